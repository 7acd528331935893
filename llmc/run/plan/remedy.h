// remedy.h: how to make a run fit into memory: changes of its options, each planned before it is suggested, with its
// costs.
#pragma once
#include <ranges>

#include "core/log.h"
#include "device/gpu.h"
#include "model/layout_faults.h"
#include "run/plan/planner.h"
#include "run/rank_device.h"
#include "run/requirements.h"
#include "schedule/token_slices.h"

namespace llmc {

// Bytes of --memory-limit, and what is taken from them: on a GPU it is the card's size, which libraries share.
inline int64_t given_limit(const Options& o) { return static_cast<int64_t>(*o.memory_limit * (1 << 30)); }
inline int64_t reserve_of(const Device& device) { return device.computes_as() == DeviceKind::cuda ? gpu_reserve : 0; }

// Bytes that a rank may use.
inline int64_t memory_limit(const Options& o, const Device& device) {
  if (o.memory_limit) return given_limit(o) - reserve_of(device);
  if (device.elsewhere && device.machine->memory_bytes > 0)
    return static_cast<int64_t>(device.machine->memory_bytes) / device.sharers - reserve_of(device);
  if (has_server(device)) return std::numeric_limits<int64_t>::max();  // unknown
  if (device.computes_as() != DeviceKind::cuda) return host_memory() / device.sharers;
  if (is_gpu_elsewhere(device)) return std::numeric_limits<int64_t>::max();  // unknown
  const std::vector<int> own = gpus_of_process(o.place);
  const int64_t of_process = ceil_div(o.place.local_ranks, std::ssize(own));  // ranks of a process on one of its GPUs
  return gpu_memory(own, ceil_div(device.sharers, of_process)) / device.sharers;
}

// Has the run begun? Then its results must not change.
enum class Begun : uint8_t { no, yes };

struct Remedy {
  StepConfig step;
  Plan plan;
};

// Whether what runs the step computes in bf16, which is known of machines by name.
inline bool computes_in_bf16(const Options& o) {
  return o.machine.empty() || o.machine == local_machine || has_bf16(o.machine);
}

// As asked, then in bf16, then with master weights in halves, which are as exact, then with moments of eight bits, then
// without master copies of the weights, each unless something needs it otherwise; all else stays.
inline std::vector<Precision> precisions_to_try(const StepConfig& asked, const Options& o) {
  const ZeroConfig& zero = asked.layout.zero;
  Precision p = asked.precision;
  std::vector<Precision> all{p};
  if (p.weights == DType::fp32 && computes_in_bf16(o)) {
    p.weights = p.activations = p.products = DType::bf16;
    all.push_back(p);
  }
  if (zero.holds != Holds::training_state) return all;
  const OptimizerRule& rule = rule_of(zero.optimizer);
  const bool whole_masters = p.averages || zero.offload.has(Offloaded::master),
             splits = !rule.of_matrices && !asked.qk_clip && !asked.layout.pipeline.asynchronous();
  if (p.keeps_masters() && !p.split_masters && !whole_masters && splits) p.split_masters = true, all.push_back(p);
  if (!rule.of_matrices && !p.moment1 && !p.moment2) {
    p.moment1 = DType::e4m3;
    if (rule.slots.size() > 1) p.moment2 = DType::e5m3;
    all.push_back(p);
  }
  if (p.masters && !whole_masters && !asked.precision.split_masters) {
    p.masters = p.split_masters = false;
    all.push_back(p);
  }
  return all;
}

// Looks for the cheapest change: first those that change no numbers (at equal --grad-reduce), which are, in this
// order, ZeRO stage 1, recomputation, smaller micro-batches and higher stages, then recomputation of segments; then
// another number of ranks; then, on all GPUs of the server, state in host memory, part by part; then state in fewer
// bits (precisions_to_try()); last, fewer tokens per sequence. Where the server of --machine has no more GPUs, host
// memory comes first. A few plans suffice for each choice of ranks and dtype: memory grows with the micro-batch and
// falls with recomputation, so the smallest plan is tried first.
class RemedySearch {
 public:
  RemedySearch(const Options& o, const StepConfig& asked, const Device& device, Begun begun)
      : options_(o), asked_(asked), device_(device), begun_(begun) {}

  std::optional<Remedy> find() {
    std::vector<Precision> precisions = precisions_to_try(asked_, options_);
    if (begun_ == Begun::yes) precisions = {asked_.precision};
    for (const Precision& precision : precisions) {
      StepConfig numerics = asked_;
      numerics.precision = precision;
      std::vector<StepConfig> steps;
      for (const int ranks : ranks_to_try())
        if (const std::optional<StepConfig> step = with_ranks(numerics, ranks)) steps.push_back(*step);
      if (server_is_full())
        if (std::optional<Remedy> found = offloaded(numerics)) return found;
      if (steps.size() <= 2 || could_fit(steps.back()))  // otherwise fewer ranks would not, either
        for (const StepConfig& step : steps)
          if (std::optional<Remedy> found = cheapest(step)) return found;
      if (server_is_full()) continue;
      std::erase_if(steps, [&](const StepConfig& step) { return !server_has(step.layout.ranks()); });
      for (const StepConfig& step : steps | std::views::reverse)
        if (std::optional<Remedy> found = offloaded(step)) return found;
    }
    return shorter_sequences();
  }
  // Among all the changes that were planned, the one that needs the least memory; none: all are impossible.
  const std::optional<Remedy>& least() const { return least_; }

 private:
  // On a CPU, one rank instead of several, which share its memory; on GPUs, twice as many, and so on, as far as there
  // are GPUs. Only data-parallel ranks change: --pp, --tp and --cp are kept.
  std::vector<int> ranks_to_try() const {
    const int asked = asked_.layout.readers();
    std::vector<int> all{asked};
    if (asked_.layout.zero.holds == Holds::weights) return all;
    if (device_.computes_as() != DeviceKind::cuda) {
      if (asked > 1 && !options_.memory_limit && options_.place.processes == 1) all.push_back(1);
      return all;
    }
    const int most = is_gpu_elsewhere(device_)                               ? 256 * asked_.layout.ranks()
                     : device_.sharers == 1 && options_.place.processes == 1 ? visible_gpus().count
                                                                             : 0;
    for (int ranks = 2 * asked; ranks * (asked_.layout.ranks() / asked) <= std::min(most, 1024); ranks *= 2)
      all.push_back(ranks);
    return all;
  }

  // None: the sequences of a step cannot be divided among this many ranks.
  std::optional<StepConfig> with_ranks(StepConfig step, int ranks) const {
    const int asked = step.layout.readers();
    if (ranks == asked) return step;
    const int64_t sequences = step.batch.B * step.micro_batches * asked;
    if (sequences % ranks != 0) return std::nullopt;
    if (ranks % step.layout.zero.replicas != 0) step.layout.zero.replicas = 1;
    step.layout.zero.shards = ranks * step.layout.context.ranks / step.layout.zero.replicas;
    if (step.layout.zero.shards * step.layout.tensor.ranks % step.layout.expert.ranks != 0) return std::nullopt;
    step.batch.B = std::min(step.batch.B, sequences / ranks);
    while (sequences / ranks % step.batch.B != 0) --step.batch.B;
    step.micro_batches = sequences / ranks / step.batch.B;
    return step;
  }

  Device device_for(const StepConfig& step) const {
    Device device = device_;
    if (device.computes_as() == DeviceKind::cuda)
      device.collectives = collectives_of(device, step.layout.ranks(), options_.comm);
    if (device.computes_as() == DeviceKind::cuda || step.layout.ranks() == asked_.layout.ranks()) return device;
    const int ranks = step.layout.ranks();  // of one data-parallel rank
    device.threads = std::max(1, device.threads * device.sharers / ranks);
    device.sharers = ranks;
    return device;
  }
  int64_t limit_for(const StepConfig& step) const {
    Options o = options_;
    if (o.place.processes == 1) o.place.ranks_on_host = step.layout.ranks();
    return memory_limit(o, device_for(step));
  }

  // The memory of a step does not depend on the number of its micro-batches beyond two, or beyond a few for each stage,
  // unless gpipe keeps them all. The change suggested in the end is planned with all of them.
  bool fits_on_paper(StepConfig step) {
    const int64_t enough = step.layout.pipeline.stages == 1 ? 2 : 4 * step.layout.pipeline.stages;
    if (step.layout.pipeline.schedule != Schedule::gpipe) step.micro_batches = std::min(step.micro_batches, enough);
    std::optional<Plan> plan = try_plan(step, device_for(step));
    if (!plan) return false;
    const bool good = fits(*plan, limit_for(step));
    if (!least_ || plan->total_bytes() < least_->plan.total_bytes()) least_ = {step, std::move(*plan)};
    return good;
  }

  // Replaces gpipe, which keeps the activations of all micro-batches, by 1f1b.
  static void keep_few(StepConfig& step) {
    if (step.layout.pipeline.schedule == Schedule::gpipe) step.layout.pipeline.schedule = Schedule::one_f_one_b;
  }
  // The higher stages have no servers.
  static void set_stage(StepConfig& step, int stage) {
    step.layout.zero.set_stage(stage);
    if (stage > 0) step.layout.zero.sync = DpSync::all_reduce;
  }

  bool could_fit(StepConfig step) {
    keep_few(step);
    step.micro_batches *= step.batch.B;
    step.batch.B = 1;
    set_recomputation(step, square_root_recomputation(step));
    if (step.layout.zero.shards > 1) set_stage(step, 3);
    return fits_on_paper(step);
  }

  static void set_recomputation(StepConfig& step, const RecomputeChoice& choice) {
    if (step.layout.zero.holds == Holds::weights) return;  // there are only forwards
    step.recompute = choice.what;
    step.segment = choice.segment;
  }

  // Has the server of --machine no room for twice as many ranks?
  bool server_is_full() const {
    const int64_t ranks = asked_.layout.ranks();
    if (!is_gpu_elsewhere(device_) || !device_.machine) return false;
    return ranks <= device_.machine->links[0].ranks && 2 * ranks > device_.machine->links[0].ranks;
  }
  // Are there so many GPUs in it, or, without a machine, in what was asked for?
  bool server_has(int64_t ranks) const {
    const bool is_known = is_gpu_elsewhere(device_) && device_.machine;
    return ranks <= std::max<int64_t>(asked_.layout.ranks(), is_known ? device_.machine->links[0].ranks : 0);
  }
  // With as little as possible in host memory.
  std::optional<Remedy> offloaded(StepConfig step) {
    if (device_.computes_as() != DeviceKind::cuda || step.layout.zero.holds == Holds::weights) return std::nullopt;
    if (server_is_full())  // otherwise it has been tried
      if (std::optional<Remedy> found = cheapest(step)) return found;
    for (const Offloaded part : all_values<Offloaded>()) {
      Offload& offload = step.layout.zero.offload;
      if (offload.has(part) || (part == Offloaded::master && !step.precision.keeps_masters())) continue;
      offload.add(part);
      step.layout.zero.set_stage(part == Offloaded::weights ? 3 : step.layout.zero.stage);
      if (part == Offloaded::activations) step.recompute = Recompute::block;
      // Other optimizers, schedules and servers may not allow it, nor may a run that reduces gradients otherwise.
      if (!layout_faults(step.layout, step.model).empty() || (step.noise_scale && part >= Offloaded::gradients) ||
          (step.precision.gathers_fp8 && part >= Offloaded::weights) ||
          (begun_ == Begun::yes && part == Offloaded::gradients))
        break;
      if (std::optional<Remedy> found = cheapest(step)) return found;
    }
    return std::nullopt;
  }

  // Recomputation of segments costs a forward more than that of blocks.
  std::optional<Remedy> cheapest(StepConfig step) {
    keep_few(step);
    const RecomputeChoice segments = square_root_recomputation(step);
    std::optional<Remedy> found;
    if (step.segment == 1) found = cheapest(step, {Recompute::block});
    if (!found && (segments.segment > 1 || step.segment > 1)) found = cheapest(step, segments);
    return found;
  }
  // most: the recomputation that needs the least memory
  std::optional<Remedy> cheapest(StepConfig step, const RecomputeChoice& most) {
    const bool sharded = step.layout.zero.shards > 1;
    const Recompute asked = step.recompute;
    const int64_t sequences = step.batch.B * step.micro_batches;
    std::vector<int64_t> sizes;  // micro-batch sizes, the largest first; others change the scales of whole operands
    const int64_t least_size = step.precision.linear == Operands::fp8_tensor ? step.batch.B : 1;
    for (int64_t B = step.batch.B; B >= least_size; --B)
      if (sequences % B == 0 && sequences / B <= most_passes / step.model.n_layer) sizes.push_back(B);
    if (sizes.empty()) return std::nullopt;
    auto set = [&](int64_t B, const RecomputeChoice& recompute) -> const StepConfig& {
      step.batch.B = B;
      step.micro_batches = sequences / B;
      set_recomputation(step, recompute);
      return step;
    };
    const int first = step.layout.zero.offload.has(Offloaded::weights) ? 3
                      : sharded                                        ? std::max(step.layout.zero.stage, 1)
                                                                       : step.layout.zero.stage;
    for (int stage = first; stage <= (sharded ? 3 : first); ++stage) {
      set_stage(step, stage);
      if (!fits_on_paper(set(sizes.back(), most))) {
        if (!sharded) break;
        continue;
      }
      size_t largest = 0, smallest = sizes.size() - 1;
      while (largest < smallest) {
        const size_t middle = (largest + smallest) / 2;
        if (fits_on_paper(set(sizes[middle], most))) smallest = middle;
        else largest = middle + 1;
      }
      for (const Recompute recompute : all_values<Recompute>()) {
        if (recompute < asked || (most.segment > 1 && recompute < most.what)) continue;
        if (device_.gelu_in_products && repeats_activation_alone(recompute)) continue;  // require_gelu_can()
        if (!fits_on_paper(set(sizes[smallest], {recompute, most.segment}))) continue;
        std::optional<Plan> plan = try_plan(step, device_for(step));  // with all micro-batches
        if (plan && fits(*plan, limit_for(step))) return Remedy{step, std::move(*plan)};
      }
    }
    return std::nullopt;
  }

  // If the state alone fits: tries half as many tokens per sequence, a quarter, and so on.
  std::optional<Remedy> shorter_sequences() {
    if (begun_ == Begun::yes || asked_.layout.zero.holds == Holds::weights) return std::nullopt;
    const std::optional<Remedy> least = least_;  // with the sequence length asked for
    StepConfig step = asked_;
    const int64_t slices = step.slices_for(Purpose::train),
                  block = step.precision.linear == Operands::as_stored || step.precision.linear == Operands::fp8_tensor
                              ? 1
                              : detail::recipe_of(step.precision.linear).block,
                  least_T = step.layout.context.slices() * slices * block;
    auto set_length = [&](int64_t T) {
      step.batch.T = T;
      if (slices > 1 && T >= slices) step.layout.pipeline.slices = even_token_slices(T, slices);
    };
    set_length(least_T);
    std::optional<Remedy> found = cheapest(step);
    auto half = [&](int64_t T) { return T / 2 / least_T * least_T; };
    for (set_length(half(asked_.batch.T)); found && step.batch.T > least_T; set_length(half(step.batch.T)))
      if (std::optional<Remedy> longer = cheapest(step)) {
        found = std::move(longer);
        break;
      }
    least_ = least;
    return found;
  }

  const Options& options_;
  const StepConfig& asked_;
  const Device& device_;
  Begun begun_;
  std::optional<Remedy> least_;
};

}  // namespace llmc
