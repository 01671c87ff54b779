// Uniform and normal random numbers. They are not cuRAND's numbers.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" bool coc_in_device_memory(const void* address, size_t bytes);

enum Status { kSuccess = 0, kOutOfRange = 104, kOddLength = 105 };
struct Generator {
  std::mt19937_64 engine;
};

template <class T> static bool outside(const T* out, size_t n) {
  if (coc_in_device_memory(out, n * sizeof(T))) return false;
  fprintf(stderr, "cuda-on-cpu: curand: the output reaches outside of its allocation\n");
  return true;
}

// In (0, 1], like cuRAND.
template <class T> static T uniform(Generator* g) {
  constexpr int bits = std::is_same_v<T, float> ? 24 : 53;
  return T((g->engine() >> (64 - bits)) + 1) * T(std::ldexp(1.0, -bits));
}

template <class T> static Status fill_uniform(Generator* g, T* out, size_t n) {
  if (outside(out, n)) return kOutOfRange;
  for (size_t i = 0; i < n; i++) out[i] = uniform<T>(g);
  return kSuccess;
}

template <class T> static Status fill_normal(Generator* g, T* out, size_t n, T mean, T deviation, bool log) {
  if (n % 2) return kOddLength;  // pseudorandom generators make pairs
  if (outside(out, n)) return kOutOfRange;
  std::normal_distribution<double> normal(mean, deviation);
  for (size_t i = 0; i < n; i++) {
    double v = normal(g->engine);
    out[i] = T(log ? std::exp(v) : v);
  }
  return kSuccess;
}

EXPORT Status curandCreateGenerator(Generator** g, int) {
  *g = new Generator;
  return kSuccess;
}
EXPORT Status curandDestroyGenerator(Generator* g) {
  delete g;
  return kSuccess;
}
EXPORT Status curandSetPseudoRandomGeneratorSeed(Generator* g, unsigned long long seed) {
  g->engine.seed(seed);
  return kSuccess;
}
EXPORT Status curandSetGeneratorOffset(Generator* g, unsigned long long offset) {
  g->engine.discard(offset);
  return kSuccess;
}
EXPORT Status curandSetStream(Generator*, void*) { return kSuccess; }
EXPORT Status curandGetVersion(int* version) {
  *version = 10400;
  return kSuccess;
}

EXPORT Status curandGenerate(Generator* g, unsigned* out, size_t n) {
  if (outside(out, n)) return kOutOfRange;
  for (size_t i = 0; i < n; i++) out[i] = unsigned(g->engine());
  return kSuccess;
}
EXPORT Status curandGenerateUniform(Generator* g, float* out, size_t n) { return fill_uniform(g, out, n); }
EXPORT Status curandGenerateUniformDouble(Generator* g, double* out, size_t n) { return fill_uniform(g, out, n); }
EXPORT Status curandGenerateNormal(Generator* g, float* out, size_t n, float mean, float deviation) {
  return fill_normal(g, out, n, mean, deviation, false);
}
EXPORT Status curandGenerateNormalDouble(Generator* g, double* out, size_t n, double mean, double deviation) {
  return fill_normal(g, out, n, mean, deviation, false);
}
EXPORT Status curandGenerateLogNormal(Generator* g, float* out, size_t n, float mean, float deviation) {
  return fill_normal(g, out, n, mean, deviation, true);
}
EXPORT Status curandGenerateLogNormalDouble(Generator* g, double* out, size_t n, double mean, double deviation) {
  return fill_normal(g, out, n, mean, deviation, true);
}
