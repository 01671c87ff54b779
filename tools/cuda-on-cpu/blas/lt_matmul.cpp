// The product itself and the heuristic that precedes it.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "gemm.h"
#include "lt.h"

using namespace blas;

namespace {

struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace;
  int32_t state;
  float waves;
  int32_t reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96);

constexpr size_t kWorkspace = 1 << 20;  // what an algorithm asks for where the preference allows it

int64_t blocks(int64_t n) { return (n + 127) / 128; }

// Tiles of 128 rows by 4 scales along the sum.
int64_t tiles_across(int64_t k) { return (k + 127) / 128; }

// Bytes of scales that a mode reads for an operand of `outer` rows (of A) or columns (of B).
size_t scale_bytes(int mode, int64_t outer, int64_t k) {
  switch (mode) {
    case kVec32: return blocks(outer) * tiles_across(k) * 512;
    case kOuterVec: return 4 * outer;
    case kVec128: return 4 * outer * blocks(k);
    case kBlk128: return 4 * blocks(outer) * ((blocks(k) + 3) / 4 * 4);
    default: return 4;
  }
}

// E8M0 scales in tiles, as floats [outer, ceil(k / 32)].
std::vector<float> from_tiles(const void* scales, int64_t outer, int64_t k) {
  const uint8_t* codes = static_cast<const uint8_t*>(scales);
  int64_t along = (k + 31) / 32;
  std::vector<float> values(outer * along);
  for (int64_t i = 0; i < outer; i++)
    for (int64_t j = 0; j < along; j++) {
      int64_t tile = i / 128 * tiles_across(k) + j / 4;
      uint8_t code = codes[tile * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4];
      values[i * along + j] = code == 0xFF ? NAN : std::ldexp(1.0f, code - 127);
    }
  return values;
}

// VEC128: the outer dimension is contiguous. BLK128x128: the sum's blocks are contiguous, padded to a multiple of 4.
StretchScales stretch_scales(const Problem& p) {
  StretchScales s;
  int64_t padded = (blocks(p.k) + 3) / 4 * 4;
  s.a = p.a_scale;
  s.b = p.b_scale;
  if (p.a_mode == kVec128) s.a_row_stride = 1, s.a_stretch_stride = p.m, s.a_row_block = 1;
  if (p.a_mode == kBlk128) s.a_row_stride = padded, s.a_stretch_stride = 1, s.a_row_block = 128;
  if (p.b_mode == kVec128) s.b_row_stride = 1, s.b_stretch_stride = p.n, s.b_row_block = 1;
  if (p.b_mode == kBlk128) s.b_row_stride = padded, s.b_stretch_stride = 1, s.b_row_block = 128;
  return s;
}

bool aligned(const void* p, size_t to = 16) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

void print(const Problem& p) {
  if (!tracing()) return;
  fprintf(
      stderr,
      "cuda-on-cpu: %s %c%c m %ld n %ld k %ld lda %ld ldb %ld ldd %ld %s x %s -> %s scale modes %d %d epilogue %d batch %ld\n",
      p.call, "NTC"[p.transa], "NTC"[p.transb], p.m, p.n, p.k, p.a.ld, p.b.ld, p.d.ld, type_name(p.a.type), type_name(p.b.type),
      type_name(p.d.type), p.a_mode, p.b_mode, p.epilogue, p.d.batch);
}

Status check_addresses(const Problem& p, const void* a, const void* b, const void* c, const void* d, bool reads_c) {
  auto outside = [&](const char* name, const void* data, size_t bytes) {
    if (in_device_memory(data, bytes)) return false;
    fprintf(stderr, "cuda-on-cpu: %s: %zu bytes of %s at %p are not in one allocation\n", p.call, bytes, name, data);
    return true;
  };
  if (p.fp8()) {
    if (!aligned(a) || !aligned(b) || !aligned(d) || (reads_c && !aligned(c)))
      return refuse(kNotSupported, p.call, "FP8 operands must be aligned to 16 bytes");
    if ((p.a_blocks() && !aligned(p.a_scale)) || (p.b_blocks() && !aligned(p.b_scale)))
      return refuse(kNotSupported, p.call, "block scales must be aligned to 16 bytes");
    if (p.a_scale && outside("A's scales", p.a_scale, scale_bytes(p.a_mode, p.m, p.k))) return kExecutionFailed;
    if (p.b_scale && outside("B's scales", p.b_scale, scale_bytes(p.b_mode, p.n, p.k))) return kExecutionFailed;
  }
  if (outside("A", a, p.a.extent()) || outside("B", b, p.b.extent()) || outside("D", d, p.d.extent())) return kExecutionFailed;
  if (reads_c && outside("C", c, p.c.extent())) return kExecutionFailed;
  if (p.epilogue == kEpilogueBias) {
    if (!p.bias) return refuse(kInvalidValue, p.call, "the bias pointer is null");
    if (outside("the bias", p.bias, p.m * size_of(p.bias_type))) return kExecutionFailed;
  }
  return kSuccess;
}

template <class T> const T* at(const void* base, const Matrix& x, int64_t i) {
  return reinterpret_cast<const T*>(static_cast<const char*>(base) + i * x.stride * int64_t(size_of(x.type)));
}

void compute(const Problem& p, double alpha, double beta, const void* a, const void* b, const void* c, void* d) {
  const void* bias = p.epilogue == kEpilogueBias ? p.bias : nullptr;
  const float *row_scales = nullptr, *column_scales = nullptr;
  bool stretches = p.fp8() && p.a_blocks();
  StretchScales scales = stretches ? stretch_scales(p) : StretchScales{};
  std::vector<float> a_values, b_values;
  if (p.fp8() && p.a_mode == kVec32) {
    a_values = from_tiles(p.a_scale, p.m, p.k), b_values = from_tiles(p.b_scale, p.n, p.k);
    scales.length = 32, scales.a = a_values.data(), scales.b = b_values.data();
    scales.a_row_stride = scales.b_row_stride = (p.k + 31) / 32, scales.a_stretch_stride = scales.b_stretch_stride = 1;
  }
  if (p.fp8() && p.a_mode == kOuterVec) row_scales = p.a_scale, column_scales = p.b_scale;
  if (p.fp8() && p.a_mode == kScalar) alpha *= double(p.a_scale ? *p.a_scale : 1.0f) * (p.b_scale ? *p.b_scale : 1.0f);
  for (int64_t i = 0; i < p.d.batch; i++) {
    Operand oa{at<char>(a, p.a, i), p.a.type, p.a.ld, p.transa != kNone};
    Operand ob{at<char>(b, p.b, i), p.b.type, p.b.ld, p.transb != kNone};
    void* out_d = const_cast<char*>(at<char>(d, p.d, i));
    Output out{c ? at<char>(c, p.c, i) : nullptr, p.c.type, p.c.ld, out_d, p.d.type, p.d.ld};
    if (p.a.type == kF64) {
      std::vector<double> sums(p.m * p.n);
      multiply(oa, ob, p.m, p.n, p.k, sums.data());
      finish(sums.data(), p.m, p.n, alpha, beta, out, nullptr, nullptr, bias, p.bias_type);
    } else {
      std::vector<float> sums(p.m * p.n);
      if (p.fp8())
        multiply_fp8(oa, ob, p.m, p.n, p.k, stretches ? &scales : nullptr, p.fast_accum, sums.data());
      else
        multiply(oa, ob, p.m, p.n, p.k, nullptr, sums.data());
      finish(sums.data(), p.m, p.n, alpha, beta, out, row_scales, column_scales, bias, p.bias_type);
    }
  }
}

Status check_algorithm(const Problem& p, const Algorithm& chosen, const void* workspace, size_t workspace_bytes) {
  if (chosen.magic != kAlgorithmMagic) return refuse(kInvalidValue, p.call, "the algorithm does not come from the heuristic");
  if (chosen.a_type != p.a.type || chosen.b_type != p.b.type || chosen.d_type != p.d.type || chosen.m != p.m ||
      chosen.n != p.n || chosen.k != p.k || chosen.epilogue != p.epilogue)
    return refuse(kInvalidValue, p.call, "the algorithm was chosen for another product");
  if (chosen.workspace > workspace_bytes)
    return refuse(kInvalidValue, p.call, "the algorithm needs a workspace of %lu bytes", chosen.workspace);
  if (chosen.workspace && (!workspace || !aligned(workspace, 256) || !in_device_memory(workspace, workspace_bytes)))
    return refuse(kInvalidValue, p.call, "the workspace is not device memory aligned to 256 bytes");
  return kSuccess;
}

}  // namespace

EXPORT Status cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference,
                                             int requested, HeuristicResult* results, int* count) {
  if (!handle || !desc || !a || !b || !c || !d || !preference || requested < 1 || !results || !count) return kInvalidValue;
  *count = 0;
  auto layout = [](void* x) -> const Layout& { return *static_cast<Layout*>(x); };
  Problem p("cublasLtMatmulAlgoGetHeuristic", *static_cast<MatmulDesc*>(desc), layout(a), layout(b), layout(c), layout(d));
  if (Status s = p.check()) return s;
  const Attributes& wishes = static_cast<Preference*>(preference)->attributes;
  for (int alignment : {kPrefAlignA, kPrefAlignB, kPrefAlignC, kPrefAlignD})
    if (p.fp8() && wishes.get<uint32_t>(alignment, 256) < 16)
      return refuse(kNotSupported, p.call, "FP8 needs alignments of 16 bytes");
  size_t workspace = std::min<size_t>(kWorkspace, wishes.get<uint64_t>(kPrefMaxWorkspace, 0));
  // All of them are the same product, with less and less workspace.
  const char* wanted = getenv("FP8_FAKE_ALGORITHMS");
  *count = std::min(requested, wanted && *wanted ? std::max(atoi(wanted), 1) : 1);
  for (int i = 0; i < *count; i++, workspace = workspace / 2 / 256 * 256)
    results[i] = {
        {kAlgorithmMagic, workspace, p.m, p.n, p.k, p.a.type, p.b.type, p.d.type, p.epilogue, 0}, workspace, kSuccess, 1.0f, {}};
  return kSuccess;
}

EXPORT Status cublasLtMatmul(void* handle, void* desc, const void* alpha, const void* a, void* la, const void* b, void* lb,
                             const void* beta, const void* c, void* lc, void* d, void* ld, const Algorithm* algorithm,
                             void* workspace, size_t workspace_bytes, void* stream) {
  if (!handle || !desc || !la || !lb || !lc || !ld || !alpha || !beta) return kInvalidValue;
  auto layout = [](void* x) -> const Layout& { return *static_cast<Layout*>(x); };
  Problem p("cublasLtMatmul", *static_cast<MatmulDesc*>(desc), layout(la), layout(lb), layout(lc), layout(ld));
  print(p);
  if (Status s = p.check()) return s;
  // Pointers to alpha and beta may be host or device memory: both are plain memory here.
  double alpha_value = load(alpha, p.scale_type, 0), beta_value = load(beta, p.scale_type, 0);
  if (Status s = check_addresses(p, a, b, c, d, beta_value != 0)) return s;
  if (algorithm) {
    if (Status s = check_algorithm(p, *algorithm, workspace, workspace_bytes)) return s;
  }
  size_t written = algorithm ? algorithm->workspace : 0;
  auto work = [=] {
    // The workspace is written, so that nothing else may live there.
    if (written) memset(workspace, 0xFF, written);
    compute(p, alpha_value, beta_value, a, b, c, d);
    check_guards(p.call);
  };
  if (!captured(stream, work)) work();
  return kSuccess;
}
