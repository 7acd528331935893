// A network that delays, stalls, cuts and resets connections: a proxy in user space between all processes of a run
// (test/net_ops.cpp, test/scripts/python/proxy.py). Where it is only slow, the run goes on; otherwise all processes end
// with status 3 and the same line, and the same command resumes, bit for bit.
#include <atomic>
#include <cmath>
#include <csignal>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <thread>

#include "catch2.h"
#include "core/rng.h"
#include "faults/fault_run.h"

using namespace llmc;
namespace fs = std::filesystem;

namespace {

class Proxy {
 public:
  Proxy(const TempDir& dir, const std::string& fault, uint64_t after, uint64_t seed) {
    const std::string port_file = dir / "port";
    fs::remove(port_file);
    const std::string after_text = std::to_string(after), seed_text = std::to_string(seed);
    process_ = ::fork();
    if (process_ == 0) {
      ::execlp("python3", "python3", "test/scripts/python/proxy.py", port_file.c_str(), fault.c_str(),
               after_text.c_str(), seed_text.c_str(), nullptr);
      ::_exit(127);
    }
    for (int i = 0; i < 1000 && (!fs::exists(port_file) || fs::file_size(port_file) == 0); ++i) ::usleep(10000);
    std::ifstream(port_file) >> port_;
    CHECK(port_ > 0, "the proxy has not started");
  }
  ~Proxy() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;
  std::string environment() const { return formatted("LD_PRELOAD=build/net_ops.so NET_OPS_PROXY={}", port_); }

 private:
  pid_t process_ = -1;
  int port_ = 0;
};

std::set<std::string> errors_in(const std::string& said) {
  std::set<std::string> lines;
  std::istringstream in(said);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("train_gpt: ")) lines.insert(line);
  return lines;
}

const char* const slow_faults[] = {"delay", "flap", "trickle"};
const char* const cuts[] = {"stall", "stall-all", "reset", "close", "half", "late"};

// The run where nothing may end it, on a busy machine either.
FaultRun patient(FaultRun run, int seconds = 60) {
  run.options += formatted(" --comm-timeout {} --init-timeout {}", seconds, seconds);
  return run;
}

// A run and one disturbance of it.
struct Disturbed {
  const FaultRun& run;
  std::string whole;  // its result
  std::string fault;
  uint64_t seed;
  bool slow() const { return std::ranges::find(slow_faults, fault) != std::end(slow_faults); }
  // Until the processes have met some thousand bytes pass, in a whole run some hundred thousand.
  uint64_t after() const {
    return slow() ? 0 : static_cast<uint64_t>(500 * std::pow(400, Philox(seed, "network " + fault).uniform(1)));
  }

  std::unique_ptr<TempDir> dir = std::make_unique<TempDir>(in_memory());
  std::string out() const { return *dir / "run"; }
  Ended ended = {}, resumed = {};

  void start() {
    const Proxy proxy(*dir, fault, after(), seed);
    ended = (slow() ? patient(run, 10) : run).start(out(), proxy.environment(), {});
  }
  void resume() {
    if (!ended.good()) resumed = patient(run).start(out(), "");
  }
  void require_answer() const {
    INFO(run.name << ", " << fault << " after " << after() << " bytes: " << ended.said);
    if (slow()) REQUIRE(ended.good());
    if (!ended.good()) {
      REQUIRE(ended.all(3));
      const bool begun = ended.said.find(" 1/30 ") != ended.said.npos;
      if (begun) REQUIRE(errors_in(ended.said).size() == 1);
      INFO("started again: " << resumed.said);
      REQUIRE(resumed.good());
    }
    REQUIRE(result_of(out()) == whole);
  }
};

// Four at a time, since they wait most of the time.
void require_answers(std::vector<Disturbed>& all) {
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < all.size(); i = next++) all[i].start(), all[i].resume();
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  for (const Disturbed& disturbed : all) disturbed.require_answer();
}

std::vector<FaultRun> runs_of_processes() {
  const std::string options =
      "--max-steps 30 --checkpoint-every 5 --keep-checkpoints 2 --comm tcp --comm-timeout 1 --init-timeout 2 ";
  return {{"two processes", options + "--zero-stage 2", 2},
          {"four ranks in two processes", options + "--local-ranks 2 --zero-stage 1", 2},
          {"four processes", options + "--zero-stage 3", 4},
          {"two stages", options + "--pp 2 --n-layer 2", 2}};
}

std::string whole_run(const FaultRun& run) {
  const TempDir dir(in_memory());
  const Ended r = patient(run).start(dir / "whole", "");
  INFO(run.name << ": " << r.said);
  REQUIRE(r.good());
  return result_of(dir / "whole");
}

}  // namespace

TEST_CASE("a run on a slow network goes on, and one whose connections are cut ends everywhere and resumes",
          "[faults][net][failures]") {
  const FaultRun run = runs_of_processes()[0];
  const std::string whole = whole_run(run);
  std::vector<Disturbed> all;
  for (const char* const fault : {"delay", "stall", "reset"}) all.push_back({run, whole, fault, 2});
  require_answers(all);
}
TEST_CASE("sixty faults of the network", "[faults][net][failures][long]") {
  const std::vector<FaultRun> runs = runs_of_processes();
  std::vector<Disturbed> all;
  for (const FaultRun& run : runs) {
    const std::string whole = whole_run(run);
    for (const char* const fault : slow_faults) all.push_back({run, whole, fault, 1});
    for (uint64_t seed = 1; seed <= 2; ++seed)
      for (const char* const fault : cuts) all.push_back({run, whole, fault, seed});
  }
  require_answers(all);
  WARN(all.size() << " faults of the network, none of which changed a result");
}
