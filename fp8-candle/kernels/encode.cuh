// Casts of one value to FP8.
//
// `Encoder` is the definition: the integer arithmetic of fp8-core's scalar cast, for every format, rounding and overflow.
// `encode4` is its fast form for nearest-even casts to the two OCP formats: the hardware conversion, from compute capability 8.9 on, which
// keeps every sign but that of a NaN, and saturates. `corrected` mends both, for codes from `least_odd_code` on.
#pragma once
#include "common.cuh"
#include <cuda_fp8.h>

enum Format : uint32_t { E4M3 = 0, E5M2 = 1, E4M3_FNUZ = 2, E5M2_FNUZ = 3 };
enum Rounding : uint32_t {
  NEAREST_EVEN = 0,
  STOCHASTIC = 1,
  TOWARD_ZERO = 2,
  NEAREST_AWAY = 3,
  TOWARD_POSITIVE = 4,
  TOWARD_NEGATIVE = 5
};

// x times its quant_scale or, where a cast divides, x over its dequant_scale.
template <bool DIVIDES> __device__ __forceinline__ float apply_scale(float x, float scale) {
  return DIVIDES ? __fdiv_rn(x, scale) : __fmul_rn(x, scale);
}

// The bits of this product or quotient; a NaN has the sign of x, whatever made it NaN.
template <bool DIVIDES> __device__ __forceinline__ uint32_t scaled_bits(float x, float scale) {
  const uint32_t magnitude = magnitude_bits(apply_scale<DIVIDES>(x, scale));
  const uint32_t flip = magnitude > 0x7F800000u ? 0u : __float_as_uint(scale);
  return magnitude | ((__float_as_uint(x) ^ flip) & 0x80000000u);
}

// Codes of two values, the first in the lower byte; a NaN has no sign.
template <bool IS_E5M2> __device__ __forceinline__ uint32_t encode2(float x, float y) {
  constexpr __nv_fp8_interpretation_t KIND = IS_E5M2 ? __NV_E5M2 : __NV_E4M3;
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, KIND);
}

// Codes of four values.
template <bool IS_E5M2> __device__ __forceinline__ uint32_t encode4(const float* scaled) {
  return encode2<IS_E5M2>(scaled[0], scaled[1]) | encode2<IS_E5M2>(scaled[2], scaled[3]) << 16;
}

// The magnitudes of NaN, in either format, and of the largest number.
constexpr uint32_t NAN_CODE = 0x7F;
template <bool IS_E5M2> constexpr uint32_t LARGEST_CODE = IS_E5M2 ? 0x7B : 0x7E;

// The highest bit of each byte whose magnitude is at least `least`.
__device__ __forceinline__ uint32_t codes_from(uint32_t codes, uint32_t least) {
  return ((codes & 0x7F7F7F7Fu) + (0x80u - least) * 0x01010101u) & 0x80808080u;
}

// Codes of at least this magnitude need more than the conversion: NaN, and without saturation the largest number, which may stand for a
// larger one.
template <bool IS_E5M2> __device__ __forceinline__ uint32_t least_odd_code(bool saturate) {
  return saturate ? NAN_CODE : LARGEST_CODE<IS_E5M2>;
}

// Four codes with the signs that a NaN has by `scaled_bits`, in place of those that the conversion drops.
__device__ __forceinline__ uint32_t with_nan_signs(uint32_t codes, const float* x) {
  uint32_t signs = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) signs |= (__float_as_uint(x[i]) >> 31) << (8 * i + 7);
  const uint32_t nans = codes_from(codes, NAN_CODE);
  return (codes & ~nans) | (signs & nans);
}

// Four codes of these values, with infinity, or NaN in E4M3, for those that round to more than the largest number.
template <bool IS_E5M2> __device__ __forceinline__ uint32_t with_overflow(uint32_t codes, const float* scaled) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    // Halfway between the largest number and what would be the next one; ties go to the even code.
    const float magnitude = fabsf(scaled[i]);
    const bool over = IS_E5M2 ? magnitude >= 61440.0f : magnitude > 464.0f;
    if (over) codes = (codes & ~(0x7Fu << 8 * i)) | (LARGEST_CODE<IS_E5M2> + 1) << 8 * i;
  }
  return codes;
}

// Four codes as the definition has them, from those of the conversion.
template <bool IS_E5M2>
__device__ __forceinline__ uint32_t corrected(uint32_t codes, const float* x, const float* scaled, bool saturate) {
  codes = with_nan_signs(codes, x);
  return saturate ? codes : with_overflow<IS_E5M2>(codes, scaled);
}

// Philox4x32-10, block `index` of the tensor's stream.
__device__ __forceinline__ uint4 philox(uint64_t index, uint32_t step, uint32_t tensor, uint64_t seed) {
  uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = step, c3 = tensor;
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)p1;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

struct Encoder {
  int mantissa_bits, bias;
  uint32_t max_mag, overflow_mag, nan_mag, rounding;
  bool has_negative_zero, via_f16;

  __device__ __forceinline__ Encoder(uint32_t format, uint32_t rounding_, bool saturate, bool via_f16_) {
    const bool fnuz = format >= E4M3_FNUZ, e5m2 = (format & 1) != 0;
    mantissa_bits = e5m2 ? 2 : 3;
    bias = (e5m2 ? 15 : 7) + (fnuz ? 1 : 0);
    max_mag = fnuz ? 0x7F : (e5m2 ? 0x7B : 0x7E);
    nan_mag = fnuz ? 0x80 : 0x7F;
    overflow_mag = saturate ? max_mag : max_mag + 1;
    rounding = rounding_;
    has_negative_zero = !fnuz;
    via_f16 = via_f16_;
  }

  // The code of the f32 with these bits; `random` decides stochastic rounding.
  __device__ __forceinline__ uint32_t code(uint32_t bits, uint32_t random) const {
    if (via_f16) bits = __float_as_uint(via_half(bits));
    const bool negative = bits >> 31;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;

    // |x| = significand * 2^(exponent - 150), f32 subnormals included.
    const int exponent = max((int)(magnitude >> 23), 1);
    const uint32_t significand = (magnitude & 0x007FFFFFu) | (min(magnitude >> 23, 1u) << 23);

    // The last place of the target is fixed below its smallest normal exponent, so the shift grows there.
    const uint32_t shift = (uint32_t)max(23 - mantissa_bits, 151 - bias - mantissa_bits - exponent);
    const uint32_t binade = (uint32_t)max(exponent - 128 + bias, 0) << mantissa_bits;

    // A shift of 31 already leaves none of the 24 bits, and a remainder below half a step.
    const uint32_t capped = min(shift, 31u);
    const uint32_t floor_ = significand >> capped;
    const uint32_t rest = significand & ((1u << capped) - 1), half = 1u << (capped - 1);
    bool away = false;
    switch (rounding) {
      case NEAREST_EVEN: away = rest > half || (rest == half && (floor_ & 1)); break;
      case NEAREST_AWAY: away = rest >= half; break;
      case TOWARD_POSITIVE: away = rest != 0 && !negative; break;
      case TOWARD_NEGATIVE: away = rest != 0 && negative; break;
      case STOCHASTIC: {
        // Shifts of 32 are not defined: shift is above 19 here, so 32 - shift is below 32.
        const uint32_t threshold = shift <= 32 ? rest << (32 - shift) : significand >> min(shift - 32, 31u);
        away = random < threshold;
        break;
      }
      default: break;
    }
    uint32_t mag = binade + floor_ + away;
    const bool toward_zero = rounding == TOWARD_ZERO || (rounding == TOWARD_POSITIVE && negative) ||
                             (rounding == TOWARD_NEGATIVE && !negative);
    if (mag > max_mag) mag = toward_zero && magnitude < 0x7F800000u ? max_mag : overflow_mag;
    if (magnitude > 0x7F800000u) mag = nan_mag;
    return mag | (negative && (mag != 0 || has_negative_zero) ? 0x80u : 0u);
  }

 private:
  // Rounded to f16 and back; a NaN keeps its sign.
  static __device__ __forceinline__ float via_half(uint32_t bits) {
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return __uint_as_float(bits);
    return __half2float(__float2half_rn(__uint_as_float(bits)));
  }
};
