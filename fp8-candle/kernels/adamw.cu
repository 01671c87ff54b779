// AdamW over all tensors of a device at once: a table of chunks tells each block its tensor and the piece of it.
//
// 1. fp8_adamw_norm_*: the sum of squares of each chunk, in f64.  2. fp8_adamw_decide: their sum, and from it whether the
// step is taken, the clip coefficient and the bias corrections.  3. fp8_adamw_update_*: the update; that of moments in FP8
// is in adamw_coded.cu.
//
// Sums and updates have the same bits as on the CPU (fp8-optim): the same order of operations, each rounded separately. The
// _rn intrinsics keep the compiler from fusing them.
#include "adamw.cuh"
#include <cfloat>

// Running sums of a chunk: element i belongs to lane i % LANES.
constexpr int LANES = 1024;
constexpr int NORM_THREADS = 128;
constexpr int OWN_LANES = LANES / NORM_THREADS;

// --- sums -----------------------------------------------------------------------------------------------------------

// The square of an f32 or narrower value is exact in f64, so this is a product and a sum.
template <class T> __device__ __forceinline__ double add_square(double sum, T x) {
  const double wide = to_f32(x);
  return __fma_rn(wide, wide, sum);
}
template <> __device__ __forceinline__ double add_square<double>(double sum, double x) {
  return __dadd_rn(sum, __dmul_rn(x, x));
}

// Adds the 1024 lanes by halves, lane i taking lane i + 512, then i + 256, down to i + 1; thread t holds lanes 8 t to
// 8 t + 7. The sum is in thread 0. For a block of NORM_THREADS threads that all call it.
__device__ __forceinline__ double sum_lanes(double (&lane)[OWN_LANES]) {
  __shared__ double upper[OWN_LANES][NORM_THREADS / 2];
  const int t = threadIdx.x;
  for (int half = NORM_THREADS / 2; half >= 32; half /= 2) {
    // The values of the previous round have been read.
    __syncthreads();
    if (t >= half && t < 2 * half) {
#pragma unroll
      for (int i = 0; i < OWN_LANES; i++) upper[i][t - half] = lane[i];
    }
    __syncthreads();
    if (t < half) {
#pragma unroll
      for (int i = 0; i < OWN_LANES; i++) lane[i] = __dadd_rn(lane[i], upper[i][t]);
    }
  }
  if (t < 32) {
    // Both partners of an exchange compute the same sum, so lane 0 ends with the one that halving gives.
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < OWN_LANES; i++) {
        lane[i] = __dadd_rn(lane[i], __shfl_xor_sync(ALL_LANES, lane[i], offset));
      }
    }
#pragma unroll
    for (int half = OWN_LANES / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; i++) lane[i] = __dadd_rn(lane[i], lane[i + half]);
    }
  }
  return lane[0];
}

// One block per chunk. `grads`: an address per tensor, 0 for a tensor without gradient, which adds 0.
template <class T>
__device__ __forceinline__ void norm(const Chunk* chunks, const Params* params, const uint64_t* grads,
                                     double* partials) {
  const Chunk chunk = chunks[blockIdx.x];
  const T* grad = pointer<const T>(grads[chunk.tensor]);
  if (grad == nullptr) {
    if (threadIdx.x == 0) partials[chunk.partial] = 0.0;
    return;
  }
  const uint64_t start = (uint64_t)chunk.block * CHUNK, left = params[chunk.tensor].len - start;
  const uint32_t count = left < CHUNK ? (uint32_t)left : CHUNK;
  grad += start;
  const bool packed = aligned16(grad);
  double lane[OWN_LANES] = {};
  for (uint32_t at = threadIdx.x * OWN_LANES; at < count; at += LANES) {
    if (packed && at + OWN_LANES <= count) {
      const Pack<T, OWN_LANES> pack = *reinterpret_cast<const Pack<T, OWN_LANES>*>(grad + at);
#pragma unroll
      for (int i = 0; i < OWN_LANES; i++) lane[i] = add_square(lane[i], pack.v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < OWN_LANES; i++) {
        if (at + i < count) lane[i] = add_square(lane[i], grad[at + i]);
      }
    }
  }
  const double sum = sum_lanes(lane);
  if (threadIdx.x == 0) partials[chunk.partial] = sum;
}

// The sum of all partials, in thread 0 of a block of NORM_THREADS threads.
__device__ __forceinline__ double sum_partials(const double* partials, uint64_t count) {
  double lane[OWN_LANES] = {};
  for (uint64_t at = threadIdx.x * OWN_LANES; at < count; at += LANES) {
#pragma unroll
    for (int i = 0; i < OWN_LANES; i++) {
      if (at + i < count) lane[i] = __dadd_rn(lane[i], partials[at + i]);
    }
  }
  return sum_lanes(lane);
}

// --- coefficients ---------------------------------------------------------------------------------------------------

// By squaring, in the order of operations of the CPU.
__device__ __forceinline__ double power(double base, uint64_t exponent) {
  double result = 1.0;
  for (;;) {
    if (exponent & 1) result = __dmul_rn(result, base);
    exponent >>= 1;
    if (exponent == 0) return result;
    base = __dmul_rn(base, base);
  }
}

__device__ __forceinline__ double correction(double beta, uint64_t step) {
  return __ddiv_rn(1.0, __dsub_rn(1.0, power(beta, step)));
}

__device__ __forceinline__ void permit(Control* control, const Coefficients<double>& c, uint64_t step) {
  control->wide = c;
  control->step = (uint32_t)step;
  control->narrow = {__double2float_rn(c.lr),
                     __double2float_rn(c.beta1),
                     __double2float_rn(c.one_minus_beta1),
                     __double2float_rn(c.beta2),
                     __double2float_rn(c.one_minus_beta2),
                     __double2float_rn(c.eps),
                     __double2float_rn(c.decay),
                     __double2float_rn(c.correction1),
                     __double2float_rn(c.correction2),
                     __double2float_rn(c.clip)};
  control->proceed = 1;
}

// One block. From `count` sums of squares, decides to take the step unless their root is not finite. `counter`: steps taken.
// `report`: norm, clip coefficient, 1 if skipped, steps taken. The last arguments are the bits of f64s; `limit` is
// infinite if nothing is clipped.
extern "C" __global__ void fp8_adamw_decide(const double* partials, uint64_t count, Control* control,
                                            long long* counter, double* report, uint64_t limit, uint64_t lr,
                                            uint64_t beta1, uint64_t beta2, uint64_t eps, uint64_t decay) {
  const double norm = __dsqrt_rn(sum_partials(partials, count));
  if (threadIdx.x != 0) return;
  uint64_t step = (uint64_t)*counter;
  // False for NaN and infinity.
  const bool finite = norm <= 1.7976931348623157e308;
  double clip = 0.0;
  if (finite) {
    step++;
    *counter = (long long)step;
    const double ratio = __ddiv_rn(bits(limit), __dadd_rn(norm, 1e-6));
    clip = ratio < 1.0 ? ratio : 1.0;
    permit(control, {bits(lr), bits(beta1), __dsub_rn(1.0, bits(beta1)), bits(beta2), __dsub_rn(1.0, bits(beta2)),
                     bits(eps), bits(decay), correction(bits(beta1), step), correction(bits(beta2), step), clip}, step);
  } else {
    control->proceed = 0;
  }
  report[0] = norm;
  report[1] = clip;
  report[2] = finite ? 0.0 : 1.0;
  report[3] = (double)step;
}

// One block: only the sum, if the host decides.
extern "C" __global__ void fp8_adamw_sum(const double* partials, uint64_t count, double* out) {
  const double sum = sum_partials(partials, count);
  if (threadIdx.x == 0) *out = sum;
}

// Writes words that the launch carries, so that a graph needs nothing of the host's memory.
extern "C" __global__ void fp8_adamw_words(uint64_t* to, uint64_t count, uint64_t w0, uint64_t w1, uint64_t w2, uint64_t w3,
                                           uint64_t w4, uint64_t w5, uint64_t w6, uint64_t w7, uint64_t w8, uint64_t w9,
                                           uint64_t w10, uint64_t w11, uint64_t w12, uint64_t w13, uint64_t w14, uint64_t w15) {
  const uint64_t words[16] = {w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15};
#pragma unroll
  for (int i = 0; i < 16; i++)
    if (threadIdx.x == i && i < count) to[i] = words[i];
}

// One thread: coefficients that the host has decided on, as the bits of f64s, and the number of the step.
extern "C" __global__ void fp8_adamw_coefficients(Control* control, uint64_t lr, uint64_t beta1, uint64_t beta2,
                                                  uint64_t eps, uint64_t decay, uint64_t correction1,
                                                  uint64_t correction2, uint64_t clip, uint64_t step) {
  if (global_thread() != 0) return;
  permit(control, {bits(lr), bits(beta1), __dsub_rn(1.0, bits(beta1)), bits(beta2), __dsub_rn(1.0, bits(beta2)),
                   bits(eps), bits(decay), bits(correction1), bits(correction2), bits(clip)}, step);
}

// --- update of moments in f32 or f64 -----------------------------------------------------------------------------------

template <class T, class C> struct Arrays {
  T* var;
  const T* grad;
  C* m;
  C* v;
  float* master;
};

// A moment that has overflowed, as the square of a gradient of 2e19 does, keeps the largest number. In f64 none does: the norm of such
// gradients is infinite.
__device__ __forceinline__ float bounded(float x) {
  x = x > FLT_MAX ? FLT_MAX : x;
  return x < -FLT_MAX ? -FLT_MAX : x;
}
__device__ __forceinline__ double bounded(double x) { return x; }

// N elements from `at` on, accessed N at a time, which they are aligned for.
template <int N, class T, class C>
__device__ __forceinline__ void update_pack(const Arrays<T, C>& a, uint32_t at, const Coefficients<C>& c) {
  using K = Kind<T>;
  Pack<T, N> var = *reinterpret_cast<const Pack<T, N>*>(a.var + at);
  const Pack<T, N> grad = *reinterpret_cast<const Pack<T, N>*>(a.grad + at);
  Pack<C, N> m = *reinterpret_cast<const Pack<C, N>*>(a.m + at);
  Pack<C, N> v = *reinterpret_cast<const Pack<C, N>*>(a.v + at);
  C theta[N];
#pragma unroll
  for (int i = 0; i < N; i++) theta[i] = K::widen(var.v[i]);
  if constexpr (K::HAS_MASTER) {
    if (a.master != nullptr) {
      const Pack<float, N> master = *reinterpret_cast<const Pack<float, N>*>(a.master + at);
      // The variable was written to since: use its value.
#pragma unroll
      for (int i = 0; i < N; i++) {
        if (same_bits(K::narrow(master.v[i]), var.v[i])) theta[i] = master.v[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    theta[i] = step(c, theta[i], K::widen(grad.v[i]), m.v[i], v.v[i]);
    m.v[i] = bounded(m.v[i]), v.v[i] = bounded(v.v[i]);
    var.v[i] = K::narrow(theta[i]);
  }
  if constexpr (K::HAS_MASTER) {
    if (a.master != nullptr) {
      Pack<float, N> master;
#pragma unroll
      for (int i = 0; i < N; i++) master.v[i] = theta[i];
      *reinterpret_cast<Pack<float, N>*>(a.master + at) = master;
    }
  }
  *reinterpret_cast<Pack<T, N>*>(a.var + at) = var;
  *reinterpret_cast<Pack<C, N>*>(a.m + at) = m;
  *reinterpret_cast<Pack<C, N>*>(a.v + at) = v;
}

// Blocks: chunks times PARTS. Tensors without a gradient are not changed, nor is any if the step is not taken.
template <class T>
__device__ __forceinline__ void update(const Chunk* chunks, const Params* params, const uint64_t* grads,
                                       const Control* control) {
  using C = typename Kind<T>::Compute;
  constexpr int N = Kind<T>::PACK;
  if (control->proceed == 0) return;
  const Chunk chunk = chunks[blockIdx.x];
  const uint64_t grad = grads[chunk.tensor];
  if (grad == 0) return;
  const Params p = params[chunk.tensor];
  const uint64_t start = (uint64_t)chunk.block * CHUNK + blockIdx.y * PART;
  if (start >= p.len) return;
  const uint32_t count = p.len - start < PART ? (uint32_t)(p.len - start) : PART;
  const Arrays<T, C> a = {pointer<T>(p.var) + start, pointer<const T>(grad) + start, pointer<C>(p.exp_avg.values) + start,
                          pointer<C>(p.exp_avg_sq.values) + start, p.master ? pointer<float>(p.master) + start : nullptr};
  Coefficients<C> c = coefficients(control, C());
  if (!(p.flags & DECAYS)) c.decay = C(1);
  // `start` is a multiple of 16 bytes in every array.
  const bool packed = aligned16(pointer<void>(p.var | p.exp_avg.values | p.exp_avg_sq.values | p.master | grad));
  const uint32_t whole = packed ? count / N * N : 0;
  for (uint32_t at = threadIdx.x * N; at < whole; at += blockDim.x * N) update_pack<N>(a, at, c);
  for (uint32_t at = whole + threadIdx.x; at < count; at += blockDim.x) update_pack<1>(a, at, c);
}

#define ADAMW(T, suffix)                                                                                             \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS) fp8_adamw_norm_##suffix(                                \
      const Chunk* chunks, const Params* params, const uint64_t* grads, double* partials) {                          \
    norm<T>(chunks, params, grads, partials);                                                                        \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256) fp8_adamw_update_##suffix(                                       \
      const Chunk* chunks, const Params* params, const uint64_t* grads, const Control* control) {                    \
    update<T>(chunks, params, grads, control);                                                                       \
  }
FP8_FOR_FLOATS(ADAMW)
ADAMW(double, f64)
