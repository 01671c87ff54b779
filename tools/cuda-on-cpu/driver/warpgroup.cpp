// Products of warpgroups, from matrices in shared memory that descriptors describe. Like a copy, a product takes effect at the wait
// that covers it, when it reads its operands: a missing wait shows, and so do operands that were overwritten before it. With
// FP8_FAKE_CP_ASYNC=early it is computed when it is started.
//
// Source: PTX ISA, "Register fragments and shared memory matrix layouts" and "wgmma.mma_async".
#include "warpgroup.h"

#include <cstring>

namespace coc {

namespace {

float from_bf16(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// A matrix of 16-bit elements: `major` is the dimension whose elements lie side by side, `minor` the other one.
class Matrix {
 public:
  // `k_major`: whether the summed dimension is the major one.
  Matrix(uint64_t descriptor, bool k_major) : k_major_(k_major) {
    auto bytes = [&](int bit) { return uint32_t(descriptor >> bit & 0x3fff) << 4; };
    start_ = bytes(0), leading_ = bytes(16), stride_ = bytes(32);
    const unsigned mode = descriptor >> 62;
    swizzle_bits_ = mode ? 4 - mode : 0;
    if (descriptor >> 49 & 7) coc_fail("wgmma: a matrix base offset other than 0 is not supported here");
    if (descriptor & ~(0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 3ull << 62))
      coc_fail("wgmma: the descriptor 0x%016llx has bits without a meaning", static_cast<unsigned long long>(descriptor));
  }

  // Element k of the sum, of row (left operand) or column (right operand) mn.
  double at(unsigned k, unsigned mn) const {
    const unsigned row_bytes = 16u << swizzle_bits_, per_row = row_bytes / 2;
    uint32_t offset;
    if (k_major_) {
      // Eight rows of mn, then the next eight; without a swizzle the second eight elements of a row lie elsewhere.
      offset = mn % 8 * row_bytes + mn / 8 * stride_ + (swizzle_bits_ ? 2 * k : k % 8 * 2 + k / 8 * leading_);
    } else {
      // As many elements of mn as a row has, for eight k; then the next elements, and the next eight k.
      const uint32_t next_elements = swizzle_bits_ ? leading_ : stride_, next_k = swizzle_bits_ ? stride_ : leading_;
      offset = mn % per_row * 2 + mn / per_row * next_elements + k % 8 * row_bytes + k / 8 * next_k;
    }
    uint32_t address = start_ + offset;
    // As many of the bits from 4 on as the mode has are flipped by those from 7 on.
    address ^= (address >> 7 & ((1u << swizzle_bits_) - 1)) << 4;
    return load(address);
  }

 private:
  static double load(uint32_t address);

  uint32_t start_, leading_, stride_;
  unsigned swizzle_bits_;
  bool k_major_;
};

thread_local uint32_t shared_bytes;

double Matrix::load(uint32_t address) {
  if (address < kSharedStart || address + 2 > kSharedStart + shared_bytes)
    coc_fail("wgmma: a descriptor leads to byte %d of %u bytes of dynamic shared memory", int(address - kSharedStart), shared_bytes);
  uint16_t bits;
  memcpy(&bits, coc_lane.dynamic_shared + (address - kSharedStart), 2);
  return from_bf16(bits);
}

}  // namespace

void set_shared_bytes_of_products(uint32_t bytes) { shared_bytes = bytes; }

void WarpgroupProducts::start(const WgmmaLane* const* lanes, bool early) {
  if (!fenced_) coc_fail("wgmma.mma_async without a wgmma.fence since the last wait");
  Product product;
  for (unsigned i = 0; i < kWarpgroup; i++) {
    product.lanes[i] = *lanes[i];
    const WgmmaLane &first = product.lanes[0], &own = product.lanes[i];
    if (own.a_descriptor != first.a_descriptor || own.b_descriptor != first.b_descriptor || own.n != first.n)
      coc_fail("wgmma.mma_async: descriptors or shapes of threads 0 and %u of the warpgroup differ", i);
  }
  if (early)
    compute(product);
  else
    started_.push_back(product);
}

void WarpgroupProducts::wait(unsigned groups_left) {
  fenced_ = false;
  if (group_ends_.size() <= groups_left) return;
  const size_t done = group_ends_.size() - groups_left, end = group_ends_[done - 1];
  for (size_t i = 0; i < end; i++) compute(started_[i]);
  started_.erase(started_.begin(), started_.begin() + end);
  group_ends_.erase(group_ends_.begin(), group_ends_.begin() + done);
  for (size_t& e : group_ends_) e -= end;
}

void WarpgroupProducts::clear() {
  started_.clear();
  group_ends_.clear();
  fenced_ = false;
}

// Products are exact in double; the sum is rounded to float once per instruction.
void WarpgroupProducts::compute(const Product& product) {
  const WgmmaLane& all = product.lanes[0];
  static thread_local double a[64][16], b[256][16];
  if (all.a) {
    for (unsigned thread = 0; thread < kWarpgroup; thread++) {
      const unsigned row = thread / 32 * 16 + thread % 32 / 4, pair = thread % 4 * 2;
      for (unsigned r = 0; r < 4; r++)
        for (unsigned half = 0; half < 2; half++)
          a[row + r % 2 * 8][pair + r / 2 * 8 + half] = from_bf16(uint16_t(product.lanes[thread].a[r] >> 16 * half));
    }
  } else {
    const Matrix matrix(all.a_descriptor, !all.a_transposed);
    for (unsigned row = 0; row < 64; row++)
      for (unsigned k = 0; k < 16; k++) a[row][k] = matrix.at(k, row);
  }
  const Matrix matrix(all.b_descriptor, !all.b_transposed);
  for (unsigned col = 0; col < all.n; col++)
    for (unsigned k = 0; k < 16; k++) b[col][k] = matrix.at(k, col);
  for (unsigned thread = 0; thread < kWarpgroup; thread++) {
    float* d = product.lanes[thread].d;
    for (unsigned i = 0; i < all.n / 2; i++) {
      const unsigned row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + thread % 4 * 2 + i % 2;
      double sum = all.add ? d[i] : 0.0;
      for (unsigned k = 0; k < 16; k++) sum += a[row][k] * b[col][k];
      d[i] = float(sum);
    }
  }
}

}  // namespace coc
