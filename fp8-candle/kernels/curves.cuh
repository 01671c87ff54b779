// The functions behind activations and their slopes: those of base/activation/mod.rs, in f32. A NaN stays NaN.
#pragma once
#include "common.cuh"

enum Curve : uint32_t { GELU = 0, QUICK_GELU = 1, RELU = 2, SQUARED_RELU = 3, SILU = 4, SIGMOID = 5, GELU_ERF = 6 };

constexpr double SQRT_2_OVER_PI = 0.7978845608028654;
constexpr double CUBIC = 0.044715;

// 1 / (1 + e^-x) and its slope, with an exponential that cannot overflow.
struct Sigmoid {
  float value, slope;
};
__device__ __forceinline__ Sigmoid sigmoid(float x) {
  const float e = expf(-fabsf(x));
  const float d = __frcp_rn(__fadd_rn(1.0f, e));
  const float small = __fmul_rn(e, d);
  return {x < 0.0f ? small : d, __fmul_rn(small, d)};
}

__device__ __forceinline__ float bounded(float x, float limit) {
  x = x > limit ? limit : x;
  return x < -limit ? -limit : x;
}

// GELU in its tanh approximation: x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
__device__ __forceinline__ Sigmoid sigmoid_of_2u(float x) {
  constexpr float LINEAR_TERM = (float)(2.0 * SQRT_2_OVER_PI);
  constexpr float CUBIC_TERM = (float)(2.0 * SQRT_2_OVER_PI * CUBIC);
  return sigmoid(fmaf(__fmul_rn(x, x), CUBIC_TERM, LINEAR_TERM) * x);
}

__device__ __forceinline__ float gelu(float x) { return x * sigmoid_of_2u(x).value; }

__device__ __forceinline__ float gelu_slope(float x) {
  constexpr float LINEAR_TERM = (float)(2.0 * SQRT_2_OVER_PI);
  constexpr float CUBIC_TERM = (float)(6.0 * SQRT_2_OVER_PI * CUBIC);
  // The slope reaches 0 and 1 well within the limits; beyond them it would be Inf * 0.
  x = bounded(x, 32.0f);
  const Sigmoid s = sigmoid_of_2u(x);
  const float du = fmaf(__fmul_rn(x, x), CUBIC_TERM, LINEAR_TERM) * x;  // x * d(2 u) / dx
  return fmaf(s.slope, du, s.value);
}

// GELU by the error function: x times the distribution of a normal variable.
__device__ __forceinline__ float gelu_erf_slope(float x) {
  // An infinite x would give Inf * 0.
  x = bounded(x, 40.0f);
  return fmaf(x, 0.398942280f * expf(-0.5f * __fmul_rn(x, x)), normcdff(x));
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x).value; }

__device__ __forceinline__ float silu_slope(float x) {
  // 1 - sigmoid(x) without cancellation; beyond the limits it would be Inf * 0.
  const float within = bounded(x, 128.0f);
  return sigmoid(x).value * fmaf(within, sigmoid(-within).value, 1.0f);
}

__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

// Calls f for each element, with one branch for all: the curve is the same for every thread of a launch.
template <int N, class F> __device__ __forceinline__ void each(float (&v)[N], F f) {
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = f(v[i]);
}

template <int N> __device__ __forceinline__ void curve_values(uint32_t curve, float (&v)[N]) {
  switch (curve) {
    case GELU: each(v, [](float x) { return gelu(x); }); break;
    case GELU_ERF: each(v, [](float x) { return x * normcdff(x); }); break;
    case QUICK_GELU: each(v, [](float x) { return x * sigmoid(x * 1.702f).value; }); break;
    case RELU: each(v, [](float x) { return relu(x); }); break;
    case SQUARED_RELU: each(v, [](float x) { return relu(x) * relu(x); }); break;
    case SILU: each(v, [](float x) { return silu(x); }); break;
    default: each(v, [](float x) { return sigmoid(x).value; });
  }
}

template <int N> __device__ __forceinline__ void curve_slopes(uint32_t curve, float (&v)[N]) {
  switch (curve) {
    case GELU: each(v, [](float x) { return gelu_slope(x); }); break;
    case GELU_ERF: each(v, [](float x) { return gelu_erf_slope(x); }); break;
    case QUICK_GELU: each(v, [](float x) { return silu_slope(x * 1.702f); }); break;
    case RELU: each(v, [](float x) { return x > 0.0f ? 1.0f : 0.0f; }); break;
    case SQUARED_RELU: each(v, [](float x) { return relu(x) + relu(x); }); break;
    case SILU: each(v, [](float x) { return silu_slope(x); }); break;
    default: each(v, [](float x) { return sigmoid(x).slope; });
  }
}

// What an activation reads: `gate` and, if it is gated, `value`, which is null otherwise; rows are `pitch` elements apart, so
// that both may be halves of one tensor.
template <class T> struct Activation {
  const T *gate, *value;
  uint64_t pitch;
  uint32_t curve;

  // N results from (row, col) on, not rounded yet.
  template <int N> __device__ __forceinline__ void results(uint64_t row, uint64_t col, float (&v)[N]) const {
    load_f32(gate + row * pitch + col, v);
    curve_values(curve, v);
    if (value == nullptr) return;
    float up[N];
    load_f32(value + row * pitch + col, up);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] *= up[i];
  }

  // Turns gradients of the results into gradients of the gate, in place.
  template <int N> __device__ __forceinline__ void gate_gradients(uint64_t row, uint64_t col, float (&grad)[N]) const {
    float v[N];
    if (value != nullptr) {
      load_f32(value + row * pitch + col, v);
#pragma unroll
      for (int i = 0; i < N; i++) grad[i] *= v[i];
    }
    load_f32(gate + row * pitch + col, v);
    curve_slopes(curve, v);
#pragma unroll
    for (int i = 0; i < N; i++) grad[i] *= v[i];
  }

  // The same for the value.
  template <int N> __device__ __forceinline__ void value_gradients(uint64_t row, uint64_t col, float (&grad)[N]) const {
    float v[N];
    load_f32(gate + row * pitch + col, v);
    curve_values(curve, v);
#pragma unroll
    for (int i = 0; i < N; i++) grad[i] *= v[i];
  }
};
