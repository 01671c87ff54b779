// Products of whole tiles: A (row-major) times B (stored column by column) plus C.
#include <stdint.h>
#include "fp8_on_cpu_ptx.h"

// The fragments are filled by hand, after the tables of the PTX ISA.
template <void (*product)(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2])>
__device__ void tile16(const uint16_t* a, const uint16_t* b, float* c) {
  int group = threadIdx.x / 4, t = threadIdx.x % 4;
  auto pair = [](const uint16_t* p) { return uint32_t(p[0]) | uint32_t(p[1]) << 16; };
  uint32_t fa[4], fb[2];
  for (int r = 0; r < 4; r++) fa[r] = pair(a + (group + (r & 1) * 8) * 16 + t * 2 + (r >> 1) * 8);
  for (int r = 0; r < 2; r++) fb[r] = pair(b + group * 16 + t * 2 + r * 8);
  float d[4];
  for (int r = 0; r < 4; r++) d[r] = c[(group + (r >> 1) * 8) * 8 + t * 2 + (r & 1)];
  product(d, fa, fb);
  for (int r = 0; r < 4; r++) c[(group + (r >> 1) * 8) * 8 + t * 2 + (r & 1)] = d[r];
}
extern "C" __global__ void t_mma_bf16(const uint16_t* a, const uint16_t* b, float* c) { tile16<mma_m16n8k16_bf16>(a, b, c); }
extern "C" __global__ void t_mma_f16(const uint16_t* a, const uint16_t* b, float* c) { tile16<mma_m16n8k16_f16>(a, b, c); }

extern "C" __global__ void t_mma_tf32(const uint32_t* a, const uint32_t* b, float* c) {
  int group = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t fa[4], fb[2];
  for (int r = 0; r < 4; r++) fa[r] = a[(group + (r & 1) * 8) * 8 + t + (r >> 1) * 4];
  for (int r = 0; r < 2; r++) fb[r] = b[group * 8 + t + r * 4];
  float d[4];
  for (int r = 0; r < 4; r++) d[r] = c[(group + (r >> 1) * 8) * 8 + t * 2 + (r & 1)];
  mma_m16n8k8_tf32(d, fa, fb);
  for (int r = 0; r < 4; r++) c[(group + (r >> 1) * 8) * 8 + t * 2 + (r & 1)] = d[r];
}

// The way kernels really do it: cp.async to shared memory, ldmatrix, product. B is k x n, row-major here.
extern "C" __global__ void t_mma_ldmatrix(const uint16_t* a, const uint16_t* b, float* c) {
  __shared__ __align__(16) uint16_t sa[16][24], sb[16][8];
  int lane = threadIdx.x, group = lane / 4, t = lane % 4;
  cp_async_16(&sa[lane / 2][lane % 2 * 8], a + lane * 8, true);
  cp_async_commit();
  cp_async_16(&sb[lane % 16][0], b + lane % 16 * 8, lane < 16 || true);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  uint32_t fa[4], fb[2];
  ldmatrix_x4(fa, &sa[lane % 16][lane / 16 * 8]);
  ldmatrix_x2_trans(fb, &sb[lane % 16][0]);
  float d[4] = {};
  mma_m16n8k16_bf16(d, fa, fb);
  for (int r = 0; r < 4; r++) c[(group + (r >> 1) * 8) * 8 + t * 2 + (r & 1)] = d[r];
}

// Four 8x8 matrices one below the other; out: [variant][register][lane].
extern "C" __global__ void t_ldmatrix(const uint16_t* in, uint32_t* out) {
  __shared__ alignas(16) uint16_t rows[32][8];
  int lane = threadIdx.x;
  for (int j = 0; j < 8; j++) rows[lane][j] = in[lane * 8 + j];
  __syncwarp();
  uint32_t r4[4], r2[2];
  ldmatrix_x4(r4, rows[lane]);
  for (int r = 0; r < 4; r++) out[r * 32 + lane] = r4[r];
  ldmatrix_x4_trans(r4, rows[lane]);
  for (int r = 0; r < 4; r++) out[128 + r * 32 + lane] = r4[r];
  ldmatrix_x2(r2, rows[lane % 16]);
  for (int r = 0; r < 2; r++) out[256 + r * 32 + lane] = r2[r];
  ldmatrix_x2_trans(r2, rows[lane % 16]);
  for (int r = 0; r < 2; r++) out[320 + r * 32 + lane] = r2[r];
}

// What shared memory holds before and after the waits; the last copy is not valid and must give zeros.
extern "C" __global__ void t_cp_async(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t buffer[3][4];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 12; i++) (&buffer[0][0])[i] = 1000;
    cp_async_16(buffer[0], in, true);
    cp_async_commit();
    cp_async_16(buffer[1], in + 4, true);
    cp_async_16(buffer[2], in + 8, false);
    cp_async_commit();
    out[0] = buffer[0][1];
    cp_async_wait<1>();
    out[1] = buffer[0][1];
    out[2] = buffer[1][1];
    cp_async_wait<0>();
    out[3] = buffer[1][1];
    out[4] = buffer[2][1];
  }
}
