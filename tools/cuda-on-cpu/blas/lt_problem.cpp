// What cublasLtMatmul accepts, after its documentation: "Using 8-bit Floating Point Data Types", "Scaling Modes",
// and the table of types for FP8.
#include <algorithm>

#include "lt.h"

namespace blas {

Matrix::Matrix(const Layout& layout) {
  const Attributes& a = layout.attributes;
  type = a.get<int32_t>(kLayoutType, 0);
  order = a.get<int32_t>(kLayoutOrder, 0);
  rows = a.get<uint64_t>(kLayoutRows, 0);
  cols = a.get<uint64_t>(kLayoutCols, 0);
  ld = a.get<int64_t>(kLayoutLd, 0);
  batch = a.get<int32_t>(kLayoutBatchCount, 1);
  stride = a.get<int64_t>(kLayoutBatchStride, 0);
}

size_t Matrix::extent() const {
  if (rows == 0 || cols == 0) return 0;
  return ((batch - 1) * std::max<int64_t>(stride, 0) + (cols - 1) * ld + rows) * size_of(type);
}

Problem::Problem(const char* call, const MatmulDesc& desc, const Layout& la, const Layout& lb, const Layout& lc,
                 const Layout& ld)
    : call(call), a(la), b(lb), c(lc), d(ld) {
  const Attributes& at = desc.attributes;
  compute = at.get<int32_t>(kDescComputeType, kCompute32F);
  scale_type = at.get<int32_t>(kDescScaleType, kF32);
  transa = at.get<int32_t>(kDescTransA, kNone);
  transb = at.get<int32_t>(kDescTransB, kNone);
  epilogue = at.get<int32_t>(kDescEpilogue, kEpilogueDefault);
  a_mode = at.get<int32_t>(kDescAScaleMode, kScalar);
  b_mode = at.get<int32_t>(kDescBScaleMode, kScalar);
  a_scale = at.get<const float*>(kDescAScale, nullptr);
  fast_accum = at.get<int8_t>(kDescFastAccum, 0) != 0;
  b_scale = at.get<const float*>(kDescBScale, nullptr);
  bias = at.get<const void*>(kDescBiasPointer, nullptr);
  bias_type = at.get<int32_t>(kDescBiasDataType, -1);
  if (bias_type == -1) bias_type = fp8() && d.type == kF32 ? int(kBF16) : d.type;
  extras = false;
  for (int pointer : {kDescCScale, kDescDScale, kDescAmaxD, kDescAuxPointer, kDescAuxScale, kDescAuxAmax, kDescDOutScale})
    extras |= at.get<const void*>(pointer, nullptr) != nullptr;
  m = d.rows;
  n = d.cols;
  k = transa == kNone ? a.cols : a.rows;
}

bool Problem::types_supported() const {
  if (fp8()) {
    if (!is_fp8(a.type) || !is_fp8(b.type) || (a.type == kE5M2 && b.type == kE5M2)) return false;
    return c.type == d.type && (d.type == kBF16 || d.type == kF16 || d.type == kF32);
  }
  if (a.type != b.type || c.type != d.type) return false;
  if (a.type == kF64) return d.type == kF64 && (compute == kCompute64F || compute == kCompute64FPedantic) && scale_type == kF64;
  if (scale_type != kF32) return false;
  return a.type == d.type || (d.type == kF32 && (a.type == kF16 || a.type == kBF16));
}

Status Problem::check_shapes() const {
  if (a.order || b.order || c.order || d.order) return refuse(kNotSupported, call, "only column-major matrices are covered");
  int64_t a_m = transa == kNone ? a.rows : a.cols, b_k = transb == kNone ? b.rows : b.cols,
          b_n = transb == kNone ? b.cols : b.rows;
  if (a_m != m || b_k != k || b_n != n || c.rows != m || c.cols != n)
    return refuse(kInvalidValue, call, "shapes do not fit: op(A) %ldx%ld, op(B) %ldx%ld, C %ldx%ld, D %ldx%ld", a_m, k, b_k,
                  b_n, c.rows, c.cols, m, n);
  for (const Matrix* x : {&a, &b, &c, &d})
    if (x->ld < std::max<int64_t>(1, x->rows))
      return refuse(kInvalidValue, call, "leading dimension %ld of %ld rows", x->ld, x->rows);
  if (a.batch != d.batch || b.batch != d.batch || c.batch != d.batch || d.batch < 1)
    return refuse(kInvalidValue, call, "batch counts differ");
  return kSuccess;
}

Status Problem::check_scales() const {
  int sm = compute_capability();
  for (int mode : {a_mode, b_mode}) {
    if (mode < kScalar || mode > kBlk128) return refuse(kInvalidValue, call, "there is no scale mode %d", mode);
    if (mode == kVec16) return refuse(kNotSupported, call, "scale mode %d is for 4-bit types", mode);
    if (mode == kVec32 && sm < 100) return refuse(kNotSupported, call, "scale mode %d needs compute capability 10.0", mode);
    if (mode > kVec32 && sm != 90) return refuse(kNotSupported, call, "scale mode %d needs compute capability 9.0", mode);
  }
  bool a_block = a_blocks(), b_block = b_blocks();
  bool alike = (a_mode == kVec32) == (b_mode == kVec32) && (a_mode == kOuterVec) == (b_mode == kOuterVec);
  if (a_block != b_block || !alike || (a_mode == kBlk128 && b_mode == kBlk128))
    return refuse(kNotSupported, call, "scale modes %d and %d do not go together", a_mode, b_mode);
  if (a_block && fast_accum) return refuse(kNotSupported, call, "block scales do not go with fast accumulation");
  if (a_block && (m % 16 || n % 16))
    return refuse(kNotSupported, call, "block scales need rows and columns that are multiples of 16: m %ld n %ld", m, n);
  // As Transformer Engine demands of its MXFP8 operands.
  if (a_mode == kVec32 && (m % 32 || n % 32 || k % 32))
    return refuse(kNotSupported, call, "scales of 32 values need sizes that are multiples of 32: m %ld n %ld k %ld", m, n, k);
  if (a_mode != kScalar && d.batch != 1)
    return refuse(kNotSupported, call, "batches with scale mode %d are not covered", a_mode);
  return kSuccess;
}

Status Problem::check_fp8() const {
  if (compute_capability() < 89) return refuse(kNotSupported, call, "FP8 needs compute capability 8.9");
  if (transa != kTranspose || transb != kNone) return refuse(kNotSupported, call, "FP8 needs TRANSA = T and TRANSB = N");
  if (compute != kCompute32F || scale_type != kF32)
    return refuse(kNotSupported, call, "FP8 needs compute type 32F and scale type R_32F");
  // The columns of D are free: PyTorch's scaled product asks for multiples of 16 in the other two dimensions only.
  if (m % 16 || k % 16)
    return refuse(kNotSupported, call, "FP8 needs rows and sums that are multiples of 16: m %ld n %ld k %ld", m, n, k);
  for (const Matrix* x : {&a, &b, &c, &d})
    if (x->ld * size_of(x->type) % 16)
      return refuse(kNotSupported, call, "leading dimension %ld of %s is not a multiple of 16 bytes", x->ld,
                    type_name(x->type));
  return check_scales();
}

Status Problem::check() const {
  if (Status s = check_shapes()) return s;
  if (!types_supported())
    return refuse(kNotSupported, call, "types %s x %s, C %s, D %s, compute type %d", type_name(a.type), type_name(b.type),
                  type_name(c.type), type_name(d.type), compute);
  if (epilogue != kEpilogueDefault && epilogue != kEpilogueBias)
    return refuse(kNotSupported, call, "epilogue %d is not covered", epilogue);
  if (extras)
    return refuse(kNotSupported, call, "scales or amax of C and D, or auxiliary outputs, without an FP8 or auxiliary output");
  if (epilogue == kEpilogueBias && bias_type != (fp8() && d.type == kF32 ? int(kBF16) : d.type))
    return refuse(kNotSupported, call, "bias type %s with D %s", type_name(bias_type), type_name(d.type));
  return fp8() ? check_fp8() : kSuccess;
}

}  // namespace blas
