// LayerNorm and RMSNorm over rows, and their gradients.
//
// With n = (x - mean) / std (RMSNorm: mean = 0) the forward pass gives y = n * weight + bias. It keeps (mean, 1 / std)
// of each row for the backward pass:
//   dx      = (g - mean(g) - n * mean(g * n)) / std    with g = grad * weight; RMSNorm has no mean(g)
//   dweight = sum over rows of grad * n                dbias = sum over rows of grad
// The sums over rows are computed in two steps without atomics: slabs of rows, then the slabs, in an order that depends
// only on the shape.
#include "rows.cuh"

// Two passes over the row, the second from cache: a variance from differences does not cancel.
template <class Group, class T>
__device__ __forceinline__ float2 moments(Group group, const T* x, uint64_t cols, bool center, float eps, bool vec) {
  const float n = (float)cols;
  float mean = 0.0f;
  if (center) {
    float sum = 0.0f;
    for_chunks(group, cols, [&](uint64_t first) {
      float v[CHUNK];
      load_chunk(x, first, cols, vec, v);
#pragma unroll
      for (float e : v) sum += e;
    });
    mean = __fdiv_rn(group.template reduce<Sum>(sum, 0.0f), n);
  }
  float squares = 0.0f;
  for_chunks(group, cols, [&](uint64_t first) {
    float v[CHUNK];
    const int count = load_chunk(x, first, cols, vec, v);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      const float d = v[i] - mean;
      if (i < count) squares = fmaf(d, d, squares);
    }
  });
  const float variance = __fdiv_rn(group.template reduce<Sum>(squares, 0.0f), n);
  return make_float2(mean, __fdiv_rn(1.0f, __fsqrt_rn(variance + eps)));
}

// `bias`, `y` and `statistics` may be null.
template <class T>
__device__ __forceinline__ void norm(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                                     T* __restrict__ y, float2* __restrict__ statistics, uint64_t rows, uint64_t cols,
                                     float eps, bool center, bool by_warp) {
  const bool vec =
      aligned16(x) && aligned16(weight) && aligned16(bias) && aligned16(y) && rows_aligned16<T>(cols);
  for_rows(rows, by_warp, [&](auto group, uint64_t row) {
    const T* x_row = x + row * cols;
    T* y_row = y + row * cols;
    const float2 m = moments(group, x_row, cols, center, eps, vec);
    if (statistics != nullptr && group.thread() == 0) statistics[row] = m;
    if (y == nullptr) return;
    for_parts(group, cols, vec, [&](uint64_t first, auto count) {
      constexpr int N = decltype(count)::value;
      float v[N], w[N];
      load_f32(x_row + first, v);
      load_f32(weight + first, w);
      if (bias != nullptr) {
        float b[N];
        load_f32(bias + first, b);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = fmaf((v[i] - m.x) * m.y, w[i], b[i]);
      } else {
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = (v[i] - m.x) * m.y * w[i];
      }
      store_f32(y_row + first, v);
    });
  });
}

template <class T>
__device__ __forceinline__ void norm_backward(const T* __restrict__ x, const T* __restrict__ weight,
                                              const T* __restrict__ grad, const float2* __restrict__ statistics,
                                              T* __restrict__ dx, uint64_t rows, uint64_t cols, bool center,
                                              bool by_warp) {
  const bool vec =
      aligned16(x) && aligned16(weight) && aligned16(grad) && aligned16(dx) && rows_aligned16<T>(cols);
  const float n = (float)cols;
  for_rows(rows, by_warp, [&](auto group, uint64_t row) {
    const T *x_row = x + row * cols, *grad_row = grad + row * cols;
    T* dx_row = dx + row * cols;
    const float mean = statistics[row].x, inv_std = statistics[row].y;
    float sum_g = 0.0f, sum_gd = 0.0f;
    for_chunks(group, cols, [&](uint64_t first) {
      float v[CHUNK], w[CHUNK], g[CHUNK];
      const int count = load_chunk(x_row, first, cols, vec, v);
      load_chunk(weight, first, cols, vec, w);
      load_chunk(grad_row, first, cols, vec, g);
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        const float gw = __fmul_rn(g[i], w[i]);
        if (i < count) {
          sum_g += gw;
          sum_gd = fmaf(gw, v[i] - mean, sum_gd);
        }
      }
    });
    const float mean_g = center ? __fdiv_rn(group.template reduce<Sum>(sum_g, 0.0f), n) : 0.0f;
    const float mean_gn = __fdiv_rn(__fmul_rn(group.template reduce<Sum>(sum_gd, 0.0f), inv_std), n);
    for_parts(group, cols, vec, [&](uint64_t first, auto count) {
      constexpr int N = decltype(count)::value;
      float v[N], w[N], g[N];
      load_f32(x_row + first, v);
      load_f32(weight + first, w);
      load_f32(grad_row + first, g);
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float normed = (v[i] - mean) * inv_std;
        v[i] = fmaf(-normed, mean_gn, __fmul_rn(g[i], w[i]) - mean_g) * inv_std;
      }
      store_f32(dx_row + first, v);
    });
  });
}

constexpr int SLAB_WARPS = 8;
constexpr int SLAB_COLS = 32 * CHUNK;

// partial[0][slab] and, for a bias, partial[1][slab] = the sums over `slab_rows` rows of grad * n and of grad; `partial`
// is [2 or 1, slabs, cols]. Blocks: (tiles of 256 columns, slabs), 8 warps.
template <class T>
__device__ __forceinline__ void norm_slabs(const T* __restrict__ x, const T* __restrict__ grad,
                                           const float2* __restrict__ statistics, float* __restrict__ partial,
                                           uint64_t rows, uint64_t cols, uint64_t slab_rows, bool with_bias) {
  __shared__ float sums[SLAB_WARPS][SLAB_COLS];
  const bool vec = aligned16(x) && aligned16(grad) && rows_aligned16<T>(cols);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint64_t tile = (uint64_t)blockIdx.x * SLAB_COLS, first = tile + lane * CHUNK;
  const uint64_t start = blockIdx.y * slab_rows, end = start + slab_rows < rows ? start + slab_rows : rows;
  float dw[CHUNK] = {}, db[CHUNK] = {};
  if (first < cols) {
    for (uint64_t row = start + warp; row < end; row += SLAB_WARPS) {
      const float2 m = statistics[row];
      float v[CHUNK], g[CHUNK];
      load_chunk(x + row * cols, first, cols, vec, v);
      load_chunk(grad + row * cols, first, cols, vec, g);
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        dw[i] = fmaf(g[i], (v[i] - m.x) * m.y, dw[i]);
        db[i] += g[i];
      }
    }
  }
  const uint64_t column = tile + threadIdx.x;
  for (int which = 0; which < (with_bias ? 2 : 1); which++) {
#pragma unroll
    for (int i = 0; i < CHUNK; i++) sums[warp][lane * CHUNK + i] = which == 0 ? dw[i] : db[i];
    __syncthreads();
    if (column < cols) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < SLAB_WARPS; w++) total += sums[w][threadIdx.x];
      partial[((uint64_t)which * gridDim.y + blockIdx.y) * cols + column] = total;
    }
    __syncthreads();
  }
}

// dweight (blockIdx.y 0) and dbias (1) = the sums over slabs. Blocks: (tiles of 32 columns, 1 or 2), 8 warps.
template <class T>
__device__ __forceinline__ void norm_parameters(const float* __restrict__ partial, T* __restrict__ dweight,
                                                T* __restrict__ dbias, uint64_t slabs, uint64_t cols) {
  __shared__ float sums[SLAB_WARPS][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint64_t column = (uint64_t)blockIdx.x * 32 + lane;
  const float* slab_sums = partial + blockIdx.y * slabs * cols;
  float sum = 0.0f;
  if (column < cols) {
    for (uint64_t slab = warp; slab < slabs; slab += SLAB_WARPS) sum += slab_sums[slab * cols + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && column < cols) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < SLAB_WARPS; w++) total += sums[w][lane];
    (blockIdx.y == 0 ? dweight : dbias)[column] = from_f32<T>(total);
  }
}

#define DEFINE(T, suffix)                                                                                         \
  extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                                       \
      fp8_norm_##suffix(const T* x, const T* weight, const T* bias, T* y, float2* statistics, uint64_t rows,      \
                        uint64_t cols, float eps, uint32_t center, uint32_t by_warp) {                            \
    norm(x, weight, bias, y, statistics, rows, cols, eps, center != 0, by_warp != 0);                             \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                                       \
      fp8_norm_backward_##suffix(const T* x, const T* weight, const T* grad, const float2* statistics, T* dx,     \
                                 uint64_t rows, uint64_t cols, uint32_t center, uint32_t by_warp) {               \
    norm_backward(x, weight, grad, statistics, dx, rows, cols, center != 0, by_warp != 0);                        \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(256)                                                               \
      fp8_norm_slabs_##suffix(const T* x, const T* grad, const float2* statistics, float* partial, uint64_t rows, \
                              uint64_t cols, uint64_t slab_rows, uint32_t with_bias) {                            \
    norm_slabs(x, grad, statistics, partial, rows, cols, slab_rows, with_bias != 0);                              \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(256)                                                               \
      fp8_norm_parameters_##suffix(const float* partial, T* dweight, T* dbias, uint64_t slabs, uint64_t cols) {   \
    norm_parameters(partial, dweight, dbias, slabs, cols);                                                        \
  }
FP8_FOR_FLOATS(DEFINE)
