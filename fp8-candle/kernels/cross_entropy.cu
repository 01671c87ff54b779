// Mean cross entropy over integer targets, and its gradient. Nothing leaves the device: a target that is not a class
// gives a NaN loss, and NaN gradients in its row.
#include "softmax.cuh"

// Integer targets of any dtype; one value may mark ignored positions.
struct Targets {
  const void* values;
  uint32_t kind;
  int64_t ignored;
  bool some_ignored;

  __device__ __forceinline__ int64_t operator[](uint64_t i) const {
    switch (kind) {
      case 0: return ((const uint8_t*)values)[i];
      case 1: return ((const uint32_t*)values)[i];
      case 2: return ((const int16_t*)values)[i];
      case 3: return ((const int32_t*)values)[i];
      default: return ((const int64_t*)values)[i];
    }
  }
  __device__ __forceinline__ bool ignores(int64_t target) const { return some_ignored && target == ignored; }
};

// losses[row] = log(sum(exp(x))) - x[target], and (largest, 1 / sum(exp(x - largest))) of each row for the gradient.
template <class T>
__device__ __forceinline__ void cross_entropy(const T* __restrict__ x, Targets targets, float* __restrict__ losses,
                                              float2* __restrict__ sums, uint64_t rows, uint64_t classes, bool by_warp) {
  const bool vec = aligned16(x) && rows_aligned16<T>(classes);
  for_rows(rows, by_warp, [&](auto group, uint64_t row) {
    const int64_t target = targets[row];
    // The whole group takes the same branch.
    if (targets.ignores(target)) {
      if (group.thread() == 0) {
        losses[row] = 0.0f;
        sums[row] = make_float2(0.0f, 0.0f);
      }
      return;
    }
    const T* x_row = x + row * classes;
    const SoftmaxSums s = softmax_sums(group, x_row, classes, 1.0f, vec);
    if (group.thread() == 0) {
      const bool is_class = target >= 0 && (uint64_t)target < classes;
      // In this order, large logits cancel before the small logarithm is added.
      losses[row] = is_class ? logf(s.total) + (s.largest - to_f32(x_row[target])) : NAN;
      sums[row] = make_float2(s.largest, __fdiv_rn(1.0f, s.total));
    }
  });
}

// dx = (softmax(x) - one_hot(target)) * grad / counted; 0 in ignored rows.
template <class T>
__device__ __forceinline__ void cross_entropy_backward(const T* __restrict__ x, Targets targets,
                                                       const float2* __restrict__ sums,
                                                       const float* __restrict__ counted, const float* __restrict__ grad,
                                                       T* __restrict__ dx, uint64_t rows, uint64_t classes,
                                                       bool by_warp) {
  const bool vec = aligned16(x) && aligned16(dx) && rows_aligned16<T>(classes);
  const float factor = __fdiv_rn(*grad, *counted);
  for_rows(rows, by_warp, [&](auto group, uint64_t row) {
    const int64_t target = targets[row];
    const T* x_row = x + row * classes;
    T* dx_row = dx + row * classes;
    const bool is_class = target >= 0 && (uint64_t)target < classes;
    if (targets.ignores(target) || !is_class) {
      fill_row(group, dx_row, 0, classes, vec, targets.ignores(target) ? 0.0f : NAN);
      return;
    }
    const float largest = sums[row].x, inv_total = sums[row].y;
    for_parts(group, classes, vec, [&](uint64_t first, auto count) {
      constexpr int N = decltype(count)::value;
      float v[N];
      load_f32(x_row + first, v);
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float p = __fmul_rn(expf(v[i] - largest), inv_total);
        v[i] = (first + i == (uint64_t)target ? p - 1.0f : p) * factor;
      }
      store_f32(dx_row + first, v);
    });
  });
}

#define DEFINE(T, suffix)                                                                                            \
  extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                                          \
      fp8_cross_entropy_##suffix(const T* x, const void* targets, float* losses, float2* sums, uint64_t rows,        \
                                 uint64_t classes, uint32_t kind, uint64_t ignored, uint32_t some_ignored,           \
                                 uint32_t by_warp) {                                                                 \
    const Targets t{targets, kind, (int64_t)ignored, some_ignored != 0};                                             \
    cross_entropy(x, t, losses, sums, rows, classes, by_warp != 0);                                                  \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                                          \
      fp8_cross_entropy_backward_##suffix(const T* x, const void* targets, const float2* sums, const float* counted, \
                                          const float* grad, T* dx, uint64_t rows, uint64_t classes, uint32_t kind,  \
                                          uint64_t ignored, uint32_t some_ignored, uint32_t by_warp) {               \
    const Targets t{targets, kind, (int64_t)ignored, some_ignored != 0};                                             \
    cross_entropy_backward(x, t, sums, counted, grad, dx, rows, classes, by_warp != 0);                              \
  }
FP8_FOR_FLOATS(DEFINE)

// loss = sum(losses) / counted, where counted (as f32) is the number of positions that are not ignored; NaN if there are
// none. One block; sums are in f64, in an order that depends only on the number of positions.
extern "C" __global__ void __launch_bounds__(1024)
    fp8_cross_entropy_mean(const float* losses, const void* targets, float* loss, float* counted, uint64_t rows,
                           uint32_t kind, uint64_t ignored, uint32_t some_ignored) {
  const Targets t{targets, kind, (int64_t)ignored, some_ignored != 0};
  double sum = 0.0, count = 0.0;
  for (uint64_t row = threadIdx.x; row < rows; row += blockDim.x) {
    if (t.ignores(t[row])) continue;
    sum += (double)losses[row];
    count += 1.0;
  }
  sum = block_reduce<Sum>(sum, 0.0);
  count = block_reduce<Sum>(count, 0.0);
  if (threadIdx.x == 0) {
    *loss = (float)(sum / count);
    *counted = (float)count;
  }
}

// Targets of any integer dtype as i64.
extern "C" __global__ void fp8_targets_to_i64(const void* targets, int64_t* out, uint64_t n, uint32_t kind) {
  const Targets t{targets, kind, 0, false};
  for (uint64_t i = global_thread(); i < n; i += global_threads()) out[i] = t[i];
}
