// Llama, Qwen2.5, Qwen3 and SmolLM2 as transformers has them (golden/families): logits, training, documents, files; the
// key-value cache; multiple choice.
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "core/safetensors.h"
#include "helpers.h"
#include "train/checkpoint.h"
#include "train/choices.h"
#include "train/dataloader.h"
#include "train/run.h"
#include "train/sample.h"
#include "train/selftest.h"

using namespace llmc;
using nlohmann::json;

namespace {

const std::string all_families[] = {"llama2_tiny", "llama3_tiny", "qwen2_tiny", "qwen3_tiny", "smollm2_tiny"};
std::string folder_of(const std::string& family) { return "test/golden/families/" + family; }

template <class T>
std::vector<T> read_tensor(const std::string& file, const std::string& name) {
  const SafetensorsReader reader(file);
  std::vector<T> values(static_cast<size_t>(reader.info(name).numel()));
  reader.read(name, values.data());
  return values;
}

// One rank with the weights of a directory.
struct Loaded {
  StepConfig config;
  World world{Mesh()};
  Run run;
  Loaded(const std::string& folder, const BatchShape& batch, DType dtype = DType::fp32,
         Documents documents = Documents::together)
      : config{.model = resolve_model(folder, {}), .dtype = dtype, .batch = batch, .documents = documents},
        run(config, make_plan(config, 1), {DeviceKind::cpu, 1}, world, 0) {
    load_model(folder, config.model, run.trainer.state(), run.stream);
    run.stream.synchronize();
  }
};

double loss_of(std::span<const float> logits, int32_t target) {
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  return std::log(sum) - static_cast<double>(logits[static_cast<size_t>(target)]);
}

}  // namespace

TEST_CASE("logits of every family are those of transformers") {
  for (const std::string& family : all_families) {
    INFO(family);
    const std::string file = folder_of(family) + "/logits.safetensors";
    const auto tokens = read_tensor<int32_t>(file, "tokens");
    const auto logits = read_tensor<float>(file, "logits");
    const int64_t T = SafetensorsReader(file).info("tokens").shape[1];
    Loaded model(folder_of(family), {1, T});
    const size_t V = static_cast<size_t>(model.config.model.vocab_size);
    for (size_t sequence = 0; sequence < 2; ++sequence)
      for (size_t t = 1; t <= static_cast<size_t>(T); ++t) {
        const std::span row = std::span(tokens).subspan(sequence * static_cast<size_t>(T), t);
        const auto ours = model.run.trainer.next_token_logits(row);
        const float* theirs = logits.data() + (sequence * static_cast<size_t>(T) + t - 1) * V;
        REQUIRE(relative_distance(ours.data(), theirs, static_cast<int64_t>(V)) < 1e-4);
      }
  }
}

TEST_CASE("twenty steps of every family follow PyTorch's AdamW, by one rank and by several") {
  for (const std::string& family : all_families) {
    const std::string folder = folder_of(family);
    const json golden = json::parse(read_whole(folder + "/trajectory.json"));
    std::string options = "--model " + folder + " --train-data " + folder + "/train.bin --threads 2";
    for (const auto& [name, value] : golden["options"].items())
      options += " --" + name + " " + (value.is_string() ? value.get<std::string>() : value.dump());
    const int64_t sequences =
        golden["options"]["total-batch-size"].get<int64_t>() / golden["options"]["seq-len"].get<int64_t>();
    std::vector<std::string> layouts = {
        "", "--batch-size 1 --recompute norm --local-ranks " + std::to_string(sequences) + " --zero-stage 3"};
    for (const std::string& layout : layouts) {
      INFO(family << " " << layout);
      const TempDir dir;
      const ProgramResult r = run_program(options + " " + layout + " --out-dir " + (dir / "run"));
      INFO(r.err);
      REQUIRE(r.status == 0);
      std::ifstream in(dir / "run/metrics.jsonl");
      size_t steps = 0;
      for (std::string line; std::getline(in, line); ++steps) {
        const json object = json::parse(line);
        INFO(line);
        for (const char* name : {"loss", "grad_norm"})
          REQUIRE(std::abs(object[name].get<double>() / golden[name][steps].get<double>() - 1) < 1e-4);
      }
      REQUIRE(steps == 20);
      std::map<std::string, std::vector<float>> ours;
      for (const std::string& file : model_files(dir / "run/step-000020")) {
        const SafetensorsReader reader(file);
        for (const std::string& name : reader.names()) ours[name] = read_tensor<float>(file, name);
      }
      const SafetensorsReader theirs(folder + "/final.safetensors");
      REQUIRE(ours.size() == theirs.names().size());
      for (const std::string& name : theirs.names()) {
        auto a = ours.at(name), b = read_tensor<float>(folder + "/final.safetensors", name);
        REQUIRE(a.size() == b.size());
        for (const json& zero : golden["zero_gradient"])  // Adam makes a step of any rounding there
          if (zero[0] == name)
            for (size_t i = zero[1]; i < zero[2]; ++i) a[i] = b[i] = 0;
        INFO(name);
        REQUIRE(relative_distance(a.data(), b.data(), static_cast<int64_t>(a.size())) < 1e-4);
      }
    }
  }
}

TEST_CASE("with documents apart every document has the logits that it has alone") {
  const std::string folder = folder_of("llama3_tiny"), file = folder + "/logits_documents.safetensors";
  const auto tokens = read_tensor<int32_t>(file, "tokens"), positions = read_tensor<int32_t>(file, "positions");
  const auto logits = read_tensor<float>(file, "logits");
  const auto shape = SafetensorsReader(file).info("tokens").shape;
  for (const Documents documents : {Documents::apart, Documents::together}) {
    Loaded model(folder, {shape[0], shape[1]}, DType::fp32, documents);
    const size_t V = static_cast<size_t>(model.config.model.vocab_size);
    std::vector<float> losses;
    // The targets are made up: each token has another one.
    auto target = [&](size_t n) { return static_cast<int32_t>((7 * n + 3) % V); };
    model.run.trainer.evaluate(
        1, 1,
        [&](int64_t) {
          HostBatch batch{tokens, {}, positions};
          for (size_t n = 0; n < tokens.size(); ++n) batch.targets.push_back(target(n));
          return batch;
        },
        [&](int64_t, std::span<const float> rows) { losses.assign(rows.begin(), rows.end()); });
    REQUIRE(losses.size() == tokens.size());
    double largest = 0;
    for (size_t n = 0; n < tokens.size(); ++n)
      largest = std::max(largest, std::abs(loss_of(std::span(logits).subspan(n * V, V), target(n)) - losses[n]));
    if (documents == Documents::apart) REQUIRE(largest < 1e-5);
    else REQUIRE(largest > 1e-2);
  }
  // The loader finds the same positions.
  const TempDir dir;
  std::vector<uint16_t> stored(tokens.begin(), tokens.end());
  stored.push_back(0);
  write_shard<uint16_t>(dir / "data.bin", stored);
  const TokenShards shards(dir / "data.bin", shape[1]);
  const int32_t end_of_text = json::parse(read_whole(folder + "/config.json"))["eos_token_id"];
  DataLoader loader(shards, {.vocab_size = 137, .end_of_text = end_of_text});
  HostBatch read;
  loader.read_batch(0, 0, {.batch_size = shape[0]}, read.tokens, read.targets, read.positions);
  REQUIRE(read.tokens == tokens);
  REQUIRE(read.positions == positions);
}

TEST_CASE("a sequence that grows against its cache has the logits of the whole one, in every family") {
  for (const Family& family : families)
    for (const DType dtype : {DType::fp32, DType::bf16}) {
      INFO(family.model_type << " in " << name_of(dtype));
      const StepConfig config{
          .model = selftest::awkward_model(family.model_type), .dtype = dtype, .batch = {1, 19}, .chunks = 2};
      World world{Mesh()};
      Run run(config, make_plan(config, 2), {DeviceKind::cpu, 2}, world, 0);
      init_weights(run.trainer.state(), 5, run.stream);
      const std::vector<int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8};
      Trainer::Continuation sequence(run.trainer);
      std::vector<std::vector<float>> grown;  // 5 tokens, then one after the other
      grown.push_back(sequence.feed(std::span(tokens).first(5)));
      for (size_t n = 5; n < tokens.size(); ++n) grown.push_back(sequence.feed(std::span(tokens).subspan(n, 1)));
      REQUIRE(sequence.rows() == 19);
      for (size_t n = 5; n <= tokens.size(); ++n) {
        const auto whole = run.trainer.next_token_logits(std::span(tokens).first(n));
        REQUIRE(relative_distance(grown[n - 5].data(), whole.data(), 131) < (dtype == DType::fp32 ? 1e-5 : 0x1p-6));
      }
    }
}

TEST_CASE("generation beyond the sequence length forgets the older half and goes on") {
  const StepConfig config{.model = selftest::awkward_model("llama"), .batch = {1, 8}};
  World world{Mesh()};
  Run run(config, make_plan(config, 1), {DeviceKind::cpu, 1}, world, 0);
  init_weights(run.trainer.state(), 5, run.stream);
  const auto made = generate(run.trainer, {1, 2, 3}, 20, {.temperature = 0}, 1, "test", [](int32_t) { return true; });
  REQUIRE(made.size() == 23);
  // By hand: greedy, with the tokens that are seen.
  std::vector<int32_t> seen = {1, 2, 3}, expected = seen;
  while (expected.size() < 23) {
    const auto logits = run.trainer.next_token_logits(seen);
    const int32_t next = sample_token(logits, {.temperature = 0}, 0);
    expected.push_back(next);
    if (seen.size() == 8) seen.erase(seen.begin(), seen.begin() + 5);  // of 9 tokens the last 4
    seen.push_back(next);
  }
  REQUIRE(made == expected);
}

TEST_CASE("what transformers wrote is written again bit for bit, from any layout, in every family") {
  for (const std::string& family : all_families)
    for (const int ranks : {1, 3}) {
      INFO(family << " on " << ranks);
      const std::string folder = folder_of(family);
      ZeroConfig zero{.shards = ranks, .poison = true};
      zero.set_stage(ranks == 1 ? 0 : 3);
      const StepConfig config{.model = resolve_model(folder, {}), .batch = {1, 8}, .zero = zero};
      const TempDir dir;
      const Plan plan = make_plan(config, 1);
      World world(zero.mesh());
      run_ranks(world, [&](int rank) {
        Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
        load_model(folder, config.model, run.trainer.state(), run.stream);
        write_checkpoint(dir.path(), 1, config.model, run.trainer.state(), config.dtype, {{"seq_len", 8}}, run.stream);
      });
      std::map<std::string, std::vector<float>> ours;
      for (const std::string& file : model_files(dir / "step-000001"))
        for (const std::string& name : SafetensorsReader(file).names()) ours[name] = read_tensor<float>(file, name);
      size_t tensors = 0;
      for (const std::string& file : model_files(folder))
        for (const std::string& name : SafetensorsReader(file).names()) {
          INFO(name);
          const auto theirs = read_tensor<float>(file, name);
          REQUIRE(std::memcmp(ours.at(name).data(), theirs.data(), theirs.size() * sizeof(float)) == 0);
          ++tensors;
        }
      REQUIRE(ours.size() == tensors);
      // And its config.json says the same.
      const ModelConfig again = resolve_model(dir / "step-000001", {});
      REQUIRE(config_to_hf(again, DType::fp32) == config_to_hf(config.model, DType::fp32));
    }
}

TEST_CASE("multiple choice: exact for any batch and layout, and what adding up by hand says") {
  const TempDir dir;
  const Philox rng(11, "choices");
  std::ofstream out(dir / "questions.jsonl");
  uint64_t draw = 0;
  auto words = [&](size_t n) {
    std::vector<int32_t> tokens;
    while (tokens.size() < n) tokens.push_back(static_cast<int32_t>(rng.bits(draw++) % 120));
    return tokens;
  };
  struct Question {
    std::vector<int32_t> context;
    std::vector<std::vector<int32_t>> choices;
    int64_t label;
  };
  std::vector<Question> questions;
  for (size_t i = 0; i < 13; ++i) {
    Question q{words(1 + i % 9), {}, static_cast<int64_t>(i % 3)};
    for (size_t c = 0; c < 3 + i % 2; ++c) q.choices.push_back(words(1 + (i + c) % 5));
    out << json{{"context", q.context}, {"choices", q.choices}, {"label", q.label}} << "\n";
    questions.push_back(q);
  }
  out.close();
  const ModelConfig model = selftest::awkward_model("qwen3");
  const ByteTokenizer bytes;
  const ChoiceSet set(dir / "questions.jsonl", bytes, model.vocab_size, 19);
  REQUIRE(set.questions() == 13);
  ChoiceScore by_hand;
  {
    const StepConfig config{.model = model, .batch = {1, 19}};
    World world{Mesh()};
    Run run(config, make_plan(config, 1), {DeviceKind::cpu, 1}, world, 0);
    init_weights(run.trainer.state(), 5, run.stream);
    for (const Question& q : questions) {
      std::vector<double> sums, means;
      for (const auto& choice : q.choices) {
        std::vector<int32_t> seen = q.context;
        double loss = 0;
        for (const int32_t token : choice) {
          loss += loss_of(run.trainer.next_token_logits(seen), token);
          seen.push_back(token);
        }
        const double space = choice[0] == ' ' ? 1 : 0;
        sums.push_back(loss);
        means.push_back(loss / std::max(1.0, static_cast<double>(choice.size()) - space));
      }
      auto right = [&](const std::vector<double>& costs) {
        return std::min_element(costs.begin(), costs.end()) - costs.begin() == q.label ? 1.0 / 13 : 0;
      };
      by_hand.accuracy += right(sums);
      by_hand.normalized_accuracy += right(means);
    }
  }
  for (const auto& [ranks, B] : {std::pair{1, 1}, {1, 5}, {2, 2}, {3, 4}}) {
    ZeroConfig zero{.shards = ranks};
    zero.set_stage(ranks == 1 ? 0 : 3);
    const StepConfig config{.model = model, .batch = {B, 19}, .zero = zero};
    const Plan plan = make_plan(config, 1);
    World world(zero.mesh());
    run_ranks(world, [&](int rank) {
      Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
      init_weights(run.trainer.state(), 5, run.stream);
      const ChoiceScore score = evaluate_choices(run.trainer, set, run.dp, [](int64_t, int64_t) {});
      if (std::abs(score.accuracy - by_hand.accuracy) > 1e-9 ||
          std::abs(score.normalized_accuracy - by_hand.normalized_accuracy) > 1e-9)
        throw Error(formatted("{} and {} by rank {} of {}, {} and {} by hand", score.accuracy,
                              score.normalized_accuracy, rank, ranks, by_hand.accuracy, by_hand.normalized_accuracy));
    });
  }
  auto refused = [&](const std::string& line, const std::string& part) {
    std::ofstream(dir / "bad.jsonl") << line << "\n";
    REQUIRE_ERROR(ChoiceSet(dir / "bad.jsonl", bytes, model.vocab_size, 19), part);
  };
  refused("not json", "line 1");
  refused(R"({"context": [1], "choices": [[1], [2]], "label": 2})", "label 2 of 2");
  refused(R"({"context": [], "choices": [[1], [2]], "label": 0})", "context is empty");
  refused(R"({"context": [1], "choices": [[1], [131]], "label": 0})", "token 131");
  refused(R"({"context": [1], "choices": [[1], []], "label": 0})", "empty choice");
  refused("", "expected an object");
}
