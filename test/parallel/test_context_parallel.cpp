// Context parallelism against one rank (contract 5): every way of attention, alone and with other axes; large scores;
// planted bugs that the comparison must find. The rest of a step is tested in test_context_steps.cpp.
#include <cstdio>
#include <mutex>
#include <optional>

#include "parallel/context_bugs.h"
#include "parallel/context_layouts.h"

using namespace context_layouts;
using llmc::name_of, context_layouts::name_of;

namespace {

constexpr Documents both[] = {Documents::together, Documents::apart};

// Compares every way of attention on 2, 4 and 8 ranks. print: the distances, one line for each way.
void compare(const Model& model, Documents documents, bool print = false) {
  const OneRank alone(model, documents);
  for (const ContextAttention attention : all_values<ContextAttention>()) {
    std::string line;
    for (const int cp : {2, 4, 8}) {
      INFO(model.family << (model.tied ? ", tied, " : ", untied, ") << model.heads << " heads on " << model.kv_heads
                        << ", " << name_of(model.dtype) << ", " << name_of(documents) << ", " << name_of(attention)
                        << ", cp " << cp);
      const Outcome found = run(step_of(model, {cp, attention}, documents));
      const Distances d(found, alone.outcome);
      line += formatted(" | {:.1e} {:.1e} {:.1e}", d.loss, d.norm, d.gradients);
      require_close(found, alone, rounds_more({cp, attention}));
    }
    if (print)
      std::printf("%s\n", formatted("{} {} {}/{} {} {} {}{}", model.family, model.tied ? "tied" : "untied", model.heads,
                                    model.kv_heads, name_of(model.dtype), name_of(documents), name_of(attention), line)
                              .c_str());
  }
}

}  // namespace

TEST_CASE("the documents of these tests begin inside slices and cross their borders, several in a sample",
          "[parallel][cp]") {
  const StepConfig step = step_of({"gpt2", true, DType::fp32, 8, 8}, {}, Documents::apart);
  const HostBatch batch = selftest::read_batch(step, 0, 0);
  for (const int64_t rows : {seq_len / 4, seq_len / 8, seq_len / 16}) {
    int inside = 0, across = 0;
    for (size_t i = 0; i < batch.positions.size(); ++i) {
      const bool border = static_cast<int64_t>(i) % rows == 0;
      inside += !border && batch.positions[i] == 0;
      across += border && batch.positions[i] > 0;
    }
    REQUIRE((inside >= 4 && across >= 4));
  }
}

TEST_CASE("context-parallel ranks agree with one rank, however many they are", "[parallel][cp]") {
  const auto [model, documents] = GENERATE(std::pair{Model{"gpt2", true, DType::fp32, 8, 8}, Documents::together},
                                           std::pair{Model{"qwen3", false, DType::fp32, 8, 2}, Documents::apart},
                                           std::pair{Model{"gpt2", false, DType::bf16, 8, 8}, Documents::apart},
                                           std::pair{Model{"qwen3", true, DType::bf16, 8, 2}, Documents::together});
  compare(model, documents);
}

TEST_CASE("context-parallel ranks agree with one rank, every family, with and without documents, printed",
          "[parallel][cp][long]") {
  std::printf("distances from one rank for cp 2 | 4 | 8: loss, norm, largest of the gradients\n");
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const Model& model :
         {Model{"gpt2", true, dtype, 8, 8}, Model{"gpt2", false, dtype, 8, 8}, Model{"llama", false, dtype, 8, 4},
          Model{"qwen2", true, dtype, 8, 2}, Model{"qwen3", false, dtype, 8, 2}, Model{"qwen3", true, dtype, 8, 1}})
      for (const Documents documents : both) compare(model, documents, true);
}

namespace {

// Compares layouts with other axes at all stages, which must agree bit for bit (contract 3).
void compare_stages(DType dtype, GradReduce reduce) {
  for (const Model& model : {Model{"gpt2", true, dtype, 8, 8}, Model{"qwen3", false, dtype, 8, 4}}) {
    const bool gpt2 = model.kv_heads == 8;
    const int one = gpt2 ? 1 : 2, two = gpt2 ? 2 : 1;  // tensor-parallel ranks: the models take turns
    const Documents documents = gpt2 ? Documents::together : Documents::apart;
    const OneRank alone(model, documents);
    for (LayoutCase layout : {LayoutCase{2, ContextAttention::ring, one, {.shards = 2}},
                              {2, ContextAttention::all_gather, two, {.shards = 2}},
                              {4, ContextAttention::ulysses, two, {}},
                              {2, ContextAttention::ring, two, {.replicas = 2}},
                              {2, ContextAttention::ulysses, one, {.replicas = 2}}}) {
      std::optional<Outcome> first;
      for (const int stage : {0, 1, 2, 3}) {
        layout.zero.stage = stage;
        layout.zero.grad_reduce = reduce;
        INFO(model.family << ", " << name_of(dtype) << ", " << to_string(layout));
        const Outcome found = run(step_of(model, layout, documents));
        if (!first) first = found;
        require_close(found, alone, rounds_more(layout));
        REQUIRE((found.losses == first->losses && found.norms == first->norms && found.weights == first->weights));
      }
    }
  }
}

}  // namespace

TEST_CASE("context parallelism with tensor and data parallelism agrees with one rank, and the stages bitwise",
          "[parallel][cp]") {
  compare_stages(DType::fp32, GradReduce::step);
  compare_stages(DType::bf16, GradReduce::micro);
}

TEST_CASE("the stages of context parallelism agree bitwise, whenever gradients are reduced", "[parallel][cp][long]") {
  compare_stages(DType::fp32, GradReduce::micro);
  compare_stages(DType::bf16, GradReduce::step);
}

TEST_CASE("a group of three, and Ulysses on all ranks of a key-value head, agree with one rank", "[parallel][cp]") {
  const Model llama{"llama", true, DType::fp32, 6, 3}, one_head{"qwen3", false, DType::fp32, 8, 1};
  for (const Documents documents : both) {
    const OneRank of_llama(llama, documents), of_one_head(one_head, documents);
    for (const ContextAttention attention : all_values<ContextAttention>())
      require_close(llama, {3, attention}, documents, of_llama);
    require_close(one_head, {8, ContextAttention::ulysses}, documents, of_one_head);
    require_close(one_head, {4, ContextAttention::ulysses, 2}, documents, of_one_head);
  }
}

// ---- Large scores --------------------------------------------------------------------------------------------------

namespace {

// A step's loss, norm and gradients with the query-key norms' weights at `weight`. largest: of |score|, of one rank in
// fp64.
Outcome with_norm_weights(const StepConfig& step, float weight, double* largest = nullptr) {
  Outcome outcome;
  outcome.key_biases = true;
  std::mutex mutex;
  on_ranks(step, [&](Run& run) {
    for (const StateEntry& e : run.trainer.state().state_table())
      if (e.kind == StateKind::weight && e.param->name.find("_norm.weight") != std::string::npos)
        fill(e.tensor, weight, run.stream);
    const BatchSource batches = [&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); };
    const ModelConfig& m = step.model;
    if (largest != nullptr)
      run.stream.set_inspector([&](const char* op, const Tensor& t) {
        if (std::string_view(op) != "qk_norm_forward" || std::string_view(t.name) != "heads") return;
        const auto* values = t.data<double>();
        const int64_t width = t.shape[1], group = m.n_head / m.n_kv_head;
        for (int64_t i = 0; i < t.shape[0]; ++i)
          for (int64_t j = i / seq_len * seq_len; j <= i; ++j)
            for (int64_t h = 0; h < m.n_head; ++h) {
              double score = 0;
              for (int64_t d = 0; d < m.head_size; ++d)
                score += values[i * width + h * m.head_size + d] *
                         values[j * width + (m.n_head + h / group) * m.head_size + d];
              *largest = std::max(*largest, std::abs(score) / std::sqrt(static_cast<double>(m.head_size)));
            }
      });
    run.trainer.accumulate_gradients(batches, Launch::enqueue);
    run.stream.synchronize();
    run.stream.set_inspector(nullptr);
    std::unique_lock lock(mutex);
    selftest::collect_gradients(outcome, run.trainer.state(), run.groups.rank(), run.stream);
    lock.unlock();
    const StepResult r = run.trainer.step(
        batches, {.lr = 0, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0, .step = 1}, {});
    lock.lock();
    outcome.losses = {r.loss};
    outcome.norms = {r.grad_norm};
  });
  return outcome;
}

}  // namespace

// In fp64 almost nothing changes. In fp32 the rounding of a score of 100 is an error of 1e-5 in its probability
// already, and one rank is further from fp64 than contract 5 allows: the ranks may be twice as far.
TEST_CASE("scores whose exponentials would overflow cost context-parallel ranks no accuracy", "[parallel][cp]") {
  auto model_in = [](DType dtype) { return Model{"qwen3", true, dtype, 8, 2}; };
  for (const auto& [dtype, weight, least] :
       {std::tuple{DType::fp64, 20.0f, std::log(std::numeric_limits<double>::max())}, {DType::fp32, 7.5f, 100.0}}) {
    double largest = 0;
    const Outcome exact = with_norm_weights(step_of(model_in(DType::fp64), {}), weight, &largest);
    REQUIRE(largest > least);
    const bool fp32 = dtype == DType::fp32;
    const double least_bound = fp32 ? 1e-5 : 1e-7;
    const Distances alone(fp32 ? with_norm_weights(step_of(model_in(dtype), {}), weight) : exact, exact);
    for (const ContextAttention attention : all_values<ContextAttention>())
      for (const int cp : {2, 4, 8}) {
        const Distances d(with_norm_weights(step_of(model_in(dtype), {cp, attention}), weight), exact);
        INFO("largest score " << largest << ", " << name_of(dtype) << ", " << name_of(attention) << ", cp " << cp
                              << ", from fp64: " << to_string(d) << "; one rank: " << to_string(alone));
        REQUIRE((d.loss < 1e-6 && d.norm < std::max(least_bound, 2 * alone.norm) &&
                 d.gradients < std::max(least_bound, 2 * alone.gradients)));
      }
  }
}

// ---- Planted bugs --------------------------------------------------------------------------------------------------

TEST_CASE("the comparison with one rank finds bugs of context parallelism", "[parallel][cp]") {
  using namespace context_bugs;
  using layout_bugs::Replaces;
  const Replaces<Exchange<keys, Stale>> stale_keys;
  const Replaces<Exchange<keys, WrongNeighbour>> keys_backwards;
  const Replaces<Exchange<keys, WithoutASlice>> a_slice_less;
  const Replaces<Exchange<keys, SwappedSlices>> swapped_slices;
  const Replaces<Exchange<key_gradients, Dropped>> dropped;
  const Replaces<Exchange<key_gradients, WrongNeighbour>> gradients_backwards;
  const Replaces<Exchange<key_gradients, Stale>> own_gradients;
  const Replaces<Exchange<key_gradients, RoundedToBf16>> rounded;
  const Replaces<GathersOwnKeys> own_keys;
  const Replaces<KeepsOwnGradients> no_reduction;
  const Replaces<Rotated<heads>> rotated_heads;
  const Replaces<Rotated<rows>> rotated_rows;
  const Replaces<OwnDivisor> own_divisor;
  const Replaces<NoSum> no_sum;
  const Replaces<LossOfRank0> loss_of_rank_0;
  constexpr auto ring = ContextAttention::ring, gather = ContextAttention::all_gather,
                 ulysses = ContextAttention::ulysses;
  const Model models[] = {{"qwen3", true, DType::fp32, 8, 2}, {"gpt2", true, DType::fp32, 8, 8}};
  const OneRank alone[] = {{models[0], Documents::together}, {models[1], Documents::together}};
  auto wrong = [&](int model, ContextAttention attention, const selftest::Parts& parts) {
    const Outcome found = selftest::run_layout(step_of(models[model], {4, attention}), {}, parts);
    return found.fault != "" || !alone[model].allows(Distances(found, alone[model].outcome), false);
  };
  for (const int model : {0, 1})
    for (const ContextAttention attention : all_values<ContextAttention>()) REQUIRE_FALSE(wrong(model, attention, {}));
  struct Case {
    const char* bug;
    const Hooks& hooks;
    std::vector<ContextAttention> attention;
  };
  for (const auto& [bug, hooks, ways] : {Case{"stale keys", stale_keys, {ring}},
                                         {"keys to the wrong neighbour", keys_backwards, {ring}},
                                         {"a slice of keys missing", a_slice_less, {ring}},
                                         {"the slices of keys in the other order", swapped_slices, {ring}},
                                         {"gradients of keys dropped", dropped, {ring}},
                                         {"gradients of keys to the wrong neighbour", gradients_backwards, {ring}},
                                         {"gradients of keys not passed on", own_gradients, {ring}},
                                         {"gradients of keys travel in bf16", rounded, {ring}},
                                         {"keys not gathered", own_keys, {gather}},
                                         {"gradients of keys not reduced", no_reduction, {gather}},
                                         {"heads to the wrong rank", rotated_heads, {ulysses}},
                                         {"rows to the wrong rank", rotated_rows, {ulysses}},
                                         {"divided by a rank's own targets", own_divisor, {ring, gather, ulysses}},
                                         {"gradients not summed", no_sum, {ring, gather, ulysses}},
                                         {"one rank's loss", loss_of_rank_0, {ring, gather, ulysses}}})
    for (const ContextAttention attention : ways) {
      INFO(bug << ", " << name_of(attention));
      REQUIRE(wrong(0, attention, {.hooks = hooks}));
    }
  for (const int model : {0, 1})
    for (const ContextAttention attention : all_values<ContextAttention>()) {
      INFO(models[model].family << ", " << name_of(attention));
      REQUIRE(wrong(model, attention, {.read = positions_of_each_rank}));
      REQUIRE(wrong(model, attention, {.read = positions_of_each_slice}));
      REQUIRE(wrong(model, attention, {.read = slices_in_plain_order}));
      REQUIRE(wrong(model, attention, {.read = targets_of_rank_0}));
    }
}
