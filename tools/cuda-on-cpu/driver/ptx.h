// What PTX text says about its kernels.
#pragma once
#include <map>
#include <string>

namespace coc {

struct PtxKernel {
  unsigned max_threads = 1024;  // of __launch_bounds__
  unsigned static_shared = 0;
};

std::map<std::string, PtxKernel> parse_ptx(const std::string& text);

}  // namespace coc
