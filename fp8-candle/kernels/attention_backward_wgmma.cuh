// Building blocks of backward passes on products of warpgroups: the sizes of a block, its tiles, and the queries that see its keys.
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

#endif
