// Tensor and sequence parallelism: which rank has which part of a parameter, traffic by the laws, memory on paper,
// planted bugs that the self-test must find. The self-test checks that layouts agree with one rank (test_parallel.cpp).
#include <set>

#include "catch2.h"
#include "helpers.h"
#include "parallel/tensor_bugs.h"
#include "run/selftest/selftest.h"

using namespace llmc;

namespace {

selftest::Model model_of(const char* family, int64_t heads, int64_t kv_heads, DType dtype = DType::fp32,
                         bool tied = true) {
  return {family, tied, dtype, heads, kv_heads};
}

StepConfig step_of(const selftest::Model& model, int tp, bool sequence, const ZeroConfig& zero = {}) {
  return selftest::step_config(model.config(), model.dtype, 3,
                               Layout{zero, tensor_parallel(model.config(), tp, sequence)});
}

}  // namespace

TEST_CASE("tensor-parallel ranks together have every element, as often as the layout says", "[parallel][tp]") {
  for (const auto& [family, heads, kv_heads] : {std::tuple{"gpt2", 8, 8}, {"qwen2", 8, 2}, {"qwen3", 8, 1}})
    for (const int tp : {1, 2, 4, 8}) {
      const ModelConfig config = model_of(family, heads, kv_heads).config();
      const TensorParallel tensor = tensor_parallel(config, tp);
      std::map<std::string, std::vector<int>> holders, counted;
      for (int rank = 0; rank < tp; ++rank)
        for (const UnitSpec& unit : part_of(parameter_table(config), tensor, rank))
          for (const ParamSpec& p : unit.params) {
            holders[p.name].resize(static_cast<size_t>(p.numel()));
            counted[p.name].resize(static_cast<size_t>(p.numel()));
            const Elements elements = p.elements_from(0);
            for (int64_t i = 0; i < p.box().numel(); ++i) {
              ++holders[p.name].at(static_cast<size_t>(elements.index(i)));
              counted[p.name].at(static_cast<size_t>(elements.index(i))) += p.first_copy;
            }
          }
      for (const UnitSpec& unit : parameter_table(config))
        for (const ParamSpec& p : unit.params) {
          INFO(family << ", tp " << tp << ", " << p.name);
          const bool key_value = p.name.find("attn.k.") != p.name.npos || p.name.find("attn.v.") != p.name.npos;
          const bool everybodys = p.tp == TensorSplit::by_row || p.tp == TensorSplit::by_head;
          const int expected = everybodys ? tp : key_value ? std::max(1, tp / kv_heads) : 1;
          REQUIRE(std::set<int>(holders[p.name].begin(), holders[p.name].end()) == std::set<int>{expected});
          REQUIRE(std::set<int>(counted[p.name].begin(), counted[p.name].end()) == std::set<int>{1});
        }
    }
}

TEST_CASE("a vocabulary of any size is shared out, also where a rank's part is all padding", "[parallel][tp]") {
  for (const int64_t V : {1, 9, 97, 128, 50257})
    for (const int tp : {2, 3, 8}) {
      ModelConfig config = model_of("gpt2", 24, 24).config();
      config.vocab_size = V;
      int64_t rows = 0;
      for (int rank = 0; rank < tp; ++rank) {
        const ParamSpec table = part_of(parameter_table(config), tensor_parallel(config, tp), rank)[0].params[0];
        REQUIRE(table.box().row == std::min(V, rows));
        REQUIRE((table.padded_rows % 128 == 0 && table.box().rows <= table.padded_rows));
        rows += table.box().rows;
      }
      REQUIRE(rows == V);
    }
}

TEST_CASE("a number of tensor-parallel ranks that the model cannot be shared out to is refused with those that can",
          "[parallel][tp]") {
  const ModelConfig config = model_of("llama", 6, 3).config();
  REQUIRE_ERROR(layout_faults({.tensor = {.ranks = 2}}, config).refuse(), "--tp 2");
  REQUIRE_ERROR(layout_faults({.tensor = {.ranks = 2}}, config).refuse(), "use one of 1, 3");
  REQUIRE_ERROR(layout_faults({.tensor = {.ranks = 4}}, config).refuse(), "6 query heads");
}

TEST_CASE("what tensor-parallel ranks send obeys the laws, planned and between threads", "[parallel][tp]") {
  for (const auto& model : {model_of("gpt2", 8, 8), model_of("qwen3", 8, 2, DType::bf16, false)})
    for (const int tp : {2, 4})
      for (const bool sequence : {true, false})
        for (const Recompute recompute : {Recompute::none, Recompute::block}) {
          INFO(model.family << ", tp " << tp << ", by rows " << sequence << ", recompute " << name_of(recompute));
          StepConfig step = step_of(model, tp, sequence);
          step.recompute = recompute;
          const ModelConfig& m = step.model;
          const int64_t P = tp, R = round_up(step.batch.rows(), P), M = step.micro_batches, L = m.n_layer,
                        A = R * m.n_embd * size_of(step.precision.activations);
          auto f = [&](int64_t bytes) { return bytes / P * (P - 1); };
          const bool block = recompute == Recompute::block;
          // Blocks; then the embedding and the head, whose input the head's rows are: with sequence parallelism rows
          // are gathered or reduced once in each direction, without it all-reduced once, and three numbers per row.
          const int64_t of_blocks =
              L * (sequence ? f(8 * A) + (block ? f(3 * A) : f(2 * A)) : f(8 * A) + (block ? f(2 * A) : 0));
          const int64_t of_ends = sequence ? f(4 * A) : f(4 * A);
          const int64_t of_loss = (P - 1) * (sequence ? R : step.batch.rows()) * 3 * 4;
          std::map<std::string, int64_t> law;
          law["activations"] = M * (of_blocks + of_ends + of_loss);
          law["scalars"] = (P - 1) * 8 * (3 + L + 2);
          // All-reduced in fp32: parameters that lie beside each other together, with the gaps between and after them.
          for (const UnitSpec& unit : part_of(parameter_table(m), step.layout.tensor, 0)) {
            const UnitLayout layout(unit);
            for (size_t first = 0, last = 0; first < unit.params.size(); first = last + 1) {
              const int copies = unit.params[first].copies;
              auto same = [&](const ParamSpec& p) { return p.partial && p.copies == copies; };
              last = first;
              if (!unit.params[first].partial) continue;
              while (last + 1 < unit.params.size() && same(unit.params[last + 1])) ++last;
              const int64_t end = layout.offsets[last] + unit.params[last].stored_shape().numel();
              law[copies == tp ? "partial gradients" : "head gradients"] +=
                  2 * 4 * (round_up(end, 64) - layout.offsets[first]) / copies * (copies - 1);
            }
          }
          const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
          for (const auto& [group, bytes] : plan.step_traffic) {
            INFO(group);
            REQUIRE(bytes == law[group]);
          }
          World world(step.layout.mesh());
          std::mutex mutex;
          run_ranks(world, [&](int rank) {
            Run run(step, plan, {DeviceKind::cpu, 1}, world, rank);
            init_weights(run.trainer.state(), 1, run.stream);
            run.trainer.step([&](int64_t m) { return selftest::read_batch(step, 0, m); },
                             {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0, .step = 1},
                             {});
            run.groups.reduce_stream().synchronize();
            std::lock_guard lock(mutex);
            const std::vector<Comm*> groups = run.groups.tensor_groups();
            for (size_t g = 0; g < groups.size(); ++g) {
              CHECK(groups[g]->bytes_sent() == plan.step_traffic[g].second, "rank {} sends {} bytes to {}, planned {}",
                    rank, groups[g]->bytes_sent(), groups[g]->name(), plan.step_traffic[g].second);
            }
          });
        }
}

TEST_CASE("a linear layer of tensor-parallel ranks is one product and one collective, or with overlap four of each",
          "[parallel][tp]") {
  const selftest::Model model = model_of("gpt2", 8, 8);
  const auto plan_of = [&](int tp, bool overlap) {
    StepConfig step = step_of(model, tp, true);
    step.batch.B = 8;
    step.head_chunks = 1;
    step.micro_batches = 2;
    step.layout.tensor.overlap = overlap;
    return make_plan(step, {DeviceKind::cpu, 1}, 0, Passes::step);
  };
  const OpLedger alone = plan_of(1, false).step_ops;
  const int64_t L = model.config().n_layer, M = 2;
  for (const int tp : {2, 4, 8}) {
    OpLedger whole = plan_of(tp, false).step_ops, pieces = plan_of(tp, true).step_ops;
    for (const char* op : {"linear_forward", "linear_backward_input"}) {
      INFO("tp " << tp << ", " << op);
      REQUIRE(whole.at(op).calls == alone.at(op).calls);
      REQUIRE(pieces.at(op).calls == std::min(tp, 4) * alone.at(op).calls);
    }
    // Of a block: before q, k, v and up, and again for their weight gradients; in the backward before proj and down.
    // Of the ends: the gradient of the embedding, the rows of the head, the numbers of the loss.
    REQUIRE(whole.at("all_gather").calls == M * (6 * L + 3) + 1);  // the scalars
    REQUIRE(whole.at("all_to_all_rows").calls == M * (4 * L + 2));
    REQUIRE((pieces.at("all_gather").calls == 1 && !pieces.contains("all_to_all_rows")));  // on a stream of their own
  }
}

TEST_CASE("pieces of a few ranks each, not equally many, compute what one piece does", "[parallel][tp]") {
  for (const int tp : {5, 6, 8})
    for (const bool sequence : {true, false}) {
      INFO("tp " << tp << ", by rows " << sequence);
      StepConfig step = step_of(model_of("llama", tp, tp), tp, sequence);
      step.model.n_layer = 1;
      step.micro_batches = 1;
      const selftest::Outcome whole = selftest::run_layout(step, {}, {.hooks = poison_hooks}, 1);
      step.layout.tensor.overlap = true;
      const selftest::Outcome pieces = selftest::run_layout(step, {}, {.hooks = poison_hooks}, 1);
      REQUIRE((pieces.fault == "" && pieces.losses == whole.losses && pieces.gradients == whole.gradients));
    }
}

TEST_CASE("with sequence parallelism a rank keeps its share of the activations", "[parallel][tp]") {
  auto activations = [](int tp, bool sequence) {
    StepConfig step{.model = resolve_model("llama3:8B", {}), .precision = DType::bf16, .batch = {1, 8192}};
    step.layout.tensor = tensor_parallel(step.model, tp, sequence);
    step.layout.zero.holds = Holds::training_state;
    int64_t bytes = 0;
    for (const MemoryLine& line : make_plan(step, {DeviceKind::cpu, 1}).memory)
      if (line.label == "activations") bytes = line.bytes;
    return bytes;
  };
  const int64_t alone = activations(1, true);
  REQUIRE(activations(8, true) * 8 == alone);
  REQUIRE(activations(8, false) * 8 > 2 * alone);
}

TEST_CASE("overlap hides some of the exchanges of tensor parallelism on paper, and changes no bytes",
          "[parallel][tp]") {
  // The rates of a GPU with fast links, on which products and exchanges take about as long as each other.
  Device device{DeviceKind::cpu, 1};
  device.machine = ideal_machine(5e14, 3e12, 2e11, 2e-6);
  for (const int tp : {2, 8})
    for (const bool sequence : {true, false}) {
      INFO("tp " << tp << ", by rows " << sequence);
      StepConfig step{.model = resolve_model("llama3:8B", {}), .precision = DType::bf16, .batch = {1, 4096}};
      step.generates = false;
      step.layout.tensor = tensor_parallel(step.model, tp, sequence);
      const Plan without = make_plan(step, device);
      step.layout.tensor.overlap = true;
      const Plan with = make_plan(step, device);
      REQUIRE(with.step_traffic == without.step_traffic);
      const double compute = without.step_seconds - without.exposed_seconds;
      REQUIRE(std::abs((with.step_seconds - with.exposed_seconds) / compute - 1) < 1e-9);
      REQUIRE((with.exposed_seconds > 0 && with.exposed_seconds < 0.8 * without.exposed_seconds));
    }
}

TEST_CASE("the self-test finds bugs of tensor parallelism", "[parallel][tp]") {
  using namespace tensor_bugs;
  using layout_bugs::Replaces;
  const Replaces<Skips<gathered>> stale_gather;
  const Replaces<Skips<gathered_again>> stale_input;
  const Replaces<Skips<gathered_gradient>> stale_gradient;
  const Replaces<Skips<head_rows>> stale_head;
  const Replaces<Skips<partial_sums>> skipped_sum;
  const Replaces<Skips<sum_over_ranks>> stale_sum;
  const Replaces<SwapsRanks> swapped;
  const Replaces<ChangesLoss<without_the_largest>> largest;
  const Replaces<ChangesLoss<with_a_padding_column>> padding;
  const Replaces<ChangesLoss<without_the_target>> target;
  const Replaces<SkipsSum<partial_gradients>> norms;
  const Replaces<SkipsSum<head_gradients>> heads;
  const Replaces<Averages> averages;
  const Replaces<OwnNorm> own_norm;
  struct Case {
    const char* bug;
    const Hooks& hooks;
    bool sequence;
  };
  const selftest::Model model = model_of("qwen3", 8, 2);
  const selftest::Outcome alone = selftest::run_layout(step_of(model, 1, true));
  auto wrong = [&](const Hooks& hooks, bool sequence) {
    const selftest::Outcome outcome = selftest::run_layout(step_of(model, 4, sequence), {}, {.hooks = hooks});
    const selftest::Distances d(outcome, alone);
    return outcome.fault != "" || !(d.loss < 1e-6 && d.norm < 1e-5 && d.gradients < 1e-5 && d.weights < 1e-5);
  };
  REQUIRE_FALSE(wrong(poison_hooks, true));
  REQUIRE_FALSE(wrong(poison_hooks, false));
  for (const auto& [bug, hooks, sequence] : {Case{"stale gather", stale_gather, true},
                                             {"stale input of a weight gradient", stale_input, true},
                                             {"stale gradient", stale_gradient, true},
                                             {"stale rows of the head", stale_head, true},
                                             {"skipped reduction, by rows", skipped_sum, true},
                                             {"skipped reduction", skipped_sum, false},
                                             {"sum that is not gathered", stale_sum, false},
                                             {"rows of two ranks swapped", swapped, true},
                                             {"loss without the largest", largest, true},
                                             {"padding column counted", padding, true},
                                             {"loss without the target", target, false},
                                             {"norm gradient not summed", norms, true},
                                             {"query-key norm's gradient not summed", norms, false},
                                             {"key-value gradients not summed", heads, true},
                                             {"averaged instead of summed", averages, true},
                                             {"each rank's own norm", own_norm, true}}) {
    INFO(bug);
    REQUIRE(wrong(hooks, sequence));
  }
}
