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

// Values of four codes that are not NaN. Moved to their places in an f16, the bits are those of a smaller number: an E5M2 is the upper byte
// of an f16, and an E4M3 needs 2^8 times that.
template <bool IS_E5M2> __device__ __forceinline__ void decode4(uint32_t codes, float* v) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    // Two codes in upper bytes.
    uint32_t bits = __byte_perm(codes, 0, half ? 0x3424 : 0x1404);
    if (!IS_E5M2) bits = (bits & 0x80008000u) | (bits >> 1 & 0x3F803F80u);
    __half2 pair = *reinterpret_cast<const __half2*>(&bits);
    if (!IS_E5M2) pair = __hmul2(pair, __floats2half2_rn(256.0f, 256.0f));
    const float2 values = __half22float2(pair);
    v[2 * half] = values.x, v[2 * half + 1] = values.y;
  }
}

// Values of N codes of any format, N a multiple of four.
template <int N> __device__ __forceinline__ void decode_pack(const Pack<uint32_t, N / 4>& codes, uint32_t format, float (&v)[N]) {
  // The least magnitude that is NaN.
  const uint32_t nan = format == E5M2 ? 0x7D : 0x7F;
  uint32_t nans = format >= E4M3_FNUZ;
#pragma unroll
  for (int i = 0; i < N / 4; i++) nans |= codes_from(codes.v[i], nan);
  if (__builtin_expect(nans != 0, 0)) {
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = decode(codes.v[j / 4] >> (8 * (j % 4)) & 0xFF, format);
  } else if (format == E5M2) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) decode4<true>(codes.v[i], v + 4 * i);
  } else {
#pragma unroll
    for (int i = 0; i < N / 4; i++) decode4<false>(codes.v[i], v + 4 * i);
  }
}

template <class T>
__device__ void dequantize(const uint8_t* codes, const float* dequant_scales, T* out, uint64_t n, uint64_t cols,
                           uint64_t block_rows, uint64_t block_cols, uint64_t scale_cols, uint32_t format) {
  // As many codes as have 16 bytes of values, so that neighbouring threads store neighbouring bytes. They have one scale.
  constexpr int N = 16 / sizeof(T), AT_ONCE = 4;
  const bool whole = block_cols >= cols || block_cols % N == 0;
  if (whole && cols % N == 0 && aligned16(codes) && aligned16(out)) {
    const uint32_t packs = (uint32_t)(cols / N), height = (uint32_t)min(block_rows, (uint64_t)UINT32_MAX);
    const uint32_t width = (uint32_t)(min(block_cols, cols) / N);
    const uint64_t all = n / N, step = global_threads();
    for (uint64_t base = global_thread(); base < all; base += AT_ONCE * step) {
      Pack<uint32_t, N / 4> read[AT_ONCE];
      float scales[AT_ONCE];
      // The last pack may be read several times. All loads of codes come before the divisions, whose branches no load would pass.
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++)
        read[j] = load_pack<N / 4>(reinterpret_cast<const uint32_t*>(codes) + min(base + j * step, all - 1) * (N / 4));
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const uint64_t i = min(base + j * step, all - 1);
        const uint32_t row = i >> 32 ? (uint32_t)(i / packs) : (uint32_t)i / packs, col = (uint32_t)(i - row * (uint64_t)packs);
        scales[j] = dequant_scales[row / height * scale_cols + col / width];
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const uint64_t i = base + j * step;
        if (i >= all) break;
        float v[N];
        decode_pack<N>(read[j], format, v);
#pragma unroll
        for (int k = 0; k < N; k++) v[k] = __fmul_rn(v[k], scales[j]);
        store_f32<N>(out + i * N, v);
      }
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
