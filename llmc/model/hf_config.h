// hf_config.h: Hugging Face's config.json, both ways. Fields with values that are not implemented are rejected by name.
#pragma once
#include <charconv>

#include "core/json.h"
#include "model/config.h"

namespace llmc {

namespace detail {

// Reads fields of one config.json; a missing or null field has transformers' default.
struct HfFields {
  const nlohmann::json& json;
  const std::string& file;

  nlohmann::json get(const char* field, const nlohmann::json& fallback) const {
    return json.contains(field) && !json[field].is_null() ? json[field] : fallback;
  }
  void expect(const char* field, const nlohmann::json& supported) const {
    const nlohmann::json found = get(field, supported);
    CHECK(found == supported, "{}: \"{}\" is {}, but only {} is supported", file, field, found, supported);
  }
  int64_t integer(const char* field, const nlohmann::json& fallback, int64_t most = 1 << 24) const {
    const nlohmann::json found = get(field, fallback);
    const int64_t value = whole_number(found).value_or(0);
    CHECK(value > 0 && value <= most, "{}: \"{}\" is {}, expected a whole number from 1 to {}", file, field, found,
          most);
    return value;
  }
  double real(const char* field, const nlohmann::json& fallback, double most = 1e12) const {
    const nlohmann::json found = get(field, fallback);
    CHECK(found.is_number() && found >= 0 && found <= most, "{}: \"{}\" is {}, expected a number from 0 to {}", file,
          field, found, most);
    return found.get<double>();
  }
  bool flag(const char* field, bool fallback) const {
    const nlohmann::json found = get(field, fallback);
    CHECK(found.is_boolean(), "{}: \"{}\" is {}, expected true or false", file, field, found);
    return found.get<bool>();
  }
};

inline void read_gpt2(ModelConfig& c, const HfFields& f) {
  f.expect("activation_function", "gelu_new");
  f.expect("scale_attn_weights", true);
  f.expect("scale_attn_by_inverse_layer_idx", false);
  f.expect("reorder_and_upcast_attn", false);
  f.expect("add_cross_attention", false);
  // transformers takes the other families' names as well, and prefers them.
  auto either = [&](const char* other, const char* name) { return f.get(other, nullptr).is_null() ? name : other; };
  c.n_layer = f.integer(either("num_hidden_layers", "n_layer"), 12, most_layers);
  const char *heads = either("num_attention_heads", "n_head"), *channels = either("hidden_size", "n_embd");
  c.n_head = c.n_kv_head = f.integer(heads, 12);
  c.n_embd = f.integer(channels, 768);
  c.n_ffn = f.integer("n_inner", 4 * c.n_embd);
  c.vocab_size = f.integer("vocab_size", 50257);
  c.n_positions = f.integer(either("max_position_embeddings", "n_positions"), 1024);
  c.tied = f.flag("tie_word_embeddings", true);
  c.norm_eps = static_cast<float>(f.real("layer_norm_epsilon", 1e-5, 1));
  CHECK(c.n_embd % c.n_head == 0, "{}: \"{}\" {} does not divide \"{}\" {}", f.file, heads, c.n_head, channels,
        c.n_embd);
  c.head_size = c.n_embd / c.n_head;
}

// transformers 5 keeps theta and scaling in "rope_parameters"; earlier versions in "rope_theta" and "rope_scaling".
// Conflicting or unknown entries are rejected.
inline Rotary read_rotary(const HfFields& f, double default_theta) {
  auto object = [&](const char* field) {
    const nlohmann::json found = f.get(field, nlohmann::json::object());
    CHECK(found.is_object(), "{}: \"{}\" is {}, expected an object", f.file, field, found);
    return found;
  };
  const nlohmann::json scaling = object("rope_scaling"), parameters = object("rope_parameters");
  CHECK(scaling.empty() || parameters.empty() || scaling == parameters,
        "{}: \"rope_scaling\" is {} and \"rope_parameters\" is {}: keep one of them", f.file, scaling, parameters);
  const HfFields p{scaling.empty() ? parameters : scaling, f.file};
  for (const auto& [key, value] : p.json.items())
    CHECK(key == "rope_theta" || key == "rope_type" || key == "type" || key == "factor" || key == "low_freq_factor" ||
              key == "high_freq_factor" || key == "original_max_position_embeddings" || key == "partial_rotary_factor",
          "{}: rotary positions have \"{}\": {}, which is not supported", f.file, shown(key), value);
  for (const HfFields& fields : {f, p}) fields.expect("partial_rotary_factor", 1.0);
  for (const char* field : {"rope_theta", "original_max_position_embeddings"})
    CHECK(!f.json.contains(field) || !p.json.contains(field) || f.json[field] == p.json[field],
          "{}: \"{}\" is {}, and {} among the rotary parameters: keep one of them", f.file, field, f.json[field],
          member(p.json, field));
  Rotary rotary;
  rotary.theta = p.real("rope_theta", f.real("rope_theta", default_theta));
  const nlohmann::json type = p.get("rope_type", p.get("type", "default"));
  rotary.scaled = type == "llama3";
  CHECK(rotary.scaled || type == "default", "{}: \"rope_type\" is {}, expected \"default\" or \"llama3\"", f.file,
        type);
  CHECK(rotary.theta > 0, "{}: \"rope_theta\" is {}, expected a positive number", f.file, rotary.theta);
  if (!rotary.scaled) return rotary;
  for (const char* field : {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
    CHECK(p.json.contains(field), "{}: rotary scaling of type llama3 has no \"{}\"", f.file, field);
  rotary.scaling = {.factor = p.real("factor", 0),
                    .low_freq_factor = p.real("low_freq_factor", 0),
                    .high_freq_factor = p.real("high_freq_factor", 0),
                    .original_positions = p.real("original_max_position_embeddings", 0)};
  CHECK(rotary.scaling.factor >= 1 && rotary.scaling.high_freq_factor > rotary.scaling.low_freq_factor &&
            rotary.scaling.low_freq_factor > 0,
        "{}: rotary scaling needs factor >= 1 and high_freq_factor > low_freq_factor > 0; it is {}", f.file, p.json);
  return rotary;
}

// The values of fields that are missing in a config.json.
struct LlamaDefaults {
  const char* family;
  int64_t n_layer, n_head, n_kv_head;  // 0 key-value heads: as many as heads
  int64_t n_embd, n_ffn, vocab_size, n_positions;
  double norm_eps, theta;
};
inline constexpr LlamaDefaults llama_defaults[] = {
    // clang-format off
    {"llama",     32, 32,  0, 4096, 11008,  32000,   2048, 1e-6, 1e4},
    {"qwen2",     32, 32, 32, 4096, 22016, 151936,  32768, 1e-6, 1e4},
    {"qwen3",     32, 32, 32, 4096, 22016, 151936,  32768, 1e-6, 1e4},
    {"mixtral",   32, 32,  8, 4096, 14336,  32000, 131072, 1e-5, 1e6},
    {"qwen2_moe", 24, 16, 16, 2048,  5632, 151936,  32768, 1e-6, 1e4},
    {"qwen3_moe", 24, 32,  4, 2048,  6144, 151936,  32768, 1e-6, 1e4},
    {"olmoe",     16, 16,  0, 2048,  2048,  50304,   4096, 1e-5, 1e4},
    // clang-format on
};

// The number of experts has two names. Most families take either, and prefer one of them by family and version.
inline int64_t read_expert_count(const ModelConfig& c, const HfFields& f, int64_t fallback) {
  const std::string type = c.family.model_type;
  const char *name = type == "mixtral" ? "num_local_experts" : "num_experts",
             *other = type == "mixtral" ? "num_experts" : "num_local_experts";
  const bool has_other = type != "qwen2_moe" && !f.get(other, nullptr).is_null();
  CHECK(!has_other || f.get(name, f.json[other]) == f.json[other],
        "{}: \"{}\" is {} and \"{}\" is {}: keep one of them", f.file, name, f.json[name], other, f.json[other]);
  return f.integer(has_other ? other : name, fallback, most_experts_in(c));
}

// c must already have its layers and its feed-forward width.
inline Experts read_experts(const ModelConfig& c, const HfFields& f) {
  const std::string type = c.family.model_type;
  Experts e;
  auto read = [&](int64_t count, int64_t per_token, double aux_loss) {
    e.count = read_expert_count(c, f, count);
    e.per_token = f.integer("num_experts_per_tok", per_token, e.count);
    e.aux_loss = f.real("router_aux_loss_coef", aux_loss);
    e.adds_aux_loss = f.flag("output_router_logits", false);
  };
  e.width = c.n_ffn;
  if (type == "mixtral") {
    read(8, 2, 0.001);
    e.normalised = true;
    f.expect("router_jitter_noise", 0.0);
    return e;
  }
  if (type == "olmoe") read(64, 8, 0.01);
  if (type == "qwen2_moe") read(60, 4, 0.001);
  if (type == "qwen3_moe") read(128, 8, 0.001);
  e.normalised = f.flag("norm_topk_prob", false);
  if (c.family.experts == ExpertFields::one_width) return e;
  e.width = f.integer("moe_intermediate_size", type == "qwen2_moe" ? 1408 : 768);
  e.shared_gate = type == "qwen2_moe";
  if (e.shared_gate) e.shared = f.integer("shared_expert_intermediate_size", 5632);
  e.every = f.integer("decoder_sparse_step", 1, most_layers);
  const nlohmann::json dense = f.get("mlp_only_layers", nlohmann::json::array());
  CHECK(dense.is_array() && std::ssize(dense) <= most_layers,
        "{}: \"mlp_only_layers\" is {}, expected a list of layers", f.file, dense);
  for (const nlohmann::json& layer : dense) {
    const int64_t l = whole_number(layer).value_or(-1);
    CHECK(l >= 0 && l < most_layers, "{}: \"mlp_only_layers\" has {}, expected whole numbers from 0 to {}", f.file,
          layer, most_layers - 1);
    e.dense_layers.push_back(l);
  }
  return e;
}

inline nlohmann::ordered_json experts_to_hf(const ModelConfig& c) {
  const std::string type = c.family.model_type;
  const Experts& e = c.experts;
  nlohmann::ordered_json json = {{type == "mixtral" ? "num_local_experts" : "num_experts", e.count},
                                 {"num_experts_per_tok", e.per_token},
                                 {"output_router_logits", e.adds_aux_loss},
                                 {"router_aux_loss_coef", e.aux_loss}};
  if (type != "mixtral") json["norm_topk_prob"] = e.normalised;
  if (c.family.experts == ExpertFields::one_width) return json;
  json.update(
      {{"decoder_sparse_step", e.every}, {"mlp_only_layers", e.dense_layers}, {"moe_intermediate_size", e.width}});
  if (e.shared_gate) json["shared_expert_intermediate_size"] = e.shared;
  return json;
}

// All families but GPT-2 use the same fields.
inline void read_llama_like(ModelConfig& c, const HfFields& f) {
  const std::string type = c.family.model_type;
  const bool qwen3 = type == "qwen3", has_bias_field = type != "qwen2" && type != "qwen2_moe";
  const auto row = std::ranges::find_if(llama_defaults, [&](const LlamaDefaults& d) { return d.family == type; });
  CHECK(row != std::end(llama_defaults), "{} has no line in llama_defaults", type);
  const LlamaDefaults& defaults = *row;
  f.expect("hidden_act", "silu");
  if (has_bias_field) f.expect("attention_bias", false);
  if (type == "qwen2_moe" && !f.flag("qkv_bias", true)) c.family.biases = Biases::none;
  f.expect("mlp_bias", false);
  f.expect("use_sliding_window", false);
  const bool may_be_off = type != "mixtral" && type != "olmoe";  // these two have no use_sliding_window
  if (!may_be_off || !f.json.contains("use_sliding_window")) f.expect("sliding_window", nullptr);  // used if given
  f.expect("pretraining_tp", 1);
  f.expect("attention_dropout", 0.0);
  if (type == "olmoe") f.expect("clip_qkv", nullptr);
  for (const nlohmann::json& layer : f.get("layer_types", nlohmann::json::array()))
    CHECK(layer == "full_attention", "{}: \"layer_types\" has {}, but only \"full_attention\" is supported", f.file,
          layer);
  c.n_layer = f.integer("num_hidden_layers", defaults.n_layer, most_layers);
  c.n_head = f.integer("num_attention_heads", defaults.n_head);
  const bool has_groups = defaults.n_kv_head > 0 && !f.json.contains("num_key_value_heads");  // null: as many as heads
  c.n_kv_head = f.integer("num_key_value_heads", has_groups ? defaults.n_kv_head : c.n_head);
  CHECK(c.n_head % c.n_kv_head == 0, "{}: \"num_key_value_heads\" {} does not divide \"num_attention_heads\" {}",
        f.file, c.n_kv_head, c.n_head);
  c.n_embd = f.integer("hidden_size", defaults.n_embd);
  c.n_ffn = f.integer("intermediate_size", defaults.n_ffn);
  c.vocab_size = f.integer("vocab_size", defaults.vocab_size);
  c.n_positions = f.integer("max_position_embeddings", defaults.n_positions);
  c.tied = f.flag("tie_word_embeddings", false);
  c.norm_eps = static_cast<float>(f.real("rms_norm_eps", defaults.norm_eps, 1));
  c.rotary = read_rotary(f, defaults.theta);
  const bool given = !f.get("head_dim", nullptr).is_null();
  CHECK(given || qwen3 || c.n_embd % c.n_head == 0, "{}: \"num_attention_heads\" {} does not divide \"hidden_size\" {}",
        f.file, c.n_head, c.n_embd);
  c.head_size = f.integer("head_dim", qwen3 ? 128 : std::max<int64_t>(1, c.n_embd / c.n_head));
  CHECK(type != "olmoe" || c.q_size() == c.n_embd,
        "{}: \"head_dim\" is {}, but its query norm is of \"hidden_size\" {} channels: expected {}", f.file,
        c.head_size, c.n_embd, c.n_embd / c.n_head);
  if (c.family.experts != ExpertFields::none) c.experts = read_experts(c, f);
}

}  // namespace detail

inline constexpr const char* special_tokens[] = {"bos_token_id", "eos_token_id", "pad_token_id"};

inline ModelConfig config_from_hf(const nlohmann::json& json, const std::string& file) {
  CHECK(json.is_object(), "{}: expected a JSON object", file);
  const nlohmann::json type = member(json, "model_type");
  const std::optional<Family> family = type.is_string() ? find_family(type.get<std::string>()) : std::nullopt;
  CHECK(family, "{}: \"model_type\" is {}, expected one of {}", file, type, family_names());
  const detail::HfFields fields{json, file};
  ModelConfig c;
  c.family = *family;
  if (c.family.positions == Positions::learned) detail::read_gpt2(c, fields);
  else detail::read_llama_like(c, fields);
  c.init_std = static_cast<float>(fields.real("initializer_range", 0.02, 1));
  CHECK(json.value("is_causal", nlohmann::json(true)) == true,  // null is false there
        "{}: \"is_causal\" is {}, but only true is supported", file, json["is_causal"]);
  for (const char* field : {"quantization_config", "per_layer_config", "transformers_weights", "fusion_config"})
    fields.expect(field, nullptr);
  for (const char* token : special_tokens) c.special_tokens[token] = json.contains(token) ? json[token].dump() : "";
  return c;
}

// The end-of-text token of vocabularies recognised by their size: GPT-2's, bytes, Llama 3's, Qwen's, SmolLM2's.
inline std::optional<int64_t> end_of_text_of(int64_t vocab_size) {
  switch (vocab_size) {
    case 257: return 256;
    case 50257: return 50256;
    case 128256: return 128001;
    case 151936:
    case 152064: return 151643;
    case 49152: return 0;
    default: return std::nullopt;
  }
}

// Whether special tokens are known, from transformers' defaults for the family or from config_to_hf().
inline bool knows_special_tokens(const ModelConfig& c) {
  if (end_of_text_of(c.vocab_size)) return true;
  if (c.family.positions == Positions::learned) return c.vocab_size > 50256;  // GPT-2's, perhaps padded
  return std::ranges::any_of(detail::llama_defaults, [&](const detail::LlamaDefaults& d) {
    return c.family.model_type == std::string_view(d.family) && c.vocab_size == d.vocab_size;
  });
}

// config.json as transformers reads it; `dtype` is that of the weights beside it.
inline nlohmann::ordered_json config_to_hf(const ModelConfig& c, DType dtype) {
  const std::optional<int64_t> known = end_of_text_of(c.vocab_size);
  auto shortest = [](float x) {  // the decimal number with the fewest digits that rounds to x
    std::array<char, 64> digits;
    return std::stod(std::string(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), x).ptr));
  };
  nlohmann::ordered_json json = {{"architectures", {c.family.architecture}},
                                 {"model_type", c.family.model_type},
                                 {"initializer_range", shortest(c.init_std)},
                                 {"tie_word_embeddings", c.tied},
                                 {"torch_dtype", dtype == DType::bf16 ? "bfloat16" : "float32"},
                                 {"vocab_size", c.vocab_size}};
  for (const auto& [token, value] : c.special_tokens)
    if (!value.empty()) json[token] = parse_json(value, token);
  if (c.special_tokens.empty() && known) {  // a preset's; Llama 3 begins texts with the token before its end of text
    json["bos_token_id"] = c.vocab_size == 128256 ? 128000 : *known;
    json["eos_token_id"] = *known;
  }
  if (c.family.positions == Positions::learned) {
    json.update({{"activation_function", "gelu_new"},
                 {"attn_pdrop", 0.0},
                 {"embd_pdrop", 0.0},
                 {"resid_pdrop", 0.0},
                 {"layer_norm_epsilon", shortest(c.norm_eps)},
                 {"n_ctx", c.n_positions},
                 {"n_embd", c.n_embd},
                 {"n_head", c.n_head},
                 {"n_inner", c.n_ffn},
                 {"n_layer", c.n_layer},
                 {"n_positions", c.n_positions}});
    return json;
  }
  json.update({{"attention_dropout", 0.0},
               {"hidden_act", "silu"},
               {"hidden_size", c.n_embd},
               {"intermediate_size", c.n_ffn},  // of Mixtral's and OLMoE's experts too: they have no dense layers
               {"max_position_embeddings", c.n_positions},
               {"num_attention_heads", c.n_head},
               {"num_hidden_layers", c.n_layer},
               {"num_key_value_heads", c.n_kv_head},
               {"rms_norm_eps", shortest(c.norm_eps)},
               {"rope_theta", c.rotary.theta},
               {"rope_scaling", nullptr},
               {"sliding_window", nullptr}});
  const std::string_view type = c.family.model_type;  // fields that only some families have
  if (type != "qwen2" && type != "qwen2_moe" && type != "mixtral") json["attention_bias"] = false;
  if (type == "qwen2_moe") json["qkv_bias"] = c.family.biases == Biases::qkv;
  if ((type != "qwen2" && type != "qwen2_moe" && type != "olmoe") || c.q_size() != c.n_embd)
    json["head_dim"] = c.head_size;
  if (type == "llama") json["mlp_bias"] = false;
  if (type.starts_with("qwen")) json["use_sliding_window"] = false;
  if (c.experts.count > 0) json.update(detail::experts_to_hf(c));
  if (c.rotary.scaled)
    json["rope_scaling"] = {
        {"rope_type", "llama3"},
        {"factor", c.rotary.scaling.factor},
        {"low_freq_factor", c.rotary.scaling.low_freq_factor},
        {"high_freq_factor", c.rotary.scaling.high_freq_factor},
        {"original_max_position_embeddings", static_cast<int64_t>(c.rotary.scaling.original_positions)}};
  return json;
}

}  // namespace llmc
