// Static shared memory: kernel objects hold it as thread-local variables, one copy per OS thread.
#pragma once
#include <cstddef>

#include "coc/runtime.h"

namespace coc {

struct Segment {
  void* start;
  size_t bytes;
};

// The calling thread's thread-local segment of the object that holds the table.
Segment thread_local_segment(const KernelTable* table);

}  // namespace coc
