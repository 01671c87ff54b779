// FP8 products with the sums of Hopper's tensor cores, which keep fewer bits than f32.
//
// Source: "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2: the products of a step of 32 are shifted to the
// largest exponent among them and the sum so far, and what lies more than 13 bits below it is cut off. Which way a negative value is
// cut off is not said there; other generations cut magnitudes, and so does this.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "gemm.h"
#include "types.h"

namespace blas {

namespace {

constexpr int kRows = 16;       // computed at once
constexpr int64_t kStep = 32;   // terms that are aligned together
constexpr int kKept = 13;       // bits below the largest exponent
constexpr int64_t kRun = 128;   // terms between two additions in f32, without fast accumulation

typedef float Floats __attribute__((vector_size(4 * kRows)));
typedef int32_t Ints __attribute__((vector_size(4 * kRows)));

constexpr int32_t kExponent = 0x7F800000, kOne = 1 << 23;

float decoded(const Operand& x, int64_t at) {
  return x.type == kE5M2 ? to_float(static_cast<const e5m2*>(x.data)[at]) : to_float(static_cast<const e4m3*>(x.data)[at]);
}

// sum = sum + products, as the tensor core has it. `finite`: no operand is Inf or NaN.
Floats step(Floats sum, const Floats* products, int64_t count, bool finite) {
  Ints largest = reinterpret_cast<Ints>(sum) & kExponent;
  for (int64_t p = 0; p < count; p++) {
    Ints exponent = reinterpret_cast<Ints>(products[p]) & kExponent;
    largest = exponent > largest ? exponent : largest;
  }
  // Products of FP8 values are between 2^-32 and 2^32: no power of two here leaves the range of f32.
  Ints bound = largest < (32 << 23) ? Ints{} + (32 << 23) : largest;
  Floats up = reinterpret_cast<Floats>((127 + kKept) * kOne - bound + 127 * kOne);
  Floats down = reinterpret_cast<Floats>(bound - kKept * kOne);
  Ints total = __builtin_convertvector(sum * up, Ints);
  for (int64_t p = 0; p < count; p++) total += __builtin_convertvector(products[p] * up, Ints);
  Floats kept = __builtin_convertvector(total, Floats) * down;
  if (finite) return kept;
  // Inf and NaN spread as in any sum.
  Floats plain = sum;
  for (int64_t p = 0; p < count; p++) plain += products[p];
  return largest == kExponent ? plain : kept;
}

}  // namespace

void multiply_fp8(const Operand& a, const Operand& b, int64_t m, int64_t n, int64_t k, const StretchScales* scales,
                  bool fast_accum, float* sums) {
  int64_t run = scales ? scales->length : fast_accum ? std::max<int64_t>(k, 1) : kRun;
  std::vector<float> columns(n * k);
  std::vector<char> finite_column(n, 1);
  for (int64_t j = 0; j < n; j++)
    for (int64_t p = 0; p < k; p++) {
      float value = decoded(b, b.transposed ? p * b.ld + j : j * b.ld + p);
      columns[j * k + p] = value;
      finite_column[j] &= std::isfinite(value);
    }
  auto part = [&](int64_t m0, int64_t m1) {
    std::vector<Floats> rows(k);
    for (int64_t i0 = m0; i0 < m1; i0 += kRows) {
      int64_t height = std::min<int64_t>(kRows, m1 - i0);
      bool finite_rows = true;
      for (int64_t p = 0; p < k; p++)
        for (int64_t i = 0; i < kRows; i++) {
          float value = i < height ? decoded(a, a.transposed ? (i0 + i) * a.ld + p : p * a.ld + i0 + i) : 0.0f;
          rows[p][i] = value;
          finite_rows &= std::isfinite(value);
        }
      for (int64_t j = 0; j < n; j++) {
        const float* column = &columns[j * k];
        Floats total = {};
        for (int64_t p0 = 0; p0 < k; p0 += run) {
          Floats sum = {};
          for (int64_t p = p0; p < std::min(k, p0 + run); p += kStep) {
            int64_t count = std::min({kStep, k - p, p0 + run - p});
            Floats products[kStep];
            for (int64_t q = 0; q < count; q++) products[q] = rows[p + q] * column[p + q];
            sum = step(sum, products, count, finite_rows && finite_column[j]);
          }
          if (scales) {
            int64_t stretch = p0 / run;
            float sb = scales->b
                           ? scales->b[j / scales->b_row_block * scales->b_row_stride + stretch * scales->b_stretch_stride]
                           : 1.0f;
            for (int64_t i = 0; i < height; i++) {
              float sa = scales->a ? scales->a[(i0 + i) / scales->a_row_block * scales->a_row_stride +
                                               stretch * scales->a_stretch_stride]
                                   : 1.0f;
              total[i] += sum[i] * (sa * sb);
            }
          } else {
            total += sum;
          }
        }
        for (int64_t i = 0; i < height; i++) sums[j * m + i0 + i] = total[i];
      }
    }
  };
  share(
      m, kRows, double(m) * n * k > 2e6,
      [](void* f, int64_t i, int64_t j) { (*static_cast<decltype(part)*>(f))(i, j); }, &part);
}

}  // namespace blas
