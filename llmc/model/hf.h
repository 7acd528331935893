// hf.h: Hugging Face's names and layouts of the parameters, both ways. transformers' GPT-2 fuses q, k and v and stores
// matrices as (in, out), for its Conv1D; ours, like those of other families, are (out, in), with q, k and v separate.
#pragma once
#include "core/safetensors.h"
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

// How experts are stored. separate: a tensor for each matrix of each expert, which every version of transformers reads
// and we write; fused: as in version 5's memory, one tensor of all gates and ups and one of all downs.
enum class ExpertTensors : uint8_t { separate, fused };

namespace detail {

// The names in transformers, within a layer or the model: in GPT-2, which fuses q, k and v, and in all other families.
struct HfName {
  const char *ours, *gpt2, *llama;
};
inline constexpr HfName hf_names[] = {
    // clang-format off
    {"wte.weight",             "wte.weight",         "embed_tokens.weight"},
    {"wpe.weight",             "wpe.weight",         nullptr},
    {"ln_f.weight",            "ln_f.weight",        "norm.weight"},
    {"ln_f.bias",              "ln_f.bias",          nullptr},
    {"ln1.weight",             "ln_1.weight",        "input_layernorm.weight"},
    {"ln1.bias",               "ln_1.bias",          nullptr},
    {"attn.q.weight",          "attn.c_attn.weight", "self_attn.q_proj.weight"},
    {"attn.k.weight",          "attn.c_attn.weight", "self_attn.k_proj.weight"},
    {"attn.v.weight",          "attn.c_attn.weight", "self_attn.v_proj.weight"},
    {"attn.q.bias",            "attn.c_attn.bias",   "self_attn.q_proj.bias"},
    {"attn.k.bias",            "attn.c_attn.bias",   "self_attn.k_proj.bias"},
    {"attn.v.bias",            "attn.c_attn.bias",   "self_attn.v_proj.bias"},
    {"attn.q_norm.weight",     nullptr,              "self_attn.q_norm.weight"},
    {"attn.k_norm.weight",     nullptr,              "self_attn.k_norm.weight"},
    {"attn.proj.weight",       "attn.c_proj.weight", "self_attn.o_proj.weight"},
    {"attn.proj.bias",         "attn.c_proj.bias",   nullptr},
    {"ln2.weight",             "ln_2.weight",        "post_attention_layernorm.weight"},
    {"ln2.bias",               "ln_2.bias",          nullptr},
    {"mlp.gate.weight",        nullptr,              "mlp.gate_proj.weight"},
    {"mlp.up.weight",          "mlp.c_fc.weight",    "mlp.up_proj.weight"},
    {"mlp.up.bias",            "mlp.c_fc.bias",      nullptr},
    {"mlp.down.weight",        "mlp.c_proj.weight",  "mlp.down_proj.weight"},
    {"mlp.down.bias",          "mlp.c_proj.bias",    nullptr},
    {"moe.shared.gate.weight", nullptr,              "mlp.shared_expert.gate_proj.weight"},
    {"moe.shared.up.weight",   nullptr,              "mlp.shared_expert.up_proj.weight"},
    {"moe.shared.down.weight", nullptr,              "mlp.shared_expert.down_proj.weight"},
    {"moe.shared_gate.weight", nullptr,              "mlp.shared_expert_gate.weight"},
    // clang-format on
};

// The matrices of an expert: in all families but Mixtral, in Mixtral, and where those of all experts are one tensor.
struct HfExpertName {
  const char *ours, *separate, *mixtral, *fused;
};
inline constexpr HfExpertName hf_expert_names[] = {
    {"gate.weight", "gate_proj.weight", "w1.weight", "gate_up_proj"},
    {"up.weight", "up_proj.weight", "w3.weight", "gate_up_proj"},
    {"down.weight", "down_proj.weight", "w2.weight", "down_proj"},
};

inline bool is_gpt2(const ModelConfig& c) { return c.family.positions == Positions::learned; }

// The name of the tensor that a parameter is or is part of. Mixtral has names of its own, for separate tensors alone.
inline std::string hf_name(const std::string& ours, const ModelConfig& c, ExpertTensors layout) {
  if (ours == "lm_head.weight") return ours;
  const bool fused = layout == ExpertTensors::fused;
  const bool mixtral = !fused && c.family.model_type == std::string_view("mixtral");
  std::string prefix = is_gpt2(c) ? "transformer." : "model.", suffix = ours;
  if (const std::string_view blocks = "blocks"; ours.starts_with(blocks)) {  // "blocks.3.ln1.weight"
    const size_t end = ours.find('.', blocks.size() + 1) + 1;
    prefix += (is_gpt2(c) ? "h" : "layers") + ours.substr(blocks.size(), end - blocks.size());
    suffix = ours.substr(end);
  }
  for (const HfName& name : hf_names)
    if (const char* theirs = is_gpt2(c) ? name.gpt2 : name.llama; suffix == name.ours && theirs != nullptr)
      return prefix + theirs;
  const std::string module = prefix + (mixtral ? "block_sparse_moe." : "mlp.");
  if (suffix == "moe.router.weight") return module + "gate.weight";
  if (const std::string_view experts = "experts."; suffix.starts_with(experts)) {  // "experts.7.gate.weight"
    const size_t end = suffix.find('.', experts.size()) + 1;
    for (const HfExpertName& name : hf_expert_names)
      if (suffix.substr(end) == name.ours)
        return module + (fused ? "experts." + std::string(name.fused)
                               : suffix.substr(0, end) + (mixtral ? name.mixtral : name.separate));
  }
  throw Error(formatted("parameter {} has no name in transformers' models of this family", ours));
}

}  // namespace detail

// All tensors of a model, in the order of the forward pass. A tied head is not stored.
inline std::vector<HfTensor> hf_tensors(const ModelConfig& c, ExpertTensors layout = ExpertTensors::separate) {
  std::vector<HfTensor> all;
  for (const UnitSpec& unit : parameter_table(c))
    for (const ParamSpec& p : unit.params) {
      const std::string name = detail::hf_name(p.name, c, layout);
      const bool of_experts = unit.sharing == Sharing::experts && layout == ExpertTensors::fused;
      if (!all.empty() && all.back().name == name) {
        all.back().parts.push_back(p.name);
        if (!of_experts) all.back().shape.back() += p.shape[0];  // the outputs of q, k and v
        continue;
      }
      HfTensor tensor{name, {p.shape.begin(), p.shape.end()}, false, {p.name}};
      tensor.transposed = detail::is_gpt2(c) && p.shape.rank() == 2 && p.name.starts_with("blocks.");
      if (tensor.transposed) std::swap(tensor.shape[0], tensor.shape[1]);
      if (of_experts)
        tensor.shape = {c.experts.count, p.shape[0] * (name.ends_with("gate_up_proj") ? 2 : 1), p.shape[1]};
      all.push_back(tensor);
    }
  return all;
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
// The row from element `index` of the part on. Parts have equal sizes: GPT-2 has as many key-value as query heads.
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
    CHECK(place.file != nullptr, "{}: has no tensor {} (nor {}); config.json and the options describe another model",
          files[0]->path(), hf.name, bare);
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
