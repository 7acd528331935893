// Checkpoints of pipelines: any layout reads what any other wrote, bit for bit (contract 6). Pipeline runs that are
// stopped, killed and moved to other layouts equal an uninterrupted one; rejected command lines.
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "catch2.h"
#include "helpers.h"
#include "parallel/on_ranks.h"
#include "run/known_state.h"
#include "schedule/pipeline_layouts.h"

using namespace pipeline_layouts;
using nlohmann::json;

namespace {

constexpr Schedule one_f_one_b = Schedule::one_f_one_b, interleaved = Schedule::interleaved;

// Writes a checkpoint with these numbers. Copies, such as a tied table's on the last stage, have others: only the first
// one's may be written.
void write_known(const StepConfig& step, const std::string& out, int64_t number) {
  on_ranks(step, [&](Run& run) {
    run.stream.synchronize();
    for (const StateEntry& e : run.trainer.state().state_table())
      for_each_value(e, [&]<class T>(T& element, T value) { element = e.param->first_copy ? value : T(-1.0f); });
    CheckpointWrite(out, number, step.model, run.trainer.state(), run.stream, {.trainer = {{"seq_len", 7}}}).publish();
  });
}
// Reads it; returns what is wrong.
std::set<std::string> read_known(const StepConfig& step, const std::string& path) {
  std::set<std::string> wrong, seen;
  std::mutex mutex;
  on_ranks(step, [&](Run& run) {
    load_checkpoint(path, step.model, run.trainer.state(), run.stream);
    run.stream.synchronize();
    std::lock_guard lock(mutex);
    for (const StateEntry& e : run.trainer.state().state_table()) {
      seen.insert(e.param->name);
      for_each_value(e, [&]<class T>(const T& element, T value) {
        if (std::memcmp(&element, &value, sizeof(T)) != 0) wrong.insert(detail::what_of(e));
      });
    }
  });
  for (const UnitSpec& unit : parameter_table(step.model))
    for (const ParamSpec& p : unit.params)
      if (!seen.contains(p.name)) wrong.insert(p.name + " is on no rank");
  return wrong;
}

void require_exchangeable(const Model& model, int64_t n_layer, const std::vector<LayoutCase>& layouts) {
  const TempDir dir;
  int64_t number = 0;
  for (const LayoutCase& writer : layouts) {
    const StepConfig step = step_of(model, writer, n_layer, 1);
    INFO(model.family << ", " << name_of(model.dtype) << ", written with " << to_string(writer));
    write_known(step, dir.path(), ++number);
    const std::string path = checkpoint_path(dir.path(), number);
    REQUIRE_FALSE(checkpoint_fault(path));
    REQUIRE(weights_of(path) == weights_of(checkpoint_path(dir.path(), 1)));
    REQUIRE(files_of(path, "optimizer-").size() ==
            static_cast<size_t>(step.layout.zero.owners() * step.layout.tensor.ranks * step.layout.pipeline.stages));
    for (const LayoutCase& reader : layouts) {
      INFO("read with " << to_string(reader));
      REQUIRE(read_known(step_of(model, reader, n_layer, 1), path) == std::set<std::string>());
    }
  }
}

// An untied Llama of six layers, which three stages divide and four do not.
struct Setting {
  TempDir dir;
  // The exit status is `status`; returns what went to stderr.
  std::string run(const std::string& name, const std::string& more, const std::string& prefix = "",
                  const std::set<int>& statuses = {0}) const {
    const ProgramResult r = run_program(
        "--model llama3:8B --n-layer 6 --n-head 4 --n-kv-head 2 --n-embd 16 --n-ffn 24 --vocab-size 211 --seq-len 33 "
        "--batch-size 2 --total-batch-size 264 --lr 1e-2 --lr-schedule constant --threads 1 --device cpu "
        "--train-data test/golden/gpt2_tiny/train.bin --out-dir " +
            (dir / name) + " " + more,
        prefix);
    INFO(more << "\n" << r.err);
    REQUIRE(statuses.contains(r.status));
    return r.err + r.out;
  }
  // Step, loss and norm of all updates.
  std::vector<std::string> metrics(const std::string& name) const {
    std::vector<std::string> lines;
    std::ifstream in(dir / (name + "/metrics.jsonl"));
    for (std::string line; std::getline(in, line);) {
      const json o = json::parse(line);
      if (o["kind"] == "checkpoint") continue;
      lines.push_back(o["step"].dump() + " " + o["loss"].dump() + " " + o["grad_norm"].dump());
    }
    return lines;
  }
  std::string checkpoint(const std::string& name, int64_t step) const {
    return dir / formatted("{}/step-{:06}", name, step);
  }
  // Weights and optimizer state, by file.
  std::map<std::string, std::string> state(const std::string& name, int64_t step) const {
    std::map<std::string, std::string> files;
    for (const char* kind : {"model", "optimizer-"})
      for (const std::string& file : files_of(checkpoint(name, step), kind))
        files[file.substr(file.rfind('/'))] = read_whole(file);
    REQUIRE(files.size() >= 2);
    return files;
  }
};

}  // namespace

TEST_CASE("a pipeline reads what any other layout wrote, and any other layout what a pipeline wrote, bit for bit",
          "[run][pp][checkpoint]") {
  require_exchangeable({"gpt2", true, DType::bf16, 8, 8}, 5,
                       {{},
                        {3, one_f_one_b},
                        {4, one_f_one_b},
                        {2, interleaved, 2},
                        {1, one_f_one_b, 1, {.stage = 3, .shards = 2, .replicas = 2}},
                        {2, one_f_one_b, 1, {.stage = 3, .shards = 2}}});
  require_exchangeable({"qwen3", false, DType::fp32, 8, 2}, 6,
                       {{4, one_f_one_b},
                        {1, one_f_one_b, 1, {.stage = 1, .shards = 2}, 2},
                        {2, interleaved, 3, {.stage = 1, .shards = 2}, 2},
                        {2, one_f_one_b, 1, {.stage = 2, .replicas = 2}},
                        {}});
}

TEST_CASE("ranks of a stage that hold nothing but padding take part in checkpoints", "[run][pp][checkpoint]") {
  const TempDir dir;
  const Model model{"gpt2", true, DType::bf16, 2, 2};
  StepConfig sharded = step_of(model, {2, one_f_one_b, 1, {.stage = 3, .shards = 12}}, 2, 1);
  sharded.layout.zero.shards = 20;
  write_known(sharded, dir.path(), 1);
  int empty = 0;
  for (const std::string& file : files_of(checkpoint_path(dir.path(), 1), "optimizer-"))
    empty += SafetensorsReader(file).names().empty() ? 1 : 0;
  REQUIRE(empty > 0);
  for (const StepConfig& reader : {sharded, step_of(model, {}, 2, 1)})
    REQUIRE(read_known(reader, checkpoint_path(dir.path(), 1)) == std::set<std::string>());
}

TEST_CASE("an optimizer file has the part of its stage; of a table on both ends the first stage's",
          "[run][pp][checkpoint]") {
  const TempDir dir;
  write_known(step_of({"gpt2", true, DType::bf16, 8, 8}, {3, one_f_one_b}, 5), dir.path(), 1);
  std::map<std::string, std::set<int>> holders;  // of parameters: the numbers of the files
  for (int number = 1; number <= 3; ++number) {
    const SafetensorsReader file(
        formatted("{}/optimizer-{:05}-of-00003.safetensors", checkpoint_path(dir.path(), 1), number));
    for (const std::string& name : file.names()) holders[name.substr(0, name.find(':'))].insert(number);
  }
  for (const auto& [name, number] : {std::pair("wte.weight", 1),
                                     {"wpe.weight", 1},
                                     {"blocks.0.ln1.weight", 1},
                                     {"blocks.2.mlp.up.weight", 2},
                                     {"blocks.4.ln1.weight", 3},
                                     {"ln_f.weight", 3}}) {
    INFO(name);
    REQUIRE(holders[name] == std::set{number});
  }
}

TEST_CASE("a run moves between pipelines and one stage, and is bit for bit the run that stayed on one",
          "[run][pp][checkpoint]") {
  const Setting s;
  s.run("stayed", "--max-steps 10");
  s.run("moved", "--max-steps 2 --pp 4");
  REQUIRE(s.run("moved", "--max-steps 4 --pp 3 --schedule gpipe").find("notice: --pp was '4' and is now '3'") !=
          std::string::npos);
  s.run("moved", "--max-steps 5");
  s.run("moved", "--max-steps 8 --pp 2 --schedule interleaved --pp-chunks 3");
  s.run("moved", "--max-steps 10");
  REQUIRE(s.metrics("stayed").size() == 10);
  REQUIRE(s.metrics("moved") == s.metrics("stayed"));
  REQUIRE(s.state("moved", 10) == s.state("stayed", 10));
  REQUIRE(json::parse(read_whole(s.checkpoint("moved", 8) + "/trainer.json"))["layout"].get<std::string>().find(
              "2 stages") != std::string::npos);
  // Data-parallel ranks with stages and without: the same sums (contract 4).
  const std::string sharded = "--zero-stage 3 --dtype bf16 --local-ranks ";
  s.run("two", sharded + "2 --max-steps 6");
  s.run("four", sharded + "4 --pp 2 --max-steps 3");
  s.run("four", sharded + "2 --max-steps 4");
  s.run("four", sharded + "6 --pp 3 --schedule gpipe --max-steps 5");
  s.run("four", sharded + "2 --max-steps 6");
  REQUIRE(s.metrics("four") == s.metrics("two"));
  REQUIRE(s.state("four", 6) == s.state("two", 6));
}

TEST_CASE("a run with four stages that is stopped and killed again and again ends as if nothing had happened",
          "[run][pp][checkpoint]") {
  const Setting s;
  const std::string stages = "--pp 4 --max-steps 60 --checkpoint-every 7";
  s.run("whole", stages);
  int stopped = 0;
  for (int attempt = 0; !std::filesystem::exists(s.checkpoint("cut", 60)); ++attempt) {
    REQUIRE(attempt < 60);
    const bool kill = attempt % 3 == 2;
    s.run("cut", stages,
          formatted("timeout --preserve-status --signal {} {:.2f}", kill ? "KILL" : "TERM", 0.15 + 0.05 * attempt),
          {0, 75, 128 + SIGTERM, 128 + SIGKILL});  // SIGTERM ends a process that has not begun
    ++stopped;
  }
  REQUIRE(stopped > 1);
  REQUIRE(s.metrics("cut") == s.metrics("whole"));
  REQUIRE(s.state("cut", 60) == s.state("whole", 60));
}

TEST_CASE("what a pipeline cannot do is refused before anything is written", "[run][pp][checkpoint]") {
  const Setting s;
  for (const auto& [options, words] : {
           std::pair{"--pp 0", "--pp 0: expected a number from 1 to 1024"},
           {"--pp -1", "--pp -1: expected a number from 1 to 1024"},
           {"--pp 1000000000", "--pp 1000000000: expected a number from 1 to 1024"},
           {"--pp 1e9", "--pp '1e9': expected a whole number"},
           {"--pp 7", "--pp 7: 6 layers cannot be spread over 7 stages"},
           {"--pp 2 --schedule interleaved --pp-chunks 4",
            "--pp 2 x --pp-chunks 4: 6 layers cannot be spread over 8 chunks"},
           {"--pp 2 --schedule interleaved --pp-chunks 0", "--pp-chunks 0: expected a number from 1"},
           {"--pp 1024 --schedule interleaved --pp-chunks 1024", "6 layers cannot be spread over 1048576 chunks"},
           {"--pp 2 --pp-chunks 2", "--pp-chunks 2 with --schedule 1f1b, whose stages have 1 chunk each"},
           {"--schedule interleaved", "--schedule interleaved is for the stages of a pipeline: give --pp"},
           {"--schedule 1F1B --pp 2", "--schedule 1F1B: expected one of gpipe, 1f1b, interleaved"},
           {"--pp 3 --local-ranks 4", "--pp 3 needs a multiple of 3 ranks, and there are 4: change --local-ranks"},
           {"--pp 2 --local-ranks 1", "--pp 2 needs a multiple of 2 ranks, and there are 1"},
           {"--pp 2 --local-ranks 6 --dp-replicate 2", "--dp-replicate 2 does not divide the 3 data-parallel ranks"},
           {"--pp 2 --local-ranks 4 --dp-sync parameter-server", "--dp-sync parameter-server with --pp 2"},
           {"--pp 2 --micro-batches 4", "--micro-batches 4 is for --print-schedule"},
           {"--pp 2 --pp-layout -1,7", "\"-1\" is not a number of layers"},
           {"--pp 2 --token-slices 1000000000", "expected a whole number from 1 to 1048576, or auto"},
           {"--pp 2 --token-slices 34", "--token-slices 34 with --seq-len 33: a slice has at least one token"},
           {"--pp 2 --total-batch-size 66000000", "1000000 micro-batches per rank and step"},
           {"--pp 2 --local-ranks 6", "--batch-size 2 x --seq-len 33 x 3 group(s) of --pp ranks = 198 tokens"},
       }) {
    INFO(options << ": " << words);
    const std::string said = s.run("refused", options, "", {1});
    INFO(said);
    REQUIRE(said.find(words) != std::string::npos);
    REQUIRE_FALSE(std::filesystem::exists(s.dir / "refused"));
  }
}
