// Checkpoints of ranks that divide experts among them: any layout reads what any other wrote, bit for bit (contract 6).
// The ranks only hold state; nothing is trained.
#include <mutex>
#include <set>

#include "catch2.h"
#include "helpers.h"
#include "parallel/expert_layouts.h"
#include "run/known_state.h"

using namespace llmc;
using namespace expert_layouts;

namespace {

// Writes a checkpoint with these numbers. Tensor-parallel ranks that are not the first to have a part have others.
void write_known(const StepConfig& step, const std::string& out, int64_t number) {
  on_holders(step, [&](Holder& h) {
    for (const StateEntry& e : h.state.state_table())
      for_each_value(e, [&]<class T>(T& element, T value) { element = e.param->first_copy ? value : T(-1.0f); });
    CheckpointWrite(out, number, step.model, h.state, h.stream, {.trainer = {{"seq_len", 7}}}).publish();
  });
}

// Reads it; returns what is wrong.
std::set<std::string> read_known(const StepConfig& step, const std::string& path) {
  std::set<std::string> wrong;
  std::mutex mutex;
  on_holders(step, [&](Holder& h) {
    load_checkpoint(path, step.model, h.state, h.stream);
    h.stream.synchronize();
    const std::lock_guard lock(mutex);
    for (const StateEntry& e : h.state.state_table())
      for_each_value(e, [&]<class T>(const T& element, T value) {
        if (std::memcmp(&element, &value, sizeof(T)) != 0) wrong.insert(detail::what_of(e));
      });
  });
  return wrong;
}

// Each layout writes, the next two read.
void require_exchangeable(const ModelConfig& model, DType dtype, const std::vector<LayoutCase>& layouts) {
  const TempDir dir;
  for (size_t i = 0; i < layouts.size(); ++i) {
    INFO(model.family.model_type << ", " << name_of(dtype) << ", written with " << to_string(layouts[i]));
    const StepConfig step = step_of(model, layouts[i], dtype);
    const int64_t number = static_cast<int64_t>(i) + 1;
    write_known(step, dir.path(), number);
    const std::string path = checkpoint_path(dir.path(), number);
    REQUIRE_FALSE(checkpoint_fault(path));
    REQUIRE(weights_of(path) == weights_of(checkpoint_path(dir.path(), 1)));
    for (const size_t after : {1, 2}) {
      const LayoutCase& reader = layouts[(i + after) % layouts.size()];
      INFO("read with " << to_string(reader));
      REQUIRE(read_known(step_of(model, reader, dtype), path) == std::set<std::string>());
    }
  }
}

}  // namespace

TEST_CASE("experts in any number of parts, in any layout, are read bit for bit from what any other wrote",
          "[run][ep][checkpoint]") {
  require_exchangeable(small_model("qwen2_moe", true), DType::bf16,
                       {{},
                        {.ep = 2, .shards = 2},
                        {.ep = 8, .shards = 4, .stage = 3, .tp = 2},
                        {.ep = 2, .shards = 2, .stage = 1, .replicas = 2, .tp = 2},
                        {.ep = 2, .shards = 2, .tp = 4},
                        {.ep = 4, .shards = 2, .stage = 2, .replicas = 2, .cp = 2}});
  require_exchangeable(small_model("mixtral"), DType::fp32,
                       {{.ep = 4, .shards = 4, .stage = 1},
                        {.shards = 3, .stage = 3},
                        {.ep = 2, .tp = 4, .pp = 3},
                        {.ep = 2, .shards = 2, .stage = 3, .cp = 2, .pp = 2}});
  require_exchangeable(small_model("qwen3_moe", false, 6), DType::fp32,
                       {{.ep = 3, .shards = 3}, {.ep = 6, .shards = 3, .stage = 2, .tp = 2}, {.tp = 2, .pp = 3}});
}

TEST_CASE(
    "every rank of an ep group writes the optimizer state of its experts, and without ZeRO each rank some of the rest",
    "[run][ep][checkpoint]") {
  const TempDir dir;
  const ModelConfig model = small_model("qwen2_moe");  // 8 experts in blocks 0 and 2
  const auto holders = [&](const LayoutCase& layout, int64_t number, int files) {
    write_known(step_of(model, layout), dir.path(), number);
    std::map<std::string, std::set<int>> all;  // the numbers of the files that have a slice of a parameter
    const std::string path = checkpoint_path(dir.path(), number);
    REQUIRE(files_of(path, "optimizer-").size() == static_cast<size_t>(files));
    for (int f = 1; f <= files; ++f) {
      const SafetensorsReader file(formatted("{}/optimizer-{:05}-of-{:05}.safetensors", path, f, files));
      for (const std::string& name : file.names()) all[name.substr(0, name.find(':'))].insert(f);
    }
    return all;
  };
  auto whole = holders({.ep = 4, .shards = 4, .replicas = 2}, 1, 4);  // stage 0: all have the same dense state
  REQUIRE(whole["blocks.1.mlp.up.weight"].size() <= 2);               // of two moments
  std::set<int> of_dense;
  for (const auto& [name, files] : whole)
    if (name.find("experts") == name.npos) of_dense.insert(files.begin(), files.end());
  REQUIRE(of_dense == std::set{1, 2, 3, 4});
  REQUIRE(whole["blocks.2.experts.1.up.weight"] == std::set{1});
  REQUIRE(whole["blocks.2.experts.7.down.weight"] == std::set{4});
  auto pipeline = holders({.ep = 2, .shards = 2, .pp = 3}, 2, 6);  // stage 1 of 3 has no experts
  REQUIRE(pipeline["blocks.0.experts.3.up.weight"] == std::set{1});
  REQUIRE(pipeline["blocks.0.experts.4.up.weight"] == std::set{2});
  REQUIRE(std::ranges::includes(std::set{3, 4}, pipeline["blocks.1.mlp.up.weight"]));
  REQUIRE(pipeline["blocks.2.experts.4.up.weight"] == std::set{6});
  auto sharded = holders({.ep = 2, .shards = 4, .stage = 1}, 3, 4);  // of experts 0 to 3: ranks 0 and 2
  REQUIRE(sharded["blocks.0.experts.0.gate.weight"] == std::set{1});
  REQUIRE(sharded["blocks.0.experts.3.down.weight"] == std::set{3});
  REQUIRE(sharded["blocks.0.experts.7.down.weight"] == std::set{4});
}

TEST_CASE("layouts of experts that do not fit are refused by the trainer, naming options and remedies",
          "[run][ep][checkpoint]") {
  const std::string train = "test/golden/experts/olmoe_tiny/train.bin";
  const TempDir dir;
  for (const auto& [options, part] :
       {std::pair(
            "--model d2-e4 --ep 3 --local-ranks 6",
            "--ep 3: it must divide the 4 experts of a layer, and the 6 ranks of --tp x --cp x shards: use one of "
            "1, 2, or with another number of ranks one of 1, 2, 4"),
        {"--model d2-e4 --ep 4 --local-ranks 4 --dp-replicate 2", "and the 2 ranks of --tp x --cp x shards"},
        {"--model d2-e4 --tp 2 --sequence-parallel off", "--sequence-parallel off with --tp 2 and 4 experts per layer"},
        {"--model d2 --ep 2", "--ep 2: gpt2 has no experts to divide: leave out --ep"},
        {"--model d2-e4 --local-ranks 2 --dp-sync partitioned-server",
         "--dp-sync partitioned-server with 4 experts per layer: servers are for dense models"},
        {"--model d2-e4 --ep 0", "--ep 0: expected a number from 1 to 1024"}})
    for (const char* mode : {"", " --plan"}) {
      const ProgramResult r =
          run_program(formatted("{} --train-data {} --seq-len 8 --batch-size 1 --max-steps 1 "
                                "--tokenizer bytes --device cpu --out-dir {}{}",
                                options, train, dir / "run", mode));
      INFO(options << mode << ": " << r.err);
      REQUIRE(r.status == 1);
      REQUIRE(r.err.find(part) != std::string::npos);
      REQUIRE(!path_exists(dir / "run"));
    }
}
