#include "scheduler.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "shared_memory.h"

__thread coc::LaneState coc_lane __attribute__((tls_model("initial-exec"), visibility("default")));

namespace coc {

__thread Scheduler* current_scheduler;

static constexpr unsigned kGuard = 1024;

Scheduler::Scheduler() : stacks_(fiber_entry), copies_(new CopyQueue[kMaxThreads]) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 1024, kMaxDynamicShared + kGuard)) abort();
  dynamic_shared_ = static_cast<unsigned char*>(memory);
}

const Scheduler::StaticShared& Scheduler::static_shared(const KernelObject* object) {
  for (auto& s : static_shared_)
    if (s.object == object) return s;
  auto memory = thread_local_segment(object->table);
  static_shared_.push_back({object, memory.start, memory.bytes});
  return static_shared_.back();
}

void Scheduler::run(const Launch& launch, std::atomic<uint64_t>& next) {
  launch_ = &launch;
  current_scheduler = this;
  threads_ = launch.threads();
  random_ = options_.seed * 0x9E3779B97F4A7C15ull + 1;
  if (memcmp(&thread_idx_shape_, &launch.block, sizeof launch.block) != 0) {
    thread_idx_shape_ = launch.block;
    unsigned i = 0;
    for (unsigned z = 0; z < launch.block.z; z++)
      for (unsigned y = 0; y < launch.block.y; y++)
        for (unsigned x = 0; x < launch.block.x; x++) thread_idx_[i++] = {x, y, z};
  }
  coc_lane.block_dim = launch.block;
  coc_lane.grid_dim = launch.grid;
  coc_lane.dynamic_shared = dynamic_shared_;
  uint64_t blocks = launch.blocks();
  bool first = true;
  for (uint64_t index; (index = next++) < blocks;) {
    const auto& fixed = static_shared(launch.object);
    if (fixed.bytes && (first || fixed.bytes <= 64 * 1024)) memset(fixed.memory, 0xFF, fixed.bytes);
    first = false;
    run_block(options_.order == Order::Reverse ? blocks - 1 - index : index);
  }
  current_scheduler = nullptr;
  launch_ = nullptr;
}

void Scheduler::run_block(uint64_t index) {
  const Index3& grid = launch_->grid;
  block_index_ = {unsigned(index % grid.x), unsigned(index / grid.x % grid.y), unsigned(index / grid.x / grid.y)};
  coc_lane.block_idx = block_index_;
  memset(dynamic_shared_, 0xFF, launch_->dynamic_shared);
  memset(dynamic_shared_ + launch_->dynamic_shared, 0xA5, kGuard);
  alive_ = threads_;
  waiting_ = barrier_true_ = 0;
  ready_warps_ = 0;
  lane_ = options_.order == Order::Reverse ? threads_ - 1 : 0;
  for (unsigned w = 0; w * 32 < threads_; w++) {
    unsigned count = threads_ - w * 32;
    Warp& warp = warps_[w];
    warp.alive = warp.ready = warp.unstarted = count >= 32 ? ~0u : (1u << count) - 1;
    warp.in_barrier = warp.in_collective = warp.in_warpgroup = 0;
    ready_warps_ |= 1u << w;
  }
  begin_groups();
  current_stack_ = stacks_.take();
  coc_switch(&main_stack_, current_stack_->start);
  stacks_.give(current_stack_);
  end_groups();
  for (unsigned i = 0; i < kGuard; i++)
    if (dynamic_shared_[launch_->dynamic_shared + i] != 0xA5)
      coc_fail("wrote past the end of dynamic shared memory (%u bytes), at byte %u", launch_->dynamic_shared,
               launch_->dynamic_shared + i);
  if (copies_pending_) {
    for (unsigned i = 0; i < threads_; i++) {
      copies_[i].copies.clear();
      copies_[i].group_ends.clear();
    }
    copies_pending_ = false;
  }
}

void Scheduler::fiber_entry() { current_scheduler->fiber_main(); }

void Scheduler::fiber_main() {
  for (;;) {
    if (!pick()) {
      if (alive_) report_deadlock();
      void* unused;
      coc_switch(&unused, main_stack_);
    }
    Warp& warp = warps_[lane_ / 32];
    unsigned bit = 1u << lane_ % 32;
    resume_state();
    if (warp.unstarted & bit) {
      warp.unstarted &= ~bit;
      launch_->kernel->call(launch_->arguments);
      finish_thread();
    } else {
      // This stack is free from here on: nothing is taken from the pool before the switch.
      stacks_.give(current_stack_);
      current_stack_ = stack_of_[lane_];
      void* unused;
      coc_switch(&unused, saved_[lane_]);
    }
  }
}

void Scheduler::finish_thread() {
  warps_[lane_ / 32].alive &= ~(1u << lane_ % 32);
  alive_--;
  if (options_.lenient && waiting_ && waiting_ == alive_) release_barrier();
}

bool Scheduler::pick() {
  if (!ready_warps_) return false;
  unsigned w = lane_ / 32, bit;
  switch (options_.order) {
    case Order::Forward:
      if (!(ready_warps_ >> w & 1)) w = __builtin_ctz(ready_warps_);
      bit = __builtin_ctz(warps_[w].ready);
      break;
    case Order::Reverse:
      if (!(ready_warps_ >> w & 1)) w = 31 - __builtin_clz(ready_warps_);
      bit = 31 - __builtin_clz(warps_[w].ready);
      break;
    default: {
      auto choose = [&](unsigned set) {
        random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
        unsigned skip = unsigned(random_ >> 33) % __builtin_popcount(set);
        while (skip--) set &= set - 1;
        return unsigned(__builtin_ctz(set));
      };
      w = choose(ready_warps_);
      bit = choose(warps_[w].ready);
    }
  }
  warps_[w].ready &= ~(1u << bit);
  if (!warps_[w].ready) ready_warps_ &= ~(1u << w);
  lane_ = w * 32 + bit;
  return true;
}

void Scheduler::set_ready(unsigned warp, unsigned lanes) {
  if (!lanes) return;
  warps_[warp].ready |= lanes;
  ready_warps_ |= 1u << warp;
}

void Scheduler::resume_state() {
  coc_lane.thread_idx = thread_idx_[lane_];
  coc_lane.lane = lane_ % 32;
}

void Scheduler::suspend() {
  unsigned self = lane_;
  stack_of_[self] = current_stack_;
  if (!pick()) report_deadlock();
  if (lane_ == self) return resume_state();
  unsigned bit = 1u << lane_ % 32;
  if (warps_[lane_ / 32].unstarted & bit) {
    set_ready(lane_ / 32, bit);  // for fiber_main to pick
    current_stack_ = stacks_.take();
    coc_switch(&saved_[self], current_stack_->start);
  } else {
    resume_state();
    current_stack_ = stack_of_[lane_];
    coc_switch(&saved_[self], saved_[lane_]);
  }
}

void Scheduler::yield() {
  set_ready(lane_ / 32, 1u << lane_ % 32);
  suspend();
}

void Scheduler::release_barrier() {
  switch (barrier_kind_) {
    case Barrier::Sync: break;
    case Barrier::Or: barrier_result_ = barrier_true_ != 0; break;
    case Barrier::And: barrier_result_ = barrier_true_ == waiting_; break;
    case Barrier::Count: barrier_result_ = barrier_true_; break;
  }
  waiting_ = barrier_true_ = 0;
  for (unsigned w = 0; w * 32 < threads_; w++) {
    set_ready(w, warps_[w].in_barrier);
    warps_[w].in_barrier = 0;
  }
}

int Scheduler::block_barrier(Barrier kind, int predicate) {
  if (waiting_ == 0) barrier_kind_ = kind;
  if (kind != barrier_kind_) coc_fail("threads of the block wait in different kinds of __syncthreads");
  waiting_++;
  barrier_true_ += predicate != 0;
  warps_[lane_ / 32].in_barrier |= 1u << lane_ % 32;
  if (waiting_ == barrier_quorum()) release_barrier();
  suspend();
  return barrier_result_;
}

void Scheduler::warp_collective(unsigned mask, WarpOp op, void* payload, const char* what) {
  Warp& warp = warps_[lane_ / 32];
  unsigned lane = lane_ % 32, bit = 1u << lane;
  if (options_.lenient) mask &= warp.alive;
  if (!(mask & bit)) coc_fail("%s: the mask 0x%08x does not name the calling lane %u", what, mask, lane);
  if (mask & ~warp.alive)
    coc_fail("%s: the mask 0x%08x names lanes that have exited or do not exist (alive: 0x%08x)", what, mask, warp.alive);
  warp.payload[lane] = payload;
  warp.op[lane] = op;
  warp.mask[lane] = mask;
  warp.what[lane] = what;
  warp.in_collective |= bit;
  if ((warp.in_collective & mask) == mask) {
    for (unsigned rest = mask; rest; rest &= rest - 1) {
      unsigned other = __builtin_ctz(rest);
      if (warp.op[other] != op || warp.mask[other] != mask)
        coc_fail("lane %u calls %s with mask 0x%08x while lane %u of that mask waits in %s with mask 0x%08x", lane, what, mask,
                 other, warp.what[other], warp.mask[other]);
    }
    op(warp.payload, mask);
    warp.in_collective &= ~mask;
    set_ready(lane_ / 32, mask & ~bit);
    return;
  }
  suspend();
}

}  // namespace coc

// ---- what kernels call ----

using coc::current_scheduler;
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int coc_block_barrier(coc::Barrier kind, int predicate) { return current_scheduler->block_barrier(kind, predicate); }
EXPORT void coc_warp_collective(unsigned mask, coc::WarpOp op, void* payload, const char* what) {
  current_scheduler->warp_collective(mask, op, payload, what);
}
EXPORT unsigned coc_active_mask() { return current_scheduler->active_mask(); }
EXPORT void coc_yield() { current_scheduler->yield(); }
EXPORT void coc_cp_async_issue(void* shared, const void* global, bool valid) {
  current_scheduler->cp_async_issue(shared, global, valid);
}
EXPORT void coc_cp_async_commit() { current_scheduler->cp_async_commit(); }
EXPORT void coc_cp_async_wait(unsigned groups_left) { current_scheduler->cp_async_wait(groups_left); }
