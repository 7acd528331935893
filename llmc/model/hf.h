// hf.h: Hugging Face names and layouts of the parameters, both ways. transformers' GPT-2 keeps q, k and v as one matrix
// and stores matrices (in, out) (its Conv1D); ours are (out, in), q, k and v by themselves.
#pragma once
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/safetensors.h"
#include "dist/zero.h"
#include "model/config.h"

namespace llmc {

// A Hugging Face tensor made of canonical parameters, one under the other along the output axis.
struct HfTensor {
  std::string name;
  std::vector<int64_t> shape;  // as stored
  bool transposed;             // stored (in, out)
  std::vector<std::string> parts;
};

// All tensors of a GPT-2, in the order of the forward pass. A tied head is not stored.
inline std::vector<HfTensor> hf_tensors(const ModelConfig& c) {
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

namespace detail {

// Where element `e` of a part's flat contents stands in the Hugging Face tensor; `row`: the part's first output.
inline int64_t hf_index(const HfTensor& hf, int64_t row, int64_t e) {
  if (!hf.transposed) return row + e;
  const int64_t in = hf.shape[0], out = hf.shape[1];
  return e % in * out + row + e / in;
}
// How many outputs a part has.
inline int64_t hf_rows(const HfTensor& hf, int64_t part_elements) {
  return hf.transposed ? part_elements / hf.shape[0] : part_elements;
}

}  // namespace detail

// The bytes of one Hugging Face tensor, in the dtype of the parts, which are whole and flat.
inline std::vector<std::byte> gather_hf(const HfTensor& hf, const std::map<std::string, Tensor>& parts) {
  const int64_t width = size_of(parts.at(hf.parts[0]).dtype);
  std::vector<std::byte> bytes(static_cast<size_t>(TensorInfo{"", DType::fp32, hf.shape}.numel() * width));
  int64_t row = 0;
  for (const std::string& part : hf.parts) {
    const Tensor& t = parts.at(part);
    if (!hf.transposed) std::memcpy(bytes.data() + row * width, t.bytes, static_cast<size_t>(t.size_bytes()));
    else
      for (int64_t e = 0; e < t.numel(); ++e)
        std::memcpy(bytes.data() + detail::hf_index(hf, row, e) * width, t.bytes + e * width,
                    static_cast<size_t>(width));
    row += detail::hf_rows(hf, t.numel());
  }
  return bytes;
}

// Where a tensor of the model is stored.
struct HfPlace {
  const SafetensorsReader* file;
  std::string name;  // with or without "transformer."
};

// For each tensor of the model; everything is checked, nothing read.
inline std::vector<HfPlace> match_hf_names(const std::vector<std::unique_ptr<SafetensorsReader>>& files,
                                           const std::vector<HfTensor>& tensors) {
  constexpr std::string_view prefix = "transformer.";
  std::vector<HfPlace> places;
  std::set<std::string> known;
  for (const HfTensor& hf : tensors) {
    const std::string bare = hf.name.starts_with(prefix) ? hf.name.substr(prefix.size()) : hf.name;
    HfPlace place{nullptr, ""};
    for (const auto& file : files)
      for (const std::string& name : {hf.name, bare})
        if (place.file == nullptr && file->has(name)) place = {file.get(), name};
    CHECK(place.file != nullptr, "{}: has no tensor {} (nor {}); config.json describes another model", files[0]->path(),
          hf.name, bare);
    const TensorInfo& info = place.file->info(place.name);
    CHECK(info.shape == hf.shape, "{}: tensor {} has the shape ({}), config.json and the options say ({})",
          place.file->path(), place.name, info.shape, hf.shape);
    CHECK(info.dtype == DType::fp32 || info.dtype == DType::bf16 || info.dtype == DType::fp16,
          "{}: tensor {} is {}, supported are fp32, bf16 and fp16", place.file->path(), place.name, info.dtype);
    known.insert(place.name);
    places.push_back(place);
  }
  for (const auto& file : files)
    for (const std::string& name : file->names()) {
      const bool buffer =
          name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") || name == "lm_head.weight";
      CHECK(buffer || known.count(name) > 0, "{}: tensor {} is not part of the model that config.json describes",
            file->path(), name);
    }
  return places;
}

// What this rank holds of the parts, weights and masters = the Hugging Face tensor `name` of the file, each rounded to
// its own dtype.
inline void scatter_hf(const HfTensor& hf, const SafetensorsReader& file, const std::string& name,
                       const StateTable& table, const std::map<std::string, int64_t>& elements) {
  const TensorInfo& info = file.info(name);
  std::vector<std::byte> stored;
  int64_t row = 0;
  for (const std::string& part : hf.parts) {
    for (const StateEntry& e : table) {
      if (e.param->name != part || (e.kind != StateKind::weight && e.kind != StateKind::master)) continue;
      if (stored.empty()) {
        stored.resize(static_cast<size_t>(info.bytes()));
        file.read(name, stored.data());
      }
      auto copy = [&]<class From, class To>(type_tag<From>, type_tag<To>) {
        for (int64_t i = 0; i < e.tensor.numel(); ++i) {
          From value;
          std::memcpy(&value,
                      stored.data() + detail::hf_index(hf, row, e.begin + i) * static_cast<int64_t>(sizeof(From)),
                      sizeof(From));
          e.tensor.data<To>()[i] = To(static_cast<float>(value));
        }
      };
      with_type(e.tensor.dtype, [&](auto to) {
        if (info.dtype == DType::fp32) copy(type_tag<float>{}, to);
        if (info.dtype == DType::bf16) copy(type_tag<bf16>{}, to);
        if (info.dtype == DType::fp16) copy(type_tag<fp16>{}, to);
      });
    }
    row += detail::hf_rows(hf, elements.at(part));
  }
}

}  // namespace llmc
