// --plan-auto: the layouts that are found, beside all layouts planned one by one; the command that is printed.
#include <set>

#include "catch2.h"
#include "helpers.h"
#include "run/plan/machines.h"
#include "run/plan/verdict.h"

using namespace llmc;

namespace {

SearchFor search_for(int64_t ranks, double memory_gib) {
  SearchFor what{.step = {.model = resolve_model("gpt2:124M", {}),
                          .precision = DType::bf16,
                          .batch = {1, 512},
                          .generates = false},
                 .ranks = ranks,
                 .sequences = 64,
                 .memory = static_cast<int64_t>(memory_gib * (1 << 30))};
  what.device.kind = DeviceKind::cuda;
  what.device.elsewhere = true;
  what.device.collectives = Collectives::library;
  what.device.machine = choose_machine("a100x2", DType::bf16, false);
  return what;
}

// The time of the fastest of all layouts that the search may choose from and that fit; none: none fits.
std::optional<double> fastest_of_all(const SearchFor& what) {
  std::optional<double> fastest;
  for (const int tp : {1, 2})
    for (const int pp : {1, 2, 4})
      for (const int stage : {0, 1, 2, 3})
        for (const int64_t B : {1, 2, 4, 8, 16, 32})
          for (const Recompute recompute : all_values<Recompute>())
            for (const auto& [schedule, chunks] : {std::pair(Schedule::one_f_one_b, 1),
                                                   {Schedule::zb_h1, 1},
                                                   {Schedule::zb_v, 2},
                                                   {Schedule::interleaved, 2}}) {
              if (what.ranks % (tp * pp) != 0) continue;
              const int readers = static_cast<int>(what.ranks) / (tp * pp);
              if (what.sequences % (readers * B) != 0 || (pp == 1 && schedule != Schedule::one_f_one_b) ||
                  (stage == 0) != (readers == 1))
                continue;
              StepConfig step = what.step;
              step.batch.B = B;
              step.micro_batches = what.sequences / (readers * B);
              step.recompute = recompute;
              step.layout = {.zero = {.shards = readers},
                             .tensor = tensor_parallel(step.model, tp),
                             .pipeline = {.schedule = schedule, .stages = pp, .chunks_per_stage = chunks}};
              step.layout.zero.set_stage(stage);
              if (!layout_faults(step.layout, step.model).empty()) continue;
              if (schedule == Schedule::interleaved && step.micro_batches % pp != 0) continue;
              const Plan plan = make_plan(step, what.device);
              if (plan.total_bytes() > what.memory) continue;
              const double seconds = detail::step_time(step, plan, what.device)->step();
              if (!fastest || seconds < *fastest) fastest = seconds;
            }
  return fastest;
}

}  // namespace

TEST_CASE("the search finds a layout that is as fast as the fastest of all", "[run][plan]") {
  for (const int64_t ranks : {1, 4})
    for (const double memory : {40.0, 3.0, 2.2}) {
      const SearchFor what = search_for(ranks, memory);
      const std::vector<Found> found = LayoutSearch(what).find();
      const std::optional<double> fastest = fastest_of_all(what);
      INFO(ranks << " ranks, " << memory << " GiB: " << found.size() << " found");
      REQUIRE(found.empty() == !fastest.has_value());
      if (!fastest) continue;
      EXPECT(found[0].seconds < 1.03 * *fastest);
      for (size_t i = 0; i < found.size(); ++i) {
        REQUIRE(found[i].bytes <= what.memory);
        REQUIRE((i == 0 || found[i - 1].seconds <= found[i].seconds));
        const Plan plan = make_plan(found[i].step, what.device);
        REQUIRE(plan.total_bytes() == found[i].bytes);
      }
    }
}

TEST_CASE("the search tries as many short sequences at once as a step has, whether or not that is a power of two",
          "[run][plan]") {
  SearchFor what = search_for(1, 40);
  what.step.batch.T = 128;
  what.sequences = 96;
  const std::vector<Found> found = LayoutSearch(what).find();
  REQUIRE_FALSE(found.empty());
  REQUIRE(found[0].step.batch.B == 96);
  REQUIRE(found[0].step.recompute == Recompute::none);
}

TEST_CASE("the estimate of a search counts the slots of each parameter's own rule", "[run][plan]") {
  SearchFor what = search_for(1, 0);
  what.step.model.n_layer = 1;  // most parameters are those of the embedding, which has AdamW's slots
  what.step.layout.zero.optimizer = Optimizer::muon;
  StepConfig smallest = what.step;
  smallest.micro_batches = what.sequences;
  smallest.recompute = Recompute::block;
  what.memory = make_plan(smallest, what.device).total_bytes() * 9 / 10;
  LayoutSearch search(what);
  REQUIRE(search.find().empty());
  INFO(search.counts_text());
  REQUIRE(search.counts().tried > 0);
  REQUIRE(search.counts().planned == 0);
}

TEST_CASE("--plan-auto prints commands whose plans have the printed time and memory", "[run][plan]") {
  for (const std::string asked :
       {"--model llama3:8B --seq-len 8192 --ranks 8 --machine h100x8 --dtype bf16",
        "--model mixtral:8x7B --seq-len 4096 --ranks 64 --machine a100x8 --dtype bf16",
        "--model qwen2.5:1.5B --seq-len 2048 --ranks 1 --machine rtx4090x1",  // without master weights
        "--model gpt2:124M --n-layer 24 --ranks 8 --machine h100x8 --dtype bf16 --gelu cublaslt --total-batch-size "
        "4194304",
        "--model llama3:8B --seq-len 131072 --ranks 32 --machine h100x8 --dtype bf16 --total-batch-size 1048576",
        "--model llama3:8B --seq-len 8192 --ranks 8 --machine h100x8 --dtype bf16 --optimizer muon --lr 1e-3 --ema "
        "0.99",
        "--model llama3:8B --seq-len 8192 --ranks 8 --machine h100x8 --dtype bf16 --master-weights split "
        "--moment1-dtype 8bit --moment2-dtype 8bit"}) {
    const std::string machine =
        asked.substr(asked.find("--machine"), asked.find(' ', asked.find("--machine") + 10) - asked.find("--machine"));
    const ProgramResult r = run_program("--plan-auto --sample-every 0 " + asked);
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    const size_t first = r.out.find("\n  1 ");
    const double seconds = 1e-3 * std::stod(r.out.substr(first + 4));  // from milliseconds
    const std::string command = r.out.substr(r.out.find("=> ./train_gpt ") + 15);
    const ProgramResult plan =
        run_program("--plan --json --sample-every 0 " + machine + " " + command.substr(0, command.find('\n')));
    INFO(plan.err);
    REQUIRE(plan.status == 0);
    const auto json = nlohmann::json::parse(plan.out);
    EXPECT(json["step_seconds"].get<double>() == Catch::Approx(seconds).epsilon(1e-3));
    EXPECT(json["fits"].get<bool>());
    const std::string memory = human_bytes(json["memory_bytes"].get<int64_t>());
    EXPECT(r.out.substr(first, r.out.find('\n', first + 1) - first).find(memory) != std::string::npos);
  }
}

TEST_CASE("--plan-auto --json has the layouts, counts and command of the table", "[run][plan]") {
  const std::string asked = "--plan-auto --sample-every 0 --model gpt2:774M --ranks 16 --machine a100x8 --dtype bf16 ";
  const ProgramResult words = run_program(asked), numbers = run_program(asked + "--json");
  INFO(words.out << words.err << numbers.err);
  REQUIRE((words.status == 0 && numbers.status == 0));
  const auto json = nlohmann::json::parse(numbers.out);
  REQUIRE(json["ranks"] == 16);
  REQUIRE(json["layouts"].size() == 10);
  double before = 0;
  for (size_t i = 0; i < 10; ++i) {
    const auto& l = json["layouts"][i];
    REQUIRE(l["step_seconds"] >= before);
    before = l["step_seconds"];
    REQUIRE(l["layout"]["ranks"] == 16);
    REQUIRE(l["batch"]["tokens_per_step"] == json["tokens_per_step"]);
    REQUIRE(l["memory_bytes"] <= l["memory_limit_bytes"]);
    const size_t row = words.out.find(formatted("\n  {} ", i + 1));
    REQUIRE(std::stod(words.out.substr(row + 4 + (i == 9))) == Catch::Approx(1e3 * before).margin(1e-3));
    REQUIRE(words.out.find(human_bytes(l["memory_bytes"].get<int64_t>()), row) < words.out.find('\n', row + 1));
  }
  REQUIRE(words.out.find("=> " + json["layouts"][0]["command"].get<std::string>()) != std::string::npos);
  REQUIRE(words.out.find(formatted("bf16: {} layouts: {} ways", json["searched"][0]["layouts"].get<int64_t>(),
                                   json["searched"][0]["impossible"].get<int64_t>())) != std::string::npos);
}

TEST_CASE("--plan-auto says how long a run takes in the layouts it finds, as --plan does", "[run][plan]") {
  const std::string asked =
      "--plan-auto --sample-every 0 --model gpt2:124M --ranks 8 --machine h100x8 --dtype bf16 --tokens 10B --price "
      "2.5 ";
  const ProgramResult words = run_program(asked), numbers = run_program(asked + "--json");
  INFO(words.out << words.err << numbers.err);
  REQUIRE((words.status == 0 && numbers.status == 0));
  const auto first = nlohmann::json::parse(numbers.out)["layouts"][0];
  const std::string command = first["command"].get<std::string>();
  REQUIRE(command.find(" --tokens 10B") != std::string::npos);
  const ProgramResult plan = run_program("--plan --json --sample-every 0 --machine h100x8 --price 2.5 " +
                                         command.substr(std::string("./train_gpt ").size()));
  INFO(plan.err);
  REQUIRE(plan.status == 0);
  const auto run = nlohmann::json::parse(plan.out)["run"];
  for (const char* name : {"seconds", "gpu_hours", "price"})
    REQUIRE(first["run"][name].get<double>() == Catch::Approx(run[name].get<double>()).epsilon(1e-6));
  REQUIRE(words.out.find("the fastest layout for --tokens 10B") != std::string::npos);
  REQUIRE(words.out.find(human_duration(run["seconds"])) != std::string::npos);
  REQUIRE(words.out.find(human_amount(run["price"].get<double>()) + ", at 2.5 per GPU-hour") != std::string::npos);
  REQUIRE_FALSE(nlohmann::json::parse(run_program("--plan-auto --json --sample-every 0 --model gpt2:124M --ranks 1 "
                                                  "--machine h100x8 --dtype bf16")
                                          .out)["layouts"][0]
                    .contains("run"));
}

TEST_CASE("by default a step of --plan-auto has sequences that many readers can share", "[run][plan]") {
  REQUIRE(usual_sequences(8, 8192) == 64);  // half a million tokens
  REQUIRE(usual_sequences(1, 1024) == 512);
  REQUIRE(usual_sequences(16384, 8192) == 2048);  // one for every eighth rank
  REQUIRE(usual_sequences(24, 8192) == 72);
  REQUIRE(usual_sequences(8, 10002) == 56);
  REQUIRE(usual_sequences(6144, 8192) == 768);
  REQUIRE(usual_sequences(1009, 8192) == 126);  // a prime number of ranks has no others
  for (const int64_t ranks : {24, 96, 72}) {
    SearchFor what = search_for(ranks, 40);
    what.sequences = usual_sequences(ranks, what.step.batch.T);
    LayoutSearch search(what);
    const std::vector<Found> found = search.find(1);
    INFO(ranks << " ranks: " << search.counts_text());
    REQUIRE(found.size() == 1);
    REQUIRE(found[0].step.tokens() == what.sequences * 512);
  }
}

TEST_CASE("sequences that --cp cannot cut into equal slices are searched and planned without it", "[run][plan]") {
  const ProgramResult found = run_program(
      "--plan-auto --json --sample-every 0 --machine h100x8 --ranks 8 --model llama3:1B --dtype bf16 --seq-len 10002");
  INFO(found.err);
  REQUIRE(found.status == 0);
  const auto json = nlohmann::json::parse(found.out);
  EXPECT(json["searched"][0]["reasons"]["cut sequences unevenly"] > 0);
  for (const auto& layout : json["layouts"]) EXPECT(layout["layout"]["cp"] == 1);
  const ProgramResult plan = run_program(
      "--plan --device cuda --sample-every 0 --model llama3:8B --dtype bf16 --ranks 8 -t 10002 -b 1 --memory-limit 62");
  INFO(plan.err);
  EXPECT(plan.status == 1);
  EXPECT(plan.err.find("does not fit into --memory-limit 62.00 GiB less 512.0 MiB for CUDA; it would with") !=
         std::string::npos);
}

TEST_CASE("where no layout divides the sequences of a step, --plan-auto says so, and which number to use",
          "[run][plan]") {
  const std::string search = "--plan-auto --sample-every 0 --machine h100x8 --dtype bf16 ";
  for (const std::string asked :
       {"--model llama3:1B --ranks 24 --total-batch-size 65536", "--model gpt2:124M --ranks 1009",
        "--model gpt2:124M --ranks 1 --total-batch-size 1099511627776"}) {
    const ProgramResult refused = run_program(search + asked);
    INFO(asked << ": " << refused.out << refused.err);
    REQUIRE(refused.status == 1);
    EXPECT(refused.err.find("GiB") == std::string::npos);
    EXPECT(refused.err.find(": of the ways to divide the ranks, ") != std::string::npos);
    EXPECT((refused.err.find("leave sequences of a step over") != std::string::npos ||
            refused.err.find("have more micro-batches than can be planned") != std::string::npos));
    const size_t use = refused.err.find("--total-batch-size ", refused.err.find(": use "));
    REQUIRE(use != std::string::npos);
    const std::string advised =
        asked.substr(0, asked.find(" --total")) + " " + refused.err.substr(use, refused.err.find(',', use) - use);
    const ProgramResult found = run_program(search + advised);
    INFO(advised << ": " << found.err);
    EXPECT(found.status == 0);
  }
}

TEST_CASE("--plan-auto refuses what fits nowhere, and what it cannot search", "[run][plan]") {
  const auto refused = [](const std::string& options, const std::string& why) {
    const ProgramResult r = run_program("--plan-auto " + options);
    INFO(options << ": " << r.err);
    EXPECT(r.status == 1);
    EXPECT(r.err.find(why) != std::string::npos);
  };
  refused("--model llama3:405B --ranks 8 --machine h100x8", "no layout of llama3:405B on 8 ranks fits into 79.10 GiB");
  refused("--model gpt2:124M --ranks 8", "--plan-auto searches the layouts of a machine: name it by --machine");
  refused("--model gpt2:124M --machine h100x8 --ranks 8 --local-ranks 8",
          "--ranks 8 with --local-ranks or --world-size");
  refused("--model gpt2:124M --machine h100x8 --seq-len 4096", "exceeds the 1024 positions");
  refused("--model gpt2:124M --machine h100x8 --total-batch-size 1000", "is no multiple of --seq-len 1024: use 1024");
  refused("--model gpt2:124M --machine h100x8 --plan", "choose one of them");
  refused("--model llama3:1B --machine h100x8 --ranks 8 --dtype bf16 --gelu cublaslt",
          "models of type llama have SwiGLU");
  refused("--model gpt2:124M --machine h100x8 --ema 0.99 --master-weights none", "it averages fp32 weights");
  refused("--model gpt2:124M --machine h100x8 --muon-ns polar-express", "--muon-ns with --optimizer adamw");
  refused("--model gpt2:124M --machine h100x8 --optimizer sgd --beta2 0.9", "--beta2 0.9");
  refused("--model gpt2:124M --machine h100x8 --head-lr 1e-3", "whose output layer is its embedding");
  refused("--model llama3:70B --ranks 1 --machine h100x8 --dtype bf16 --ema 0.99",
          "any --recompute, and --batch-size 1");
}

TEST_CASE("--plan-auto searches with the vocabulary of --tokenizer, as --plan plans", "[run][plan]") {
  const std::string asked =
      "--model gpt2:124M --seq-len 1024 --sample-every 0 --machine h100x8 --ranks 1 --tokenizer bytes ";
  const ProgramResult search = run_program("--plan-auto --dtype bf16 " + asked + "--json"),
                      words = run_program("--plan-auto --dtype bf16 " + asked);
  INFO(search.err << words.out << words.err);
  REQUIRE((search.status == 0 && words.status == 0));
  EXPECT(words.out.find("notice: 257 tokens, those of --tokenizer, instead of the 50,257 of gpt2:124M") !=
         std::string::npos);
  const auto found = nlohmann::json::parse(search.out);
  EXPECT(found["notices"].dump().find("257 tokens, those of --tokenizer") != std::string::npos);
  const auto first = found["layouts"][0];
  const std::string command = first["command"];
  EXPECT(command.find(" --tokenizer bytes") != std::string::npos);
  EXPECT(command.find(" --vocab-size") == std::string::npos);
  const ProgramResult plan = run_program("--plan --json --sample-every 0 --machine h100x8 " + command.substr(12));
  INFO(command << plan.err);
  REQUIRE(plan.status == 0);
  const auto planned = nlohmann::json::parse(plan.out);
  EXPECT(planned["memory_bytes"] == first["memory_bytes"]);
  EXPECT(planned["step_seconds"] == first["step_seconds"]);
  EXPECT(planned["notices"] == found["notices"]);
  const ProgramResult padded = run_program("--plan-auto --dtype bf16 " + asked + "--json --vocab-size 320");
  INFO(padded.err);
  REQUIRE(padded.status == 0);
  const auto other = nlohmann::json::parse(padded.out);
  EXPECT(other["notices"].empty());
  EXPECT(other["layouts"][0]["command"].get<std::string>().find(" --vocab-size 320") != std::string::npos);
}

TEST_CASE("--plan-auto searches all layouts, whichever one a --config has", "[run][plan]") {
  const TempDir dir;
  std::ofstream(dir / "run.ini") << "tp=8\ndp-replicate=2\nhead-chunks=64\ngrad-reduce=micro\nrecompute=block:20\n"
                                    "dp-sync=parameter-server\nnoise-scale=true\n";
  const std::string search = "--plan-auto --model gpt2:124M --ranks 4 --machine h100x8 --master-weights none ";
  const ProgramResult alone = run_program(search), configured = run_program(search + "--config " + (dir / "run.ini"));
  INFO(alone.err << configured.err);
  REQUIRE((alone.status == 0 && configured.status == 0));
  REQUIRE(alone.out == configured.out);
  REQUIRE(alone.out.find("--dtype bf16") < alone.out.find("\n  2 "));  // faster than the fp32 of the default
}

TEST_CASE("what is found or advised with --gelu cublaslt allows it", "[run][plan]") {
  const std::string found = "--plan-auto --json --sample-every 0 --model gpt2:124M --ranks 8 --machine h100x8 ";
  const ProgramResult own = run_program(found + "--dtype bf16"),
                      products = run_program(found + "--dtype bf16 --gelu cublaslt");
  INFO(own.err << products.err);
  REQUIRE((own.status == 0 && products.status == 0));
  const auto recompute_of = [](const ProgramResult& r) {
    std::set<std::string> all;
    const auto json = nlohmann::json::parse(r.out);
    for (const auto& layout : json["layouts"]) all.insert(layout["precision"]["recompute"].get<std::string>());
    return all;
  };
  REQUIRE(recompute_of(own).contains("activation"));
  for (const std::string& recompute : recompute_of(products)) REQUIRE((recompute == "none" || recompute == "block"));

  const std::string large =
      "--plan --sample-every 0 --model gpt2:1558M --ranks 8 --machine h100x8 --dtype bf16 -b 64 -t 1024 ";
  REQUIRE(run_program(large).out.find("--recompute activation") != std::string::npos);
  const std::string advised = run_program(large + "--gelu cublaslt").out;
  INFO(advised);
  const size_t begin = advised.find("it would with ");
  REQUIRE(begin != std::string::npos);
  const std::string change = advised.substr(begin + 14, advised.find(" (", begin) - begin - 14);
  const ProgramResult followed = run_program(large + "--gelu cublaslt " + change);
  INFO(followed.out << followed.err);
  REQUIRE(followed.status == 0);
  REQUIRE(followed.out.find("=> fits into") != std::string::npos);
}

TEST_CASE("what is advised for GPUs is the fastest layout that fits, not the first", "[run][plan]") {
  struct Case {
    std::string options, change, instead;  // instead: what was once advised
  };
  for (const Case& c : std::vector<Case>{
           {"--model llama3:8B --local-ranks 8 -t 8192 -b 1 --memory-limit 62", "--zero-stage 3", "--recompute block"},
           {"--model llama2:13B --local-ranks 8 -t 4096 -b 1 --memory-limit 79 --zero-stage 1", "--zero-stage ",
            "--recompute block"},
           {"--model llama3:405B --world-size 1024 --local-ranks 1 -t 8192 -b 1 --memory-limit 79", "--tp ",
            "--seq-len"},
           {"--model llama3:8B --local-ranks 8 -t 131072 -b 1 --memory-limit 79 --zero-stage 3", "--cp ", "--seq-len"},
           {"--model llama3:8B --local-ranks 8 -t 8192 -b 4 --memory-limit 40 --products fp8-tensor", "--zero-stage 3",
            "--cp "},
           {"--model llama3:8B --local-ranks 8 -t 8192 -b 4 --memory-limit 40 --products fp8-block", "--zero-stage 3",
            "--seq-len"},
           {"--model gpt2:1558M --local-ranks 1 -t 1024 -b 1 --memory-limit 16 --optimizer sgd",
            "--moment1-dtype 8bit --recompute activation", "--recompute block"},
           {"--model qwen2.5:1.5B --local-ranks 1 -t 2048 -b 4 --memory-limit 24",
            "--master-weights split --moment1-dtype 8bit --moment2-dtype 8bit --batch-size 2", "--local-ranks"},
           {"--model llama3:70B --ranks 64 -t 8192 -b 1 --memory-limit 79 --pp 4 --pp-layout 20,20,20,20",
            "--pp-layout even", "--seq-len"},
           {"--model llama3:8B --ranks 8 -t 8192 -b 1 -d 262144 --memory-limit 62 --pp 2 --schedule interleaved "
            "--pp-chunks 4",
            "--pp-chunks 1", "--seq-len"},
           {"--model llama3:8B --ranks 1 -t 2048 -b 1 -d 16384 --memory-limit 62", "--ranks 4", "--local-ranks"},
           {"--model llama3:8B --world-size 2 --local-ranks 1 -t 2048 -b 1 -d 32768 --memory-limit 30",
            "--world-size 8", "--local-ranks"}}) {
    const std::string plan = "--plan --device cuda --dtype bf16 --sample-every 0 " + c.options;
    const ProgramResult refused = run_program(plan);
    INFO(c.options << ": " << refused.err);
    REQUIRE(refused.status == 1);
    const size_t begin = refused.err.find("it would with ");
    REQUIRE(begin != std::string::npos);
    const std::string change = refused.err.substr(begin + 14, refused.err.find(" (", begin) - begin - 14);
    EXPECT(change.find(c.change) != std::string::npos);
    EXPECT(change.find(c.instead) == std::string::npos);
    const ProgramResult followed = run_program(plan + " " + change);
    INFO(followed.out << followed.err);
    EXPECT(followed.status == 0);
    const size_t size = begin + 14 + change.size() + 2;  // " (15.07 GiB instead of"
    EXPECT(followed.out.find(refused.err.substr(size, refused.err.find(" instead of", size) - size)) !=
           std::string::npos);
  }
}

TEST_CASE("what is advised for a pipeline takes back layers and chunks that it cannot have", "[run][plan]") {
  Options o;
  o.pp_layout = "3,9", o.pp_chunks = 4;
  StepConfig from{.model = resolve_model("gpt2:124M", {}), .micro_batches = 4}, to = from;
  from.layout.pipeline = {
      .schedule = Schedule::interleaved, .stages = 2, .chunks_per_stage = 4, .layers = {1, 2, 1, 2, 1, 2, 1, 2}};
  to.layout.pipeline = {.schedule = Schedule::one_f_one_b, .stages = 4};
  EXPECT(detail::change_text(o, from, to) == " --local-ranks 4 --pp 4 --pp-layout even --schedule 1f1b --pp-chunks 1");
  to.layout.pipeline = {.schedule = Schedule::zb_v, .stages = 2, .chunks_per_stage = 2};
  EXPECT(detail::change_text(o, from, to) == " --pp-layout even --schedule zb-v --pp-chunks 2");
  to.layout.pipeline = from.layout.pipeline;
  EXPECT(detail::change_text(o, from, to).empty());
  to.layout.pipeline.layers.clear();
  EXPECT(detail::change_text({}, from, to).empty());
  to.layout.pipeline = {.schedule = Schedule::zb_v, .stages = 2, .chunks_per_stage = 2};
  EXPECT(detail::change_text({}, from, to) == " --schedule zb-v");
}

TEST_CASE("a layout that the trainer rejects is left out of what is tried, and ends neither advice nor search",
          "[run][plan]") {
  const std::string copies = "--model llama2:7B --n-embd 40 --n-head 4 --n-kv-head 1 --n-layer 2 --n-ffn 64 ";
  for (const std::string& options :
       {std::string(
            "--model d2 --n-embd 32 --n-head 2 --vocab-size 257 -t 32 -b 2 --parametrization mup --base-width 16 "
            "--base-head-size 8 --memory-limit 0.0005 --device cpu"),
        copies + "--vocab-size 257 -t 32 -b 2 --tp 2 --memory-limit 0.0008 --device cpu"}) {
    const ProgramResult r = run_program("--plan " + options);
    INFO(r.err);
    EXPECT(r.status == 1);
    EXPECT(r.err.find("nor does what was tried on paper; the least is ") != std::string::npos);
  }
  const std::string noise =
      "--plan --model gpt2:1558M --machine a100-40x8 --memory-limit 8 -b 1 -t 512 --local-ranks 2 "
      "--dtype bf16 --noise-scale -d 8192 ";
  const ProgramResult refused = run_program(noise);
  INFO(refused.err);
  const size_t begin = refused.err.find("it would with ");
  REQUIRE(begin != std::string::npos);
  const std::string change = refused.err.substr(begin + 14, refused.err.find(" (", begin) - begin - 14);
  EXPECT(run_program(noise + change).status == 0);

  const ProgramResult search = run_program(
      "--plan-auto --machine h100x8 --ranks 8 --dtype bf16 --moment1-dtype 8bit --moment2-dtype 8bit -t 512 " + copies);
  INFO(search.err);
  EXPECT(search.status == 0);
  EXPECT(search.out.find("2 the trainer rejects (moments in 8 bits: 2 ranks have copies of blocks.0.attn.k.weight, "
                         "which shares blocks of 64 elements with other parameters)") != std::string::npos);
}

TEST_CASE("a machine without bf16 is not advised to use it, nor one whose ranks share its memory to have more",
          "[run][plan]") {
  const auto advice = [](const std::string& options) {
    const ProgramResult r = run_program("--plan --sample-every 0 " + options);
    return r.out.substr(r.out.find("=> ") == r.out.npos ? 0 : r.out.find("=> ")) + r.err;
  };
  const std::string old = advice("--model gpt2:1558M --machine v100x8 --memory-limit 8 -b 2 -t 512 --ranks 8");
  INFO(old);
  EXPECT(old.find("does not fit into") != old.npos);
  EXPECT(old.find("--dtype") == old.npos);
  const std::string cpu = "--model llama3:1B -t 131072 -b 1 --dtype bf16 --recompute block --machine cpux4 ";
  const std::string shared = advice(cpu), limited = advice(cpu + "--memory-limit 23");
  INFO(shared << limited);
  EXPECT(shared.find("it would with --seq-len ") != shared.npos);
  EXPECT(shared.find("--cp") == shared.npos);
  EXPECT(limited.find("or with --cp, which divides long sequences among ranks") != limited.npos);
}

TEST_CASE("what would reduce a loss is named as far as the step may have it", "[run][plan]") {
  struct Case {
    std::string options, loss, remedy;  // remedy: all of it, or its end; "not X": X is no part of it
  };
  for (const Case& c : std::vector<Case>{
           {"--model llama3:1B -t 1000 -b 1", "products and attention below the peak", "not fp8-block"},
           {"--model llama3:1B -t 1024 -b 1", "products and attention below the peak",
            "--products fp8-block, which rounds to eight bits"},
           {"--model llama3:1B -t 1024 -b 1 --recompute block", "computing again", ": --recompute none"},
           {"--model llama3:1B -t 1024 -b 2 --recompute block", "computing again",
            ": --recompute none, with a smaller --batch-size"},
           {"--model llama3:1B -t 1024 -b 1 --ranks 2 --recompute block", "computing again",
            ": --recompute none, with a higher --zero-stage"},
           {"--model d2 --pp 2 -t 512 -b 4", "the pipeline's bubble", ": more micro-batches (--total-batch-size)"},
           {"--model llama3:1B -t 1024 -b 2 --pp 2 --token-slices 4", "the pipeline's bubble",
            ": more micro-batches (--total-batch-size)"},
           {"--model llama3:1B -t 1024 -b 2 --pp 2 -d 8192", "the pipeline's bubble",
            ", or --schedule interleaved or zb-v"},
           {"--model llama3:1B -t 1024 -b 2 --pp 8 --schedule zb-v", "the pipeline's bubble",
            ": more micro-batches (--total-batch-size)"},
           {"--model llama3:1B -t 1024 -b 2 --pp 4 --schedule interleaved", "the pipeline's bubble",
            ", or more --pp-chunks"},
           {"--model llama3:1B -t 1024 -b 2 --pp 4 --schedule interleaved --pp-chunks 4", "the pipeline's bubble",
            ": more micro-batches (--total-batch-size)"},
           {"--model llama2:7B --ranks 32 --pp 4 --schedule pipedream -b 1 -t 128", "communication: gradients",
            ": a larger --batch-size; --reduce-dtype bf16, which rounds gradients and sends half the bytes"},
           {"--model llama3:8B -t 1024 -b 1 --ranks 8 -z 3 --products fp8-block", "communication: weights",
            ": a larger --batch-size, --zero-stage 2 or --dp-replicate; --gather-dtype fp8, which sends half the bytes "
            "of the same numbers"},
           {"--model llama3:8B -t 1024 -b 1 --ranks 8 -z 3 --offload weights,moments --products fp8-block",
            "communication: weights", ": a larger --batch-size or --dp-replicate"}}) {
    const ProgramResult r = run_program("--plan --machine h100x8 --dtype bf16 --sample-every 0 --json " + c.options);
    INFO(c.options << r.err);
    REQUIRE(r.status == 0);
    bool found = false;
    const auto json = nlohmann::json::parse(r.out);
    for (const auto& loss : json["time"]["losses"]) {
      if (!loss["what"].get<std::string>().ends_with(c.loss)) continue;
      found = true;
      const std::string remedy = ": " + loss["remedy"].get<std::string>();
      INFO(remedy);
      if (c.remedy.starts_with("not ")) EXPECT(remedy.find(c.remedy.substr(4)) == std::string::npos);
      else EXPECT((c.remedy.starts_with(": ") ? remedy == c.remedy : remedy.ends_with(c.remedy)));
    }
    EXPECT(found);
  }
}
