// mixture.h: which source each sample of a mixed stream comes from: a pure function of the weights and of the sample's
// number, computed from counts of 64 bits and never stored.
//
// Two sources: of the first n samples, the first source has n w0 / (w0 + w1), rounded. Several: two halves of the list
// share the samples like two sources, and so on down a balanced tree. Each level rounds once, so that after any number
// of samples the count of each of S sources is within ceil(log2 S) / 2 of its share.
#pragma once
#include "core/check.h"

namespace llmc {

class Mixture {
 public:
  static constexpr int64_t whole = 1'000'000'000'000;  // a share of 1, as shares() gives it

  // weights: at least one above 0; their sum fits into 64 bits. Sources of weight 0 get no samples.
  explicit Mixture(const std::vector<int64_t>& weights) {
    for (const int64_t weight : weights) {
      CHECK(weight >= 0);
      sums_.push_back(sums_.back() + weight);
    }
    CHECK(sums_.back() > 0, "a mixture of no sources");
  }

  // Weights such as 0.7 in trillionths of the largest one, so that equal proportions are equal mixtures.
  static std::vector<int64_t> shares(const std::vector<double>& weights) {
    double largest = 0;
    for (const double weight : weights) largest = std::max(largest, weight);
    std::vector<int64_t> all;
    for (const double weight : weights)
      all.push_back(static_cast<int64_t>(weight / largest * static_cast<double>(whole) + 0.5));
    return all;
  }

  struct Place {
    size_t source;
    int64_t before;  // how many of the samples in front of this one are this source's
  };
  // The source of sample n, which counts from 0.
  Place at(int64_t n) const {
    size_t begin = 0, end = sums_.size() - 1;
    while (end - begin > 1) {
      const size_t middle = begin + (end - begin + 1) / 2;
      const int64_t left = left_of(begin, middle, end, n);
      if (left_of(begin, middle, end, n + 1) > left) end = middle, n = left;
      else begin = middle, n -= left;
    }
    return {begin, n};
  }

  // How many of the first n samples each source has.
  std::vector<int64_t> counts(int64_t n) const {
    std::vector<int64_t> all(sums_.size() - 1);
    count(0, all.size(), n, all);
    return all;
  }

 private:
  // round(n * left / all), a half up, of the sources [begin, end), split at middle.
  int64_t left_of(size_t begin, size_t middle, size_t end, int64_t n) const {
    using wide = __int128;  // 10^15 samples times weights of 10^12 fit
    const wide left = sums_[middle] - sums_[begin], all = sums_[end] - sums_[begin];
    return all == 0 ? 0 : static_cast<int64_t>((2 * n * left + all) / (2 * all));
  }
  void count(size_t begin, size_t end, int64_t n, std::vector<int64_t>& all) const {
    if (end - begin == 1) return void(all[begin] = n);
    const size_t middle = begin + (end - begin + 1) / 2;
    const int64_t left = left_of(begin, middle, end, n);
    count(begin, middle, left, all), count(middle, end, n - left, all);
  }

  std::vector<int64_t> sums_ = {0};  // of the weights before each source, and of all
};

}  // namespace llmc
