// The gradient of queries of attention with products in FP8, for Hopper, and the statistics of queries that the sums over queries need.
//
// A block goes over its keys three times: delta, rowsum(P * dP), and the largest of each row of P; with delta the largest of each row of dS,
// from which the row's scale follows; and with that the gradient. As in attention_backward_wgmma.cu one warpgroup copies tiles, and
// the others have 64 queries each.
#include "attention_backward_fp8.cuh"

#ifdef FP8_WGMMA

constexpr int PASSES = 3;

template <int D>
__device__ __forceinline__ void sum_over_keys(const Layout<D, 0>& tiles, const Fp8Inputs& in, const float* lse_row,
                                              QueryStatistics* statistics, int group, int first, int steps,
                                              const Results& dq_rows, int batch, int head, const Problem& problem) {
  using G = BackwardGroups;
  constexpr int STEP = G::STEP, N = STEP / 8, ROWS = G::ROWS;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // The warp's first query.
  const int row = first + 64 * group + 16 * (threadIdx.x / 32 % 4);
  const int places = PASSES * steps;
  float s[N][4], dp[N][4], lse[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query = row + 8 * half + g;
    lse[half] = query < problem.queries ? lse_row[query] : INFINITY;
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
  const auto probabilities = [&] {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] = exp2_approximate(fmaf(s[n][e], in.softmax_scale_log2, -lse[e >> 1]));
  };
  // Each step has a turn but the first of the last pass.
  const int turns = places - 1;
  Turns<G::Tiles>::begin(group);
  // Shows `use` the probabilities of all keys and the products of dout and v. Both are 0 where a query does not see a key: there the
  // products may be NaN.
  const auto look = [&](int first_place, const auto& use) {
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const int place = first_place + step;
      Turns<G::Tiles>::await(group);
      wgmma_fence();
      start_products(place);
      Turns<G::Tiles>::pass_on(group, place + 1 == turns);
      wgmma_wait<1>();
      wgmma_done(s);
      probabilities();
      computed_here(all_bits(s));
      wgmma_wait<0>();
      wgmma_done(dp);
      G::Tiles::give_back(place, places);
      hide(s, problem, row, step * STEP, 0.0f);
      hide(dp, problem, row, step * STEP, 0.0f);
      use();
      G::Tiles::await(place + 1, group);
    }
  };

  float delta[2] = {0.0f, 0.0f}, least[2] = {0.0f, 0.0f};
  {
    float largest[2] = {0.0f, 0.0f};
    look(0, [&] {
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          delta[e >> 1] = fmaf(s[n][e], dp[n][e], delta[e >> 1]);
          largest[e >> 1] = fmaxf(largest[e >> 1], s[n][e]);
        }
    });
#pragma unroll
    for (int half = 0; half < 2; half++) delta[half] = row_sum(delta[half]);
    // The largest of dS: where one is NaN, delta is, and then all are.
    look(steps, [&] {
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) least[e >> 1] = fmaxf(least[e >> 1], fabsf(s[n][e] * (dp[n][e] - delta[e >> 1])));
    });
#pragma unroll
    for (int half = 0; half < 2; half++) {
      least[half] = in.grad_format.least(row_max(least[half]));
      const float least_of_p = in.format.least(row_max(largest[half]));
      const int query = row + 8 * half + g;
      if (t == 0 && query < problem.queries) statistics[query] = {lse[half], least_of_p, delta[half], least[half]};
    }
  }

  float dq[1][D / 8][4];
  uint32_t ds[N / 2][4];
  clear(dq);
  const auto start_sums = [&](int place) {
    add_results<STEP>(dq[0], ds, shared_address(tiles.slot(place, 0)));
    wgmma_commit();
  };
  const auto round = [&](int step) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        s[n][e] = nearest(s[n][e] * (dp[n][e] - delta[e >> 1]), least[e >> 1], in.grad_format.to_large);
    hide(s, problem, row, step * STEP, 0.0f);
    round_results(ds, s);
  };
  const int last_pass = places - steps;
  wgmma_fence();
  start_products(last_pass);
  wgmma_wait<0>();
  wgmma_done(s);
  wgmma_done(dp);
  probabilities();
  round(0);
#pragma unroll 1
  for (int step = 1; step < steps; step++) {
    const int place = last_pass + step;
    G::Tiles::await(place, group);
    Turns<G::Tiles>::await(group);
    wgmma_fence();
    start_products(place);
    start_sums(place - 1);
    Turns<G::Tiles>::pass_on(group, place == turns);
    wgmma_wait<2>();
    wgmma_done(s);
    probabilities();
    computed_here(all_bits(s));
    wgmma_wait<0>();
    wgmma_done(dp);
    wgmma_done(dq[0]);
    wgmma_done(ds);
    G::Tiles::give_back(place - 1, places);
    round(step);
  }
  wgmma_fence();
  start_sums(places - 1);
  wgmma_wait<0>();
  wgmma_done(dq[0]);
  dq_rows.store<D>(batch, head, row, problem.queries, problem.head_dim, dq, in.softmax_scale);
}

// A block per tile of queries and head.
template <int D>
__device__ __forceinline__ void attention_backward_q_fp8(const Fp8Inputs& in, const float* lse, QueryStatistics* statistics,
                                                         const Results& dq, const Problem& problem) {
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
    copy_for_queries<D, PASSES>(layout, in, batch, head, first, steps, problem);
  } else {
    more_registers<G::REGISTERS>();
    sum_over_keys(layout, in, lse + (uint64_t)pair * statistics_row(problem.queries), statistics + (uint64_t)pair * problem.queries,
                  group, first, steps, dq, batch, head, problem);
  }
}

#endif

#define BACKWARD(D)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(BackwardGroups::THREADS, 1) fp8_attention_backward_q_fp8_d##D(                \
      PARAMETERS, const float* lse, QueryStatistics* statistics, void* dq, uint64_t d_batch, uint64_t d_head, uint64_t d_row, \
      int wide) {                                                                                                            \
    CONTENTS(attention_backward_q_fp8<D>(INPUTS, lse, statistics, {dq, d_batch, d_head, d_row, wide}, PROBLEM);)              \
  }
BACKWARD(64)
BACKWARD(128)
