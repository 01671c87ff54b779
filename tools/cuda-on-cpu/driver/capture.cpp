#include "capture.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "api.h"

using namespace coc;

// A node says only what it is: the graph holds what it does.
struct CUgraphNode_st {
  CUgraphNodeType type;
};

namespace {

struct Work {
  CUgraphNode_st node;
  std::function<void()> run;
};

// What a graph and the executable ones made from it share.
struct Recorded {
  std::vector<std::unique_ptr<Work>> nodes;
  struct Memory {
    size_t bytes;
    bool freed;
  };
  // By address: every allocation of a graph has its own, so memory that is used after its end holds NaN.
  std::map<CUdeviceptr, Memory> memory;

  void add(CUgraphNodeType type, std::function<void()> run) {
    nodes.push_back(std::make_unique<Work>(Work{{type}, std::move(run)}));
  }
  bool keeps_memory() const {
    for (auto& [address, memory] : memory)
      if (!memory.freed) return true;
    return false;
  }
  // Memory that was not freed belongs to the program.
  ~Recorded() {
    for (auto& [address, memory] : memory)
      if (memory.freed) release_memory(address);
  }
};

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

struct CUgraph_st {
  std::shared_ptr<Recorded> recorded;
};
struct CUgraphExec_st {
  std::shared_ptr<Recorded> recorded;
  bool frees_at_launch, launched;
};

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

void coc::capture_allocation(CUstream stream, CUdeviceptr address, size_t bytes) {
  auto recorded = of(stream);
  trace("captured allocation of %zu bytes at %#llx", bytes, address);
  recorded->memory[address] = {bytes, false};
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

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode) {
  NEED_CONTEXT();
  // The legacy stream cannot be captured.
  if (reinterpret_cast<uintptr_t>(stream) <= 1) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  std::lock_guard<std::mutex> lock(captures().mutex);
  bool begun = captures().streams.emplace(stream, std::make_shared<Recorded>()).second;
  return begun ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  auto recorded = of(stream);
  if (!recorded) return CUDA_ERROR_ILLEGAL_STATE;
  std::lock_guard<std::mutex> lock(captures().mutex);
  captures().streams.erase(stream);
  *graph = new CUgraph_st{recorded};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = is_captured(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  auto& all = graph->recorded->nodes;
  if (nodes)
    for (size_t i = 0; i < *count && i < all.size(); i++) nodes[i] = &all[i]->node;
  *count = all.size();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  *type = node->type;
  return CUDA_SUCCESS;
}

// Copies from and to the host are refused when they are captured.
EXPORT CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D* copy) {
  if (node->type != CU_GRAPH_NODE_TYPE_MEMCPY) return CUDA_ERROR_INVALID_VALUE;
  copy->srcMemoryType = copy->dstMemoryType = CU_MEMORYTYPE_DEVICE;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  *exec = new CUgraphExec_st{graph->recorded, (flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) != 0, false};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphUpload(CUgraphExec, CUstream) { return CUDA_SUCCESS; }

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream) {
  NEED_CONTEXT();
  if (exec->launched && exec->recorded->keeps_memory() && !exec->frees_at_launch) return CUDA_ERROR_INVALID_VALUE;
  exec->launched = true;
  trace("graph of %zu nodes", exec->recorded->nodes.size());
  stats().graphs++;
  for (auto& node : exec->recorded->nodes) node->run();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
  delete exec;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
  delete graph;
  return CUDA_SUCCESS;
}
