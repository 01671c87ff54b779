// Rotary position embedding: pairs of a row are rotated by the angles of its position.
#include "common.cuh"

// y0 = x0 cos - x1 sin, y1 = x0 sin + x1 cos; `sign` -1 rotates back.
__device__ __forceinline__ void rotate(float& x0, float& x1, float cos, float sin) {
  const float y0 = fmaf(x0, cos, -__fmul_rn(x1, sin)), y1 = fmaf(x0, sin, __fmul_rn(x1, cos));
  x0 = y0;
  x1 = y1;
}

struct Halves {
  // N pairs from `j` on of a row with `half` pairs.
  template <int N, class T>
  static __device__ __forceinline__ void apply(const T* x, T* y, const float (&cos)[N], const float (&sin)[N],
                                               uint64_t j, uint64_t half) {
    float x0[N], x1[N];
    load_f32(x + j, x0);
    load_f32(x + half + j, x1);
#pragma unroll
    for (int i = 0; i < N; i++) rotate(x0[i], x1[i], cos[i], sin[i]);
    store_f32(y + j, x0);
    store_f32(y + half + j, x1);
  }
};
struct Interleaved {
  template <int N, class T>
  static __device__ __forceinline__ void apply(const T* x, T* y, const float (&cos)[N], const float (&sin)[N],
                                               uint64_t j, uint64_t) {
    x += 2 * j;
    y += 2 * j;
    if constexpr (N == 1) {
      // Pairs of a view may lie at odd elements.
      float x0 = to_f32(x[0]), x1 = to_f32(x[1]);
      rotate(x0, x1, cos[0], sin[0]);
      y[0] = from_f32<T>(x0);
      y[1] = from_f32<T>(x1);
    } else {
      float v[2 * N];
      load_f32(x, v);
#pragma unroll
      for (int i = 0; i < N; i++) rotate(v[2 * i], v[2 * i + 1], cos[i], sin[i]);
      store_f32(y, v);
    }
  }
};

// N pairs for each thread. x and y are [rows, 2 * half], cos and sin [positions, half], row r is at r % positions.
template <class Pairs, int N, class T>
__device__ __forceinline__ void rope_parts(const T* __restrict__ x, const T* __restrict__ cos_table,
                                           const T* __restrict__ sin_table, T* __restrict__ y, uint64_t rows,
                                           uint64_t positions, uint64_t half, float sign) {
  const uint64_t parts = half / N, items = rows * parts;
  // 64-bit divisions are slow.
  const bool narrow = items <= 0xFFFFFFFFu;
  for (uint64_t item = global_thread(); item < items; item += global_threads()) {
    const uint64_t row = narrow ? (uint32_t)item / (uint32_t)parts : item / parts;
    const uint64_t position = narrow ? (uint32_t)row % (uint32_t)positions : row % positions;
    const uint64_t j = (item - row * parts) * N;
    float cos[N], sin[N];
    load_f32(cos_table + position * half + j, cos);
    load_f32(sin_table + position * half + j, sin);
#pragma unroll
    for (float& s : sin) s *= sign;
    Pairs::apply(x + row * 2 * half, y + row * 2 * half, cos, sin, j, half);
  }
}

template <class Pairs, int N, class T>
__device__ __forceinline__ void rope(const T* x, const T* cos, const T* sin, T* y, uint64_t rows, uint64_t positions,
                                     uint64_t half, float sign) {
  if (half % N == 0 && aligned16(x) && aligned16(cos) && aligned16(sin) && aligned16(y)) {
    rope_parts<Pairs, N>(x, cos, sin, y, rows, positions, half, sign);
  } else {
    rope_parts<Pairs, 1>(x, cos, sin, y, rows, positions, half, sign);
  }
}

// Packs of 8 are aligned if the half is a multiple of 8; interleaved, 4 pairs are 8 elements.
#define DEFINE(T, suffix)                                                                                \
  extern "C" __global__ void __launch_bounds__(256)                                                      \
      fp8_rope_##suffix(const T* x, const T* cos, const T* sin, T* y, uint64_t rows, uint64_t positions, \
                        uint64_t half, float sign, uint32_t interleaved) {                               \
    if (interleaved) {                                                                                   \
      rope<Interleaved, 4>(x, cos, sin, y, rows, positions, half, sign);                                 \
    } else {                                                                                             \
      rope<Halves, 8>(x, cos, sin, y, rows, positions, half, sign);                                      \
    }                                                                                                    \
  }
FP8_FOR_FLOATS(DEFINE)
