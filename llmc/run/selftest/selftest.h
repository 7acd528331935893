// selftest.h: --selftest compares tiny models with awkward sizes, in layouts of the available ranks, with the same
// models on one rank: loss, gradient norm, every gradient, the resulting weights (contracts 3 and 5).
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/log.h"
#include "run/processes.h"
#include "run/ranks.h"
#include "run/selftest/layouts.h"
#include "run/selftest/ties.h"
#include "shard/replica_check.h"

namespace llmc {

namespace selftest {

// Whole tensors, and how many ranks hold each element.
struct Whole {
  std::vector<float> values;
  std::vector<int> holders;
  bool operator==(const Whole& other) const { return values == other.values; }
};
using Wholes = std::map<std::string, Whole>;

// The results of a layout: whole parameters and gradients, assembled from all ranks.
struct Outcome {
  std::vector<double> losses, norms;
  Wholes gradients, weights, optimizer_state;  // the last two after the last step
  bool key_biases = false;                     // are their gradients more than rounding errors?
  std::string fault;                           // copies that differ between ranks, or faults that ranks report
};

// Assembles every rank's slices into whole tensors; elements that several ranks hold must be equal (contract 14).
inline void collect(Wholes& all, std::string& fault, const StateEntry& e, const std::string& name, int rank,
                    Stream& stream) {
  Whole& whole = all[name];
  whole.values.resize(static_cast<size_t>(e.param->numel()));
  whole.holders.resize(whole.values.size());
  const Elements elements = e.elements();
  const HostView held(e.tensor, stream);
  with_type(e.tensor.dtype, [&](auto tag) {
    const auto* from = held.data<typename decltype(tag)::type>();
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
    int weights, state;
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
      expected[p.name] = {copies * of_weights, copies * of_state};
    }
  }
  auto check = [&](const Wholes& all, int Expected::*times) {
    for (const auto& [name, whole] : all) {
      const int n = expected.at(name.substr(0, name.find(':'))).*times;
      for (const int holders : whole.holders)
        if (holders != n) outcome.fault = formatted("{} ranks hold an element of {}, expected {}", holders, name, n);
    }
  };
  check(outcome.weights, &Expected::weights);
  check(outcome.optimizer_state, &Expected::state);
  if (outcome.weights.size() != expected.size()) outcome.fault = "a parameter is held by no rank";
}

// Micro-batch m of a step for a reader: random tokens, the same for every step. Some begin a document.
inline HostBatch read_batch(const StepConfig& step, int reader, int64_t micro_batch) {
  HostBatch batch;
  const Philox rng(7, "self-test");
  const int64_t T = step.batch.T, rows = step.batch.B * T,
                first = (micro_batch * step.layout.readers() + reader) * rows;
  const uint64_t V = static_cast<uint64_t>(step.model.vocab_size);
  for (int64_t i = 0; i < rows; ++i) {
    const uint64_t token = static_cast<uint64_t>(first + i);
    batch.tokens.push_back(static_cast<int32_t>(rng.bits(2 * token) % V));
    batch.targets.push_back(static_cast<int32_t>(rng.bits(2 * token + 1) % V));
    const bool begins = i % T == 0 || (step.documents == Documents::apart && batch.tokens.back() % 11 == 0);
    batch.positions.push_back(begins ? 0 : batch.positions.back() + 1);
  }
  return batch;
}

// The parts that a model, or a test that plants a bug, replaces. Free and released memory is always poisoned.
struct Parts {
  const Hooks& hooks = poison_hooks;
  HostBatch (*read)(const StepConfig& step, int reader, int64_t micro_batch) = read_batch;
  void (*init)(const StepConfig& step, const ModelState& state, Stream& stream) = init_drawn;  // the weights
};

// Where a layout runs.
struct Machine {
  Device device = {};  // of rank 0
  Backend backend = Backend::threads;
  int gpus = 1;
  const Processes* processes = nullptr;  // that have the ranks; null: this one has them all

  Device of_rank(int rank) const {
    Device its = device;
    if (!processes) its.gpu = rank % gpus;
    else its.gpu = (device.gpu + rank - processes->local_ranks().first) % gpus;
    return its;
  }
};

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

// routes: where they are recorded. Ranks then wait for every op, which hides missing waits between streams.
inline Outcome run_layout(const StepConfig& step, const Machine& machine = {}, const Parts& parts = {},
                          int steps = selftest::steps, Routes* routes = nullptr) {
  Outcome outcome;
  outcome.key_biases = step.model.family.positions == Positions::rotary && step.precision.activations != DType::bf16;
  std::vector<Outcome> after(static_cast<size_t>(steps));  // the state of all ranks after each step
  std::string copies;                                      // how they differ bitwise after the last step
  std::mutex mutex;
  const Plan plan = make_plan(step, machine.device);
  World world(step.layout.mesh(), machine.backend, parts.hooks,
              machine.processes ? machine.processes->local_ranks() : LocalRanks());
  run_ranks(world, [&](int rank) {
    Run run(step, plan, machine.of_rank(rank), world, rank);
    parts.init(step, run.trainer.state(), run.stream);
    const BatchSource batches = [&](int64_t micro_batch) { return parts.read(step, run.groups.reader(), micro_batch); };
    std::optional<RouteRecorder> recorder;
    if (routes != nullptr) recorder.emplace(*routes, mutex, run);
    run.trainer.accumulate_gradients(batches);
    run.stream.synchronize();
    {
      std::lock_guard lock(mutex);
      collect_gradients(outcome, run.trainer.state(), rank, run.stream);
    }
    for (int s = 1; s <= steps; ++s) {
      if (recorder) recorder->begin_step(s);
      // An epsilon as large as the gradients: the update is smooth, so errors show in proportion.
      const StepResult r = run.trainer.step(
          batches, {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0.1f, .step = s},
          {.max_norm = 1});
      std::lock_guard lock(mutex);
      collect_state(after[static_cast<size_t>(s) - 1], run.trainer.state(), rank, run.stream);
      for (auto& [all, mine] : {std::pair{&outcome.losses, r.loss}, {&outcome.norms, r.grad_norm}}) {
        if (static_cast<int>(all->size()) < s) all->push_back(mine);
        else if (!(all->back() == mine)) outcome.fault = formatted("rank {} reports another loss or norm", rank);
      }
    }
    if (const auto differ = diverged_copies(run.trainer.state(), formatted("rank {}", rank), run.stream)) {
      std::lock_guard lock(mutex);
      copies = "copies differ: " + *differ;
    }
  });
  for (Outcome& state : after) {  // every update leaves the copies equal and the model whole
    if (!machine.processes) require_whole(state, step);
    if (outcome.fault.empty()) outcome.fault = state.fault;
  }
  if (outcome.fault.empty()) outcome.fault = copies;
  outcome.weights = std::move(after.back().weights);
  outcome.optimizer_state = std::move(after.back().optimizer_state);
  if (machine.processes) {
    merge(outcome, *machine.processes, static_cast<size_t>(steps));
    require_whole(outcome, step);
    if (routes != nullptr) merge(*routes, *machine.processes);
  }
  return outcome;
}

// Tokens that a layout routes differently from one rank that begins with the same weights.
inline Rerouted rerouted(const StepConfig& one, const StepConfig& step, const Machine& machine = {},
                         const Parts& parts = {}, int steps = selftest::steps) {
  Routes expected, found;
  run_layout(one, {}, {.init = parts.init}, steps, &expected);
  run_layout(step, machine, parts, steps, &found);
  return rerouted(expected, found);
}

// The largest ||a - b|| / ||b|| over all tensors; NaN counts as infinite.
inline double distance(const Wholes& a, const Wholes& b, bool key_biases = false) {
  double largest = 0;
  for (const auto& [name, whole] : b) {
    const auto other = a.find(name);
    double difference = 0, size = 0;
    if (other == a.end() || other->second.values.size() != whole.values.size())
      return std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < whole.values.size(); ++i) {
      const double of_a = other->second.values[i], of_b = whole.values[i];
      difference += (of_a - of_b) * (of_a - of_b);
      size += of_b * of_b;
    }
    if (!key_biases && name.ends_with("attn.k.bias")) continue;
    const double d = size > 0 ? std::sqrt(difference / size) : std::sqrt(difference);
    largest = std::isnan(d) ? std::numeric_limits<double>::infinity() : std::max(largest, d);
  }
  return largest;
}
inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double d = std::abs(a[i] / b[i] - 1);
    largest = std::isnan(d) ? std::numeric_limits<double>::infinity() : std::max(largest, d);
  }
  return largest;
}

// The distances of one outcome from another. A key bias shifts all scores of a query alike, except for the rotation of
// rotary positions. Without rotary positions its true gradient is zero; with them it is, in bf16, mostly rounding
// error. In both cases key biases are left out.
struct Distances {
  double loss, norm, gradients, weights;
  Distances(const Outcome& a, const Outcome& b)
      : loss(distance(a.losses, b.losses)),
        norm(distance(a.norms, b.norms)),
        gradients(distance(a.gradients, b.gradients, b.key_biases)),
        weights(distance(a.weights, b.weights, b.key_biases)) {}
  bool within(const Distances& bound) const {
    return loss <= bound.loss && norm <= bound.norm && gradients <= bound.gradients && weights <= bound.weights;
  }
  Distances or_larger(const Distances& other) const {
    Distances both = *this;
    both.loss = std::max(loss, other.loss);
    both.norm = std::max(norm, other.norm);
    both.gradients = std::max(gradients, other.gradients);
    both.weights = std::max(weights, other.weights);
    return both;
  }
};

}  // namespace selftest

// Compares these layouts on the machine with one rank on the CPU. Prints a table for each model, with a row for each
// number of ranks, and a line for each layout that failed; false: one failed. The layouts run with `parts`, the one
// rank does not.
inline bool run_selftest(Log& log, const std::vector<selftest::ModelLayouts>& models,
                         const selftest::Machine& machine = {}, const selftest::Parts& parts = {}) {
  using namespace selftest;
  const auto begin = std::chrono::steady_clock::now();
  const int64_t total = count_layouts(models);
  int64_t number = 0;
  CHECK(total > 0, "the self-test has no layout to compare");
  int max_ranks = 0;
  for (const ModelLayouts& m : models) max_ranks = std::max(max_ranks, m.layouts.back().ranks());
  log.line(formatted("self-test: {} layouts of up to {} ranks; in each, ranks together train a tiny model for {} steps",
                     total, max_ranks, steps));
  const auto row = [](const std::string& name, const auto&... columns) {
    return formatted("  {:-34} {:9} {:9} {:9} {:9}", name, columns...);
  };
  const auto distances = [&](const std::string& name, const Distances& d) {
    const auto text = [](double x) { return formatted("{:.1e}", x); };
    return row(name, text(d.loss), text(d.norm), text(d.gradients), text(d.weights));
  };
  int64_t failed = 0, not_compared = 0;
  for (const ModelLayouts& m : models) {
    const Model& compared = m.model;
    const ModelConfig model = compared.config();
    const DType dtype = compared.dtype;
    Parts used = parts;  // for the layouts
    if (model.experts.count > 0 && dtype == DType::bf16 && parts.init == init_drawn)
      used.init = init_routes_by_token;  // without it, some tokens' scores of two experts would be closer than rounding
    const Parts right{.init = used.init};
    const StepConfig one = step_config(model, dtype, 1, Layout{});
    const Outcome alone = run_layout(one, {}, right);
    // Contract 5: the distance between two runs that differ only in the micro-batch, or a bound where that is larger.
    const Distances noise(run_layout(step_config(model, dtype, 2, Layout{}), {}, right), alone);
    const bool fp32 = dtype == DType::fp32;
    // Another device rounds differently in bf16, and so do ranks that add parts of a product or merge parts of
    // attention: they may be as far away as both are from fp32. (Two runs that differ only in the micro-batch round
    // every activation alike.)
    const Distances from_fp32 =
        fp32 ? noise : Distances(run_layout(step_config(model, DType::fp32, 1, Layout{}), {}, right), alone);
    const auto twice = [&](const Distances& usual) {
      Distances bound = usual;
      for (auto which : {&Distances::norm, &Distances::gradients, &Distances::weights})
        bound.*which = fp32 ? 1e-5 : std::max(2 * usual.*which, 0x1p-8);
      bound.loss = fp32 ? 1e-6 : std::max(2 * usual.loss, 1e-3);
      return bound;
    };
    const Distances near = twice(noise), farther = twice(noise.or_larger(from_fp32));
    const bool other_device = machine.device.kind != DeviceKind::cpu;
    const auto text = [](const Distances& d) {
      return formatted("loss {:.1e} | norm {:.1e} | gradients {:.1e} | weights {:.1e}", d.loss, d.norm, d.gradients,
                       d.weights);
    };
    const auto in_parts = [](const Layout& l) { return l.tensor.ranks > 1 || l.context.ranks > 1; };
    log.line("");
    log.line(formatted("{} | {}", to_string(compared), axes_of(m.layouts)));
    log.line(row("largest distance from one rank", "loss", "norm", "gradients", "weights"));
    log.line(distances("allowed", other_device ? farther : near));
    if (!fp32 && !other_device && std::ranges::any_of(m.layouts, in_parts))
      log.line(distances("allowed with tp or cp", farther));
    int64_t compared_here = 0, ties_here = 0;
    for (auto from = m.layouts.begin(); from != m.layouts.end();) {
      const int ranks = from->ranks();
      const auto to = std::find_if(from, m.layouts.end(), [&](const Layout& l) { return l.ranks() != ranks; });
      const std::span of_this_size(from, to);
      from = to;
      const std::string of_ranks = formatted("{} rank{}", ranks, ranks == 1 ? "" : "s");
      Distances largest(alone, alone);
      int good = 0, ties = 0;
      Outcome first;  // the first of those that agree bitwise
      for (const Layout& layout : of_this_size) {
        log.progress(formatted("{}, {}: layout", to_string(compared), of_ranks), ++number, total);
        const StepConfig step = step_config(model, dtype, layout);
        const Outcome outcome = run_layout(step, machine, used);
        if (begins(layout)) first = outcome;
        const Distances d(outcome, alone);
        largest = largest.or_larger(d);
        std::string verdict = outcome.fault, tie;
        const Distances& allowed = other_device || in_parts(layout) ? farther : near;
        const bool sparse = model.experts.count > 0, too_far = !d.within(allowed);
        const Rerouted routes = sparse && any_process(machine.processes, "distances of a layout", too_far)
                                    ? rerouted(one, step, machine, used)
                                    : Rerouted();
        if (too_far && routes.tokens > 0 && routes.ties) tie = to_string(routes);
        else if (too_far) verdict += " too far" + (sparse ? "; " + to_string(routes) : "");
        // Contracts 3 and 4: the stages agree bit for bit, and so do servers and schedules; overlap changes nothing
        // either. But zb-v has both parts of a tied table's gradient on one rank, and adds them in another order.
        const bool reorders = model.tied && layout.pipeline.schedule == Schedule::zb_v;
        if (!reorders &&
            (outcome.losses != first.losses || outcome.norms != first.norms || outcome.weights != first.weights))
          verdict += " not bitwise equal to the first of its kind";
        const bool is_tie = verdict.empty() && !tie.empty();
        good += verdict.empty() && !is_tie;
        ties += is_tie;
        if (is_tie || !verdict.empty())
          log.line(formatted("  {} | {} | {}{}", to_string(layout), text(d),
                             is_tie ? "NOT COMPARED: " : "FAILED:", is_tie ? tie : verdict));
      }
      compared_here += good;
      ties_here += ties;
      failed += static_cast<int>(of_this_size.size()) - good - ties;
      log.line(distances(formatted("{}: {} of {} layouts good", of_ranks, good, of_this_size.size()), largest));
    }
    if (compared_here == 0 && ties_here > 0) {
      log.line("  FAILED: none of the layouts could be compared");
      failed += std::exchange(ties_here, 0);
    }
    not_compared += ties_here;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  log.line("");
  log.line(formatted("self-test: {} of {} layouts are good{} | {}", total - failed - not_compared, total,
                     not_compared == 0 ? "" : formatted("; near ties of routers: {} not compared", not_compared),
                     human_duration(seconds)));
  return failed == 0;
}

}  // namespace llmc
