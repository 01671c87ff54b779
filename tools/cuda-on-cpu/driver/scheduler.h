// Runs the CUDA threads of a block as fibers of one OS thread.
//
// A fiber starts threads one after another on its stack for as long as they run to their end. A thread
// that waits keeps the stack; the next one starts on another. So kernels without barriers cost a call per thread.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "fiber.h"
#include "launch.h"
#include "options.h"
#include "warpgroup.h"

namespace coc {

class Scheduler {
 public:
  Scheduler();
  // Takes block numbers from `next` until all are done.
  void run(const Launch& launch, std::atomic<uint64_t>& next);

  int block_barrier(Barrier kind, int predicate);
  void warp_collective(unsigned mask, WarpOp op, void* payload, const char* what);
  void warpgroup(WarpgroupCall call, const WgmmaLane* product, unsigned groups_left);
  void named_barrier(unsigned barrier, unsigned threads, bool waits);
  unsigned active_mask() const { return warps_[lane_ / 32].alive; }
  void yield();

  void cp_async_issue(void* shared, const void* global, bool valid);
  void cp_async_commit();
  void cp_async_wait(unsigned groups_left);

  const Launch* launch() const { return launch_; }
  // Before it moves to another OS thread.
  void forget_thread() { static_shared_.clear(); }
  // Prints where the running thread is: kernel, block, thread.
  void print_position() const;

 private:
  struct Warp {
    unsigned alive, ready, unstarted;
    unsigned in_barrier, in_collective, in_warpgroup;
    void* payload[32];
    WarpOp op[32];
    unsigned mask[32];
    const char* what[32];
  };
  // The call that its threads are making, and those of them that have come.
  struct Warpgroup {
    unsigned arrived;
    WarpgroupCall call;
    unsigned groups_left;
    const WgmmaLane* lanes[kWarpgroup];
    WarpgroupProducts products;
  };
  struct NamedBarrier {
    unsigned expected, arrived;
    unsigned waiting[kMaxThreads / 32];
  };
  static constexpr unsigned kNamedBarriers = 16;
  struct Copy {
    void* shared;
    const void* global;
    bool valid;
  };
  struct CopyQueue {
    std::vector<Copy> copies;
    std::vector<size_t> group_ends;
  };

  static void fiber_entry();
  [[noreturn]] void fiber_main();
  void run_block(uint64_t index);
  bool pick();          // sets lane_ to a ready thread
  void suspend();       // leaves the running thread, which must have been put somewhere
  void resume_state();  // points coc_lane at lane_
  void finish_thread();
  void release_barrier();
  unsigned barrier_quorum() const { return options_.lenient ? alive_ : threads_; }
  void set_ready(unsigned warp, unsigned lanes);
  void apply(const Copy& copy);
  void begin_groups();
  void end_groups();
  void report_groups() const;
  [[noreturn]] void report_deadlock();

  const Options& options_ = options();
  StackPool stacks_;
  void* main_stack_ = nullptr;
  Stack* current_stack_ = nullptr;
  const Launch* launch_ = nullptr;
  Index3 block_index_{};

  unsigned threads_ = 0, alive_ = 0, lane_ = 0, ready_warps_ = 0;
  unsigned waiting_ = 0;  // threads in the block barrier
  Barrier barrier_kind_ = Barrier::Sync;
  unsigned barrier_true_ = 0;
  int barrier_result_ = 0;
  uint64_t random_ = 0;
  bool copies_pending_ = false;

  Warp warps_[kMaxThreads / 32];
  Warpgroup warpgroups_[kMaxThreads / kWarpgroup];
  NamedBarrier named_[kNamedBarriers];
  void* saved_[kMaxThreads];
  Stack* stack_of_[kMaxThreads];
  Index3 thread_idx_[kMaxThreads];
  Index3 thread_idx_shape_{};
  std::unique_ptr<CopyQueue[]> copies_;

  unsigned char* dynamic_shared_;
  // The static shared memory of each object on this OS thread.
  struct StaticShared {
    const KernelObject* object;
    void* memory;
    size_t bytes;
  };
  std::vector<StaticShared> static_shared_;
  const StaticShared& static_shared(const KernelObject* object);
};

// The scheduler whose fibers run on this OS thread; null outside a launch.
extern __thread Scheduler* current_scheduler __attribute__((tls_model("initial-exec")));

}  // namespace coc
