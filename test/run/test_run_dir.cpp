// A run's directory: its contents, which checkpoint a start resumes from, and the commands suggested at the end.
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "catch2.h"
#include "run/checkpoints/run_dir.h"
#include "run/reports/next_steps.h"
#include "tiny_run.h"
#include "train/lr_schedule.h"

using namespace llmc;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

Options in(const std::string& out) {
  Options o;
  o.out_dir = out;
  return o;
}

// Drops root, which ignores permissions, until the end of the scope.
class OrdinaryUser {
 public:
  OrdinaryUser() : root_(geteuid() == 0) {
    if (root_) REQUIRE(seteuid(65534) == 0);
  }
  ~OrdinaryUser() {
    if (root_) REQUIRE(seteuid(0) == 0);
  }
  OrdinaryUser(const OrdinaryUser&) = delete;
  OrdinaryUser& operator=(const OrdinaryUser&) = delete;

 private:
  bool root_;
};

// Changes trainer.json of a checkpoint, keeping the checkpoint valid.
template <class Change>
void edit_trainer(const std::string& checkpoint, Change&& change) {
  json trainer = read_json(checkpoint + "/trainer.json"), manifest = read_json(checkpoint + "/manifest.json");
  change(trainer);
  manifest["files"]["trainer.json"] = write_recorded_text(checkpoint + "/trainer.json", trainer.dump()).to_json();
  std::ofstream(checkpoint + "/manifest.json") << manifest;
}

void require_in(const std::string& text, const std::string& expected) {
  INFO(text << "\nexpected: " << expected);
  REQUIRE(text.find(expected) != std::string::npos);
}

}  // namespace

TEST_CASE("an out directory that cannot be read, and odd things in it, are refused by name", "[run][checkpoint]") {
  const TempDir dir;
  REQUIRE(chmod(dir.path().c_str(), 0755) == 0);
  Log log = Log::silent();
  const std::string hidden = dir / "hidden", odd = dir / "odd";
  for (const std::string& made : {hidden, odd}) fs::create_directory(made);
  for (const mode_t mode : {0000, 0111, 0333}) {  // no access; search only; search and write
    REQUIRE(chmod(hidden.c_str(), mode) == 0);
    const OrdinaryUser user;
    REQUIRE_ERROR(RunDirectory(log, in(hidden)), hidden);
    REQUIRE_ERROR(RunDirectory(log, in(hidden)), "Permission denied");
  }
  REQUIRE(chmod(hidden.c_str(), 0755) == 0);
  fs::create_symlink("loop", odd + "/loop");
  REQUIRE_ERROR(RunDirectory(log, in(odd)), "holds loop, which does not belong to a run");
  fs::remove(odd + "/loop");
  fs::create_symlink("run.json", odd + "/run.json");
  REQUIRE_ERROR(RunDirectory(log, in(odd)), "odd/run.json: Too many levels");
  fs::remove(odd + "/run.json");
  std::ofstream(dir / "file") << "x";
  REQUIRE_ERROR(RunDirectory(log, in(dir / "file")), "cannot create this directory");
  REQUIRE_ERROR(RunDirectory(log, in(dir / "file/below")), "cannot create this directory");
  const RunDirectory good(log, in(odd));
}

TEST_CASE("a run without a completed step may be replaced by one with other options; one with a step may not",
          "[run][checkpoint]") {
  const TempDir dir;
  Log log = Log::silent();
  Options first = in(dir / "run"), other = first;
  other.seq_len = first.seq_len + 1;
  RunDirectory(log, first).claim(log, first, {});
  std::ofstream(dir / "run/metrics.jsonl") << "{\"kind\":\"val\",\"step\":0}\n";
  {  // a start that dies before it claims the directory leaves it as it was
    const RunDirectory died(log, other);
  }
  RunDirectory(log, other).claim(log, other, {});
  REQUIRE(fs::file_size(dir / "run/metrics.jsonl") == 0);  // the validation was of the first one's model
  // Nor does a run that resumes from a checkpoint of elsewhere take over what it finds.
  std::ofstream(dir / "run/metrics.jsonl") << "{\"kind\":\"val\",\"step\":0,\"elapsed_s\":9}\n";
  REQUIRE(RunDirectory(log, other).claim(log, other, ResumePoint{dir / "elsewhere/step-000002", 2, {}}).elapsed_s == 0);
  REQUIRE(fs::file_size(dir / "run/metrics.jsonl") == 0);
  std::ofstream(dir / "run/metrics.jsonl") << "{\"kind\":\"train\",\"step\":1}\n";
  REQUIRE_ERROR(RunDirectory(log, first), "--seq-len was");
  const RunDirectory same(log, other);
}

TEST_CASE("a resumed run keeps the order of its samples; the opposite option is refused", "[run][checkpoint]") {
  const TempDir dir;
  auto losses_of = [&](const std::string& run) {
    std::vector<double> losses;
    std::istringstream lines(read_whole(dir / (run + "/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);)
      if (const json object = json::parse(line); object["kind"] == "train") losses.push_back(object["loss"]);
    return losses;
  };
  auto train = [&](const std::string& run, const std::string& more) {
    run_well(tiny(dir / run, "--lr-schedule constant " + more));
    return losses_of(run);
  };
  const std::vector<double> shuffled = train("shuffled", "--max-steps 4"),
                            in_order = train("in_order", "--max-steps 4 --no-shuffle");
  REQUIRE(shuffled != in_order);
  REQUIRE(train("also_shuffled", "--max-steps 4 --shuffle") == shuffled);
  // The run of an older version, which recorded "false" by default, or did not record the option.
  for (const std::string run : {"off", "not_recorded"}) {
    INFO(run);
    train(run, "--max-steps 2 --no-shuffle");
    auto edit = [&](json& options) {
      if (run == "off") options["--shuffle"] = "false";
      else options.erase("--shuffle");
    };
    json record = read_json(dir / (run + "/run.json"));
    edit(record["options"]);
    record["format"] = 1;
    record.erase("checksum");
    std::ofstream(dir / (run + "/run.json")) << record;
    edit_trainer(dir / (run + "/step-000002"), [&](json& trainer) { edit(trainer["options"]); });
    const ProgramResult refused = run_program(tiny(dir / run, "--lr-schedule constant --max-steps 4 --shuffle"));
    REQUIRE(refused.status == 1);
    REQUIRE(refused.err.find("--shuffle was 'false' and is now 'true'") != std::string::npos);
    REQUIRE(train(run, "--max-steps 3") == std::vector(in_order.begin(), in_order.begin() + 3));
    REQUIRE(train(run, "--max-steps 4 --no-shuffle") == in_order);
    train(run + "-elsewhere", "--max-steps 4 --resume " + (dir / (run + "/step-000003")));
    REQUIRE(losses_of(run + "-elsewhere") == std::vector{in_order[3]});
  }
  train("shuffled-half", "--max-steps 2");
  REQUIRE(train("shuffled-half", "--max-steps 4") == shuffled);
  const ProgramResult refused =
      run_program(tiny(dir / "shuffled-half", "--lr-schedule constant --max-steps 5 --no-shuffle"));
  REQUIRE(refused.err.find("--shuffle was 'true' and is now 'false'") != std::string::npos);
}

TEST_CASE("metrics are truncated after the step; damaged lines are moved to a file, with a warning",
          "[run][checkpoint]") {
  const TempDir dir;
  Log log = Log::silent();
  RunDirectory directory(log, in(dir / "run"));
  const std::string kept =
                        "{\"kind\":\"train\",\"step\":1}\n{\"kind\":\"train\",\"step\":2,\"elapsed_s\":12.5}\n"
                        "{\"kind\":\"gpu\",\"step\":2,\"elapsed_s\":null}\n",
                    bad = "{\"kind\":3,\"step\":2}\n{\"step\":2}\n{\"kind\":\"val\",\"step\":\"2\"}\n[2]\n\n",
                    later = "{\"kind\":\"val\",\"step\":3,\"elapsed_s\":99}\n";
  directory.claim(log, in(dir / "run"), {});
  std::ofstream(dir / "run/metrics.jsonl") << kept << bad << later << "{\"kind\":\"val\",\"st";
  const MetricsKept end = directory.claim(log, in(dir / "run"), ResumePoint{dir / "run/step-000002", 2, {}});
  REQUIRE_FALSE(end.validated);
  REQUIRE(end.elapsed_s == 12.5);
  REQUIRE(read_whole(dir / "run/metrics.jsonl") == kept);
  REQUIRE(read_whole(dir / "run/metrics-damaged.txt") == bad);
  REQUIRE(metrics_fault(metrics_until(kept + bad + later, 2), 2, "M", "D") ==
          "M: 5 damaged line(s), the first is line 4: moved to D");
  REQUIRE(metrics_fault(metrics_until(later + kept, 2), 2, "M", "D") ==
          "M: 1 damaged line(s), the first is line 1: moved to D");
  REQUIRE(metrics_fault(metrics_until(kept, 5), 5, "M", "D") == "M: 2 line(s) for steps 1 to 5");
  REQUIRE(metrics_fault(metrics_until("", 5), 5, "M", "D") == "M: no line of a step up to 5");
}

TEST_CASE("a run that was stopped between its last update and its last validation does that validation",
          "[run][checkpoint]") {
  const TempDir dir;
  const std::string options = tiny(dir / "run",
                                   "--max-steps 3 --val-every 2 --val-steps 4 --keep-best --val-data "
                                   "test/golden/gpt2_tiny/train.bin");
  run_well(options);
  const std::string whole = read_whole(dir / "run/metrics.jsonl");
  const size_t at = whole.rfind("{\"kind\":\"val\",\"step\":3,");
  REQUIRE(at != whole.npos);
  const std::string before = whole.substr(0, at), last = whole.substr(at, whole.find('\n', at) - at);
  std::ofstream(dir / "run/metrics.jsonl") << before;
  run_well(options);
  const std::string again = read_whole(dir / "run/metrics.jsonl"), redone = again.substr(again.rfind("{\"kind\""));
  REQUIRE(again.substr(0, again.size() - redone.size()) == before);
  REQUIRE(json::parse(redone)["loss"] == json::parse(last)["loss"]);
  REQUIRE(json::parse(redone)["elapsed_s"] > json::parse(last)["elapsed_s"].get<double>() / 2);  // counted on
  REQUIRE(run_program(options).out.find("already complete") != std::string::npos);
  REQUIRE(read_whole(dir / "run/metrics.jsonl") == again);
}

TEST_CASE("--keep-best says why there is no OUT/best if no validation is better than the first", "[run][checkpoint]") {
  const TempDir dir;
  const auto best = [&](const std::string& out, const std::string& more) {
    const std::string log = said(tiny(dir / out,
                                      "--max-steps 4 --val-every 2 --val-steps 4 --keep-best --val-data "
                                      "test/golden/gpt2_tiny/train.bin " +
                                          more));
    const size_t notice = log.find("notice: --keep-best: ");
    REQUIRE(fs::exists(dir / out + "/best") == (notice == log.npos));
    return notice == log.npos ? "" : log.substr(notice, log.find('\n', notice) - notice);
  };
  REQUIRE(best("better", "").empty());
  const std::string notice = best("same", "--lr 0");
  REQUIRE(notice ==
          formatted("notice: --keep-best: no validation loss is below that of the weights that the run began with, "
                    "{:.4f}, so there is no {}/best",
                    validations(dir / "same").at(0), dir / "same"));
}

TEST_CASE("a run that was stopped before its first step neither locks its directory nor leaves its validation behind",
          "[run][checkpoint]") {
  const TempDir dir;
  const std::string val = " --val-data test/golden/gpt2_tiny/train.bin --val-steps 1 ";
  fs::create_directories(dir / "run");
  std::ofstream(dir / "run/metrics.jsonl") << "{\"kind\":\"val\",\"step\":0,\"loss\":5}\n";
  std::ofstream(dir / "run/run.json") << "{\"format\":1,\"options\":{\"--seed\":\"1\"}}";
  // A second start that dies on the way, at whatever operation; run.json and metrics.jsonl are replaced by the third.
  for (const char* at : {"1", "4", "8"}) {
    const ProgramResult died =
        run_program(tiny(dir / "run", "--max-steps 1"),
                    formatted("FILE_OPS_KILL={} FILE_OPS_ROOT={} LD_PRELOAD=build/file_ops.so", at, dir.path()));
    REQUIRE(died.status == 128 + 9);
  }
  run_well(tiny(dir / "run", "--max-steps 1 --seed 7" + val));
  run_well(tiny(dir / "other", "--max-steps 1 --seed 7" + val));
  REQUIRE(validations(dir / "run") == validations(dir / "other"));
  REQUIRE(validations(dir / "run").size() == 2);
}

TEST_CASE("training data that changed between a run and its resume are named", "[run][checkpoint]") {
  const TempDir dir;
  for (const char* name : {"a.bin", "b.bin"}) fs::copy("test/golden/gpt2_tiny/train.bin", dir / name);
  const std::string data = " --train-data \"" + dir.path() + "/?.bin\" ";
  run_well(tiny(dir / "run", "--max-steps 2" + data));
  std::fstream changed(dir / "b.bin", std::ios::binary | std::ios::in | std::ios::out);
  changed.seekp(-2, std::ios::end);  // the last token
  changed.put(1);
  changed.close();
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 4" + data));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("--train-data: " + (dir / "b.bin") + " has changed since the run began") != std::string::npos);
  edit_trainer(dir / "run/step-000002", [](json& trainer) {
    trainer.erase("data_checksums");  // as in a checkpoint of an older version
    trainer["recipe"]["sources"][0].erase("shards");
    trainer["val_checksums"] = {"0123456789abcdef"};
  });
  const ProgramResult older = run_program(tiny(dir / "run", "--max-steps 4 --val-data " + (dir / "a.bin") + data));
  REQUIRE(older.status == 0);
  REQUIRE(older.out.find("notice: --val-data has changed") != std::string::npos);
}

TEST_CASE("a run that resumes with more steps is told what its learning rate does", "[run][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 10 --final-lr-frac 0.1"));
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 20 --final-lr-frac 0.1"));
  REQUIRE(r.status == 0);
  INFO(r.out);
  const LrSchedule before{LrShape::cosine, 1e-2, 0, 10, 0.1}, now{LrShape::cosine, 1e-2, 0, 20, 0.1};
  REQUIRE(r.out.find(formatted("notice: 20 steps instead of 10: the learning rate was {:.2e} at step 10 and is {:.2e} "
                               "at step 11, on its way to {:.2e} (cosine)\n",
                               learning_rate(before, 10), learning_rate(now, 11), learning_rate(now, 20))) !=
          std::string::npos);
}

TEST_CASE("--tokens and --epochs train as many steps as --max-steps would; a resumed run may extend them",
          "[run][checkpoint]") {
  const TempDir dir;
  const auto run = [&](const char* out, const char* options) {
    const ProgramResult r = run_program(tiny(dir / out, options));
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out;
  };
  run("steps", "--max-steps 8");
  // 2000 tokens / 264 tokens per step
  REQUIRE(run("run", "--tokens 2k").find(" 8 (--tokens 2k) = 2,112 tokens = 0.4 epochs\n") != std::string::npos);
  REQUIRE(losses(dir / "run") == losses(dir / "steps"));
  const json before = json::parse(read_whole(dir / "run/step-000008/trainer.json"));
  REQUIRE(before["options"]["--tokens"] == "2k");
  REQUIRE(before["max_steps"] == 8);
  const std::string more = run("run", "--epochs 0.5");  // of 160 samples, 8 per step
  REQUIRE(more.find("notice: --tokens was '2k' and is now ''\n") != std::string::npos);
  REQUIRE(more.find("notice: 10 steps instead of 8: the learning rate was 0.00e+00 at step 8") != std::string::npos);
  REQUIRE(losses(dir / "run").size() == 10);
  REQUIRE(json::parse(read_whole(dir / "run/step-000010/trainer.json"))["options"]["--epochs"] == "0.5");
  REQUIRE(run("run", "--tokens 1k").find("already complete: " + (dir / "run") + " is at step 10, beyond step 4\n") !=
          std::string::npos);

  const std::string plan = run("run", "--plan --epochs 1.5");
  REQUIRE(plan.find(" 30 (--epochs 1.5) = 7,920 tokens, ") != std::string::npos);
  // Three times 160 samples in steps of 128: no epoch is rounded.
  const std::string large = run("run", "--plan --epochs 3 --total-batch-size 4224");
  REQUIRE(large.find(" 4 (--epochs 3) = 16,896 tokens, ") != std::string::npos);
  REQUIRE(run_program("--plan --epochs 1").err.find("--epochs 1 with --plan: how many steps") != std::string::npos);
}

TEST_CASE("--resume accepts a checkpoint of its own out directory in any spelling", "[run][checkpoint]") {
  const TempDir dir;
  const std::string more = "--max-steps 6 --checkpoint-every 2 ";
  run_well(tiny(dir / "whole", more));
  fs::create_directory_symlink(dir.path(), dir / "link");
  fs::create_directory_symlink(dir / "run/step-000004", dir / "four");
  for (const char* spelled : {"run/step-000004", "run/step-000004/", "run/step-000004//", "./run/../run/step-000004",
                              "link/run/step-000004", "four", "four/"}) {
    INFO(spelled);
    fs::remove_all(dir / "run");
    fs::copy(dir / "whole", dir / "run", fs::copy_options::recursive);
    fs::remove_all(dir / "run/step-000006");
    run_well(tiny(dir / "run", more + "--resume " + (dir / spelled)));
    REQUIRE(read_whole(dir / "run/step-000006/model.safetensors") ==
            read_whole(dir / "whole/step-000006/model.safetensors"));
  }
}

TEST_CASE("--resume refuses another run's checkpoint if the out directory has its own", "[run][checkpoint]") {
  const TempDir dir;
  for (const char* run : {"a", "b"}) run_well(tiny(dir / run, "--max-steps 4 --lr-schedule constant"));
  auto refused = [&](const std::string& resume, const std::string& why) {
    const ProgramResult r =
        run_program(tiny(dir / "a", "--max-steps 6 --lr-schedule constant --resume " + (dir / resume)));
    INFO(r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(why) != std::string::npos);
  };
  const std::string own = "/a holds checkpoints of its own, the last of step 4";
  refused("b/step-000004", own);
  refused("b",
          "this is not a checkpoint; expected auto, never, or a checkpoint's directory, " + (dir / "b/step-000004"));
  refused("c", "No such file or directory; expected auto, never");
  run_well(tiny(dir / "b", "--max-steps 7 --lr-schedule constant"));
  refused("b/step-000007", own);  // a later step than any of this run
}

TEST_CASE("a checkpoint whose data cursor does not match its step is refused", "[run][checkpoint]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--max-steps 4 --total-batch-size 264"));
  const json before = read_json(dir / "run/step-000004/trainer.json");
  REQUIRE(before["data_cursor"] == 4 * 8);
  for (const json& cursor : {json(24), json("32"), json(), json(32.5)}) {
    edit_trainer(dir / "run/step-000004", [&](json& trainer) { trainer["data_cursor"] = cursor; });
    const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 8 --total-batch-size 264"));
    INFO(r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find("trainer.json: \"data_cursor\" is " + cursor.dump() + ", but 32") != std::string::npos);
  }
}

namespace {

// The command after `title` in a run's final output.
std::string next_command(const ProgramResult& r, const std::string& title) {
  const size_t table = r.out.rfind("\nnext: "), line = r.out.find("\n  " + title + " ", table);
  REQUIRE(table != std::string::npos);
  REQUIRE(line != std::string::npos);
  const size_t begin = r.out.find_first_not_of(' ', line + 3 + title.size());
  return r.out.substr(begin, r.out.find('\n', begin) - begin);
}

// Runs a command line in a shell, as if pasted.
ProgramResult run_shell(const std::string& command) {
  const std::string program = "./train_gpt ";
  REQUIRE(command.starts_with(program));
  return run_program(command.substr(program.size()));
}

}  // namespace

TEST_CASE("the commands suggested at the end of a run work when pasted", "[run][checkpoint]") {
  const TempDir dir;
  // A table of 211 one-byte tokens: it can decode but not encode a prompt.
  std::string table(1024, '\0');
  const uint32_t header[4] = {20240328, 2, 211, 3};
  std::memcpy(table.data(), header, sizeof header);
  for (int i = 0; i < 211; ++i) table += std::string("\1") + static_cast<char>('a' + i % 26);
  std::ofstream(dir / "table.bin", std::ios::binary) << table;
  for (const std::string& more :
       {std::string("--prompt=\"--it's \\$HOME\""), "--tokenizer " + (dir / "table.bin"), std::string("--prompt []")}) {
    INFO(more);
    const std::string out = dir / "it's [1] $x";
    fs::remove_all(out);
    fs::remove_all(out + "-continued");
    run_well(tiny("\"" + dir.path() + "/it's [1] \\$x/\"", "--max-steps 2 " + more));
    const ProgramResult first =
        run_program(tiny("\"" + dir.path() + "/it's [1] \\$x//\"",
                         "--max-steps 3 --resume \"" + dir.path() + "/it's [1] \\$x/step-000002\" " + more));
    INFO(first.out << first.err);
    REQUIRE(first.status == 0);

    const ProgramResult generated = run_shell(next_command(first, "generate"));
    INFO(generated.err);
    REQUIRE(generated.status == 0);
    if (more.starts_with("--prompt=")) REQUIRE(generated.out.starts_with("--it's $HOME"));
    if (more.starts_with("--tokenizer")) REQUIRE(generated.out.find('<') == std::string::npos);  // all ids are known

    const ProgramResult on = run_shell(next_command(first, "train further"));
    INFO(on.err);
    REQUIRE(on.status == 0);
    REQUIRE(fs::exists(out + "-continued/step-000003"));
    // If that directory is taken, another one is suggested.
    const ProgramResult again = run_program(tiny("\"" + dir.path() + "/it's [1] \\$x/\"", "--max-steps 3 " + more));
    REQUIRE(again.out.find("already complete") != std::string::npos);
    REQUIRE(next_command(again, "train further").find("-continued-2'") != std::string::npos);
    REQUIRE(next_command(again, "plot").starts_with("python3 scripts/plot.py '" + dir.path()));
  }
}

TEST_CASE("a prompt that the tokenizer or the model does not accept is refused before anything is created",
          "[run][checkpoint]") {
  const TempDir dir;
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 2 --prompt \"\xf4\x8f\xbf\xbf\""));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("--prompt: token 244") != std::string::npos);
  REQUIRE_FALSE(fs::exists(dir / "run"));
}

TEST_CASE("a run records its actual number of ranks, also when chosen automatically", "[run][checkpoint]") {
  Options o;
  o.ranks = 4;
  REQUIRE(options_json(o)["--local-ranks"] == "4");
  REQUIRE(command_line(o).find("--local-ranks") == std::string::npos);
}

TEST_CASE("a run continued from a continued run keeps the first one's name", "[run][checkpoint]") {
  for (const char* name : {"out/run", "out/run-continued", "out/run-continued-12"})
    REQUIRE(detail::without_continued(name) == "out/run");
  for (const char* name : {"42", "out/run-2", "a-continued/b", "continued"})
    REQUIRE(detail::without_continued(name) == name);
}

TEST_CASE("the best validation begins anew where another one is made", "[run][checkpoint]") {
  const TempDir dir;
  const std::string more = "--keep-best --val-every 2 --val-data ";
  run_well(tiny(dir / "run", more + tiny_data + " --max-steps 4 --val-steps 2"));
  const json first = read_json(dir / "run/step-000004/trainer.json")["best_validation"];
  for (const auto& [options, what] :
       {std::pair{std::string(tiny_data + " --val-steps 3"), "a validation has another number of samples"},
        {dir / "other.bin --val-steps 2", "--val-data has changed"}}) {
    fs::remove_all(dir / "again");
    fs::copy(dir / "run", dir / "again", fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    write_shard(dir / "other.bin", std::vector<uint16_t>(33 * 40 + 1, 200));  // whose losses are higher
    const std::string out = said(tiny(dir / "again", more + options + " --max-steps 6"));
    require_in(out, formatted("notice: {}: validation losses cannot be compared with the earlier ones, and the best of "
                              "them is sought anew",
                              what));
    REQUIRE(read_json(dir / "again/step-000006/trainer.json")["best_validation"]["step"] == 6);
    REQUIRE(fs::read_symlink(dir / "again/best") == "step-000006");
  }
  const std::string same = said(tiny(dir / "run", more + tiny_data + " --max-steps 6 --val-steps 2"));
  REQUIRE(same.find("sought anew") == std::string::npos);
  REQUIRE(first["loss"] > 0);
}

TEST_CASE(
    "OUT/best that is a directory, as in a copy that followed links, becomes a link again, and old checkpoints go",
    "[run][checkpoint]") {
  const TempDir dir;
  const std::string best = "--keep-best --keep-checkpoints 1 --val-every 2 --val-steps 2 --val-data " + tiny_data;
  run_well(tiny(dir / "run", best + " --max-steps 4"));
  for (const char* kind : {"whole", "alone", "foreign"}) {
    INFO(kind);
    const std::string out = dir / kind;
    fs::copy(dir / "run", out, fs::copy_options::recursive);  // best is a directory now
    REQUIRE_FALSE(fs::is_symlink(out + "/best"));
    const std::string of = read_json(out + "/best/trainer.json")["step"].dump();
    if (kind == std::string("alone")) std::ofstream(out + "/best/manifest.json", std::ios::app) << " ";  // another one
    if (kind == std::string("foreign")) fs::remove(out + "/best/manifest.json");
    const std::string text = said(tiny(out, best + " --max-steps 10"));
    INFO(text);
    const bool foreign = kind == std::string("foreign");
    REQUIRE((text.find("WARNING: " + out + "/best is a directory that is no copy") != std::string::npos) == foreign);
    REQUIRE(fs::is_symlink(out + "/best") != foreign);
    REQUIRE(fs::exists(out + "/former-best-step-00000" + of) == (kind == std::string("alone")));
    REQUIRE(checkpoint_steps(out).size() <= (foreign ? 3 : 2));
  }
}
