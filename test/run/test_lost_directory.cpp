// An out directory that is moved or deleted while a run is in it: nothing is lost silently, and no directory has two
// writers.
#include "catch2.h"
#include "run/checkpoints/run_dir.h"
#include "tiny_run.h"

using namespace llmc;
namespace fs = std::filesystem;

namespace {

constexpr const char* endless = "--max-steps 100000000 --lr-schedule constant ";

// A run without end in `out`; once it has made updates, a shell script in which $! is the run and $(steps FILE) counts
// the lines of a metrics file. Its status is that of the script.
ProgramResult during(const std::string& out, const std::string& more, const std::string& script) {
  const std::string counting =
      "steps() { grep -s -c '\"kind\":\"train\"' $1 || true; }; until_steps() { for i in $(seq 400); do "
      "[ \"$(steps $1)\" -ge $2 ] 2>/dev/null && return; sleep 0.05; done; }; "
      "until_checkpoint() { for i in $(seq 400); do ls $1 2>/dev/null | grep -q ^step- && return; sleep 0.05; done; "
      "}; ";
  return run_program(
      tiny(out, std::string(endless) + more) +
      formatted(" >{}.out 2>{}.err & {} until_steps {}/metrics.jsonl 3; {}", out, out, counting, out, script));
}
// metrics.jsonl has every step from the first on.
void require_all_steps(const std::string& out, int64_t last) {
  const std::map<int64_t, double> found = losses(out);
  REQUIRE(found.begin()->first == 1);
  REQUIRE(std::ssize(found) >= last);
  REQUIRE(found.rbegin()->first == std::ssize(found));
}
int64_t last_step(const std::string& out) {
  const auto newest = newest_checkpoint(out, [](const std::string& warning) { FAIL(warning); });
  REQUIRE(newest);
  return newest->step;
}

}  // namespace

TEST_CASE("an out directory that is deleted or moved is made again, with all metrics and a checkpoint at once",
          "[run][checkpoint]") {
  for (const std::string what : {"rm -rf run", "mv run moved"})
    for (const std::string layout : {"", "--local-ranks 2 "}) {
      INFO(what << ", " << layout);
      const TempDir dir;
      const std::string out = dir / "run";
      const ProgramResult r =
          during(out, layout + "--checkpoint-every 2",
                 formatted("until_checkpoint {}; kill -STOP $!; (cd {} && {}); kill -CONT $!; until_checkpoint {}; "
                           "kill -TERM $!; wait $!",
                           out, dir.path(), what, out));
      INFO(read_whole(out + ".out") << read_whole(out + ".err"));
      REQUIRE(r.status == 75);
      const std::string said = read_whole(out + ".out");
      REQUIRE(said.find(formatted("WARNING: --out-dir {} was {} while the run was in it; it is made again", out,
                                  what == "rm -rf run" ? "deleted" : "moved to " + (dir / "moved"))) != said.npos);
      require_all_steps(out, last_step(out));
      REQUIRE(read_whole(out + "/log.txt").find("train_gpt") != std::string::npos);
      run_well(tiny(out, "--lr-schedule constant " + layout + formatted("--max-steps {}", last_step(out) + 1)));
      if (what != "rm -rf run") REQUIRE_FALSE(checkpoint_fault(checkpoint_path(dir / "moved", 2)));
    }
}

namespace {

// Moved before an operation of the first save, or of the last one, after which no update follows; every `stride`-th.
void move_at_operations(size_t stride) {
  const TempDir dir;
  const std::string options = "--max-steps 4 --checkpoint-every 2 --lr-schedule constant ", whole = dir / "whole";
  const auto shim = [](const std::string& out, const std::string& more) {
    return formatted("FILE_OPS_ROOT={} LD_PRELOAD=build/file_ops.so {}", out, more);
  };
  REQUIRE(run_program(tiny(whole, options), shim(whole, "FILE_OPS_LOG=" + (dir / "log"))).status == 0);
  const std::vector<std::string> operations = file_operations(read_whole(dir / "log"));
  size_t first = 0;
  while (operations.at(first).find(".tmp-step-000002") == std::string::npos) ++first;
  for (size_t at = first; at < operations.size(); at += stride) {
    INFO("moved before operation " << at + 1 << ", " << operations[at]);
    const std::string out = dir / std::to_string(at);
    const ProgramResult r = run_program(tiny(out, options), shim(out, formatted("FILE_OPS_MOVE={}", at + 1)));
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    const bool ended = !fs::exists(out);  // moved after the last save
    REQUIRE((ended ||
             r.out.find("was moved to " + out + ".moved while the run was in it; it is made again") != r.out.npos));
    const std::string now = ended ? out + ".moved" : out;
    REQUIRE(state_of(checkpoint_path(now, 4)) == state_of(checkpoint_path(whole, 4)));
    REQUIRE(losses(now) == losses(whole));
    run_well(tiny(now, options + "--max-steps 5"));
  }
}

}  // namespace

TEST_CASE("an out directory that is moved at any moment of a save is made again, with all metrics and a checkpoint",
          "[run][checkpoint]") {
  move_at_operations(7);
}
TEST_CASE("an out directory that is moved at every moment of a save is made again", "[run][checkpoint][long]") {
  move_at_operations(1);
}

TEST_CASE("where another run has taken a moved out directory's name, the first one saves where it is now, and ends",
          "[run][checkpoint]") {
  const TempDir dir;
  const std::string out = dir / "run", moved = dir / "moved";
  const ProgramResult r = during(
      out, "--comm-timeout 60 ",
      formatted("first=$!; kill -STOP $first; mv {} {}; ./train_gpt {} >{}.2 2>&1 & second=$!; until_steps "
                "{}/metrics.jsonl 3; kill -CONT $first; wait $first; status=$?; kill -TERM $second; wait $second; [ $? "
                "= 75 ] || exit 99; exit $status",
                out, moved, tiny(out, endless), out, out));
  const std::string said = read_whole(out + ".err");
  INFO(read_whole(out + ".out") << said << read_whole(out + ".2"));
  REQUIRE(r.status == 1);
  REQUIRE(said.find(formatted("--out-dir {} was moved to {} while the run was in it, and another run is writing to it "
                              "now; the run ended after step ",
                              out, moved)) != said.npos);
  REQUIRE(said.find("saved to " + checkpoint_path(moved, last_step(moved))) != said.npos);
  for (const std::string& run : {moved, out}) require_all_steps(run, last_step(run));
}

TEST_CASE("of an out directory's files, those that are deleted alone are made again", "[run][checkpoint]") {
  const TempDir dir;
  const std::string out = dir / "run";
  const ProgramResult r = during(out, "",
                                 formatted("rm {}/metrics.jsonl {}/log.txt {}/.lock; until_steps {}/metrics.jsonl 6; "
                                           "timeout 20 ./train_gpt {} >{}.2 2>&1; kill -TERM $!; wait $!",
                                           out, out, out, out, tiny(out, endless), out));
  INFO(read_whole(out + ".out") << read_whole(out + ".err"));
  REQUIRE(r.status == 75);
  REQUIRE(read_whole(out + ".2").find("another run is writing to it") != std::string::npos);
  require_all_steps(out, last_step(out));
  const std::string log = read_whole(out + "/log.txt");
  for (const char* part : {"documents ", "/.lock was deleted; it is made again", "/metrics.jsonl was deleted"}) {
    INFO(part);
    REQUIRE(log.find(part) != std::string::npos);
  }
}
