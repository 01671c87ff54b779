// Casts of a matrix to FP8 codes: row-major, transposed or both, from one read.
#include "encode.cuh"
#include "scales.cuh"

// Sixteen codes from sixteen values, each with its scale; `largest` gets the largest magnitude.
template <bool IS_E5M2, class T>
__device__ __forceinline__ uint4 encode16(const T* x, const float (&quant_scale)[16], uint32_t& largest) {
  float v[16];
  load_f32<16>(x, v);
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

template <bool IS_E5M2> __device__ __forceinline__ uint8_t encode1(float x, float quant_scale) {
  const float v[4] = {x, 0, 0, 0}, s[4] = {quant_scale, 0, 0, 0};
  return (uint8_t)encode4<IS_E5M2>(v, s);
}

// One scale for all; `amax`, if not null, gets the largest magnitude. x and codes are aligned to 16 bytes.
template <bool IS_E5M2, class T>
__device__ void cast_flat(const T* x, const float* quant_scale, uint8_t* codes, uint32_t* amax, uint64_t n) {
  const float scale = *quant_scale;
  float scales[16];
#pragma unroll
  for (int i = 0; i < 16; i++) scales[i] = scale;
  uint32_t largest = 0;
  const bool wide = aligned16(x) && aligned16(codes);
  const uint64_t packs = wide ? n / 16 : 0;
  for (uint64_t i = global_thread(); i < packs; i += global_threads())
    reinterpret_cast<uint4*>(codes)[i] = encode16<IS_E5M2>(x + i * 16, scales, largest);
  for (uint64_t i = packs * 16 + global_thread(); i < n; i += global_threads()) {
    const float v = to_f32(x[i]);
    largest = max(largest, magnitude_bits(v));
    codes[i] = encode1<IS_E5M2>(v, scale);
  }
  if (amax) {
    largest = block_reduce<Max>(largest, 0u);
    if (threadIdx.x == 0 && largest) atomicMax(amax, largest);
  }
}

// A scale for each row from its own amax; the row stays in the caches between the two reads. A block per row.
template <bool IS_E5M2, class T>
__device__ void cast_rows(const T* x, uint8_t* codes, float* amax, float* quant_scale, float* dequant_scale,
                          uint64_t rows, uint64_t cols, float max_value, uint32_t policy, float eps,
                          bool power_of_two) {
  for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* in = x + row * cols;
    uint8_t* out = codes + row * cols;
    const uint64_t packs = aligned16(in) && aligned16(out) ? cols / 16 : 0;
    uint32_t largest = 0;
    for (uint64_t i = threadIdx.x; i < packs; i += blockDim.x) {
      float v[16];
      load_f32<16>(in + i * 16, v);
#pragma unroll
      for (int j = 0; j < 16; j++) largest = max(largest, magnitude_bits(v[j]));
    }
    for (uint64_t i = packs * 16 + threadIdx.x; i < cols; i += blockDim.x)
      largest = max(largest, magnitude_bits(to_f32(in[i])));
    largest = block_reduce<Max>(largest, 0u);
    const float scale = quant_scale_of(__uint_as_float(largest), max_value, policy, eps, power_of_two);
    if (threadIdx.x == 0) {
      amax[row] = __uint_as_float(largest);
      quant_scale[row] = scale;
      dequant_scale[row] = __fdiv_rn(1.0f, scale);
    }
    float scales[16];
#pragma unroll
    for (int i = 0; i < 16; i++) scales[i] = scale;
    for (uint64_t i = threadIdx.x; i < packs; i += blockDim.x)
      reinterpret_cast<uint4*>(out)[i] = encode16<IS_E5M2>(in + i * 16, scales, largest);
    for (uint64_t i = packs * 16 + threadIdx.x; i < cols; i += blockDim.x)
      out[i] = encode1<IS_E5M2>(to_f32(in[i]), scale);
  }
}

constexpr int TILE = 128;

// Tiles of 128x128: each thread casts 4 rows of 16 values, turns them 4x4 with byte permutations, and the block writes
// columns of 128 codes. `codes` (may be null) is row-major; `transposed` [cols, rows]. quant_scale has one value, or
// one for each column (per_col). rows and cols are multiples of 16 and all pointers are aligned to 16 bytes.
template <bool IS_E5M2, class T>
__device__ void cast_transpose(const T* x, const float* quant_scale, uint8_t* codes, uint8_t* transposed,
                               uint32_t* amax, uint64_t rows, uint64_t cols, bool per_col, uint32_t* tile) {
  // In `tile`: word (column, four rows); rows are rotated by column, so that neither writes nor reads have bank conflicts.
  const int group_col = threadIdx.x % 8, group_row = threadIdx.x / 8;
  const uint64_t col_tiles = (cols + TILE - 1) / TILE, tiles = col_tiles * ((rows + TILE - 1) / TILE);
  uint32_t largest = 0;
  for (uint64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const uint64_t row0 = index / col_tiles * TILE, col0 = index % col_tiles * TILE;
    const uint64_t row = row0 + group_row * 4, col = col0 + group_col * 16;
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
        const uint4 pack = encode16<IS_E5M2>(x + (row + r) * cols + col, scales, largest);
        words[r][0] = pack.x, words[r][1] = pack.y, words[r][2] = pack.z, words[r][3] = pack.w;
        if (codes) *reinterpret_cast<uint4*>(codes + (row + r) * cols + col) = pack;
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
          tile[(group_col * 16 + c) * 32 + ((group_row + 4 * group_col + c) & 31)] = columns[j];
        }
      }
    }
    __syncthreads();
    // Eight threads write the 128 rows of a column, 16 at a time.
#pragma unroll
    for (int step = 0; step < 4; step++) {
      const int c = step * 32 + threadIdx.x / 8, part = threadIdx.x % 8;
      const uint64_t out_row = row0 + part * 16;
      if (col0 + c < cols && out_row < rows) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = tile[c * 32 + ((part * 4 + i + 4 * (c / 16) + c % 16) & 31)];
        *reinterpret_cast<uint4*>(transposed + (col0 + c) * rows + out_row) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    __syncthreads();
  }
  if (amax) {
    largest = block_reduce<Max>(largest, 0u);
    if (threadIdx.x == 0 && largest) atomicMax(amax, largest);
  }
}

// Every format, rounding, overflow and grid of scales, value by value.
template <class T>
__device__ void cast_general(const T* x, const float* quant_scales, uint8_t* codes, uint32_t* amax, uint64_t n,
                             uint64_t cols, uint64_t block_rows, uint64_t block_cols, uint64_t scale_cols,
                             const Encoder& encoder, uint64_t seed, uint32_t step, uint32_t tensor) {
  uint32_t largest = 0;
  for (uint64_t i = global_thread(); i < n; i += global_threads()) {
    const uint64_t row = i / cols, col = i - row * cols;
    const float v = to_f32(x[i]);
    largest = max(largest, magnitude_bits(v));
    uint32_t random = 0;
    if (encoder.rounding == STOCHASTIC) {
      const uint4 block = philox(i / 4, step, tensor, seed);
      const uint32_t words[4] = {block.x, block.y, block.z, block.w};
      random = i % 4 == 0 ? words[0] : i % 4 == 1 ? words[1] : i % 4 == 2 ? words[2] : words[3];
    }
    const float scale = quant_scales[row / block_rows * scale_cols + col / block_cols];
    codes[i] = (uint8_t)encoder.code(scaled_bits(v, scale), random);
  }
  if (amax) {
    largest = block_reduce<Max>(largest, 0u);
    if (threadIdx.x == 0 && largest) atomicMax(amax, largest);
  }
}

#define DEFINE(T, NAME)                                                                                               \
  extern "C" __global__ void fp8_cast_flat_##NAME(const T* x, const float* quant_scale, uint8_t* codes,               \
                                                  uint32_t* amax, uint64_t n, uint32_t e5m2) {                        \
    if (e5m2)                                                                                                         \
      cast_flat<true>(x, quant_scale, codes, amax, n);                                                                \
    else                                                                                                              \
      cast_flat<false>(x, quant_scale, codes, amax, n);                                                               \
  }                                                                                                                   \
  extern "C" __global__ void fp8_cast_rows_##NAME(const T* x, uint8_t* codes, float* amax, float* quant_scale,        \
                                                  float* dequant_scale, uint64_t rows, uint64_t cols,                 \
                                                  uint32_t e5m2, float max_value, uint32_t policy, float eps,         \
                                                  uint32_t power_of_two) {                                            \
    if (e5m2)                                                                                                         \
      cast_rows<true>(x, codes, amax, quant_scale, dequant_scale, rows, cols, max_value, policy, eps,                 \
                      power_of_two != 0);                                                                             \
    else                                                                                                              \
      cast_rows<false>(x, codes, amax, quant_scale, dequant_scale, rows, cols, max_value, policy, eps,                \
                       power_of_two != 0);                                                                            \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      fp8_cast_transpose_##NAME(const T* x, const float* quant_scale, uint8_t* codes, uint8_t* transposed,            \
                                uint32_t* amax, uint64_t rows, uint64_t cols, uint32_t per_col, uint32_t e5m2) {      \
    __shared__ uint32_t tile[TILE * TILE / 4];                                                                        \
    if (e5m2)                                                                                                         \
      cast_transpose<true>(x, quant_scale, codes, transposed, amax, rows, cols, per_col != 0, tile);                  \
    else                                                                                                              \
      cast_transpose<false>(x, quant_scale, codes, transposed, amax, rows, cols, per_col != 0, tile);                 \
  }                                                                                                                   \
  extern "C" __global__ void fp8_cast_general_##NAME(                                                                 \
      const T* x, const float* quant_scales, uint8_t* codes, uint32_t* amax, uint64_t n, uint64_t cols,               \
      uint64_t block_rows, uint64_t block_cols, uint64_t scale_cols, uint32_t format, uint32_t rounding,              \
      uint32_t saturate, uint32_t via_f16, uint64_t seed, uint32_t step, uint32_t tensor) {                           \
    const Encoder encoder(format, rounding, saturate != 0, via_f16 != 0);                                             \
    cast_general(x, quant_scales, codes, amax, n, cols, block_rows, block_cols, scale_cols, encoder, seed, step,      \
                 tensor);                                                                                             \
  }
FP8_FOR_FLOATS(DEFINE)
