// The functions behind activations and their slopes: those of base/activation/mod.rs, in f32. A NaN stays NaN.
//
// A kernel is compiled for one activation, so that its code is short. Exponentials and reciprocals are the chip's own. With
// u = 2^-24, the exponential of -a is off by at most (4 + 1.3 a) u of itself (2 ulp, and the rounded product with log2 e), a
// reciprocal by 2 u. A sigmoid is then off by at most (8 + 1.3 |x|) u of itself where x < 0, and by 6 u where x > 0, since
// a / (1 + e^a) is below 0.28. So for |x| < 16 everything is within 30 u, a hundredth of what rounding to f16 takes; farther
// out a sigmoid is below 1.2e-7, and results below 2^-126 are 0.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

enum Curve : uint32_t { GELU, QUICK_GELU, RELU, SQUARED_RELU, SILU, SIGMOID, GELU_ERF };

constexpr double SQRT_2_OVER_PI = 0.7978845608028654;
constexpr double CUBIC = 0.044715;
constexpr double LOG2_E = 1.4426950408889634;

// 1 / (1 + e^-x) and its slope, with an exponential that cannot overflow.
struct Sigmoid {
  float value, slope;
};
__device__ __forceinline__ Sigmoid sigmoid(float x) {
  const float e = exp2_approximate(__fmul_rn(fabsf(x), (float)-LOG2_E));
  const float d = reciprocal_approximate(__fadd_rn(1.0f, e));
  const float small = __fmul_rn(e, d);
  return {x < 0.0f ? small : d, __fmul_rn(small, d)};
}

// x between the limits, where a slope is multiplied by it that is 0 beyond them: an infinite x would give NaN.
__device__ __forceinline__ float bounded(float x, float limit) { return fmaxf(fminf(x, limit), -limit); }

// GELU in its tanh approximation: x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
__device__ __forceinline__ Sigmoid sigmoid_of_2u(float x) {
  constexpr float LINEAR_TERM = (float)(2.0 * SQRT_2_OVER_PI);
  constexpr float CUBIC_TERM = (float)(2.0 * SQRT_2_OVER_PI * CUBIC);
  return sigmoid(__fmul_rn(fmaf(__fmul_rn(x, x), CUBIC_TERM, LINEAR_TERM), x));
}

// With s the sigmoid at -2 u(|x|): s - |x| s (1 - s) d(2 u) / dx where x < 0, and 1 minus that where x > 0. Beyond 32 it is 0 or 1.
__device__ __forceinline__ float gelu_slope(float x) {
  constexpr double LINEAR_TERM = 2.0 * SQRT_2_OVER_PI, CUBIC_TERM = LINEAR_TERM * CUBIC;
  const float a = least(fabsf(x), 32.0f), square = __fmul_rn(a, a);
  const float e = exp2_approximate(__fmul_rn(fmaf(square, (float)(-LOG2_E * CUBIC_TERM), (float)(-LOG2_E * LINEAR_TERM)), a));
  const float d = reciprocal_approximate(__fadd_rn(1.0f, e));
  const float small = __fmul_rn(e, d);
  const float rise = __fmul_rn(fmaf(square, (float)(3.0 * CUBIC_TERM), (float)LINEAR_TERM), a);  // a * d(2 u) / da
  const float of_negative = fmaf(-__fmul_rn(small, d), rise, small);
  return x < 0.0f ? of_negative : __fsub_rn(1.0f, of_negative);
}

// The distribution of a normal variable and e^(-x^2 / 2).
struct Normal {
  float distribution, exponential;
};
// Phi(-|x|) = t P(t) e^(-x^2 / 2), t = 1 / (1 + 0.26 |x|), with the polynomial of base/activation/erf.rs, whose relative error is
// below 6e-8. The two roundings of the exponent add x^2 u.
__device__ __forceinline__ Normal normal(float x) {
  const float e = exp2_approximate(__fmul_rn(__fmul_rn(x, x), (float)(-0.5 * LOG2_E)));
  const float t = reciprocal_approximate(fmaf(0.26f, fabsf(x), 1.0f));
  float p = 0.03089622f;
  p = fmaf(p, t, -0.15474083f);
  p = fmaf(p, t, 0.2554678f);
  p = fmaf(p, t, -0.15553722f);
  p = fmaf(p, t, 0.16415332f);
  p = fmaf(p, t, 0.04964213f);
  p = fmaf(p, t, 0.103391424f);
  p = fmaf(p, t, 0.10296492f);
  p = fmaf(p, t, 0.103762195f);
  const float tail = __fmul_rn(__fmul_rn(p, t), e);
  return {x < 0.0f ? tail : __fsub_rn(1.0f, tail), e};
}

// GELU by the error function: x times the distribution of a normal variable.
__device__ __forceinline__ float gelu_erf_slope(float x) {
  const Normal n = normal(x);
  return fmaf(bounded(x, 40.0f), __fmul_rn(0.398942280f, n.exponential), n.distribution);
}

// sigmoid(x) + x sigmoid'(x)
__device__ __forceinline__ float silu_slope(float x) {
  const Sigmoid s = sigmoid(x);
  return fmaf(bounded(x, 128.0f), s.slope, s.value);
}

__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

template <uint32_t CURVE> __device__ __forceinline__ float curve_value(float x) {
  if constexpr (CURVE == GELU) return __fmul_rn(x, sigmoid_of_2u(x).value);
  if constexpr (CURVE == GELU_ERF) return __fmul_rn(x, normal(x).distribution);
  if constexpr (CURVE == QUICK_GELU) return __fmul_rn(x, sigmoid(__fmul_rn(x, 1.702f)).value);
  if constexpr (CURVE == RELU) return relu(x);
  if constexpr (CURVE == SQUARED_RELU) return __fmul_rn(relu(x), relu(x));
  if constexpr (CURVE == SILU) return __fmul_rn(x, sigmoid(x).value);
  if constexpr (CURVE == SIGMOID) return sigmoid(x).value;
}

template <uint32_t CURVE> __device__ __forceinline__ float curve_slope(float x) {
  if constexpr (CURVE == GELU) return gelu_slope(x);
  if constexpr (CURVE == GELU_ERF) return gelu_erf_slope(x);
  if constexpr (CURVE == QUICK_GELU) return silu_slope(__fmul_rn(x, 1.702f));
  if constexpr (CURVE == RELU) return x > 0.0f ? 1.0f : 0.0f;
  if constexpr (CURVE == SQUARED_RELU) return __fadd_rn(relu(x), relu(x));
  if constexpr (CURVE == SILU) return silu_slope(x);
  if constexpr (CURVE == SIGMOID) return sigmoid(x).slope;
}

// Where an activation reads: `gate` and, if it is gated, `value`; rows are `pitch` elements apart, so that both may be halves of
// one tensor.
template <class T, uint32_t CURVE, bool GATED> struct Activation {
  const T *gate, *value;
  uint64_t pitch;

  // What is read for N results from (row, col) on; the value only if it is needed.
  template <int N> struct Read {
    Pack<T, N> gate, value;
  };
  template <int N> __device__ __forceinline__ Read<N> read(uint64_t row, uint64_t col, bool needs_value = true) const {
    Read<N> read;
    read.gate = load_pack<N>(gate + row * pitch + col);
    if constexpr (GATED) {
      if (needs_value) read.value = load_pack<N>(value + row * pitch + col);
    }
    return read;
  }

  // The results, not rounded yet.
  template <int N> __device__ __forceinline__ void results(const Read<N>& read, float (&v)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i++) {
      v[i] = curve_value<CURVE>(to_f32(read.gate.v[i]));
      if constexpr (GATED) v[i] = __fmul_rn(v[i], to_f32(read.value.v[i]));
    }
  }

  // Turns gradients of the results into gradients of the gate, in place.
  template <int N> __device__ __forceinline__ void gate_gradients(const Read<N>& read, float (&grad)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if constexpr (GATED) grad[i] = __fmul_rn(grad[i], to_f32(read.value.v[i]));
      grad[i] = __fmul_rn(grad[i], curve_slope<CURVE>(to_f32(read.gate.v[i])));
    }
  }

  // The same for the value.
  template <int N> __device__ __forceinline__ void value_gradients(const Read<N>& read, float (&grad)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i++) grad[i] = __fmul_rn(grad[i], curve_value<CURVE>(to_f32(read.gate.v[i])));
  }
};

// Defines kernels for each activation: DEFINE(name, curve, gated, ...). Names are those of base/activation/mod.rs.
#define FP8_FOR_ACTIVATIONS(DEFINE, ...)             \
  DEFINE(gelu, GELU, false, __VA_ARGS__)             \
  DEFINE(gelu_erf, GELU_ERF, false, __VA_ARGS__)     \
  DEFINE(qgelu, QUICK_GELU, false, __VA_ARGS__)      \
  DEFINE(relu, RELU, false, __VA_ARGS__)             \
  DEFINE(srelu, SQUARED_RELU, false, __VA_ARGS__)    \
  DEFINE(silu, SILU, false, __VA_ARGS__)             \
  DEFINE(glu, SIGMOID, true, __VA_ARGS__)            \
  DEFINE(geglu, GELU, true, __VA_ARGS__)             \
  DEFINE(geglu_erf, GELU_ERF, true, __VA_ARGS__)     \
  DEFINE(qgeglu, QUICK_GELU, true, __VA_ARGS__)      \
  DEFINE(reglu, RELU, true, __VA_ARGS__)             \
  DEFINE(sreglu, SQUARED_RELU, true, __VA_ARGS__)    \
  DEFINE(swiglu, SILU, true, __VA_ARGS__)
