// Arithmetic that CUDA offers beside the C++ library.
#pragma once

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

// CUDA has min and max for all pairs of arithmetic types in the global namespace.
#define COC_MINMAX(T)                              \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
COC_MINMAX(int)
COC_MINMAX(unsigned)
COC_MINMAX(long)
COC_MINMAX(unsigned long)
COC_MINMAX(long long)
COC_MINMAX(unsigned long long)
#undef COC_MINMAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
#define COC_MIXED(A, B, T)                                                     \
  inline T min(A a, B b) { return min(static_cast<T>(a), static_cast<T>(b)); } \
  inline T max(A a, B b) { return max(static_cast<T>(a), static_cast<T>(b)); } \
  inline T min(B a, A b) { return min(static_cast<T>(a), static_cast<T>(b)); } \
  inline T max(B a, A b) { return max(static_cast<T>(a), static_cast<T>(b)); }
COC_MIXED(int, unsigned, unsigned)
COC_MIXED(long, unsigned long, unsigned long)
COC_MIXED(unsigned, unsigned long, unsigned long)
COC_MIXED(int, long, long)
COC_MIXED(int, unsigned long, unsigned long)
COC_MIXED(unsigned, long, long)
COC_MIXED(long long, unsigned long long, unsigned long long)
COC_MIXED(float, double, double)
#undef COC_MIXED

// ---- bits ----

namespace coc {
template <class To, class From> inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
// Keeps the compiler from fusing a product into a following sum.
inline float rounded(float x) {
  asm("" : "+x"(x));
  return x;
}
inline double rounded(double x) {
  asm("" : "+x"(x));
  return x;
}
}  // namespace coc

inline unsigned __float_as_uint(float x) { return coc::bits<unsigned>(x); }
inline int __float_as_int(float x) { return coc::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return coc::bits<float>(x); }
inline float __int_as_float(int x) { return coc::bits<float>(x); }
inline long long __double_as_longlong(double x) { return coc::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return coc::bits<double>(x); }
inline int __double2hiint(double x) { return int(coc::bits<uint64_t>(x) >> 32); }
inline int __double2loint(double x) { return int(coc::bits<uint64_t>(x)); }
inline double __hiloint2double(int hi, int lo) { return coc::bits<double>(uint64_t(unsigned(hi)) << 32 | unsigned(lo)); }

inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  x = __builtin_bswap32(x);
  x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
  x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
  return (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    unsigned nibble = selector >> 4 * i & 15, byte = bytes >> 8 * (nibble & 7) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
  return unsigned((uint64_t(hi) << 32 | lo) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
  return unsigned((uint64_t(hi) << 32 | lo) >> (n & 31));
}
inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned n) { return n >= 32 ? lo : __funnelshift_l(lo, hi, n); }
inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned n) { return n >= 32 ? hi : __funnelshift_r(lo, hi, n); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }
inline long long __mul64hi(long long a, long long b) { return (__int128)a * b >> 64; }
inline int __mul24(int a, int b) { return int(unsigned(a << 8 >> 8) * unsigned(b << 8 >> 8)); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
inline unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a > b ? a - b : b - a); }

// ---- one operation, one rounding, never fused ----

#define COC_ROUNDED(T, add, sub, mul, div, root, fused)     \
  inline T add(T a, T b) { return coc::rounded(a + b); }    \
  inline T sub(T a, T b) { return coc::rounded(a - b); }    \
  inline T mul(T a, T b) { return coc::rounded(a * b); }    \
  inline T div(T a, T b) { return coc::rounded(a / b); }    \
  inline T root(T a) { return coc::rounded(std::sqrt(a)); } \
  inline T fused(T a, T b, T c) { return std::fma(a, b, c); }
COC_ROUNDED(float, __fadd_rn, __fsub_rn, __fmul_rn, __fdiv_rn, __fsqrt_rn, __fmaf_rn)
COC_ROUNDED(double, __dadd_rn, __dsub_rn, __dmul_rn, __ddiv_rn, __dsqrt_rn, __fma_rn)
#undef COC_ROUNDED
inline float __frcp_rn(float a) { return coc::rounded(1.0f / a); }
inline double __drcp_rn(double a) { return coc::rounded(1.0 / a); }
inline float __frsqrt_rn(float a) { return float(1.0 / std::sqrt(double(a))); }

// ---- approximations; the exact functions stand in for them ----

inline float rsqrtf(float a) { return float(1.0 / std::sqrt(double(a))); }
inline double rsqrt(double a) { return 1.0 / std::sqrt(a); }
inline float __expf(float a) { return expf(a); }
inline float __exp10f(float a) { return exp10f(a); }
inline float __logf(float a) { return logf(a); }
inline float __log2f(float a) { return log2f(a); }
inline float __log10f(float a) { return log10f(a); }
inline float __sinf(float a) { return sinf(a); }
inline float __cosf(float a) { return cosf(a); }
inline float __tanf(float a) { return tanf(a); }
inline void __sincosf(float a, float* s, float* c) { sincosf(a, s, c); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __fdividef(float a, float b) { return a / b; }
inline float fdividef(float a, float b) { return a / b; }
inline float __saturatef(float a) { return a >= 0.0f ? (a > 1.0f ? 1.0f : a) : 0.0f; }
inline float __tanhf(float a) { return tanhf(a); }
inline float normcdff(float a) { return float(0.5 * erfc(-double(a) * M_SQRT1_2)); }
inline double normcdf(double a) { return 0.5 * erfc(-a * M_SQRT1_2); }
inline float rcbrtf(float a) { return 1.0f / cbrtf(a); }
inline float sinpif(float a) { return float(sin(M_PI * double(a))); }
inline float cospif(float a) { return float(cos(M_PI * double(a))); }

// ---- conversions: saturating, NaN becomes 0, as on the device ----

namespace coc {
template <class I, class F> inline I to_integer(F x) {
  constexpr F low = F(std::numeric_limits<I>::min()), high = F(std::numeric_limits<I>::max());
  if (x != x) return 0;
  return x <= low ? std::numeric_limits<I>::min() : x >= high ? std::numeric_limits<I>::max() : I(x);
}
}  // namespace coc
#define COC_TO_INTEGER(F, I, prefix)                                          \
  inline I prefix##_rn(F x) { return coc::to_integer<I>(std::nearbyint(x)); } \
  inline I prefix##_rz(F x) { return coc::to_integer<I>(std::trunc(x)); }     \
  inline I prefix##_ru(F x) { return coc::to_integer<I>(std::ceil(x)); }      \
  inline I prefix##_rd(F x) { return coc::to_integer<I>(std::floor(x)); }
COC_TO_INTEGER(float, int, __float2int)
COC_TO_INTEGER(float, unsigned, __float2uint)
COC_TO_INTEGER(float, long long, __float2ll)
COC_TO_INTEGER(float, unsigned long long, __float2ull)
COC_TO_INTEGER(double, int, __double2int)
COC_TO_INTEGER(double, unsigned, __double2uint)
COC_TO_INTEGER(double, long long, __double2ll)
COC_TO_INTEGER(double, unsigned long long, __double2ull)
#undef COC_TO_INTEGER
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __ull2float_rn(unsigned long long x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }
inline double __int2double_rn(int x) { return double(x); }
inline double __uint2double_rn(unsigned x) { return double(x); }
