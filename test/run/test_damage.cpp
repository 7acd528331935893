// Runs that meet damaged checkpoints, changed options, another run, a full disk or missing permissions; and which
// checkpoints a run keeps.
#include <fcntl.h>
#include <sys/file.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "catch2.h"
#include "run/checkpoints/run_dir.h"
#include "tiny_run.h"

using namespace llmc;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

void flip_byte(const std::string& file, int64_t at) {
  std::fstream f(file, std::ios::binary | std::ios::in | std::ios::out);
  f.seekg(at);
  const char byte = static_cast<char>(f.get() ^ 1);
  f.seekp(at).put(byte);
  REQUIRE(f);
}

// Mounts something until the end of the scope; skipped if this process may not mount.
struct Mount {
  std::string path;
  bool there;
  Mount(const std::string& at, const std::string& how) : path(at) {
    fs::create_directories(at);
    there = std::system(("mount " + how + " " + at + " 2>/dev/null").c_str()) == 0;
    if (!there) WARN("skipped: this process may not mount");
  }
  ~Mount() {
    if (there) REQUIRE(std::system(("umount -l " + path).c_str()) == 0);
  }
};

}  // namespace

TEST_CASE("--resume auto skips damaged checkpoints with a warning; an explicit one is never replaced by another",
          "[run][checkpoint]") {
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
    fs::create_directories(dir / "run/.tmp-step-000009-123/x");  // left by a killed run
    damage(dir / "run/step-000006");

    const ProgramResult asked = run_program(tiny(dir / "run", options + "--resume " + (dir / "run/step-000006")));
    REQUIRE(asked.status == 1);
    INFO(asked.err);
    REQUIRE(asked.err.find(message) != std::string::npos);
    REQUIRE_FALSE(fs::exists(dir / "run/step-000009"));

    const ProgramResult automatic = run_program(tiny(dir / "run", options));
    REQUIRE(automatic.out.find("WARNING") != std::string::npos);
    REQUIRE(automatic.out.find(message) != std::string::npos);
    REQUIRE(automatic.out.find("resuming after step 3") != std::string::npos);
    INFO(automatic.err);
    REQUIRE(automatic.status == 0);
    REQUIRE(losses(dir / "run") == losses(dir / "whole"));
    REQUIRE(state_of(dir / "run/step-000009") == state_of(dir / "whole/step-000009"));
    REQUIRE(fs::exists(dir / "run/damaged-step-000006"));
    REQUIRE_FALSE(fs::exists(dir / "run/.tmp-step-000009-123"));
  }
}

TEST_CASE("readers of shares of a checkpoint find together what one finds alone", "[run][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 1"));
  const std::string path = dir / "run/step-000001";
  const auto found = [&](int readers) {
    std::vector<std::string> faults;
    for (int reader = 0; reader < readers; ++reader)
      if (const auto fault = checkpoint_fault(path, Part::all, {reader, readers})) faults.push_back(*fault);
    return faults;
  };
  for (const auto& [name, record] : read_manifest(path)) {
    INFO(name);
    for (const int readers : {1, 2, 3, 50}) REQUIRE(found(readers).empty());
    flip_byte(path + "/" + name, record.size - 1);
    const std::string alone = *checkpoint_fault(path);
    REQUIRE(alone.find("/" + name + ": bytes") != std::string::npos);
    for (const int readers : {1, 2, 3, 50}) REQUIRE(found(readers) == std::vector{alone});
    flip_byte(path + "/" + name, record.size - 1);
  }
}

TEST_CASE("readers of shares of a large file each read some of its slices", "[run][checkpoint]") {
  const TempDir dir;
  const std::string file = dir / "large";
  constexpr int64_t slice = FileRecord::slice_bytes, size = 2 * slice + 1000;
  std::ofstream(file).close();
  fs::resize_file(file, size);  // zeros that take no room
  const std::string zeros = checksum(std::string(slice, '\0'));
  const std::map<std::string, FileRecord> records = {{file, {size, {zeros, zeros, checksum(std::string(1000, '\0'))}}}};
  for (const int readers : {1, 2, 3, 4}) {
    INFO(readers << " readers");
    const auto found = [&] {
      std::vector<std::string> faults;
      for (int reader = 0; reader < readers; ++reader)
        if (const auto fault = file_fault(records, {reader, readers})) faults.push_back(*fault);
      return faults;
    };
    REQUIRE(found().empty());
    for (const int64_t at : {slice - 1, slice, size - 1}) {
      flip_byte(file, at);
      const int64_t begin = at / slice * slice;
      const std::string what = formatted("{}: bytes {} to {} ", file, begin, std::min(begin + slice, size));
      const std::vector<std::string> faults = found();
      REQUIRE(faults.size() == 1);
      REQUIRE(faults[0].starts_with(what));
      flip_byte(file, at);
    }
  }
}

TEST_CASE("the processes of a job check together which checkpoint is intact", "[run][checkpoint][net]") {
  const TempDir dir;
  const auto two = [&](const std::string& options) {
    const std::string command =
        "--local-ranks 1 --world-size 2 --comm tcp --rendezvous file:" + (dir / "meet") + " " + options;
    ProgramResult second;
    std::thread other([&] { second = run_program(command + " --rank 1", "TRAIN_GPT_TOKEN=secret-of-a-test"); });
    ProgramResult first = run_program(command + " --rank 0", "TRAIN_GPT_TOKEN=secret-of-a-test");
    other.join();
    INFO(first.err + second.err);
    REQUIRE(first.status == second.status);
    fs::remove(dir / "meet");
    return first;
  };
  const std::string shape = "--checkpoint-every 1 ";
  REQUIRE(two(tiny(dir / "whole", shape + "--max-steps 2")).status == 0);
  for (const char* file : {"config.json", "trainer.json"}) {  // the first and the last: of one share each
    INFO(file);
    fs::remove_all(dir / "run");
    fs::copy(dir / "whole", dir / "run", fs::copy_options::recursive);
    flip_byte(dir / "run/step-000002/" + file, 20);
    const ProgramResult asked = two(tiny(dir / "run", shape + "--max-steps 3 --resume " + (dir / "run/step-000002")));
    REQUIRE(asked.status == 1);
    REQUIRE(asked.err.find(std::string(file) + ": bytes") != std::string::npos);
    const ProgramResult automatic = two(tiny(dir / "run", shape + "--max-steps 3"));
    INFO(automatic.err);
    REQUIRE(automatic.status == 0);
    REQUIRE(automatic.out.find(std::string(file) + ": bytes") != std::string::npos);
    REQUIRE(automatic.out.find("resuming after step 1") != std::string::npos);
    REQUIRE(fs::exists(dir / "run/damaged-step-000002"));
  }
  const std::string model = dir / "whole/step-000002";
  flip_byte(model + "/model-00002-of-00002.safetensors", 3000);
  const ProgramResult refused = two(tiny(dir / "new", "--max-steps 1 --model " + model));
  REQUIRE(refused.status == 1);
  REQUIRE(refused.err.find("model-00002-of-00002.safetensors: bytes") != std::string::npos);
  REQUIRE_FALSE(fs::exists(dir / "new"));
}

TEST_CASE("every host verifies its own copy of --model", "[run][checkpoint][net]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 1"));
  const std::string here = fs::current_path();
  for (const char* host : {"a", "b"}) {
    fs::create_directories(dir / host);
    fs::copy(dir / "run/step-000001", dir / host + "/model");
    fs::create_symlink(here + "/train_gpt", dir / host + "/train_gpt");
  }
  const auto on_two_hosts = [&] {
    ProgramResult results[2];
    const auto run_on = [&](int host) {
      results[host] = run_program(
          "--model model --train-data " + here + "/" + tiny_data +
              " --seq-len 33 --batch-size 2 --total-batch-size 264 --threads 1 --max-steps 1 --out-dir " +
              (dir / "out") + " --local-ranks 1 --world-size 2 --comm tcp --rendezvous file:" + (dir / "meet") +
              formatted(" --rank {}", host),
          formatted("TRAIN_GPT_TOKEN=secret-of-a-test TRAIN_GPT_ADDRESS=127.0.0.1 "
                    "LD_PRELOAD={}/build/net_ops.so NET_OPS_HOST=host-{} env -C {}",
                    here, host, dir / (host == 0 ? "a" : "b")));
    };
    std::thread other(run_on, 1);
    run_on(0);
    other.join();
    fs::remove(dir / "meet");
    INFO(results[0].err + results[1].err);
    REQUIRE(results[0].status == results[1].status);
    return results[0];
  };
  for (const char* host : {"a", "b"}) {
    const std::string file = dir / host + "/model/model.safetensors";
    flip_byte(file, 3000);
    const ProgramResult refused = on_two_hosts();
    INFO(refused.err);
    REQUIRE(refused.status == 1);
    REQUIRE(refused.err.find("--model model: model/model.safetensors: bytes") != std::string::npos);
    REQUIRE((refused.err.find("(read by rank 1 on host-1)") != std::string::npos) == (*host == 'b'));
    flip_byte(file, 3000);
  }
  const ProgramResult good = on_two_hosts();
  INFO(good.err);
  REQUIRE(good.status == 0);
}

TEST_CASE("no new run is started when every checkpoint is damaged", "[run][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 3"));
  flip_byte(dir / "run/step-000003/model.safetensors", 3000);
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 3"));
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("all of its checkpoints are damaged") != std::string::npos);
  REQUIRE(losses(dir / "run").size() == 3);
}

TEST_CASE("a --model of ours with modified weights is refused, unless its manifest is missing", "[run][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 3 --log-every 2"));
  const std::string checkpoint = dir / "run/step-000003",
                    generate = "--generate --sample-tokens 2 --model " + checkpoint;
  run_well(generate);
  flip_byte(checkpoint + "/model.safetensors", 3000);
  for (const std::string& command : {generate, tiny(dir / "other", "--max-steps 1 --model " + checkpoint)}) {
    const ProgramResult r = run_program(command);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find("model.safetensors: bytes") != std::string::npos);
    REQUIRE(r.err.find("remove manifest.json if the files were changed on purpose") != std::string::npos);
  }
  REQUIRE_FALSE(fs::exists(dir / "other"));
  fs::remove(checkpoint + "/manifest.json");
  run_well(generate);
  // Without a manifest it is damage of the format that is noticed; nothing is left of the start, nor is a run moved.
  fs::resize_file(checkpoint + "/model.safetensors", 3000);
  run_well(tiny(dir / "run/of/another", "--max-steps 1"));
  for (const char* out : {"other", "more/than/one", "run/of/another --restart"}) {
    const ProgramResult r = run_program(tiny(dir / out, "--max-steps 1 --model " + checkpoint));
    INFO(r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(checkpoint + "/model.safetensors") != std::string::npos);
  }
  for (const char* gone : {"other", "more", "run/of/another.before-1"}) REQUIRE_FALSE(fs::exists(dir / gone));
}

TEST_CASE("--log-every thins the console output, not the metrics", "[run][checkpoint]") {
  const TempDir dir;
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 8 --log-every 3"));
  REQUIRE(r.status == 0);
  for (const int64_t step : {1, 2, 3, 4, 5, 6, 7, 8})
    REQUIRE((r.out.find(formatted(" {}/8 ", step)) != std::string::npos) == (step == 1 || step % 3 == 0 || step == 8));
  REQUIRE(losses(dir / "run").size() == 8);
}

TEST_CASE("on a CPU a step's time is its own, also before and after a validation and a checkpoint",
          "[run][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run",
                "--max-steps 80 --n-embd 64 --total-batch-size 528 --checkpoint-every 20 --val-every 4 --val-steps 4 "
                "--val-data " +
                    tiny_data));
  const std::map<int64_t, double> ms = metric(dir / "run", "train", "ms");
  std::vector<double> sorted;
  for (const auto& [step, time] : ms) sorted.push_back(time);
  std::sort(sorted.begin(), sorted.end());
  // A line that came when half of the next step was done showed a fraction of the step before a pause, an eighth here,
  // and double the one after it. Many times may be off on a busy machine, not all.
  double longest_before = 0, shortest_after = 1e9;
  for (int64_t step = 4; step < 80; step += 4) {
    longest_before = std::max(longest_before, ms.at(step));
    shortest_after = std::min(shortest_after, ms.at(step + 1));
  }
  REQUIRE(longest_before > 0.5 * sorted[40]);
  REQUIRE(shortest_after < 1.6 * sorted[40]);
}

TEST_CASE("a resume with changed options that must match is refused by name; others warn or may change",
          "[run][checkpoint]") {
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
  refused("--max-steps 8 --lr 0.5", "--lr was '0.01' and is now '0.5'");
  refused("--max-steps 8 --seed 7", "--seed");
  refused("--max-steps 8 --dtype bf16", "--dtype");
  refused("--max-steps 8 --total-batch-size 528", "--total-batch-size");
  refused("--max-steps 8 --resume never", "--resume never");
  refused("--max-steps 8 --resume " + (dir / "run/step-000009"), "step-000009");
  refused("--max-steps 8 --resume sometimes", "--resume sometimes");
  const ProgramResult longer = run_program(tiny(dir / "run", "--max-steps 8 --batch-size 4"));
  REQUIRE(longer.status == 0);
  REQUIRE(longer.out.find("notice: --max-steps was '4' and is now '8'") != std::string::npos);
  REQUIRE(losses(dir / "run").size() == 8);
  // A branch: another directory continues from a checkpoint of this one.
  run_well(tiny(dir / "branch", "--max-steps 8 --resume " + (dir / "run/step-000004")));
  REQUIRE(losses(dir / "branch").size() == 4);
  REQUIRE(run_program(tiny(dir / "run", "--max-steps 9 --resume " + (dir / "run/step-000004"))).status ==
          1);  // step 8 exists
}

TEST_CASE("two runs on one out directory are refused", "[run][checkpoint]") {
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

TEST_CASE("a run on a file system without locks says that nothing keeps a second one out", "[run][checkpoint]") {
  const TempDir dir;
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 1"),
                                      formatted("env LD_PRELOAD=build/file_ops.so FILE_OPS_LOCK_ERRNO={}", ENOLCK));
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  REQUIRE(r.out.find("WARNING: " + (dir / "run/.lock") +
                     " cannot be locked, on a file system without locks (No locks available): nothing keeps a second "
                     "run from") != std::string::npos);
}

TEST_CASE("a full disk does not end a run: checkpoints and metrics are tried again, only the last one must succeed",
          "[run][checkpoint]") {
  const TempDir dir;
  const Mount disk(dir / "small", "-t tmpfs -o size=400k tmpfs");
  if (!disk.there) return;
  const std::string options = "--max-steps 12 --checkpoint-every 2 ";
  const ProgramResult full = run_program(tiny(disk.path + "/run", options));
  INFO(full.out << full.err);
  REQUIRE(full.status == 1);
  REQUIRE(full.err.find("no checkpoint after step 12: ") != std::string::npos);
  REQUIRE(full.err.find("small/run") != std::string::npos);
  // The first failure is that of an even step s; then s + 1, s + 2 (due, and so tried anyway) and so on.
  const size_t first = full.out.find("WARNING: no checkpoint after step ");
  REQUIRE(first != std::string::npos);
  const int64_t failed = std::stoll(full.out.substr(first + 34));
  REQUIRE(failed % 2 == 0);
  REQUIRE(full.out.find(formatted("WARNING: no checkpoint after step {}: ", failed + 1), first) != std::string::npos);
  REQUIRE(full.out.find(formatted("trying again by step {}", failed + 1), first) != std::string::npos);
  const auto newest = newest_checkpoint(disk.path + "/run", [](const std::string& w) { FAIL(w); });
  REQUIRE(newest);
  REQUIRE(newest->step == failed - 2);
  for (const std::string& name : names_in(disk.path + "/run")) REQUIRE_FALSE(name.starts_with(".tmp-step"));

  REQUIRE(std::system(("mount -o remount,size=4m " + disk.path).c_str()) == 0);
  run_well(tiny(disk.path + "/run", options));
  run_well(tiny(dir / "whole", options));
  REQUIRE(losses(disk.path + "/run") == losses(dir / "whole"));
  REQUIRE(state_of(disk.path + "/run/step-000012") == state_of(dir / "whole/step-000012"));
}

TEST_CASE("if one rank cannot write its part of a checkpoint, all give up together, and the next attempt succeeds",
          "[run][checkpoint]") {
  const TempDir dir;
  // The optimizer slices of the second rank meet a full disk at step 2, once.
  const std::string shim =
      "FILE_OPS_ROOT=" + dir.path() + " FILE_OPS_FULL=.tmp-step-000002/optimizer-00002 LD_PRELOAD=build/file_ops.so";
  const std::string options =
      "--max-steps 6 --checkpoint-every 2 --local-ranks 2 --zero-stage 1 --checkpoint-mode sync ";
  const ProgramResult r = run_program(tiny(dir / "run", options), shim);
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  REQUIRE(r.out.find("WARNING: no checkpoint after step 2: rank 1: cannot write to ") != std::string::npos);
  REQUIRE(r.out.find("No space left on device; there is none; trying again by step 3") != std::string::npos);
  REQUIRE(checkpoint_steps(dir / "run") == std::vector<int64_t>{3, 4, 6});
  for (const int64_t step : {3, 4, 6}) REQUIRE_FALSE(checkpoint_fault(checkpoint_path(dir / "run", step)));

  const ProgramResult strict = run_program(tiny(dir / "strict", options + "--checkpoint-errors fail"), shim);
  INFO(strict.err);
  REQUIRE(strict.status == 1);
  REQUIRE(strict.err.find("no checkpoint after step 2: rank 1: cannot write to ") != std::string::npos);
  REQUIRE(names_in(dir / "strict") ==
          std::vector<std::string>{".lock", "log.txt", "metrics.jsonl", "run.json", "weights-only-step-000002"});
  REQUIRE(read_whole(dir / "strict/log.txt").ends_with(strict.err));  // what ended the run
}

TEST_CASE("a checkpoint that fails while updates are under way is tried again after them", "[run][checkpoint]") {
  const TempDir dir;
  // Both stages of an asynchronous pipeline have begun an update where the failure of the background write is heard.
  const std::string shim =
      "FILE_OPS_ROOT=" + dir.path() + " FILE_OPS_FULL=.tmp-step-000010/ LD_PRELOAD=build/file_ops.so";
  const std::string options =
      "--model llama2:7B --n-layer 2 --n-kv-head 2 --n-ffn 20 --total-batch-size 66 --pp 2 --local-ranks 2 "
      "--schedule pipedream --max-steps 30 --checkpoint-every 10 ";
  const ProgramResult r = run_program(tiny(dir / "run", options), shim);
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  const std::string words = "No space left on device; there is none; trying again by step ";
  const size_t said = r.out.find(words);
  REQUIRE(said != std::string::npos);
  const int64_t again = std::stoll(r.out.substr(said + words.size()));
  REQUIRE((again > 10 && again < 20));
  REQUIRE(checkpoint_steps(dir / "run") == std::vector<int64_t>{again, 20, 30});

  const ProgramResult strict = run_program(tiny(dir / "strict", options + "--checkpoint-errors fail"), shim);
  INFO(strict.err);
  REQUIRE(strict.status == 1);
  const std::string folder = "weights-only-step-";
  for (const std::string& name : names_in(dir / "strict"))
    if (name.starts_with(folder)) {
      const nlohmann::json trainer = read_json(dir / ("strict/" + name + "/trainer.json"));
      REQUIRE(trainer["step"] == std::stoll(name.substr(folder.size())));
      return;
    }
  FAIL("no weights were saved");
}

TEST_CASE("a full disk holds up metrics and the log, not training; they are whole in the end", "[run][checkpoint]") {
  const TempDir dir;
  const std::string shim = "FILE_OPS_ROOT=" + dir.path() + " FILE_OPS_FULL=metrics.jsonl LD_PRELOAD=build/file_ops.so ";
  const ProgramResult whole = run_program(tiny(dir / "whole", "--max-steps 3"), "FILE_OPS_FULL_WRITES=2 " + shim);
  INFO(whole.out << whole.err);
  REQUIRE(whole.status == 0);
  REQUIRE(whole.out.find("WARNING: cannot write to " + (dir / "whole/metrics.jsonl")) != std::string::npos);
  REQUIRE(losses(dir / "whole").size() == 3);

  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 3"), shim);
  INFO(r.out << r.err);
  REQUIRE(r.status == 1);  // the last checkpoint would be without its metrics
  const std::string warning = "WARNING: cannot write to " + (dir / "run/metrics.jsonl") + ": No space left on device";
  REQUIRE(r.out.find(warning) != std::string::npos);
  REQUIRE(r.out.find(warning) == r.out.rfind(warning));
  REQUIRE(r.out.find(" 3/3 ") != std::string::npos);
  REQUIRE(r.err.find("no checkpoint after step 3: cannot write to " + (dir / "run/metrics.jsonl")) !=
          std::string::npos);
}

TEST_CASE("a read-only file system is refused before training", "[run][checkpoint]") {
  const TempDir dir;
  fs::create_directories(dir / "real/run");
  const Mount disk(dir / "read-only", "-o bind,ro " + (dir / "real"));
  if (!disk.there) return;
  const ProgramResult r = run_program(tiny(disk.path + "/run", "--max-steps 3"));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("Read-only file system") != std::string::npos);
}

TEST_CASE("retention keeps the newest, the milestones and the best, and `best` links to the best",
          "[run][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run",
                "--max-steps 20 --checkpoint-every 2 --keep-checkpoints 2 --keep-every 8 --keep-best --val-data " +
                    tiny_data + " --val-every 5 --val-steps 4"));
  const std::vector<int64_t> steps = checkpoint_steps(dir / "run");
  const json best = json::parse(read_whole(dir / "run/step-000020/trainer.json"))["best_validation"];
  std::set<int64_t> expected = {8, 16, 18, 20};
  expected.insert(best["step"].get<int64_t>());
  REQUIRE(std::set<int64_t>(steps.begin(), steps.end()) == expected);
  REQUIRE(fs::read_symlink(dir / "run/best") == formatted("step-{:06}", best["step"].get<int64_t>()));
  REQUIRE_FALSE(checkpoint_fault(dir / "run/best"));
}

TEST_CASE("a model that options change says that its tensors may not be those of the options", "[run][errors]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 1"));
  refused(
      tiny(dir / "deep", "--model " + (dir / "run/step-000001") + " --n-layer 4"),
      "has no tensor transformer.h.1.ln_1.weight (nor h.1.ln_1.weight); config.json and the options describe another "
      "model");
  refused("--plan --model llama3:1B --n-head 2 --n-embd 32 --n-kv-head 3",
          "--n-kv-head 3 exceeds --n-head 2: use one "
          "of 1, 2");
}
