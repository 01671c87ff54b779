#include <stdint.h>

// Sum of each block's row through static shared memory.
extern "C" __global__ void t_static_sum(const float* in, float* out, int width) {
  __shared__ float partial[256];
  float sum = 0;
  for (int i = threadIdx.x; i < width; i += blockDim.x) sum += in[blockIdx.x * width + i];
  partial[threadIdx.x] = sum;
  for (unsigned s = blockDim.x / 2; s; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) partial[threadIdx.x] += partial[threadIdx.x + s];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

// Reverses each block's part through dynamic shared memory.
template <class T> __device__ void reverse(const T* in, T* out) {
  extern __shared__ __align__(16) unsigned char raw[];
  T* buffer = reinterpret_cast<T*>(raw);
  unsigned i = threadIdx.y * blockDim.x + threadIdx.x, n = blockDim.x * blockDim.y;
  buffer[i] = in[blockIdx.x * n + i];
  __syncthreads();
  out[blockIdx.x * n + i] = buffer[n - 1 - i];
}
extern "C" __global__ void t_reverse_f32(const float* in, float* out) { reverse(in, out); }
extern "C" __global__ void t_reverse_u16(const uint16_t* in, uint16_t* out) { reverse(in, out); }

extern "C" __global__ void __launch_bounds__(128) t_barrier_votes(const int* in, int* out) {
  int x = in[threadIdx.x];
  out[threadIdx.x] = __syncthreads_count(x > 0);
  out[128 + threadIdx.x] = __syncthreads_or(x == 77) * 2 + __syncthreads_and(x < 1000);
}

// Which thread wrote where, over all three dimensions.
extern "C" __global__ void t_indices(unsigned* out) {
  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  unsigned n = blockDim.x * blockDim.y * blockDim.z;
  out[block * n + thread] = block << 16 | thread;
}

// Writes one byte of dynamic shared memory and leaves the rest as it was.
extern "C" __global__ void t_uninitialized(float* out) {
  extern __shared__ float memory[];
  __shared__ float fixed[4];
  if (threadIdx.x == 0) {
    out[0] = memory[1];
    out[1] = fixed[2];
    memory[1] = fixed[2] = 1.0f;
  }
}

struct Parameters {
  int n;
  float scale;
  uint8_t shift;
};
extern "C" __global__ void t_parameters(Parameters p, const float* __restrict__ in, float* out, uint8_t more, double most) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) out[i] = in[i] * p.scale + p.shift + more + float(most);
}
