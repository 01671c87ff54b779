// Constants of the cuBLAS interface and element types. cuBLAS' own headers are not needed to build.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>

namespace blas {

enum Status {
  kSuccess = 0,
  kNotInitialized = 1,
  kInvalidValue = 7,
  kArchMismatch = 8,
  kExecutionFailed = 13,
  kNotSupported = 15,
};

enum Type { kF32 = 0, kF64 = 1, kF16 = 2, kBF16 = 14, kE4M3 = 28, kE5M2 = 29 };

enum Compute {
  kCompute16F = 64,
  kCompute16FPedantic = 65,
  kCompute32F = 68,
  kCompute32FPedantic = 69,
  kCompute64F = 70,
  kCompute64FPedantic = 71,
  kCompute32FFast16F = 74,
  kCompute32FFast16BF = 75,
  kCompute32FFastTF32 = 77,
  kCompute32FEmulated = 78,
};

enum Operation { kNone = 0, kTranspose = 1, kConjugate = 2 };

inline size_t size_of(int type) {
  switch (type) {
    case kF64: return 8;
    case kF32: return 4;
    case kF16:
    case kBF16: return 2;
    case kE4M3:
    case kE5M2: return 1;
    default: return 0;
  }
}
inline bool is_fp8(int type) { return type == kE4M3 || type == kE5M2; }
const char* type_name(int type);

struct bf16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};
extern const float* const e4m3_values;  // 256 of each
extern const float* const e5m2_values;

inline float to_float(float x) { return x; }
inline float to_float(double x) { return float(x); }
inline float to_float(_Float16 x) { return float(x); }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
inline float to_float(e4m3 x) { return e4m3_values[x.bits]; }
inline float to_float(e5m2 x) { return e5m2_values[x.bits]; }

// Rounds once, to nearest even.
bf16 to_bf16(double x);
_Float16 to_f16(double x);

// One element of any type.
double load(const void* data, int type, int64_t index);
void store(void* data, int type, int64_t index, double value);

// From the environment and the driver library.
bool tracing();
int compute_capability();
bool in_device_memory(const void* data, size_t bytes);
void check_guards(const char* after);
// Whether `work` on this stream is kept for a graph; otherwise the caller does it.
bool captured(void* stream, std::function<void()> work);

// Says on standard error why a call is refused, where tracing is on, and returns the status.
Status refuse(Status status, const char* call, const char* format, ...) __attribute__((format(printf, 3, 4)));

}  // namespace blas

#define EXPORT extern "C" __attribute__((visibility("default")))
