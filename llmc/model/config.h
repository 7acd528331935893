// config.h: the architecture, and the parameter table that everything derives from. Published shapes: presets.h.
#pragma once
#include <ranges>

#include "model/expert_config.h"
#include "model/parametrization.h"
#include "ops/ops_attention.h"
#include "shard/params.h"

namespace llmc {

enum class Norm : uint8_t { layernorm, rmsnorm };
enum class Positions : uint8_t { learned, rotary };
enum class Mlp : uint8_t { gelu, swiglu };
enum class Biases : uint8_t { all, qkv, none };
// Which channels of queries, and of keys, share one root mean square: those of a head, or of all heads together.
enum class QkNorm : uint8_t { none, by_head, by_projection };
// Whether layers have experts, and whether config.json has one width for all feed-forwards or another one for experts.
enum class ExpertFields : uint8_t { none, one_width, two_widths };

// The traits that the models of a family share. How to add a family: README.md.
struct Family {
  const char* model_type;    // in Hugging Face's config.json
  const char* architecture;  // transformers' class
  Norm norm;
  Positions positions;
  Mlp mlp;
  Biases biases;
  QkNorm qk_norm;
  bool own_head_size;    // the head size may differ from C / heads
  ExpertFields experts;  // none: all layers are dense
};
inline constexpr Family families[] = {
    // clang-format off
    {"gpt2",      "GPT2LMHeadModel",     Norm::layernorm, Positions::learned, Mlp::gelu,   Biases::all,  QkNorm::none,          false, ExpertFields::none},
    {"llama",     "LlamaForCausalLM",    Norm::rmsnorm,   Positions::rotary,  Mlp::swiglu, Biases::none, QkNorm::none,          false, ExpertFields::none},
    {"qwen2",     "Qwen2ForCausalLM",    Norm::rmsnorm,   Positions::rotary,  Mlp::swiglu, Biases::qkv,  QkNorm::none,          false, ExpertFields::none},
    {"qwen3",     "Qwen3ForCausalLM",    Norm::rmsnorm,   Positions::rotary,  Mlp::swiglu, Biases::none, QkNorm::by_head,       true,  ExpertFields::none},
    {"mixtral",   "MixtralForCausalLM",  Norm::rmsnorm,   Positions::rotary,  Mlp::swiglu, Biases::none, QkNorm::none,          false, ExpertFields::one_width},
    {"qwen2_moe", "Qwen2MoeForCausalLM", Norm::rmsnorm,   Positions::rotary,  Mlp::swiglu, Biases::qkv,  QkNorm::none,          false, ExpertFields::two_widths},
    {"qwen3_moe", "Qwen3MoeForCausalLM", Norm::rmsnorm,   Positions::rotary,  Mlp::swiglu, Biases::none, QkNorm::by_head,       true,  ExpertFields::two_widths},
    {"olmoe",     "OlmoeForCausalLM",    Norm::rmsnorm,   Positions::rotary,  Mlp::swiglu, Biases::none, QkNorm::by_projection, false, ExpertFields::one_width},
    // clang-format on
};
inline std::optional<Family> find_family(std::string_view model_type) {
  for (const Family& f : families)
    if (model_type == f.model_type) return f;
  return std::nullopt;
}
inline std::string family_names() { return formatted("{}", std::views::transform(families, &Family::model_type)); }

struct ModelConfig {
  Family family = families[0];
  int64_t n_layer = 12;
  int64_t n_head = 12;         // Hq
  int64_t n_kv_head = 12;      // Hkv
  int64_t head_size = 64;      // D
  int64_t n_embd = 768;        // C
  int64_t n_ffn = 3072;        // F, of dense layers
  int64_t vocab_size = 50257;  // V, unpadded
  int64_t n_positions = 1024;
  bool tied = true;  // the head's matrix is the token embedding
  float norm_eps = 1e-5f;
  float init_std = 0.02f;
  Rotary rotary = {};
  Experts experts = {};
  std::optional<BaseShape> base = {};  // from which initial weights and rates follow; none: standard parametrization
  const ScalingRules* scaling = &scaling_rules;
  // Special tokens by their names in config.json, as JSON (a number, a list, null), for checkpoints; "": absent.
  std::map<std::string, std::string> special_tokens = {};

  int64_t padded_vocab() const { return TensorParallel().stored_vocab(vocab_size); }
  int64_t q_size() const { return n_head * head_size; }
  int64_t kv_size() const { return n_kv_head * head_size; }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
  Growth growth() const {
    const auto over = [](int64_t size, int64_t of_base) {
      return static_cast<double>(size) / static_cast<double>(of_base);
    };
    if (!base) return {};
    return {over(n_embd, base->width), over(n_layer, base->depth), over(head_size, base->head_size)};
  }
  // Columns of the MLP's first product: with SwiGLU the gates, then the ups.
  int64_t mlp_in_size() const { return family.mlp == Mlp::swiglu ? 2 * n_ffn : n_ffn; }
  BlockPlace place_of(int64_t layer) const { return {layer, n_layer - 1 - layer}; }
  bool is_sparse(int64_t layer) const {
    return experts.count > 0 && (layer + 1) % experts.every == 0 &&
           std::ranges::count(experts.dense_layers, layer) == 0;
  }
  Router router() const {
    return {experts.count, experts.per_token, experts.scores, experts.normalised, experts.scaling};
  }
  int64_t sparse_layers() const {
    int64_t n = 0;
    for (int64_t l = 0; l < n_layer; ++l) n += is_sparse(l);
    return n;
  }
};

inline constexpr int64_t most_experts_in_all = 1 << 16;  // in all layers: their parameters are listed by name
inline int64_t most_experts_in(const ModelConfig& c) { return std::min(most_experts, most_experts_in_all / c.n_layer); }

namespace detail {

inline void validate_experts(const ModelConfig& c) {
  const Experts& e = c.experts;
  const char* type = c.family.model_type;
  CHECK(c.family.experts != ExpertFields::none || e.count == 0,
        "{} has no experts, and {} were asked for: choose another family", type, e.count);
  if (c.family.experts == ExpertFields::none) return;
  constexpr int64_t largest = 1 << 24;
  CHECK(e.count > 0 && e.count <= most_experts_in(c),
        "{} has experts: expected 1 to {} of them in each of {} layers, not {}", type, most_experts_in(c), c.n_layer,
        e.count);
  CHECK(e.per_token > 0 && e.per_token <= e.count, "{} experts per token of {} in all: expected 1 to {}", e.per_token,
        e.count, e.count);
  CHECK(e.width > 0 && e.width <= largest && e.shared >= 0 && e.shared <= largest,
        "experts of width {} and a shared one of width {}: expected 1 to {}, and 0 to {}", e.width, e.shared, largest,
        largest);
  const bool qwen2 = std::string_view(type) == "qwen2_moe", mixtral = std::string_view(type) == "mixtral";
  CHECK(e.scores == RouterScores::softmax && e.scaling == 1 && (e.shared > 0) == qwen2 && e.shared_gate == qwen2 &&
            (!mixtral || e.normalised),
        "{} has softmax scores, {}normalised, not scaled, and {} shared expert: its config.json has no fields for "
        "others",
        type, mixtral ? "" : "perhaps ", qwen2 ? "a gated" : "no");
  const bool one_width = c.family.experts == ExpertFields::one_width;
  CHECK(!one_width || (c.n_ffn == e.width && e.every == 1 && e.dense_layers.empty()),
        "{} has experts in every layer, whose width, {}, is n_ffn, {}", type, e.width, c.n_ffn);
  const double parameters = 3.0 * static_cast<double>(c.n_layer * e.count) * static_cast<double>(e.width * c.n_embd);
  CHECK(parameters < 0x1p60, "{} experts in {} layers, of width {} and n_embd {}, have {:.1e} parameters: too many",
        e.count, c.n_layer, e.width, c.n_embd, parameters);
  CHECK(e.every > 0 && c.sparse_layers() > 0,
        "none of the {} layers is sparse: every layer whose number, counted from 1, is a multiple of {} has experts, "
        "except {}",
        c.n_layer, e.every, e.dense_layers);
}

}  // namespace detail

inline constexpr int64_t most_layers = 1 << 14;  // whose parameters are listed by name

inline void validate_model(const ModelConfig& c) {
  CHECK(
      c.n_layer > 0 && c.n_head > 0 && c.n_kv_head > 0 && c.head_size > 0 && c.n_embd > 0 && c.n_ffn > 0 &&
          c.vocab_size > 0 && c.n_positions > 0,
      "the model has a size that is not positive: n_layer {}, n_head {}, n_kv_head {}, head size {}, n_embd {}, n_ffn "
      "{}, vocab_size {}, n_positions {}",
      c.n_layer, c.n_head, c.n_kv_head, c.head_size, c.n_embd, c.n_ffn, c.vocab_size, c.n_positions);
  CHECK(c.n_layer <= most_layers, "the model has {} layers: use at most {}", c.n_layer, most_layers);
  constexpr int64_t largest = 1 << 24;  // of one dimension: products of two stay far below 2^63
  CHECK(c.n_head <= largest / c.head_size && c.n_embd <= largest && c.n_ffn <= 4 * largest,
        "the model has a dimension beyond {}: {} heads of {}, n_embd {}, n_ffn {}", largest, c.n_head, c.head_size,
        c.n_embd, c.n_ffn);
  CHECK(c.n_kv_head <= c.n_head, "--n-kv-head {} exceeds --n-head {}: use one of {}", c.n_kv_head, c.n_head,
        divisors(c.n_head));
  detail::validate_experts(c);
  CHECK(c.family.norm == Norm::rmsnorm || c.q_size() == c.n_embd,
        "--n-head {} does not divide --n-embd {}: use one of {}", c.n_head, c.n_embd, divisors(c.n_embd));
  CHECK(c.n_head % c.n_kv_head == 0, "--n-kv-head {} does not divide --n-head {}: use one of {}", c.n_kv_head, c.n_head,
        divisors(c.n_head));
  CHECK(c.family.norm == Norm::rmsnorm || c.n_kv_head == c.n_head,
        "--n-kv-head {}: {} has as many key-value heads as query heads, {}; choose another family for grouped-query "
        "attention",
        c.n_kv_head, c.family.model_type, c.n_head);
  CHECK(c.family.positions == Positions::learned || c.head_size % 2 == 0,
        "rotary positions need an even head size, not {}: choose --n-head and --n-embd accordingly", c.head_size);
}

// The shape of a model that one rank of a tensor-parallel group computes: its heads, its part of the feed-forward.
inline ModelConfig model_of_rank(ModelConfig c, const TensorParallel& tp) {
  if (tp.ranks == 1) return c;
  c.n_head = exact_div(c.n_head, tp.ranks, "heads over tensor-parallel ranks");
  c.n_kv_head = std::max<int64_t>(1, c.n_kv_head / tp.ranks);
  if (c.sparse_layers() < c.n_layer)
    c.n_ffn = exact_div(c.n_ffn, tp.ranks, "feed-forward width over tensor-parallel ranks");
  c.experts.shared = exact_div(c.experts.shared, tp.ranks, "width of the shared expert over tensor-parallel ranks");
  c.vocab_size = ceil_div(c.vocab_size, tp.ranks);
  return c;
}

inline bool can_share_heads(const ModelConfig& c, int64_t ranks) {
  return c.n_head % ranks == 0 && (c.n_kv_head % ranks == 0 || ranks % c.n_kv_head == 0);
}
inline bool can_share_out(const ModelConfig& c, int64_t ranks) {
  return can_share_heads(c, ranks) && (c.sparse_layers() == c.n_layer || c.n_ffn % ranks == 0) &&
         c.experts.shared % ranks == 0;
}

// How these ranks share the model, if they can (layout_faults.h).
inline TensorParallel tensor_parallel(const ModelConfig& c, int64_t ranks, bool sequence = true, bool overlap = false) {
  return {.ranks = static_cast<int>(ranks),
          .sequence = sequence,
          .overlap = overlap && ranks > 1,
          .head_copies = static_cast<int>(std::max<int64_t>(1, ranks / c.n_kv_head))};
}

inline ExpertParallel expert_parallel(const ModelConfig& c, int64_t ranks) {
  return {.ranks = static_cast<int>(ranks), .count = c.experts.count};
}

// Which parameters a table lists. The units of other layers are there, too, but empty.
struct WantedParameters {
  std::function<bool(int64_t layer)> layer = {};  // none: all
  std::optional<Range> experts = {};              // of each layer; none: all
};

// The parameters, with GPT-2's initialisation: normal 0.02, projections into the residual stream scaled by
// 1 / sqrt(2 L) (Radford et al. 2019), for L layers of the base, if there is one. A tied token embedding is one
// parameter, used by the embedding and the head.
//
// The experts of a layer are a unit of their own, since they are shared among different ranks from the rest of the
// layer. It has the gates and ups of all experts, expert by expert, then their downs, without gaps. So a grouped
// product sees one tensor of each kind, (E, 2 F, C) and (E, C, F), which are also transformers' fused tensors, and the
// rows of every expert are aligned like those of the first.
inline ParamTable parameter_table(const ModelConfig& c, Optimizer rule = Optimizer::adamw,
                                  const WantedParameters& wanted = {}, const Muon& muon = {}) {
  const int64_t C = c.n_embd, F = c.n_ffn, D = c.head_size, Q = c.q_size(), KV = c.kv_size();
  const float std = c.init_std;
  const float residual_std = std / std::sqrt(2.0f * static_cast<float>(c.base ? c.base->depth : c.n_layer));
  const bool all_biases = c.family.biases == Biases::all, qkv_biases = c.family.biases != Biases::none;
  using enum TensorSplit;
  using enum Placement;
  auto table_of_tokens = [&](const char* name) {
    return ParamSpec{.name = name,
                     .shape = {c.vocab_size, C},
                     .tp = vocabulary,
                     .init_std = std,
                     .decay = true,
                     .padded_rows = c.padded_vocab()};
  };
  ParamTable table;
  auto vector = [&](const std::string& name, int64_t n, TensorSplit tp, Init init, Placement placement = aligned,
                    int64_t most_parts = 0) {
    table.back().params.push_back(
        {.name = name, .shape = {n}, .tp = tp, .init = init, .placement = placement, .most_parts = most_parts});
  };
  auto norm = [&](const std::string& name) {
    vector(name + ".weight", C, by_row, Init::constant);
    if (c.family.norm == Norm::layernorm) vector(name + ".bias", C, by_row, Init::zeros);
  };
  table.push_back({"embedding", {table_of_tokens("wte.weight")}});
  if (c.family.positions == Positions::learned)
    table.back().params.push_back({.name = "wpe.weight", .shape = {c.n_positions, C}, .init_std = std, .decay = true});
  for (int64_t l = 0; l < c.n_layer; ++l) {
    const std::string block = formatted("blocks.{}", l);
    const BlockPlace place = c.place_of(l);
    table.push_back({block, {}, Sharing::dense, place});
    if (wanted.layer && !wanted.layer(l)) {
      if (c.is_sparse(l)) table.push_back({block + ".experts", {}, Sharing::experts, place});
      continue;
    }
    auto matrix = [&](const std::string& name, int64_t out, int64_t in, TensorSplit tp, float stddev,
                      Placement placement = aligned, int64_t most_parts = 0) {
      table.back().params.push_back({.name = block + name,
                                     .shape = {out, in},
                                     .tp = tp,
                                     .init_std = stddev,
                                     .decay = true,
                                     .placement = placement,
                                     .most_parts = most_parts});
    };
    norm(block + ".ln1");
    matrix(".attn.q.weight", Q, C, outputs, std);
    matrix(".attn.k.weight", KV, C, outputs, std, adjacent, c.n_kv_head);
    matrix(".attn.v.weight", KV, C, outputs, std, adjacent, c.n_kv_head);
    if (qkv_biases) {
      vector(block + ".attn.q.bias", Q, outputs, Init::zeros);
      vector(block + ".attn.k.bias", KV, outputs, Init::zeros, adjacent, c.n_kv_head);
      vector(block + ".attn.v.bias", KV, outputs, Init::zeros, adjacent, c.n_kv_head);
    }
    if (c.family.qk_norm == QkNorm::by_head) {
      vector(block + ".attn.q_norm.weight", D, by_head, Init::constant);
      vector(block + ".attn.k_norm.weight", D, by_head, Init::constant);
    }
    if (c.family.qk_norm == QkNorm::by_projection) {
      vector(block + ".attn.q_norm.weight", Q, outputs, Init::constant);
      vector(block + ".attn.k_norm.weight", KV, outputs, Init::constant, aligned, c.n_kv_head);
    }
    matrix(".attn.proj.weight", C, Q, inputs, residual_std);
    if (all_biases) vector(block + ".attn.proj.bias", C, by_row, Init::zeros);
    norm(block + ".ln2");
    if (c.is_sparse(l)) {
      const Experts& e = c.experts;
      matrix(".moe.router.weight", e.count, C, by_row, std);
      if (e.shared > 0) {
        matrix(".moe.shared.gate.weight", e.shared, C, outputs, std);
        matrix(".moe.shared.up.weight", e.shared, C, outputs, std, adjacent);
        matrix(".moe.shared.down.weight", C, e.shared, inputs, residual_std);
      }
      if (e.shared_gate) matrix(".moe.shared_gate.weight", 1, C, by_row, std);
      table.push_back({block + ".experts", {}, Sharing::experts, place});
      auto of_expert = [&](int64_t i, const char* name, int64_t out, int64_t in, float stddev, Placement placement) {
        matrix(formatted(".experts.{}.{}", i, name), out, in, by_row, stddev, placement);
        table.back().params.back().expert = i;
      };
      const Range experts = wanted.experts.value_or(Range{0, e.count});
      for (int64_t i = experts.begin; i < experts.end(); ++i) {
        of_expert(i, "gate.weight", e.width, C, std, i == experts.begin ? aligned : adjacent);
        of_expert(i, "up.weight", e.width, C, std, adjacent);
      }
      for (int64_t i = experts.begin; i < experts.end(); ++i)
        of_expert(i, "down.weight", C, e.width, residual_std, i == experts.begin ? aligned : adjacent);
      continue;
    }
    const bool gated = c.family.mlp == Mlp::swiglu;
    if (gated) matrix(".mlp.gate.weight", F, C, outputs, std);
    matrix(".mlp.up.weight", F, C, outputs, std, gated ? adjacent : aligned);
    if (all_biases) vector(block + ".mlp.up.bias", F, outputs, Init::zeros);
    matrix(".mlp.down.weight", C, F, inputs, residual_std);
    if (all_biases) vector(block + ".mlp.down.bias", C, by_row, Init::zeros);
  }
  table.push_back({"head", {}});
  norm("ln_f");
  if (!c.tied) table.back().params.push_back(table_of_tokens("lm_head.weight"));
  for (UnitSpec& unit : table)
    for (ParamSpec& p : unit.params) {
      const bool of_tokens = &unit == &table.front();
      p.rates = p.shape.rank() == 1      ? RateGroup::scalars
                : of_tokens              ? RateGroup::embedding
                : &unit == &table.back() ? RateGroup::head
                                         : RateGroup::matrices;
      const bool matrix = p.rates == RateGroup::matrices && p.shape[0] > 1 && !p.name.ends_with("router.weight");
      p.rule = rule_of(rule).of_matrices && !matrix ? Optimizer::adamw : rule;
      if (matrix && p.name.find(".attn.") != p.name.npos && !p.name.ends_with("proj.weight"))
        p.group_rows = p.shape[0] / c.n_kv_head;
      // Keys that several heads share stay as they are, so that no head loses what another one exceeds.
      const bool shared = c.n_kv_head < c.n_head, of_queries = p.name.find(".attn.q.") != p.name.npos;
      if (c.family.qk_norm == QkNorm::none && (of_queries || p.name.find(".attn.k.") != p.name.npos))
        p.clip = !shared ? ClipShare::root : of_queries ? ClipShare::whole : ClipShare::none;
      parametrize(p, {.growth = c.growth(),
                      .tied = c.tied,
                      .query_norm = c.family.qk_norm != QkNorm::none,
                      .muon = muon,
                      .rules = c.scaling});
    }
  return table;
}

// Where the units of a layer are in the parameter table.
struct LayerUnits {
  size_t block;
  std::optional<size_t> experts;  // none: the layer is dense
};
inline std::vector<LayerUnits> layer_units(const ModelConfig& c) {
  std::vector<LayerUnits> units;
  size_t next = 1;  // the embedding is the first
  for (int64_t l = 0; l < c.n_layer; ++l) {
    units.push_back({next++, std::nullopt});
    if (c.is_sparse(l)) units.back().experts = next++;
  }
  return units;
}

// Parameters that a token uses: among the experts of a layer only those that the router chooses, and the shared one.
inline int64_t count_active_parameters(const ModelConfig& c) {
  return count_parameters(parameter_table(c, Optimizer::adamw, {.experts = Range{0, c.experts.per_token}}));
}

// Active parameters that multiply activations: a tied table counts once, as the head; lookup tables do not count.
inline int64_t matmul_parameters(const ModelConfig& c) {
  const int64_t positions = c.family.positions == Positions::learned ? c.n_positions : 0;
  const int64_t lookups = positions + (c.tied ? 0 : c.vocab_size);
  return count_active_parameters(c) - lookups * c.n_embd;
}

// 6 N + 6 L C T: forward and backward of the matrices and of causal attention; this C is the width of all heads.
inline double training_flops_per_token(const ModelConfig& c, int64_t seq_len) {
  return 6.0 * static_cast<double>(matmul_parameters(c)) + 6.0 * static_cast<double>(c.n_layer * c.q_size() * seq_len);
}

}  // namespace llmc
