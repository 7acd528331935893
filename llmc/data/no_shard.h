// no_shard.h: guesses what a file is if it is not the token shard that it was taken for, and what to do with it.
#pragma once
#include <filesystem>

#include "data/megatron_index.h"

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

inline std::string beginning_of(const File& file) {
  std::string sample(static_cast<size_t>(std::min<int64_t>(file.size(), 1 << 16)), '\0');
  file.read_at(sample.data(), std::ssize(sample), 0);
  return sample;
}

inline bool has_magic_of_llmc(const File& file) {
  int32_t magic = 0;
  if (file.size() >= 4) file.read_at(&magic, 4, 0);
  return magic == 20240520 || magic == 20240801;
}

inline bool has_index_of_megatron(const File& file) {
  const std::string index = MegatronIndex::path_for(file.path());
  std::error_code none;
  return std::filesystem::is_regular_file(index, none) && MegatronIndex::begins(File::open_read(index));
}

// "; it seems to be ..." by the first bytes of a file, or by the index beside it, or nothing.
inline std::string hint_of_magic(const File& file, const std::string& sample) {
  if (has_magic_of_llmc(file)) return "; it seems to be a token shard of llm.c, which --data-format auto reads";
  int32_t magic = 0;
  std::memcpy(&magic, sample.data(), std::min(sample.size(), sizeof magic));
  constexpr std::pair<int32_t, const char*> numbers[] = {
      {20240522, "llm.c's multiple-choice questions: let data/hellaswag.py write them for --eval-choices"},
      {20240326, "a model of llm.c; --model takes the Hugging Face directory of the same weights"},
      {20240328, "a tokenizer of llm.c, for --tokenizer"}};
  for (const auto& [known, what] : numbers)
    if (magic == known) return formatted("; it seems to be {}", what);
  constexpr std::pair<std::string_view, const char*> texts[] = {
      {"\x93NUMPY", "an array of numpy's with a header: write it with ndarray.tofile()"},
      {MegatronIndex::magic, "Megatron's index: name the .bin beside it"},
      {"\x1f\x8b\x08", "compressed with gzip: decompress it"},
      {"\x28\xb5\x2f\xfd", "compressed with zstd: decompress it"},
      {"PAR1", "Parquet: data/tokenize_text.py makes shards of it"}};
  for (const auto& [known, what] : texts)
    if (sample.starts_with(known)) return formatted("; it seems to be {}", what);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, sample.data(), std::min(sample.size(), sizeof header_bytes));
  if (sample.size() > 9 && header_bytes < static_cast<uint64_t>(file.size()) && sample.compare(8, 2, "{\"") == 0)
    return "; it seems to be a model's weights (safetensors); --model takes their directory";
  return has_index_of_megatron(file) ? formatted("; its index {} is Megatron's: --data-format auto reads both",
                                                 MegatronIndex::path_for(file.path()))
                                     : "";
}

inline bool seems_text(const std::string& sample, bool cut) {
  const auto is_control = [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < ' ' && byte != '\t' && byte != '\n' && byte != '\r' && byte != '\f';
  };
  const size_t valid = utf8_fault(sample).value_or(sample.size());
  return !sample.empty() && std::ranges::none_of(sample, is_control) &&
         (valid == sample.size() || (cut && valid + 4 > sample.size()));
}

// What a file is that is in no format which is recognised; nothing: unknown.
inline std::string hint_of_no_shard(const File& file) {
  const std::string sample = beginning_of(file);
  const int64_t size = file.size();
  if (const std::string hint = hint_of_magic(file, sample); !hint.empty()) return hint;
  if (sample.size() > 1 && seems_utf16(sample))
    return "; it seems to be text in UTF-16: convert it with iconv -f UTF-16LE -t UTF-8; data/tokenize_text.py then "
           "makes shards of it";
  if (seems_text(sample, std::ssize(sample) < size))
    return "; it seems to be text: data/tokenize_text.py makes shards of it";
  std::string end(sample.size(), '\0');
  file.read_at(end.data(), std::ssize(end), (size - std::ssize(end)) / 4 * 4);
  // GPT-2's tokens are below 50257; those of Llama and Qwen, which do not fit into 16 bits, are below 2^18. Almost any
  // other contents would have a larger number.
  if (size % 4 == 0 && all_below<uint32_t>(sample, 1 << 18) && all_below<uint32_t>(end, 1 << 18))
    return "; it seems to be uint32 tokens without a header, as OLMo's tools write them: --data-format olmo";
  if (size % 2 == 0 && !seems_weights(sample) && all_below<uint16_t>(sample, 50304) && all_below<uint16_t>(end, 50304))
    return "; it seems to be uint16 tokens without a header, as nanoGPT writes them: --data-format nanogpt";
  return "";
}

// What a file is that was said to be tokens of this many bytes without a header, but clearly is not; nothing: it may
// be. Upper halves of 32-bit tokens, read as tokens, are tiny; most pairs of 16-bit tokens, read as one, are huge.
inline std::string hint_of_header(const File& file, int64_t width) {
  constexpr size_t enough = 128;  // bytes; fewer may look like anything
  const std::string sample = beginning_of(file);
  if (const std::string hint = hint_of_magic(file, sample); !hint.empty()) return hint;
  if (sample.size() < enough) return "";
  if (seems_text(sample, std::ssize(sample) < file.size()))
    return "; it seems to be text: data/tokenize_text.py makes shards of it";
  size_t large_lower = 0, tiny_upper = 0, huge = 0, n = sample.size() / 4;
  for (size_t i = 0; i < n; ++i) {
    uint16_t halves[2];
    std::memcpy(halves, sample.data() + 4 * i, sizeof halves);
    large_lower += halves[0] >= 1024, tiny_upper += halves[1] < 4, huge += halves[1] >= 16;
  }
  if (width == 2 && tiny_upper == n && large_lower > 0) return "; these seem to be uint32 tokens: --data-format olmo";
  if (width == 4 && huge > n / 2) return "; these seem to be uint16 tokens: --data-format nanogpt";
  return "";
}

}  // namespace llmc::detail
