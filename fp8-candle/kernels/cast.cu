// Casts of a matrix to FP8 codes: row-major, transposed or both, from one read.
#include "cast_tiles.cuh"
#include "scales.cuh"

// What a cast is to do, in one argument.
enum Target : uint32_t { TO_E5M2 = 1, OVERFLOWS = 2 };
__device__ __forceinline__ bool saturates(uint32_t target) { return !(target & OVERFLOWS); }

template <bool IS_E5M2, bool DIVIDES> __device__ __forceinline__ uint8_t encode1(float x, float scale, bool saturate) {
  const float scaled[4] = {apply_scale<DIVIDES>(x, scale), 0, 0, 0}, values[4] = {x, 0, 0, 0};
  return (uint8_t)corrected<IS_E5M2>(encode2<IS_E5M2>(scaled[0], 0.0f), values, scaled, saturate);
}

// One scale for all; `amax`, if not null, gets the largest magnitude. x and codes are aligned to 16 bytes. A division has much more code
// than a product, so fewer of them stand side by side.
template <bool IS_E5M2, bool DIVIDES, class T>
__device__ void cast_flat(const T* x, const float* one_scale, uint8_t* codes, uint32_t* amax, uint64_t n, bool saturate) {
  constexpr int AT_ONCE = DIVIDES ? 1 : Stored<T>::ROWS;
  const float scale = *one_scale;
  float scales[16];
#pragma unroll
  for (int i = 0; i < 16; i++) scales[i] = scale;
  Largest largest;
  const bool wide = aligned16(x) && aligned16(codes);
  const uint64_t packs = wide ? n / 16 : 0, step = global_threads();
  uint64_t i = global_thread();
  for (; i + (AT_ONCE - 1) * step < packs; i += AT_ONCE * step) {
    Pack<T, 16> read[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) read[j] = load_pack<16>(x + (i + j * step) * 16);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      reinterpret_cast<uint4*>(codes)[i + j * step] = encode16<IS_E5M2, DIVIDES>(read[j], scales, largest, saturate);
  }
  if constexpr (AT_ONCE > 1) {
#pragma unroll 1
    for (; i < packs; i += step)
      reinterpret_cast<uint4*>(codes)[i] = encode16<IS_E5M2, DIVIDES>(load_pack<16>(x + i * 16), scales, largest, saturate);
  }
  for (uint64_t i = packs * 16 + global_thread(); i < n; i += step) {
    const float v = to_f32(x[i]);
    largest.bits = max(largest.bits, magnitude_bits(v));
    codes[i] = encode1<IS_E5M2, DIVIDES>(v, scale, saturate);
  }
  if (amax) {
    const uint32_t most = block_reduce<Max>(largest.get(), 0u);
    if (threadIdx.x == 0 && most) atomicMax(amax, most);
  }
}

// A scale for each row from its own amax; a thread keeps its first 16 values, and the rest of the row stays in the caches between
// the two reads. A block per row.
template <bool IS_E5M2, bool DIVIDES, class T>
__device__ void cast_rows(const T* x, uint8_t* codes, float* amax, float* quant_scale, float* dequant_scale,
                          uint64_t rows, uint64_t cols, float max_value, uint32_t policy, float eps,
                          bool power_of_two, bool saturate) {
  for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* in = x + row * cols;
    uint8_t* out = codes + row * cols;
    const uint32_t packs = aligned16(in) && aligned16(out) ? (uint32_t)(cols / 16) : 0;
    Pack<T, 16> first;
    if (threadIdx.x < packs) first = load_pack<16>(in + threadIdx.x * 16);
    uint32_t largest = 0;
    const auto measure = [&](const Pack<T, 16>& read) {
#pragma unroll
      for (int j = 0; j < 16; j++) largest = max(largest, magnitude_bits(to_f32(read.v[j])));
    };
    if (threadIdx.x < packs) measure(first);
    for (uint32_t i = threadIdx.x + blockDim.x; i < packs; i += blockDim.x) measure(load_pack<16>(in + i * 16));
    for (uint64_t i = packs * 16ull + threadIdx.x; i < cols; i += blockDim.x)
      largest = max(largest, magnitude_bits(to_f32(in[i])));
    largest = block_reduce<Max>(largest, 0u);
    const float most = __uint_as_float(largest);
    const float scale = taken_scale<DIVIDES>(most, max_value, policy, eps, power_of_two);
    if (threadIdx.x == 0) {
      const ScalePair made = scales_of(most, max_value, policy, eps, power_of_two);
      amax[row] = most;
      quant_scale[row] = made.quant;
      dequant_scale[row] = made.dequant;
    }
    float scales[16];
#pragma unroll
    for (int i = 0; i < 16; i++) scales[i] = scale;
    Largest unused;
    if (threadIdx.x < packs)
      reinterpret_cast<uint4*>(out)[threadIdx.x] = encode16<IS_E5M2, DIVIDES>(first, scales, unused, saturate);
    for (uint32_t i = threadIdx.x + blockDim.x; i < packs; i += blockDim.x)
      reinterpret_cast<uint4*>(out)[i] = encode16<IS_E5M2, DIVIDES>(load_pack<16>(in + i * 16), scales, unused, saturate);
    for (uint64_t i = packs * 16ull + threadIdx.x; i < cols; i += blockDim.x)
      out[i] = encode1<IS_E5M2, DIVIDES>(to_f32(in[i]), scale, saturate);
  }
}

// Eight codes from eight values with one scale.
template <bool IS_E5M2, bool DIVIDES>
__device__ __forceinline__ uint2 encode8(const float (&v)[8], float scale, bool saturate) {
  float scaled[8];
#pragma unroll
  for (int i = 0; i < 8; i++) scaled[i] = apply_scale<DIVIDES>(v[i], scale);
  uint2 codes = make_uint2(encode4<IS_E5M2>(scaled), encode4<IS_E5M2>(scaled + 4));
  const uint32_t least_odd = least_odd_code<IS_E5M2>(saturate);
  if (__builtin_expect((codes_from(codes.x, least_odd) | codes_from(codes.y, least_odd)) != 0, 0)) {
    codes.x = corrected<IS_E5M2>(codes.x, v, scaled, saturate);
    codes.y = corrected<IS_E5M2>(codes.y, v + 4, scaled + 4, saturate);
  }
  return codes;
}

// The same for groups of `width` neighbouring values, at most 128 and a multiple of 8, with x at a multiple of 16 bytes: `lanes` threads, a
// power of two, for a group.
template <bool DIVIDES, class T>
__device__ void cast_groups(const T* x, uint8_t* codes, float* amax, float* quant_scale, float* dequant_scale,
                            uint64_t groups, uint32_t width, uint32_t lanes, uint32_t target, float max_value, uint32_t policy,
                            float eps, bool power_of_two) {
  constexpr int N = 8, AT_ONCE = 2;
  const uint32_t shift = __ffs(lanes) - 1, lane = threadIdx.x & (lanes - 1);
  const uint64_t first = global_thread() >> shift, step = global_threads() >> shift;
  const auto place = [&](int j) { return (first + j * step) * width + lane * N; };
  const auto valid = [&](int j) { return first + j * step < groups && lane * N < width; };
  Pack<T, N> read[AT_ONCE] = {};
#pragma unroll
  for (int j = 0; j < AT_ONCE; j++)
    if (valid(j)) read[j] = load_pack<N>(x + place(j));
#pragma unroll
  for (int j = 0; j < AT_ONCE; j++) {
    float v[N];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      v[i] = to_f32(read[j].v[i]);
      largest = max(largest, magnitude_bits(v[i]));
    }
    for (uint32_t offset = lanes / 2; offset > 0; offset >>= 1)
      largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
    const float most = __uint_as_float(largest);
    const float scale = taken_scale<DIVIDES>(most, max_value, policy, eps, power_of_two);
    if (!valid(j)) continue;
    if (lane == 0) {
      const uint64_t group = first + j * step;
      const ScalePair made = scales_of(most, max_value, policy, eps, power_of_two);
      amax[group] = most;
      quant_scale[group] = made.quant;
      dequant_scale[group] = made.dequant;
    }
    *reinterpret_cast<uint2*>(codes + place(j)) = target & TO_E5M2 ? encode8<true, DIVIDES>(v, scale, saturates(target))
                                                                   : encode8<false, DIVIDES>(v, scale, saturates(target));
  }
}

// Every format, rounding, overflow and grid of scales. A thread takes four values in a row, which share a block of random words.
template <bool DIVIDES, class T>
__device__ void cast_general(const T* x, const float* all_scales, uint8_t* codes, uint32_t* amax, uint64_t n,
                             uint64_t cols, uint64_t block_rows, uint64_t block_cols, uint64_t scale_cols,
                             const Encoder& encoder, uint64_t seed, uint32_t step, uint32_t tensor) {
  constexpr int N = 4;
  const bool one = block_cols >= cols && block_rows >= n / cols;
  const bool wide = (reinterpret_cast<uint64_t>(x) % (N * sizeof(T)) | reinterpret_cast<uint64_t>(codes) % N) == 0;
  uint32_t largest = 0;
  for (uint64_t group = global_thread(); group * N < n; group += global_threads()) {
    const uint64_t first = group * N;
    const int count = (int)min((uint64_t)N, n - first);
    float v[N] = {}, scales[N];
    if (wide && count == N) {
      load_f32<N>(x + first, v);
    } else {
      for (int j = 0; j < count; j++) v[j] = to_f32(x[first + j]);
    }
    if (one) {
#pragma unroll
      for (int j = 0; j < N; j++) scales[j] = all_scales[0];
    } else {
      for (int j = 0; j < count; j++) {
        const uint64_t row = (first + j) / cols, col = first + j - row * cols;
        scales[j] = all_scales[row / block_rows * scale_cols + col / block_cols];
      }
    }
    const uint4 block = encoder.rounding == STOCHASTIC ? philox(group, step, tensor, seed) : make_uint4(0, 0, 0, 0);
    const uint32_t random[N] = {block.x, block.y, block.z, block.w};
    uint32_t encoded[N] = {};
#pragma unroll
    for (int j = 0; j < N; j++) {
      if (j >= count) break;
      largest = max(largest, magnitude_bits(v[j]));
      encoded[j] = encoder.code(scaled_bits<DIVIDES>(v[j], scales[j]), random[j]);
    }
    if (wide && count == N) {
      *reinterpret_cast<uint32_t*>(codes + first) = encoded[0] | encoded[1] << 8 | encoded[2] << 16 | encoded[3] << 24;
    } else {
      for (int j = 0; j < count; j++) codes[first + j] = (uint8_t)encoded[j];
    }
  }
  if (amax) {
    largest = block_reduce<Max>(largest, 0u);
    if (threadIdx.x == 0 && largest) atomicMax(amax, largest);
  }
}

template <class Source, class Scales>
__device__ __forceinline__ void cast_matrix(const Source& source, const Scales& scales, const CastTo& to, uint64_t rows,
                                            uint64_t cols, uint32_t target) {
  __shared__ Tile tile;
  if (target & TO_E5M2)
    cast_tiles<true>(source, scales, to, rows, cols, tile);
  else
    cast_tiles<false>(source, scales, to, rows, cols, tile);
}

// The kernels that multiply by scales and, under another name, those that divide by them: a kernel with both would need more registers.
#define DEFINE_BOTH(NAME, DIVIDES, T, TYPE)                                                                           \
  extern "C" __global__ void fp8_##NAME##_flat_##TYPE(const T* x, const float* scale, uint8_t* codes, uint32_t* amax, \
                                                      uint64_t n, uint32_t target) {                                  \
    if (target & TO_E5M2)                                                                                             \
      cast_flat<true, DIVIDES>(x, scale, codes, amax, n, saturates(target));                                          \
    else                                                                                                              \
      cast_flat<false, DIVIDES>(x, scale, codes, amax, n, saturates(target));                                         \
  }                                                                                                                   \
  extern "C" __global__ void fp8_##NAME##_rows_##TYPE(const T* x, uint8_t* codes, float* amax, float* quant_scale,    \
                                                      float* dequant_scale, uint64_t rows, uint64_t cols,             \
                                                      uint32_t target, float max_value, uint32_t policy, float eps,   \
                                                      uint32_t power_of_two) {                                        \
    if (target & TO_E5M2)                                                                                             \
      cast_rows<true, DIVIDES>(x, codes, amax, quant_scale, dequant_scale, rows, cols, max_value, policy, eps,        \
                               power_of_two != 0, saturates(target));                                                 \
    else                                                                                                              \
      cast_rows<false, DIVIDES>(x, codes, amax, quant_scale, dequant_scale, rows, cols, max_value, policy, eps,       \
                                power_of_two != 0, saturates(target));                                                \
  }                                                                                                                   \
  extern "C" __global__ void fp8_##NAME##_groups_##TYPE(const T* x, uint8_t* codes, float* amax, float* quant_scale,  \
                                                        float* dequant_scale, uint64_t groups, uint32_t width,        \
                                                        uint32_t lanes, uint32_t target, float max_value,             \
                                                        uint32_t policy, float eps, uint32_t power_of_two) {          \
    cast_groups<DIVIDES>(x, codes, amax, quant_scale, dequant_scale, groups, width, lanes, target, max_value, policy, \
                         eps, power_of_two != 0);                                                                     \
  }                                                                                                                   \
  extern "C" __global__ void fp8_##NAME##_general_##TYPE(                                                             \
      const T* x, const float* scales, uint8_t* codes, uint32_t* amax, uint64_t n, uint64_t cols,                     \
      uint64_t block_rows, uint64_t block_cols, uint64_t scale_cols, uint32_t format, uint32_t rounding,              \
      uint32_t saturate, uint32_t via_f16, uint64_t seed, uint32_t step, uint32_t tensor) {                           \
    const Encoder encoder(format, rounding, saturate != 0, via_f16 != 0);                                             \
    cast_general<DIVIDES>(x, scales, codes, amax, n, cols, block_rows, block_cols, scale_cols, encoder, seed, step,   \
                          tensor);                                                                                    \
  }

#define DEFINE(T, NAME)                                                                                               \
  DEFINE_BOTH(cast, false, T, NAME)                                                                                   \
  DEFINE_BOTH(divide, true, T, NAME)                                                                                  \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)                                                       \
      fp8_cast_transpose_##NAME(const T* x, const float* quant_scale, uint8_t* codes, uint8_t* transposed, uint32_t* amax, \
                    uint64_t rows, uint64_t cols, uint32_t target) {                                                  \
    cast_matrix(Stored<T>{x, cols}, OneScale{quant_scale}, {codes, transposed, amax, nullptr, saturates(target)}, rows, cols, target); \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)                                                       \
      fp8_cast_blocks_##NAME(const T* x, const float* quant_scale, uint8_t* codes, uint8_t* transposed, uint32_t* amax, \
                    uint64_t rows, uint64_t cols, uint32_t block_rows, uint32_t block_cols, uint32_t pitch, uint32_t target) { \
    cast_matrix(Stored<T>{x, cols}, BlockScales{quant_scale, block_rows, block_cols, pitch}, {codes, transposed, amax, nullptr, saturates(target)}, rows, cols, target); \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)                                                       \
      fp8_cast_columns_##NAME(const T* x, const float* quant_scale, uint8_t* codes, uint8_t* transposed, uint32_t* amax, \
                    uint64_t rows, uint64_t cols, uint32_t run, uint32_t pitch, uint32_t target) {                    \
    cast_matrix(Stored<T>{x, cols}, ColumnScales{quant_scale, run, pitch}, {codes, transposed, amax, nullptr, saturates(target)}, rows, cols, target); \
  }
FP8_FOR_FLOATS(DEFINE)
