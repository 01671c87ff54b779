// Rows rounded to the values of their FP8 codes, each under a scale of its own, as bf16, in which these are exact: operands of attention whose
// codes nothing else reads.
#include "nearest.cuh"

// Values of a thread, and threads of a row.
constexpr int VALUES = 8, LANES = 16;

// x: `rows` rows of at most 128 values, a multiple of 8, which begin at multiples of 16 bytes; of three outer dimensions the sizes of the
// last two and all strides. out: contiguous.
template <class T>
__device__ __forceinline__ void round_rows(const T* x, __nv_bfloat16* out, uint64_t rows, uint64_t middle, uint64_t last,
                                           uint64_t stride0, uint64_t stride1, uint64_t stride2, int cols, const Steps& format) {
  // Where a row begins. Divisions of 64 bits take many instructions.
  const auto place = [&](auto row) {
    using Number = decltype(row);
    const Number outer = row / (Number)last, inner = row - outer * (Number)last, first = outer / (Number)middle;
    return first * stride0 + (outer - first * (Number)middle) * stride1 + inner * stride2;
  };
  const int col = threadIdx.x % LANES * VALUES;
  const uint64_t row = global_thread() / LANES;
  const bool valid = row < rows && col < cols;
  float v[VALUES] = {};
  if (valid) load_f32(x + (rows >> 32 ? place(row) : place((uint32_t)row)) + col, v);
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < VALUES; i++) amax = max(amax, magnitude_bits(v[i]));
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset >>= 1) amax = max(amax, __shfl_xor_sync(ALL_LANES, amax, offset));
  // Powers of two: both products are exact, and no sum of `nearest` is infinite.
  const float quant_scale = mx_quant_scale(__uint_as_float(amax), format.most), dequant_scale = __fdiv_rn(1.0f, quant_scale);
#pragma unroll
  for (int i = 0; i < VALUES; i++)
    v[i] = __fmul_rn(nearest(__fmul_rn(v[i], quant_scale), format.least_normal, format.to_large), dequant_scale);
  if (valid) store_f32(out + row * cols + col, v);
}

#define DEFINE(T, NAME)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(256) fp8_round_rows_##NAME(                                                   \
      const T* x, __nv_bfloat16* out, uint64_t rows, uint64_t middle, uint64_t last, uint64_t stride0, uint64_t stride1,      \
      uint64_t stride2, int cols, float most, float least_normal, float to_large) {                                          \
    round_rows(x, out, rows, middle, last, stride0, stride1, stride2, cols, {most, least_normal, to_large});                 \
  }
FP8_FOR_FLOATS(DEFINE)
