// Casts of a matrix by tiles, row-major, transposed or both, of values that a source reads or computes.
#pragma once
#include "encode.cuh"

// Sixteen codes from sixteen values, each with its scale; `largest` gets the largest magnitude.
template <bool IS_E5M2>
__device__ __forceinline__ uint4 encode16(const float (&v)[16], const float (&quant_scale)[16], uint32_t& largest) {
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float quad[4], scales[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      quad[j] = v[4 * i + j];
      scales[j] = quant_scale[4 * i + j];
      largest = max(largest, magnitude_bits(quad[j]));
    }
    codes[i] = encode4<IS_E5M2>(quad, scales);
  }
  return make_uint4(codes[0], codes[1], codes[2], codes[3]);
}

template <bool IS_E5M2, class T>
__device__ __forceinline__ uint4 encode16(const T* x, const float (&quant_scale)[16], uint32_t& largest) {
  float v[16];
  load_f32<16>(x, v);
  return encode16<IS_E5M2>(v, quant_scale, largest);
}

constexpr int TILE = 128;

constexpr int TILE_THREADS = 256;
constexpr int TILE_WARPS = TILE_THREADS / 32;

// Shared memory of a block.
struct Tile {
  // (column, four rows): rows are rotated by column, so that neither writes nor reads have bank conflicts.
  uint32_t codes[TILE * TILE / 4];
  // Of each warp's rows.
  float sums[TILE_WARPS][TILE];
};

// Where a cast goes. `codes` is row-major, `transposed` [cols, rows], `amax` the bits of the largest magnitude, `sums`
// [row tiles, cols] the sums of the values over the rows of a tile; each may be null.
struct CastTo {
  uint8_t *codes, *transposed;
  uint32_t* amax;
  float* sums;
};

// Values as they lie in memory.
template <class T> struct Stored {
  const T* x;
  uint64_t cols;
  __device__ __forceinline__ void load(uint64_t row, uint64_t col, float (&v)[16]) const { load_f32<16>(x + row * cols + col, v); }
};

// The values rounded to the element type, as a cast that reads them would see them.
template <class T> __device__ __forceinline__ void round_to(float (&v)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = to_f32(from_f32<T>(v[i]));
}

// Tiles of 128x128: each thread casts 4 rows of 16 values, turns them 4x4 with byte permutations, and the block writes
// columns of 128 codes. `source.load(row, col, v)` gives 16 values of a row. quant_scale has one value, or one for each column
// (per_col). rows and cols are multiples of 16 and all pointers are aligned to 16 bytes. The order of sums depends only on the
// shape.
template <bool IS_E5M2, class Source>
__device__ __forceinline__ void cast_tiles(const Source& source, const float* quant_scale, const CastTo& to, uint64_t rows,
                                           uint64_t cols, bool per_col, Tile& tile) {
  const int group_col = threadIdx.x % 8, group_row = threadIdx.x / 8;
  const uint64_t col_tiles = (cols + TILE - 1) / TILE, tiles = col_tiles * ((rows + TILE - 1) / TILE);
  uint32_t largest = 0;
  for (uint64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const uint64_t row0 = index / col_tiles * TILE, col0 = index % col_tiles * TILE;
    const uint64_t row = row0 + group_row * 4, col = col0 + group_col * 16;
    float sums[16] = {};
    if (row < rows && col < cols) {
      float scales[16];
      if (per_col) {
        load_f32<16>(quant_scale + col, scales);
      } else {
        const float scale = *quant_scale;
#pragma unroll
        for (int i = 0; i < 16; i++) scales[i] = scale;
      }
      uint32_t words[4][4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        float v[16];
        source.load(row + r, col, v);
        const uint4 pack = encode16<IS_E5M2>(v, scales, largest);
        words[r][0] = pack.x, words[r][1] = pack.y, words[r][2] = pack.z, words[r][3] = pack.w;
        if (to.codes) *reinterpret_cast<uint4*>(to.codes + (row + r) * cols + col) = pack;
        if (to.sums) {
#pragma unroll
          for (int i = 0; i < 16; i++) sums[i] += v[i];
        }
      }
#pragma unroll
      for (int w = 0; w < 4; w++) {
        // Columns 4w .. 4w+3 of four rows: byte c of each word goes to column c.
        const uint32_t low01 = __byte_perm(words[0][w], words[1][w], 0x5140);
        const uint32_t low23 = __byte_perm(words[2][w], words[3][w], 0x5140);
        const uint32_t high01 = __byte_perm(words[0][w], words[1][w], 0x7362);
        const uint32_t high23 = __byte_perm(words[2][w], words[3][w], 0x7362);
        const uint32_t columns[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                                     __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int c = 4 * w + j;
          tile.codes[(group_col * 16 + c) * 32 + ((group_row + 4 * group_col + c) & 31)] = columns[j];
        }
      }
    }
    if (to.sums) {
      // A warp has four groups of rows, eight lanes apart.
#pragma unroll
      for (int i = 0; i < 16; i++) {
        float sum = sums[i];
        sum += __shfl_xor_sync(ALL_LANES, sum, 8);
        sum += __shfl_xor_sync(ALL_LANES, sum, 16);
        if ((threadIdx.x & 31) < 8) tile.sums[threadIdx.x >> 5][group_col * 16 + i] = sum;
      }
    }
    __syncthreads();
    if (to.sums && threadIdx.x < TILE && col0 + threadIdx.x < cols) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < TILE_WARPS; warp++) sum += tile.sums[warp][threadIdx.x];
      to.sums[row0 / TILE * cols + col0 + threadIdx.x] = sum;
    }
    // Eight threads write the 128 rows of a column, 16 at a time.
#pragma unroll
    for (int step = 0; step < 4 && to.transposed; step++) {
      const int c = step * 32 + threadIdx.x / 8, part = threadIdx.x % 8;
      const uint64_t out_row = row0 + part * 16;
      if (col0 + c < cols && out_row < rows) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = tile.codes[c * 32 + ((part * 4 + i + 4 * (c / 16) + c % 16) & 31)];
        *reinterpret_cast<uint4*>(to.transposed + (col0 + c) * rows + out_row) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    __syncthreads();
  }
  if (to.amax) {
    largest = block_reduce<Max>(largest, 0u);
    if (threadIdx.x == 0 && largest) atomicMax(to.amax, largest);
  }
}
