// Common to the files that implement driver functions.
#pragma once
#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <cstdio>

#include "options.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
// Most calls need a context on the calling OS thread, as on a real device.
#define NEED_CONTEXT() \
  if (!coc::has_context()) return CUDA_ERROR_INVALID_CONTEXT

namespace coc {

bool has_context();
// Bytes of shared memory a block may have after setting the function attribute.
unsigned max_shared_opt_in();

struct Stats {
  std::atomic<uint64_t> launches{0}, to_host{0}, to_device{0}, on_device{0}, sets{0}, synchronizations{0}, graphs{0}, allocations{0},
      peak_bytes{0};
};
Stats& stats();

template <class... A> void trace(const char* format, A... arguments) {
  if (!options().trace) return;
  char line[512];
  snprintf(line, sizeof line, format, arguments...);
  fprintf(stderr, "cuda-on-cpu: %s\n", line);
}

}  // namespace coc
