// Data that turn out to be bad in the middle of a run: the work is saved, all ranks end alike, and a repaired shard is
// taken on resume if the user says so.
#include "catch2.h"
#include "tiny_run.h"

using namespace llmc;
namespace fs = std::filesystem;

namespace {

void set_token(const std::string& shard, int64_t position, uint16_t token) {
  std::fstream file(shard, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(1024 + 2 * position);
  file.write(reinterpret_cast<const char*>(&token), 2);
}
uint16_t token_at(const std::string& shard, int64_t position) {
  uint16_t token = 0;
  std::ifstream file(shard, std::ios::binary);
  file.seekg(1024 + 2 * position);
  file.read(reinterpret_cast<char*>(&token), 2);
  return token;
}
std::string on(const std::string& shard) { return " --no-shuffle --train-data " + shard + " "; }

}  // namespace

TEST_CASE("a bad token in mid-run ends all ranks after a save, and the repaired shard is accepted on request",
          "[run]") {
  const TempDir dir;
  const std::string shard = dir / "a.bin", other = dir / "b.bin";
  // The last of the eight samples of step 6 that the second of two ranks reads. Ranks hear of it with the results of
  // step 5; in the next start, whose first step it is, before it.
  constexpr int64_t position = 47 * 33 + 5;
  for (const std::string layout : {"", "--local-ranks 2", "--local-ranks 2 --pp 2 --n-layer 2"}) {
    INFO(layout);
    fs::copy_file(tiny_data, shard, fs::copy_options::overwrite_existing);
    const uint16_t good = token_at(shard, position);
    for (const char* run : {"whole", "run"}) fs::remove_all(dir / run);
    const std::string options = "--max-steps 8 " + on(shard) + layout;
    run_well(tiny(dir / "whole", options));
    set_token(shard, position, 60000);
    for (int start = 0; start < 2; ++start) {  // nor does another start lose anything
      const ProgramResult r = run_program(tiny(dir / "run", options));
      INFO(r.out << r.err);
      REQUIRE(r.status == 1);
      REQUIRE(r.err.find(formatted("{}: token 60000 at position {} is outside the model's vocabulary of 211", shard,
                                   position)) != std::string::npos);
      REQUIRE(r.err.find("; step 6 needs it. The run ended after step 5 of 8, saved to " + (dir / "run/step-000005") +
                         ". Repair the file") != std::string::npos);
      const std::string error = r.err.substr(r.err.find("train_gpt: "));  // after the notice of two --train-data
      REQUIRE((error.find("train_gpt: rank 1 on ") == 0) == (layout == "--local-ranks 2"));
      REQUIRE(error.find('\n') == error.size() - 1);  // said once
    }
    set_token(shard, position, good);
    set_token(shard, 0, static_cast<uint16_t>(token_at(shard, 0) ^ 1));  // so that it is not the former one
    const ProgramResult refused = run_program(tiny(dir / "run", options));
    REQUIRE(refused.status == 1);
    REQUIRE(refused.err.find(shard + " has changed since the run began (checksum ") != std::string::npos);
    REQUIRE(refused.err.find("take it as it is with --data-changed accept") != std::string::npos);
    const ProgramResult accepted = run_program(tiny(dir / "run", options + " --data-changed accept"));
    INFO(accepted.err);
    REQUIRE(accepted.status == 0);
    REQUIRE(losses(dir / "run") == losses(dir / "whole"));  // the other change was in step 1
    // Named on the console, in the metrics and in all later checkpoints.
    const std::string notice = "notice: " + shard + " has changed since step 5 (checksum ";
    REQUIRE(accepted.out.find(notice) != std::string::npos);
    REQUIRE(read_whole(dir / "run/log.txt").find(notice) != std::string::npos);
    REQUIRE(read_whole(dir / "run/metrics.jsonl").find("{\"kind\":\"data\",\"step\":5,\"shard\":\"" + shard) !=
            std::string::npos);
    run_well(tiny(dir / "run", "--max-steps 9 " + on(shard) + layout));
    const nlohmann::json changes = read_json(dir / "run/step-000009/trainer.json")["data_changes"];
    REQUIRE(changes.size() == 1);
    REQUIRE(changes[0]["step"] == 5);
    REQUIRE(changes[0]["shard"] == shard);
  }
}

TEST_CASE(
    "a token outside the vocabulary before the first update speaks of the tokenizer, and the same directory is "
    "good for the right vocabulary",
    "[run]") {
  const TempDir dir;
  for (const std::string layout : {"", "--local-ranks 2"}) {
    INFO(layout);
    const std::string shard = dir / "a.bin", options = "--max-steps 2 --vocab-size 70 " + on(shard) + layout;
    fs::copy_file(tiny_data, shard, fs::copy_options::overwrite_existing);
    fs::remove_all(dir / "run");
    const ProgramResult r = run_program(tiny(dir / "run", options));
    INFO(r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find("; step 1 needs it. The run ended before its first update. Were the data made with the model's "
                       "tokenizer? A new model takes its vocabulary from --tokenizer, or --vocab-size; --verify-data "
                       "names the largest token. If the file is damaged, repair it and run the same command again\n") !=
            std::string::npos);
    run_well(tiny(dir / "run", options + " --vocab-size 211"));
    // A damaged token that a resumed run meets at its first step is another matter.
    set_token(shard, 2 * 8 * 33 + 5, 60000);
    const ProgramResult later =
        run_program(tiny(dir / "run", options + " --vocab-size 211 --max-steps 3 --data-changed accept"));
    REQUIRE(later.err.find("The run ended after step 2 of 3") != std::string::npos);
    REQUIRE(later.err.find("Repair the file, keeping") != std::string::npos);
  }
}

TEST_CASE("the branch that a run suggests from a checkpoint of former data accepts the repaired ones", "[run]") {
  const TempDir dir;
  write_broken_model(dir);
  const std::string shard = dir / "a.bin";
  write_shard(shard, std::vector<uint16_t>(33 * 20 + 1, 5));
  const auto run = [&](const std::string& more) {
    return run_program("--model " + (dir / "broken") + on(shard) +
                       "--seq-len 33 --batch-size 2 --lr 1e-9 --threads 1 " +
                       "--checkpoint-minutes 0 --max-steps 4 --out-dir " + (dir / "run ") + more);
  };
  REQUIRE(run("--max-steps 2").status == 0);
  set_token(shard, 33 * 6 + 4, 9);  // in step 4
  const ProgramResult stopped = run("--data-changed accept");
  INFO(stopped.err);
  REQUIRE(stopped.status == 2);
  const std::string command = stopped.err.substr(stopped.err.rfind("./train_gpt ") + 12);
  REQUIRE(command.find("--branch-from " + (dir / "run/step-000002")) != std::string::npos);
  REQUIRE(run_program(command.substr(0, command.find('\n')) + " --max-steps 3").status == 0);
}

TEST_CASE("--data-changed accept takes no shard with another number of tokens", "[run]") {
  const TempDir dir;
  const auto write = [&](int64_t first, int64_t second, uint16_t token) {  // two shards, of so many samples
    write_shard<uint16_t>(dir / "a.bin", std::vector<uint16_t>(static_cast<size_t>(33 * first + 1), token));
    write_shard<uint16_t>(dir / "b.bin", std::vector<uint16_t>(static_cast<size_t>(33 * second + 1), token));
  };
  const std::string data = on("\"" + dir.path() + "/?.bin\"");
  write(20, 10, 7);
  run_well(tiny(dir / "run", "--max-steps 1" + data));
  write(10, 20, 8);
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 2 --data-changed accept" + data));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find(formatted("--data-changed accept: {} has {} tokens, but {} when the run began", dir / "a.bin",
                               33 * 10 + 1, 33 * 20 + 1)) != std::string::npos);
}

TEST_CASE("validation data that cannot be read any more end a run after a save", "[run]") {
  for (const std::string layout : {"", "--local-ranks 2"}) {
    INFO(layout);
    const TempDir dir;
    fs::copy_file(tiny_data, dir / "val.bin");
    const ProgramResult r = run_program(tiny(
        dir / "run", formatted("{} --max-steps 1000000 --val-every 20 --val-steps 2 --val-data {} >/dev/null 2>{} & "
                               "while [ ! -s {} ]; do sleep 0.05; done; truncate -s 2000 {}; wait $!",
                               layout, dir / "val.bin", dir / "said", dir / "run/metrics.jsonl", dir / "val.bin")));
    REQUIRE(r.status == 1);
    const std::string said = read_whole(dir / "said");
    INFO(said);
    REQUIRE(said.find("its size has changed since the run began") != std::string::npos);
    const size_t after = said.find("; the validation after step ");
    REQUIRE(after != std::string::npos);
    const int64_t step = std::stoll(said.substr(said.find_first_of("0123456789", after)));
    REQUIRE(step > 0);
    REQUIRE_FALSE(checkpoint_fault(checkpoint_path(dir / "run", step)));
  }
}

TEST_CASE("a plan refuses lists of data as the run would", "[plan]") {
  for (const auto& [options, fault] : {std::pair{"--val-data a --val b=c", "--val with --val-data"},
                                       {"--val b", "--val 'b': expected NAME=PATTERN"},
                                       {"--val b=c --val b=d", "two of the same name"},
                                       {"--data a=b:0", "--data 'a=b:0': the weight is 0"}}) {
    const ProgramResult r = run_program(std::string("--plan --model d2 ") + options);
    INFO(options << ": " << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(fault) != std::string::npos);
  }
}
