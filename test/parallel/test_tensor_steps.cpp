// Steps, evaluation and generation with tensor parallelism, against one rank: recomputation, parts of the head, masked
// documents, rounding without masters, twenty steps, multiple choice, sampling, the search for NaN.
#include <mutex>

#include "catch2.h"
#include "helpers.h"
#include "parallel/on_ranks.h"
#include "run/selftest/selftest.h"
#include "train/choices.h"
#include "train/not_finite.h"
#include "train/sample.h"

using namespace llmc;

namespace {

const selftest::Model qwen3{"qwen3", true, DType::fp32, 8, 2}, gpt2{"gpt2", false, DType::fp32, 8, 8};

StepConfig step_of(const selftest::Model& model, int tp, bool sequence = true, const ZeroConfig& zero = {}) {
  const ModelConfig config = model.config();
  return selftest::step_config(config, model.dtype, 3, Layout{zero, tensor_parallel(config, tp, sequence)});
}

void require_close(const selftest::Outcome& outcome, const selftest::Outcome& alone, double weights = 1e-5) {
  REQUIRE(outcome.fault == "");
  const selftest::Distances d(outcome, alone);
  INFO("loss " << d.loss << ", norm " << d.norm << ", gradients " << d.gradients << ", weights " << d.weights);
  REQUIRE((d.loss < 1e-6 && d.norm < 1e-5 && d.gradients < 1e-5 && d.weights < weights));
}

}  // namespace

TEST_CASE("recomputation changes no bits on tensor-parallel ranks", "[parallel][tp]") {
  for (const bool sequence : {true, false})
    for (const bool overlap : {false, true}) {
      StepConfig step = step_of(qwen3, 4, sequence);
      step.layout.tensor.overlap = overlap;
      const selftest::Outcome kept = selftest::run_layout(step);
      for (const Recompute recompute : {Recompute::activation, Recompute::norm, Recompute::block}) {
        INFO(name_of(recompute) << ", by rows " << sequence << ", overlap " << overlap);
        step.recompute = recompute;
        const selftest::Outcome outcome = selftest::run_layout(step);
        REQUIRE((outcome.fault == "" && outcome.losses == kept.losses && outcome.weights == kept.weights));
      }
    }
}

TEST_CASE("the head takes the rows of tensor-parallel ranks in parts", "[parallel][tp]") {
  for (const selftest::Model& model : {qwen3, gpt2}) {
    const selftest::Outcome alone = selftest::run_layout(step_of(model, 1));
    for (const bool sequence : {true, false})
      for (const int64_t chunks : {2, 3, 19}) {
        StepConfig step = step_of(model, 4, sequence);
        step.head_chunks = chunks;
        INFO(model.family << ", " << chunks << " chunks, by rows " << sequence);
        require_close(selftest::run_layout(step), alone);
      }
  }
}

TEST_CASE("masked documents and rows without targets are those of the micro-batch on tensor-parallel ranks",
          "[parallel][tp]") {
  selftest::Parts parts;
  parts.read = [](const StepConfig& step, int reader, int64_t micro_batch) {
    HostBatch batch = selftest::read_batch(step, reader, micro_batch);
    for (size_t i = 0; i < batch.positions.size(); ++i) {
      batch.positions[i] = static_cast<int32_t>(i % selftest::seq_len % 7);
      if (i % 5 == 3) batch.targets[i] = -1;
    }
    return batch;
  };
  for (const selftest::Model& model : {qwen3, gpt2}) {
    auto apart = [&](int tp, bool sequence) {
      StepConfig step = step_of(model, tp, sequence);
      step.documents = Documents::apart;
      return selftest::run_layout(step, {}, parts);
    };
    for (const bool sequence : {true, false}) require_close(apart(4, sequence), apart(1, true));
  }
}

TEST_CASE("bf16 weights without masters are rounded as on one rank, and alike on all tensor-parallel ranks",
          "[parallel][tp]") {
  selftest::Model model = qwen3;
  model.dtype = DType::bf16;
  auto without_masters = [&](int tp) {
    StepConfig step = step_of(model, tp);
    step.precision.masters = false;
    return selftest::run_layout(step);
  };
  const selftest::Outcome alone = without_masters(1);
  for (const int tp : {2, 4}) {
    const selftest::Outcome outcome = without_masters(tp);
    REQUIRE(outcome.fault == "");
    REQUIRE(selftest::distance(outcome.weights, alone.weights) < 0x1p-7);
  }
  // An update that no gradient takes part in is the same on all layouts, and so is its rounding, bit for bit.
  auto decayed = [&](int tp) {
    StepConfig step = step_of(model, tp);
    step.precision.masters = false;
    selftest::Outcome outcome;
    std::mutex mutex;
    on_ranks(step, [&](Run& run) {
      run.trainer.step([&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
                       {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e30f, .weight_decay = 0.1f, .step = 1}, {});
      run.stream.synchronize();
      std::lock_guard lock(mutex);
      selftest::collect_state(outcome, run.trainer.state(), run.groups.rank(), run.stream);
    });
    REQUIRE(outcome.fault == "");
    return outcome.weights;
  };
  const selftest::Wholes by_one = decayed(1);
  for (const int tp : {2, 4}) REQUIRE(decayed(tp) == by_one);
}

TEST_CASE("a rank whose part of the vocabulary is all padding trains with the others", "[parallel][tp]") {
  selftest::Outcome alone;
  for (const int tp : {1, 8})
    for (const bool sequence : {true, false}) {
      ModelConfig config = gpt2.config();
      config.vocab_size = 9;  // two tokens for each of four ranks, one for the fifth
      const StepConfig step =
          selftest::step_config(config, DType::fp32, 1, Layout{{}, tensor_parallel(config, tp, sequence)});
      if (tp == 1) alone = selftest::run_layout(step);
      else require_close(selftest::run_layout(step), alone);
    }
}

TEST_CASE("twenty steps of tensor-parallel ranks follow one rank", "[parallel][tp]") {
  for (const selftest::Model& model : {qwen3, gpt2}) {
    const selftest::Outcome alone = selftest::run_layout(step_of(model, 1), {}, {}, 20);
    for (const bool sequence : {true, false}) {
      const StepConfig step = sequence ? step_of(model, 2, true, {.stage = 3, .shards = 2}) : step_of(model, 4, false);
      const selftest::Outcome outcome = selftest::run_layout(step, {}, {}, 20);
      REQUIRE(outcome.fault == "");
      const selftest::Distances d(outcome, alone);
      INFO("loss " << d.loss << ", weights " << d.weights);
      REQUIRE((outcome.losses.size() == 20 && d.loss < 1e-4 && d.norm < 1e-4 && d.weights < 1e-4));
    }
  }
}

TEST_CASE("multiple choice and sampling give on tensor-parallel ranks what they give on one", "[parallel][tp]") {
  const TempDir dir;
  write_choices(dir / "choices.jsonl");
  const std::vector<int32_t> text = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
  for (const selftest::Model& model : {qwen3, gpt2}) {
    const ChoiceSet set(dir / "choices.jsonl", model.config().vocab_size, selftest::seq_len);
    ChoiceScore score;
    std::vector<std::vector<float>> logits;
    on_ranks(step_of(model, 1), [&](Run& run) {
      score = evaluate_choices(run.trainer, set, run.groups, [](int64_t, int64_t) {});
      for (size_t n = 1; n <= text.size(); ++n)
        logits.push_back(run.trainer.next_token_logits(std::span(text).first(n)));
    });
    for (const auto& [tp, sequence, chunks] : {std::tuple{2, true, 3}, {4, true, 0}, {8, true, 0}, {4, false, 2}}) {
      StepConfig step = step_of(model, tp, sequence);
      step.head_chunks = chunks;
      on_ranks(step, [&](Run& run) {
        const ChoiceScore mine = evaluate_choices(run.trainer, set, run.groups, [](int64_t, int64_t) {});
        CHECK(mine.accuracy == score.accuracy && mine.normalized_accuracy == score.normalized_accuracy,
              "tp {}: accuracy {} instead of {}", tp, mine.accuracy, score.accuracy);
        Continuation sequence_so_far(run.trainer);
        for (size_t n = 1; n <= text.size(); ++n) {
          const std::vector<float> whole = run.trainer.next_token_logits(std::span(text).first(n)),
                                   grown = sequence_so_far.feed(std::span(text).subspan(n - 1, 1));
          for (const auto& found : {whole, grown}) {
            CHECK(found.size() == logits[n - 1].size());
            const double far =
                relative_distance(found.data(), logits[n - 1].data(), static_cast<int64_t>(found.size()));
            CHECK(far < 1e-5, "tp {}, {} tokens: logits are {} from those of one rank", tp, n, far);
          }
        }
      });
    }
  }
}

TEST_CASE("the first number that is not finite is found on the tensor-parallel rank where it arose", "[parallel][tp]") {
  const StepConfig step = step_of(qwen3, 4);
  std::vector<std::string> found(4);
  auto search = [&](auto&& break_weights) {
    on_ranks(step, [&](Run& run) {
      break_weights(run);
      const BatchSource batches = [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); };
      found[static_cast<size_t>(run.groups.rank())] =
          where_not_finite(run.trainer, batches, [](int64_t m, int64_t b) { return m + b; });
    });
    for (const std::string& text : found) REQUIRE(text == found[0]);
    return found[0];
  };
  auto set = [](Run& run, const std::string& name, float value) {
    for (const StateEntry& e : run.trainer.state().state_table())
      if (e.param->name == name && e.kind == StateKind::weight) fill(e.tensor, value, run.stream);
  };
  const std::string bad_weight = search([&](Run& run) {
    if (run.groups.rank() == 2) set(run, "blocks.1.mlp.up.weight", std::numeric_limits<float>::quiet_NaN());
  });
  INFO(bad_weight);
  REQUIRE(bad_weight == "blocks.1.mlp.up.weight (weight, before the step) contains a non-finite number on rank 2");
  // Finite, but their product is not; the others get it with the sum of the branch.
  const std::string overflow = search([&](Run& run) {
    if (run.groups.rank() == 2) set(run, "blocks.1.mlp.gate.weight", 3e38f);
  });
  INFO(overflow);
  REQUIRE(overflow.find("is in up, written by linear_forward in the forward of blocks.1, rank 2") != std::string::npos);
}

TEST_CASE(
    "a non-finite number among the rows of one tensor-parallel rank is found there, with the samples it may be of",
    "[parallel][tp]") {
  StepConfig step = step_of(gpt2, 2);
  step.batch.B = 2;
  step.micro_batches = 1;
  std::vector<std::string> found(2);
  on_ranks(step, [&](Run& run) {
    // The embedding of a token that only the second sequence has: finite, but a norm's sum of it is not.
    for (const StateEntry& e : run.trainer.state().state_table())
      if (e.param->name == "wte.weight" && e.kind == StateKind::weight && e.param->box().row <= 96 &&
          96 < e.param->box().row + e.param->box().rows)
        fill(e.tensor.slice((96 - e.param->box().row) * e.param->box().columns, {e.param->box().columns}), 3e38f,
             run.stream);
    const BatchSource batches = [&](int64_t) {
      HostBatch batch = selftest::read_batch(step, 0, 0);
      for (int32_t& token : batch.tokens) token = std::min(token, 95);
      batch.tokens.back() = 96;
      return batch;
    };
    found[static_cast<size_t>(run.groups.rank())] =
        where_not_finite(run.trainer, batches, [](int64_t, int64_t b) { return 100 + b; });
  });
  INFO(found[0]);
  REQUIRE(found[0] == found[1]);
  REQUIRE(found[0] ==
          "the first non-finite number is in norm1, written by layernorm_forward in the forward of blocks.0, rank 1, "
          "micro-batch 0, samples 100, 101");
}
