// Settings from the environment, read once.
#pragma once
#include <cstdint>

namespace coc {

enum class Order { Forward, Reverse, Random };

struct Options {
  int compute_capability = 90;   // FP8_FAKE_SM
  unsigned threads = 2;          // FP8_FAKE_THREADS
  int guard = 0;                 // FP8_FAKE_GUARD: 1 guard zones, 2 also unmapped pages
  bool trace = false;            // FP8_FAKE_TRACE
  bool stats = false;            // FP8_FAKE_STATS
  bool lenient = false;          // FP8_FAKE_LENIENT: exited threads count as arrived
  bool early_cp_async = false;   // FP8_FAKE_CP_ASYNC=early: copies land when issued
  Order order = Order::Forward;  // FP8_FAKE_ORDER: forward, reverse or random:SEED
  uint64_t seed = 0;
  uint64_t memory = 80ull << 30;  // FP8_FAKE_MEMORY_MB
};

const Options& options();

}  // namespace coc
