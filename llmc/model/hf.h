// hf.h: Hugging Face names and layouts of the parameters, both ways. transformers' GPT-2 keeps q, k and v as one matrix
// and stores matrices (in, out) (its Conv1D); ours are (out, in), q, k and v by themselves.
#pragma once
#include <cstring>
#include <map>
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

// All tensors of a GPT-2, in the order of the forward pass. The head is tied and not stored.
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
  return all;
}

// The whole tensors of one kind, by canonical name.
inline std::map<std::string, Tensor> tensors_of_kind(const StateTable& table, StateKind kind) {
  std::map<std::string, Tensor> found;
  for (const StateEntry& e : table)
    if (e.kind == kind) {
      CHECK(e.begin == 0 && e.tensor.numel() == e.param->numel());
      found.emplace(e.param->name, e.tensor);
    }
  return found;
}

namespace detail {

// Calls f(flat index in the Hugging Face tensor, bytes of the canonical element) for all elements.
template <class F>
void for_each_element(const HfTensor& hf, const std::map<std::string, Tensor>& parts, F&& f) {
  int64_t out_begin = 0;
  for (const std::string& part : hf.parts) {
    const Tensor& t = parts.at(part);
    const int64_t width = size_of(t.dtype);
    const int64_t rows = hf.transposed ? t.numel() / hf.shape[0] : t.numel(), columns = hf.transposed ? hf.shape[0] : 1;
    for (int64_t o = 0; o < rows; ++o)
      for (int64_t i = 0; i < columns; ++i)
        f(hf.transposed ? i * hf.shape[1] + out_begin + o : out_begin + o, t.bytes + (o * columns + i) * width);
    out_begin += rows;
  }
}

}  // namespace detail

// The bytes of one Hugging Face tensor, in the dtype of the parts.
inline std::vector<std::byte> gather_hf(const HfTensor& hf, const std::map<std::string, Tensor>& parts) {
  const int64_t width = size_of(parts.at(hf.parts[0]).dtype);
  std::vector<std::byte> bytes(static_cast<size_t>(TensorInfo{"", DType::fp32, hf.shape}.numel() * width));
  if (hf.parts.size() == 1 && !hf.transposed) {
    std::memcpy(bytes.data(), parts.at(hf.parts[0]).bytes, bytes.size());
    return bytes;
  }
  detail::for_each_element(hf, parts, [&](int64_t index, const std::byte* element) {
    std::memcpy(bytes.data() + index * width, element, static_cast<size_t>(width));
  });
  return bytes;
}

// The names in a file, with and without "transformer.", for each tensor of the model; everything is checked, nothing
// read.
inline std::vector<std::string> match_hf_names(const SafetensorsReader& file, const std::vector<HfTensor>& tensors) {
  constexpr std::string_view prefix = "transformer.";
  std::vector<std::string> names;
  for (const HfTensor& hf : tensors) {
    const std::string bare = hf.name.substr(prefix.size());
    const std::string name = file.has(hf.name) ? hf.name : bare;
    CHECK(file.has(name), "{}: has no tensor {} (nor {}); config.json describes another model", file.path(), hf.name,
          bare);
    const TensorInfo& info = file.info(name);
    CHECK(info.shape == hf.shape, "{}: tensor {} has the shape ({}), config.json and the options say ({})", file.path(),
          name, info.shape, hf.shape);
    CHECK(info.dtype == DType::fp32 || info.dtype == DType::bf16 || info.dtype == DType::fp16,
          "{}: tensor {} is {}, supported are fp32, bf16 and fp16", file.path(), name, info.dtype);
    names.push_back(name);
  }
  for (const std::string& name : file.names()) {
    const bool buffer = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") || name == "lm_head.weight";
    if (buffer || std::find(names.begin(), names.end(), name) != names.end()) continue;
    throw Error(formatted("{}: tensor {} is not part of the model that config.json describes", file.path(), name));
  }
  return names;
}

// parts (fp32) = the Hugging Face tensor `name` of the file, widened from its dtype.
inline void scatter_hf(const HfTensor& hf, const SafetensorsReader& file, const std::string& name,
                       const std::map<std::string, Tensor>& parts) {
  const TensorInfo& info = file.info(name);
  std::vector<std::byte> stored(static_cast<size_t>(info.bytes()));
  file.read(name, stored.data());
  auto scatter = [&]<class T>(type_tag<T>) {
    detail::for_each_element(hf, parts, [&](int64_t index, std::byte* element) {
      T value;
      std::memcpy(&value, stored.data() + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
      const float wide = static_cast<float>(value);
      std::memcpy(element, &wide, sizeof wide);
    });
  };
  if (info.dtype == DType::fp32) scatter(type_tag<float>{});
  if (info.dtype == DType::bf16) scatter(type_tag<bf16>{});
  if (info.dtype == DType::fp16) scatter(type_tag<fp16>{});
}

}  // namespace llmc
