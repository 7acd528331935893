// outcome.h: what a layout of the self-test computed, as whole tensors of all ranks' parts; how far two of them differ.
#pragma once
#include "device/host_copy.h"
#include "run/processes.h"
#include "shard/zero.h"
#include "train/step_config.h"

namespace llmc::selftest {

inline double root_mean_square(const auto& values) {
  double squares = 0;
  for (const double x : values) squares += x * x;
  return std::sqrt(squares / static_cast<double>(values.size()));
}

// Whole tensors, and how many ranks hold each element.
struct Whole {
  std::vector<float> values;
  std::vector<int> holders;
  bool operator==(const Whole& other) const { return values == other.values; }
};
using Wholes = std::map<std::string, Whole>;

// Lion moves a weight by the sign of a direction. Where that direction is little more than rounding, a layout may
// choose the other sign. The weight is not compared after that step; and if the sign really was another one, later
// steps are not compared at all, because they begin with other weights.
struct Directions {
  using Sizes = std::map<std::string, std::vector<float>>;  // |direction| of each weight, divided by the tensor's root
                                                            // mean square
  std::vector<Sizes> of_steps;                              // empty: another optimizer
  double rounding = 0;                                      // how large a direction may be that is not compared
  double lr = 0;                                            // by which a sign moves a weight
  // share: how much the tensor counts
  bool unsure(const std::vector<float>* sizes, size_t i, double share = 1) const {
    return sizes && share * (*sizes)[i] <= rounding;
  }
  const std::vector<float>* sizes(size_t step, const std::string& name) const {
    return of_steps.empty() ? nullptr : &of_steps[step].at(name);
  }
};

// The results of a layout: whole parameters and gradients, assembled from all ranks.
struct Outcome {
  std::vector<double> losses, norms;
  Wholes gradients, weights, optimizer_state;  // the last two after the last step
  std::vector<Wholes> earlier_weights;         // after each step before the last; empty but with Lion
  bool key_biases = false;                     // are their gradients more than rounding errors?
  bool limits_logits = false;                  // QK-clip, which sees the shift of all scores by a key bias
  Directions directions = {};                  // of one rank
  std::string fault;                           // copies that differ between ranks, or faults that ranks report

  // Counted from 0.
  const Wholes& weights_after(size_t step) const {
    return step < earlier_weights.size() ? earlier_weights[step] : weights;
  }
  bool same_bits(const Outcome& other) const {
    return losses == other.losses && norms == other.norms && weights == other.weights;
  }
};

// The directions of Lion, from its momentum after each step: with gradients g of a step and the momentum m before it,
// the direction is beta1 m + (1 - beta1) g, and the momentum becomes beta2 m + (1 - beta2) g.
inline Directions lion_directions(const std::vector<Outcome>& after, const OptimizerOptions& o) {
  Directions all{.of_steps = std::vector<Directions::Sizes>(after.size()), .lr = o.lr};
  const std::string slot = formatted(":{}", rule_of(Optimizer::lion).slots[0].name);
  for (const auto& [name, last] : after.back().optimizer_state) {
    if (!name.ends_with(slot)) continue;
    std::vector<double> momentum(last.values.size()), direction(last.values.size());
    for (size_t s = 0; s < after.size(); ++s) {
      const std::vector<float>& now = after[s].optimizer_state.at(name).values;
      for (size_t i = 0; i < now.size(); ++i) {
        const double gradient = (now[i] - o.beta2 * momentum[i]) / (1 - o.beta2);
        direction[i] = o.beta1 * momentum[i] + (1 - o.beta1) * gradient;
        momentum[i] = now[i];
      }
      const double mean = root_mean_square(direction);
      std::vector<float>& sizes = all.of_steps[s][name.substr(0, name.find(':'))];
      for (const double d : direction) sizes.push_back(mean > 0 ? static_cast<float>(std::abs(d) / mean) : 0.0f);
    }
  }
  return all;
}

// Assembles every rank's slices into whole tensors; elements that several ranks hold must be equal (contract 14).
inline void collect(Wholes& all, std::string& fault, const StateEntry& e, const std::string& name, int rank,
                    Stream& stream) {
  Whole& whole = all[name];
  whole.values.resize(static_cast<size_t>(e.param->numel()));
  whole.holders.resize(whole.values.size());
  const Elements elements = e.elements();
  const StateView held(e, stream);
  with_type(held.tensor().dtype, [&](auto tag) {
    const auto* from = held.tensor().data<typename decltype(tag)::type>();
    for (int64_t i = 0; i < e.tensor.numel(); ++i) {
      const size_t element = static_cast<size_t>(elements.index(i));
      const float value = static_cast<float>(from[i]);
      if (whole.holders[element]++ == 0) whole.values[element] = value;
      else if (!(whole.values[element] == value)) fault = formatted("rank {} holds a different {}", rank, name);
    }
  });
}
inline void collect_gradients(Outcome& outcome, const ModelState& state, int rank, Stream& stream) {
  for (const StateEntry& e : state.gradient_table())
    collect(outcome.gradients, outcome.fault, e, e.param->name, rank, stream);
}
inline void collect_state(Outcome& outcome, const ModelState& state, int rank, Stream& stream) {
  for (const StateEntry& e : state.state_table())
    if (e.kind == StateKind::weight) collect(outcome.weights, outcome.fault, e, e.param->name, rank, stream);
    else collect(outcome.optimizer_state, outcome.fault, e, formatted("{}:{}", e.param->name, e.name()), rank, stream);
}

// Checks that every element of every parameter is held exactly as often as the layout says (contract 15); called when
// the slices of all ranks are collected.
inline void require_whole(Outcome& outcome, const StepConfig& step) {
  struct Expected {
    int weights, state, row_moments;
  };
  std::map<std::string, Expected> expected;
  for (const UnitSpec& unit : part_of(parameter_table(step.model), step.layout.tensor, 0)) {
    const ZeroConfig zero = unit.sharing == Sharing::experts ? step.layout.expert_zero() : step.layout.zero;
    const int of_weights = zero.stage == 3 ? zero.replicas : zero.ranks(),
              of_state = zero.updates() == ZeroConfig::Updates::everyone       ? zero.ranks()
                         : zero.updates() == ZeroConfig::Updates::shard_owners ? zero.replicas
                                                                               : 1;
    for (const ParamSpec& p : unit.params) {
      const bool twice = unit.name == "embedding" && step.model.tied &&
                         step.pipeline().stage_of(step.layout.pipeline.chunks() - 1) != 0;
      const int copies = p.copies * (twice ? 2 : 1);
      const int parts = unit.sharing == Sharing::experts ? 1 : step.layout.tensor.ranks;
      expected[p.name] = {copies * of_weights, copies * of_state,
                          zero.updates() == ZeroConfig::Updates::server ? 1 : zero.ranks() * parts};
    }
  }
  auto check = [&](const Wholes& all, int Expected::*times) {
    for (const auto& [name, whole] : all) {
      const Expected& its = expected.at(name.substr(0, name.find(':')));
      const int n = name.ends_with(formatted(":{}", row_moment.name)) ? its.row_moments : its.*times;
      for (const int holders : whole.holders)
        if (holders != n) outcome.fault = formatted("{} ranks hold an element of {}, expected {}", holders, name, n);
    }
  };
  check(outcome.weights, &Expected::weights);
  check(outcome.optimizer_state, &Expected::state);
  if (outcome.weights.size() != expected.size()) outcome.fault = "a parameter is held by no rank";
}

// Completes the whole tensors with the parts held by the ranks of other processes.
inline void merge(Wholes& whole, std::string& fault, const Processes& processes) {
  std::string mine;
  const auto append = [&](const void* bytes, size_t size) { mine.append(static_cast<const char*>(bytes), size); };
  for (const auto& [name, tensor] : whole) {
    const size_t sizes[] = {name.size(), tensor.values.size()};
    append(sizes, sizeof sizes);
    append(name.data(), name.size());
    append(tensor.values.data(), tensor.values.size() * sizeof(float));
    append(tensor.holders.data(), tensor.holders.size() * sizeof(int));
  }
  const std::vector<std::string> all = gather_large("tensors", mine, processes);
  const size_t me = static_cast<size_t>(processes.process());
  for (size_t p = 0; p < all.size(); ++p)
    for (size_t begin = 0; p != me && begin < all[p].size();) {
      size_t sizes[2];
      const auto take = [&](void* to, size_t size) {
        std::memcpy(to, all[p].data() + begin, size);
        begin += size;
      };
      take(sizes, sizeof sizes);
      std::string name(sizes[0], ' ');
      take(name.data(), name.size());
      Whole theirs{std::vector<float>(sizes[1]), std::vector<int>(sizes[1])};
      take(theirs.values.data(), sizes[1] * sizeof(float));
      take(theirs.holders.data(), sizes[1] * sizeof(int));
      Whole& to = whole[name];
      to.values.resize(sizes[1]);
      to.holders.resize(sizes[1]);
      for (size_t i = 0; i < sizes[1]; ++i) {
        if (to.holders[i] == 0) to.values[i] = theirs.values[i];
        else if (theirs.holders[i] > 0 && to.values[i] != theirs.values[i])
          fault = formatted("process {} holds a different {}", p, name);
        to.holders[i] += theirs.holders[i];
      }
    }
}

// The same results on all processes; losses and norms are those of rank 0.
inline void merge(Outcome& outcome, const Processes& processes, size_t steps) {
  merge(outcome.gradients, outcome.fault, processes);
  for (Wholes& weights : outcome.earlier_weights) merge(weights, outcome.fault, processes);
  merge(outcome.weights, outcome.fault, processes);
  merge(outcome.optimizer_state, outcome.fault, processes);
  std::vector<double> scalars = outcome.losses;
  scalars.insert(scalars.end(), outcome.norms.begin(), outcome.norms.end());
  scalars.resize(2 * steps);  // also on processes without rank 0
  const size_t bytes = scalars.size() * sizeof(double);
  const std::string mine(reinterpret_cast<const char*>(scalars.data()), bytes);
  const std::vector<std::string> all = processes.all_gather("losses", mine + outcome.fault);
  std::memcpy(scalars.data(), all[0].data(), bytes);
  const auto norms = scalars.begin() + static_cast<int64_t>(steps);
  outcome.losses.assign(scalars.begin(), norms);
  outcome.norms.assign(norms, scalars.end());
  for (const std::string& text : all)
    if (text.size() > bytes) outcome.fault = text.substr(bytes);
}

// How much the distance of a tensor counts. A key bias shifts all scores of a query alike, except for the rotation of
// rotary positions: its gradient is a sum of which most cancels, but whose rounding error is in proportion to the
// gradient of the key weights, and so it counts in proportion. Without rotary positions all of it cancels, and in bf16
// what is left is mostly rounding error: then it does not count.
inline double share(const std::string& name, const Outcome& one) {
  constexpr std::string_view bias = "attn.k.bias";
  if (!name.ends_with(bias)) return 1;
  if (!one.key_biases) return 0;
  const std::string weights = name.substr(0, name.size() - bias.size()) + "attn.k.weight";
  const auto size = [&](const std::string& of) { return root_mean_square(one.gradients.at(of).values); };
  return std::min(1.0, size(name) / size(weights));
}

// The largest ||a - b|| / ||b|| over all tensors, as far as they count; NaN counts as infinite.
inline double distance(const Wholes& a, const Wholes& b, const Outcome& one = {}, const Directions& directions = {},
                       size_t step = 0) {
  double largest = 0;
  for (const auto& [name, whole] : b) {
    const auto other = a.find(name);
    double difference = 0, size = 0;
    if (other == a.end() || other->second.values.size() != whole.values.size())
      return std::numeric_limits<double>::infinity();
    const double counts = share(name, one);
    if (counts == 0 && !one.key_biases) continue;
    const std::vector<float>* const sizes = directions.sizes(step, name);
    for (size_t i = 0; i < whole.values.size(); ++i) {
      if (directions.unsure(sizes, i, counts)) continue;
      const double of_a = other->second.values[i], of_b = whole.values[i];
      difference += (of_a - of_b) * (of_a - of_b);
      size += of_b * of_b;
    }
    const double d = counts * (size > 0 ? std::sqrt(difference / size) : std::sqrt(difference));
    largest = std::isnan(d) ? std::numeric_limits<double>::infinity() : std::max(largest, d);
  }
  return largest;
}
// The same for all of them as one vector.
inline double whole_distance(const Wholes& a, const Wholes& b) {
  double difference = 0, size = 0;
  for (const auto& [name, whole] : b) {
    const std::vector<float>& of_a = a.at(name).values;
    for (size_t i = 0; i < whole.values.size(); ++i) {
      const double d = static_cast<double>(of_a[i]) - static_cast<double>(whole.values[i]);
      difference += d * d;
      size += static_cast<double>(whole.values[i]) * static_cast<double>(whole.values[i]);
    }
  }
  return std::sqrt(difference / size);
}
// Of the first `steps` at most.
inline double distance(const std::vector<double>& a, const std::vector<double>& b, size_t steps) {
  double largest = 0;
  for (size_t i = 0; i < std::min(steps, b.size()); ++i) {
    const double d = std::abs(a[i] / b[i] - 1);
    largest = std::isnan(d) ? std::numeric_limits<double>::infinity() : std::max(largest, d);
  }
  return largest;
}

// Did one of two outcomes move a weight by the other sign of a direction that is little more than rounding? Signs
// differ by lr where one is 0.
inline bool other_sign(const Wholes& a, const Wholes& b, const Outcome& one, size_t step) {
  const Directions& directions = one.directions;
  for (const auto& [name, whole] : b) {
    const std::vector<float>* const sizes = directions.sizes(step, name);
    const std::vector<float>& of_a = a.at(name).values;
    const double counts = share(name, one);
    for (size_t i = 0; (counts > 0 || one.limits_logits) && i < whole.values.size(); ++i)
      if (directions.unsure(sizes, i, counts) && std::abs(of_a[i] - whole.values[i]) > directions.lr / 2) return true;
  }
  return false;
}

// The distances of one outcome from another.
struct Distances {
  double loss = 0, norm = 0, gradients = 0, weights = 0;
  Distances() = default;
  Distances(double loss, double norm, double gradients, double weights)
      : loss(loss), norm(norm), gradients(gradients), weights(weights) {}
  Distances(const Outcome& a, const Outcome& b) : gradients(distance(a.gradients, b.gradients, b)) {
    size_t steps = b.losses.size();  // that begin with the same weights
    for (size_t s = 0; s <= b.earlier_weights.size(); ++s) {
      const Wholes &of_a = a.weights_after(s), &of_b = b.weights_after(s);
      weights = std::max(weights, distance(of_a, of_b, b, b.directions, s));
      if (std::isfinite(weights) && other_sign(of_a, of_b, b, s)) {
        steps = s + 1;
        break;
      }
    }
    loss = distance(a.losses, b.losses, steps);
    norm = distance(a.norms, b.norms, steps);
  }
  bool within(const Distances& bound) const {
    return loss <= bound.loss && norm <= bound.norm && gradients <= bound.gradients && weights <= bound.weights;
  }
  Distances or_larger(const Distances& other) const {
    return {std::max(loss, other.loss), std::max(norm, other.norm), std::max(gradients, other.gradients),
            std::max(weights, other.weights)};
  }
  std::string text() const {
    return formatted("loss {:.1e} | norm {:.1e} | gradients {:.1e} | weights {:.1e}", loss, norm, gradients, weights);
  }
};

}  // namespace llmc::selftest
