#include "gemm.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "types.h"

namespace blas {

namespace {

constexpr int64_t kDepth = 256;  // of the sum that is packed at once, where no scales are applied in between

template <class T> struct Tile;
// Rows are vectors of 64 bytes, two to a tile.
template <> struct Tile<float> {
  typedef float Vector __attribute__((vector_size(64)));
  static constexpr int lanes = 16, rows = 32, cols = 12;
};
template <> struct Tile<double> {
  typedef double Vector __attribute__((vector_size(64)));
  static constexpr int lanes = 8, rows = 16, cols = 12;
};

template <class T, class S>
void pack_typed(const Operand& x, int64_t first, int64_t count, int64_t p0, int64_t depth, int width, bool rows_of_a, T* out) {
  // Along the packed dimension i and the sum's p: op(A)(i, p) or op(B)(p, i).
  bool contiguous_i = rows_of_a ? !x.transposed : x.transposed;
  const S* data = static_cast<const S*>(x.data);
  for (int64_t i0 = 0; i0 < count; i0 += width, out += width * depth) {
    int w = int(std::min<int64_t>(width, count - i0));
    if (w < width) std::fill(out, out + width * depth, T(0));
    if (contiguous_i) {
      for (int64_t p = 0; p < depth; p++) {
        const S* from = data + (p0 + p) * x.ld + first + i0;
        for (int i = 0; i < w; i++) out[p * width + i] = T(to_float(from[i]));
      }
    } else {
      for (int i = 0; i < w; i++) {
        const S* from = data + (first + i0 + i) * x.ld + p0;
        for (int64_t p = 0; p < depth; p++) out[p * width + i] = T(to_float(from[p]));
      }
    }
  }
}

template <>
void pack_typed<double, double>(const Operand& x, int64_t first, int64_t count, int64_t p0, int64_t depth, int width,
                                bool rows_of_a, double* out) {
  int64_t step_i = (rows_of_a ? !x.transposed : x.transposed) ? 1 : x.ld, step_p = step_i == 1 ? x.ld : 1;
  const double* data = static_cast<const double*>(x.data);
  for (int64_t i0 = 0; i0 < count; i0 += width, out += width * depth)
    for (int64_t p = 0; p < depth; p++)
      for (int i = 0; i < width; i++)
        out[p * width + i] = i0 + i < count ? data[(first + i0 + i) * step_i + (p0 + p) * step_p] : 0;
}

void pack(const Operand& x, int64_t first, int64_t count, int64_t p0, int64_t depth, int width, bool rows_of_a, float* out) {
  switch (x.type) {
    case kF32: return pack_typed<float, float>(x, first, count, p0, depth, width, rows_of_a, out);
    case kF16: return pack_typed<float, _Float16>(x, first, count, p0, depth, width, rows_of_a, out);
    case kBF16: return pack_typed<float, bf16>(x, first, count, p0, depth, width, rows_of_a, out);
    case kE4M3: return pack_typed<float, e4m3>(x, first, count, p0, depth, width, rows_of_a, out);
    case kE5M2: return pack_typed<float, e5m2>(x, first, count, p0, depth, width, rows_of_a, out);
  }
}
void pack(const Operand& x, int64_t first, int64_t count, int64_t p0, int64_t depth, int width, bool rows_of_a, double* out) {
  pack_typed<double, double>(x, first, count, p0, depth, width, rows_of_a, out);
}

// tile (rows x cols, column-major) = panel of A times panel of B
template <class T> void tile_product(const T* a, const T* b, int64_t depth, T* tile) {
  using V = typename Tile<T>::Vector;
  constexpr int cols = Tile<T>::cols, rows = Tile<T>::rows, lanes = Tile<T>::lanes;
  V sum[cols][2] = {};
  for (int64_t p = 0; p < depth; p++) {
    V a0, a1;
    memcpy(&a0, a + p * rows, sizeof a0);
    memcpy(&a1, a + p * rows + lanes, sizeof a1);
#pragma GCC unroll 12
    for (int j = 0; j < cols; j++) {
      sum[j][0] += a0 * b[p * cols + j];
      sum[j][1] += a1 * b[p * cols + j];
    }
  }
  memcpy(tile, sum, sizeof sum);
}

// Columns [n0, n1) and rows [m0, m1) of the sums.
template <class T>
void multiply_part(const Operand& a, const Operand& b, int64_t m, int64_t m0, int64_t m1, int64_t n0, int64_t n1, int64_t k,
                   const StretchScales* scales, T* sums) {
  constexpr int rows = Tile<T>::rows, cols = Tile<T>::cols;
  constexpr int64_t block_m = rows * 8, block_n = cols * 64;
  int64_t depth_max = scales ? scales->length : kDepth;
  std::vector<T> pa(block_m * depth_max + 16), pb(block_n * depth_max + 16);
  alignas(64) T tile[rows * cols];
  for (int64_t j = n0; j < n1; j++) std::fill(sums + j * m + m0, sums + j * m + m1, T(0));
  for (int64_t jb = n0; jb < n1; jb += block_n) {
    int64_t nb = std::min(block_n, n1 - jb);
    for (int64_t p0 = 0; p0 < k; p0 += depth_max) {
      int64_t depth = std::min(depth_max, k - p0), stretch = p0 / depth_max;
      pack(b, jb, nb, p0, depth, cols, false, pb.data());
      for (int64_t ib = m0; ib < m1; ib += block_m) {
        int64_t mb = std::min(block_m, m1 - ib);
        pack(a, ib, mb, p0, depth, rows, true, pa.data());
        for (int64_t j0 = 0; j0 < nb; j0 += cols)
          for (int64_t i0 = 0; i0 < mb; i0 += rows) {
            tile_product(&pa[i0 * depth], &pb[j0 * depth], depth, tile);
            int64_t w = std::min<int64_t>(rows, mb - i0), h = std::min<int64_t>(cols, nb - j0);
            for (int64_t j = 0; j < h; j++) {
              T* out = sums + (jb + j0 + j) * m + ib + i0;
              const T* in = tile + j * rows;
              if (!scales) {
                for (int64_t i = 0; i < w; i++) out[i] += in[i];
                continue;
              }
              float sb =
                  scales->b
                      ? scales
                            ->b[(jb + j0 + j) / scales->b_row_block * scales->b_row_stride + stretch * scales->b_stretch_stride]
                      : 1.0f;
              for (int64_t i = 0; i < w; i++) {
                float sa = scales->a ? scales->a[(ib + i0 + i) / scales->a_row_block * scales->a_row_stride +
                                                 stretch * scales->a_stretch_stride]
                                     : 1.0f;
                out[i] += in[i] * (sa * sb);
              }
            }
          }
      }
    }
  }
}

template <class T>
void multiply_any(const Operand& a, const Operand& b, int64_t m, int64_t n, int64_t k, const StretchScales* scales, T* sums) {
  auto by_columns = [&](int64_t n0, int64_t n1) { multiply_part(a, b, m, 0, m, n0, n1, k, scales, sums); };
  auto by_rows = [&](int64_t m0, int64_t m1) { multiply_part(a, b, m, m0, m1, 0, n, k, scales, sums); };
  bool worth_it = double(m) * n * k > 2e6;
  if (n >= m)
    share(
        n, Tile<T>::cols, worth_it, [](void* f, int64_t i, int64_t j) { (*static_cast<decltype(by_columns)*>(f))(i, j); },
        &by_columns);
  else
    share(
        m, Tile<T>::rows, worth_it, [](void* f, int64_t i, int64_t j) { (*static_cast<decltype(by_rows)*>(f))(i, j); },
        &by_rows);
}

int64_t thread_count() {
  static const int64_t count = [] {
    const char* value = getenv("FP8_FAKE_THREADS");
    return value && *value ? std::clamp(atol(value), 1L, 64L) : 2L;
  }();
  return count;
}

}  // namespace

void share(int64_t count, int64_t granularity, bool worth_it, void (*work)(void*, int64_t, int64_t), void* context) {
  int64_t units = (count + granularity - 1) / granularity, parts = worth_it ? std::min(thread_count(), units) : 1;
  if (parts <= 1) return work(context, 0, count);
  std::vector<std::thread> threads;
  auto bound = [&](int64_t i) { return std::min(count, units * i / parts * granularity); };
  for (int64_t i = 1; i < parts; i++) threads.emplace_back(work, context, bound(i), bound(i + 1));
  work(context, 0, bound(1));
  for (auto& t : threads) t.join();
}

void multiply(const Operand& a, const Operand& b, int64_t m, int64_t n, int64_t k, const StretchScales* scales, float* sums) {
  multiply_any(a, b, m, n, k, scales, sums);
}
void multiply(const Operand& a, const Operand& b, int64_t m, int64_t n, int64_t k, double* sums) {
  multiply_any(a, b, m, n, k, static_cast<const StretchScales*>(nullptr), sums);
}

template <class T>
void finish(const T* sums, int64_t m, int64_t n, double alpha, double beta, const Output& out, const float* row_scales,
            const float* column_scales, const void* bias, int bias_type) {
  bool plain = alpha == 1 && beta == 0 && !row_scales && !column_scales && !bias;
  for (int64_t j = 0; j < n; j++)
    for (int64_t i = 0; i < m; i++) {
      double v = sums[j * m + i];
      if (!plain) {
        if (row_scales) v *= row_scales[i];
        if (column_scales) v *= column_scales[j];
        v *= alpha;
        if (beta != 0) v += beta * load(out.c, out.c_type, j * out.ldc + i);
        if (bias) v += load(bias, bias_type, i);
      }
      store(out.d, out.d_type, j * out.ldd + i, v);
    }
}
template void finish(const float*, int64_t, int64_t, double, double, const Output&, const float*, const float*, const void*,
                     int);
template void finish(const double*, int64_t, int64_t, double, double, const Output&, const float*, const float*, const void*,
                     int);

}  // namespace blas
