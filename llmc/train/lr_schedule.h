// lr_schedule.h: the learning rate as a pure function of the step.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/enum_names.h"

namespace llmc {

enum class LrShape : uint8_t { constant, cosine, linear, wsd };
constexpr auto names_of_values(LrShape) { return std::array{"constant", "cosine", "linear", "wsd"}; }

struct LrSchedule {
  LrShape shape = LrShape::cosine;
  double peak = 3e-4;
  int64_t warmup_steps = 0;
  int64_t max_steps = 1;
  double final_frac = 0;  // of the peak, at the last step
};

// The learning rate of update `step`, which counts from 1. Warm-up is linear: peak * step / warmup_steps. It reaches
// the peak at the last step of the warm-up (without one at step 1), and final_frac * peak at step max_steps. (nanoGPT
// ends there too; llm.c and transformers would only reach it one step later.) Between the two:
//   cosine    half a cosine (Loshchilov & Hutter 2017)
//   linear    a straight line
//   wsd       warmup-stable-decay: the peak, then a decay by 1 - sqrt over the last fifth of the run (Haegele et al.
//   2024)
// A run of one step, or one that ends with its warm-up, has no decay: it ends at the peak.
inline double learning_rate(const LrSchedule& s, int64_t step) {
  if (step < s.warmup_steps) return s.peak * static_cast<double>(step) / static_cast<double>(s.warmup_steps);
  const double end = static_cast<double>(s.max_steps);
  double begin = static_cast<double>(std::max<int64_t>(1, s.warmup_steps));  // the last step at the peak
  if (s.shape == LrShape::wsd) begin = std::max(begin, 0.8 * end);
  if (s.shape == LrShape::constant || static_cast<double>(step) <= begin) return s.peak;
  const double done = (static_cast<double>(step) - begin) / (end - begin), lowest = s.peak * s.final_frac;
  auto above_lowest = [&](double share) { return lowest + share * (s.peak - lowest); };
  if (s.shape == LrShape::cosine) return above_lowest(0.5 * (1 + std::cos(3.14159265358979323846 * done)));
  if (s.shape == LrShape::linear) return above_lowest(1 - done);
  return above_lowest(1 - std::sqrt(done));
}

}  // namespace llmc
