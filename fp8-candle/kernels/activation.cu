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
template <class T>
__device__ __forceinline__ void forward(const Activation<T>& a, T* __restrict__ y, uint64_t rows, uint64_t cols) {
  const bool vec = whole_chunks(cols, a.pitch) && aligned16(a.gate) && aligned16(a.value) && aligned16(y);
  for_parts(rows, cols, vec, [&](uint64_t row, uint64_t col, auto count) {
    float v[decltype(count)::value];
    a.results(row, col, v);
    store_f32(y + row * cols + col, v);
  });
}

// grad [rows, cols]; dgate and dvalue (null if not gated) have the pitch of gate and value.
template <class T>
__device__ __forceinline__ void backward(const Activation<T>& a, const T* __restrict__ grad, T* __restrict__ dgate,
                                         T* __restrict__ dvalue, uint64_t rows, uint64_t cols) {
  const bool vec = whole_chunks(cols, a.pitch) && aligned16(a.gate) && aligned16(a.value) && aligned16(grad) &&
                   aligned16(dgate) && aligned16(dvalue);
  for_parts(rows, cols, vec, [&](uint64_t row, uint64_t col, auto count) {
    constexpr int N = decltype(count)::value;
    float g[N];
    load_f32(grad + row * cols + col, g);
    if (dvalue != nullptr) {
      float d[N];
#pragma unroll
      for (int i = 0; i < N; i++) d[i] = g[i];
      a.value_gradients(row, col, d);
      store_f32(dvalue + row * a.pitch + col, d);
    }
    a.gate_gradients(row, col, g);
    store_f32(dgate + row * a.pitch + col, g);
  });
}

#define DEFINE(T, suffix)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      fp8_activation_##suffix(const T* gate, const T* value, T* y, uint64_t rows, uint64_t cols, uint64_t pitch,       \
                              uint32_t curve) {                                                                        \
    forward(Activation<T>{gate, value, pitch, curve}, y, rows, cols);                                                  \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      fp8_activation_backward_##suffix(const T* gate, const T* value, const T* grad, T* dgate, T* dvalue,              \
                                       uint64_t rows, uint64_t cols, uint64_t pitch, uint32_t curve) {                 \
    backward(Activation<T>{gate, value, pitch, curve}, grad, dgate, dvalue, rows, cols);                               \
  }
FP8_FOR_FLOATS(DEFINE)
