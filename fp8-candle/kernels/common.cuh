// What all kernels share: element types, 16-byte accesses, reductions over a warp and a block.
//
// Naming: extern "C" kernels are `fp8_<what>` or `fp8_<what>_<f32|bf16|f16>`; FP8_FOR_FLOATS defines the three.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// Defines a kernel for each element type from a template: FP8_FOR_FLOATS(DEFINE) with DEFINE(type, suffix).
#define FP8_FOR_FLOATS(DEFINE) \
  DEFINE(float, f32)           \
  DEFINE(__nv_bfloat16, bf16)  \
  DEFINE(__half, f16)

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_f32(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_f32(double x) { return __double2float_rn(x); }

template <class T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 from_f32<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half from_f32<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ double from_f32<double>(float x) { return x; }

// N elements, read and written by as few 16-byte accesses as possible.
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T v[N];
};

// Loads N consecutive elements; `src` is aligned to the pack.
template <int N, class T> __device__ __forceinline__ Pack<T, N> load_pack(const T* src) {
  return *reinterpret_cast<const Pack<T, N>*>(src);
}

// The same as f32.
template <int N, class T> __device__ __forceinline__ void load_f32(const T* src, float (&dst)[N]) {
  const Pack<T, N> pack = load_pack<N>(src);
#pragma unroll
  for (int i = 0; i < N; i++) dst[i] = to_f32(pack.v[i]);
}

// Two elements at a time, which is one instruction on the chip.
__device__ __forceinline__ void round_pair(const float (&src)[2], float* dst) { dst[0] = src[0], dst[1] = src[1]; }
__device__ __forceinline__ void round_pair(const float (&src)[2], __nv_bfloat16* dst) {
  *reinterpret_cast<__nv_bfloat162*>(dst) = __floats2bfloat162_rn(src[0], src[1]);
}
__device__ __forceinline__ void round_pair(const float (&src)[2], __half* dst) {
  *reinterpret_cast<__half2*>(dst) = __floats2half2_rn(src[0], src[1]);
}

// Rounds N elements.
template <class T, int N> __device__ __forceinline__ Pack<T, N> rounded(const float (&src)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i + 1 < N; i += 2) round_pair({src[i], src[i + 1]}, pack.v + i);
  if constexpr (N % 2) pack.v[N - 1] = from_f32<T>(src[N - 1]);
  return pack;
}

// Rounds and stores N consecutive elements; `dst` is aligned to the pack.
template <int N, class T> __device__ __forceinline__ void store_f32(T* dst, const float (&src)[N]) {
  *reinterpret_cast<Pack<T, N>*>(dst) = rounded<T>(src);
}

// Whether pointers may be read and written 16 bytes at a time.
__device__ __forceinline__ bool aligned16(const void* a) { return (reinterpret_cast<uint64_t>(a) & 15) == 0; }

// |x| as bits, in the order of the magnitudes, with NaN above infinity.
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

__device__ __forceinline__ uint64_t global_thread() { return blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; }
__device__ __forceinline__ uint64_t global_threads() { return gridDim.x * (uint64_t)blockDim.x; }

struct Sum {
  template <class T> static __device__ __forceinline__ T apply(T a, T b) { return a + b; }
};
struct Max {
  static __device__ __forceinline__ uint32_t apply(uint32_t a, uint32_t b) { return a > b ? a : b; }
  // NaN is the largest.
  static __device__ __forceinline__ float apply(float a, float b) { return (a != a || a > b) ? a : b; }
};

// The result in every lane.
template <class Op, class T> __device__ __forceinline__ T warp_reduce(T value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value = Op::apply(value, __shfl_xor_sync(ALL_LANES, value, offset));
  return value;
}

// The result in every thread of a one-dimensional block of whole warps, at most 32. `identity` fills absent warps.
template <class Op, class T> __device__ __forceinline__ T block_reduce(T value, T identity) {
  __shared__ T partial[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
  value = warp_reduce<Op>(value);
  // A block may reduce several times.
  __syncthreads();
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  return warp_reduce<Op>(lane < warps ? partial[lane] : identity);
}
