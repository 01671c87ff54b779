// Building blocks of backward passes on products of warpgroups: the sizes of a block, its tiles and their copies, the queries that see
// its keys, and what it does with these.
#pragma once
#include "attention_wgmma.cuh"

struct BackwardGroups {
  // Warpgroups that compute, rows of a block (keys or queries), rows per step (of the other).
  static constexpr int GROUPS = 2, ROWS = 64 * GROUPS, STEP = 64;
  // Two tiles in each slot. A warpgroup starts a step before it has finished the one before.
  static constexpr int SLOTS = 4;
  using Tiles = Ring<GROUPS, SLOTS, 2>;
  static constexpr int THREADS = Tiles::THREADS;
  // Registers of a thread that copies, and of one that computes: together those of a multiprocessor.
  static constexpr int COPY_REGISTERS = 24, REGISTERS = 240;
};

#ifdef FP8_WGMMA

// Where a block's tiles are: two that stay, and two in each slot of the ring, behind which each slot has room for EXTRA f32.
template <int D, int EXTRA> struct Layout {
  using G = BackwardGroups;
  static constexpr int FIXED = G::ROWS * D, STEP = G::STEP * D, SLOT = 2 * STEP;
  __nv_bfloat16* shared;

  __device__ __forceinline__ __nv_bfloat16* fixed(int tile) const { return shared + tile * FIXED; }
  __device__ __forceinline__ __nv_bfloat16* slot(int place, int tile) const {
    return shared + 2 * FIXED + G::Tiles::slot(place) * SLOT + tile * STEP;
  }
  __device__ __forceinline__ float* extra(int place) const {
    return reinterpret_cast<float*>(shared + 2 * FIXED + G::SLOTS * SLOT) + G::Tiles::slot(place) * EXTRA;
  }
};

// What a block of keys goes through: all queries that see any of its keys, for each head that shares them.
struct QuerySteps {
  int head, query, start, places;

  __device__ __forceinline__ QuerySteps(const Problem& problem, int kv_head, int first_key) {
    constexpr int STEP = BackwardGroups::STEP;
    head = kv_head * problem.group;
    query = start = problem.causal ? max(0, first_key - (problem.keys - problem.queries)) / STEP * STEP : 0;
    places = (problem.queries - start + STEP - 1) / STEP * problem.group;
  }
  // To the next place.
  __device__ __forceinline__ void advance(const Problem& problem) {
    query += BackwardGroups::STEP;
    if (query >= problem.queries) query = start, head++;
  }
};

// What the warpgroup that copies does for a block of keys: keys and values, then queries and gradients of all steps.
// `statistics(place, head, query)` copies what a step needs of its queries besides.
template <int D, class Tiles, class In, class Statistics>
__device__ __forceinline__ void copy_for_keys(const Tiles& tiles, const In& in, int batch, int kv_head, int first, QuerySteps steps,
                                              const Problem& problem, const Statistics& statistics) {
  using G = BackwardGroups;
  constexpr int STEP = G::STEP;
  copy_panels<D, G::ROWS>(tiles.fixed(0), in.k.at(batch, kv_head), first, problem.keys, problem.head_dim);
  copy_panels<D, G::ROWS>(tiles.fixed(1), in.v.at(batch, kv_head), first, problem.keys, problem.head_dim);
  G::Tiles::fill(steps.places, [&](int place) {
    const int head = steps.head, query = steps.query;
    copy_panels<D, STEP>(tiles.slot(place, 0), in.q.at(batch, head), query, problem.queries, problem.head_dim);
    copy_panels<D, STEP>(tiles.slot(place, 1), in.dout.at(batch, head), query, problem.queries, problem.head_dim);
    // Rows beyond the last query are zeros and add nothing: their P is multiplied by a dout of 0, and their dS is 0.
    statistics(place, head, query);
    steps.advance(problem);
  });
}

// The same for a block of queries: these and their gradients, then PASSES times keys and values of all steps.
template <int D, int PASSES, class In>
__device__ __forceinline__ void copy_for_queries(const Layout<D, 0>& tiles, const In& in, int batch, int head, int first, int steps,
                                                 const Problem& problem) {
  using G = BackwardGroups;
  const Heads<const __nv_bfloat16> k = in.k.at(batch, head / problem.group), v = in.v.at(batch, head / problem.group);
  copy_panels<D, G::ROWS>(tiles.fixed(0), in.q.at(batch, head), first, problem.queries, problem.head_dim);
  copy_panels<D, G::ROWS>(tiles.fixed(1), in.dout.at(batch, head), first, problem.queries, problem.head_dim);
  int step = 0;
  G::Tiles::fill(PASSES * steps, [&](int place) {
    if constexpr (PASSES == 1) step = place;
    copy_panels<D, G::STEP>(tiles.slot(place, 0), k, step * G::STEP, problem.keys, problem.head_dim);
    copy_panels<D, G::STEP>(tiles.slot(place, 1), v, step * G::STEP, problem.keys, problem.head_dim);
    if constexpr (PASSES > 1) step = step + 1 == steps ? 0 : step + 1;
  });
}

// Goes through the steps of a block of keys: `probabilities(place)` makes P, rounded as the operand `p`, from the logits `s`, and
// `gradients(place)` dS, rounded as `ds`, from the products `dp` of values and gradients. Products have keys as rows, so P^T and dS^T are
// left operands as they are.
template <int D, bool HELD, class Tiles, int N, class Probabilities, class Gradients>
__device__ __forceinline__ void go_through_queries(const Tiles& tiles, int group, QuerySteps& steps, const Problem& problem,
                                                   const LeftPanels<D, BackwardGroups::ROWS, HELD>& k,
                                                   const LeftPanels<D, BackwardGroups::ROWS, HELD>& v, float (&s)[N][4],
                                                   float (&dp)[N][4], uint32_t (&p)[N / 2][4], uint32_t (&ds)[N / 2][4],
                                                   float (&dk)[1][D / 8][4], float (&dv)[1][D / 8][4],
                                                   const Probabilities& probabilities, const Gradients& gradients) {
  using G = BackwardGroups;
  constexpr int STEP = G::STEP;
  const auto start_logits = [&](int place) {
    k.template multiply<STEP>(s, shared_address(tiles.slot(place, 0)));
    wgmma_commit();
  };
  // From the logits on, until the sums are started.
  const auto step = [&](int place) {
    const uint32_t q = shared_address(tiles.slot(place, 0)), dout = shared_address(tiles.slot(place, 1));
    wgmma_fence();
    v.template multiply<STEP>(dp, dout);
    wgmma_commit();
    probabilities(place);
    wgmma_fence();
    add_results<STEP>(dv[0], p, dout);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_done(dp);
    gradients(place);
    wgmma_fence();
    add_results<STEP>(dk[0], ds, q);
    wgmma_commit();
  };
  const auto finish = [&] {
    wgmma_wait<0>();
    wgmma_done(dk[0]);
    wgmma_done(dv[0]);
    wgmma_done(p);
    wgmma_done(ds);
  };

  wgmma_fence();
  start_logits(0);
  wgmma_wait<0>();
  wgmma_done(s);
#pragma unroll 1
  for (int place = 0; place + 1 < steps.places; place++) {
    step(place);
    steps.advance(problem);
    G::Tiles::await(place + 1, group);
    start_logits(place + 1);
    finish();
    wgmma_done(s);
    G::Tiles::give_back(place, steps.places);
  }
  step(steps.places - 1);
  finish();
}

#endif
