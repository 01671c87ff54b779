// Copies and fills.
#include <cstring>

#include "api.h"
#include "capture.h"
#include "memory.h"

using namespace coc;

static void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

static bool valid(const char* what, CUdeviceptr address, size_t bytes) {
  if (in_device_memory(pointer(address), bytes)) return true;
  fprintf(stderr, "cuda-on-cpu: %s: %zu bytes at %#llx are not in one allocation\n", what, bytes, address);
  return false;
}

// Of the host's memory, which a launch of the graph would read or write when it is long gone.
static CUresult refuse_capture() {
  fprintf(stderr, "cuda-on-cpu: a captured copy from or to pageable memory\n");
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

static CUresult to_device(CUdeviceptr to, const void* from, size_t bytes, CUstream stream = nullptr) {
  NEED_CONTEXT();
  if (is_captured(stream)) return refuse_capture();
  if (!valid("copy to the device", to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  stats().to_device++;
  trace("copy to the device: %zu bytes", bytes);
  memcpy(pointer(to), from, bytes);
  return CUDA_SUCCESS;
}

static CUresult to_host(void* to, CUdeviceptr from, size_t bytes, CUstream stream = nullptr) {
  NEED_CONTEXT();
  if (is_captured(stream)) return refuse_capture();
  if (!valid("copy to the host", from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  stats().to_host++;
  trace("copy to the host: %zu bytes", bytes);
  memcpy(to, pointer(from), bytes);
  return CUDA_SUCCESS;
}

static CUresult on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream = nullptr) {
  NEED_CONTEXT();
  if (!valid("copy on the device, target", to, bytes) || !valid("copy on the device, source", from, bytes))
    return CUDA_ERROR_INVALID_VALUE;
  stats().on_device++;
  trace("copy on the device: %zu bytes", bytes);
  auto work = [=] { memmove(pointer(to), pointer(from), bytes); };
  if (!captured(stream, CU_GRAPH_NODE_TYPE_MEMCPY, work)) work();
  return CUDA_SUCCESS;
}

template <class T> static CUresult fill(CUdeviceptr to, T value, size_t count, CUstream stream = nullptr) {
  NEED_CONTEXT();
  if (!valid("fill", to, count * sizeof(T))) return CUDA_ERROR_INVALID_VALUE;
  if (to % sizeof(T)) return CUDA_ERROR_INVALID_VALUE;
  stats().sets++;
  trace("fill: %zu bytes", count * sizeof(T));
  auto work = [=] {
    for (size_t i = 0; i < count; i++) static_cast<T*>(pointer(to))[i] = value;
  };
  if (!captured(stream, CU_GRAPH_NODE_TYPE_MEMSET, work)) work();
  return CUDA_SUCCESS;
}

// cuda.h renames the old entry points to these versions.
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t n) { return to_device(to, from, n); }
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t n, CUstream s) { return to_device(to, from, n, s); }
EXPORT CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t n) { return to_host(to, from, n); }
EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t n, CUstream s) { return to_host(to, from, n, s); }
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) { return on_device(to, from, n); }
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) { return on_device(to, from, n, s); }
EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t n, CUstream) {
  return on_device(to, from, n);
}
EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char v, size_t n) { return fill(to, v, n); }
EXPORT CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short v, size_t n) { return fill(to, v, n); }
EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned v, size_t n) { return fill(to, v, n); }
EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char v, size_t n, CUstream s) { return fill(to, v, n, s); }
EXPORT CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short v, size_t n, CUstream s) { return fill(to, v, n, s); }
EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned v, size_t n, CUstream s) { return fill(to, v, n, s); }
