// Products of a warpgroup, whose operands are laid out by hand, and named barriers.
#include <stdint.h>
#include "fp8_on_cpu_wgmma.h"

// Bytes 16 to 45 of a descriptor are the leading and the stride dimension's offset, bits 62 and 63 the mode.
__device__ uint64_t descriptor(const void* at, uint32_t leading, uint32_t stride, uint64_t mode) {
  return shared_address(at) / 16 | (uint64_t)(leading / 16) << 16 | (uint64_t)(stride / 16) << 32 | mode << 62;
}

template <int N> __device__ void store(const float (&d)[N][4], float* out) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
  for (int n = 0; n < N; n++)
    for (int e = 0; e < 4; e++) out[(row + e / 2 * 8) * 8 * N + 8 * n + col + e % 2] = d[n][e];
}

// Where the 128-byte swizzle puts element (row, col) of rows of 64 elements.
__device__ int swizzled(int row, int col) { return row * 64 + ((col / 8) ^ (row % 8)) * 8 + col % 8; }

// The thread's part of columns `col` to `col` + 15 of a [64, width].
__device__ void load_left(uint32_t (&left)[4], const uint16_t* a, int width, int col) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  for (int r = 0; r < 4; r++) {
    const uint16_t* const pair = a + (row + r % 2 * 8) * width + col + threadIdx.x % 4 * 2 + r / 2 * 8;
    left[r] = pair[0] | (uint32_t)pair[1] << 16;
  }
}

// a [64, 64] times b [128, 64] transposed, both by rows, b and if not HELD also a in shared memory.
template <bool HELD> __device__ void product_of_rows(const uint16_t* a, const uint16_t* b, float* out) {
  extern __shared__ __align__(1024) uint16_t tiles[];
  uint16_t* const b_tile = tiles + 64 * 64;
  for (int i = threadIdx.x; i < 64 * 64; i += 128) tiles[swizzled(i / 64, i % 64)] = a[i];
  for (int i = threadIdx.x; i < 128 * 64; i += 128) b_tile[swizzled(i / 64, i % 64)] = b[i];
  fence_products();
  __syncthreads();
  float d[16][4];
  uint32_t held[4][4];
  for (int k = 0; k < 4; k++) load_left(held[k], a, 64, 16 * k);
  wgmma_fence();
  for (int k = 0; k < 4; k++) {
    const uint64_t left = descriptor(tiles + 16 * k, 16, 1024, 1), right = descriptor(b_tile + 16 * k, 16, 1024, 1);
    if (k == 0) HELD ? wgmma_rows<false>(d, held[k], right) : wgmma_rows<false>(d, left, right);
    else HELD ? wgmma_rows<true>(d, held[k], right) : wgmma_rows<true>(d, left, right);
  }
  wgmma_commit();
  wgmma_wait<0>();
  store(d, out);
}
extern "C" __global__ void t_wgmma_rows(const uint16_t* a, const uint16_t* b, float* out) { product_of_rows<false>(a, b, out); }
extern "C" __global__ void t_wgmma_rows_held(const uint16_t* a, const uint16_t* b, float* out) {
  product_of_rows<true>(a, b, out);
}

// out += a [64, 32], in registers, times b [32, 128] by rows, in two panels of 64 columns.
extern "C" __global__ void t_wgmma_columns(const uint16_t* a, const uint16_t* b, float* out) {
  extern __shared__ __align__(1024) uint16_t tiles[];
  for (int i = threadIdx.x; i < 32 * 128; i += 128) tiles[i % 128 / 64 * 32 * 64 + swizzled(i / 128, i % 64)] = b[i];
  fence_products();
  __syncthreads();
  uint32_t left[2][4];
  float d[16][4];
  for (int k = 0; k < 2; k++) load_left(left[k], a, 32, 16 * k);
  for (int n = 0; n < 16; n++)
    for (int e = 0; e < 4; e++) d[n][e] = 1.0f;
  wgmma_fence();
  for (int k = 0; k < 2; k++) wgmma_columns(d, left[k], descriptor(tiles + k * 16 * 64, 32 * 64 * 2, 1024, 1));
  wgmma_commit();
  wgmma_wait<0>();
  store(d, out);
}

// Rows 0 to 15 of the result are those of the right operand [16, 8 N], of which `image` is shared memory.
template <int N>
__device__ void show(const uint16_t* image, float* out, uint32_t leading, uint32_t stride, uint32_t mode) {
  extern __shared__ __align__(1024) uint16_t tiles[];
  for (int i = threadIdx.x; i < 16 * 8 * N; i += 128) tiles[i] = image[i];
  fence_products();
  __syncthreads();
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
  uint32_t one[4];
  for (int r = 0; r < 4; r++) {
    const int distance = row + r % 2 * 8 - (col + r / 2 * 8);
    one[r] = distance == 0 ? 0x3f80u : distance == 1 ? 0x3f800000u : 0;
  }
  float d[N][4] = {};
  wgmma_fence();
  wgmma_columns(d, one, descriptor(tiles, leading, stride, mode));
  wgmma_commit();
  wgmma_wait<0>();
  store(d, out);
}
extern "C" __global__ void t_wgmma_show16(const uint16_t* image, float* out, uint32_t leading, uint32_t stride, uint32_t mode) {
  show<2>(image, out, leading, stride, mode);
}
extern "C" __global__ void t_wgmma_show32(const uint16_t* image, float* out, uint32_t leading, uint32_t stride, uint32_t mode) {
  show<4>(image, out, leading, stride, mode);
}
extern "C" __global__ void t_wgmma_show64(const uint16_t* image, float* out, uint32_t leading, uint32_t stride, uint32_t mode) {
  show<8>(image, out, leading, stride, mode);
}

// One product of ones, whose operand changes, and whose result is read, before and after the wait.
extern "C" __global__ void t_wgmma_waits(float* out) {
  extern __shared__ __align__(1024) uint16_t tiles[];
  for (int i = threadIdx.x; i < 16 * 64; i += 128) tiles[i] = 0x3f80;
  fence_products();
  __syncthreads();
  const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  float d[8][4] = {};
  wgmma_fence();
  wgmma_columns(d, ones, descriptor(tiles, 2048, 1024, 1));
  wgmma_commit();
  wgmma_wait<1>();
  if (threadIdx.x == 0) out[0] = d[0][0];
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * 64; i += 128) tiles[i] = 0x4000;
  __syncthreads();
  wgmma_wait<0>();
  if (threadIdx.x == 0) out[1] = d[0][0];
}

// Warps 4 to 7 hand numbers to warps 0 to 3, one slot at a time.
extern "C" __global__ void t_named_barriers(float* out) {
  __shared__ float slot[128];
  const int thread = threadIdx.x % 128;
  float sum = 0.0f;
  for (int round = 0; round < 5; round++) {
    if (threadIdx.x >= 128) {
      if (round > 0) named_barrier_wait(2, 256);
      slot[thread] = float(thread + round);
      named_barrier_arrive(1, 256);
    } else {
      named_barrier_wait(1, 256);
      sum += slot[127 - thread];
      if (round < 4) named_barrier_arrive(2, 256);
    }
  }
  if (threadIdx.x < 128) out[threadIdx.x] = sum;
}

extern "C" __global__ void f_wgmma_unfenced(float*) {
  float d[8][4] = {};
  const uint32_t a[4] = {};
  wgmma_columns(d, a, 0);
}
extern "C" __global__ void f_wgmma_without_wait(float*) {
  float d[8][4] = {};
  const uint32_t a[4] = {};
  wgmma_fence();
  wgmma_columns(d, a, 0);
  wgmma_commit();
}
extern "C" __global__ void f_wgmma_outside(float*) {
  extern __shared__ __align__(1024) uint16_t tiles[];
  float d[8][4] = {};
  const uint32_t a[4] = {};
  wgmma_fence();
  wgmma_columns(d, a, descriptor(tiles, 2048, 1040, 1));
  wgmma_commit();
  wgmma_wait<0>();
}
extern "C" __global__ void f_wgmma_half(float*) {
  if (threadIdx.x < 64) wgmma_fence();
}
extern "C" __global__ void f_named_barrier(float*) {
  if (threadIdx.x < 32) named_barrier_wait(3, 64);
}
