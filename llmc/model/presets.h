// presets.h: --model: published shapes, by name, or a directory with a config.json; with changes of single sizes.
#pragma once
#include <charconv>
#include <ranges>

#include "core/files.h"
#include "core/words.h"
#include "model/hf_config.h"

namespace llmc {

struct PresetExperts {
  int64_t count, per_token, width;
  bool normalised;
  double aux_loss;
  double active;  // parameters that a token uses
};

struct Preset {
  const char* name;
  const char* family;
  int64_t n_layer, n_head, n_kv_head, head_size, n_embd, n_ffn, vocab_size, n_positions;
  bool tied;
  float norm_eps;
  double theta;          // of rotary positions; 0: learned positions
  double rotary_factor;  // of Llama 3's scaling; 0: none
  double parameters;     // as published
  PresetExperts experts = {};
};
inline constexpr Preset presets[] = {
    // clang-format off
    // Radford et al. 2019; counts of the published weights.
    {"gpt2:124M",  "gpt2", 12, 12, 12, 64,  768, 3072, 50257, 1024, true, 1e-5f, 0, 0, 124'439'808},
    {"gpt2:350M",  "gpt2", 24, 16, 16, 64, 1024, 4096, 50257, 1024, true, 1e-5f, 0, 0, 354'823'168},
    {"gpt2:774M",  "gpt2", 36, 20, 20, 64, 1280, 5120, 50257, 1024, true, 1e-5f, 0, 0, 774'030'080},
    {"gpt2:1558M", "gpt2", 48, 25, 25, 64, 1600, 6400, 50257, 1024, true, 1e-5f, 0, 0, 1'557'611'200},
    // Brown et al. 2020, table 2.1; XL and 13B with head counts and channels that divide.
    {"gpt3:125M", "gpt2", 12, 12, 12,  64,  768,  3072, 50257, 2048, true, 1e-5f, 0, 0, 125e6},
    {"gpt3:350M", "gpt2", 24, 16, 16,  64, 1024,  4096, 50257, 2048, true, 1e-5f, 0, 0, 350e6},
    {"gpt3:760M", "gpt2", 24, 16, 16,  96, 1536,  6144, 50257, 2048, true, 1e-5f, 0, 0, 760e6},
    {"gpt3:1.3B", "gpt2", 24, 16, 16, 128, 2048,  8192, 50257, 2048, true, 1e-5f, 0, 0, 1.3e9},
    {"gpt3:2.7B", "gpt2", 32, 32, 32,  80, 2560, 10240, 50257, 2048, true, 1e-5f, 0, 0, 2.7e9},
    {"gpt3:6.7B", "gpt2", 32, 32, 32, 128, 4096, 16384, 50257, 2048, true, 1e-5f, 0, 0, 6.7e9},
    {"gpt3:13B",  "gpt2", 40, 40, 40, 128, 5120, 20480, 50257, 2048, true, 1e-5f, 0, 0, 13e9},
    // Touvron et al. 2023; Llama 3.1 (8B and above) and 3.2 (1B and 3B), Meta 2024. Counts of the published weights.
    {"llama2:7B",   "llama",  32,  32, 32, 128,  4096, 11008,  32000,   4096, false, 1e-5f, 1e4,  0,   6'738'415'616},
    {"llama2:13B",  "llama",  40,  40, 40, 128,  5120, 13824,  32000,   4096, false, 1e-5f, 1e4,  0,  13'015'864'320},
    {"llama2:70B",  "llama",  80,  64,  8, 128,  8192, 28672,  32000,   4096, false, 1e-5f, 1e4,  0,  68'976'648'192},
    {"llama3:1B",   "llama",  16,  32,  8,  64,  2048,  8192, 128256, 131072, true,  1e-5f, 5e5, 32,   1'235'814'400},
    {"llama3:3B",   "llama",  28,  24,  8, 128,  3072,  8192, 128256, 131072, true,  1e-5f, 5e5, 32,   3'212'749'824},
    {"llama3:8B",   "llama",  32,  32,  8, 128,  4096, 14336, 128256, 131072, false, 1e-5f, 5e5,  8,   8'030'261'248},
    {"llama3:70B",  "llama",  80,  64,  8, 128,  8192, 28672, 128256, 131072, false, 1e-5f, 5e5,  8,  70'553'706'496},
    {"llama3:405B", "llama", 126, 128,  8, 128, 16384, 53248, 128256, 131072, false, 1e-5f, 5e5,  8, 405'853'388'800},
    // Qwen team 2024.
    {"qwen2.5:0.5B", "qwen2", 24, 14, 2,  64,  896,  4864, 151936,  32768, true,  1e-6f, 1e6, 0,    494'032'768},
    {"qwen2.5:1.5B", "qwen2", 28, 12, 2, 128, 1536,  8960, 151936, 131072, true,  1e-6f, 1e6, 0,  1'543'714'304},
    {"qwen2.5:3B",   "qwen2", 36, 16, 2, 128, 2048, 11008, 151936,  32768, true,  1e-6f, 1e6, 0,  3'085'938'688},
    {"qwen2.5:7B",   "qwen2", 28, 28, 4, 128, 3584, 18944, 152064, 131072, false, 1e-6f, 1e6, 0,  7'615'616'512},
    {"qwen2.5:14B",  "qwen2", 48, 40, 8, 128, 5120, 13824, 152064, 131072, false, 1e-5f, 1e6, 0, 14'770'033'664},
    {"qwen2.5:32B",  "qwen2", 64, 40, 8, 128, 5120, 27648, 152064, 131072, false, 1e-5f, 1e6, 0, 32'763'876'352},
    {"qwen2.5:72B",  "qwen2", 80, 64, 8, 128, 8192, 29568, 152064, 131072, false, 1e-5f, 1e6, 0, 72'706'203'648},
    // Qwen team 2025, the base models.
    {"qwen3:0.6B", "qwen3", 28, 16, 8, 128, 1024,  3072, 151936, 32768, true,  1e-6f, 1e6, 0,    596'049'920},
    {"qwen3:1.7B", "qwen3", 28, 16, 8, 128, 2048,  6144, 151936, 32768, true,  1e-6f, 1e6, 0,  1'720'574'976},
    {"qwen3:4B",   "qwen3", 36, 32, 8, 128, 2560,  9728, 151936, 32768, true,  1e-6f, 1e6, 0,  4'022'468'096},
    {"qwen3:8B",   "qwen3", 36, 32, 8, 128, 4096, 12288, 151936, 32768, false, 1e-6f, 1e6, 0,  8'190'735'360},
    {"qwen3:14B",  "qwen3", 40, 40, 8, 128, 5120, 17408, 151936, 32768, false, 1e-6f, 1e6, 0, 14'768'307'200},
    {"qwen3:32B",  "qwen3", 64, 64, 8, 128, 5120, 25600, 151936, 40960, false, 1e-6f, 1e6, 0, 32'762'123'264},
    {"qwen3:30B-A3B",   "qwen3_moe", 48, 32, 4, 128, 2048,  6144, 151936, 32768, false, 1e-6f, 1e6, 0,  30'532'122'624, {128, 8,  768, true, 0.001,  3'353'032'704}},
    {"qwen3:235B-A22B", "qwen3_moe", 94, 64, 4, 128, 4096, 12288, 151936, 40960, false, 1e-6f, 1e6, 0, 235'093'634'560, {128, 8, 1536, true, 0.001, 22'190'763'520}},
    // Ben Allal et al. 2025.
    {"smollm2:135M", "llama", 30,  9,  3, 64,  576, 1536, 49152, 8192, true, 1e-5f, 1e5,   0,   134'515'008},
    {"smollm2:360M", "llama", 32, 15,  5, 64,  960, 2560, 49152, 8192, true, 1e-5f, 1e5,   0,   361'821'120},
    {"smollm2:1.7B", "llama", 24, 32, 32, 64, 2048, 8192, 49152, 8192, true, 1e-5f, 1.3e5, 0, 1'711'376'384},
    // Jiang et al. 2024, v0.1; counts of the published weights.
    {"mixtral:8x7B",  "mixtral", 32, 32, 8, 128, 4096, 14336, 32000, 32768, false, 1e-5f, 1e6, 0,  46'702'792'704, {8, 2, 14336, true, 0.02,  12'879'925'248}},
    {"mixtral:8x22B", "mixtral", 56, 48, 8, 128, 6144, 16384, 32000, 65536, false, 1e-5f, 1e6, 0, 140'620'634'112, {8, 2, 16384, true, 0.001, 39'152'031'744}},
    // Muennighoff et al. 2024.
    {"olmoe:1B-7B", "olmoe", 16, 16, 16, 128, 2048, 1024, 50304, 4096, false, 1e-5f, 1e4, 0, 6'919'161'856, {64, 8, 1024, false, 0.01, 1'282'017'280}},
    // clang-format on
};

namespace detail {

// "7B" -> 7e9; none: not a size.
inline std::optional<double> size_from_text(const std::string& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string unit = plain_name(std::string(end, text.data() + text.size()));
  if (error != std::errc() || number <= 0 || (unit != "m" && unit != "b")) return std::nullopt;
  return number * (unit == "b" ? 1e9 : 1e6);
}

}  // namespace detail

// The possible meanings of a name that is not a preset: "the nearest is llama3:8B" for llama3:9B; the sizes of a
// family, if the name has none; or all presets.
inline std::string presets_like(const std::string& name) {
  const size_t colon = std::min(name.find_first_of(":-_"), name.size());
  const std::optional<double> size = detail::size_from_text(name.substr(std::min(colon + 1, name.size())));
  std::vector<std::string> groups;  // gpt2, gpt3, ...
  for (const Preset& p : presets) {
    const std::string group = std::string(p.name).substr(0, std::string(p.name).find(':'));
    if (groups.empty() || groups.back() != group) groups.push_back(group);
  }
  std::vector<std::string> near, all;
  const std::vector<std::string> meant = similar_names(name.substr(0, colon), groups);
  for (const std::string& group : groups) {
    const Preset* nearest = nullptr;
    for (const Preset& p : presets) {
      if (!std::string(p.name).starts_with(group + ":")) continue;
      all.emplace_back(p.name);
      if (std::find(meant.begin(), meant.end(), group) == meant.end()) continue;
      auto distance = [&](const Preset& q) { return std::abs(std::log(q.parameters / *size)); };
      if (!size) near.emplace_back(p.name);
      else if (nearest == nullptr || distance(p) < distance(*nearest)) nearest = &p;
    }
    if (nearest != nullptr) near.emplace_back(nearest->name);
  }
  if (!near.empty()) return (size ? "the nearest is " : "its sizes are ") + either(near);
  return formatted("{}, d<N> such as d12, d<N>-e<E> such as d12-e8", all);
}

inline ModelConfig config_of(const Preset& p) {
  ModelConfig c;
  c.family = *find_family(p.family);
  c.n_layer = p.n_layer;
  c.n_head = p.n_head;
  c.n_kv_head = p.n_kv_head;
  c.head_size = p.head_size;
  c.n_embd = p.n_embd;
  c.n_ffn = p.n_ffn;
  c.vocab_size = p.vocab_size;
  c.n_positions = p.n_positions;
  c.tied = p.tied;
  c.norm_eps = p.norm_eps;
  if (p.theta > 0) c.rotary.theta = p.theta;
  c.experts = {.count = p.experts.count,
               .per_token = p.experts.per_token,
               .width = p.experts.width,
               .normalised = p.experts.normalised,
               .aux_loss = p.experts.aux_loss};
  c.rotary.scaled = p.rotary_factor > 0;
  if (c.rotary.scaled) c.rotary.scaling.factor = p.rotary_factor;
  return c;
}

namespace detail {

// "12" -> 12; -1: not a number of up to three digits.
inline int64_t dial_number(const std::string& digits) {
  const bool number = !digits.empty() && digits.size() <= 3 && digits.find_first_not_of("0123456789") == digits.npos;
  return number ? std::stoll(digits) : -1;
}

}  // namespace detail

// A published shape, or "d<N>": GPT-2 with N layers, N heads, C = 64 N; or "d<N>-e<E>": Mixtral with the same sizes and
// E experts, two for each token. The experts' width F gives a token as many multiplications as in d<N>: 3 matrices of
// C F for 2 experts instead of 2 matrices of 4 C C. None: not a preset (perhaps a directory).
inline std::optional<ModelConfig> model_preset(const std::string& name) {
  for (const Preset& p : presets)
    if (name == p.name) return config_of(p);
  if (!name.starts_with("d")) return std::nullopt;
  const size_t dash = std::min(name.find("-e"), name.size());
  const bool sparse = dash < name.size();
  const int64_t depth = detail::dial_number(name.substr(1, dash - 1)),
                experts = sparse ? detail::dial_number(name.substr(dash + 2)) : 0;
  if (depth < 0 || experts < 0) return std::nullopt;
  CHECK(depth > 0, "--model {}: the depth must be at least 1", name);
  ModelConfig c;
  c.n_layer = c.n_head = c.n_kv_head = depth;
  c.n_embd = 64 * depth;
  c.n_ffn = 4 * c.n_embd;
  if (!sparse) return c;
  CHECK(experts >= 2, "--model {}: each token goes to two experts: there must be at least 2", name);
  c.family = *find_family("mixtral");
  c.n_ffn = 4 * c.n_embd / 3 / 8 * 8;
  c.experts = {.count = experts, .per_token = 2, .width = c.n_ffn, .normalised = true, .aux_loss = 0.01};
  return c;
}

// Overrides of single numbers, from --n-layer and similar options.
struct ModelOverrides {
  std::optional<int64_t> n_layer, n_head, n_kv_head, n_embd, n_ffn, vocab_size;
};

namespace detail {

// Whether the name looks like a repository on a hub, OWNER/NAME, and OWNER is not a directory here.
inline bool may_be_on_a_hub(const std::string& name) {
  constexpr auto allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/";
  const size_t slash = name.find('/');
  std::error_code none;
  return slash != 0 && slash != std::string::npos && slash + 1 < name.size() &&
         name.find('/', slash + 1) == std::string::npos && name.find_first_not_of(allowed) == std::string::npos &&
         name[0] != '.' && !std::filesystem::exists(name.substr(0, slash), none);
}

// Says what is wrong with a --model that is neither a preset nor a directory with a config.json.
inline std::string why_no_model(const std::string& model) {
  if (is_directory(model)) {
    const std::vector<std::string> names = names_in(model);
    for (const std::string& name : names | std::views::reverse)  // the newest checkpoint has the last name
      if (const std::string inside = model + "/" + name; is_directory(inside) && path_exists(inside + "/config.json"))
        return "this directory has no config.json; did you mean " + inside + "?";
    return "this directory has no config.json: it is not a model";
  }
  if (may_be_on_a_hub(model)) {
    const std::string directory = model.substr(model.find('/') + 1);
    return formatted(
        "no such directory; if this is a repository of huggingface.co, download it first: `hf download {} "
        "--local-dir {}` (pip install huggingface_hub), then --model {}",
        model, directory, directory);
  }
  if (model.find('/') != std::string::npos) return "no such directory";
  if (model.ends_with(".bin"))
    return "llm.c's checkpoints are not read: give the Hugging Face directory of the same weights, such as that of `hf "
           "download openai-community/gpt2 --local-dir gpt2`";
  return formatted("neither a preset ({}) nor a directory with a config.json", presets_like(model));
}

}  // namespace detail

// Throws if `model` is a preset, or looks like the name of one: `option`, such as "--generate", needs weights.
inline void require_trained_model(const char* option, const std::string& model) {
  const bool is_word = model.find('/') == std::string::npos && !model.ends_with(".bin") && !is_directory(model);
  CHECK(!model_preset(model) && !is_word,
        "{} needs a trained model: --model {} is {}; name a checkpoint's directory, such as out/step-001000", option,
        model, model_preset(model) ? "a preset" : "no directory");
}

// The model of a preset or of a directory with config.json, with the overrides. Sizes that are not given scale with
// those that are: the feed-forward widths with the channels, rounded down; key-value heads with the heads, if that is a
// whole number; the heads divide the channels.
inline ModelConfig resolve_model(const std::string& model, const ModelOverrides& o) {
  const std::optional<ModelConfig> preset = model_preset(model);
  ModelConfig c;
  if (preset) {
    c = *preset;
  } else {
    const std::string file = model + "/config.json";
    CHECK(path_exists(file), "--model {}: {}", model, detail::why_no_model(model));
    c = config_from_hf(read_json(file), file);
  }
  if (o.n_layer) c.n_layer = *o.n_layer;
  if (o.n_head && *o.n_head * c.n_kv_head % c.n_head == 0) c.n_kv_head = *o.n_head * c.n_kv_head / c.n_head;
  if (o.n_kv_head) c.n_kv_head = *o.n_kv_head;
  if (o.n_head) c.n_head = *o.n_head;
  if (o.n_embd) {
    for (int64_t* width : {&c.n_ffn, &c.experts.width, &c.experts.shared})
      if (*width > 0) *width = std::max<int64_t>(1, *width * *o.n_embd / c.n_embd);
    c.n_embd = *o.n_embd;
  }
  if (o.n_ffn) c.n_ffn = *o.n_ffn;
  if (o.n_ffn && c.family.experts == ExpertFields::one_width) c.experts.width = c.n_ffn;
  if (o.vocab_size) c.vocab_size = *o.vocab_size;
  if ((o.n_head || o.n_embd) && !c.family.own_head_size) {
    CHECK(c.n_embd % c.n_head == 0, "--n-head {} does not divide --n-embd {}: use one of {}", c.n_head, c.n_embd,
          divisors(c.n_embd));
    c.head_size = c.n_embd / c.n_head;
  }
  try {
    validate_model(c);
  } catch (const Error& error) {
    throw preset ? error : Error(formatted("--model {}: {}", model, error.what()));
  }
  return c;
}

}  // namespace llmc
