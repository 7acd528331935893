// no_shard.h: what a file that is no token shard seems to be instead, and what makes a shard of it.
#pragma once
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/files.h"
#include "core/utf8.h"
#include "core/words.h"

namespace llmc::detail {

// Whether all numbers of a file's beginning and end may be tokens of a vocabulary.
template <class Token>
bool all_below(const std::string& sample, uint32_t limit) {
  uint32_t largest = 0;
  for (size_t at = 0; at + sizeof(Token) <= sample.size(); at += sizeof(Token)) {
    Token token;
    std::memcpy(&token, sample.data() + at, sizeof token);
    largest = std::max<uint32_t>(largest, token);
  }
  return largest > 0 && largest < limit;
}

// "; it seems to be ...", or nothing.
inline std::string hint_of_no_shard(const File& file) {
  constexpr int64_t most = 1 << 16;
  const int64_t size = file.size(), piece = std::min(size, most);
  std::string sample(static_cast<size_t>(piece), '\0');
  file.read_at(sample.data(), piece, 0);
  int32_t magic = 0;
  std::memcpy(&magic, sample.data(), std::min(sample.size(), sizeof magic));
  for (const auto& [known, what] :
       {std::pair(20240522, "llm.c's multiple-choice questions: let data/hellaswag.py write them for --eval-choices"),
        {20240326, "a model of llm.c; --model takes the Hugging Face directory of the same weights"},
        {20240328, "a tokenizer of llm.c, for --tokenizer"}})
    if (magic == known) return formatted("; it seems to be {}", what);
  const bool cut = piece < size,
             controls = std::ranges::any_of(
                 sample,
                 [](char c) {
                   const auto byte = static_cast<unsigned char>(c);
                   return byte < ' ' && byte != '\t' && byte != '\n' && byte != '\r' && byte != '\f';
                 });
  const size_t valid = utf8_fault(sample).value_or(sample.size());
  if (!sample.empty() && !controls && (valid == sample.size() || (cut && valid + 4 > sample.size())))
    return "; it seems to be text: data/tokenize_text.py makes shards of it";
  std::string end(sample.size(), '\0');
  file.read_at(end.data(), piece, (size - piece) / 4 * 4);
  // GPT-2's tokens are below 50257, those of Llama and Qwen, which do not fit into 16 bits, below 2^18; of any other
  // contents some number would hardly be.
  const bool uint32 = size % 4 == 0 && all_below<uint32_t>(sample, 1 << 18) && all_below<uint32_t>(end, 1 << 18);
  const bool uint16 = size % 2 == 0 && all_below<uint16_t>(sample, 50304) && all_below<uint16_t>(end, 50304);
  if (!uint32 && !uint16) return "";
  const uint32_t header[] = {uint32 ? 20240801u : 20240520u, uint32 ? 7u : 1u,
                             static_cast<uint32_t>(size / (uint32 ? 4 : 2))};
  std::string octal;
  for (const uint32_t word : header)
    for (int byte = 0; byte < 4; ++byte)
      for (const int bit : {8, 6, 3, 0})
        octal += bit == 8 ? '\\' : static_cast<char>('0' + (word >> (8 * byte) >> bit & (bit == 6 ? 3 : 7)));
  const std::string& path = file.path();
  const std::string to = (path.ends_with(".bin") ? path.substr(0, path.size() - 4) : path) + "_shard.bin";
  return formatted(
      "; it seems to be tokens without a header, as nanoGPT writes them (uint{}); this puts one before them:\n"
      "  (printf '{}'; head -c {} /dev/zero; cat {}) > {}",
      uint32 ? 32 : 16, octal, 1024 - sizeof header, shell_word(path), shell_word(to));
}

}  // namespace llmc::detail
