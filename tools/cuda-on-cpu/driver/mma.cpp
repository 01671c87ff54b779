// Tensor core products and ldmatrix, computed for a whole warp at once. Layouts: PTX ISA, "Matrix fragments for
// mma.m16n8k16 with floating point type", "... mma.m16n8k8", "ldmatrix".
#include <cstring>

#include "coc/runtime.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace coc;

float from_bf16(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

float from_f16(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return float(value);
}

float from_tf32(uint32_t bits) {
  bits &= 0xffffe000u;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Products are exact in double; the sum is rounded to float once per instruction.
template <int K> void multiply(void* const* lanes, const double (&a)[16][K], const double (&b)[K][8]) {
  for (int lane = 0; lane < 32; lane++) {
    float* d = static_cast<MmaLane*>(lanes[lane])->d;
    int group = lane / 4, pair = lane % 4 * 2;
    for (int r = 0; r < 4; r++) {
      int row = group + r / 2 * 8, col = pair + r % 2;
      double sum = d[r];
      for (int k = 0; k < K; k++) sum += a[row][k] * b[k][col];
      d[r] = float(sum);
    }
  }
}

template <float (*decode)(uint16_t)> void mma_16bit(void* const* lanes) {
  double a[16][16], b[16][8];
  for (int lane = 0; lane < 32; lane++) {
    auto* own = static_cast<const MmaLane*>(lanes[lane]);
    int group = lane / 4, pair = lane % 4 * 2;
    for (int half = 0; half < 2; half++) {
      for (int r = 0; r < 4; r++) a[group + r % 2 * 8][pair + r / 2 * 8 + half] = decode(uint16_t(own->a[r] >> 16 * half));
      for (int r = 0; r < 2; r++) b[pair + r * 8 + half][group] = decode(uint16_t(own->b[r] >> 16 * half));
    }
  }
  multiply(lanes, a, b);
}

}  // namespace

EXPORT void coc_mma_bf16(void* const* lanes, unsigned) { mma_16bit<from_bf16>(lanes); }
EXPORT void coc_mma_f16(void* const* lanes, unsigned) { mma_16bit<from_f16>(lanes); }

EXPORT void coc_mma_tf32(void* const* lanes, unsigned) {
  double a[16][8], b[8][8];
  for (int lane = 0; lane < 32; lane++) {
    auto* own = static_cast<const MmaLane*>(lanes[lane]);
    int group = lane / 4, in_group = lane % 4;
    for (int r = 0; r < 4; r++) a[group + r % 2 * 8][in_group + r / 2 * 4] = from_tf32(own->a[r]);
    for (int r = 0; r < 2; r++) b[in_group + r * 4][group] = from_tf32(own->b[r]);
  }
  multiply(lanes, a, b);
}

static void load_matrices(void* const* lanes, bool transposed) {
  unsigned matrices = static_cast<LdmatrixLane*>(lanes[0])->matrices;
  for (unsigned m = 0; m < matrices; m++) {
    uint16_t values[8][8];
    for (int row = 0; row < 8; row++) {
      const void* from = static_cast<LdmatrixLane*>(lanes[m * 8 + row])->row;
      if (reinterpret_cast<uintptr_t>(from) % 16) coc_fail("ldmatrix: row address %p is not 16-byte aligned", from);
      memcpy(values[row], from, 16);
    }
    for (int lane = 0; lane < 32; lane++) {
      int group = lane / 4, pair = lane % 4 * 2;
      uint32_t low = transposed ? values[pair][group] : values[group][pair];
      uint32_t high = transposed ? values[pair + 1][group] : values[group][pair + 1];
      static_cast<LdmatrixLane*>(lanes[lane])->registers[m] = low | high << 16;
    }
  }
}

EXPORT void coc_ldmatrix(void* const* lanes, unsigned) { load_matrices(lanes, false); }
EXPORT void coc_ldmatrix_trans(void* const* lanes, unsigned) { load_matrices(lanes, true); }
