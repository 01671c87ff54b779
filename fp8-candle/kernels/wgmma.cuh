// Products of warpgroups (`wgmma`, Hopper alone): 4 warps multiply matrices that lie in shared memory, asynchronously, and get the
// result in their registers. With them the named barriers through which warpgroups hand tiles to each other, and the split of
// the registers between warpgroups.
//
// Source: PTX ISA, sections "Asynchronous warpgroup level matrix instructions", "barrier{.cta}", "setmaxnreg", "membar / fence".
#pragma once
#include "ptx.cuh"

constexpr int WARPGROUP_THREADS = 128;

// Rows of a matrix in shared memory as `wgmma` reads it here: 64 elements of 16 bits, whose eight 16-byte chunks are permuted by
// the row's number modulo 8 (128-byte swizzle). Wider matrices are several panels of such rows. Panels begin at multiples of 1024
// bytes.
constexpr int PANEL_COLUMNS = 64, PANEL_ROW_BYTES = 128;

// Describes a matrix in panels at `address`. `leading`: bytes from one panel to the next, where an instruction reads across
// panels. Eight rows are followed by the next eight. Later parts of the matrix: add their distance in bytes / 16.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading) {
  constexpr uint64_t SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = 8 * PANEL_ROW_BYTES / 16;
  return SWIZZLE_128 | EIGHT_ROWS << 32 | (uint64_t)(leading / 16) << 16 | address / 16;
}

#ifdef FP8_ON_CPU

#include "fp8_on_cpu_wgmma.h"

template <class T> __device__ __forceinline__ void wgmma_done(T&) {}
__device__ __forceinline__ void computed_here(int) {}

#else

// Before the first product after registers that take part were written otherwise.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the latest N groups are pending.
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The compiler believes that a product is done when it is started. With this behind a wait, it uses no result before.
template <int N> __device__ __forceinline__ void wgmma_done(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

// The same for left operands, which may only change when the product is done.
template <int N> __device__ __forceinline__ void wgmma_done(uint32_t (&a)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
}

#define WGMMA_4(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define WGMMA_16(d, n) WGMMA_4(d, n), WGMMA_4(d, n + 1), WGMMA_4(d, n + 2), WGMMA_4(d, n + 3)
#define WGMMA_32(d, n) WGMMA_16(d, n), WGMMA_16(d, n + 4)
#define WGMMA_64(d, n) WGMMA_32(d, n), WGMMA_32(d, n + 8)
#define WGMMA_NAMES_32                                                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
  "%26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_64                                                                                                    \
  WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
                 "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = a b^T, or with ADD d += a b^T, of bf16: a [64, 16] and b [8 N, 16], rows in shared memory. Of d, warp w of the warpgroup has
// rows 16 w to 16 w + 15 in the order of mma_m16n8k16: d[n] are columns 8 n to 8 n + 7.
template <bool ADD> __device__ __forceinline__ void wgmma_rows(float (&d)[16][4], uint64_t a, uint64_t b) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_NAMES_64 "}, %64, %65, add, 1, 1, 0, 0;\n}"
               : WGMMA_64(d, 0)
               : "l"(a), "l"(b), "n"(ADD));
}

template <bool ADD> __device__ __forceinline__ void wgmma_rows(float (&d)[8][4], uint64_t a, uint64_t b) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_NAMES_32 "}, %32, %33, add, 1, 1, 0, 0;\n}"
               : WGMMA_32(d, 0)
               : "l"(a), "l"(b), "n"(ADD));
}

// The same with `a` in registers, in the order of mma_m16n8k16 for each warp's 16 rows.
template <bool ADD> __device__ __forceinline__ void wgmma_rows(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_NAMES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
               : WGMMA_32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));
}

template <bool ADD> __device__ __forceinline__ void wgmma_rows(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_NAMES_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 0;\n}"
               : WGMMA_64(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));
}

// d += a b, of bf16: a [64, 16] in registers, as above; b [16, 8 N], rows in shared memory.
__device__ __forceinline__ void wgmma_columns(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_NAMES_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : WGMMA_32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_columns(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : WGMMA_64(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Keeps what `x` depends on at this point of the code. The assembler moves arithmetic that runs beside a product behind the wait for
// that product, but not across a branch, so this is one that is never taken: `x` is not negative.
__device__ __forceinline__ void computed_here(int x) {
  if (x < 0) asm volatile("nanosleep.u32 0;");
}

// What this thread has written to shared memory before, copies that have arrived included, is seen by products that are ordered
// behind this by a barrier.
__device__ __forceinline__ void fence_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers: `threads` threads have to come, whole warps, of which those that only arrive do not wait.
__device__ __forceinline__ void named_barrier_wait(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The registers of each thread of a warpgroup from here on.
template <int N> __device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
