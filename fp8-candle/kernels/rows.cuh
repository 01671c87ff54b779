// Rows of a matrix: which threads work on one, and how its elements are divided among them.
//
// In a reduction a thread takes chunks of eight consecutive elements, whatever their type and alignment. So the order of
// sums depends only on the length of the row: rows of 16-bit elements give the same as these rows in f32, and unaligned
// views the same as aligned copies.
#pragma once
#include "common.cuh"

constexpr int CHUNK = 8;
// The most threads of a block that works on rows.
constexpr int ROW_THREADS = 512;

template <int N> struct Count {
  static constexpr int value = N;
};

// A row for each warp.
struct WarpOfRow {
  static __device__ __forceinline__ uint32_t thread() { return threadIdx.x & 31; }
  static __device__ __forceinline__ uint32_t threads() { return 32; }
  template <class Op> static __device__ __forceinline__ float reduce(float value, float) {
    return warp_reduce<Op>(value);
  }
};

// A row for each block.
struct BlockOfRow {
  static __device__ __forceinline__ uint32_t thread() { return threadIdx.x; }
  static __device__ __forceinline__ uint32_t threads() { return blockDim.x; }
  template <class Op> static __device__ __forceinline__ float reduce(float value, float identity) {
    return block_reduce<Op>(value, identity);
  }
};

// Calls body(group, row) for every row with a whole group: a warp if `by_warp`, otherwise a block.
template <class Body> __device__ __forceinline__ void for_rows(uint64_t rows, bool by_warp, Body body) {
  if (by_warp) {
    const uint64_t warps = blockDim.x >> 5;
    for (uint64_t row = blockIdx.x * warps + (threadIdx.x >> 5); row < rows; row += gridDim.x * warps) {
      body(WarpOfRow{}, row);
    }
  } else {
    for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x) body(BlockOfRow{}, row);
  }
}

// Whether every row of `cols` elements is aligned to 16 bytes if the first is.
template <class T> __device__ __forceinline__ bool rows_aligned16(uint64_t cols) {
  return cols * sizeof(T) % 16 == 0;
}

// The chunk at `first`, with 0 after the end of the row, and how many elements of it exist. `vec`: the row is aligned to 16
// bytes.
template <class T>
__device__ __forceinline__ int load_chunk(const T* row, uint64_t first, uint64_t cols, bool vec, float (&v)[CHUNK]) {
  if (vec && first + CHUNK <= cols) {
    load_f32(row + first, v);
    return CHUNK;
  }
  const int count = cols - first < CHUNK ? (int)(cols - first) : CHUNK;
#pragma unroll
  for (int i = 0; i < CHUNK; i++) v[i] = i < count ? to_f32(row[first + i]) : 0.0f;
  return count;
}

// Calls f(first) for this thread's chunks of a row.
template <class Group, class F> __device__ __forceinline__ void for_chunks(Group group, uint64_t cols, F f) {
  for (uint64_t first = (uint64_t)group.thread() * CHUNK; first < cols; first += (uint64_t)group.threads() * CHUNK) {
    f(first);
  }
}

// Calls f(first, Count<n>) for parts of a row that are independent of each other: whole chunks if the row is aligned to 16
// bytes, otherwise single elements, neighbours in neighbouring threads.
template <class Group, class F> __device__ __forceinline__ void for_parts(Group group, uint64_t cols, bool vec, F f) {
  const uint64_t whole = vec ? cols / CHUNK * CHUNK : 0;
  for (uint64_t first = (uint64_t)group.thread() * CHUNK; first < whole; first += (uint64_t)group.threads() * CHUNK) {
    f(first, Count<CHUNK>{});
  }
  for (uint64_t i = whole + group.thread(); i < cols; i += group.threads()) f(i, Count<1>{});
}

// Writes `value` to the elements from `from` on.
template <class Group, class T>
__device__ __forceinline__ void fill_row(Group group, T* row, uint64_t from, uint64_t cols, bool vec, float value) {
  uint64_t start = (from + CHUNK - 1) / CHUNK * CHUNK;
  start = start < cols ? start : cols;
  for (uint64_t i = from + group.thread(); i < start; i += group.threads()) row[i] = from_f32<T>(value);
  for_parts(group, cols - start, vec, [&](uint64_t first, auto count) {
    constexpr int N = decltype(count)::value;
    float values[N];
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = value;
    store_f32(row + start + first, values);
  });
}
