// Scales from amaxes, and their reciprocals.
#include "scales.cuh"

extern "C" __global__ void fp8_reciprocal(const float* scale, float* out, uint64_t n) {
  for (uint64_t i = global_thread(); i < n; i += global_threads()) out[i] = __fdiv_rn(1.0f, scale[i]);
}

// `dequant_scale` may be null.
extern "C" __global__ void fp8_quant_scale(const float* amax, float* quant_scale, float* dequant_scale, uint64_t n,
                                           float max, uint32_t policy, float eps, uint32_t power_of_two) {
  for (uint64_t i = global_thread(); i < n; i += global_threads()) {
    const float scale = quant_scale_of(amax[i], max, policy, eps, power_of_two != 0);
    quant_scale[i] = scale;
    if (dequant_scale) dequant_scale[i] = __fdiv_rn(1.0f, scale);
  }
}
