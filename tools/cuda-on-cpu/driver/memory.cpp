#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "api.h"
#include "capture.h"

namespace coc {

namespace {

constexpr size_t kAlign = 256, kZone = 256, kPage = 4096;
constexpr unsigned char kZoneByte = 0xA5, kPoison = 0xFF;

struct Allocation {
  size_t bytes;
  void* memory;    // what malloc or mmap gave
  size_t mapped;   // 0: malloc
  size_t padding;  // zone bytes after the allocation
};

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Allocation> live;
  std::deque<Allocation> retired;
  uint64_t used = 0;
};
Memory& memory() {
  static auto* m = new Memory;
  return *m;
}

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

unsigned char* bytes_at(uintptr_t address) { return reinterpret_cast<unsigned char*>(address); }

// The allocation that starts at or before the address; the lock is held.
std::map<uintptr_t, Allocation>::iterator at_or_before(uintptr_t address) {
  auto next = memory().live.upper_bound(address);
  return next == memory().live.begin() ? memory().live.end() : std::prev(next);
}

void check_zones(uintptr_t start, const Allocation& a, const char* after) {
  auto check = [&](uintptr_t zone, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
      if (*bytes_at(zone + i) != kZoneByte) {
        fprintf(stderr, "cuda-on-cpu: %s wrote outside of an allocation of %zu bytes at %#zx: at offset %td\n", after, a.bytes,
                size_t(start), ptrdiff_t(zone + i - start));
        abort();
      }
  };
  check(start - kZone, kZone);
  check(start + a.bytes, a.padding);
}

CUresult allocate(CUdeviceptr* out, size_t bytes) {
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (m.used + bytes > options().memory) return CUDA_ERROR_OUT_OF_MEMORY;
  int guard = options().guard;
  Allocation a{bytes, nullptr, 0, 0};
  uintptr_t start;
  size_t rounded = round_up(bytes, kAlign);
  if (guard >= 2) {
    // Ends (rounded to the alignment) where an unmapped page begins.
    a.mapped = round_up(rounded + kZone, kPage) + kPage;
    a.memory = mmap(nullptr, a.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (a.memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    uintptr_t end = reinterpret_cast<uintptr_t>(a.memory) + a.mapped - kPage;
    mprotect(reinterpret_cast<void*>(end), kPage, PROT_NONE);
    start = end - rounded;
    a.padding = rounded - bytes;
  } else {
    size_t before = guard ? kZone : 0;
    a.padding = guard ? rounded - bytes + kZone : 0;
    if (posix_memalign(&a.memory, kAlign, before + bytes + a.padding)) return CUDA_ERROR_OUT_OF_MEMORY;
    start = reinterpret_cast<uintptr_t>(a.memory) + before;
  }
  if (guard) {
    memset(bytes_at(start - kZone), kZoneByte, kZone);
    memset(bytes_at(start + bytes), kZoneByte, a.padding);
  }
  memset(bytes_at(start), kPoison, bytes);
  m.used += bytes;
  stats().allocations++;
  if (m.used > stats().peak_bytes) stats().peak_bytes = m.used;
  m.live.emplace(start, a);
  *out = start;
  return CUDA_SUCCESS;
}

// Freed memory stays mapped without access for a while, so that use after free shows.
void retire(const Allocation& a) {
  mprotect(a.memory, a.mapped, PROT_NONE);
  auto& retired = memory().retired;
  retired.push_back(a);
  if (retired.size() <= 8192) return;
  munmap(retired.front().memory, retired.front().mapped);
  retired.pop_front();
}

CUresult release(CUdeviceptr address) {
  if (!address) return CUDA_SUCCESS;
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  auto found = m.live.find(address);
  if (found == m.live.end()) return CUDA_ERROR_INVALID_VALUE;
  Allocation a = found->second;
  if (options().guard) {
    check_zones(address, a, "something before this free");
    memset(bytes_at(address), kPoison, a.bytes);
  }
  m.live.erase(found);
  m.used -= a.bytes;
  if (a.mapped)
    retire(a);
  else
    free(a.memory);
  return CUDA_SUCCESS;
}

}  // namespace

bool in_device_memory(const void* address, size_t bytes) {
  if (bytes == 0) return true;
  auto a = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = at_or_before(a);
  return found != memory().live.end() && a - found->first + bytes <= found->second.bytes;
}

bool points_to_device_memory(const void* address) {
  auto a = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = at_or_before(a);
  return found != memory().live.end() && a - found->first <= found->second.bytes;
}

const char* describe_address(const void* address) {
  static char text[160];
  auto a = reinterpret_cast<uintptr_t>(address);
  auto found = at_or_before(a);  // without the lock: only used on the way to abort
  if (found == memory().live.end()) return "";
  snprintf(text, sizeof text, ", %zu bytes after the start of an allocation of %zu bytes", size_t(a - found->first),
           found->second.bytes);
  return text;
}

void check_guards(const char* after) {
  if (!options().guard) return;
  std::lock_guard<std::mutex> lock(memory().mutex);
  for (auto& [start, a] : memory().live) check_zones(start, a, after);
}

void memory_info(uint64_t* free, uint64_t* total) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  *total = options().memory;
  *free = options().memory - memory().used;
}

}  // namespace coc

using namespace coc;

// For the math libraries.
EXPORT bool coc_in_device_memory(const void* address, size_t bytes) { return in_device_memory(address, bytes); }
EXPORT void coc_check_guards(const char* after) { check_guards(after); }

EXPORT CUresult cuMemAlloc(CUdeviceptr* out, size_t bytes) {
  NEED_CONTEXT();
  return allocate(out, bytes);
}

// Of nothing: the drivers of chips with memory pools give null, though their documentation does not promise it.
EXPORT CUresult cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream stream) {
  NEED_CONTEXT();
  *out = 0;
  if (!bytes) return CUDA_SUCCESS;
  CUresult status = allocate(out, bytes);
  if (status == CUDA_SUCCESS && is_captured(stream))
    capture_allocation(stream, *out, bytes, [address = *out] { release(address); });
  return status;
}

EXPORT CUresult cuMemFree(CUdeviceptr address) {
  NEED_CONTEXT();
  return release(address);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  NEED_CONTEXT();
  if (address && is_captured(stream)) return capture_free(stream, address);
  return release(address);
}

// The one pool there is; it keeps nothing, so its threshold changes nothing.
EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  *pool = reinterpret_cast<CUmemoryPool>(&memory());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void* value) {
  if (pool != reinterpret_cast<CUmemoryPool>(&memory()) || !value) return CUDA_ERROR_INVALID_VALUE;
  if (which != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) return CUDA_ERROR_NOT_SUPPORTED;
  trace("memory pool keeps %lu bytes", *static_cast<uint64_t*>(value));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo(size_t* free, size_t* total) {
  NEED_CONTEXT();
  uint64_t f, t;
  memory_info(&f, &t);
  *free = f, *total = t;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  NEED_CONTEXT();
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  return posix_memalign(out, 4096, bytes) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void* address) {
  free(address);
  return CUDA_SUCCESS;
}
