// Pipelines whose backward has two parts, an input part and a weight part (--schedule zb-h1 and zb-v): training steps
// against one stage, and their memory against the simulation.
#include <map>
#include <string>

#include "catch2.h"
#include "helpers.h"
#include "run/selftest/selftest.h"

using namespace llmc;
using selftest::Model, selftest::Outcome;

namespace {

constexpr Schedule zb_h1 = Schedule::zb_h1, zb_v = Schedule::zb_v;
constexpr GradReduce every_step = GradReduce::step, every_micro_batch = GradReduce::micro;

struct LayoutCase {
  int pp = 1;
  Schedule schedule = Schedule::one_f_one_b;
  ZeroConfig zero = {};
  int tp = 1, cp = 1;
  bool sequence = true, overlap = false;  // of tp
  int chunks() const { return schedule == Schedule::interleaved || schedule == Schedule::zb_v ? 2 : 1; }
};
std::string to_string(const LayoutCase& l) {
  return formatted("pp {} {}, dp {} x {} stage {} reduce {}, tp {}{}, cp {}", l.pp, l.schedule, l.zero.replicas,
                   l.zero.shards, l.zero.stage, l.zero.grad_reduce, l.tp, l.sequence ? " by rows" : "", l.cp);
}

StepConfig step_of(const Model& model, const LayoutCase& layout, int64_t n_layer, int64_t micro_batches,
                   Recompute recompute = Recompute::none) {
  ModelConfig config = model.config();
  config.n_layer = n_layer;
  StepConfig step{.model = config,
                  .precision = model.dtype,
                  .batch = {1, config.n_positions},
                  .micro_batches = micro_batches,
                  .recompute = recompute,
                  .layout = {.zero = layout.zero,
                             .tensor = tensor_parallel(config, layout.tp, layout.sequence, layout.overlap),
                             .pipeline = {layout.schedule, layout.pp, layout.chunks()}}};
  step.layout.context = ContextParallel{layout.cp, ContextAttention::ring};
  step.layout.zero.shards *= layout.cp;
  step.documents = layout.cp > 1 ? Documents::apart : Documents::together;
  return step;
}

// Untied models are bitwise what one stage computes; of a tied table two parts are added in another order (contracts 4
// and 5).
void compare(const Model& model, const LayoutCase& layout, int64_t n_layer, int64_t micro_batches,
             Recompute recompute = Recompute::none) {
  INFO(model.family << (model.tied ? ", tied, " : ", untied, ") << name_of(model.dtype) << ", " << n_layer
                    << " layers, " << to_string(layout) << ", " << micro_batches << " micro-batches, recompute "
                    << name_of(recompute));
  LayoutCase one = layout;
  one.pp = 1, one.schedule = Schedule::one_f_one_b;
  static std::map<std::string, Outcome> known;
  const auto [alone, fresh] = known.try_emplace(
      formatted("{} {} {} {} {} {}", model.family, model.tied, model.dtype, n_layer, micro_batches, to_string(one)));
  if (fresh) alone->second = selftest::run_layout(step_of(model, one, n_layer, micro_batches));
  const Outcome found = selftest::run_layout(step_of(model, layout, n_layer, micro_batches, recompute));
  REQUIRE(found.fault == "");
  const selftest::Distances d(found, alone->second);
  INFO("loss " << d.loss << ", norm " << d.norm << ", gradients " << d.gradients << ", weights " << d.weights);
  if (model.tied && model.dtype == DType::fp32) {
    REQUIRE((d.loss <= 1e-6 && d.norm <= 1e-5 && d.gradients <= 1e-5 && d.weights <= 1e-5));
  } else if (model.tied) {
    REQUIRE((d.loss <= 1e-3 && d.norm <= 0x1p-8 && d.gradients <= 0x1p-8 && d.weights <= 0x1p-8));
  } else {
    REQUIRE(found.losses == alone->second.losses);
    REQUIRE(found.norms == alone->second.norms);
    REQUIRE(found.gradients == alone->second.gradients);
    REQUIRE(found.weights == alone->second.weights);
    REQUIRE(found.optimizer_state == alone->second.optimizer_state);
  }
}

// What a rank of a stage plans under a label.
int64_t planned(const Plan& plan, const std::string& label) {
  for (const MemoryLine& line : plan.memory)
    if (line.label == label) return line.bytes;
  return 0;
}

}  // namespace

TEST_CASE("a backward in two parts computes bitwise what one stage does, with any number of micro-batches", "[pp]") {
  for (const Schedule schedule : {zb_h1, zb_v})
    for (const int pp : {2, 3, 4}) {
      compare({"gpt2", false, DType::fp32, 8, 8}, {pp, schedule}, 9, pp + 2);
      compare({"qwen3", false, DType::bf16, 8, 2}, {pp, schedule}, 9, pp - 1);
    }
}

TEST_CASE("tied tables get both parts of their gradient where the backward has two parts", "[pp]") {
  for (const Schedule schedule : {zb_h1, zb_v})
    for (const GradReduce reduce : {every_step, every_micro_batch}) {
      const DType dtype = schedule == zb_v ? DType::fp32 : DType::bf16;
      compare({"gpt2", true, dtype, 8, 8}, {2, schedule, {.grad_reduce = reduce, .shards = 2}}, 5, 5);
    }
}

TEST_CASE("sharded ranks reduce gradients after the weight part", "[pp]") {
  for (const Schedule schedule : {zb_h1, zb_v}) {
    for (const int stage : {0, 1, 2, 3})
      for (const GradReduce reduce : {every_step, every_micro_batch})
        if ((stage % 2 == 0) == ((schedule == zb_v) == (reduce == every_step)))
          compare({"qwen3", false, DType::fp32, 8, 2},
                  {2, schedule, {.stage = stage, .grad_reduce = reduce, .shards = 2}}, 4, 4);
    compare({"gpt2", false, DType::bf16, 8, 8},
            {2, schedule, {.stage = 3, .grad_reduce = every_micro_batch, .shards = 2, .replicas = 2}}, 4, 3);
  }
}

TEST_CASE("tensor- and context-parallel ranks gather again what the weight part needs", "[pp]") {
  for (const Schedule schedule : {zb_h1, zb_v}) {
    compare({"qwen3", false, DType::fp32, 8, 2}, {2, schedule, {}, 2}, 4, 4);
    compare({"gpt2", false, DType::bf16, 8, 8}, {2, schedule, {}, 2, 1, true, true}, 4, 3);
    compare({"gpt2", false, DType::fp32, 8, 8}, {2, schedule, {}, 2, 1, false}, 4, 3);
    compare({"qwen3", false, DType::bf16, 8, 2, 48}, {2, schedule, {}, 1, 2}, 4, 3);
    compare({"gpt2", false, DType::fp32, 8, 8, 48},
            {2, schedule, {.stage = 3, .grad_reduce = every_micro_batch, .shards = 2}, 2, 2}, 4, 2);
  }
}

TEST_CASE("recomputation changes no bits of a backward in two parts", "[pp]") {
  for (const Schedule schedule : {zb_h1, zb_v})
    for (const Recompute recompute : all_values<Recompute>()) {
      compare({"qwen3", false, DType::bf16, 8, 2}, {3, schedule}, 7, 4, recompute);
      compare({"gpt2", false, DType::fp32, 8, 8},
              {2, schedule, {.stage = 3, .grad_reduce = every_micro_batch, .shards = 1}, 2}, 4, 3, recompute);
    }
}

TEST_CASE("a backward in two parts on up to 8 stages is one stage", "[pp][long]") {
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const char* family : {"gpt2", "qwen3"})
      for (const bool tied : {false, true})
        for (const Schedule schedule : {zb_h1, zb_v})
          for (const int pp : {2, 3, 4, 8})
            for (const int64_t micro_batches : {1, 7, 17})
              compare({family, tied, dtype, 8, 8}, {pp, schedule}, 17, micro_batches,
                      dtype == DType::fp32 ? Recompute::none : Recompute::norm);
}

TEST_CASE("a stage takes messages by what they are where activations and gradients overtake each other", "[pp]") {
  // A stage uses some of these messages in another order than they arrive in.
  compare({"gpt2", false, DType::fp32, 8, 8}, {2, Schedule::interleaved}, 5, 5);
  compare({"gpt2", false, DType::bf16, 8, 8}, {2, Schedule::interleaved}, 5, 7);
  compare({"gpt2", false, DType::fp32, 8, 8}, {2, zb_v}, 5, 7);
}

TEST_CASE("the planned activations of every stage are what the simulation counts, for every schedule", "[pp]") {
  const DType dtype = DType::bf16;
  const int64_t per_chunk = 2;  // layers
  for (const Schedule schedule : {Schedule::gpipe, Schedule::one_f_one_b, Schedule::interleaved, zb_h1, zb_v})
    for (const Recompute recompute : all_values<Recompute>())
      for (const int pp : {2, 3, 4})
        for (const int64_t micro_batches : {1, 2, 3, 8}) {
          const LayoutCase layout{pp, schedule};
          StepConfig step = step_of({"llama", false, dtype, 6, 3}, layout, per_chunk * pp * layout.chunks(),
                                    micro_batches, recompute);
          step.generates = false;
          const Pipeline pipeline = step.pipeline();
          const std::vector<ActionList> lists = pipeline_actions(pipeline);
          const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
          auto bytes_of = [&](auto&& allocate) {
            Arena arena({DeviceKind::null});
            allocate(arena);
            return arena.used();
          };
          const bool in_parts = pipeline.splits_backward();
          const BlockShape shape{step.model, step.batch, Layers::any, {}, dtype};
          auto product_inputs = [&](ActionKind made_by) {
            return bytes_of([&](Arena& arena) { BlockActivations::product_inputs(shape, recompute, made_by, arena); });
          };
          const int64_t block = bytes_of([&](Arena& arena) {
            BlockActivations::kept(shape, recompute, in_parts ? Backward::in_parts : Backward::whole, {}, arena);
          });
          const int64_t gradients = bytes_of([&](Arena& arena) { OutputGradients(shape, arena); });
          const int64_t stream = bytes_of([&](Arena& arena) {
            arena.alloc("", "", dtype, {step.batch.rows(), step.model.n_embd});
          });
          for (int s = 0; s < pp; ++s) {
            INFO(to_string(layout) << ", " << micro_batches << " micro-batches, stage " << s << ", "
                                   << name_of(recompute));
            const ActionList& list = lists[static_cast<size_t>(s)];
            const auto elsewhere = [&](int chunk) {  // another stage has this chunk
              return chunk >= 0 && chunk < pipeline.chunks() && pipeline.stage_of(chunk) != s;
            };
            ActionList with_input, leaving;  // passes whose input, or output, is not another chunk's on this stage
            int64_t outputs = 0, most_outputs = 0;  // of blocks; those that leave are not kept
            for (const Action& a : list) {
              if (a.chunk == 0 || elsewhere(a.chunk - 1)) with_input.push_back(a);
              if (elsewhere(a.chunk + 1)) leaving.push_back(a);
              const int64_t of_pass = per_chunk - elsewhere(a.chunk + 1);
              if (a.kind == ActionKind::forward) outputs += of_pass;
              if (is_backward(a.kind)) outputs -= of_pass;
              most_outputs = std::max(most_outputs, outputs);
            }
            const Kept kept = most_kept(pipeline, list), inputs = most_kept(pipeline, with_input);
            const Plan& of_stage = *plan.stages[static_cast<size_t>(s)];
            REQUIRE(planned(of_stage, "activations") ==
                    kept.activations * per_chunk * block +
                        (inputs.activations + most_outputs + (leaving.empty() ? 0 : 1)) * stream);
            REQUIRE(planned(of_stage, "for the weight part") ==
                    (in_parts
                         ? per_chunk * (kept.together * product_inputs(ActionKind::forward) +
                                        kept.for_weights * (gradients + product_inputs(ActionKind::backward_input)))
                         : 0));
          }
        }
}

TEST_CASE("gradients in flight are those of the blocks between an input part and its weight part", "[pp]") {
  for (const Schedule schedule : {Schedule::gpipe, Schedule::one_f_one_b, Schedule::interleaved, zb_h1, zb_v})
    for (const int pp : {2, 3, 4, 8})
      for (const int64_t micro_batches : {1, 2, 5, 24}) {
        const int chunks = pp * LayoutCase{pp, schedule}.chunks();
        const Pipeline pipeline{schedule, pp, chunks / pp, micro_batches};
        for (int s = 0; s < pp; ++s) {
          INFO(name_of(schedule) << ", " << pp << " stages, stage " << s << ", " << micro_batches << " micro-batches");
          const ActionList list = pipeline_actions(pipeline)[static_cast<size_t>(s)];
          const int64_t open = blocks_open(list, chunks_of(std::vector<int64_t>(static_cast<size_t>(chunks), 3)));
          REQUIRE(open == (pipeline.splits_backward() ? 3 * most_kept(pipeline, list).for_weights : 1));
        }
      }
}

TEST_CASE("where a stage has both chunks of a hand-over, the gradient goes straight from one to the other", "[pp]") {
  // The input part of the next chunk finds it where that of the chunk before has left it.
  for (const Schedule schedule : {zb_h1, zb_v, Schedule::interleaved})
    for (int pp = 2; pp <= 8; ++pp)
      for (int64_t micro_batches = 1; micro_batches <= 20; ++micro_batches) {
        const Pipeline p{schedule, pp, LayoutCase{pp, schedule}.chunks(), micro_batches};
        const std::vector<ActionList> lists = compute_orders(p);
        for (int s = 0; s < pp; ++s) {
          ActionList backwards;
          for (const Action& a : lists[static_cast<size_t>(s)])
            if (is_backward(a.kind)) backwards.push_back(a);
          for (size_t i = 0; i < backwards.size(); ++i) {
            const Action& a = backwards[i];
            if (a.chunk == 0 || p.stage_of(a.chunk - 1) != s) continue;
            REQUIRE((i + 1 < backwards.size() && backwards[i + 1] == Action{a.kind, a.chunk - 1, a.micro_batch}));
          }
        }
      }
}

TEST_CASE("a weight part before its input part, or without one, has nothing to work on", "[pp]") {
  StepConfig step = step_of({"gpt2", false, DType::fp32, 8, 8}, {2, zb_h1}, 4, 3);
  const std::vector<ActionList> lists = pipeline_actions(step.pipeline());
  auto plan_memory = [&](const ActionList& list) {
    Arena arena({DeviceKind::null});
    PassMemory(step, step.model_chunks(), list, {Purpose::train, step.batch}, arena);
  };
  for (ActionList list : lists) {
    plan_memory(list);
    const auto input =
        std::find_if(list.begin(), list.end(), [](const Action& a) { return a.kind == ActionKind::backward_input; });
    const auto weight =
        std::find_if(list.begin(), list.end(), [](const Action& a) { return a.kind == ActionKind::backward_weight; });
    std::swap(*input, *weight);
    REQUIRE_ERROR(plan_memory(list), "comes before the input part of the backward");
  }
}
