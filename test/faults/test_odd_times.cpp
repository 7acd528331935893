// A clock that jumps; a rank that is stopped and goes on, again and again; shards of tokens that change while a run
// reads them.
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "catch2.h"
#include "faults/fault_run.h"

using namespace llmc;
namespace fs = std::filesystem;

TEST_CASE("a clock that jumps by days changes nothing", "[faults][checkpoint]") {
  const std::string saves = "--max-steps 12 --checkpoint-every 3 --checkpoint-minutes 5 --time-limit 60 ";
  for (const FaultRun& run : {FaultRun{"one rank", saves}, FaultRun{"two processes", saves + "--zero-stage 1", 2}}) {
    const TempDir dir(in_memory());
    const Ended whole = run.start(dir / "whole", "");
    INFO(whole.said);
    REQUIRE(whole.good());
    const Ended jumps = run.start(dir / "jumps", shim(dir, "FILE_OPS_CLOCK=900000"), {});
    INFO(jumps.said);
    REQUIRE(jumps.good());
    REQUIRE(result_of(dir / "jumps") == result_of(dir / "whole"));
    REQUIRE(checkpoint_steps(dir / "jumps") == checkpoint_steps(dir / "whole"));
    for (const auto& [step, seconds] : metric(dir / "jumps", "train", "elapsed_s"))
      REQUIRE((seconds >= 0 && seconds < 3600));
  }
}

TEST_CASE("a rank that hangs among threads of one process is named, and the process ends", "[faults][failures]") {
  const TempDir dir(in_memory());
  const FaultRun run{"two threads",
                     "--max-steps 4 --checkpoint-every 2 --local-ranks 2 --checkpoint-mode sync --comm-timeout 0.5"};
  const Ended ended = run.start(dir / "run", shim(dir, "FILE_OPS_HANG=model-00002"));
  INFO(ended.said);
  REQUIRE(ended.all(3));
  REQUIRE(ended.said.find("train_gpt: rank 1 on ") != std::string::npos);
  REQUIRE(ended.said.find("has not arrived at ") != std::string::npos);
  REQUIRE(ended.said.find("; it is writing a checkpoint") != std::string::npos);
  REQUIRE(run.start(dir / "run", "").good());
}

TEST_CASE("a rank that is stopped for less than the timeout, again and again, is waited for", "[faults][failures]") {
  const FaultRun run{"two processes", "--max-steps 200 --checkpoint-every 50 --zero-stage 2 --comm-timeout 20", 2};
  const TempDir dir(in_memory());
  const Ended whole = run.start(dir / "whole", "");
  INFO(whole.said);
  REQUIRE(whole.good());
  // The second process starts a shell beside itself that stops it for a fifth of a second each time.
  std::ofstream(dir / "flap") << "#!/bin/bash\n"
                                 "(while sleep 0.1 && kill -s STOP $$; do sleep 0.2; kill -s CONT $$; echo >>"
                              << dir / "stops"
                              << "; done) >/dev/null 2>&1 &\n"
                                 "exec \"$@\"\n";
  fs::permissions(dir / "flap", fs::perms::owner_all);
  for (int tries = 0; tries < 10 && read_whole(dir / "stops").empty(); ++tries) {  // the run may end before the first
    fs::remove_all(dir / "flaps");
    const Ended flaps = run.start(dir / "flaps", dir / "flap", 1);
    INFO(flaps.said);
    REQUIRE(flaps.good());
  }
  REQUIRE(!read_whole(dir / "stops").empty());
  REQUIRE(result_of(dir / "flaps") == result_of(dir / "whole"));
}

TEST_CASE("a shard whose tokens change while a run reads it ends the run, which resumes once it is repaired",
          "[faults][checkpoint]") {
  const TempDir dir(in_memory());
  const std::string shard = dir / "train.bin", good = read_whole(tiny_data);
  std::string changed = good;
  for (size_t at = 1024; at < changed.size(); at += 2)  // tokens of the vocabulary of 211
    changed[at] = static_cast<char>((static_cast<unsigned char>(changed[at]) + 1) % 200);
  const auto arguments = [&](const std::string& out, int64_t steps) {
    std::string words = tiny(
        dir / out,
        formatted("--max-steps {} --checkpoint-every 100 --keep-checkpoints 2 --time-limit 10 --lr-schedule constant",
                  steps));
    return words.replace(words.find(tiny_data), tiny_data.size(), shard);
  };
  // Writes to the shard once a run that has begun meanwhile is in its fifth step, or has ended.
  std::atomic<bool> ended;
  const auto run_while = [&](const std::string& out, int64_t steps, const std::string& bytes) {
    std::ofstream(shard, std::ios::binary) << good;
    ProgramResult r;
    ended = false;
    std::thread run([&] { r = run_program(arguments(out, steps)), ended = true; });
    while (!ended && read_whole(dir / out + "/metrics.jsonl").find("\"step\":5,") == std::string::npos) ::usleep(2000);
    std::fstream(shard, std::ios::binary | std::ios::in | std::ios::out) << bytes;
    run.join();
    return r;
  };
  const ProgramResult r = run_while("run", 1'000'000'000, changed);  // until it notices
  INFO(r.out << r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find(shard + ": its tokens have changed since the run began") != std::string::npos);
  REQUIRE(r.err.find(", saved to " + (dir / "run")) != std::string::npos);
  const int64_t steps = checkpoint_steps(dir / "run").back() + 50;
  REQUIRE(refused(arguments("run", steps), shard).status == 1);  // still changed
  std::ofstream(shard, std::ios::binary) << good;
  run_well(arguments("run", steps));
  const ProgramResult touched = run_while("touched", steps, good);  // the same bytes: of a short run at its end, too
  INFO(touched.err);
  REQUIRE(touched.status == 0);
  REQUIRE(result_of(dir / "run") == result_of(dir / "touched"));
}
