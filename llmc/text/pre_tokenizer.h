// pre_tokenizer.h: "pre_tokenizer" of a tokenizer.json: how a text is split into the pieces that merges do not cross.
#pragma once
#include <nlohmann/json.hpp>

#include "text/normalizer.h"
#include "text/split_automaton.h"

namespace llmc {

// Where Metaspace puts a space before a text: "always", "first" or "never".
inline std::string prepend_scheme(const nlohmann::json& metaspace) {
  return metaspace.value("prepend_scheme", metaspace.value("add_prefix_space", true) ? "always" : "never");
}

class PreTokenizer {
 public:
  // refuse(what): throws that this is not supported; errors of patterns begin with `where`.
  template <class Refuse>
  void read(const nlohmann::json& json, const std::string& where, Refuse&& refuse) {
    const std::string type = type_of(json);
    if (type == "Sequence") {
      for (const nlohmann::json& one : json.at("pretokenizers")) read(one, where, refuse);
      return;
    }
    if (type == "null") return;
    if (byte_level_) refuse("a pre-tokenizer after ByteLevel");
    Step step;
    if (type == "ByteLevel") {
      byte_level_ = true;
      if (json.value("add_prefix_space", true)) step.prefix = Prefix::every_piece;
      if (json.value("use_regex", true))
        step.splitter.emplace(R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", where);
    } else if (type == "Split") {
      read_split(step, json, where, refuse);
    } else if (type == "Digits") {
      step.splitter.emplace(json.value("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)", where);
    } else if (type == "Metaspace") {
      read_metaspace(step, json, refuse);
    } else {
      refuse("\"pre_tokenizer\" " + type);
    }
    if (step.splitter || !step.literal.empty() || step.prefix != Prefix::none || !step.space.empty())
      steps_.push_back(std::move(step));
  }

  bool is_byte_level() const { return byte_level_; }

  // Passes on the pieces of a text, some at a time. `part`: whether this is where a document begins; `first`: whether
  // the text is the first between added tokens.
  template <class F>
  void split(std::string_view text, TextPart part, bool first, F&& on_pieces) const {
    if (steps_.size() == 1 && steps_[0].splitter && steps_[0].prefix == Prefix::none)
      return steps_[0].splitter->split(text, on_pieces);
    auto on_piece = [&](std::string_view piece) { on_pieces(Pieces(&piece, 1)); };
    split_by(0, text, part, first, on_piece);
  }

  // Whether pieces on either side of the border of two characters are independent, or even always separate. a and b
  // become what the steps make of them.
  SplitAutomaton::Place between(char32_t& a, char32_t& b) const {
    using enum SplitAutomaton::Place;
    for (size_t s = 0; s < steps_.size(); ++s) {
      const Step& step = steps_[s];
      if (s > 0 && step.prefix != Prefix::none) return anything;
      if (!step.space.empty()) {
        for (char32_t* c : {&a, &b})
          if (*c == ' ') *c = utf8_at(step.space, 0).code;
      }
      const SplitAutomaton::Place place = step.splitter          ? step.splitter->between(a, b)
                                          : step.literal.empty() ? independent
                                                                 : step.between(a, b);
      if (place != independent) return place;
    }
    return independent;
  }

 private:
  enum class Prefix : uint8_t { none, every_piece, first_piece };
  struct Step {
    Prefix prefix = Prefix::none;      // a space, or `space`, before a piece that does not begin with one
    std::string space;                 // in the place of every space; empty: spaces stay
    std::optional<Splitter> splitter;  // either this, or `literal`
    std::string literal;               // a text, before or after which pieces end
    bool cut_before = false, cut_after = false;

    SplitAutomaton::Place between(char32_t a, char32_t b) const {
      using enum SplitAutomaton::Place;
      const Utf8Character only = utf8_at(literal, 0);
      if (only.width < literal.size()) return anything;
      return (cut_before && b == only.code) || (cut_after && a == only.code) ? boundary : independent;
    }
  };

  template <class Refuse>
  static void read_split(Step& step, const nlohmann::json& json, const std::string& where, Refuse&& refuse) {
    const nlohmann::json &pattern = json.at("pattern"), &behavior = json.at("behavior");
    if (json.value("invert", false)) refuse("a Split with \"invert\"");
    if (pattern.contains("Regex")) {
      if (behavior != "Isolated") refuse(formatted("a Split with behavior {}", behavior));
      step.splitter.emplace(pattern.at("Regex").get<std::string>(), where);
    } else {
      step.literal = pattern.at("String");
      if (step.literal.empty()) refuse("a Split by nothing");
      step.cut_before = behavior == "Isolated" || behavior == "MergedWithNext";
      step.cut_after = behavior == "Isolated" || behavior == "MergedWithPrevious";
      if (!step.cut_before && !step.cut_after) refuse(formatted("a Split with behavior {}", behavior));
    }
  }

  template <class Refuse>
  static void read_metaspace(Step& step, const nlohmann::json& json, Refuse&& refuse) {
    step.space = json.value("replacement", "\u2581");
    const std::string scheme = prepend_scheme(json);
    if (scheme != "always" && scheme != "first" && scheme != "never")
      refuse("Metaspace with \"prepend_scheme\": " + shown(scheme));
    step.prefix = scheme == "always" ? Prefix::every_piece : scheme == "first" ? Prefix::first_piece : Prefix::none;
    if (!json.value("split", true)) return;
    step.literal = step.space;
    step.cut_before = true;
  }

  // Passes on the pieces into which step `s` and the later steps split a text.
  template <class F>
  void split_by(size_t s, std::string_view text, TextPart part, bool first, F& on_piece) const {
    if (s == steps_.size()) return on_piece(text);
    const Step& step = steps_[s];
    std::string changed;
    if (!step.space.empty() && text.find(' ') != text.npos) text = changed = replaced(text, " ", step.space);
    const std::string_view prefix = step.space.empty() ? std::string_view(" ") : std::string_view(step.space);
    // A continuation's first piece is not the first of a text; before step 0 it is not even a piece of its own.
    const bool continues = first && part == TextPart::continuation;
    const bool here = step.prefix == Prefix::every_piece ? !(continues && s == 0)
                                                         : step.prefix == Prefix::first_piece && first && !continues;
    if (here && !text.starts_with(prefix)) text = changed = std::string(prefix) + std::string(text);
    auto next = [&](std::string_view piece) {
      split_by(s + 1, piece, part, first && piece.data() == text.data(), on_piece);
    };
    auto each = [&](Pieces pieces) {
      for (const std::string_view piece : pieces) next(piece);
    };
    if (step.splitter) step.splitter->split(text, each);
    else if (step.literal.empty()) next(text);
    else split_at(step, text, next);
  }

  template <class F>
  static void split_at(const Step& step, std::string_view text, F&& on_piece) {
    size_t cut = 0;
    auto end_at = [&](size_t at) {
      if (cut < at) on_piece(text.substr(cut, at - cut));
      cut = at;
    };
    for (size_t at = 0; (at = text.find(step.literal, at)) != text.npos; at += step.literal.size()) {
      if (step.cut_before) end_at(at);
      if (step.cut_after) end_at(at + step.literal.size());
    }
    end_at(text.size());
  }

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace llmc
