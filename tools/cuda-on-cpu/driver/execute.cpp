// Shares the blocks of a launch between OS threads.
#include <signal.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>

#include "memory.h"
#include "scheduler.h"

namespace coc {

namespace {

// Schedulers hold many stacks, so they outlive their OS threads.
struct SchedulerList {
  std::mutex mutex;
  std::vector<Scheduler*> free;
};
SchedulerList& schedulers() {
  static auto* list = new SchedulerList;
  return *list;
}

struct OwnScheduler {
  Scheduler* scheduler;
  OwnScheduler() {
    std::lock_guard<std::mutex> lock(schedulers().mutex);
    if (schedulers().free.empty()) {
      scheduler = new Scheduler;
    } else {
      scheduler = schedulers().free.back();
      schedulers().free.pop_back();
    }
  }
  ~OwnScheduler() {
    scheduler->forget_thread();
    std::lock_guard<std::mutex> lock(schedulers().mutex);
    schedulers().free.push_back(scheduler);
  }
};

Scheduler& own_scheduler() {
  static thread_local OwnScheduler own;
  return *own.scheduler;
}

// ---- a report for accesses to unmapped memory ----

struct sigaction previous_segv;

void on_segv(int signal, siginfo_t* info, void* context) {
  if (current_scheduler && current_scheduler->launch()) {
    current_scheduler->print_position();
    if (in_stack_guard(info->si_addr))
      fprintf(stderr, "the thread's stack overflowed\n");
    else
      fprintf(stderr, "illegal access to address %p%s\n", info->si_addr, describe_address(info->si_addr));
    abort();
  }
  if (previous_segv.sa_flags & SA_SIGINFO) return previous_segv.sa_sigaction(signal, info, context);
  sigaction(SIGSEGV, &previous_segv, nullptr);
}

void watch_segv() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action{};
    action.sa_sigaction = on_segv;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &previous_segv);
  });
  static thread_local bool has_stack = [] {
    stack_t now{};
    sigaltstack(nullptr, &now);
    if (now.ss_flags & SS_DISABLE) {
      stack_t stack{};
      stack.ss_size = 64 * 1024;
      stack.ss_sp = malloc(stack.ss_size);
      sigaltstack(&stack, nullptr);
    }
    return true;
  }();
  (void)has_stack;
}

// ---- helper threads ----

class Helpers {
 public:
  explicit Helpers(unsigned count) {
    for (unsigned i = 0; i < count; i++) std::thread([this] { loop(); }).detach();
    count_ = count;
  }
  // Runs the work on every helper and on the caller.
  void run(const std::function<void()>& work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      running_ = count_;
      round_++;
    }
    wake_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
  }

 private:
  void loop() {
    watch_segv();
    uint64_t seen = 0;
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      auto* work = work_;
      lock.unlock();
      (*work)();
      lock.lock();
      if (--running_ == 0) done_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void()>* work_ = nullptr;
  unsigned count_ = 0, running_ = 0;
  uint64_t round_ = 0;
};

}  // namespace

void execute(const Launch& launch) {
  watch_segv();
  std::atomic<uint64_t> next{0};
  auto work = [&] { own_scheduler().run(launch, next); };
  static auto* pool_mutex = new std::mutex;
  bool worth_sharing = options().threads > 1 && launch.blocks() > 1 && launch.blocks() * launch.threads() >= 4096;
  if (worth_sharing && pool_mutex->try_lock()) {
    std::lock_guard<std::mutex> lock(*pool_mutex, std::adopt_lock);
    static auto* helpers = new Helpers(options().threads - 1);
    helpers->run(work);
  } else {
    work();
  }
}

}  // namespace coc
