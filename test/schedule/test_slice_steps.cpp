// Token slices, against whole sequences (contract 5) and, with the same slices, a pipeline against one stage (bit for
// bit): what a step computes, what it keeps, and how long it takes on paper.
#include "helpers.h"
#include "parallel/context_layouts.h"
#include "schedule/check.h"
#include "schedule/laws.h"
#include "train/not_finite.h"
#include "train/slice_times.h"

using namespace context_layouts;
using llmc::name_of, context_layouts::name_of;

namespace {

using Lengths = std::vector<int64_t>;

// A pipeline, or one stage, whose sequences are cut.
struct Sliced {
  int stages = 1;
  Lengths slices;
  Schedule schedule = Schedule::one_f_one_b;
  Recompute recompute = Recompute::none;
  int tp = 1;
  ZeroConfig zero = {};
  int64_t batch_size = 1;
};
std::string to_string(const Sliced& s) {
  return formatted("{} stages, slices of {}, {}, recompute {}, {}, {} sequences a micro-batch", s.stages, s.slices,
                   s.schedule, s.recompute, context_layouts::to_string(LayoutCase{.tp = s.tp, .zero = s.zero}),
                   s.batch_size);
}
StepConfig step_of(const Model& model, const Sliced& s, Documents documents) {
  StepConfig step = step_of(model, LayoutCase{.tp = s.tp, .zero = s.zero}, documents, s.batch_size);
  step.layout.pipeline.schedule = s.schedule;
  step.layout.pipeline.stages = s.stages;
  step.layout.pipeline.slices = s.slices;
  step.recompute = s.recompute;
  return step;
}
bool same_bits(const Outcome& a, const Outcome& b) {
  return a.fault == "" && b.fault == "" && a.losses == b.losses && a.norms == b.norms && a.weights == b.weights &&
         a.gradients == b.gradients;
}
ZeroConfig zero_of(int stage, int shards, int replicas = 1) {
  ZeroConfig zero{.shards = shards, .replicas = replicas};
  zero.set_stage(stage);
  return zero;
}

// Slices that take equally long where attention over the context takes most of the time.
const Lengths two_uneven = {32, 16}, three_uneven = {25, 13, 10}, four_uneven = {21, 11, 9, 7};

const auto gpipe = Schedule::gpipe, one_f_one_b = Schedule::one_f_one_b;
// Two, three and four slices, even and uneven, one of a single token; all stages, recomputations and axes.
const std::vector<Sliced> all_sliced = {
    {1, {24, 24}, one_f_one_b, Recompute::none, 1, {}, 2},
    {1, {16, 16, 16}, gpipe, Recompute::activation},
    {2, four_uneven, gpipe, Recompute::norm, 1, {}, 2},
    {3, {16, 16, 16}, one_f_one_b, Recompute::block},
    {3, {1, 40, 7}, gpipe},
    {2, {12, 12, 12, 12}, one_f_one_b, Recompute::activation},
    {1, three_uneven, one_f_one_b, Recompute::block, 2},
    {2, {24, 24}, one_f_one_b, Recompute::norm, 2, {}, 2},
    {2, three_uneven, one_f_one_b, Recompute::none, 1, zero_of(0, 2), 2},
    {1, three_uneven, gpipe, Recompute::block, 1, zero_of(1, 2)},
    {2, {16, 16, 16}, gpipe, Recompute::none, 1, zero_of(2, 2)},
    {2, four_uneven, one_f_one_b, Recompute::block, 1, zero_of(3, 2)},
    {1, {24, 24}, one_f_one_b, Recompute::none, 1, zero_of(2, 2, 2)},
    {2, two_uneven, one_f_one_b, Recompute::norm, 2, zero_of(3, 2), 2},
};

// Untied, one stage with the same slices computes the same.
void require_agreement(const Model& model, Documents documents, const std::vector<Sliced>& some) {
  const OneRank alone(model, documents);
  for (const Sliced& s : some) {
    INFO(model.family << (model.tied ? " tied " : " untied ") << name_of(model.dtype) << ", " << name_of(documents)
                      << ": " << to_string(s));
    const Outcome found = run(step_of(model, s, documents));
    require_close(found, alone, true);
    if (s.stages == 1 || model.tied) continue;
    Sliced one_stage = s;
    one_stage.stages = 1;
    one_stage.recompute = Recompute::none;
    REQUIRE(same_bits(found, run(step_of(model, one_stage, documents))));
  }
}

const Model gpt2{"gpt2", true, DType::fp32, 8, 8}, qwen3{"qwen3", false, DType::fp32, 8, 2};

}  // namespace

TEST_CASE("token slices agree with whole sequences: grouped heads, documents apart, untied", "[pp][slices]") {
  require_agreement(qwen3, Documents::apart, all_sliced);
}
TEST_CASE("token slices agree with whole sequences: learned positions, documents together, tied", "[pp][slices]") {
  require_agreement(gpt2, Documents::together, all_sliced);
}
TEST_CASE("token slices agree with whole sequences in bf16", "[pp][slices]") {
  Model model = qwen3;
  model.dtype = DType::bf16;
  require_agreement(model, Documents::apart, {all_sliced[2], all_sliced[3], all_sliced[11]});
}
TEST_CASE("token slices agree with whole sequences for every family, dtype and use of documents",
          "[pp][slices][long]") {
  for (const char* family : {"gpt2", "llama", "qwen2", "qwen3"})
    for (const DType dtype : {DType::fp32, DType::bf16})
      for (const Documents documents : {Documents::together, Documents::apart})
        for (const bool tied : {false, true})
          require_agreement({family, tied, dtype, 8, std::string_view(family) == "gpt2" ? 8 : 2}, documents,
                            all_sliced);
}

TEST_CASE("twenty steps in token slices follow whole sequences", "[pp][slices]") {
  const Outcome whole = selftest::run_layout(step_of(qwen3, LayoutCase{}, Documents::apart), {}, {}, 20);
  const Outcome found = selftest::run_layout(step_of(qwen3, {2, three_uneven}, Documents::apart), {}, {}, 20);
  const Distances d(found, whole);
  INFO(context_layouts::to_string(d));
  REQUIRE(found.fault == "");
  REQUIRE((found.losses.size() == 20 && d.loss < 1e-4 && d.norm < 1e-4 && d.weights < 1e-4));
}

TEST_CASE("parameter servers and parts of the head take token slices", "[pp][slices]") {
  StepConfig step = step_of(qwen3, {1, {20, 20, 8}, one_f_one_b, Recompute::none, 1, zero_of(0, 2)}, Documents::apart);
  const OneRank alone(qwen3, Documents::apart);
  step.head_chunks = 3;
  require_close(run(step), alone, false);
  step.layout.zero.sync = DpSync::partitioned_server;
  require_close(run(step), alone, false);
}

// ---- Bugs ----------------------------------------------------------------------------------------------------------

namespace {

// Positions that begin at 0 in each of three slices of 16 tokens.
HostBatch positions_of_slices(const StepConfig& step, int reader, int64_t micro_batch) {
  HostBatch batch = selftest::read_batch(step, reader, micro_batch);
  for (size_t i = 0; i < batch.positions.size(); ++i) batch.positions[i] = static_cast<int32_t>(i % 16);
  return batch;
}
// The sequences of a micro-batch are taken to be one after the other slice by slice.
HostBatch slices_as_rows(const StepConfig& step, int reader, int64_t micro_batch) {
  HostBatch batch = selftest::read_batch(step, reader, micro_batch);
  std::rotate(batch.tokens.begin(), batch.tokens.begin() + 16, batch.tokens.end());
  return batch;
}

}  // namespace

TEST_CASE("positions that begin anew in each slice, and tokens of another slice, are found", "[pp][slices]") {
  for (const Model& model : {gpt2, qwen3}) {
    const OneRank alone(model, Documents::together);
    const StepConfig step = step_of(model, {1, {16, 16, 16}}, Documents::together);
    for (const auto read : {positions_of_slices, slices_as_rows}) {
      const Outcome found = selftest::run_layout(step, {}, {.read = read});
      REQUIRE(!alone.allows(Distances(found, alone.outcome), false));
    }
  }
}

// ---- NaN -----------------------------------------------------------------------------------------------------------

TEST_CASE("the search for a non-finite number names the token slice", "[pp][slices]") {
  const StepConfig step = step_of({"gpt2", false, DType::fp32, 8, 8}, {2, {20, 20, 8}}, Documents::together);
  std::string found[2];
  on_ranks(step, [&](Run& run) {
    // The embedding of a token that only row 44 of micro-batch 1 has: finite, but a norm's sum of it is not.
    const int64_t C = step.model.n_embd;
    for (const StateEntry& e : run.trainer.state().state_table())
      if (e.param->name == "wte.weight" && e.kind == StateKind::weight)
        fill(e.tensor.slice(96 * C, {C}), 3e38f, run.stream);
    const BatchSource batches = [&](int64_t m) {
      HostBatch batch = selftest::read_batch(step, 0, m);
      for (int32_t& token : batch.tokens) token = std::min(token, 95);
      if (m == 1) batch.tokens[44] = 96;
      return batch;
    };
    found[run.groups.rank()] = where_not_finite(run.trainer, batches, [](int64_t m, int64_t b) { return 100 * m + b; });
  });
  INFO(found[0]);
  REQUIRE(found[0] == found[1]);
  REQUIRE(found[0] ==
          "the first non-finite number is in norm1, written by layernorm_forward in the forward of "
          "blocks.0, rank 0, micro-batch 1, token slice 2, sample 100");
}

// ---- Memory --------------------------------------------------------------------------------------------------------

TEST_CASE("activations are kept by slice, as many as the law says, and keys by micro-batch", "[pp][slices]") {
  for (const Schedule schedule : {gpipe, one_f_one_b})
    for (int P = 1; P <= 4; ++P)
      for (int64_t M = 1; M <= 6; ++M)
        for (int K = 1; K <= 4; ++K) {
          const Pipeline p{schedule, P, 1, M, K};
          const std::vector<ActionList> lists = pipeline_actions(p);
          for (int s = 0; s < P; ++s) {
            const ActionList& list = lists[static_cast<size_t>(s)];
            INFO(name_of(schedule) << " P " << P << " M " << M << " K " << K << " stage " << s);
            const auto one = [](int) { return std::vector<int>{0}; };
            REQUIRE(static_cast<int64_t>(PassSets(list, one, ActionKind::forward, is_backward).count()) ==
                    *activations_law(p, s));
            REQUIRE(micro_batches_in_flight(list) == most_kept(p, list).micro_batches);
            std::vector<Chunk> chunks(static_cast<size_t>(P));
            for (Chunk& chunk : chunks) chunk.layers = {0, 1, 2};
            REQUIRE(blocks_open(list, chunks) == (K == 1 ? 1 : 3));
          }
          const std::vector<Action> alone = training_actions(schedule, 2, M, K);
          REQUIRE(micro_batches_in_flight(alone) == (schedule == gpipe ? M : 1));
        }
}

TEST_CASE("the activations of 1f1b in token slices take a part of the memory, and keys a line of their own",
          "[pp][slices]") {
  auto memory = [](const Lengths& slices, const std::string& label) {
    StepConfig step = step_of(qwen3, {2, slices}, Documents::together);
    step.batch.B = 8;
    step.micro_batches = 8;
    for (const MemoryLine& line : make_plan(step, {DeviceKind::cpu, 1}).memory)
      if (line.label == label) return line.bytes;
    return int64_t{0};
  };
  // Stage 0 keeps 2 whole micro-batches, or K + 1 slices of K.
  const double whole = static_cast<double>(memory({}, "activations"));
  REQUIRE(static_cast<double>(memory({12, 12, 12, 12}, "activations")) < 0.65 * whole);
  REQUIRE(memory({}, "keys of token slices") == 0);
  // Two micro-batches and a gradient in fp32, of 8 x 48 rows of 2 x 2 heads of 4, in two layers.
  REQUIRE(memory({12, 12, 12, 12}, "keys of token slices") == 3 * 2 * 8 * 48 * 16 * 4);
}

// ---- Time ----------------------------------------------------------------------------------------------------------

namespace {

ModelConfig long_gpt2(int64_t T) {
  ModelConfig m;
  m.family = *find_family("gpt2");
  m.n_layer = 4, m.n_head = m.n_kv_head = 16, m.head_size = 128, m.n_embd = 2048, m.n_ffn = 8192;
  m.vocab_size = 50257, m.n_positions = T;
  return m;
}
StepConfig long_step(int64_t T) {
  return {.model = long_gpt2(T),
          .precision = DType::bf16,
          .batch = {1, T},
          .micro_batches = 2,
          .layout = {.pipeline = {.stages = 4}}};
}

}  // namespace

TEST_CASE("the longer the sequence, the more slices are best and the smaller is the bubble on paper", "[pp][slices]") {
  double least = 1;
  size_t most = 1;
  for (const int64_t T : {2048, 8192, 32768}) {
    const StepConfig step = long_step(T);
    SliceTimes times(step, DeviceKind::cuda);
    const TokenSlices cut = planned_token_slices(step, DeviceKind::cuda);
    // How long the lists take, and how long their stages idle.
    auto simulated = [&](const Lengths& lengths) {
      const Pipeline p{Schedule::gpipe, step.layout.pipeline.stages, 1, step.micro_batches,
                       static_cast<int>(lengths.size())};
      PassCosts costs{.forward = 1.0 / 3, .input = 1.0 / 3, .weight = 1.0 / 3};
      int64_t context = 0;
      for (const int64_t l : lengths) costs.slice.push_back(times(l, context)), context += l;
      return simulate(p, pipeline_actions(p), costs);
    };
    const Simulation best = simulated(cut.lengths), whole = simulated({T});
    INFO(T << " tokens: " << cut.lengths.size() << " slices, bubble " << best.bubble() << ", of whole sequences "
           << whole.bubble());
    REQUIRE(best.makespan == Catch::Approx(cut.seconds));
    for (const int64_t slices : {1, 2, 4, 8, 16, 32})
      REQUIRE(best.makespan <= simulated(even_token_slices(T, slices)).makespan * (1 + 1e-12));
    REQUIRE(whole.bubble() == Catch::Approx(3.0 / 5));  // (P - 1) / (M + P - 1)
    REQUIRE(best.bubble() < least);
    REQUIRE(cut.lengths.size() > most);
    least = best.bubble(), most = cut.lengths.size();
    // What the context costs is made up for: later slices are shorter.
    REQUIRE(std::is_sorted(cut.lengths.rbegin() + 1, cut.lengths.rend()));
  }
  REQUIRE(least < 0.15);
}
