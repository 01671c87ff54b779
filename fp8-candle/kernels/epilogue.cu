// After a product: scales of rows and columns, bias, rounding; and sums over rows for the gradient of a bias.
#include "common.cuh"

// In f64 neither the product of two scales nor that of one scale and the sum overflows or underflows.
__device__ __forceinline__ float scaled(float sum, float row_scale, float col_scale) {
  return __double2float_rn((double)sum * ((double)row_scale * (double)col_scale));
}

// out [rows, cols] = round(product * row_scale * col_scale), then + bias in the output dtype. `product` is f32 with rows of
// `pitch` values; row_scale has row_count values (1 or rows), col_scale col_count; bias may be null.
template <class T>
__device__ void scale_product(const float* product, const float* row_scale, const float* col_scale, const T* bias,
                              T* out, uint64_t rows, uint64_t cols, uint64_t pitch, bool per_row, bool per_col) {
  constexpr int N = 4;
  const bool wide = cols % N == 0 && pitch % N == 0 && aligned16(product) && aligned16(out);
  const uint64_t groups = wide ? cols / N : cols;
  for (uint64_t i = global_thread(); i < rows * groups; i += global_threads()) {
    const uint64_t row = i / groups, group = i - row * groups;
    const float by_row = row_scale[per_row ? row : 0];
    if (wide) {
      const uint64_t col = group * N;
      float v[N];
      load_f32<N>(product + row * pitch + col, v);
#pragma unroll
      for (int j = 0; j < N; j++) {
        v[j] = scaled(v[j], by_row, col_scale[per_col ? col + j : 0]);
        if (bias) v[j] = to_f32(from_f32<T>(v[j])) + to_f32(bias[col + j]);
      }
      store_f32<N>(out + row * cols + col, v);
    } else {
      float v = scaled(product[row * pitch + group], by_row, col_scale[per_col ? group : 0]);
      if (bias) v = to_f32(from_f32<T>(v)) + to_f32(bias[group]);
      out[row * cols + group] = from_f32<T>(v);
    }
  }
}

// y [rows, cols] += bias, in place.
template <class T> __device__ void add_bias(T* y, const T* bias, uint64_t n, uint64_t cols) {
  constexpr int N = 16 / sizeof(T);
  if (cols % N == 0 && aligned16(y) && aligned16(bias)) {
    for (uint64_t i = global_thread(); i < n / N; i += global_threads()) {
      float v[N], b[N];
      load_f32<N>(y + i * N, v);
      load_f32<N>(bias + i * N % cols, b);
#pragma unroll
      for (int j = 0; j < N; j++) v[j] += b[j];
      store_f32<N>(y + i * N, v);
    }
  } else {
    for (uint64_t i = global_thread(); i < n; i += global_threads())
      y[i] = from_f32<T>(to_f32(y[i]) + to_f32(bias[i % cols]));
  }
}

template <int N, class T>
__device__ __forceinline__ void sum_columns(const T* x, float* out, uint64_t cols, uint64_t col, uint64_t first,
                                            uint64_t end) {
  float sums[N] = {};
#pragma unroll 8
  for (uint64_t row = first; row < end; row++) {
    float v[N];
    load_f32<N>(x + row * cols + col, v);
#pragma unroll
    for (int i = 0; i < N; i++) sums[i] += v[i];
  }
#pragma unroll
  for (int i = 0; i < N; i++) out[col + i] = sums[i];
}

// partial [gridDim.y, cols]: sums over runs of rows; the order of a sum depends only on the shape.
template <class T>
__device__ void sum_rows(const T* x, float* partial, uint64_t rows, uint64_t cols, uint32_t rows_per_block) {
  constexpr int N = 16 / sizeof(T);
  const uint64_t first = blockIdx.y * (uint64_t)rows_per_block, end = min(rows, first + rows_per_block);
  float* out = partial + blockIdx.y * cols;
  if (aligned16(x) && cols % N == 0) {
    const uint64_t col = global_thread() * N;
    if (col < cols) sum_columns<N>(x, out, cols, col, first, end);
  } else {
    for (uint64_t col = global_thread(); col < cols; col += global_threads())
      sum_columns<1>(x, out, cols, col, first, end);
  }
}

// out [cols] = sums of partial [parts, cols]. A block of 8 warps for 32 columns: each warp takes every eighth part, then the
// warps' sums are added in order.
template <class T> __device__ void sum_partials(const float* partial, T* out, uint64_t parts, uint64_t cols) {
  constexpr int WARPS = 8;
  __shared__ float sums[WARPS][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint64_t col = blockIdx.x * (uint64_t)32 + lane;
  float sum = 0.0f;
  if (col < cols) {
#pragma unroll 4
    for (uint64_t part = warp; part < parts; part += WARPS) sum += partial[part * cols + col];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && col < cols) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[w][lane];
    out[col] = from_f32<T>(total);
  }
}

#define DEFINE(T, NAME)                                                                                               \
  extern "C" __global__ void fp8_scale_product_##NAME(const float* product, const float* row_scale,                   \
                                                      const float* col_scale, const T* bias, T* out, uint64_t rows,   \
                                                      uint64_t cols, uint64_t pitch, uint32_t per_row,                \
                                                      uint32_t per_col) {                                             \
    scale_product(product, row_scale, col_scale, bias, out, rows, cols, pitch, per_row != 0, per_col != 0);           \
  }                                                                                                                   \
  extern "C" __global__ void fp8_add_bias_##NAME(T* y, const T* bias, uint64_t n, uint64_t cols) {                    \
    add_bias(y, bias, n, cols);                                                                                       \
  }                                                                                                                   \
  extern "C" __global__ void fp8_sum_rows_##NAME(const T* x, float* partial, uint64_t rows, uint64_t cols,            \
                                                 uint32_t rows_per_block) {                                           \
    sum_rows(x, partial, rows, cols, rows_per_block);                                                                 \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      fp8_sum_partials_##NAME(const float* partial, T* out, uint64_t parts, uint64_t cols) {   \
    sum_partials(partial, out, parts, cols);                                                                          \
  }
FP8_FOR_FLOATS(DEFINE)
