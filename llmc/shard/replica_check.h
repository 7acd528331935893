// replica_check.h: are the copies of the model's state still equal, bit for bit (contract 14)? A bit that flips in the
// memory of one rank, or a device that computes wrongly, turns one model into two, and no loss shows it.
//
// No list says which ranks hold copies: two ranks whose StateTables name the same elements of the same parameter hold
// copies of them, be they data-parallel or context-parallel ranks, replicas, tensor-parallel ranks with the same norms
// or key-value heads, ranks with the same experts, or the two ends of a pipeline with a tied table. Each rank sends
// rank 0 a number for each unit, kind of state and number of tensor-parallel copies: a hash of which elements. Of what
// several ranks hold, each hashes the contents, in one pass over its memory, and sends that, too. Only if those differ
// do the ranks send the hashes of each parameter.
#pragma once
#include <sstream>

#include "core/checksum.h"
#include "shard/zero.h"

namespace llmc {

// State outside the units, the same on all ranks.
struct SharedByAll {
  std::string name;
  std::vector<float> values;
};

namespace detail {

// The part of a parameter's state that a rank holds.
struct HeldCopy {
  // PARAMETER:KIND[BEGIN:END], as in a checkpoint, and its unit; a weight has no KIND, a whole tensor no range
  std::string name;
  uint64_t where = 0, contents = 0;      // which elements; their bits, once they are hashed
  std::optional<StateEntry> entry = {};  // none: of state outside the units, which is hashed at once
};
// Parts that the same ranks hold: those of one unit, kind of state and number of tensor-parallel copies.
struct HeldCopies {
  std::vector<HeldCopy> parts;
  uint64_t where() const { return of_parts(&HeldCopy::where); }
  uint64_t contents() const { return of_parts(&HeldCopy::contents); }

 private:
  uint64_t of_parts(uint64_t HeldCopy::*which) const {
    RunningHash hash;
    for (const HeldCopy& part : parts) hash.add(&(part.*which), sizeof(uint64_t));
    return hash.value();
  }
};

inline uint64_t hash_of(const void* data, int64_t bytes) {
  RunningHash hash;
  hash.add(data, bytes);
  return hash.value();
}
// Hashes in pieces, so that the copy of a GPU's memory takes little memory of the host.
inline uint64_t hash_of_bits(const Tensor& t, Stream& stream) {
  constexpr int64_t piece_bytes = int64_t{16} << 20;
  const int64_t piece = piece_bytes / size_of(t.dtype);
  RunningHash hash;
  for (int64_t begin = 0; begin < t.numel(); begin += piece) {
    const HostView view(t.slice(begin, {std::min(piece, t.numel() - begin)}), stream);
    hash.add(view.tensor().bytes, view.tensor().size_bytes());
  }
  return hash.value();
}

inline HeldCopy held_copy(const StateEntry& e, const std::string& unit) {
  const Elements elements = e.elements();
  const int64_t numbers[] = {elements.begin, elements.first, elements.columns, elements.stride, e.tensor.numel()};
  RunningHash where;
  where.add(e.param->name.data(), std::ssize(e.param->name));
  where.add(e.name(), static_cast<int64_t>(std::strlen(e.name())));
  where.add(numbers, sizeof numbers);
  HeldCopy held{e.param->name, where.value(), 0, e};
  if (e.kind != StateKind::weight) held.name += formatted(":{}", e.name());
  if (e.tensor.numel() < e.param->numel())
    held.name += formatted("[{}:{}]", elements.index(0), elements.index(e.tensor.numel() - 1) + 1);
  held.name += " of unit " + unit;
  return held;
}

inline uint64_t hash_of_contents(const StateEntry& e, Stream& stream) {
  if (!e.small() || e.is_bf16_slot()) return hash_of_bits(e.tensor, stream);
  const StateView view(e, stream);
  return hash_of(view.tensor().bytes, view.tensor().size_bytes());
}

// only: this unit alone; none: all
inline std::vector<HeldCopies> copies_held(const ModelState& state, const std::vector<SharedByAll>& shared,
                                           std::optional<size_t> only) {
  std::vector<HeldCopies> held;
  for (size_t u = 0; u < state.size(); ++u) {
    if (!state.has(u) || (only && u != *only)) continue;
    StateTable table;
    state.unit(u).append_to(table);
    std::map<std::tuple<StateKind, size_t, int>, HeldCopies> of_unit;
    for (const StateEntry& e : table)
      of_unit[{e.kind, e.slot, e.param->copies}].parts.push_back(held_copy(e, state.unit(u).spec().name));
    for (auto& [key, copies] : of_unit) held.push_back(std::move(copies));
  }
  for (const SharedByAll& s : shared)
    held.push_back({{{s.name, hash_of(s.name.data(), std::ssize(s.name)),
                      hash_of(s.values.data(), std::ssize(s.values) * static_cast<int64_t>(sizeof(float)))}}});
  return held;
}

// Numbers as the bytes of a text, and back.
inline std::string bytes_of(const std::vector<uint64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(uint64_t)};
}
inline std::vector<uint64_t> numbers_of(const std::string& bytes) {
  std::vector<uint64_t> numbers(bytes.size() / sizeof(uint64_t));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(uint64_t));
  return numbers;
}

// What of that other ranks hold, too. Called by all ranks.
inline std::vector<HeldCopies> held_by_several(const ModelState& state, const std::vector<SharedByAll>& shared,
                                               std::optional<size_t> only) {
  Comm& control = state.groups()[GroupName::control];
  std::vector<HeldCopies> held = copies_held(state, shared, only);
  std::vector<uint64_t> places;
  for (const HeldCopies& copies : held) places.push_back(copies.where());
  std::map<uint64_t, int> holders;
  for (const std::string& theirs : control.gather_text(0, "places of copies", bytes_of(places)))
    for (const uint64_t where : numbers_of(theirs)) ++holders[where];
  std::vector<uint64_t> several;  // in ascending order
  for (const auto& [where, count] : holders)
    if (count > 1) several.push_back(where);
  several = numbers_of(control.all_gather_text("what several ranks hold", bytes_of(several))[0]);
  std::erase_if(held, [&](const HeldCopies& copies) { return !std::ranges::binary_search(several, copies.where()); });
  return held;
}

// Who holds a parameter, and the hash of each holder, in words. A majority of equal holders is only counted; the others
// are named. With two holders, both are named.
inline std::string describe_copies(const std::vector<std::pair<std::string, uint64_t>>& holders) {
  std::map<uint64_t, std::vector<std::string>> by_contents;
  for (const auto& [holder, contents] : holders) by_contents[contents].push_back(holder);
  const auto most = std::max_element(by_contents.begin(), by_contents.end(),
                                     [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  const bool majority = 2 * most->second.size() > holders.size();
  std::string text;
  for (const auto& [contents, names] : by_contents) {
    if (majority && contents == most->first) continue;
    for (const std::string& name : names)
      text += formatted("{}{} has {}", text.empty() ? "" : ", ", name, hex_digits(contents));
  }
  if (majority) text += formatted(", the {} others {}", most->second.size(), hex_digits(most->first));
  return text;
}

}  // namespace detail

// How copies of the model's state differ, in words; none: they are equal. Called by all ranks, between two steps; all
// get the same answer. me: this rank and where it runs. only: this unit alone; none: all
inline std::optional<std::string> diverged_copies(const ModelState& state, const std::string& me, Stream& stream,
                                                  const std::vector<SharedByAll>& shared = {},
                                                  std::optional<size_t> only = {}) {
  if (state.groups().ranks() == 1) return std::nullopt;
  Comm& control = state.groups()[GroupName::control];
  std::vector<detail::HeldCopies> held = detail::held_by_several(state, shared, only);
  std::vector<uint64_t> hashes;
  for (detail::HeldCopies& copies : held) {
    for (detail::HeldCopy& part : copies.parts)
      if (part.entry) part.contents = detail::hash_of_contents(*part.entry, stream);
    hashes.insert(hashes.end(), {copies.where(), copies.contents()});
  }
  std::map<uint64_t, uint64_t> first;
  std::vector<uint64_t> differ;  // the `where` of copies that differ
  for (const std::string& theirs : control.gather_text(0, "hashes of copies", detail::bytes_of(hashes))) {
    const std::vector<uint64_t> numbers = detail::numbers_of(theirs);
    for (size_t i = 0; i + 1 < numbers.size(); i += 2)
      if (first.emplace(numbers[i], numbers[i + 1]).first->second != numbers[i + 1]) differ.push_back(numbers[i]);
  }
  differ = detail::numbers_of(control.all_gather_text("copies that differ", detail::bytes_of(differ))[0]);
  if (differ.empty()) return std::nullopt;

  std::string mine = me + '\n';
  for (const detail::HeldCopies& copies : held)
    if (std::ranges::find(differ, copies.where()) != differ.end())
      for (const detail::HeldCopy& part : copies.parts)
        mine += formatted("{} {} {}\n", part.where, part.contents, part.name);
  std::vector<std::pair<std::string, uint64_t>> names;  // with `where`, in the order of the model
  std::map<uint64_t, std::vector<std::pair<std::string, uint64_t>>> holders;
  for (const std::string& theirs : control.gather_text(0, "what differs", mine)) {
    std::istringstream in(theirs);
    std::string line, rank;
    std::getline(in, rank);
    while (std::getline(in, line)) {
      std::istringstream words(line);
      uint64_t where, contents;
      std::string name;
      words >> where >> contents >> std::ws;
      std::getline(words, name);
      if (!holders.contains(where)) names.emplace_back(name, where);
      holders[where].emplace_back(rank, contents);
    }
  }
  std::erase_if(names, [&](const auto& n) {
    const auto& of = holders[n.second];
    return std::ranges::all_of(of, [&](const auto& h) { return h.second == of.front().second; });
  });
  constexpr size_t most_named = 3;
  std::string words;
  for (size_t i = 0; i < std::min(names.size(), most_named); ++i)
    words +=
        formatted("{}{}: {}", i == 0 ? "" : "; ", names[i].first, detail::describe_copies(holders[names[i].second]));
  if (names.size() > most_named) words += formatted("; and {} more differ", names.size() - most_named);
  return control.all_gather_text("how copies differ", words)[0];
}

}  // namespace llmc
