// lr_schedule.h: the learning rate as a pure function of how much of a run is done.
#pragma once
#include "core/check.h"

namespace llmc {

enum class LrShape : uint8_t { constant, cosine, linear, wsd, sqrt };
constexpr auto names_of_values(LrShape) { return std::array{"constant", "cosine", "linear", "wsd", "1-sqrt"}; }

// Counted in steps or, in a run of stages, in tokens, so that steps of changing size bend nothing.
struct LrSchedule {
  LrShape shape = LrShape::cosine;
  double peak = 3e-4;
  int64_t warmup = 0;
  int64_t length = 1;
  double final_frac = 0;              // of the peak, at the end
  std::optional<int64_t> decay = {};  // of wsd; none: the last fifth
  int64_t first = 1;                  // what the first step counts
};

// The learning rate of the update that ends at `at`: with steps, its number, from 1. Warm-up is linear: peak * at /
// warmup. It reaches the peak at the last step of the warm-up (without one at the first step), and final_frac * peak at
// the end. (nanoGPT ends there too; llm.c and transformers would only reach it one step later.) Between the two:
//   cosine    half a cosine (Loshchilov & Hutter 2017)
//   linear    a straight line
//   1-sqrt    1 - the square root of the share that is done (Haegele et al. 2024)
//   wsd       warmup-stable-decay: the peak, then a decay by 1 - sqrt over the last fifth, or over `decay`
// A run of one step, or one that ends with its warm-up, has no decay: it ends at the peak.
inline double learning_rate(const LrSchedule& s, int64_t at) {
  if (at < s.warmup) return s.peak * static_cast<double>(at) / static_cast<double>(s.warmup);
  const double end = static_cast<double>(s.length);
  double begin = static_cast<double>(std::max(s.first, s.warmup));  // the last step at the peak
  if (s.shape == LrShape::wsd) begin = std::max(begin, s.decay ? end - static_cast<double>(*s.decay) : 0.8 * end);
  if (s.shape == LrShape::constant || static_cast<double>(at) <= begin) return s.peak;
  const double done = (static_cast<double>(at) - begin) / (end - begin), lowest = s.peak * s.final_frac;
  auto above_lowest = [&](double share) { return lowest + share * (s.peak - lowest); };
  if (s.shape == LrShape::cosine) return above_lowest(0.5 * (1 + std::cos(3.14159265358979323846 * done)));
  if (s.shape == LrShape::linear) return above_lowest(1 - done);
  return above_lowest(1 - std::sqrt(done));
}

}  // namespace llmc
