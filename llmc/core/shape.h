// shape.h: shapes of up to four axes, exact division, rounding up, checked narrowing.
#pragma once
#include "core/check.h"

namespace llmc {

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

// a / b where b must divide a; `what` names the two in the error.
inline int64_t exact_div(int64_t a, int64_t b, const char* what) {
  CHECK(b > 0 && a % b == 0, "{}: {} is not a multiple of {}", what, a, b);
  return a / b;
}

template <class To>
To narrow(int64_t value) {
  CHECK(std::in_range<To>(value), "{} does not fit into {} bytes", value, sizeof(To));
  return static_cast<To>(value);
}

// The divisors of n in ascending order, for messages that suggest one.
inline std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> found;
  for (int64_t d = 1; d <= n; ++d)
    if (n % d == 0) found.push_back(d);
  return found;
}

class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) {
    CHECK(dims.size() <= dims_.size());
    for (int64_t d : dims) dims_[static_cast<size_t>(rank_++)] = d;
  }
  int rank() const { return rank_; }
  int64_t operator[](int axis) const { return dims_[static_cast<size_t>(axis)]; }
  int64_t& operator[](int axis) { return dims_[static_cast<size_t>(axis)]; }
  int64_t numel() const { return dims_[0] * dims_[1] * dims_[2] * dims_[3]; }
  bool operator==(const Shape&) const = default;
  const int64_t* begin() const { return dims_.data(); }
  const int64_t* end() const { return dims_.data() + rank_; }

 private:
  std::array<int64_t, 4> dims_{1, 1, 1, 1};
  int rank_ = 0;
};

inline std::string to_string(const Shape& shape) { return formatted("({})", shape); }

// The elements, rows or experts [begin, begin + size).
struct Range {
  int64_t begin = 0, size = 0;
  int64_t end() const { return begin + size; }
  bool operator==(const Range&) const = default;
};
inline Range overlap(const Range& a, const Range& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max<int64_t>(0, std::min(a.end(), b.end()) - begin)};
}
// What of [0, size) lies in none of these ranges, which ascend.
inline std::vector<Range> gaps(const std::vector<Range>& ranges, int64_t size) {
  std::vector<Range> all;
  int64_t begin = 0;
  for (const Range& r : ranges) {
    if (r.begin > begin) all.push_back({begin, r.begin - begin});
    begin = r.end();
  }
  if (begin < size) all.push_back({begin, size - begin});
  return all;
}

}  // namespace llmc
