// planner.h: finds what a run needs by running the trainer itself on the null device, which computes nothing: memory by
// name, work by op, at given rates time. The run's arenas have exactly this size, so plan and code cannot drift apart.
#pragma once
#include "run/checkpoints/checkpoint_share.h"
#include "schedule/balance.h"
#include "train/sample.h"

namespace llmc {

// Labels in a plan's memory.
inline constexpr const char* nccl_label = "NCCL";  // what it takes for a rank's groups
inline constexpr const char* scratch_label = "op scratch";
inline constexpr const char* offloaded_label = "offloaded";       // where the device uses the host's memory
inline constexpr const char* copies_label = "checkpoint copies";  // of asynchronous ones

struct Plan {
  int64_t arena_bytes = 0, scratch_bytes = 0;
  int64_t host_bytes = 0;               // of the host, for what is offloaded
  std::vector<MemoryLine> host_memory;  // what they are for
  int64_t file_bytes = 0;               // of the file that has some of it instead
  std::vector<MemoryLine> file_contents;
  int64_t share_bytes = 0;         // of a checkpoint that a rank writes, at most
  int64_t copy_bytes = 0;          // host memory for copies of them (copies.h)
  std::vector<MemoryLine> memory;  // of a rank, live at the high-water mark, scratch last
  OpLedger step_ops;               // calls, flops and bytes per training step of a rank, if it trains
  std::vector<std::pair<std::string, int64_t>> step_traffic;  // bytes that a rank sends in a step, by group
  HostBytes step_host;  // copied in a step between the memories of a rank and of its host
  FileBytes step_file;  // read from its file and written to it
  // The time of a training step on paper, on the target's machine; 0 without. Exposed: the compute stream waits for
  // others, or does transfers itself.
  double step_seconds = 0, exposed_seconds = 0;
  std::map<std::string, double> exposed_by_group;
  std::vector<double> action_seconds;  // of each action of a step; none with pipedream
  std::shared_ptr<const Plan> others;  // of the ranks that a parameter server, rank 0, serves; none: as rank 0's
  // A plan for each stage of a pipeline; empty: all ranks have this one. Rank 0's is on the first stage.
  std::vector<std::shared_ptr<const Plan>> stages;
  int ranks_of_stage = 1;
  const Plan& of(int rank) const {
    if (!stages.empty()) return *stages[static_cast<size_t>(rank / ranks_of_stage)];
    return rank > 0 && others ? *others : *this;
  }
  const Plan& of_stage(size_t s) const { return stages.empty() ? *this : *stages[s]; }
  // The stage with the most of a member, such as &Plan::total_bytes; among equals, the first.
  template <class Member>
  size_t stage_with_most(Member of) const {
    if (stages.empty()) return 0;
    return static_cast<size_t>(std::ranges::max_element(stages, {}, of) - stages.begin());
  }
  template <class Member>
  const Plan& with_most(Member of) const {
    return of_stage(stage_with_most(of));
  }
  double flops() const {  // of a rank of this stage, per step
    double sum = 0;
    for (const auto& [op, totals] : step_ops) sum += totals.flops;
    return sum;
  }
  int64_t bytes_sent() const {
    int64_t sum = 0;
    for (const auto& [group, bytes] : step_traffic) sum += bytes;
    return sum;
  }
  int64_t total_bytes() const {  // of the stage that needs the most
    int64_t bytes = 0;
    for (const MemoryLine& line : memory) bytes += line.bytes;
    for (const auto& stage : stages) bytes = std::max(bytes, stage->total_bytes());
    return bytes;
  }
};

inline double flops_of_step(const Plan& plan, const StepConfig& step) {
  double flops = 0;  // sum over one rank of each stage
  for (size_t s = 0; s < static_cast<size_t>(step.layout.pipeline.stages); ++s) flops += plan.of_stage(s).flops();
  return flops * step.layout.ranks() / step.layout.pipeline.stages;
}

// Which passes a plan runs: a search needs them apart.
enum class Passes : uint8_t { all, step, forwards };

// Evaluation, and rank 0's generation, at all lengths.
inline void run_forwards(Trainer& trainer) {
  const StepConfig& config = trainer.config();
  const BatchSource nothing = [](int64_t) { return HostBatch{}; };
  trainer.count_memory_alone();
  // With several chunks per stage, as many micro-batches are in flight as there are stages (forward_orders).
  const int64_t in_flight = config.layout.pipeline.chunks_per_stage > 1 ? config.layout.pipeline.stages : 1;
  if (config.layout.zero.holds == Holds::training_state || !config.generates) trainer.evaluate(in_flight, 1, nothing);
  for (int64_t length = 1; length < config.batch.T; length *= 2) trainer.evaluate(in_flight, 1, nothing, {}, length);
  if (config.generates) {
    std::vector<int32_t> tokens;
    for (int64_t length = 1;; length = std::min(2 * length, config.batch.T)) {
      tokens.resize(static_cast<size_t>(length));
      trainer.next_token_logits(tokens);
      if (length == config.batch.T) break;
    }
    Continuation sequence(trainer);
    for (tokens.resize(1); static_cast<int64_t>(tokens.size()) <= config.batch.T; tokens.resize(2 * tokens.size())) {
      sequence.restart(config.batch.T - static_cast<int64_t>(tokens.size()));
      sequence.feed(tokens);
    }
  }
}

// Whether updates by the host end with their step on paper. Stages are planned alone: none may count the update of
// another step as a part of its first forward, for which the next stage does not wait.
inline bool ends_updates(const Layout& layout) {
  return layout.pipeline.stages > 1 && layout.zero.offload.updates_at_host();
}

// Runs on paper: one training step, if the rank trains; one evaluation, unless it only generates; and rank 0's
// generation at all lengths. `target`: a rank's device.
inline Plan make_plan(const StepConfig& config, const Device& target, int rank = 0, Passes passes = Passes::all) {
  std::optional<KeptLists> kept;
  if (!KeptLists::exist()) kept.emplace();
  Device device = target.on_paper();
  device.links = std::make_shared<LinkTimes>();
  device.links->in_order = target.collectives == Collectives::library;
  Arena arena(device), scratch(device), host(device, 0, MemoryOf::host), file(device, 0, MemoryOf::file);
  Stream stream(device, scratch);
  Groups groups(config.layout, rank, device, Groups::null_groups(rank));
  Trainer trainer(config, {arena, stream, &groups, &host, nullptr, &file});
  const auto copied = [&] {  // over the bus so far
    HostBytes all = stream.host_bytes();
    for (const Stream* s : groups.streams())
      all.to_device += s->host_bytes().to_device, all.to_host += s->host_bytes().to_host;
    return all;
  };
  const auto through_files = [&] {
    FileBytes all;
    for (const Stream* s : groups.streams()) all.read += s->file_bytes().read, all.written += s->file_bytes().written;
    return all;
  };
  Plan plan;
  if (config.layout.zero.holds == Holds::training_state && passes != Passes::forwards) {
    trainer.follow_another_step();
    if (ends_updates(config.layout)) trainer.flush();
    for (Comm* comm : groups.tensor_groups()) comm->forget_bytes();
    const double begin = stream.seconds(), exposed_before = stream.exposed_seconds();
    const std::map<std::string, double> exposed = stream.exposed_by_group();
    const HostBytes copied_before = copied();
    const FileBytes files_before = through_files();
    stream.set_ledger(&plan.step_ops);
    std::vector<PassTime> actions;
    if (device.machine) trainer.time_actions(&actions);
    trainer.begin_step([](int64_t) { return HostBatch{}; }, {}, {.max_norm = 1});
    if (ends_updates(config.layout) || config.layout.pipeline.asynchronous()) trainer.flush();
    trainer.time_actions(nullptr);
    for (const PassTime& a : actions) plan.action_seconds.push_back(a.end - a.begin);
    stream.set_ledger(nullptr);
    plan.step_seconds = stream.seconds() - begin;
    plan.step_host = {copied().to_device - copied_before.to_device, copied().to_host - copied_before.to_host};
    plan.step_file = {through_files().read - files_before.read, through_files().written - files_before.written};
    plan.exposed_seconds = stream.exposed_seconds() - exposed_before;
    for (const auto& [group, seconds] : stream.exposed_by_group())
      plan.exposed_by_group[group] = seconds - (exposed.contains(group) ? exposed.at(group) : 0);
    for (const Comm* comm : groups.tensor_groups()) plan.step_traffic.emplace_back(comm->name(), comm->bytes_sent());
  }
  if (config.layout.zero.holds == Holds::training_state && passes == Passes::all)
    plan.share_bytes = detail::bytes_of_share(config.model, trainer.state());
  if (passes != Passes::step) run_forwards(trainer);
  plan.arena_bytes = arena.high_water();
  plan.scratch_bytes = scratch.high_water();
  plan.host_bytes = host.high_water();
  plan.host_memory = host.table();
  plan.file_bytes = file.high_water();
  plan.file_contents = file.table();
  plan.memory = arena.table();
  plan.memory.push_back({scratch_label, plan.scratch_bytes});
  if (groups.ranks() > 1 || config.layout.zero.offload.any())
    plan.memory.push_back({"ring chunks", groups.streams_with_scratch() * Groups::scratch_bytes});
  if (target.collectives == Collectives::library) {
    int64_t bytes = 0;
    for (const Comm* comm : groups.tensor_groups())
      bytes += nccl_bytes(comm->name(), comm->size(), static_cast<int>(comm->partners().size()));
    if (bytes > 0) plan.memory.push_back({nccl_label, bytes});
  }
  if (target.computes_as() != DeviceKind::cuda && plan.host_bytes > 0)  // it is the same memory
    plan.memory.push_back({offloaded_label, plan.host_bytes});
  if (groups.ranks() > 1 && rank == 0 && config.layout.zero.updates() == ZeroConfig::Updates::server)
    plan.others = std::make_shared<Plan>(make_plan(config, target, 1, passes));
  if (config.layout.pipeline.stages > 1 && rank == 0) {
    plan.ranks_of_stage = groups.ranks_of_stage();
    std::vector<std::shared_ptr<const Plan>> stages = {std::make_shared<Plan>(plan)};
    for (int s = 1; s < config.layout.pipeline.stages; ++s)
      stages.push_back(std::make_shared<Plan>(make_plan(config, target, s * plan.ranks_of_stage, passes)));
    plan.stages = std::move(stages);
  }
  return plan;
}

// The same for a step that nobody asked for; none: the trainer rejects it.   why: the reason
inline std::optional<Plan> try_plan(const StepConfig& config, const Device& target, std::string* why = nullptr) try {
  return make_plan(config, target);
} catch (const Error& error) {
  if (why != nullptr) *why = error.what();
  return std::nullopt;
}

// A limit beyond any run: layers x micro-batches of a step, whose actions and activations are listed before it begins.
inline constexpr int64_t most_passes = 1 << 18;

// Rejects what cannot even be planned: a step with more actions than can be listed, or sizes whose products overflow 64
// bits. Generous bounds, in floating point, on the bytes of a plan and the operations of its largest op.
inline void require_countable(const StepConfig& config) {
  const ModelConfig& m = config.model;
  CHECK(config.micro_batches <= most_passes / m.n_layer,
        "{} micro-batches per rank and step, times {} layers, are more than {} passes: use a larger --batch-size or a "
        "smaller --total-batch-size",
        config.micro_batches, m.n_layer, most_passes);
  const double L = static_cast<double>(m.n_layer), C = static_cast<double>(m.n_embd), F = static_cast<double>(m.n_ffn),
               V = static_cast<double>(m.vocab_size) + static_cast<double>(vocab_multiple),
               T = static_cast<double>(config.batch.T), N = static_cast<double>(config.batch.B) * T,
               in_flight =
                   config.layout.pipeline.schedule == Schedule::gpipe ? static_cast<double>(config.micro_batches) : 1;
  const double experts = static_cast<double>(m.experts.count) * static_cast<double>(m.experts.width) * 3 * C;
  const double parameters = (2 * V + static_cast<double>(m.n_positions)) * C + L * (8 * C * C + 4 * C * F + experts);
  const double k = static_cast<double>(m.experts.per_token),
               of_experts = static_cast<double>(m.experts.width + m.experts.shared);
  const double activations = in_flight * N * (L * (16 * C + 4 * F + k * (4 * C + 6 * of_experts + 8)) + 4 * C + 4 * V);
  const double largest =
      std::max(64 * (parameters + activations), 16 * N * std::max({C * C, C * F, C * k * of_experts, C * V, C * T}));
  CHECK(largest < 0x1p62, "a step of about {:.1e} bytes or operations is too large to plan: use a smaller {}", largest,
        64 * parameters >= 0x1p62 ? "--model" : "--batch-size, --seq-len or --model");
}

// Whether the plan fits into `limit` bytes.
inline bool fits(const Plan& plan, int64_t limit) { return plan.total_bytes() <= limit; }

// ---- For --pp-layout balanced, and for what --plan says about it ----------------------------------------------------

// The costs of the embedding, a layer and the head, from a model with this one layer. A pipeline of three stages is
// planned with two micro-batches and with one; costs common to both, such as the update, cancel.
inline std::array<ModuleCost, 3> count_modules(StepConfig step, double flops_per_s) {
  PipelineParallel& pipeline = step.layout.pipeline;
  pipeline = {.schedule = Schedule::one_f_one_b, .stages = 3, .layers = {0, 1, 0}, .slices = pipeline.slices};
  step.generates = false;
  const auto flops_with = [&](int64_t micro_batches) {
    step.micro_batches = micro_batches;
    std::vector<double> flops;
    for (const auto& stage : make_plan(step, Device{}).stages) flops.push_back(stage->flops());
    return flops;
  };
  const std::vector<double> one = flops_with(1), two = flops_with(2);
  const double message =
      static_cast<double>(step.layout.tensor.stream_rows(step.share(step.batch, Purpose::train).rows()) *
                          step.model.n_embd * size_of(step.precision.activations));
  const ParamTable table = part_of(parameter_table(step.model), step.layout.tensor, 0);
  std::array<int64_t, 3> elements = {};
  for (size_t u = 0; u < table.size(); ++u)  // a layer may have two units
    for (const ParamSpec& p : table[u].params) elements[u == 0 ? 0 : u + 1 == table.size() ? 2 : 1] += p.box().numel();
  if (step.model.tied)  // the head's table is the embedding's
    for (const ParamSpec& p : table[0].params) elements[2] += p.name.starts_with("wte") ? p.box().numel() : 0;
  std::array<ModuleCost, 3> modules;
  for (size_t m = 0; m < 3; ++m)
    modules[m] = {.seconds = (two[m] - one[m]) / flops_per_s,
                  .weight_bytes = static_cast<double>(elements[m] * size_of(step.precision.state)),
                  .activation_bytes = m == 2 ? 0 : message,
                  .gradient_bytes = m == 2 ? 0 : message};
  return modules;
}

// The costs of one micro-batch, forward and backward, on a rank: the flops of its ops, at `flops_per_s`; with experts,
// as if all ranks had equally many rows.
inline ModelCosts count_costs(const StepConfig& step, double flops_per_s = 1e12) {
  std::array<std::optional<std::array<ModuleCost, 3>>, 2> kinds;  // with a dense layer, and with a sparse one
  std::vector<ModuleCost> blocks;
  for (int64_t l = 0; l < step.model.n_layer; ++l) {
    auto& modules = kinds[step.model.is_sparse(l)];
    if (!modules) {
      StepConfig one = step;
      one.model.n_layer = 1;
      one.model.experts.every = 1;
      one.model.experts.dense_layers = {};
      if (!step.model.is_sparse(l)) one.model.experts.dense_layers = {0};
      modules = count_modules(one, flops_per_s);
    }
    blocks.push_back((*modules)[1]);
  }
  const auto& any = kinds[0] ? *kinds[0] : *kinds[1];
  return {any[0], std::move(blocks), any[2]};
}

}  // namespace llmc
