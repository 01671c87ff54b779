// What the kernels of AdamW share: the tables that the host writes, the numbers of a step, and the step of an element.
#pragma once
#include "common.cuh"

constexpr uint32_t CHUNK = 1 << 14;
// Blocks of an update that share a chunk.
constexpr uint32_t PARTS = 4;
constexpr uint32_t PART = CHUNK / PARTS;

struct alignas(16) Chunk {
  uint32_t tensor;   // index into both tables
  uint32_t block;    // counted within the tensor
  uint32_t partial;  // index of its sum of squares
  uint32_t unused;
};

// A moment. Addresses are u64: element types differ between tensors.
struct Moment {
  uint64_t values;          // or codes
  uint64_t amaxes, curves;  // 0 for a moment of values
  uint64_t rotated;         // bits by which the random words are rotated left for its codes
};

enum Flags : uint32_t { DECAYS = 1, EXPANDS = 2, STOCHASTIC_CODES = 4 };

struct alignas(16) Params {
  uint64_t var;
  Moment exp_avg, exp_avg_sq;
  uint64_t master;  // 0 for none
  uint64_t len;
  uint64_t flags;
  uint64_t seed;    // of random words
  uint64_t random;  // the number of the tensor for them
};
static_assert(sizeof(Params) == 14 * 8, "the host writes 14 words");

template <class C> struct Coefficients {
  C lr, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, correction1, correction2, clip;
};

// What an update reads. Written by fp8_adamw_decide or fp8_adamw_coefficients.
struct Control {
  Coefficients<double> wide;
  Coefficients<float> narrow;
  uint32_t proceed;
  uint32_t step;  // the number of this step, for random bits
};
static_assert(sizeof(Control) == 128, "the host allocates 128 bytes");

template <class T> __device__ __forceinline__ T* pointer(uint64_t address) { return reinterpret_cast<T*>(address); }
__device__ __forceinline__ double bits(uint64_t x) { return __longlong_as_double((long long)x); }

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double sub(double a, double b) { return __dsub_rn(a, b); }
__device__ __forceinline__ double quotient(double a, double b) { return __ddiv_rn(a, b); }
__device__ __forceinline__ double root(double a) { return __dsqrt_rn(a); }

__device__ __forceinline__ const Coefficients<float>& coefficients(const Control* control, float) {
  return control->narrow;
}
__device__ __forceinline__ const Coefficients<double>& coefficients(const Control* control, double) {
  return control->wide;
}

// Element type, type of the arithmetic and the moments, elements per 16 bytes.
template <class T> struct Kind {
  using Compute = float;
  static constexpr int PACK = 16 / sizeof(T);
  static constexpr bool HAS_MASTER = sizeof(T) == 2;
  static __device__ __forceinline__ float widen(T x) { return to_f32(x); }
  static __device__ __forceinline__ T narrow(float x) { return from_f32<T>(x); }
};
template <> struct Kind<double> {
  using Compute = double;
  static constexpr int PACK = 2;
  static constexpr bool HAS_MASTER = false;
  static __device__ __forceinline__ double widen(double x) { return x; }
  static __device__ __forceinline__ double narrow(double x) { return x; }
};

__device__ __forceinline__ bool same_bits(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __bfloat16_as_ushort(a) == __bfloat16_as_ushort(b);
}
__device__ __forceinline__ bool same_bits(__half a, __half b) { return __half_as_ushort(a) == __half_as_ushort(b); }

// Returns the new theta; updates the moments in place.
template <class C> __device__ __forceinline__ C step(const Coefficients<C>& c, C theta, C grad, C& m, C& v) {
  const C g = mul(grad, c.clip);
  m = add(mul(m, c.beta1), mul(g, c.one_minus_beta1));
  v = add(mul(v, c.beta2), mul(mul(g, g), c.one_minus_beta2));
  const C adjusted = quotient(mul(m, c.correction1), add(root(mul(v, c.correction2)), c.eps));
  return sub(mul(theta, c.decay), mul(adjusted, c.lr));
}
