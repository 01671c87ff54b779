// Handles, descriptors, layouts and preferences of cuBLASLt.
#include "lt.h"

using namespace blas;

namespace {

size_t desc_size(int attribute) {
  switch (attribute) {
    case kDescComputeType:
    case kDescScaleType:
    case kDescPointerMode:
    case kDescTransA:
    case kDescTransB:
    case kDescTransC:
    case kDescFillMode:
    case kDescEpilogue:
    case kDescSmCount:
    case kDescAuxDataType:
    case kDescBiasDataType:
    case kDescAScaleMode:
    case kDescBScaleMode:
    case kDescCScaleMode:
    case kDescDScaleMode:
    case kDescAuxScaleMode:
    case kDescDOutScaleMode: return 4;
    case kDescBiasPointer:
    case kDescBiasBatchStride:
    case kDescAuxPointer:
    case kDescAuxLd:
    case kDescAuxBatchStride:
    case kDescAlphaBatchStride:
    case kDescAScale:
    case kDescBScale:
    case kDescCScale:
    case kDescDScale:
    case kDescAmaxD:
    case kDescAuxScale:
    case kDescAuxAmax:
    case kDescDOutScale:
    case kDescEmulation: return 8;
    case kDescFastAccum: return 1;
    default: return 0;
  }
}

size_t layout_size(int attribute) {
  switch (attribute) {
    case kLayoutType:
    case kLayoutOrder:
    case kLayoutBatchCount:
    case kLayoutBatchMode: return 4;
    case kLayoutRows:
    case kLayoutCols:
    case kLayoutLd:
    case kLayoutBatchStride:
    case kLayoutPlane: return 8;
    default: return 0;
  }
}

size_t preference_size(int attribute) {
  switch (attribute) {
    case kPrefMaxWorkspace: return 8;
    case kPrefImpl: return 8;
    case kPrefSearchMode:
    case kPrefReduction:
    case kPrefAlignA:
    case kPrefAlignB:
    case kPrefAlignC:
    case kPrefAlignD:
    case kPrefMaxWaves: return 4;
    default: return 0;
  }
}

template <class Object>
Status set(void* object, int attribute, const void* value, size_t bytes, size_t (*size)(int), const char* call) {
  if (!object || !value) return kInvalidValue;
  if (!size(attribute)) return refuse(kInvalidValue, call, "there is no attribute %d", attribute);
  if (bytes != size(attribute))
    return refuse(kInvalidValue, call, "attribute %d has %zu bytes, not %zu", attribute, size(attribute), bytes);
  static_cast<Object*>(object)->attributes.values[attribute] = std::string(static_cast<const char*>(value), bytes);
  return kSuccess;
}

template <class Object>
Status get(void* object, int attribute, void* value, size_t bytes, size_t* written, size_t (*size)(int)) {
  if (!object || !size(attribute)) return kInvalidValue;
  size_t needed = size(attribute);
  if (written) *written = needed;
  if (bytes == 0) return kSuccess;
  if (bytes != needed || !value) return kInvalidValue;
  auto& values = static_cast<Object*>(object)->attributes.values;
  auto found = values.find(attribute);
  memset(value, 0, needed);
  if (found != values.end()) memcpy(value, found->second.data(), needed);
  return kSuccess;
}

}  // namespace

EXPORT Status cublasLtCreate(void** handle) {
  *handle = new int(0);
  return kSuccess;
}
EXPORT Status cublasLtDestroy(void* handle) {
  delete static_cast<int*>(handle);
  return kSuccess;
}
EXPORT size_t cublasLtGetVersion() { return 130000; }
EXPORT size_t cublasLtGetCudartVersion() { return 13000; }
EXPORT Status cublasLtLoggerSetLevel(int) { return kSuccess; }
EXPORT Status cublasLtLoggerOpenFile(const char*) { return kSuccess; }
EXPORT Status cublasLtLoggerForceDisable() { return kSuccess; }

EXPORT const char* cublasLtGetStatusName(Status status) {
  switch (status) {
    case kSuccess: return "CUBLAS_STATUS_SUCCESS";
    case kNotInitialized: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case kInvalidValue: return "CUBLAS_STATUS_INVALID_VALUE";
    case kArchMismatch: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case kExecutionFailed: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case kNotSupported: return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "CUBLAS_STATUS_UNKNOWN";
}
EXPORT const char* cublasLtGetStatusString(Status status) { return cublasLtGetStatusName(status); }

EXPORT Status cublasLtMatmulDescCreate(void** out, int compute, int scale_type) {
  auto* desc = new MatmulDesc;
  desc->attributes.put<int32_t>(kDescComputeType, compute);
  desc->attributes.put<int32_t>(kDescScaleType, scale_type);
  desc->attributes.put<int32_t>(kDescEpilogue, kEpilogueDefault);
  desc->attributes.put<int32_t>(kDescBiasDataType, -1);
  desc->attributes.put<int32_t>(kDescAuxDataType, -1);
  *out = desc;
  return kSuccess;
}
EXPORT Status cublasLtMatmulDescDestroy(void* desc) {
  delete static_cast<MatmulDesc*>(desc);
  return kSuccess;
}
EXPORT Status cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value, size_t bytes) {
  return set<MatmulDesc>(desc, attribute, value, bytes, desc_size, "cublasLtMatmulDescSetAttribute");
}
EXPORT Status cublasLtMatmulDescGetAttribute(void* desc, int attribute, void* value, size_t bytes, size_t* written) {
  return get<MatmulDesc>(desc, attribute, value, bytes, written, desc_size);
}

EXPORT Status cublasLtMatrixLayoutCreate(void** out, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  auto* layout = new Layout;
  layout->attributes.put<int32_t>(kLayoutType, type);
  layout->attributes.put<uint64_t>(kLayoutRows, rows);
  layout->attributes.put<uint64_t>(kLayoutCols, cols);
  layout->attributes.put<int64_t>(kLayoutLd, ld);
  layout->attributes.put<int32_t>(kLayoutBatchCount, 1);
  *out = layout;
  return kSuccess;
}
EXPORT Status cublasLtMatrixLayoutDestroy(void* layout) {
  delete static_cast<Layout*>(layout);
  return kSuccess;
}
EXPORT Status cublasLtMatrixLayoutSetAttribute(void* layout, int attribute, const void* value, size_t bytes) {
  return set<Layout>(layout, attribute, value, bytes, layout_size, "cublasLtMatrixLayoutSetAttribute");
}
EXPORT Status cublasLtMatrixLayoutGetAttribute(void* layout, int attribute, void* value, size_t bytes, size_t* written) {
  return get<Layout>(layout, attribute, value, bytes, written, layout_size);
}

EXPORT Status cublasLtMatmulPreferenceCreate(void** out) {
  *out = new Preference;
  return kSuccess;
}
EXPORT Status cublasLtMatmulPreferenceDestroy(void* preference) {
  delete static_cast<Preference*>(preference);
  return kSuccess;
}
EXPORT Status cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t bytes) {
  return set<Preference>(preference, attribute, value, bytes, preference_size, "cublasLtMatmulPreferenceSetAttribute");
}
EXPORT Status cublasLtMatmulPreferenceGetAttribute(void* preference, int attribute, void* value, size_t bytes,
                                                   size_t* written) {
  return get<Preference>(preference, attribute, value, bytes, written, preference_size);
}
