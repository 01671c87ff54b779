// A few lines of test framework and short forms of driver calls.
#pragma once
#include <cuda.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

struct Case {
  const char* name;
  void (*body)();
  const char* dies_with;  // null, or a part of the message with which it must abort
  const char* setting;    // an environment variable for it, NAME=VALUE, or null
};
std::vector<Case>& cases();
struct Register {
  Register(Case c) { cases().push_back(c); }
};
#define TEST(name)                                                  \
  static void name();                                               \
  static Register register_##name({#name, name, nullptr, nullptr}); \
  static void name()
#define DIES(name, text, setting)                                \
  static void name();                                            \
  static Register register_##name({#name, name, text, setting}); \
  static void name()

void fail(const char* file, int line, const char* text);
#define CHECK(condition) ((condition) ? (void)0 : fail(__FILE__, __LINE__, #condition))
#define OK(call) CHECK((call) == CUDA_SUCCESS)

// Device memory with the type of its elements.
template <class T> class Device {
 public:
  explicit Device(size_t n) : n_(n) { OK(cuMemAlloc(&address_, n * sizeof(T))); }
  explicit Device(const std::vector<T>& values) : Device(values.size()) {
    OK(cuMemcpyHtoD(address_, values.data(), n_ * sizeof(T)));
  }
  ~Device() { cuMemFree(address_); }
  Device(const Device&) = delete;
  std::vector<T> get() const {
    std::vector<T> values(n_);
    OK(cuMemcpyDtoH(values.data(), address_, n_ * sizeof(T)));
    return values;
  }
  T* data() const { return reinterpret_cast<T*>(address_); }
  CUdeviceptr address() const { return address_; }

 private:
  size_t n_;
  CUdeviceptr address_;
};

CUfunction function(const char* name);

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};

template <class... A> CUresult try_launch(CUfunction f, Grid grid, Grid block, unsigned shared, A... arguments) {
  void* pointers[] = {&arguments..., nullptr};
  return cuLaunchKernel(f, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, nullptr, pointers, nullptr);
}
template <class... A> void launch(const char* name, Grid grid, Grid block, unsigned shared, A... arguments) {
  OK(try_launch(function(name), grid, block, shared, arguments...));
}

// The same numbers in every run.
struct Random {
  uint64_t state = 88172645463325252ull;
  uint64_t next() { return state ^= state << 13, state ^= state >> 7, state ^= state << 17; }
  float uniform() { return float(next() >> 40) * 0x1p-23f - 1.0f; }  // in [-1, 1)
};
std::vector<float> random_floats(size_t n, uint64_t seed = 1);

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
