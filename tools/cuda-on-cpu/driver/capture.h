// CUDA graphs: what calls on a stream do between the begin and the end of a capture is kept and done at each launch of the graph.
#pragma once
#include <cuda.h>

#include <functional>
#include <map>
#include <memory>
#include <vector>

// A node says only what it is: the graph holds what it does.
struct CUgraphNode_st {
  CUgraphNodeType type;
};

namespace coc {

// What a graph and the executable ones made from it share.
struct Recorded {
  struct Work {
    CUgraphNode_st node;
    std::function<void()> run;
  };
  struct Memory {
    size_t bytes;
    bool freed;
    std::function<void()> release;
  };
  std::vector<std::unique_ptr<Work>> nodes;
  // By address: every allocation of a graph has its own, so memory that is used after its end holds NaN.
  std::map<CUdeviceptr, Memory> memory;

  void add(CUgraphNodeType type, std::function<void()> run);
  bool keeps_memory() const;
  ~Recorded();
};

// False if the stream is being captured already.
bool begin_capture(CUstream stream);
// Null if the stream is not being captured.
std::shared_ptr<Recorded> end_capture(CUstream stream);

// If `stream` is being captured, keeps `work` as a node of its graph and returns true; otherwise the caller does it.
bool captured(CUstream stream, CUgraphNodeType type, std::function<void()> work);
// For calls that wait for a stream or copy from or to pageable memory: whether this one is captured, which makes them an error.
bool is_captured(CUstream stream);
// For calls that are an error while any stream is captured: they wait for the whole device, or load code.
bool any_captured();

// An allocation and a free become nodes of the graph. When the graph ends, `release` returns the memory if it was freed there.
// Only an address that the graph has allocated can be freed there.
void capture_allocation(CUstream stream, CUdeviceptr address, size_t bytes, std::function<void()> release);
CUresult capture_free(CUstream stream, CUdeviceptr address);

}  // namespace coc
