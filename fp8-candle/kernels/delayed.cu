// Delayed scaling: the amaxes of a step merged, and every slot of a device updated, in one launch each.
#include "scales.cuh"

// amaxes[s] = the largest finite amax recorded in slot s (0 where none), counts[s] = how many were not finite.
// `recorded` holds pointers to single f32, those of slot s at first[s] .. first[s + 1].
extern "C" __global__ void fp8_merge_amaxes(const uint64_t* recorded, const uint32_t* first, float* amaxes,
                                            uint32_t* counts, uint64_t slots) {
  for (uint64_t s = global_thread(); s < slots; s += global_threads()) {
    float largest = 0.0f;
    uint32_t non_finite = 0;
    for (uint32_t i = first[s]; i < first[s + 1]; i++) {
      const float amax = *reinterpret_cast<const float*>(recorded[i]);
      if (magnitude_bits(amax) < 0x7F800000u)
        largest = fmaxf(largest, amax);
      else
        non_finite++;
    }
    amaxes[s] = largest;
    counts[s] = non_finite;
  }
}

// A block per slot. `state` holds three pointers for each slot: quant_scale, amax_history [len], non_finite. An amax of 0
// or one that is not finite leaves history and scale as they are. `max_values` are those of the formats times 2^-margin.
extern "C" __global__ void fp8_update_delayed(const uint64_t* state, const float* amaxes, const uint32_t* counts,
                                              const float* max_values, float* quant_scales, float* dequant_scales,
                                              float* histories, uint32_t* non_finite, uint64_t len,
                                              uint32_t most_recent, uint32_t power_of_two) {
  const uint64_t s = blockIdx.x;
  const float previous = *reinterpret_cast<const float*>(state[3 * s]);
  const float* history = reinterpret_cast<const float*>(state[3 * s + 1]);
  const float amax = amaxes[s];
  const bool used = amax > 0.0f && magnitude_bits(amax) < 0x7F800000u;
  float largest = used ? amax : 0.0f;
  for (uint64_t i = threadIdx.x; i < len; i += blockDim.x) {
    const float value = !used ? history[i] : i == 0 ? amax : history[i - 1];
    histories[s * len + i] = value;
    // fmaxf drops NaN.
    largest = fmaxf(largest, value);
  }
  const float reduced = most_recent ? amax : block_reduce<Max>(largest, 0.0f);
  if (threadIdx.x == 0) {
    float scale = previous;
    if (used && reduced > 0.0f && magnitude_bits(reduced) < 0x7F800000u) {
      scale = finite_quotient(max_values[s], reduced, previous);
      if (power_of_two) scale = floor_to_power_of_two(scale);
    }
    quant_scales[s] = scale;
    dequant_scales[s] = __fdiv_rn(1.0f, scale);
    const uint32_t seen = *reinterpret_cast<const uint32_t*>(state[3 * s + 2]);
    non_finite[s] = seen > 0xFFFFFFFFu - counts[s] ? 0xFFFFFFFFu : seen + counts[s];
  }
}
