// A flipped bit in any kind of copy is noticed and named; without one, nothing is reported.
#include <map>
#include <mutex>
#include <set>

#include "catch2.h"
#include "helpers.h"
#include "parallel/expert_layouts.h"
#include "shard/replica_check.h"

using namespace llmc;
using namespace expert_layouts;

namespace {

// The lowest bit of the first element that a rank holds of a parameter.
struct Flip {
  int rank;
  const char* param;
  std::string kind = "weight";
};

// What all ranks say of their copies.
std::string told(const StepConfig& step, const std::vector<Flip>& flips) {
  std::mutex mutex;
  std::set<std::string> all;
  on_holders(step, [&](Holder& h) {
    init_weights(h.state, 42, h.stream);
    for (const Flip& flip : flips)
      for (const StateEntry& e : h.state.state_table())
        if (flip.rank == h.groups.rank() && e.param->name == flip.param && e.name() == flip.kind)
          write_on_host(e.tensor, h.stream, [](const Tensor& t) { t.bytes[0] ^= std::byte{1}; });
    const auto differ =
        diverged_copies(h.state, formatted("rank {}", h.groups.rank()), h.stream, {{"what all have", {1, 2}}});
    std::lock_guard lock(mutex);
    all.insert(differ.value_or(""));
  });
  REQUIRE(all.size() == 1);
  return *all.begin();
}

// Without the hashes: "NAME of unit UNIT: RANK has, RANK has".
std::string without_hashes(std::string text) {
  for (size_t i = 0; i + 16 < text.size(); ++i)
    if (text[i] == ' ' && text.find_first_not_of("0123456789abcdef", i + 1) >= i + 17) text.erase(i, 17);
  return text;
}

}  // namespace

TEST_CASE("a flipped bit in any kind of copy is named with who has it: of two copies both, of more the odd one",
          "[parallel][replicas]") {
  const ModelConfig gpt2 = small_model("gpt2", true, 0), llama = small_model("llama", false, 0),
                    mixtral = small_model("mixtral");
  struct Case {
    const char* what;
    const ModelConfig& model;
    LayoutCase layout;
    Flip flip;
    const char* expected;
    DType dtype = DType::fp32;
  };
  for (const Case& c : std::vector<Case>{
           {"stage 0", gpt2, {.shards = 2}, {1, "blocks.1.attn.k.weight"}, "0 1"},
           {"its moments", gpt2, {.shards = 2}, {0, "blocks.1.attn.k.weight", "moment2"}, "0 1"},
           {"its master weights", gpt2, {.shards = 3}, {1, "blocks.1.attn.k.weight", "master"}, "odd 1", DType::bf16},
           {"three copies", gpt2, {.shards = 3}, {2, "blocks.1.attn.k.weight"}, "odd 2"},
           {"stage 1", gpt2, {.shards = 4, .stage = 1}, {0, "wte.weight"}, "odd 0"},
           {"stage 2", gpt2, {.shards = 2, .stage = 2}, {1, "ln_f.weight"}, "0 1"},
           {"replicas", gpt2, {.shards = 2, .stage = 3, .replicas = 2}, {0, "wte.weight"}, "0 2"},
           {"their moments", gpt2, {.shards = 2, .stage = 1, .replicas = 3}, {4, "wte.weight", "moment1"}, "odd 4"},
           {"context", llama, {.cp = 2}, {1, "blocks.0.mlp.up.weight"}, "0 1"},
           {"norms", llama, {.tp = 2}, {1, "blocks.2.ln1.weight"}, "0 1"},
           {"biases", gpt2, {.tp = 4}, {3, "blocks.2.attn.proj.bias", "moment1"}, "odd 3"},
           {"key-value heads", llama, {.tp = 4}, {2, "blocks.1.attn.k.weight"}, "2 3"},
           {"experts", mixtral, {.ep = 2, .shards = 4}, {1, "blocks.0.experts.5.up.weight"}, "1 3"},
           {"their tensor ranks", mixtral, {.shards = 2, .tp = 2}, {2, "blocks.2.experts.0.gate.weight"}, "odd 2"},
           {"a tied table", gpt2, {.shards = 2, .stage = 1, .pp = 3}, {5, "wte.weight", "moment1"}, "1 5"},
       }) {
    const StepConfig step = step_of(c.model, c.layout, c.dtype);
    const std::string text = told(step, {c.flip});
    INFO(c.what << ": " << text);
    REQUIRE(told(step, {}).empty());
    REQUIRE(text.find(c.flip.param) == 0);
    const std::string rank = std::string(c.expected);
    const std::string ranks = without_hashes(text.substr(text.find(": ") + 1));
    if (rank.starts_with("odd ")) REQUIRE(ranks.starts_with(formatted(" rank {} has, the ", rank.substr(4))));
    else
      REQUIRE((ranks == formatted(" rank {} has, rank {} has", rank[0], rank[2]) ||
               ranks == formatted(" rank {} has, rank {} has", rank[2], rank[0])));
  }
}

TEST_CASE("more that differs is listed, and counted", "[parallel][replicas]") {
  const ModelConfig model = small_model("llama", false, 0);
  const std::string text = told(step_of(model, {.shards = 4}), {{2, "wte.weight"},
                                                                {2, "wte.weight", "moment1"},
                                                                {0, "blocks.0.ln1.weight"},
                                                                {1, "blocks.0.ln1.weight"},
                                                                {3, "blocks.1.ln1.weight"},
                                                                {3, "ln_f.weight"}});
  INFO(text);
  REQUIRE(text.starts_with("wte.weight of unit embedding: rank 2 has "));
  REQUIRE(text.find(", the 3 others ") != std::string::npos);
  REQUIRE(text.find("; wte.weight:moment1 of unit embedding: rank 2 has ") != std::string::npos);
  REQUIRE(text.find("; blocks.0.ln1.weight of unit blocks.0: rank ") != std::string::npos);  // two against two
  REQUIRE(text.find("more differ") != std::string::npos);
}

TEST_CASE("in every layout each element is compared with all of its copies", "[parallel][replicas]") {
  const ModelConfig gpt2 = small_model("gpt2", true, 0), sparse = small_model("qwen2_moe");
  for (const LayoutCase& layout : std::vector<LayoutCase>{{.shards = 2, .replicas = 2},
                                                          {.shards = 3, .stage = 1, .replicas = 2},
                                                          {.shards = 2, .stage = 2, .tp = 2, .cp = 2},
                                                          {.shards = 2, .stage = 3, .replicas = 2, .tp = 2},
                                                          {.shards = 2, .stage = 1, .tp = 4},
                                                          {.shards = 2, .stage = 1, .tp = 2, .pp = 2},
                                                          {.ep = 4, .shards = 4, .stage = 1, .replicas = 2},
                                                          {.ep = 2, .shards = 2, .stage = 2, .tp = 2, .pp = 2}})
    for (const DType dtype : {DType::fp32, DType::bf16}) {
      const StepConfig step = step_of(layout.ep > 1 ? sparse : gpt2, layout, dtype);
      INFO(to_string(layout));
      std::mutex mutex;
      std::map<uint64_t, int> holders;                         // by what is hashed
      std::map<std::string, std::map<int64_t, int>> elements;  // holders, by element
      struct Hashed {
        std::string what;
        int64_t index;
        uint64_t where;
      };
      std::vector<Hashed> hashed;
      on_holders(step, [&](Holder& h) {
        init_weights(h.state, 42, h.stream);
        h.stream.synchronize();
        std::lock_guard lock(mutex);
        for (const StateEntry& e : h.state.state_table()) {
          const uint64_t where = detail::held_copy(e, "").where;
          const std::string what = formatted("{}:{}", e.param->name, e.name());
          ++holders[where];
          for (int64_t i = 0; i < e.tensor.numel(); ++i) {
            ++elements[what][e.elements().index(i)];
            hashed.push_back({what, e.elements().index(i), where});
          }
        }
      });
      int wrong = 0;
      for (const Hashed& x : hashed) wrong += holders[x.where] != elements[x.what][x.index];
      REQUIRE(!hashed.empty());
      REQUIRE(wrong == 0);
    }
}

TEST_CASE("only what several ranks hold is compared", "[parallel][replicas]") {
  const ModelConfig model = small_model("gpt2", true, 0);
  using Kinds = std::set<std::string>;
  const auto compared = [&](const LayoutCase& layout) {
    std::mutex mutex;
    Kinds kinds;
    on_holders(step_of(model, layout, DType::bf16), [&](Holder& h) {
      init_weights(h.state, 42, h.stream);
      const auto held = detail::held_by_several(h.state, {{"what all have", {1}}}, std::nullopt);
      std::lock_guard lock(mutex);
      for (const detail::HeldCopies& copies : held)
        for (const detail::HeldCopy& part : copies.parts) kinds.insert(part.entry ? part.entry->name() : part.name);
    });
    return kinds;
  };
  REQUIRE(compared({.shards = 2}) == Kinds{"master", "moment1", "moment2", "weight", "what all have"});
  REQUIRE(compared({.shards = 2, .stage = 1}) == Kinds{"weight", "what all have"});
  REQUIRE(compared({.shards = 2, .stage = 3}) == Kinds{"what all have"});
}
