// Casts of a matrix by tiles, row-major, transposed or both, of values that a source reads or computes.
#pragma once
#include "encode.cuh"
#include "tile.cuh"

// The largest magnitude that a thread has seen: of numbers as f32, and as bits where a NaN was among them.
struct Largest {
  float number = 0.0f;
  uint32_t bits = 0;
  __device__ __forceinline__ uint32_t get() const { return max(bits, __float_as_uint(number)); }
};

// Sixteen codes from sixteen values, each with its scale. NaN and, without saturation, overflow are rare, and only their codes need
// more than the conversion.
template <bool IS_E5M2, bool DIVIDES = false>
__device__ __forceinline__ uint4 encode16(const float (&v)[16], const float (&scale)[16], Largest& largest, bool saturate) {
  const uint32_t least_odd = least_odd_code<IS_E5M2>(saturate);
  uint32_t codes[4], odd = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float scaled[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      scaled[j] = apply_scale<DIVIDES>(v[4 * i + j], scale[4 * i + j]);
      largest.number = fmaxf(largest.number, fabsf(v[4 * i + j]));
    }
    codes[i] = encode4<IS_E5M2>(scaled);
    odd |= codes_from(codes[i], least_odd);
  }
  if (__builtin_expect(odd != 0, 0)) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float scaled[4];
#pragma unroll
      for (int j = 0; j < 4; j++) scaled[j] = apply_scale<DIVIDES>(v[4 * i + j], scale[4 * i + j]);
      codes[i] = corrected<IS_E5M2>(codes[i], v + 4 * i, scaled, saturate);
    }
#pragma unroll
    for (int i = 0; i < 16; i++) largest.bits = max(largest.bits, magnitude_bits(v[i]));
  }
  return make_uint4(codes[0], codes[1], codes[2], codes[3]);
}

template <class T> __device__ __forceinline__ void to_f32(const Pack<T, 16>& pack, float (&v)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = to_f32(pack.v[i]);
}

template <bool IS_E5M2, bool DIVIDES = false, class T>
__device__ __forceinline__ uint4 encode16(const Pack<T, 16>& pack, const float (&scale)[16], Largest& largest, bool saturate) {
  float v[16];
  to_f32(pack, v);
  return encode16<IS_E5M2, DIVIDES>(v, scale, largest, saturate);
}

// Where a cast goes. `codes` is row-major, `transposed` [cols, rows], `amax` the bits of the largest magnitude, `sums`
// [row tiles, cols] the sums of the values over the rows of a tile; each may be null. `saturate`: what is too large becomes the largest
// number.
struct CastTo {
  uint8_t *codes, *transposed;
  uint32_t* amax;
  float* sums;
  bool saturate;
};

// One quant_scale for all values.
struct OneScale {
  const float* quant_scale;
  // Those of 16 columns of four rows, from (row, col) on, and then the ones of row `row + r`.
  struct Read {
    float scale;
  };
  __device__ __forceinline__ Read read(uint32_t, uint32_t) const { return {*quant_scale}; }
  __device__ __forceinline__ void of_row(const Read& read, int, float (&scales)[16]) const {
#pragma unroll
    for (int i = 0; i < 16; i++) scales[i] = read.scale;
  }
};

// A quant_scale for each block of values: blocks have a multiple of 16 columns, or are wider than the matrix.
struct BlockScales {
  const float* quant_scale;
  uint32_t block_rows, block_cols, pitch;
  struct Read {
    const float* of_col;
    uint32_t row;
  };
  __device__ __forceinline__ Read read(uint32_t row, uint32_t col) const { return {quant_scale + col / block_cols, row}; }
  __device__ __forceinline__ void of_row(const Read& read, int r, float (&scales)[16]) const {
    const float scale = read.of_col[(read.row + r) / block_rows * (uint64_t)pitch];
#pragma unroll
    for (int i = 0; i < 16; i++) scales[i] = scale;
  }
};

// A quant_scale for each column of a run of rows: runs are a multiple of four rows, or longer than the matrix. pitch is a multiple
// of four.
struct ColumnScales {
  const float* quant_scale;
  uint32_t run, pitch;
  struct Read {
    float scales[16];
  };
  __device__ __forceinline__ Read read(uint32_t row, uint32_t col) const {
    Read read;
    load_f32<16>(quant_scale + row / run * (uint64_t)pitch + col, read.scales);
    return read;
  }
  __device__ __forceinline__ void of_row(const Read& read, int, float (&scales)[16]) const {
#pragma unroll
    for (int i = 0; i < 16; i++) scales[i] = read.scales[i];
  }
};

// Rows that a thread reads before it computes, so that about 128 bytes are in flight. `streams`: tensors that are read.
template <class T> constexpr int rows_at_once(int streams) {
  return sizeof(T) * streams <= 2 ? 4 : sizeof(T) * streams <= 4 ? 2 : 1;
}

// Values as they lie in memory.
template <class T> struct Stored {
  using Element = T;
  struct Columns {};
  using Row = Pack<T, 16>;
  static constexpr int ROWS = rows_at_once<T>(1);
  const T* x;
  uint64_t cols;
  __device__ __forceinline__ Columns columns(uint64_t) const { return {}; }
  __device__ __forceinline__ Row read(uint64_t row, uint64_t col) const { return load_pack<16>(x + row * cols + col); }
  __device__ __forceinline__ void values(const Row& read, const Columns&, uint64_t, float (&v)[16]) const { to_f32(read, v); }
};

// The values rounded to the element type, as a cast that reads them would see them.
template <class T> __device__ __forceinline__ void round_to(float (&v)[16]) { to_f32(rounded<T>(v), v); }

// Tiles of 128x128: each thread casts 4 rows of 16 values, and the block turns the codes in shared memory. A source gives what it
// needs for 16 columns (`columns`), reads 16 values of a row (`read`), and computes from both (`values`); all reads of `ROWS` rows
// come before what is computed from them, because pointers may alias and no load would pass a store. rows and cols are multiples
// of 16 and below 2^31, and all pointers are aligned to 16 bytes. The order of sums depends only on the shape.
template <bool IS_E5M2, class Source, class Scales>
__device__ __forceinline__ void cast_tiles(const Source& source, const Scales& quant_scales, const CastTo& to, uint64_t rows,
                                           uint64_t cols, Tile& tile) {
  const int group_col = threadIdx.x % 8, group_row = threadIdx.x / 8;
  const uint32_t height = (uint32_t)rows, width = (uint32_t)cols;
  const uint32_t col_tiles = (width + TILE - 1) / TILE, tiles = col_tiles * ((height + TILE - 1) / TILE);
  Largest largest;
  for (uint32_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const uint32_t row0 = index / col_tiles * TILE, col0 = index % col_tiles * TILE;
    const uint32_t row = row0 + group_row * 4, col = col0 + group_col * 16;
    float sums[16] = {};
    if (row < height && col < width) {
      const typename Scales::Read own = quant_scales.read(row, col);
#pragma unroll 1
      for (int first = 0; first < 4; first += Source::ROWS) {
        // Again for each group of rows, from the cache: there are no registers to keep them in.
        const typename Source::Columns columns = source.columns(col);
        typename Source::Row read[Source::ROWS];
#pragma unroll
        for (int i = 0; i < Source::ROWS; i++) read[i] = source.read(row + first + i, col);
#pragma unroll
        for (int i = 0; i < Source::ROWS; i++) {
          const int r = first + i;
          float scales[16], v[16];
          quant_scales.of_row(own, r, scales);
          source.values(read[i], columns, col, v);
          const uint4 pack = encode16<IS_E5M2>(v, scales, largest, to.saturate);
          if (to.codes) *reinterpret_cast<uint4*>(to.codes + (row + r) * cols + col) = pack;
          if (to.transposed) tile.codes[Tile::place(group_row * 4 + r, group_col)] = pack;
          if (to.sums) {
#pragma unroll
            for (int c = 0; c < 16; c++) sums[c] += v[c];
          }
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
    if (to.sums && threadIdx.x < TILE && col0 + threadIdx.x < width) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < TILE_WARPS; warp++) sum += tile.sums[warp][threadIdx.x];
      to.sums[row0 / TILE * cols + col0 + threadIdx.x] = sum;
    }
    if (to.transposed) write_turned(tile, to.transposed, row0, col0, height, width);
    __syncthreads();
  }
  if (to.amax) {
    const uint32_t most = block_reduce<Max>(largest.get(), 0u);
    if (threadIdx.x == 0 && most) atomicMax(to.amax, most);
  }
}
