// Runs of the program with --schedule pipedream: killed and resumed, they are bitwise equal to an uninterrupted run;
// stopped by a signal, they record where they flushed, and are bitwise equal to a run that flushed there. Options that
// it does not support are rejected.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "catch2.h"
#include "helpers.h"
#include "run/checkpoints/run_dir.h"

using namespace llmc;

namespace {

std::string options(const std::string& out, const std::string& more) {
  return "--model llama2:7B --n-layer 5 --n-head 4 --n-kv-head 2 --n-embd 48 --n-ffn 60 --vocab-size 211 --train-data "
         "test/golden/gpt2_tiny/train.bin --val-data test/golden/gpt2_tiny/train.bin --val-every 0 --val-steps 1 "
         "--seq-len 33 --lr 1e-2 --threads 1 --device cpu --batch-size 8 --local-ranks 4 --pp 4 --schedule pipedream "
         "--max-steps 60 --out-dir " +
         out + " " + more;
}
ProgramResult train(const std::string& out, const std::string& more = "") {
  const ProgramResult r = run_program(options(out, more));
  INFO(r.err);
  REQUIRE(r.status == 0);
  return r;
}
// The run is asked to stop when more than half of its updates are reported; once more if it ended before. Returns its
// exit status.
int stopped(const std::string& out) {
  int status = 0;
  for (int tries = 0; tries < 20 && status == 0; ++tries) {
    std::filesystem::remove_all(out);
    status = run_program(options(out, "") +
                         formatted(" >/dev/null 2>&1 & until grep -qs '\"step\":3[1-9]' {}/metrics.jsonl; do kill -0 "
                                   "$! || break; done; kill -TERM $!; wait $!",
                                   out))
                 .status;
  }
  return status;
}

// From metrics.jsonl: the steps of flushes; losses and norms, and the time of each step.
struct Metrics {
  std::vector<int64_t> flushes;
  std::vector<double> values, ms;
  explicit Metrics(const std::string& out) {
    std::ifstream in(out + "/metrics.jsonl");
    for (std::string line; std::getline(in, line);) {
      const nlohmann::json object = nlohmann::json::parse(line);
      if (object["kind"] == "flush") flushes.push_back(object["step"]);
      if (object["kind"] != "train") continue;
      ms.push_back(object["ms"]);
      values.push_back(object["loss"]);
      values.push_back(object["grad_norm"]);
    }
  }
};
// The bytes of the newest checkpoint's entire state.
std::string state_of(const std::string& out) {
  const std::string checkpoint = newest_checkpoint(out, [](const std::string& w) { FAIL(w); }).value().path;
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint))
    if (entry.path().extension() == ".safetensors") files.insert(entry.path().string());
  REQUIRE(files.size() == 8);  // weights and optimizer state by stage
  std::string all;
  for (const std::string& file : files) all += read_whole(file);
  return all;
}
bool same(const std::string& a, const std::string& b) {
  return state_of(a) == state_of(b) && Metrics(a).values == Metrics(b).values;
}
using Steps = std::vector<int64_t>;

}  // namespace

TEST_CASE("a run with pipedream that is killed and resumed is bitwise the one that nobody killed",
          "[run][pp][pipedream]") {
  const TempDir dir;
  const ProgramResult whole = train(dir / "whole", "--checkpoint-every 20");
  REQUIRE(whole.out.find("pipedream with up to 4 versions of weights") != std::string::npos);
  REQUIRE(whole.out.find("gradients of stage s are P - 1 - s = 3 - s updates old: the numbers") != std::string::npos);
  REQUIRE(whole.out.find("clip 1, stage by stage by its own norm") != std::string::npos);
  REQUIRE(Metrics(dir / "whole").flushes == Steps{20, 40, 60});
  // Three steps finish together at a flush: none of them looks as if it had taken no time.
  std::vector<double> ms = Metrics(dir / "whole").ms;
  std::ranges::sort(ms);
  REQUIRE(ms.front() > ms[ms.size() / 2] / 8);
  train(dir / "none");
  REQUIRE(Metrics(dir / "none").flushes == Steps{60});
  REQUIRE(!same(dir / "none", dir / "whole"));

  const std::string in_the_second = "LD_PRELOAD=build/file_ops.so FILE_OPS_KILL_AT=.tmp-step-000040 FILE_OPS_ROOT=";
  REQUIRE(run_program(options(dir / "killed", "--checkpoint-every 20"), in_the_second + dir.path()).status ==
          128 + SIGKILL);
  train(dir / "killed", "--checkpoint-every 20");
  REQUIRE(Metrics(dir / "killed").flushes == Steps{20, 40, 60});
  REQUIRE(same(dir / "killed", dir / "whole"));

  const ProgramResult other = train(dir / "whole", "--schedule 1f1b --max-steps 61");
  REQUIRE(other.out.find("notice: --schedule was 'pipedream' and is now '1f1b'") != std::string::npos);
}

TEST_CASE("a run with pipedream that is stopped records the flush, and is bitwise one that flushed there",
          "[run][pp][pipedream]") {
  const TempDir dir;
  REQUIRE(stopped(dir / "stopped") == 75);
  train(dir / "stopped");
  const Steps flushes = Metrics(dir / "stopped").flushes;
  REQUIRE(flushes.size() == 2);
  REQUIRE((flushes[0] > 30 && flushes[0] < 60 && flushes[1] == 60));
  train(dir / "flushed", formatted("--val-every {}", flushes[0]));
  REQUIRE(Metrics(dir / "flushed").flushes == flushes);
  REQUIRE(same(dir / "stopped", dir / "flushed"));
}

TEST_CASE("what pipedream cannot do is refused by name", "[run][pp][pipedream]") {
  const TempDir dir;
  const std::string with = " with --schedule pipedream: ";
  for (const auto& [more, text] : std::vector<std::pair<std::string, std::string>>{
           {"--total-batch-size 528",
            with + "a step is one micro-batch of each data-parallel rank, 8 x 33 x 1 = 264 tokens"},
           {"--zero-stage 1 --local-ranks 8", with + "every rank keeps whole older versions"},
           {"--pp 1 --local-ranks 2 --dp-sync partitioned-server", with + "a server has no older versions"},
           {"--grad-reduce micro", with + "a step is one micro-batch"},
           {"--skip-loss-z 3", with + "the loss and the norm of the whole model tell outliers"},
           {"--on-spike skip", with + "a stage makes its update before the loss and the norm of the whole model"},
           {"--skip-grad-z 3", with + "the loss and the norm of the whole model tell outliers"},
           {"--token-slices 2", "--token-slices" + with.substr(0, with.size() - 2)},
           {"--model d5 --n-head 4 --n-kv-head 4", with + "its embedding is also its head"}}) {
    const ProgramResult r = run_program(options(dir / "refused", more));
    INFO(more << ": " << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(text) != std::string::npos);
    REQUIRE(!path_exists(dir / "refused"));
  }
}
