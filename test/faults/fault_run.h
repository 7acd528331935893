// fault_run.h: tiny runs in several layouts, as threads and as processes, for tests that disturb them; and what must be
// the same whatever has happened to them.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "run/checkpoints/run_dir.h"
#include "tiny_run.h"

// Where tests of hundreds of runs have their files: in memory, since other programs may keep a disk busy.
inline std::string in_memory() { return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp"; }

// The losses of all steps, and all bytes of the last checkpoint.
inline std::string result_of(const std::string& out) {
  std::string text;
  for (const auto& [step, loss] : losses(out)) text += llmc::formatted("{} {}\n", step, loss);
  const std::string last = llmc::checkpoint_path(out, llmc::checkpoint_steps(out).back());
  REQUIRE_FALSE(llmc::checkpoint_fault(last));
  for (const std::string& name : llmc::names_in(last))
    if (name.ends_with(".safetensors")) text += name + read_whole(last + "/" + name);
  return text;
}

// The environment in which file_ops.so does this to what is under the directory.
inline std::string shim(const TempDir& dir, const std::string& what) {
  return "LD_PRELOAD=build/file_ops.so FILE_OPS_ROOT=" + dir.path() + " " + what;
}

// How the processes of a run have ended.
struct Ended {
  std::vector<int> statuses;
  std::string said;  // on stdout and stderr

  bool all(int status) const {
    return std::all_of(statuses.begin(), statuses.end(), [&](int s) { return s == status; });
  }
  bool good() const { return all(0); }
  // One was killed; the others have lost it, or had ended by then.
  bool killed() const {
    return std::count(statuses.begin(), statuses.end(), 137) == 1 &&
           std::all_of(statuses.begin(), statuses.end(), [](int s) { return s == 137 || s == 3 || s == 0; });
  }
};

struct FaultRun {
  std::string name, options;  // NODE in them: a directory of each process, beside the out directory
  int processes = 1;

  static std::string node(const std::string& out, int process) { return llmc::formatted("{}-node-{}", out, process); }

  // Starts it, and waits for its end. environment: of one of the processes, which `draw` chooses; none: of all
  Ended start(const std::string& out, const std::string& environment, std::optional<uint64_t> draw = 0) const {
    const TempDir dir;
    std::string command;
    for (int p = 0; p < processes; ++p) {
      const std::string own =
          !draw || *draw % static_cast<uint64_t>(processes) == static_cast<uint64_t>(p) ? environment : "";
      const std::string place =
          llmc::formatted(" --rank {} --world-size {} --rendezvous file:{}", p, processes, dir / "meet");
      command += llmc::formatted(
          "(XDG_CACHE_HOME=build/cache CUDA_VISIBLE_DEVICES= {} ./train_gpt {} >{}.out 2>&1 "
          "</dev/null; echo $? >{}.status) 2>{}.shell & ",
          own, tiny(out, for_process(out, p)) + (processes > 1 ? place : ""), dir / std::to_string(p),
          dir / std::to_string(p), dir / std::to_string(p));
    }
    CHECK(std::system((command + "wait").c_str()) == 0, "{}: the shell has failed", name);  // may be on another thread
    Ended ended;
    for (int p = 0; p < processes; ++p) {
      ended.statuses.push_back(std::stoi(read_whole(dir / (std::to_string(p) + ".status"))));
      ended.said += llmc::formatted("process {} ended with {}:\n", p, ended.statuses.back()) +
                    read_whole(dir / (std::to_string(p) + ".out"));
    }
    return ended;
  }
  // What nobody disturbs: its result, and the operations on files of process 0.
  std::pair<std::string, std::vector<std::string>> undisturbed(const TempDir& dir) const {
    const std::string out = dir / "whole", log = dir / "log";
    const Ended ended = start(out, shim(dir, "FILE_OPS_LOG=" + log));
    INFO(name << ": " << ended.said);
    REQUIRE(ended.good());
    const auto operations = file_operations(read_whole(log));
    REQUIRE(operations.size() > 100);
    return {result_of(out), operations};
  }

 private:
  std::string for_process(const std::string& out, int process) const {
    const size_t at = options.find("NODE");
    return at == options.npos ? options : std::string(options).replace(at, 4, node(out, process));
  }
};

// The option that leaves memory for copies of half of a checkpoint, so that it is copied a part at a time.
inline std::string memory_for_a_part(const std::string& options) {
  const auto bytes = [&](const std::string& mode) {
    const ProgramResult r = run_program("--plan --json --checkpoint-mode " + mode + tiny(" none", options));
    INFO(r.err);
    REQUIRE(r.status == 0);
    return nlohmann::json::parse(r.out)["memory_bytes"].get<int64_t>();
  };
  const int64_t without = bytes("sync "), copies = bytes("async ") - without;
  REQUIRE(copies > 2 << 20);
  return llmc::formatted("--memory-limit {:.12f}", static_cast<double>(without + copies / 2) / (1 << 30));
}

// 1, 2 and 4 ranks, as threads and processes, some with local checkpoints; in the last ones a checkpoint is copied a
// part at a time.
inline std::vector<FaultRun> fault_runs() {
  const std::string saves = "--max-steps 12 --checkpoint-every 3 --keep-checkpoints 1 --keep-every 6 ",
                    local = "--checkpoint-local NODE --checkpoint-local-every 2 ";
  return {{"one rank", saves},
          {"one rank, sync", saves + "--checkpoint-mode sync"},
          {"two ranks", saves + "--local-ranks 2 --zero-stage 2"},
          {"four ranks", saves + "--local-ranks 4 --zero-stage 3 --dtype bf16"},
          {"two stages", saves + local + "--pp 2 --n-layer 2 --local-ranks 2"},
          {"two processes", saves + "--zero-stage 1 --init-timeout 10", 2},
          {"four ranks in two processes", saves + local + "--local-ranks 2 --zero-stage 2 --init-timeout 10", 2},
          {"a part at a time", saves + "--n-embd 96 " + memory_for_a_part(saves + "--n-embd 96")}};
}
