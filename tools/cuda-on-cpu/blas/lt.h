// cuBLASLt's opaque objects and the problem that they describe together.
#pragma once
#include <map>
#include <string>

#include "types.h"

namespace blas {

// Attributes by number, as bytes.
struct Attributes {
  std::map<int, std::string> values;

  template <class T> T get(int attribute, T otherwise) const {
    auto found = values.find(attribute);
    if (found == values.end() || found->second.size() != sizeof(T)) return otherwise;
    T value;
    memcpy(&value, found->second.data(), sizeof value);
    return value;
  }
  template <class T> void put(int attribute, T value) {
    values[attribute] = std::string(reinterpret_cast<const char*>(&value), sizeof value);
  }
};

enum DescAttribute {
  kDescComputeType = 0,
  kDescScaleType = 1,
  kDescPointerMode = 2,
  kDescTransA = 3,
  kDescTransB = 4,
  kDescTransC = 5,
  kDescFillMode = 6,
  kDescEpilogue = 7,
  kDescBiasPointer = 8,
  kDescBiasBatchStride = 10,
  kDescAuxPointer = 11,
  kDescAuxLd = 12,
  kDescAuxBatchStride = 13,
  kDescAlphaBatchStride = 14,
  kDescSmCount = 15,
  kDescAScale = 17,
  kDescBScale = 18,
  kDescCScale = 19,
  kDescDScale = 20,
  kDescAmaxD = 21,
  kDescAuxDataType = 22,
  kDescAuxScale = 23,
  kDescAuxAmax = 24,
  kDescFastAccum = 25,
  kDescBiasDataType = 26,
  kDescAScaleMode = 31,
  kDescBScaleMode = 32,
  kDescCScaleMode = 33,
  kDescDScaleMode = 34,
  kDescAuxScaleMode = 35,
  kDescDOutScale = 36,
  kDescDOutScaleMode = 37,
  kDescEmulation = 38,
};
enum LayoutAttribute {
  kLayoutType = 0,
  kLayoutOrder = 1,
  kLayoutRows = 2,
  kLayoutCols = 3,
  kLayoutLd = 4,
  kLayoutBatchCount = 5,
  kLayoutBatchStride = 6,
  kLayoutPlane = 7,
  kLayoutBatchMode = 8,
};
enum PreferenceAttribute {
  kPrefSearchMode = 0,
  kPrefMaxWorkspace = 1,
  kPrefReduction = 3,
  kPrefAlignA = 5,
  kPrefAlignB = 6,
  kPrefAlignC = 7,
  kPrefAlignD = 8,
  kPrefMaxWaves = 9,
  kPrefImpl = 12,
};
enum ScaleMode { kScalar = 0, kVec16 = 1, kVec32 = 2, kOuterVec = 3, kVec128 = 4, kBlk128 = 5 };
inline bool is_block(int mode) { return mode == kVec32 || mode == kVec128 || mode == kBlk128; }
enum Epilogue { kEpilogueDefault = 1, kEpilogueBias = 4 };

struct MatmulDesc {
  Attributes attributes;
};
struct Layout {
  Attributes attributes;
};
struct Preference {
  Attributes attributes;
};

struct Matrix {
  int type, order;
  int64_t rows, cols, ld, batch, stride;
  explicit Matrix(const Layout& layout);
  size_t extent() const;
};

struct Problem {
  const char* call;
  int compute, scale_type, transa, transb, epilogue, a_mode, b_mode, bias_type;
  bool fast_accum;
  const float *a_scale, *b_scale;
  const void* bias;
  bool extras;  // attributes of fp8 outputs and auxiliary outputs, which are not covered
  Matrix a, b, c, d;
  int64_t m, n, k;

  Problem(const char* call, const MatmulDesc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d);
  bool fp8() const { return is_fp8(a.type) || is_fp8(b.type); }
  // Whether scales change along the sum.
  bool a_blocks() const { return is_block(a_mode); }
  bool b_blocks() const { return is_block(b_mode); }
  // What can be said without the operands' addresses.
  Status check() const;

 private:
  Status check_fp8() const;
  Status check_scales() const;
  Status check_shapes() const;
  bool types_supported() const;
};

// cublasLtMatmulAlgo_t is 64 opaque bytes; ours says what the heuristic promised.
struct Algorithm {
  uint64_t magic;
  uint64_t workspace;
  int64_t m, n, k;
  int32_t a_type, b_type, d_type, epilogue;
  uint64_t unused;
};
static_assert(sizeof(Algorithm) == 64);
constexpr uint64_t kAlgorithmMagic = 0x636f632d6c740001ull;

}  // namespace blas
