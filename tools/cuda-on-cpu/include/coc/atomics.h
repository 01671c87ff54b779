// Atomic operations: real ones, as blocks may run on several OS threads.
#pragma once

namespace coc {

template <size_t N> struct Word;
template <> struct Word<2> {
  using type = uint16_t;
};
template <> struct Word<4> {
  using type = uint32_t;
};
template <> struct Word<8> {
  using type = uint64_t;
};

// Replaces *address by next(old) and returns the old value.
template <class T, class F> inline T atomic_update(T* address, F next) {
  using W = typename Word<sizeof(T)>::type;
  check_aligned(address, "atomic operation");
  auto* word = reinterpret_cast<W*>(address);
  W old = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    T before;
    memcpy(&before, &old, sizeof before);
    T after = next(before);
    W wanted;
    memcpy(&wanted, &after, sizeof wanted);
    if (__atomic_compare_exchange_n(word, &old, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) return before;
  }
}

}  // namespace coc

#define COC_INTEGER(T)                                                                       \
  inline T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }       \
  inline T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }     \
  inline T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }         \
  inline T atomicAnd(T* p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }       \
  inline T atomicXor(T* p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST); }       \
  inline T atomicMin(T* p, T v) {                                                            \
    return coc::atomic_update(p, [v](T a) { return v < a ? v : a; });                        \
  }                                                                                          \
  inline T atomicMax(T* p, T v) {                                                            \
    return coc::atomic_update(p, [v](T a) { return a < v ? v : a; });                        \
  }                                                                                          \
  inline T atomicCAS(T* p, T expected, T v) {                                                \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    return expected;                                                                         \
  }
COC_INTEGER(int)
COC_INTEGER(unsigned)
COC_INTEGER(long long)
COC_INTEGER(unsigned long long)
#undef COC_INTEGER

inline unsigned short atomicCAS(unsigned short* p, unsigned short expected, unsigned short v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
inline int atomicSub(int* p, int v) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); }
inline unsigned atomicSub(unsigned* p, unsigned v) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); }
inline unsigned atomicInc(unsigned* p, unsigned limit) {
  return coc::atomic_update(p, [limit](unsigned a) { return a >= limit ? 0u : a + 1; });
}
inline unsigned atomicDec(unsigned* p, unsigned limit) {
  return coc::atomic_update(p, [limit](unsigned a) { return a == 0 || a > limit ? limit : a - 1; });
}

inline float atomicAdd(float* p, float v) {
  return coc::atomic_update(p, [v](float a) { return a + v; });
}
inline double atomicAdd(double* p, double v) {
  return coc::atomic_update(p, [v](double a) { return a + v; });
}
inline float atomicExch(float* p, float v) {
  return coc::atomic_update(p, [v](float) { return v; });
}
inline __half atomicAdd(__half* p, __half v) {
  return coc::atomic_update(p, [v](__half a) { return __hadd(a, v); });
}
inline __nv_bfloat16 atomicAdd(__nv_bfloat16* p, __nv_bfloat16 v) {
  return coc::atomic_update(p, [v](__nv_bfloat16 a) { return __hadd(a, v); });
}
inline __half2 atomicAdd(__half2* p, __half2 v) {
  return coc::atomic_update(p, [v](__half2 a) { return __hadd2(a, v); });
}
inline __nv_bfloat162 atomicAdd(__nv_bfloat162* p, __nv_bfloat162 v) {
  return coc::atomic_update(p, [v](__nv_bfloat162 a) { return __hadd2(a, v); });
}
