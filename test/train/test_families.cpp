// Llama, Qwen2.5, Qwen3, SmolLM2 and the families with experts compared with transformers (golden/families and
// golden/experts): logits, training, documents, files; the key-value cache.
#include <nlohmann/json.hpp>
#include <tuple>

#include "catch2.h"
#include "core/safetensors.h"
#include "data/dataloader.h"
#include "helpers.h"
#include "run/checkpoints/checkpoint_write.h"
#include "run/ranks.h"
#include "run/selftest/selftest.h"
#include "train/sample.h"

using namespace llmc;
using nlohmann::json;

namespace {

const std::string dense_families[] = {"llama2_tiny", "llama3_tiny", "qwen2_tiny", "qwen3_tiny", "smollm2_tiny"};
const std::string all_families[] = {"llama2_tiny",  "llama3_tiny",    "qwen2_tiny",     "qwen3_tiny", "smollm2_tiny",
                                    "mixtral_tiny", "qwen2_moe_tiny", "qwen3_moe_tiny", "olmoe_tiny"};
std::string folder_of(const std::string& family) {
  const std::string sparse = "test/golden/experts/" + family;
  return path_exists(sparse) ? sparse : "test/golden/families/" + family;
}

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
      : config{.model = resolve_model(folder, {}), .precision = dtype, .batch = batch, .documents = documents},
        run(config, make_plan(config, {DeviceKind::cpu, 1}), {DeviceKind::cpu, 1}, world, 0) {
    load_model(folder, config.model, run.trainer.state(), run.stream);
    run.stream.synchronize();
  }
};

}  // namespace

TEST_CASE("logits of every family match transformers", "[train][pytorch]") {
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

TEST_CASE("twenty steps of every family follow PyTorch's AdamW, on one rank and on several", "[train][pytorch]") {
  for (const std::string& family : all_families) {
    const std::string folder = folder_of(family);
    const json golden = json::parse(read_whole(folder + "/trajectory.json"));
    std::string options = "--model " + folder + " --train-data " + folder + "/train.bin --no-shuffle --threads 2";
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
      for (std::string line; std::getline(in, line);) {
        const json object = json::parse(line);
        INFO(line);
        if (object["kind"] != "train") continue;
        for (const char* name : {"loss", "grad_norm"})
          REQUIRE(std::abs(object[name].get<double>() / golden[name][steps].get<double>() - 1) < 1e-4);
        ++steps;
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
        for (const json& zero : golden["zero_gradient"])  // where Adam turns any rounding error into a full step
          if (zero[0] == name)
            for (size_t i = zero[1]; i < zero[2]; ++i) a[i] = b[i] = 0;
        INFO(name);
        REQUIRE(relative_distance(a.data(), b.data(), static_cast<int64_t>(a.size())) < 1e-4);
      }
    }
  }
}

TEST_CASE("with separated documents every document has the logits that it has alone", "[train][pytorch]") {
  const std::string folder = folder_of("llama3_tiny"), file = folder + "/logits_documents.safetensors";
  const auto tokens = read_tensor<int32_t>(file, "tokens"), positions = read_tensor<int32_t>(file, "positions");
  const auto logits = read_tensor<float>(file, "logits");
  const auto shape = SafetensorsReader(file).info("tokens").shape;
  for (const Documents documents : {Documents::apart, Documents::together}) {
    Loaded model(folder, {shape[0], shape[1]}, DType::fp32, documents);
    const size_t V = static_cast<size_t>(model.config.model.vocab_size);
    std::vector<float> losses;
    // Synthetic targets: distinct for every token.
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
  // The loader computes the same positions.
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

TEST_CASE("incremental decoding with a cache gives the logits of the whole sequence, in every family",
          "[train][pytorch]") {
  for (const Family& family : families)
    for (const DType dtype : {DType::fp32, DType::bf16}) {
      INFO(family.model_type << " in " << name_of(dtype));
      const StepConfig config{.model = selftest::awkward_model(family.model_type),
                              .precision = dtype,
                              .batch = {1, 19},
                              .layout = {.pipeline = {.chunks_per_stage = 2}}};
      World world{Mesh()};
      Run run(config, make_plan(config, {DeviceKind::cpu, 2}), {DeviceKind::cpu, 2}, world, 0);
      init_weights(run.trainer.state(), 5, run.stream);
      const std::vector<int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8};
      Continuation sequence(run.trainer);
      std::vector<std::vector<float>> grown;  // 5 tokens, then one at a time
      grown.push_back(sequence.feed(std::span(tokens).first(5)));
      for (size_t n = 5; n < tokens.size(); ++n) grown.push_back(sequence.feed(std::span(tokens).subspan(n, 1)));
      REQUIRE(sequence.rows() == 19);
      for (size_t n = 5; n <= tokens.size(); ++n) {
        const auto whole = run.trainer.next_token_logits(std::span(tokens).first(n));
        REQUIRE(relative_distance(grown[n - 5].data(), whole.data(), 131) < (dtype == DType::fp32 ? 1e-5 : 0x1p-6));
      }
    }
}

TEST_CASE("generation beyond the sequence length drops the older half and continues", "[train][pytorch]") {
  const StepConfig config{.model = selftest::awkward_model("llama"), .batch = {1, 8}};
  World world{Mesh()};
  Run run(config, make_plan(config, {DeviceKind::cpu, 1}), {DeviceKind::cpu, 1}, world, 0);
  init_weights(run.trainer.state(), 5, run.stream);
  const auto made =
      generate(run.trainer, {1, 2, 3}, 20, {.temperature = 0}, Philox(1, "test"), [](int32_t) { return true; });
  REQUIRE(made.size() == 23);
  // By hand: greedy, from the visible tokens.
  std::vector<int32_t> seen = {1, 2, 3}, expected = seen;
  while (expected.size() < 23) {
    const auto logits = run.trainer.next_token_logits(seen);
    const int32_t next = sample_token(logits, {.temperature = 0}, 0);
    expected.push_back(next);
    if (seen.size() == 8) seen.erase(seen.begin(), seen.begin() + 5);  // keep the last 4 of 9 tokens
    seen.push_back(next);
  }
  REQUIRE(made == expected);
}

TEST_CASE("files written by transformers are rewritten bit for bit, from any layout, in every family",
          "[train][pytorch]") {
  for (const std::string& family : dense_families)  // others: test_expert_models.cpp
    for (const int ranks : {1, 3}) {
      INFO(family << " on " << ranks);
      const std::string folder = folder_of(family);
      ZeroConfig zero{.shards = ranks};
      zero.set_stage(ranks == 1 ? 0 : 3);
      const StepConfig config{.model = resolve_model(folder, {}), .batch = {1, 8}, .layout = {.zero = zero}};
      const TempDir dir;
      const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
      World world(Layout{.zero = zero}.mesh(), Backend::threads, poison_hooks);
      run_ranks(world, [&](int rank) {
        Run run(config, plan, {DeviceKind::cpu, 1}, world, rank);
        load_model(folder, config.model, run.trainer.state(), run.stream);
        CheckpointWrite(dir.path(), 1, config.model, run.trainer.state(), run.stream, {.trainer = {{"seq_len", 8}}})
            .publish();
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
      // config.json round-trips too.
      const ModelConfig again = resolve_model(dir / "step-000001", {});
      REQUIRE(config_to_hf(again, DType::fp32) == config_to_hf(config.model, DType::fp32));
    }
}

TEST_CASE("an unsupported field of config.json is refused by name", "[train][pytorch]") {
  for (const auto& [family, field, value, part] :
       {std::tuple<std::string, std::string, json, std::string>{"llama3_tiny", "attention_bias", true,
                                                                "attention_bias"},
        {"llama3_tiny", "mlp_bias", true, "mlp_bias"},
        {"llama3_tiny", "hidden_act", "gelu", "hidden_act"},
        {"llama3_tiny", "attention_dropout", 0.1, "attention_dropout"},
        {"llama3_tiny", "sliding_window", 8, "sliding_window"},
        {"llama3_tiny", "partial_rotary_factor", 0.5, "partial_rotary_factor"},
        {"llama3_tiny", "original_max_position_embeddings", 20, "original_max_position_embeddings"},
        {"llama3_tiny", "rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e4}}, "keep one of them"},
        {"llama3_tiny", "rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}, "low_freq_factor"},
        {"llama2_tiny", "rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "keep one of them"},
        {"smollm2_tiny", "rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "linear"},
        {"smollm2_tiny", "rope_scaling", {{"full_attention", {{"rope_theta", 77}}}}, "full_attention"},
        {"smollm2_tiny", "rope_scaling", json::array(), "rope_scaling"},
        {"smollm2_tiny", "rope_scaling", {{"\x1b[2J", 1}}, "rotary positions have \"\\x1b[2J\": 1"},
        {"qwen3_tiny", "layer_types", {"full_attention", "sliding_attention"}, "sliding_attention"},
        {"qwen3_tiny", "use_sliding_window", true, "use_sliding_window"},
        {"qwen3_tiny", "head_dim", int64_t{1} << 33, "head_dim"},
        {"qwen2_tiny", "quantization_config", {{"bits", 4}}, "quantization_config"},
        {"qwen2_tiny", "rms_norm_eps", 1e300, "rms_norm_eps"},
        {"qwen2_tiny", "num_key_value_heads", 5, "num_key_value_heads"},
        {"qwen2_tiny", "is_causal", false, "\"is_causal\" is false"},
        {"qwen3_tiny", "is_causal", nullptr, "\"is_causal\" is null"},
        {"llama2_tiny", "per_layer_config", {{"0", {{"rms_norm_eps", 0.5}}}}, "per_layer_config"},
        {"llama2_tiny", "num_hidden_layers", 16385, "a whole number from 1 to 16384"},
        {"qwen2_tiny", "model_type", "qwen9", "qwen9"}}) {
    json config = json::parse(read_whole(folder_of(family) + "/config.json"));
    config_from_hf(config, "config.json");  // valid when unmodified
    config[field] = value;
    INFO(family << ": " << field << " " << value.dump());
    REQUIRE_ERROR(config_from_hf(config, "config.json"), part);
  }
}

TEST_CASE("GPT-2's sizes may have the other families' names, which then count", "[train][pytorch]") {
  json config = json::parse(read_whole("test/golden/gpt2_tiny/config.json"));
  const ModelConfig whole = config_from_hf(config, "config.json");
  for (const auto& [name, other] : {std::pair("n_layer", "num_hidden_layers"),
                                    {"n_head", "num_attention_heads"},
                                    {"n_embd", "hidden_size"},
                                    {"n_positions", "max_position_embeddings"}}) {
    config[other] = config[name];
    config[name] = 7;
  }
  for (const bool alone : {false, true}) {
    if (alone)
      for (const char* name : {"n_layer", "n_head", "n_embd", "n_positions"}) config.erase(name);
    const ModelConfig read = config_from_hf(config, "config.json");
    REQUIRE(config_to_hf(read, DType::fp32) == config_to_hf(whole, DType::fp32));
  }
  config["num_attention_heads"] = "many";
  REQUIRE_ERROR(config_from_hf(config, "config.json"), "\"num_attention_heads\" is \"many\"");
}

TEST_CASE("a tied model whose file has a different head is refused; an identical head is ignored", "[train][pytorch]") {
  const std::string folder = folder_of("smollm2_tiny");
  const ModelConfig config = resolve_model(folder, {});
  REQUIRE(config.tied);
  for (const bool same : {true, false}) {
    const TempDir dir;
    const SafetensorsReader from(folder + "/model.safetensors");
    std::vector<TensorInfo> infos;
    for (const std::string& name : from.names()) infos.push_back(from.info(name));
    infos.push_back({"lm_head.weight", DType::fp32, {config.vocab_size, config.n_embd}});
    SafetensorsWriter to(dir / "model.safetensors", infos);
    for (const TensorInfo& info : infos) {
      const bool head = info.name == "lm_head.weight";
      auto values = read_tensor<float>(folder + "/model.safetensors", head ? "model.embed_tokens.weight" : info.name);
      if (head && !same) values[7] += 1;
      to.write(values.data(), info.bytes());
    }
    to.finish();
    const StepConfig step{.model = config, .batch = {1, 8}};
    World world{Mesh()};
    Run run(step, make_plan(step, {DeviceKind::cpu, 1}), {DeviceKind::cpu, 1}, world, 0);
    if (same) load_model(dir.path(), config, run.trainer.state(), run.stream);
    else REQUIRE_ERROR(load_model(dir.path(), config, run.trainer.state(), run.stream), "lm_head.weight differs");
  }
}

TEST_CASE("document masking and multiple choice give the same on one rank and on two", "[train][pytorch]") {
  const TempDir dir;
  std::vector<uint16_t> tokens;
  const Philox rng(3, "program");
  for (uint64_t i = 0; i < 16 * 12 + 1; ++i)
    tokens.push_back(i % 7 == 3 ? 256 : static_cast<uint16_t>(rng.bits(i) % 256));
  write_shard<uint16_t>(dir / "data.bin", tokens);
  std::ofstream(dir / "questions.jsonl")
      << R"({"context": [1, 2], "choices": [[3], [4, 5], [6]], "lengths": [1, 2, 1], "label": 1})"
      << "\n"
      << R"({"context": [7], "choices": [[3], [9]], "lengths": [4, 2], "label": 0})"
      << "\n";
  auto run = [&](const std::string& name, const std::string& more) {
    const ProgramResult r = run_program(
        "--model smollm2:135M --n-layer 2 --n-head 3 --n-embd 12 --vocab-size 257 "
        "--seq-len 12 --total-batch-size 48 --max-steps 3 --lr 1e-2 --train-data " +
        (dir / "data.bin") + " --val-data " + (dir / "data.bin") + " --eval-choices " + (dir / "questions.jsonl") +
        " " + more + " --out-dir " + (dir / name));
    INFO(r.err);
    REQUIRE(r.status == 0);
    std::vector<json> lines;
    std::ifstream in(dir / (name + "/metrics.jsonl"));
    for (std::string line; std::getline(in, line);)
      if (json object = json::parse(line); object["kind"] != "checkpoint") lines.push_back(object);
    return lines;
  };
  const auto one = run("one", "--batch-size 4 --mask-documents"),
             two = run("two", "--batch-size 2 --local-ranks 2 --zero-stage 3 --mask-documents"),
             together = run("together", "--batch-size 4");
  REQUIRE(one.size() == 5);
  REQUIRE(two.size() == 5);
  bool differs = false;
  for (size_t i = 0; i < one.size(); ++i) {
    REQUIRE(std::abs(one[i]["loss"].get<double>() / two[i]["loss"].get<double>() - 1) < 1e-5);
    differs |= std::abs(one[i]["loss"].get<double>() / together[i]["loss"].get<double>() - 1) > 1e-4;
    REQUIRE(one[i].contains("choices_acc") == (one[i]["kind"] == "val"));
    if (one[i]["kind"] == "val") {
      REQUIRE(one[i]["choices_acc"] == two[i]["choices_acc"]);
      REQUIRE(one[i]["choices_acc_norm"] == two[i]["choices_acc_norm"]);
    }
  }
  REQUIRE(differs);
  const ProgramResult guess = run_program(
      "--model d1 --vocab-size 300 --seq-len 12 --batch-size 1 --mask-documents "
      "--train-data " +
      (dir / "data.bin") + " --out-dir " + (dir / "guess"));
  INFO(guess.err);
  REQUIRE(guess.status == 1);
  REQUIRE(guess.err.find("give the data's --tokenizer") != std::string::npos);
}
