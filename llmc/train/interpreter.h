// interpreter.h: runs lists of actions (dist/schedule.h): the only place that runs forward and backward. It gives every
// micro-batch in flight a slot of activations, uploads inputs, says which units will be needed, and launches what
// repeats as a CUDA graph. What an action computes is in stage.h.
#pragma once
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dist/zero.h"
#include "train/in_flight.h"
#include "train/stage.h"
#include "train/step_config.h"

namespace llmc {

class Interpreter {
 public:
  Interpreter(const StepConfig& config, const Context& context, ModelState& state, Stage& stage)
      : config_(config), context_(context), state_(state), stage_(stage), uploads_(config, context) {}

  // Enqueues all actions on the compute stream. `batches`: the inputs of each micro-batch.
  void run(const std::vector<Action>& actions, const Pass& pass, const BatchSource& batches) {
    auto scope = context_.arena.scope();
    const std::vector<Slot> slots = make_slots(actions, pass);
    state_.start_pass(units_acquired(actions, pass.purpose), context_.compute);
    for (const Action& action : actions) {
      const Slot& slot = slots[static_cast<size_t>(action.micro_batch) % slots.size()];
      micro_batch_ = action.micro_batch;
      if (action.kind == ActionKind::forward && stage_.chunk(action.chunk).has_embedding)
        uploads_.upload_batch(slot.inputs, batches(action.micro_batch), pass.shape, pass.purpose,
                              state_.dp().context_rank, context_);
      auto enqueue = [&] { dispatch(action, slot, pass); };
      if (replayable(action, pass))
        context_.compute.replayed(replays_[{action.kind, action.chunk, slot.inputs.tokens.bytes}], enqueue);
      else enqueue();
    }
  }

  // Where the interpreter is.
  struct Place {
    std::string what;  // "forward of blocks.3"
    int64_t micro_batch;
  };
  Place place() const { return {stage_.current(), micro_batch_}; }

 private:
  void dispatch(const Action& action, const Slot& slot, const Pass& pass) {
    switch (action.kind) {
      case ActionKind::forward: return stage_.forward(action.chunk, slot, pass, action.micro_batch);
      case ActionKind::backward: return stage_.backward(action.chunk, slot, pass, is_last(action));
      default: throw Error(formatted("a {} in a list for one rank, which has forwards and backwards", action.kind));
    }
  }

  // One set of activations for each micro-batch in flight; micro-batch m uses slot m modulo their number.
  std::vector<Slot> make_slots(const std::vector<Action>& actions, const Pass& pass) const {
    const int64_t in_flight = pass.purpose == Purpose::train ? micro_batches_in_flight(actions) : 1;
    const BlockActivations shared =
        BlockActivations::recomputed(config_.part(), config_.share(pass.shape, pass.purpose), config_.tensor,
                                     config_.dtype, config_.recompute_for(pass.purpose), context_.arena);
    std::vector<Slot> slots;
    for (int64_t i = 0; i < in_flight; ++i)
      slots.emplace_back(config_, stage_.chunks(), pass.shape, pass.purpose, shared, context_.arena);
    return slots;
  }

  std::vector<size_t> units_acquired(const std::vector<Action>& actions, Purpose purpose) const {
    std::vector<size_t> units;
    for (const Action& action : actions)
      for (const size_t u : stage_.units_acquired(action, purpose)) units.push_back(u);
    return units;
  }

  bool is_last(const Action& action) const { return action.micro_batch + 1 == config_.micro_batches; }

  // Does the action enqueue the same every time, and only on the compute stream? Not where it waits for other streams,
  // or they for it, nor where it exchanges activations.
  bool replayable(const Action& action, const Pass& pass) const {
    if (pass.purpose != Purpose::train || pass.launch == Launch::enqueue) return false;
    if (config_.zero.stage == 3 || config_.zero.grad_reduce == GradReduce::micro) return false;
    if (config_.tensor.ranks > 1 || config_.context.ranks > 1) return false;
    const bool reduces = action.kind == ActionKind::backward && is_last(action) && config_.zero.ranks() > 1;
    return !reduces;
  }

  const StepConfig& config_;
  Context context_;
  ModelState& state_;
  Stage& stage_;
  Uploads uploads_;
  // By kind, chunk, and the address of the slot.
  std::map<std::tuple<ActionKind, int, const std::byte*>, Replay> replays_;
  int64_t micro_batch_ = -1;
};

}  // namespace llmc
