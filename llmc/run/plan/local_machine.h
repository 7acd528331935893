// local_machine.h: --machine local: how fast this machine's processors are at a run's ops, measured by training a
// layer of each kind of its model for a few steps, at its shapes and at halves of them, and by moving bytes between
// its ranks.
#pragma once
#include <mutex>

#include "core/clock.h"
#include "core/json.h"
#include "core/log.h"
#include "model/presets.h"
#include "run/options/options.h"
#include "run/plan/planner.h"
#include "run/ranks.h"
#include "run/reports/peak.h"

namespace llmc {

namespace detail {

// What a call of an op took.
struct Sample {
  double bytes, flops, seconds;
};

// The rate, with no part below zero, that is off least from these samples, each relative to its own time: the best of
// the least squares over some of the parts (there are only seven).
inline OpRate fit_rate(const std::vector<Sample>& samples) {
  OpRate best;
  double least = std::numeric_limits<double>::infinity();
  for (unsigned parts = 1; parts < 8; ++parts) {
    std::array<std::array<double, 4>, 3> m{};  // the normal equations; the last column: their right sides
    for (const Sample& s : samples) {
      const std::array<double, 3> x = {1 / s.seconds, s.bytes / s.seconds, s.flops / s.seconds};
      for (size_t i = 0; i < 3; ++i) {
        for (size_t j = 0; j < 3; ++j) m[i][j] += x[i] * x[j];
        m[i][3] += x[i];
      }
    }
    std::array<double, 3> rate{};
    std::vector<size_t> chosen;
    for (size_t i = 0; i < 3; ++i)
      if ((parts >> i & 1) != 0) chosen.push_back(i);
    for (const size_t pivot : chosen)  // Gauss: they are symmetric and positive
      for (const size_t row : chosen) {
        if (row == pivot) continue;
        const double factor = m[row][pivot] / m[pivot][pivot];
        for (size_t column = 0; column < 4; ++column) m[row][column] -= factor * m[pivot][column];
      }
    bool solved = true;
    for (const size_t i : chosen) {
      rate[i] = m[i][3] / m[i][i];
      solved = solved && std::isfinite(rate[i]) && rate[i] >= 0;
    }
    if (!solved) continue;
    double off = 0;
    for (const Sample& s : samples) {
      const double ratio = (rate[0] + rate[1] * s.bytes + rate[2] * s.flops) / s.seconds - 1;
      off += ratio * ratio;
    }
    if (off < least * 0.999) least = off, best = {rate[0], rate[1], rate[2]};  // among equals, the one of fewer parts
  }
  return best;
}

// The ops of a rank's step: for each op and size the mean of its calls, in the least disturbed of a few steps.
using Samples = std::map<std::string, std::vector<Sample>>;
inline void time_ops(const StepConfig& step, const Device& device, Samples& samples) {
  const Plan plan = make_plan(step, device);
  World world(step.layout.mesh());
  using Size = std::tuple<std::string, double, double>;  // op, bytes, flops
  std::map<Size, double> best;
  run_ranks(world, [&](int rank) {
    Run run(step, plan, device, world, rank);
    run.touch_memory();
    init_weights(run.trainer.state(), 1, run.stream);
    const BatchSource batches = [&](int64_t micro_batch) {
      const Philox rng(1, "tokens to measure with");
      HostBatch batch;
      for (int64_t i = 0; i < step.batch.rows(); ++i) {
        const auto draw = [&](int64_t which) {
          const uint64_t n = static_cast<uint64_t>(2 * (micro_batch * step.batch.rows() + i) + which);
          return static_cast<int32_t>(rng.bits(n) % static_cast<uint64_t>(step.model.vocab_size));
        };
        batch.tokens.push_back(draw(0));
        batch.targets.push_back(draw(1));
        batch.positions.push_back(static_cast<int32_t>(i % step.batch.T));
      }
      return batch;
    };
    for (int turn = 0; turn < 5; ++turn) {
      StreamTrace trace("ops", TraceZero());
      run.stream.set_trace(&trace);
      run.trainer.step(batches,
                       {.lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0, .step = turn + 1},
                       {.max_norm = 1});
      run.stream.synchronize();
      run.stream.set_trace(nullptr);
      if (turn == 0) continue;  // warms up
      std::map<Size, std::pair<int, double>> now;
      for (const TraceSpan& span : trace.take().spans) {
        if (span.kind != SpanKind::op) continue;
        auto& [calls, seconds] = now[{span.name, span.args["bytes"].get<double>(), span.args["flops"].get<double>()}];
        ++calls, seconds += span.end - span.begin;
      }
      for (const auto& [size, of_size] : now) {
        const double mean = of_size.second / of_size.first;
        best[size] = turn == 1 ? mean : std::min(best[size], mean);
      }
    }
  });
  for (const auto& [size, seconds] : best)
    if (seconds > 0) samples[std::get<0>(size)].push_back({std::get<1>(size), std::get<2>(size), seconds});
}

// The steps to measure: a layer of each kind, at the run's shapes, half of its rows, half of its widths, half of both.
inline std::vector<StepConfig> steps_to_measure(const StepConfig& step) {
  StepConfig one = step;
  one.layout = {};
  one.layout.zero.optimizer = step.layout.zero.optimizer;
  one.layout.zero.muon = step.layout.zero.muon;
  one.micro_batches = 1;
  one.generates = false;
  one.recompute = Recompute::none;
  ModelConfig& m = one.model;
  const bool both = m.experts.count > 0 && m.sparse_layers() < m.n_layer;
  m.n_layer = both ? 2 : 1;
  m.experts.dense_layers.clear();
  if (both) m.experts.dense_layers = {0};
  std::vector<StepConfig> all = {one};
  for (const auto& [rows, widths] : {std::pair{true, false}, std::pair{false, true}, std::pair{true, true}}) {
    StepConfig part = one;
    if (rows && part.batch.T >= 64) part.batch.T /= 2;
    else if (rows) part.batch.B = std::max<int64_t>(1, part.batch.B / 2);
    if (widths) {
      ModelConfig& c = part.model;
      const int64_t heads = std::max<int64_t>(1, c.n_head / c.n_kv_head);
      c.n_kv_head = std::max<int64_t>(1, c.n_kv_head / 2);
      c.n_head = c.n_kv_head * heads;
      c.n_embd = std::max<int64_t>(8, c.n_embd * c.n_head / one.model.n_head);
      c.n_ffn = std::max<int64_t>(8, c.n_ffn / 2);
      c.experts.width = c.experts.width / 2;
      c.experts.shared = c.experts.shared / 2;
      c.vocab_size = std::max<int64_t>(8, c.vocab_size / 2);
    }
    all.push_back(part);
  }
  return all;
}

// Seconds of a message between ranks as threads, and of a byte, while all of them exchange.
struct LinkRate {
  double message = 0, byte = 0;
};
inline LinkRate time_links(int ranks, const Device& device) {
  if (ranks == 1) return {};
  const Layout layout{.zero = {.shards = ranks}};
  World world(layout.mesh());
  std::array<double, 2> best;  // seconds of a ring of few bytes, and of many
  best.fill(std::numeric_limits<double>::infinity());
  const std::array<int64_t, 2> elements = {1, int64_t{1} << 18};  // of each rank
  std::mutex mutex;
  run_ranks(world, [&](int rank) {
    Arena arena(device, elements[1] * ranks * 4 + 4096), scratch(device, Groups::scratch_bytes);
    Stream stream(device, scratch);
    const Groups groups(layout, rank, device, [&](const std::string& name, const std::vector<int>& members) {
      return world.join(rank, name, members);
    });
    for (int turn = 0; turn < 10; ++turn)
      for (size_t size = 0; size < 2; ++size) {
        auto scope = arena.scope();
        const Tensor x = arena.alloc("links", "numbers", DType::fp32, {elements[size] * ranks});
        if (turn == 0) zero(x, stream);
        stream.synchronize();
        const auto begin = Clock::now();
        groups[GroupName::scalars].all_gather(x, stream);
        stream.synchronize();
        const double seconds = seconds_since(begin);
        std::lock_guard lock(mutex);
        if (turn > 1) best[size] = std::min(best[size], seconds);
      }
  });
  const double messages = ranks - 1;
  return {best[0] / messages,
          std::max(0.0, best[1] - best[0]) / messages / static_cast<double>((elements[1] - elements[0]) * 4)};
}

// A machine whose ops and links are as fast as measured for a rank of this run. device: of a rank; a CPU
inline Machine measure_machine(const StepConfig& step, const Device& device) {
  const int ranks = step.layout.ranks();
  Device all = device;  // every thread that the ranks have together
  all.threads = std::min(available_processors(), device.threads * ranks);
  all.sharers = 1;
  Samples samples;
  const std::vector<StepConfig> steps = steps_to_measure(step);
  const int64_t bytes = make_plan(steps[0], all).total_bytes();  // the largest
  CHECK(bytes <= host_memory(),
        "--machine {}: a layer of this model at this --batch-size and --seq-len takes {} to be measured, and this "
        "machine has {}: use a smaller one, or leave out --machine",
        local_machine, human_bytes(bytes), human_bytes(host_memory()));
  for (const StepConfig& one : steps) time_ops(one, all, samples);
  Machine machine;
  // The ranks share what was measured; where they have more threads than there are processors, they wait for those.
  const double share = ranks, crowd = std::max(1.0, static_cast<double>(device.threads * ranks) / all.threads);
  machine.flops_per_s = measure_matmul_peak(all, step.precision.products) / share;
  machine.bytes_per_s = measure_bandwidth(all) / share;
  for (const auto& [name, of_op] : samples) {
    const OpRate rate = fit_rate(of_op);
    machine.measured[name] = {rate.call * crowd, rate.byte * share, rate.flop * share};
  }
  const LinkRate links = time_links(ranks, device);
  machine.links = {{.bytes_per_s = 1 / std::max(links.byte, 1e-15), .latency_s = links.message}};
  return machine;
}

inline nlohmann::json to_json(const Machine& m) {
  nlohmann::json ops = nlohmann::json::object();
  for (const auto& [name, rate] : m.measured) ops[name] = {rate.call, rate.byte, rate.flop};
  return {{"flops_per_s", m.flops_per_s},
          {"bytes_per_s", m.bytes_per_s},
          {"link_bytes_per_s", m.links[0].bytes_per_s},
          {"link_latency_s", m.links[0].latency_s},
          {"ops", ops}};
}
inline Machine machine_of(const nlohmann::json& json) {
  Machine m;
  m.flops_per_s = json.at("flops_per_s"), m.bytes_per_s = json.at("bytes_per_s");
  m.links = {{.bytes_per_s = json.at("link_bytes_per_s"), .latency_s = json.at("link_latency_s")}};
  for (const auto& [name, rate] : json.at("ops").items()) m.measured[name] = {rate.at(0), rate.at(1), rate.at(2)};
  return m;
}

// All that decides which ops a step has, and in which dtypes.
inline std::string numerics_of(const StepConfig& step) {
  const Precision& p = step.precision;
  const Muon& muon = step.layout.zero.muon;
  return formatted("{}, masters {} {}, slots {} {}, averages {}, wire {}, {} {} {}, {} {} {} {} {} {}, z {}, clip {}",
                   p.weights, p.keeps_masters(), p.master_dtype(), p.slot_dtype(0), p.slot_dtype(1), p.averages, p.wire,
                   p.linear, std::string(p.fp8_skip), p.gathers_fp8, step.layout.zero.optimizer, muon.coefficients,
                   muon.scale, muon.heads, muon.rows, muon.dtype.value_or(p.weights), step.z_loss,
                   step.qk_clip.value_or(0));
}

// What the measurement depends on.
inline std::string key_of(const StepConfig& step, const Device& device) {
  const StepConfig one = steps_to_measure(step)[0];
  return formatted("{} | {} | {} | {} ranks of {} threads on {} | {} x {} tokens, documents {}, head {} | {}",
                   processor_name(), matmul_library(device), numerics_of(one), step.layout.ranks(), device.threads,
                   available_processors(), one.batch.B, one.batch.T, static_cast<int>(one.documents), one.head_chunks,
                   config_to_hf(one.model, one.precision.weights).dump());
}

}  // namespace detail

// This machine, as measured for a run within the last hour. log: says that it measures; none: silent
inline std::shared_ptr<const Machine> measured_machine(const StepConfig& step, const Device& device, Log* log) {
  CHECK(device.kind == DeviceKind::cpu && step.layout.zero.holds == Holds::training_state);
  constexpr double an_hour = 3600;
  MeasurementCache cache("local_machine.json");
  const std::string key = detail::key_of(step, device);
  Machine machine;
  try {
    machine = detail::machine_of(cache.find(key, an_hour));
  } catch (const nlohmann::json::exception&) {  // none, or damaged
    if (log != nullptr) log->line("measuring this machine: one layer of each kind, at four sizes");
    machine = detail::measure_machine(step, device);
    cache.keep(key, detail::to_json(machine), an_hour);
  }
  machine.name = local_machine;
  machine.source = "measured; " + cache.file();
  machine.one_at_a_time = true;
  machine.cores = available_processors();
  return std::make_shared<const Machine>(std::move(machine));
}

}  // namespace llmc
