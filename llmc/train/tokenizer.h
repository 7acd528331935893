// tokenizer.h: tokens to text and back, for prompts and samples.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/check.h"

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

inline std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name) {
  CHECK(name == "bytes", "--tokenizer {}: this version knows only bytes (ids 0-255, end of text 256)", name);
  return std::make_unique<ByteTokenizer>();
}

}  // namespace llmc
