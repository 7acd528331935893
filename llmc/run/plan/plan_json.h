// plan_json.h: a plan as JSON, for scripts: --plan --json. run/README.md has the schema.
#pragma once
#include <nlohmann/json.hpp>

#include "run/plan/report_plan.h"
#include "schedule/picture.h"

namespace llmc {

namespace detail {

using OrderedJson = nlohmann::ordered_json;

// What a rank of a stage holds, computes and sends.
inline OrderedJson rank_json(const Plan& plan) {
  OrderedJson sent = OrderedJson::array(), ops = OrderedJson::array(), exposed = OrderedJson::array();
  const auto lines = [](const std::vector<MemoryLine>& all, int64_t least) {
    OrderedJson json = OrderedJson::array();
    for (const MemoryLine& line : all)
      if (line.bytes >= least) json.push_back({{"name", line.label}, {"bytes", line.bytes}});
    return json;
  };
  for (const auto& [group, of_group] : plan.step_traffic)
    if (of_group > 0) sent.push_back({{"group", group}, {"bytes", of_group}});
  for (const auto& [name, t] : plan.step_ops)
    ops.push_back({{"op", name}, {"calls", t.calls}, {"flops", t.flops}, {"bytes", t.bytes}, {"seconds", t.seconds}});
  for (const auto& [group, seconds] : plan.exposed_by_group)
    if (seconds > 0) exposed.push_back({{"group", group}, {"seconds", seconds}});
  return {{"memory_bytes", plan.total_bytes()},
          {"memory", lines(plan.memory, 1)},
          {"checkpoint_copy_bytes", plan.copy_bytes},
          {"host_memory_bytes", plan.host_bytes},
          {"host_memory", lines(plan.host_memory, 0)},
          {"to_device_bytes", plan.step_host.to_device},
          {"to_host_bytes", plan.step_host.to_host},
          {"file_bytes", plan.file_bytes},
          {"file", lines(plan.file_contents, 0)},
          {"file_read_bytes", plan.step_file.read},
          {"file_written_bytes", plan.step_file.written},
          {"flops", plan.flops()},
          {"ops", ops},
          {"sent_bytes", plan.bytes_sent()},
          {"sent", sent},
          {"exposed", exposed}};
}

// The passes of each stage, with begin and end in seconds, and then its update: an array for each stage. None without a
// clock, with servers or pipedream, and where there are too many passes to draw.
inline std::vector<OrderedJson> timelines_json(const StepConfig& step, const Plan& plan, const Device& device) {
  constexpr int64_t most = 1 << 14;
  if (!device.machine || plan.others || step.layout.pipeline.asynchronous()) return {};
  const Pipeline pipeline = step.pipeline();
  if (pipeline.chunks() * pipeline.passes() * (pipeline.splits_backward() ? 3 : 2) > most) return {};
  const StageTimes times = stage_times(step, plan, *device.machine);
  std::vector<OrderedJson> stages;
  for (size_t s = 0; s < times.lists.size(); ++s) {
    OrderedJson& stage = stages.emplace_back(OrderedJson::array());
    for (size_t i = 0; i < times.lists[s].size(); ++i)
      if (computes(times.lists[s][i].kind)) stage.push_back(action_json(times.lists[s][i], times.passes.times[s][i]));
    const double begin = times.passes.makespan;
    stage.push_back({{"kind", "update"}, {"begin", begin}, {"end", begin + times.others[s]}});
  }
  return stages;
}

// The split of a step's time, and what loses most.
inline OrderedJson time_json(const StepConfig& step, const Plan& whole, const StepTime& time, const Device& device) {
  const Plan& plan = whole.of_stage(time.stage);
  OrderedJson losses = OrderedJson::array();
  for (const Loss& loss : losses_of(step, whole, time, device))
    if (loss.seconds > 0) losses.push_back({{"seconds", loss.seconds}, {"what", loss.what}, {"remedy", loss.remedy}});
  return {{"slowest_stage", time.stage},
          {"compute_seconds", time.compute},
          {"update_seconds", update_seconds(plan)},
          {"exposed_communication_seconds", time.exposed},
          {"bubble_seconds", time.bubble},
          {"losses", losses}};
}

// What a run of these steps costs; null where it is unknown.
inline OrderedJson run_json(const Options& o, const StepConfig& step, const Machine& machine, double seconds) {
  const RunCost cost = run_cost(o, step, machine, seconds);
  const bool gpus = machine.cores == 0;
  const auto if_known = [&](double value) { return gpus && value > 0 ? OrderedJson(value) : OrderedJson(); };
  return {{"seconds", cost.seconds},
          {"least_seconds", if_known(seconds * published_runs_took.least)},
          {"most_seconds", if_known(seconds * published_runs_took.most)},
          {"gpu_hours", if_known(cost.gpu_hours)},
          {"kwh", if_known(cost.kwh)},
          {"kg_co2", if_known(cost.kg_co2)},
          {"price", if_known(cost.price)}};
}

inline OrderedJson precision_json(const StepConfig& step) {
  return {{"weights", name_of(step.precision.weights)},
          {"state", name_of(step.precision.state)},
          {"master_weights", step.precision.keeps_masters()},
          {"moments", {name_of(step.precision.slot_dtype(0)), name_of(step.precision.slot_dtype(1))}},
          {"recompute", std::string(step.recomputation())},
          {"offload", std::string(step.layout.zero.offload)},
          {"moments_in_file", step.layout.zero.offload.any_in_file()},
          {"offload_update", name_of(step.layout.zero.offload.update)}};
}
inline OrderedJson batch_json(const StepConfig& step, const std::optional<PlannedRun>& run) {
  return {{"tokens_per_step", step.tokens()},
          {"micro_batches", step.micro_batches},
          {"batch_size", step.batch.B},
          {"seq_len", step.batch.T},
          {"steps", run ? OrderedJson(run->steps) : OrderedJson()}};
}
inline OrderedJson layout_json(const StepConfig& step) {
  const Layout& l = step.layout;
  OrderedJson layers = OrderedJson::array();
  for (const Chunk& chunk : step.model_chunks()) layers.push_back(chunk.layers.size());
  return {{"ranks", l.ranks()},
          {"pp", l.pipeline.stages},
          {"schedule", name_of(l.pipeline.schedule)},
          {"chunks_per_stage", l.pipeline.chunks_per_stage},
          {"layers_of_chunks", layers},
          {"token_slices", l.pipeline.slices},
          {"tp", l.tensor.ranks},
          {"sequence_parallel", l.tensor.by_rows()},
          {"cp", l.context.ranks},
          {"cp_attention", name_of(l.context.attention)},
          {"ep", l.expert.ranks},
          {"readers", l.readers()},
          {"dp_replicate", l.zero.replicas},
          {"zero_stage", l.zero.stage},
          {"grad_reduce", name_of(l.zero.grad_reduce)},
          {"reduce_dtype", name_of(step.precision.wire)},
          {"dp_sync", name_of(l.zero.sync)}};
}

}  // namespace detail

// run: if its length is known. stretches: of a run of stages, whose step with most memory is planned. Unknown: null.
inline std::string plan_json(const Options& o, const Device& device, const StepConfig& step, const Plan& plan,
                             const std::optional<detail::PlannedRun>& run = std::nullopt,
                             const detail::OrderedJson& stretches = {}) {
  using detail::OrderedJson;
  const auto known = [](const auto& value) { return value ? OrderedJson(*value) : OrderedJson(); };
  const auto time = detail::step_time(step, plan, device);
  const int64_t limit = memory_limit(o, device);
  const bool limited = limit < std::numeric_limits<int64_t>::max();
  const double tokens = static_cast<double>(step.tokens());
  std::vector<std::string> notices = detail::plan_notices(o, device, step, plan);
  if (const std::string notice = detail::vocabulary_notice(o, step.model); !notice.empty())
    notices.insert(notices.begin(), notice);
  OrderedJson stages = OrderedJson::array();
  const std::vector<OrderedJson> timelines = detail::timelines_json(step, plan, device);
  const std::vector<Chunk> chunks = step.model_chunks();
  for (int s = 0; s < step.layout.pipeline.stages; ++s) {
    OrderedJson stage = {{"stage", s}, {"modules", detail::modules_text(step, chunks, s)}};
    stage.update(detail::rank_json(plan.of_stage(static_cast<size_t>(s))));
    stage["timeline"] = timelines.empty() ? OrderedJson() : timelines[static_cast<size_t>(s)];
    stages.push_back(std::move(stage));
  }
  std::optional<double> seconds, per_second, mfu, hfu;
  if (time) {
    seconds = time->step();
    per_second = tokens / *seconds;
    mfu = training_flops_per_token(step.model, step.batch.T) * *per_second /
          (device.machine->flops_per_s * step.layout.ranks());
    hfu = flops_of_step(plan, step) / (device.machine->flops_per_s * step.layout.ranks() * *seconds);
  }
  OrderedJson json = {
      {"step_seconds", known(seconds)},
      {"tokens_per_second", known(per_second)},
      {"mfu", known(mfu)},
      {"hfu", known(hfu)},
      {"memory_bytes", plan.total_bytes()},
      {"memory_limit_bytes", limited ? OrderedJson(limit) : OrderedJson()},
      {"fits", limited ? OrderedJson(fits(plan, limit)) : OrderedJson()},
      {"device", describe(device)},
      {"model",
       {{"name", o.model},
        {"type", step.model.family.model_type},
        {"parameters", count_parameters(parameter_table(step.model))},
        {"active_parameters", count_active_parameters(step.model)},
        {"flops_per_token", training_flops_per_token(step.model, step.batch.T)}}},
      {"precision", detail::precision_json(step)},
      {"batch", detail::batch_json(step, run)},
      {"layout", detail::layout_json(step)},
      {"time", time ? detail::time_json(step, plan, *time, device) : OrderedJson()},
      {"run", run && run->seconds ? detail::run_json(o, step, *device.machine, *run->seconds) : OrderedJson()},
      {"notices", notices},
      {"stages", stages},
      {"other_ranks", plan.others ? detail::rank_json(*plan.others) : OrderedJson()}};
  if (!stretches.is_null()) json["stretches"] = stretches;
  return json.dump(2);
}

}  // namespace llmc
