// Instructions that CUDA C++ has no functions for: products on tensor cores, matrix loads from shared memory, asynchronous
// copies. The only inline PTX of these kernels; a build with FP8_ON_CPU brings its own versions.
//
// Source: PTX ISA, sections "Matrix multiply-accumulate operation using mma instruction", "ldmatrix" and "cp.async".
#pragma once
#include <stdint.h>

#ifdef FP8_ON_CPU

#include "fp8_on_cpu_ptx.h"

__device__ __forceinline__ int recomputed(int x) { return x; }
__device__ __forceinline__ float exp2_approximate(float x) { return exp2f(x); }
__device__ __forceinline__ float reciprocal_approximate(float x) { return 1.0f / x; }
__device__ __forceinline__ float least(float x, float y) { return x != x || x < y ? x : y; }

#else

// d += a * b, a [16, 16] by rows, b [16, 8] by columns, sums in f32. With g = lane / 4 and t = lane % 4, of two elements per
// register: a = (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); b = (2t, g), (2t + 8, g); d, one element per register,
// = (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a * b, a [16, 8] by rows, b [8, 8] by columns, f32 bits whose low 13 are zero. a = (g, t), (g + 8, t), (g, t + 4),
// (g + 8, t + 4); b = (t, g), (t + 4, g); d as above.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 8x8 matrices of 16-bit elements: lanes 8i to 8i + 7 hold the addresses of the rows of matrix i (16 bytes each, aligned); a
// lane gets elements (lane / 4, 2 * (lane % 4)) and the next of each. `trans`: of each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(smem_row)));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(smem_row)));
}

// Two matrices, with addresses from lanes 0 to 15; the other lanes hold any valid address.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(smem_row)));
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(smem_row)));
}

// Starts a copy of 16 aligned bytes past L1; zeros when not valid, and `gmem` may then point anywhere.
__device__ __forceinline__ void cp_async_16(void* smem, const void* gmem, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(smem)), "l"(gmem), "r"(valid ? 16 : 0)
               : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the latest N groups of this thread are pending.
template <int N> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// `x`. What follows from it is computed where it is used, and not before a loop, where it would need registers all the time.
__device__ __forceinline__ int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 2^x within 2 ulp; results below the normal range are 0.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 1 ulp; results below the normal range are 0.
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The lesser of a number, or NaN, and a number.
__device__ __forceinline__ float least(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

#endif
