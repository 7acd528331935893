// run_layout.h: trains a tiny model for a few steps in a layout, in one process or several, and collects the outcome.
#pragma once
#include <mutex>

#include "run/processes.h"
#include "run/ranks.h"
#include "run/selftest/layouts.h"
#include "run/selftest/outcome.h"
#include "run/selftest/ties.h"
#include "shard/replica_check.h"

namespace llmc::selftest {

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
  double max_norm = 1;  // to which gradients are clipped; 0: they are not
};

// Updates that change weights by a few percent, so that a wrong one shows in bf16 too, and that are smooth, so that
// errors show in proportion: AdamW's epsilon is as large as the gradients. Lion: see Directions.
inline OptimizerOptions update_options(Optimizer optimizer, int64_t step) {
  const float lr = optimizer == Optimizer::adamw ? 1e-2f : optimizer == Optimizer::sgd ? 0.1f : 1e-3f;
  return {
      .lr = lr, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0.1f, .step = step, .average_share = 0.5};
}

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

// routes: where they are recorded. Ranks then wait for every op, which hides missing waits between streams.
inline Outcome run_layout(const StepConfig& step, const Machine& machine = {}, const Parts& parts = {},
                          int steps = selftest::steps, Routes* routes = nullptr) {
  Outcome outcome;
  outcome.key_biases = step.model.family.positions == Positions::rotary && step.precision.activations != DType::bf16;
  outcome.limits_logits = step.qk_clip.has_value();
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
      const StepResult r =
          run.trainer.step(batches, update_options(step.layout.zero.optimizer, s), {.max_norm = parts.max_norm});
      std::lock_guard lock(mutex);
      collect_state(after[static_cast<size_t>(s) - 1], run.trainer.state(), rank, run.stream);
      for (auto& [all, mine] : {std::pair{&outcome.losses, r.loss}, std::pair{&outcome.norms, r.grad_norm}}) {
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
  if (step.layout.zero.optimizer == Optimizer::lion) {
    if (!machine.processes) outcome.directions = lion_directions(after, update_options(Optimizer::lion, steps));
    for (size_t s = 0; s + 1 < after.size(); ++s) outcome.earlier_weights.push_back(std::move(after[s].weights));
  }
  outcome.weights = std::move(after.back().weights);
  outcome.optimizer_state = std::move(after.back().optimizer_state);
  if (machine.processes) {
    merge(outcome, *machine.processes, static_cast<size_t>(steps));
    require_whole(outcome, step);
    if (routes != nullptr) merge(*routes, *machine.processes);
  }
  return outcome;
}

// The same model and batch on one rank, in micro-batches of this many sequences.
inline StepConfig on_one_rank(const StepConfig& step, int64_t batch_size = 1) {
  StepConfig one = step;
  one.micro_batches = exact_div(step.batch.B * step.micro_batches * step.layout.readers(), batch_size,
                                "sequences of a step over those of a micro-batch");
  one.batch.B = batch_size;
  one.layout = {.zero = {.optimizer = step.layout.zero.optimizer, .muon = step.layout.zero.muon},
                .expert = expert_parallel(step.model, 1)};
  one.recompute = Recompute::none;
  one.head_chunks = 0;
  return one;
}

// Tokens that a layout routes differently from one rank that begins with the same weights.
inline Rerouted rerouted(const StepConfig& one, const StepConfig& step, const Machine& machine = {},
                         const Parts& parts = {}, int steps = selftest::steps) {
  Routes expected, found;
  run_layout(one, {}, {.init = parts.init, .max_norm = parts.max_norm}, steps, &expected);
  run_layout(step, machine, parts, steps, &found);
  return rerouted(expected, found);
}

}  // namespace llmc::selftest
