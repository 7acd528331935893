// report_plan.h: prints what a run needs: memory by name, the stages of a pipeline, work by op, traffic, time.
#pragma once
#include "core/log.h"
#include "run/plan/copies.h"
#include "run/plan/describe.h"
#include "run/plan/report_time.h"
#include "run/plan/verdict.h"
#include "train/slice_times.h"

namespace llmc {

namespace detail {

inline Rows rows_of(const std::vector<MemoryLine>& lines, int64_t total, const Rows& more = {}) {
  Rows rows;
  for (const MemoryLine& line : lines)
    if (line.bytes > 0) rows.emplace_back(line.label, human_bytes(line.bytes));
  rows.emplace_back("total", human_bytes(total));
  rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

// The part of the model that a stage has: "embedding, 0-7 and 64-71, head". chunks: step.model_chunks()
inline std::string modules_text(const StepConfig& step, const std::vector<Chunk>& chunks, int stage) {
  std::string text;
  const auto add = [&](const std::string& what) { text += (text.empty() ? "" : ", ") + what; };
  for (int c = 0; c < step.layout.pipeline.chunks(); ++c) {
    if (step.pipeline().stage_of(c) != stage) continue;
    const Chunk& chunk = chunks[static_cast<size_t>(c)];
    if (chunk.has_embedding) add("embedding");
    if (chunk.layers.size() == 1) add(std::to_string(chunk.layers[0]));
    if (chunk.layers.size() > 1) add(formatted("{}-{}", chunk.layers.front(), chunk.layers.back()));
    if (chunk.has_head) add("head");
  }
  return text;
}

// A row for each run of stages that print the same numbers: "stages 1-4".
inline Rows stage_rows(const StepConfig& step, const Plan& plan) {
  struct StageRun {
    int first, last;
    std::string numbers, modules;
  };
  std::vector<StageRun> runs;
  for (int s = 0; s < step.layout.pipeline.stages; ++s) {
    const Plan& its = plan.of_stage(static_cast<size_t>(s));
    const std::string numbers = formatted("{:10} {:12}, sends {:10} a step", human_bytes(its.total_bytes()),
                                          human_flops(its.flops()), human_bytes(its.bytes_sent()));
    if (runs.empty() || runs.back().numbers != numbers) runs.push_back({s, s, numbers, ""});
    runs.back().last = s;
  }
  const std::vector<Chunk> chunks = step.model_chunks();
  size_t width = 0;
  for (StageRun& run : runs) {
    run.modules = modules_text(step, chunks, run.first);
    if (run.last > run.first) run.modules += " to " + modules_text(step, chunks, run.last);
    width = std::max(width, run.modules.size());
  }
  Rows rows;
  for (StageRun& run : runs) {
    run.modules.resize(width, ' ');
    rows.emplace_back(
        run.first == run.last ? formatted("stage {}", run.first) : formatted("stages {}-{}", run.first, run.last),
        run.modules + " " + run.numbers);
  }
  return rows;
}

// How long the stages wait for each other in a step, on paper: chunks take as long as their flops, slices as
// --token-slices auto estimates, and messages no time.
inline Simulation simulate_step(const StepConfig& step, const ModelCosts& costs, DeviceKind kind) {
  PassCosts pass;
  if (!step.layout.pipeline.slices.empty()) {
    SliceTimes times(step, kind);
    int64_t context = 0;
    for (const int64_t length : step.layout.pipeline.slices) {
      pass.slice.push_back(times(length, context));
      context += length;
    }
  }
  for (const Chunk& chunk : step.model_chunks()) {
    double seconds = (chunk.has_embedding ? costs.embedding.seconds : 0) + (chunk.has_head ? costs.head.seconds : 0);
    for (const int64_t l : chunk.layers) seconds += costs.blocks[static_cast<size_t>(l)].seconds;
    pass.chunk.push_back(seconds);
  }
  return simulate(step.pipeline(), *KeptLists::of(pipeline_actions, step.pipeline()), pass);
}

// How well the stages are balanced, and what --pp-layout balanced would choose.
inline Rows balance_rows(const StepConfig& step, const Device& device) {
  const std::shared_ptr<const Machine>& machine = device.machine;
  const double flops_per_s = machine ? machine->flops_per_s : 1e12;
  const ModelCosts costs = count_costs(step, flops_per_s);
  const Simulation sim = simulate_step(step, costs, device.computes_as());
  const auto law = bubble_law(step.pipeline());
  const double most = *std::ranges::max_element(sim.busy);
  const auto slowest = std::ranges::find_if(sim.busy, [&](double b) { return b > most * (1 - 1e-9); });
  double mean = 0;
  for (const double b : sim.busy) mean += b / step.layout.pipeline.stages;
  const double above = 100 * (most / mean - 1);
  const std::string bubble =
      step.layout.pipeline.asynchronous()
          ? formatted(
                "none between flushes but for unequal stages (the slowest has {:.1f}% more than the mean); each flush "
                "costs the time of P - 1 = {} micro-batches",
                above, step.layout.pipeline.stages - 1)
          : formatted("{:.1f}% of the stages' time{}{}", 100 * sim.bubble(),
                      step.pipeline().splits_backward() ? " (both parts of a backward count as equally long)" : "",
                      law ? formatted("; would be {:.1f}% if all chunks took equally long: {}", 100 * law->bubble,
                                      law->formula)
                          : "");
  double dense = 0, sparse = 0;  // seconds per layer of this kind; 0: there is none
  for (int64_t l = 0; l < step.model.n_layer; ++l)
    (step.model.is_sparse(l) ? sparse : dense) = costs.blocks[static_cast<size_t>(l)].seconds;
  const double layer = dense > 0 ? dense : sparse;
  const bool alike = dense == 0 || sparse == 0 || dense == sparse;
  const std::string layers = alike ? "a layer 1" : formatted("a dense layer 1, a sparse one {:.2f}", sparse / dense);
  Rows rows = {{"work", formatted("{}, the embedding {:.2f}, the head {:.2f}", layers, costs.embedding.seconds / layer,
                                  costs.head.seconds / layer)},
               {"slowest stage", formatted("{}, of 0 to {}: {:.1f}% more work than the mean",
                                           slowest - sim.busy.begin(), step.layout.pipeline.stages - 1, above)},
               {"idle, over all stages", bubble}};
  // Some layers cannot be divided otherwise.
  if (step.model.n_layer + 2 >= step.layout.pipeline.chunks() &&
      (alike || step.layout.pipeline.chunks_per_stage == 1)) {
    const std::vector<int64_t> balanced = balanced_layers(costs, step.stages_of_chunks());
    std::vector<int64_t> used;
    for (const Chunk& chunk : step.model_chunks()) used.push_back(static_cast<int64_t>(chunk.layers.size()));
    rows.emplace_back("--pp-layout balanced", balanced == used ? "the same layers"
                                              : balanced.size() <= 64
                                                  ? name_of(PipelineLayout{LayoutKind::list, balanced})
                                                  : numbers_text(balanced));
  }
  if (!machine) return rows;
  // A PipeDream worker is a group of tensor- and context-parallel ranks; beyond this many, they are counted in groups:
  // the time to find its answer grows with the square of layers times workers.
  const int64_t most_workers = std::clamp<int64_t>(8192 / step.model.n_layer, 8, 128);
  const int all = step.layout.pipeline.stages * step.layout.readers();
  int workers = all;
  for (int group = 2; workers > most_workers && group <= all; ++group)
    if (all % group == 0) workers = all / group;
  ModelCosts of_group = costs;
  const double group = static_cast<double>(all) / workers;
  of_group.embedding.seconds /= group, of_group.head.seconds /= group;
  for (ModuleCost& block : of_group.blocks) block.seconds /= group;
  // That joins all ranks: stages are farthest from each other.
  const auto joins = [&](const LinkTier& tier) { return tier.ranks >= step.layout.ranks(); };
  const auto tier = std::ranges::find_if(machine->links, joins);
  const double link_bytes_per_s = (tier == machine->links.end() ? machine->links.back() : *tier).bytes_per_s;
  const BalancedPipeline replicated = balanced_replicated_stages(of_group, workers, link_bytes_per_s);
  const std::string stages =
      replicated.stages.size() == 1
          ? formatted("1 stage of {} layers on {} workers (pure data parallelism)", step.model.n_layer, workers)
          : formatted("{} stages of {} layers on {} workers", replicated.stages.size(), name_of(replicated), workers);
  rows.emplace_back(
      "PipeDream's answer",
      formatted("{}{}, with links of {:.1f} GB/s; this trainer does not replicate stages", stages,
                group > 1 ? formatted(", each {} data-parallel ranks", group) : "", link_bytes_per_s * 1e-9));
  return rows;
}

// more: rows to append to the table.
inline void report_memory(Log& log, const StepConfig& step, const Plan& plan, const Rows& more = {}) {
  const size_t largest = plan.stage_with_most(&Plan::total_bytes);
  const Plan& p = plan.of_stage(largest);
  const auto has = [&](const char* label) { return std::ranges::count(p.memory, label, &MemoryLine::label) > 0; };
  Rows rows = rows_of(p.memory, p.total_bytes(), more);
  if (p.copy_bytes > 0 && !has(copies_label))
    rows.emplace_back(copies_label, human_bytes(p.copy_bytes) + " of host memory, pinned");
  log.table(step.layout.ranks() == 1          ? std::string("memory")
            : plan.others                     ? "memory of rank 0, the server"
            : step.layout.pipeline.stages > 1 ? formatted("memory per rank of stage {}, which needs most", largest)
                                              : "memory per rank",
            rows);
  const auto bytes = [](double n) { return human_bytes(static_cast<int64_t>(n)); };
  if (p.host_bytes > 0)
    log.table(has(offloaded_label) ? "of it offloaded" : "host memory of a rank, pinned",
              rows_of(p.host_memory, p.host_bytes,
                      {{"copied per step", formatted("{} to the device, {} to the host", bytes(p.step_host.to_device),
                                                     bytes(p.step_host.to_host))}}));
  if (p.file_bytes > 0)
    log.table(
        formatted("file of a rank, in {}", shown(step.layout.zero.offload.directory)),
        rows_of(p.file_contents, p.file_bytes,
                {{"per step", formatted("{} read, {} written", bytes(p.step_file.read), bytes(p.step_file.written))}}));
  if (plan.others) log.table("memory of each other rank", rows_of(plan.others->memory, plan.others->total_bytes()));
  if (step.layout.pipeline.stages > 1)
    log.table("stages: layers; memory, work and traffic of a rank", stage_rows(step, plan));
}

// A notice if processes that may share processors have more threads, `threads` each, than there are processors.
inline std::string crowded_notice(const llmc::Place& place, int64_t threads, int64_t processors) {
  if (place.sharers == 1 || place.sharers * threads <= processors) return "";
  return formatted(
      "notice: {} processes of this host, with {} thread{} each, share {} processor{}: start fewer, give them fewer "
      "--threads, or let the launcher bind each to processors of its own",
      place.sharers, threads, threads == 1 ? "" : "s", processors, processors == 1 ? "" : "s");
}

// Ranks are threads of one process: a notice if there are more than a machine can take, or than this one has room for.
inline std::string too_many_ranks_notice(const Options& o, const Device& device) {
  const int64_t ranks = o.place.local_ranks;
  constexpr int largest_server = 16;  // in GPUs
  const bool elsewhere = is_gpu_elsewhere(device), gpus = device.computes_as() == DeviceKind::cuda;
  if (elsewhere ? ranks <= largest_server : gpus ? device.sharers <= 1 : ranks <= processors_of(device)) return "";
  const std::string shared = elsewhere ? "each with a GPU of its own in one machine"
                             : gpus    ? formatted("which share {} GPU(s)", visible_gpus().count)
                                       : formatted("which share {} processor(s)", processors_of(device));
  return formatted(
      "notice: {} ranks would be threads of one process, {}; scripts/multi_node/ starts processes on several hosts",
      ranks, shared);
}

// A notice if tensor-parallel groups lie in more than one server: each layer waits for their exchanges.
inline std::string topology_notice(const StepConfig& step, const Machine& machine) {
  const int64_t tp = step.layout.tensor.ranks, server = machine.links[0].ranks;
  if (machine.links.size() == 1 || step.layout.ranks() <= server || server % tp == 0) return "";
  const auto rate = [](double bytes_per_s) {
    return formatted(bytes_per_s < 1e10 ? "{:.2g} GB/s" : "{:.0f} GB/s", bytes_per_s * 1e-9);
  };
  return formatted(
      "notice: --tp {}: {} of {} ranks, and each layer waits for exchanges over {} instead of {}: "
      "use a divisor of {}, with --pp or a higher --zero-stage if memory is short",
      tp, tp > server ? "groups are larger than servers" : "some groups lie in two servers", server,
      rate(machine.links[1].bytes_per_s), rate(machine.links[0].bytes_per_s), server);
}

// "activations (--tp)": a group of ranks, and the option that makes it, unless all layouts have it.
inline std::string axis_of_group(const std::string& name) {
  const bool tensor = name == "activations" || name == "partial gradients" || name == "head gradients";
  return name == "keys and values" ? "attention (--cp)" : name + (tensor ? " (--tp)" : "");
}

// What a plan has to say beside its numbers: lines that begin with "notice: ".
inline std::vector<std::string> plan_notices(const Options& o, const Device& device, const StepConfig& step,
                                             const Plan& plan) {
  std::vector<std::string> notices = {depth_notice(o)};
  if (const Machine* const m = device.machine.get()) {
    const auto untimed = [&](const char* what, const char* left_out, const char* member) {
      notices.push_back(formatted(
          "notice: {} does not say how fast its {}: times are without what {}: give {} in a file of --machine", m->name,
          what, left_out, member));
    };
    notices.push_back(topology_notice(step, *m));
    if (step.layout.zero.offload.any_in_file() && m->disk_bytes_per_s == 0)
      untimed("disks are", "--offload-dir reads and writes", "disk_gb_per_s");
    if (device.computes_as() == DeviceKind::cuda && step.layout.zero.offload.updates_at_host() &&
        m->host_update_bytes_per_s == 0)
      untimed("hosts update", "--offload-update host computes", "host_update_gb_per_s");
  }
  std::string threads;
  if (device.computes_as() != DeviceKind::cuda)
    threads = crowded_notice(o.place, o.place.local_ranks * device.threads, processors_of(device));
  notices.push_back(threads.empty() ? too_many_ranks_notice(o, device) : threads);
  notices.push_back(copies_notice(o, plan));
  if (o.price && plan.others)
    notices.push_back(formatted("notice: no price: a step with --dp-sync {} has no time on paper", o.dp_sync));
  else if (o.price && (!device.machine || device.machine->cores > 0))
    notices.push_back("notice: no price: the plan has no time of GPUs: name a machine that has them by --machine");
  std::erase(notices, "");
  return notices;
}

}  // namespace detail

// Rejects a run, or a generation, that needs more memory than --memory-limit or the machine allows.
inline void require_memory(const Options& o, const StepConfig& step, const Plan& plan, const Device& device,
                           Begun begun = Begun::no) {
  const int64_t host_bytes = plan.with_most(&Plan::host_bytes).host_bytes;
  CHECK(device.kind != DeviceKind::cuda || host_bytes <= free_memory_of_rank(o),
        "--offload {} needs {} of host memory for a rank, and its share of what is free is {}: leave out a part, share "
        "the state among more ranks, with --zero-stage 1, or have moments in files, with --offload-dir",
        step.layout.zero.offload, human_bytes(host_bytes), human_bytes(free_memory_of_rank(o)));
  if (fits(plan, memory_limit(o, device))) return;
  const size_t largest = plan.stage_with_most(&Plan::total_bytes);
  std::string message =
      formatted("{} needs {} and {}",
                step.layout.ranks() == 1          ? "the run"
                : plan.others                     ? "the server, rank 0,"
                : step.layout.pipeline.stages > 1 ? formatted("each rank of stage {}, which needs most,", largest)
                                                  : "each rank",
                human_bytes(plan.total_bytes()), detail::memory_verdict(o, step, plan, device, begun));
  const Plan& p = plan.of_stage(largest);
  for (const auto& [name, value] : detail::rows_of(p.memory, p.total_bytes()))
    message += formatted("\n  {:-22} {}", name, value);
  throw Error(message);
}

// --plan: prints what a run needs without running it; an error if it exceeds --memory-limit. run: if its length is
// known
inline void report_plan(Log& log, const Options& o, const Device& device, const StepConfig& step, const Plan& plan,
                        const std::optional<detail::PlannedRun>& run = std::nullopt) {
  Rows rows_of_run = detail::run_rows(o, step);
  if (run)
    rows_of_run.emplace_back("steps", formatted("{} ({}) = {} tokens, {}", run->steps, run->asked,
                                                human_count(run->tokens), human_flops(run->flops)));
  log.table("plan for " + describe(device), rows_of_run);
  Rows not_counted;
  if (device.computes_as() == DeviceKind::cuda)
    not_counted = {{"not counted",
                    formatted("about {} for the CUDA context and cuBLASLt{}", human_bytes(gpu_reserve),
                              built_for_gpus ? "" : "; some MiB of op scratch, which only a build for GPUs counts")}};
  detail::report_memory(log, step, plan, not_counted);
  if (step.layout.ranks() > 1) {
    auto rows = [](const Plan& p) {
      Rows traffic;
      int64_t messages = 0;
      for (const auto& [group, bytes] : p.step_traffic)
        if (group.starts_with("stages ")) messages += bytes;
        else if (bytes > 0) traffic.emplace_back(detail::axis_of_group(group), human_bytes(bytes));
      if (messages > 0) traffic.emplace_back("messages (--pp)", human_bytes(messages));
      return traffic;
    };
    // Partial gradients of --tp are reduced by the ranks that hold their shard.
    const bool alike = !plan.others && (step.layout.tensor.ranks == 1 || step.layout.zero.shards == 1);
    const size_t most = plan.stage_with_most(&Plan::bytes_sent);
    log.table(step.layout.pipeline.stages > 1 ? formatted("sent by a rank of stage {} per step, which sends most", most)
              : alike                         ? "sent per rank and step"
                                              : "sent by rank 0 per step",
              rows(plan.of_stage(most)));
    if (plan.others) log.table("sent by rank 1 per step", rows(*plan.others));
    if (step.layout.zero.sync != DpSync::all_reduce) detail::report_links(log, step);
  }
  const size_t slowest =
      device.machine ? plan.stage_with_most(&Plan::step_seconds) : plan.stage_with_most(&Plan::flops);
  log.table(o.ranks == 1  ? std::string("work per step")
            : plan.others ? "work of rank 0 per step"
            : step.layout.pipeline.stages > 1
                ? formatted("work per step of a rank of stage {}, which has most", slowest)
                : "work per rank and step",
            detail::work_rows(plan.of_stage(slowest)));
  if (step.layout.pipeline.stages > 1)
    log.table("balance of the stages, by counted flops", detail::balance_rows(step, device));
  if (const Rows time = detail::time_rows(o, step, plan, device, run); !time.empty())
    log.table("time of a step on paper, by " + (o.machine.empty()            ? "the GPU's datasheet"
                                                : o.machine == local_machine ? "what was measured here"
                                                                             : o.machine),
              time);
  for (const std::string& notice : detail::plan_notices(o, device, step, plan)) log.line(notice);
  const std::string verdict = detail::memory_verdict(o, step, plan, device);
  if (o.memory_limit && !fits(plan, memory_limit(o, device))) throw Error(verdict);
  log.line("=> " + verdict);
}

}  // namespace llmc
