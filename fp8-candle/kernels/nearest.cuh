// Rounding to the values of FP8 codes in f32, without codes: every row has a scale of its own, a power of two from its amax.
//
// `fp8_candle::device::cpu::attention::cast` does the same on the CPU.
#pragma once
#include "scales.cuh"

// What rounding needs of a format. Any format will do.
struct Steps {
  // The largest number.
  float most;
  // The least normal number.
  float least_normal;
  // From a power of two to 1.5 * 2^23 times the step of the numbers from there on.
  float to_large;

  // The least normal number of a row with this amax, under the row's scale; NaN for an amax of Inf or NaN.
  __device__ __forceinline__ float least(float amax) const { return __fdiv_rn(least_normal, mx_quant_scale(amax, most)); }
};

// The value of the code of `x` in a row with this least normal number: the nearest multiple of the step, which is even if there are
// two. Near 1.5 * 2^23 steps a step is the last place, so that the sum rounds, and the difference is exact. NaN if `least` is NaN,
// and for magnitudes of 2^107 and more, whose sum may be infinite.
__device__ __forceinline__ float nearest(float x, float least, float to_large) {
  const float power = __uint_as_float(max(__float_as_uint(x) & 0x7F800000u, __float_as_uint(least)));
  return fmaf(power, -to_large, fmaf(power, to_large, x));
}
