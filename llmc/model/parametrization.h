// parametrization.h: how initial weights, learning rates and epsilons follow the size of a model, so that what is best
// for a small model, the base, stays best for a larger one.
//
//   standard    They do not: GPT-2's initial weights, one learning rate.
//   mup         They follow the width: maximal update parametrization (Yang et al. 2022, arXiv 2203.03466, table 8).
//   completep   And the depth (Dey et al. 2025, arXiv 2505.01618, table 1 with alpha = 1).
//
// Both papers multiply logits, attention scores and what a block adds to the residual stream by a constant. Here the
// constant is folded into the weights from the beginning: a weight a w with gradient g / a follows AdamW as w does, if
// its initial value and learning rate are a times, its epsilon and decay 1 / a times as large (Yang et al. 2022,
// appendix J.2.1); Lion and Muon have no epsilon. So the model computes what it always does, and a checkpoint is the
// model of its config.json. With m, l and d the width, depth and head size over those of the base (l = 1 with mup):
//
//                                          initial std      rate, AdamW and Lion   epsilon
//   tables of tokens and positions         1                1                      1 / m
//   matrices of blocks                     1 / sqrt(m)      1 / m                  1 / (m l)
//     queries, or the gains of their norm  times 1/sqrt(d)  times 1 / sqrt(d)      times sqrt(d)
//     into the residual stream             times 1 / l      times 1 / l            times l       (also biases)
//   router, gate of the shared expert      1 / m            1 / m                  1 / l
//   output layer                           1 / m            1 / m                  1
//   norms and biases of blocks             1                1                      1 / (m l)
//   final norm                             1                1                      1 / m
//     before a tied output layer           times 1 / m      times 1 / m            times m
//
// Weight decay is divided by the rate, so that a step shrinks all weights alike. Muon's matrices: muon_rate().
#pragma once
#include "ops/ops_muon.h"
#include "shard/params.h"

namespace llmc {

enum class Parametrization : uint8_t { standard, mup, completep };
constexpr auto names_of_values(Parametrization) { return std::array{"standard", "mup", "completep"}; }

// The sizes of the model for which the learning rate was chosen.
struct BaseShape {
  int64_t width, depth, head_size;
};

// How many times as large as its base a model is.
struct Growth {
  double width = 1, depth = 1, head_size = 1;
};

// The rules, as powers of Growth.
struct ScalingRules {
  double hidden_std = -0.5, hidden_rate = -1;       // of the width, for matrices of blocks
  double output = -1;                               // multiplier of logits, of the width
  double branch = -1;                               // multiplier of what a block adds to the stream, of the depth
  double query = -0.5;                              // multiplier of queries, of the head size: 1 / sqrt(D) is now 1 / D
  double gradient_width = -1, gradient_depth = -1;  // of gradients, and so of epsilon; by depth in blocks alone
};
inline constexpr ScalingRules scaling_rules;

// What depends on the model beside its sizes.
struct ScaledModel {
  Growth growth = {};
  bool tied, query_norm;
  Muon muon = {};
  const ScalingRules* rules = &scaling_rules;
};

// Muon's update of a matrix with R rows and C columns has scale_of(R, C) as its largest singular values. An update has
// the same effect at any width if that is in proportion to sqrt(R / C) (Yang, Simon & Bernstein 2023, arXiv
// 2310.17813): the rate corrects it, as far as it grows otherwise. With matrices of whole parameters, whose sides all
// grow by m, that is 1 / sqrt(m) with --muon-scale rms, and 1 with spectral.
inline double muon_rate(const ParamSpec& p, const Muon& muon, const Growth& growth) {
  const bool apart = muon.heads == HeadGroups::apart && p.group_rows > 0;
  const double rows = static_cast<double>(apart ? p.group_rows : p.shape[0]), columns = static_cast<double>(p.shape[1]),
               base_rows = rows / (apart ? growth.head_size : growth.width), base_columns = columns / growth.width;
  const auto effect = [&](double r, double c) { return scale_of(muon.scale, r, c) / std::sqrt(r / c); };
  return effect(base_rows, base_columns) / effect(rows, columns);
}

// Scales a parameter's initial values, rate and epsilon. `p` has its name, shape, rate group and optimizer.
inline void parametrize(ParamSpec& p, const ScaledModel& model) {
  const ScalingRules& rules = *model.rules;
  const Growth& growth = model.growth;
  const auto ends_with = [&](std::string_view suffix) { return p.name.ends_with(suffix); };
  const bool in_block = p.name.starts_with("blocks."), matrix = p.shape.rank() == 2;
  const bool router = ends_with(".router.weight") || ends_with(".shared_gate.weight"),
             output = router || p.rates == RateGroup::head || (model.tied && p.name.starts_with("ln_f.")),
             query = model.query_norm ? ends_with(".q_norm.weight") : ends_with(".q.weight") || ends_with(".q.bias"),
             branch = in_block && (p.name.find(".proj.") != p.name.npos || p.name.find(".down.") != p.name.npos);
  double multiplier = 1, std = 1, rate = 1, eps = std::pow(growth.width, rules.gradient_width);
  if (output) multiplier *= std::pow(growth.width, rules.output);
  if (query) multiplier *= std::pow(growth.head_size, rules.query);
  if (branch) multiplier *= std::pow(growth.depth, rules.branch);
  if (in_block) eps *= std::pow(growth.depth, rules.gradient_depth);
  if (in_block && matrix && !router) {
    std = std::pow(growth.width, rules.hidden_std);
    rate = p.rule == Optimizer::muon ? muon_rate(p, model.muon, growth) : std::pow(growth.width, rules.hidden_rate);
  }
  p.init_std *= static_cast<float>(multiplier * std);
  p.init_value *= static_cast<float>(multiplier);
  p.rate = static_cast<float>(multiplier * rate);
  p.eps = static_cast<float>(eps / multiplier);
}

}  // namespace llmc
