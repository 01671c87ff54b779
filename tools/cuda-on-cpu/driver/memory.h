// Device memory: plain host memory, with a record of what is allocated.
#pragma once
#include <cstddef>
#include <cstdint>

namespace coc {

// Whether [address, address + bytes) lies in one live allocation. An empty range always does.
bool in_device_memory(const void* address, size_t bytes);
// Whether the address lies in a live allocation or just past its end.
bool points_to_device_memory(const void* address);
// For messages: " (just past an allocation of 12 bytes)" and the like.
const char* describe_address(const void* address);
// With FP8_FAKE_GUARD: aborts if a write went past either end of an allocation; `after` names what ran last.
void check_guards(const char* after);
void memory_info(uint64_t* free, uint64_t* total);

}  // namespace coc
