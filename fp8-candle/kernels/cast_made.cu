// Casts of matrices that are computed for the cast alone: results of norms and activations, gradients of activations. Only
// their codes, the largest magnitude and, if asked for, the sums over rows (for the gradient of a bias) are written. Values
// are rounded to the element type first, so the codes equal those of a cast that reads the matrix.
#include "cast_tiles.cuh"
#include "curves.cuh"

// A norm, by the statistics (mean, 1 / std) of rows; `bias` may be null. As in norm.cu.
template <class T> struct Normed {
  struct Columns {
    Pack<T, 16> weight, bias;
  };
  struct Row {
    Pack<T, 16> x;
    float2 statistics;
  };
  // Fewer than of other sources: weight and bias take registers.
  static constexpr int ROWS = rows_at_once<T>(2);
  const T *x, *weight, *bias;
  const float2* statistics;
  uint64_t cols;

  __device__ __forceinline__ Columns columns(uint64_t col) const {
    Columns columns;
    columns.weight = load_pack<16>(weight + col);
    if (bias != nullptr) columns.bias = load_pack<16>(bias + col);
    return columns;
  }
  __device__ __forceinline__ Row read(uint64_t row, uint64_t col) const {
    return {load_pack<16>(x + row * cols + col), statistics[row]};
  }
  __device__ __forceinline__ void values(const Row& read, const Columns& columns, uint64_t, float (&v)[16]) const {
    const float2 m = read.statistics;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float w = to_f32(columns.weight.v[i]), centered = (to_f32(read.x.v[i]) - m.x) * m.y;
      v[i] = bias != nullptr ? fmaf(centered, w, to_f32(columns.bias.v[i])) : centered * w;
    }
    round_to<T>(v);
  }
};

// Blocks of a multiprocessor that share its registers, in kernels whose threads read two tensors and compute much. A thread then has
// one row of 16-bit elements at a time, and what three blocks read is under way beside what they compute.
template <class T> constexpr int BLOCKS_OF_TWO_READS = sizeof(T) == 2 ? 3 : 2;

template <class T, uint32_t CURVE, bool GATED> struct Activated {
  struct Columns {};
  using Row = typename Activation<T, CURVE, GATED>::template Read<16>;
  static constexpr int ROWS = GATED ? 1 : rows_at_once<T>(1);
  Activation<T, CURVE, GATED> activation;
  __device__ __forceinline__ Columns columns(uint64_t) const { return {}; }
  __device__ __forceinline__ Row read(uint64_t row, uint64_t col) const {
    return activation.template read<16>(row, col);
  }
  __device__ __forceinline__ void values(const Row& read, const Columns&, uint64_t, float (&v)[16]) const {
    activation.results(read, v);
    round_to<T>(v);
  }
};

// The gradient of what an activation reads: of a gate alone, or of gate and value side by side. `grad` has `n` columns.
template <class T, uint32_t CURVE, bool GATED> struct ActivationGradient {
  struct Columns {};
  struct Row {
    Pack<T, 16> grad;
    typename Activation<T, CURVE, GATED>::template Read<16> of;
  };
  static constexpr int ROWS = 1;
  Activation<T, CURVE, GATED> activation;
  const T* grad;
  uint64_t n;
  __device__ __forceinline__ Columns columns(uint64_t) const { return {}; }
  __device__ __forceinline__ Row read(uint64_t row, uint64_t col) const {
    const bool of_gate = !GATED || col < n;
    const uint64_t at = of_gate ? col : col - n;
    // The gradient of the value does not depend on the value.
    return {load_pack<16>(grad + row * n + at), activation.template read<16>(row, at, of_gate)};
  }
  __device__ __forceinline__ void values(const Row& read, const Columns&, uint64_t col, float (&v)[16]) const {
    to_f32(read.grad, v);
    if (!GATED || col < n) {
      activation.gate_gradients(read.of, v);
    } else {
      activation.value_gradients(read.of, v);
    }
    round_to<T>(v);
  }
};

template <class Source>
__device__ __forceinline__ void cast(const Source& source, const float* quant_scale, const CastTo& to, uint64_t rows,
                                     uint64_t cols, bool e5m2) {
  __shared__ Tile tile;
  const OneScale one{quant_scale};
  if (e5m2)
    cast_tiles<true>(source, one, to, rows, cols, tile);
  else
    cast_tiles<false>(source, one, to, rows, cols, tile);
}

#define DEFINE(T, NAME)                                                                                                \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)                                                        \
      fp8_cast_stored_##NAME(const T* x, const float* quant_scale, uint8_t* codes, uint8_t* transposed, uint32_t* amax,\
                             float* sums, uint64_t rows, uint64_t cols, uint32_t e5m2) {                               \
    cast(Stored<T>{x, cols}, quant_scale, CastTo{codes, transposed, amax, sums, true}, rows, cols, e5m2 != 0);         \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)                                                        \
      fp8_cast_norm_##NAME(const T* x, const T* weight, const T* bias, const float2* statistics,                       \
                           const float* quant_scale, uint8_t* codes, uint8_t* transposed, uint32_t* amax, float* sums, \
                           uint64_t rows, uint64_t cols, uint32_t e5m2) {                                              \
    cast(Normed<T>{x, weight, bias, statistics, cols}, quant_scale, CastTo{codes, transposed, amax, sums, true}, rows, cols,\
         e5m2 != 0);                                                                                                   \
  }                                                                                                                    \
  FP8_FOR_ACTIVATIONS(DEFINE_ACTIVATION, T, NAME)

#define DEFINE_ACTIVATION(ACT, CURVE, GATED, T, NAME)                                                                  \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS, GATED ? BLOCKS_OF_TWO_READS<T> : 2)                       \
      fp8_cast_activation_##ACT##_##NAME(const T* gate, const T* value, uint64_t pitch, const float* quant_scale,      \
                                uint8_t* codes, uint8_t* transposed, uint32_t* amax, float* sums, uint64_t rows,       \
                                uint64_t cols, uint32_t e5m2) {                                                        \
    cast(Activated<T, CURVE, GATED>{{gate, value, pitch}}, quant_scale, CastTo{codes, transposed, amax, sums, true}, rows, cols,\
         e5m2 != 0);                                                                                                   \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS, BLOCKS_OF_TWO_READS<T>)                                   \
      fp8_cast_activation_gradient_##ACT##_##NAME(const T* gate, const T* value, uint64_t pitch, const T* grad, uint64_t n,\
                                         const float* quant_scale, uint8_t* codes, uint8_t* transposed,                \
                                         uint32_t* amax, float* sums, uint64_t rows, uint64_t cols, uint32_t e5m2) {   \
    cast(ActivationGradient<T, CURVE, GATED>{{gate, value, pitch}, grad, n}, quant_scale,                              \
         CastTo{codes, transposed, amax, sums, true}, rows, cols, e5m2 != 0);                                          \
  }
FP8_FOR_FLOATS(DEFINE)
