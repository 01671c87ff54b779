// The part of cuBLAS that matrix products use.
#include <algorithm>
#include <vector>

#include "gemm.h"
#include "types.h"

using namespace blas;

namespace {

struct Handle {
  void* stream;
  int math_mode, pointer_mode;
};

struct Product {
  const char* call;
  int transa, transb;
  int64_t m, n, k;
  const void *alpha, *a;
  int a_type;
  int64_t lda, stride_a;
  const void* b;
  int b_type;
  int64_t ldb, stride_b;
  const void* beta;
  void* c;
  int c_type;
  int64_t ldc, stride_c, batch;
  int compute;
};

bool supported(const Product& p) {
  if (p.a_type != p.b_type) return false;
  switch (p.compute) {
    case kCompute16F:
    case kCompute16FPedantic: return p.a_type == kF16 && p.c_type == kF16;
    case kCompute64F:
    case kCompute64FPedantic: return p.a_type == kF64 && p.c_type == kF64;
    case kCompute32F:
    case kCompute32FPedantic:
      return (p.a_type == kF32 && p.c_type == kF32) ||
             ((p.a_type == kF16 || p.a_type == kBF16) && (p.c_type == p.a_type || p.c_type == kF32));
    // These modes take f32 according to the documentation; 16-bit types work too in practice.
    case kCompute32FFast16F:
    case kCompute32FFast16BF:
    case kCompute32FFastTF32:
    case kCompute32FEmulated: return p.a_type == p.c_type && p.a_type != kF64;
    default: return false;
  }
}

// Bytes from the first to the last element of a column-major matrix, times the batch.
size_t extent(int64_t rows, int64_t cols, int64_t ld, int64_t stride, int64_t batch, int type) {
  if (rows == 0 || cols == 0 || batch == 0) return 0;
  return ((batch - 1) * std::max<int64_t>(stride, 0) + (cols - 1) * ld + rows) * size_of(type);
}

void compute(const Product& p, double alpha, double beta) {
  auto batches = [&](int64_t first, int64_t last) {
    std::vector<float> sums(p.a_type == kF64 ? 0 : p.m * p.n);
    std::vector<double> double_sums(p.a_type == kF64 ? p.m * p.n : 0);
    for (int64_t i = first; i < last; i++) {
      Operand a{static_cast<const char*>(p.a) + i * p.stride_a * int64_t(size_of(p.a_type)), p.a_type, p.lda,
                p.transa != kNone};
      Operand b{static_cast<const char*>(p.b) + i * p.stride_b * int64_t(size_of(p.b_type)), p.b_type, p.ldb,
                p.transb != kNone};
      void* c = static_cast<char*>(p.c) + i * p.stride_c * int64_t(size_of(p.c_type));
      Output out{c, p.c_type, p.ldc, c, p.c_type, p.ldc};
      if (p.a_type == kF64) {
        multiply(a, b, p.m, p.n, p.k, double_sums.data());
        finish(double_sums.data(), p.m, p.n, alpha, beta, out, nullptr, nullptr, nullptr, 0);
      } else {
        multiply(a, b, p.m, p.n, p.k, nullptr, sums.data());
        finish(sums.data(), p.m, p.n, alpha, beta, out, nullptr, nullptr, nullptr, 0);
      }
    }
  };
  double work = double(p.m) * p.n * p.k;
  bool worth_it = p.batch > 1 && work < 2e6 && work * p.batch > 2e6;
  share(p.batch, 1, worth_it, [](void* f, int64_t i, int64_t j) { (*static_cast<decltype(batches)*>(f))(i, j); }, &batches);
  check_guards(p.call);
}

Status run(void* handle, const Product& p) {
  if (tracing())
    fprintf(stderr, "cuda-on-cpu: %s %c%c m %ld n %ld k %ld lda %ld ldb %ld ldc %ld %s -> %s batch %ld\n", p.call,
            "NTC"[p.transa], "NTC"[p.transb], p.m, p.n, p.k, p.lda, p.ldb, p.ldc, type_name(p.a_type), type_name(p.c_type),
            p.batch);
  int64_t a_rows = p.transa ? p.k : p.m, a_cols = p.transa ? p.m : p.k, b_rows = p.transb ? p.n : p.k,
          b_cols = p.transb ? p.k : p.n;
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.batch < 0) return refuse(kInvalidValue, p.call, "a negative dimension");
  if (p.lda < std::max<int64_t>(1, a_rows) || p.ldb < std::max<int64_t>(1, b_rows) || p.ldc < std::max<int64_t>(1, p.m))
    return refuse(kInvalidValue, p.call, "a leading dimension is too small");
  if (!supported(p))
    return refuse(kNotSupported, p.call, "types %s, %s -> %s, compute type %d", type_name(p.a_type), type_name(p.b_type),
                  type_name(p.c_type), p.compute);
  if (p.m == 0 || p.n == 0 || p.batch == 0) return kSuccess;
  if (!in_device_memory(p.a, extent(a_rows, a_cols, p.lda, p.stride_a, p.batch, p.a_type)) ||
      !in_device_memory(p.b, extent(b_rows, b_cols, p.ldb, p.stride_b, p.batch, p.b_type)) ||
      !in_device_memory(p.c, extent(p.m, p.n, p.ldc, p.stride_c, p.batch, p.c_type))) {
    fprintf(stderr, "cuda-on-cpu: %s: an operand reaches outside of its allocation\n", p.call);
    return kExecutionFailed;
  }
  int scale_type = p.a_type == kF64 ? kF64 : p.compute == kCompute16F || p.compute == kCompute16FPedantic ? kF16 : kF32;
  double alpha = load(p.alpha, scale_type, 0), beta = load(p.beta, scale_type, 0);

  auto work = [p, alpha, beta] { compute(p, alpha, beta); };
  if (!captured(static_cast<Handle*>(handle)->stream, work)) work();
  return kSuccess;
}

}  // namespace

EXPORT Status cublasCreate_v2(void** handle) {
  *handle = new Handle{};
  return kSuccess;
}
EXPORT Status cublasDestroy_v2(void* handle) {
  delete static_cast<Handle*>(handle);
  return kSuccess;
}
EXPORT Status cublasGetVersion_v2(void*, int* version) {
  *version = 130000;
  return kSuccess;
}
EXPORT Status cublasSetStream_v2(void* handle, void* stream) {
  static_cast<Handle*>(handle)->stream = stream;
  return kSuccess;
}
EXPORT Status cublasGetStream_v2(void* handle, void** stream) {
  *stream = static_cast<Handle*>(handle)->stream;
  return kSuccess;
}
EXPORT Status cublasSetWorkspace_v2(void*, void*, size_t) { return kSuccess; }
EXPORT Status cublasSetMathMode(void* handle, int mode) {
  static_cast<Handle*>(handle)->math_mode = mode;
  return kSuccess;
}
EXPORT Status cublasGetMathMode(void* handle, int* mode) {
  *mode = static_cast<Handle*>(handle)->math_mode;
  return kSuccess;
}
// Host and device memory are the same here, so both modes work alike.
EXPORT Status cublasSetPointerMode_v2(void* handle, int mode) {
  static_cast<Handle*>(handle)->pointer_mode = mode;
  return kSuccess;
}
EXPORT Status cublasGetPointerMode_v2(void* handle, int* mode) {
  *mode = static_cast<Handle*>(handle)->pointer_mode;
  return kSuccess;
}
EXPORT Status cublasSetAtomicsMode(void*, int) { return kSuccess; }

EXPORT Status cublasGemmStridedBatchedEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a,
                                         int a_type, int lda, long long stride_a, const void* b, int b_type, int ldb,
                                         long long stride_b, const void* beta, void* c, int c_type, int ldc, long long stride_c,
                                         int batch, int compute, int) {
  return run(handle, {"cublasGemmStridedBatchedEx",
              transa,
              transb,
              m,
              n,
              k,
              alpha,
              a,
              a_type,
              lda,
              stride_a,
              b,
              b_type,
              ldb,
              stride_b,
              beta,
              c,
              c_type,
              ldc,
              stride_c,
              batch,
              compute});
}

EXPORT Status cublasGemmEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a, int a_type,
                           int lda, const void* b, int b_type, int ldb, const void* beta, void* c, int c_type, int ldc,
                           int compute, int) {
  return run(handle, {"cublasGemmEx", transa, transb, m,    n, k,      alpha, a, a_type, lda,    0, b,
              b_type,         ldb,    0,      beta, c, c_type, ldc,   0, 1,      compute});
}

#define GEMM(T, letter, type, compute)                                                                                         \
  EXPORT Status cublas##letter##gemm_v2(void* handle, int transa, int transb, int m, int n, int k, const T* alpha, const T* a,        \
                                        int lda, const T* b, int ldb, const T* beta, T* c, int ldc) {                          \
    return run(handle, {"cublas" #letter "gemm",                                                                                       \
                transa,                                                                                                        \
                transb,                                                                                                        \
                m,                                                                                                             \
                n,                                                                                                             \
                k,                                                                                                             \
                alpha,                                                                                                         \
                a,                                                                                                             \
                type,                                                                                                          \
                lda,                                                                                                           \
                0,                                                                                                             \
                b,                                                                                                             \
                type,                                                                                                          \
                ldb,                                                                                                           \
                0,                                                                                                             \
                beta,                                                                                                          \
                c,                                                                                                             \
                type,                                                                                                          \
                ldc,                                                                                                           \
                0,                                                                                                             \
                1,                                                                                                             \
                compute});                                                                                                     \
  }                                                                                                                            \
  EXPORT Status cublas##letter##gemmStridedBatched(                                                                            \
      void* handle, int transa, int transb, int m, int n, int k, const T* alpha, const T* a, int lda, long long stride_a, const T* b, \
      int ldb, long long stride_b, const T* beta, T* c, int ldc, long long stride_c, int batch) {                              \
    return run(handle, {"cublas" #letter "gemmStridedBatched",                                                                         \
                transa,                                                                                                        \
                transb,                                                                                                        \
                m,                                                                                                             \
                n,                                                                                                             \
                k,                                                                                                             \
                alpha,                                                                                                         \
                a,                                                                                                             \
                type,                                                                                                          \
                lda,                                                                                                           \
                stride_a,                                                                                                      \
                b,                                                                                                             \
                type,                                                                                                          \
                ldb,                                                                                                           \
                stride_b,                                                                                                      \
                beta,                                                                                                          \
                c,                                                                                                             \
                type,                                                                                                          \
                ldc,                                                                                                           \
                stride_c,                                                                                                      \
                batch,                                                                                                         \
                compute});                                                                                                     \
  }
GEMM(float, S, kF32, kCompute32F)
GEMM(double, D, kF64, kCompute64F)
