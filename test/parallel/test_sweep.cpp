// The random part of the self-test: draws are reproducible, possible and varied, agree with one rank, find planted
// bugs, and are repeated by the command that is printed.
#include <algorithm>
#include <map>
#include <set>

#include "catch2.h"
#include "helpers.h"
#include "parallel/layout_bugs.h"
#include "run/modes.h"

using namespace llmc;
using selftest::Draw, selftest::draw, selftest::Sweep;

namespace {

// Which values of two axes exclude each other, with the names of axis_values(), by their beginnings.
bool exclude_each_other(const std::string& a, const std::string& b) {
  static const std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>> rules = {
      {{"sync par"},
       {"stage 1", "stage 2", "stage 3", "replicas several", "tp by rows", "tp whole", "cp ring", "cp all-gather",
        "cp ulysses", "pp several", "overlap on", "layers listed", "schedule interleaved", "schedule zb",
        "schedule pipedream"}},
      {{"schedule pipedream"},
       {"stage 1", "stage 2", "stage 3", "reduce micro", "clipping on", "sequences sliced", "micro-batches several"}},
      {{"schedule interleaved", "schedule zb"}, {"pp one", "sequences sliced"}},
      {{"sequences sliced"}, {"cp ring", "cp all-gather", "cp ulysses", "aux loss on", "dispatch by capacity"}},
      {{"pp one"}, {"layers listed"}},
      {{"qk clip on"}, {"schedule pipedream", "family qwen3", "family qwen3_moe", "family olmoe"}},
      {{"averages on"}, {"dtype bf16 without masters"}},
      {{"replicas several"}, {"dp one"}},
      {{"tp one"}, {"overlap on"}},
      {{"family mixtral", "family qwen2_moe", "family qwen3_moe", "family olmoe"},
       {"tp whole", "sync par", "ep of a dense", "aux loss of a dense", "bias rate of a dense", "dispatch of a dense"}},
      {{"family gpt2", "family llama", "family qwen2", "family qwen3"},
       {"ep one", "ep several", "aux loss on", "aux loss off", "bias rate on", "bias rate off", "dispatch dropless",
        "dispatch by"}},
      {{"ep one", "ep several", "aux loss on", "aux loss off", "bias rate on", "bias rate off", "dispatch dropless",
        "dispatch by"},
       {"tp whole", "sync par", "ep of a dense", "aux loss of a dense", "bias rate of a dense", "dispatch of a dense"}},
  };
  const auto one_of = [](const std::string& value, const std::vector<std::string>& beginnings) {
    const bool dense = value == "family qwen2" || value == "family qwen3";  // which are the beginnings of others
    return std::ranges::any_of(beginnings, [&](const std::string& beginning) {
      return beginning.starts_with("family") ? value == beginning : value.starts_with(beginning) && !dense;
    });
  };
  return std::ranges::any_of(rules, [&](const auto& rule) {
    return (one_of(a, rule.first) && one_of(b, rule.second)) || (one_of(b, rule.first) && one_of(a, rule.second));
  });
}

}  // namespace

TEST_CASE("a draw is a function of its number and the number of ranks, and is possible", "[parallel][selftest]") {
  std::set<std::string> all;
  for (const int ranks : {1, 2, 5, 8})
    for (const uint64_t first : {uint64_t{0}, uint64_t{123'456'789'000}, ~uint64_t{0} - 20})
      for (uint64_t n = first; n < first + 20; ++n) {
        const Draw d = draw(ranks, n);
        INFO(n << ": " << to_string(d));
        REQUIRE(to_string(d) == to_string(draw(ranks, n)));
        all.insert(formatted("{} ranks: {}", ranks, to_string(d)));
        REQUIRE(d.step.layout.ranks() <= ranks);
        validate_model(d.step.model);
        layout_faults(d.step.layout, d.step.model).refuse();
        // A plan runs the trainer of each rank, with all its checks.
        make_plan(d.step, Device());
        make_plan(selftest::first_of_its_kind(d.step), Device());
        make_plan(selftest::on_one_rank(d.step), Device());
        REQUIRE(selftest::on_one_rank(d.step).tokens() == d.step.tokens());
        REQUIRE(selftest::first_of_its_kind(d.step).tokens() == d.step.tokens());
      }
  REQUIRE(all.size() >= 4 * 3 * 20 - 10);  // few are the same by chance, and those have few ranks
}

TEST_CASE("draws of eight ranks have every pair of choices that do not exclude each other", "[parallel][selftest]") {
  std::set<std::string> values;
  std::set<std::pair<std::string, std::string>> pairs;
  for (uint64_t n = 0; n < 6000; ++n) {
    const std::vector<std::string> all = axis_values(draw(8, n));
    values.insert(all.begin(), all.end());
    for (const std::string& a : all)
      for (const std::string& b : all) pairs.emplace(a, b);
  }
  for (const auto& [axis, names] :
       std::map<std::string, std::vector<std::string>>{{"schedule", all_names<Schedule>()},
                                                       {"recompute", all_names<Recompute>()},
                                                       {"optimizer", all_names<Optimizer>()},
                                                       {"sync", all_names<DpSync>()},
                                                       {"cp", all_names<ContextAttention>()},
                                                       {"dtype", {"fp32", "bf16", "bf16 without masters"}}})
    for (const std::string& name : names) REQUIRE(values.contains(axis + " " + name));
  for (const Family& family : families) REQUIRE(values.contains(formatted("family {}", family.model_type)));
  const auto axis = [](const std::string& value) {
    for (const char* words : {"aux loss", "bias rate", "head chunks"})
      if (value.starts_with(words)) return std::string(words);
    return value.substr(0, value.find(' '));
  };
  for (const std::string& a : values)
    for (const std::string& b : values) {
      if (axis(a) == axis(b)) continue;
      INFO(a << " with " << b);
      REQUIRE(pairs.contains({a, b}) != exclude_each_other(a, b));
    }
}

TEST_CASE("the draws that every self-test compares have each choice that occurs", "[parallel][selftest]") {
  for (const int ranks : {1, 2, 8}) {
    std::set<std::string> all, chosen;
    const std::vector<uint64_t> covering = selftest::covering_draws(ranks);
    for (uint64_t n = 0; n < 2000; ++n)
      for (const std::string& value : axis_values(draw(ranks, n))) all.insert(value);
    for (const uint64_t n : covering)
      for (const std::string& value : axis_values(draw(ranks, n))) chosen.insert(value);
    INFO(ranks << " ranks: " << covering.size() << " draws");
    REQUIRE(chosen == all);
    REQUIRE(covering.size() < 30);
  }
}

TEST_CASE("draws of four ranks agree with one rank", "[parallel][selftest]") {
  Log log = Log::silent();
  std::vector<uint64_t> failed;
  const auto note = [&](uint64_t n) {
    failed.push_back(n);
    return "";
  };
  REQUIRE(run_sweep(log, {.first = 5000, .last = 5009, .max_ranks = 4, .command = note}));
  REQUIRE(failed.empty());
}

TEST_CASE("the random part of the self-test finds planted bugs, and the number of a draw repeats them",
          "[parallel][selftest]") {
  using namespace layout_bugs;
  const Replaces<MeanInsteadOfSum> mean_instead_of_sum;
  const Replaces<StaleGather> stale_gather;
  // A small dense model, and layouts of several readers, two of them with weights that are gathered.
  const auto shards = [](uint64_t n) {
    const Layout l = draw(4, n).step.layout;
    return l.readers() > 1 && l.zero.shards > 1 && l.zero.stage > 0;
  };
  const auto is_wanted = [&](uint64_t n) {
    const ModelConfig m = draw(4, n).step.model;
    int64_t sharded = 0;
    for (uint64_t k = n; k < n + selftest::draws_of_model; ++k) sharded += shards(k);
    return m.experts.count == 0 && m.n_layer == 3 && m.n_positions < 30 && sharded >= 2;
  };
  uint64_t first = 0;
  while (!is_wanted(first)) first += selftest::draws_of_model;
  for (const auto& [bug, parts] :
       {std::pair<const char*, selftest::Parts>{"mean instead of sum", {.hooks = mean_instead_of_sum}},
        {"duplicate sample", {.read = read_as_rank_0}},
        {"stale unit", {.hooks = stale_gather}}}) {
    INFO(bug);
    Log log = Log::silent();
    std::vector<uint64_t> failed;
    const auto note = [&](uint64_t n) {
      failed.push_back(n);
      return "";
    };
    Sweep sweep{.first = first, .last = first + selftest::draws_of_model - 1, .max_ranks = 4, .command = note};
    REQUIRE_FALSE(run_sweep(log, sweep, {}, parts));
    REQUIRE(!failed.empty());
    for (const uint64_t n : failed) REQUIRE(draw(4, n).step.layout.ranks() > 1);
    const uint64_t again = failed.front();
    failed.clear();
    sweep.first = again;
    sweep.last = again;
    REQUIRE_FALSE(run_sweep(log, sweep, {}, parts));
    REQUIRE(failed == std::vector<uint64_t>{again});
    REQUIRE(run_sweep(log, sweep));
  }
}

TEST_CASE("a bug that stays within the bounds of bf16 is found because the first of its kind has other bits",
          "[parallel][selftest]") {
  uint64_t n = 0;  // the first draw in bf16 with a parameter server and several ranks
  const auto is_wanted = [](const Draw& d) {
    return d.step.precision.activations == DType::bf16 && d.step.layout.zero.sync == DpSync::partitioned_server &&
           d.step.layout.zero.shards > 2;
  };
  while (!is_wanted(draw(4, n))) ++n;
  const layout_bugs::Replaces<layout_bugs::ServerAddsAsItArrives> other_order;  // but only with one server
  Log log = Log::silent();
  REQUIRE_FALSE(run_sweep(log, {.first = n, .last = n, .max_ranks = 4}, {}, {.hooks = other_order}));
  selftest::DrawComparer comparer({}, {.hooks = other_order});
  const selftest::Comparison c = comparer.compare(draw(4, n));
  REQUIRE(c.fault == " not bitwise equal to the first of its kind");
}

TEST_CASE("the experts of a token are found in slices of its sequence too", "[parallel][selftest][slices]") {
  const selftest::Model model{"mixtral", false, DType::fp32, 8, 2, 20};
  StepConfig step = selftest::step_config(model.config(), DType::fp32, 3,
                                          {.zero = {.shards = 2}, .tensor = tensor_parallel(model.config(), 2)});
  step.experts = {};
  step.layout.pipeline.slices = {7, 12, 1};
  const selftest::Rerouted same = selftest::rerouted(selftest::on_one_rank(step), step);
  INFO(to_string(same));
  REQUIRE(same.tokens == 0);
  const auto first_sample = [](const StepConfig& s, int reader, int64_t) { return selftest::read_batch(s, reader, 0); };
  REQUIRE(selftest::rerouted(selftest::on_one_rank(step), step, {}, {.read = first_sample}).tokens > 0);
}

TEST_CASE("with Lion, weights are not compared where a sign is mere rounding, nor steps after one that was the other",
          "[parallel][selftest][optimizer]") {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    INFO(name_of(dtype));
    StepConfig step = selftest::step_config(selftest::awkward_model("llama", false), dtype, 1, Layout{});
    step.layout.zero.optimizer = Optimizer::lion;
    const selftest::Reference reference(step, {});
    selftest::Outcome one = reference.alone;
    REQUIRE(one.losses.size() == 2);
    REQUIRE(one.earlier_weights.size() == 1);
    for (const size_t s : {0, 1}) {
      int64_t unsure = 0, all = 0, unmoved = 0;
      for (const auto& [name, whole] : one.weights_after(s)) {
        const std::vector<float>* const sizes = one.directions.sizes(s, name);
        REQUIRE((sizes != nullptr && sizes->size() == whole.values.size()));
        for (size_t i = 0; i < whole.values.size(); ++i)
          ++all, unsure += one.directions.unsure(sizes, i), unmoved += (*sizes)[i] == 0;
      }
      INFO(unsure << " of " << all << " not compared, " << unmoved << " have no gradient");
      REQUIRE(unsure - unmoved < all / (dtype == DType::fp32 ? 1000 : 2));
    }
    // Another sign of a weight that is compared counts, of one that is not, it does not.
    one.directions.rounding = 0.1;  // so that a tensor has both
    const auto with_other_signs = [&](size_t s, bool sure) {
      selftest::Outcome other = one;
      selftest::Wholes& weights = s == 0 ? other.earlier_weights[0] : other.weights;
      auto& [name, whole] = *weights.find("blocks.1.attn.q.weight");
      for (size_t i = 0; i < whole.values.size(); ++i)
        if (one.directions.unsure(one.directions.sizes(s, name), i) != sure) whole.values[i] += 2e-3f;
      return other;
    };
    for (const size_t s : {0, 1})
      for (const bool sure : {true, false}) {
        const selftest::Distances d(with_other_signs(s, sure), one);
        REQUIRE((d.weights > reference.near.weights) == sure);
      }
    // What comes after it does not count either, but all that came before.
    for (const size_t s : {0, 1}) {
      selftest::Outcome other = with_other_signs(s, false);
      other.losses[1] *= 2, other.norms[1] *= 2;
      for (float& weight : other.weights.at("lm_head.weight").values) weight += 1;
      const selftest::Distances d(other, one);
      REQUIRE((d.loss > 0.9 && d.norm > 0.9 && d.weights > 0.01) == (s == 1));
      REQUIRE((d.loss == 0 && d.norm == 0 && d.weights == 0) == (s == 0));
      other.losses[0] *= 2;
      REQUIRE(selftest::Distances(other, one).loss > 0.9);
    }
  }
}

TEST_CASE("a key bias that Lion moves by the sign of rounding counts for what follows if logits have a limit",
          "[parallel][selftest][optimizer]") {
  for (const bool limit : {false, true}) {
    INFO("a limit: " << limit);
    StepConfig step = selftest::step_config(selftest::awkward_model("gpt2"), DType::fp32, 1, Layout{});
    step.layout.zero.optimizer = Optimizer::lion;
    if (limit) step.qk_clip = 0.01;
    const selftest::Outcome one = selftest::Reference(step, {}).alone;
    selftest::Outcome other = one;
    other.earlier_weights[0].at("blocks.1.attn.k.bias").values[0] += static_cast<float>(2 * one.directions.lr);
    REQUIRE(selftest::Distances(other, one).weights == 0);
    for (float& weight : other.weights.at("blocks.1.attn.k.weight").values) weight *= 0.9f;
    REQUIRE((selftest::Distances(other, one).weights > 0.09) == !limit);
  }
}

TEST_CASE("the gradient of a key bias counts relative to that of the key weights, and only with rotary positions",
          "[parallel][selftest]") {
  for (const auto& [family, least] : {std::pair{"gpt2", 0.0}, {"qwen2", 1e-3}}) {
    INFO(family);
    const StepConfig step = selftest::step_config(selftest::awkward_model(family), DType::fp32, 1, Layout{});
    const selftest::Outcome one = selftest::run_layout(step);
    selftest::Outcome other = one;
    double size = 0, of_weights = 0;  // squares
    for (float& x : other.gradients.at("blocks.1.attn.k.bias").values) size += x * x, x *= 2;
    for (const float x : one.gradients.at("blocks.1.attn.k.weight").values) of_weights += x * x;
    of_weights /= static_cast<double>(step.model.n_embd);
    const double found = selftest::Distances(other, one).gradients;
    REQUIRE(found >= least);
    REQUIRE(found == Catch::Approx(least == 0 ? 0 : std::min(1.0, std::sqrt(size / of_weights))));
  }
}

TEST_CASE("the printed command repeats a draw", "[parallel][selftest]") {
  Options o;
  o.selftest = true;
  o.local_ranks = 4;
  o.selftest_minutes = 10;
  o.selftest_layouts = SelftestLayouts::all;
  const std::string command = detail::repeat_command(o, 5001);
  REQUIRE(command == "./train_gpt --local-ranks 4 --selftest --selftest-draws 5001");
  const ProgramResult r = run_program(command.substr(command.find(' ') + 1));
  INFO(r.out);
  REQUIRE(r.status == 0);
  REQUIRE(r.out.find("draw 5001 | " + to_string(draw(4, 5001))) != std::string::npos);
  REQUIRE(r.out.find("self-test: 1 of 1 draws are good") != std::string::npos);
}

TEST_CASE("a sweep ends when its minutes are over, and the next one begins elsewhere", "[parallel][selftest]") {
  REQUIRE(selftest::fresh_draw(nullptr) != selftest::fresh_draw(nullptr));
  const ProgramResult r = run_program("--selftest --local-ranks 2 --selftest-draws 0 --selftest-minutes 0.02");
  INFO(r.out);
  REQUIRE(r.status == 0);
  REQUIRE(r.out.find("drawn at random from number 0 for 0.02 minute(s)") != std::string::npos);
  REQUIRE(r.out.find("draws are good") != std::string::npos);
}
