// tokenizer.h: text to tokens and back, for documents, prompts and samples; and the end of text, which separates
// documents where they are packed and masked.
#pragma once
#include <filesystem>

#include "text/bpe.h"

namespace llmc {

// The files of a tokenizer in a model's directory.
inline constexpr std::array tokenizer_file_names = {"tokenizer.json", "tokenizer_config.json",
                                                    "special_tokens_map.json", "generation_config.json",
                                                    "chat_template.jinja"};

// ids += the tokens of a document or a part of one, in which special tokens' names are plain text; for one thread.
using DocumentEncoder = std::function<void(std::string_view text, TextPart part, std::vector<int32_t>& ids)>;

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // where: how errors about the text begin
  virtual std::vector<int32_t> encode(const std::string& text, const std::string& where = "--prompt") const = 0;
  // What a token is decoded to, and is in a text; none: there is no such token.
  virtual std::optional<std::string> text_of(int32_t token) const = 0;
  std::string decode(std::span<const int32_t> tokens) const {
    std::string all;
    for (const int32_t token : tokens) {
      const std::optional<std::string> text = text_of(token);
      all += text ? *text : formatted("<{}>", token);
    }
    return all;
  }
  // Empty: this tokenizer only decodes.
  virtual DocumentEncoder document_encoder() const { return {}; }
  // The last place where a long document may be cut without a change to its tokens; none: there is none.
  virtual std::optional<size_t> last_cut(std::string_view text) const { return text.size(); }
  virtual bool needs_utf8() const { return false; }
  virtual int32_t end_of_text() const = 0;
  virtual bool is_special(int32_t token) const { return token == end_of_text(); }
  virtual int64_t size() const = 0;  // ids are below it
  // Does decoding drop one leading space of a document?
  virtual bool strips_first_space() const { return false; }
  // The bytes of text that a token stands for, 0 if special; none: no such token. `part`: whether it begins a document.
  std::optional<int64_t> bytes_of(int32_t token, TextPart part) const {
    const std::optional<std::string> text = text_of(token);
    if (!text) return std::nullopt;
    if (is_special(token)) return 0;
    return std::ssize(*text) - (part == TextPart::beginning && strips_first_space() && text->starts_with(' '));
  }
  // Tokens that precede the text of a prompt.
  virtual std::vector<int32_t> prefix() const { return {end_of_text()}; }
  // Names and contents of the tokenizer's files, for a checkpoint to keep.
  virtual std::map<std::string, std::string> files() const { return {}; }
};

// Ids 0 to 255 are bytes, 256 is the end of text. To transformers, its files describe byte-level BPE without merges.
class ByteTokenizer final : public Tokenizer {
 public:
  static constexpr int64_t vocab_size = 257;
  std::vector<int32_t> encode(const std::string& text, const std::string& = "--prompt") const override {
    std::vector<int32_t> tokens;
    for (unsigned char byte : text) tokens.push_back(byte);
    return tokens;
  }
  DocumentEncoder document_encoder() const override {
    return [](std::string_view text, TextPart, std::vector<int32_t>& ids) {
      for (const unsigned char byte : text) ids.push_back(byte);
    };
  }
  std::optional<std::string> text_of(int32_t token) const override {
    if (token < 0 || token > end_of_text()) return std::nullopt;
    return token == end_of_text() ? "<|endoftext|>" : std::string(1, static_cast<char>(token));
  }
  int32_t end_of_text() const override { return 256; }
  int64_t size() const override { return vocab_size; }
  std::map<std::string, std::string> files() const override {
    auto tokenizer = parse_json<nlohmann::ordered_json>(R"({
      "version": "1.0", "truncation": null, "padding": null,
      "added_tokens": [{"id": 256, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
                        "normalized": false, "special": true}],
      "normalizer": null,
      "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
      "post_processor": null,
      "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
      "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": {}, "merges": []}})",
                                                        "tokenizer.json of bytes");
    for (int byte = 0; byte < 256; ++byte)
      tokenizer["model"]["vocab"][byte_level_text(std::string(1, static_cast<char>(byte)))] = byte;
    const nlohmann::ordered_json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                           {"bos_token", "<|endoftext|>"},
                                           {"eos_token", "<|endoftext|>"},
                                           {"clean_up_tokenization_spaces", false}};
    return {{"tokenizer.json", tokenizer.dump(1) + "\n"}, {"tokenizer_config.json", config.dump(1) + "\n"}};
  }
};

// llm.c's gpt2_tokenizer.bin: 256 little-endian uint32, {20240328, version, tokens, end of text}, then for each token
// one byte with its length and its bytes. Version 1 does not store the end of text: it is GPT-2's. The file has no
// merges, so it can decode but not encode.
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
      CHECK(at + 1 + length <= bytes.size(), "--tokenizer {}: ends in token {} of {}: truncated, create it again", path,
            i, header[2]);
      tokens_.push_back(bytes.substr(at + 1, length));
      at += 1 + length;
    }
    CHECK(at == bytes.size(), "--tokenizer {}: {} bytes follow the last of {} tokens: damaged, create it again", path,
          bytes.size() - at, header[2]);
    const uint32_t end = header[1] == 1 ? 50256 : header[3];
    CHECK(end < header[2], "--tokenizer {}: the end of text is token {} of {}: create it again", path, end, header[2]);
    end_of_text_ = narrow<int32_t>(end);
  }
  std::vector<int32_t> encode(const std::string& text, const std::string& where = "--prompt") const override {
    CHECK(text.empty(), "{}: --tokenizer {} can decode tokens but not encode text: leave out the prompt", where, path_);
    return {};
  }
  std::optional<std::string> text_of(int32_t token) const override {
    return token < 0 || token >= size() ? std::nullopt : std::optional(tokens_[static_cast<size_t>(token)]);
  }
  int32_t end_of_text() const override { return end_of_text_; }
  int64_t size() const override { return std::ssize(tokens_); }

 private:
  std::string path_;
  std::vector<std::string> tokens_;
  int32_t end_of_text_;
};

// A Hugging Face tokenizer.json of BPE (bpe.h), and the files beside it.
//
// The end of text, which data/tokenize_text.py puts before every document, too, is the special token with the first of
// the usual names; without one, the end of sequence named by tokenizer_config.json, generation_config.json or
// config.json beside the file; else an ordinary token with a usual name. A prompt begins with what the file's template
// puts there, such as <|begin_of_text|>, otherwise with the end of text. A token that is half a character is printed as
// its bytes; its neighbours complete it.
class HuggingFaceTokenizer final : public Tokenizer {
 public:
  explicit HuggingFaceTokenizer(const std::string& path)
      : path_(path), bpe_(read(path)), end_of_text_(find_end_of_text()) {}

  std::vector<int32_t> encode(const std::string& text, const std::string& where = "--prompt") const override {
    const std::optional<size_t> fault = utf8_fault(text);
    CHECK(!fault,
          "{}: byte {} of the text is not UTF-8, and --tokenizer {} takes nothing else: convert it, or use --tokenizer "
          "bytes",
          where, *fault + 1, path_);
    return bpe_.encode(text);
  }
  DocumentEncoder document_encoder() const override {
    return [encoder = Bpe::Encoder(bpe_, Specials::as_text, 18)](  // of 12 MiB
               std::string_view text, TextPart part, std::vector<int32_t>& ids) mutable {
      encoder.append(text, part, ids);
    };
  }
  std::optional<size_t> last_cut(std::string_view text) const override { return bpe_.last_cut(text); }
  bool needs_utf8() const override { return true; }
  std::optional<std::string> text_of(int32_t token) const override {
    const std::string text = bpe_.text_of(token);
    return text.empty() ? std::nullopt : std::optional(text);
  }
  int32_t end_of_text() const override { return end_of_text_; }
  bool is_special(int32_t token) const override { return token == end_of_text_ || bpe_.is_special(token); }
  int64_t size() const override { return bpe_.vocab_size(); }
  bool strips_first_space() const override { return bpe_.strips_first_space(); }
  std::vector<int32_t> prefix() const override {
    return bpe_.prefix().empty() ? std::vector<int32_t>{end_of_text_} : bpe_.prefix();
  }
  std::map<std::string, std::string> files() const override {
    std::map<std::string, std::string> files{{"tokenizer.json", read_text(path_)}};
    for (const char* name : tokenizer_file_names)
      if (!files.contains(name) && path_exists(beside(name))) files[name] = read_text(beside(name));
    return files;
  }

 private:
  static Bpe read(const std::string& path) try {
    return Bpe(read_json(path, "--tokenizer "), "--tokenizer " + path);
  } catch (const nlohmann::json::exception& error) {
    throw Error(
        formatted("--tokenizer {}: not a complete Hugging Face tokenizer.json: {}", path, shown(error.what(), 300)));
  }
  std::string beside(const char* name) const { return std::filesystem::path(path_).replace_filename(name); }

  int32_t find_end_of_text() const {
    std::optional<int32_t> ordinary;  // such as Gemma's "</s>", which is HTML
    for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<|im_end|>"})
      if (const std::optional<int32_t> id = bpe_.find(name)) {
        if (bpe_.is_special(*id)) return *id;
        if (!ordinary) ordinary = id;
      }
    for (const char* name : {"tokenizer_config.json", "generation_config.json", "config.json"}) {
      if (!path_exists(beside(name))) continue;
      const nlohmann::json json = read_json(beside(name)), none;
      nlohmann::json token = json.value("eos_token", none), id = json.value("eos_token_id", none);
      if (token.is_object()) token = token.value("content", none);
      if (id.is_array() && !id.empty()) id = id.front();
      if (token.is_string())
        if (const std::optional<int32_t> found = bpe_.find(token.get_ref<const std::string&>())) return *found;
      if (id.is_number_integer() && id >= 0 && id < bpe_.vocab_size()) return id;
    }
    if (ordinary) return *ordinary;
    throw Error(
        formatted("--tokenizer {}: no end of text: no token has a usual name, such as <|endoftext|>, and no file "
                  "beside it names one; add a generation_config.json with its \"eos_token_id\"",
                  path_));
  }

  std::string path_;
  Bpe bpe_;
  int32_t end_of_text_;
};

inline std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  if (name.ends_with(".bin")) return std::make_unique<TableTokenizer>(name);
  if (is_directory(name)) return std::make_unique<HuggingFaceTokenizer>(name + "/tokenizer.json");
  CHECK(name.ends_with(".json"),
        "--tokenizer {}: expected auto, bytes (ids 0-255, end of text 256), a Hugging Face tokenizer.json or its "
        "directory, or a gpt2_tokenizer.bin (data/README.md)",
        shown(name, 300));
  return std::make_unique<HuggingFaceTokenizer>(name);
}

// "auto": a tokenizer.json in the model's directory (none: a preset) whose tokens the vocabulary has; otherwise bytes.
inline std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, const std::optional<std::string>& directory,
                                                 int64_t vocab_size) {
  if (name != "auto") return make_tokenizer(name);
  if (directory && path_exists(*directory + "/tokenizer.json")) {
    auto tokenizer = std::make_unique<HuggingFaceTokenizer>(*directory + "/tokenizer.json");
    if (tokenizer->size() <= vocab_size) return tokenizer;
  }
  return make_tokenizer("bytes");
}

}  // namespace llmc
