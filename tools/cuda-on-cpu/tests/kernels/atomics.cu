#include <stdint.h>

extern "C" __global__ void t_atomics(int* i, unsigned* u, float* f, double* d, __half* h, __nv_bfloat162* b) {
  unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(i, 1);
  atomicAdd(u, 2u);
  atomicMax(u + 1, id);
  atomicMin(u + 2, id);
  atomicOr(u + 3, 1u << id % 32);
  atomicAdd(f, 1.0f);
  atomicMax(reinterpret_cast<unsigned*>(f + 1), __float_as_uint(float(id)));
  atomicAdd(d, 0.5);
  if (id < 100) atomicAdd(h, __float2half(1.0f));
  if (id < 100) atomicAdd(b, __floats2bfloat162_rn(1.0f, 2.0f));
  // Every value once: a counter that hands out places.
  unsigned place = atomicInc(u + 4, 0xffffffffu);
  i[16 + place] = int(id);
  unsigned old = u[5], assumed;
  do {
    assumed = old;
    old = atomicCAS(u + 5, assumed, assumed + 3);
  } while (old != assumed);
}

// The last block to finish adds up what the others left.
extern "C" __global__ void t_last_block(const float* in, float* partial, unsigned* counter, float* out) {
  __shared__ bool last;
  float x = in[blockIdx.x * blockDim.x + threadIdx.x];
  for (int o = 16; o; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = x;
    __threadfence();
    last = atomicAdd(counter, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++) sum += partial[i];
    *out = sum;
  }
}
