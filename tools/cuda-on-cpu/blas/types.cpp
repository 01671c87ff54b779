#include "types.h"

#include <cmath>
#include <cstdarg>
#include <cstdlib>

extern "C" bool coc_in_device_memory(const void* address, size_t bytes);
extern "C" void coc_check_guards(const char* after);
extern "C" bool coc_captured(void* stream, std::function<void()> work);

namespace blas {

namespace {

// FP8 values from their definition: sign, exponent bits, mantissa bits.
const float* table(int exponent_bits, bool has_infinity) {
  auto* values = new float[256];
  int mantissa_bits = 7 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
  for (int code = 0; code < 256; code++) {
    int exponent = code >> mantissa_bits & top, mantissa = code & ((1 << mantissa_bits) - 1);
    double v;
    if (has_infinity && exponent == top)
      v = mantissa ? NAN : INFINITY;
    else if (!has_infinity && (code & 127) == 127)
      v = NAN;
    else if (exponent == 0)
      v = std::ldexp(mantissa, 1 - bias - mantissa_bits);
    else
      v = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    values[code] = float(code & 128 ? -v : v);
  }
  return values;
}

// Rounds to `bits` of mantissa, ties to even, with the smallest exponent `lowest`.
double round_to(double x, int bits, int lowest) {
  if (!std::isfinite(x) || x == 0) return x;
  int exponent;
  std::frexp(x, &exponent);
  int unit = (exponent - 1 < lowest ? lowest : exponent - 1) - bits;
  return std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
}

}  // namespace

const float* const e4m3_values = table(4, false);
const float* const e5m2_values = table(5, true);

bf16 to_bf16(double x) {
  if (x != x) return {0x7fff};
  float f = float(round_to(x, 7, -126));
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return {uint16_t(bits >> 16)};
}

_Float16 to_f16(double x) { return _Float16(float(round_to(x, 10, -14))); }

double load(const void* data, int type, int64_t i) {
  switch (type) {
    case kF64: return static_cast<const double*>(data)[i];
    case kF32: return static_cast<const float*>(data)[i];
    case kF16: return static_cast<const _Float16*>(data)[i];
    case kBF16: return to_float(static_cast<const bf16*>(data)[i]);
    case kE4M3: return to_float(static_cast<const e4m3*>(data)[i]);
    case kE5M2: return to_float(static_cast<const e5m2*>(data)[i]);
    default: return NAN;
  }
}

void store(void* data, int type, int64_t i, double value) {
  switch (type) {
    case kF64: static_cast<double*>(data)[i] = value; break;
    case kF32: static_cast<float*>(data)[i] = float(value); break;
    case kF16: static_cast<_Float16*>(data)[i] = to_f16(value); break;
    case kBF16: static_cast<bf16*>(data)[i] = to_bf16(value); break;
  }
}

const char* type_name(int type) {
  switch (type) {
    case kF64: return "f64";
    case kF32: return "f32";
    case kF16: return "f16";
    case kBF16: return "bf16";
    case kE4M3: return "e4m3";
    case kE5M2: return "e5m2";
    default: return "other";
  }
}

bool tracing() {
  static const bool on = [] {
    const char* value = getenv("FP8_FAKE_TRACE");
    return value && *value && strcmp(value, "0") != 0;
  }();
  return on;
}

int compute_capability() {
  const char* value = getenv("FP8_FAKE_SM");
  return value && *value ? atoi(value) : 90;
}

bool in_device_memory(const void* data, size_t bytes) { return coc_in_device_memory(data, bytes); }
void check_guards(const char* after) { coc_check_guards(after); }
bool captured(void* stream, std::function<void()> work) { return coc_captured(stream, std::move(work)); }

Status refuse(Status status, const char* call, const char* format, ...) {
  if (tracing()) {
    fprintf(stderr, "cuda-on-cpu: %s refused (status %d): ", call, status);
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
  }
  return status;
}

}  // namespace blas
