// partitions.h: every partition of a small number, and random values: what the answers of dynamic programming are
// compared with.
#pragma once
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace partitions {

using Sizes = std::vector<int64_t>;

// Every way to write n as a sum of numbers from 1.
inline std::vector<Sizes> compositions(int64_t n) {
  std::vector<Sizes> all;
  for (int64_t cuts = 0; cuts < (int64_t{1} << (n - 1)); ++cuts) {
    Sizes sizes = {1};
    for (int64_t i = 0; i + 1 < n; ++i) {
      if (cuts >> i & 1) sizes.push_back(1);
      else ++sizes.back();
    }
    all.push_back(sizes);
  }
  return all;
}

inline int64_t sum(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }

// Small whole numbers, so that there are ties and zeros, or any.
struct RandomValues {
  std::mt19937 random;

  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random); }
  double value(bool whole, double most) {
    return whole ? static_cast<double>(below(static_cast<int64_t>(most) + 1))
                 : std::uniform_real_distribution<double>(0, most)(random);
  }
};

}  // namespace partitions
