// split_automaton.h: a split pattern as a deterministic automaton over classes of characters: one look into a table for
// each character, where backtracking would try one alternative after the other. Its states are the lists of places in
// the pattern where backtracking may be, in the order in which it would try them (Cox 2010, "Regular Expression
// Matching in the Wild"). Since every match ends one character late, what follows a match, as in (?!\S), is known; and
// the character after most matches is read once, as the end of one piece and the beginning of the next.
#pragma once
#include "text/split_pattern.h"

namespace llmc {

// Adjacent pieces of a text, in their order.
using Pieces = std::span<const std::string_view>;

class SplitAutomaton {
 public:
  static constexpr size_t most_pieces = 128;  // at a time

  // None: the pattern has lookahead over more than one character, or too many states.
  static std::optional<SplitAutomaton> compile(const SplitPattern& pattern) {
    SplitAutomaton made;
    made.nodes_ = &pattern.nodes();
    if (!made.classify() || !made.number_states(pattern.start())) return std::nullopt;
    made.find_places();
    made.make_steps_on();
    made.nodes_ = nullptr;
    return made;
  }

  // As SplitPattern::split(), up to most_pieces at a time.
  template <class F>
  void split(std::string_view text, F&& emit) const {
    const auto* const begin = reinterpret_cast<const unsigned char*>(text.data());
    const auto* const end = begin + text.size();
    std::array<const unsigned char*, most_pieces + 1> cuts;  // where pieces begin, and the last one ends
    std::array<std::string_view, most_pieces> pieces;
    const auto full = cuts.end() - 2;  // room for two
    auto last = cuts.begin();
    *last = begin;
    const unsigned char* here = begin;
    for (uint32_t state = start * classes_; *last < end;) {
      while (here < end && last < full) {
        size_t width = 1;
        const uint32_t step = steps_on_[state + class_at(here, width)];
        if ((step & stops) != 0) break;
        last[1] = here;
        last += step & cuts_here;
        state = step >> 2;
        here += width;
      }
      if (last < full) {  // the slow way from the beginning of this piece
        const auto [from, to] = next_match(*last, end);
        if (*last < from) *++last = from;
        if (from < to) *++last = to;
        here = to;
        state = start * classes_;
      }
      if (last < full && *last < end) continue;
      const size_t n = static_cast<size_t>(last - cuts.begin());
      for (size_t i = 0; i < n; ++i)
        pieces[i] = {reinterpret_cast<const char*>(cuts[i]), static_cast<size_t>(cuts[i + 1] - cuts[i])};
      emit(Pieces(pieces.data(), n));
      cuts[0] = *last;
      last = cuts.begin();
    }
  }

  // What is known of the place between two characters, whatever the rest of the text: a piece always ends there, and
  // the pieces on either side do not depend on the other one; or at least the latter.
  enum class Place : uint8_t { anything, independent, boundary };
  Place between(char32_t a, char32_t b) const { return places_[class_of(a) * classes_ + class_of(b)]; }

 private:
  static constexpr uint32_t dead = 0, start = 1;
  static constexpr size_t end_class = 0, most_states = 2000, most_classes = 255;
  struct Step {
    uint16_t next : 15, match : 1;  // match: one ends before the character
  };
  // A place in the pattern: a node, and how many characters a repetition has matched.
  using Thread = std::pair<size_t, size_t>;
  using Threads = std::vector<Thread>;
  using Kind = SplitPattern::Kind;

  Step step_at(uint32_t state, size_t c) const { return steps_[state * classes_ + c]; }

  // The first match that begins at `at` or later; nothing at the end: there is none.
  std::pair<const unsigned char*, const unsigned char*> next_match(const unsigned char* at,
                                                                   const unsigned char* end) const {
    while (at < end) {
      const unsigned char *matched = nullptr, *here = at;
      for (uint32_t state = start;;) {
        size_t width = 1;
        const Step step = step_at(state, here < end ? class_at(here, width) : end_class);
        if (step.match) matched = here;
        if (step.next == dead) break;
        state = step.next;
        here += width;
      }
      if (matched != nullptr) return {at, matched};
      size_t width = 1;
      class_at(at, width);
      at += width;
    }
    return {end, end};
  }
  size_t class_of(char32_t c) const { return class_in_page_[page_[c >> 8] | (c & 0xff)]; }
  size_t class_at(const unsigned char* at, size_t& width) const {
    if (*at < 0x80) return ascii_[*at];
    const Utf8Character c = utf8_at({reinterpret_cast<const char*>(at), 4}, 0);
    width = c.width;
    return class_of(c.code);
  }

  // Characters that are in the same sets of the pattern are one class.
  bool classify() {
    std::vector<const CharacterSet*> sets;
    std::set<char32_t> bounds = {0x110000};
    for (const SplitPattern::Node& node : *nodes_)
      if (node.kind == Kind::characters) sets.push_back(&node.set), node.set.add_bounds(bounds);
    std::map<std::vector<bool>, uint8_t> numbers;  // by which sets the class is in
    std::map<std::pair<char32_t, uint8_t>, uint8_t> known;
    std::vector<uint8_t> all(0x110000);
    auto bound = bounds.begin();
    const std::vector<uint8_t>& traits = detail::unicode_tables().traits;
    for (char32_t c = 0; c < all.size(); ++c) {
      if (c >= *bound) ++bound;
      else if (c > 0 && traits[c] == traits[c - 1]) {
        all[c] = all[c - 1];
        continue;
      }
      const auto [found, is_new] = known.try_emplace({*bound, traits[c]}, 0);
      if (is_new) {
        std::vector<bool> in(sets.size());
        for (size_t i = 0; i < sets.size(); ++i) in[i] = sets[i]->contains(c);
        const auto [number, first] = numbers.try_emplace(in, static_cast<uint8_t>(members_.size()));
        if (first) {
          if (members_.size() == most_classes) return false;
          members_.push_back(c);
        }
        found->second = number->second;
      }
      all[c] = found->second;
    }
    classes_ = static_cast<uint32_t>(members_.size());
    std::map<std::string, uint32_t> pages;
    for (size_t page = 0; page < page_.size(); ++page) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(page << 8);
      const auto [found, is_new] =
          pages.try_emplace({first, first + 256}, static_cast<uint32_t>(class_in_page_.size()));
      if (is_new) class_in_page_.insert(class_in_page_.end(), first, first + 256);
      page_[page] = found->second;
    }
    std::copy_n(all.begin(), ascii_.size(), ascii_.begin());
    return true;
  }

  bool number_states(size_t first_node) {
    std::map<Threads, uint16_t> numbers = {{{}, dead}, {{{first_node, 0}}, start}};
    std::vector<Threads> states = {{}, {{first_node, 0}}};
    for (size_t s = 0; s < states.size(); ++s)
      for (size_t c = 0; c < classes_; ++c) {
        Threads next;
        std::set<Thread> tried;
        bool match = false;
        for (const Thread& thread : Threads(states[s])) {
          const std::optional<bool> ends = advance(thread, c, next, tried);
          if (!ends) return false;
          if ((match = *ends)) break;  // what comes later is less preferred
        }
        const auto [found, is_new] = numbers.try_emplace(next, static_cast<uint16_t>(states.size()));
        if (is_new) states.push_back(next);
        if (states.size() > most_states) return false;
        steps_.push_back({.next = found->second, .match = match});
      }
    return true;
  }

  // next += where a place leads with a character of class c. Does a match end before it? None: it cannot be built.
  std::optional<bool> advance(const Thread& thread, size_t c, Threads& next, std::set<Thread>& tried) const {
    if (!tried.insert(thread).second) return false;  // a more preferred way led here, too
    const auto& [n, count] = thread;
    const SplitPattern::Node& node = (*nodes_)[n];
    switch (node.kind) {
      case Kind::accept: return true;
      case Kind::ahead:
      case Kind::not_ahead: {
        const SplitPattern::Node& inside = (*nodes_)[node.ways[0]];
        const bool one = inside.kind == Kind::characters && inside.min == 1 && inside.max == 1 &&
                         (*nodes_)[inside.next].kind == Kind::accept;
        if (!one) return std::nullopt;
        return contains(inside, c) == (node.kind == Kind::ahead) ? advance({node.next, 0}, c, next, tried) : false;
      }
      case Kind::branch:
        for (const size_t way : node.ways) {
          const std::optional<bool> ends = advance({way, 0}, c, next, tried);
          if (!ends || *ends) return ends;
        }
        return false;
      case Kind::characters:
        if (count < node.max && contains(node, c)) {
          const size_t enough = node.max == SplitPattern::unlimited ? node.min : node.max;
          const Thread more{n, std::min(count + 1, std::max<size_t>(enough, 1))};
          if (std::find(next.begin(), next.end(), more) == next.end()) next.push_back(more);
          if (node.possessive) return false;
        }
        return count >= node.min ? advance({node.next, 0}, c, next, tried) : false;
    }
    return std::nullopt;
  }
  bool contains(const SplitPattern::Node& node, size_t c) const {
    return c != end_class && node.set.contains(members_[c]);
  }

  // steps_, with those that begin the next piece where one ends.
  void make_steps_on() {
    for (uint32_t s = dead; s < steps_.size() / classes_; ++s)
      for (size_t c = 0; c < classes_; ++c) {
        const Step step = step_at(s, c);
        const bool ends = step.next == dead && step.match;
        const uint32_t next = ends ? step_at(start, c).next : step.next;
        steps_on_.push_back(next == dead ? stops : next * classes_ << 2 | (ends ? cuts_here : 0));
      }
  }

  void find_places() {
    places_.resize(classes_ * classes_, Place::anything);
    for (size_t a = 1; a < classes_; ++a) {
      std::set<uint32_t> after;  // the states after a character of class a
      for (uint32_t s = start; s < steps_.size() / classes_; ++s)
        if (const uint32_t next = step_at(s, a).next; next != dead) after.insert(next);
      for (size_t b = 1; b < classes_; ++b) {
        bool independent = true, boundary = step_at(start, a).next != dead;
        for (const uint32_t s : after) {
          const Step with = step_at(s, b), at_end = step_at(s, end_class);
          independent &= with.next == dead && with.match == at_end.match;
          boundary &= with.next == dead && with.match && at_end.match;
        }
        places_[a * classes_ + b] = boundary ? Place::boundary : independent ? Place::independent : Place::anything;
      }
    }
  }

  const std::vector<SplitPattern::Node>* nodes_ = nullptr;  // while it is built
  std::vector<char32_t> members_ = {0};  // one character of each class; class 0 is the end of the text
  uint32_t classes_ = 0;
  std::array<uint8_t, 128> ascii_{};
  std::array<uint32_t, 0x1100> page_{};  // where the classes of 256 characters are
  std::vector<uint8_t> class_in_page_;
  std::vector<Step> steps_;  // (states, classes)
  // The same of a text: the next state's place, and whether the character begins a piece, or needs the slow way.
  static constexpr uint32_t cuts_here = 1, stops = 2;
  std::vector<uint32_t> steps_on_;
  std::vector<Place> places_;
};

// A pattern, by its automaton if it has one.
class Splitter {
 public:
  Splitter(const std::string& pattern, const std::string& where)
      : pattern_(pattern, where), automaton_(SplitAutomaton::compile(pattern_)) {}
  template <class F>
  void split(std::string_view text, F&& emit) const {
    if (automaton_) automaton_->split(text, emit);
    else pattern_.split(text, [&](std::string_view piece) { emit(Pieces(&piece, 1)); });
  }
  SplitAutomaton::Place between(char32_t a, char32_t b) const {
    return automaton_ ? automaton_->between(a, b) : SplitAutomaton::Place::anything;
  }

 private:
  SplitPattern pattern_;
  std::optional<SplitAutomaton> automaton_;
};

}  // namespace llmc
