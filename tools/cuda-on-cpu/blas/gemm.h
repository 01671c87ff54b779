// Matrix products on the CPU: decoded to f32 (f64 for f64), packed, multiplied in tiles.
#pragma once
#include <cstdint>

namespace blas {

// A column-major matrix as the product sees it, op(X): rows x cols.
struct Operand {
  const void* data;
  int type;
  int64_t ld;
  bool transposed;  // stored as cols x rows
};

// Scales that change along the sum: stretch p / length of row (of A) or column (of B) i.
// Null pointers stand for 1.
struct StretchScales {
  int64_t length = 128;
  const float* a = nullptr;
  int64_t a_row_stride = 0, a_stretch_stride = 0, a_row_block = 1;
  const float* b = nullptr;
  int64_t b_row_stride = 0, b_stretch_stride = 0, b_row_block = 1;
};

// sums (m x n, column-major without gaps) = op(A) op(B)
void multiply(const Operand& a, const Operand& b, int64_t m, int64_t n, int64_t k, const StretchScales* scales, float* sums);
void multiply(const Operand& a, const Operand& b, int64_t m, int64_t n, int64_t k, double* sums);

// The same for FP8, with the precision of tensor cores; `fast_accum` keeps it for the whole sum, else 128 terms at a time have it,
// or those that share scales.
void multiply_fp8(const Operand& a, const Operand& b, int64_t m, int64_t n, int64_t k, const StretchScales* scales,
                  bool fast_accum, float* sums);

// D = alpha * sums + beta * C + bias (per row), rounded once to the type. C is not read where beta is 0.
struct Output {
  const void* c;
  int c_type;
  int64_t ldc;
  void* d;
  int d_type;
  int64_t ldd;
};
// row_scales and column_scales multiply the sums; they and the bias may be null.
template <class T>
void finish(const T* sums, int64_t m, int64_t n, double alpha, double beta, const Output& out, const float* row_scales,
            const float* column_scales, const void* bias, int bias_type);

extern template void finish(const float*, int64_t, int64_t, double, double, const Output&, const float*, const float*,
                            const void*, int);
extern template void finish(const double*, int64_t, int64_t, double, double, const Output&, const float*, const float*,
                            const void*, int);

// Calls work(first, last) for parts of [0, count) on a few OS threads.
void share(int64_t count, int64_t granularity, bool worth_it, void (*work)(void* context, int64_t, int64_t), void* context);

}  // namespace blas
