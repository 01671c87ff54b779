// Captured streams: nothing is done before the graph is launched, and then everything, as often as it is launched.
#include "harness.h"

namespace {

struct Stream {
  CUstream handle;
  Stream() { OK(cuStreamCreate(&handle, CU_STREAM_NON_BLOCKING)); }
  ~Stream() { cuStreamDestroy(handle); }
};

struct Graph {
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  // What `calls` asks of the stream.
  Graph(CUstream stream, const std::function<void()>& calls, unsigned flags = 0) {
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CUstreamCaptureStatus status;
    OK(cuStreamIsCapturing(stream, &status));
    CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
    calls();
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&exec, graph, flags));
  }
  ~Graph() {
    cuGraphExecDestroy(exec);
    cuGraphDestroy(graph);
  }
  std::vector<CUgraphNodeType> types() const {
    size_t count = 0;
    OK(cuGraphGetNodes(graph, nullptr, &count));
    std::vector<CUgraphNode> nodes(count);
    OK(cuGraphGetNodes(graph, nodes.data(), &count));
    std::vector<CUgraphNodeType> types(count);
    for (size_t i = 0; i < count; i++) OK(cuGraphNodeGetType(nodes[i], &types[i]));
    return types;
  }
};

}  // namespace

TEST(captured_calls_run_with_the_graph) {
  const unsigned n = 64;
  Stream stream;
  Device<float> x(random_floats(n)), y(std::vector<float>(n, 7.0f));
  CUfunction reverse = function("t_reverse_f32");
  CUdeviceptr from = x.address(), to = 0;
  Graph graph(stream.handle, [&] {
    OK(cuMemAllocAsync(&to, n * 4, stream.handle));
    void* arguments[] = {&from, &to};
    OK(cuLaunchKernel(reverse, 1, 1, 1, n, 1, 1, n * 4, stream.handle, arguments, nullptr));
    OK(cuMemcpyDtoDAsync(y.address(), to, n * 2, stream.handle));
    OK(cuMemsetD32Async(y.address() + n * 2, 0, n / 2, stream.handle));
    OK(cuMemFreeAsync(to, stream.handle));
  });
  // The values of arguments are those of the capture.
  from = to = 0;
  CHECK(y.get()[0] == 7.0f);
  auto types = graph.types();
  CHECK(types.size() == 5 && types[0] == CU_GRAPH_NODE_TYPE_MEM_ALLOC && types[1] == CU_GRAPH_NODE_TYPE_KERNEL &&
        types[2] == CU_GRAPH_NODE_TYPE_MEMCPY && types[3] == CU_GRAPH_NODE_TYPE_MEMSET && types[4] == CU_GRAPH_NODE_TYPE_MEM_FREE);
  for (int run = 0; run < 2; run++) {
    auto in = random_floats(n, run + 2);
    OK(cuMemcpyHtoD(x.address(), in.data(), n * 4));
    OK(cuGraphLaunch(graph.exec, stream.handle));
    auto out = y.get();
    for (unsigned i = 0; i < n; i++) CHECK(out[i] == (i < n / 2 ? in[n - 1 - i] : 0.0f));
  }
}

TEST(what_a_capture_refuses) {
  Stream stream;
  Device<float> x(4);
  float here = 0;
  Graph graph(stream.handle, [&] {
    CHECK(cuMemcpyHtoDAsync(x.address(), &here, 4, stream.handle) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(cuMemcpyDtoHAsync(&here, x.address(), 4, stream.handle) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(cuStreamSynchronize(stream.handle) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(cuCtxSynchronize() == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(cuMemFreeAsync(x.address(), stream.handle) == CUDA_ERROR_INVALID_VALUE);
  });
  CHECK(graph.types().empty());
  CHECK(cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CUgraph none;
  CHECK(cuStreamEndCapture(stream.handle, &none) == CUDA_ERROR_ILLEGAL_STATE);
}

TEST(a_graph_that_keeps_memory_runs_once) {
  Stream stream;
  for (unsigned flags : {0u, unsigned(CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)}) {
    CUdeviceptr kept = 0;
    Graph graph(stream.handle, [&] { OK(cuMemAllocAsync(&kept, 4, stream.handle)); }, flags);
    OK(cuGraphLaunch(graph.exec, stream.handle));
    CHECK(cuGraphLaunch(graph.exec, stream.handle) == (flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE));
    OK(cuMemFreeAsync(kept, stream.handle));
  }
}
