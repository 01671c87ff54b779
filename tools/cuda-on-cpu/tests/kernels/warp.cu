// One warp (or a few): each kernel writes what every lane got.
#include <stdint.h>

extern "C" __global__ void t_shuffles(const float* in, float* out) {
  unsigned i = threadIdx.x;
  float x = in[i];
  out[i] = __shfl_sync(~0u, x, 5);
  out[32 + i] = __shfl_up_sync(~0u, x, 3);
  out[64 + i] = __shfl_down_sync(~0u, x, 4, 16);
  out[96 + i] = __shfl_xor_sync(~0u, x, 9);
  out[128 + i] = __shfl_sync(~0u, x, int(i * 7 + 40), 8);
  double d = x;
  out[160 + i] = float(__shfl_xor_sync(~0u, d, 1));
  out[192 + i] = __half2float(__shfl_xor_sync(~0u, __float2half(x), 2));
}

extern "C" __global__ void t_votes(const int* in, unsigned* out) {
  unsigned i = threadIdx.x;
  int x = in[i];
  out[i] = __ballot_sync(~0u, x > 0);
  out[32 + i] = __any_sync(~0u, x > 1000) * 2 + __all_sync(~0u, x > -1000);
  out[64 + i] = unsigned(__reduce_max_sync(~0u, x));
  out[96 + i] = __reduce_add_sync(~0u, unsigned(x));
  // The two halves go different ways.
  if (i < 16)
    out[128 + i] = __reduce_or_sync(0x0000ffffu, unsigned(x));
  else
    out[128 + i] = __reduce_or_sync(0xffff0000u, unsigned(x));
  __syncwarp();
}
