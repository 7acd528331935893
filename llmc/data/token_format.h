// token_format.h: the formats that files of tokens may have, and the numbers that tokens are stored as.
#pragma once
#include "core/check.h"

namespace llmc {

inline constexpr int64_t shard_header_bytes = 1024;  // of a token shard in llm.c's format

enum class DataFormat : uint8_t { automatic, llmc, nanogpt, megatron, olmo };
constexpr auto names_of_values(DataFormat) { return std::array{"auto", "llmc", "nanogpt", "megatron", "olmo"}; }

// Little-endian.
enum class TokenType : uint8_t { uint8, int8, int16, int32, int64, uint16, uint32 };
constexpr auto names_of_values(TokenType) {
  return std::array{"uint8", "int8", "int16", "int32", "int64", "uint16", "uint32"};
}

// Calls f.operator()<T>() with the type of C++.
template <class F>
decltype(auto) with_type(TokenType type, F&& f) {
  switch (type) {
    case TokenType::uint8: return f.template operator()<uint8_t>();
    case TokenType::int8: return f.template operator()<int8_t>();
    case TokenType::int16: return f.template operator()<int16_t>();
    case TokenType::int32: return f.template operator()<int32_t>();
    case TokenType::int64: return f.template operator()<int64_t>();
    case TokenType::uint16: return f.template operator()<uint16_t>();
    default: return f.template operator()<uint32_t>();
  }
}

// Bytes of a token.
inline int64_t width_of(TokenType type) {
  return with_type(type, [&]<class T>() { return static_cast<int64_t>(sizeof(T)); });
}

// What says where a document begins: the end of text is its first token, or the last of the document before it, or an
// index lists the documents.
enum class DocumentMark : uint8_t { end_of_text_before, end_of_text_after, index };

inline std::string mark_text(DocumentMark mark, int64_t end_of_text) {
  return mark == DocumentMark::index
             ? "their index says where they begin"
             : formatted("token {} {} one", end_of_text, mark == DocumentMark::end_of_text_before ? "begins" : "ends");
}

// Sources: llm.c's dev/data/data_common.py, nanoGPT's data/openwebtext/prepare.py, Megatron-LM's
// megatron/core/datasets/indexed_dataset.py, OLMo's olmo/data/memmap_dataset.py.
inline DocumentMark document_mark_of(DataFormat format) {
  if (format == DataFormat::megatron) return DocumentMark::index;
  return format == DataFormat::llmc ? DocumentMark::end_of_text_before : DocumentMark::end_of_text_after;
}

}  // namespace llmc
