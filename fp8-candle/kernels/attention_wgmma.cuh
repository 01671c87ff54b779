// Building blocks of the attention kernels for Hopper and bf16 (attention_forward_wgmma.cu, attention_backward_wgmma.cu): tiles in
// panels, a ring of them that one warpgroup fills for others, and products of tiles.
//
// A result is in the registers of its warpgroup as `mma.sync` leaves it, 16 rows per warp, so that softmax and rounding are those of
// attention.cuh.
#pragma once
#include "attention.cuh"
#include "wgmma.cuh"

// The machine code of other chips has these kernels without their contents, and is never asked for them.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(FP8_ON_CPU)
#define FP8_WGMMA 1
#endif

// Slots in shared memory for tiles in the order of their places, which one warpgroup fills and GROUPS others read. A reader waits for
// AHEAD tiles before it gives the first of them back.
template <int GROUPS, int SLOTS, int AHEAD> struct Ring {
  static constexpr int THREADS = WARPGROUP_THREADS * (GROUPS + 1);
  // Tiles on their way. Those before them are handed over when a slot is waited for, and are enough for a reader to give it back.
  static constexpr int UNDER_WAY = SLOTS - AHEAD;
  // Named barriers of the ring: those from here on are free.
  static constexpr int BARRIERS = SLOTS * (GROUPS + 1);
  static_assert(UNDER_WAY > 0 && BARRIERS <= 16, "a block has 16 barriers");

  static __device__ __forceinline__ int slot(int place) { return place % SLOTS; }
  // Named barriers: a tile is there, for each warpgroup that reads it; none reads it any more.
  static __device__ __forceinline__ int full(int place, int group) { return slot(place) * GROUPS + group; }
  static __device__ __forceinline__ int empty(int place) { return SLOTS * GROUPS + slot(place); }

#ifdef FP8_WGMMA
  // `copy` starts copies of the tile of a place. What was started before arrives with the first tile.
  template <class Copy> static __device__ __forceinline__ void fill(int places, const Copy& copy) {
#pragma unroll 1
    for (int place = 0; place < places + UNDER_WAY; place++) {
      if (place < places) {
        if (place >= SLOTS) named_barrier_wait(empty(place), THREADS);
        copy(place);
      }
      cp_async_commit();
      if (place >= UNDER_WAY) {
        cp_async_wait<UNDER_WAY>();
        fence_products();
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
          named_barrier_arrive(full(place - UNDER_WAY, group), 2 * WARPGROUP_THREADS);
      }
    }
  }

  static __device__ __forceinline__ void await(int place, int group) {
    named_barrier_wait(full(place, group), 2 * WARPGROUP_THREADS);
  }

  // Of `places` in all.
  static __device__ __forceinline__ void give_back(int place, int places) {
    if (place + SLOTS < places) named_barrier_arrive(empty(place), THREADS);
  }
#endif
};

#ifdef FP8_WGMMA

// Two warpgroups that start products in turns, so that those of one run beside the exponentials of the other. Left alone they fall into
// step, and the tensor cores wait while both take exponentials. Both have the same number of turns, of which `last` is the last.
template <class Tiles> struct Turns {
  static_assert(Tiles::BARRIERS + 2 <= 16, "a block has 16 barriers");
  static constexpr int THREADS = 2 * WARPGROUP_THREADS;

  // Before the first turn, if there is one: the first warpgroup begins.
  static __device__ __forceinline__ void begin(int group) {
    if (group == 1) named_barrier_arrive(Tiles::BARRIERS, THREADS);
  }
  static __device__ __forceinline__ void await(int group) { named_barrier_wait(Tiles::BARRIERS + group, THREADS); }
  static __device__ __forceinline__ void pass_on(int group, bool last) {
    if (group == 0 || !last) named_barrier_arrive(Tiles::BARRIERS + 1 - group, THREADS);
  }
};

// The number of the thread's warpgroup: the same in all lanes, which the compiler does not see in the number of a thread.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP_THREADS, 0); }

// Starts copying rows `first`.. of `x` into a tile of panels, by one warpgroup; elements beyond `rows` and `head_dim` become 0.
template <int D, int ROWS>
__device__ __forceinline__ void copy_panels(__nv_bfloat16* tile, const Heads<const __nv_bfloat16>& x, int first, int rows,
                                            int head_dim) {
  constexpr int CHUNKS = D / 8, STRIDE = WARPGROUP_THREADS / CHUNKS;
  static_assert(ROWS % STRIDE == 0 && STRIDE % 8 == 0, "whole passes, in which a thread permutes chunks in one way");
  const int thread = recomputed(threadIdx.x) % WARPGROUP_THREADS, chunk = thread % CHUNKS, offset = thread / CHUNKS;
  const int left = 8 * chunk < head_dim ? rows - first - offset : 0;
  const __nv_bfloat16* source = x.row(first + offset) + 8 * chunk;
  __nv_bfloat16* const to = tile + chunk / 8 * ROWS * PANEL_COLUMNS + offset * PANEL_COLUMNS + 8 * (chunk % 8 ^ offset % 8);
#pragma unroll
  for (int i = 0; i < ROWS; i += STRIDE) {
    cp_async_16(to + i * PANEL_COLUMNS, source, i < left);
    source += STRIDE * x.row_stride;
  }
}

// Describes rows of a tile, or its columns from panel to panel where the tile has ROWS rows.
__device__ __forceinline__ uint64_t rows_descriptor(uint32_t address) { return matrix_descriptor(address, 16); }
template <int ROWS> __device__ __forceinline__ uint64_t columns_descriptor(uint32_t address) {
  return matrix_descriptor(address, ROWS * PANEL_ROW_BYTES);
}

// 64 rows of a tile of ROWS rows, from `first` on, as the left operand of products that sum over D columns. Held in registers, which
// then are read from shared memory once, or read again by each product.
template <int D, int ROWS, bool HELD> struct LeftPanels {
  uint32_t held[HELD ? D / 16 : 1][4];
  uint64_t descriptor;

  __device__ __forceinline__ LeftPanels(const __nv_bfloat16* tile, int first) {
    if constexpr (HELD) {
      const int lane = threadIdx.x & 31, row = first + 16 * (threadIdx.x / 32 % 4) + (lane & 15);
#pragma unroll
      for (int c = 0; c < D / 16; c++) {
        const int chunk = c % 4 * 2 + (lane >> 4);
        ldmatrix_x4(held[c], tile + (c / 4 * ROWS + row) * PANEL_COLUMNS + 8 * (chunk ^ (lane & 7)));
      }
    } else {
      descriptor = rows_descriptor(shared_address(tile) + first * PANEL_ROW_BYTES);
    }
  }

  // Starts d = a b^T: all 8 N rows of the tile of B_ROWS rows at address `b`.
  template <int B_ROWS, int N> __device__ __forceinline__ void multiply(float (&d)[N][4], uint32_t b) const {
#pragma unroll
    for (int c = 0; c < D / 16; c++) {
      // 16 columns, four times in a panel.
      const int panel = c / 4 * PANEL_ROW_BYTES, in_panel = c % 4 * 32;
      const uint64_t right = rows_descriptor(b) + (panel * B_ROWS + in_panel) / 16;
      if constexpr (HELD) {
        if (c == 0) wgmma_rows<false>(d, held[c], right);
        else wgmma_rows<true>(d, held[c], right);
      } else {
        const uint64_t left = descriptor + (panel * ROWS + in_panel) / 16;
        if (c == 0) wgmma_rows<false>(d, left, right);
        else wgmma_rows<true>(d, left, right);
      }
    }
  }
};

// Starts d += p b: p [64, ROWS] rounded results, b the tile of ROWS rows at `address`.
template <int ROWS, int N>
__device__ __forceinline__ void add_results(float (&d)[N][4], const uint32_t (&p)[ROWS / 16][4], uint32_t address) {
  const uint64_t b = columns_descriptor<ROWS>(address);
#pragma unroll
  for (int c = 0; c < ROWS / 16; c++) wgmma_columns(d, p[c], b + c * 16 * PANEL_ROW_BYTES / 16);
}

// Results, rounded, as the left operand of the next product.
template <int N> __device__ __forceinline__ void round_results(uint32_t (&p)[N / 2][4], const float (&s)[N][4]) {
  using F = Fragments<__nv_bfloat16>;
#pragma unroll
  for (int c = 0; c < N / 2; c++) {
    p[c][0] = F::pack(s[2 * c][0], s[2 * c][1]), p[c][1] = F::pack(s[2 * c][2], s[2 * c][3]);
    p[c][2] = F::pack(s[2 * c + 1][0], s[2 * c + 1][1]), p[c][3] = F::pack(s[2 * c + 1][2], s[2 * c + 1][3]);
  }
}

// Puts `hidden` in place of results [64, 8 N] for keys from `first` on that their queries do not see. `row`: the warp's first query.
template <int N>
__device__ __forceinline__ void hide(float (&s)[N][4], const Problem& problem, int row, int first, float hidden) {
  if (first + 8 * N <= problem.visible(row)) return;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int visible = problem.visible(row + 8 * half + g) - first - 2 * t;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (8 * n + e >= visible) s[n][2 * half + e] = hidden;
  }
}

// The bits of all numbers of an array: negative only if one of these is.
template <int N> __device__ __forceinline__ int all_bits(const float (&x)[N][4]) {
  int bits = 0;
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) bits |= __float_as_int(x[n][e]);
  return bits;
}

#endif
