// AdamW with moments as E4M3 codes in blocks of 128 elements, each with an amax and a curve.
//
// A warp updates a block: each lane decodes the moments of four elements, makes their step, and codes the new moments. Bits are those
// of fp8-core on the CPU (expansion.rs, the definition): the same operations, each rounded, sums in the same order, and the same random
// words, which both moments share.
#include "adamw.cuh"
#include "encode.cuh"
#include <cfloat>

constexpr uint32_t BLOCK = 128;
constexpr uint32_t OWN = 4;
constexpr float LARGEST = 448.0f;

// The element x has the code of 448 (|x| / amax)^k with its sign. Numbers are those of the CPU.
enum CurveOfBlock : uint32_t { LINEAR = 0, SQUARE = 1, FOURTH = 2, ROOT = 3 };

// By the amax of a block over its mean magnitude. NaN, of a block of zeros, is as large as it can be.
__device__ __forceinline__ uint32_t curve_for_spread(float spread) {
  return spread <= 1.25f ? FOURTH : spread <= 10.0f ? SQUARE : spread <= 48.0f ? LINEAR : ROOT;
}

__device__ __forceinline__ float raise(uint32_t curve, float t) {
  const float square = mul(t, t);
  return curve == LINEAR ? t : curve == SQUARE ? square : curve == FOURTH ? mul(square, square) : root(t);
}

__device__ __forceinline__ float lower(uint32_t curve, float t) {
  if (curve == LINEAR) return t;
  if (curve == ROOT) return mul(t, t);
  const float first = root(t);
  return curve == SQUARE ? first : root(first);
}

__device__ __forceinline__ float decoded(uint32_t code, float amax, uint32_t curve) {
  const float x = __half2float(__half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)code, __NV_E4M3)));
  return copysignf(mul(amax, lower(curve, quotient(fabsf(x), LARGEST))), x);
}

// The code of a magnitude of at most 448, or NaN, by a random word: a fixed-point number with 20 bits after the point counts codes.
__device__ __forceinline__ uint32_t round_up_at_random(float y, uint32_t word) {
  const uint32_t fixed = y < 0x1p-6f ? (uint32_t)(y * 0x1p29f) : __float_as_uint(y) - (120u << 23);
  return isnan(y) ? NAN_CODE : (fixed + (word >> 12)) >> 20;
}

// A block of one moment: of this lane the elements from `own` on, of which `count` exist.
struct CodedBlock {
  uint8_t* codes;
  float* amax;
  uint8_t* curve;
  uint32_t rotated;

  __device__ __forceinline__ CodedBlock(const Moment& moment, uint64_t block, uint64_t own)
      : codes(pointer<uint8_t>(moment.values) + own), amax(pointer<float>(moment.amaxes) + block),
        curve(pointer<uint8_t>(moment.curves) + block), rotated((uint32_t)moment.rotated) {}

  __device__ __forceinline__ void read(float (&v)[OWN], int count, bool packed) const {
    const float largest = *amax;
    const uint32_t k = *curve;
    uint32_t word = 0;
    if (packed && count == OWN) {
      word = *reinterpret_cast<const uint32_t*>(codes);
    } else {
      for (int i = 0; i < count; i++) word |= (uint32_t)codes[i] << 8 * i;
    }
#pragma unroll
    for (int i = 0; i < (int)OWN; i++) v[i] = decoded(word >> 8 * i & 0xFF, largest, k);
  }

  // For a whole warp. `elements`: those of the block; `words`: the random words of this lane's.
  __device__ __forceinline__ void write(const float (&v)[OWN], int count, uint32_t elements, bool packed, bool non_negative,
                                        uint64_t flags, uint4 words) const {
    const int lane = threadIdx.x & 31;
    float largest = 0.0f, sums[OWN];
#pragma unroll
    for (int i = 0; i < (int)OWN; i++) {
      sums[i] = i < count ? fabsf(v[i]) : 0.0f;
      largest = fmaxf(largest, sums[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
    uint32_t k = LINEAR;
    if (flags & EXPANDS) {
      // Four lanes hold a row of sixteen elements. First rows are added, then the halves of what is left.
#pragma unroll
      for (int n = 0; n < 5; n++) {
        const int offset = n < 3 ? 4 << n : 4 >> (n - 2);
#pragma unroll
        for (int i = 0; i < (int)OWN; i++) sums[i] = add(sums[i], __shfl_xor_sync(ALL_LANES, sums[i], offset));
      }
      const float sum = add(add(sums[0], sums[2]), add(sums[1], sums[3]));
      k = curve_for_spread(quotient(mul(fminf(largest, FLT_MAX), (float)elements), sum));
    }
    // A moment that has overflowed keeps the largest number.
    largest = fminf(largest, FLT_MAX);
    const float divisor = largest == 0.0f ? 1.0f : largest;
    const bool stochastic = flags & STOCHASTIC_CODES;
    const uint32_t random[OWN] = {words.x, words.y, words.z, words.w};
    const Encoder nearest(E4M3, NEAREST_EVEN, true, false);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < (int)OWN; i++) {
      const float t = quotient(fabsf(v[i]), divisor);
      // NaN stays NaN.
      const float y = mul(LARGEST, raise(k, t > 1.0f ? 1.0f : t));
      uint32_t code = stochastic ? round_up_at_random(y, __funnelshift_l(random[i], random[i], rotated))
                                 : nearest.code(__float_as_uint(y), 0);
      code |= __float_as_uint(v[i]) >> 31 << 7;
      if (non_negative && v[i] > 0.0f && code == 0) code = 1;
      word |= code << 8 * i;
    }
    if (packed && count == OWN) {
      *reinterpret_cast<uint32_t*>(codes) = word;
    } else {
      for (int i = 0; i < count; i++) codes[i] = (uint8_t)(word >> 8 * i);
    }
    if (lane == 0) *amax = largest, *curve = (uint8_t)k;
  }
};

template <class T>
__device__ __forceinline__ void load_some(const T* from, int count, bool packed, T (&to)[OWN]) {
  if (packed && count == OWN) {
    *reinterpret_cast<Pack<T, OWN>*>(to) = *reinterpret_cast<const Pack<T, OWN>*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < (int)OWN; i++) to[i] = i < count ? from[i] : T(0.0f);
  }
}
template <class T>
__device__ __forceinline__ void store_some(T* to, int count, bool packed, const T (&from)[OWN]) {
  if (packed && count == OWN) {
    *reinterpret_cast<Pack<T, OWN>*>(to) = *reinterpret_cast<const Pack<T, OWN>*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < (int)OWN; i++)
      if (i < count) to[i] = from[i];
  }
}

// Blocks: chunks times PARTS. Tensors without a gradient are not changed, nor is any if the step is not taken.
template <class T>
__device__ __forceinline__ void update_coded(const Chunk* chunks, const Params* params, const uint64_t* grads,
                                             const Control* control) {
  using K = Kind<T>;
  if (control->proceed == 0) return;
  const Chunk chunk = chunks[blockIdx.x];
  const uint64_t grad_address = grads[chunk.tensor];
  if (grad_address == 0) return;
  const Params p = params[chunk.tensor];
  Coefficients<float> c = control->narrow;
  if (!(p.flags & DECAYS)) c.decay = 1.0f;
  const bool packed = aligned16(pointer<void>(p.var | p.exp_avg.values | p.exp_avg_sq.values | p.master | grad_address));
  const uint64_t start = (uint64_t)chunk.block * CHUNK + blockIdx.y * PART;
  const uint64_t end = start + PART < p.len ? start + PART : p.len;
  for (uint64_t first = start + threadIdx.x / 32 * BLOCK; first < end; first += blockDim.x / 32 * BLOCK) {
    const uint32_t elements = end - first < BLOCK ? (uint32_t)(end - first) : BLOCK;
    const uint32_t lane = threadIdx.x & 31;
    const int count = min(max((int)elements - (int)(lane * OWN), 0), (int)OWN);
    const uint64_t own = first + lane * OWN;
    const CodedBlock exp_avg(p.exp_avg, first / BLOCK, own), exp_avg_sq(p.exp_avg_sq, first / BLOCK, own);
    alignas(16) T var[OWN], grad[OWN];
    alignas(16) float master[OWN];
    float m[OWN], v[OWN], theta[OWN];
    T* const var_at = pointer<T>(p.var) + own;
    load_some(var_at, count, packed, var);
    load_some(pointer<const T>(grad_address) + own, count, packed, grad);
    exp_avg.read(m, count, packed);
    exp_avg_sq.read(v, count, packed);
    // All lanes have read the amaxes before one writes them.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < (int)OWN; i++) theta[i] = K::widen(var[i]);
    if constexpr (K::HAS_MASTER) {
      if (p.master) {
        load_some(pointer<float>(p.master) + own, count, packed, master);
        // The variable was written to since: use its value.
#pragma unroll
        for (int i = 0; i < (int)OWN; i++)
          if (same_bits(K::narrow(master[i]), var[i])) theta[i] = master[i];
      }
    }
#pragma unroll
    for (int i = 0; i < (int)OWN; i++) {
      theta[i] = step(c, theta[i], K::widen(grad[i]), m[i], v[i]);
      var[i] = K::narrow(theta[i]), master[i] = theta[i];
    }
    store_some(var_at, count, packed, var);
    if constexpr (K::HAS_MASTER) {
      if (p.master) store_some(pointer<float>(p.master) + own, count, packed, master);
    }
    uint4 words = make_uint4(0, 0, 0, 0);
    if (p.flags & STOCHASTIC_CODES) words = philox(own / OWN, control->step, (uint32_t)p.random, p.seed);
    exp_avg.write(m, count, elements, packed, false, p.flags, words);
    exp_avg_sq.write(v, count, elements, packed, true, p.flags, words);
  }
}

#define ADAMW_CODED(T, suffix)                                                                    \
  extern "C" __global__ void __launch_bounds__(256) fp8_adamw_update_coded_##suffix(              \
      const Chunk* chunks, const Params* params, const uint64_t* grads, const Control* control) { \
    update_coded<T>(chunks, params, grads, control);                                              \
  }
FP8_FOR_FLOATS(ADAMW_CODED)
