// verdict.h: does a run fit into memory, and if not, with which options would it, and at what cost?
#pragma once
#include "run/plan/machines.h"
#include "run/plan/remedy.h"
#include "run/plan/search.h"

namespace llmc {

namespace detail {

// So many ranks, by the option that says how many there are.
inline std::string ranks_option(const Options& o, int64_t ranks) {
  if (o.plan_ranks) return formatted(" --ranks {}", ranks);
  if (o.place.processes > 1) return formatted(" --world-size {}", ranks / o.place.local_ranks);
  return formatted(" --local-ranks {}", ranks);
}
// The options that turn one step, of these options, into the other. A stage of a file has its own sizes and
// recomputation, which are set there: " --zero-stage 1, with batch-size = 2 in stage "b" of st.toml".
inline std::string change_text(const Options& o, const StepConfig& from, const StepConfig& to) {
  const Layout &was = from.layout, &is = to.layout;
  const Precision &had = from.precision, &has = to.precision;
  std::string text;
  const auto add = [&](const char* option, const auto& before, const auto& now) {
    if (before != now) text += formatted(" {} {}", option, now);
  };
  std::string settings;
  const auto set = [&](const char* name, const auto& value) {
    if (o.stage) settings += formatted("{}{} = {}", settings.empty() ? "" : ", ", name, value);
    else text += formatted(" --{} {}", name, value);
  };
  add("--dtype", had.weights, has.weights);
  if (has.masters != had.masters || has.split_masters != had.split_masters)
    text += formatted(" --master-weights {}", !has.masters ? "none" : has.split_masters ? "split" : "fp32");
  if (has.moment1 != had.moment1) text += " --moment1-dtype 8bit";
  if (has.moment2 != had.moment2) text += " --moment2-dtype 8bit";
  if (is.ranks() != was.ranks()) text += ranks_option(o, is.ranks());
  add("--tp", was.tensor.ranks, is.tensor.ranks);
  add("--cp", was.context.ranks, is.context.ranks);
  add("--ep", was.expert.ranks, is.expert.ranks);
  add("--pp", was.pipeline.stages, is.pipeline.stages);
  if (is.pipeline.layers.empty() && o.pp_layout != Options().pp_layout) text += " --pp-layout even";
  add("--dp-replicate", was.zero.replicas, is.zero.replicas);
  if (to.batch.T != from.batch.T) set("seq-len", to.batch.T);
  if (to.batch.B != from.batch.B) set("batch-size", to.batch.B);
  const bool other_step =
      to.batch.B != from.batch.B || to.batch.T != from.batch.T || is.zero.ranks() != was.zero.ranks();
  if (other_step && was.zero.holds == Holds::training_state && !(o.stage && o.stage->ramps))
    set("total-batch-size", to.tokens());
  add("--dp-sync", was.zero.sync, is.zero.sync);
  add("--zero-stage", was.zero.stage, is.zero.stage);
  add("--offload", was.zero.offload, is.zero.offload);
  if (const std::string recompute(to.recomputation()); recompute != std::string(from.recomputation()))
    set("recompute", o.stage ? formatted("\"{}\"", recompute) : recompute);
  const auto simple = [](Schedule s) { return s == Schedule::gpipe || s == Schedule::one_f_one_b; };
  const bool alike = from.micro_batches == 1 && simple(was.pipeline.schedule) && simple(is.pipeline.schedule);
  if (!alike) add("--schedule", was.pipeline.schedule, is.pipeline.schedule);
  if (is.pipeline.schedule == Schedule::interleaved || o.pp_chunks)  // other schedules have their usual number
    add("--pp-chunks", was.pipeline.chunks_per_stage, is.pipeline.chunks_per_stage);
  if (!settings.empty()) text += formatted("{} {} in {}", text.empty() ? "" : ", with", settings, o.stage->name);
  return text;
}

// The costs of the change besides the memory that it saves: "; 33% more work; each rank sends 3.1 GiB a step instead of
// ..". machine: of the plan's clock, if it has one
inline std::string price_text(const StepConfig& from, const Plan& before, const Remedy& remedy,
                              const Machine* machine) {
  const StepConfig& to = remedy.step;
  std::string text;
  const double work = flops_of_step(remedy.plan, to) / flops_of_step(before, from);
  if (to.batch.T == from.batch.T && work > 1.005) text += formatted("; {:.0f}% more work", 100 * (work - 1));
  const int64_t sent = remedy.plan.with_most(&Plan::bytes_sent).bytes_sent(),  // on the stage that sends the most
      sent_before = before.with_most(&Plan::bytes_sent).bytes_sent();
  if (sent * 100 > sent_before * 101 || sent * 101 < sent_before * 100)
    text += formatted("; each rank sends {}{} a step{}", to.layout.pipeline.stages > 1 ? "at most " : "",
                      sent == 0 ? "nothing" : human_bytes(sent),
                      sent_before == 0 ? "" : " instead of " + human_bytes(sent_before));
  if (to.layout.zero.grad_reduce != from.layout.zero.grad_reduce)
    text += "; gradients are then reduced every micro-batch, which rounds differently";
  if (to.layout.zero.sync != from.layout.zero.sync)
    text += "; gradients are then added in another order, which rounds differently";
  Precision as_exact = to.precision;
  as_exact.split_masters = from.precision.split_masters;  // the same numbers
  if (as_exact != from.precision) text += "; less exact";
  if (to.layout.zero.offload.any()) {
    const Plan& plan = remedy.plan.with_most(&Plan::host_bytes);
    const HostBytes& host = plan.step_host;
    text += formatted("; each rank has {} in host memory, and copies {} a step to its device and {} back",
                      human_bytes(plan.host_bytes), human_bytes(static_cast<int64_t>(host.to_device)),
                      human_bytes(static_cast<int64_t>(host.to_host)));
    if (machine != nullptr && machine->host_bytes_per_s > 0)
      text += formatted(", {:.2f} s at {:.1f} GB/s, as much of it as computation does not hide",
                        std::max(host.to_device, host.to_host) / machine->host_bytes_per_s,
                        machine->host_bytes_per_s * 1e-9);
  }
  return text;
}

// On a GPU that is not here (an H100 unless a machine is named), the fastest layout of these ranks that fits, if need
// be with state in fewer bits. None: nothing fits, or the layout has parts that the search does not choose.
inline std::optional<Remedy> fastest_remedy(const Options& o, const StepConfig& asked, const Device& device,
                                            int64_t limit) {
  const Layout& l = asked.layout;
  const bool searched = l.zero.replicas == 1 && !l.zero.offload.any() && l.zero.sync == DpSync::all_reduce &&
                        l.zero.reduce_by_stage && l.tensor.sequence && !l.tensor.overlap &&
                        l.context.attention == ContextAttention::ring && l.pipeline.slices.empty() &&
                        !l.pipeline.asynchronous() && asked.head_chunks == 0 && l.zero.holds == Holds::training_state &&
                        asked.tokens() % asked.batch.T == 0;
  if (!is_gpu_elsewhere(device) || !searched) return std::nullopt;
  SearchFor what{.step = asked,
                 .ranks = l.ranks(),
                 .sequences = asked.tokens() / asked.batch.T,
                 .device = device,
                 .memory = limit};
  if (!what.device.machine) what.device.machine = choose_machine("h100x8", asked.precision.products, false);
  for (const Precision& precision : precisions_to_try(asked, o)) {
    what.step.precision = precision;
    const std::vector<Found> found = LayoutSearch(what).find(1);
    if (!found.empty()) return Remedy{found[0].step, make_plan(found[0].step, device)};
  }
  return std::nullopt;
}

inline std::string memory_verdict(const Options& o, const StepConfig& step, const Plan& plan, const Device& device,
                                  Begun begun = Begun::no) {
  const int64_t limit = memory_limit(o, device);
  if (limit == std::numeric_limits<int64_t>::max())
    return has_server(device)
               ? "--machine does not say how much memory a server has: --memory-limit says how many GiB a rank may use"
               : "there is no GPU here to compare with: --memory-limit says how many GiB of memory a rank's GPU has";
  const std::string where = device.computes_as() == DeviceKind::cuda ? "GPU" : "machine";
  const std::string what =
      o.memory_limit       ? formatted("--memory-limit {}{}", human_bytes(given_limit(o)),
                                 reserve_of(device) == 0 ? "" : " less " + human_bytes(gpu_reserve) + " for CUDA")
      : has_server(device) ? formatted("a rank's share of a server of {}, {}", shown(o.machine), human_bytes(limit))
      : device.elsewhere   ? formatted("a GPU of {}, {}", shown(o.machine), human_bytes(limit))
      : step.layout.ranks() == 1 ? formatted("this {}'s {}", where, human_bytes(limit))
                                 : formatted("a rank's share of this {}, {}", where, human_bytes(limit));
  if (fits(plan, limit)) return "fits into " + what;
  if (step.generates && step.layout.context.ranks > 1) {  // every rank has memory for whole texts
    StepConfig silent = step;
    silent.generates = false;
    if (const Plan without = make_plan(silent, device); fits(without, limit))
      return formatted(
          "does not fit into {}; it would without --sample-every ({} instead of {}): texts are not divided", what,
          human_bytes(without.total_bytes()), human_bytes(plan.total_bytes()));
  }
  // Ranks on the processors of one machine share its memory.
  const bool more_ranks_have_more = device.computes_as() == DeviceKind::cuda || o.memory_limit || o.place.hosts > 1;
  RemedySearch search(o, step, device, begun);
  std::optional<Remedy> found = begun == Begun::no ? fastest_remedy(o, step, device, limit) : std::nullopt;
  if (!found) found = search.find();
  if (found)
    return formatted("does not fit into {}; it would with{} ({} instead of {}{}){}", what,
                     change_text(o, step, found->step), human_bytes(found->plan.total_bytes()),
                     human_bytes(plan.total_bytes()), price_text(step, plan, *found, device.machine.get()),
                     found->step.batch.T < step.batch.T && more_ranks_have_more
                         ? ", or with --cp, which divides long sequences among ranks"
                         : "");
  std::string least;
  if (const std::optional<Remedy>& tried = search.least(); tried && tried->plan.total_bytes() < plan.total_bytes()) {
    StepConfig changed = tried->step;  // was planned with few micro-batches
    changed.micro_batches = step.tokens() / (changed.batch.rows() * changed.layout.readers());
    const std::string change = change_text(o, step, changed);
    if (!change.empty()) least = formatted("; the least is {}, with{}", human_bytes(tried->plan.total_bytes()), change);
  }
  return formatted("does not fit into {}, nor does what was tried on paper{}: use a smaller --model, or a larger {}",
                   what, least, o.memory_limit ? "--memory-limit" : "machine");
}

}  // namespace detail

}  // namespace llmc
