// One kernel launch, as the scheduler sees it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "coc/runtime.h"

namespace coc {

// A loaded kernels_*.so.
struct KernelObject {
  std::string path;
  const KernelTable* table;
};

struct Launch {
  const Kernel* kernel;
  const KernelObject* object;
  void** arguments;
  Index3 grid, block;
  unsigned dynamic_shared;
  uint64_t blocks() const { return uint64_t(grid.x) * grid.y * grid.z; }
  unsigned threads() const { return block.x * block.y * block.z; }
};

// Runs all blocks and returns when they are done.
void execute(const Launch& launch);

constexpr unsigned kMaxThreads = 1024, kMaxDynamicShared = 227 * 1024, kDefaultShared = 48 * 1024;

}  // namespace coc
