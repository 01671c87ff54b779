// Gradients of attention from the saved log-sum-exps. With P the probabilities and dP = dout v^T:
//   delta = rowsum(dout * out),  dS = P * (dP - delta),  dv = P^T dout,
//   dq = softmax_scale * dS k,  dk = softmax_scale * dS^T q
//
// P and dP are computed twice: a block per tile of keys sums dk and dv over all queries, a block per tile of queries sums dq
// over all keys. No sum depends on scheduling, and memory holds no f32 copy of dq.
#include "attention.cuh"

// One tile stays, and tiles of the other side are loaded in two stages.
template <class T> struct BackwardTiles {
  // dk, dv: [16, ..] per warp. Keys per block, queries per step.
  static constexpr int KEYS = 16 * ATTENTION_WARPS, QUERY_STEP = sizeof(T) == 2 ? 64 : 16;
  // dq: [16 M, ..] per warp. Queries per block, keys per step.
  static constexpr int M = sizeof(T) == 2 ? 2 : 1, QUERIES = 16 * M * ATTENTION_WARPS, KEY_STEP = sizeof(T) == 2 ? 32 : 16;
};

// delta [batch, heads, statistics_row]: a half-warp per row, 8 elements per lane.
template <class T>
__device__ __forceinline__ void attention_delta(const Heads<const T>& out, const Heads<const T>& dout,
                                                float* __restrict__ delta, uint64_t rows, int heads, int queries,
                                                int head_dim) {
  const uint64_t index = global_thread() / 16;
  const int lane = threadIdx.x & 15;
  const int stride = statistics_row(queries), row = index % stride;
  const uint32_t pair = index / stride, batch = pair / heads, head = pair % heads;
  float sum = 0.0f;
  if (index < rows && row < queries && 8 * lane < head_dim) {
    float a[8], b[8];
    load_f32<8>(out.at(batch, head).row(row) + 8 * lane, a);
    load_f32<8>(dout.at(batch, head).row(row) + 8 * lane, b);
#pragma unroll
    for (int i = 0; i < 8; i++) sum += a[i] * b[i];
  }
#pragma unroll
  for (int offset = 8; offset > 0; offset >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
  if (index < rows && lane == 0) delta[index] = sum;
}

// A block per tile of keys and key head. Products have keys as rows, so P^T and dS^T are operands as they are.
template <class T, int D>
__device__ __forceinline__ void attention_backward_kv(const Heads<const T>& all_q, const Heads<const T>& all_k,
                                                      const Heads<const T>& all_v, const Heads<const T>& all_dout,
                                                      const float* __restrict__ lse, const float* __restrict__ delta,
                                                      const Heads<T>& all_dk, const Heads<T>& all_dv,
                                                      const Problem& problem, float softmax_scale_log2, float softmax_scale) {
  constexpr int KEYS = BackwardTiles<T>::KEYS, STEP = BackwardTiles<T>::QUERY_STEP, N = STEP / 8;
  // Tiles are read 16 bytes at a time, eight rows of which make 128.
  extern __shared__ __align__(128) uint8_t shared[];
  T* const k_tile = reinterpret_cast<T*>(shared);
  T* const v_tile = k_tile + KEYS * D;
  T* const stages = v_tile + KEYS * D;
  // Per stage: log-sum-exps, deltas.
  float* const statistics = reinterpret_cast<float*>(stages + 4 * STEP * D);

  const int tiles = (problem.keys + KEYS - 1) / KEYS, kv_heads = problem.heads / problem.group;
  // The first keys have the most queries under a causal mask.
  const uint32_t pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t batch = pair / kv_heads, kv_head = pair % kv_heads;
  const int first = KEYS * tile;
  // The first step of each head that sees any of the keys.
  const int start = problem.causal ? max(0, first - (problem.keys - problem.queries)) / STEP * STEP : 0;
  const int last_head = (kv_head + 1) * problem.group - 1;

  const auto copy_stage = [&](int stage, int head, int query) {
    T* const q = stages + stage * 2 * STEP * D;
    copy_tile<D, STEP>(q, all_q.at(batch, head), query, problem.queries, problem.head_dim);
    copy_tile<D, STEP>(q + STEP * D, all_dout.at(batch, head), query, problem.queries, problem.head_dim);
    // Rows beyond the last query are zeros and add nothing: their P is multiplied by a dout of 0, and their dS is 0.
    if (threadIdx.x < STEP / 2) {
      const int row = query + threadIdx.x % (STEP / 4) * 4, stride = statistics_row(problem.queries);
      const float* const source = (threadIdx.x < STEP / 4 ? lse : delta) + ((uint64_t)batch * problem.heads + head) * stride;
      cp_async_16(statistics + stage * 2 * STEP + threadIdx.x * 4, source + row, row < stride);
    }
    cp_async_commit();
  };
  copy_tile<D, KEYS>(k_tile, all_k.at(batch, kv_head), first, problem.keys, problem.head_dim);
  copy_tile<D, KEYS>(v_tile, all_v.at(batch, kv_head), first, problem.keys, problem.head_dim);
  int head = kv_head * problem.group, query = start;
  copy_stage(0, head, query);

  const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
  // The warp's keys in the tile.
  const int row = (threadIdx.x >> 5) * 16;
  float dk[1][D / 8][4], dv[1][D / 8][4];
  clear(dk);
  clear(dv);
  for (int stage = 0;; stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    int next_head = head, next_query = query + STEP;
    if (next_query >= problem.queries) next_head++, next_query = start;
    const bool more = next_head <= last_head;
    if (more) copy_stage(stage ^ 1, next_head, next_query);
    const T* const q = stages + stage * 2 * STEP * D;
    const T* const dout = q + STEP * D;
    const float* const step_lse = statistics + stage * 2 * STEP;

    float p[1][N][4];
    multiply_rows<D, 4>(p, k_tile, row, q);
    // Keys after a query; results of keys beyond the last one are not stored.
    const int distance = query + problem.keys - problem.queries - first - row;
    const bool masked = problem.causal && distance < 15;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        p[0][n][e] = exp2_approximate(p[0][n][e] * softmax_scale_log2 - step_lse[8 * n + 2 * t + (e & 1)]);
        if (masked && distance + 8 * n + 2 * t + (e & 1) < g + 8 * (e >> 1)) p[0][n][e] = 0.0f;
      }
    multiply_results<D>(dv, p, dout);
    float dp[1][N][4];
    multiply_rows<D, 4>(dp, v_tile, row, dout);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) p[0][n][e] *= dp[0][n][e] - step_lse[STEP + 8 * n + 2 * t + (e & 1)];
    multiply_results<D>(dk, p, q);
    if (!more) break;
    head = next_head, query = next_query;
  }

  const float k_factor[1][2] = {{softmax_scale, softmax_scale}}, v_factor[1][2] = {{1.0f, 1.0f}};
  store_rows<D>(all_dk.at(batch, kv_head), first + row, problem.keys, problem.head_dim, dk, k_factor);
  store_rows<D>(all_dv.at(batch, kv_head), first + row, problem.keys, problem.head_dim, dv, v_factor);
}

// A block per tile of queries and head.
template <class T, int D>
__device__ __forceinline__ void attention_backward_q(const Heads<const T>& all_q, const Heads<const T>& all_k,
                                                     const Heads<const T>& all_v, const Heads<const T>& all_dout,
                                                     const float* __restrict__ lse, const float* __restrict__ delta,
                                                     const Heads<T>& all_dq, const Problem& problem,
                                                     float softmax_scale_log2, float softmax_scale) {
  constexpr int M = BackwardTiles<T>::M, QUERIES = BackwardTiles<T>::QUERIES, STEP = BackwardTiles<T>::KEY_STEP;
  constexpr int N = STEP / 8;
  // Tiles are read 16 bytes at a time, eight rows of which make 128.
  extern __shared__ __align__(128) uint8_t shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);
  T* const dout_tile = q_tile + QUERIES * D;
  T* const stages = dout_tile + QUERIES * D;

  const int tiles = (problem.queries + QUERIES - 1) / QUERIES;
  const uint32_t pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t batch = pair / problem.heads, head = pair % problem.heads;
  const int first = QUERIES * (problem.causal ? tiles - 1 - tile : tile);
  const Heads<const T> k = all_k.at(batch, head / problem.group), v = all_v.at(batch, head / problem.group);

  const auto copy_stage = [&](int step) {
    T* const stage = stages + (step & 1) * 2 * STEP * D;
    copy_tile<D, STEP>(stage, k, step * STEP, problem.keys, problem.head_dim);
    copy_tile<D, STEP>(stage + STEP * D, v, step * STEP, problem.keys, problem.head_dim);
    cp_async_commit();
  };
  copy_tile<D, QUERIES>(q_tile, all_q.at(batch, head), first, problem.queries, problem.head_dim);
  copy_tile<D, QUERIES>(dout_tile, all_dout.at(batch, head), first, problem.queries, problem.head_dim);
  copy_stage(0);

  const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
  // The warp's queries in the tile.
  const int row = (threadIdx.x >> 5) * 16 * M;
  const int steps = (problem.visible(first + QUERIES - 1) + STEP - 1) / STEP;
  float dq[M][D / 8][4], row_lse[M][2], row_delta[M][2], factor[M][2];
  clear(dq);
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int query = first + row + 16 * m + 8 * half + g;
      const uint64_t index = (uint64_t)pair * statistics_row(problem.queries) + query;
      row_lse[m][half] = query < problem.queries ? lse[index] : INFINITY;
      row_delta[m][half] = query < problem.queries ? delta[index] : 0.0f;
      factor[m][half] = softmax_scale;
    }

  for (int step = 0; step < steps; step++) {
    cp_async_wait<0>();
    __syncthreads();
    if (step + 1 < steps) copy_stage(step + 1);
    const T* const k_tile = stages + (step & 1) * 2 * STEP * D;
    const T* const v_tile = k_tile + STEP * D;

    float p[M][N][4], dp[M][N][4];
    multiply_rows<D, 4>(p, q_tile, row, k_tile);
    multiply_rows<D, 4>(dp, dout_tile, row, v_tile);
    const bool masked = (step + 1) * STEP > problem.visible(first + row);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int visible = problem.visible(first + row + 16 * m + 8 * half + g) - step * STEP - 2 * t;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& x = p[m][n][2 * half + e];
            x = exp2_approximate(x * softmax_scale_log2 - row_lse[m][half]);
            x *= dp[m][n][2 * half + e] - row_delta[m][half];
            if (masked && 8 * n + e >= visible) x = 0.0f;
          }
      }
    multiply_results<D>(dq, p, k_tile);
  }
  store_rows<D>(all_dq.at(batch, head), first + row, problem.queries, problem.head_dim, dq, factor);
}

#define DELTA(T, suffix)                                                                                                  \
  extern "C" __global__ void fp8_attention_delta_##suffix(                                                                \
      const T* out, const T* dout, float* delta, uint64_t out_batch, uint64_t out_head, uint64_t out_row,                 \
      uint64_t dout_batch, uint64_t dout_head, uint64_t dout_row, uint64_t rows, int heads, int queries, int head_dim) {  \
    attention_delta<T>({out, out_batch, out_head, out_row}, {dout, dout_batch, dout_head, dout_row}, delta, rows, heads,  \
                       queries, head_dim);                                                                                \
  }
FP8_FOR_FLOATS(DELTA)

// What the two kernels of the backward pass have in common.
#define SHARED_PARAMETERS(T)                                                                                              \
  const T *q, const T *k, const T *v, const T *dout, const float *lse, const float *delta, uint64_t q_batch,              \
      uint64_t q_head, uint64_t q_row, uint64_t k_batch, uint64_t k_head, uint64_t k_row, uint64_t v_batch,               \
      uint64_t v_head, uint64_t v_row, uint64_t dout_batch, uint64_t dout_head, uint64_t dout_row, int heads, int group,  \
      int queries, int keys, int head_dim, int causal, float softmax_scale_log2, float softmax_scale
#define SHARED_ARGUMENTS                                                                                                  \
  {q, q_batch, q_head, q_row}, {k, k_batch, k_head, k_row}, {v, v_batch, v_head, v_row},                                  \
      {dout, dout_batch, dout_head, dout_row}, lse, delta

// dk and dv have the same strides.
#define BACKWARD(T, suffix, D)                                                                                            \
  extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 2) fp8_attention_backward_kv_d##D##_##suffix(           \
      SHARED_PARAMETERS(T), T* dk, T* dv, uint64_t d_batch, uint64_t d_head, uint64_t d_row) {                            \
    attention_backward_kv<T, D>(SHARED_ARGUMENTS, {dk, d_batch, d_head, d_row}, {dv, d_batch, d_head, d_row},             \
                                {heads, group, queries, keys, head_dim, causal}, softmax_scale_log2, softmax_scale);      \
  }                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 2) fp8_attention_backward_q_d##D##_##suffix(            \
      SHARED_PARAMETERS(T), T* dq, uint64_t d_batch, uint64_t d_head, uint64_t d_row) {                                   \
    attention_backward_q<T, D>(SHARED_ARGUMENTS, {dq, d_batch, d_head, d_row},                                            \
                               {heads, group, queries, keys, head_dim, causal}, softmax_scale_log2, softmax_scale);       \
  }
#define BACKWARD_64(T, suffix) BACKWARD(T, suffix, 64)
#define BACKWARD_128(T, suffix) BACKWARD(T, suffix, 128)
FP8_FOR_FLOATS(BACKWARD_64)
FP8_FOR_FLOATS(BACKWARD_128)
