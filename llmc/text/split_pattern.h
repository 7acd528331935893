// split_pattern.h: the regular expressions with which tokenizers split text, matched by backtracking where
// split_automaton.h cannot. Supported: characters, classes [...], \p{L}, \s, \S, \d, \D, groups, (?i:...),
// alternatives, * + ? {n,m}, possessive *+ ++ ?+, and lookahead (?=...) (?!...). Anything else is refused by name.
// Semantics: Oniguruma with Ruby's syntax, as in Hugging Face's tokenizers.
#pragma once
#include <bitset>

#include "core/check.h"
#include "text/unicode.h"

namespace llmc {

// A set of characters.
class CharacterSet {
 public:
  void add(CharacterTraits traits) { traits_ |= traits; }
  void add(char32_t first, char32_t last) { ranges_.emplace_back(first, last); }
  void invert() { inverted_ = !inverted_; }
  // Call after the last add(): precomputes the answers for ASCII.
  void finish() {
    for (char32_t c = 0; c < 128; ++c) ascii_[c] = look_up(c);
  }
  bool contains(char32_t c) const { return c < 128 ? ascii_[c] : look_up(c); }
  // Where whether a character is in the set may change for other reasons than its traits.
  void add_bounds(std::set<char32_t>& bounds) const {
    for (const auto& [first, last] : ranges_) bounds.insert({first, last + 1});
  }

 private:
  bool look_up(char32_t c) const {
    const bool in = (traits_of(c) & traits_) != 0 ||
                    std::any_of(ranges_.begin(), ranges_.end(),
                                [&](const auto& range) { return range.first <= c && c <= range.second; });
    return in != inverted_;
  }
  CharacterTraits traits_ = 0;  // any of these
  std::vector<std::pair<char32_t, char32_t>> ranges_;
  bool inverted_ = false;
  std::bitset<128> ascii_;
};

class SplitPattern {
 public:
  // `where`: how errors begin, before the pattern.
  SplitPattern(const std::string& pattern, const std::string& where) : pattern_(pattern), where_(where) {
    CHECK(pattern.size() <= most_bytes, "{}: pattern '{}': expected at most {} bytes", where_, shown(pattern),
          most_bytes);
    const Alternatives all = parse_alternatives(IgnoreCase::no);
    CHECK(at_ == pattern_.size(), "{}: pattern '{}': unmatched ')' at byte {}", where_, shown(pattern_, 400), at_);
    CHECK(shortest(all) > 0, "{}: pattern '{}' matches an empty text, so it cannot split anything", where_,
          shown(pattern_, 400));
    nodes_.push_back({});  // accept
    start_ = link(all, 0);
  }

  // Splits valid UTF-8 into pieces, passed to `emit`: the matches from left to right, and the text between them.
  template <class F>
  void split(std::string_view text, F&& emit) const {
    size_t cut = 0;
    for (size_t at = 0; at < text.size();) {
      size_t steps = 0;
      const size_t end = match(start_, text, at, steps);
      if (end == nowhere) {
        at += utf8_at(text, at).width;
        continue;
      }
      if (cut < at) emit(text.substr(cut, at - cut));
      emit(text.substr(at, end - at));
      cut = at = end;
    }
    if (cut < text.size()) emit(text.substr(cut));
  }

  static constexpr size_t unlimited = static_cast<size_t>(-1);
  enum class Kind { accept, characters, branch, ahead, not_ahead };

  // The pattern as matched: items linked to their successors.
  struct Node {
    Kind kind = Kind::accept;
    size_t next = 0;
    CharacterSet set{};
    size_t min = 1, max = 1;
    bool possessive = false;
    std::vector<size_t> ways{};  // a branch: in order of preference; a lookahead: where its inside begins
  };
  const std::vector<Node>& nodes() const { return nodes_; }
  size_t start() const { return start_; }

 private:
  static constexpr size_t nowhere = static_cast<size_t>(-1);
  static constexpr size_t most_bytes = 4096, most_depth = 32;  // parsing and matching recurse
  static constexpr size_t most_steps = size_t{1} << 28;        // of one match: a second
  static constexpr const char* remedy = "--tokenizer bytes needs no pattern";
  enum class IgnoreCase { no, yes };

  // The parsed pattern: alternatives of sequences of items.
  struct Item;
  using Sequence = std::vector<Item>;
  using Alternatives = std::vector<Sequence>;
  struct Item : Node {         // not linked yet
    Alternatives inside = {};  // the contents of a group or a lookahead
  };

  // ---- Matching ----

  // The end of the match that begins at `at`. Recursion is as deep as the pattern, never the text: a run is a loop.
  size_t match(size_t n, std::string_view text, size_t at, size_t& steps) const {
    for (;;) {
      CHECK(++steps < most_steps, "{}: pattern '{}': a match takes more than {} steps near '{}': {}", where_,
            shown(pattern_, 400), most_steps, shown(text.substr(at)), remedy);
      const Node& node = nodes_[n];
      switch (node.kind) {
        case Kind::accept: return at;
        case Kind::ahead:
        case Kind::not_ahead:
          if ((match(node.ways[0], text, at, steps) != nowhere) != (node.kind == Kind::ahead)) return nowhere;
          n = node.next;
          break;
        case Kind::branch:
          for (size_t way = 0; way + 1 < node.ways.size(); ++way)
            if (const size_t end = match(node.ways[way], text, at, steps); end != nowhere) return end;
          n = node.ways.back();
          break;
        case Kind::characters: {
          size_t end = at, count = 0;
          while (count < node.max && end < text.size()) {
            const Utf8Character c = utf8_at(text, end);
            if (!node.set.contains(c.code)) break;
            end += c.width;
            ++count;
          }
          steps += count;
          if (count < node.min) return nowhere;
          for (; !node.possessive && count > node.min; --count) {
            if (const size_t found = match(node.next, text, end, steps); found != nowhere) return found;
            end = utf8_before(text, end);
          }
          at = end;
          n = node.next;
        }
      }
    }
  }

  // ---- Linking ----

  // The node where the alternatives begin; each continues at `next`.
  size_t link(const Alternatives& all, size_t next) {
    std::vector<size_t> ways;
    for (const Sequence& sequence : all) {
      size_t first = next;
      for (auto item = sequence.rbegin(); item != sequence.rend(); ++item) first = link(*item, first);
      ways.push_back(first);
    }
    if (ways.size() == 1) return ways[0];
    nodes_.push_back({.kind = Kind::branch, .ways = ways});
    return nodes_.size() - 1;
  }
  size_t link(const Item& item, size_t next) {
    Node node = item;
    node.next = next;
    if (item.kind == Kind::branch) {
      node.ways = {link(item.inside, next)};
      if (item.min == 0) node.ways.push_back(next);
    } else if (item.kind != Kind::characters) {
      node.ways = {link(item.inside, 0)};  // accept: a lookahead ends here
    }
    nodes_.push_back(std::move(node));
    return nodes_.size() - 1;
  }
  // The smallest number of characters that the alternatives match.
  static size_t shortest(const Alternatives& all) {
    size_t least = unlimited;
    for (const Sequence& sequence : all) {
      size_t sum = 0;
      for (const Item& item : sequence)
        if (item.kind == Kind::characters) sum += item.min;
        else if (item.kind == Kind::branch) sum += item.min * shortest(item.inside);
      least = std::min(least, sum);
    }
    return least;
  }

  // ---- Parsing ----

  [[noreturn]] void refuse(const std::string& what, size_t at) const {
    throw Error(formatted("{}: pattern '{}': {} at byte {} is not supported; {}", where_, shown(pattern_, 400), what,
                          at, remedy));
  }
  bool peek(std::string_view text) const { return std::string_view(pattern_).substr(at_).starts_with(text); }
  bool take(std::string_view text) {
    const bool found = peek(text);
    if (found) at_ += text.size();
    return found;
  }
  char32_t take_character() {
    CHECK(at_ < pattern_.size(), "{}: pattern '{}' is incomplete", where_, shown(pattern_, 400));
    const Utf8Character c = utf8_at(pattern_, at_);
    at_ += c.width;
    return c.code;
  }

  Alternatives parse_alternatives(IgnoreCase ignore_case) {
    Alternatives all(1);
    while (at_ < pattern_.size() && !peek(")")) {
      if (take("|")) all.emplace_back();
      else all.back().push_back(parse_item(ignore_case));
    }
    return all;
  }

  Item parse_item(IgnoreCase ignore_case) {
    const size_t begin = at_;
    Item item;
    if (take("(")) {
      item.kind = Kind::branch;
      if (++depth_ > most_depth) refuse(formatted("a group {} deep", depth_), begin);
      if (take("?i:")) ignore_case = IgnoreCase::yes;
      else if (take("?=")) item.kind = Kind::ahead;
      else if (take("?!")) item.kind = Kind::not_ahead;
      else if (!take("?:") && peek("?")) refuse(formatted("the group '{}'", pattern_.substr(at_ - 1, 4)), begin);
      item.inside = parse_alternatives(ignore_case);
      CHECK(take(")"), "{}: pattern '{}': '(' at byte {} is not closed", where_, shown(pattern_, 400), begin);
      --depth_;
      if (ignore_case == IgnoreCase::yes) refuse_pairs(begin);
    } else {
      item.kind = Kind::characters;
      item.set = parse_set(ignore_case);
      item.set.finish();
    }
    parse_quantifier(item);
    return item;
  }

  // Refuses a case-insensitive group that matches one character for two: sharp s, ligatures.
  void refuse_pairs(size_t begin) const {
    std::string literals;  // lower case; escapes and classes are other characters
    bool in_class = false;
    for (size_t i = begin; i < at_; ++i) {
      const char c = pattern_[i];
      if (c == '\\') ++i;
      else if (c == '[' || c == ']') in_class = c == '[';
      const bool letter = !in_class && ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
      literals += letter ? static_cast<char>(c | 0x20) : ' ';
    }
    for (const char* pair : {"ss", "st", "ff", "fi", "fl"})
      if (literals.find(pair) != literals.npos) refuse(formatted("case-insensitive '{}'", pair), begin);
  }

  void parse_quantifier(Item& item) {
    const size_t begin = at_;
    if (take("*")) item.min = 0, item.max = unlimited;
    else if (take("+")) item.max = unlimited;
    else if (take("?")) item.min = 0;
    else if (take("{")) {
      item.min = item.max = parse_count(begin);
      if (take(",")) item.max = peek("}") ? unlimited : parse_count(begin);
      CHECK(take("}") && item.min <= item.max, "{}: pattern '{}': the count at byte {} is not {n}, {n,} or {n,m}",
            where_, shown(pattern_, 400), begin);
      if (peek("+") || peek("?")) refuse("a second quantifier", at_);  // in Oniguruma {n,m}+ is not possessive
    } else {
      return;
    }
    const bool once = item.min == 0 && item.max == 1;
    if (item.kind != Kind::characters && !(item.kind == Kind::branch && once && !peek("+")))
      refuse("a repeated group", begin);
    item.possessive = take("+");
    if (peek("*") || peek("+") || peek("?") || peek("{")) refuse("a second quantifier", at_);
  }
  size_t parse_count(size_t begin) {
    size_t count = 0, digits = 0;
    for (; at_ < pattern_.size() && pattern_[at_] >= '0' && pattern_[at_] <= '9'; ++at_, ++digits)
      count = 10 * count + static_cast<size_t>(pattern_[at_] - '0');
    if (digits == 0 || digits > 5) refuse("this count", begin);
    return count;
  }

  // One character, an escape or a class.
  CharacterSet parse_set(IgnoreCase ignore_case) {
    CharacterSet set;
    const size_t begin = at_;
    if (!take("[")) {
      for (const char* special : {".", "^", "$", "*", "+", "?", "{"})
        if (peek(special)) refuse(formatted("'{}'", special), begin);
      if (!parse_escaped_set(set, ignore_case)) {
        const char32_t c = parse_literal();
        add_range(set, c, c, ignore_case, begin);
      }
      return set;
    }
    const bool inverted = take("^");
    if (peek("]")) refuse("an empty class", begin);
    while (!take("]")) {
      const size_t here = at_;
      if (peek("[") || peek("&&")) refuse("a nested class", here);
      if (parse_escaped_set(set, ignore_case)) continue;
      const char32_t first = parse_literal();
      char32_t last = first;
      if (peek("-") && !peek("-]")) {
        ++at_;
        if (peek("[") || parse_escaped_set(set, ignore_case)) refuse("a range that ends in a class", here);
        last = parse_literal();
        CHECK(first <= last, "{}: pattern '{}': the range at byte {} is empty", where_, shown(pattern_, 400), here);
      }
      add_range(set, first, last, ignore_case, here);
    }
    if (inverted) set.invert();
    return set;
  }

  // Case-insensitive characters are ASCII only; two letters have a third form, the long s and the Kelvin sign.
  void add_range(CharacterSet& set, char32_t first, char32_t last, IgnoreCase ignore_case, size_t begin) const {
    set.add(first, last);
    if (ignore_case == IgnoreCase::no) return;
    if (last > 127) refuse("a case-insensitive character beyond ASCII", begin);
    for (char32_t c = first; c <= last; ++c) {
      const char32_t lower = c | 0x20;
      if (lower < 'a' || lower > 'z') continue;
      set.add(lower, lower);
      set.add(lower - 0x20, lower - 0x20);
      if (lower == 's') set.add(0x17f, 0x17f);
      if (lower == 'k') set.add(0x212a, 0x212a);
    }
  }

  // \s, \S, \d, \D, \p{NAME} or \P{NAME}; false: something else follows.
  bool parse_escaped_set(CharacterSet& set, IgnoreCase ignore_case) {
    constexpr CharacterTraits every_category = white_space_trait - 1;
    const size_t begin = at_;
    if (take("\\s")) set.add(white_space_trait);
    else if (take("\\S")) set.add(visible_trait);
    else if (take("\\d")) set.add(category_traits("Nd"));
    else if (take("\\D")) set.add(every_category & ~category_traits("Nd"));
    else if (peek("\\p{") || peek("\\P{")) {
      const bool others = peek("\\P");
      const size_t close = std::min(pattern_.find('}', at_), pattern_.size());
      const CharacterTraits traits = category_traits(pattern_.substr(at_ + 3, close - at_ - 3));
      if (traits == 0) refuse(formatted("'{}'", pattern_.substr(at_, close + 1 - at_)), begin);
      set.add(others ? every_category & ~traits : traits);
      at_ = close + 1;
    } else {
      return false;
    }
    if (ignore_case == IgnoreCase::yes) refuse("a case-insensitive class", begin);
    return true;
  }

  // A literal character, escaped or not.
  char32_t parse_literal() {
    const size_t begin = at_;
    if (!take("\\")) return take_character();
    const char32_t c = take_character();
    constexpr std::string_view letters = "nrtfv", controls = "\n\r\t\f\v";
    if (const size_t i = c < 128 ? letters.find(static_cast<char>(c)) : letters.npos; i != letters.npos)
      return static_cast<unsigned char>(controls[i]);
    const bool plain = c < 128 && !(c >= '0' && c <= '9') && !((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
    if (!plain) refuse(formatted("'{}'", pattern_.substr(begin, at_ - begin)), begin);
    return c;
  }

  std::string pattern_, where_;
  size_t at_ = 0, depth_ = 0;  // the parser's position and depth
  std::vector<Node> nodes_;
  size_t start_ = 0;
};

}  // namespace llmc
