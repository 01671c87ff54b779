// Kernels that are wrong, for the reports.
#include "fp8_on_cpu_ptx.h"

extern "C" __global__ void f_some_exit(float* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

extern "C" __global__ void f_barrier_in_branch(float* out) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
  if (threadIdx.x >= 32) __shfl_xor_sync(threadIdx.x == 32 ? ~0u : ~0u, 1.0f, 1), out[0] = __syncthreads_or(1);
}

extern "C" __global__ void f_missing_lanes(float* out) {
  if (threadIdx.x < 16)
    out[threadIdx.x] = __shfl_down_sync(~0u, 1.0f, 1);
  else
    __syncthreads();
}

extern "C" __global__ void f_exited_lanes(float* out) {
  if (threadIdx.x >= 20) return;
  out[threadIdx.x] = __shfl_down_sync(~0u, 1.0f, 1);
}

extern "C" __global__ void f_other_mask(float* out) {
  out[threadIdx.x] = threadIdx.x < 16 ? __shfl_xor_sync(~0u, 1.0f, 1) : __shfl_xor_sync(0xffff0000u | 1u << 3, 1.0f, 1);
}

extern "C" __global__ void f_out_of_bounds(float* out, int n) { out[n + threadIdx.x] = 1; }

extern "C" __global__ void f_shared_overflow(float* out) {
  extern __shared__ float memory[];
  memory[blockDim.x + 1] = 1;
  out[threadIdx.x] = memory[0];
}

extern "C" __global__ void f_misaligned(const float* in, float4* out) {
  out[0] = __ldg(reinterpret_cast<const float4*>(in + 1));
}

extern "C" __global__ void f_misaligned_vector(const float* in, float4* out) {
  out[threadIdx.x] = *reinterpret_cast<const float4*>(in + 2);
}

extern "C" __global__ void f_static_overflow(float* out) {
  __shared__ float value[16][17];
  value[threadIdx.x / 2][threadIdx.x % 2 * 17] = 1;
  out[threadIdx.x] = value[threadIdx.x / 2][0];
}

extern "C" __global__ void f_ldmatrix_alignment(float* out) {
  __shared__ __align__(16) unsigned short rows[32][9];
  uint32_t r[4];
  ldmatrix_x4(r, rows[threadIdx.x]);
  out[threadIdx.x] = float(r[0]);
}

// Right only if warp 0 runs before warp 1: a barrier is missing.
extern "C" __global__ void f_missing_barrier(float* out) {
  __shared__ float value[32];
  if (threadIdx.x < 32) value[threadIdx.x] = float(threadIdx.x);
  if (threadIdx.x >= 32) out[threadIdx.x - 32] = value[threadIdx.x - 32];
}
