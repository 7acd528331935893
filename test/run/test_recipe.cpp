// Recipes: mixed sources, stages, and what a run may change when it goes on.
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

#include "catch2.h"
#include "run/recipe/course.h"
#include "run/recipe/print_stages.h"
#include "tiny_run.h"

using namespace llmc;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

struct RecipeData {
  TempDir dir;
  RecipeData() {
    uint32_t state = 1;
    for (const auto& [name, tokens] : {std::pair{"web", 3000}, {"code", 1100}, {"math", 700}}) {
      std::vector<uint16_t> all;
      for (int i = 0; i < tokens; ++i) state = state * 1664525 + 1013904223, all.push_back(state >> 24 & 127);
      write_shard(dir / std::string(name) + ".bin", all);
    }
  }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(dir / name) << text;
    return dir / name;
  }
  std::string sources() const {
    return " --data web=" + (dir / "web.bin") + ":0.6 --data code=" + (dir / "code.bin") +
           ":0.3 --data math=" + (dir / "math.bin") + ":0.1 ";
  }
  std::string run(const std::string& out, const std::string& more) const {
    return "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 16 --batch-size 2 --lr 1e-2 --threads 1 "
           "--checkpoint-minutes 0 --out-dir " +
           (dir / out) + " " + more;
  }
};

const std::string three_stages = R"(
[[stage]]
name = "main"
tokens = 640
data = { web = 0.7, code = 0.3 }
batch-ramp = [[0, 64], [128, 128]]
warmup = 200
lr-schedule = "constant"

[[stage]]
name = "anneal"
steps = 4
data = { web = 1, code = 1, math = 2 }
total-batch-size = 96
batch-size = 1
lr-schedule = "linear"

[[stage]]
name = "long"
tokens = 500
seq-len = 48
batch-size = 1
total-batch-size = 96
lr-schedule = "1-sqrt"
lr = 1e-3
)";

Options options_of(const std::string& stages) {
  Options o;
  o.train_data = "x";
  o.seq_len = 16, o.batch_size = 2;
  o.stages = stages;
  return o;
}

}  // namespace

TEST_CASE("a run of stages resumes bit for bit from every checkpoint, at and between the ends of stages",
          "[run][recipe]") {
  const RecipeData data;
  const std::string more = data.sources() + "--checkpoint-every 3 --stages " + data.write("r.toml", three_stages);
  const std::string out = said(data.run("whole", more));
  REQUIRE(out.find("stage 2 of 3, anneal: steps 7 to 10") != std::string::npos);
  REQUIRE(out.find("after 200 warm-up tokens, ") != std::string::npos);
  const size_t web = out.find("source web"), epochs = out.find(" epochs by the end", web);
  REQUIRE((web != std::string::npos && epochs != std::string::npos && epochs < out.find('\n', web)));
  const std::vector<int64_t> saved = checkpoint_steps(data.dir / "whole");
  REQUIRE(saved == std::vector<int64_t>{2, 3, 6, 9, 10, 12, 15, 16});
  for (const int64_t step : saved) {
    if (step == 16) continue;
    fs::remove_all(data.dir / "again");
    fs::create_directories(data.dir / "again");
    fs::copy(data.dir / "whole", data.dir / "again", fs::copy_options::recursive);
    for (const int64_t later : saved)
      if (later > step) fs::remove_all(checkpoint_path(data.dir / "again", later));
    run_well(data.run("again", more));
    INFO("resumed after step " << step);
    REQUIRE(state_of(data.dir / "again/step-000016") == state_of(data.dir / "whole/step-000016"));
    REQUIRE(losses(data.dir / "again") == losses(data.dir / "whole"));
  }
  // Other layouts take the same samples: losses differ by rounding alone.
  for (const char* layout : {"--local-ranks 2", "--local-ranks 2 --tp 2", "--local-ranks 2 --zero-stage 3"}) {
    fs::remove_all(data.dir / "other");
    run_well(data.run("other",
                      more + " --dp-replicate 1 " +
                          (std::string(layout).find("tp") == std::string::npos ? std::string(layout) + " --batch-size 1"
                                                                               : std::string(layout))));
    for (const auto& [step, loss] : losses(data.dir / "whole"))
      REQUIRE(std::abs(losses(data.dir / "other").at(step) - loss) < 1e-4);
  }
}

TEST_CASE("--print-stages refuses a run in epochs of unknown data, whose steps it would have to invent", "[recipe]") {
  const std::string stages = "--print-stages --model d2 --vocab-size 257 --seq-len 64 --batch-size 1 ";
  for (const auto& [length, named] : {std::pair("--epochs 3", "--epochs 3 with --print-stages: "),
                                      std::pair("", "one epoch with --print-stages: ")}) {
    const ProgramResult r = run_program(stages + length);
    INFO(r.out << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(std::string(named) + "how many steps that is depends on --train-data: name the data, or give "
                                            "--max-steps or --tokens instead") != std::string::npos);
  }
  const ProgramResult known = run_program(stages + "--max-steps 3");
  REQUIRE(known.out.find("all    192 tokens in 3 steps") != std::string::npos);
  const RecipeData data;
  const ProgramResult counted = run_program(stages + "--epochs 3 --train-data " + (data.dir / "code.bin"));
  INFO(counted.out << counted.err);
  REQUIRE(counted.out.find("all    3,264 tokens in 51 steps") != std::string::npos);  // 1100 / 64 = 17 steps, 3 times
}

TEST_CASE("stages in steps of changing size give the plan's tokens, rates and mixes", "[recipe]") {
  const TempDir dir;
  std::ofstream(dir / "r.toml") << R"([[stage]]
tokens = 1000
total-batch-size = 128
batch-doubling = {from = 32, every = 100}
warmup = 200
lr-schedule = "wsd"
decay = 300
lr = 1.0
[[stage]]
steps = 3
seq-len = 8
lr-schedule = "constant"
lr = 0.5
)";
  const Course course(read_recipe(options_of(dir / "r.toml")), {});
  const auto& s = course.stretches();
  REQUIRE(s.size() == 4);
  // 4 x 32 tokens reach 100, then 64 until 200, then 128 until 1000
  REQUIRE((s[0].steps == 4 && s[1].steps == 2 && s[2].steps == 6 && s[3].steps == 3));
  REQUIRE((s[2].tokens == 256 && s[3].tokens == 1024 && course.tokens() == 1024 + 3 * 16));
  REQUIRE(course.learning_rate(1) == 32.0 / 200);
  REQUIRE(course.learning_rate(6) == 1);
  REQUIRE(course.learning_rate(9) == 1);  // 640 tokens: the decay begins at 724
  REQUIRE(std::abs(course.learning_rate(10) - (1 - std::sqrt((768.0 - 724) / 300))) < 1e-12);
  REQUIRE(course.learning_rate(12) == 0);
  REQUIRE(course.learning_rate(13) == 0.5);
}

TEST_CASE("stages on paper show the range of all steps, the peak of the rate and shares as they were given",
          "[recipe]") {
  Options o;
  o.train_data = "x";
  o.seq_len = 16, o.batch_size = 2, o.max_steps = 200, o.warmup_steps = 3, o.lr = 1;
  const std::string text = stages_text(Course(read_recipe(o), {}));
  INFO(text);
  REQUIRE(text.find(" 3.33e-01 up to 1.00e+00, 0.00e+00 at the end ") != std::string::npos);
  REQUIRE(text.find(" 0 to 1\n") != std::string::npos);  // not of the steps that a column shows
  o.train_data.clear(), o.data.items = {"a=x:0.7", "b=y:0.3"};
  REQUIRE(stages_json(Course(read_recipe(o), {})).find(R"("mix":{"a":0.7,"b":0.3})") != std::string::npos);
}

TEST_CASE("a stage's faults are named with file and line", "[recipe][errors]") {
  const TempDir dir;
  const auto no = [&](const std::string& text, const std::string& why, const char* name = "r.toml") {
    std::ofstream(dir / name) << text;
    INFO(text);
    REQUIRE_ERROR(read_recipe(options_of(dir / name)), why);
  };
  no("[[stage]]\ntokens = 10\nlearning-rate = 3\n", "r.toml:3: learning-rate: no setting of a stage has this name");
  no("[[stage]]\ntokens = 10\nlr = \"fast\"\n", "r.toml:3: lr 'fast': expected a number");
  no("[[stage]]\ntokens = 10\nlr = 200\n", "r.toml:1: stage \"1\": ");
  no("[[stage]]\ntokens = 10\nseq-len = -9223372036854775807\n",
     "--seq-len -9223372036854775807: expected a number from 1");
  no("[[stage]]\n\nname = \"a\"\n", "has none of tokens, steps, epochs and share");
  no("[[stage]]\ntokens = 10\nsteps = 3\n", "has several of tokens");
  no("[[stage]]\ntokens = -10\n", "r.toml:2: tokens is -10, expected a whole number of tokens from 1 on");
  no("[[stage]]\ntokens = 10\ndata = {web = 1}\n", "r.toml:3: data names web, which is no --data");
  no("[[stage]]\nshare = 0.5\n", "r.toml:2: share = 0.5 is a part of --tokens");
  no("[[stage]]\ntokens = 10\nseq-len = 12\n[[stage]]\ntokens = 10\nseq-len = 8\n",
     "which do not divide the longest, 12");
  no("[[stage]]\ntokens = 10\nbatch-ramp = [[0, 100]]\n", "--total-batch-size 100 is not a multiple");
  no("[[stage]]\ntokens = 10\nbatch-ramp = [[5, 32]]\n", "begins at token 5, expected 0");
  no("[[stage]]\ntokens = 10\nbatch-doubling = {from = 96, every = 10}\ntotal-batch-size = 128\n", "does not reach");
  no("[[stage]]\nname = \"a\"\ntokens = 1\n[[stage]]\nname = \"a\"\ntokens = 1\n",
     "r.toml:4: two stages are called \"a\"");
  no("[[stage]]\ntokens = 10\nlr-schedule = \"linear\"\ndecay = 5\n", "r.toml:4: decay is for lr-schedule = \"wsd\"");
  no("[[stage]\ntokens = 10\n", "r.toml:1: ");
  no("[[stages]]\ntokens = 10\n", "stages is unknown: expected [[stage]]");
  no("tokens = 1979-05-27\n", "r.toml:1: a date or a time");
  std::ofstream(dir / "large.toml") << "[[stage]]\ntokens = 9223372036854775807\ntotal-batch-size = 32\n";
  REQUIRE_ERROR(Course(read_recipe(options_of(dir / "large.toml")), {}), "more tokens than 64 bits count");
  no("{\"stage\": [{\"tokens\": 10, \"lr\": []}]}", "r.json: /stage/0/lr", "r.json");
  no("{\"stage\": [{\"tokens\": 10,]}", "not JSON", "r.json");
  no("", "no stages");
}

TEST_CASE("sources are refused by name", "[recipe][errors]") {
  const auto no = [&](const std::string& source, const std::string& why) {
    Options o;
    o.data.add(source);
    INFO(source);
    REQUIRE_ERROR(source_texts(o), why);
  };
  no("x.bin:0.5", "expected NAME=PATTERN:WEIGHT");
  no("we b=x.bin:0.5", "expected NAME=PATTERN:WEIGHT");
  no("web=", "expected NAME=PATTERN:WEIGHT");
  no("web=x.bin:0", "the weight is 0, expected a number above 0");
  no("web=x.bin:nan", "the weight is nan");
  no("web=x.bin:1:-2", "-2 epochs, expected a number above 0");
  no("web=x.bin:1;web=y.bin:1", "two of the same name");
  no("web=x.bin:1;code=y.bin:1e-10", "is less than 1e-09 of the largest");
  Options o;
  o.data.add("web=a:b.bin:0.5:3");
  const SourceText source = source_texts(o)[0];
  REQUIRE((source.pattern == "a:b.bin" && source.weight == 0.5 && source.max_epochs == 3));
}

TEST_CASE("a run that would read a source too often is refused before it begins", "[run][recipe]") {
  const RecipeData data;
  const std::string sources =
      " --data web=" + (data.dir / "web.bin") + ":0.5 --data code=" + (data.dir / "code.bin") + ":0.5:2 ";
  refused(data.run("o", sources + "--max-steps 200"), "--data code: the run would read it 2.9");
  REQUIRE_FALSE(fs::exists(data.dir / "o"));
  refused(data.run("o", sources), "say how long the run is by --tokens or --max-steps");
  run_well(data.run("o", sources + "--max-steps 3"));
}

TEST_CASE("another mix, other stages and lengths go on from a stated step, and are recorded", "[run][recipe]") {
  const RecipeData data;
  const std::string old_one = data.sources() + "--max-steps 6 --checkpoint-every 3 ",
                    heavier = " --data web=" + (data.dir / "web.bin") + ":0.2 --data math=" + (data.dir / "math.bin") +
                              ":0.8 ";
  run_well(data.run("run", old_one));
  fs::remove_all(data.dir / "run/step-000006");
  const std::string with_mix = heavier + "--max-steps 6 --checkpoint-every 3 ";
  refused(data.run("run", with_mix), "the recipe of the run was another one: source 2 was ");
  const std::string out = said(data.run("run", with_mix + "--data-changed accept"));
  REQUIRE(out.find("notice: --data was ") != std::string::npos);
  const json trainer = read_json(data.dir / "run/step-000006/trainer.json"),
             before = read_json(data.dir / "run/step-000003/trainer.json");
  REQUIRE(trainer["recipe"]["origin"]["step"] == 3);
  REQUIRE(trainer["data_changes"][0]["step"] == 3);
  const auto position = [](const json& t, size_t s, size_t i) {
    return t["recipe"]["sources"][s]["position"][i].get<int64_t>();
  };
  const int64_t web = position(trainer, 0, 2) - position(before, 0, 2),
                math = position(trainer, 1, 2) - position(before, 2, 2);
  REQUIRE(web + math == 3 * 2);
  REQUIRE(web == 1);
  REQUIRE(position(trainer, 1, 1) == position(before, 2, 1) + math * 16);  // it goes on where it was
  // Again from the same checkpoint, and from the changed one without the option.
  fs::copy(data.dir / "run", data.dir / "again", fs::copy_options::recursive);
  fs::remove_all(data.dir / "again/step-000006");
  run_well(data.run("again", with_mix + "--data-changed accept"));
  REQUIRE(state_of(data.dir / "again/step-000006") == state_of(data.dir / "run/step-000006"));
  run_well(data.run("run", heavier + "--max-steps 8"));
  // A branch may change it all, and a length that was not foreseen begins a new epoch.
  const std::string from = "--branch-from " + (data.dir / "run/step-000003");
  const std::string longer =
      said(data.run("long", data.sources() + "--max-steps 6 --seq-len 48 --batch-size 1 " + from));
  REQUIRE(longer.find("sequences of 48 tokens were not foreseen") != std::string::npos);
  const json in_branch = read_json(data.dir / "long/step-000006/trainer.json");
  REQUIRE(position(in_branch, 0, 0) == 1);
  REQUIRE(in_branch["recipe"]["block"] == 48);
  // A shorter one is cut from the same blocks.
  const std::string shorter =
      said(data.run("short", data.sources() + "--max-steps 6 --seq-len 8 --batch-size 4 " + from));
  REQUIRE(shorter.find("were not foreseen") == std::string::npos);
  REQUIRE(position(read_json(data.dir / "short/step-000006/trainer.json"), 0, 0) == 0);
}

TEST_CASE("the files of each source are those of the run, whatever else of --data changes", "[run][recipe]") {
  const RecipeData data;
  const auto shard = [&](const std::string& name, uint16_t token) {
    std::vector<uint16_t> tokens(800);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>((i * 31 + token) % 200);
    write_shard(data.dir / name, tokens);
  };
  shard("site_0.bin", 0), shard("site_1.bin", 1);
  const std::string site = " --data site=" + (data.dir / "site_?.bin"),
                    code = " --data code=" + (data.dir / "code.bin") + ":1 ", accept = " --data-changed accept ",
                    heavier = site + ":2" + code + "--max-steps 6 ";
  const auto site_samples = [&](int64_t step) -> int64_t {
    return read_json(checkpoint_path(data.dir / "run", step) + "/trainer.json")["recipe"]["sources"][0]["position"][2];
  };
  run_well(data.run("run", site + ":1" + code + "--max-steps 4 "));
  // Another one.
  shard("site_2.bin", 2);
  for (const std::string& more : {site + ":1" + code + "--max-steps 6 ", heavier + accept})
    refused(data.run("run", more),
            "--data site: 3 files, but 2 when the run began (new: site_2.bin; missing: none): resume with those alone");
  fs::create_directories(data.dir / "new");
  fs::rename(data.dir / "site_2.bin", data.dir / "new/site_2.bin");
  // The same ones under other names.
  fs::rename(data.dir / "site_0.bin", data.dir / "site_9.bin");
  for (const std::string& more : {site + ":1" + code + "--max-steps 6 ", heavier + accept})
    refused(data.run("run", more),
            "--data site: the files of the run in another order, because they were renamed (site_9.bin was "
            "site_0.bin): samples are numbered in the order of the names");
  fs::rename(data.dir / "site_9.bin", data.dir / "site_0.bin");
  // A repaired one, beside other weights.
  shard("site_1.bin", 7);
  refused(data.run("run", site + ":1" + code + "--max-steps 6 "), "site_1.bin has changed since the run began");
  const std::string out = said(data.run("run", heavier + accept));
  REQUIRE(out.find("notice: " + (data.dir / "site_1.bin") + " has changed since step 4 (checksum ") !=
          std::string::npos);
  REQUIRE(site_samples(6) > site_samples(4));
  const json changes = read_json(data.dir / "run/step-000006/trainer.json")["data_changes"];
  REQUIRE(std::ranges::any_of(changes, [](const json& change) { return change.contains("shard"); }));
  REQUIRE(std::ranges::any_of(changes, [](const json& change) { return change.value("setting", "") == "--data"; }));
  // A new one as a source of its own, as the first message says.
  const std::string more = said(
      data.run("run", site + ":1" + code + "--data more=" + (data.dir / "new/*.bin") + ":1 --max-steps 8 " + accept));
  REQUIRE(more.find("notice: --data more names new files: it begins at their first sample") != std::string::npos);
  REQUIRE(more.find("notice: --data site ") == std::string::npos);
  REQUIRE(site_samples(8) > site_samples(6));
  // Left out, and then other files under its name.
  run_well(data.run("run", code + "--max-steps 9 " + accept));
  shard("site_2.bin", 2);
  refused(data.run("run", site + ":1" + code + "--max-steps 10 " + accept),
          "; the run has read other files under this name before: with a new name, and --data-changed accept, these ");
}

TEST_CASE("a source goes on where it was under another name, in another folder, and after it was left out",
          "[run][recipe]") {
  const RecipeData data;
  const auto source = [&](const char* name, const std::string& folder = "") {
    const std::string file = std::string(name) == "code" ? "code.bin" : "web.bin";
    return std::string(" --data ") + name + "=" + (data.dir / folder + file) + ":1 ";
  };
  const auto samples = [&](const std::string& out, const std::string& more) {
    std::vector<json> all;
    std::istringstream lines(said(data.run(out, more)));
    for (std::string line; std::getline(lines, line);) {
      const json step = json::parse(line);
      all.insert(all.end(), step["samples"].begin(), step["samples"].end());
    }
    return all;
  };
  const auto position = [&](int64_t step, size_t i) {
    return read_json(checkpoint_path(data.dir / "run", step) + "/trainer.json")["recipe"]["sources"][i]["position"];
  };
  const std::string accept = " --data-changed accept ", unnamed = " --train-data " + (data.dir / "web.bin");
  run_well(data.run("run", unnamed + " --max-steps 3"));
  const std::string mixed = source("site") + source("code");
  const std::string out = said(data.run("run", mixed + "--max-steps 8" + accept));
  REQUIRE(out.find("notice: --data site goes on where --train-data was: they are the same files") != std::string::npos);
  REQUIRE(out.find("notice: --data code names new files: it begins at their first sample") != std::string::npos);
  REQUIRE(position(8, 0) == json({0, (6 + 5) * 16, 6 + 5}));
  // Nothing that --train-data has read comes again. --print-samples names what the run in --out-dir reads.
  const std::vector<json> before = samples("new", unnamed + " --print-samples 1-3"),
                          after = samples("run", mixed + "--max-steps 8 --print-samples 4-8");
  REQUIRE((before.size() == 6 && after.size() == 10));
  for (const json& one : after)
    for (const json& other : before) REQUIRE((one[0] == "code" || one[1] != other[1]));
  refused(data.run("run", mixed + "--max-steps 8 --print-samples 3"), "the run has steps 4 to 8; earlier ones were of");
  // Left out, and read again.
  run_well(data.run("run", source("site") + "--max-steps 10" + accept));
  REQUIRE(position(10, 0)[2] == 15);
  const std::string again = said(data.run("run", mixed + "--max-steps 12" + accept));
  REQUIRE(again.find("begins at their first sample") == std::string::npos);
  REQUIRE(position(12, 0)[2] == 17);
  REQUIRE(position(12, 1) == json({0, 7 * 16, 7}));
  // Moved, which is no other recipe.
  fs::create_directories(data.dir / "moved");
  for (const char* name : {"web.bin", "code.bin"}) fs::rename(data.dir / name, (data.dir / "moved/") + name);
  const std::string there = source("site", "moved/") + source("code", "moved/") + "--max-steps 14";
  REQUIRE(said(data.run("run", there)).find("notice: --data was ") != std::string::npos);
  REQUIRE(position(14, 1) == json({0, 9 * 16, 9}));
  REQUIRE(samples("run", there + " --print-samples 13-14").size() == 4);
  const ProgramResult other =
      run_program(data.run("run", source("site", "moved/") + "--max-steps 2 --print-samples 1"));
  REQUIRE((other.status == 0 && other.out.starts_with("{\"step\":1,")));
  REQUIRE(other.err.find("step-000014 is of a run with other data; these are the samples of a new run") !=
          other.err.npos);
}

TEST_CASE("--print-samples names the samples of a branch with another seed", "[run][recipe]") {
  const RecipeData data;
  const std::string source = " --train-data " + (data.dir / "math.bin") + " --max-steps 12 ";
  run_well(data.run("run", source + "--checkpoint-every 4"));
  const auto indices = [&](const std::string& out, const std::string& more) {
    std::set<int64_t> all;
    std::istringstream lines(said(data.run(out, source + more)));
    for (std::string line; std::getline(lines, line);) {
      const json step = json::parse(line);
      for (const json& sample : step["samples"]) all.insert(sample[1].get<int64_t>());
    }
    return all;
  };
  const std::string branch = "--seed 7 --branch-from " + (data.dir / "run/step-000004");
  const std::set<int64_t> first = indices("run", "--print-samples 1-4"),
                          planned = indices("branch", branch + " --print-samples 5-12");
  run_well(data.run("branch", source + branch));
  REQUIRE(indices("branch", "--seed 7 --print-samples 5-12") == planned);
  REQUIRE(indices("branch", "--seed 7 --print-samples 1-4") == first);
  REQUIRE(indices("run", "--print-samples 5-12") != planned);
  REQUIRE((first.size() == 8 && planned.size() == 16));
  for (const int64_t sample : planned) REQUIRE_FALSE(first.contains(sample));
}

TEST_CASE("a resumed run is told where its learning rate jumps to, with another batch and without its stages",
          "[run][recipe]") {
  const RecipeData data;
  const std::string source = " --train-data " + (data.dir / "web.bin") + " --data-changed accept ",
                    decay = source + "--lr-schedule wsd --decay-tokens 320 --max-steps 30 ";
  const std::string notice = "notice: the learning rate was ";
  run_well(data.run("batch", decay + "--total-batch-size 32 --checkpoint-every 8"));
  fs::remove_all(data.dir / "batch/step-000030");
  const std::string out = said(data.run("batch", decay + "--total-batch-size 64"));
  REQUIRE(out.find(notice) != std::string::npos);
  REQUIRE(out.find(" at step 24 and is 1.00e-02 at step 25, ") != std::string::npos);
  // 8 steps of 32 tokens, and one of 64, of which all 320 would be 5.
  const std::string tokens = source + "--tokens 320 --total-batch-size ";
  run_well(data.run("tokens", tokens + "32 --checkpoint-every 8"));
  fs::remove_all(data.dir / "tokens/step-000010");
  run_well(data.run("tokens", tokens + "64"));
  REQUIRE(said(data.run("tokens", tokens + "64")).find(" is at step 9 of 9\n") != std::string::npos);
  const std::string stages =
      data.write("r.toml", "[[stage]]\nsteps = 10\ntotal-batch-size = 32\nlr-schedule = \"linear\"\n");
  run_well(data.run("stages", source + "--checkpoint-every 5 --stages " + stages));
  fs::remove_all(data.dir / "stages/step-000010");
  REQUIRE(said(data.run("stages", source + "--max-steps 10")).find(notice) != std::string::npos);
}

TEST_CASE("a finished run of stages is extended by another stage", "[run][recipe]") {
  const RecipeData data;
  const std::string one = "[[stage]]\ntokens = 160\ntotal-batch-size = 32\nlr-schedule = \"linear\"\n";
  const std::string more = data.sources() + "--stages " + data.write("r.toml", one);
  run_well(data.run("run", more));
  REQUIRE(said(data.run("run", more)).find("already complete") != std::string::npos);
  data.write("r.toml", one + "[[stage]]\nsteps = 3\ntotal-batch-size = 64\n");
  refused(data.run("run", more), "stage 2 was null and is now ");
  const std::string out = said(data.run("run", more + " --data-changed accept"));
  REQUIRE(out.find("stage 2 of 2") != std::string::npos);
  REQUIRE(out.find("notice: the recipe is another one from step 6 on: stage 2 was null and is now ") !=
          std::string::npos);
  REQUIRE(out.find("notice: 8 steps instead of 5: the learning rate was 0.00e+00 at step 5 and is ") !=
          std::string::npos);
  REQUIRE(read_whole(data.dir / "run/metrics.jsonl").find(R"({"kind":"data","step":5,"setting":"stages","before":)") !=
          std::string::npos);
  REQUIRE(losses(data.dir / "run").size() == 8);
  REQUIRE(read_json(data.dir / "run/step-000008/trainer.json")["tokens"] == 160 + 3 * 64);
}

TEST_CASE("each validation set has its loss, and their mean by tokens is the validation loss", "[run][recipe]") {
  const RecipeData data;
  const std::string more = data.sources() + "--max-steps 2 --val-steps 1000 --val web=" + (data.dir / "web.bin") +
                           " --val math=" + (data.dir / "math.bin");
  run_well(data.run("both", more));
  const double mean = validations(data.dir / "both").at(2);
  double web = 0, math = 0;
  std::ifstream in(data.dir / "both/metrics.jsonl");
  for (std::string line; std::getline(in, line);) {
    const json object = json::parse(line);
    if (object["kind"] == "val" && object["step"] == 2) web = object["losses"]["web"], math = object["losses"]["math"];
  }
  const double samples[] = {(3000 - 1) / 16, (700 - 1) / 16};
  REQUIRE(std::abs(mean - (web * samples[0] + math * samples[1]) / (samples[0] + samples[1])) < 1e-12);
  run_well(data.run("one", data.sources() + "--max-steps 2 --val-steps 1000 --val-data " + (data.dir / "math.bin")));
  REQUIRE(validations(data.dir / "one").at(2) == math);
}

TEST_CASE("padding changes neither loss nor gradient: both are means over the targets", "[run][recipe]") {
  // 20 tokens in samples of 4, then samples of 8: the first is the rest of a block, half of it padding.
  const RecipeData data;
  const std::string stages = data.write("r.toml", R"([[stage]]
steps = 1
seq-len = 8
batch-size = 1
[[stage]]
steps = 1
seq-len = 16
batch-size = 1
)"),
                    unstaged = " --data-changed accept --max-steps 2 --batch-size 1 ";
  const std::string source = " --no-shuffle --grad-clip 0.01 --train-data " + (data.dir / "web.bin");
  run_well(data.run("padded", source + " --stages " + stages));
  // The same step without padding: samples of 8 all along.
  run_well(data.run("short", source + " --max-steps 1 --seq-len 8 --batch-size 1 --lr-schedule constant"));
  run_well(data.run("short", source + " --seq-len 8 --lr-schedule constant" + unstaged));
  REQUIRE(std::abs(losses(data.dir / "padded").at(2) - losses(data.dir / "short").at(2)) < 1e-5);
  const auto norms = [&](const char* run) { return metric(data.dir / std::string(run), "train", "grad_norm"); };
  REQUIRE(std::abs(norms("padded").at(2) / norms("short").at(2) - 1) < 1e-4);
}

TEST_CASE("packed samples are the same in every layout, and a run of them resumes exactly", "[run][recipe]") {
  const RecipeData data;
  std::vector<uint16_t> tokens;
  uint32_t state = 7;
  for (int document = 0; document < 60; ++document) {
    tokens.push_back(256);  // the end of text of bytes
    state = state * 1664525 + 1013904223;
    for (uint32_t i = 0, n = 2 + (state >> 24) % 20; i < n; ++i) tokens.push_back(static_cast<uint16_t>(i * 7 % 199));
  }
  write_shard(data.dir / "documents.bin", tokens);
  const std::string more = "--train-data " + (data.dir / "documents.bin") + " --max-steps 6 --checkpoint-every 3 " +
                           "--total-batch-size 64 --pack best-fit --mask-documents --vocab-size 257 ";
  setenv("XDG_CACHE_HOME", (data.dir / "cache").c_str(), 1);
  const std::string out = said(data.run("whole", more));
  REQUIRE(out.find("packing                best-fit: ") != std::string::npos);
  fs::copy(data.dir / "whole", data.dir / "again", fs::copy_options::recursive);
  fs::remove_all(data.dir / "again/step-000006");
  run_well(data.run("again", more));
  REQUIRE(state_of(data.dir / "again/step-000006") == state_of(data.dir / "whole/step-000006"));
  for (const char* layout : {"--local-ranks 2 ", "--cp 2 ", "--pp 2 --n-layer 2 "}) {
    const bool deeper = std::string(layout).find("pp") != std::string::npos;
    const std::string one = deeper ? "deeper" : "whole";
    if (deeper) run_well(data.run(one, more + "--n-layer 2 "));
    fs::remove_all(data.dir / "other");
    run_well(data.run("other", more + layout));
    for (const auto& [step, loss] : losses(data.dir / one))
      REQUIRE(std::abs(losses(data.dir / "other").at(step) - loss) < 1e-4);
  }
  unsetenv("XDG_CACHE_HOME");
  refused(data.run("again", more + "--pack stream "), "--pack was 'best-fit' and is now 'stream'");
}

TEST_CASE("documents that are shorter than a sample fill one by --pack best-fit", "[run][recipe]") {
  const RecipeData data;
  write_shard(data.dir / "few.bin", std::vector<uint16_t>{256, 1, 2, 256, 1, 2, 3, 256, 1, 2, 3, 4});
  const std::string few = "--vocab-size 257 --max-steps 2 --batch-size 1 --train-data " + (data.dir / "few.bin");
  const std::string out = said(data.run("few", few + " --pack best-fit"));
  REQUIRE(out.find(" 12 tokens, 1 samples of 16, shuffled\n") != std::string::npos);
  REQUIRE(out.find("best-fit: 31.2% padded; 0% of 3 documents cut, 0% of tokens dropped\n") != std::string::npos);
  REQUIRE(out.find("notice: ") == std::string::npos);
  refused(data.run("stream", few), "no file holds a sample of --seq-len 16 + 1 tokens (12 tokens in 1 file(s))");
}

TEST_CASE("a stage of epochs resumes, and what would end a later stage is refused before the run begins",
          "[run][recipe]") {
  const RecipeData data;
  const std::string source = " --train-data " + (data.dir / "math.bin") + " ";
  const std::string epochs = source + "--checkpoint-every 3 --stages " +
                             data.write("epochs.toml", "[[stage]]\nepochs = 0.5\ntotal-batch-size = 32\n");
  run_well(data.run("whole", epochs));
  fs::copy(data.dir / "whole", data.dir / "again", fs::copy_options::recursive);
  fs::remove_all(checkpoint_path(data.dir / "again", checkpoint_steps(data.dir / "again").back()));
  run_well(data.run("again", epochs));
  const int64_t last = checkpoint_steps(data.dir / "whole").back();
  REQUIRE(last == 11);  // half of 43 samples of 16 tokens, two in a step
  REQUIRE(state_of(checkpoint_path(data.dir / "again", last)) == state_of(checkpoint_path(data.dir / "whole", last)));

  write_shard(data.dir / "short.bin", std::vector<uint16_t>(40, 1));
  const std::string longer =
      source + "--val-data " + (data.dir / "short.bin") + " --stages " +
      data.write("longer.toml", "[[stage]]\nsteps = 2\n[[stage]]\nsteps = 2\nseq-len = 48\nbatch-size = 1\n");
  refused(data.run("longer", longer), "--val-data: no sample of 48 + 1 tokens");
  REQUIRE_FALSE(fs::exists(data.dir / "longer"));
}

TEST_CASE("faults and memory of a later stage are said with its place, and the remedy is set there", "[run][recipe]") {
  const RecipeData data;
  const std::string source = "--train-data " + (data.dir / "web.bin") + " ";
  const auto staged = [&](const std::string& second) {
    return source + "--stages " +
           data.write("r.toml", "[[stage]]\nsteps = 2\n[[stage]]\nname = \"b\"\nsteps = 2\n" + second);
  };
  const std::string file = data.dir / "r.toml", where = file + ":3: stage \"b\": ";
  for (const auto& [second, options, fault] :
       {std::tuple("recompute = \"block:5\"\n", "", ":6: --recompute block:5 with 1 block in the model"),
        {"seq-len = 2048\n", "", ":6: --seq-len 2048 exceeds the 1024 positions of --model d1"}})
    for (const char* mode : {"", " --plan"}) {
      const ProgramResult r = run_program(data.run("no", staged(second) + options + mode));
      INFO(r.err);
      REQUIRE(r.status == 1);
      REQUIRE(r.err.find(where + file + fault) != std::string::npos);
    }

  const std::string sizes = "total-batch-size = 1024\nseq-len = 64\nbatch-size = 16\n";
  const ProgramResult large = run_program(data.run("large", staged(sizes) + " --memory-limit 0.003"));
  INFO(large.err);
  REQUIRE(large.status == 1);
  REQUIRE(large.err.find(where + "the run needs ") != std::string::npos);
  const std::string set = "it would with batch-size = ", in = ", total-batch-size = 1024 in stage \"b\" of " + file;
  const size_t begin = large.err.find(set), end = large.err.find(in);
  REQUIRE((begin != std::string::npos && end != std::string::npos));
  const std::string size = large.err.substr(begin + set.size(), end - begin - set.size());
  const std::string smaller = "total-batch-size = 1024\nseq-len = 64\nbatch-size = " + size + "\n";
  run_well(data.run("large", staged(smaller) + " --memory-limit 0.003"));
}
