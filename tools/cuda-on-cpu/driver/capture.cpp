#include "capture.h"

#include <cstdio>
#include <cstring>
#include <mutex>

#include "api.h"

using namespace coc;

namespace {

struct Captures {
  std::mutex mutex;
  std::map<CUstream, std::shared_ptr<Recorded>> streams;
};
Captures& captures() {
  static auto* c = new Captures;
  return *c;
}

std::shared_ptr<Recorded> of(CUstream stream) {
  std::lock_guard<std::mutex> lock(captures().mutex);
  auto found = captures().streams.find(stream);
  return found == captures().streams.end() ? nullptr : found->second;
}

void poison(CUdeviceptr address, size_t bytes) { memset(reinterpret_cast<void*>(address), 0xFF, bytes); }

}  // namespace

void coc::Recorded::add(CUgraphNodeType type, std::function<void()> run) {
  nodes.push_back(std::make_unique<Work>(Work{{type}, std::move(run)}));
}

bool coc::Recorded::keeps_memory() const {
  for (auto& [address, memory] : memory)
    if (!memory.freed) return true;
  return false;
}

// Memory that was not freed belongs to the program.
coc::Recorded::~Recorded() {
  for (auto& [address, memory] : memory)
    if (memory.freed) memory.release();
}

bool coc::begin_capture(CUstream stream) {
  std::lock_guard<std::mutex> lock(captures().mutex);
  return captures().streams.emplace(stream, std::make_shared<Recorded>()).second;
}

std::shared_ptr<Recorded> coc::end_capture(CUstream stream) {
  std::lock_guard<std::mutex> lock(captures().mutex);
  auto ended = captures().streams.extract(stream);
  return ended.empty() ? nullptr : ended.mapped();
}

bool coc::is_captured(CUstream stream) { return of(stream) != nullptr; }

bool coc::any_captured() {
  std::lock_guard<std::mutex> lock(captures().mutex);
  return !captures().streams.empty();
}

bool coc::captured(CUstream stream, CUgraphNodeType type, std::function<void()> work) {
  auto recorded = of(stream);
  if (!recorded) return false;
  recorded->add(type, std::move(work));
  return true;
}

void coc::capture_allocation(CUstream stream, CUdeviceptr address, size_t bytes, std::function<void()> release) {
  auto recorded = of(stream);
  trace("captured allocation of %zu bytes at %#llx", bytes, address);
  recorded->memory[address] = {bytes, false, std::move(release)};
  recorded->add(CU_GRAPH_NODE_TYPE_MEM_ALLOC, [=] { poison(address, bytes); });
}

CUresult coc::capture_free(CUstream stream, CUdeviceptr address) {
  auto recorded = of(stream);
  auto found = recorded->memory.find(address);
  if (found == recorded->memory.end() || found->second.freed) {
    fprintf(stderr, "cuda-on-cpu: a captured free of memory that the graph has not allocated\n");
    return CUDA_ERROR_INVALID_VALUE;
  }
  trace("captured free at %#llx", address);
  found->second.freed = true;
  size_t bytes = found->second.bytes;
  recorded->add(CU_GRAPH_NODE_TYPE_MEM_FREE, [=] { poison(address, bytes); });
  return CUDA_SUCCESS;
}

// For the math libraries.
EXPORT bool coc_captured(void* stream, std::function<void()> work) {
  return captured(static_cast<CUstream>(stream), CU_GRAPH_NODE_TYPE_KERNEL, std::move(work));
}
