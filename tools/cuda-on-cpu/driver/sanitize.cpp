// What g++'s -fsanitize=alignment,bounds calls from kernels: misaligned vector loads and indices outside of arrays
// (so also of static shared memory). A device stops at the first and silently overwrites at the second.
#include "coc/runtime.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
struct Location {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, info;
  char name[1];
};
struct Mismatch {
  Location location;
  const Type* type;
  unsigned char log_alignment, kind;
};
struct OutOfBounds {
  Location location;
  const Type *array, *index;
};
}  // namespace

EXPORT void __ubsan_handle_type_mismatch_v1_abort(Mismatch* data, uintptr_t address) {
  coc_fail("%s:%u: address %#zx of type %s is not aligned to %u bytes", data->location.file, data->location.line,
           size_t(address), data->type->name, 1u << data->log_alignment);
}

EXPORT void __ubsan_handle_out_of_bounds_abort(OutOfBounds* data, uintptr_t index) {
  coc_fail("%s:%u: index %td is outside of %s", data->location.file, data->location.line, intptr_t(index), data->array->name);
}
