// What softmax and cross entropy share: the largest element of a row and its sum of exponentials.
#pragma once
#include "rows.cuh"

constexpr float LOWEST = -INFINITY;

struct SoftmaxSums {
  float largest;
  float total;
};

// For softmax_scale * x[..cols], in every thread of the group, from one read. `largest` ignores NaN, which shows in `total`.
// A row of only -Inf has a total of 0; its softmax is NaN, since -Inf - -Inf is.
template <class Group, class T>
__device__ __forceinline__ SoftmaxSums softmax_sums(Group group, const T* x, uint64_t cols, float softmax_scale, bool vec) {
  float largest = LOWEST, total = 0.0f;
  for_chunks(group, cols, [&](uint64_t first) {
    float v[CHUNK];
    const int count = load_chunk(x, first, cols, vec, v);
    float most = largest;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      v[i] = i < count ? __fmul_rn(v[i], softmax_scale) : LOWEST;
      most = v[i] > most ? v[i] : most;
    }
    // Exponentials are relative to the largest element so far; the sum is rescaled when that grows. A sum over only -Inf
    // is 0 (or NaN, which stays).
    if (most > largest) {
      total *= expf(largest - most);
      largest = most;
    }
    const float base = largest == LOWEST ? 0.0f : largest;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) total += expf(v[i] - base);
  });
  const float row_largest = group.template reduce<Max>(largest, LOWEST);
  // Inf - Inf must not turn a valid part into NaN.
  if (largest != row_largest) total *= expf(largest - row_largest);
  return {row_largest, group.template reduce<Sum>(total, 0.0f)};
}
