// cuBLAS and cuBLASLt against plain loops.
#include "harness.h"

#include "../blas/gemm.h"
#include "../blas/lt.h"

using namespace blas;

extern "C" {
Status cublasCreate_v2(void**);
Status cublasGemmStridedBatchedEx(void*, int, int, int, int, int, const void*, const void*, int, int, long long, const void*,
                                  int, int, long long, const void*, void*, int, int, long long, int, int, int);
Status cublasLtCreate(void**);
Status cublasLtMatmulDescCreate(void**, int, int);
Status cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t);
Status cublasLtMatrixLayoutCreate(void**, int, uint64_t, uint64_t, int64_t);
Status cublasLtMatmulPreferenceCreate(void**);
Status cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t);
Status cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int*);
Status cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*,
                      void*, const void*, void*, size_t, void*);
}

static std::string random_matrix(int type, size_t n, uint64_t seed) {
  std::string bytes(n * size_of(type), 0);
  auto values = random_floats(n, seed);
  Random random;
  random.state += seed;
  for (size_t i = 0; i < n; i++) {
    if (is_fp8(type)) do
        bytes[i] = char(random.next() >> 20);
      while (!std::isfinite(load(bytes.data(), type, i)) || std::fabs(load(bytes.data(), type, i)) > 16);
    else
      store(bytes.data(), type, i, values[i]);
  }
  return bytes;
}
static std::vector<char> vec(const std::string& s) { return {s.begin(), s.end()}; }

static double tolerance(int type) { return type == kF64 ? 1e-12 : type == kF32 ? 2e-5 : type == kF16 ? 2e-3 : 1.2e-2; }

TEST(cublas_all_transposes_and_types) {
  void* handle;
  CHECK(cublasCreate_v2(&handle) == kSuccess);
  const int m = 45, n = 70, k = 130, lda = 140, ldb = 145, ldc = 50, batch = 3;
  for (int type : {kF32, kF64, kF16, kBF16})
    for (int ta : {0, 1})
      for (int tb : {0, 1}) {
        size_t a_size = lda * 140, b_size = ldb * 140, c_size = ldc * n;
        auto a = random_matrix(type, a_size * batch, 1), b = random_matrix(type, b_size * batch, 2),
             c = random_matrix(type, c_size * batch, 3);
        Device<char> da(vec(a)), db(vec(b)), dc(vec(c));
        float alpha = 0.5f, beta = 0.25f;
        double alpha64 = 0.5, beta64 = 0.25;
        CHECK(cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, type == kF64 ? (void*)&alpha64 : &alpha, da.data(), type, lda,
                                         a_size, db.data(), type, ldb, b_size, type == kF64 ? (void*)&beta64 : &beta, dc.data(),
                                         type, ldc, c_size, batch, type == kF64 ? kCompute64F : kCompute32F, 99) == kSuccess);
        auto out = dc.get();
        double worst = 0;
        for (int s = 0; s < batch; s++)
          for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) {
              double sum = 0;
              for (int p = 0; p < k; p++)
                sum += load(a.data(), type, s * a_size + (ta ? i * lda + p : p * lda + i)) *
                       load(b.data(), type, s * b_size + (tb ? p * ldb + j : j * ldb + p));
              double want = 0.5 * sum + 0.25 * load(c.data(), type, s * c_size + j * ldc + i);
              worst =
                  std::max(worst, std::fabs(load(out.data(), type, s * c_size + j * ldc + i) - want) / (1 + std::fabs(want)));
            }
        CHECK(worst < tolerance(type));
        // What lies between the columns stays as it was.
        CHECK(load(out.data(), type, m) == load(c.data(), type, m));
      }
}

// One FP8 product with everything adjustable.
struct Fp8 {
  int64_t m = 64, n = 48, k = 256;
  int a_type = kE4M3, b_type = kE4M3, d_type = kBF16, a_mode = kScalar, b_mode = kScalar, transa = 1, transb = 0,
      compute = kCompute32F;
  bool bias = false, null_scales = false, use_algorithm = true, fast_accum = true;
  float alpha = 1, beta = 0;
  int64_t a_offset = 0;

  // In floats; those of kVec32 are bytes.
  static size_t scales(int mode, int64_t outer, int64_t k) {
    int64_t blocks = (k + 127) / 128;
    return mode == kScalar     ? 1
           : mode == kVec32    ? (outer + 127) / 128 * blocks * 128
           : mode == kOuterVec ? outer
           : mode == kVec128   ? outer * blocks
                               : (outer + 127) / 128 * ((blocks + 3) / 4 * 4);
  }
  static float scale(const std::vector<float>& s, int mode, int64_t outer, int64_t i, int64_t p, int64_t k) {
    int64_t padded = ((k + 127) / 128 + 3) / 4 * 4;
    switch (mode) {
      case kVec32: {
        int64_t tile = i / 128 * ((k + 127) / 128) + p / 128, within = i % 32 * 16 + i / 32 % 4 * 4 + p / 32 % 4;
        return std::ldexp(1.0f, reinterpret_cast<const uint8_t*>(s.data())[tile * 512 + within] - 127);
      }
      case kOuterVec: return s[i];
      case kVec128: return s[p / 128 * outer + i];
      case kBlk128: return s[i / 128 * padded + p / 128];
      default: return s[0];
    }
  }

  // Returns the status; where it is success, checks the numbers.
  Status run() {
    auto a = random_matrix(a_type, m * k + 32, 1), b = random_matrix(b_type, n * k, 2), c = random_matrix(d_type, m * n, 3);
    int bias_type = d_type == kF32 ? int(kBF16) : d_type;
    auto bias_values = random_matrix(bias_type, m, 4);
    auto sa = random_floats(scales(a_mode, m, k), 5), sb = random_floats(scales(b_mode, n, k), 6);
    for (auto* s : {&sa, &sb})
      for (float& v : *s) v = 1.5f + v;
    auto powers = [](std::vector<float>& s, unsigned seed) {
      uint8_t* codes = reinterpret_cast<uint8_t*>(s.data());
      for (size_t i = 0; i < s.size() * 4; i++) codes[i] = uint8_t(126 + (i * 2654435761u + seed) / 1000 % 3);
    };
    if (a_mode == kVec32) powers(sa, 7);
    if (b_mode == kVec32) powers(sb, 8);
    Device<char> da(vec(a)), db(vec(b)), dc(vec(c)), dd(m * n * size_of(d_type)), dbias(vec(bias_values)), workspace(1 << 20);
    Device<float> dsa(sa), dsb(sb);
    void *handle, *desc, *la, *lb, *lc, *preference;
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&desc, compute, kF32);
    auto set = [&](int attribute, auto value) {
      CHECK(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value) == kSuccess);
    };
    set(kDescTransA, transa);
    set(kDescTransB, transb);
    if (!null_scales) set(kDescAScale, dsa.data()), set(kDescBScale, dsb.data());
    set(kDescAScaleMode, a_mode);
    set(kDescBScaleMode, b_mode);
    set(kDescFastAccum, int8_t(fast_accum));
    if (bias) set(kDescEpilogue, int(kEpilogueBias)), set(kDescBiasPointer, dbias.data()), set(kDescBiasDataType, bias_type);
    cublasLtMatrixLayoutCreate(&la, a_type, transa ? k : m, transa ? m : k, transa ? k : m);
    cublasLtMatrixLayoutCreate(&lb, b_type, transb ? n : k, transb ? k : n, transb ? n : k);
    cublasLtMatrixLayoutCreate(&lc, d_type, m, n, m);
    cublasLtMatmulPreferenceCreate(&preference);
    uint64_t most = 1 << 20;
    cublasLtMatmulPreferenceSetAttribute(preference, kPrefMaxWorkspace, &most, 8);
    struct {
      Algorithm algorithm;
      uint64_t rest[4];
    } result;
    int count = 0;
    Status status = cublasLtMatmulAlgoGetHeuristic(handle, desc, la, lb, lc, lc, preference, 1, &result, &count);
    if (status != kSuccess) return status;
    CHECK(count == 1);
    status = cublasLtMatmul(handle, desc, &alpha, da.data() + a_offset, la, db.data(), lb, &beta, dc.data(), lc, dd.data(), lc,
                            use_algorithm ? &result.algorithm : nullptr, workspace.data(), 1 << 20, nullptr);
    if (status != kSuccess) return status;
    auto out = dd.get();
    double worst = 0;
    for (int64_t j = 0; j < n; j++)
      for (int64_t i = 0; i < m; i++) {
        double sum = 0, magnitude = 0;
        for (int64_t p = 0; p < k; p++) {
          double s = null_scales ? 1 : double(scale(sa, a_mode, m, i, p, k)) * scale(sb, b_mode, n, j, p, k);
          double term = s * load(a.data(), a_type, i * k + p + a_offset) * load(b.data(), b_type, j * k + p);
          sum += term, magnitude += std::fabs(term);
        }
        double want = alpha * sum + (beta != 0 ? beta * load(c.data(), d_type, j * m + i) : 0) +
                      (bias ? load(bias_values.data(), bias_type, i) : 0);
        // Each of 33 terms of a step loses at most 2^-13 of the largest partial sum, which is at most the sum of magnitudes.
        double steps = double(fast_accum ? k : 128) / 32;
        double lost = 33 * steps * std::ldexp(1.0, -13) * std::fabs(alpha) * magnitude;
        double allowed = std::min(lost, 0.1 * std::fabs(alpha) * magnitude) + tolerance(d_type) * (30 + std::fabs(want));
        worst = std::max(worst, std::fabs(load(out.data(), d_type, j * m + i) - want) / allowed);
      }
    CHECK(worst < 1);
    return kSuccess;
  }
};

TEST(cublaslt_fp8_types) {
  for (int d : {kBF16, kF16, kF32})
    for (int a : {kE4M3, kE5M2})
      for (int b : {kE4M3, kE5M2})
        for (bool bias : {false, true}) {
          Fp8 p;
          p.a_type = a, p.b_type = b, p.d_type = d, p.bias = bias;
          CHECK(p.run() == (a == kE5M2 && b == kE5M2 ? kNotSupported : kSuccess));
        }
}

TEST(cublaslt_fp8_scales) {
  auto with = [](int a, int b, auto... more) {
    Fp8 p;
    p.a_mode = a, p.b_mode = b, p.m = 272, p.n = 144, p.k = 720, p.d_type = kF32, p.fast_accum = false;
    (more(p), ...);
    return p.run();
  };
  for (int mode : {kScalar, kOuterVec, kVec128}) CHECK(with(mode, mode) == kSuccess);
  CHECK(with(kVec128, kBlk128) == kSuccess);
  CHECK(with(kBlk128, kVec128) == kSuccess);
  CHECK(with(kVec128, kVec128, [](Fp8& p) { p.fast_accum = true; }) == kNotSupported);
  CHECK(with(kOuterVec, kOuterVec, [](Fp8& p) { p.fast_accum = true; }) == kSuccess);
  CHECK(with(kBlk128, kBlk128) == kNotSupported);
  CHECK(with(kScalar, kOuterVec) == kNotSupported);
  CHECK(with(kScalar, kVec128) == kNotSupported);
  CHECK(with(kOuterVec, kVec128) == kNotSupported);
  CHECK(with(kVec32, kVec32) == kNotSupported);
  CHECK(with(kScalar, kScalar, [](Fp8& p) { p.null_scales = true; }) == kSuccess);
  CHECK(with(kVec128, kBlk128, [](Fp8& p) { p.bias = true, p.alpha = 0.5f, p.beta = 2; }) == kSuccess);
  CHECK(with(kOuterVec, kOuterVec, [](Fp8& p) { p.bias = true, p.alpha = 0.5f, p.beta = 2, p.use_algorithm = false; }) ==
        kSuccess);
}

TEST(cublaslt_fp8_demands) {
  auto with = [](auto change) {
    Fp8 p;
    change(p);
    return p.run();
  };
  CHECK(with([](Fp8& p) { p.transa = 0; }) == kNotSupported);
  CHECK(with([](Fp8& p) { p.transb = 1; }) == kNotSupported);
  CHECK(with([](Fp8& p) { p.m = 72; }) == kNotSupported);
  CHECK(with([](Fp8& p) { p.n = 40; }) == kSuccess);
  CHECK(with([](Fp8& p) { p.n = 3; }) == kSuccess);
  CHECK(with([](Fp8& p) { p.k = 136; }) == kNotSupported);
  CHECK(with([](Fp8& p) { p.compute = kCompute32FFastTF32; }) == kNotSupported);
  CHECK(with([](Fp8& p) { p.a_offset = 8; }) == kNotSupported);
  CHECK(with([](Fp8& p) { p.a_offset = 16; }) == kSuccess);
}

DIES(cublaslt_ada_has_scalars_only, nullptr, "FP8_FAKE_SM=89") {
  Fp8 p;
  CHECK(p.run() == kSuccess);
  p.a_mode = p.b_mode = kOuterVec;
  CHECK(p.run() == kNotSupported);
}
DIES(cublaslt_blackwell_has_powers_of_two, nullptr, "FP8_FAKE_SM=100") {
  auto with = [](int a, int b, auto... more) {
    Fp8 p;
    p.a_mode = a, p.b_mode = b, p.m = 288, p.n = 160, p.k = 736, p.d_type = kF32, p.fast_accum = false;
    (more(p), ...);
    return p.run();
  };
  CHECK(with(kScalar, kScalar) == kSuccess);
  CHECK(with(kVec32, kVec32) == kSuccess);
  CHECK(with(kVec32, kVec32, [](Fp8& p) { p.bias = true, p.alpha = 0.5f, p.beta = 2; }) == kSuccess);
  CHECK(with(kVec32, kVec32, [](Fp8& p) { p.fast_accum = true; }) == kNotSupported);
  CHECK(with(kVec32, kVec32, [](Fp8& p) { p.n = 144; }) == kNotSupported);
  CHECK(with(kVec32, kScalar) == kNotSupported);
  CHECK(with(kOuterVec, kOuterVec) == kNotSupported);
}
DIES(cublaslt_ampere_has_no_fp8, nullptr, "FP8_FAKE_SM=80") { CHECK(Fp8().run() == kNotSupported); }

// Sums by hand: 13 bits below the largest exponent are kept, for 128 terms or for all.
TEST(fp8_sums_of_tensor_cores) {
  auto sum = [](std::vector<std::pair<int64_t, uint8_t>> ones, int64_t k, bool fast_accum) {
    std::vector<uint8_t> a(k), b(k);
    for (auto [at, code] : ones) a[at] = code, b[at] = 0x38;  // 1 in E4M3
    Operand oa{a.data(), kE4M3, k, true}, ob{b.data(), kE4M3, k, false};
    float result;
    multiply_fp8(oa, ob, 1, 1, k, nullptr, fast_accum, &result);
    return result;
  };
  const uint8_t large = 0x78, small = 0x01, next = 0x02, negative = 0x81;  // 256, 2^-9, 2^-8, -2^-9
  // 256 = 2^8 keeps multiples of 2^-5.
  CHECK(sum({{0, large}, {1, small}}, 32, true) == 256);
  CHECK(sum({{0, large}, {1, negative}}, 32, true) == 256);
  CHECK(sum({{0, small}, {1, next}}, 32, true) == std::ldexp(3.0f, -9));
  // 0x18 is 2^-4: kept beside 256, cut off beside 2^10, which 256 four times is.
  CHECK(sum({{0, large}, {1, 0x18}}, 32, true) == 256.0625f);
  CHECK(sum({{0, large}, {1, large}, {2, large}, {3, large}, {32, 0x08}}, 64, true) == 1024);
  CHECK(sum({{0, large}, {128, small}}, 160, true) == 256);
  CHECK(sum({{0, large}, {128, small}}, 160, false) == 256 + std::ldexp(1.0f, -9));
  CHECK(std::isnan(sum({{0, large}, {1, 0x7F}}, 32, true)));
}

TEST(cublaslt_attribute_sizes) {
  void* desc;
  cublasLtMatmulDescCreate(&desc, kCompute32F, kF32);
  int32_t four = 1;
  int8_t one = 1;
  CHECK(cublasLtMatmulDescSetAttribute(desc, kDescFastAccum, &four, 4) == kInvalidValue);
  CHECK(cublasLtMatmulDescSetAttribute(desc, kDescFastAccum, &one, 1) == kSuccess);
  CHECK(cublasLtMatmulDescSetAttribute(desc, 99, &four, 4) == kInvalidValue);
}
