// added_tokens.h: tokens that are matched literally in a text, before anything else.
#pragma once
#include <iterator>

#include "core/std.h"
#include "text/unicode.h"

namespace llmc {

// Whether the names of special tokens in a text stand for these tokens, as in a prompt, or are text like any other, as
// in a document: none can forge an end of text.
enum class Specials : uint8_t { as_tokens, as_text };

class AddedTokens {
 public:
  struct Token {
    std::string text;
    int32_t id;
    bool strip_left, strip_right;  // adjacent white space belongs to the token
    bool special;
  };
  void add(const Token& token) {
    if (token.text.empty()) return;
    auto& bucket = by_first_byte_[static_cast<unsigned char>(token.text[0])];
    const auto place = std::ranges::lower_bound(bucket, token.text, {}, &Token::text);
    if (place == bucket.end() || place->text != token.text) bucket.insert(place, token);
    all_special_ &= token.special;
    empty_ = false;
  }

  // Splits the text at its tokens, leftmost first, then longest; passes their ids to on_token and the text between them
  // to on_text.
  template <class OnToken, class OnText>
  void split(std::string_view text, Specials specials, OnToken&& on_token, OnText&& on_text) const {
    size_t cut = 0;
    for (size_t at = finds_none(specials) ? text.size() : 0; at < text.size();) {
      const auto& bucket = by_first_byte_[static_cast<unsigned char>(text[at])];
      const Token* token = bucket.empty() ? nullptr : find(bucket, text.substr(at));
      if (!token || (token->special && specials == Specials::as_text)) {
        at += token ? token->text.size() : 1;
        continue;
      }
      size_t begin = at, end = at += token->text.size();
      if (token->strip_left)
        while (begin > cut && is_space(text, utf8_before(text, begin))) begin = utf8_before(text, begin);
      if (token->strip_right)
        while (end < text.size() && is_space(text, end)) end += utf8_at(text, end).width;
      if (cut < begin) on_text(text.substr(cut, begin - cut));
      on_token(token->id);
      cut = end;
    }
    if (cut < text.size()) on_text(text.substr(cut));
  }

  // May a token, or the white space that belongs to it, be on both sides of the border of these two characters of a
  // document, or end there, so that a text begins?
  bool cross(std::string_view a, std::string_view b) const {
    if (finds_none(Specials::as_text)) return false;
    const std::string both = std::string(a) + std::string(b);
    for (const auto& bucket : by_first_byte_)
      for (const Token& token : bucket)
        if (token.text.find(both) != token.text.npos || token.text.ends_with(a) ||
            ((token.strip_left || token.strip_right) && is_space(a, 0)) || (token.strip_right && is_space(b, 0)))
          return true;
    return false;
  }

 private:
  bool finds_none(Specials specials) const { return empty_ || (all_special_ && specials == Specials::as_text); }
  static bool is_space(std::string_view text, size_t at) {
    return (traits_of(utf8_at(text, at).code) & white_space_trait) != 0;
  }
  // The longest token that the text begins with: in lexicographic order the last one that is not after the text, or
  // else one that what these two have in common begins with.
  static const Token* find(const std::vector<Token>& bucket, std::string_view text) {
    for (;;) {
      const auto after = std::ranges::upper_bound(bucket, text, {}, [](auto& t) { return std::string_view(t.text); });
      if (after == bucket.begin()) return nullptr;
      const Token& token = *std::prev(after);
      if (text.starts_with(token.text)) return &token;
      text = {text.begin(), std::ranges::mismatch(text, token.text).in1};
    }
  }
  std::array<std::vector<Token>, 256> by_first_byte_;  // in lexicographic order
  bool empty_ = true, all_special_ = true;
};

}  // namespace llmc
