// selftest.h: --selftest compares a tiny model with awkward sizes, in every layout of the available ranks, with one
// rank: loss, gradient norm, every gradient, the resulting weights (contracts 3 and 5). A new axis of parallelism is
// one more line of layouts().
#pragma once
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "core/log.h"
#include "run/processes.h"
#include "run/ranks.h"

namespace llmc {

namespace selftest {

inline constexpr int64_t sequences = 24, seq_len = 19;  // per step; numbers of ranks that do not divide it are left out
inline constexpr int steps = 2;

// A tiny model with odd sizes: uneven layers, grouped heads, a vocabulary that is a multiple of nothing.
inline ModelConfig awkward_model(const char* family = "gpt2", bool tied = true) {
  ModelConfig m;
  m.family = *find_family(family);
  m.n_layer = 3;
  const bool grouped = m.family.norm == Norm::rmsnorm;
  m.n_head = grouped ? 6 : 3;
  m.n_kv_head = grouped ? 2 : 3;
  m.head_size = grouped ? 6 : 7;
  m.n_embd = m.family.own_head_size ? 22 : m.q_size();
  m.n_ffn = 50;
  m.vocab_size = 131;
  m.n_positions = seq_len;
  m.tied = tied;
  m.rotary.scaled = m.family.model_type == std::string_view("llama");
  m.rotary.scaling.original_positions = 8;  // so that a short sequence sees the scaling
  return m;
}

// The models that are compared: every family in every dtype, GPT-2 with tied and with untied embeddings.
struct Model {
  const char* family;
  bool tied;
  DType dtype;
};
inline std::vector<Model> all_models() {
  std::vector<Model> all;
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    bool tied = true;  // the families take turns
    all.push_back({"gpt2", false, dtype});
    for (const Family& f : families) all.push_back({f.model_type, std::exchange(tied, !tied), dtype});
  }
  return all;
}

inline StepConfig step_config(const ModelConfig& model, DType dtype, int64_t batch_size, const ZeroConfig& zero) {
  return {.model = model,
          .dtype = dtype,
          .batch = {batch_size, seq_len},
          .micro_batches = sequences / batch_size / zero.ranks(),
          .zero = zero};
}

// Every layout of this many ranks; empty if they cannot share a step equally. A layout that is not an all-reduce in
// stage 0 or a parameter server agrees bit for bit with the last one that was.
inline std::vector<ZeroConfig> layouts(int ranks) {
  std::vector<ZeroConfig> all;
  for (int replicas = 1; replicas <= ranks; ++replicas)
    for (const GradReduce reduce : {GradReduce::step, GradReduce::micro})
      for (int stage = 0; stage <= 3; ++stage)
        if (sequences % ranks == 0 && ranks % replicas == 0)
          all.push_back({.stage = stage, .grad_reduce = reduce, .shards = ranks / replicas, .replicas = replicas});
  for (const GradReduce reduce : {GradReduce::step, GradReduce::micro})
    for (const DpSync sync : all_dp_syncs)
      if (sequences % ranks == 0 && ranks > 1 && sync != DpSync::all_reduce)
        all.push_back({.grad_reduce = reduce, .shards = ranks, .sync = sync});
  return all;
}

// The results of a layout: whole parameters and gradients, assembled from all ranks.
struct Outcome {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<float>> gradients, weights;
  std::string fault;  // copies that differ between ranks, or what they report of a step
};

// Assembles every rank's slices into whole tensors; elements that several ranks hold must be equal.
inline void collect(std::map<std::string, std::vector<float>>& whole, std::string& fault, const StateTable& table,
                    int rank, Stream& stream) {
  for (const StateEntry& e : table) {
    if (e.kind != StateKind::weight) continue;
    std::vector<float>& to = whole[e.param->name];
    to.resize(static_cast<size_t>(e.param->numel()), std::numeric_limits<float>::infinity());  // held by no rank so far
    const HostView held(e.tensor, stream);
    with_type(e.tensor.dtype, [&](auto tag) {
      const auto* from = held.data<typename decltype(tag)::type>();
      for (int64_t i = 0; i < e.tensor.numel(); ++i) {
        float& element = to[static_cast<size_t>(e.begin + i)];
        const float value = static_cast<float>(from[i]);
        if (std::isinf(element)) element = value;
        else if (!(element == value)) fault = formatted("rank {} holds a different {}", rank, e.param->name);
      }
    });
  }
}

// What a rank reads as micro-batch m of a step: random tokens, the same for every step.
inline HostBatch read_batch(const StepConfig& step, int rank, int64_t micro_batch) {
  HostBatch batch;
  const Philox rng(7, "self-test");
  const int64_t T = step.batch.T, rows = step.batch.B * T, first = (micro_batch * step.zero.ranks() + rank) * rows;
  const uint64_t V = static_cast<uint64_t>(step.model.vocab_size);
  for (int64_t i = 0; i < rows; ++i) {
    const uint64_t token = static_cast<uint64_t>(first + i);
    batch.tokens.push_back(static_cast<int32_t>(rng.bits(2 * token) % V));
    batch.targets.push_back(static_cast<int32_t>(rng.bits(2 * token + 1) % V));
    batch.positions.push_back(static_cast<int32_t>(i % T));
  }
  return batch;
}

// What a test replaces to plant a bug. Free and released memory is always poisoned.
struct Parts {
  const Hooks& hooks = poison_hooks;
  HostBatch (*read)(const StepConfig& step, int rank, int64_t micro_batch) = read_batch;
};

// Where a layout runs.
struct Machine {
  Device device = {};  // of rank 0
  Backend backend = Backend::threads;
  int gpus = 1;
  const Processes* processes = nullptr;  // of the ranks; none: this one has them all

  Device of_rank(int rank) const {
    Device its = device;
    if (!processes) its.gpu = rank % gpus;
    else its.gpu = (device.gpu + rank - processes->local_ranks().first) % gpus;
    return its;
  }
};

// Completes the whole tensors with what the ranks of other processes hold.
inline void merge(std::map<std::string, std::vector<float>>& whole, std::string& fault, const Processes& processes) {
  std::string mine;
  const auto append = [&](const void* bytes, size_t size) { mine.append(static_cast<const char*>(bytes), size); };
  for (const auto& [name, values] : whole) {
    const size_t sizes[] = {name.size(), values.size()};
    append(sizes, sizeof sizes);
    append(name.data(), name.size());
    append(values.data(), values.size() * sizeof(float));
  }
  const std::vector<std::string> all = processes.all_gather("tensors", mine);
  for (size_t p = 0; p < all.size(); ++p)
    for (size_t at = 0; at < all[p].size();) {
      size_t sizes[2];
      std::memcpy(sizes, all[p].data() + at, sizeof sizes);
      const std::string name = all[p].substr(at + sizeof sizes, sizes[0]);
      std::vector<float> values(sizes[1]);
      std::memcpy(values.data(), all[p].data() + at + sizeof sizes + sizes[0], sizes[1] * sizeof(float));
      at += sizeof sizes + sizes[0] + sizes[1] * sizeof(float);
      std::vector<float>& to = whole[name];
      to.resize(values.size(), std::numeric_limits<float>::infinity());
      for (size_t i = 0; i < values.size(); ++i) {
        if (std::isinf(to[i])) to[i] = values[i];
        else if (!std::isinf(values[i]) && to[i] != values[i])
          fault = formatted("process {} holds a different {}", p, name);
      }
    }
}

// The same results on all processes; losses and norms are those of rank 0.
inline void merge(Outcome& outcome, const Processes& processes) {
  merge(outcome.gradients, outcome.fault, processes);
  merge(outcome.weights, outcome.fault, processes);
  std::vector<double> scalars = outcome.losses;
  scalars.insert(scalars.end(), outcome.norms.begin(), outcome.norms.end());
  scalars.resize(2 * steps);  // of processes without rank 0 as well
  const size_t bytes = scalars.size() * sizeof(double);
  const std::string mine(reinterpret_cast<const char*>(scalars.data()), bytes);
  const std::vector<std::string> all = processes.all_gather("losses", mine + outcome.fault);
  std::memcpy(scalars.data(), all[0].data(), bytes);
  outcome.losses.assign(scalars.begin(), scalars.begin() + steps);
  outcome.norms.assign(scalars.begin() + steps, scalars.end());
  for (const std::string& text : all)
    if (text.size() > bytes) outcome.fault = text.substr(bytes);
}

inline Outcome run_layout(const StepConfig& step, const Machine& machine = {}, const Parts& parts = {}) {
  Outcome outcome;
  std::mutex mutex;
  const Plan plan = make_plan(step, machine.device);
  World world(step.zero.mesh(), machine.backend, parts.hooks,
              machine.processes ? machine.processes->local_ranks() : LocalRanks());
  run_ranks(world, [&](int rank) {
    Run run(step, plan, machine.of_rank(rank), world, rank);
    init_weights(run.trainer.state(), 42, run.stream);
    const BatchSource batches = [&](int64_t micro_batch) { return parts.read(step, rank, micro_batch); };
    run.trainer.accumulate_gradients(batches);
    run.stream.synchronize();
    {
      std::lock_guard lock(mutex);
      collect(outcome.gradients, outcome.fault, run.trainer.state().gradient_table(), rank, run.stream);
    }
    for (int s = 1; s <= steps; ++s) {
      // An epsilon as large as the gradients: the update is smooth and shows an error in proportion.
      const StepResult r = run.trainer.step(
          batches, {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0.1f, .step = s},
          {.max_norm = 1});
      std::lock_guard lock(mutex);
      for (auto& [all, mine] : {std::pair{&outcome.losses, r.loss}, {&outcome.norms, r.grad_norm}}) {
        if (static_cast<int>(all->size()) < s) all->push_back(mine);
        else if (!(all->back() == mine)) outcome.fault = formatted("rank {} reports another loss or norm", rank);
      }
    }
    std::lock_guard lock(mutex);
    collect(outcome.weights, outcome.fault, run.trainer.state().state_table(), rank, run.stream);
  });
  if (machine.processes) merge(outcome, *machine.processes);
  return outcome;
}

// The largest ||a - b|| / ||b|| of all tensors; NaN counts as infinite.
inline double distance(const std::map<std::string, std::vector<float>>& a,
                       const std::map<std::string, std::vector<float>>& b) {
  double largest = 0;
  for (const auto& [name, values] : b) {
    const auto other = a.find(name);
    double difference = 0, size = 0;
    if (other == a.end() || other->second.size() != values.size()) return std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < values.size(); ++i) {
      difference += (double{other->second[i]} - values[i]) * (double{other->second[i]} - values[i]);
      size += double{values[i]} * values[i];
    }
    // The key biases' true gradient is zero: what is there is rounding error.
    if (name.ends_with("attn.k.bias")) continue;
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

// The distances of one outcome from another.
struct Distances {
  double loss, norm, gradients, weights;
  Distances(const Outcome& a, const Outcome& b)
      : loss(distance(a.losses, b.losses)),
        norm(distance(a.norms, b.norms)),
        gradients(distance(a.gradients, b.gradients)),
        weights(distance(a.weights, b.weights)) {}
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

// Compares every layout on the machine with one rank on the CPU, for each of the models. Prints a line for each number
// of ranks and for each layout that failed; false: one failed. The layouts, not the one rank, run with `parts`.
// layouts_of(ranks): those to compare.
inline bool run_selftest(Log& log, int64_t max_ranks, const selftest::Machine& machine = {},
                         const selftest::Parts& parts = {},
                         const std::vector<selftest::Model>& models = selftest::all_models(),
                         std::vector<ZeroConfig> (*layouts_of)(int ranks) = selftest::layouts) {
  using namespace selftest;
  int failed = 0, count = 0;
  for (const auto& [family, tied, dtype] : models) {
    const ModelConfig model = awkward_model(family, tied);
    const Outcome alone = run_layout(step_config(model, dtype, 1, {}));
    // Contract 5: the distance between two runs that differ only in the micro-batch, or a bound where that is larger.
    const Distances noise(run_layout(step_config(model, dtype, 2, {})), alone);
    const bool fp32 = dtype == DType::fp32;
    auto bound = [&](double of_noise, double least) { return fp32 ? least : std::max(2 * of_noise, least); };
    // Another device rounds differently in bf16, so it may be as far away as both are from fp32.
    Distances from_fp32 = noise;
    if (!fp32 && machine.device.kind != DeviceKind::cpu)
      from_fp32 = Distances(run_layout(step_config(model, DType::fp32, 1, {})), alone);
    auto usual = [&](double Distances::*which) { return std::max(noise.*which, from_fp32.*which); };
    const double loss = bound(usual(&Distances::loss), fp32 ? 1e-6 : 1e-3),
                 norm = bound(usual(&Distances::norm), fp32 ? 1e-5 : 0x1p-8),
                 gradients = bound(usual(&Distances::gradients), fp32 ? 1e-5 : 0x1p-8),
                 weights = bound(usual(&Distances::weights), fp32 ? 1e-5 : 0x1p-8);
    log.line(formatted(
        "{} in {}, {} embeddings: largest distances from one rank; allowed: loss {:.1e}, norm {:.1e}, gradients "
        "{:.1e}, weights {:.1e}",
        family, dtype, tied ? "tied" : "untied", loss, norm, gradients, weights));
    const auto text = [](const Distances& d) {
      return formatted("loss {:.1e} | norm {:.1e} | gradients {:.1e} | weights {:.1e}", d.loss, d.norm, d.gradients,
                       d.weights);
    };
    for (int ranks = 1; ranks <= max_ranks; ++ranks) {
      const std::vector<ZeroConfig> all = layouts_of(ranks);
      Distances largest(alone, alone);
      int good = 0;
      Outcome first;  // of those that agree bit for bit
      int64_t number = 0;
      for (const ZeroConfig& zero : all) {
        log.progress(formatted("  {} rank(s): layout", ranks), ++number, static_cast<int64_t>(all.size()));
        const Outcome outcome = run_layout(step_config(model, dtype, 1, zero), machine, parts);
        if (zero.stage == 0 && zero.sync <= DpSync::parameter_server) first = outcome;
        const Distances d(outcome, alone);
        largest = largest.or_larger(d);
        std::string verdict = outcome.fault;
        if (!(d.loss <= loss && d.norm <= norm && d.gradients <= gradients && d.weights <= weights))
          verdict += " too far";
        // Contract 3: the stages agree bit for bit, and so do the servers.
        if (outcome.losses != first.losses || outcome.norms != first.norms || outcome.weights != first.weights)
          verdict += formatted(" not bitwise equal to {}",
                               zero.sync == DpSync::all_reduce ? "stage 0" : name_of(DpSync::parameter_server));
        good += verdict.empty();
        if (!verdict.empty())
          log.line(formatted("  dp {} = {} x {}, {}, stage {}, reduce {} | {} | FAILED:{}", ranks, zero.replicas,
                             zero.shards, zero.sync, zero.stage, zero.grad_reduce, text(d), verdict));
      }
      count += static_cast<int>(all.size());
      failed += static_cast<int>(all.size()) - good;
      if (!all.empty())
        log.line(formatted("  {:2} rank(s): {} of {} layouts good | {}", ranks, good, all.size(), text(largest)));
    }
  }
  log.line(formatted("self-test: {} of {} layouts are good", count - failed, count));
  return failed == 0;
}

}  // namespace llmc
