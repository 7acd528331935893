// hf_experts.h: the fields of config.json that describe experts, both ways.
#pragma once
#include <nlohmann/json.hpp>

#include "model/config.h"
#include "model/hf_fields.h"

namespace llmc::detail {

// The number of experts has two names. For most families transformers takes either; which one it prefers depends on the
// family and the version.
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

}  // namespace llmc::detail
