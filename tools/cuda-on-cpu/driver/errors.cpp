// Names and texts of error codes.
#include "api.h"

#define ERRORS(E)                                                                             \
  E(CUDA_SUCCESS, "no error")                                                                 \
  E(CUDA_ERROR_INVALID_VALUE, "invalid argument")                                             \
  E(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                                \
  E(CUDA_ERROR_NOT_INITIALIZED, "initialization error")                                       \
  E(CUDA_ERROR_DEINITIALIZED, "driver shutting down")                                         \
  E(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                               \
  E(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                      \
  E(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")                               \
  E(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                                     \
  E(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device") \
  E(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed")                                   \
  E(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                                     \
  E(CUDA_ERROR_NOT_FOUND, "named symbol not found")                                           \
  E(CUDA_ERROR_NOT_READY, "device not ready")                                                 \
  E(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")                   \
  E(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch")            \
  E(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                                   \
  E(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                                      \
  E(CUDA_ERROR_UNKNOWN, "unknown error")

EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  switch (error) {
#define NAME(code, message) \
  case code: *text = #code; return CUDA_SUCCESS;
    ERRORS(NAME)
    default: *text = nullptr; return CUDA_ERROR_INVALID_VALUE;
  }
}

EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  switch (error) {
#define TEXT(code, message) \
  case code: *text = message; return CUDA_SUCCESS;
    ERRORS(TEXT)
    default: *text = nullptr; return CUDA_ERROR_INVALID_VALUE;
  }
}
