// Products of a warpgroup that are under way.
#pragma once
#include <cstddef>
#include <vector>

#include "coc/runtime.h"

namespace coc {

constexpr unsigned kWarpgroup = 128;

// Dynamic shared memory of the block that this OS thread runs: what descriptors may lead to.
void set_shared_bytes_of_products(uint32_t bytes);

class WarpgroupProducts {
 public:
  void fence() { fenced_ = true; }
  // `lanes`: what each thread passed. Computed at once if `early`, else by the wait for it.
  void start(const WgmmaLane* const* lanes, bool early);
  void commit() { group_ends_.push_back(started_.size()); }
  void wait(unsigned groups_left);
  bool pending() const { return !started_.empty(); }
  void clear();

 private:
  struct Product {
    WgmmaLane lanes[kWarpgroup];
  };
  static void compute(const Product& product);

  std::vector<Product> started_;
  std::vector<size_t> group_ends_;
  bool fenced_ = false;
};

}  // namespace coc
