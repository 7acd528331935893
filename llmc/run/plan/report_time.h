// report_time.h: what a plan says about time: a step on paper, what of it is lost and to what, and what a run costs.
#pragma once
#include "core/log.h"
#include "model/layout_faults.h"
#include "run/plan/describe.h"
#include "run/plan/planner.h"
#include "run/requirements.h"
#include "schedule/simulate.h"

namespace llmc {

namespace detail {

// The seconds of a planned step.
struct StepTime {
  size_t stage;                     // the slowest
  double compute, exposed, bubble;  // its own; exposed: communication that no computation hides
  double step() const { return compute + exposed + bubble; }
};

// From the end of a pass until the next stage has its result.
inline double message_seconds(const StepConfig& step, const Machine& machine) {
  const int64_t elements =
      step.layout.tensor.stream_rows(step.share(step.batch, Purpose::train).rows()) * step.model.n_embd;
  const std::vector<int> ends = {0, step.layout.ranks() / step.layout.pipeline.stages};
  return machine.seconds({.name = "message",
                          .link_bytes = static_cast<double>(elements * size_of(step.precision.activations)),
                          .messages = 1,
                          .pattern = Pattern::neighbours,
                          .members = &ends});
}

// What the stages do when. The stages of a pipeline are planned alone; how they wait for each other is simulated with
// the times of their actions.
struct StageTimes {
  std::vector<ActionList> lists;  // of each stage
  Simulation passes;
  std::vector<double> others;  // of each stage: before the first action and after the last: the update, for one
  double step() const { return passes.makespan + *std::ranges::max_element(others); }
};
inline StageTimes stage_times(const StepConfig& step, const Plan& whole, const Machine& machine) {
  const Pipeline pipeline = step.pipeline();
  StageTimes times;
  PassCosts costs;
  if (pipeline.stages == 1) times.lists = {Trainer::actions_of(step, 0)};
  else times.lists = *KeptLists::of(pipeline_actions, pipeline), costs.message = message_seconds(step, machine);
  for (int s = 0; s < pipeline.stages; ++s) {
    const Plan& stage = whole.of_stage(static_cast<size_t>(s));
    costs.actions.push_back(stage.action_seconds);
    double actions = 0;
    for (const double seconds : stage.action_seconds) actions += seconds;
    times.others.push_back(stage.step_seconds - actions);
  }
  times.passes = simulate(pipeline, times.lists, costs);
  return times;
}

// On the machine of the plan's clock; none without, or with servers, which are not in step with the ranks they serve.
inline std::optional<StepTime> step_time(const StepConfig& step, const Plan& whole, const Device& device) {
  if (!device.machine || whole.others) return std::nullopt;
  const size_t slowest = whole.stage_with_most(&Plan::step_seconds);
  const Plan& plan = whole.of_stage(slowest);
  StepTime time{slowest, plan.step_seconds - plan.exposed_seconds, plan.exposed_seconds, 0};
  // Between two flushes, the slowest stage of an asynchronous pipeline never waits.
  if (step.layout.pipeline.stages == 1 || step.layout.pipeline.asynchronous()) return time;
  time.bubble = stage_times(step, whole, *device.machine).step() - plan.step_seconds;
  return time;
}

// The ops of a rank: by time, the longest first, if there is a clock.
inline Rows work_rows(const Plan& plan) {
  std::vector<std::pair<std::string, OpTotals>> ops(plan.step_ops.begin(), plan.step_ops.end());
  OpTotals sum;
  for (const auto& [name, t] : ops) sum.flops += t.flops, sum.bytes += t.bytes, sum.seconds += t.seconds;
  std::ranges::stable_sort(ops, [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  const auto time = [&](double seconds) {
    return sum.seconds == 0 ? std::string()
                            : formatted(" {:10.3f} ms {:5.1f}%", seconds * 1e3, 100 * seconds / sum.seconds);
  };
  Rows rows;
  for (const auto& [name, t] : ops)
    if (t.flops > 0 || t.bytes >= 1e4)  // others are scalars that ranks exchange
      rows.emplace_back(name, formatted("{:8} calls {:12} {:12.3f} GB{}", t.calls, human_flops(t.flops), t.bytes * 1e-9,
                                        time(t.seconds)));
  rows.emplace_back("total", formatted("{:8}       {:12} {:12.3f} GB{}", "", human_flops(sum.flops), sum.bytes * 1e-9,
                                       time(sum.seconds)));
  return rows;
}

// Time that a step would not take on an ideal machine, and the options that would reduce it, among those that the step
// may have.
struct Loss {
  double seconds;
  std::string what, remedy;
};
inline bool can_be(const Layout& layout, const StepConfig& step) { return layout_faults(layout, step.model).empty(); }
inline bool can_replicate(const StepConfig& step) {
  return std::ranges::any_of(divisors(step.layout.readers()), [&](int64_t replicas) {
    Layout l = step.layout;
    l.zero.replicas = static_cast<int>(replicas);
    l.zero.shards = step.layout.zero.ranks() / l.zero.replicas;
    return replicas > step.layout.zero.replicas && can_be(l, step);
  });
}
inline bool can_shard_more(const StepConfig& step) {
  Layout l = step.layout;
  l.zero.set_stage(l.zero.stage + 1);
  return l.zero.shards > 1 && l.zero.stage <= 3 && can_be(l, step);
}
// With so many chunks of the model on each stage.
inline bool can_schedule(const StepConfig& step, Schedule schedule, int chunks) {
  Layout l = step.layout;
  l.pipeline.schedule = schedule;
  l.pipeline.chunks_per_stage = chunks;
  return l.pipeline.chunks() <= step.model.n_layer && can_be(l, step);
}
inline std::string remedy_of_bubble(const StepConfig& step) {
  const PipelineParallel& p = step.layout.pipeline;
  std::string remedy = "more micro-batches (--total-batch-size)";
  if (p.schedule == Schedule::interleaved) {
    if (can_schedule(step, p.schedule, p.chunks_per_stage + 1)) remedy += ", or more --pp-chunks";
  } else if (p.schedule != Schedule::zb_v) {
    std::vector<std::string> others;
    for (const Schedule schedule : {Schedule::interleaved, Schedule::zb_v})
      if (can_schedule(step, schedule, 2)) others.emplace_back(name_of(schedule));
    if (!others.empty()) remedy += ", or --schedule " + either(others);
  }
  return remedy;
}
inline std::string remedy_of_group(const std::string& group, const StepConfig& step) {
  // A step of pipedream is one micro-batch.
  const std::string larger =
      step.layout.pipeline.schedule == Schedule::pipedream ? "a larger --batch-size" : "a larger --total-batch-size";
  // What comes from a file comes through host memory.
  if ((group == host_copies || group == file_transfers) && step.layout.zero.offload.any_in_file())
    return larger + ", or moments in host memory, without --offload-dir";
  if (group == host_copies) return larger + ", or less --offload";
  if (group == host_updates) return larger + ", or --offload-update device";
  if (group == "activations" || group == "head gradients")
    return step.layout.tensor.overlap ? "a smaller --tp" : "--tp-overlap, or a smaller --tp";
  if (group == "keys and values") return "a smaller --cp";
  if (group == "rows" || group == "experts") return "a smaller --ep";
  const Precision& p = step.precision;
  const bool weights_at_host = step.layout.zero.offload.has(Offloaded::weights);
  std::string remedy = larger;
  if (step.layout.zero.stage == 3) {
    std::vector<std::string> ways = {"a larger --batch-size"};
    if (!weights_at_host && !p.gathers_fp8) ways.emplace_back("--zero-stage 2");
    if (can_replicate(step)) ways.emplace_back("--dp-replicate");
    remedy = either(ways);
  }
  if (group.ends_with("gradients") && p.wire == DType::fp32 && p.weights == DType::bf16 &&
      step.layout.zero.sync == DpSync::all_reduce)
    remedy += "; --reduce-dtype bf16, which rounds gradients and sends half the bytes";
  if (group.ends_with("weights") && step.layout.zero.stage == 3 && p.linear == Operands::fp8_block && !p.gathers_fp8 &&
      !weights_at_host)
    remedy += "; --gather-dtype fp8, which sends half the bytes of the same numbers";
  return remedy;
}
inline bool gains_by_fp8(StepConfig step, const Device& device) {
  const bool has_bf16 = step.precision.linear == Operands::as_stored && step.precision.weights == DType::bf16,
             is_slower = device.machine->fp8_flops_per_s > device.machine->flops_per_s;
  step.precision.linear = Operands::fp8_block;
  return has_bf16 && is_slower && !device.gelu_in_products && !device.residual_in_products && fp8_can(step, device);
}
// Whether --pp-layout balanced would divide the layers otherwise.
inline bool gains_by_balance(const StepConfig& step) {
  const std::vector<Chunk> chunks = step.model_chunks();
  if (step.model.n_layer + 2 < std::ssize(chunks)) return false;
  std::vector<int64_t> used;
  for (const Chunk& chunk : chunks) used.push_back(static_cast<int64_t>(chunk.layers.size()));
  try {
    return balanced_layers(count_costs(step), step.stages_of_chunks()) != used;
  } catch (const Error&) {  // some layers cannot be divided otherwise
    return false;
  }
}
// By how much the slowest stage takes longer than the mean.
inline double imbalance_seconds(const StepConfig& step, const Plan& whole) {
  const int stages = step.layout.pipeline.stages;
  double most = 0, sum = 0;
  for (int s = 0; s < stages; ++s) {
    const double seconds = whole.of_stage(static_cast<size_t>(s)).step_seconds;
    most = std::max(most, seconds), sum += seconds;
  }
  return most - sum / stages;
}
// whole: of all stages; device: with a machine
inline std::vector<Loss> losses_of(const StepConfig& step, const Plan& whole, const StepTime& time,
                                   const Device& device) {
  const Machine& machine = *device.machine;
  const Plan& plan = whole.of_stage(time.stage);
  std::vector<Loss> losses = {{time.bubble, "the pipeline's bubble", remedy_of_bubble(step)}};
  if (step.layout.pipeline.stages > 1)
    losses.push_back({imbalance_seconds(step, whole), "stages of unequal work",
                      gains_by_balance(step) ? "--pp-layout balanced" : "a smaller --pp"});
  for (const auto& [group, seconds] : plan.exposed_by_group)
    losses.push_back({seconds, "exposed communication: " + group, remedy_of_group(group, step)});
  double products = 0, memory = 0, computed = 0;  // beyond the peak; ops bound by memory; at the peak
  for (const auto& [name, t] : plan.step_ops) {
    computed += t.flops / machine.flops_per_s;
    if (t.flops > 0) products += t.seconds - t.flops / machine.flops_per_s;
    else if (t.bytes > 0 && !plan.exposed_by_group.contains(name)) memory += t.seconds;
  }
  losses.push_back({products, "products and attention below the peak",
                    formatted("a larger --batch-size{}{}", step.layout.tensor.ranks > 1 ? "; a smaller --tp" : "",
                              gains_by_fp8(step, device) ? "; --products fp8-block, which rounds to eight bits" : "")});
  losses.push_back({memory, "ops bound by memory",
                    step.recompute != Recompute::none ? "less --recompute"
                    : step.micro_batches > 1 ? "a larger --batch-size and fewer micro-batches, which update less often"
                                             : "a larger --batch-size"});
  const double model = training_flops_per_token(step.model, step.batch.T) * static_cast<double>(step.tokens()) /
                       step.layout.ranks() / machine.flops_per_s;
  if (step.recompute != Recompute::none && step.layout.pipeline.stages == 1) {
    std::vector<std::string> room;
    if (step.batch.B > 1) room.emplace_back("a smaller --batch-size");
    if (can_shard_more(step)) room.emplace_back("a higher --zero-stage");
    if (step.layout.zero.offload.has(Offloaded::activations)) room = {"activations on the device (--offload)"};
    losses.push_back(
        {computed - model, "computing again", "--recompute none" + (room.empty() ? "" : ", with " + either(room))});
  }
  std::ranges::stable_sort(losses, [](const Loss& a, const Loss& b) { return a.seconds > b.seconds; });
  return losses;
}

// The seconds of a rank's step on the norm of the gradients and the update, which are part of the computation.
inline double update_seconds(const Plan& plan) {
  double sum = 0;
  for (const auto& [name, t] : plan.step_ops)
    if (name.ends_with("_update") || name == "average_weights" || name == "square_sum" || name == "combine_scalars" ||
        name == "clip_control")
      sum += t.seconds;
  return sum;
}

// Model flops utilisation: with causal attention, and with attention counted as if it were not causal, as papers do.
// HFU: hardware flops utilisation, which counts what is computed again.
inline std::string utilisation_text(const StepConfig& step, const Plan& plan, double seconds, const Machine& machine) {
  const double peak = machine.flops_per_s * step.layout.ranks() * seconds, tokens = static_cast<double>(step.tokens());
  const double causal = training_flops_per_token(step.model, step.batch.T),
               attention = 6.0 * static_cast<double>(step.model.n_layer * step.model.q_size() * step.batch.T);
  return formatted("MFU {:.1f}% ({:.1f}% with attention counted in full), HFU {:.1f}%", 100 * causal * tokens / peak,
                   100 * (causal + attention) * tokens / peak, 100 * flops_of_step(plan, step) / peak);
}

// Published runs took from this to that many times as long as their plans (--plan-examples; dev/results/plans.md).
struct TimesPlanned {
  double least, most;
};
inline constexpr TimesPlanned published_runs_took{0.89, 1.28};

// A run whose length is known: steps of one size, or of one size after the other.
struct PlannedRun {
  std::string asked = {};  // the option that says how long it is
  int64_t steps = 0, tokens = 0;
  double flops = 0;                     // of the model
  std::optional<double> seconds = 0.0;  // none without a clock

  void add(int64_t count, const StepConfig& step, const std::optional<StepTime>& time) {
    const int64_t more = count * step.tokens();
    steps += count;
    tokens += more;
    flops += training_flops_per_token(step.model, step.batch.T) * static_cast<double>(more);
    if (!time) seconds.reset();
    else if (seconds) *seconds += time->step() * static_cast<double>(count);
  }
};

// What a run costs, whose steps take so many seconds together; 0: unknown.
struct RunCost {
  double seconds, gpu_hours, kwh, kg_co2, price;
};
inline constexpr double kg_per_kwh = 0.45;  // the world's electricity in 2024 (IEA, Electricity 2025)
inline RunCost run_cost(const Options& o, const StepConfig& step, const Machine& machine, double seconds) {
  const double gpu_hours = seconds * step.layout.ranks() / 3600, kwh = gpu_hours * machine.watts * 1e-3;
  return {seconds, gpu_hours, kwh, kwh * kg_per_kwh, gpu_hours * o.price.value_or(0)};
}
inline Rows run_cost_rows(const Options& o, const Machine& machine, const RunCost& cost) {
  const double seconds = cost.seconds;
  if (machine.cores > 0) return {{"run", human_duration(seconds)}};
  const std::string hours = human_amount(cost.gpu_hours);
  Rows rows = {{"run", formatted("{}, {} GPU-hour{}; {} to {}, if it is as far off as plans of published runs",
                                 human_duration(seconds), hours, hours == "1" ? "" : "s",
                                 human_duration(seconds * published_runs_took.least),
                                 human_duration(seconds * published_runs_took.most))}};
  if (cost.kwh > 0)
    rows.emplace_back("energy", formatted("{} kWh, about {} kg of CO2 at {} kg/kWh", human_amount(cost.kwh),
                                          human_amount(cost.kg_co2), kg_per_kwh));
  if (o.price) rows.emplace_back("price", formatted("{}, at {} per GPU-hour", human_amount(cost.price), *o.price));
  return rows;
}

// None without a clock.   run: if its length is known
inline Rows time_rows(const Options& o, const StepConfig& step, const Plan& whole, const Device& device,
                      const std::optional<PlannedRun>& run = std::nullopt) {
  const std::optional<StepTime> known = step_time(step, whole, device);
  if (!known) return {};
  const StepTime& time = *known;
  const Machine& machine = *device.machine;
  const Plan& plan = whole.of_stage(time.stage);
  const double ms = time.step() * 1e3;
  const auto share = [&](double seconds) { return formatted("{:.3f} ms {:5.1f}%", seconds * 1e3, 1e5 * seconds / ms); };
  Rows rows = {
      {"step",
       formatted("{:.3f} ms: {} tokens/s, {} per rank", ms, human_amount(static_cast<double>(step.tokens()) / ms * 1e3),
                 human_amount(static_cast<double>(step.tokens()) / ms * 1e3 / step.layout.ranks()))},
      {"", utilisation_text(step, whole, time.step(), machine)},
      {"compute", share(time.compute) +
                      (step.layout.pipeline.stages == 1 ? "" : formatted(", of stage {}, the slowest", time.stage))}};
  if (step.layout.ranks() > 1 || time.exposed > 0)
    rows.emplace_back("exposed communication", share(time.exposed) + ", which no computation hides");
  for (const auto& [group, seconds] : plan.exposed_by_group)
    if (seconds > 1e-3 * time.step()) rows.emplace_back("  " + group, share(seconds));
  if (step.layout.pipeline.stages > 1)
    rows.emplace_back("bubble", step.layout.pipeline.asynchronous() ? "none between flushes" : share(time.bubble));
  int count = 0;
  for (const Loss& loss : losses_of(step, whole, time, device))
    if (loss.seconds > 0.01 * time.step() && ++count <= 3)
      rows.emplace_back(formatted("loss {}", count), share(loss.seconds) + " " + loss.what + ": " + loss.remedy);
  if (run && run->seconds)
    for (auto& row : run_cost_rows(o, machine, run_cost(o, step, machine, *run->seconds)))
      rows.push_back(std::move(row));
  std::string links;
  for (const LinkTier& tier : machine.links)
    if (step.layout.ranks() > 1 && tier.bytes_per_s < 1e15)
      links += formatted(", {:.1f} GB/s and {:.1f} us{}", tier.bytes_per_s * 1e-9, tier.latency_s * 1e6,
                         &tier == &machine.links.back() ? (machine.links.size() > 1 ? " beyond" : " of link")
                                                        : formatted(" among {} ranks", tier.ranks));
  if (step.layout.zero.offload.any() && machine.host_bytes_per_s > 0)
    links += formatted(", {:.1f} GB/s to host memory and back", machine.host_bytes_per_s * 1e-9);
  if (step.layout.zero.offload.updates_at_host() && machine.host_update_bytes_per_s > 0)
    links += formatted(", {:.1f} GB/s in updates by the host", machine.host_update_bytes_per_s * 1e-9);
  if (step.layout.zero.offload.any_in_file() && machine.disk_bytes_per_s > 0)
    links += formatted(", {:.1f} GB/s from files and to them", machine.disk_bytes_per_s * 1e-9);
  rows.emplace_back("rates",
                    formatted("{}/s, {:.1f} GB/s of memory{}{}", human_flops(machine.flops_per_s),
                              machine.bytes_per_s * 1e-9, links, machine.op_s == 0 ? "; no time for launches" : ""));
  return rows;
}

}  // namespace detail

}  // namespace llmc
