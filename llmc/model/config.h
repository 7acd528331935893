// config.h: the architecture: presets, Hugging Face config.json, and the parameter table that everything derives from.
#pragma once
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/files.h"
#include "dist/params.h"

namespace llmc {

struct ModelConfig {
  int64_t n_layer = 12;
  int64_t n_head = 12;
  int64_t n_embd = 768;        // C
  int64_t n_ffn = 3072;        // F
  int64_t vocab_size = 50257;  // V: what the outside sees
  int64_t n_positions = 1024;
  bool tied = true;  // the head's matrix is the token embedding
  float norm_eps = 1e-5f;
  float init_std = 0.02f;

  static constexpr int64_t vocab_multiple = 128;
  int64_t padded_vocab() const { return round_up(vocab_size, vocab_multiple); }
  int64_t head_size() const { return n_embd / n_head; }
};

// Overrides of single numbers, from --n-layer and its siblings.
struct ModelOverrides {
  std::optional<int64_t> n_layer, n_head, n_embd, n_ffn, vocab_size;
};

// The published shapes.
struct Preset {
  const char* name;
  int64_t n_layer, n_head, n_embd, n_positions;
  double parameters;  // as published
};
inline constexpr Preset presets[] = {
    // Radford et al. 2019; the weights that were published have these counts.
    {"gpt2:124M", 12, 12, 768, 1024, 124'439'808},
    {"gpt2:350M", 24, 16, 1024, 1024, 354'823'168},
    {"gpt2:774M", 36, 20, 1280, 1024, 774'030'080},
    {"gpt2:1558M", 48, 25, 1600, 1024, 1'557'611'200},
    // Brown et al. 2020, table 2.1; XL and 13B with head counts and channels that divide.
    {"gpt3:125M", 12, 12, 768, 2048, 125e6},
    {"gpt3:350M", 24, 16, 1024, 2048, 350e6},
    {"gpt3:760M", 24, 16, 1536, 2048, 760e6},
    {"gpt3:1.3B", 24, 16, 2048, 2048, 1.3e9},
    {"gpt3:2.7B", 32, 32, 2560, 2048, 2.7e9},
    {"gpt3:6.7B", 32, 32, 4096, 2048, 6.7e9},
    {"gpt3:13B", 40, 40, 5120, 2048, 13e9},
};

inline std::string preset_names() {
  std::string names;
  for (const Preset& p : presets) names += std::string(p.name) + ", ";
  return names + "d<N> such as d12";
}

// A published shape, or "d<N>": N layers, N heads, C = 64 N. None: not a preset (perhaps a directory).
inline std::optional<ModelConfig> model_preset(const std::string& name) {
  auto shape = [](int64_t layers, int64_t heads, int64_t channels, int64_t positions) {
    ModelConfig config;
    config.n_layer = layers;
    config.n_head = heads;
    config.n_embd = channels;
    config.n_ffn = 4 * channels;
    config.n_positions = positions;
    return config;
  };
  for (const Preset& p : presets)
    if (name == p.name) return shape(p.n_layer, p.n_head, p.n_embd, p.n_positions);
  if (name.size() > 1 && name.size() <= 4 && name[0] == 'd' &&
      name.find_first_not_of("0123456789", 1) == std::string::npos) {
    const int64_t depth = std::stoll(name.substr(1));
    CHECK(depth > 0, "--model {}: the depth must be at least 1", name);
    return shape(depth, depth, 64 * depth, 1024);
  }
  return std::nullopt;
}

inline void validate_model(const ModelConfig& c) {
  CHECK(c.n_layer > 0 && c.n_head > 0 && c.n_embd > 0 && c.n_ffn > 0 && c.vocab_size > 0 && c.n_positions > 0,
        "the model has a size that is not positive: n_layer {}, n_head {}, n_embd {}, n_ffn {}, vocab_size {}, "
        "n_positions {}",
        c.n_layer, c.n_head, c.n_embd, c.n_ffn, c.vocab_size, c.n_positions);
  CHECK(c.n_embd % c.n_head == 0, "--n-head {} does not divide --n-embd {}: use one of {}", c.n_head, c.n_embd,
        divisors(c.n_embd));
}

// What a Hugging Face GPT-2 config.json says; a value that this program would compute differently is refused by name.
inline ModelConfig config_from_hf(const nlohmann::json& json, const std::string& file) {
  auto expect = [&](const char* field, const nlohmann::json& supported) {
    const nlohmann::json found = json.value(field, supported);
    CHECK(found == supported, "{}: \"{}\" is {}, supported is {}", file, field, found.dump(), supported.dump());
  };
  auto integer = [&](const char* field, const nlohmann::json& fallback) {
    const nlohmann::json found = json.contains(field) && !json[field].is_null() ? json[field] : fallback;
    CHECK(found.is_number_integer() && found > 0, "{}: \"{}\" is {}, expected a positive whole number", file, field,
          found.dump());
    return found.get<int64_t>();
  };
  auto real = [&](const char* field, double fallback) {
    const nlohmann::json found = json.contains(field) ? json[field] : nlohmann::json(fallback);
    CHECK(found.is_number() && found >= 0, "{}: \"{}\" is {}, expected a number", file, field, found.dump());
    return static_cast<float>(found.get<double>());
  };
  CHECK(json.is_object(), "{}: expected a JSON object", file);
  CHECK(json.value("model_type", nlohmann::json()) == "gpt2", "{}: \"model_type\" is {}, supported is \"gpt2\"", file,
        json.value("model_type", nlohmann::json()).dump());
  expect("activation_function", "gelu_new");
  expect("scale_attn_weights", true);
  expect("scale_attn_by_inverse_layer_idx", false);
  expect("reorder_and_upcast_attn", false);
  expect("add_cross_attention", false);
  ModelConfig config;
  config.n_layer = integer("n_layer", 12);
  config.n_head = integer("n_head", 12);
  config.n_embd = integer("n_embd", 768);
  config.n_ffn = integer("n_inner", 4 * config.n_embd);
  config.vocab_size = integer("vocab_size", 50257);
  config.n_positions = integer("n_positions", 1024);
  const nlohmann::json tied = json.value("tie_word_embeddings", nlohmann::json(true));
  CHECK(tied.is_boolean(), "{}: \"tie_word_embeddings\" is {}, expected true or false", file, tied.dump());
  config.tied = tied;
  config.norm_eps = real("layer_norm_epsilon", 1e-5);
  config.init_std = real("initializer_range", 0.02);
  return config;
}

// The end-of-text token of the vocabularies that are known by their size: GPT-2's, and bytes.
inline std::optional<int64_t> end_of_text_of(int64_t vocab_size) {
  if (vocab_size == 50257 || vocab_size == 257) return vocab_size - 1;
  return std::nullopt;
}

// config.json as transformers reads it; `dtype` is that of the weights beside it.
inline nlohmann::ordered_json config_to_hf(const ModelConfig& c, DType dtype) {
  const std::optional<int64_t> known = end_of_text_of(c.vocab_size);
  const nlohmann::ordered_json end_of_text = known ? nlohmann::ordered_json(*known) : nlohmann::ordered_json();
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"activation_function", "gelu_new"},
          {"bos_token_id", end_of_text},
          {"eos_token_id", end_of_text},
          {"attn_pdrop", 0.0},
          {"embd_pdrop", 0.0},
          {"resid_pdrop", 0.0},
          {"initializer_range", std::stod(formatted("{:.9g}", c.init_std))},
          {"layer_norm_epsilon", std::stod(formatted("{:.9g}", c.norm_eps))},
          {"n_ctx", c.n_positions},
          {"n_embd", c.n_embd},
          {"n_head", c.n_head},
          {"n_inner", c.n_ffn},
          {"n_layer", c.n_layer},
          {"n_positions", c.n_positions},
          {"tie_word_embeddings", c.tied},
          {"torch_dtype", dtype == DType::bf16 ? "bfloat16" : "float32"},
          {"vocab_size", c.vocab_size}};
}

// A preset or a directory with config.json, then the overrides.
inline ModelConfig resolve_model(const std::string& model, const ModelOverrides& o) {
  const std::optional<ModelConfig> preset = model_preset(model);
  ModelConfig config;
  if (preset) {
    config = *preset;
  } else {
    const std::string file = model + "/config.json";
    CHECK(std::filesystem::exists(file), "--model {}: neither a preset ({}) nor a directory with a config.json", model,
          preset_names());
    const nlohmann::json json = nlohmann::json::parse(read_text(file), nullptr, false);
    CHECK(!json.is_discarded(), "{}: not valid JSON; expected a Hugging Face config.json", file);
    config = config_from_hf(json, file);
  }
  if (o.n_layer) config.n_layer = *o.n_layer;
  if (o.n_head) config.n_head = *o.n_head;
  if (o.n_embd) config.n_embd = *o.n_embd, config.n_ffn = 4 * *o.n_embd;
  if (o.n_ffn) config.n_ffn = *o.n_ffn;
  if (o.vocab_size) config.vocab_size = *o.vocab_size;
  validate_model(config);
  return config;
}

// The parameters of GPT-2, with its initialisation: normal 0.02, projections into the residual stream scaled by
// 1 / sqrt(2 L) (Radford et al. 2019). A tied token embedding is one parameter, used by the embedding and the head.
inline ParamTable parameter_table(const ModelConfig& c) {
  const int64_t C = c.n_embd, F = c.n_ffn;
  const float std = c.init_std;
  const float residual_std = std / std::sqrt(2.0f * static_cast<float>(c.n_layer));
  using enum TensorSplit;
  using enum Placement;
  ParamTable table;
  table.push_back({"embedding",
                   {{.name = "wte.weight",
                     .shape = {c.vocab_size, C},
                     .tp = axis0,
                     .init_std = std,
                     .decay = true,
                     .padded_rows = c.padded_vocab()},
                    {.name = "wpe.weight", .shape = {c.n_positions, C}, .init_std = std, .decay = true}}});
  for (int64_t l = 0; l < c.n_layer; ++l) {
    const std::string block = formatted("blocks.{}", l);
    auto vector = [&](const char* name, int64_t n, TensorSplit tp, Init init, Placement placement = aligned) {
      return ParamSpec{.name = block + name, .shape = {n}, .tp = tp, .init = init, .placement = placement};
    };
    auto matrix = [&](const char* name, int64_t out, int64_t in, TensorSplit tp, float stddev,
                      Placement placement = aligned) {
      return ParamSpec{.name = block + name,
                       .shape = {out, in},
                       .tp = tp,
                       .init_std = stddev,
                       .decay = true,
                       .placement = placement};
    };
    table.push_back(
        {block,
         {vector(".ln1.weight", C, replicated, Init::ones), vector(".ln1.bias", C, replicated, Init::zeros),
          matrix(".attn.q.weight", C, C, axis0, std), matrix(".attn.k.weight", C, C, axis0, std, adjacent),
          matrix(".attn.v.weight", C, C, axis0, std, adjacent), vector(".attn.q.bias", C, axis0, Init::zeros),
          vector(".attn.k.bias", C, axis0, Init::zeros, adjacent),
          vector(".attn.v.bias", C, axis0, Init::zeros, adjacent),
          matrix(".attn.proj.weight", C, C, axis1, residual_std), vector(".attn.proj.bias", C, replicated, Init::zeros),
          vector(".ln2.weight", C, replicated, Init::ones), vector(".ln2.bias", C, replicated, Init::zeros),
          matrix(".mlp.up.weight", F, C, axis0, std), vector(".mlp.up.bias", F, axis0, Init::zeros),
          matrix(".mlp.down.weight", C, F, axis1, residual_std),
          vector(".mlp.down.bias", C, replicated, Init::zeros)}});
  }
  table.push_back({"head",
                   {{.name = "ln_f.weight", .shape = {C}, .init = Init::ones},
                    {.name = "ln_f.bias", .shape = {C}, .init = Init::zeros}}});
  if (!c.tied)
    table.back().params.push_back({.name = "lm_head.weight",
                                   .shape = {c.vocab_size, C},
                                   .tp = axis0,
                                   .init_std = std,
                                   .decay = true,
                                   .padded_rows = c.padded_vocab()});
  return table;
}

// Parameters that multiply activations: a tied table once, as the head; lookups not.
inline int64_t matmul_parameters(const ModelConfig& c) {
  const int64_t lookups = c.n_positions + (c.tied ? 0 : c.vocab_size);
  return count_parameters(parameter_table(c)) - lookups * c.n_embd;
}

// 6 N + 6 L C T: forward and backward of the matrices, and of causal attention.
inline double training_flops_per_token(const ModelConfig& c, int64_t seq_len) {
  return 6.0 * static_cast<double>(matmul_parameters(c)) + 6.0 * static_cast<double>(c.n_layer * c.n_embd * seq_len);
}

}  // namespace llmc
