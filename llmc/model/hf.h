// hf.h: Hugging Face's names and layouts of the parameters, both ways. transformers' GPT-2 fuses q, k and v and stores
// matrices as (in, out), for its Conv1D; ours, like those of the other families, are (out, in), with q, k and v
// separate.
#pragma once
#include <iterator>

#include "core/safetensors.h"
#include "device/host_copy.h"
#include "model/hf_config.h"
#include "shard/zero.h"

namespace llmc {

// A Hugging Face tensor: canonical parameters, concatenated along the output axis.
struct HfTensor {
  std::string name;
  std::vector<int64_t> shape;  // as stored
  bool transposed;             // stored (in, out)
  std::vector<std::string> parts;
};

// How the experts of a layer are stored. separate: a tensor for each matrix of each expert, which every version of
// transformers reads and we write; fused: as in version 5's memory, one tensor of all gates and ups and one of all
// downs.
enum class ExpertTensors : uint8_t { separate, fused };

namespace detail {

inline std::vector<HfTensor> gpt2_tensors(const ModelConfig& c) {
  const int64_t C = c.n_embd, F = c.n_ffn;
  std::vector<HfTensor> all = {{"transformer.wte.weight", {c.vocab_size, C}, false, {"wte.weight"}},
                               {"transformer.wpe.weight", {c.n_positions, C}, false, {"wpe.weight"}}};
  for (int64_t l = 0; l < c.n_layer; ++l) {
    const std::string hf = formatted("transformer.h.{}", l), ours = formatted("blocks.{}", l);
    auto vector = [&](const char* name, int64_t n, std::vector<std::string> parts) {
      for (std::string& part : parts) part = ours + part;
      all.push_back({hf + name, {n}, false, parts});
    };
    auto matrix = [&](const char* name, int64_t in, int64_t out, std::vector<std::string> parts) {
      for (std::string& part : parts) part = ours + part;
      all.push_back({hf + name, {in, out}, true, parts});
    };
    vector(".ln_1.weight", C, {".ln1.weight"});
    vector(".ln_1.bias", C, {".ln1.bias"});
    matrix(".attn.c_attn.weight", C, 3 * C, {".attn.q.weight", ".attn.k.weight", ".attn.v.weight"});
    vector(".attn.c_attn.bias", 3 * C, {".attn.q.bias", ".attn.k.bias", ".attn.v.bias"});
    matrix(".attn.c_proj.weight", C, C, {".attn.proj.weight"});
    vector(".attn.c_proj.bias", C, {".attn.proj.bias"});
    vector(".ln_2.weight", C, {".ln2.weight"});
    vector(".ln_2.bias", C, {".ln2.bias"});
    matrix(".mlp.c_fc.weight", C, F, {".mlp.up.weight"});
    vector(".mlp.c_fc.bias", F, {".mlp.up.bias"});
    matrix(".mlp.c_proj.weight", F, C, {".mlp.down.weight"});
    vector(".mlp.c_proj.bias", C, {".mlp.down.bias"});
  }
  all.push_back({"transformer.ln_f.weight", {C}, false, {"ln_f.weight"}});
  all.push_back({"transformer.ln_f.bias", {C}, false, {"ln_f.bias"}});
  if (!c.tied) all.push_back({"lm_head.weight", {c.vocab_size, C}, false, {"lm_head.weight"}});
  return all;
}

// The names in all families but GPT-2: one tensor per parameter. mixtral: with Mixtral's own names for routers and
// experts, which it uses only with separate tensors.
inline std::string llama_name(const std::string& ours, bool mixtral) {
  static constexpr std::pair<const char*, const char*> names[] = {
      {"wte.weight", "model.embed_tokens.weight"},
      {"ln_f.weight", "model.norm.weight"},
      {"lm_head.weight", "lm_head.weight"},
      {"ln1.weight", "input_layernorm.weight"},
      {"attn.q.weight", "self_attn.q_proj.weight"},
      {"attn.k.weight", "self_attn.k_proj.weight"},
      {"attn.v.weight", "self_attn.v_proj.weight"},
      {"attn.q.bias", "self_attn.q_proj.bias"},
      {"attn.k.bias", "self_attn.k_proj.bias"},
      {"attn.v.bias", "self_attn.v_proj.bias"},
      {"attn.q_norm.weight", "self_attn.q_norm.weight"},
      {"attn.k_norm.weight", "self_attn.k_norm.weight"},
      {"attn.proj.weight", "self_attn.o_proj.weight"},
      {"ln2.weight", "post_attention_layernorm.weight"},
      {"mlp.gate.weight", "mlp.gate_proj.weight"},
      {"mlp.up.weight", "mlp.up_proj.weight"},
      {"mlp.down.weight", "mlp.down_proj.weight"},
      {"moe.shared.gate.weight", "mlp.shared_expert.gate_proj.weight"},
      {"moe.shared.up.weight", "mlp.shared_expert.up_proj.weight"},
      {"moe.shared.down.weight", "mlp.shared_expert.down_proj.weight"},
      {"moe.shared_gate.weight", "mlp.shared_expert_gate.weight"},
  };
  static constexpr std::pair<const char*, std::array<const char*, 2>> of_experts[] = {
      // the second name: Mixtral's
      {"gate.weight", {"gate_proj.weight", "w1.weight"}},
      {"up.weight", {"up_proj.weight", "w3.weight"}},
      {"down.weight", {"down_proj.weight", "w2.weight"}},
  };
  constexpr std::string_view blocks = "blocks.";
  std::string prefix, suffix = ours;
  if (ours.starts_with(blocks)) {
    const size_t dot = ours.find('.', blocks.size());
    prefix = "model.layers." + ours.substr(blocks.size(), dot + 1 - blocks.size());
    suffix = ours.substr(dot + 1);
  }
  for (const auto& [from, to] : names)
    if (suffix == from) return prefix + to;
  const std::string module = prefix + (mixtral ? "block_sparse_moe." : "mlp.");
  if (suffix == "moe.router.weight") return module + "gate.weight";
  if (const std::string_view experts = "experts."; suffix.starts_with(experts)) {
    const size_t dot = suffix.find('.', experts.size());
    for (const auto& [from, to] : of_experts)
      if (suffix.substr(dot + 1) == from) return module + suffix.substr(0, dot + 1) + to[mixtral ? 1 : 0];
  }
  throw Error(formatted("parameter {} has no name in transformers' models of this family", ours));
}

inline std::vector<HfTensor> llama_tensors(const ModelConfig& c, ExpertTensors layout) {
  const bool fused = layout == ExpertTensors::fused;
  const bool mixtral = !fused && c.family.model_type == std::string_view("mixtral");
  std::vector<HfTensor> all;
  for (const UnitSpec& unit : parameter_table(c)) {
    if (fused && unit.sharing == Sharing::experts) {
      const int64_t E = c.experts.count, F = c.experts.width, C = c.n_embd;
      const std::string first = llama_name(unit.params[0].name, false);
      const std::string experts = first.substr(0, first.rfind(".0."));
      HfTensor gate_up{experts + ".gate_up_proj", {E, 2 * F, C}, false, {}},
          down{experts + ".down_proj", {E, C, F}, false, {}};
      for (const ParamSpec& p : unit.params)
        (p.name.ends_with(".down.weight") ? down : gate_up).parts.push_back(p.name);
      all.insert(all.end(), {gate_up, down});
      continue;
    }
    for (const ParamSpec& p : unit.params) {
      std::vector<int64_t> shape;
      for (int64_t d : p.shape) shape.push_back(d);
      all.push_back({llama_name(p.name, mixtral), shape, false, {p.name}});
    }
  }
  return all;
}

}  // namespace detail

// All tensors of a model, in the order of the forward pass. A tied head is not stored.
inline std::vector<HfTensor> hf_tensors(const ModelConfig& c, ExpertTensors layout = ExpertTensors::separate) {
  return c.family.positions == Positions::learned ? detail::gpt2_tensors(c) : detail::llama_tensors(c, layout);
}

// The same, with experts stored as in these files.
inline std::vector<HfTensor> hf_tensors(const ModelConfig& c, const SafetensorsFiles& files) {
  for (const auto& file : files)
    for (const std::string& name : file->names())
      if (name.ends_with(".experts.gate_up_proj")) return hf_tensors(c, ExpertTensors::fused);
  return hf_tensors(c);
}

namespace detail {

// Where the elements of a part's row are in the Hugging Face tensor: at `begin` and then every `step`.
struct HfRow {
  int64_t begin, step;
};
// The row from element `index` of the part on. The parts of a tensor have equal sizes: GPT-2 has as many key-value
// heads as query heads.
inline HfRow hf_row(const HfTensor& hf, size_t part, int64_t index) {
  const int64_t parts = std::ssize(hf.parts), before = static_cast<int64_t>(part);
  if (!hf.transposed) return {TensorInfo{"", DType::fp32, hf.shape}.numel() / parts * before + index, 1};
  const int64_t in = hf.shape[0], out = hf.shape[1];
  return {index % in * out + out / parts * before + index / in, out};
}

// Calls f(number of the part, entry) for each entry of these kinds that belongs to a part of the tensor.
template <class F>
void for_each_part(const HfTensor& hf, const StateTable& table, std::initializer_list<StateKind> kinds, F&& f) {
  for (size_t part = 0; part < hf.parts.size(); ++part)
    for (const StateEntry& e : table)
      if (e.param->name == hf.parts[part] && std::find(kinds.begin(), kinds.end(), e.kind) != kinds.end()) f(part, e);
}

// Calls f(i, at, step, n) for runs of a part's elements: element i of the entry is at `at` in the Hugging Face tensor,
// and the n - 1 after it every `step`. Where rows become columns the runs are short, and those of all rows come one
// after the other, so that neighbours in the columns are together in the cache. Several threads then call f, each for
// columns of its own.
template <class F>
void for_each_run(const HfTensor& hf, size_t part, const StateEntry& e, F&& f) {
  constexpr int64_t tile = 32;
  struct Row {
    int64_t i, n;
    HfRow place;
  };
  std::vector<Row> rows;
  int64_t longest = 0;
  e.for_each_row([&](int64_t i, int64_t index, int64_t n) {
    rows.push_back({i, n, hf_row(hf, part, index)});
    longest = std::max(longest, n);
  });
  const int64_t most = hf.transposed ? tile : std::max<int64_t>(longest, 1);  // OpenMP divides by it
#pragma omp parallel for schedule(static) if (hf.transposed)
  for (int64_t k = 0; k < longest; k += most)
    for (const Row& row : rows)
      if (k < row.n) f(row.i + k, row.place.begin + k * row.place.step, row.place.step, std::min(most, row.n - k));
}

}  // namespace detail

// A Hugging Face tensor, from boxes in host memory that together are its parts; `weights` may also have boxes of other
// tensors. Where it lies there as it is stored, the result is that; else it is put together in `room`, whose memory is
// used again.
inline const std::byte* gather_hf(std::vector<std::byte>& room, const HfTensor& hf, const StateTable& weights) {
  const int64_t elements = TensorInfo{"", DType::fp32, hf.shape}.numel();
  int64_t gathered = 0;
  const std::byte* whole = nullptr;
  detail::for_each_part(hf, weights, {StateKind::weight}, [&](size_t part, const StateEntry& e) {
    gathered += e.tensor.numel();
    if (!hf.transposed && e.tensor.numel() == elements) {
      whole = e.tensor.bytes;
      return;
    }
    room.resize(static_cast<size_t>(TensorInfo{"", e.tensor.dtype, hf.shape}.bytes()));
    with_type(e.tensor.dtype, [&]<class T>(type_tag<T>) {
      const T* from = e.tensor.data<T>();
      T* to = reinterpret_cast<T*>(room.data());
      detail::for_each_run(hf, part, e, [&](int64_t i, int64_t at, int64_t step, int64_t n) {
        if (step == 1) std::copy_n(from + i, n, to + at);
        else
          for (int64_t k = 0; k < n; ++k) to[at + k * step] = from[i + k];
      });
    });
  });
  CHECK(gathered == elements, "{}: its parts have {} elements, expected {}", hf.name, gathered, elements);
  return whole != nullptr ? whole : room.data();
}

// Where a tensor of the model is stored.
struct HfPlace {
  const SafetensorsReader* file;
  std::string name;  // with or without "transformer." or "model."
};

// The place of each tensor of the model. Checks everything, reads no data.
inline std::vector<HfPlace> match_hf_names(const SafetensorsFiles& files, const std::vector<HfTensor>& tensors) {
  std::vector<HfPlace> places;
  std::set<std::string> known;
  for (const HfTensor& hf : tensors) {
    const bool prefixed = hf.name.starts_with("transformer.") || hf.name.starts_with("model.");
    const std::string bare = prefixed ? hf.name.substr(hf.name.find('.') + 1) : hf.name;
    HfPlace place{nullptr, ""};
    for (const auto& file : files)
      for (const std::string& name : {hf.name, bare})
        if (place.file == nullptr && file->has(name)) place = {file.get(), name};
    CHECK(place.file != nullptr, "{}: has no tensor {} (nor {}); config.json describes another model", files[0]->path(),
          hf.name, bare);
    const TensorInfo& info = place.file->info(place.name);
    CHECK(info.shape == hf.shape, "{}: tensor {} has shape ({}), but config.json and the options say ({})",
          place.file->path(), place.name, shown(formatted("{}", info.shape)), hf.shape);
    CHECK(info.dtype == DType::fp32 || info.dtype == DType::bf16 || info.dtype == DType::fp16,
          "{}: tensor {} is {}, expected fp32, bf16 or fp16", place.file->path(), place.name, info.dtype);
    known.insert(place.name);
    places.push_back(place);
  }
  for (const auto& file : files)
    for (const std::string& name : file->names()) {
      const bool buffer = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
                          name.ends_with("rotary_emb.inv_freq") || name == "lm_head.weight";
      CHECK(buffer || known.count(name) > 0, "{}: tensor {} is not part of the model that config.json describes",
            file->path(), shown(name));
    }
  return places;
}

// A tied model's file may also hold its head, which must then equal the embedding (at `embedding`).
inline void require_same_head(const SafetensorsFiles& files, const HfPlace& embedding) {
  for (const auto& file : files) {
    if (!file->has("lm_head.weight")) continue;
    auto contents = [](const SafetensorsReader& from, const std::string& name) {
      std::vector<std::byte> bytes(static_cast<size_t>(from.info(name).bytes()));
      from.read(name, bytes.data());
      return bytes;
    };
    CHECK(
        contents(*file, "lm_head.weight") == contents(*embedding.file, embedding.name),
        "{}: lm_head.weight differs from {}, but config.json ties them: set \"tie_word_embeddings\" to false there, or "
        "remove lm_head.weight",
        file->path(), embedding.name);
  }
}

// Sets this rank's slices of the parts, weights and master weights, from the Hugging Face tensor `name` of the file,
// each rounded to its own dtype. Reads only from the first to the last element that the rank has.
inline void scatter_hf(const HfTensor& hf, const SafetensorsReader& file, const std::string& name,
                       const StateTable& table, Stream& stream) {
  const TensorInfo& info = file.info(name);
  const auto kinds = {StateKind::weight, StateKind::master};
  int64_t begin = info.numel(), end = 0;
  detail::for_each_part(hf, table, kinds, [&](size_t part, const StateEntry& e) {
    e.for_each_row([&](int64_t, int64_t index, int64_t n) {
      const detail::HfRow row = detail::hf_row(hf, part, index);
      begin = std::min(begin, row.begin);
      end = std::max(end, row.begin + (n - 1) * row.step + 1);
    });
  });
  if (begin >= end) return;
  std::vector<std::byte> stored(static_cast<size_t>((end - begin) * size_of(info.dtype)));
  file.read(name, stored.data(), begin, end - begin);
  detail::for_each_part(hf, table, kinds, [&](size_t part, const StateEntry& e) {
    auto copy = [&]<class From, class To>(To* to, type_tag<From>) {
      const From* from = reinterpret_cast<const From*>(stored.data());
      detail::for_each_run(hf, part, e, [&](int64_t i, int64_t at, int64_t step, int64_t n) {
        for (int64_t k = 0; k < n; ++k) to[i + k] = To(static_cast<float>(from[at - begin + k * step]));
      });
    };
    write_state(e, stream, [&](const Tensor& host) {
      with_type(host.dtype, [&]<class To>(type_tag<To>) {
        if (info.dtype == DType::fp32) copy(host.data<To>(), type_tag<float>{});
        if (info.dtype == DType::bf16) copy(host.data<To>(), type_tag<bf16>{});
        if (info.dtype == DType::fp16) copy(host.data<To>(), type_tag<fp16>{});
      });
      CHECK(all_finite(host),
            "{}: tensor {} contains a number that is not finite, or too large for {}: use other weights", file.path(),
            name, host.dtype);
    });
  });
}

}  // namespace llmc
