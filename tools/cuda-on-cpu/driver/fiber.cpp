#include "fiber.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

asm(R"(
.text
.globl coc_switch
.hidden coc_switch
.type coc_switch,@function
coc_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size coc_switch, .-coc_switch
)");

namespace coc {

static constexpr size_t kPage = 4096, kStack = 128 * 1024, kSlab = 64;

// Mapped slabs of stacks, for the report of an overflow.
static std::atomic<uintptr_t> slabs[1024];
static std::atomic<unsigned> slab_count;

static char* map_slab() {
  size_t bytes = kSlab * (kStack + kPage);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    perror("cuda-on-cpu: stacks");
    abort();
  }
  for (size_t i = 0; i < kSlab; i++) mprotect(static_cast<char*>(memory) + i * (kStack + kPage), kPage, PROT_NONE);
  unsigned index = slab_count++;
  if (index < 1024) slabs[index] = reinterpret_cast<uintptr_t>(memory);
  return static_cast<char*>(memory);
}

bool in_stack_guard(const void* address) {
  auto a = reinterpret_cast<uintptr_t>(address);
  for (unsigned i = 0; i < slab_count && i < 1024; i++) {
    uintptr_t base = slabs[i];
    if (a >= base && a < base + kSlab * (kStack + kPage)) return (a - base) % (kStack + kPage) < kPage;
  }
  return false;
}

Stack* StackPool::take() {
  if (free_.empty()) {
    char* memory = map_slab();
    for (size_t i = kSlab; i-- > 0;) free_.push_back(new Stack{memory + i * (kStack + kPage) + kPage, nullptr});
  }
  Stack* stack = free_.back();
  free_.pop_back();
  // The tops are staggered by cache lines, or all of them would share a few cache sets.
  uintptr_t slot = reinterpret_cast<uintptr_t>(stack->base) / (kStack + kPage);
  char* top = stack->base + kStack - (slot % 48) * 64;
  auto** frame = reinterpret_cast<void**>(top) - 8;
  for (int i = 0; i < 6; i++) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(entry_);
  frame[7] = nullptr;  // where a return address would be: keeps the entry's stack aligned
  stack->start = frame;
  return stack;
}

}  // namespace coc
