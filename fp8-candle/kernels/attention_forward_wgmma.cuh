// Building blocks of forward passes on products of warpgroups: the order of tiles, and the running softmax.
#pragma once
#include "attention_wgmma.cuh"

#ifdef FP8_WGMMA

// The order in which tiles come, which is that of their use: K0, K1, V0, K2, V1, .. and the last values.
__device__ __forceinline__ int place_of_keys(int step) { return step == 0 ? 0 : 2 * step - 1; }
__device__ __forceinline__ int place_of_values(int step, int steps) { return step + 1 == steps ? 2 * steps - 1 : 2 * step + 2; }

// The running softmax of a thread's two rows of a product [64, 8 N]: rows g and g + 8 of the warp's 16.
struct RunningSoftmax {
  // In the units of the logits before they are scaled.
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};

  // Logits become probabilities relative to the largest so far; `factor`: what those of earlier keys are multiplied by. `scale` is
  // above 0.
  template <int N> __device__ __forceinline__ void update(float (&s)[N][4], float scale, float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float maximum = largest[half];
#pragma unroll
      for (int n = 0; n < N; n++) maximum = fmaxf(maximum, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      maximum = fmaxf(maximum, __shfl_xor_sync(ALL_LANES, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(ALL_LANES, maximum, 2));
      // Only -inf so far: avoid -inf - -inf.
      const float offset = maximum == -INFINITY ? 0.0f : maximum * scale;
      factor[half] = exp2_approximate(largest[half] * scale - offset);
      largest[half] = maximum;
      float part = 0.0f;
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[n][2 * half + e];
          part += x = exp2_approximate(fmaf(x, scale, -offset));
        }
      sum[half] = sum[half] * factor[half] + part;
    }
  }
};

#endif
