// Products of a warpgroup and named barriers. The layouts of `wgmma_layouts` are examples of the PTX ISA ("Canonical layouts").
#include "harness.h"

static std::vector<uint16_t> random_bf16(size_t n, uint64_t seed) {
  std::vector<uint16_t> values;
  for (float x : random_floats(n, seed)) values.push_back(to_bf16(x));
  return values;
}

static void product_of_rows(const char* kernel = "t_wgmma_rows") {
  auto a = random_bf16(64 * 64, 1), b = random_bf16(128 * 64, 2);
  Device<uint16_t> da(a), db(b);
  Device<float> dc(64 * 128);
  launch(kernel, {1}, {128}, (64 + 128) * 128, da.address(), db.address(), dc.address());
  auto out = dc.get();
  for (int i = 0; i < 64; i++)
    for (int j = 0; j < 128; j++) {
      double sum = 0;
      for (int k = 0; k < 64; k++) sum += from_bf16(a[i * 64 + k]) * from_bf16(b[j * 64 + k]);
      CHECK(std::fabs(out[i * 128 + j] - sum) < 1e-5);
    }
}
TEST(wgmma_rows) { product_of_rows(); }
TEST(wgmma_rows_held) { product_of_rows("t_wgmma_rows_held"); }
DIES(wgmma_rows_early, nullptr, "FP8_FAKE_CP_ASYNC=early") { product_of_rows(); }
DIES(wgmma_rows_in_reverse, nullptr, "FP8_FAKE_ORDER=reverse") { product_of_rows(); }

TEST(wgmma_columns) {
  auto a = random_bf16(64 * 32, 3), b = random_bf16(32 * 128, 4);
  Device<uint16_t> da(a), db(b);
  Device<float> dc(64 * 128);
  launch("t_wgmma_columns", {1}, {128}, 32 * 128 * 2, da.address(), db.address(), dc.address());
  auto out = dc.get();
  for (int i = 0; i < 64; i++)
    for (int j = 0; j < 128; j++) {
      double sum = 1;
      for (int k = 0; k < 32; k++) sum += from_bf16(a[i * 32 + k]) * from_bf16(b[k * 128 + j]);
      CHECK(std::fabs(out[i * 128 + j] - sum) < 1e-5);
    }
}

// One dimension of a layout: sizes and strides in elements, the first size running fastest.
struct Dimension {
  std::vector<unsigned> sizes, strides;
  unsigned at(unsigned i) const {
    unsigned offset = 0;
    for (size_t d = 0; d < sizes.size(); d++) offset += i % sizes[d] * strides[d], i /= sizes[d];
    return offset;
  }
};

// The right operand [16, columns] of a layout, with `swizzle` of the bits of a byte's address from 4 on flipped by those from 7 on.
static void layout(const char* kernel, unsigned columns, const Dimension& of_columns, const Dimension& of_rows, unsigned swizzle,
                   unsigned leading, unsigned stride, unsigned mode) {
  std::vector<uint16_t> image(16 * columns);
  for (unsigned k = 0; k < 16; k++)
    for (unsigned n = 0; n < columns; n++) {
      unsigned byte = 2 * (of_columns.at(n) + of_rows.at(k));
      byte ^= (byte >> 7 & ((1u << swizzle) - 1)) << 4;
      image[byte / 2] = to_bf16(float(n + columns * k % 251));
    }
  Device<uint16_t> x(image);
  Device<float> y(64 * columns);
  launch(kernel, {1}, {128}, 32 * columns, x.address(), y.address(), 2 * leading, 2 * stride, mode);
  auto out = y.get();
  for (unsigned k = 0; k < 64; k++)
    for (unsigned n = 0; n < columns; n++)
      CHECK(out[k * columns + n] == (k < 16 ? from_bf16(to_bf16(float(n + columns * k % 251))) : 0));
}
TEST(wgmma_layouts) {
  layout("t_wgmma_show16", 16, {{8, 1, 2}, {1, 8, 64}}, {{8, 2}, {8, 128}}, 0, 128, 64, 0);
  layout("t_wgmma_show32", 32, {{8, 2, 2}, {1, 8, 128}}, {{8, 2}, {16, 256}}, 1, 128, 256, 3);
  layout("t_wgmma_show64", 64, {{8, 4, 2}, {1, 8, 256}}, {{8, 2}, {32, 512}}, 2, 256, 512, 2);
}

TEST(wgmma_happens_at_the_wait) {
  Device<float> y(2);
  launch("t_wgmma_waits", {1}, {128}, 2048, y.address());
  CHECK(y.get()[0] == 0 && y.get()[1] == 32);
}
DIES(wgmma_happens_early, nullptr, "FP8_FAKE_CP_ASYNC=early") {
  Device<float> y(2);
  launch("t_wgmma_waits", {1}, {128}, 2048, y.address());
  CHECK(y.get()[0] == 16 && y.get()[1] == 16);
}

static void hand_over() {
  Device<float> y(128);
  launch("t_named_barriers", {1}, {256}, 0, y.address());
  auto out = y.get();
  for (int i = 0; i < 128; i++) CHECK(out[i] == 5 * (127 - i) + 10);
}
TEST(named_barriers) { hand_over(); }
DIES(named_barriers_in_reverse, nullptr, "FP8_FAKE_ORDER=reverse") { hand_over(); }

static void run(const char* name, unsigned threads, unsigned shared = 0) {
  Device<float> y(64);
  launch(name, {1}, {threads}, shared, y.address());
}
DIES(wgmma_unfenced, "without a wgmma.fence", nullptr) { run("f_wgmma_unfenced", 128); }
DIES(wgmma_without_wait, "ended without a wait for its products", nullptr) { run("f_wgmma_without_wait", 128); }
DIES(wgmma_outside, "of 2048 bytes of dynamic shared memory", nullptr) { run("f_wgmma_outside", 128, 2048); }
DIES(wgmma_half, "64 threads of warpgroup 0 wait in wgmma.fence", nullptr) { run("f_wgmma_half", 128); }
DIES(wgmma_small_block, "has no four warps", nullptr) { run("f_wgmma_half", 64); }
DIES(named_barrier, "32 of 64 threads have come to named barrier 3", nullptr) { run("f_named_barrier", 64); }
