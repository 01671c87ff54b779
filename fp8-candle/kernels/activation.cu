// Activations, gated or not, and their gradients, computed in f32 and rounded once.
#include "curves.cuh"

// Calls f(row, col, Count<n>) for parts of a matrix: chunks of 8 where rows are aligned, otherwise single elements.
template <int N> struct Count {
  static constexpr int value = N;
};
template <class F> __device__ __forceinline__ void for_parts(uint64_t rows, uint64_t cols, bool vec, F f) {
  constexpr int CHUNK = 8;
  const uint64_t chunks = vec ? cols / CHUNK : cols;
  for (uint64_t i = global_thread(); i < rows * chunks; i += global_threads()) {
    const uint64_t row = i / chunks, chunk = i - row * chunks;
    if (vec) {
      f(row, chunk * CHUNK, Count<CHUNK>{});
    } else {
      f(row, chunk, Count<1>{});
    }
  }
}

// Whether chunks of 8 lie at multiples of 16 bytes.
__device__ __forceinline__ bool whole_chunks(uint64_t cols, uint64_t pitch) { return cols % 8 == 0 && pitch % 8 == 0; }

// y [rows, cols].
template <class A, class T>
__device__ __forceinline__ void forward(const A& a, T* __restrict__ y, uint64_t rows, uint64_t cols) {
  const bool vec = whole_chunks(cols, a.pitch) && aligned16(a.gate) && aligned16(a.value) && aligned16(y);
  for_parts(rows, cols, vec, [&](uint64_t row, uint64_t col, auto count) {
    constexpr int N = decltype(count)::value;
    float v[N];
    a.results(a.template read<N>(row, col), v);
    store_f32(y + row * cols + col, v);
  });
}

// grad [rows, cols]; dgate and dvalue (if gated) have the pitch of gate and value.
template <bool GATED, class A, class T>
__device__ __forceinline__ void backward(const A& a, const T* __restrict__ grad, T* __restrict__ dgate,
                                         T* __restrict__ dvalue, uint64_t rows, uint64_t cols) {
  const bool vec = whole_chunks(cols, a.pitch) && aligned16(a.gate) && aligned16(a.value) && aligned16(grad) &&
                   aligned16(dgate) && aligned16(dvalue);
  for_parts(rows, cols, vec, [&](uint64_t row, uint64_t col, auto count) {
    constexpr int N = decltype(count)::value;
    const auto read = a.template read<N>(row, col);
    float g[N], d[N];
    load_f32(grad + row * cols + col, g);
#pragma unroll
    for (int i = 0; i < N; i++) d[i] = g[i];
    a.gate_gradients(read, g);
    if constexpr (GATED) {
      a.value_gradients(read, d);
      store_f32(dvalue + row * a.pitch + col, d);
    }
    store_f32(dgate + row * a.pitch + col, g);
  });
}

#define DEFINE_ACTIVATION(ACT, CURVE, GATED, T, NAME)                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      fp8_activation_##ACT##_##NAME(const T* gate, const T* value, T* y, uint64_t rows, uint64_t cols, uint64_t pitch) {\
    forward(Activation<T, CURVE, GATED>{gate, value, pitch}, y, rows, cols);                                           \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      fp8_activation_backward_##ACT##_##NAME(const T* gate, const T* value, const T* grad, T* dgate, T* dvalue, uint64_t rows,\
                                  uint64_t cols, uint64_t pitch) {                                                     \
    backward<GATED>(Activation<T, CURVE, GATED>{gate, value, pitch}, grad, dgate, dvalue, rows, cols);                 \
  }
#define DEFINE(T, NAME) FP8_FOR_ACTIVATIONS(DEFINE_ACTIVATION, T, NAME)
FP8_FOR_FLOATS(DEFINE)
