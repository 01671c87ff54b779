// Stacks and the switch between them (x86-64 System V).
#pragma once
#include <vector>

// Saves the callee-saved registers and the stack pointer in *save, then continues at `to`.
extern "C" void coc_switch(void** save, void* to);

namespace coc {

struct Stack {
  char* base;   // lowest usable address, above a guard page
  void* start;  // what coc_switch takes to call the entry function on a fresh stack
};

class StackPool {
 public:
  explicit StackPool(void (*entry)()) : entry_(entry) {}
  // Ready to call the entry function, which must never return.
  Stack* take();
  void give(Stack* stack) { free_.push_back(stack); }

 private:
  void (*entry_)();
  std::vector<Stack*> free_;
};

// Whether the address lies in a guard page below a fiber's stack.
bool in_stack_guard(const void* address);

}  // namespace coc
