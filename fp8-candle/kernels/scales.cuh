// From an amax to its scales: the formulas of fp8-core's scaling.rs, in plain f32, rounded to nearest.
#pragma once
#include "common.cuh"

enum Policy : uint32_t { DYNAMIC = 0, CURRENT = 1, MX = 2, INFERENCE = 3 };

__device__ __forceinline__ float floor_to_power_of_two(float quant_scale) {
  return quant_scale != quant_scale ? quant_scale : __uint_as_float(__float_as_uint(quant_scale) & 0xFF800000u);
}

// max / amax, at most the largest f32; `otherwise` if amax is 0 or not finite.
__device__ __forceinline__ float finite_quotient(float max, float amax, float otherwise) {
  const bool defined = amax > 0.0f && magnitude_bits(amax) < 0x7F800000u;
  return defined ? fminf(__fdiv_rn(max, amax), 3.402823466e38f) : otherwise;
}

// The reciprocal of the least power of two not below amax / max (RCEIL), an exponent of 8 bits.
__device__ __forceinline__ float mx_quant_scale(float amax, float max) {
  if (magnitude_bits(amax) >= 0x7F800000u) return __uint_as_float(0x7FC00000u);
  const uint32_t bits = __float_as_uint(__fdiv_rn(amax, max));
  const uint32_t fraction = bits & 0x007FFFFFu;
  // 2^-127 is an f32 subnormal, with the fraction 0x400000.
  const uint32_t up = (bits >> 23) == 0 ? fraction > 0x00400000u : fraction != 0;
  const uint32_t exponent = (bits >> 23) + up;
  return __uint_as_float(exponent < 254u ? (254u - exponent) << 23 : 0x00400000u);
}

__device__ __forceinline__ float quant_scale_of(float amax, float max, uint32_t policy, float eps, bool power_of_two) {
  if (policy == MX) return mx_quant_scale(amax, max);
  if (amax < eps) amax = eps;
  if (policy == INFERENCE) {
    const float scale = __fdiv_rn(1.0f, __fdiv_rn(amax, max));
    return power_of_two ? floor_to_power_of_two(scale) : scale;
  }
  float scale = policy == DYNAMIC ? __fdiv_rn(max, amax) : finite_quotient(max, amax, 1.0f);
  return power_of_two ? floor_to_power_of_two(scale) : scale;
}

struct ScalePair {
  float quant, dequant;
};

// Both scales of an amax. Engines make the dequant_scale first; otherwise it is the reciprocal of the other.
__device__ __forceinline__ ScalePair scales_of(float amax, float max, uint32_t policy, float eps, bool power_of_two) {
  if (policy == INFERENCE && !power_of_two) {
    const float dequant = __fdiv_rn(amax < eps ? eps : amax, max);
    return {__fdiv_rn(1.0f, dequant), dequant};
  }
  const float quant = quant_scale_of(amax, max, policy, eps, power_of_two);
  return {quant, __fdiv_rn(1.0f, quant)};
}

// The one of them that a cast takes.
template <bool DIVIDES>
__device__ __forceinline__ float taken_scale(float amax, float max, uint32_t policy, float eps, bool power_of_two) {
  if constexpr (DIVIDES)
    return scales_of(amax, max, policy, eps, power_of_two).dequant;
  else
    return quant_scale_of(amax, max, policy, eps, power_of_two);
}
