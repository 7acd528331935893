// When a run saves: by the clock, and what it can still save if the disk is full at the end.
#include <set>

#include "catch2.h"
#include "run/checkpoints/retention.h"
#include "run/checkpoints/run_dir.h"
#include "tiny_run.h"

using namespace llmc;
namespace fs = std::filesystem;

namespace {

std::set<std::string> checkpoints_in(const std::string& out) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(out))
    if (entry.is_directory()) names.insert(entry.path().filename());
  return names;
}
using Names = std::set<std::string>;

ProgramResult refused(const std::string& arguments, const std::string& prefix = "") {
  const ProgramResult r = run_program(arguments, prefix);
  INFO(r.out << r.err);
  REQUIRE(r.status == 1);
  return r;
}

}  // namespace

TEST_CASE("a run saves by the clock, keeps the two newest of those checkpoints, and computes the same",
          "[run][checkpoint]") {
  const TempDir dir;
  const std::string often = "--checkpoint-minutes 1e-9 --checkpoint-mode sync ";  // after every step
  for (const std::string layout : {"", "--local-ranks 2 --zero-stage 1 "}) {
    for (const char* run : {"never", "often"}) fs::remove_all(dir / run);
    run_well(tiny(dir / "never", layout + "--max-steps 9 --checkpoint-minutes 0"));
    run_well(tiny(dir / "often", layout + "--max-steps 9 --checkpoint-every 3 " + often));
    REQUIRE(checkpoints_in(dir / "never") == Names{"step-000009"});
    REQUIRE(checkpoints_in(dir / "often") ==
            Names{"step-000003", "step-000006", "step-000007", "step-000008", "step-000009"});
    REQUIRE(losses(dir / "often") == losses(dir / "never"));
    for (const char* file : {"model.safetensors", "optimizer-00001-of-00001.safetensors"})
      if (layout.empty())
        REQUIRE((read_whole(dir / "often/step-000009/" + file) == read_whole(dir / "never/step-000009/" + file)));
  }
  // A later start still knows which ones it need not keep; --keep-checkpoints counts the others.
  const ProgramResult more = run_program(
      tiny(dir / "often", "--max-steps 13 --checkpoint-every 3 --keep-checkpoints 1 --keep-every 3 " + often));
  INFO(more.err);
  REQUIRE(more.status == 0);
  REQUIRE(checkpoints_in(dir / "often") == Names{"step-000003", "step-000006", "step-000009", "step-000010",
                                                 "step-000011", "step-000012", "step-000013"});
  REQUIRE(
      more.out.find("every 3 steps, 1e-09 minutes after the last one (two such are kept), at the end and when it is "
                    "stopped\n") != std::string::npos);
}

TEST_CASE("a checkpoint by the clock that cannot be written is tried again, and stays one by the clock",
          "[run][checkpoint]") {
  const TempDir dir;
  const ProgramResult r = run_program(
      tiny(dir / "run", "--max-steps 7 --checkpoint-minutes 1e-9 --checkpoint-mode sync"),
      "FILE_OPS_FULL=manifest FILE_OPS_FULL_WRITES=1 FILE_OPS_ROOT=" + dir.path() + " LD_PRELOAD=build/file_ops.so");
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  REQUIRE(r.out.find("WARNING: no checkpoint after step 1: ") != std::string::npos);
  REQUIRE(checkpoints_in(dir / "run") == Names{"step-000005", "step-000006", "step-000007"});
}

TEST_CASE("the checkpoint to which a rollback would return is never deleted for newer ones", "[run][checkpoint]") {
  const TempDir dir;
  for (const int64_t step : {5, 10, 12, 13}) {
    fs::create_directory(checkpoint_path(dir.path(), step));
    std::ofstream(checkpoint_path(dir.path(), step) + "/manifest.json") << "{}";
    std::ofstream(checkpoint_path(dir.path(), step) + "/trainer.json") << "{}";
  }
  Retention(dir.path()).prune(1, 0, {10});
  REQUIRE(checkpoint_steps(dir.path()) == std::vector<int64_t>{10, 13});
}

TEST_CASE("by default a run saves every 15 minutes, but not an asynchronous pipeline", "[run][checkpoint]") {
  Options o;
  REQUIRE(o.minutes_between_checkpoints() == 15);
  o.schedule = Schedule::pipedream;
  REQUIRE(o.minutes_between_checkpoints() == 0);
  const TempDir dir;
  REQUIRE(refused(tiny(dir / "run", "--total-batch-size 66 --schedule pipedream --checkpoint-minutes 5"))
              .err.find("--checkpoint-minutes 5 with --schedule pipedream: a checkpoint empties the pipeline") !=
          std::string::npos);
}

TEST_CASE("where the disk has no room for the last checkpoint, the weights alone are saved", "[run][checkpoint]") {
  const TempDir dir;
  const auto full = [&](const std::string& what) {
    return "FILE_OPS_FULL=" + what + " FILE_OPS_ROOT=" + dir.path() + " LD_PRELOAD=build/file_ops.so";
  };
  const std::string constant = "--lr-schedule constant ", options = constant + "--max-steps 4 --checkpoint-every 3 ",
                    weights = dir / "run/weights-only-step-000004";
  run_well(tiny(dir / "whole", options));
  run_well(tiny(dir / "run", constant + "--max-steps 3"));
  for (int attempt = 0; attempt < 2; ++attempt) {  // the second one replaces what the first one left
    const ProgramResult r = refused(tiny(dir / "run", options), full("optimizer-"));
    INFO(r.err);
    REQUIRE(r.err.find("no checkpoint after step 4: ") != std::string::npos);
    REQUIRE(r.err.find("the last one is " + (dir / "run/step-000003") + "; the weights alone are saved in " +
                       weights) != std::string::npos);
    REQUIRE(checkpoints_in(dir / "run") == Names{"step-000003", "weights-only-step-000004"});
  }
  REQUIRE((read_whole(weights + "/model.safetensors") == read_whole(dir / "whole/step-000004/model.safetensors")));
  // It is a model, and no checkpoint.
  const ProgramResult generated = run_program("--generate --sample-tokens 3 --model " + weights);
  INFO(generated.err);
  REQUIRE(generated.status == 0);
  REQUIRE(refused(tiny(dir / "run", options + "--resume " + weights)).err.find("this is not a checkpoint") !=
          std::string::npos);
  const ProgramResult again = run_program(tiny(dir / "run", options));  // there is room now
  REQUIRE(again.out.find("resuming after step 3") != std::string::npos);
  REQUIRE((state_of(dir / "run/step-000004") == state_of(dir / "whole/step-000004")));
  // Where not even they fit, the error says so, and nothing half-written stays.
  const ProgramResult none = refused(tiny(dir / "none", options), full("model"));
  REQUIRE(none.err.find("there is none; nor could the weights alone be saved: ") != std::string::npos);
  REQUIRE(checkpoints_in(dir / "none").empty());
}

// The loss of a step is that of the weights before its update: that of the last weights no step shows.
TEST_CASE("weights whose loss is not finite are not saved, also where the very last update made them so",
          "[run][checkpoint]") {
  const TempDir dir;
  const std::string flies = "--lr 100 --grad-clip 0 --lr-schedule constant --warmup-steps 0 --batch-size 8 ";
  int64_t last = 0;
  for (int64_t steps = 4; steps <= 40 && last == 0; ++steps) {
    fs::remove_all(dir / "run");
    const ProgramResult r =
        run_program(tiny(dir / "run", flies + formatted("--max-steps {} --checkpoint-every 3", steps)));
    INFO(steps << " steps: " << r.err);
    REQUIRE((r.status == 0 || r.status == 2));
    if (r.status == 0) continue;
    // By the time the loss is first seen, at the end of the run that has just one step too many.
    REQUIRE(r.err.find(formatted("with the weights after step {} the loss is nan", steps)) != std::string::npos);
    REQUIRE(!fs::exists(checkpoint_path(dir / "run", steps)));
    const int64_t good = (steps - 1) / 3 * 3;
    REQUIRE(r.err.find("the last checkpoint is " + checkpoint_path(dir / "run", good)) != std::string::npos);
    last = steps;
  }
  REQUIRE(last > 0);
  // A validation sees it, too, and a stage of a pipeline ends with the others.
  for (const std::string& more : {"--val-data " + tiny_data, std::string("--pp 2 --n-layer 2 --local-ranks 2")}) {
    fs::remove_all(dir / "run");
    const ProgramResult r =
        run_program(tiny(dir / "run", flies + "--max-steps 40 --val-every 1 --checkpoint-every 1 " + more));
    INFO(r.err);
    REQUIRE(r.status == 2);
    REQUIRE(r.err.find("the last update diverged: with the weights after step ") != std::string::npos);
    REQUIRE(r.err.find(more.starts_with("--val") ? "the validation loss is " : "the loss is ") != std::string::npos);
  }
}

TEST_CASE("checkpoints written while training goes on have the same bytes, and a run resumes from them",
          "[run][checkpoint]") {
  const TempDir dir;
  const std::string async = "--checkpoint-mode async ";
  for (const std::string layout :
       {"", "--local-ranks 2 --zero-stage 2 --dtype bf16 ", "--pp 2 --n-layer 2 --local-ranks 2 "}) {
    for (const char* run : {"sync", "async"}) fs::remove_all(dir / run);
    const std::string options = layout + "--max-steps 9 --checkpoint-every 2 ";
    run_well(tiny(dir / "sync", options + "--checkpoint-mode sync"));
    const ProgramResult r = run_program(tiny(dir / "async", options + async));
    INFO(layout << r.out << r.err);
    REQUIRE(r.status == 0);
    REQUIRE(losses(dir / "async") == losses(dir / "sync"));
    REQUIRE(checkpoints_in(dir / "async") == checkpoints_in(dir / "sync"));
    for (const std::string& name : checkpoints_in(dir / "sync"))
      REQUIRE((state_of(dir / "async/" + name) == state_of(dir / "sync/" + name)));
    REQUIRE(r.out.find("step-000002; training stood still for ") != std::string::npos);
    for (const char* later : {"step-000008", "step-000009"}) fs::remove_all(dir / "async/" + later);
    run_well(tiny(dir / "async", options + async));
    REQUIRE(losses(dir / "async") == losses(dir / "sync"));
    REQUIRE((state_of(dir / "async/step-000009") == state_of(dir / "sync/step-000009")));
  }
}

TEST_CASE("a checkpoint that cannot be written while training goes on is tried again, or ends the run",
          "[run][checkpoint]") {
  const TempDir dir;
  const std::string full = "FILE_OPS_FULL_WRITES=1 FILE_OPS_ROOT=" + dir.path() + " LD_PRELOAD=build/file_ops.so ";
  for (const std::string what : {"optimizer-", "manifest"}) {
    const std::string options = "--checkpoint-mode async --max-steps 9 --checkpoint-every 3 ";
    for (const char* run : {"retries", "fails"}) fs::remove_all(dir / run);
    const ProgramResult r = run_program(tiny(dir / "retries", options), full + "FILE_OPS_FULL=" + what);
    INFO(what << ": " << r.out << r.err);
    REQUIRE(r.status == 0);
    REQUIRE(r.out.find("WARNING: no checkpoint after step 3: ") != std::string::npos);
    REQUIRE(checkpoints_in(dir / "retries").count("step-000003") == 0);
    REQUIRE(checkpoints_in(dir / "retries").count("step-000009") == 1);
    const ProgramResult fails =
        refused(tiny(dir / "fails", options + "--checkpoint-errors fail"), full + "FILE_OPS_FULL=" + what);
    INFO(fails.err);
    REQUIRE(fails.err.find("no checkpoint after step 3: ") != std::string::npos);
    REQUIRE(fails.err.find("there is none; the weights alone are saved in ") != std::string::npos);
  }
}

TEST_CASE("a run that diverges or is stopped while a checkpoint is written keeps that checkpoint",
          "[run][checkpoint]") {
  const TempDir dir;
  const ProgramResult r =
      run_program(tiny(dir / "run",
                       "--lr 100 --grad-clip 0 --lr-schedule constant --warmup-steps 0 --batch-size 8 --max-steps 40 "
                       "--checkpoint-every 1 --checkpoint-mode async"));
  INFO(r.out << r.err);
  REQUIRE(r.status == 2);
  const std::vector<int64_t> saved = checkpoint_steps(dir / "run");
  REQUIRE(!saved.empty());
  REQUIRE(r.err.find("the last checkpoint is " + checkpoint_path(dir / "run", saved.back())) != std::string::npos);
  // All updates before the one that diverged were saved, also the last of them.
  REQUIRE(saved.size() == static_cast<size_t>(saved.back()));
  REQUIRE(r.err.find(formatted("with the weights after step {} the loss is nan", saved.back() + 1)) !=
          std::string::npos);
}
