// --trace: a step as a timeline, planned and run. trace_checker.h reads the files back; damaged ones must not pass.
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "catch2.h"
#include "core/json.h"
#include "helpers.h"
#include "run/ranks.h"
#include "run/trace/step_trace.h"
#include "run/trace_checker.h"
#include "tiny_run.h"

using namespace llmc;

namespace {

using Json = nlohmann::json;

Json read_trace(const std::string& path) { return Json::parse(read_whole(path)); }

const std::string shape = "--n-layer 8 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 32 --batch-size 2 ";

// The trace of a plan on an imaginary cluster.
Json planned(const TempDir& dir, const std::string& more) {
  const std::string file = dir / "plan.json";
  run_well("--plan --machine h100x8 --model llama3:1B --dtype bf16 --batch-size 1 --seq-len 2048 --trace " + file +
           " " + more);
  return read_trace(file);
}
// The trace of a run.
Json traced(const TempDir& dir, const std::string& out, const std::string& more) {
  const std::string file = dir / (out + ".json");
  run_well("--model d8 " + shape + "--train-data " + tiny_data +
           " --threads 1 --max-steps 4 --lr 1e-2 --device cpu --out-dir " + (dir / out) + " --trace " + file + " " +
           more);
  return read_trace(file);
}

// The events that are spans of this category, "": of any.
std::vector<Json*> spans_of(Json& file, const std::string& category, const std::string& name = "") {
  std::vector<Json*> found;
  for (Json& e : file["traceEvents"])
    if (e["ph"] == "X" && (category.empty() || e["cat"] == category) && e["name"].get<std::string>().starts_with(name))
      found.push_back(&e);
  return found;
}
double end_of(const Json& span) { return span["ts"].get<double>() + span["dur"].get<double>(); }

}  // namespace

TEST_CASE("the trace of a plan has every action of every schedule once, and messages in order", "[run][plan][trace]") {
  const TempDir dir;
  for (const char* const layout :
       {"--ranks 8 --zero-stage 2 --total-batch-size 65536", "--ranks 8 --tp 2 --pp 4 --schedule gpipe",
        "--ranks 8 --pp 4 --schedule 1f1b --zero-stage 1", "--ranks 4 --pp 4 --schedule interleaved --pp-chunks 2",
        "--ranks 4 --pp 4 --schedule zb-h1", "--ranks 4 --pp 4 --schedule zb-v",
        "--ranks 4 --pp 4 --schedule 1f1b --token-slices 4", "--ranks 4 --pp 2 --cp 2 --schedule gpipe"}) {
    INFO(layout);
    Json file =
        planned(dir, std::string(layout) +
                         (std::string(layout).find("total") == std::string::npos ? " --total-batch-size 32768" : ""));
    REQUIRE(trace_faults(file) == "");
    REQUIRE(file["otherData"]["times"].get<std::string>().find("h100x8: nothing ran") != std::string::npos);
    REQUIRE(spans_of(file, "layer", "update").size() == file["otherData"]["stages"].get<size_t>());
    REQUIRE(spans_of(file, "layer", "forward of blocks.0").size() ==
            file["otherData"]["micro_batches"].get<size_t>() * file["otherData"]["slices"].get<size_t>());
  }
  Json asynchronous = planned(dir, "--ranks 4 --pp 4 --schedule pipedream --model llama3:8B --zero-stage 0");
  REQUIRE(trace_faults(asynchronous) == "");
  REQUIRE(spans_of(asynchronous, "action", "update").size() == 4 * 8);
}

TEST_CASE("a planned trace is as long as the plan says, and its waits are the exposed communication",
          "[run][plan][trace]") {
  const TempDir dir;
  const std::string file = dir / "plan.json";
  std::ofstream(dir / "m.json") << R"({"like": "h100x8", "host_update_gb_per_s": 50})";
  for (const char* const layout : {"--zero-stage 3", "--pp 4 --tp 2 --schedule zb-h1",
                                   "--zero-stage 1 --offload moments,master --offload-update host"}) {
    INFO(layout);
    const ProgramResult r = run_program("--plan --json --machine " + (dir / "m.json") +
                                        " --ranks 8 --model llama3:1B --dtype bf16 --batch-size 1 --seq-len 2048 "
                                        "--total-batch-size 65536 --trace " +
                                        file + " " + layout);
    REQUIRE(r.status == 0);
    const Json plan = Json::parse(r.out);
    Json trace = read_trace(file);
    REQUIRE(trace_faults(trace) == "");
    double end = 0;
    for (const Json* s : spans_of(trace, "step")) end = std::max(end, end_of(*s));
    REQUIRE(end * 1e-6 == Catch::Approx(plan["step_seconds"].get<double>()).epsilon(1e-3));
    if (plan["layout"]["pp"] > 1) continue;
    // On the compute stream: waits, and transfers that it makes itself.
    double exposed = 0;
    for (const char* const kind : {"wait", "transfer"})
      for (const Json* s : spans_of(trace, kind))
        if ((*s)["tid"] == 0) exposed += (*s)["dur"].get<double>() * 1e-6;
    REQUIRE(exposed > 0);
    REQUIRE(exposed == Catch::Approx(plan["time"]["exposed_communication_seconds"].get<double>()).epsilon(1e-3));
  }
}

TEST_CASE("the trace of a run has every rank, and every action of its schedule once", "[run][trace]") {
  const TempDir dir;
  int out = 0;
  for (const char* const layout :
       {"--total-batch-size 256", "--local-ranks 4 --zero-stage 3 --total-batch-size 512",
        "--local-ranks 4 --tp 2 --pp 2 --total-batch-size 256", "--local-ranks 2 --pp 2 --schedule gpipe",
        "--local-ranks 2 --pp 2 --schedule interleaved --total-batch-size 256",
        "--local-ranks 4 --pp 4 --schedule zb-h1 --total-batch-size 512",
        "--local-ranks 4 --pp 2 --schedule zb-v --total-batch-size 512",
        "--local-ranks 2 --pp 2 --token-slices 3 --total-batch-size 256",
        "--local-ranks 4 --pp 4 --schedule pipedream --model llama2:7B --n-kv-head 2 --n-ffn 20",
        "--local-ranks 4 --cp 2 --pp 2", "--local-ranks 3 --dp-sync parameter-server"}) {
    INFO(layout);
    Json file = traced(dir, formatted("run{}", out++), layout);
    REQUIRE(trace_faults(file) == "");
    REQUIRE(file["otherData"]["step"] == 3);
    const auto ranks = file["otherData"]["ranks"].get<size_t>();
    REQUIRE(spans_of(file, "host", "enqueue the step").size() == ranks);
    REQUIRE(spans_of(file, "op", "linear_forward").size() > 0);
    if (ranks > 1) REQUIRE(spans_of(file, "transfer").size() > 0);
  }
}

TEST_CASE("a trace of several processes has the ranks of all", "[run][trace][net]") {
  const TempDir dir;
  const std::string common = "--model d8 " + shape + "--train-data " + tiny_data +
                             " --threads 1 --max-steps 2 --device cpu --world-size 2 --local-ranks 2 --comm tcp --pp 2 "
                             "--total-batch-size 512 --rendezvous file:" +
                             (dir / "meet") + " --out-dir " + (dir / "out") + " --trace " + (dir / "t.json");
  int status = -1;
  std::thread other([&] { status = run_program(common + " --rank 1", "TRAIN_GPT_TOKEN=secret-of-a-test").status; });
  const ProgramResult first = run_program(common + " --rank 0", "TRAIN_GPT_TOKEN=secret-of-a-test");
  other.join();
  INFO(first.err);
  REQUIRE(first.status == 0);
  REQUIRE(status == 0);
  const Json file = read_trace(dir / "t.json");
  REQUIRE(trace_faults(file) == "");
  REQUIRE(file["otherData"]["ranks_of_run"].size() == 4);
  REQUIRE(file["otherData"]["step"] == 2);  // the last
}

TEST_CASE("a trace changes no number, whichever step it shows", "[run][trace]") {
  const TempDir dir;
  const std::string layout = "--n-layer 2 --local-ranks 2 --pp 2 --max-steps 6 ";
  run_well(tiny(dir / "without", layout));
  for (const char* const step : {"1", "4", "6"}) {
    const std::string out = dir / ("step" + std::string(step)), file = out + ".json";
    run_well(tiny(out, layout + "--checkpoint-every 2 --trace " + file + " --trace-step " + step));
    REQUIRE(losses(out) == losses(dir / "without"));
    REQUIRE(metric(out, "train", "grad_norm") == metric(dir / "without", "train", "grad_norm"));
    Json trace = read_trace(file);
    REQUIRE(trace_faults(trace) == "");
    REQUIRE(trace["otherData"]["step"] == std::stoi(step));
    REQUIRE(spans_of(trace, "host", "validation, sample, checkpoint").size() == (*step == '1' ? 0u : 2u));
  }
  // A resumed run counts from where it resumes.
  const std::string resumed = dir / "resumed.json";
  run_well(
      tiny(dir / "step4", "--n-layer 2 --local-ranks 2 --pp 2 --max-steps 9 --trace " + resumed + " --trace-step 2"));
  REQUIRE(read_trace(resumed)["otherData"]["step"] == 8);
}

TEST_CASE("a trace that cannot be written, or would show nothing, is refused before training", "[run][trace]") {
  const TempDir dir;
  const auto refused = [&](const std::string& arguments, const std::string& why) {
    const ProgramResult r = run_program(arguments);
    INFO(r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(why) != std::string::npos);
  };
  const std::string out = dir / "out";
  refused(tiny(out, "--max-steps 3 --trace " + (dir / "none/t.json")),
          "--trace " + (dir / "none/t.json") + ": cannot create");
  refused(tiny(out, "--max-steps 3 --trace " + dir.path()), "is a directory: name a file");
  refused(tiny(out, "--max-steps 3 --trace " + (dir / "t.json") + " --trace-step 4"),
          "--trace-step 4: only 3 steps are left: use at most 3");
  refused(tiny(out, "--max-steps 3 --trace-step 2"), "--trace-step 2 is for --trace");
  refused(tiny(out, "--max-steps 3 --profile --trace " + (dir / "t.json")), "--trace with --profile");
  REQUIRE_FALSE(std::filesystem::exists(out + "/metrics.jsonl"));
  REQUIRE_FALSE(std::filesystem::exists(dir / "t.json"));
  REQUIRE_FALSE(std::filesystem::exists(dir / "t.json.partial"));
  refused("--plan --device cpu --model d2 --trace " + (dir / "t.json"), "name one by --machine");
  refused("--plan --machine h100x8 --model d2 --trace-step 1 --trace " + (dir / "t.json"),
          "all steps of a plan are equal");
  refused("--plan --machine h100x8 --ranks 2 --dp-sync parameter-server --model d2 --trace " + (dir / "t.json"),
          "there is no clock for --dp-sync parameter-server");
  refused("--plan --machine h100x8 --model d2 --trace " + (dir / "none/t.json"), "cannot create");
  refused("--generate --model out --trace " + (dir / "t.json"), "--trace");
}

TEST_CASE("ranks ask each other by texts whether to go on only until they know how long a step takes", "[run][trace]") {
  const TempDir dir;
  for (const std::string layout : {"--local-ranks 2", "--local-ranks 2 --pp 2 --n-layer 2"})
    for (const int step : {1, 6}) {
      const std::string file = dir / "t.json", out = dir / "out";
      std::filesystem::remove_all(out);
      run_well(tiny(out, formatted("{} --max-steps 7 --trace-step {} --trace {}", layout, step, file)));
      INFO(layout << ", step " << step);
      const std::string text = read_whole(file);
      REQUIRE(text.find("agree to go on") != std::string::npos);
      REQUIRE((text.find("ask all ranks whether to go on") != std::string::npos) == (step == 1));
    }
}

TEST_CASE("a run that ends before the traced step says that there is no trace", "[run][trace]") {
  const TempDir dir;
  const ProgramResult r = run_program(
      tiny(dir / "out", "--max-steps 100000 --time-limit 0.01 --trace-step 90000 --trace " + (dir / "t.json")));
  INFO(r.err);
  REQUIRE(r.status == 75);
  REQUIRE(r.out.find("no trace was written: step 90000 was not reached") != std::string::npos);
  REQUIRE_FALSE(std::filesystem::exists(dir / "t.json"));
}

TEST_CASE("the checker of traces finds damage", "[run][trace]") {
  const TempDir dir;
  const Json good = traced(dir, "run", "--local-ranks 4 --pp 2 --schedule zb-h1 --total-batch-size 512");
  REQUIRE(trace_faults(good) == "");
  const auto finds = [&](const char* part, const std::function<void(Json&)>& damage) {
    Json bad = good;
    damage(bad);
    INFO(part);
    REQUIRE_THAT(trace_faults(bad), Catch::Matchers::ContainsSubstring(part));
  };
  const auto erase = [](Json& file, const Json* event) {
    Json& all = file["traceEvents"];
    all.erase(all.begin() + (event - &all[0]));
  };
  const auto ends = [](Json& file, const char* ph) -> Json& {
    for (Json& e : file["traceEvents"])
      if (e["ph"] == ph) return e;
    throw Error("no such event");
  };
  finds("process 0 computes", [&](Json& f) { erase(f, spans_of(f, "action", "forward")[1]); });
  finds("process 0 computes", [&](Json& f) {  // twice
    Json copy = *spans_of(f, "action", "forward")[0];
    copy["ts"] = copy["ts"].get<double>() - 1e3;
    f["traceEvents"].push_back(copy);
  });
  finds("process 0 computes", [&](Json& f) {  // in another order
    const auto actions = spans_of(f, "action", "forward");
    std::swap((*actions[0])["args"], (*actions[1])["args"]);
  });
  finds("0 times, expected 1", [&](Json& f) { erase(f, spans_of(f, "action", "send activations")[0]); });
  finds("overlaps", [&](Json& f) {
    Json& op = *spans_of(f, "op", "attention_forward")[0];
    op["dur"] = op["dur"].get<double>() + 1e6;
  });
  finds(" lies in ", [&](Json& f) {  // an op in an op
    Json copy = *spans_of(f, "op", "attention_forward")[0];
    copy["name"] = "inner";
    copy["ts"] = copy["ts"].get<double>() + 0.001;
    copy["dur"] = copy["dur"].get<double>() - 0.002;
    f["traceEvents"].push_back(copy);
  });
  finds("ends before it begins", [&](Json& f) { (*spans_of(f, "op")[0])["dur"] = -1.0; });
  finds("not the schema", [&](Json& f) { spans_of(f, "op")[0]->erase("dur"); });
  finds("not the schema", [&](Json& f) { f.erase("traceEvents"); });
  finds("an unknown kind", [&](Json& f) { (*spans_of(f, "op")[0])["cat"] = "something"; });
  finds("an unknown phase", [&](Json& f) { (*spans_of(f, "op")[0])["ph"] = "B"; });
  finds("has no group", [&](Json& f) { (*spans_of(f, "transfer")[0])["args"]["group"] = ""; });
  finds("is sent 1 times and received 0 times", [&](Json& f) { erase(f, &ends(f, "f")); });
  finds("is sent 0 times", [&](Json& f) { ends(f, "s")["id"] = 1 << 20; });
  finds("is received before it is sent", [&](Json& f) { ends(f, "s")["ts"] = 1e9; });
  finds("an arrow lies in no action", [&](Json& f) { ends(f, "f")["ts"] = 1e9; });
  finds("an arrow does not end in its span", [&](Json& f) { ends(f, "f").erase("bp"), ends(f, "f")["bp"] = "x"; });
  finds("begins before", [&](Json& f) {  // a pass before its message
    for (Json* s : spans_of(f, "action", "receive activations 0")) (*s)["dur"] = (*s)["dur"].get<double>() + 1e6;
  });
  finds("process 3 is missing", [&](Json& f) {
    Json kept = Json::array();
    for (const Json& e : f["traceEvents"])
      if (e["pid"] != 3) kept.push_back(e);
    f["traceEvents"] = kept;
  });
  finds("has no name", [&](Json& f) {
    for (Json& e : f["traceEvents"])
      if (e["name"] == "thread_name" && e["args"]["name"] == "reduce") e["name"] = "other";
  });
}

TEST_CASE("spans that an error leaves open end with the last that was recorded; ops beyond the limit are counted",
          "[run][trace]") {
  StreamTrace trace("compute", TraceZero{}, 1);
  trace.open({.kind = SpanKind::step, .name = "step"}, 1);
  REQUIRE(trace.takes_op());
  trace.add({.kind = SpanKind::op, .name = "copy"}, 1.5, 2);
  REQUIRE_FALSE(trace.takes_op());
  REQUIRE(trace.ops_left_out() == 1);
  trace.open({.kind = SpanKind::layer, .name = "update"}, 3);
  const Track track = trace.take();
  REQUIRE(track.spans.size() == 3);
  for (const TraceSpan& s : track.spans) REQUIRE((s.end == (s.kind == SpanKind::op ? 2 : 3)));
}

TEST_CASE("the step that is traced is the third, or the last", "[run][trace]") {
  REQUIRE(traced_step({}, 0, 100) == 3);
  REQUIRE(traced_step({}, 0, 2) == 2);
  REQUIRE(traced_step({}, 40, 100) == 43);
  REQUIRE(traced_step({}, 99, 100) == 100);
  REQUIRE(traced_step(60, 40, 100) == 100);
  REQUIRE_ERROR(traced_step(61, 40, 100), "only 60 steps are left after step 40: use at most 60");
  REQUIRE_ERROR(traced_step(2, 99, 100), "only 1 step is left after step 99: use at most 1");
}

TEST_CASE("clocks of several machines are compared to within the uncertainty that is reported", "[run][trace]") {
  constexpr int ranks = 5;
  // Ranks 1 and 2 have one clock, which is behind; 3 and 4 each their own.
  const int64_t ahead[ranks] = {0, -5'000'000'000, -5'000'000'000, 3'000'000, 7'777'777'777};
  const char* const clocks[ranks] = {"a", "b", "b", "c", "d"};
  std::vector<ClockOffset> found(ranks), same(ranks);
  World world(Layout{.zero = {.shards = ranks}}.mesh());
  run_ranks(world, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const auto control = world.join(rank, "control", {0, 1, 2, 3, 4}, 0);
    const auto now = [&] {
      return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
                 .count() +
             ahead[r];
    };
    found[r] = compare_clocks(*control, clocks[r], now);
    same[r] = compare_clocks(*control, "a", now);
  });
  for (size_t r = 0; r < ranks; ++r) {
    INFO(r << ": " << found[r].ns << " +- " << found[r].uncertainty_ns);
    REQUIRE(std::abs(found[r].ns - ahead[r]) <= found[r].uncertainty_ns);
    REQUIRE((found[r].uncertainty_ns > 0) == (r > 0));
    REQUIRE((same[r].ns == 0 && same[r].uncertainty_ns == 0));
  }
  REQUIRE(found[1].ns == found[2].ns);
}
