// max |x| for one scale, for each row, for each column, or for each block of a matrix. Magnitudes are compared as integers,
// so NaN is the largest, then infinity. Outputs are bits of f32, zero before the first launch; the result of atomic maxima
// does not depend on their order.
#include "common.cuh"

template <class T> __device__ __forceinline__ uint32_t amax_of(const T* x, uint64_t first, uint64_t step, uint64_t n) {
  constexpr int N = 16 / sizeof(T);
  uint32_t largest = 0;
  if (aligned16(x)) {
    const uint64_t packs = n / N;
    // Four loads in flight.
    uint64_t i = first;
    for (; i + 3 * step < packs; i += 4 * step) {
      float v[4][N];
#pragma unroll
      for (int j = 0; j < 4; j++) load_f32<N>(x + (i + j * step) * N, v[j]);
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int k = 0; k < N; k++) largest = max(largest, magnitude_bits(v[j][k]));
    }
    for (; i < packs; i += step) {
      float v[N];
      load_f32<N>(x + i * N, v);
#pragma unroll
      for (int k = 0; k < N; k++) largest = max(largest, magnitude_bits(v[k]));
    }
    for (uint64_t i = packs * N + first; i < n; i += step) largest = max(largest, magnitude_bits(to_f32(x[i])));
  } else {
    for (uint64_t i = first; i < n; i += step) largest = max(largest, magnitude_bits(to_f32(x[i])));
  }
  return largest;
}

// out: one value.
template <class T> __device__ void amax_tensor(const T* x, uint32_t* out, uint64_t n) {
  const uint32_t largest = block_reduce<Max>(amax_of(x, global_thread(), global_threads(), n), 0u);
  if (threadIdx.x == 0 && largest) atomicMax(out, largest);
}

// out [rows]; a block per row.
template <class T> __device__ void amax_rows(const T* x, uint32_t* out, uint64_t rows, uint64_t cols) {
  for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const uint32_t largest = block_reduce<Max>(amax_of(x + row * cols, threadIdx.x, blockDim.x, cols), 0u);
    if (threadIdx.x == 0) out[row] = largest;
  }
}

// out [runs, cols], where all runs that give one row of results are `rows_of_out` rows; a thread takes the columns of one pack,
// blockIdx.y a run of rows.
template <int N, class T>
__device__ __forceinline__ void amax_columns(const T* x, uint32_t* out, uint64_t rows, uint64_t cols, uint64_t col,
                                             uint64_t first, uint64_t end) {
  uint32_t largest[N] = {};
#pragma unroll 8
  for (uint64_t row = first; row < end; row++) {
    float v[N];
    load_f32<N>(x + row * cols + col, v);
#pragma unroll
    for (int i = 0; i < N; i++) largest[i] = max(largest[i], magnitude_bits(v[i]));
  }
#pragma unroll
  for (int i = 0; i < N; i++)
    if (largest[i]) atomicMax(out + col + i, largest[i]);
}

template <class T>
__device__ void amax_cols(const T* x, uint32_t* out, uint64_t rows, uint64_t cols, uint32_t rows_per_block,
                          uint32_t rows_of_out) {
  constexpr int N = 16 / sizeof(T);
  const uint64_t first = blockIdx.y * (uint64_t)rows_per_block, end = min(rows, first + rows_per_block);
  out += first / rows_of_out * cols;
  if (aligned16(x) && cols % N == 0) {
    const uint64_t col = global_thread() * N;
    if (col < cols) amax_columns<N>(x, out, rows, cols, col, first, end);
  } else {
    for (uint64_t col = global_thread(); col < cols; col += global_threads())
      amax_columns<1>(x, out, rows, cols, col, first, end);
  }
}

// out [rows, cols / width], for groups of `width` values of a row; the rows lie one after the other, cols is a multiple of width,
// and width / N a power of two, at most 32, where N values fill 16 bytes. A group is read by neighbouring threads of a warp.
template <class T> __device__ void amax_groups(const T* x, uint32_t* out, uint64_t n, uint32_t width) {
  constexpr int N = 16 / sizeof(T), AT_ONCE = 4;
  const uint32_t lanes = width / N, shift = __ffs(lanes) - 1;
  const uint64_t packs = n / N, step = global_threads();
  // Whole warps take part in each exchange: `base` is the same for all threads of one.
  for (uint64_t base = global_thread() & ~31ull; base < packs; base += AT_ONCE * step) {
    uint32_t largest[AT_ONCE] = {};
    Pack<T, N> read[AT_ONCE];
    const uint64_t first = base + (threadIdx.x & 31);
    // Threads past the end read the last pack, and their results are not stored.
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) read[j] = load_pack<N>(x + min(first + j * step, packs - 1) * N);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
#pragma unroll
      for (int k = 0; k < N; k++) largest[j] = max(largest[j], magnitude_bits(to_f32(read[j].v[k])));
      for (uint32_t offset = lanes / 2; offset > 0; offset >>= 1)
        largest[j] = max(largest[j], __shfl_xor_sync(ALL_LANES, largest[j], offset));
      if (first + j * step < packs && (threadIdx.x & (lanes - 1)) == 0) out[(first + j * step) >> shift] = largest[j];
    }
  }
}

// out [scale_rows, scale_cols]; a block of threads per block of values. rows and cols are below 2^31.
template <class T>
__device__ void amax_blocks(const T* x, uint32_t* out, uint32_t rows, uint32_t cols, uint32_t block_rows,
                            uint32_t block_cols, uint32_t scale_cols, uint64_t scales) {
  constexpr int N = 16 / sizeof(T), AT_ONCE = 4;
  const bool wide = aligned16(x) && cols % N == 0 && block_cols % N == 0;
  for (uint64_t index = blockIdx.x; index < scales; index += gridDim.x) {
    const uint32_t row0 = (uint32_t)(index / scale_cols) * block_rows, col0 = (uint32_t)(index % scale_cols) * block_cols;
    const uint32_t height = min(block_rows, rows - row0), width = min(block_cols, cols - col0);
    const T* first = x + row0 * (uint64_t)cols + col0;
    uint32_t largest = 0;
    if (wide) {
      const uint32_t packs = width / N, all = height * packs;
      for (uint32_t base = threadIdx.x; base < all; base += AT_ONCE * blockDim.x) {
        Pack<T, N> read[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          // The last pack may be read twice.
          const uint32_t i = min(base + j * blockDim.x, all - 1), row = i / packs;
          read[j] = load_pack<N>(first + row * (uint64_t)cols + (i - row * packs) * N);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
#pragma unroll
          for (int k = 0; k < N; k++) largest = max(largest, magnitude_bits(to_f32(read[j].v[k])));
        }
      }
    } else {
      for (uint64_t i = threadIdx.x; i < (uint64_t)height * width; i += blockDim.x)
        largest = max(largest, magnitude_bits(to_f32(first[i / width * cols + i % width])));
    }
    largest = block_reduce<Max>(largest, 0u);
    if (threadIdx.x == 0) out[index] = largest;
  }
}

#define DEFINE(T, NAME)                                                                                             \
  extern "C" __global__ void fp8_amax_tensor_##NAME(const T* x, uint32_t* out, uint64_t n) { amax_tensor(x, out, n); } \
  extern "C" __global__ void fp8_amax_rows_##NAME(const T* x, uint32_t* out, uint64_t rows, uint64_t cols) {        \
    amax_rows(x, out, rows, cols);                                                                                  \
  }                                                                                                                 \
  extern "C" __global__ void fp8_amax_cols_##NAME(const T* x, uint32_t* out, uint64_t rows, uint64_t cols,          \
                                                  uint32_t rows_per_block, uint32_t rows_of_out) {                  \
    amax_cols(x, out, rows, cols, rows_per_block, rows_of_out);                                                     \
  }                                                                                                                 \
  extern "C" __global__ void fp8_amax_groups_##NAME(const T* x, uint32_t* out, uint64_t n, uint32_t width) {        \
    amax_groups(x, out, n, width);                                                                                  \
  }                                                                                                                 \
  extern "C" __global__ void fp8_amax_blocks_##NAME(const T* x, uint32_t* out, uint32_t rows, uint32_t cols,        \
                                                    uint32_t block_rows, uint32_t block_cols, uint32_t scale_cols,  \
                                                    uint64_t scales) {                                              \
    amax_blocks(x, out, rows, cols, block_rows, block_cols, scale_cols, scales);                                    \
  }
FP8_FOR_FLOATS(DEFINE)
