// run/options/: the command line, --config files, combinations that are refused, --help.
#include <ranges>
#include <set>
#include <string>
#include <vector>

#include "catch2.h"
#include "helpers.h"
#include "run/options/parse.h"

using namespace llmc;

namespace {

Options parse(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "train_gpt");
  const std::set<std::string> without = {"--train-data", "--generate",   "--evaluate",      "--selftest",
                                         "--plan-auto",  "--tokenize",   "--plan-examples", "--print-schedule",
                                         "--average",    "--coord-check"};
  const bool reads = std::ranges::none_of(arguments, [&](const std::string& a) { return without.contains(a); });
  if (reads) arguments.insert(arguments.begin() + 1, {"--train-data", "x"});
  const auto take_place = [](Options& o) {
    o.ranks = o.plan_ranks.value_or(o.local_ranks > 0 ? o.local_ranks : o.seed == 4 ? 4 : 1);
  };
  return parse_command_line(arguments, take_place).options;
}

}  // namespace

TEST_CASE("--config reads back what --print-config prints; the command line overrides it, and the last option wins",
          "[options]") {
  const TempDir dir;
  const std::string prompt = "  # two \"words\" = [1, 2]; ";
  Options o = parse({"--lr", "0.1", "-l", "0.0123456789012345678", "--n-layer", "7", "--shuffle", "--prompt",
                     prompt.c_str(), "-b", "3", "-t", "8", "--weight-decay", "1e-310", "--memory-limit", "1.5"});
  REQUIRE(o.lr == 0.0123456789012345678);
  REQUIRE(o.batch_size == 3);
  std::ofstream(dir / "c.ini") << config_text(o);
  const Options back = parse({"--config", dir / "c.ini"});
  REQUIRE(config_text(back) == config_text(o));
  REQUIRE(back.lr == o.lr);
  REQUIRE(back.n_layer == 7);
  REQUIRE(back.shuffle == true);
  REQUIRE(back.prompt == prompt);
  REQUIRE(back.weight_decay == 1e-310);
  REQUIRE(back.memory_limit == 1.5);
  REQUIRE(!back.max_steps);
  REQUIRE(parse({"--config", dir / "c.ini", "--batch-size", "5"}).batch_size == 5);
  std::ofstream(dir / "spaced.ini") << "  # a comment\n\n lr = 0.3 \r\n";
  REQUIRE(parse({"--config", dir / "spaced.ini"}).lr == 0.3);
  for (const auto& [line, culprit] : std::vector<std::pair<std::string, std::string>>{{"bach-size=3", "--batch-size"},
                                                                                      {"lr", "bad.ini:1"},
                                                                                      {"lr=", "--lr"},
                                                                                      {"lr=[1,2]", "[1,2]"},
                                                                                      {"shuffle=maybe", "shuffle"}}) {
    std::ofstream(dir / "bad.ini") << line << "\n";
    REQUIRE_ERROR(parse({"--config", dir / "bad.ini"}), culprit);
  }
  REQUIRE_ERROR(parse({"--config", dir / "none.ini"}), "none.ini");
  REQUIRE_ERROR(parse({"--config"}), "--config");
}

TEST_CASE("options are printed as a shell-quoted command line without the defaults", "[options]") {
  REQUIRE(command_line(parse({"--lr", "0.1", "--seed", "42", "--shuffle", "--prompt", "it's"})) ==
          "./train_gpt --train-data x --shuffle --lr 0.1 --prompt 'it'\\''s'");
}

TEST_CASE("--shuffle is on by default, --no-shuffle turns it off, and the last one wins", "[options]") {
  REQUIRE(Options().shuffled());
  REQUIRE(!parse({}).shuffle);
  REQUIRE(parse({"--shuffle"}).shuffle == true);
  const Options off = parse({"--shuffle", "--no-shuffle"});
  REQUIRE(off.shuffle == false);
  REQUIRE(parse({"--no-shuffle", "--shuffle"}).shuffle == true);
  REQUIRE(command_line(off) == "./train_gpt --train-data x --no-shuffle");
  const TempDir dir;
  std::ofstream(dir / "c.ini") << config_text(off);
  REQUIRE(parse({"--config", dir / "c.ini"}).shuffle == false);
  REQUIRE(parse({"--config", dir / "c.ini", "--shuffle"}).shuffle == true);
  REQUIRE_ERROR(parse({"--no-plan"}), "--no-plan");
}

TEST_CASE("an option whose value is missing takes no other word for it", "[options]") {
  REQUIRE_ERROR(parse({"--lr=", "0.1"}), "--lr=: the value after '=' is missing; leave the option out for its default");
  REQUIRE_ERROR(parse({"--prompt=", "--generate"}), "--prompt=: the value after '=' is missing");
  REQUIRE_ERROR(parse({"--config="}), "--config=: the value after '=' is missing");
  REQUIRE_ERROR(parse({"--tokenize=", "a.txt"}), "--tokenize=: the value after '=' is missing");
  REQUIRE_ERROR(parse({"--wandb_project=", "--learning_rate", "1"}), "--wandb_project");
  // A shell variable that is not set must not switch an option off.
  for (const std::string option : {"--branch-from", "--stages", "--val-data", "-j", "--eval-choices", "--machine",
                                   "--tokenize", "--average", "--print-samples", "--out-dir", "--seed"})
    REQUIRE_ERROR(
        parse({option, "", "--lr", "1"}),
        option + " '': the value is empty, as that of a shell variable that is not set; leave the option out");
  const TempDir dir;
  for (const char* value : {"", "\"\""}) {
    std::ofstream(dir / "c.ini") << "lr=1\nbranch-from=" << value << "\n";
    REQUIRE_ERROR(parse({"--config", dir / "c.ini"}), (dir / "c.ini") + ":2: --branch-from '': the value is empty");
  }
  std::ofstream(dir / "c.ini") << "prompt=\"of the file\"\n";
  REQUIRE(parse({"--config", dir / "c.ini", "--prompt", ""}).prompt.empty());  // a prompt may have no text
  REQUIRE(parse({"--prompt", "--a="}).prompt == "--a=");
  REQUIRE(parse({"--prompt", "a="}).prompt == "a=");
}

TEST_CASE("option errors name the option, what was found and what was expected", "[options]") {
  REQUIRE_ERROR(parse({"--bath-size", "3"}), "--batch-size");
  REQUIRE_ERROR(parse({"--lr"}), "--lr needs a value");
  REQUIRE_ERROR(parse({"--lr=inf"}), "--lr inf");
  REQUIRE_ERROR(parse({"--moe-aux-loss", "-inf"}), "--moe-aux-loss -inf: expected a finite number");
  REQUIRE_ERROR(parse({"--beta1", "1"}), "--beta1 1: expected a number from 0 to 0.9999999");
  REQUIRE_ERROR(parse({"--batch-size", "0"}), "from 1 to 16777216");
  REQUIRE_ERROR(parse({"--time-limit", "0"}), "--time-limit 0: expected a number above 0");
  for (const std::string option : {"--skip-loss-z", "--skip-grad-z"})  // in llm.c 0 means never
    REQUIRE_ERROR(parse({option, "0"}), option + " 0: expected a number above 0; leave it out to skip none");
  REQUIRE_ERROR(parse({"a.bin", "b.bin"}), "quote file patterns");
  REQUIRE_ERROR(parse({"--max-steps", "99999999999999999999"}), "--max-steps");
  REQUIRE_ERROR(parse({"--max-steps", ""}), "--max-steps ''");
  REQUIRE_ERROR(parse({"--lr", ""}), "--lr ''");
  REQUIRE_ERROR(parse({"--lr", "1e400"}), "64 bits");
  REQUIRE_ERROR(parse({"--lr", "-1"}), "--lr -1");
  REQUIRE_ERROR(parse({"--lr", "0.1x"}), "0.1x");
  REQUIRE_ERROR(parse({"--max-steps", "0x10"}), "0x10");
  REQUIRE(parse({"--max-steps", "010"}).max_steps == 10);
  REQUIRE_ERROR(parse({"--batch-size", "4611686018427387904", "--seq-len", "4"}), "--batch-size");
  REQUIRE_ERROR(parse({"--threads", "4294967296"}), "--threads");
  REQUIRE_ERROR(parse({"--memory-limit", "1e300"}), "--memory-limit");
  REQUIRE_ERROR(parse({"--device", "gpu"}), "--device gpu");
  REQUIRE_ERROR(parse({"--plan", "--generate"}), "choose one");
  REQUIRE_ERROR(parse({"--dtype", "int8"}), "fp32, bf16");
  REQUIRE_ERROR(parse({"--total-batch-size", "5000"}), "use 4096");
  REQUIRE_ERROR(parse({"--generate", "--from-scratch"}), "--from-scratch");
  REQUIRE_ERROR(parse({"--train-data", ""}), "--train-data");
  for (const std::string schedule : {"1f1b", "pipedream"})
    REQUIRE_ERROR(
        parse({"--plan", "-b", "16777216", "-t", "16777216", "--ranks", "65536", "-d", "1", "--schedule", schedule}),
        "--batch-size 16777216 x --seq-len 16777216 x 65536 ranks");
  REQUIRE_ERROR(parse({"--seed", "4", "--dp-replicate", "3"}), "does not divide the 4 ranks");
  REQUIRE_ERROR(parse({"--seed", "4", "--tp", "3"}), "--tp 3 needs a multiple of 3 ranks, and there are 4");
  REQUIRE_ERROR(parse({"--seed", "4", "--tp", "2", "--dp-replicate", "4"}),
                "does not divide the 2 data-parallel ranks");
  REQUIRE_ERROR(parse({"--seed", "4", "--tp", "2", "--dp-sync", "parameter-server"}),
                "--dp-sync parameter-server with --tp 2");
  REQUIRE_ERROR(parse({"--seed", "4", "--tp-overlap"}), "nothing to overlap");
  REQUIRE_ERROR(parse({"--seed", "4", "--sequence-parallel", "off"}), "--sequence-parallel off");
  REQUIRE_ERROR(parse({"--seed", "4", "--cp", "3"}),
                "--cp 3 needs a multiple of 3 ranks, and there are 4: change "
                "--local-ranks, the number of processes, or --cp");
  REQUIRE_ERROR(parse({"--seed", "4", "--cp", "4", "--tp", "2"}),
                "--tp 2 with --cp 4 needs a multiple of 8 ranks, and there are 4");
  REQUIRE_ERROR(parse({"--seed", "4", "--cp", "4", "--seq-len", "1001"}),
                "--cp 4 cuts sequences into 8 equal slices, and 8 does not divide --seq-len 1001: use 1000, or "
                "another --cp");
  REQUIRE_ERROR(parse({"--seed", "4", "--cp", "4", "--seq-len", "3"}), "use 8, or");
  REQUIRE(parse({"--seed", "4", "--cp", "4", "--seq-len", "1000"}).cp == 4);
  REQUIRE_ERROR(parse({"--seed", "4", "--cp-attention", "ulysses"}),
                "--cp-attention ulysses: there is nothing to share with --cp 1; leave it out, or raise --cp");
  REQUIRE_ERROR(parse({"--seed", "4", "--cp", "2", "--cp-attention", "rings"}),
                "--cp-attention rings: expected one of ring, all-gather, ulysses");
  REQUIRE_ERROR(parse({"--seed", "4", "--cp", "2", "--dp-sync", "parameter-server"}),
                "--dp-sync parameter-server with --cp 2: servers are for data parallelism alone");
  REQUIRE_ERROR(parse({"--seed", "4", "--cp", "2", "--dp-replicate", "4"}),
                "--dp-replicate 4 does not divide the 2 data-parallel ranks, each of which is a group of --cp");
  REQUIRE_ERROR(parse({"--seed", "4", "--cp", "2", "--total-batch-size", "4100"}),
                "--batch-size 4 x --seq-len 1024 x 2 group(s) of --cp ranks = 8192 tokens: use ");
  REQUIRE_ERROR(parse({"--seed", "4", "--dp-sync", "partitioned-server", "--zero-stage", "1"}),
                "--dp-sync partitioned-server with --zero-stage 1: servers are for stage 0");
  REQUIRE_ERROR(parse({"--seed", "4", "--dp-sync", "parameter-server", "--dp-replicate", "2"}),
                "--dp-sync parameter-server with --dp-replicate 2: servers serve one group");
  REQUIRE_ERROR(parse({"--dp-sync", "ring"}), "expected one of all-reduce, parameter-server, parameter-server-chain");
}

TEST_CASE("data that a later option replaces are named, with the option that takes several", "[options]") {
  REQUIRE(notice_of_ignored(parse({"-j", "b", "--val-data", "c", "--lr", "1", "--lr", "2"})) ==
          "notice: --val-data is given more than once, and only the last counts, c: to use several, give --val "
          "NAME=PATTERN for each");
  REQUIRE(notice_of_ignored(parse({"-i", "a", "-i", "b", "-j", "c", "-j", "c"})) ==
          "notice: --train-data is given more than once, and only the last counts, b: to use several, give --data "
          "NAME=PATTERN:WEIGHT for each");
}

TEST_CASE("options that a mode does not use are refused on the command line, and noted in a --config file",
          "[options]") {
  for (const std::string mode : {"--generate", "--verify-data", "--selftest", "--print-schedule"})
    for (const std::string option : {"--pp", "--tp", "--cp", "--ep", "--moe-z-loss", "--moe-capacity-factor"}) {
      if (mode == "--print-schedule" && option == "--pp") continue;
      REQUIRE_ERROR(parse({mode, option, "2"}), option + " with " + mode + ", which ");
      if (option != "--moe-capacity-factor") parse({mode, option, option == "--moe-z-loss" ? "0" : "1"});
    }
  const TempDir dir;
  std::ofstream(dir / "c.ini") << "tp=2\nep=2\nmoe-z-loss=0.1\n";
  REQUIRE(parse({"--generate", "--config", dir / "c.ini"}).ep == 1);
  REQUIRE_ERROR(parse({"--generate", "--config", dir / "c.ini", "--ep", "4"}), "--ep with --generate");
  for (const std::string mode : {"--generate", "--verify-data", "--selftest", "--print-schedule"})
    REQUIRE(notice_of_ignored(parse({mode, "--config", dir / "c.ini"})) ==
            "notice: " + mode + " does not use these options of --config: --tp, --ep and --moe-z-loss");
  REQUIRE(notice_of_ignored(parse({"--config", dir / "c.ini", "--plan", "--local-ranks", "2"})).empty());
  REQUIRE(notice_of_ignored(parse({"--generate"})).empty());
  const std::vector<OptionText> all = option_texts(Options());
  for (const detail::OptionKind& kind : detail::option_kinds())
    for (const std::string_view name : kind.names)
      REQUIRE(std::ranges::any_of(all, [&](const OptionText& option) { return option.name == name; }));
  REQUIRE_ERROR(parse({"--generate", "--lr", "1e-3", "--train-data", "x", "--batch-size", "2"}),
                "--train-data, --batch-size and --lr with --generate, which computes on one rank and does not train: "
                "leave them out");
  REQUIRE_ERROR(parse({"--verify-data", "--prompt", "x"}), "--prompt with --verify-data");
  REQUIRE_ERROR(parse({"--selftest", "--n-layer", "2"}), "--n-layer with --selftest");
  REQUIRE_ERROR(parse({"--selftest", "--gelu", "cublaslt", "--residual", "cublaslt"}),
                "--gelu and --residual with --selftest");
  REQUIRE_ERROR(parse({"--plan-auto", "--machine", "h100x8", "--head-chunks", "8", "--batch-size", "2"}),
                "--batch-size and --head-chunks with --plan-auto, which searches the layout of a step");
  REQUIRE(parse({"--plan-auto", "--machine", "h100x8", "--total-batch-size", "8192"}).total_batch_size == 8192);
  REQUIRE(parse({"--selftest", "--selftest-layouts", "all"}).selftest_layouts == SelftestLayouts::all);
  REQUIRE_ERROR(parse({"--print-schedule", "--dtype", "bf16"}), "--dtype with --print-schedule");
  REQUIRE(parse({"--generate", "--prompt", "x", "--top-k", "3", "--dtype", "bf16", "--local-ranks", "2"}).top_k == 3);
  REQUIRE(parse({"--print-schedule", "--pp", "2"}).pp == 2);
  REQUIRE(parse({"--plan", "--local-ranks", "2", "--ep", "2", "--moe-z-loss", "0.1"}).ep == 2);
}

TEST_CASE("options of some modes are refused by all others, and only noted in a --config file", "[options]") {
  using Words = std::vector<std::string>;
  const TempDir dir;
  const std::vector<Words> modes = {{"--evaluate", "--model", "test/golden/gpt2_tiny", "--val-data", "x"},
                                    {"--generate"},
                                    {"--verify-data"},
                                    {"--tokenize", "x", "--tokenizer", "bytes", "--out", "x"},
                                    {"--average", "x", "--out", "x"},
                                    {"--selftest"},
                                    {"--coord-check", "128,512"},
                                    {"--plan", "--max-steps", "1"},
                                    {"--plan-auto", "--machine", "h100x8", "--tokens", "1B"},
                                    {"--plan-examples"},
                                    {"--print-schedule"},
                                    {"--print-stages"},
                                    {"--print-samples", "1"},
                                    {}};
  struct Case {
    Words option;
    std::set<std::string> users;
  };
  for (const auto& [option, users] : std::vector<Case>{
           {{"--price", "2"}, {"--plan", "--plan-auto"}},
           {{"--machine", "h200x8"}, {"--plan", "--plan-auto"}},
           {{"--ranks", "8"}, {"--plan", "--plan-auto"}},
           {{"--prompt-file", "x"}, {"--generate"}},
           {{"--num-samples", "2"}, {"--generate"}},
           {{"--interactive"}, {"--generate"}},
           {{"--micro-batches", "4"}, {"--print-schedule"}},
           {{"--selftest-layouts", "all"}, {"--selftest"}},
           {{"--selftest-minutes", "1"}, {"--selftest"}},
           {{"--selftest-draws", "1"}, {"--selftest"}},
           {{"--coord-depths", "2,4"}, {"--coord-check"}},
           {{"--out", "y"}, {"--tokenize", "--average"}},
           {{"--tokenize-split", "val"}, {"--tokenize"}},
           {{"--json"},
            {"--evaluate", "--coord-check", "--plan", "--plan-auto", "--print-schedule", "--print-stages"}}}) {
    const std::string given = option[0] + (option.size() > 1 ? " " + option[1] : "");
    const std::vector<std::string> names(users.begin(), users.end());
    std::ofstream(dir / "c.ini") << option[0].substr(2) << "=" << (option.size() > 1 ? option[1] : "true") << "\n";
    for (const Words& mode : modes) {
      const std::string name = mode.empty() ? "training" : mode[0];
      INFO(given << " with " << name);
      Words words = mode;
      words.insert(words.end(), option.begin(), option.end());
      Words configured = mode;
      configured.insert(configured.end(), {"--config", dir / "c.ini"});
      if (users.contains(name)) {
        REQUIRE_NOTHROW(parse(words));
        REQUIRE(parse(configured).unused.empty());
        continue;
      }
      REQUIRE_ERROR(parse(words), given + " is for --");
      REQUIRE_ERROR(parse(words), mode.empty() ? ", not for training: add " : ", not for " + name + ": leave out ");
      REQUIRE(notice_of_ignored(parse(configured)) ==
              "notice: " + name + " does not use these options of --config: " + option[0]);
    }
  }
  REQUIRE_ERROR(parse({"--ranks", "8"}),
                "--ranks 8 is for --plan and --plan-auto, not for training: add one of them, or leave out --ranks; the "
                "ranks of a run are --local-ranks of each process");
  REQUIRE_ERROR(parse({"--micro-batches", "8"}),
                "--micro-batches 8 is for --print-schedule, not for training: add it, or leave out --micro-batches; ");
  const std::set<std::string> of_runs = {"--plan", "--print-stages", "--print-samples"},
                              of_processes = {"--plan", "--evaluate", "--selftest"};
  for (const Words& mode : modes) {
    if (mode.empty()) continue;
    Words branch = mode, spare = mode;
    branch.insert(branch.end(), {"--branch-from", "x"});
    spare.insert(spare.end(), {"--spare", "--world-size", "2", "--rendezvous", "h:1"});
    if (!of_runs.contains(mode[0])) REQUIRE_ERROR(parse(branch), "--branch-from with " + mode[0] + ", which ");
    if (!of_processes.contains(mode[0])) REQUIRE_ERROR(parse(spare), "--spare with " + mode[0] + ", which ");
  }
  REQUIRE_ERROR(parse({"--selftest", "--threads", "2"}), "--threads with --selftest");
  for (const Words& option : std::vector<Words>{{"--seq-len", "64"}, {"--local-ranks", "4"}, {"--tp", "2"}})
    REQUIRE_ERROR(parse({"--coord-check", "128,512", option[0], option[1]}), option[0] + " with --coord-check, which ");
  REQUIRE_ERROR(parse({"--plan", "--price", "2"}), "this plan has no length: give --max-steps, --tokens or --epochs");
  for (const Words& length : std::vector<Words>{{"--tokens", "1M"}, {"--epochs", "2"}, {"--stages", "s.toml"}})
    REQUIRE(parse({"--plan", "--price", "2", length[0], length[1]}).price == 2);
  REQUIRE_ERROR(parse({"--plan-auto", "--machine", "h100x8", "--price", "2"}),
                "this plan has no length: give --max-steps or --tokens, or leave out --price");
  REQUIRE_ERROR(parse({"--plan-auto", "--machine", "h100x8", "--max-steps", "10", "--tokens", "1B"}),
                "--max-steps 10 with --tokens 1B: each says how long the run is: give one of them");
  REQUIRE_ERROR(parse({"--plan", "--generate", "--lr", "1"}), "--generate and --plan: choose one of them");
}

TEST_CASE("where and by how many ranks to compute is refused by modes that do not compute", "[options]") {
  using Words = std::vector<std::string>;
  const TempDir dir;
  std::ofstream(dir / "c.ini")
      << "device=cpu\ncomm=threads\nmemory-limit=1\nlocal-ranks=1\ntf32=true\nattention=cudnn\ncuda-graphs=off\n";
  const auto check = [&](const Words& mode, const Words& ignored) {
    Words configured = mode;
    configured.insert(configured.end(), {"--config", dir / "c.ini"});
    REQUIRE(parse(configured).unused == ignored);
    for (const Words& option : std::vector<Words>{{"--device", "cpu"},
                                                  {"--comm", "threads"},
                                                  {"--memory-limit", "1"},
                                                  {"--local-ranks", "1"},
                                                  {"--tf32"},
                                                  {"--attention", "cudnn"},
                                                  {"--cuda-graphs", "off"}}) {
      Words words = mode;
      words.insert(words.end(), option.begin(), option.end());
      INFO(mode[0] << " " << option[0]);
      if (std::ranges::find(ignored, option[0]) == ignored.end()) REQUIRE_NOTHROW(parse(words));
      else REQUIRE_ERROR(parse(words), option[0] + " with " + mode[0] + ", which ");
    }
  };
  const Words all = {"--memory-limit", "--local-ranks", "--comm", "--device", "--attention", "--cuda-graphs", "--tf32"};
  check({"--verify-data"}, all);
  check({"--tokenize", "x", "--tokenizer", "bytes", "--out", "x"}, all);
  check({"--average", "x", "--out", "x"}, all);
  check({"--plan-examples"}, all);
  check({"--print-schedule"}, all);
  check({"--coord-check", "128,512"}, {"--memory-limit", "--local-ranks", "--comm"});
  check({"--generate"}, {"--comm"});
  check({"--selftest"}, {"--memory-limit"});
  for (const Words& mode : std::vector<Words>{{"--plan", "--max-steps", "1"},
                                              {"--plan-auto", "--machine", "h100x8"},
                                              {"--evaluate", "--model", "test/golden/gpt2_tiny", "--val-data", "x"},
                                              {"--print-stages"},
                                              {"--print-samples", "1"}})
    check(mode, {});
  for (const Words& mode :
       std::vector<Words>{{"--average", "x", "--out", "x"}, {"--plan-examples"}, {"--print-schedule"}}) {
    Words words = mode;
    words.insert(words.end(), {"--threads", "2"});
    REQUIRE_ERROR(parse(words), "--threads with " + mode[0]);
  }
}

TEST_CASE("options of a --config file that a mode does not use have their defaults in it", "[options]") {
  const TempDir dir;
  const std::string file = dir / "run.ini";
  const auto with = [&](const std::string& text, std::vector<std::string> arguments) {
    std::ofstream(file) << text;
    arguments.insert(arguments.end(), {"--config", file});
    return parse(arguments);
  };
  const Options searched = with("reduce-dtype=bf16\nmoe-aux-loss=0.01\nsample-every=5\nz-loss=1e-4\n",
                                {"--plan-auto", "--machine", "h100x8"});
  REQUIRE(searched.unused == std::vector<std::string>{"--sample-every", "--reduce-dtype", "--moe-aux-loss"});
  REQUIRE((searched.reduce_dtype == WeightType::fp32 && !searched.moe_aux_loss && searched.sample_every == 0));
  REQUIRE(searched.z_loss == 1e-4);

  const std::vector<std::string> evaluate = {"--evaluate", "--model", "test/golden/gpt2_tiny", "--val-data", "x",
                                             "--seq-len",  "8"};
  const Options evaluated = with("noise-scale=true\nverify-updates=10\nstages=\"s.toml\"\nshuffle=false\n", evaluate);
  REQUIRE(evaluated.shuffle == false);  // of the validation data, if --val-steps are not all
  REQUIRE((!evaluated.noise_scale && evaluated.verify_updates == 0 && evaluated.stages.empty()));
  REQUIRE_ERROR(with("stages=\"s.toml\"\ntp=3\nseed=4\n", evaluate), "--tp 3 needs a multiple of 3 ranks");
  const Options checked = with("tp=2\nlocal-ranks=4\nseq-len=64\n", {"--coord-check", "128,512"});
  REQUIRE((checked.tp == 1 && checked.ranks == 1));
  REQUIRE(with("train-data=\"x\"\nstages=\"s.toml\"\nnoise-scale=true\n", {"--print-stages"}).noise_scale);
}

TEST_CASE("--selftest-draws takes a number or a range", "[options][selftest]") {
  const auto draws = [](const std::string& text) {
    return selftest_draws(parse({"--selftest", "--selftest-draws", text}));
  };
  REQUIRE(!selftest_draws(parse({"--selftest", "--selftest-minutes", "0.5"})));
  REQUIRE((draws("123")->first == 123 && !draws("123")->last));
  REQUIRE((draws("120-129")->first == 120 && draws("120-129")->last == 129));
  REQUIRE(draws("18446744073709551614")->first == 18446744073709551614u);
  for (const char* wrong : {"x", "1-", "-1", "1-2-3", "1.5", "18446744073709551615", "99999999999999999999"})
    REQUIRE_ERROR(parse({"--selftest", "--selftest-draws=" + std::string(wrong)}),
                  formatted("--selftest-draws '{}': expected the number of a draw, such as 123, or a range", wrong));
  REQUIRE_ERROR(draws("9-8"), "--selftest-draws 9-8: the range ends before it begins");
  REQUIRE_ERROR(parse({"--selftest", "--selftest-draws", "1", "--selftest-layouts", "all"}),
                "--selftest-layouts all with --selftest-draws, which leaves those layouts out");
  REQUIRE_ERROR(parse({"--selftest", "--selftest-minutes", "-1"}), "--selftest-minutes -1: expected a number from 0");
}

TEST_CASE("the help and the table in dev/docs/options.md list every option", "[options]") {
  const std::string help = help_text(), table = options_markdown();
  Options o;
  for (const OptionRow& row : option_rows(o)) {
    REQUIRE(help.find(row.name + std::string(" ")) != std::string::npos);
    REQUIRE(table.find(row.help) != std::string::npos);
  }
  const std::string document = read_whole("dev/docs/options.md");
  INFO("run scripts/update_options.sh to write the options into dev/docs/options.md");
  REQUIRE(document.find(table) != std::string::npos);
}

TEST_CASE("the help of one group is that group", "[options]") {
  const std::string help = help_text("parallel");
  REQUIRE(help.starts_with("Parallelism\n"));
  REQUIRE(help.find("--tp ") != std::string::npos);
  REQUIRE(help.find("--lr ") == std::string::npos);
  REQUIRE(help_text().find(help) != std::string::npos);
  for (const std::string& group : option_groups()) REQUIRE(help_text(group).starts_with(group + "\n"));
  REQUIRE_ERROR(help_text("cooking"), "--help cooking: there is no such group of options: name one of Data, Model");
}
