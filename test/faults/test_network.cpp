// A network that delays, stalls, cuts and resets connections: a proxy in user space between all processes of a run
// (test/net_ops.cpp, test/scripts/python/proxy.py). Where it is only slow, the run goes on; otherwise all processes end
// with status 3 and the same line, and the same command resumes, bit for bit.
#include <cmath>
#include <csignal>
#include <fstream>
#include <set>
#include <sstream>

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
    REQUIRE(port_ > 0);
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

void disturb(const FaultRun& run, const std::string& whole, const std::string& fault, uint64_t seed, bool slow) {
  const TempDir dir(in_memory());
  const Philox rng(seed, "network");
  // Until the processes have met some thousand bytes pass, in a whole run some hundred thousand.
  const double share = rng.uniform(1);
  const auto after = static_cast<uint64_t>(slow ? 0 : 500 * std::pow(400, share));
  Ended r;
  {
    const Proxy proxy(dir, fault, after, seed);
    r = run.start(dir / "run", proxy.environment(), {});
  }
  INFO(run.name << ", " << fault << " after " << after << " bytes: " << r.said);
  if (slow) REQUIRE(r.good());
  if (!r.good()) {
    REQUIRE(r.all(3));
    const bool begun = fs::exists(dir / "run/metrics.jsonl") && !losses(dir / "run").empty();
    if (begun) REQUIRE(errors_in(r.said).size() == 1);
    const Ended resumed = run.start(dir / "run", "");
    INFO("started again: " << resumed.said);
    REQUIRE(resumed.good());
  }
  REQUIRE(result_of(dir / "run") == whole);
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
  const Ended r = run.start(dir / "whole", "");
  INFO(run.name << ": " << r.said);
  REQUIRE(r.good());
  return result_of(dir / "whole");
}

}  // namespace

TEST_CASE("a run on a slow network goes on, and one whose connections are cut ends everywhere and resumes",
          "[faults][net][failures]") {
  const FaultRun run = runs_of_processes()[0];
  const std::string whole = whole_run(run);
  disturb(run, whole, "delay", 1, true);
  for (const char* const fault : {"stall", "reset"}) disturb(run, whole, fault, 2, false);
}
TEST_CASE("sixty faults of the network", "[faults][net][failures][long]") {
  const std::vector<FaultRun> runs = runs_of_processes();
  int faults = 0;
  for (const FaultRun& run : runs) {
    const std::string whole = whole_run(run);
    for (const char* const fault : slow_faults) disturb(run, whole, fault, 1, true), ++faults;
    for (uint64_t seed = 1; seed <= 2; ++seed)
      for (const char* const fault : cuts) disturb(run, whole, fault, seed, false), ++faults;
  }
  WARN(faults << " faults of the network, none of which changed a result");
}
