// row_blocks.h: blocks of rows for all_to_all_rows().
#pragma once
#include <vector>

#include "comm/ring.h"

namespace llmc {

// Blocks with these numbers of rows, one after the other in rank order.
inline std::vector<Range> in_order(const std::vector<int64_t>& counts) {
  std::vector<Range> blocks;
  int64_t begin = 0;
  for (const int64_t n : counts) blocks.push_back({begin, n}), begin += n;
  return blocks;
}

}  // namespace llmc
