// Branches: a run that begins at a checkpoint of another one, with other options.
#include "catch2.h"
#include "run/job.h"
#include "run/reports/next_steps.h"
#include "tiny_run.h"
#include "train/lr_schedule.h"

using namespace llmc;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

const std::string eight = "--max-steps 8 --checkpoint-every 2 ";

}  // namespace

TEST_CASE("a branch keeps weights, moments and the data's position, says what it changes, and records its parent",
          "[run][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run", eight));
  const std::string from = "--branch-from " + (dir / "run/step-000004");
  const std::string same = said(tiny(dir / "same", eight + from));
  REQUIRE(same.find("branching after step 4 from " + (dir / "run/step-000004")) != std::string::npos);
  REQUIRE(same.find("notice: --") == std::string::npos);
  REQUIRE(state_of(dir / "same/step-000008") == state_of(dir / "run/step-000008"));

  const std::string slower = eight + "--lr 5e-3 --grad-clip 0.5 ";
  const std::string out = said(tiny(dir / "slower", slower + from));
  REQUIRE(out.find("notice: --lr was '0.01' and is now '0.005'") != std::string::npos);
  REQUIRE(out.find("notice: --grad-clip was '1' and is now '0.5'") != std::string::npos);
  const LrSchedule before{LrShape::cosine, 1e-2, 0, 8, 0}, now{LrShape::cosine, 5e-3, 0, 8, 0};
  REQUIRE(out.find(formatted("notice: the learning rate was {:.2e} at step 4 and is {:.2e} at step 5",
                             learning_rate(before, 4), learning_rate(now, 5))) != std::string::npos);
  REQUIRE(losses(dir / "slower").at(5) == losses(dir / "run").at(5));
  REQUIRE(losses(dir / "slower").at(7) != losses(dir / "run").at(7));
  REQUIRE(losses(dir / "slower").size() == 4);
  const json parent = read_json(dir / "slower/run.json")["parent"];
  REQUIRE(parent["step"] == 4);
  REQUIRE(parent["manifest"] == checksum(read_whole(dir / "run/step-000004/manifest.json")));
  REQUIRE(read_json(dir / "slower/step-000006/trainer.json")["parent"] == parent);
  REQUIRE(fs::equivalent(parent["path"].get<std::string>(), dir / "run/step-000004"));

  // It resumes from its own checkpoints, with --branch-from or without, also when its parent is gone.
  for (const std::string& how : {std::string(), from}) {
    fs::remove_all(dir / "again");
    fs::copy(dir / "slower", dir / "again", fs::copy_options::recursive);
    fs::remove_all(dir / "again/step-000008");
    const std::string on = said(tiny(dir / "again", slower + how));
    REQUIRE(on.find("resuming after step 6") != std::string::npos);
    REQUIRE(on.find("WARNING") == std::string::npos);
    REQUIRE(state_of(dir / "again/step-000008") == state_of(dir / "slower/step-000008"));
    // Before the first of them, from its parent again.
    for (const char* step : {"/step-000004", "/step-000006", "/step-000008"}) fs::remove_all(dir / "again" + step);
    REQUIRE(said(tiny(dir / "again", slower + how)).find("branching after step 4") != std::string::npos);
    REQUIRE(state_of(dir / "again/step-000008") == state_of(dir / "slower/step-000008"));
    REQUIRE(losses(dir / "again") == losses(dir / "slower"));
    REQUIRE(read_json(dir / "again/run.json")["parent"] == parent);
  }
  refused(tiny(dir / "slower", eight + from), "--lr was '0.005' and is now '0.01'");
  refused(tiny(dir / "slower", slower + "--branch-from " + (dir / "run/step-000002")),
          "is a branch of another checkpoint, " + parent["path"].dump());
  fs::rename(dir / "run", dir / "moved");
  fs::remove_all(dir / "again/step-000008");
  REQUIRE(said(tiny(dir / "again", slower + from)).find("resuming after step 6") != std::string::npos);
  for (const char* step : {"/step-000004", "/step-000006", "/step-000008"}) fs::remove_all(dir / "again" + step);
  refused(tiny(dir / "again", slower), "the parent in " + (dir / "again/run.json") + ", ");
}

TEST_CASE("what a branch cannot do is refused with a remedy, and nothing is left behind", "[run][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 4 --checkpoint-every 2"));
  const std::string from = "--branch-from " + (dir / "run/step-000002 ");
  const auto no = [&](const std::string& more, const std::string& why) {
    refused(tiny(dir / "new", more), why);
    REQUIRE_FALSE(fs::exists(dir / "new"));
  };
  no(from + "--restart", "leave out --restart");
  no(from + "--resume never", "leave out --resume");
  no(from + "--resume " + (dir / "run/step-000002"), "leave out --resume");
  no(from + "--model d2", "--model was 'd1' and is now 'd2'");
  no(from + "--optimizer lion --lr 1e-3",
     "--optimizer was 'adamw' and is now 'lion'\na branch cannot change this one: ");
  no(from + "--optimizer lion --init-std 0.1", "a branch cannot change these: ");
  no("--branch-from " + (dir / "run"), "expected a checkpoint's directory, " + (dir / "run/step-000004"));
  no("--branch-from " + (dir / "run/step-000003"), "No such file or directory");
  no("--max-steps 4 --branch-from " + (dir / "run/step-000004"), "nothing would be left to do");
  refused(tiny(dir / "run", "--max-steps 4 --lr 1e-3 " + from), "holds a run that is no branch");
  refused(tiny(dir / "run", "--max-steps 4 " + from), "holds a run that is no branch");

  // Without --branch-from, it says whether a branch could.
  const auto resumed = [&](const std::string& more, const std::string& remedy) {
    refused(tiny(dir / "run", "--max-steps 4 " + more), "or choose another --out-dir" + remedy);
  };
  const std::string branch = ", add --branch-from CHECKPOINT --out-dir NEW\n";
  resumed("--lr 1e-3", "; to branch with this change" + branch);
  resumed("--lr 1e-3 --seq-len 11", "; to branch with these changes" + branch);
  resumed("--seq-len 11", "; to go on here, add --data-changed accept; to branch with this change" + branch);
  resumed("--optimizer lion --init-std 0.1 --lr 1e-3",
          "; a branch of it (--branch-from) may change --lr and --beta2, but not --init-std and --optimizer\n");
  resumed("--init-std 0.1", "\n");
}

TEST_CASE("a branch with another seed takes what is left of the epoch in another order, and resumes exactly",
          "[run][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run", eight));
  const std::string branch = eight + "--seed 7 --branch-from " + (dir / "run/step-000004");
  const std::string out = said(tiny(dir / "other", branch));
  REQUIRE(out.find("notice: --seed was '42' and is now '7'") != std::string::npos);
  REQUIRE(out.find("notice: --seed 7 orders the samples from step 5 on") != std::string::npos);
  REQUIRE(losses(dir / "other").at(5) != losses(dir / "run").at(5));
  const auto seeds = [&](const std::string& checkpoint) {
    return read_json(dir / checkpoint + "/trainer.json")["recipe"]["sources"][0]["seeds"];
  };
  const int64_t n = read_json(dir / "run/step-000004/trainer.json")["data_samples"];
  const auto at = [&](int64_t sample, int seed) { return json::array({sample / n, sample % n, seed}); };
  REQUIRE(seeds("other/step-000006") == json::array({at(0, 42), at(32, 7)}));
  fs::remove_all(dir / "other/step-000008");
  fs::copy(dir / "other", dir / "again", fs::copy_options::recursive);
  run_well(tiny(dir / "other", branch));
  run_well(tiny(dir / "again", eight + "--seed 7"));
  REQUIRE(state_of(dir / "other/step-000008") == state_of(dir / "again/step-000008"));
  // A branch of the branch keeps both orders, and adds its own.
  run_well(tiny(dir / "third", eight + "--seed 9 --branch-from " + (dir / "other/step-000006")));
  REQUIRE(seeds("third/step-000008") == json::array({at(0, 42), at(32, 7), at(48, 9)}));
}

TEST_CASE("where stages set the rate, a run that diverges says that --lr does not change it, and where it stands",
          "[run][checkpoint]") {
  const TempDir dir;
  const auto stages = [&](const char* name, const char* rate) {
    std::ofstream(dir / name) << "[[stage]]\nname = \"one\"\nsteps = 2\nlr = 1e-3\n"
                              << "[[stage]]\nname = \"two\"\nsteps = 12\nlr = " << rate << "\n";
    return dir / name;
  };
  const std::string file = stages("stages.toml", "100");
  const ProgramResult r = run_program(
      tiny(dir / "run", "--lr-schedule constant --dtype bf16 --grad-clip 0 --weight-decay 100 --stages " + file));
  INFO(r.out << r.err);
  REQUIRE(r.status == 2);
  const std::string advice = "step-000002; " + file +
                             ":8 sets its own rate, which --lr does not change: lower it in a copy and give that to "
                             "--stages. This command continues from the checkpoint, with half the --lr:\n";
  const size_t at = r.err.find(advice);
  REQUIRE(at != std::string::npos);
  std::string command = r.err.substr(at + advice.size() + 12);
  command = command.substr(0, command.find('\n'));
  INFO(command);
  REQUIRE(command.find(file) != std::string::npos);
  command.replace(command.find(file), file.size(), stages("lower.toml", "1e-5"));
  const ProgramResult branch = run_program(command);
  INFO(branch.out << branch.err);
  REQUIRE(branch.status == 0);
  REQUIRE(branch.out.find("branching after step 2 ") != std::string::npos);
}

TEST_CASE("a run that diverges prints the command that continues with a lower rate, and the command works",
          "[run][checkpoint]") {
  const TempDir dir;
  const std::string diverging = "--max-steps 8 --checkpoint-every 1 --dtype bf16 --lr-schedule constant --grad-clip 0 ";
  const ProgramResult r = run_program(tiny(dir / "run", diverging + "--lr 100 --weight-decay 100"));
  INFO(r.err);
  REQUIRE(r.status == 2);
  const size_t line = r.err.find("half the --lr:\n./train_gpt ");
  if (r.err.find("the last checkpoint is ") == std::string::npos) return;  // no checkpoint yet
  REQUIRE(line != std::string::npos);
  const std::string command = r.err.substr(line + 27, r.err.find('\n', line + 20) - line - 27);
  INFO(command);
  REQUIRE(command.find(" --lr 50 ") != std::string::npos);
  REQUIRE(command.find("--branch-from " + (dir / "run/step-")) != std::string::npos);
  REQUIRE(command.find("--out-dir " + (dir / "run-branch")) != std::string::npos);
  const ProgramResult branch = run_program(command);  // it may well diverge, too
  INFO(branch.out << branch.err);
  REQUIRE(branch.out.find("branching after step ") != std::string::npos);
}
