// Waits of parts of a block: calls that the threads of a warpgroup make together, and named barriers.
#include <cstdio>
#include <cstring>

#include "scheduler.h"

namespace coc {

namespace {
const char* name_of(WarpgroupCall call) {
  switch (call) {
    case WarpgroupCall::Fence: return "wgmma.fence";
    case WarpgroupCall::Product: return "wgmma.mma_async";
    case WarpgroupCall::Commit: return "wgmma.commit_group";
    default: return "wgmma.wait_group";
  }
}
}  // namespace

void Scheduler::begin_groups() {
  set_shared_bytes_of_products(launch_->dynamic_shared);
  memset(named_, 0, sizeof named_);
  for (Warpgroup& group : warpgroups_) {
    group.arrived = 0;
    group.products.clear();
  }
}

void Scheduler::end_groups() {
  for (Warpgroup& group : warpgroups_)
    if (group.products.pending()) coc_fail("a warpgroup ended without a wait for its products");
}

void Scheduler::warpgroup(WarpgroupCall call, const WgmmaLane* product, unsigned groups_left) {
  const unsigned number = lane_ / kWarpgroup;
  Warpgroup& group = warpgroups_[number];
  if ((number + 1) * kWarpgroup > threads_) coc_fail("%s: the block has no four warps for this warpgroup", name_of(call));
  if (group.arrived == 0) group.call = call, group.groups_left = groups_left;
  if (group.call != call || group.groups_left != groups_left)
    coc_fail("a thread calls %s while others of its warpgroup wait in %s", name_of(call), name_of(group.call));
  group.lanes[lane_ % kWarpgroup] = product;
  warps_[lane_ / 32].in_warpgroup |= 1u << lane_ % 32;
  if (++group.arrived < kWarpgroup) return suspend();
  switch (call) {
    case WarpgroupCall::Fence: group.products.fence(); break;
    case WarpgroupCall::Product: group.products.start(group.lanes, options_.early_cp_async); break;
    case WarpgroupCall::Commit: group.products.commit(); break;
    case WarpgroupCall::Wait: group.products.wait(groups_left); break;
  }
  group.arrived = 0;
  for (unsigned w = number * 4; w < number * 4 + 4; w++) {
    set_ready(w, warps_[w].in_warpgroup & ~(w == lane_ / 32 ? 1u << lane_ % 32 : 0u));
    warps_[w].in_warpgroup = 0;
  }
}

void Scheduler::named_barrier(unsigned barrier, unsigned threads, bool waits) {
  if (barrier >= kNamedBarriers) coc_fail("named barrier %u: a block has %u", barrier, kNamedBarriers);
  if (threads == 0 || threads % 32 || threads > threads_)
    coc_fail("named barrier %u for %u threads in a block of %u", barrier, threads, threads_);
  NamedBarrier& named = named_[barrier];
  if (named.arrived == 0) named.expected = threads;
  if (named.expected != threads)
    coc_fail("named barrier %u for %u threads, at which others have arrived for %u", barrier, threads, named.expected);
  const unsigned warp = lane_ / 32, bit = 1u << lane_ % 32;
  named.arrived++;
  if (waits) named.waiting[warp] |= bit;
  if (named.arrived < named.expected) {
    if (waits) suspend();
    return;
  }
  named.arrived = 0;
  for (unsigned w = 0; w * 32 < threads_; w++) {
    set_ready(w, named.waiting[w] & ~(waits && w == warp ? bit : 0u));
    named.waiting[w] = 0;
  }
}

void Scheduler::report_groups() const {
  for (unsigned i = 0; i < kNamedBarriers; i++)
    if (named_[i].arrived)
      fprintf(stderr, "  %u of %u threads have come to named barrier %u\n", named_[i].arrived, named_[i].expected, i);
  for (unsigned i = 0; i * kWarpgroup < threads_; i++)
    if (warpgroups_[i].arrived)
      fprintf(stderr, "  %u threads of warpgroup %u wait in %s\n", warpgroups_[i].arrived, i, name_of(warpgroups_[i].call));
}

}  // namespace coc

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void coc_warpgroup(coc::WarpgroupCall call, const coc::WgmmaLane* product, unsigned groups_left) {
  coc::current_scheduler->warpgroup(call, product, groups_left);
}
EXPORT void coc_named_barrier(unsigned barrier, unsigned threads, bool waits) {
  coc::current_scheduler->named_barrier(barrier, threads, waits);
}
