// Building blocks of the attention kernels: tiles in shared memory, fragments of tensor core products, products of tiles.
//
// A block has 4 warps. Each warp owns rows of the result of every product, so that the softmax of a row and the second
// product, which uses it, stay in the registers of one warp.
//
// f32 is multiplied as three products of tf32 (x = hi + lo of 11 bits each; lo * lo is below an ulp). Tensor cores truncate
// sums instead of rounding them, so groups of 16 terms are summed from 0 and added outside.
//
// Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", arXiv:2307.08691;
// Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", arXiv:2203.03341.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

constexpr int ATTENTION_WARPS = 4;
constexpr int ATTENTION_THREADS = 32 * ATTENTION_WARPS;

// A tensor [batch, head, row, d] with any strides (in elements) but unit stride in d.
template <class T> struct Heads {
  T* data;
  uint64_t batch_stride, head_stride, row_stride;

  __device__ __forceinline__ Heads<T> at(uint32_t batch, uint32_t head) const {
    return {data + batch * batch_stride + head * head_stride, 0, 0, row_stride};
  }
  __device__ __forceinline__ T* row(int row) const { return data + row * row_stride; }
};

// Length of a row of per-query statistics, filled with 0: every row begins at a multiple of 16 bytes.
__device__ __forceinline__ int statistics_row(int queries) { return (queries + 3) & ~3; }

// Chunk `even` + `odd` of a row whose chunks are permuted by `key`; `even` is even, `odd` is 0 or 1. What does not depend on
// the lane is kept separate, and most of it becomes an immediate offset.
__device__ __forceinline__ int swizzled(int key, int odd, int even) { return ((key ^ odd) ^ (even & 7)) + (even & ~7); }

// The sizes that all attention kernels get.
struct Problem {
  int heads, group, queries, keys, head_dim, causal;

  // Keys before this are visible to `query`.
  __device__ __forceinline__ int visible(int query) const {
    return causal ? min(keys, query + 1 + keys - queries) : keys;
  }
};

// Products of one element type. A: [16, 16], B: [16, 8] of two neighbours at a time. Tiles lie in shared memory with rows of
// D elements, whose 16-byte chunks are permuted by row so that no access of a warp has bank conflicts.
template <class T> struct Fragments {
  static_assert(sizeof(T) == 2, "bf16 or f16");
  struct __align__(16) A {
    uint32_t r[4];
  };
  struct B {
    uint32_t r[2];
  };

  static __device__ __forceinline__ int key(int row) { return row & 7; }

  // Rows `row`.. and columns `col`.. of `tile`; multiples of 16.
  template <int D> static __device__ __forceinline__ A load_a(const T* tile, int row, int col) {
    const int lane = threadIdx.x & 31;
    A a;
    ldmatrix_x4(a.r, tile + (row + (lane & 15)) * D + 8 * swizzled(key(lane), lane >> 4, col / 8));
    return a;
  }

  // b[i][k][n] = tile[n0 + 8i + n][k0 + k]
  template <int D> static __device__ __forceinline__ void load_b(B (&b)[2], const T* tile, int n0, int k0) {
    const int lane = threadIdx.x & 31;
    uint32_t r[4];
    ldmatrix_x4(r, tile + (n0 + (lane & 7) + (lane >> 4) * 8) * D + 8 * swizzled(key(lane), lane >> 3 & 1, k0 / 8));
    split(b, r);
  }

  // b[i][k][n] = tile[k0 + k][n0 + 8i + n]
  template <int D> static __device__ __forceinline__ void load_b_trans(B (&b)[2], const T* tile, int n0, int k0) {
    const int lane = threadIdx.x & 31;
    uint32_t r[4];
    ldmatrix_x4_trans(r, tile + (k0 + (lane & 15)) * D + 8 * swizzled(key(lane), lane >> 4, n0 / 8));
    split(b, r);
  }

  static __device__ __forceinline__ void split(B (&b)[2], const uint32_t (&r)[4]) {
    b[0].r[0] = r[0], b[0].r[1] = r[1];
    b[1].r[0] = r[2], b[1].r[1] = r[3];
  }

  // Two neighbouring [16, 8] results, rounded, as the A of the next product.
  static __device__ __forceinline__ A from_results(const float (&left)[4], const float (&right)[4]) {
    A a;
    a.r[0] = pack(left[0], left[1]), a.r[1] = pack(left[2], left[3]);
    a.r[2] = pack(right[0], right[1]), a.r[3] = pack(right[2], right[3]);
    return a;
  }

  static __device__ __forceinline__ uint32_t pack(float low, float high);
  static __device__ __forceinline__ void mma(float (&d)[4], const A& a, const B& b);
};

template <> __device__ __forceinline__ uint32_t Fragments<__nv_bfloat16>::pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <> __device__ __forceinline__ uint32_t Fragments<__half>::pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <> __device__ __forceinline__ void Fragments<__nv_bfloat16>::mma(float (&d)[4], const A& a, const B& b) {
  mma_m16n8k16_bf16(d, a.r, b.r);
}
template <> __device__ __forceinline__ void Fragments<__half>::mma(float (&d)[4], const A& a, const B& b) {
  mma_m16n8k16_f16(d, a.r, b.r);
}

// The order of the summed elements is free: position t of a product of 8 holds element 2t, position t + 4 element 2t + 1.
// So operands are read in pairs, and a result can be used directly as the A of the next product.
template <> struct Fragments<float> {
  struct A {
    uint32_t hi[2][4], lo[2][4];
  };
  struct B {
    uint32_t hi[2][2], lo[2][2];
  };

  // Different banks for rows 0 to 3 and 4 to 7 (pairs), and for rows 0, 2, 4, 6 and 1, 3, 5, 7 (transposed).
  static __device__ __forceinline__ int key(int row) { return ((row ^ (row >> 1)) & 3) << 1; }

  // Element (row0 + row, col0 + col) of a tile; row0 and col0 are multiples of 8, row and col less.
  template <int D> static __device__ __forceinline__ int index(int row0, int row, int col0, int col) {
    return (row0 + row) * D + 4 * swizzled(key(row), col >> 2, col0 / 4) + col % 4;
  }

  static __device__ __forceinline__ void split(float x, uint32_t& hi, uint32_t& lo) {
    hi = (__float_as_uint(x) + 0x1000u) & 0xFFFFE000u;
    lo = __float_as_uint(x - __uint_as_float(hi)) & 0xFFFFE000u;
  }

  template <int D> static __device__ __forceinline__ A load_a(const float* tile, int row, int col) {
    const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
    A a;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float2 upper = *reinterpret_cast<const float2*>(tile + index<D>(row, g, col + 8 * j, 2 * t));
      const float2 lower = *reinterpret_cast<const float2*>(tile + index<D>(row + 8, g, col + 8 * j, 2 * t));
      split(upper.x, a.hi[j][0], a.lo[j][0]);
      split(lower.x, a.hi[j][1], a.lo[j][1]);
      split(upper.y, a.hi[j][2], a.lo[j][2]);
      split(lower.y, a.hi[j][3], a.lo[j][3]);
    }
    return a;
  }

  template <int D> static __device__ __forceinline__ void load_b(B (&b)[2], const float* tile, int n0, int k0) {
    const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float2 pair = *reinterpret_cast<const float2*>(tile + index<D>(n0 + 8 * i, g, k0 + 8 * j, 2 * t));
        split(pair.x, b[i].hi[j][0], b[i].lo[j][0]);
        split(pair.y, b[i].hi[j][1], b[i].lo[j][1]);
      }
  }

  template <int D> static __device__ __forceinline__ void load_b_trans(B (&b)[2], const float* tile, int n0, int k0) {
    const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          split(tile[index<D>(k0 + 8 * j, 2 * t + e, n0 + 8 * i, g)], b[i].hi[j][e], b[i].lo[j][e]);
  }

  static __device__ __forceinline__ A from_results(const float (&left)[4], const float (&right)[4]) {
    A a;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      // A has rows before columns, a result has columns before rows.
      const int position = (e & 1) << 1 | e >> 1;
      split(left[e], a.hi[0][position], a.lo[0][position]);
      split(right[e], a.hi[1][position], a.lo[1][position]);
    }
    return a;
  }

  static __device__ __forceinline__ void mma(float (&d)[4], const A& a, const B& b) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      mma_m16n8k8_tf32(sum, a.lo[j], b.hi[j]);
      mma_m16n8k8_tf32(sum, a.hi[j], b.lo[j]);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) mma_m16n8k8_tf32(sum, a.hi[j], b.hi[j]);
#pragma unroll
    for (int e = 0; e < 4; e++) d[e] += sum[e];
  }
};

// Starts copying rows `first`.. of `x` into a tile of ROWS rows of D, by a block of THREADS threads; elements beyond `rows` and
// `head_dim` become 0.
template <int D, int ROWS, int THREADS = ATTENTION_THREADS, class T>
__device__ __forceinline__ void copy_tile(T* tile, const Heads<const T>& x, int first, int rows, int head_dim) {
  constexpr int PER_CHUNK = 16 / sizeof(T), CHUNKS = D / PER_CHUNK, STRIDE = THREADS / CHUNKS;
  static_assert(ROWS % STRIDE == 0, "whole passes");
  const int thread = recomputed(threadIdx.x), chunk = thread % CHUNKS, offset = thread / CHUNKS;
  const int left = chunk * PER_CHUNK < head_dim ? rows - first - offset : 0;
  const T* source = x.row(first + offset) + chunk * PER_CHUNK;
#pragma unroll
  for (int i = 0; i < ROWS; i += STRIDE) {
    const int row = offset + i;
    cp_async_16(tile + row * D + PER_CHUNK * (chunk ^ Fragments<T>::key(row)), source, i < left);
    source += STRIDE * x.row_stride;
  }
}

template <int M, int N> __device__ __forceinline__ void clear(float (&d)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) d[m][n][e] = 0.0f;
}

// The left operand of products that sum over D columns: 16 M rows of a tile from `row` on. Held in registers, which then are read
// from shared memory once, or read again for each product.
template <class T, int D, int M, bool HELD> struct Left {
  using A = typename Fragments<T>::A;
  A held[HELD ? D / 16 : 1][M];
  const T* tile;
  int row;

  __device__ __forceinline__ Left(const T* tile, int row) : tile(tile), row(row) {
    if constexpr (HELD) {
#pragma unroll
      for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int m = 0; m < M; m++) held[k][m] = Fragments<T>::template load_a<D>(tile, row + 16 * m, 16 * k);
    }
  }

  // Columns 16 k and the next 15. Where it is held, `k` must be known when the code is compiled.
  __device__ __forceinline__ void at(A (&a)[M], int k) const {
#pragma unroll
    for (int m = 0; m < M; m++)
      if constexpr (HELD) a[m] = held[k][m];
      else a[m] = Fragments<T>::template load_a<D>(tile, row + 16 * m, 16 * k);
  }
};

// d = a b^T: the rows of `a` times all 8 N rows of tile `b`, summed over D columns. UNROLL: as many steps of the sum as the
// registers of the caller allow.
template <int D, int UNROLL, class T, int M, int N, bool HELD>
__device__ __forceinline__ void multiply_rows(float (&d)[M][N][4], const Left<T, D, M, HELD>& a, const T* b) {
  using F = Fragments<T>;
  static_assert(!HELD || UNROLL == D / 16, "registers have no index at run time");
  clear(d);
#pragma unroll UNROLL
  for (int k = 0; k < D / 16; k++) {
    typename F::A left[M];
    a.at(left, k);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      typename F::B right[2];
      F::template load_b<D>(right, b, 8 * n, 16 * k);
#pragma unroll
      for (int m = 0; m < M; m++) {
        F::mma(d[m][n], left[m], right[0]);
        F::mma(d[m][n + 1], left[m], right[1]);
      }
    }
  }
}

// d += left b: left [16 M, 16], b rows `row` to `row` + 15 and columns from `col` on, as many as `d` has, of a tile of rows of D.
template <int D, class T, int M, int N>
__device__ __forceinline__ void multiply_step(float (&d)[M][N][4], const typename Fragments<T>::A (&left)[M], const T* b,
                                              int row, int col) {
  using F = Fragments<T>;
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    typename F::B right[2];
    F::template load_b_trans<D>(right, b, col + 8 * n, row);
#pragma unroll
    for (int m = 0; m < M; m++) {
      F::mma(d[m][n], left[m], right[0]);
      F::mma(d[m][n + 1], left[m], right[1]);
    }
  }
}

// d += p b: p [16 M, 8 K] in the layout of results of products, rounded to T; b a tile of 8 K rows of D.
template <int D, class T, int M, int K>
__device__ __forceinline__ void multiply_results(float (&d)[M][D / 8][4], const float (&p)[M][K][4], const T* b) {
  using F = Fragments<T>;
#pragma unroll
  for (int k = 0; k < K; k += 2) {
    typename F::A left[M];
#pragma unroll
    for (int m = 0; m < M; m++) left[m] = F::from_results(p[m][k], p[m][k + 1]);
    multiply_step<D>(d, left, b, 8 * k, 0);
  }
}

// Rounds and stores one warp's rows, times a factor per row: those before `rows`, and columns before `head_dim`.
template <int D, int M, class T>
__device__ __forceinline__ void store_rows(const Heads<T>& x, int first, int rows, int head_dim,
                                           const float (&d)[M][D / 8][4], const float (&factor)[M][2]) {
  const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first + 16 * m + 8 * half + g;
      if (row >= rows) continue;
      T* out = x.row(row) + 2 * t;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        const float pair[2] = {d[m][n][2 * half] * factor[m][half], d[m][n][2 * half + 1] * factor[m][half]};
        if (8 * n < head_dim) store_f32<2>(out + 8 * n, pair);
      }
    }
}
