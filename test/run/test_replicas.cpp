// A bit that flips in the memory of one of two data-parallel ranks of a run.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "catch2.h"
#include "core/environment.h"
#include "core/files.h"
#include "core/json.h"
#include "run/checkpoints/run_dir.h"
#include "tiny_run.h"

using namespace llmc;

namespace {

// A run that goes on by itself, and whose memory can be changed.
class Running {
 public:
  Running(const std::string& arguments, std::string log) : log_(std::move(log)), pid_(fork()) {
    const std::string command = "exec ./train_gpt " + arguments + " > " + log_ + " 2>&1";
    if (pid_ == 0) execl("/bin/sh", "sh", "-c", command.c_str(), nullptr), _exit(127);
    REQUIRE(pid_ > 0);
  }
  ~Running() {
    if (ended()) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  bool ended() { return ended_ || (ended_ = waitpid(pid_, &status_, WNOHANG) == pid_); }
  int exit_status() const { return WIFEXITED(status_) ? WEXITSTATUS(status_) : -1; }
  std::string log() const { return read_whole(log_); }

  // Where these bytes are in its writable memory.
  std::vector<uint64_t> find(const std::string& bytes) const {
    std::vector<uint64_t> places;
    std::ifstream maps(formatted("/proc/{}/maps", pid_));
    const int memory = open(formatted("/proc/{}/mem", pid_).c_str(), O_RDONLY);
    for (std::string line; std::getline(maps, line);) {
      unsigned long long begin = 0, end = 0;
      char rights[5] = {};
      if (std::sscanf(line.c_str(), "%llx-%llx %4s", &begin, &end, rights) != 3 || rights[1] != 'w') continue;
      std::string contents(end - begin, '\0');
      const ssize_t n = pread(memory, contents.data(), contents.size(), static_cast<off_t>(begin));
      if (n <= 0) continue;
      for (size_t at = 0; (at = contents.find(bytes, at)) != std::string::npos; at += bytes.size())
        places.push_back(begin + at);
    }
    close(memory);
    return places;
  }
  void flip_bit(uint64_t place) const {
    const int memory = open(formatted("/proc/{}/mem", pid_).c_str(), O_RDWR);
    char byte = 0;
    if (pread(memory, &byte, 1, static_cast<off_t>(place)) == 1) {
      byte ^= 1;
      const ssize_t written = pwrite(memory, &byte, 1, static_cast<off_t>(place));
      (void)written;  // the run may have ended
    }
    close(memory);
  }

 private:
  std::string log_;
  pid_t pid_;
  bool ended_ = false;
  int status_ = 0;
};

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Rows in the middle of the table of tokens.
std::string weights_in(const std::string& checkpoint) {
  const std::string name = "transformer.wte.weight";
  const auto files = read_json(checkpoint + "/model.safetensors.index.json").at("weight_map");
  const std::string model = read_whole(checkpoint + "/" + files.at(name).get<std::string>());
  REQUIRE(model.size() > 8);
  uint64_t header = 0;
  std::memcpy(&header, model.data(), sizeof header);
  const auto offsets = parse_json(model.substr(8, header), "header").at(name).at("data_offsets");
  return model.substr(8 + header + offsets[0].get<size_t>() + 480, 480);
}

size_t steps_done(const std::string& out) {
  const std::string lines = read_whole(out + "/metrics.jsonl");
  size_t steps = 0;
  for (size_t at = 0; (at = lines.find(R"("kind":"train")", at)) != std::string::npos; ++at) ++steps;
  return steps;
}

// Flips a bit of each place with these bytes in turn, until the run ends; others are as they were after 120 more steps.
void flip_until_it_ends(Running& run, const std::string& out, const std::string& bytes) {
  const std::vector<uint64_t> places = run.find(bytes);
  REQUIRE(places.size() >= 2);  // of two ranks; and where a checkpoint was written from
  for (const uint64_t place : places) {
    run.flip_bit(place);
    const size_t before = steps_done(out);
    for (int i = 0; i < 3000 && !run.ended() && steps_done(out) < before + 120; ++i) sleep_ms(20);
    if (run.ended()) break;
    run.flip_bit(place);  // that was no weight
  }
  INFO(run.log());
  REQUIRE(run.ended());
  REQUIRE(run.exit_status() == 2);
  for (const int rank : {0, 1})
    REQUIRE(run.log().find(formatted("rank {} on {} has ", rank, host_name())) != std::string::npos);
}

// Two ranks, whose weights do not change.
std::string constant(const std::string& out, const std::string& options) {
  return tiny(out, "--local-ranks 2 --lr 1e-30 --max-steps " + options);
}

}  // namespace

TEST_CASE("a bit that flips in a weight of one of two ranks ends the run at the next checkpoint, with status 2",
          "[run][replicas]") {
  const TempDir dir;
  const std::string out = dir / "run";
  Running run(constant(out, "1000000 --checkpoint-every 40"), dir / "log");
  for (int i = 0; i < 600 && checkpoint_steps(out).empty() && !run.ended(); ++i) sleep_ms(50);
  INFO(run.log());
  REQUIRE(!checkpoint_steps(out).empty());
  flip_until_it_ends(run, out, weights_in(checkpoint_path(out, checkpoint_steps(out).front())));
  const int64_t last = checkpoint_steps(out).back();
  REQUIRE(run.log().find(formatted("the replicas have diverged by step {}: wte.weight of unit embedding: rank ",
                                   last + 40)) != std::string::npos);
  REQUIRE(run.log().find("the last good one is " + checkpoint_path(out, last)) != std::string::npos);
}

TEST_CASE("--check-replicas finds a flipped bit between checkpoints, and so does --verify-updates, a unit at a time",
          "[run][replicas]") {
  const TempDir dir;
  run_well(constant(dir / "one", "1"));
  for (const std::string option : {"--check-replicas 40", "--verify-updates 20"}) {
    const std::string out = dir / option.substr(2, 6);
    Running run(constant(out, "1000000 " + option), dir / "log");
    for (int i = 0; i < 600 && steps_done(out) < 1 && !run.ended(); ++i) sleep_ms(50);
    flip_until_it_ends(run, out, weights_in(checkpoint_path(dir / "one", 1)));
    const size_t steps = steps_done(out);
    if (option.starts_with("--check")) REQUIRE(steps % 40 == 0);
    else REQUIRE(steps % 60 == 0);  // three units: the embedding, a block, the head
    REQUIRE(run.log().find(formatted("the replicas have diverged by step {}: wte.weight", steps)) != std::string::npos);
    REQUIRE(run.log().find("there is none to go back to") != std::string::npos);
  }
  const std::string why = "every update is made by one rank alone, and nobody can compare it: use ";
  refused(tiny(dir / "no", "--verify-updates 5"), why + "more data-parallel ranks, or leave it out");
  refused(tiny(dir / "no", "--verify-updates 5 --local-ranks 2 --zero-stage 1"), why + "--dp-replicate 2, or");
  refused(tiny(dir / "no", "--verify-updates 5 --local-ranks 3 --zero-stage 1"), why + "--dp-replicate 3, or");
  refused(tiny(dir / "no", "--verify-updates 5 --local-ranks 2 --optimizer muon"),
          "--verify-updates 5 with --optimizer muon: one rank makes the update");
}
