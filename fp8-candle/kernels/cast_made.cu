// Casts of matrices that are computed for the cast alone: results of norms and activations, gradients of activations. Only
// their codes, the largest magnitude and, if asked for, the sums over rows (for the gradient of a bias) are written. Values
// are rounded to the element type first, so the codes equal those of a cast that reads the matrix.
#include "cast_tiles.cuh"
#include "curves.cuh"

// A norm, by the statistics (mean, 1 / std) of rows; `bias` may be null. As in norm.cu.
template <class T> struct Normed {
  const T *x, *weight, *bias;
  const float2* statistics;
  uint64_t cols;

  __device__ __forceinline__ void load(uint64_t row, uint64_t col, float (&v)[16]) const {
    const float2 m = statistics[row];
    float w[16];
    load_f32<16>(x + row * cols + col, v);
    load_f32<16>(weight + col, w);
    if (bias != nullptr) {
      float b[16];
      load_f32<16>(bias + col, b);
#pragma unroll
      for (int i = 0; i < 16; i++) v[i] = fmaf((v[i] - m.x) * m.y, w[i], b[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 16; i++) v[i] = (v[i] - m.x) * m.y * w[i];
    }
    round_to<T>(v);
  }
};

template <class T> struct Activated {
  Activation<T> activation;
  __device__ __forceinline__ void load(uint64_t row, uint64_t col, float (&v)[16]) const {
    activation.results(row, col, v);
    round_to<T>(v);
  }
};

// The gradient of what an activation reads: of a gate alone, or of gate and value side by side. `grad` has `n` columns.
template <class T> struct ActivationGradient {
  Activation<T> activation;
  const T* grad;
  uint64_t n;
  __device__ __forceinline__ void load(uint64_t row, uint64_t col, float (&v)[16]) const {
    const bool of_gate = col < n;
    const uint64_t at = of_gate ? col : col - n;
    load_f32<16>(grad + row * n + at, v);
    if (of_gate) {
      activation.gate_gradients(row, at, v);
    } else {
      activation.value_gradients(row, at, v);
    }
    round_to<T>(v);
  }
};

template <class Source>
__device__ __forceinline__ void cast(const Source& source, const float* quant_scale, const CastTo& to, uint64_t rows,
                                     uint64_t cols, bool e5m2) {
  __shared__ Tile tile;
  if (e5m2)
    cast_tiles<true>(source, quant_scale, to, rows, cols, false, tile);
  else
    cast_tiles<false>(source, quant_scale, to, rows, cols, false, tile);
}

#define DEFINE(T, NAME)                                                                                                \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS)                                                           \
      fp8_cast_stored_##NAME(const T* x, const float* quant_scale, uint8_t* codes, uint8_t* transposed, uint32_t* amax, \
                             float* sums, uint64_t rows, uint64_t cols, uint32_t e5m2) {                               \
    cast(Stored<T>{x, cols}, quant_scale, CastTo{codes, transposed, amax, sums}, rows, cols, e5m2 != 0);               \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS)                                                           \
      fp8_cast_norm_##NAME(const T* x, const T* weight, const T* bias, const float2* statistics,                       \
                           const float* quant_scale, uint8_t* codes, uint8_t* transposed, uint32_t* amax, float* sums, \
                           uint64_t rows, uint64_t cols, uint32_t e5m2) {                                              \
    cast(Normed<T>{x, weight, bias, statistics, cols}, quant_scale, CastTo{codes, transposed, amax, sums}, rows, cols, \
         e5m2 != 0);                                                                                                   \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS)                                                           \
      fp8_cast_activation_##NAME(const T* gate, const T* value, uint64_t pitch, uint32_t curve,                        \
                                 const float* quant_scale, uint8_t* codes, uint8_t* transposed, uint32_t* amax,        \
                                 float* sums, uint64_t rows, uint64_t cols, uint32_t e5m2) {                           \
    cast(Activated<T>{{gate, value, pitch, curve}}, quant_scale, CastTo{codes, transposed, amax, sums}, rows, cols,    \
         e5m2 != 0);                                                                                                   \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS)                                                           \
      fp8_cast_activation_gradient_##NAME(const T* gate, const T* value, uint64_t pitch, uint32_t curve,               \
                                          const T* grad, uint64_t n, const float* quant_scale, uint8_t* codes,         \
                                          uint8_t* transposed, uint32_t* amax, float* sums, uint64_t rows,             \
                                          uint64_t cols, uint32_t e5m2) {                                              \
    cast(ActivationGradient<T>{{gate, value, pitch, curve}, grad, n}, quant_scale,                                     \
         CastTo{codes, transposed, amax, sums}, rows, cols, e5m2 != 0);                                                \
  }
FP8_FOR_FLOATS(DEFINE)
