// The backward pass of attention_backward.cu for Hopper and bf16, on products of warpgroups: the same two kernels, so that no sum
// depends on scheduling.
//
// One warpgroup of a block copies tiles, the others have 64 keys or 64 queries each. These start the products of a step together
// with the sums of the step before it, and take the exponentials of the one while the others run.
#include "attention_backward_wgmma.cuh"

#ifdef FP8_WGMMA

// What both kernels get.
struct Inputs {
  Heads<const __nv_bfloat16> q, k, v, dout;
  const float *lse, *delta;
  float softmax_scale_log2, softmax_scale;
};

// Log-sum-exps and deltas of the queries of a step.
template <int D>
__device__ __forceinline__ void copy_statistics(const Layout<D, 2 * BackwardGroups::STEP>& tiles, const Inputs& in, int place,
                                                int batch, int head, int query, const Problem& problem) {
  constexpr int STEP = BackwardGroups::STEP;
  const int thread = recomputed(threadIdx.x) % WARPGROUP_THREADS;
  if (thread < STEP / 2) {
    const int row = query + thread % (STEP / 4) * 4, stride = statistics_row(problem.queries);
    const float* const source = (thread < STEP / 4 ? in.lse : in.delta) + ((uint64_t)batch * problem.heads + head) * stride;
    cp_async_16(tiles.extra(place) + thread * 4, source + row, row < stride);
  }
}

template <int D>
__device__ __forceinline__ void sum_over_queries(const Layout<D, 2 * BackwardGroups::STEP>& tiles, const Inputs& in, int group,
                                                 int first, QuerySteps steps, const Heads<__nv_bfloat16>& dk_rows,
                                                 const Heads<__nv_bfloat16>& dv_rows, const Problem& problem) {
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

  const auto probabilities = [&](int place) {
    const float* const lse = tiles.extra(place) + 2 * t;
    // Keys after a query; results of keys beyond the last one are not stored.
    const int distance = steps.query + problem.keys - problem.queries - first_key;
    const bool masked = problem.causal && distance < 63;
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float2 pair = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
      for (int e = 0; e < 4; e++)
        s[n][e] = exp2_approximate(fmaf(s[n][e], in.softmax_scale_log2, -(e & 1 ? pair.y : pair.x)));
    }
    if (masked) {
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (distance + 8 * n + 2 * t + (e & 1) < row + 8 * (e >> 1)) s[n][e] = 0.0f;
    }
    round_results(p, s);
  };
  const auto gradients = [&](int place) {
    const float* const delta = tiles.extra(place) + STEP + 2 * t;
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float2 pair = *reinterpret_cast<const float2*>(delta + 8 * n);
#pragma unroll
      for (int e = 0; e < 4; e++) dp[n][e] = s[n][e] * (dp[n][e] - (e & 1 ? pair.y : pair.x));
    }
    round_results(ds, dp);
  };

  go_through_queries<D, D == 64>(tiles, group, steps, problem, k, v, s, dp, p, ds, dk, dv, probabilities, gradients);

  const int first_row = first_key + 16 * (recomputed(threadIdx.x) / 32 % 4);
  const float scale[1][2] = {{in.softmax_scale, in.softmax_scale}}, one[1][2] = {{1.0f, 1.0f}};
  store_rows<D>(dk_rows, first_row, problem.keys, problem.head_dim, dk, scale);
  store_rows<D>(dv_rows, first_row, problem.keys, problem.head_dim, dv, one);
}

template <int D>
__device__ __forceinline__ void sum_over_keys(const Layout<D, 0>& tiles, const Inputs& in, uint64_t statistics, int group,
                                              int first, int steps, const Heads<__nv_bfloat16>& dq_rows,
                                              const Problem& problem) {
  using G = BackwardGroups;
  constexpr int STEP = G::STEP, N = STEP / 8, ROWS = G::ROWS;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // The warp's first query.
  const int row = first + 64 * group + 16 * (threadIdx.x / 32 % 4);
  float s[N][4], dp[N][4], dq[1][D / 8][4], lse[2], delta[2];
  uint32_t ds[N / 2][4];
  clear(dq);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query = row + 8 * half + g;
    lse[half] = query < problem.queries ? in.lse[statistics + query] : INFINITY;
    delta[half] = query < problem.queries ? in.delta[statistics + query] : 0.0f;
  }

  // Queries and gradients arrive with the first tile.
  G::Tiles::await(0, group);
  const LeftPanels<D, ROWS, true> q(tiles.fixed(0), 64 * group), dout(tiles.fixed(1), 64 * group);
  const auto start_products = [&](int place) {
    q.template multiply<STEP>(s, shared_address(tiles.slot(place, 0)));
    wgmma_commit();
    dout.template multiply<STEP>(dp, shared_address(tiles.slot(place, 1)));
    wgmma_commit();
  };
  const auto start_sums = [&](int place) {
    add_results<STEP>(dq[0], ds, shared_address(tiles.slot(place, 0)));
    wgmma_commit();
  };
  const auto probabilities = [&](int place) {
    const int before = place * STEP;
    // Known before the exponentials: with `hide` after them the code is longer.
    const bool masked = before + STEP > problem.visible(row);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] = exp2_approximate(fmaf(s[n][e], in.softmax_scale_log2, -lse[e >> 1]));
    if (!masked) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int visible = problem.visible(row + 8 * half + g) - before - 2 * t;
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * n + e >= visible) s[n][2 * half + e] = 0.0f;
    }
  };
  const auto round = [&] {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] *= dp[n][e] - delta[e >> 1];
    round_results(ds, s);
  };

  wgmma_fence();
  start_products(0);
  wgmma_wait<0>();
  wgmma_done(s);
  wgmma_done(dp);
  probabilities(0);
  round();
  if (steps > 1) Turns<G::Tiles>::begin(group);
#pragma unroll 1
  for (int place = 1; place < steps; place++) {
    G::Tiles::await(place, group);
    Turns<G::Tiles>::await(group);
    wgmma_fence();
    start_products(place);
    start_sums(place - 1);
    Turns<G::Tiles>::pass_on(group, place + 1 == steps);
    wgmma_wait<2>();
    wgmma_done(s);
    probabilities(place);
    computed_here(all_bits(s));
    wgmma_wait<0>();
    wgmma_done(dp);
    wgmma_done(dq[0]);
    wgmma_done(ds);
    G::Tiles::give_back(place - 1, steps);
    round();
  }
  wgmma_fence();
  start_sums(steps - 1);
  wgmma_wait<0>();
  wgmma_done(dq[0]);

  const float scale[1][2] = {{in.softmax_scale, in.softmax_scale}};
  store_rows<D>(dq_rows, row, problem.queries, problem.head_dim, dq, scale);
}

// A block per tile of keys and key head.
template <int D>
__device__ __forceinline__ void attention_backward_kv_wgmma(const Inputs& in, const Heads<__nv_bfloat16>& all_dk,
                                                            const Heads<__nv_bfloat16>& all_dv, const Problem& problem) {
  using G = BackwardGroups;
  extern __shared__ __align__(1024) uint8_t shared[];
  const Layout<D, 2 * G::STEP> layout = {reinterpret_cast<__nv_bfloat16*>(shared)};
  const int tiles = (problem.keys + G::ROWS - 1) / G::ROWS, kv_heads = problem.heads / problem.group;
  // The first keys have the most queries under a causal mask.
  const uint32_t pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t batch = pair / kv_heads, kv_head = pair % kv_heads;
  const int first = G::ROWS * tile, group = warpgroup();
  const QuerySteps steps(problem, kv_head, first);
  if (group == G::GROUPS) {
    fewer_registers<G::COPY_REGISTERS>();
    copy_for_keys<D>(layout, in, batch, kv_head, first, steps, problem, [&](int place, int head, int query) {
      copy_statistics<D>(layout, in, place, batch, head, query, problem);
    });
  } else {
    more_registers<G::REGISTERS>();
    sum_over_queries(layout, in, group, first, steps, all_dk.at(batch, kv_head), all_dv.at(batch, kv_head), problem);
  }
}

// A block per tile of queries and head.
template <int D>
__device__ __forceinline__ void attention_backward_q_wgmma(const Inputs& in, const Heads<__nv_bfloat16>& all_dq,
                                                           const Problem& problem) {
  using G = BackwardGroups;
  extern __shared__ __align__(1024) uint8_t shared[];
  const Layout<D, 0> layout = {reinterpret_cast<__nv_bfloat16*>(shared)};
  const int tiles = (problem.queries + G::ROWS - 1) / G::ROWS;
  const uint32_t pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t batch = pair / problem.heads, head = pair % problem.heads;
  const int first = G::ROWS * (problem.causal ? tiles - 1 - tile : tile), group = warpgroup();
  const int steps = max(1, (problem.visible(first + G::ROWS - 1) + G::STEP - 1) / G::STEP);
  if (group == G::GROUPS) {
    fewer_registers<G::COPY_REGISTERS>();
    copy_for_queries<D, 1>(layout, in, batch, head, first, steps, problem);
  } else {
    more_registers<G::REGISTERS>();
    sum_over_keys(layout, in, (uint64_t)pair * statistics_row(problem.queries), group, first, steps, all_dq.at(batch, head),
                  problem);
  }
}

#endif

#define PARAMETERS                                                                                                       \
  const __nv_bfloat16 *q, const __nv_bfloat16 *k, const __nv_bfloat16 *v, const __nv_bfloat16 *dout, const float *lse,    \
      const float *delta, uint64_t q_batch, uint64_t q_head, uint64_t q_row, uint64_t k_batch, uint64_t k_head,           \
      uint64_t k_row, uint64_t v_batch, uint64_t v_head, uint64_t v_row, uint64_t dout_batch, uint64_t dout_head,         \
      uint64_t dout_row, int heads, int group, int queries, int keys, int head_dim, int causal, float softmax_scale_log2, \
      float softmax_scale
#define INPUTS                                                                                                           \
  {{q, q_batch, q_head, q_row}, {k, k_batch, k_head, k_row}, {v, v_batch, v_head, v_row}, {dout, dout_batch, dout_head,   \
   dout_row}, lse, delta, softmax_scale_log2, softmax_scale}
#define PROBLEM {heads, group, queries, keys, head_dim, causal}

#ifdef FP8_WGMMA
#define CONTENTS(...) __VA_ARGS__
#else
#define CONTENTS(...)
#endif

// dk and dv have the same strides.
#define BACKWARD(D)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(BackwardGroups::THREADS, 1) fp8_attention_backward_kv_wgmma_d##D##_bf16(   \
      PARAMETERS, __nv_bfloat16* dk, __nv_bfloat16* dv, uint64_t d_batch, uint64_t d_head, uint64_t d_row) {              \
    CONTENTS(attention_backward_kv_wgmma<D>(INPUTS, {dk, d_batch, d_head, d_row}, {dv, d_batch, d_head, d_row}, PROBLEM);) \
  }                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(BackwardGroups::THREADS, 1) fp8_attention_backward_q_wgmma_d##D##_bf16(    \
      PARAMETERS, __nv_bfloat16* dq, uint64_t d_batch, uint64_t d_head, uint64_t d_row) {                                 \
    CONTENTS(attention_backward_q_wgmma<D>(INPUTS, {dq, d_batch, d_head, d_row}, PROBLEM);)                               \
  }
BACKWARD(64)
BACKWARD(128)
