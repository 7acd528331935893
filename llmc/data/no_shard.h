// no_shard.h: guesses what a file is if it is not a token shard, and how to make a shard of it.
#pragma once
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/files.h"
#include "core/utf8.h"
#include "core/words.h"

namespace llmc::detail {

// Whether all numbers of a sample of a file may be tokens of a vocabulary.
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

// Whether a file's beginning, read as 16-bit numbers, seems to be weights in bf16 or fp16: about half of them are
// negative, and so between 0x9000 and 0xc480; or text in UTF-16: all of it is printable characters. Tokens of a text
// are neither: few of GPT-2's are that large.
inline bool seems_weights(const std::string& sample) {
  size_t negative = 0, n = sample.size() / 2;
  for (size_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, sample.data() + 2 * i, sizeof bits);
    negative += bits >= 0x9000 && bits < 0xc480;
  }
  return 20 * negative > 7 * n;  // with tokens drawn evenly from 50,304 it would be a quarter
}
inline bool seems_utf16(const std::string& sample) {
  for (size_t i = 0; i + 1 < sample.size(); i += 2) {
    const char low = sample[i];
    const bool printable = (low >= ' ' && low <= '~') || low == '\n' || low == '\r' || low == '\t';
    if (sample[i + 1] != '\0' || !printable) return false;
  }
  return true;
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
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, sample.data(), std::min(sample.size(), sizeof header_bytes));
  if (sample.size() > 9 && header_bytes < static_cast<uint64_t>(size) && sample.compare(8, 2, "{\"") == 0)
    return "; it seems to be a model's weights (safetensors); --model takes their directory";
  if (sample.size() > 1 && seems_utf16(sample))
    return "; it seems to be text in UTF-16: convert it with iconv -f UTF-16LE -t UTF-8; data/tokenize_text.py then "
           "makes shards of it";
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
  // GPT-2's tokens are below 50257; those of Llama and Qwen, which do not fit into 16 bits, are below 2^18. Almost any
  // other contents would have a larger number.
  const bool uint32 = size % 4 == 0 && all_below<uint32_t>(sample, 1 << 18) && all_below<uint32_t>(end, 1 << 18);
  const bool uint16 =
      size % 2 == 0 && !seems_weights(sample) && all_below<uint16_t>(sample, 50304) && all_below<uint16_t>(end, 50304);
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
