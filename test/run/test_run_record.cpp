// Damage to a run's own records: run.json, trainer.json, metrics.jsonl. It is rejected by name, or changes no number of
// the run that resumes.
#include "catch2.h"
#include "core/rng.h"
#include "run/checkpoints/run_dir.h"
#include "tiny_run.h"

using namespace llmc;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

// Every bit flipped; ranges deleted and doubled, whose lengths and places go through many combinations.
template <class Look>
void for_each_damage(const std::string& text, size_t every, Look&& look) {
  for (size_t at = 0; at < text.size(); at += every) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = text;
      changed[at] = static_cast<char>(changed[at] ^ static_cast<char>(1 << bit));
      look(changed);
    }
    const size_t length = 1 + at * 7 % 97;
    look(std::string(text).erase(at, length));
    look(std::string(text).insert(at, text.substr(at, length)));
  }
  look("");
}

Options recorded_example() {
  Options o;
  o.train_data = "data/*.bin";
  o.seed = 7;
  o.lr = 0.01;
  return o;
}

std::string format_1(const Options& o) {  // of the versions before the checksum
  return nlohmann::ordered_json{{"format", 1}, {"options", options_json(o)}}.dump(1) + "\n";
}

// every: as in for_each_damage
void damage_format_1(size_t every) {
  const Options o = recorded_example();
  for_each_damage(format_1(o), every, [&](const std::string& changed) {
    try {
      const RunRecord record = parse_run_record(changed, "OUT/run.json");
      if (record.options.contains("--shuffle")) REQUIRE(shuffled(record.options));  // else it is refused later
      if (record.options == json(options_json(o))) return;
      // What must match is compared with the command line; what has gone, or is not text, has its default there.
      option_changes("OUT/run.json", record.options, o);
    } catch (const Error& error) {
      REQUIRE(std::string(error.what()).find("OUT/run.json") != std::string::npos);
    }
  });
}

}  // namespace

TEST_CASE("no damage of run.json is read over", "[run]") {
  const Options o = recorded_example();
  const std::string text = run_record_text(o);
  REQUIRE(parse_run_record(text, "OUT/run.json").options == json(options_json(o)));
  int64_t refused = 0, same = 0;
  for_each_damage(text, 1, [&](const std::string& changed) {
    try {
      const json options = parse_run_record(changed, "OUT/run.json").options;
      REQUIRE(options == json(options_json(o)));
      ++same;  // between the values
    } catch (const Error& error) {
      REQUIRE(std::string(error.what()).starts_with("OUT/run.json: "));
      ++refused;
    }
  });
  REQUIRE(refused > 10 * same);
}

TEST_CASE("no damage of an older version's run.json changes the order of samples", "[run][long]") {
  damage_format_1(1);
}
TEST_CASE("a run.json without a checksum, of an older version, is read; damage does not change the order of samples",
          "[run]") {
  damage_format_1(5);
  const std::string text = format_1(recorded_example());
  auto refused = [&](const std::string& from, const std::string& to, const std::string& why) {
    REQUIRE_ERROR(parse_run_record(std::string(text).replace(text.find(from), from.size(), to), "OUT/run.json"), why);
  };
  refused("\"--shuffle\"", "\"--shuffld\"", "\"options\" has --shuffld, which this version of train_gpt does not know");
  refused("\"--shuffle\": \"true\"", "\"--shuffle\": \"trud\"",
          "OUT/run.json: --shuffle 'trud': expected true or false");
  refused("\"--shuffle\": \"true\"", "\"--shuffle\": true", "OUT/run.json: --shuffle is true, expected text");
  refused("\"format\": 1", "\"format\": 3", "\"format\" is 3, expected 1 or 2");
  refused("\"format\"", "\"parent\": 5, \"format\"", "parent is unknown");
}

TEST_CASE("a damaged run.json is refused; without it a run resumes by its checkpoint, and is the same", "[run]") {
  const TempDir dir;
  const std::string more = "--lr-schedule constant --no-shuffle ";
  run_well(tiny(dir / "run", more + "--max-steps 2"));
  run_well(tiny(dir / "whole", more + "--max-steps 4"));
  std::string text = read_whole(dir / "run/run.json");
  text.replace(text.find("\"--shuffle\""), 11, "\"--shuffld\"");
  std::ofstream(dir / "run/run.json") << text;
  const std::string resumed = "--lr-schedule constant --max-steps 4";  // in the same order as before
  const ProgramResult r = run_program(tiny(dir / "run", resumed));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("/run/run.json: its checksum is ") != std::string::npos);
  REQUIRE(r.err.find("where there are checkpoints it may be removed") != std::string::npos);
  std::ofstream(dir / "run/run.json") << text.substr(0, text.size() / 2);
  const ProgramResult cut = run_program(tiny(dir / "run", resumed));
  INFO(cut.err);
  REQUIRE(cut.status == 1);
  REQUIRE(cut.err.find("/run/run.json: not JSON") != std::string::npos);
  REQUIRE(cut.err.find("where there are checkpoints it may be removed") != std::string::npos);
  fs::remove(dir / "run/run.json");
  run_well(tiny(dir / "run", resumed));
  REQUIRE(losses(dir / "run") == losses(dir / "whole"));
  REQUIRE(state_of(dir / "run/step-000004") == state_of(dir / "whole/step-000004"));
  REQUIRE(read_run_record(dir / "run/run.json").options["--shuffle"] == "false");

  // Where there is no checkpoint, run.json alone knows; also where metrics.jsonl does not show that there was a step.
  for (const char* step : {"/step-000004", "/step-000002"}) fs::remove_all(dir / "run" + step);
  std::ofstream(dir / "run/metrics.jsonl").flush();
  run_well(tiny(dir / "run", resumed));
  REQUIRE(losses(dir / "run") == losses(dir / "whole"));
  fs::remove_all(dir / "run/step-000004");
  Log log = Log::silent();
  Options o;
  o.out_dir = dir / "run";
  const std::string good = read_whole(dir / "run/run.json");
  std::ofstream(dir / "run/run.json") << "{}";
  REQUIRE_ERROR(RunDirectory(log, o), "/run/run.json: \"format\" is null");
  json older = json::parse(good);
  older["format"] = 1;
  older.erase("checksum");
  older["options"].erase("--shuffle");
  std::ofstream(dir / "run/run.json") << older;
  const ProgramResult unsaid = run_program(tiny(dir / "run", resumed));
  INFO(unsaid.err);
  REQUIRE(unsaid.err.find("run.json does not say whether the run shuffles: give --shuffle") != std::string::npos);
}

TEST_CASE("every damage of a checkpoint's trainer.json is noticed", "[run]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 1"));
  const std::string file = dir / "run/step-000001/trainer.json", text = read_whole(file);
  for_each_damage(text, 61, [&](const std::string& changed) {
    std::ofstream(file, std::ios::binary) << changed;
    const auto fault = checkpoint_fault(dir / "run/step-000001");
    REQUIRE(fault);
    REQUIRE(fault->find("trainer.json") != std::string::npos);
  });
  // As is an option in it that no version knows, with whatever checksum.
  json trainer = json::parse(text);
  trainer["options"]["--shuffld"] = "true";
  Log log = Log::silent();
  REQUIRE_ERROR(check_resumed_options(log, file, trainer["options"], Options()), file + ": \"options\" has --shuffld");
}

TEST_CASE("no line of metrics.jsonl vanishes on resume without a word", "[run]") {
  std::string text;
  for (int64_t step = 1; step <= 6; ++step) {
    const std::string n = std::to_string(step);
    text += "{\"kind\":\"train\",\"step\":" + n + ",\"loss\":2.5,\"elapsed_s\":" + n + "}\n";
    if (step % 2 == 0) text += "{\"kind\":\"val\",\"step\":" + n + ",\"loss\":2}\n";
  }
  const MetricsKept whole = metrics_until(text, 4);
  REQUIRE(whole.validated);
  REQUIRE(whole.elapsed_s == 4);
  REQUIRE(metrics_fault(whole, 4, "m", "d").empty());
  const size_t end = whole.lines.size();
  REQUIRE(text.starts_with(whole.lines));
  const int64_t lines = std::count(whole.lines.begin(), whole.lines.end(), '\n');
  for_each_damage(text.substr(0, end), 1, [&](const std::string& changed) {
    const MetricsKept kept = metrics_until(changed + text.substr(end), 4);
    const int64_t now = std::count(kept.lines.begin(), kept.lines.end(), '\n');
    INFO(changed);
    // The last line is the validation of step 4, which is made again if it is not there. Where the first lines are
    // gone, the run may have begun later.
    if (now < lines && kept.validated && kept.first <= 1) REQUIRE_FALSE(metrics_fault(kept, 4, "m", "d").empty());
    if (!kept.validated) REQUIRE(now <= lines + 1);
  });
}

TEST_CASE("records of long runs: run.json of megabytes, the last line of a metrics.jsonl of a gigabyte", "[run]") {
  const TempDir dir;
  RunRecord record;
  for (int64_t step = 1; step <= 8000; ++step)
    record.rollbacks.push_back({step, step + 9, 12.25, 3.5, 80, "0123456789abcdef"});
  const std::string text = run_record_text(recorded_example(), record);
  REQUIRE(text.size() > size_t{1} << 20);
  std::ofstream(dir / "run.json") << text;
  REQUIRE(read_run_record(dir / "run.json").rollbacks.size() == 8000);

  Log log = Log::silent();
  Options o;
  o.out_dir = dir / "out";
  const RunDirectory directory(log, o);
  const std::string metrics = dir / "out/metrics.jsonl";
  const auto size_after = [&](uintmax_t hole, const std::string& end) {
    std::ofstream(metrics).flush();
    fs::resize_file(metrics, hole);
    std::ofstream(metrics, std::ios::app) << end;
    directory.drop_incomplete_line();
    return fs::file_size(metrics);
  };
  const uintmax_t large = (uintmax_t{1} << 30) + 7;
  REQUIRE(size_after(large, "\n" + std::string(100'000, 'x')) == large + 1);
  REQUIRE(size_after(large, "\nx\n") == large + 3);
  REQUIRE(size_after(100'000, "x") == 0);
  REQUIRE(size_after(0, "") == 0);
}

TEST_CASE("with --keep-checkpoints a rollback deletes what an earlier one left behind", "[run]") {
  const TempDir dir;
  Log log = Log::silent();
  Options o;
  o.out_dir = dir / "out";
  RunDirectory directory(log, o);
  const auto left_after = [&](bool keep) {
    for (const char* name : {"step-000010", "step-000020", "rolled-back-step-000015"})
      fs::create_directories(dir / "out/" + name + "/ema");
    directory.roll_back(log, 10, {}, keep);
    std::vector<std::string> left = names_in(o.out_dir);
    std::erase_if(left, [](const std::string& name) { return name.find("step-") == name.npos; });
    return left;
  };
  REQUIRE(left_after(false) == std::vector<std::string>{"rolled-back-step-000020", "step-000010"});
  REQUIRE(left_after(true) == std::vector<std::string>{"rolled-back-step-000015", "rolled-back-step-000020",
                                                       "rolled-back-step-000020-2", "step-000010"});
}

TEST_CASE("progress lines and escape codes are for a terminal that a person reads, never for that of a launcher",
          "[run]") {
  const TempDir dir;
  const auto on_terminal = [&](const std::string& arguments, const std::string& variables) {
    const std::string command = formatted("XDG_CACHE_HOME=build/cache {} script -qec './train_gpt {}' /dev/null >{}",
                                          variables, arguments, dir / "seen");
    REQUIRE(std::system(command.c_str()) == 0);
    return read_whole(dir / "seen");
  };
  const std::string run = tiny(dir / "out", "--max-steps 1"), escape = "\033[";
  const std::string seen = on_terminal(run, "TERM=xterm");
  INFO(seen);
  REQUIRE(seen.find("\r\033[Kstep 1: micro-batch 1/4") != std::string::npos);
  const std::string schedule = "--print-schedule --pp 2";
  int runs = 0;
  REQUIRE(on_terminal(schedule, "TERM=xterm").find(escape) != std::string::npos);
  REQUIRE(on_terminal(schedule, "TERM=xterm NO_COLOR=1").find(escape) == std::string::npos);
  for (const char* variables :
       {"TERM=dumb", "TERM=xterm OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", "TERM=xterm RANK=0 WORLD_SIZE=1"}) {
    const std::string other = on_terminal(tiny(dir / formatted("out{}", ++runs), "--max-steps 1"), variables);
    INFO(other);
    REQUIRE(other.find("1/1 ") != std::string::npos);  // the row of step 1
    REQUIRE(other.find(escape) == std::string::npos);
    REQUIRE(on_terminal(schedule, variables).find(escape) == std::string::npos);
  }
}

TEST_CASE("a checkpoint of another run is refused before ranks start", "[run]") {
  const TempDir dir;
  const auto command = [&](const std::string& more) {
    std::string all = tiny(dir / "run", more);
    return all.erase(all.find("--total-batch-size 264 "), 23);  // so it is as many tokens as all ranks have at once
  };
  run_well(command("--max-steps 2 --local-ranks 1"));
  const ProgramResult r = run_program(command("--max-steps 4 --local-ranks 2"));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.starts_with("train_gpt: " + (dir / "run/step-000002/trainer.json") + ": \"tokens_per_step\" is "));
}
