// The commands that a run suggests: other samples than before, for as many processes as it had. How long the rest of a
// run takes.
#include <thread>

#include "catch2.h"
#include "core/words.h"
#include "run/job.h"
#include "run/options/parse.h"
#include "run/reports/next_steps.h"
#include "run/reports/step_report.h"
#include "run/start.h"
#include "tiny_run.h"

using namespace llmc;
using nlohmann::json;

namespace {

// A command of the last table of a run; empty: there is none of this title.
std::string next_command(const std::string& out, const std::string& title) {
  const size_t table = out.rfind("\nnext: "), line = out.find("\n  " + title + " ", table);
  if (table == out.npos || line == out.npos) return "";
  const size_t begin = out.find("./train_gpt ", line);
  return out.substr(begin, out.find('\n', begin) - begin);
}

}  // namespace

TEST_CASE("a suggested command is for as many processes, and belongs to none of them", "[run]") {
  Options o;
  o.rank = 0, o.world_size = 4, o.rendezvous = "127.0.0.1:4000", o.restart = true, o.lr = 1;
  o.data_changed = DataChanged::accept;  // what this start accepted
  REQUIRE(command_line(detail::of_any_start(o), "./t") == "./t --lr 1");
  auto launched = [&](const std::string& by, int64_t processes, int64_t hosts) {
    o.place.started_by = by, o.place.processes = processes, o.place.hosts = hosts;
    return detail::launched(o, "./t", Options());
  };
  REQUIRE(launched("one process", 1, 1) == "./t");
  REQUIRE(launched("mpirun (Open MPI)", 4, 1) ==
          std::string("mpirun ") + (::geteuid() == 0 ? "--allow-run-as-root " : "") + "-n 4 ./t");
  REQUIRE(launched("mpiexec (MPICH)", 2, 1) == "mpiexec -n 2 ./t");
  REQUIRE(launched("srun (Slurm job 17)", 8, 2) == "srun -n 8 ./t");
  for (const char* by : {"--rank", "torchrun's variables", "a launcher with PMIx"})
    REQUIRE(launched(by, 4, 1) == "in 4 processes, started as these were: ./t");
  REQUIRE(launched("mpirun (Open MPI)", 4, 2) == "in 4 processes, started as these were: ./t");  // on which hosts?
  // The scripts say how they were called.
  setenv(detail::launch_variable, "HOSTS=a,b RANKS=4 ./run_mpirun.sh", 1);
  const std::string by_script = launched("mpirun (Open MPI)", 8, 2), alone = launched("one process", 1, 1);
  unsetenv(detail::launch_variable);
  REQUIRE(by_script == "HOSTS=a,b RANKS=4 ./run_mpirun.sh");
  REQUIRE(alone == "./t");
}

TEST_CASE("the run itself goes on to twice its length, with its optimizer's state, by the first command suggested",
          "[run]") {
  const TempDir dir;
  const std::string constant = " --lr-schedule constant --warmup-steps 0 ";
  const auto steps = [&](const std::string& out) { return losses(out).rbegin()->first; };
  for (const std::string length : {"--max-steps 3", "--tokens 600", "--epochs 0.1", "--overfit-batch", ""}) {
    INFO(length);
    for (const char* run : {"run", "whole"}) std::filesystem::remove_all(dir / run);
    const std::string first = said(tiny(dir / "run", length + constant)), command = next_command(first, "continue");
    INFO(command);
    REQUIRE(first.find("\nnext: continue this run to twice its length, train further from these weights (with a new "
                       "optimizer), generate, plot\n  continue ") != std::string::npos);
    const int64_t before = steps(dir / "run");
    const std::string second = said(command.substr(12));
    REQUIRE(second.find("resuming") != std::string::npos);
    REQUIRE(std::abs(steps(dir / "run") - 2 * before) <= 1);  // lengths are rounded up
    run_well(tiny(dir / "whole", constant + formatted("--max-steps {}", steps(dir / "run")) +
                                     (length == "--overfit-batch" ? " " + length : "")));
    REQUIRE(losses(dir / "run") == losses(dir / "whole"));
  }
  // Without an update, and where the run is longer than its options say.
  const std::string again = said(tiny(dir / "run", constant + "--epochs 2"));
  REQUIRE(again.find("already complete") != std::string::npos);
  REQUIRE(next_command(again, "continue").find(" --epochs 4 ") != std::string::npos);
  REQUIRE(next_command(said(tiny(dir / "whole", "--max-steps 4" + constant)), "continue").empty());

  Options o;
  o.train_data = "x", o.max_steps = 5, o.restart = true, o.branch_from = "y";
  REQUIRE(command_line(*twice_as_long(o), "./t") == "./t --train-data x --max-steps 10");
  o.stages = "z";
  REQUIRE_FALSE(twice_as_long(o));
  o.stages.clear(), o.train_data.clear();
  o.data.items = {"a=x:1", "b=y:2"};
  REQUIRE(twice_as_long(o)->max_steps == 10);
  o.data.items = {"a=x:1", "b=y:2:3"};
  REQUIRE_FALSE(twice_as_long(o));
}

TEST_CASE("a run from weights that have seen the very samples that it begins with says so; the one suggested has not",
          "[run]") {
  const TempDir dir;
  const ProgramResult first = run_program(tiny(dir / "run", "--max-steps 4"));
  REQUIRE(first.status == 0);
  const std::string command = next_command(first.out, "train further"), further = command.substr(12);
  INFO(command);
  REQUIRE(command.find(" --seed 43") != std::string::npos);
  const ProgramResult on = run_program(further);
  REQUIRE(on.status == 0);
  REQUIRE(on.out.find("was trained on the same data") == std::string::npos);
  const std::string notice = "notice: --model " + (dir / "run/step-000004") +
                             " was trained on the same data in the same order, --seed 42: this run begins with the "
                             "same samples, 0.20 epochs of them; another --seed takes them in another order\n";
  const ProgramResult same = run_program(further + " --seed 42 --out-dir " + (dir / "same"));
  REQUIRE(same.out.find(notice) != std::string::npos);

  const json trainer = read_json(dir / "run/step-000004/trainer.json");
  const std::vector<std::string> data = {trainer["recipe"]["sources"][0]["shards"][0][2]};
  Options o;
  o.seq_len = 33;
  REQUIRE_FALSE(seen_samples(trainer, o, data).empty());
  REQUIRE(seen_samples(trainer, o, {"other"}).empty());
  json older = trainer;
  older["data_checksums"] = data, older["recipe"]["sources"][0].erase("shards");
  REQUIRE_FALSE(seen_samples(older, o, data).empty());
  REQUIRE(seen_samples(json(), o, data).empty());
  o.shuffle = false;
  REQUIRE(seen_samples(trainer, o, data).empty());
  json in_order = trainer;
  in_order["options"]["--shuffle"] = "false";
  o.seed = 7;
  REQUIRE(seen_samples(in_order, o, data).find("that of the files: ") != std::string::npos);
  o.seq_len = 32;
  REQUIRE(seen_samples(in_order, o, data).empty());
}

TEST_CASE("the rest of a run is estimated from what steps and tasks usually take, each kind by itself", "[run]") {
  const auto seconds_left = [](const std::string& options, const std::function<void(StepReport&)>& tasks) {
    std::vector<std::string> words = {"train_gpt"};
    for (const std::string& word : split(tiny("unused", "--local-ranks 2 --max-steps 1000 " + options), ' '))
      if (!word.empty()) words.push_back(word);
    const Job job(parse_command_line(words, [](Options& o) { o.ranks = 2; }).options, Clock::now());
    Log log = Log::silent();
    RunTotals totals;
    StepReport report(job, log, {}, true, totals);
    report.start_clock();
    for (int64_t step = 1; step <= 10; ++step) {
      if (step == 10) std::this_thread::sleep_for(std::chrono::milliseconds(300));  // a pause
      StepResult result;
      result.loss = 1;
      report.finished(step, 1e-3, 0, result, {});
    }
    REQUIRE(report.update_seconds() < 0.1);
    tasks(report);
    return report.seconds_left(10);
  };
  const auto thrice = [](StepReport& report, Task task, double seconds) {
    for (const double pause : {0, 600, 0}) report.took(task, seconds + pause);
  };
  const auto close_to = [](double seconds) { return Catch::Matchers::WithinAbs(seconds, 50); };
  const std::string none = "--checkpoint-minutes 0 ";
  REQUIRE_THAT(seconds_left(none, [](StepReport&) {}), close_to(0));
  // 1000 verifications, 100 local checkpoints and 20 checkpoints are no more than each of them takes.
  const std::string often =
      none + "--checkpoint-every 50 --checkpoint-local local --checkpoint-local-every 10 --verify-updates 1 ";
  REQUIRE_THAT(seconds_left(often, [&](StepReport& report) { thrice(report, Task::checkpoint, 100); }), close_to(2000));
  REQUIRE_THAT(seconds_left(often,
                            [&](StepReport& report) {
                              thrice(report, Task::checkpoint, 100);
                              thrice(report, Task::local_checkpoint, 10);
                              thrice(report, Task::verification, 1);
                            }),
               close_to(2000 + 1000 + 991));
  REQUIRE_THAT(seconds_left(none + "--check-replicas 10",
                            [&](StepReport& report) {
                              thrice(report, Task::comparison, 10);
                              thrice(report, Task::checkpoint, 500);  // the last one
                            }),
               close_to(1000 + 500));
}
