// softmax(softmax_scale * q k^T) v with a running softmax; the probabilities never leave the registers.
#include "attention.cuh"

// Shared memory: a tile of queries, two stages of a tile of keys and a tile of values.
template <class T, int D> struct ForwardTiles {
  // [16, ..] results per warp, queries per block, keys per step.
  static constexpr int M = sizeof(T) == 2 ? 2 : 1, QUERIES = 16 * M * ATTENTION_WARPS, KEYS = sizeof(T) == 2 ? 64 : 32;
  // Whether there are registers for the queries beside results and probabilities.
  static constexpr bool HELD = sizeof(T) == 2 && D == 64;
};

// A block per tile of queries and head. `softmax_scale_log2`: softmax_scale * log2(e). `lse` [batch, heads,
// statistics_row]: log2 of the sum of 2^(softmax_scale_log2 * logit).
template <class T, int D>
__device__ __forceinline__ void attention_forward(const Heads<const T>& all_q, const Heads<const T>& all_k,
                                                  const Heads<const T>& all_v, const Heads<T>& all_out,
                                                  float* __restrict__ all_lse, const Problem& problem,
                                                  float softmax_scale_log2) {
  using Tiles = ForwardTiles<T, D>;
  constexpr int M = Tiles::M, QUERIES = Tiles::QUERIES, KEYS = Tiles::KEYS, N = KEYS / 8;
  // Tiles are read 16 bytes at a time, eight rows of which make 128.
  extern __shared__ __align__(128) uint8_t shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);
  T* const stages = q_tile + QUERIES * D;

  const int tiles = (problem.queries + QUERIES - 1) / QUERIES;
  const uint32_t pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t batch = pair / problem.heads, head = pair % problem.heads;
  // The longest rows of a causal mask start first.
  const int first = QUERIES * (problem.causal ? tiles - 1 - tile : tile);
  const Heads<const T> k = all_k.at(batch, head / problem.group), v = all_v.at(batch, head / problem.group);

  const auto copy_stage = [&](int step) {
    T* const stage = stages + (step & 1) * 2 * KEYS * D;
    copy_tile<D, KEYS>(stage, k, step * KEYS, problem.keys, problem.head_dim);
    copy_tile<D, KEYS>(stage + KEYS * D, v, step * KEYS, problem.keys, problem.head_dim);
    cp_async_commit();
  };
  copy_tile<D, QUERIES>(q_tile, all_q.at(batch, head), first, problem.queries, problem.head_dim);
  copy_stage(0);

  const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
  // The warp's rows in the tile.
  const int row = (threadIdx.x >> 5) * 16 * M;
  const int steps = (problem.visible(first + QUERIES - 1) + KEYS - 1) / KEYS;
  float out[M][D / 8][4], largest[M][2], sum[M][2];
  clear(out);
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) largest[m][half] = -INFINITY, sum[m][half] = 0.0f;

  if (Tiles::HELD) {
    cp_async_wait<0>();
    __syncthreads();
  }
  const Left<T, D, M, Tiles::HELD> q(q_tile, row);
  for (int step = 0; step < steps; step++) {
    cp_async_wait<0>();
    // This stage is loaded, and nothing reads the other one any more.
    __syncthreads();
    if (step + 1 < steps) copy_stage(step + 1);
    const T* const stage = stages + (step & 1) * 2 * KEYS * D;

    float p[M][N][4];
    multiply_rows<D, D / 16>(p, q, stage);
    const bool masked = (step + 1) * KEYS > problem.visible(first + row);
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) p[m][n][e] *= softmax_scale_log2;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (masked) {
          const int visible = problem.visible(first + row + 16 * m + 8 * half + g) - step * KEYS - 2 * t;
#pragma unroll
          for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
              if (8 * n + e >= visible) p[m][n][2 * half + e] = -INFINITY;
        }
        float maximum = largest[m][half];
#pragma unroll
        for (int n = 0; n < N; n++) maximum = fmaxf(maximum, fmaxf(p[m][n][2 * half], p[m][n][2 * half + 1]));
        maximum = fmaxf(maximum, __shfl_xor_sync(ALL_LANES, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(ALL_LANES, maximum, 2));
        // Only -inf so far: avoid -inf - -inf.
        const float offset = maximum == -INFINITY ? 0.0f : maximum;
        const float factor = exp2_approximate(largest[m][half] - offset);
        largest[m][half] = maximum;
        float part = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) part += p[m][n][2 * half + e] = exp2_approximate(p[m][n][2 * half + e] - offset);
        sum[m][half] = sum[m][half] * factor + part;
#pragma unroll
        for (int n = 0; n < D / 8; n++) out[m][n][2 * half] *= factor, out[m][n][2 * half + 1] *= factor;
      }
    }
    multiply_results<D>(out, p, stage + KEYS * D);
  }

#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float total = sum[m][half];
      total += __shfl_xor_sync(ALL_LANES, total, 1);
      total += __shfl_xor_sync(ALL_LANES, total, 2);
      const int query = first + row + 16 * m + 8 * half + g;
      const int stride = statistics_row(problem.queries);
      if (t == 0 && query < stride)
        all_lse[(uint64_t)pair * stride + query] = query < problem.queries ? largest[m][half] + log2f(total) : 0.0f;
      sum[m][half] = 1.0f / total;
    }
  store_rows<D>(all_out.at(batch, head), first + row, problem.queries, problem.head_dim, out, sum);
}

#define FORWARD(T, suffix, D)                                                                                            \
  extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 2) fp8_attention_forward_d##D##_##suffix(               \
      const T* q, const T* k, const T* v, T* out, float* lse, uint64_t q_batch, uint64_t q_head, uint64_t q_row,          \
      uint64_t k_batch, uint64_t k_head, uint64_t k_row, uint64_t v_batch, uint64_t v_head, uint64_t v_row,               \
      uint64_t out_batch, uint64_t out_head, uint64_t out_row, int heads, int group, int queries, int keys, int head_dim, \
      int causal, float softmax_scale_log2) {                                                                            \
    attention_forward<T, D>({q, q_batch, q_head, q_row}, {k, k_batch, k_head, k_row}, {v, v_batch, v_head, v_row},        \
                            {out, out_batch, out_head, out_row}, lse, {heads, group, queries, keys, head_dim, causal},   \
                            softmax_scale_log2);                                                                         \
  }
#define FORWARD_64(T, suffix) FORWARD(T, suffix, 64)
#define FORWARD_128(T, suffix) FORWARD(T, suffix, 128)
FP8_FOR_FLOATS(FORWARD_64)
FP8_FOR_FLOATS(FORWARD_128)
