// Spikes: --on-spike stop, skip and rollback. The oracle of a rollback is a run whose data never had the samples that
// it leaves out: bit for bit the same losses, weights, optimizer state and statistics.
#include <algorithm>
#include <future>
#include <set>

#include "catch2.h"
#include "run/checkpoints/run_record.h"
#include "run/recipe/course.h"
#include "run/spikes.h"
#include "tiny_run.h"

using namespace llmc;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

// Samples of 33 tokens, 8 in a step, taken in file order. They are easy to learn, but those of some steps are noise.
struct SpikeData {
  static constexpr int T = 33, per_step = 8;
  struct Steps {
    int first, last;
    bool has(int step) const { return step >= first && step <= last; }
  };
  TempDir dir;
  SpikeData() {
    write("bad", {140, 140});
    write("good", {140, 140}, {131, 140});
  }
  // left_out: steps whose samples the file does not have
  void write(const std::string& name, const Steps& noise, const Steps& left_out = {0, 0}, int steps = 172) const {
    uint32_t state = 1;
    const auto random = [&] { return (state = state * 1664525 + 1013904223) >> 8; };
    std::vector<uint16_t> tokens;
    for (int step = 1; step <= steps; ++step)
      for (int sample = 0; sample < per_step; ++sample) {
        const uint32_t begin = random() % 40;
        for (uint32_t t = 0; t < T; ++t) {
          const uint32_t easy = (begin + 3 * t + (random() % 8 == 0)) % 40, hard = 100 + random() % 100;
          // The target of a sample's last token is the first of the next sample.
          if (!left_out.has(step)) tokens.push_back(static_cast<uint16_t>(t == 0 ? 0 : noise.has(step) ? hard : easy));
        }
      }
    tokens.push_back(0);
    write_shard(dir / name + ".bin", tokens);
  }
  std::string run(const std::string& data, const std::string& out, const std::string& more) const {
    return run_of("--max-steps 150 --lr-schedule constant --train-data " + (dir / data) + ".bin", out, more);
  }
  std::string run_of(const std::string& recipe, const std::string& out, const std::string& more) const {
    return "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --no-shuffle --seq-len 33 --batch-size 2 "
           "--total-batch-size 264 --lr 1e-2 --threads 1 --val-every 0 --checkpoint-every 10 --skip-loss-z 3 "
           "--out-dir " +
           (dir / out) + " " + recipe + " " + more;
  }
  const std::string rollback = "--on-spike rollback ";
};

// Metrics' lines of a kind.
std::vector<json> lines_of(const std::string& out, const std::string& kind) {
  std::vector<json> found;
  std::ifstream in(out + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);)
    if (const json object = json::parse(line); object["kind"] == kind) found.push_back(object);
  return found;
}
// All tensors of a checkpoint, whichever ranks wrote them.
std::string tensors_of(const std::string& checkpoint) {
  REQUIRE_FALSE(checkpoint_fault(checkpoint));
  std::string all;
  std::set<std::string> files;
  for (const auto& entry : fs::directory_iterator(checkpoint))
    if (entry.path().extension() == ".safetensors") files.insert(entry.path());
  for (const std::string& file : files) all += read_whole(file);
  return all;
}
json detectors_of(const std::string& checkpoint) { return read_json(checkpoint + "/trainer.json")["detectors"]; }

void require_same_end(const std::string& out, const std::string& other, const char* last = "/step-000150") {
  REQUIRE(losses(out) == losses(other));
  REQUIRE(tensors_of(out + last) == tensors_of(other + last));
  REQUIRE(detectors_of(out + last) == detectors_of(other + last));
}

// The run in `out`, as it was when only checkpoints up to this step were there.
void copy_until(const std::string& out, const std::string& to, int64_t step) {
  fs::remove_all(to);
  fs::copy(out, to, fs::copy_options::recursive);
  for (const int64_t later : checkpoint_steps(to))
    if (later > step) fs::remove_all(checkpoint_path(to, later));
}

// Samples of 33 tokens in file order, of which some give losses that are not finite (write_broken_model()).
struct BrokenSamples {
  TempDir dir;
  BrokenSamples() { write_broken_model(dir); }

  void write(const std::string& name, const std::vector<size_t>& broken, uint16_t first = 5) const {
    std::vector<uint16_t> tokens(33 * 60 + 1, 5);
    tokens[0] = first;
    for (const size_t sample : broken) tokens[33 * sample + 4] = 9;
    write_shard(dir / name + ".bin", tokens);
  }
  std::string source(const std::string& name) const { return "--train-data " + (dir / name) + ".bin "; }
  // By default 4 samples in a step.
  std::string run(const std::string& out, const std::string& more, int samples = 4) const {
    return formatted(
        "--model {} --no-shuffle --seq-len 33 --batch-size 2 --total-batch-size {} --lr 0 --threads 1 "
        "--on-spike rollback --checkpoint-mode sync --out-dir {} {} ",
        dir / "broken", samples * 33, dir / out, more);
  }
  json trainer(const std::string& out, int64_t step) const {
    return read_json(checkpoint_path(dir / out, step) + "/trainer.json");
  }
  void remove(const std::string& out, int64_t step) const { fs::remove_all(checkpoint_path(dir / out, step)); }
};

const std::string by_clock = "--checkpoint-minutes 1e-9 ", accept = "--data-changed accept ";

void require_in(const std::string& text, const std::string& expected) {
  INFO(text << "\nexpected: " << expected);
  REQUIRE(text.find(expected) != std::string::npos);
}

}  // namespace

TEST_CASE("after a rollback a run is bit for bit one whose data never had the samples left out, in any layout",
          "[run][spikes]") {
  const SpikeData data;
  for (const std::string layout : {"", "--local-ranks 2 --zero-stage 3", "--local-ranks 4 --pp 2 --n-layer 2",
                                   "--local-ranks 2 --tp 2 --checkpoint-mode sync"}) {
    INFO(layout);
    const std::string place = std::to_string(layout.size()), rolled = "rolled" + place, good = "good" + place;
    const std::string out = said(data.run("bad", rolled, data.rollback + layout));
    REQUIRE(out.find("step 140 is a spike: the loss, ") != std::string::npos);
    REQUIRE(out.find("--skip-loss-z): the run returns to " + (data.dir / rolled) +
                     "/step-000130 (rollback 1 of at most 3 without a later checkpoint), and leaves out the 80 samples "
                     "from 1040 on") != std::string::npos);
    REQUIRE(said(data.run("good", good, layout)).find(" is a spike") == std::string::npos);
    require_same_end(data.dir / rolled, data.dir / good);
    const std::vector<json> rollbacks = lines_of(data.dir / rolled, "rollback");
    REQUIRE(rollbacks.size() == 1);
    REQUIRE((rollbacks[0]["step"] == 130 && rollbacks[0]["spike"] == 140 && rollbacks[0]["samples"] == 80));
    REQUIRE(rollbacks[0]["loss"] > 4.0);
    const json trainer = read_json((data.dir / rolled) + "/step-000150/trainer.json");
    REQUIRE(trainer["data_cursor"] == 8 * 160);
    REQUIRE(trainer["tokens"] == 264 * 150);
  }
  // --print-samples knows what the run in --out-dir has left out; another run has left out nothing.
  const auto first_of_step_131 = [&](const std::string& out, const std::string& more) -> int64_t {
    return json::parse(said(data.run("bad", out, data.rollback + "--print-samples 131 " + more)))["samples"][0][1];
  };
  REQUIRE(first_of_step_131("rolled0", "") == 8 * 130 + 80);
  REQUIRE(first_of_step_131("elsewhere", "") == 8 * 130);
  REQUIRE(first_of_step_131("rolled0", "--lr 1e-3") == 8 * 130);
}

TEST_CASE("processes that roll back together do what threads do", "[run][spikes]") {
  const SpikeData data;
  run_well(data.run("bad", "threads", data.rollback + "--local-ranks 2 --zero-stage 1"));
  std::vector<std::future<ProgramResult>> all;
  for (int process = 0; process < 2; ++process)
    all.push_back(std::async(std::launch::async, [&, process] {
      return run_program(data.run("bad", "processes",
                                  data.rollback + formatted("--zero-stage 1 --local-ranks 1 --comm tcp --world-size 2 "
                                                            "--rank {} --init-timeout 60 --rendezvous file:{}",
                                                            process, data.dir / "meet")),
                         "timeout 120");
    }));
  for (std::future<ProgramResult>& one : all) {
    const ProgramResult r = one.get();
    INFO(r.err);
    REQUIRE(r.status == 0);
  }
  require_same_end(data.dir / "processes", data.dir / "threads");
  REQUIRE(lines_of(data.dir / "processes", "rollback").size() == 1);
}

TEST_CASE("killed between a rollback and the next checkpoint, a run ends with the same bits, in another layout too",
          "[run][spikes]") {
  const SpikeData data;
  run_well(data.run("bad", "whole", data.rollback));
  const std::string again = data.dir / "again";
  copy_until(data.dir / "whole", again, 130);
  REQUIRE(said(data.run("bad", "again", data.rollback)).find(" is a spike") == std::string::npos);  // run.json has it
  require_same_end(again, data.dir / "whole");
  REQUIRE(lines_of(again, "rollback").size() == 1);

  copy_until(data.dir / "whole", again, 140);  // trainer.json has it
  fs::remove(again + "/run.json");
  run_well(data.run("bad", "again", data.rollback));
  require_same_end(again, data.dir / "whole");

  copy_until(data.dir / "whole", again, 130);  // killed before it was recorded
  fs::remove(again + "/run.json");
  REQUIRE(said(data.run("bad", "again", data.rollback)).find("step 140 is a spike") != std::string::npos);
  require_same_end(again, data.dir / "whole");

  copy_until(data.dir / "whole", again, 130);
  run_well(data.run("bad", "again", data.rollback + "--local-ranks 2 --zero-stage 2"));
  for (const auto& [step, loss] : losses(data.dir / "whole")) REQUIRE(std::abs(losses(again).at(step) - loss) < 1e-4);
}

TEST_CASE(
    "a rollback returns to the same step whatever the clock and signals have saved, and no start resumes from what "
    "it leaves behind",
    "[run][spikes]") {
  const SpikeData data;
  run_well(data.run("good", "good", ""));
  const std::string out = said(data.run(
      "bad", "rolled", data.rollback + "--checkpoint-mode sync --checkpoint-minutes 1e-6 --keep-checkpoints 1 "));
  REQUIRE(out.find("step-000130 (rollback 1 of") != std::string::npos);
  require_same_end(data.dir / "rolled", data.dir / "good");
  int left_behind = 0;
  for (const auto& entry : fs::directory_iterator(data.dir / "rolled"))
    left_behind += entry.path().filename().string().starts_with("rolled-back-step-00013");
  REQUIRE(left_behind >= 1);
}

TEST_CASE("a branch without a checkpoint of its own rolls back to its parent, before and after it was killed",
          "[run][spikes]") {
  const SpikeData data;
  run_well(data.run("bad", "parent", "--max-steps 130"));
  const std::string parent = (data.dir / "parent") + "/step-000130", branch = data.dir / "branch",
                    more = data.rollback + "--checkpoint-every 100 --lr 1e-3";
  const std::string out = said(data.run("bad", "branch", more + " --branch-from " + parent));
  REQUIRE(out.find("the run returns to " + fs::canonical(parent).string()) != std::string::npos);
  REQUIRE(read_json(branch + "/step-000150/trainer.json")["data_cursor"] == 8 * 160);
  copy_until(branch, data.dir / "again", 130);
  REQUIRE(said(data.run("bad", "again", more)).find(" is a spike") == std::string::npos);
  require_same_end(data.dir / "again", branch);
}

TEST_CASE("after rollbacks without a later checkpoint a run gives up, naming the steps, also when it is started again",
          "[run][spikes]") {
  const SpikeData data;
  data.write("bad_from_140", {140, 172});
  const std::string command = data.run("bad_from_140", "out", data.rollback + "--max-rollbacks 2");
  const ProgramResult first = run_program(command);
  INFO(first.out << first.err);
  REQUIRE(first.status == 2);
  REQUIRE(first.out.find("(rollback 2 of at most 2 without a later checkpoint)") != std::string::npos);
  REQUIRE(first.err.find("step 131 is a spike") != std::string::npos);
  REQUIRE(
      first.err.find("2 rollback(s) to step 130, after spikes at steps 140, 131, have led to no later checkpoint") !=
      std::string::npos);
  const ProgramResult again = run_program(command);
  REQUIRE(again.status == 2);
  REQUIRE(again.err == first.err);
  REQUIRE(read_run_record((data.dir / "out") + "/run.json").rollbacks.size() == 2);
  REQUIRE(checkpoint_steps(data.dir / "out").back() == 130);
}

TEST_CASE("stop ends the run with nothing saved after its last checkpoint; the run may go on with a rollback",
          "[run][spikes]") {
  const SpikeData data;
  const ProgramResult stopped = run_program(data.run("bad", "out", "--on-spike stop"));
  INFO(stopped.err);
  REQUIRE(stopped.status == 2);
  REQUIRE(stopped.err.find("step 140 is a spike: the loss, ") != std::string::npos);
  REQUIRE(stopped.err.find("The weights were not updated") != std::string::npos);
  REQUIRE(stopped.err.find("or resume with --on-spike skip or rollback; the last checkpoint is ") != std::string::npos);
  REQUIRE(checkpoint_steps(data.dir / "out").back() == 130);
  run_well(data.run("bad", "out", data.rollback));
  run_well(data.run("good", "good", ""));
  require_same_end(data.dir / "out", data.dir / "good");
}

TEST_CASE("a run that stops at a spike is offered the other ways that its options allow", "[run][spikes]") {
  Options o;
  REQUIRE(other_ways_past(o, true).empty());
  o.on_spike = OnSpike::stop;
  o.checkpoint_every = 10;
  REQUIRE(other_ways_past(o, true) == ", or resume with --on-spike skip or rollback");
  o.checkpoint_every = 0;
  REQUIRE(other_ways_past(o, false) == ", or begin again with --on-spike skip or rollback --checkpoint-every N");
  o.overfit_batch = true;
  REQUIRE(other_ways_past(o, false) == ", or begin again with --on-spike skip");
  o.schedule = Schedule::pipedream;
  REQUIRE(other_ways_past(o, false).empty());
  o = {};
  o.on_spike = OnSpike::skip;
  REQUIRE(other_ways_past(o, true).empty());

  const SpikeData data;
  const ProgramResult stopped = run_program(data.run("bad", "out", "--on-spike stop --checkpoint-every 0"));
  INFO(stopped.err);
  REQUIRE(stopped.err.find("or begin again with --on-spike skip or rollback --checkpoint-every N; no checkpoint was "
                           "written") != std::string::npos);
}

TEST_CASE("skipped updates keep out of the statistics, and the default for outliers is to skip", "[run][spikes]") {
  const SpikeData data;
  run_well(data.run("bad", "default", ""));
  run_well(data.run("bad", "skip", "--on-spike skip"));
  require_same_end(data.dir / "skip", data.dir / "default");
  const std::string last = (data.dir / "skip") + "/step-000150";
  std::vector<double> kept, usual;
  for (const json& line : lines_of(data.dir / "skip", "train")) {
    REQUIRE(line.value("skipped", false) == (line["step"] == 140));
    if (line["step"] != 140) usual.push_back(line["loss"]);
  }
  REQUIRE(detectors_of(last)["loss"] == json(std::vector<double>(usual.end() - 128, usual.end())));
}

TEST_CASE("if as many updates in a row are skipped as the statistics hold, these begin anew", "[run][spikes]") {
  const SpikeData data;
  data.write("long", {140, 290}, {0, 0}, 290);
  const std::string out = said(data.run("long", "out", "--max-steps 280 --checkpoint-every 200"));
  REQUIRE(out.find("WARNING: the last 128 updates were skipped: such losses and norms count as usual from here on") !=
          std::string::npos);
  for (const json& line : lines_of(data.dir / "out", "train"))
    REQUIRE(line.value("skipped", false) == (line["step"] >= 140 && line["step"] < 268));
  // In the middle of the row, a checkpoint knows how long it is.
  copy_until(data.dir / "out", data.dir / "again", 200);
  run_well(data.run("long", "again", "--max-steps 280 --checkpoint-every 200"));
  require_same_end(data.dir / "again", data.dir / "out", "/step-000280");
}

TEST_CASE("numbers that are not finite count as spikes without a threshold", "[run][spikes]") {
  const TempDir dir;
  write_broken_model(dir);
  std::vector<uint16_t> tokens(33 * 20 + 1, 5);
  tokens[33 * 3 + 4] = 9;  // in sample 3; with --lr 0 the weights stay as they are
  write_shard(dir / "data.bin", tokens);
  const auto run = [&](const std::string& out, const std::string& more) {
    return run_program("--model " + (dir / "broken") + " --train-data " + (dir / "data.bin") +
                       " --no-shuffle --seq-len 33 --batch-size 2 --total-batch-size 132 --max-steps 3 --lr 0 "
                       "--threads 1 --checkpoint-every 1 --out-dir " +
                       (dir / out) + " " + more);
  };
  const auto skipped = [&](const std::string& out) {
    std::vector<bool> all;
    for (const json& line : lines_of(dir / out, "train")) all.push_back(line.value("skipped", false));
    return all;
  };
  REQUIRE(run("stop", "--on-spike stop").status == 2);
  REQUIRE(run("default", "--skip-loss-z 3").status == 2);  // as without --on-spike, ever since
  for (const char* ranks : {"1", "2 --zero-stage 2"}) {
    const std::string more = std::string(" --local-ranks ") + ranks;
    const ProgramResult skip = run(std::string("skip") + ranks[0], "--on-spike skip" + more);
    INFO(skip.out << skip.err);
    REQUIRE(skip.status == 0);
    REQUIRE(skip.out.find("step 1 is a spike: loss nan or gradient norm nan is not finite: its update was skipped") !=
            std::string::npos);
    REQUIRE(skipped(std::string("skip") + ranks[0]) == std::vector<bool>{true, false, false});
    // There is no checkpoint yet: the run begins anew, without the samples of step 1.
    const ProgramResult back = run(std::string("back") + ranks[0], "--on-spike rollback" + more);
    INFO(back.out << back.err);
    REQUIRE(back.status == 0);
    REQUIRE(back.out.find("the run returns to its beginning (rollback 1 of at most 3 without a later checkpoint), and "
                          "leaves out the 4 samples from 0 on") != std::string::npos);
    REQUIRE(skipped(std::string("back") + ranks[0]) == std::vector<bool>(3, false));
    REQUIRE(read_json(dir / std::string("back") + ranks[0] + "/step-000003/trainer.json")["data_cursor"] == 16);
  }
}

TEST_CASE("a branch that reads other data leaves out samples of those, also after it was killed", "[run][spikes]") {
  const TempDir dir;
  write_broken_model(dir);
  std::vector<uint16_t> tokens(33 * 60 + 1, 5);
  write_shard(dir / "data.bin", tokens);
  tokens[33 * 9 + 4] = 9;  // in the third step
  write_shard(dir / "other.bin", tokens);
  const auto run = [&](const std::string& data, const std::string& out, const std::string& more) {
    return said("--model " + (dir / "broken") + " --train-data " + (dir / data) +
                " --no-shuffle --seq-len 33 --batch-size 2 --total-batch-size 132 --lr 0 "
                "--threads 1 --on-spike rollback --out-dir " +
                (dir / out) + " " + more);
  };
  run("data.bin", "parent", "--max-steps 2 --checkpoint-every 2");
  const std::string more = "--max-steps 6 --checkpoint-every 50 ", branch = dir / "branch";
  REQUIRE(
      run("other.bin", "branch", more + "--branch-from " + (dir / "parent/step-000002")).find("step 5 is a spike") !=
      std::string::npos);
  REQUIRE(read_json(branch + "/step-000006/trainer.json")["data_cursor"] == 4 * 6 + 12);
  copy_until(branch, dir / "again", 2);
  REQUIRE(run("other.bin", "again", more).find(" is a spike") == std::string::npos);
  require_same_end(dir / "again", branch, "/step-000006");
}

TEST_CASE("a checkpoint that is being written when a spike comes is the one to return to, and no metrics are damaged",
          "[run][spikes]") {
  const TempDir dir;
  write_broken_model(dir);
  std::vector<uint16_t> tokens(33 * 40 + 1, 5);
  tokens[33 * 9 + 4] = 9;  // in the third step
  write_shard(dir / "data.bin", tokens);
  const std::string out = said("--model " + (dir / "broken") + " --train-data " + (dir / "data.bin") +
                               " --no-shuffle --seq-len 33 --batch-size 2 --total-batch-size 132 --lr 0 --threads 1 "
                               "--max-steps 6 --checkpoint-every 2 --on-spike rollback --out-dir " +
                               (dir / "out"));
  INFO(out);
  REQUIRE(out.find("step 3 is a spike") != std::string::npos);
  REQUIRE(out.find("/step-000002 (rollback 1 of") != std::string::npos);
  REQUIRE(out.find("WARNING") == std::string::npos);
}

TEST_CASE(
    "weights with which the next loss would not be finite are rolled back where a checkpoint finds it, but not by "
    "the clock",
    "[run][spikes]") {
  const TempDir dir;
  // Weight decay multiplies matrices by up to 10^4 in each step, until attention overflows.
  const auto run = [&](const std::string& out, const std::string& more) {
    const ProgramResult r = run_program(tiny(dir / out,
                                             "--lr 100 --weight-decay 100 --warmup-steps 3 --max-steps 200 "
                                             "--max-rollbacks 1 --on-spike rollback " +
                                                 more));
    INFO(r.out << r.err);
    REQUIRE(r.status == 2);
    return r;
  };
  const ProgramResult r = run("rule", "--checkpoint-every 1");
  REQUIRE(r.out.find(" is a spike: with the weights after it the loss is ") != std::string::npos);
  REQUIRE(r.err.find(" 1 rollback(s) to step ") != std::string::npos);
  run("clock", "--checkpoint-every 3 --checkpoint-minutes 1e-9");
  run("none", "--checkpoint-every 3 --checkpoint-minutes 0");
  const auto rollbacks = [&](const std::string& out) {
    return to_json_object(read_run_record(dir / out + "/run.json").rollbacks).dump();
  };
  REQUIRE(rollbacks("clock") == rollbacks("none"));
}

TEST_CASE("a rollback in a stage of a mixture resumes bit for bit from every checkpoint after it", "[run][spikes]") {
  const SpikeData data;
  data.write("one", {70, 70});
  std::ofstream(data.dir / "r.toml") << "[[stage]]\nsteps = 6\ntotal-batch-size = 132\nlr-schedule = \"constant\"\n"
                                        "[[stage]]\nsteps = 150\ndata = {one = 1, two = 1}\n"
                                        "lr-schedule = \"constant\"\n";
  const std::string recipe = "--data one=" + (data.dir / "one") + ".bin:2 --data two=" + (data.dir / "good") +
                             ".bin:1 --on-spike rollback --stages " + (data.dir / "r.toml");
  const std::string out = said(data.run_of(recipe, "whole", ""));
  INFO(out);
  REQUIRE(out.find("is a spike") != std::string::npos);
  const int64_t from = lines_of(data.dir / "whole", "rollback").back()["step"];
  REQUIRE(from >= 120);
  for (const int64_t step : {from, int64_t{150}}) {
    copy_until(data.dir / "whole", data.dir / "again", step);
    REQUIRE(said(data.run_of(recipe, "again", "")).find("is a spike") == std::string::npos);
    require_same_end(data.dir / "again", data.dir / "whole", "/step-000156");
  }
}

TEST_CASE("what a course leaves out moves later samples, and nothing else", "[run][spikes]") {
  const TempDir dir;
  std::ofstream(dir / "r.toml") << "[[stage]]\nsteps = 10\ntotal-batch-size = 32\n"
                                   "[[stage]]\nsteps = 10\ndata = {a = 3, b = 1}\ntotal-batch-size = 64\n"
                                   "[[stage]]\nsteps = 5\ntotal-batch-size = 32\n";
  Options o;
  o.data.add("a=x:1");
  o.data.add("b=y:2");
  o.seq_len = 8, o.batch_size = 2;
  o.stages = dir / "r.toml";
  const Recipe recipe = read_recipe(o);
  const std::vector<int64_t> epochs = {800, 1600};
  const Course plain(recipe, epochs), skipping(recipe, epochs, {}, {{12, 24}, {14, 8}});
  for (int64_t step = 0; step <= 25; ++step) {
    const int64_t moved = (step > 12 ? 24 : 0) + (step > 14 ? 8 : 0);
    REQUIRE(skipping.samples_after(step) == plain.samples_after(step) + moved);
    REQUIRE(skipping.tokens_after(step) == plain.tokens_after(step));
    if (step > 0) REQUIRE(skipping.learning_rate(step) == plain.learning_rate(step));
  }
  // Steps of 8 samples: those after step 12 are where three steps more would have been, one more after step 14.
  REQUIRE(skipping.sources_after(12) == plain.sources_after(12));
  REQUIRE(skipping.sources_after(13) == plain.sources_after(16));
  REQUIRE(skipping.sources_after(15) == plain.sources_after(19));
  int64_t all = 0;
  for (const SourcePosition& at : skipping.sources_after(25)) all += at.samples;
  REQUIRE(all == skipping.samples_after(25));
  // A rollback counts what the ones before it have left out from the same step on.
  const auto skips = [](std::vector<Rollback> rollbacks) { return skips_of(rollbacks, "x"); };
  REQUIRE(skips({{10, 15, 1, 1, 40, "x"}, {10, 12, 1, 1, 56, "x"}, {20, 21, 1, 1, 8, "x"}}) ==
          std::vector<Skip>{{10, 56}, {20, 8}});
  REQUIRE(skips({{10, 15, 1, 1, 40, "x"}, {20, 21, 1, 1, 8, "x"}, {8, 22, 1, 1, 160, "x"}}) ==
          std::vector<Skip>{{8, 160}});
  REQUIRE(skips({{10, 15, 1, 1, 40, "x"}, {10, 12, 1, 1, 56, "y"}}) == std::vector<Skip>{{10, 40}});
}

TEST_CASE("a rollback goes behind no change of the batch or the data, whether it is still accepted or not",
          "[run][spikes]") {
  const BrokenSamples data;
  data.write("a", {20});
  // That of step 2 is saved by a rule, that of step 3 by the clock.
  run_well(data.run("run", data.source("a") + by_clock + "--checkpoint-every 2 --max-steps 4"));
  data.remove("run", 4);
  for (const char* copy : {"accepted", "repaired"})
    fs::copy(data.dir / "run", data.dir / copy, fs::copy_options::recursive);

  // Sample 20 is in step 8. The change comes after step 3, and the start after step 5 does not accept it again.
  const std::string to_end = data.source("a") + "--checkpoint-minutes 0 --checkpoint-every 50 --max-steps 10 ";
  run_well(data.run("run", data.source("a") + by_clock + accept + "--checkpoint-every 50 --max-steps 6", 2));
  data.remove("run", 6);
  require_in(said(data.run("run", to_end, 2)),
             "step-000005 (rollback 1 of at most 3 without a later checkpoint), and leaves out the 6 samples from 16 "
             "on");
  REQUIRE(data.trainer("run", 10)["data_cursor"] == 16 + 6 + 5 * 2);

  require_in(said(data.run("accepted", to_end + accept, 2)),
             "step-000003 (rollback 1 of at most 3 without a later checkpoint), and leaves out the 10 samples from 12 "
             "on");
  REQUIRE(data.trainer("accepted", 10)["recipe"]["origin"]["step"] == 3);
  REQUIRE(data.trainer("accepted", 10)["data_cursor"] == 12 + 10 + 7 * 2);

  data.write("a", {20}, 6);
  run_well(data.run("repaired", data.source("a") + by_clock + accept + "--checkpoint-every 50 --max-steps 5"));
  data.remove("repaired", 5);
  require_in(said(data.run("repaired", to_end)), "step-000004 (rollback 1 of ");
}

TEST_CASE("what a rollback left out stays left out if the recipe changes before the next checkpoint, else it is named",
          "[run][spikes]") {
  const BrokenSamples data;
  data.write("a", {9, 17});
  const std::string often = data.source("a") + "--checkpoint-every 2 ", accepted = often + accept + "--max-steps 6 ";
  require_in(said(data.run("run", often + "--max-steps 3")), "leaves out the 4 samples from 8 on");
  data.remove("run", 3);
  fs::copy(data.dir / "run", data.dir / "few", fs::copy_options::recursive);
  // 2 samples in a step: sample 17 is in step 5. Rollbacks of the former recipe do not count.
  require_in(said(data.run("run", accepted + "--checkpoint-every 50 --max-rollbacks 1", 2)),
             "step-000002 (rollback 1 of at most 1 without a later checkpoint), and leaves out the 6 samples from 12 "
             "on");
  const json end = data.trainer("run", 6);
  REQUIRE(end["recipe"]["origin"]["samples"] == 12);
  REQUIRE(end["data_cursor"] == 12 + 6 + 4 * 2);
  REQUIRE(end["recipe"]["sources"][0]["position"] == json{0, 26 * 33, 26});
  data.remove("run", 6);
  require_in(said(data.run("run", often + "--max-steps 3")),
             "notice: the samples that rollbacks left out after the spikes at steps 5 are not left out any more: they "
             "were those of another recipe");

  // A new source may have files that are shorter than the former samples.
  write_shard(data.dir / "few.bin", std::vector<uint16_t>(25, 5));
  run_well(data.run("few", formatted("--data a={}.bin:1 --data few={}.bin:1 ", data.dir / "a", data.dir / "few") +
                               accept + "--checkpoint-every 2 --max-steps 3 --seq-len 20 --total-batch-size 40"));

  // The same in a mixture: each source is where a run is that has read them.
  data.write("b", {});
  const auto mix = [&](const std::string& file, int b) {
    return formatted("--data a={}.bin:2 --data b={}.bin:{} --checkpoint-every 2 ", data.dir / file, data.dir / "b", b);
  };
  data.write("mixed", {6});  // the 9th or 10th sample of the mixture
  data.write("good", {});
  require_in(said(data.run("mixed", mix("mixed", 1) + "--max-steps 3")), "leaves out the 4 samples from 8 on");
  run_well(data.run("good", mix("good", 1) + "--max-steps 3"));
  data.remove("mixed", 3);
  const std::string out = said(data.run("mixed", mix("mixed", 2) + accept + "--max-steps 3"));
  INFO(out);
  REQUIRE(out.find(" is a spike") == std::string::npos);
  const json at = data.trainer("mixed", 3)["recipe"]["origin"]["sources"];
  for (const size_t source : {0, 1})
    REQUIRE(at[source] == data.trainer("good", 3)["recipe"]["sources"][source]["position"]);
}

TEST_CASE("data that were moved are no change: rollbacks go as far back as before, and leave out the same",
          "[run][spikes]") {
  const BrokenSamples data;
  data.write("a", {0, 28});
  const auto run = [&](const std::string& folder, const std::string& more) {
    return said(data.run("run", data.source(folder + "a") + "--checkpoint-every 50 " + more));
  };
  require_in(run("", by_clock + "--max-steps 5"), "returns to its beginning (rollback 1 of");
  std::string before;
  for (const std::string folder : {"moved/", "again/"}) {
    data.remove("run", 5);
    fs::create_directory(data.dir / folder);
    fs::rename(data.dir / (before + "a.bin"), data.dir / (folder + "a.bin"));
    run(before = folder, by_clock + "--max-steps 5");
    data.remove("run", 5);  // the newest that is left is of the first folder
  }
  require_in(run("again/", "--max-steps 7"), "(rollback 2 of at most 3 without a later checkpoint), and leaves out");
  for (const int64_t step : {4, 5, 6, 7}) data.remove("run", step);
  REQUIRE(run("again/", "--max-steps 7").find("is a spike") == std::string::npos);  // run.json alone knows
}

TEST_CASE(
    "a run that resumes without the checkpoint of its last rule says so, and rolls back to the one it resumes from",
    "[run][spikes]") {
  const BrokenSamples data;
  data.write("a", {17});
  run_well(data.run("parent", data.source("a") + "--checkpoint-every 50 --max-steps 2"));
  const std::string more = data.source("a") + by_clock + "--checkpoint-every 50 ";
  run_well(data.run("run", more + "--max-steps 4 --resume " + (data.dir / "parent/step-000002")));
  for (const int64_t step : {2, 4}) data.remove("run", step);  // by the clock, and by a rule
  const std::string out = said(data.run("run", more + "--max-steps 6"));
  require_in(out, "notice: " + (data.dir / "run/step-000002") + ", to which a rollback would return, is not there");
  require_in(out, "step 5 is a spike");
  require_in(out, "the run returns to " + (data.dir / "run/step-000003"));
}

TEST_CASE("what does not go with a rollback is refused by name", "[run][spikes][errors]") {
  const SpikeData data;
  refused(data.run("bad", "out", "--max-rollbacks 5"), "--max-rollbacks 5 is for --on-spike rollback");
  refused(data.run("bad", "out", "--on-spike rollback --checkpoint-every 0"),
          "give it, such as --checkpoint-every 500");
  refused(data.run("bad", "out", "--on-spike rollback --overfit-batch"), "--overfit-batch, which trains on one batch");
  refused(data.run("bad", "out", "--on-spike maybe"), "expected one of stop, skip, rollback");
  REQUIRE_FALSE(fs::exists(data.dir / "out"));
}
