// token_slices.h: where a sequence is cut into token slices (Li et al. 2021, TeraPipe). A slice of l tokens after c
// others takes t(l, c): a long context makes attention slower, and so the later slices of an optimal cut are shorter.
//
// P stages that take equally long for a slice work on slices t_1 .. t_K of M micro-batches, one after the other, in
//   M x (t_1 + ... + t_K) + (P - 1) x max t_k               (the paper's objective, which has one micro-batch)
// The second term is the bubble: more slices make it smaller, but each has a minimum cost, which makes the sum larger.
#pragma once
#include "core/check.h"

namespace llmc {

// K slices whose lengths differ by at most one token: the first are longer, since their context is the shortest.
inline std::vector<int64_t> even_token_slices(int64_t tokens, int64_t slices) {
  CHECK(slices >= 1 && slices <= tokens,
        "--token-slices {}: a sequence of {} tokens can be cut into 1 to {} slices, or by auto", slices, tokens,
        tokens);
  std::vector<int64_t> lengths(static_cast<size_t>(slices), tokens / slices);
  for (int64_t k = 0; k < tokens % slices; ++k) ++lengths[static_cast<size_t>(k)];
  return lengths;
}

struct TokenCut {
  int64_t tokens = 0;         // of the sequence
  int64_t granularity = 1;    // cuts are at multiples of it
  int stages = 1;             // P
  int64_t micro_batches = 1;  // M
};

struct TokenSlices {
  std::vector<int64_t> lengths;  // in tokens, from the first slice to the last
  double seconds = 0;            // of all micro-batches through all stages, by the formula above
};

// t(l, c): the seconds that a stage takes for a slice of l tokens after c others.
using SliceSeconds = std::function<double(int64_t length, int64_t context)>;

namespace detail {

// The paper's dynamic programming: for a bound t_max on the time of a slice, the cut of the first i tokens with the
// smallest sum is
//   S(i; t_max) = min over l with t(l, i - l) <= t_max of S(i - l; t_max) + t(l, i - l)
// and the best cut is found by trying bounds. Each of the n (n + 1) / 2 times of the n pieces may be the best bound;
// the paper tries them in ascending order, skipping those within 0.1 ms. This search is exact and needs few of them:
// - S falls as the bound rises; so if S(b) is known, every bound in [a, b) gives at least M S(b) + (P - 1) a;
// - if the slowest slice of the cut for bound b takes t, every bound in [t, b] has that cut.
class Terapipe {
 public:
  Terapipe(const TokenCut& cut, const SliceSeconds& slice_seconds) : cut_(cut) {
    for (int64_t point = 0; point < cut.tokens; point += cut.granularity) points_.push_back(point);
    points_.push_back(cut.tokens);
    for (size_t i = 1; i < points_.size(); ++i)
      for (size_t s = 0; s < i; ++s) {
        const double t = slice_seconds(points_[i] - points_[s], points_[s]);
        CHECK(t >= 0 && std::isfinite(t), "a slice of {} tokens after {} takes {} s; expected a finite time",
              points_[i] - points_[s], points_[s], t);
        fastest_.push_back(s == 0 ? t : std::min(t, fastest_.back()));
        seconds_.push_back(t);
      }
    const std::set<double> distinct(seconds_.begin(), seconds_.end());
    bounds_.assign(distinct.begin(), distinct.end());
  }

  TokenSlices solve() {
    struct Open {  // bounds not yet decided, and the sum S of a bound above them
      std::vector<double>::const_iterator first, last;
      double sum;
    };
    const auto bounds_below = [&](double t) { return std::lower_bound(bounds_.cbegin(), bounds_.cend(), t); };
    Cut best = smallest_sum(bounds_.back());
    std::vector<Open> open = {{bounds_.cbegin(), bounds_below(best.slowest), best.sum}};
    while (!open.empty()) {
      const auto [first, end, sum] = open.back();
      open.pop_back();
      const auto last = std::partition_point(
          first, end, [&, sum = sum](double bound) { return seconds_of(sum, bound) < seconds_of(best); });
      if (first == last) continue;
      const auto middle = first + (last - first) / 2;
      Cut cut = smallest_sum(*middle);
      open.push_back({middle + 1, last, sum});
      if (cut.sum == infinity) continue;  // no cut for this bound, nor for any smaller one
      open.push_back({first, bounds_below(cut.slowest), cut.sum});
      if (seconds_of(cut) < seconds_of(best)) best = std::move(cut);
    }
    return {best.lengths, seconds_of(best)};
  }

 private:
  static constexpr double infinity = std::numeric_limits<double>::infinity();

  struct Cut {
    double sum = infinity, slowest = 0;
    std::vector<int64_t> lengths;
  };

  double seconds_of(double sum, double slowest) const {
    return static_cast<double>(cut_.micro_batches) * sum + (cut_.stages - 1) * slowest;
  }
  double seconds_of(const Cut& cut) const { return seconds_of(cut.sum, cut.slowest); }

  // S(tokens; bound) and its cut.
  Cut smallest_sum(double bound) {
    const size_t n = points_.size();
    sums_.assign(n, infinity);
    starts_.resize(n);
    sums_[0] = 0;  // no tokens
    for (size_t i = 1; i < n; ++i) {
      const size_t to_i = i * (i - 1) / 2;  // the times of the slices that end at point i, by their first point
      for (size_t s = i; s-- > 0 && fastest_[to_i + s] <= bound;) {
        const double t = seconds_[to_i + s];
        if (t > bound || sums_[s] + t >= sums_[i]) continue;
        sums_[i] = sums_[s] + t;
        starts_[i] = s;
      }
    }
    Cut cut{sums_.back(), 0, {}};
    if (cut.sum == infinity) return cut;
    for (size_t i = n - 1; i > 0;) {
      const size_t s = starts_[i];
      cut.lengths.insert(cut.lengths.begin(), points_[i] - points_[s]);
      cut.slowest = std::max(cut.slowest, seconds_[i * (i - 1) / 2 + s]);
      i = s;
    }
    return cut;
  }

  TokenCut cut_;
  std::vector<int64_t> points_;  // where a slice may begin or end
  std::vector<double> seconds_;  // of the slice from point s to point i, at i (i - 1) / 2 + s
  std::vector<double> fastest_;  // the fastest of the slices to i that are as long or longer
  std::vector<double> bounds_;   // all distinct times, ascending
  std::vector<double> sums_;     // S, by point
  std::vector<size_t> starts_;   // the start of the last slice, for each sum
};

}  // namespace detail

// The cut of a sequence with which a pipeline finishes soonest. t(l, c) may be any function; it is called once for each
// pair of points at which the sequence may be cut, its ends included.
inline TokenSlices optimal_token_slices(const TokenCut& cut, const SliceSeconds& slice_seconds) {
  CHECK(cut.tokens >= 1 && cut.granularity >= 1 && cut.stages >= 1 && cut.micro_batches >= 1);
  return detail::Terapipe(cut, slice_seconds).solve();
}

}  // namespace llmc
