// The driver's calls on graphs.
#include "api.h"
#include "capture.h"

using namespace coc;

struct CUgraph_st {
  std::shared_ptr<Recorded> recorded;
};
struct CUgraphExec_st {
  std::shared_ptr<Recorded> recorded;
  bool frees_at_launch, launched;
};

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode) {
  NEED_CONTEXT();
  // The legacy stream cannot be captured.
  if (reinterpret_cast<uintptr_t>(stream) <= 1) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return begin_capture(stream) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  auto recorded = end_capture(stream);
  if (!recorded) return CUDA_ERROR_ILLEGAL_STATE;
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
