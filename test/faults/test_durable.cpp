// Durable runs: exact resume after signals, kills and crashes of the machine at any file operation.
#include <map>
#include <memory>
#include <set>

#include "catch2.h"
#include "core/rng.h"
#include "faults/fault_run.h"
#include "run/checkpoints/run_dir.h"

using namespace llmc;
namespace fs = std::filesystem;

namespace {

// Runs until the run is complete; returns how often it was stopped and saved.
int run_until_done(const std::string& arguments, const std::function<std::string(int)>& prefix) {
  int stopped = 0;
  for (int attempt = 0;; ++attempt) {
    REQUIRE(attempt < 60);
    const ProgramResult r = run_program(arguments, prefix(attempt));
    INFO(r.err);
    if (r.status == 0) return stopped;
    REQUIRE((r.status == 75 || r.status > 128));  // killed by a signal before the first step
    stopped += r.status == 75;
  }
}

}  // namespace

TEST_CASE("a run stopped by signals at arbitrary moments and resumed is bitwise the run that never stopped",
          "[faults][checkpoint]") {
  for (const std::string dtype : {"fp32", "bf16"}) {
    const TempDir dir;
    const std::string options = "--max-steps 200 --model d2 --n-embd 64 --n-head 4 --total-batch-size 1056 --dtype " +
                                dtype + " --checkpoint-every 37 --keep-checkpoints 2 --val-data " + tiny_data +
                                " --val-every 50 --val-steps 3 --sample-every 60 --sample-tokens 5 ";
    run_well(tiny(dir / "whole", options));
    const Philox rng(3, dtype);
    const char* signals[] = {"TERM", "INT", "USR1"};
    const int stopped = run_until_done(tiny(dir / "cut", options), [&](int i) {
      const double seconds = 0.3 + 0.06 * i + 0.5 * rng.uniform(static_cast<uint64_t>(i));
      return formatted("timeout --preserve-status --signal {} {:.3f}", signals[i % 3], seconds);
    });
    INFO(dtype << ", stopped " << stopped << " times");
    REQUIRE(stopped > 0);
    REQUIRE(losses(dir / "whole").size() == 200);
    REQUIRE(losses(dir / "cut") == losses(dir / "whole"));
    REQUIRE(state_of(dir / "cut/step-000200") == state_of(dir / "whole/step-000200"));
    REQUIRE(validations(dir / "whole").size() == 5);
    REQUIRE(validations(dir / "cut") == validations(dir / "whole"));
  }
}

namespace {

// Runs of a layout are killed up to three times each, before operations drawn at random; then they go on to their end.
// Returns how often one was killed.
int kill_everywhere(const FaultRun& run, int runs, uint64_t seed) {
  const TempDir dir(in_memory());
  const auto [whole, operations] = run.undisturbed(dir);
  const Philox rng(seed, "kill -9" + run.name);
  int killed = 0;
  for (int i = 0; i < runs; ++i) {
    const std::string out = formatted("{}/{}", dir.path(), i);
    std::string places;
    for (int attempt = 0;; ++attempt) {
      const uint64_t draw = rng.bits(static_cast<uint64_t>(4 * i + attempt));
      const uint64_t at = 1 + draw % operations.size();
      if (attempt < 3) places += formatted(" {}", at);
      const Ended r = run.start(out, attempt < 3 ? shim(dir, formatted("FILE_OPS_KILL={}", at)) : "", draw >> 32);
      INFO(run.name << ", killed before the operations" << places << ": " << r.said);
      REQUIRE(attempt < 4);
      if (r.good()) break;
      REQUIRE(attempt < 3);
      REQUIRE(r.killed());
      ++killed;
    }
    INFO(run.name << ", killed before the operations" << places);
    REQUIRE(result_of(out) == whole);
    for (const std::string& name : names_in(out)) REQUIRE_FALSE(name.starts_with(".tmp-"));
    fs::remove_all(out);
  }
  return killed;
}

}  // namespace

TEST_CASE("kill -9 in the middle of any file operation loses only the steps since the last checkpoint",
          "[faults][checkpoint]") {
  for (const FaultRun& run : fault_runs()) kill_everywhere(run, run.processes > 1 ? 1 : 3, 1);
}
TEST_CASE("kill -9 at 300 places", "[faults][checkpoint][long]") {
  int killed = 0;
  for (uint64_t seed = 2; killed < 300; ++seed)
    for (const FaultRun& run : fault_runs()) killed += kill_everywhere(run, 5, seed);
  WARN(killed << " kills, none of which changed a result");
}

TEST_CASE("a run that was killed in its last line is complete, and without that line", "[faults][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 3"));
  const std::string metrics = read_whole(dir / "run/metrics.jsonl");
  for (const std::string half : {"{\"kind\":\"checkpoint\",\"step\":3,\"write_s\":0.", "{"}) {
    std::ofstream(dir / "run/metrics.jsonl", std::ios::app) << half;
    REQUIRE(said(tiny(dir / "run", "--max-steps 3")).find("already complete") != std::string::npos);
    REQUIRE(read_whole(dir / "run/metrics.jsonl") == metrics);
  }
}

// ---- Crashes of the machine: unsynced data is lost ------------------------------------------------------------------

namespace {

// A model of a file system that tracks what is on disk and what is only in memory.
class CrashingDisk {
 public:
  explicit CrashingDisk(const std::string& root) : root_(root) {}

  void apply(const std::vector<std::string>& words, const std::string& bytes) {
    const std::string &what = words[0], &path = words[1];
    auto& entries = parent(path).entries;
    const std::string name = fs::path(path).filename();
    if (what == "mkdir") entries.emplace(name, make(true));
    else if (what == "create" || what == "append") {
      if (entries.count(name) == 0) entries[name] = make(false);
      if (what == "create") entries[name]->data.clear();
    } else if (what == "write") entries.at(name)->data += bytes;
    else if (what == "fsync") {
      Node& node = path == root_ ? *top_ : *entries.at(name);
      node.disk_data = node.data;
      node.disk_entries = node.entries;
    } else if (what == "rename") {
      const auto moved = entries.at(name);
      entries.erase(name);
      parent(words[2]).entries[fs::path(words[2]).filename()] = moved;
    } else if (what == "unlink") entries.erase(name);
    else if (what != "close" && what != "begin-fsync") FAIL("unknown operation " << what);
  }

  // The state after a crash. Names and data each either as in memory, or as last synced.
  void materialise(const std::string& to, bool names_in_memory, bool data_in_memory) const {
    fs::remove_all(to);
    write(*top_, to, names_in_memory, data_in_memory);
  }

 private:
  struct Node {
    bool directory;
    std::string data, disk_data;
    std::map<std::string, std::shared_ptr<Node>> entries, disk_entries;
  };
  static std::shared_ptr<Node> make(bool directory) { return std::make_shared<Node>(Node{directory, {}, {}, {}, {}}); }

  Node& parent(const std::string& path) {
    Node* node = top_.get();
    const fs::path inside = fs::path(path).parent_path().lexically_relative(root_);
    if (path != root_ && inside != ".")
      for (const auto& part : inside) node = node->entries.at(part).get();
    return *node;
  }
  static void write(const Node& node, const std::string& to, bool names, bool contents) {
    if (!node.directory) {
      std::ofstream(to, std::ios::binary) << (contents ? node.data : node.disk_data);
      return;
    }
    fs::create_directory(to);
    for (const auto& [name, child] : names ? node.entries : node.disk_entries)
      write(*child, to + "/" + name, names, contents);
  }

  std::string root_;
  std::shared_ptr<Node> top_ = make(true);
};

}  // namespace

TEST_CASE("a crash after any file operation leaves the previous or the new checkpoint intact", "[faults][checkpoint]") {
  const TempDir dir;
  const std::string out = dir / "run";
  fs::create_directory(out);
  const std::string shim = "FILE_OPS_ROOT=" + out + " LD_PRELOAD=build/file_ops.so FILE_OPS_LOG=" + (dir / "log");
  REQUIRE(run_program(tiny(out, "--max-steps 9 --checkpoint-every 3 --keep-checkpoints 1"), shim).status == 0);
  const std::string log = read_whole(dir / "log");

  CrashingDisk disk(out);
  int64_t durable = 0, appearing = 0;  // the last checkpoint on disk, and the last one renamed
  int checked = 0;
  std::set<int64_t> seen;
  for (size_t at = 0; at < log.size();) {
    const size_t end = log.find('\n', at);
    std::vector<std::string> words;
    std::istringstream line(log.substr(at, end - at));
    for (std::string word; line >> word;) words.push_back(word);
    const size_t n = std::stoul(words.back());
    words.pop_back();
    disk.apply(words, log.substr(end + 1, n));
    at = end + 1 + n;
    if (words[0] == "rename")
      if (const auto step = checkpoint_step(words[2])) appearing = *step;
    if (words[0] == "fsync" && words[1] == out) durable = appearing;
    if (words[0] == "write" && words[1].find("metrics") != std::string::npos) continue;  // not written by the saver

    for (const auto& [names, contents] : {std::pair{false, false}, {true, false}, {true, true}}) {
      if (contents && words[0] == "write" && checked % 8 != 0) {
        ++checked;
        continue;
      }  // most change no name
      disk.materialise(dir / "crashed", names, contents);
      const auto found = newest_checkpoint(dir / "crashed", [](const std::string&) {});
      INFO("after " << words[0] << " " << words[1] << (names ? ", names in memory" : "")
                    << (contents ? ", data in memory" : ""));
      const int64_t step = found ? found->step : 0;
      REQUIRE((step == durable || step == appearing));
      seen.insert(step);
      ++checked;
    }
  }
  REQUIRE(seen == std::set<int64_t>{0, 3, 6, 9});
  REQUIRE(checked > 300);
}
