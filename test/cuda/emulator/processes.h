// processes.h: runs hidden test cases of this program as processes that each have an emulated GPU of one machine, or
// several.
#pragma once
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "core/clock.h"
#include "cuda/emulator/emulator_ranks.h"
#include "helpers.h"

namespace llmc {

// In such a process: which one it is.
inline std::string told(const char* name) {
  const char* const value = std::getenv(name);
  REQUIRE(value != nullptr);
  return value;
}
inline int this_process() { return std::stoi(told("TEST_PROCESS")); }
inline ncclUniqueId told_id() {
  ncclUniqueId id{};
  std::strncpy(id.internal, told("TEST_NCCL_ID").c_str(), sizeof id.internal - 1);
  return id;
}
inline std::string told_file(const std::string& name) { return told("TEST_DIR") + "/" + name; }

// What does not wait for anything takes less, even on a busy machine; what waits for a peer would take 10 s or more.
inline constexpr double prompt = 8;

// Waits until f() is true, for 10 seconds at most.
template <class F>
bool eventually(F&& f) {
  const auto begin = Clock::now();
  while (!f()) {
    if (seconds_since(begin) > 10) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Starts `count` processes, which run this hidden test case. gpus: those that each process sees; when:
// told("TEST_WHEN").
class Processes {
 public:
  Processes(const std::string& test_case, int count, const std::vector<std::string>& gpus = {},
            const std::string& when = "") {
    NCCL_OK(ncclGetUniqueId(&id_));
    const std::string program = std::filesystem::read_symlink("/proc/self/exe");
    for (int p = 0; p < count; ++p) {
      const std::string seen = gpus.empty() ? std::to_string(p) : gpus[static_cast<size_t>(p)];
      std::vector<std::string> set = {"TEST_PROCESS=" + std::to_string(p),
                                      std::string("TEST_NCCL_ID=") + id_.internal,
                                      "TEST_DIR=" + dir_.path(),
                                      "TEST_WHEN=" + when,
                                      "EMULATED_GPUS=8",
                                      "CUDA_VISIBLE_DEVICES=" + seen};
      std::vector<char*> environment, arguments;
      for (char** each = environ; *each != nullptr; ++each) environment.push_back(*each);
      for (std::string& each : set) environment.push_back(each.data());
      environment.push_back(nullptr);
      std::vector<std::string> command = {program, test_case};
      for (std::string& each : command) arguments.push_back(each.data());
      arguments.push_back(nullptr);
      posix_spawn_file_actions_t files;
      posix_spawn_file_actions_init(&files);
      posix_spawn_file_actions_addopen(&files, 1, output_file(p).c_str(), O_WRONLY | O_CREAT, 0600);
      posix_spawn_file_actions_adddup2(&files, 1, 2);
      pid_t id = -1;
      REQUIRE(posix_spawn(&id, program.c_str(), &files, nullptr, arguments.data(), environment.data()) == 0);
      posix_spawn_file_actions_destroy(&files);
      ids_.push_back(id);
    }
  }
  ~Processes() {
    for (const pid_t id : ids_)
      if (id > 0) ::kill(id, SIGKILL), waitpid(id, nullptr, 0);
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  const TempDir& dir() const { return dir_; }
  std::string output(int p) const { return read_file(output_file(p)); }
  // "passed", "failed", or "killed"; then the process is gone.
  std::string end_of(int p) {
    int status = 0;
    waitpid(std::exchange(ids_[static_cast<size_t>(p)], -1), &status, 0);
    return WIFSIGNALED(status) ? "killed" : WEXITSTATUS(status) == 0 ? "passed" : "failed";
  }
  void require_all_passed() {
    for (size_t p = 0; p < ids_.size(); ++p) {
      const std::string end = end_of(static_cast<int>(p));
      INFO("process " << p << ": " << output(static_cast<int>(p)));
      REQUIRE(end == "passed");
    }
  }

 private:
  std::string output_file(int p) const { return dir_ / ("output." + std::to_string(p)); }
  static std::string read_file(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  TempDir dir_;
  ncclUniqueId id_;
  std::vector<pid_t> ids_;
};

}  // namespace llmc
