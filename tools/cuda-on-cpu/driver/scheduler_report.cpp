// Errors inside kernels: where the running thread is, and why a block cannot go on.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "scheduler.h"

namespace coc {

void Scheduler::print_position() const {
  const Index3 &t = coc_lane.thread_idx, &g = launch_->grid, &b = launch_->block;
  fprintf(stderr, "cuda-on-cpu: kernel %s, grid (%u,%u,%u), block (%u,%u,%u), at block (%u,%u,%u) thread (%u,%u,%u): ",
          launch_->kernel->name, g.x, g.y, g.z, b.x, b.y, b.z, block_index_.x, block_index_.y, block_index_.z, t.x, t.y, t.z);
}

void Scheduler::report_deadlock() {
  print_position();
  fprintf(stderr, "the block cannot go on\n");
  fprintf(stderr, "  %u of %u threads have exited\n", threads_ - alive_, threads_);
  if (waiting_) fprintf(stderr, "  %u wait in __syncthreads, which needs %u\n", waiting_, barrier_quorum());
  report_groups();
  std::map<std::string, unsigned> collectives;
  for (unsigned w = 0; w * 32 < threads_; w++)
    for (unsigned rest = warps_[w].in_collective; rest; rest &= rest - 1) {
      unsigned lane = __builtin_ctz(rest), mask = warps_[w].mask[lane];
      char text[256];
      snprintf(text, sizeof text, "warp %u: %s with mask 0x%08x, where lanes 0x%08x never came", w, warps_[w].what[lane], mask,
               mask & ~warps_[w].in_collective);
      collectives[text]++;
    }
  for (auto& [text, count] : collectives) fprintf(stderr, "  %u lanes wait in %s\n", count, text.c_str());
  abort();
}

}  // namespace coc

extern "C" __attribute__((visibility("default"))) void coc_fail(const char* format, ...) {
  if (coc::current_scheduler && coc::current_scheduler->launch())
    coc::current_scheduler->print_position();
  else
    fprintf(stderr, "cuda-on-cpu: ");
  va_list list;
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
  fputc('\n', stderr);
  abort();
}
