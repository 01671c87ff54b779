// Scales from amaxes, and their reciprocals.
#include "scales.cuh"

extern "C" __global__ void fp8_reciprocal(const float* scale, float* out, uint64_t n) {
  for (uint64_t i = global_thread(); i < n; i += global_threads()) out[i] = __fdiv_rn(1.0f, scale[i]);
}

// `dequant_scale` may be null.
extern "C" __global__ void fp8_quant_scale(const float* amax, float* quant_scale, float* dequant_scale, uint64_t n,
                                           float max, uint32_t policy, float eps, uint32_t power_of_two) {
  for (uint64_t i = global_thread(); i < n; i += global_threads()) {
    const ScalePair made = scales_of(amax[i], max, policy, eps, power_of_two != 0);
    quant_scale[i] = made.quant;
    if (dequant_scale) dequant_scale[i] = made.dequant;
  }
}

// E8M0 codes of the powers of two `scales` [kept, blocks] in tiles of 128 by 4, as tensor cores read them: within a tile, 16
// bytes for each of 32 rows hold four blocks of this row and of those 32, 64 and 96 below. Other numbers become NaN (0xFF);
// places without a scale become 2^-127.
extern "C" __global__ void fp8_e8m0_tiles(const float* scales, uint8_t* out, uint64_t kept, uint64_t blocks) {
  const uint64_t across = (blocks + 3) / 4, n = (kept + 127) / 128 * across * 512;
  for (uint64_t i = global_thread(); i < n; i += global_threads()) {
    const uint64_t tile = i / 512;
    const uint32_t within = i % 512;
    const uint64_t row = tile / across * 128 + within % 16 / 4 * 32 + within / 16;
    const uint64_t block = tile % across * 4 + within % 4;
    uint32_t code = 0;
    if (row < kept && block < blocks) {
      const uint32_t bits = __float_as_uint(scales[row * blocks + block]);
      // 2^-127 is an f32 subnormal.
      const bool power = (bits & 0x007FFFFFu) == 0 ? bits - 1 < 0x7F800000u - 1 : bits == 0x00400000u;
      code = power ? bits >> 23 : 0xFFu;
    }
    out[i] = static_cast<uint8_t>(code);
  }
}
