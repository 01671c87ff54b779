// Gradients of attention from the saved log-sum-exps. With P the probabilities and dP = dout v^T:
//   delta = rowsum(dout * out),  dS = P * (dP - delta),  dv = P^T dout,
//   dq = softmax_scale * dS k,  dk = softmax_scale * dS^T q
//
// P and dP are computed twice: a block per tile of keys sums dk and dv over all queries, a block per tile of queries sums dq
// over all keys. No sum depends on scheduling, and memory holds no f32 copy of dq.
#include "attention.cuh"

// What the two kernels of 16-bit elements read from shared memory decides how fast they are, so what can stay in registers does.
template <class T, int D> struct KeyTiles {
  static constexpr bool HELD = sizeof(T) == 2;
  // Two warps share 16 M keys, so that each has one of dk and dv: [16 M, D] sums, as many as half of a warp's registers hold.
  static constexpr int M = HELD ? 256 / D : 1, PAIRS = HELD ? D / 32 : 2, KEYS = 16 * M * PAIRS, THREADS = 64 * PAIRS;
  // Queries that are loaded at once, in two stages, and those of which the probabilities are in registers.
  static constexpr int STEP = HELD ? 64 : 16, CHUNK = HELD ? D / 4 : 16, CHUNKS = STEP / CHUNK;
  // Probabilities on their way from one warp of each pair to the other: those of a chunk, and where a barrier for all warps does
  // not come between two chunks, those of the chunk before.
  static constexpr int BUFFERS = CHUNKS > 1 ? 2 : 1;
  // Blocks on a multiprocessor: where all of its registers are used.
  static constexpr int BLOCKS = THREADS == 256 ? 1 : 2;
};

template <class T, int D> struct QueryTiles {
  static constexpr bool HELD = sizeof(T) == 2;
  // dq: [16 M, D / PARTS] sums per warp. PARTS warps share 16 M queries: each computes dS for its part of the keys.
  static constexpr int PARTS = HELD && D == 128 ? 2 : 1, M = HELD ? 2 : 1, QUERIES = 16 * M * ATTENTION_WARPS;
  static constexpr int THREADS = PARTS * ATTENTION_THREADS, BLOCKS = PARTS == 2 ? 1 : 2;
  // Keys that are loaded at once, in two stages, and those of which dS is in registers.
  static constexpr int STEP = HELD ? 64 : 16, CHUNK = HELD ? 32 : 16;
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

// A block per tile of keys and key head. Products have keys as rows, so P^T and dS^T are operands as they are. Of two warps with
// the same keys, the first computes P^T and dv, the second dP^T, and with P^T from the first dS^T and dk.
template <class T, int D>
__device__ __forceinline__ void attention_backward_kv(const Heads<const T>& all_q, const Heads<const T>& all_k,
                                                      const Heads<const T>& all_v, const Heads<const T>& all_dout,
                                                      const float* __restrict__ lse, const float* __restrict__ delta,
                                                      const Heads<T>& all_dk, const Heads<T>& all_dv,
                                                      const Problem& problem, float softmax_scale_log2, float softmax_scale) {
  using Tiles = KeyTiles<T, D>;
  constexpr int M = Tiles::M, KEYS = Tiles::KEYS, THREADS = Tiles::THREADS, STEP = Tiles::STEP, CHUNK = Tiles::CHUNK;
  constexpr int N = CHUNK / 8;
  constexpr bool HELD = Tiles::HELD;
  static_assert(!HELD || KEYS <= 2 * STEP, "keys and values are loaded to where the stages are");
  // Tiles are read 16 bytes at a time, eight rows of which make 128.
  extern __shared__ __align__(128) uint8_t shared[];
  T* const k_tile = reinterpret_cast<T*>(shared);
  T* const v_tile = k_tile + KEYS * D;
  T* const stages = HELD ? k_tile : v_tile + KEYS * D;
  // Per stage: log-sum-exps, deltas.
  float* const statistics = reinterpret_cast<float*>(stages + 4 * STEP * D);
  float4* const exchanged = reinterpret_cast<float4*>(statistics + 4 * STEP);

  const int tiles = (problem.keys + KEYS - 1) / KEYS, kv_heads = problem.heads / problem.group;
  // The first keys have the most queries under a causal mask.
  const uint32_t block_pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t batch = block_pair / kv_heads, kv_head = block_pair % kv_heads;
  const int first = KEYS * tile;
  // The first step of each head that sees any of the keys.
  const int start = problem.causal ? max(0, first - (problem.keys - problem.queries)) / STEP * STEP : 0;
  const int last_head = (kv_head + 1) * problem.group - 1;

  const auto copy_stage = [&](int stage, int head, int query) {
    T* const q = stages + stage * 2 * STEP * D;
    copy_tile<D, STEP, THREADS>(q, all_q.at(batch, head), query, problem.queries, problem.head_dim);
    copy_tile<D, STEP, THREADS>(q + STEP * D, all_dout.at(batch, head), query, problem.queries, problem.head_dim);
    // Rows beyond the last query are zeros and add nothing: their P is multiplied by a dout of 0, and their dS is 0.
    if (threadIdx.x < STEP / 2) {
      const int row = query + threadIdx.x % (STEP / 4) * 4, stride = statistics_row(problem.queries);
      const float* const source = (threadIdx.x < STEP / 4 ? lse : delta) + ((uint64_t)batch * problem.heads + head) * stride;
      cp_async_16(statistics + stage * 2 * STEP + threadIdx.x * 4, source + row, row < stride);
    }
    cp_async_commit();
  };
  copy_tile<D, KEYS, THREADS>(k_tile, all_k.at(batch, kv_head), first, problem.keys, problem.head_dim);
  copy_tile<D, KEYS, THREADS>(v_tile, all_v.at(batch, kv_head), first, problem.keys, problem.head_dim);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  const int warp = threadIdx.x >> 5, pair = warp % Tiles::PAIRS;
  const bool makes_dk = warp >= Tiles::PAIRS;
  // The keys of the pair in the tile.
  const int row = pair * 16 * M;
  const Left<T, D, M, HELD> left(makes_dk ? v_tile : k_tile, row);
  if (HELD) __syncthreads();
  int head = kv_head * problem.group, query = start;
  copy_stage(0, head, query);

  float sums[M][D / 8][4];
  clear(sums);
  for (int stage = 0;; stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    int next_head = head, next_query = query + STEP;
    if (next_query >= problem.queries) next_head++, next_query = start;
    const bool more = next_head <= last_head;
    if (more) copy_stage(stage ^ 1, next_head, next_query);
    const T* const q = stages + stage * 2 * STEP * D;
    const T* const dout = q + STEP * D;
    const float* const step_statistics = statistics + stage * 2 * STEP + makes_dk * STEP;

#pragma unroll 1
    for (int chunk = 0; chunk < Tiles::CHUNKS; chunk++) {
      float x[M][N][4];
      multiply_rows<D, HELD ? D / 16 : 4>(x, left, (makes_dk ? dout : q) + chunk * CHUNK * D);
      const int lane = recomputed(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
      const float* const of_queries = step_statistics + chunk * CHUNK + 2 * t;
      float4* const exchange = exchanged + ((chunk % Tiles::BUFFERS) * Tiles::PAIRS + pair) * M * N * 32 + lane;
      if (makes_dk) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[m][n][e] -= of_queries[8 * n + (e & 1)];
      } else {
        // Keys after a query; results of keys beyond the last one are not stored.
        const int distance = query + chunk * CHUNK + problem.keys - problem.queries - first - row;
        const bool masked = problem.causal && distance < 16 * M - 1;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
              x[m][n][e] = exp2_approximate(x[m][n][e] * softmax_scale_log2 - of_queries[8 * n + (e & 1)]);
              if (masked && distance + 8 * n + 2 * t + (e & 1) < 16 * m + g + 8 * (e >> 1)) x[m][n][e] = 0.0f;
            }
            exchange[(m * N + n) * 32] = make_float4(x[m][n][0], x[m][n][1], x[m][n][2], x[m][n][3]);
          }
      }
      __syncthreads();
      if (makes_dk) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int n = 0; n < N; n++) {
            const float4 p = exchange[(m * N + n) * 32];
            x[m][n][0] *= p.x, x[m][n][1] *= p.y, x[m][n][2] *= p.z, x[m][n][3] *= p.w;
          }
      }
      multiply_results<D>(sums, x, (makes_dk ? q : dout) + chunk * CHUNK * D);
    }
    if (!more) break;
    head = next_head, query = next_query;
  }

  float factor[M][2];
#pragma unroll
  for (int m = 0; m < M; m++) factor[m][0] = factor[m][1] = makes_dk ? softmax_scale : 1.0f;
  const Heads<T>& all = makes_dk ? all_dk : all_dv;
  store_rows<D>(all.at(batch, kv_head), first + row, problem.keys, problem.head_dim, sums, factor);
}

// A block per tile of queries and head.
template <class T, int D>
__device__ __forceinline__ void attention_backward_q(const Heads<const T>& all_q, const Heads<const T>& all_k,
                                                     const Heads<const T>& all_v, const Heads<const T>& all_dout,
                                                     const float* __restrict__ lse, const float* __restrict__ delta,
                                                     const Heads<T>& all_dq, const Problem& problem,
                                                     float softmax_scale_log2, float softmax_scale) {
  using Tiles = QueryTiles<T, D>;
  using A = typename Fragments<T>::A;
  constexpr int M = Tiles::M, QUERIES = Tiles::QUERIES, THREADS = Tiles::THREADS, STEP = Tiles::STEP, CHUNK = Tiles::CHUNK;
  constexpr int PARTS = Tiles::PARTS, COLUMNS = D / PARTS, PART = CHUNK / PARTS, N = PART / 8;
  constexpr bool HELD = Tiles::HELD;
  static_assert(!HELD || QUERIES <= 2 * STEP, "queries and gradients are loaded to where the stages are");
  static_assert(PARTS == 1 || (PART == 16 && sizeof(A) == 16), "dS of a part is one operand");
  // Tiles are read 16 bytes at a time, eight rows of which make 128.
  extern __shared__ __align__(128) uint8_t shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);
  T* const dout_tile = q_tile + QUERIES * D;
  T* const stages = HELD ? q_tile : dout_tile + QUERIES * D;
  // dS of two chunks on its way between warps with the same queries.
  A* const exchanged = reinterpret_cast<A*>(stages + 4 * STEP * D);

  const int tiles = (problem.queries + QUERIES - 1) / QUERIES;
  const uint32_t pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t batch = pair / problem.heads, head = pair % problem.heads;
  const int first = QUERIES * (problem.causal ? tiles - 1 - tile : tile);
  const Heads<const T> k = all_k.at(batch, head / problem.group), v = all_v.at(batch, head / problem.group);

  const auto copy_stage = [&](int step) {
    T* const stage = stages + (step & 1) * 2 * STEP * D;
    copy_tile<D, STEP, THREADS>(stage, k, step * STEP, problem.keys, problem.head_dim);
    copy_tile<D, STEP, THREADS>(stage + STEP * D, v, step * STEP, problem.keys, problem.head_dim);
    cp_async_commit();
  };
  copy_tile<D, QUERIES, THREADS>(q_tile, all_q.at(batch, head), first, problem.queries, problem.head_dim);
  copy_tile<D, QUERIES, THREADS>(dout_tile, all_dout.at(batch, head), first, problem.queries, problem.head_dim);
  if (HELD) {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }

  // The warp's queries in the tile.
  const int warp = threadIdx.x >> 5, part = warp / ATTENTION_WARPS, row = warp % ATTENTION_WARPS * 16 * M;
  const Left<T, D, M, HELD> q(q_tile, row), dout(dout_tile, row);
  if (HELD) __syncthreads();
  copy_stage(0);
  const int steps = (problem.visible(first + QUERIES - 1) + STEP - 1) / STEP;
  float dq[M][COLUMNS / 8][4], row_lse[M][2], row_delta[M][2], factor[M][2];
  clear(dq);
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int query = first + row + 16 * m + 8 * half + (threadIdx.x >> 2 & 7);
      const uint64_t index = (uint64_t)pair * statistics_row(problem.queries) + query;
      row_lse[m][half] = query < problem.queries ? lse[index] : INFINITY;
      row_delta[m][half] = query < problem.queries ? delta[index] : 0.0f;
      factor[m][half] = softmax_scale;
    }

  for (int step = 0; step < steps; step++) {
    cp_async_wait<0>();
    __syncthreads();
    if (step + 1 < steps) copy_stage(step + 1);
#pragma unroll 1
    for (int key = 0; key < STEP; key += CHUNK) {
      const T* const k_tile = stages + ((step & 1) * 2 * STEP + key) * D;
      const T* const part_tile = k_tile + part * PART * D;
      float p[M][N][4], dp[M][N][4];
      multiply_rows<D, HELD ? D / 16 : 4>(p, q, part_tile);
      multiply_rows<D, HELD ? D / 16 : 4>(dp, dout, part_tile + STEP * D);
      const int lane = recomputed(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
      const int before = step * STEP + key + part * PART;
      const bool masked = before + PART > problem.visible(first + row);
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int visible = problem.visible(first + row + 16 * m + 8 * half + g) - before - 2 * t;
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
      if constexpr (PARTS == 1) {
        multiply_results<D>(dq, p, k_tile);
      } else {
        const auto at = [&](int part) {
          const int buffer = key / CHUNK % 2, group = warp % ATTENTION_WARPS;
          return exchanged + ((buffer * PARTS + part) * ATTENTION_WARPS + group) * M * 32 + lane;
        };
        A own[M];
#pragma unroll
        for (int m = 0; m < M; m++) at(part)[32 * m] = own[m] = Fragments<T>::from_results(p[m][0], p[m][1]);
        __syncthreads();
        // Both warps of a pair add in the order of keys.
#pragma unroll
        for (int other = 0; other < PARTS; other++) {
          A left[M];
#pragma unroll
          for (int m = 0; m < M; m++) left[m] = other == part ? own[m] : at(other)[32 * m];
          multiply_step<D>(dq, left, k_tile, PART * other, COLUMNS * part);
        }
      }
    }
  }
  Heads<T> out = all_dq.at(batch, head);
  out.data += COLUMNS * part;
  store_rows<COLUMNS>(out, first + row, problem.queries, problem.head_dim - COLUMNS * part, dq, factor);
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
  extern "C" __global__ void __launch_bounds__(KeyTiles<T, D>::THREADS, KeyTiles<T, D>::BLOCKS)                           \
      fp8_attention_backward_kv_d##D##_##suffix(                                                                          \
      SHARED_PARAMETERS(T), T* dk, T* dv, uint64_t d_batch, uint64_t d_head, uint64_t d_row) {                            \
    attention_backward_kv<T, D>(SHARED_ARGUMENTS, {dk, d_batch, d_head, d_row}, {dv, d_batch, d_head, d_row},             \
                                {heads, group, queries, keys, head_dim, causal}, softmax_scale_log2, softmax_scale);      \
  }                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(QueryTiles<T, D>::THREADS, QueryTiles<T, D>::BLOCKS)                       \
      fp8_attention_backward_q_d##D##_##suffix(                                                                           \
      SHARED_PARAMETERS(T), T* dq, uint64_t d_batch, uint64_t d_head, uint64_t d_row) {                                   \
    attention_backward_q<T, D>(SHARED_ARGUMENTS, {dq, d_batch, d_head, d_row},                                            \
                               {heads, group, queries, keys, head_dim, causal}, softmax_scale_log2, softmax_scale);       \
  }
#define BACKWARD_64(T, suffix) BACKWARD(T, suffix, 64)
#define BACKWARD_128(T, suffix) BACKWARD(T, suffix, 128)
FP8_FOR_FLOATS(BACKWARD_64)
FP8_FOR_FLOATS(BACKWARD_128)
