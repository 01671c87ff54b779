// Codes decoded, transposed and padded.
#include "encode.cuh"
#include "tile.cuh"

// The value of a code, exact in f32; Inf and NaN for E5M2, NaN for the others.
__device__ __forceinline__ float decode(uint32_t code, uint32_t format) {
  const bool fnuz = format >= E4M3_FNUZ, e5m2 = (format & 1) != 0;
  const uint32_t mag = code & 0x7F, sign = (code & 0x80) << 24;
  if (fnuz ? code == 0x80 : (e5m2 ? mag > 0x7C : mag == 0x7F)) return __uint_as_float(sign | 0x7FC00000u);
  if (!fnuz && e5m2 && mag == 0x7C) return __uint_as_float(sign | 0x7F800000u);
  const int mantissa_bits = e5m2 ? 2 : 3, bias = (e5m2 ? 15 : 7) + (fnuz ? 1 : 0);
  // Read as a small f32, whose exponent a multiplication then shifts; both steps are exact.
  const float small = __uint_as_float(mag << (23 - mantissa_bits));
  const float value = __fmul_rn(small, __uint_as_float((uint32_t)(254 - bias) << 23));
  return __uint_as_float(__float_as_uint(value) | sign);
}

template <class T>
__device__ void dequantize(const uint8_t* codes, const float* dequant_scales, T* out, uint64_t n, uint64_t cols,
                           uint64_t block_rows, uint64_t block_cols, uint64_t scale_cols, uint32_t format) {
  // Sixteen codes have one scale.
  const bool whole = block_cols >= cols || block_cols % 16 == 0;
  if (whole && cols % 16 == 0 && aligned16(codes) && aligned16(out)) {
    const uint32_t packs = (uint32_t)(cols / 16), height = (uint32_t)min(block_rows, (uint64_t)UINT32_MAX);
    const uint32_t width = (uint32_t)(min(block_cols, cols) / 16);
    for (uint64_t i = global_thread(); i < n / 16; i += global_threads()) {
      const uint4 pack = reinterpret_cast<const uint4*>(codes)[i];
      const uint32_t row = (uint32_t)(i / packs), col = (uint32_t)(i - row * (uint64_t)packs);
      const float scale = dequant_scales[row / height * scale_cols + col / width];
      const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
      float v[16];
#pragma unroll
      for (int j = 0; j < 16; j++) v[j] = __fmul_rn(decode(words[j / 4] >> (8 * (j % 4)) & 0xFF, format), scale);
      store_f32<16>(out + i * 16, v);
    }
    return;
  }
  for (uint64_t i = global_thread(); i < n; i += global_threads()) {
    const uint64_t row = i / cols, col = i - row * cols;
    const float scale = dequant_scales[row / block_rows * scale_cols + col / block_cols];
    out[i] = from_f32<T>(__fmul_rn(decode(codes[i], format), scale));
  }
}

#define DEFINE(T, NAME)                                                                                              \
  extern "C" __global__ void fp8_dequantize_##NAME(const uint8_t* codes, const float* dequant_scales, T* out,        \
                                                   uint64_t n, uint64_t cols, uint64_t block_rows,                   \
                                                   uint64_t block_cols, uint64_t scale_cols, uint32_t format) {      \
    dequantize(codes, dequant_scales, out, n, cols, block_rows, block_cols, scale_cols, format);                     \
  }
FP8_FOR_FLOATS(DEFINE)

// out [cols, out_rows] = transpose of codes [rows, cols]; columns rows .. out_rows of it are zero. Rows of codes and of out begin at
// multiples of 16 bytes.
extern "C" __global__ void __launch_bounds__(TILE_THREADS) fp8_transpose_tiles(const uint8_t* codes, uint8_t* out, uint32_t rows,
                                                                               uint32_t cols, uint32_t out_rows) {
  __shared__ Tile tile;
  const uint32_t col_tiles = (cols + TILE - 1) / TILE, tiles = col_tiles * ((out_rows + TILE - 1) / TILE);
  const int pack = threadIdx.x % 8, group = threadIdx.x / 8;
  for (uint32_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const uint32_t row0 = index / col_tiles * TILE, col0 = index % col_tiles * TILE, col = col0 + pack * 16;
    uint4 read[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint32_t row = row0 + 32 * r + group;
      read[r] = row < rows && col < cols ? *reinterpret_cast<const uint4*>(codes + row * (uint64_t)cols + col)
                                         : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) tile.codes[Tile::place(32 * r + group, pack)] = read[r];
    __syncthreads();
    write_turned(tile, out, row0, col0, out_rows, cols);
    __syncthreads();
  }
}

// The same for any sizes. Tiles of 32x32.
extern "C" __global__ void fp8_transpose_codes(const uint8_t* codes, uint8_t* out, uint64_t rows, uint64_t cols,
                                               uint64_t out_rows) {
  __shared__ uint8_t tile[32][33];
  const uint64_t col_tiles = (cols + 31) / 32, tiles = col_tiles * ((out_rows + 31) / 32);
  for (uint64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const uint64_t row0 = index / col_tiles * 32, col0 = index % col_tiles * 32;
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) {
      const uint64_t row = row0 + i / 32, col = col0 + i % 32;
      tile[i / 32][i % 32] = row < rows && col < cols ? codes[row * cols + col] : 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) {
      const uint64_t row = row0 + i % 32, col = col0 + i / 32;
      if (row < out_rows && col < cols) out[col * out_rows + row] = tile[i % 32][i / 32];
    }
    __syncthreads();
  }
}

// out [out_rows, out_cols] = codes [rows, cols], padded with zeros.
extern "C" __global__ void fp8_pad_codes(const uint8_t* codes, uint8_t* out, uint64_t rows, uint64_t cols,
                                         uint64_t out_rows, uint64_t out_cols) {
  for (uint64_t i = global_thread(); i < out_rows * out_cols; i += global_threads()) {
    const uint64_t row = i / out_cols, col = i - row * out_cols;
    out[i] = row < rows && col < cols ? codes[row * cols + col] : 0;
  }
}
