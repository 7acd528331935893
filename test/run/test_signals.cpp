// Stop requests: signals, single and repeated, and the time limit.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "catch2.h"
#include "core/signals.h"
#include "helpers.h"
#include "run/checkpoints/run_dir.h"

using namespace llmc;

namespace {

std::string tiny(const std::string& out, const std::string& more) {
  return "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --train-data test/golden/gpt2_tiny/train.bin --seq-len 33 "
         "--batch-size 2 --threads 1 --out-dir " +
         out + " " + more;
}

// SIGHUP as it is without nohup, also for the processes that begin meanwhile.
class NoNohup {
 public:
  NoNohup() : before_(std::signal(SIGHUP, SIG_DFL)) {}
  ~NoNohup() { std::signal(SIGHUP, before_); }
  NoNohup(const NoNohup&) = delete;
  NoNohup& operator=(const NoNohup&) = delete;

 private:
  void (*before_)(int);
};

// A process that only records stop signals, and says so.
class Sleeper {
 public:
  Sleeper() {
    REQUIRE(pipe(said_) == 0);
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      note_stop_signals(Says::nothing);
      sigset_t all, none;
      sigfillset(&all), sigemptyset(&none);
      sigprocmask(SIG_BLOCK, &all, nullptr);  // but where it waits
      do {
        if (write(said_[1], "x", 1) != 1) _exit(1);
      } while (sigsuspend(&none) != 0);
    }
    close(said_[1]);
    hear();
  }
  ~Sleeper() {
    close(said_[0]);
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  // Waits until it is ready, or has recorded a signal.
  void hear() const {
    char x;
    REQUIRE(read(said_[0], &x, 1) == 1);
  }
  void send(int signal) const { REQUIRE(kill(pid_, signal) == 0); }
  bool alive() const { return waitpid(pid_, nullptr, WNOHANG) == 0; }
  // The signal that kills it.
  int ended_by() {
    int status = 0;
    REQUIRE(waitpid(std::exchange(pid_, 0), &status, 0) > 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  }

 private:
  int said_[2];
  pid_t pid_;
};

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

}  // namespace

TEST_CASE("signals that repeat the first within a second are one stop request; of later ones Ctrl-C ends the process",
          "[run][failures]") {
  const NoNohup none;
  for (const int again : {SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGHUP}) {
    Sleeper sleeper;
    const auto begin = std::chrono::steady_clock::now();
    sleeper.send(SIGINT);
    sleeper.hear();
    const auto first = std::chrono::steady_clock::now();
    for (int i = 0; i < 4; ++i) {
      sleep_ms(50);
      sleeper.send(i % 2 == 0 ? SIGINT : again);
    }
    sleep_ms(50);
    if (std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(800)) {
      WARN("this machine is too busy to repeat a signal within a second");
      continue;
    }
    REQUIRE(sleeper.alive());
    std::this_thread::sleep_until(first + std::chrono::milliseconds(1100));
    if (again != SIGINT) sleeper.send(again);
    sleep_ms(50);
    REQUIRE(sleeper.alive());
    sleeper.send(SIGINT);
    REQUIRE(sleeper.ended_by() == SIGINT);
  }
}

TEST_CASE("a Ctrl-C that is delivered twice saves the run", "[run][failures]") {
  const TempDir dir;
  const ProgramResult r = run_program(
      tiny(dir / "run", "--max-steps 100000000 >/dev/null 2>&1 & while [ ! -s " + (dir / "run/metrics.jsonl") +
                            " ]; do sleep 0.05; done; kill -INT $!; kill -INT $!; kill -TERM $!; wait $!"));
  REQUIRE(r.status == 75);
  REQUIRE(newest_checkpoint(dir / "run", [](const std::string& w) { FAIL(w); }));
}

TEST_CASE("every signal that asks for a stop saves the run", "[run][failures]") {
  const NoNohup none;
  for (const StopSignal& signal : stop_signals) {
    const TempDir dir;
    const ProgramResult r = run_program(
        tiny(dir / "run", formatted("--max-steps 100000000 >/dev/null 2>{} & while [ ! -s {} ]; do sleep 0.05; done; "
                                    "kill -{} $!; wait $!",
                                    dir / "said", dir / "run/metrics.jsonl", signal.name + 3)));
    INFO(signal.name);
    REQUIRE(r.status == 75);
    REQUIRE(read_whole(dir / "said").find(std::string("stopped by ") + signal.name) != std::string::npos);
    REQUIRE(newest_checkpoint(dir / "run", [](const std::string& w) { FAIL(w); }));
  }
}

TEST_CASE("only after a batch system's signal is a start without an update said to come again", "[run][failures]") {
  for (const StopSignal& signal : stop_signals) {
    if (signal.number != SIGINT && signal.number != SIGTERM) continue;
    const TempDir dir;
    const ProgramResult r =
        run_program(tiny(dir / "run", formatted("--max-steps 1 --total-batch-size 660000 >/dev/null 2>{} & "
                                                "while [ ! -s {} ]; do sleep 0.05; done; kill -{} $!; wait $!",
                                                dir / "said", dir / "run/log.txt", signal.name + 3)));
    const std::string said = read_whole(dir / "said");
    INFO(said);
    REQUIRE(r.status == 75);
    REQUIRE(said.starts_with(
        formatted("train_gpt: {}: ending after what is under way; SIGINT after a second ends at once\n", signal.name)));
    REQUIRE(said.find(formatted("stopped by {} after step 0 of 1", signal.name)) != std::string::npos);
    REQUIRE((said.find("this start completed no update") != std::string::npos) == (signal.number == SIGTERM));
  }
  REQUIRE(comes_again("--time-limit 1 minutes"));
  REQUIRE(!comes_again("SIGHUP"));
}

TEST_CASE("a signal that was blocked when the process began saves the run, too", "[run][failures]") {
  const TempDir dir;
  const ProgramResult r = run_program(
      tiny(dir / "run",
           formatted(
               "--max-steps 100000000 >/dev/null 2>&1 & run=$!; while [ ! -s {} ]; do sleep 0.05; "
               "done; kill -TERM $run; (sleep 100; kill -KILL $run) & guard=$!; wait $run; s=$?; kill $guard; exit $s",
               dir / "run/metrics.jsonl")),
      "env --block-signal=TERM");
  REQUIRE(r.status == 75);
  REQUIRE(newest_checkpoint(dir / "run", [](const std::string& w) { FAIL(w); }));
}

TEST_CASE("a signal that came while it was blocked, before the process began, ends a run like one that comes later",
          "[run][failures]") {
  const TempDir dir;
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 1"),
                                      "env --block-signal=TERM bash -c 'kill -TERM $$; exec \"$@\"' bash");
  INFO(r.err);
  REQUIRE(r.status == 75);
  REQUIRE(r.err.find("stopped by SIGTERM after step 0 of 1") != std::string::npos);
}

TEST_CASE("a reader of stdout and stderr that stops reading stops neither the run nor its saving nor its end",
          "[run][failures]") {
  for (const bool goes_on : {false, true}) {  // or reads on only when the run has ended
    const TempDir dir;
    const std::string pipe = dir / "pipe", out = dir / "run", read = dir / "read", shown = dir / "shown";
    const std::string reader = formatted(
        "true; (exec 3<{}; until [ -e {} ]; do sleep 0.05; done; exec cat <&3 >{}) & reader=$!; ", pipe, read, shown);
    const std::string reads = formatted(": >{}; ", read), stop = "kill -TERM $run; ",
                      sees = formatted("until grep -q 'not read in time' {}; do sleep 0.05; done; ", shown),
                      end = "(sleep 60; exec kill -KILL $run) >/dev/null & guard=$!; wait $run; s=$?; kill $guard; ";
    REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
    // The pipe holds 64 KiB, 800 lines.
    const ProgramResult r = run_program(
        tiny(out, formatted("--max-steps 100000000 >{} 2>&1 & run=$!; while [ ! -s {}/metrics.jsonl ]; do sleep 0.05; "
                            "done; while [ $(wc -l <{}/metrics.jsonl) -lt 2000 ]; do sleep 0.05; done; {} "
                            "wait $reader; exit $s",
                            pipe, out, out, goes_on ? reads + sees + stop + end : stop + end + reads)),
        reader + "XDG_CACHE_HOME=build/cache");
    REQUIRE(r.status == 75);
    REQUIRE(newest_checkpoint(out, [](const std::string& w) { FAIL(w); }));
    REQUIRE(read_whole(out + "/log.txt").find("stopped by SIGTERM") != std::string::npos);
    REQUIRE((read_whole(shown).find("stopped by SIGTERM") != std::string::npos) == goes_on);
  }
}

TEST_CASE("threads are not bound to one processor, whatever OpenMP is told", "[run]") {
  for (const std::string prefix :
       {"OMP_PLACES=cores", "OMP_PROC_BIND=true OMP_WAIT_POLICY=passive", "GOMP_CPU_AFFINITY=0"}) {
    const TempDir dir;
    const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 1"), prefix);
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    REQUIRE(r.out.find(prefix.substr(0, prefix.find('=')) + " is left out: ") != std::string::npos);
  }
  for (const auto& [prefix, said] : {std::pair{"GOMP_CPU_AFFINITY=0 OMP_PLACES=cores OMP_PROC_BIND=close",
                                               "OMP_PROC_BIND, OMP_PLACES and GOMP_CPU_AFFINITY are left out: "},
                                     {"OMP_PROC_BIND=false", nullptr}}) {
    const TempDir dir;
    const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 1"), prefix);
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    REQUIRE((r.out.find(said == nullptr ? "left out" : said) == r.out.npos) == (said == nullptr));
  }
}

TEST_CASE("nohup's SIGHUP is left alone", "[run][failures]") {
  const TempDir dir;
  // Also if a library takes the signal, in the process that begins, and in the one that it becomes without a policy.
  const std::string taken = "env LD_PRELOAD=build/file_ops.so FILE_OPS_HANGUP=1 ";
  for (const std::string& prefix :
       {std::string("nohup"), "nohup " + taken, "nohup env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT " + taken.substr(4)}) {
    INFO(prefix);
    std::filesystem::remove_all(dir / "run");
    const ProgramResult r = run_program(
        tiny(dir / "run", formatted("--max-steps 100000000 >/dev/null 2>{} & while [ ! -s {} ]; do sleep 0.05; done; "
                                    "kill -HUP $!; sleep 0.3; kill -TERM $!; wait $!",
                                    dir / "said", dir / "run/metrics.jsonl")),
        prefix);
    REQUIRE(r.status == 75);
    REQUIRE(read_whole(dir / "said").find("stopped by SIGTERM") != std::string::npos);
  }
}

TEST_CASE("a run whose directory is removed meanwhile saves nevertheless, and can be resumed", "[run][failures]") {
  const TempDir dir;
  const ProgramResult r = run_program(
      tiny(dir / "run", formatted("--max-steps 100000000 >/dev/null 2>&1 & while [ ! -s {} ]; do sleep 0.05; done; "
                                  "rm -rf {}; kill -TERM $!; wait $!",
                                  dir / "run/metrics.jsonl", dir / "run")));
  REQUIRE(r.status == 75);
  const ProgramResult again = run_program(tiny(dir / "run", "--max-steps 1"));
  INFO(again.err);
  REQUIRE(again.status == 0);
  REQUIRE(again.out.find("already complete") != std::string::npos);
}

TEST_CASE("the time limit counts from the start of the process and leaves time for a save", "[run][failures]") {
  const auto ago = [](int seconds) { return Clock::now() - std::chrono::seconds(seconds); };
  REQUIRE(StopCondition(std::nullopt, ago(100000), 1e9).reason().empty());
  REQUIRE(StopCondition(1.0, ago(50), 0).reason().empty());
  REQUIRE(StopCondition(1.0, ago(61), 0).reason() == "--time-limit 1 minutes");
  // A save estimated at 20 seconds is given 30.
  REQUIRE(StopCondition(2.0, ago(85), 20).reason().empty());
  REQUIRE_FALSE(StopCondition(2.0, ago(91), 20).reason().empty());
  // However slow the estimated save, half of the time is for training; a measured save counts in full.
  StopCondition slow(2.0, ago(55), 1e6);
  REQUIRE(slow.reason().empty());
  slow.saves_take(50);
  REQUIRE_FALSE(slow.reason().empty());
  slow.saves_take(1);
  REQUIRE(slow.reason().empty());
}

TEST_CASE("--time-limit saves and exits with 75; the next start resumes", "[run][failures]") {
  const TempDir dir;
  const std::string options = "--max-steps 100000000 --checkpoint-every 7 --time-limit 0.05 ";  // 3 s
  std::optional<ResumePoint> last;
  for (int start = 0; start < 2; ++start) {
    const ProgramResult r = run_program(tiny(dir / "run", options));
    INFO(r.err);
    REQUIRE(r.status == 75);
    REQUIRE(r.err.find("--time-limit 0.05 minutes") != std::string::npos);
    const auto now = newest_checkpoint(dir / "run", [](const std::string& w) { FAIL(w); });
    REQUIRE(now);
    REQUIRE(now->step > (last ? last->step : 7));
    REQUIRE(std::filesystem::exists(checkpoint_path(dir / "run", 7)));  // periodic checkpoints are kept
    last = now;
  }
}

TEST_CASE("a start that uses up --time-limit does not train", "[run][failures]") {
  const TempDir dir;
  const ProgramResult r =
      run_program(tiny(dir / "run", "--max-steps 1000 --time-limit 0.02"),
                  "FILE_OPS_ROOT=" + dir.path() + " FILE_OPS_SLEEP=1.5 LD_PRELOAD=build/file_ops.so");
  INFO(r.err);
  REQUIRE(r.status == 75);
  REQUIRE(r.err.find("after step 0 of 1000") != std::string::npos);
}
