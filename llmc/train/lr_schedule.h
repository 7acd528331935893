// lr_schedule.h: the learning rate as a pure function of the step.
#pragma once
#include <cmath>
#include <string>

#include "core/check.h"

namespace llmc {

struct LrSchedule {
  std::string kind = "cosine";  // constant, cosine, linear, wsd
  double peak = 3e-4;
  int64_t warmup_steps = 0;
  int64_t max_steps = 1;
  double final_frac = 0;  // of the peak, at the end
};

// The learning rate of update `step`, which counts from 1. Warm-up is linear: peak * step / warmup_steps. After it,
// with `done` the fraction of the remaining updates that came before this one:
//   cosine    half a cosine from the peak to final_frac * peak (Loshchilov & Hutter 2017)
//   linear    a straight line between the same two
//   wsd       warmup-stable-decay: the peak, then a decay by 1 - sqrt over the last fifth of the run (Haegele et al.
//   2024)
inline double learning_rate(const LrSchedule& s, int64_t step) {
  if (step <= s.warmup_steps) return s.peak * static_cast<double>(step) / static_cast<double>(s.warmup_steps);
  const double lowest = s.peak * s.final_frac;
  const double done = static_cast<double>(step - 1 - s.warmup_steps) /
                      static_cast<double>(std::max<int64_t>(1, s.max_steps - s.warmup_steps));
  if (s.kind == "constant") return s.peak;
  if (s.kind == "cosine") return lowest + 0.5 * (1 + std::cos(3.14159265358979323846 * done)) * (s.peak - lowest);
  if (s.kind == "linear") return s.peak + (lowest - s.peak) * done;
  CHECK(s.kind == "wsd", "--lr-schedule {}: expected constant, cosine, linear or wsd", s.kind);
  const double before = static_cast<double>(step - 1), decay_begin = 0.8 * static_cast<double>(s.max_steps);
  if (before < decay_begin) return s.peak;
  const double fall = (before - decay_begin) / (static_cast<double>(s.max_steps) - decay_begin);
  return s.peak + (lowest - s.peak) * std::sqrt(fall);
}

}  // namespace llmc
