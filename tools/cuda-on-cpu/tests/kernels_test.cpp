// Kernels that are right: their results against plain loops.
#include "harness.h"

TEST(shuffles) {
  auto in = random_floats(32);
  Device<float> x(in), y(224);
  launch("t_shuffles", {1}, {32}, 0, x.address(), y.address());
  auto out = y.get();
  for (int i = 0; i < 32; i++) {
    CHECK(out[i] == in[5]);
    CHECK(out[32 + i] == in[i < 3 ? i : i - 3]);
    CHECK(out[64 + i] == in[i % 16 + 4 > 15 ? i : i + 4]);
    CHECK(out[96 + i] == in[i ^ 9]);
    CHECK(out[128 + i] == in[(i & ~7) | ((i * 7 + 40) & 7)]);
    CHECK(out[160 + i] == in[i ^ 1]);
    CHECK(std::fabs(out[192 + i] - in[i ^ 2]) < 1e-3f);
  }
}

TEST(votes) {
  std::vector<int> in(32);
  Random random;
  for (int& x : in) x = int(random.next() % 201) - 100;
  Device<int> x(in);
  Device<unsigned> y(160);
  launch("t_votes", {1}, {32}, 0, x.address(), y.address());
  unsigned ballot = 0, sum = 0, low = 0, high = 0;
  int top = -1000;
  for (int i = 0; i < 32; i++) {
    ballot |= unsigned(in[i] > 0) << i;
    sum += unsigned(in[i]);
    top = std::max(top, in[i]);
    (i < 16 ? low : high) |= unsigned(in[i]);
  }
  auto out = y.get();
  for (int i = 0; i < 32; i++) {
    CHECK(out[i] == ballot);
    CHECK(out[32 + i] == 1);
    CHECK(int(out[64 + i]) == top);
    CHECK(out[96 + i] == sum);
    CHECK(out[128 + i] == (i < 16 ? low : high));
  }
}

TEST(static_shared_sum) {
  const int rows = 300, width = 1000;
  auto in = random_floats(rows * width);
  Device<float> x(in), y(rows);
  launch("t_static_sum", {rows}, {256}, 0, x.address(), y.address(), width);
  auto out = y.get();
  for (int r = 0; r < rows; r++) {
    double sum = 0;
    for (int i = 0; i < width; i++) sum += in[r * width + i];
    CHECK(std::fabs(out[r] - sum) < 1e-4);
  }
}

TEST(dynamic_shared_reverse) {
  const int blocks = 50, n = 512;
  auto in = random_floats(blocks * n);
  Device<float> x(in), y(blocks * n);
  launch("t_reverse_f32", {blocks}, {64, 8}, n * 4, x.address(), y.address());
  auto out = y.get();
  for (int b = 0; b < blocks; b++)
    for (int i = 0; i < n; i++) CHECK(out[b * n + i] == in[b * n + n - 1 - i]);
  std::vector<uint16_t> words(1024);
  for (int i = 0; i < 1024; i++) words[i] = uint16_t(i * 3);
  Device<uint16_t> p(words), q(1024);
  launch("t_reverse_u16", {1}, {1024}, 2048, p.address(), q.address());
  auto got = q.get();
  for (int i = 0; i < 1024; i++) CHECK(got[i] == words[1023 - i]);
}

TEST(barrier_votes) {
  std::vector<int> in(128);
  int positive = 0;
  for (int i = 0; i < 128; i++) in[i] = i % 3 - 1, positive += in[i] > 0;
  in[100] = 77;
  positive += in[100] > 0 && 100 % 3 - 1 <= 0;
  Device<int> x(in), y(256);
  launch("t_barrier_votes", {1}, {128}, 0, x.address(), y.address());
  auto out = y.get();
  for (int i = 0; i < 128; i++) CHECK(out[i] == positive && out[128 + i] == 3);
}

TEST(indices) {
  Device<unsigned> y(3 * 2 * 5 * 4 * 3 * 2);
  launch("t_indices", {3, 2, 5}, {4, 3, 2}, 0, y.address());
  auto out = y.get();
  for (unsigned b = 0; b < 30; b++)
    for (unsigned t = 0; t < 24; t++) CHECK(out[b * 24 + t] == (b << 16 | t));
}

TEST(memory_starts_as_nan) {
  Device<float> fresh(10), y(2);
  for (float v : fresh.get()) CHECK(std::isnan(v));
  launch("t_uninitialized", {4}, {64}, 64, y.address());
  for (float v : y.get()) CHECK(std::isnan(v));
}

TEST(parameters_by_value) {
  struct {
    int n;
    float scale;
    uint8_t shift;
  } p = {100, 0.5f, 7};
  auto in = random_floats(100);
  Device<float> x(in), y(100);
  launch("t_parameters", {1}, {128}, 0, p, x.address(), y.address(), uint8_t(3), 2.25);
  auto out = y.get();
  for (int i = 0; i < 100; i++) CHECK(std::fabs(out[i] - (in[i] * 0.5f + 12.25f)) < 1e-5f);
}

TEST(atomics) {
  const unsigned n = 64 * 256;
  Device<int> i(16 + n);
  Device<unsigned> u(std::vector<unsigned>{0, 0, ~0u, 0, 0, 0});
  Device<float> f(std::vector<float>{0, 0});
  Device<double> d(std::vector<double>{0});
  Device<uint16_t> h(std::vector<uint16_t>{0, 0});
  Device<uint32_t> b(std::vector<uint32_t>{0});
  OK(cuMemsetD32(i.address(), 0, 16 + n));
  launch("t_atomics", {64}, {256}, 0, i.address(), u.address(), f.address(), d.address(), h.address(), b.address());
  auto gi = i.get();
  auto gu = u.get();
  CHECK(gi[0] == int(n) && gu[0] == 2 * n && gu[1] == n - 1 && gu[2] == 0 && gu[3] == ~0u && gu[4] == n && gu[5] == 3 * n);
  CHECK(f.get()[0] == float(n) && f.get()[1] == float(n - 1) && d.get()[0] == n * 0.5);
  CHECK(h.get()[0] == 0x5640);                     // 100 in f16
  CHECK(b.get()[0] == (0x42c8u | 0x4348u << 16));  // 100 and 200 in bf16
  std::vector<bool> seen(n);
  for (unsigned k = 0; k < n; k++) seen[gi[16 + k]] = true;
  for (unsigned k = 0; k < n; k++) CHECK(seen[k]);
}

TEST(last_block_reduces) {
  const unsigned blocks = 500;
  auto in = random_floats(blocks * 32);
  Device<float> x(in), partial(blocks), out(1);
  Device<unsigned> counter(std::vector<unsigned>{0});
  launch("t_last_block", {blocks}, {32}, 0, x.address(), partial.address(), counter.address(), out.address());
  double sum = 0;
  for (float v : in) sum += v;
  CHECK(std::fabs(out.get()[0] - sum) < 1e-3);
}
