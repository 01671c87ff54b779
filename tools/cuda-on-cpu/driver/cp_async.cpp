// cp.async: a copy takes effect at the wait that covers it, so that a missing wait shows. With
// FP8_FAKE_CP_ASYNC=early it takes effect when issued, so that overwriting a buffer still in use shows.
#include <cstring>

#include "scheduler.h"

namespace coc {

void Scheduler::apply(const Copy& copy) {
  if (copy.valid)
    memcpy(copy.shared, copy.global, 16);
  else
    memset(copy.shared, 0, 16);
}

void Scheduler::cp_async_issue(void* shared, const void* global, bool valid) {
  if (reinterpret_cast<uintptr_t>(shared) % 16) coc_fail("cp.async: the shared address %p is not 16-byte aligned", shared);
  if (valid && reinterpret_cast<uintptr_t>(global) % 16)
    coc_fail("cp.async: the global address %p is not 16-byte aligned", global);
  Copy copy{shared, global, valid};
  if (options_.early_cp_async) return apply(copy);
  copies_[lane_].copies.push_back(copy);
  copies_pending_ = true;
}

void Scheduler::cp_async_commit() {
  copies_[lane_].group_ends.push_back(copies_[lane_].copies.size());
  copies_pending_ = true;
}

void Scheduler::cp_async_wait(unsigned groups_left) {
  CopyQueue& queue = copies_[lane_];
  if (queue.group_ends.size() <= groups_left) return;
  size_t done = queue.group_ends.size() - groups_left, end = queue.group_ends[done - 1];
  for (size_t i = 0; i < end; i++) apply(queue.copies[i]);
  queue.copies.erase(queue.copies.begin(), queue.copies.begin() + end);
  queue.group_ends.erase(queue.group_ends.begin(), queue.group_ends.begin() + done);
  for (size_t& e : queue.group_ends) e -= end;
}

}  // namespace coc
