// The gradients of keys and values of attention with products in FP8, for Hopper: as in attention_backward_wgmma.cu, with P and dS rounded
// under the scales of their rows, which here are those of columns. The kernel of attention_backward_q_fp8.cu has left what follows
// from a whole row.
#include "attention_backward_fp8.cuh"

#ifdef FP8_WGMMA

template <int D> using KeyLayout = Layout<D, BackwardGroups::STEP * sizeof(QueryStatistics) / sizeof(float)>;

// Statistics of the queries of a step.
template <int D>
__device__ __forceinline__ void copy_statistics(const KeyLayout<D>& tiles, const QueryStatistics* statistics, int place, int batch,
                                                int head, int query, const Problem& problem) {
  const int thread = recomputed(threadIdx.x) % WARPGROUP_THREADS;
  if (thread < BackwardGroups::STEP) {
    const QueryStatistics* const source = statistics + ((uint64_t)batch * problem.heads + head) * problem.queries;
    cp_async_16(tiles.extra(place) + thread * 4, source + query + thread, query + thread < problem.queries);
  }
}

// Results, rounded to the values of their codes, as the left operand of the next product. `least`: the least normal number of a thread's
// first column, with those of later columns every QueryStatistics.
template <int N>
__device__ __forceinline__ void round_columns(uint32_t (&p)[N / 2][4], const float (&s)[N][4], const float* least, float to_large) {
  constexpr int COLUMN = sizeof(QueryStatistics) / sizeof(float);
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float even = least[8 * n * COLUMN], odd = least[(8 * n + 1) * COLUMN];
#pragma unroll
    for (int half = 0; half < 2; half++)
      p[n / 2][n % 2 * 2 + half] = Fragments<__nv_bfloat16>::pack(nearest(s[n][2 * half], even, to_large),
                                                                  nearest(s[n][2 * half + 1], odd, to_large));
  }
}

// Puts 0 in place of operands of queries that do not see a key. `distance`: how many keys after the thread's first one the last one is that
// its first query sees; later rows are 8 keys on.
template <int C> __device__ __forceinline__ void hide_operands(uint32_t (&p)[C][4], int distance) {
#pragma unroll
  for (int c = 0; c < C; c++)
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int first = distance + 8 * (2 * c + r / 2) - 8 * (r % 2);
      p[c][r] &= (first >= 0 ? 0x0000FFFFu : 0u) | (first >= -1 ? 0xFFFF0000u : 0u);
    }
}

template <int D>
__device__ __forceinline__ void sum_over_queries(const KeyLayout<D>& tiles, const Fp8Inputs& in, int group, int first,
                                                 QuerySteps steps, const Results& dk_rows, const Results& dv_rows, int batch,
                                                 int kv_head, const Problem& problem) {
  using G = BackwardGroups;
  constexpr int STEP = G::STEP, N = STEP / 8, ROWS = G::ROWS;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // The first key of the warpgroup, and the thread's first one from there.
  const int first_key = first + 64 * group, row = 16 * (threadIdx.x / 32 % 4) + g;
  float s[N][4], dp[N][4], dk[1][D / 8][4], dv[1][D / 8][4];
  uint32_t p[N / 2][4], ds[N / 2][4];
  clear(dk);
  clear(dv);
  // Keys and values arrive with the first tile.
  G::Tiles::await(0, group);
  const LeftPanels<D, ROWS, D == 64> k(tiles.fixed(0), 64 * group), v(tiles.fixed(1), 64 * group);

  // Of the thread's first query.
  const auto statistics = [&](int place) { return reinterpret_cast<const QueryStatistics*>(tiles.extra(place)) + 2 * t; };
  // Hides operands of a step; results of keys beyond the last one are not stored.
  const auto hide_later = [&](uint32_t (&operands)[N / 2][4]) {
    const int distance = steps.query + problem.keys - problem.queries - first_key;
    if (problem.causal && distance < 63) hide_operands(operands, distance + 2 * t - row);
  };
  const auto probabilities = [&](int place) {
    const QueryStatistics* const of = statistics(place);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float even = of[8 * n].lse, odd = of[8 * n + 1].lse;
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] = exp2_approximate(fmaf(s[n][e], in.softmax_scale_log2, -(e & 1 ? odd : even)));
    }
    round_columns(p, s, &of->least_of_p, in.format.to_large);
    hide_later(p);
  };
  const auto gradients = [&](int place) {
    const QueryStatistics* const of = statistics(place);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float even = of[8 * n].delta, odd = of[8 * n + 1].delta;
#pragma unroll
      for (int e = 0; e < 4; e++) dp[n][e] = s[n][e] * (dp[n][e] - (e & 1 ? odd : even));
    }
    round_columns(ds, dp, &of->least_of_ds, in.grad_format.to_large);
    hide_later(ds);
  };

  go_through_queries<D, D == 64>(tiles, group, steps, problem, k, v, s, dp, p, ds, dk, dv, probabilities, gradients);

  const int first_row = first_key + 16 * (recomputed(threadIdx.x) / 32 % 4);
  dk_rows.store<D>(batch, kv_head, first_row, problem.keys, problem.head_dim, dk, in.softmax_scale);
  dv_rows.store<D>(batch, kv_head, first_row, problem.keys, problem.head_dim, dv, 1.0f);
}

// A block per tile of keys and key head.
template <int D>
__device__ __forceinline__ void attention_backward_kv_fp8(const Fp8Inputs& in, const QueryStatistics* statistics, const Results& dk,
                                                          const Results& dv, const Problem& problem) {
  using G = BackwardGroups;
  extern __shared__ __align__(1024) uint8_t shared[];
  const KeyLayout<D> layout = {reinterpret_cast<__nv_bfloat16*>(shared)};
  const int tiles = (problem.keys + G::ROWS - 1) / G::ROWS, kv_heads = problem.heads / problem.group;
  // The first keys have the most queries under a causal mask.
  const uint32_t pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t batch = pair / kv_heads, kv_head = pair % kv_heads;
  const int first = G::ROWS * tile, group = warpgroup();
  const QuerySteps steps(problem, kv_head, first);
  if (group == G::GROUPS) {
    fewer_registers<G::COPY_REGISTERS>();
    copy_for_keys<D>(layout, in, batch, kv_head, first, steps, problem, [&](int place, int head, int query) {
      copy_statistics<D>(layout, statistics, place, batch, head, query, problem);
    });
  } else {
    more_registers<G::REGISTERS>();
    sum_over_queries<D>(layout, in, group, first, steps, dk, dv, batch, kv_head, problem);
  }
}

#endif

// dk and dv have the same strides.
#define BACKWARD(D)                                                                                                          \
  extern "C" __global__ void __launch_bounds__(BackwardGroups::THREADS, 1) fp8_attention_backward_kv_fp8_d##D(                \
      PARAMETERS, const QueryStatistics* statistics, void* dk, void* dv, uint64_t d_batch, uint64_t d_head, uint64_t d_row,    \
      int wide) {                                                                                                             \
    CONTENTS(attention_backward_kv_fp8<D>(INPUTS, statistics, {dk, d_batch, d_head, d_row, wide},                             \
                                          {dv, d_batch, d_head, d_row, wide}, PROBLEM);)                                      \
  }
BACKWARD(64)
BACKWARD(128)
