// Streams and events. Everything has been done when a call returns, so streams are only names.
#include <time.h>

#include "api.h"
#include "capture.h"

using namespace coc;

struct CUstream_st {
  int unused;
};
struct CUevent_st {
  bool timed;
  bool recorded;
  double milliseconds;
};

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned) {
  NEED_CONTEXT();
  *stream = new CUstream_st{};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
  auto handle = reinterpret_cast<uintptr_t>(stream);
  if (handle <= 2) return CUDA_ERROR_INVALID_HANDLE;  // null, legacy and per-thread streams
  delete stream;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  NEED_CONTEXT();
  if (is_captured(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  stats().synchronizations++;
  trace("stream synchronized");
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamQuery(CUstream) { return CUDA_SUCCESS; }
EXPORT CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuStreamAttachMemAsync(CUstream, CUdeviceptr, size_t, unsigned) { return CUDA_SUCCESS; }

EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument) {
  if (captured(stream, CU_GRAPH_NODE_TYPE_HOST, [=] { function(argument); })) return CUDA_SUCCESS;
  function(argument);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent* event, unsigned flags) {
  NEED_CONTEXT();
  *event = new CUevent_st{!(flags & CU_EVENT_DISABLE_TIMING), false, 0};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event) {
  delete event;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream) {
  NEED_CONTEXT();
  event->recorded = true;
  event->milliseconds = now();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventQuery(CUevent) { return CUDA_SUCCESS; }

EXPORT CUresult cuEventSynchronize(CUevent) {
  stats().synchronizations++;
  trace("event synchronized");
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  if (!start->timed || !end->timed || !start->recorded || !end->recorded) return CUDA_ERROR_INVALID_HANDLE;
  *milliseconds = float(end->milliseconds - start->milliseconds);
  return CUDA_SUCCESS;
}
