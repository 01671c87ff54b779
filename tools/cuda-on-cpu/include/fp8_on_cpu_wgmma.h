// Stands in for inline PTX that only Hopper has: products of warpgroups, with what belongs to them. Computed in libcuda.so.1.
#pragma once
#include "coc/runtime.h"

// The address in the shared window that a descriptor holds. Dynamic shared memory alone.
inline uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const unsigned char*>(pointer) - coc_lane.dynamic_shared) + coc::kSharedStart;
}

inline void wgmma_fence() { coc_warpgroup(coc::WarpgroupCall::Fence, nullptr, 0); }
inline void wgmma_commit() { coc_warpgroup(coc::WarpgroupCall::Commit, nullptr, 0); }
template <int N> inline void wgmma_wait() { coc_warpgroup(coc::WarpgroupCall::Wait, nullptr, N); }

// d (64 x 8N) = or += a b^T, both by rows in shared memory
template <bool ADD, int N> inline void wgmma_rows(float (&d)[N][4], uint64_t a, uint64_t b) {
  const coc::WgmmaLane own{d[0], nullptr, a, b, 8 * N, ADD, false, false};
  coc_warpgroup(coc::WarpgroupCall::Product, &own, 0);
}

// The same with a in registers
template <bool ADD, int N> inline void wgmma_rows(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b) {
  const coc::WgmmaLane own{d[0], a, 0, b, 8 * N, ADD, false, false};
  coc_warpgroup(coc::WarpgroupCall::Product, &own, 0);
}

// d (64 x 8N) += a b, a in registers, b by rows in shared memory
template <int N> inline void wgmma_columns(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b) {
  const coc::WgmmaLane own{d[0], a, 0, b, 8 * N, true, false, true};
  coc_warpgroup(coc::WarpgroupCall::Product, &own, 0);
}

// Nothing is reordered here, and there are registers for all.
inline void fence_products() {}
template <int> inline void fewer_registers() {}
template <int> inline void more_registers() {}

inline void named_barrier_wait(int barrier, int threads) { coc_named_barrier(barrier, threads, true); }
inline void named_barrier_arrive(int barrier, int threads) { coc_named_barrier(barrier, threads, false); }
