// token_count.h: a number of tokens as people write it: 1000000, 300M, 1.5B.
#pragma once
#include <charconv>

#include "core/std.h"

namespace llmc {

struct TokenCount {
  int64_t tokens = 0;
  std::string text;  // as given and recorded

  operator const std::string&() const { return text; }
  explicit operator double() const { return static_cast<double>(tokens); }
};

// With k, M, B (or G) and T for thousands, millions, billions and trillions; none: not a whole number of tokens, or one
// that does not fit into 64 bits.
inline std::optional<TokenCount> token_count(const std::string& text) {
  const char *begin = text.data(), *end = begin + text.size();
  TokenCount count{.text = text};
  const auto [after, fault] = std::from_chars(begin, end, count.tokens);
  if (fault == std::errc() && after == end) return count;
  double number = 0;
  const auto [suffix, error] = std::from_chars(begin, end, number);
  if (error != std::errc() || end - suffix > 1) return std::nullopt;
  double scale = 1;
  if (suffix < end) switch (*suffix) {
      case 'k':
      case 'K': scale = 1e3; break;
      case 'm':
      case 'M': scale = 1e6; break;
      case 'b':
      case 'B':
      case 'g':
      case 'G': scale = 1e9; break;
      case 't':
      case 'T': scale = 1e12; break;
      default: return std::nullopt;
    }
  const double tokens = number * scale, whole = std::round(tokens);
  if (!(std::abs(tokens) < 9.2e18) || std::abs(tokens - whole) > 1e-9 * std::abs(whole)) return std::nullopt;
  count.tokens = static_cast<int64_t>(whole);
  return count;
}

}  // namespace llmc
