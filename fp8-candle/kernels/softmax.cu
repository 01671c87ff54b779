// Softmax over rows, plain and causal, and its gradient.
#include "softmax.cuh"

// How many columns are visible to a row. Causal: matrices of `queries` rows (0: not causal); the last row sees all columns.
__device__ __forceinline__ uint64_t visible_cols(uint64_t row, uint64_t queries, uint64_t cols) {
  return queries == 0 ? cols : row % queries + cols - queries + 1;
}

// y = softmax(softmax_scale * x) over the visible columns, 0 in the others, which are not read.
template <class T>
__device__ __forceinline__ void softmax(const T* __restrict__ x, T* __restrict__ y, uint64_t rows, uint64_t cols,
                                        uint64_t queries, float softmax_scale, bool by_warp) {
  const bool vec = aligned16(x) && aligned16(y) && rows_aligned16<T>(cols);
  for_rows(rows, by_warp, [&](auto group, uint64_t row) {
    const T* x_row = x + row * cols;
    T* y_row = y + row * cols;
    const uint64_t visible = visible_cols(row, queries, cols);
    const SoftmaxSums sums = softmax_sums(group, x_row, visible, softmax_scale, vec);
    const float factor = __fdiv_rn(1.0f, sums.total);
    for_parts(group, visible, vec, [&](uint64_t first, auto count) {
      float v[decltype(count)::value];
      load_f32(x_row + first, v);
#pragma unroll
      for (float& e : v) e = __fmul_rn(expf(__fmul_rn(e, softmax_scale) - sums.largest), factor);
      store_f32(y_row + first, v);
    });
    fill_row(group, y_row, visible, cols, vec, 0.0f);
  });
}

// dx = softmax_scale * y * (grad - sum(y * grad)) over the visible columns, 0 in the others.
template <class T>
__device__ __forceinline__ void softmax_backward(const T* __restrict__ y, const T* __restrict__ grad, T* __restrict__ dx,
                                                 uint64_t rows, uint64_t cols, uint64_t queries, float softmax_scale,
                                                 bool by_warp) {
  const bool vec = aligned16(y) && aligned16(grad) && aligned16(dx) && rows_aligned16<T>(cols);
  for_rows(rows, by_warp, [&](auto group, uint64_t row) {
    const T *y_row = y + row * cols, *grad_row = grad + row * cols;
    T* dx_row = dx + row * cols;
    const uint64_t visible = visible_cols(row, queries, cols);
    float dot = 0.0f;
    for_chunks(group, visible, [&](uint64_t first) {
      float p[CHUNK], g[CHUNK];
      load_chunk(y_row, first, visible, vec, p);
      load_chunk(grad_row, first, visible, vec, g);
#pragma unroll
      for (int i = 0; i < CHUNK; i++) dot = fmaf(p[i], g[i], dot);
    });
    dot = group.template reduce<Sum>(dot, 0.0f);
    for_parts(group, visible, vec, [&](uint64_t first, auto count) {
      constexpr int N = decltype(count)::value;
      float p[N], g[N];
      load_f32(y_row + first, p);
      load_f32(grad_row + first, g);
#pragma unroll
      for (int i = 0; i < N; i++) p[i] = p[i] * (g[i] - dot) * softmax_scale;
      store_f32(dx_row + first, p);
    });
    fill_row(group, dx_row, visible, cols, vec, 0.0f);
  });
}

#define DEFINE(T, suffix)                                                                                      \
  extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                                    \
      fp8_softmax_##suffix(const T* x, T* y, uint64_t rows, uint64_t cols, uint64_t queries, float softmax_scale, \
                           uint32_t by_warp) {                                                                 \
    softmax(x, y, rows, cols, queries, softmax_scale, by_warp != 0);                                              \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                                    \
      fp8_softmax_backward_##suffix(const T* y, const T* grad, T* dx, uint64_t rows, uint64_t cols,            \
                                    uint64_t queries, float softmax_scale, uint32_t by_warp) {                    \
    softmax_backward(y, grad, dx, rows, cols, queries, softmax_scale, by_warp != 0);                              \
  }
FP8_FOR_FLOATS(DEFINE)
