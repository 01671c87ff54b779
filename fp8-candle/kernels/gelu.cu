// GELU in its tanh approximation: x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
#include "rows.cuh"

constexpr double SQRT_2_OVER_PI = 0.7978845608028654;
constexpr double CUBIC = 0.044715;

// sigmoid(2 u) and its derivative with respect to 2 u, with an exponential that cannot overflow.
struct Sigmoid {
  float value, slope;
};
__device__ __forceinline__ Sigmoid sigmoid_of_2u(float x) {
  constexpr float LINEAR_TERM = (float)(2.0 * SQRT_2_OVER_PI);
  constexpr float CUBIC_TERM = (float)(2.0 * SQRT_2_OVER_PI * CUBIC);
  const float v = fmaf(__fmul_rn(x, x), CUBIC_TERM, LINEAR_TERM) * x;
  const float e = expf(-fabsf(v));
  const float d = __frcp_rn(__fadd_rn(1.0f, e));
  const float small = __fmul_rn(e, d);
  return {v < 0.0f ? small : d, __fmul_rn(small, d)};
}

__device__ __forceinline__ float gelu(float x) { return x * sigmoid_of_2u(x).value; }

__device__ __forceinline__ float gelu_derivative(float x) {
  constexpr float LIMIT = 32.0f;
  constexpr float LINEAR_TERM = (float)(2.0 * SQRT_2_OVER_PI);
  constexpr float CUBIC_TERM = (float)(6.0 * SQRT_2_OVER_PI * CUBIC);
  // The derivative reaches 0 and 1 well within the limits; beyond them it would be Inf * 0. NaN passes the comparisons.
  x = x > LIMIT ? LIMIT : x;
  x = x < -LIMIT ? -LIMIT : x;
  const Sigmoid sigmoid = sigmoid_of_2u(x);
  const float du = fmaf(__fmul_rn(x, x), CUBIC_TERM, LINEAR_TERM) * x;  // x * d(2 u) / dx
  return fmaf(sigmoid.slope, du, sigmoid.value);
}

// All threads of the grid, as the group of one row with all elements.
struct Grid {
  static __device__ __forceinline__ uint64_t thread() { return global_thread(); }
  static __device__ __forceinline__ uint64_t threads() { return global_threads(); }
};

template <class T> __device__ __forceinline__ void gelu_forward(const T* __restrict__ x, T* __restrict__ y, uint64_t n) {
  for_parts(Grid{}, n, aligned16(x) && aligned16(y), [&](uint64_t first, auto count) {
    float v[decltype(count)::value];
    load_f32(x + first, v);
#pragma unroll
    for (float& e : v) e = gelu(e);
    store_f32(y + first, v);
  });
}

template <class T>
__device__ __forceinline__ void gelu_backward(const T* __restrict__ x, const T* __restrict__ grad, T* __restrict__ dx,
                                              uint64_t n) {
  for_parts(Grid{}, n, aligned16(x) && aligned16(grad) && aligned16(dx), [&](uint64_t first, auto count) {
    constexpr int N = decltype(count)::value;
    float v[N], g[N];
    load_f32(x + first, v);
    load_f32(grad + first, g);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = g[i] * gelu_derivative(v[i]);
    store_f32(dx + first, v);
  });
}

#define DEFINE(T, suffix)                                                                             \
  extern "C" __global__ void __launch_bounds__(256) fp8_gelu_##suffix(const T* x, T* y, uint64_t n) { \
    gelu_forward(x, y, n);                                                                            \
  }                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256)                                                   \
      fp8_gelu_backward_##suffix(const T* x, const T* grad, T* dx, uint64_t n) {                      \
    gelu_backward(x, grad, dx, n);                                                                    \
  }
FP8_FOR_FLOATS(DEFINE)
