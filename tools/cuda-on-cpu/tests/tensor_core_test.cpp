// Tensor core products, ldmatrix and cp.async against plain loops.
#include "harness.h"

static uint16_t to_f16(float x) {
  _Float16 value = _Float16(x);
  uint16_t bits;
  memcpy(&bits, &value, 2);
  return bits;
}
static float from_f16(uint16_t x) {
  _Float16 value;
  memcpy(&value, &x, 2);
  return float(value);
}

static void product_16bit(const char* kernel, uint16_t (*encode)(float), float (*decode)(uint16_t)) {
  auto fa = random_floats(256, 1), fb = random_floats(128, 2), c = random_floats(128, 3);
  std::vector<uint16_t> a, b;
  for (float x : fa) a.push_back(encode(x));
  for (float x : fb) b.push_back(encode(x));
  Device<uint16_t> da(a), db(b);
  Device<float> dc(c);
  launch(kernel, {1}, {32}, 0, da.address(), db.address(), dc.address());
  auto out = dc.get();
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 8; j++) {
      double sum = c[i * 8 + j];
      for (int k = 0; k < 16; k++) sum += double(decode(a[i * 16 + k])) * decode(b[j * 16 + k]);
      CHECK(std::fabs(out[i * 8 + j] - sum) < 1e-6);
    }
}
TEST(mma_bf16) { product_16bit("t_mma_bf16", to_bf16, from_bf16); }
TEST(mma_f16) { product_16bit("t_mma_f16", to_f16, from_f16); }

TEST(mma_tf32) {
  auto a = random_floats(128, 4), b = random_floats(64, 5), c = random_floats(128, 6);
  Device<float> da(a), db(b), dc(c);
  launch("t_mma_tf32", {1}, {32}, 0, da.address(), db.address(), dc.address());
  auto cut = [](float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0xffffe000u;
    memcpy(&x, &bits, 4);
    return x;
  };
  auto out = dc.get();
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 8; j++) {
      double sum = c[i * 8 + j];
      for (int k = 0; k < 8; k++) sum += double(cut(a[i * 8 + k])) * cut(b[j * 8 + k]);
      CHECK(std::fabs(out[i * 8 + j] - sum) < 1e-6);
    }
}

static void whole_path() {
  auto fa = random_floats(256, 7), fb = random_floats(128, 8);
  std::vector<uint16_t> a, b;
  for (float x : fa) a.push_back(to_bf16(x));
  for (float x : fb) b.push_back(to_bf16(x));
  Device<uint16_t> da(a), db(b);
  Device<float> dc(128);
  launch("t_mma_ldmatrix", {1}, {32}, 0, da.address(), db.address(), dc.address());
  auto out = dc.get();
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 8; j++) {
      double sum = 0;
      for (int k = 0; k < 16; k++) sum += double(from_bf16(a[i * 16 + k])) * from_bf16(b[k * 8 + j]);
      CHECK(std::fabs(out[i * 8 + j] - sum) < 1e-6);
    }
}
TEST(cp_async_ldmatrix_mma) { whole_path(); }

TEST(ldmatrix) {
  std::vector<uint16_t> in(256);
  for (int i = 0; i < 256; i++) in[i] = uint16_t(i);
  Device<uint16_t> x(in);
  Device<uint32_t> y(384);
  launch("t_ldmatrix", {1}, {32}, 0, x.address(), y.address());
  auto out = y.get();
  for (int r = 0; r < 4; r++)
    for (int lane = 0; lane < 32; lane++) {
      uint32_t row = lane / 4, col = lane % 4 * 2, base = r * 64;
      uint32_t plain = (base + row * 8 + col) | (base + row * 8 + col + 1) << 16;
      uint32_t transposed = (base + col * 8 + row) | (base + (col + 1) * 8 + row) << 16;
      CHECK(out[r * 32 + lane] == plain);
      CHECK(out[128 + r * 32 + lane] == transposed);
      if (r < 2) CHECK(out[256 + r * 32 + lane] == plain && out[320 + r * 32 + lane] == transposed);
    }
}

TEST(cp_async_lands_at_the_wait) {
  std::vector<uint32_t> in(12);
  for (int i = 0; i < 12; i++) in[i] = i;
  Device<uint32_t> x(in), y(5);
  launch("t_cp_async", {1}, {32}, 0, x.address(), y.address());
  auto out = y.get();
  CHECK(out[0] == 1000 && out[1] == 1 && out[2] == 1000 && out[3] == 5 && out[4] == 0);
}

DIES(cp_async_early, nullptr, "FP8_FAKE_CP_ASYNC=early") {
  std::vector<uint32_t> in(12, 3);
  Device<uint32_t> x(in), y(5);
  launch("t_cp_async", {1}, {32}, 0, x.address(), y.address());
  CHECK(y.get()[0] == 3 && y.get()[2] == 3 && y.get()[4] == 0);
  whole_path();
}
