// CUDA graphs: what calls on a stream do between the begin and the end of a capture is kept and done at each launch of the graph.
#pragma once
#include <cuda.h>

#include <functional>

namespace coc {

// If `stream` is being captured, keeps `work` as a node of its graph and returns true; otherwise the caller does it.
bool captured(CUstream stream, CUgraphNodeType type, std::function<void()> work);
// For calls that wait for a stream or copy from or to pageable memory: whether this one is captured, which makes them an error.
bool is_captured(CUstream stream);
// For calls that are an error while any stream is captured: they wait for the whole device, or load code.
bool any_captured();

// Memory of a captured allocation, and its end: `work` says what a launch does. An address that no allocation of the graph has
// given cannot be freed there.
void capture_allocation(CUstream stream, CUdeviceptr address, size_t bytes);
CUresult capture_free(CUstream stream, CUdeviceptr address);

// Takes back memory that a graph has given and freed (memory.cpp).
CUresult release_memory(CUdeviceptr address);

}  // namespace coc
