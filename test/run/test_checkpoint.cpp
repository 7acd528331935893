// Checkpoints: reading and writing Hugging Face directories atomically; the parameter table behind them.
#include "catch2.h"
#include "helpers.h"
#include "model/presets.h"
#include "run/checkpoints/checkpoint_write.h"
#include "run/plan/planner.h"

using namespace llmc;

namespace {

ModelConfig odd_model() {
  ModelConfig m;
  m.n_layer = 2;
  m.n_head = m.n_kv_head = 3;
  m.head_size = 5;
  m.n_embd = 15;
  m.n_ffn = 22;
  m.vocab_size = 131;
  m.n_positions = 9;
  return m;
}

// A model with random numbers in every parameter.
struct Model {
  ModelConfig config = odd_model();
  Device device{DeviceKind::cpu, 1};
  Arena arena{device, 8 << 20}, scratch{device, 1 << 20};
  Stream stream{device, scratch};
  Groups alone{Layout{}, 0, device, Groups::null_groups(0)};
  ModelState state;
  DType dtype;
  explicit Model(DType d, uint64_t seed) : state(parameter_table(odd_model()), d, {}, alone, arena), dtype(d) {
    init_weights(state, seed, stream);
    for (const StateEntry& e : state.state_table())  // biases and norms too
      if (e.kind == StateKind::master || e.kind == StateKind::weight)
        init_normal(e.tensor, 0.5f, {}, seed, e.param->name, stream);
    stream.synchronize();
  }
  std::string save(const std::string& out, int64_t step = 1) {
    std::filesystem::create_directories(out);
    return CheckpointWrite(out, step, config, state, stream, {.trainer = {{"seq_len", 7}}}).publish();
  }
  void load(const std::string& path) { load_model(path, config, state, stream); }
  std::string bytes() {
    stream.synchronize();
    std::string all;
    for (const StateEntry& e : state.state_table())
      if (e.kind == StateKind::weight)
        all.append(reinterpret_cast<const char*>(e.tensor.bytes), static_cast<size_t>(e.tensor.size_bytes()));
    return all;
  }
};

// A copy of a safetensors file in which names and dtypes may change.
template <class T, class Rename>
void rewrite(const std::string& from, const std::string& to, Rename&& rename) {
  const SafetensorsReader r(from);
  std::vector<TensorInfo> infos;
  for (const std::string& name : r.names())
    if (!rename(name).empty()) infos.push_back({rename(name), dtype_of<T>(), r.info(name).shape});
  SafetensorsWriter w(to, infos);
  for (const std::string& name : r.names()) {
    if (rename(name).empty()) continue;
    std::vector<float> values(static_cast<size_t>(r.info(name).numel()));
    r.read(name, values.data());
    for (float v : values) {
      const T stored(v);
      w.write(&stored, sizeof stored);
    }
  }
  w.finish();
}

}  // namespace

TEST_CASE("an unknown --model is refused with a similar preset", "[run][checkpoint]") {
  for (const auto& [name, part] : std::vector<std::pair<std::string, std::string>>{
           {"gpt2:125M", "the nearest is gpt2:124M"},
           {"llama3:9B", "the nearest is llama3:8B)"},
           {"llama3:2.1B", "the nearest is llama3:3B)"},
           {"llama3:1000m", "the nearest is llama3:1B)"},
           {"Qwen2.5-0.6B", "the nearest is qwen2.5:0.5B)"},
           {"lama3:70B", "the nearest is llama3:70B)"},
           {"llama:9B", "the nearest is llama2:7B or llama3:8B)"},
           {"gpt2-medium", "its sizes are gpt2:124M, gpt2:350M, gpt2:774M or gpt2:1558M)"},
           {"smollm2", "its sizes are smollm2:135M, smollm2:360M or smollm2:1.7B)"},
           {"gpt2_124M_bf16.bin", "llm.c's checkpoints are not read"},
           {"mistral:7B", "the nearest is mixtral:8x7B)"},
           {"olmoe", "its sizes are olmoe:1B-7B)"},
           {"nothing-of-ours", "llama3:8B, "}})
    REQUIRE_ERROR(resolve_model(name, {}), part);
  REQUIRE_ERROR(resolve_model("HuggingFaceTB/SmolLM2-135M", {}),
                "`hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M` (pip install huggingface_hub), then "
                "--model SmolLM2-135M");
  for (const char* path : {"./nowhere", "../no/where", "/nowhere", "out/a/b", "nowhere/", "test/no"}) {
    INFO(path);
    REQUIRE(detail::why_no_model(path) == "no such directory");
  }
  REQUIRE_ERROR(resolve_model("test/golden/families", {}), "did you mean test/golden/families/smollm2_tiny?");
  REQUIRE_ERROR(resolve_model("test/golden/tokenizers", {}), "this directory has no config.json: it is not a model");
}

TEST_CASE("every preset has the published parameter count, of all and of active ones", "[run][checkpoint]") {
  for (const Preset& p : presets) {
    INFO(p.name);
    const double n = static_cast<double>(count_parameters(parameter_table(resolve_model(p.name, {}))));
    if (std::string(p.name).starts_with("gpt3:"))
      REQUIRE(std::abs(n - p.parameters) < 0.02 * p.parameters);  // the paper gives two digits
    else REQUIRE(n == p.parameters);
    if (p.experts.count > 0) REQUIRE(count_active_parameters(resolve_model(p.name, {})) == p.experts.active);
  }
  REQUIRE_ERROR(resolve_model("gpt2:125M", {}), "gpt2:124M");
  const ModelConfig d4 = resolve_model(
      "d4", {.n_layer = {}, .n_head = {}, .n_kv_head = {}, .n_embd = 128, .n_ffn = {}, .vocab_size = 257});
  REQUIRE(d4.n_layer == 4);
  REQUIRE(d4.n_head == 4);
  REQUIRE(d4.n_ffn == 512);
  REQUIRE(resolve_model("d12", {}).n_embd == 768);
}

TEST_CASE("initialisation follows GPT-2: residual projections are scaled by 1 / sqrt(2 L)", "[run][checkpoint]") {
  for (const UnitSpec& unit : parameter_table(odd_model()))
    for (const ParamSpec& p : unit.params) {
      const bool residual = p.name.ends_with("proj.weight") || p.name.ends_with("down.weight");
      if (p.init == Init::normal) REQUIRE(std::abs(p.init_std - (residual ? 0.01f : 0.02f)) < 1e-7);
      REQUIRE(p.decay == (p.shape.rank() == 2));
    }
}

TEST_CASE("the state table has every parameter once per kind, without padding, and buffers do not overlap",
          "[run][checkpoint]") {
  for (const DType d : {DType::fp32, DType::bf16}) {
    Model m(d, 1);
    std::map<std::string, int64_t> elements;
    std::vector<std::pair<const std::byte*, const std::byte*>> ranges;
    for (const StateEntry& e : m.state.state_table()) {
      elements[e.name()] += e.tensor.numel();
      ranges.emplace_back(e.tensor.bytes, e.tensor.bytes + e.tensor.size_bytes());
    }
    REQUIRE(elements.size() == (d == DType::bf16 ? 4u : 3u));
    for (const auto& [kind, n] : elements) REQUIRE(n == count_parameters(parameter_table(m.config)));
    std::sort(ranges.begin(), ranges.end());
    for (size_t i = 1; i < ranges.size(); ++i) REQUIRE(ranges[i - 1].second <= ranges[i].first);
  }
}

TEST_CASE("writing, reading and writing again gives the same bytes; vocabulary padding is never saved",
          "[run][checkpoint]") {
  for (const DType d : {DType::fp32, DType::bf16}) {
    const TempDir dir;
    Model a(d, 1), b(d, 2);
    const std::string first = a.save(dir / "a");
    REQUIRE(a.bytes() != b.bytes());
    b.load(first);
    REQUIRE(a.bytes() == b.bytes());
    const std::string second = b.save(dir / "b");
    REQUIRE(read_whole(first + "/model.safetensors") == read_whole(second + "/model.safetensors"));
    const SafetensorsReader r(first + "/model.safetensors");
    REQUIRE(r.info("transformer.wte.weight").shape == std::vector<int64_t>{131, 15});
    REQUIRE(r.info("transformer.h.1.attn.c_attn.weight").shape == std::vector<int64_t>{15, 45});
    REQUIRE(config_from_hf(nlohmann::json::parse(read_whole(first + "/config.json")), "config.json").n_ffn == 22);
    REQUIRE(checkpoint_steps(dir / "a") == std::vector<int64_t>{1});
    REQUIRE_FALSE(checkpoint_fault(first));
    REQUIRE(trained_seq_len(first) == 7);
  }
}

TEST_CASE("a model written by transformers gives the logits of transformers", "[run][checkpoint]") {
  const std::string directory = "test/golden/gpt2_tiny";
  const StepConfig config{.model = resolve_model(directory, {}), .batch = {1, 48}};
  const Plan plan = make_plan(config, {DeviceKind::cpu, 2});
  const Device device{DeviceKind::cpu, 2};
  Arena arena(device, plan.arena_bytes), scratch(device, plan.scratch_bytes);
  Stream stream(device, scratch);
  Trainer trainer(config, {arena, stream});
  load_model(directory, config.model, trainer.state(), stream);
  std::vector<uint16_t> shard(20);
  std::memcpy(shard.data(), read_whole(directory + "/train.bin").data() + 1024, 40);
  const std::vector<int32_t> tokens(shard.begin(), shard.end());
  const std::vector<float> ours = trainer.next_token_logits(tokens);
  std::vector<float> theirs(211);
  SafetensorsReader(directory + "/logits.safetensors").read("logits", theirs.data());
  for (size_t v = 0; v < theirs.size(); ++v) REQUIRE(std::abs(ours[v] - theirs[v]) < 1e-5);
}

TEST_CASE("names without the prefix and weights stored in bf16 are read; buffers of old files are ignored",
          "[run][checkpoint]") {
  const TempDir dir;
  Model a(DType::fp32, 1), b(DType::fp32, 2), rounded(DType::bf16, 3);
  const std::string path = a.save(dir / "a");
  std::filesystem::create_directories(dir / "bare");
  rewrite<float>(path + "/model.safetensors", dir / "bare/model.safetensors",
                 [](const std::string& n) { return n.substr(12); });
  b.load(dir / "bare");
  REQUIRE(a.bytes() == b.bytes());
  std::filesystem::create_directories(dir / "half");
  rewrite<bf16>(path + "/model.safetensors", dir / "half/model.safetensors", [](const std::string& n) { return n; });
  rounded.load(dir / "half");
  b.load(dir / "half");
  const Tensor x = b.state.unit(1).weight("mlp.up.weight"), y = rounded.state.unit(1).weight("mlp.up.weight");
  for (int64_t i = 0; i < x.numel(); ++i) REQUIRE(x.data<float>()[i] == static_cast<float>(y.data<bf16>()[i]));
}

TEST_CASE("a missing, unknown or misshapen tensor is refused by name, and nothing changes", "[run][checkpoint]") {
  const TempDir dir;
  Model a(DType::fp32, 1), b(DType::fp32, 2);
  const std::string path = a.save(dir / "a"), before = b.bytes(), file = path + "/model.safetensors";
  auto refuse = [&](auto rename, const std::string& culprit) {
    std::filesystem::create_directories(dir / "x");
    rewrite<float>(file, dir / "x/model.safetensors", rename);
    REQUIRE_ERROR(b.load(dir / "x"), culprit);
    REQUIRE(b.bytes() == before);
  };
  refuse([](const std::string& n) { return n == "transformer.ln_f.bias" ? "" : n; }, "ln_f.bias");
  refuse([](const std::string& n) { return n == "transformer.ln_f.bias" ? "something.else" : n; }, "ln_f.bias");
  b.config.n_ffn = 23;
  REQUIRE_ERROR(b.load(path), "mlp.c_fc.weight");
  b.config = odd_model();
  b.config.n_layer = 1;
  REQUIRE_ERROR(b.load(path), "transformer.h.1.");
  REQUIRE(b.bytes() == before);
  std::filesystem::remove(dir / "x/model.safetensors");
  std::ofstream(dir / "x/model.safetensors.index.json") << "{}";
  REQUIRE_ERROR(b.load(dir / "x"), "weight_map");
}

TEST_CASE("a checkpoint that cannot be written leaves no trace and older ones intact", "[run][checkpoint]") {
  const TempDir dir;
  Model m(DType::fp32, 1);
  const std::string first = m.save(dir / "out", 1), before = read_whole(first + "/model.safetensors");
  REQUIRE_ERROR(m.save(dir / "out", 1), "already exists");
  REQUIRE(read_whole(first + "/model.safetensors") == before);
  REQUIRE(std::distance(std::filesystem::directory_iterator(dir / "out"), {}) == 1);
  std::ofstream(dir / "file") << "x";
  REQUIRE_ERROR(CheckpointWrite(dir / "file", 2, m.config, m.state, m.stream).publish(), "file");
}

TEST_CASE("a checkpoint is read by its manifest, wherever it is and whatever other files are there",
          "[run][checkpoint]") {
  const TempDir dir;
  const std::string out = dir / "a [1] *? {2}";
  Model a(DType::fp32, 1), b(DType::fp32, 2);
  for (const StateEntry& e : a.state.state_table())
    if (e.kind == StateKind::slot && e.slot == 0) init_normal(e.tensor, 0.5f, {}, 9, e.param->name, a.stream);
  const std::string path = a.save(out);
  // Files that an interrupted copy or another run may leave there.
  std::ofstream(path + "/optimizer-00002-of-00002.safetensors") << "garbage";
  std::ofstream(path + "/model-00001-of-00002.safetensors") << "garbage";
  std::ofstream(path + "/model.safetensors.index.json")
      << R"({"weight_map": {"transformer.wte.weight": "model-00001-of-00002.safetensors"}})";
  REQUIRE_FALSE(checkpoint_fault(path));
  load_checkpoint(path, b.config, b.state, b.stream);
  b.stream.synchronize();
  const StateTable x = a.state.state_table(), y = b.state.state_table();
  for (size_t i = 0; i < x.size(); ++i)
    REQUIRE(std::memcmp(x[i].tensor.bytes, y[i].tensor.bytes, static_cast<size_t>(x[i].tensor.size_bytes())) == 0);

  auto with_manifest = [&](const std::string& text) {
    std::ofstream(path + "/manifest.json") << text;
    load_checkpoint(path, b.config, b.state, b.stream);
  };
  REQUIRE_ERROR(with_manifest(R"({"files": {}})"), "names no model.safetensors");
  REQUIRE_ERROR(with_manifest(R"({"files": {"model.safetensors": {"size": 1, "xxh3": []}}})"), "no optimizer");
  REQUIRE_ERROR(with_manifest(R"({"files": {"../x": {"size": 1, "xxh3": []}}})"), "names ../x");
  REQUIRE_ERROR(with_manifest(R"({"files": {"x": {"size": "1"}}})"), "the record of x is {");
  std::filesystem::remove(path + "/manifest.json");
  REQUIRE_ERROR(load_checkpoint(path, b.config, b.state, b.stream), "has no manifest.json");
}

TEST_CASE("optimizer slices are refused unless they hold every element exactly once", "[run][checkpoint]") {
  const TempDir dir;
  Model a(DType::bf16, 7), b(DType::bf16, 8);
  const std::string path = a.save(dir / "out"), file = path + "/optimizer-00001-of-00001.safetensors";
  std::map<std::string, std::vector<float>> whole;
  {
    const SafetensorsReader r(file);
    for (const std::string& name : r.names())
      r.read(name, whole.emplace(name, r.info(name).numel()).first->second.data());
  }
  const std::string what = "ln_f.weight:moment1", all = what + "[0:15]";
  REQUIRE(whole.at(all).size() == 15);
  // Loads the checkpoint with these slices instead of that one: each its name and its number of elements.
  auto load_with = [&](const std::vector<std::pair<std::string, int64_t>>& slices) {
    std::map<std::string, std::vector<float>> changed = whole;
    changed.erase(all);
    for (const auto& [name, size] : slices) {
      const int64_t begin = std::atoll(name.c_str() + std::min(name.find('[') + 1, name.size()));
      std::vector<float> values(static_cast<size_t>(size));
      for (int64_t i = 0; i < size && begin + i < 15; ++i)
        values[static_cast<size_t>(i)] = whole.at(all)[static_cast<size_t>(begin + i)];
      changed[what + name] = values;
    }
    std::vector<TensorInfo> infos;
    for (const auto& [name, values] : changed)
      infos.push_back({name, DType::fp32, {static_cast<int64_t>(values.size())}});
    SafetensorsWriter w(file, infos);
    for (const auto& [name, values] : changed) w.write(values.data(), static_cast<int64_t>(values.size()) * 4);
    w.finish();
    load_checkpoint(path, b.config, b.state, b.stream);
  };
  load_with({{"[0:4]", 4}, {"[10:15]", 5}, {"[4:10]", 6}});
  b.stream.synchronize();
  const StateTable x = a.state.state_table(), y = b.state.state_table();
  for (size_t i = 0; i < x.size(); ++i)
    REQUIRE(std::memcmp(x[i].tensor.bytes, y[i].tensor.bytes, static_cast<size_t>(x[i].tensor.size_bytes())) == 0);

  REQUIRE_ERROR(load_with({{"[0:10]", 10}, {"[5:10]", 5}}), what + "[5:10] begins at element 5, but the slice before");
  REQUIRE_ERROR(load_with({{"[0:10]", 10}, {"[0:15]", 15}}), "begins at element 0, but the slice before it ends at 10");
  REQUIRE_ERROR(load_with({{"[0:10]", 10}, {"[12:15]", 3}}),
                "begins at element 12, but the slice before it ends at 10");
  REQUIRE_ERROR(load_with({{"[0:10]", 10}}), "the slices of " + what + " end at element 10 of 15");
  REQUIRE_ERROR(load_with({{"[0:16]", 16}}), "end at element 16 of 15");
  REQUIRE_ERROR(load_with({}), "has no " + what);
  REQUIRE_ERROR(load_with({{"[0:15]", 15}, {"s[0:1]", 1}}), what + "s[0:1] belongs to no state of this model");
  for (const char* name :
       {"[0:15]xyz", "[0:15] ", "[ 0:15]", "[+0:15]", "[0:015]", "[0:15", "[0:99999999999999999999]"})
    REQUIRE_ERROR(load_with({{name, 15}}), what + name + " is not a slice PARAMETER:KIND[BEGIN:END]");
  REQUIRE_ERROR(load_with({{"[0:14]", 15}}), "is not a slice");
}
