// --restart: a run begins anew, and what was there is kept.
#include "catch2.h"
#include "run/checkpoints/run_dir.h"
#include "tiny_run.h"

using namespace llmc;
namespace fs = std::filesystem;

TEST_CASE("--restart moves a run aside as a whole and begins anew", "[run]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 3"));
  const std::string before = read_whole(dir / "run/metrics.jsonl");
  fs::create_directory_symlink(dir / "run", dir / "link");
  for (const int64_t start : {1, 2}) {
    const ProgramResult r = run_program(tiny(dir / "link", "--max-steps 2 --restart --seed 5"));
    INFO(r.err);
    REQUIRE(r.status == 0);
    REQUIRE(r.out.find(formatted("are now in {}.before-{}", dir / "run", start)) != std::string::npos);
    REQUIRE(fs::exists(formatted("{}.before-{}/step-{:06}", dir / "run", start, start == 1 ? 3 : 2)));
    REQUIRE(checkpoint_steps(dir / "run") == std::vector<int64_t>{2});
    REQUIRE(r.out.find("--restart", r.out.find("\nnext: ")) == std::string::npos);
  }
  REQUIRE(read_whole(dir / "run.before-1/metrics.jsonl") == before);
  REQUIRE(fs::is_symlink(dir / "link"));

  fs::create_directory(dir / "other");
  run_well(tiny(dir / "other", "--max-steps 1 --restart"));  // nothing to move
  REQUIRE_FALSE(fs::exists(dir / "other.before-1"));
  auto refused = [&](const std::string& options, const std::string& why) {
    const ProgramResult r = run_program(options);
    INFO(r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(why) != std::string::npos);
  };
  refused(tiny(dir / "run", "--restart --resume " + (dir / "run/step-000002")), "--restart starts a run over");
  refused("--train-data test/golden/gpt2_tiny/train.bin --seq-len 33 --restart --out-dir " + (dir / "run") +
              " --model " + (dir / "run/step-000002"),
          "--restart would move --model");
  fs::copy("test/golden/gpt2_tiny/train.bin", dir / "run/mine.bin");
  refused(tiny(dir / "run", "--restart --train-data " + (dir / "run/*.bin")), "--restart would move --train-data");
  const ProgramResult requeued =
      run_program(tiny(dir / "run", "--max-steps 2 --restart --seed 5"), "SLURM_RESTART_COUNT=1");
  REQUIRE(requeued.status == 0);
  REQUIRE(requeued.out.find("again: it goes on, without --restart, from where it was") != std::string::npos);
  REQUIRE(requeued.out.find("already complete") != std::string::npos);

  // --resume, too: a checkpoint of another run, or none, only for the first start.
  for (const std::string& from : {std::string("never"), dir / "run/step-000002"}) {
    const std::string out = dir / (from == "never" ? "new" : "from");
    const std::string options = tiny(out, "--seed 5 --max-steps 5 --resume " + from);
    const ProgramResult stopped = run_program(options + " --time-limit 0.0000001");
    INFO(stopped.err);
    REQUIRE(stopped.status == static_cast<int>(ExitStatus::requeue));
    REQUIRE(stopped.err.find("run the same command again, without --resume " + from + ", to resume") !=
            std::string::npos);
    const ProgramResult again = run_program(options, "SLURM_RESTART_COUNT=1");
    INFO(again.out << again.err);
    REQUIRE(again.status == 0);
    REQUIRE(checkpoint_steps(out).back() == 5);
    const ProgramResult by_hand = run_program(tiny(out, "--seed 5 --max-steps 6 --resume " + from));
    REQUIRE(by_hand.status == 1);
    REQUIRE(by_hand.err.find(from == "never" ? "already holds a run" : "holds checkpoints of its own") !=
            std::string::npos);
  }

  std::ofstream(dir / "notes.txt") << "x";
  fs::create_directory(dir / "mine");
  fs::rename(dir / "notes.txt", dir / "mine/notes.txt");
  refused(tiny(dir / "mine", "--restart"), "holds notes.txt, which does not belong to a run");
  REQUIRE(fs::exists(dir / "run/step-000002/manifest.json"));
}

TEST_CASE("a run that is resumed with other instructions goes on, and says so", "[run]") {
  const TempDir dir;
  const std::string notice =
      "computed with the instructions of portable, and the run goes on with those of amx-stand-in";
  REQUIRE(run_program(tiny(dir / "run", "--max-steps 2 --dtype bf16"), "TRAIN_GPT_CPU_ISA=portable").status == 0);
  for (const int64_t steps : {3, 4}) {
    const ProgramResult r = run_program(tiny(dir / "run", formatted("--max-steps {} --dtype bf16", steps)),
                                        "TRAIN_GPT_CPU_ISA=amx-stand-in");
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    REQUIRE((r.out.find(notice) != r.out.npos) == (steps == 3));
  }
  const ProgramResult refused = run_program(tiny(dir / "run", "--max-steps 5 --dtype bf16"), "TRAIN_GPT_CPU_ISA=sse9");
  REQUIRE(refused.status == 1);
  REQUIRE(refused.err.find("TRAIN_GPT_CPU_ISA sse9: no such instruction set") != std::string::npos);
}
