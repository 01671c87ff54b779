// What a comparison of algorithms needs: operands that any order of adding shows in, and whether two results differ.
#include "common.cuh"

// out = bits that look random where `mask` has ones, and those of `set`: the same in every run.
extern "C" __global__ void fp8_trial_words(uint32_t* out, uint64_t words, uint32_t seed, uint32_t mask, uint32_t set) {
  for (uint64_t i = global_thread(); i < words; i += global_threads()) {
    // The last steps of MurmurHash3.
    uint32_t bits = (static_cast<uint32_t>(i) + seed) * 0x9E3779B1u;
    bits = (bits ^ bits >> 16) * 0x85EBCA6Bu;
    bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
    out[i] = ((bits ^ bits >> 16) & mask) | set;
  }
}

// found = 1 if `n` bytes at a and b, aligned to 4, are different.
extern "C" __global__ void fp8_differ(const uint8_t* a, const uint8_t* b, uint32_t* found, uint64_t n) {
  const uint64_t words = n / 4;
  bool other = false;
  for (uint64_t i = global_thread(); i < words; i += global_threads())
    other |= reinterpret_cast<const uint32_t*>(a)[i] != reinterpret_cast<const uint32_t*>(b)[i];
  for (uint64_t i = words * 4 + global_thread(); i < n; i += global_threads()) other |= a[i] != b[i];
  if (other) *found = 1;
}
