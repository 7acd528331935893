// normalizer.h: "normalizer" of a tokenizer.json: what a text becomes before it is split: NFC, a prefix, replacements.
#pragma once
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "text/unicode.h"

namespace llmc {

// Whether a text begins a document, or continues one that was cut at a place of Bpe::last_cut().
enum class TextPart : uint8_t { beginning, continuation };

// The "type" of a step of a tokenizer.json; "null": there is none.
inline std::string type_of(const nlohmann::json& step) {
  return step.is_null() ? "null" : shown(step.at("type").get<std::string>());
}

// The text with all of `from` replaced by `to`.
inline std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t at = 0;
  for (size_t found; (found = text.find(from, at)) != text.npos; at = found + from.size())
    out.append(text, at, found - at).append(to);
  return out.append(text, at);
}

class Normalizer {
 public:
  // refuse(what): throws that this is not supported.
  template <class Refuse>
  void read(const nlohmann::json& json, Refuse&& refuse) {
    const std::string type = type_of(json);
    if (type == "Sequence") {
      for (const nlohmann::json& one : json.at("normalizers")) read(one, refuse);
    } else if (type == "NFC") {
      steps_.push_back({Kind::nfc, {}, {}});
    } else if (type == "Prepend") {
      steps_.push_back({Kind::prepend, {}, json.at("prepend")});
    } else if (type == "Replace") {
      const nlohmann::json& pattern = json.at("pattern");
      if (!pattern.contains("String") || pattern.at("String") == "") refuse(formatted("a Replace of {}", pattern));
      steps_.push_back({Kind::replace, pattern.at("String"), json.at("content")});
    } else if (type != "null") {
      refuse("\"normalizer\" " + type);
    }
  }

  // The text, or what it becomes, in `buffer`.
  std::string_view apply(std::string_view text, TextPart part, std::string& buffer) const {
    for (const Step& step : steps_) {
      if (step.kind == Kind::nfc) {
        if (find_unstable(text) < text.size()) text = buffer = nfc(text);
      } else if (step.kind == Kind::replace) {
        if (text.find(step.from) != text.npos) text = buffer = replaced(text, step.from, step.to);
      } else if (!text.empty() && part == TextPart::beginning) {
        text = buffer = step.to + std::string(text);
      }
    }
    return text;
  }

  // Does what lies on one side of the border of these two characters never change what the other side becomes?
  bool independent(char32_t a, char32_t b) const {
    for (const Step& step : steps_) {
      if (step.kind == Kind::nfc && (nfc_may_change(a) || nfc_may_change(b))) return false;
      if (step.kind == Kind::replace && utf8_at(step.from, 0).width < step.from.size()) return false;
    }
    return true;
  }

 private:
  enum class Kind : uint8_t { nfc, prepend, replace };
  struct Step {
    Kind kind;
    std::string from, to;
  };
  std::vector<Step> steps_;
};

}  // namespace llmc
