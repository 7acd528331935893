// Models with experts: their parameters, config.json and weights both ways, compared with what transformers wrote
// (golden/experts). Nothing is computed.
#include <nlohmann/json.hpp>
#include <tuple>

#include "catch2.h"
#include "helpers.h"
#include "model/presets.h"
#include "run/checkpoints/checkpoint_write.h"
#include "run/ranks.h"
#include "run/selftest/layouts.h"

using namespace llmc;
using nlohmann::json;

namespace {

const std::string all_models[] = {"mixtral_tiny", "qwen2_moe_tiny", "qwen3_moe_tiny", "olmoe_tiny"};
std::string folder_of(const std::string& name) { return "test/golden/experts/" + name; }
json golden_config(const std::string& name) { return json::parse(read_whole(folder_of(name) + "/config.json")); }

// The bytes of all tensors of some files, by name.
std::map<std::string, std::string> tensors_of(const std::vector<std::string>& paths) {
  std::map<std::string, std::string> all;
  for (const auto& file : open_all(paths))
    for (const std::string& name : file->names()) {
      std::string& bytes = all[name];
      bytes.resize(static_cast<size_t>(file->info(name).bytes()));
      file->read(name, bytes.data());
    }
  return all;
}

std::string bytes_of(const Tensor& t) {
  return {reinterpret_cast<const char*>(t.bytes), static_cast<size_t>(t.size_bytes())};
}

// f(state, stream) on every rank of this many shards.
template <class F>
void on_shards(const ModelConfig& model, int shards, int stage, F&& f) {
  ZeroConfig zero{.shards = shards};
  zero.set_stage(stage);
  const Layout layout{.zero = zero};
  World world(layout.mesh(), Backend::threads, poison_hooks);
  run_ranks(world, [&](int rank) {
    const Device device{DeviceKind::cpu, 1};
    Arena arena(device, (1 << 20) + 40 * count_parameters(parameter_table(model))), scratch(device, 1 << 20);
    arena.poison_free();
    Stream stream(device, scratch);
    const auto join = [&](const std::string& name, const auto& group) { return world.join(rank, name, group); };
    Groups groups(layout, rank, device, join, world.hooks());
    ModelState state(parameter_table(model), DType::fp32, zero, groups, arena);
    f(state, stream);
    for (Stream* s : {&stream, &groups.reduce_stream(), &groups.gather_stream()}) s->synchronize();
  });
}

}  // namespace

TEST_CASE("the parameters of models with experts are those that transformers stores, in both of its layouts",
          "[run][ep]") {
  for (const std::string& name : all_models) {
    INFO(name);
    const ModelConfig config = resolve_model(folder_of(name), {});
    for (const auto& paths : {model_files(folder_of(name)), {folder_of(name) + "/fused.safetensors"}}) {
      const auto files = open_all(paths);
      match_hf_names(files, hf_tensors(config, files));  // refuses what is missing, unknown or of another shape
      int64_t elements = 0;
      for (const auto& file : files)
        for (const std::string& tensor : file->names()) elements += file->info(tensor).numel();
      REQUIRE(count_parameters(parameter_table(config)) == elements);
    }
  }
}

TEST_CASE("the experts of a layer are a unit behind the rest of it, and each kind is one matrix for each expert",
          "[run][ep]") {
  const ModelConfig config = resolve_model(folder_of("qwen2_moe_tiny"), {});
  std::vector<std::string> names;
  for (const UnitSpec& unit : parameter_table(config)) names.push_back(unit.name);
  REQUIRE(names == std::vector<std::string>{"embedding", "blocks.0", "blocks.0.experts", "blocks.1", "blocks.2",
                                            "blocks.2.experts", "head"});
  const std::vector<LayerUnits> units = layer_units(config);
  REQUIRE(units.size() == 3);
  REQUIRE((units[0].block == 1 && units[0].experts == 2));
  REQUIRE((units[1].block == 3 && !units[1].experts));
  REQUIRE((units[2].block == 4 && units[2].experts == 5));
  for (const std::string& name : all_models) {
    INFO(name);
    const ModelConfig model = resolve_model(folder_of(name), {});
    const auto fused = tensors_of({folder_of(name) + "/fused.safetensors"});
    const int experts = static_cast<int>(model.experts.count);
    on_shards(model, 1, 0, [&](ModelState& state, Stream& stream) {
      load_model(folder_of(name), model, state, stream);
      stream.synchronize();
      for (int64_t l = 0; l < model.n_layer; ++l) {
        const auto unit = layer_units(model)[static_cast<size_t>(l)].experts;
        REQUIRE(unit.has_value() == model.is_sparse(l));
        if (!unit) continue;
        const std::string prefix = formatted("model.layers.{}.mlp.experts", l);
        REQUIRE(bytes_of(state.unit(*unit).weight("experts.0.gate.weight", 2 * experts)) ==
                fused.at(prefix + ".gate_up_proj"));
        REQUIRE(bytes_of(state.unit(*unit).weight("experts.0.down.weight", experts)) ==
                fused.at(prefix + ".down_proj"));
      }
    });
  }
}

TEST_CASE("weights in either layout are written back as transformers wrote them, bit for bit", "[run][ep]") {
  for (const std::string& name : all_models)
    for (const int shards : {1, 3})
      for (const bool fused : {false, true}) {
        INFO(name << " on " << shards << (fused ? ", fused" : ""));
        const ModelConfig model = resolve_model(folder_of(name), {});
        const TempDir dir;
        std::filesystem::create_directories(dir / "out");
        if (fused) {
          std::filesystem::copy(folder_of(name) + "/config.json", dir.path());
          std::filesystem::copy(folder_of(name) + "/fused.safetensors", dir / "model.safetensors");
        }
        on_shards(model, shards, shards == 1 ? 0 : 3, [&](ModelState& state, Stream& stream) {
          load_model(fused ? dir.path() : folder_of(name), model, state, stream);
          CheckpointWrite(dir / "out", 1, model, state, stream, {.trainer = {{"seq_len", 8}}}).publish();
        });
        const std::string path = checkpoint_path(dir / "out", 1);
        REQUIRE(tensors_of(model_files(path)) == tensors_of(model_files(folder_of(name))));
        const ModelConfig again = resolve_model(path, {});
        REQUIRE(config_to_hf(again, DType::fp32) == config_to_hf(model, DType::fp32));
      }
}

TEST_CASE("every field that describes experts is written as transformers wrote it", "[run][ep]") {
  for (const std::string& name : all_models) {
    const json theirs = golden_config(name);
    const nlohmann::ordered_json ours = config_to_hf(config_from_hf(theirs, "config.json"), DType::fp32);
    int compared = 0;
    for (const auto& [field, value] : theirs.items()) {
      const std::string as = field == "num_local_experts" && !ours.contains(field) ? "num_experts" : field;
      INFO(name << ": " << field);
      if (!ours.contains(as) || field == "sliding_window" || value.is_null()) continue;
      REQUIRE(json(ours[as]) == value);
      ++compared;
    }
    REQUIRE(compared >= 18);
  }
  const json published = json::parse(R"({"model_type": "qwen2_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2,
    "mlp_only_layers": [3, 9], "qkv_bias": false, "num_local_experts": 7, "output_router_logits": true,
    "router_aux_loss_coef": 0.25, "norm_topk_prob": true})");
  const ModelConfig c = config_from_hf(published, "config.json");
  std::vector<int64_t> sparse;
  for (int64_t l = 0; l < c.n_layer; ++l)
    if (c.is_sparse(l)) sparse.push_back(l);
  REQUIRE(sparse == std::vector<int64_t>{1, 5});
  REQUIRE(c.family.biases == Biases::none);
  REQUIRE(c.experts.count == 60);  // this family alone has no other name for it
  REQUIRE((c.experts.aux_loss == 0.25 && c.experts.adds_aux_loss && c.experts.normalised));
  const nlohmann::ordered_json written = config_to_hf(c, DType::bf16);
  for (const char* field : {"decoder_sparse_step", "mlp_only_layers", "qkv_bias", "output_router_logits",
                            "router_aux_loss_coef", "norm_topk_prob"})
    REQUIRE(json(written[field]) == published[field]);
}

TEST_CASE("fields that are missing have the defaults of transformers", "[run][ep]") {
  for (const auto& [type, count, per_token, width, shared, n_ffn, theta] :
       {std::tuple("mixtral", 8, 2, 14336, 0, 14336, 1e6),
        {"qwen2_moe", 60, 4, 1408, 5632, 5632, 1e4},
        {"qwen3_moe", 128, 8, 768, 0, 6144, 1e4},
        {"olmoe", 64, 8, 2048, 0, 2048, 1e4}}) {
    INFO(type);
    const ModelConfig c = config_from_hf({{"model_type", type}}, "config.json");
    validate_model(c);
    REQUIRE((c.experts.count == count && c.experts.per_token == per_token && c.experts.width == width));
    REQUIRE((c.experts.shared == shared && c.n_ffn == n_ffn && c.rotary.theta == theta));
    REQUIRE(c.experts.normalised == (type == std::string("mixtral")));
    REQUIRE(c.sparse_layers() == c.n_layer);
  }
  // Counted by transformers.
  const ModelConfig c = config_from_hf({{"model_type", "qwen2_moe"}}, "config.json");
  REQUIRE(count_parameters(parameter_table(c)) == 14'315'784'192);
  REQUIRE(count_active_parameters(c) == 2'689'173'504);
}

TEST_CASE("a field of config.json that experts do not support is refused by name", "[run][ep]") {
  for (const auto& [name, field, value, part] :
       {std::tuple<std::string, std::string, json, std::string>{"mixtral_tiny", "sliding_window", 4096,
                                                                "\"sliding_window\" is 4096"},
        {"mixtral_tiny", "router_jitter_noise", 0.1, "\"router_jitter_noise\" is 0.1"},
        {"mixtral_tiny", "num_experts", 7, "\"num_local_experts\" is 5 and \"num_experts\" is 7: keep one of them"},
        {"mixtral_tiny", "num_local_experts", 0, "\"num_local_experts\" is 0, expected a whole number from 1"},
        {"mixtral_tiny", "num_local_experts", 1 << 20, "num_local_experts"},
        {"mixtral_tiny", "num_experts_per_tok", 6, "\"num_experts_per_tok\" is 6, expected a whole number from 1 to 5"},
        {"mixtral_tiny", "hidden_act", "gelu", "hidden_act"},
        {"mixtral_tiny", "output_router_logits", "yes", "output_router_logits"},
        {"mixtral_tiny", "router_aux_loss_coef", -1, "router_aux_loss_coef"},
        {"olmoe_tiny", "clip_qkv", 8.0, "\"clip_qkv\" is 8.0"},
        {"olmoe_tiny", "head_dim", 4, "\"head_dim\" is 4"},
        {"olmoe_tiny", "attention_bias", true, "attention_bias"},
        {"olmoe_tiny", "sliding_window", 8, "sliding_window"},
        {"olmoe_tiny", "num_local_experts", 9, "keep one of them"},
        {"olmoe_tiny", "norm_topk_prob", 1, "norm_topk_prob"},
        {"qwen2_moe_tiny", "use_sliding_window", true, "use_sliding_window"},
        {"qwen2_moe_tiny", "mlp_only_layers", {0, "x"}, "\"mlp_only_layers\" has \"x\""},
        {"qwen2_moe_tiny", "mlp_only_layers", 3, "\"mlp_only_layers\" is 3, expected a list"},
        {"qwen2_moe_tiny", "mlp_only_layers", {-1}, "\"mlp_only_layers\" has -1"},
        {"qwen2_moe_tiny", "decoder_sparse_step", 0, "decoder_sparse_step"},
        {"qwen2_moe_tiny", "shared_expert_intermediate_size", 0, "shared_expert_intermediate_size"},
        {"qwen2_moe_tiny", "layer_types", {"sliding_attention"}, "sliding_attention"},
        {"qwen3_moe_tiny", "moe_intermediate_size", 1.5, "moe_intermediate_size"},
        {"qwen3_moe_tiny", "attention_bias", true, "attention_bias"},
        {"qwen3_moe_tiny", "attention_dropout", 0.1, "attention_dropout"}}) {
    json config = golden_config(name);
    config_from_hf(config, "config.json");  // valid when unmodified
    config[field] = value;
    INFO(name << ": " << field << " " << value.dump());
    REQUIRE_ERROR(config_from_hf(config, "config.json"), part);
  }
  const TempDir dir;
  json all_dense = golden_config("qwen2_moe_tiny");
  all_dense["mlp_only_layers"] = {0, 1, 2};
  std::ofstream(dir / "config.json") << all_dense.dump();
  REQUIRE_ERROR(resolve_model(dir.path(), {}), "none of the 3 layers is sparse");
}

TEST_CASE("experts that the config.json of a family has no fields for are refused", "[run][ep]") {
  const ModelConfig mixtral = selftest::awkward_model("mixtral"), qwen = selftest::awkward_model("qwen3_moe");
  validate_model(mixtral);
  const auto refused = [](ModelConfig c, auto&& change) {
    change(c);
    try {
      validate_model(c);
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  REQUIRE(refused(mixtral, [](ModelConfig& c) { c.experts.scores = RouterScores::sigmoid; }));
  REQUIRE(refused(mixtral, [](ModelConfig& c) { c.experts.normalised = false; }));
  REQUIRE(refused(mixtral, [](ModelConfig& c) { c.experts.dense_layers = {0}; }));
  REQUIRE(refused(mixtral, [](ModelConfig& c) { c.experts.width = 13; }));
  REQUIRE(refused(qwen, [](ModelConfig& c) { c.experts.scaling = 2; }));
  REQUIRE(refused(qwen, [](ModelConfig& c) { c.experts.shared = 8; }));
  REQUIRE(refused(qwen, [](ModelConfig& c) { c.experts.per_token = 6; }));
  REQUIRE(refused(qwen, [](ModelConfig& c) { c.experts = {}; }));
  REQUIRE(refused(selftest::awkward_model("llama"), [&](ModelConfig& c) { c.experts = qwen.experts; }));
}

TEST_CASE("d<N>-e<E> has the products of d<N> for each token, and sizes scale with the options", "[run][ep]") {
  const ModelConfig dense = resolve_model("d12", {}), sparse = resolve_model("d12-e8", {});
  REQUIRE((sparse.experts.count == 8 && sparse.experts.per_token == 2 && sparse.experts.width == 1024));
  const int64_t C = 768, router = 12 * 8 * C, biases_and_norms = 12 * (9 + 4) * C + 2 * C, norms = 12 * 2 * C + C;
  REQUIRE(matmul_parameters(sparse) - router - norms == matmul_parameters(dense) - biases_and_norms);
  REQUIRE(training_flops_per_token(sparse, 64) ==
          6.0 * static_cast<double>(matmul_parameters(sparse)) + 6.0 * 12 * 768 * 64);
  REQUIRE(count_parameters(parameter_table(sparse)) - count_active_parameters(sparse) ==
          int64_t{12} * 6 * 3 * 768 * 1024);
  REQUIRE_ERROR(resolve_model("d12-e1", {}), "at least 2");
  REQUIRE_ERROR(resolve_model("d0-e4", {}), "at least 1");
  for (const char* name : {"d12-e", "d-e8", "d12-e8x", "d12e8", "d1234"}) {
    INFO(name);
    REQUIRE_ERROR(resolve_model(name, {}), "d<N>-e<E> such as d12-e8");
  }
  ModelOverrides half;
  half.n_embd = 1024;
  const ModelConfig olmoe = resolve_model("olmoe:1B-7B", half), qwen = resolve_model("qwen3:30B-A3B", half);
  REQUIRE((olmoe.n_ffn == 512 && olmoe.experts.width == 512));
  REQUIRE((qwen.n_ffn == 3072 && qwen.experts.width == 384));
  ModelOverrides wide;
  wide.n_ffn = 4096;
  REQUIRE(resolve_model("olmoe:1B-7B", wide).experts.width == 4096);
  REQUIRE(resolve_model("qwen3:30B-A3B", wide).experts.width == 768);
}

TEST_CASE("tensor-parallel ranks all have every expert, and share out the shared one", "[run][ep]") {
  const ModelConfig model = selftest::awkward_model("qwen2_moe");
  const TensorParallel two = tensor_parallel(model, 2);
  const ParamTable whole = parameter_table(model), part = part_of(whole, two, 1);
  const size_t experts = *layer_units(model)[0].experts, block = layer_units(model)[0].block;
  REQUIRE(part[experts].sharing == Sharing::experts);
  REQUIRE(part[experts].params.size() == whole[experts].params.size());
  for (size_t i = 0; i < part[experts].params.size(); ++i) {
    const ParamSpec& p = part[experts].params[i];
    REQUIRE(p.name == whole[experts].params[i].name);  // in the same order, so that adjacent ones stay together
    // Not as tensor-parallel copies: expert_parallel.h.
    REQUIRE((p.copies == 1 && !p.partial && p.first_copy && p.box() == whole[experts].params[i].box()));
  }
  const auto of = [&](const char* suffix) { return part[block].params[param_index(part[block], suffix)]; };
  REQUIRE(of("moe.shared.gate.weight").box() == Box{12, 12, 0, 36});
  REQUIRE(of("moe.shared.down.weight").box() == Box{0, 36, 12, 12});
  REQUIRE((of("moe.router.weight").copies == 2 && of("moe.shared_gate.weight").copies == 2));
  REQUIRE(model_of_rank(model, two).experts.shared == 12);
  REQUIRE_ERROR(layout_faults({.tensor = {.ranks = 5}}, selftest::awkward_model("qwen2_moe")).refuse(),
                "24 of the shared expert");
}

TEST_CASE("both units of a layer go to its stage of a pipeline", "[run][ep]") {
  StepConfig step{.model = resolve_model(folder_of("qwen3_moe_tiny"), {})};
  step.layout.pipeline.stages = 2;
  step.layout.pipeline.layers = {1, 3};
  REQUIRE(step.stage_units().stage_of == std::vector<int>{0, 0, 1, 1, 1, 1, 1, 1});
}

TEST_CASE("at stage 3 a block and its experts are gathered at the same time, each into a buffer of its size",
          "[run][ep]") {
  const std::string folder = folder_of("mixtral_tiny");
  const ModelConfig model = resolve_model(folder, {});
  const auto theirs = tensors_of(model_files(folder));
  on_shards(model, 2, 3, [&](ModelState& state, Stream& stream) {
    load_model(folder, model, state, stream);
    stream.synchronize();
    const std::vector<LayerUnits> units = layer_units(model);
    for (int pass = 0; pass < 3; ++pass) {
      std::vector<size_t> order;
      for (const LayerUnits& u : units) order.insert(order.end(), {u.block, *u.experts});
      state.weights.start_pass(order, stream);
      for (size_t l = 0; l < units.size(); ++l) {
        const UnitState &block = state.weights.acquire(units[l].block, stream),
                        &experts = state.weights.acquire(*units[l].experts, stream);
        stream.synchronize();
        const std::string prefix = formatted("model.layers.{}.", l);
        REQUIRE(bytes_of(block.weight("attn.proj.weight")) == theirs.at(prefix + "self_attn.o_proj.weight"));
        REQUIRE(bytes_of(block.weight("moe.router.weight")) == theirs.at(prefix + "block_sparse_moe.gate.weight"));
        REQUIRE(bytes_of(experts.weight("experts.4.down.weight")) ==
                theirs.at(prefix + "block_sparse_moe.experts.4.w2.weight"));
        REQUIRE(block.weights().numel() != experts.weights().numel());
        state.weights.release(*units[l].experts, stream);
        state.weights.release(units[l].block, stream);
      }
    }
  });
}
