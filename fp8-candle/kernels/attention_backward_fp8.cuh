// What the two backward kernels of attention with products in FP8 get, in the order of their parameters.
#pragma once
#include "attention_backward_wgmma.cuh"
#include "attention_fp8.cuh"

// q, k, v and the gradient of the result hold the values of FP8 codes.
struct Fp8Inputs {
  Heads<const __nv_bfloat16> q, k, v, dout;
  float softmax_scale_log2, softmax_scale;
  // The formats of P and of dS.
  Steps format, grad_format;
};

#define PARAMETERS                                                                                                         \
  const __nv_bfloat16 *q, const __nv_bfloat16 *k, const __nv_bfloat16 *v, const __nv_bfloat16 *dout, uint64_t q_batch,      \
      uint64_t q_head, uint64_t q_row, uint64_t k_batch, uint64_t k_head, uint64_t k_row, uint64_t v_batch, uint64_t v_head, \
      uint64_t v_row, uint64_t dout_batch, uint64_t dout_head, uint64_t dout_row, int heads, int group, int queries,        \
      int keys, int head_dim, int causal, float softmax_scale_log2, float softmax_scale, float most, float least_normal,    \
      float to_large, float grad_most, float grad_least_normal, float grad_to_large
#define INPUTS                                                                                                             \
  {{q, q_batch, q_head, q_row}, {k, k_batch, k_head, k_row}, {v, v_batch, v_head, v_row}, {dout, dout_batch, dout_head,     \
   dout_row}, softmax_scale_log2, softmax_scale, {most, least_normal, to_large}, {grad_most, grad_least_normal, grad_to_large}}
#define PROBLEM {heads, group, queries, keys, head_dim, causal}
