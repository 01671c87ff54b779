// What a kernel object uses of libcuda.so.1: the state of the running CUDA thread, barriers,
// warp collectives, and the table through which the driver finds its kernels.
#pragma once
#include <cstddef>
#include <cstdint>

namespace coc {

struct Index3 {
  unsigned x, y, z;
};

// Of the CUDA thread that runs on this OS thread; the scheduler replaces it at every switch.
struct LaneState {
  Index3 thread_idx, block_idx, block_dim, grid_dim;
  unsigned lane;  // within the warp
  unsigned char* dynamic_shared;
};

// Computes the results of all lanes of `mask` at once: `lanes[i]` is what lane i passed.
using WarpOp = void (*)(void* const* lanes, unsigned mask);

enum class Barrier : unsigned { Sync, Or, And, Count };

struct Argument {
  unsigned size;
  bool is_pointer;
};

struct Kernel {
  const char* name;
  void (*call)(void** arguments);
  unsigned count;
  const Argument* arguments;
};

// Exported by every kernel object as `coc_kernels`.
struct KernelTable {
  const Kernel* kernels;
  size_t count;
  void (*touch_shared)();  // makes the thread's static shared memory exist
};

// What a lane passes to the products and matrix loads below.
struct MmaLane {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};
struct LdmatrixLane {
  uint32_t* registers;
  const void* row;
  unsigned matrices;
};


// What a thread of a warpgroup passes to a product [64, 16] x [16, n]: the left operand in registers, or where `a` is null in
// shared memory as the right one is.
struct WgmmaLane {
  float* d;
  const uint32_t* a;
  uint64_t a_descriptor, b_descriptor;
  unsigned n;
  bool add, a_transposed, b_transposed;
};
enum class WarpgroupCall { Fence, Product, Commit, Wait };

// Where dynamic shared memory begins in the shared window: behind what the system reserves.
constexpr uint32_t kSharedStart = 1024;

}  // namespace coc

extern "C" {
extern __thread coc::LaneState coc_lane __attribute__((tls_model("initial-exec")));

// Waits for all threads of the block; returns the reduction of `predicate` over them.
int coc_block_barrier(coc::Barrier kind, int predicate);
// Waits for all lanes of `mask`; the last to arrive runs `op`.
void coc_warp_collective(unsigned mask, coc::WarpOp op, void* payload, const char* what);
unsigned coc_active_mask();
void coc_yield();
[[noreturn]] void coc_fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

void coc_cp_async_issue(void* shared, const void* global, bool valid);
void coc_cp_async_commit();
void coc_cp_async_wait(unsigned groups_left);

// All threads of a warpgroup make the same calls. `product` for a product, `groups_left` for a wait.
void coc_warpgroup(coc::WarpgroupCall call, const coc::WgmmaLane* product, unsigned groups_left);
// Arrives at a named barrier of `threads` threads, and waits for them if it `waits`.
void coc_named_barrier(unsigned barrier, unsigned threads, bool waits);

void coc_mma_bf16(void* const* lanes, unsigned mask);
void coc_mma_f16(void* const* lanes, unsigned mask);
void coc_mma_tf32(void* const* lanes, unsigned mask);
void coc_ldmatrix(void* const* lanes, unsigned mask);
void coc_ldmatrix_trans(void* const* lanes, unsigned mask);
}
