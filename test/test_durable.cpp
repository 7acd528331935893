// A run is durable: exact resume after signals, kills and crashes at any file operation; damaged checkpoints, full and
// read-only disks, locks; numbers that are not finite, and outliers.
#include <fcntl.h>
#include <sys/file.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "catch2.h"
#include "core/rng.h"
#include "core/safetensors.h"
#include "helpers.h"
#include "train/detector.h"
#include "train/run_dir.h"

using namespace llmc;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

const std::string data = "test/golden/gpt2_tiny/train.bin";

// A tiny model, accumulation, shuffling; epochs end in the middle of steps.
std::string tiny(const std::string& out, const std::string& more) {
  return "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --train-data " + data +
         " --seq-len 33 --batch-size 2 --total-batch-size 264 --shuffle --lr 1e-2 --threads 1 --out-dir " + out + " " +
         more;
}

std::map<int64_t, double> losses(const std::string& out) {
  std::map<int64_t, double> found;
  std::ifstream in(out + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);) {
    const json object = json::parse(line);
    if (object["kind"] != "train") continue;
    REQUIRE(found.emplace(object["step"], object["loss"]).second);  // each step once
  }
  return found;
}

// The bytes of everything that a checkpoint says about the state.
std::string state_of(const std::string& checkpoint) {
  REQUIRE_FALSE(checkpoint_fault(checkpoint));
  return read_whole(checkpoint + "/model.safetensors") +
         read_whole(checkpoint + "/optimizer-00001-of-00001.safetensors");
}

void run_well(const std::string& arguments) {
  const ProgramResult r = run_program(arguments);
  INFO(r.err);
  REQUIRE(r.status == 0);
}

void flip_byte(const std::string& file, int64_t at) {
  std::fstream f(file, std::ios::binary | std::ios::in | std::ios::out);
  f.seekg(at);
  const char byte = static_cast<char>(f.get() ^ 1);
  f.seekp(at).put(byte);
}

// A directory under which something is mounted, until the end of the scope; tests may run as root, or be passed over.
struct Mount {
  std::string path;
  bool there;
  Mount(const std::string& at, const std::string& how) : path(at) {
    fs::create_directories(at);
    there = std::system(("mount " + how + " " + at + " 2>/dev/null").c_str()) == 0;
    if (!there) WARN("passed over: this process may not mount");
  }
  ~Mount() {
    if (there) REQUIRE(std::system(("umount -l " + path).c_str()) == 0);
  }
};

// Runs until it is done, whatever stops it; returns how often it was stopped by saving.
int run_until_done(const std::string& arguments, const std::function<std::string(int)>& prefix) {
  int stopped = 0;
  for (int attempt = 0;; ++attempt) {
    REQUIRE(attempt < 60);
    const ProgramResult r = run_program(arguments, prefix(attempt));
    INFO(r.err);
    if (r.status == 0) return stopped;
    REQUIRE((r.status == 75 || r.status > 128));  // by a signal, before the first step
    stopped += r.status == 75;
  }
}

}  // namespace

TEST_CASE("a run stopped by signals at arbitrary moments and resumed is bitwise the run that never stopped") {
  for (const std::string dtype : {"fp32", "bf16"}) {
    const TempDir dir;
    const std::string options = "--max-steps 200 --model d2 --n-embd 64 --n-head 4 --total-batch-size 1056 --dtype " +
                                dtype + " --checkpoint-every 37 --keep-checkpoints 2 --val-data " + data +
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
    // Validations too, each once.
    auto validations = [](const std::string& out) {
      std::vector<std::string> lines;
      std::ifstream in(out + "/metrics.jsonl");
      for (std::string line; std::getline(in, line);)
        if (line.find("\"val\"") != std::string::npos) lines.push_back(line);
      return lines;
    };
    REQUIRE(validations(dir / "whole").size() == 5);
    REQUIRE(validations(dir / "cut") == validations(dir / "whole"));
  }
}

namespace {

void kill_everywhere(int kills, uint64_t seed) {
  const TempDir dir;
  const std::string options = "--max-steps 12 --checkpoint-every 3 --keep-checkpoints 1 --keep-every 6 ";
  const std::string shim = "FILE_OPS_ROOT=" + dir.path() + " LD_PRELOAD=build/file_ops.so ";
  REQUIRE(run_program(tiny(dir / "whole", options), shim + "FILE_OPS_LOG=" + (dir / "log")).status == 0);
  int64_t operations = 0;
  const std::string log = read_whole(dir / "log");
  for (size_t at = 0; at < log.size();) {  // "WORDS BYTES\n", then so many bytes
    const size_t end = log.find('\n', at), space = log.rfind(' ', end);
    at = end + 1 + std::stoul(log.substr(space + 1, end - space - 1));
    ++operations;
  }
  REQUIRE(operations > 100);
  const Philox rng(seed, "kill -9");
  for (int i = 0; i < kills; ++i) {
    const std::string out = formatted("{}/{}", dir.path(), i);
    std::string killed;
    run_until_done(tiny(out, options), [&](int attempt) -> std::string {
      if (attempt >= 3) return "";
      const int64_t at = 1 + static_cast<int64_t>(rng.bits(static_cast<uint64_t>(4 * i + attempt)) %
                                                  static_cast<uint64_t>(operations));
      killed += formatted(" {}", at);
      return shim + formatted("FILE_OPS_KILL={}", at);
    });
    INFO("killed at the file operations" << killed);
    REQUIRE(losses(out) == losses(dir / "whole"));
    REQUIRE(state_of(out + "/step-000012") == state_of(dir / "whole/step-000012"));
    for (const auto& entry : fs::directory_iterator(out))
      REQUIRE_FALSE(entry.path().filename().string().starts_with(".tmp-"));
    fs::remove_all(out);
  }
}

}  // namespace

TEST_CASE("kill -9 in the middle of any file operation costs only the steps since the last checkpoint") {
  kill_everywhere(12, 1);
}
TEST_CASE("kill -9 at fifty places", "[long]") { kill_everywhere(50, 2); }

// ---- Crashes of the machine: what was not synced is lost ------------------------------------------------------------

namespace {

// A file system that knows what is on the disk and what is only in memory.
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
    else FAIL("unknown operation " << what);
  }

  // What a crash leaves. Names and data each as they were in memory, or as they were synced.
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

TEST_CASE("a crash after any file operation leaves the previous or the new checkpoint, whole") {
  const TempDir dir;
  const std::string out = dir / "run";
  fs::create_directory(out);
  const std::string shim = "FILE_OPS_ROOT=" + out + " LD_PRELOAD=build/file_ops.so FILE_OPS_LOG=" + (dir / "log");
  REQUIRE(run_program(tiny(out, "--max-steps 9 --checkpoint-every 3 --keep-checkpoints 1"), shim).status == 0);
  const std::string log = read_whole(dir / "log");

  CrashingDisk disk(out);
  int64_t durable = 0, appearing = 0;  // the last checkpoint that is on the disk, the one that has its name
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
    if (words[0] == "write" && words[1].find("metrics") != std::string::npos) continue;  // not of the saver

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

// ---- Damage ---------------------------------------------------------------------------------------------------------

TEST_CASE("--resume auto passes over damaged checkpoints, loudly; an explicit one is never replaced by another") {
  const TempDir dir;
  const std::string options = "--max-steps 9 --checkpoint-every 3 ";
  run_well(tiny(dir / "whole", options));
  const std::map<std::string, std::function<void(const std::string&)>> damages = {
      {"model.safetensors: bytes", [](const std::string& c) { flip_byte(c + "/model.safetensors", 2000); }},
      {"optimizer-00001-of-00001.safetensors has",
       [](const std::string& c) { fs::resize_file(c + "/optimizer-00001-of-00001.safetensors", 3000); }},
      {"cannot open", [](const std::string& c) { fs::remove(c + "/trainer.json"); }},
      {"has no manifest.json", [](const std::string& c) { fs::remove(c + "/manifest.json"); }},
      {"manifest.json", [](const std::string& c) { std::ofstream(c + "/manifest.json") << "{\"files\": 3}"; }},
      {"config.json: bytes", [](const std::string& c) { flip_byte(c + "/config.json", 20); }}};
  for (const auto& [message, damage] : damages) {
    INFO(message);
    fs::remove_all(dir / "run");
    fs::copy(dir / "whole", dir / "run", fs::copy_options::recursive);
    fs::remove_all(dir / "run/step-000009");
    fs::create_directories(dir / "run/.tmp-step-000009-123/x");  // stale, of a run that was killed
    damage(dir / "run/step-000006");

    const ProgramResult asked = run_program(tiny(dir / "run", options + "--resume " + (dir / "run/step-000006")));
    REQUIRE(asked.status == 1);
    INFO(asked.err);
    REQUIRE(asked.err.find(message) != std::string::npos);
    REQUIRE_FALSE(fs::exists(dir / "run/step-000009"));

    const ProgramResult automatic = run_program(tiny(dir / "run", options));
    REQUIRE(automatic.out.find("WARNING") != std::string::npos);
    REQUIRE(automatic.out.find(message) != std::string::npos);
    REQUIRE(automatic.out.find("resuming behind step 3") != std::string::npos);
    INFO(automatic.err);
    REQUIRE(automatic.status == 0);
    REQUIRE(losses(dir / "run") == losses(dir / "whole"));
    REQUIRE(state_of(dir / "run/step-000009") == state_of(dir / "whole/step-000009"));
    REQUIRE(fs::exists(dir / "run/damaged-step-000006"));
    REQUIRE_FALSE(fs::exists(dir / "run/.tmp-step-000009-123"));
  }
}

TEST_CASE("where every checkpoint is damaged nothing is begun anew") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 3"));
  flip_byte(dir / "run/step-000003/model.safetensors", 3000);
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 3"));
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("none of its checkpoints is whole") != std::string::npos);
  REQUIRE(losses(dir / "run").size() == 3);
}

TEST_CASE("a resume with options that must match is refused by name; others warn or change freely") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 4"));
  const std::string before = read_whole(dir / "run/metrics.jsonl");
  auto refused = [&](const std::string& more, const std::string& culprit) {
    const ProgramResult r = run_program(tiny(dir / "run", more));
    INFO(more << "\n" << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(culprit) != std::string::npos);
    REQUIRE(read_whole(dir / "run/metrics.jsonl") == before);
  };
  refused("--max-steps 8 --lr 0.5", "--lr was '0.01' and is '0.5'");
  refused("--max-steps 8 --seed 7", "--seed");
  refused("--max-steps 8 --dtype bf16", "--dtype");
  refused("--max-steps 8 --total-batch-size 528", "--total-batch-size");
  refused("--max-steps 8 --resume never", "--resume never");
  refused("--max-steps 8 --resume " + (dir / "run/step-000009"), "step-000009");
  refused("--max-steps 8 --resume sometimes", "--resume sometimes");
  const ProgramResult longer = run_program(tiny(dir / "run", "--max-steps 8 --batch-size 4"));
  REQUIRE(longer.status == 0);
  REQUIRE(longer.out.find("notice: --max-steps was '4' and is '8'") != std::string::npos);
  REQUIRE(losses(dir / "run").size() == 8);
  // A branch: another directory goes on from a checkpoint of this one.
  run_well(tiny(dir / "branch", "--max-steps 8 --resume " + (dir / "run/step-000004")));
  REQUIRE(losses(dir / "branch").size() == 4);
  REQUIRE(run_program(tiny(dir / "run", "--max-steps 9 --resume " + (dir / "run/step-000004"))).status ==
          1);  // 8 is there
}

TEST_CASE("two runs on one out directory are refused") {
  const TempDir dir;
  fs::create_directory(dir / "run");
  const int lock = ::open((dir / "run/.lock").c_str(), O_RDWR | O_CREAT, 0644);
  REQUIRE(flock(lock, LOCK_EX) == 0);
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 3"));
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("another run is writing") != std::string::npos);
  ::close(lock);
  run_well(tiny(dir / "run", "--max-steps 3"));
}

TEST_CASE("a full disk ends the run with the last checkpoint whole; with room it goes on") {
  const TempDir dir;
  const Mount disk(dir / "small", "-t tmpfs -o size=400k tmpfs");
  if (!disk.there) return;
  const std::string options = "--max-steps 12 --checkpoint-every 2 ";
  const ProgramResult full = run_program(tiny(disk.path + "/run", options));
  INFO(full.err);
  REQUIRE(full.status == 1);
  REQUIRE(full.err.find("small/run") != std::string::npos);
  REQUIRE(newest_checkpoint(disk.path + "/run", [](const std::string& w) { FAIL(w); }));
  REQUIRE(std::system(("mount -o remount,size=4m " + disk.path).c_str()) == 0);
  run_well(tiny(disk.path + "/run", options));
  run_well(tiny(dir / "whole", options));
  REQUIRE(losses(disk.path + "/run") == losses(dir / "whole"));
  REQUIRE(state_of(disk.path + "/run/step-000012") == state_of(dir / "whole/step-000012"));
}

TEST_CASE("a read-only file system is refused before training") {
  const TempDir dir;
  fs::create_directories(dir / "real/run");
  const Mount disk(dir / "read-only", "-o bind,ro " + (dir / "real"));
  if (!disk.there) return;
  const ProgramResult r = run_program(tiny(disk.path + "/run", "--max-steps 3"));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("Read-only file system") != std::string::npos);
}

TEST_CASE("retention keeps the newest, the milestones and the best, and best leads to it") {
  const TempDir dir;
  run_well(tiny(dir / "run",
                "--max-steps 20 --checkpoint-every 2 --keep-checkpoints 2 --keep-every 8 --keep-best --val-data " +
                    data + " --val-every 5 --val-steps 4"));
  const std::vector<int64_t> steps = checkpoint_steps(dir / "run");
  const json best = json::parse(read_whole(dir / "run/step-000020/trainer.json"))["best_validation"];
  std::set<int64_t> expected = {8, 16, 18, 20};
  expected.insert(best["step"].get<int64_t>());
  REQUIRE(std::set<int64_t>(steps.begin(), steps.end()) == expected);
  REQUIRE(fs::read_symlink(dir / "run/best") == formatted("step-{:06}", best["step"].get<int64_t>()));
  REQUIRE_FALSE(checkpoint_fault(dir / "run/best"));
}

// ---- Not finite, and outliers ---------------------------------------------------------------------------------------

TEST_CASE(
    "a step that is not finite names the first bad tensor, its place and the samples; the weights are not touched") {
  const TempDir dir;
  // A model in which token 9 at position 4, and nothing else, embeds to infinity. The head does not see that channel.
  run_well(tiny(dir / "made", "--max-steps 1 --warmup-steps 0"));
  const std::string from = dir / "made/step-000001";
  fs::create_directories(dir / "broken");
  fs::copy(from + "/config.json", dir / "broken/config.json");
  const SafetensorsReader r(from + "/model.safetensors");
  std::vector<TensorInfo> infos;
  for (const std::string& name : r.names()) infos.push_back(r.info(name));
  SafetensorsWriter w(dir / "broken/model.safetensors", infos);
  for (const TensorInfo& info : infos) {
    std::vector<float> values(static_cast<size_t>(info.numel()));
    r.read(info.name, values.data());
    if (info.name.ends_with("wte.weight")) values[9 * 12] = 3e38f;
    if (info.name.ends_with("wpe.weight")) values[4 * 12] = 1e38f;
    if (info.name.ends_with("ln_f.weight")) values[0] = 0;
    w.write(values.data(), info.bytes());
  }
  w.finish();
  std::vector<uint16_t> tokens(33 * 8 + 1, 5);
  tokens[33 * 3 + 4] = 9;  // sample 3: micro-batch 1, sequence 1
  write_shard<uint16_t>(dir / "data.bin", tokens);
  const ProgramResult bad = run_program(
      "--model " + (dir / "broken") + " --train-data " + (dir / "data.bin") +
      " --seq-len 33 --batch-size 2 --total-batch-size 264 --max-steps 2 --threads 1 --out-dir " + (dir / "run"));
  INFO(bad.err);
  REQUIRE(bad.status == 2);
  REQUIRE(bad.err.find("step 1 diverged") != std::string::npos);
  REQUIRE(bad.err.find(
              "in embedded, written by embedding_forward in the forward of the embedding, micro-batch 1, sample 3.") !=
          std::string::npos);
  const ProgramResult ranks = run_program("--model " + (dir / "broken") + " --train-data " + (dir / "data.bin") +
                                          " --seq-len 33 --batch-size 2 --total-batch-size 264 --max-steps 2 "
                                          "--local-ranks 2 --zero-stage 3 --out-dir " +
                                          (dir / "ranks"));
  INFO(ranks.err);
  REQUIRE(ranks.status == 2);
  REQUIRE(ranks.err.find("in the forward of the embedding, rank 1, micro-batch 0, sample 3.") != std::string::npos);
  REQUIRE(checkpoint_steps(dir / "run").empty());
}

TEST_CASE("outliers have no limit before a window is full; NaN neither passes nor leaves a trace") {
  OutlierDetector d;
  for (int i = 0; i < 127; ++i) d.add(i % 2);
  REQUIRE(std::isinf(d.limit(2)));
  d.add(std::numeric_limits<double>::quiet_NaN());
  d.add(std::numeric_limits<double>::infinity());
  REQUIRE(std::isinf(d.limit(2)));
  d.add(1);
  REQUIRE(std::abs(d.limit(2) - 1.5) < 1e-12);  // mean 0.5, deviation 0.5
  REQUIRE(OutlierDetector(d.values()).limit(3) == d.limit(3));
  d.add(100);
  REQUIRE(d.limit(2) > 10);
  REQUIRE(d.values().size() == OutlierDetector::window);
}

TEST_CASE("outliers are skipped where asked for, also across a resume, and say so in the metrics") {
  const TempDir dir;
  const std::string options = "--max-steps 150 --skip-loss-z 0.5 ";
  run_well(tiny(dir / "whole", options));
  run_well(tiny(dir / "cut", "--max-steps 133 --skip-loss-z 0.5"));
  run_well(tiny(dir / "cut", options));
  auto skipped = [](const std::string& out) {
    std::set<int64_t> steps;
    std::ifstream in(out + "/metrics.jsonl");
    for (std::string line; std::getline(in, line);)
      if (const json object = json::parse(line); object.value("skipped", false))
        steps.insert(object["step"].get<int64_t>());
    return steps;
  };
  const std::set<int64_t> whole = skipped(dir / "whole");
  for (int64_t step : whole) REQUIRE(step > 128);
  REQUIRE(skipped(dir / "cut") == whole);
}
