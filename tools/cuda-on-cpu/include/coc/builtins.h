// Thread indices, barriers, fences, and loads and stores with cache hints.
#pragma once

constexpr int warpSize = 32;

namespace coc {
inline uint3 as_uint3(const Index3& i) { return {i.x, i.y, i.z}; }
inline dim3 as_dim3(const Index3& i) { return dim3(i.x, i.y, i.z); }
template <class T> T* dynamic_shared() { return reinterpret_cast<T*>(coc_lane.dynamic_shared); }
}  // namespace coc

#define threadIdx (coc::as_uint3(coc_lane.thread_idx))
#define blockIdx (coc::as_uint3(coc_lane.block_idx))
#define blockDim (coc::as_dim3(coc_lane.block_dim))
#define gridDim (coc::as_dim3(coc_lane.grid_dim))

inline void __syncthreads() { coc_block_barrier(coc::Barrier::Sync, 0); }
inline int __syncthreads_or(int p) { return coc_block_barrier(coc::Barrier::Or, p); }
inline int __syncthreads_and(int p) { return coc_block_barrier(coc::Barrier::And, p); }
inline int __syncthreads_count(int p) { return coc_block_barrier(coc::Barrier::Count, p); }

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { coc_yield(); }
[[noreturn]] inline void __trap() { coc_fail("__trap()"); }

inline long long clock64() { return __builtin_ia32_rdtsc(); }
inline unsigned long long __globaltimer() { return __builtin_ia32_rdtsc(); }

// Loads check the alignment that the hardware demands.
namespace coc {
template <class T> inline void check_aligned(const T* p, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T))
    coc_fail("%s: address %p is not aligned to %zu bytes", what, static_cast<const void*>(p), sizeof(T));
}
}  // namespace coc

#define COC_LOAD(name)                           \
  template <class T> inline T name(const T* p) { \
    coc::check_aligned(p, #name);                \
    return *p;                                   \
  }
#define COC_STORE(name)                                                    \
  template <class T> inline void name(T* p, std::common_type_t<T> value) { \
    coc::check_aligned(p, #name);                                          \
    *p = value;                                                            \
  }
COC_LOAD(__ldg)
COC_LOAD(__ldcg)
COC_LOAD(__ldca)
COC_LOAD(__ldcs)
COC_LOAD(__ldlu)
COC_LOAD(__ldcv)
COC_STORE(__stwb)
COC_STORE(__stcg)
COC_STORE(__stcs)
COC_STORE(__stwt)
#undef COC_LOAD
#undef COC_STORE

#define __builtin_assume(condition) ((void)0)
