// Which layers a stage has: against every partition of small models, on known answers, and rejected options.
#include "catch2.h"
#include "schedule/balance.h"
#include "schedule/laws.h"
#include "schedule/partitions.h"

using namespace llmc;
using namespace partitions;
using Catch::Matchers::ContainsSubstring;

namespace {

std::vector<int> one_chunk_a_stage(int stages) {
  std::vector<int> stage_of(static_cast<size_t>(stages));
  std::iota(stage_of.begin(), stage_of.end(), 0);
  return stage_of;
}
std::vector<int> interleaved(int stages, int chunks_per_stage) {
  std::vector<int> stage_of;
  for (int c = 0; c < stages * chunks_per_stage; ++c) stage_of.push_back(c % stages);
  return stage_of;
}
std::vector<int> v_shaped(int stages) {
  std::vector<int> stage_of = one_chunk_a_stage(stages);
  stage_of.insert(stage_of.end(), stage_of.rbegin(), stage_of.rend());
  return stage_of;
}

template <class Values>
auto spread(const Values& values) {
  return *std::max_element(values.begin(), values.end()) - *std::min_element(values.begin(), values.end());
}

std::vector<ModuleCost> modules_of(const ModelCosts& costs) {
  std::vector<ModuleCost> modules = costs.blocks;
  modules.insert(modules.begin(), costs.embedding);
  modules.push_back(costs.head);
  return modules;
}

// The times of stages of these numbers of modules, and of the links between them, from the slowest to the fastest.
std::vector<double> times_of(const ModelCosts& costs, const Sizes& modules_per_stage, const Sizes& replicas,
                             double link) {
  const std::vector<ModuleCost> modules = modules_of(costs);
  std::vector<double> times;
  size_t next = 0;
  for (size_t s = 0; s < modules_per_stage.size(); ++s) {
    double seconds = 0, bytes = 0;
    for (int64_t i = 0; i < modules_per_stage[s]; ++i, ++next) {
      seconds += modules[next].seconds;
      bytes += modules[next].weight_bytes;
    }
    const auto m = static_cast<double>(replicas[s]);
    // Reduce-scatter and all-gather, each m - 1 times the m-th part, once for m micro-batches.
    const double all_reduce = m > 1 ? ((m - 1) * (bytes / m) + (m - 1) * (bytes / m)) / link : 0;
    times.push_back(std::max(seconds / m, all_reduce / m));
    if (s + 1 < modules_per_stage.size())
      times.push_back((modules[next - 1].activation_bytes + modules[next - 1].gradient_bytes) / link);
  }
  std::sort(times.rbegin(), times.rend());
  return times;
}

Sizes modules_per_stage(const BalancedPipeline& pipeline) {
  Sizes sizes;
  for (const PipelineStage& s : pipeline.stages)
    sizes.push_back(static_cast<int64_t>(s.chunk.layers.size()) + s.chunk.has_embedding + s.chunk.has_head);
  return sizes;
}
Sizes replicas(const BalancedPipeline& pipeline) {
  Sizes all;
  for (const PipelineStage& s : pipeline.stages) all.push_back(s.replicas);
  return all;
}
std::vector<Chunk> chunks(const BalancedPipeline& pipeline) {
  std::vector<Chunk> all;
  for (const PipelineStage& s : pipeline.stages) all.push_back(s.chunk);
  return all;
}

struct RandomCosts : RandomValues {
  ModuleCost module(bool whole, double most_sent) {
    return {value(whole, 8), value(whole, 20), value(whole, most_sent), value(whole, most_sent)};
  }
  ModelCosts model(int64_t n_layer, bool whole, double most_sent) {
    ModelCosts costs{module(whole, most_sent), {}, module(whole, most_sent)};
    for (int64_t l = 0; l < n_layer; ++l) costs.blocks.push_back(module(whole, most_sent));
    return costs;
  }
};

// Blocks of one second each.
ModelCosts unit_costs(size_t n_layer, double embedding, double head) {
  return {{embedding}, std::vector<ModuleCost>(n_layer, ModuleCost{1}), {head}};
}

}  // namespace

TEST_CASE("even stages hold every layer once and differ by at most one, in chunks and in sums", "[pp]") {
  for (int stages = 1; stages <= 8; ++stages)
    for (int per_stage = 1; per_stage <= 4; ++per_stage)
      for (const std::vector<int>& stage_of : {interleaved(stages, per_stage), v_shaped(stages)})
        for (int64_t n_layer = static_cast<int64_t>(stage_of.size()); n_layer <= 80; n_layer += 1 + n_layer / 20) {
          const Sizes layers = even_layers(n_layer, stage_of);
          REQUIRE(layers.size() == stage_of.size());
          REQUIRE(spread(layers) <= 1);
          check_every_layer_once(chunks_of(layers), n_layer);
          Sizes per(static_cast<size_t>(stages));
          for (size_t c = 0; c < layers.size(); ++c) per[static_cast<size_t>(stage_of[c])] += layers[c];
          REQUIRE(spread(per) <= 1);
          // The stages of the embedding and of the head are the last to get one more.
          const auto has_head = static_cast<size_t>(stage_of.back());
          for (size_t s = 1; s < per.size(); ++s) REQUIRE((s == has_head || per[s] >= per[0]));
          REQUIRE(per[has_head] <= *std::min_element(per.begin(), per.end()) + (has_head == 0 ? 1 : 0));
        }
}

TEST_CASE("the remainder of even stages goes to the middle, to later stages first", "[pp]") {
  REQUIRE(even_layers(10, interleaved(4, 1)) == Sizes{2, 3, 3, 2});
  REQUIRE(even_layers(9, interleaved(4, 1)) == Sizes{2, 2, 3, 2});
  REQUIRE(even_layers(11, interleaved(4, 1)) == Sizes{3, 3, 3, 2});
  REQUIRE(even_layers(5, interleaved(2, 1)) == Sizes{3, 2});
  REQUIRE(even_layers(7, interleaved(2, 2)) == Sizes{2, 2, 2, 1});
  REQUIRE(even_layers(10, interleaved(4, 2)) == Sizes{1, 1, 1, 1, 1, 2, 2, 1});
  REQUIRE(even_layers(10, v_shaped(4)) == Sizes{1, 1, 1, 1, 2, 2, 1, 1});
  const Sizes layers = even_layers(80, interleaved(64, 1));  // 80, not 64
  REQUIRE(sum(layers) == 80);
  REQUIRE((layers[47] == 2 && layers[62] == 2 && layers[46] == 1 && layers[63] == 1));
  REQUIRE(sum(even_layers(126, interleaved(16, 1))) == 126);
}

TEST_CASE("more stages than layers are refused by name", "[pp]") {
  REQUIRE_THROWS_WITH(even_layers(4, interleaved(6, 1)),
                      ContainsSubstring("--pp 6: 4 layers cannot be spread over 6 stages") &&
                          ContainsSubstring("at most 4, or a list whose first or last number is 0"));
  REQUIRE_THROWS_WITH(even_layers(4, interleaved(7, 1)),
                      ContainsSubstring("use at most 4") && !ContainsSubstring("list"));
  REQUIRE_THROWS_WITH(even_layers(7, interleaved(4, 2)),
                      ContainsSubstring("--pp 4 x --pp-chunks 2: 7 layers cannot be spread over 8 chunks"));
  REQUIRE_THROWS_WITH(balanced_stages(unit_costs(4, 1, 1), 7),
                      ContainsSubstring("4 layers") && ContainsSubstring("into 7 stages; use at most 6"));
}

TEST_CASE("a list of layers is parsed and checked, and errors say what was found and expected", "[pp]") {
  const auto parsed = [](const std::string& text) { return pipeline_layout_from_name(text); };
  REQUIRE(parsed("even").kind == LayoutKind::even);
  REQUIRE(parsed("balanced").kind == LayoutKind::balanced);
  REQUIRE(parsed("8,10,10,8").kind == LayoutKind::list);
  REQUIRE(parsed("8,10,10,8").layers == Sizes{8, 10, 10, 8});
  REQUIRE(parsed("36").layers == Sizes{36});
  for (const std::string name : {"even", "balanced", "8,10,10,8", "0,3"}) REQUIRE(name_of(parsed(name)) == name);
  for (const std::string wrong :
       {"", "8,", ",8", "8,,8", "8, 8", "8,-1", "8,x", "8.5", "+8", "evn", "99999999999999999999"})
    REQUIRE_THROWS_WITH(parsed(wrong), ContainsSubstring("--pp-layout " + wrong + ": \"") &&
                                           ContainsSubstring("\" is not a number of layers; expected even, balanced"));
  REQUIRE_THROWS_WITH(parsed("8,10x,8"), ContainsSubstring("\"10x\" is not"));

  REQUIRE(listed_layers({8, 10, 10, 8}, 36, 4) == Sizes{8, 10, 10, 8});
  REQUIRE(listed_layers({0, 4, 0}, 4, 3) == Sizes{0, 4, 0});
  REQUIRE_THROWS_WITH(
      listed_layers({8, 10, 10}, 28, 4),
      ContainsSubstring("--pp-layout 8,10,10: found 3 numbers, expected 4: one for each of the 4 stages"));
  REQUIRE_THROWS_WITH(listed_layers({8, 10, 10}, 28, 2, 2),
                      ContainsSubstring("found 3 numbers, expected 4") && ContainsSubstring("--pp 2 x --pp-chunks 2"));
  REQUIRE_THROWS_WITH(listed_layers({8, 10, 10, 8}, 40, 4),
                      ContainsSubstring("add up to 36, but the model has 40 layers: 4 too few"));
  REQUIRE_THROWS_WITH(listed_layers({8, 10, 10, 8}, 35, 4), ContainsSubstring("1 too many"));
  REQUIRE_THROWS_WITH(listed_layers({4, 0, 4}, 8, 3), ContainsSubstring("number 2 is 0; only the first"));
  const int64_t huge = std::numeric_limits<int64_t>::max();
  REQUIRE_THROWS_WITH(listed_layers({huge, huge, 10}, 8, 3), ContainsSubstring("but the model has 8"));
}

TEST_CASE("a layer lost, moved or held twice between stages is found", "[pp]") {
  const std::vector<Chunk> whole = chunks_of({2, 3, 2});
  check_every_layer_once(whole, 7);
  const auto broken = [&](auto&& change) {
    std::vector<Chunk> chunks = whole;
    change(chunks);
    return chunks;
  };
  const auto refused = [&](auto&& change, const std::string& why) {
    REQUIRE_THROWS_WITH(check_every_layer_once(broken(change), 7), ContainsSubstring(why));
  };
  refused([](auto& c) { c[1].layers.erase(c[1].layers.begin()); }, "chunk 1 of 3 has layer 3, expected 2");
  refused([](auto& c) { c[2].layers.pop_back(); }, "6 in 3 chunks, but the model has 7");
  refused([](auto& c) { c[1].layers.insert(c[1].layers.begin(), 1); }, "chunk 1 of 3 has layer 1, expected 2");
  refused([](auto& c) { c[2].layers.push_back(7); }, "8 in 3 chunks, but the model has 7");
  refused([](auto& c) { std::swap(c[0].layers, c[1].layers); }, "chunk 0 of 3 has layer 2, expected 0");
  refused([](auto& c) { c[0].has_embedding = false; }, "chunk 0 of 3 has not");
  refused([](auto& c) { c[1].has_head = true; }, "chunk 1 of 3 has it too");
  refused([](auto& c) { c.pop_back(); }, "chunk 1 of 2 has not");
}

TEST_CASE("balanced stages are the best of all partitions, in all their times", "[pp]") {
  RandomCosts random;
  for (int round = 0; round < 600; ++round) {
    const bool whole = round % 2 == 0;
    const ModelCosts costs = random.model(random.below(7), whole, 6);
    const auto modules = static_cast<int64_t>(costs.blocks.size()) + 2;
    const int64_t stages = 1 + random.below(modules);
    const double link = std::numeric_limits<double>::infinity();  // messages do not count
    const Sizes alone(static_cast<size_t>(stages), 1);

    std::vector<double> best;
    for (const Sizes& sizes : compositions(modules))
      if (static_cast<int64_t>(sizes.size()) == stages) {
        const std::vector<double> times = times_of(costs, sizes, alone, link);
        if (best.empty() || times < best) best = times;
      }
    const BalancedPipeline found = balanced_stages(costs, static_cast<int>(stages));
    INFO("round " << round << ": " << name_of(found));
    REQUIRE(replicas(found) == alone);
    check_every_layer_once(chunks(found), modules - 2);
    const std::vector<double> times = times_of(costs, modules_per_stage(found), alone, link);
    REQUIRE(found.slowest == times[0]);
    for (size_t i = 0; i < times.size(); ++i) REQUIRE(times[i] == Catch::Approx(best[i]).epsilon(1e-12).margin(1e-12));
  }
}

TEST_CASE("balanced replicated stages are the fastest of all partitions and replications, with the fewest stages",
          "[pp]") {
  RandomCosts random;
  int several_stages = 0, some_replicated = 0;
  for (int round = 0; round < 400; ++round) {
    const bool whole = round % 2 == 0;
    const ModelCosts costs = random.model(random.below(5), whole, round % 4 == 0 ? 6 : 1);
    const auto modules = static_cast<int64_t>(costs.blocks.size()) + 2;
    const int64_t workers = 1 + random.below(7);
    const double link = 1 + random.value(whole, 4);

    double fastest = std::numeric_limits<double>::infinity();
    size_t fewest = 0;
    for (const Sizes& sizes : compositions(modules))
      for (const Sizes& replicas : compositions(workers)) {
        if (sizes.size() != replicas.size()) continue;
        const double slowest = times_of(costs, sizes, replicas, link)[0];
        if (slowest < fastest * (1 - 1e-12)) fastest = slowest, fewest = sizes.size();
        else if (slowest <= fastest * (1 + 1e-12)) fewest = std::min(fewest, sizes.size());
      }
    const BalancedPipeline found = balanced_replicated_stages(costs, static_cast<int>(workers), link);
    INFO("round " << round << ": " << name_of(found));
    REQUIRE(sum(replicas(found)) == workers);
    check_every_layer_once(chunks(found), modules - 2);
    REQUIRE(found.slowest == Catch::Approx(fastest).epsilon(1e-12));
    REQUIRE(times_of(costs, modules_per_stage(found), replicas(found), link)[0] ==
            Catch::Approx(fastest).epsilon(1e-12));
    REQUIRE(found.stages.size() == fewest);
    several_stages += found.stages.size() > 1;
    some_replicated += found.stages.size() > 1 && found.stages.size() < static_cast<size_t>(workers);
  }
  REQUIRE(several_stages > 50);  // else the cases would show little
  REQUIRE(some_replicated > 50);
}

TEST_CASE("balanced stages on models whose answer is known", "[pp]") {
  const auto balanced = [](const ModelCosts& costs, int stages) { return name_of(balanced_stages(costs, stages)); };
  REQUIRE(balanced(unit_costs(8, 0, 0), 4) == "2,2,2,2");
  REQUIRE(balanced(unit_costs(10, 0, 2), 4) == "3,3,3,1");  // a head as slow as two layers
  REQUIRE(balanced(unit_costs(9, 0, 0), 4) == "2,2,2,3");   // of equal ones, the later stage
  REQUIRE(balanced(unit_costs(4, 0.5, 9), 3) == "2,2,0");   // a stage of the head alone
  REQUIRE(balanced(unit_costs(2, 1, 1), 4) == "0,1,1,0");
  REQUIRE(balanced(unit_costs(5, 1, 1), 1) == "5");

  ModelCosts costs = unit_costs(4, 0, 0);
  REQUIRE_THROWS_WITH(balanced_replicated_stages(costs, 2, 0), ContainsSubstring("a link of 0 bytes/s"));
  costs.head.seconds = -1;
  REQUIRE_THROWS_WITH(balanced(costs, 2), ContainsSubstring("not negative, found -1"));

  // Without weights, data parallelism alone is perfect.
  const auto replicated = [](const ModelCosts& model, int workers, double link) {
    return name_of(balanced_replicated_stages(model, workers, link));
  };
  REQUIRE(replicated(unit_costs(8, 1, 3), 5, 1) == "8x5");
  REQUIRE(balanced_replicated_stages(unit_costs(8, 1, 3), 5, 1).slowest == 12.0 / 5);
  // VGG-16 in the paper: convolutions on 15 workers, the fully connected layers, with most weights, on one: "15-1".
  ModelCosts vgg = unit_costs(14, 1, 1);
  vgg.head.weight_bytes = 1000;
  REQUIRE(replicated(vgg, 16, 1) == "14x15,0");
  REQUIRE(balanced_replicated_stages(vgg, 16, 1).slowest == 1);
  // Weights that take too long to reduce make a straight pipeline.
  for (ModuleCost& c : vgg.blocks) c.weight_bytes = 1000;
  vgg.embedding.weight_bytes = 1000;
  REQUIRE(replicated(vgg, 16, 1) == balanced(vgg, 16));
}
