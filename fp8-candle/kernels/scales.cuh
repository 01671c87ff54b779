// From an amax to a quant_scale: the formulas of fp8-core's scaling.rs, in plain f32, rounded to nearest.
#pragma once
#include "common.cuh"

enum Policy : uint32_t { DYNAMIC = 0, CURRENT = 1 };

__device__ __forceinline__ float floor_to_power_of_two(float quant_scale) {
  return quant_scale != quant_scale ? quant_scale : __uint_as_float(__float_as_uint(quant_scale) & 0xFF800000u);
}

// max / amax, at most the largest f32; `otherwise` where amax is 0 or not finite.
__device__ __forceinline__ float finite_quotient(float max, float amax, float otherwise) {
  const bool defined = amax > 0.0f && magnitude_bits(amax) < 0x7F800000u;
  return defined ? fminf(__fdiv_rn(max, amax), 3.402823466e38f) : otherwise;
}

__device__ __forceinline__ float quant_scale_of(float amax, float max, uint32_t policy, float eps, bool power_of_two) {
  if (amax < eps) amax = eps;
  float scale = policy == DYNAMIC ? __fdiv_rn(max, amax) : finite_quotient(max, amax, 1.0f);
  return power_of_two ? floor_to_power_of_two(scale) : scale;
}
