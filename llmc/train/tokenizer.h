// tokenizer.h: tokens to text and back, for prompts and samples.
#pragma once
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/files.h"
#include "core/shape.h"

namespace llmc {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::vector<int32_t> encode(const std::string& text) const = 0;
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  virtual int32_t end_of_text() const = 0;
};

// Ids 0 to 255 are bytes, 256 is the end of text.
class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<int32_t> encode(const std::string& text) const override {
    std::vector<int32_t> tokens;
    for (unsigned char byte : text) tokens.push_back(byte);
    return tokens;
  }
  std::string decode(std::span<const int32_t> tokens) const override {
    std::string text;
    for (int32_t token : tokens) {
      if (token >= 0 && token < 256) text += static_cast<char>(token);
      else text += token == 256 ? "<|endoftext|>" : formatted("<{}>", token);
    }
    return text;
  }
  int32_t end_of_text() const override { return 256; }
};

// llm.c's gpt2_tokenizer.bin: 256 little-endian uint32, {20240328, version, tokens, end of text}, then each token: a
// byte with its length, and its bytes. Version 1 does not name the end of text: it is GPT-2's. It knows no merges, so
// that it prints, and cannot encode.
class TableTokenizer final : public Tokenizer {
 public:
  explicit TableTokenizer(const std::string& path) : path_(path) {
    const std::string bytes = read_text(path);
    constexpr size_t header_bytes = 1024;
    uint32_t header[header_bytes / 4] = {};
    CHECK(bytes.size() >= header_bytes, "--tokenizer {}: {} bytes are too few for a header of {}", path, bytes.size(),
          header_bytes);
    std::memcpy(header, bytes.data(), header_bytes);
    CHECK(header[0] == 20240328 && (header[1] == 1 || header[1] == 2),
          "--tokenizer {}: magic {} version {}, expected 20240328 version 1 or 2: not a gpt2_tokenizer.bin", path,
          header[0], header[1]);
    size_t at = header_bytes;
    for (uint32_t i = 0; i < header[2]; ++i) {
      const size_t length = at < bytes.size() ? static_cast<unsigned char>(bytes[at]) : 0;
      CHECK(at + 1 + length <= bytes.size(), "--tokenizer {}: ends in token {} of {}: truncated, make it again", path,
            i, header[2]);
      tokens_.push_back(bytes.substr(at + 1, length));
      at += 1 + length;
    }
    CHECK(at == bytes.size(), "--tokenizer {}: {} bytes follow the last of {} tokens: damaged, make it again", path,
          bytes.size() - at, header[2]);
    end_of_text_ = header[1] == 1 ? 50256 : narrow<int32_t>(header[3]);
  }
  std::vector<int32_t> encode(const std::string& text) const override {
    CHECK(text.empty(), "--prompt: --tokenizer {} can print tokens, not make them: leave --prompt out", path_);
    return {};
  }
  std::string decode(std::span<const int32_t> tokens) const override {
    std::string text;
    for (int32_t token : tokens)
      text += token >= 0 && static_cast<size_t>(token) < tokens_.size() ? tokens_[static_cast<size_t>(token)]
                                                                        : formatted("<{}>", token);
    return text;
  }
  int32_t end_of_text() const override { return end_of_text_; }

 private:
  std::string path_;
  std::vector<std::string> tokens_;
  int32_t end_of_text_;
};

inline std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  CHECK(name.ends_with(".bin"),
        "--tokenizer {}: expected bytes (ids 0-255, end of text 256) or a gpt2_tokenizer.bin (data/README.md)", name);
  return std::make_unique<TableTokenizer>(name);
}

}  // namespace llmc
