// What the kernels of attention with products in FP8 share. Operands are bf16 and hold the values of FP8 codes, which are exact there, so
// products are those of bf16. P and dS are computed in f32 and rounded in registers: a row, the keys of one query, has one scale,
// which follows from its largest magnitude. So kernels go over the keys before they round anything.
#pragma once
#include "attention_wgmma.cuh"
#include "nearest.cuh"

// Results [batch, head, row, d], in f32 if `wide`, else in bf16.
struct Results {
  void* data;
  uint64_t batch_stride, head_stride, row_stride;
  int wide;

  template <class T> __device__ __forceinline__ Heads<T> at(uint32_t batch, uint32_t head) const {
    return Heads<T>{static_cast<T*>(data), batch_stride, head_stride, row_stride}.at(batch, head);
  }
  // `store_rows` for one head.
  template <int D>
  __device__ __forceinline__ void store(uint32_t batch, uint32_t head, int first, int rows, int head_dim,
                                        const float (&d)[1][D / 8][4], float factor) const {
    const float factors[1][2] = {{factor, factor}};
    if (wide) store_rows<D>(at<float>(batch, head), first, rows, head_dim, d, factors);
    else store_rows<D>(at<__nv_bfloat16>(batch, head), first, rows, head_dim, d, factors);
  }
};

// What the backward pass keeps of a query for the sums over queries: 16 bytes.
struct __align__(16) QueryStatistics {
  float lse, least_of_p, delta, least_of_ds;
};

#ifdef FP8_WGMMA
#define CONTENTS(...) __VA_ARGS__

// The sum and the largest of a row's values in the four threads that have it.
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

#else
#define CONTENTS(...)
#endif
