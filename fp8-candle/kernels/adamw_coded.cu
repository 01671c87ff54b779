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
// Random words of a block. Elements of its second half use those of the first half, rotated.
constexpr uint32_t WORDS = BLOCK / 2;
constexpr uint32_t HALF_ROTATED = 16;
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

// The shares of an amax that codes without a sign stand for, on each curve. To read one takes less time than a division and up to two
// roots.
struct Shares {
  static constexpr uint32_t CODES = 128, CURVES = 4;
  float of[CURVES * CODES];

  // By all threads of a block.
  __device__ __forceinline__ void fill() {
    for (uint32_t i = threadIdx.x; i < CURVES * CODES; i += blockDim.x) {
      const float x = __half2float(__half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(i % CODES), __NV_E4M3)));
      of[i] = lower(i / CODES, quotient(x, LARGEST));
    }
    __syncthreads();
  }
  __device__ __forceinline__ float decoded(uint32_t code, float amax, uint32_t curve) const {
    const float magnitude = mul(amax, of[curve * CODES + code % CODES]);
    return __uint_as_float(__float_as_uint(magnitude) | (code & CODES) << 24);
  }
};

// What magnitudes are multiplied by to become shares of the amax: first by a power of two, which keeps the reciprocal away from both
// ends of f32, then by the number after the reciprocal. The share of the amax itself is at least 1.
struct Factors {
  float exact, reciprocal;

  __device__ __forceinline__ explicit Factors(float amax) {
    if (amax == 0.0f) {
      exact = reciprocal = 1.0f;
      return;
    }
    exact = amax < 0x1p-63f ? 0x1p63f : amax > 0x1p63f ? 0x1p-63f : 1.0f;
    reciprocal = __uint_as_float(__float_as_uint(quotient(1.0f, mul(amax, exact))) + 1);
  }
  // At most 1. NaN stays NaN.
  __device__ __forceinline__ float share(float magnitude) const {
    const float t = mul(mul(magnitude, exact), reciprocal);
    return t > 1.0f ? 1.0f : t;
  }
};

// The sum over the elements of a warp's block, in all lanes and in the order of the definition. Four lanes hold a row of sixteen
// elements: rows are added first, then the halves of what is left. Lanes that exchange sums keep half of them each, as long as they
// have more than one.
__device__ __forceinline__ float sum_of_block(const float (&v)[OWN]) {
  const auto from = [](float x, int lanes) { return __shfl_xor_sync(ALL_LANES, x, lanes); };
  const bool second_pair = threadIdx.x & 4, odd = threadIdx.x & 8;
  const float left = add(second_pair ? v[2] : v[0], from(second_pair ? v[0] : v[2], 4));
  const float right = add(second_pair ? v[3] : v[1], from(second_pair ? v[1] : v[3], 4));
  float sum = add(odd ? right : left, from(odd ? left : right, 8));
  sum = add(sum, from(sum, 16));
  sum = add(sum, from(sum, 2));
  sum = add(sum, from(sum, 1));
  sum = add(sum, from(sum, 4));
  return add(sum, from(sum, 8));
}

// The code of a magnitude of at most 448, or NaN, by a random word: a fixed-point number with 20 bits after the point counts codes.
__device__ __forceinline__ uint32_t round_up_at_random(float y, uint32_t word) {
  constexpr uint32_t SMALLEST_NORMAL = 121u << 23;
  const uint32_t fixed = y < 0x1p-6f ? __float_as_uint(add(y, 0x1p-6f)) - SMALLEST_NORMAL : __float_as_uint(y) - (120u << 23);
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

  __device__ __forceinline__ void read(float (&v)[OWN], int count, bool packed, const Shares& shares) const {
    const float largest = *amax;
    const uint32_t k = *curve;
    uint32_t word = 0;
    if (packed && count == OWN) {
      word = *reinterpret_cast<const uint32_t*>(codes);
    } else {
      for (int i = 0; i < count; i++) word |= (uint32_t)codes[i] << 8 * i;
    }
#pragma unroll
    for (int i = 0; i < (int)OWN; i++) v[i] = shares.decoded(word >> 8 * i & 0xFF, largest, k);
  }

  // For a whole warp. `elements`: those of the block; `words`: the random words of this lane's.
  __device__ __forceinline__ void write(const float (&v)[OWN], int count, uint32_t elements, bool packed, bool non_negative,
                                        uint64_t flags, uint4 words) const {
    float largest = 0.0f, magnitudes[OWN];
#pragma unroll
    for (int i = 0; i < (int)OWN; i++) {
      magnitudes[i] = i < count ? fabsf(v[i]) : 0.0f;
      largest = fmaxf(largest, magnitudes[i]);
    }
    // Of numbers without a sign, the largest has the largest bits. A moment that has overflowed keeps the largest number.
    largest = fminf(__uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(largest))), FLT_MAX);
    const uint32_t k =
        flags & EXPANDS ? curve_for_spread(quotient(mul(largest, (float)elements), sum_of_block(magnitudes))) : LINEAR;
    const Factors factors(largest);
    const bool stochastic = flags & STOCHASTIC_CODES;
    const uint32_t random[OWN] = {words.x, words.y, words.z, words.w};
    const uint32_t turn = rotated + (threadIdx.x & 16 ? HALF_ROTATED : 0);
    const Encoder nearest(E4M3, NEAREST_EVEN, true, false);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < (int)OWN; i++) {
      const float y = mul(LARGEST, raise(k, factors.share(fabsf(v[i]))));
      uint32_t code = stochastic ? round_up_at_random(y, __funnelshift_l(random[i], random[i], turn))
                                 : nearest.code(__float_as_uint(y), 0);
      if (!non_negative) code |= __float_as_uint(v[i]) >> 31 << 7;
      if (non_negative && v[i] > 0.0f && code == 0) code = 1;
      word |= code << 8 * i;
    }
    if (packed && count == OWN) {
      *reinterpret_cast<uint32_t*>(codes) = word;
    } else {
      for (int i = 0; i < count; i++) codes[i] = (uint8_t)(word >> 8 * i);
    }
    if (threadIdx.x % 32 == 0) *amax = largest, *curve = (uint8_t)k;
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
  __shared__ Shares shares;
  shares.fill();
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
    exp_avg.read(m, count, packed, shares);
    exp_avg_sq.read(v, count, packed, shares);
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
    if (p.flags & STOCHASTIC_CODES) {
      const uint64_t word = first / BLOCK * WORDS + lane * OWN % WORDS;
      words = philox(word / 4, control->step, (uint32_t)p.random, p.seed);
    }
    exp_avg.write(m, count, elements, packed, false, p.flags, words);
    exp_avg_sq.write(v, count, elements, packed, true, p.flags, words);
  }
}

#define ADAMW_CODED(T, suffix)                                                                    \
  extern "C" __global__ void __launch_bounds__(256, 3) fp8_adamw_update_coded_##suffix(           \
      const Chunk* chunks, const Params* params, const uint64_t* grads, const Control* control) { \
    update_coded<T>(chunks, params, grads, control);                                              \
  }
FP8_FOR_FLOATS(ADAMW_CODED)
