// Stands in for the inline PTX of the kernels: tensor core products, ldmatrix and cp.async, with the fragment
// layouts of the PTX ISA. The collectives are computed in libcuda.so.1.
#pragma once
#include "coc/runtime.h"

namespace coc {

template <class D, class A, class B> inline void mma(WarpOp op, D& d, const A& a, const B& b, const char* what) {
  MmaLane own{d, a, b};
  coc_warp_collective(~0u, op, &own, what);
}

template <unsigned N> inline void ldmatrix(WarpOp op, uint32_t (&r)[N], const void* row, const char* what) {
  LdmatrixLane own{r, row, N};
  coc_warp_collective(~0u, op, &own, what);
}

}  // namespace coc

// d (16x8) += a (16x16) * b (16x8)
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  coc::mma(coc_mma_bf16, d, a, b, "mma.m16n8k16.bf16");
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  coc::mma(coc_mma_f16, d, a, b, "mma.m16n8k16.f16");
}
// d (16x8) += a (16x8) * b (8x8), of which the upper 19 bits count
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  coc::mma(coc_mma_tf32, d, a, b, "mma.m16n8k8.tf32");
}

// Lanes 8i .. 8i+7 give the rows of matrix i, 16 bytes each.
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { coc::ldmatrix(coc_ldmatrix, r, row, "ldmatrix.x4"); }
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row) { coc::ldmatrix(coc_ldmatrix, r, row, "ldmatrix.x2"); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  coc::ldmatrix(coc_ldmatrix_trans, r, row, "ldmatrix.x4.trans");
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
  coc::ldmatrix(coc_ldmatrix_trans, r, row, "ldmatrix.x2.trans");
}

// Zeros where not valid.
inline void cp_async_16(void* shared, const void* global, bool valid) { coc_cp_async_issue(shared, global, valid); }
inline void cp_async_commit() { coc_cp_async_commit(); }
template <int N> inline void cp_async_wait() { coc_cp_async_wait(N); }
