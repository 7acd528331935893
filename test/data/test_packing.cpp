// Documents in rows (--pack): nothing dropped or doubled, how much is padded, samples of packed files, and the index of
// documents in its cache.
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "catch2.h"
#include "core/rng.h"
#include "data/dataloader.h"
#include "data/packed_shards.h"
#include "helpers.h"

using namespace llmc;

namespace {

// Documents that follow each other from place `begin` on.
std::vector<Range> documents_from(int64_t begin, const std::vector<int64_t>& sizes) {
  std::vector<Range> documents;
  for (const int64_t size : sizes) documents.push_back({begin, size}), begin += size;
  return documents;
}

std::vector<int64_t> random_sizes(std::mt19937& random, int64_t T) {
  std::vector<int64_t> sizes(random() % 40 + 1);
  for (int64_t& size : sizes)
    size = static_cast<int64_t>(random() % static_cast<uint64_t>(random() % 5 ? T : 4 * T)) + 1;
  return sizes;
}

// What is wrong with best-fit rows, found place by place; empty: nothing.
std::string fault_of(const PackedRows& rows, const std::vector<Range>& documents, int64_t T) {
  std::map<int64_t, int> held;       // place -> how often
  std::map<int64_t, int64_t> parts;  // a document's beginning -> its pieces
  int64_t before = -1;
  for (int64_t r = 0; r < rows.count(); ++r) {
    int64_t size = 0, end = -1;
    if (rows[r].empty()) return "a row is empty";
    if (rows[r].front().begin <= before) return "the rows are out of order";
    before = rows[r].front().begin;
    for (const Range& piece : rows[r]) {
      if (piece.begin < end) return "the pieces are out of order";
      end = piece.end(), size += piece.size;
      for (int64_t place = piece.begin; place < piece.end(); ++place) ++held[place];
      for (const Range& d : documents)
        if (overlap(d, piece).size > 0) {
          if (overlap(d, piece).size < piece.size) return "a piece is of two documents";
          ++parts[d.begin];
        }
    }
    if (size > T) return "a row is too long";
  }
  for (const Range& d : documents) {
    for (int64_t place = d.begin; place < d.end(); ++place)
      if (held[place] != 1) return held[place] == 0 ? "a place is dropped" : "a place is doubled";
    if (d.size <= T && parts[d.begin] != 1) return "a document is cut";
  }
  return held.size() == static_cast<size_t>(documents.back().end() - documents.front().begin) ? "" : "more is held";
}

// How much of each row is filled, in ascending order, by the same rule in its plainest form.
std::vector<int64_t> filled_by_looking(const std::vector<Range>& documents, int64_t T) {
  std::multiset<int64_t> left;
  int64_t full = 0;
  for (const Range& d : documents)
    for (int64_t size = d.size; size > 0; size -= T) {
      left.insert(std::min(size, T));
      full += d.size > T && size >= T;
    }
  const auto take = [&left](int64_t size) { left.erase(left.find(size)); };
  std::vector<int64_t> filled;
  while (!left.empty()) {
    int64_t room = T;
    bool more = true;
    while (more && !left.empty() && *left.begin() <= room) {
      const int64_t longest = *std::prev(left.upper_bound(room));
      take(longest);
      room -= longest;
      // The best one or two of all that are left: the larger from half the room on, of 16 different sizes.
      std::pair<int64_t, int64_t> best;
      if (left.contains(room)) best.first = room;
      std::set<int64_t> larger(left.lower_bound(ceil_div(room, 2)), left.lower_bound(room));
      while (larger.size() > 16) larger.erase(std::prev(larger.end()));
      for (auto a = larger.begin(); a != larger.end() && best.first + best.second < room; ++a) {
        std::multiset<int64_t> others = left;
        others.erase(others.find(*a));
        others.insert(0);
        const int64_t b = *std::prev(others.upper_bound(room - *a));
        if (*a + b > best.first + best.second) best = {*a, b};
      }
      more = 1024 * (room - best.first - best.second) > T;
      if (more) continue;
      for (const int64_t size : {best.first, best.second})
        if (size > 0) take(size), room -= size;
    }
    filled.push_back(T - room);
  }
  // While the large gaps together have room for a full row of a long document, take one away and fill the largest gaps.
  std::sort(filled.begin(), filled.end());
  const auto has_large_gap = [T](int64_t row) { return 16 * (T - row) >= T; };
  for (size_t row = 0; full > 0; --full) {
    int64_t free = 0;
    for (const int64_t f : filled) free += has_large_gap(f) ? T - f : 0;
    if (free < T) break;
    for (int64_t left = T; left > 0; row += !has_large_gap(filled[row])) {
      const int64_t n = std::min(left, T - filled[row]);
      filled[row] += n, left -= n;
    }
    filled.pop_back();  // the rows of long documents are full: at the end
  }
  std::sort(filled.begin(), filled.end());
  return filled;
}

std::vector<int64_t> filled(const PackedRows& rows) {
  std::vector<int64_t> all;
  for (int64_t r = 0; r < rows.count(); ++r) {
    all.push_back(0);
    for (const Range& piece : rows[r]) all.back() += piece.size;
  }
  std::sort(all.begin(), all.end());
  return all;
}

// A file of random documents that begin with token 0; all other tokens of it are different. Returns the tokens.
template <class Token>
std::vector<Token> write_documents(const std::string& path, std::mt19937& random, int64_t n, int64_t longest) {
  std::vector<Token> tokens;
  while (static_cast<int64_t>(tokens.size()) < n) {
    const uint64_t size = random() % static_cast<uint64_t>(longest) + 1;
    for (uint64_t i = 0; i < size; ++i) tokens.push_back(static_cast<Token>(i == 0 ? 0 : tokens.size() + 1));
  }
  write_shard(path, tokens);
  return tokens;
}

struct Sample {
  std::vector<int32_t> tokens, targets, positions;
  bool operator==(const Sample&) const = default;
};
Sample read(const PackedShards& shards, int64_t i, int64_t T, PositionsIn positions = PositionsIn::row) {
  const std::vector<int32_t> unset(static_cast<size_t>(T), -7);
  Sample s{unset, unset, unset};
  shards.read_sample(i, 1 << 20, s.tokens.data(), s.targets.data(), s.positions.data(), positions);
  return s;
}

PackedShards::Config config(Packing packing, int64_t T, const TempDir& dir) {
  return {.packing = packing, .seq_len = T, .vocab_size = 1 << 20, .index_directory = dir / "cache"};
}

const Notice no_notice = [](const std::string& text) { FAIL(text); };

}  // namespace

TEST_CASE("a set of numbers finds neighbours as std::set does", "[data][packing]") {
  std::mt19937 random(9);
  for (const int64_t size : {1, 64, 65, 4096, 5000, 300'000}) {
    detail::NumberSet numbers(size);
    std::set<int64_t> expected;
    for (int round = 0; round < 3000; ++round) {
      const int64_t x = static_cast<int64_t>(random() % static_cast<uint64_t>(size));
      if (expected.size() > 20 || (random() % 2 == 0 && !expected.empty())) {
        const int64_t gone = *std::next(expected.begin(), static_cast<int64_t>(random() % expected.size()));
        numbers.erase(gone), expected.erase(gone);
      } else {
        numbers.insert(x), expected.insert(x);
      }
      const auto next = expected.lower_bound(x), after = expected.upper_bound(x);
      REQUIRE(numbers.next(x) == (next == expected.end() ? std::nullopt : std::optional(*next)));
      REQUIRE(numbers.previous(x) == (after == expected.begin() ? std::nullopt : std::optional(*std::prev(after))));
    }
  }
}

TEST_CASE("best-fit rows hold every place once and cut only documents longer than a row", "[data][packing]") {
  std::mt19937 random(1);
  for (int round = 0; round < 400; ++round) {
    const int64_t T = round % 300 + 1;
    const std::vector<Range> documents = documents_from(random() % 50, random_sizes(random, T));
    const PackedRows rows = pack_rows(Packing::best_fit, documents, T);
    INFO("round " << round << ", T " << T);
    REQUIRE(fault_of(rows, documents, T) == "");
    REQUIRE(filled(rows) == filled_by_looking(documents, T));
    const PackingCounts counts = counts_of(rows, documents, T);
    REQUIRE(counts.dropped == 0);
    REQUIRE(counts.rows * T - counts.padded == counts.tokens);
    REQUIRE(counts.cut == std::ranges::count_if(documents, [T](const Range& d) { return d.size > T; }));
  }
  // Longer rows, which are full if one place in 1024 is left.
  for (int round = 0; round < 200; ++round) {
    const int64_t T = 1024 * (round % 4 + 1);
    std::vector<int64_t> sizes(random() % 80 + 20), some(random() % 40 + 2);
    for (int64_t& size : some) size = T / 12 + static_cast<int64_t>(random() % static_cast<uint64_t>(T / 2));
    for (int64_t& size : sizes) size = some[random() % some.size()];
    const std::vector<Range> documents = documents_from(0, sizes);
    INFO("round " << round);
    REQUIRE(filled(pack_rows(Packing::best_fit, documents, T)) == filled_by_looking(documents, T));
  }
  REQUIRE(pack_rows(Packing::best_fit, {}, 5).count() == 0);
  // Rows of more than 64 and 64^2 places.
  const std::vector<Range> documents = documents_from(0, {100'000, 7, 99'990, 3, 10, 1, 4096, 95'903});
  REQUIRE(filled(pack_rows(Packing::best_fit, documents, 100'000)) ==
          std::vector<int64_t>{10, 100'000, 100'000, 100'000});
}

TEST_CASE("the check of best-fit rows finds planted mistakes", "[data][packing]") {
  const int64_t T = 10;
  const std::vector<Range> documents = documents_from(3, {4, 25, 6, 3, 8, 10, 2});
  const PackedRows good = pack_rows(Packing::best_fit, documents, T);
  REQUIRE(fault_of(good, documents, T) == "");
  std::set<std::string> found;
  const auto plant = [&](auto&& change) {
    PackedRows bad = good;
    change(bad.pieces, bad.row_ends);
    found.insert(fault_of(bad, documents, T));
  };
  using Pieces = std::vector<Range>&;
  using Ends = std::vector<int64_t>&;
  plant([](Pieces pieces, Ends) { --pieces.back().size; });
  plant([](Pieces pieces, Ends) { pieces.back().begin = pieces.front().begin + 1; });
  plant([](Pieces pieces, Ends) { ++pieces.back().begin; });
  plant([](Pieces pieces, Ends) { --pieces[0].begin; });
  plant([](Pieces, Ends ends) { ends.erase(ends.begin()); });
  plant([](Pieces, Ends ends) { ends.push_back(ends.back()); });
  plant([](Pieces pieces, Ends) { std::swap(pieces[0], pieces[1]); });
  plant([&](Pieces pieces, Ends ends) {
    for (size_t i = 0; i < pieces.size(); ++i)
      if (const Range piece = pieces[i]; piece.size == 8) {  // alone in its row
        pieces[i].size = 3;
        pieces.insert(pieces.begin() + static_cast<int64_t>(i) + 1, {piece.begin + 3, 5});
        for (int64_t& end : ends) end += end > static_cast<int64_t>(i);
        return;
      }
  });
  for (const std::string& fault : found) UNSCOPED_INFO(fault);
  REQUIRE(!found.contains(""));
  REQUIRE(found.size() >= 6);
}

TEST_CASE("document-start rows begin with a document, are full, and drop the rest of the one they cut",
          "[data][packing]") {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    const int64_t T = round % 50 + 1;
    const std::vector<Range> documents = documents_from(random() % 50, random_sizes(random, T));
    const PackedRows rows = pack_rows(Packing::document_start, documents, T);
    const int64_t first = documents[0].begin, end = documents.back().end();
    std::set<int64_t> begins, cut;
    for (const Range& d : documents) begins.insert(d.begin);
    begins.insert(end);
    int64_t r = 0, held = 0;
    for (int64_t place = first; place + T <= end; ++r, held += T, place = *begins.lower_bound(place + T)) {
      INFO("round " << round << ", row " << r);
      REQUIRE(r < rows.count());
      int64_t at = place;
      for (const Range& piece : rows[r]) {  // one for each document in the row
        REQUIRE(piece.begin == at);
        REQUIRE((at == place || begins.contains(at)));
        REQUIRE(begins.upper_bound(at) == begins.lower_bound(piece.end()));
        at = piece.end();
      }
      REQUIRE(at == place + T);
      if (!begins.contains(at)) cut.insert(*std::prev(begins.lower_bound(at)));
    }
    REQUIRE(rows.count() == r);
    const PackingCounts counts = counts_of(rows, documents, T);
    REQUIRE(counts.padded == 0);
    REQUIRE(counts.dropped == end - first - held);
    REQUIRE(counts.cut == static_cast<int64_t>(cut.size()));
  }
}

TEST_CASE("best-fit pads less than 0.5% of rows for lengths as texts have them", "[data][packing]") {
  const int64_t T = 2048, window = 1024 * T;
  const Philox draw(7, "lengths");
  uint64_t at = 0;
  // Bytes of 20,283 manual pages of Debian 12, which few are short: 32 quantiles, linear between them.
  const std::vector<double> quantiles = {0,    902,  1052, 1179, 1303, 1434, 1590, 1766, 1943,  2136,  2321,
                                         2474, 2597, 2717, 2831, 2942, 3063, 3187, 3328, 3500,  3675,  3849,
                                         4032, 4219, 4450, 4741, 5144, 5799, 6527, 7751, 10197, 16680, 794636};
  const auto log_normal = [&](double sigma) {
    return T / 4 * std::exp(sigma * static_cast<double>(draw.normals(at++)[0]));
  };
  const std::map<std::string, std::function<double()>> lengths = {
      {"log-normal, median T / 4, sigma 1/2", [&] { return log_normal(0.5); }},
      {"log-normal, median T / 4, sigma 1", [&] { return log_normal(1); }},
      {"log-normal, median T / 4, sigma 3/2", [&] { return log_normal(1.5); }},
      {"Zipf's, up to 64 T",
       [&] { return std::exp(draw.uniform(at++) * std::log(64.0 * T)); }},  // P(length) ~ 1 / length
      {"manual pages", [&] {
         const double place = draw.uniform(at++) * static_cast<double>(quantiles.size() - 1), below = std::floor(place);
         const size_t i = static_cast<size_t>(below);
         return quantiles[i] + (place - below) * (quantiles[i + 1] - quantiles[i]);
       }}};
  for (const auto& [name, length] : lengths) {
    std::vector<int64_t> sizes;
    for (int64_t total = 0; total < window; total += sizes.back())
      sizes.push_back(std::max<int64_t>(1, std::llround(length())));
    const std::vector<Range> documents = documents_from(0, sizes);
    const PackingCounts counts = counts_of(pack_rows(Packing::best_fit, documents, T), documents, T);
    INFO(name << ": " << counts.padded << " of " << counts.rows * T);
    REQUIRE(counts.dropped == 0);
    REQUIRE(counts.padded * 200 < counts.rows * T);
  }
}

TEST_CASE("packed samples hold every token of the files once, each with its next token as target", "[data][packing]") {
  const TempDir dir;
  std::mt19937 random(3);
  using Pair = std::pair<int64_t, int64_t>;
  std::map<Pair, int> expected;  // of the token files, each a token and the next one
  const auto expect = [&](const auto& tokens) {
    for (size_t i = 0; i + 1 < tokens.size(); ++i) ++expected[{tokens[i], tokens[i + 1]}];
  };
  expect(write_documents<uint32_t>(dir / "a_0.bin", random, 20'000, 11));
  expect(write_documents<uint16_t>(dir / "a_1.bin", random, 300, 40));
  write_shard<uint16_t>(dir / "a_2.bin", {0});
  const TokenFiles files(dir / "a_*.bin", "--train-data");
  const auto check = [&](int64_t T, PositionsIn positions) {
    PackedShards::Config c = config(Packing::best_fit, T, dir);
    c.most_kept = 10;  // every window is packed again and again
    const PackedShards shards(files, c, no_notice);
    REQUIRE(shards.counts().dropped == 0);
    std::map<Pair, int> found;
    for (int64_t i = 0; i < shards.samples(); ++i) {
      const Sample s = read(shards, i, T, positions);
      int64_t targets = 0, begin = 0;
      for (size_t t = 0; t < s.tokens.size(); ++t) {
        const bool padded = s.targets[t] == -1;
        if (padded) REQUIRE(s.targets.back() == -1);
        else ++found[{s.tokens[t], s.targets[t]}], ++targets;
        // A document or the rest of one begins, as do the tokens of padding.
        const bool begins = t == 0 || padded || s.tokens[t] != s.targets[t - 1] || s.tokens[t] == 0;
        const int64_t place = static_cast<int64_t>(t);
        if (begins) begin = place;
        REQUIRE(s.positions[t] == (positions == PositionsIn::row ? place : place - begin));
      }
      REQUIRE(targets == shards.targets(i));
    }
    REQUIRE(found == expected);
  };
  for (const PositionsIn positions : {PositionsIn::row, PositionsIn::document}) {
    check(6, positions);    // a window has 6144 tokens
    check(600, positions);  // the last row of each file is mostly padding
  }
}

TEST_CASE("packed like the stream, samples are those of the stream", "[data][packing]") {
  const TempDir dir;
  std::mt19937 random(4);
  const int64_t T = 7;
  write_documents<uint16_t>(dir / "x.bin", random, 3000, 30);
  const TokenShards stream(dir / "x.bin", T);
  const PackedShards packed(stream, config(Packing::stream, T, dir), no_notice);
  REQUIRE(packed.samples() == stream.samples());
  DataLoader loader(stream, {.vocab_size = 1 << 20, .end_of_text = 0});
  for (int64_t i = 0; i < stream.samples(); ++i) {
    Sample s;
    loader.read_batch(i, 0, {}, s.tokens, s.targets, s.positions);
    REQUIRE(read(packed, i, T, PositionsIn::document) == s);
  }
}

TEST_CASE("threads read the same packed samples", "[data][packing]") {
  const TempDir dir;
  std::mt19937 random(5);
  const int64_t T = 4;
  write_documents<uint16_t>(dir / "x.bin", random, 30'000, 9);
  const TokenFiles files(dir / "x.bin", "--train-data");
  PackedShards::Config c = config(Packing::best_fit, T, dir);
  c.most_kept = 1000;
  const PackedShards shards(files, c, no_notice);
  const Permutation order(shards.samples(), 1, "order");
  std::vector<Sample> expected;
  for (int64_t i = 0; i < 500; ++i) expected.push_back(read(shards, order(i), T));
  std::array<bool, 4> same{};
  std::vector<std::thread> threads;
  for (bool& mine : same)
    threads.emplace_back([&] {
      mine = true;
      for (int64_t i = 0; i < 500; ++i) mine &= read(shards, order(i), T) == expected[static_cast<size_t>(i)];
    });
  for (std::thread& thread : threads) thread.join();
  REQUIRE(std::ranges::all_of(same, std::identity()));
}

TEST_CASE("data that cannot be packed are refused", "[data][packing]") {
  const TempDir dir;
  const auto refused = [&](const std::vector<uint16_t>& tokens, Packing packing, const std::string& part) {
    write_shard(dir / "x.bin", tokens);
    const TokenFiles files(dir / "x.bin", "--train-data");
    std::vector<std::string> notices;
    REQUIRE_ERROR(PackedShards(files, config(packing, 4, dir), [&](const std::string& n) { notices.push_back(n); }),
                  part);
  };
  refused({1, 2, 3, 4, 5, 6}, Packing::best_fit, "none of the 6 tokens of --train-data is 0, the end of text");
  refused({0}, Packing::best_fit, "no file holds a sample, which takes two tokens (1 tokens in 1 file(s))");
  refused({0, 1, 0, 2}, Packing::document_start,
          "no file holds a sample of --seq-len 4 + 1 tokens that begins with a document (4 tokens in 1 file(s))");
}

TEST_CASE("documents are indexed once; another state of the file, and damage, have them indexed again",
          "[data][packing]") {
  const TempDir dir;
  std::mt19937 random(6);
  std::vector<std::string> notices;
  const std::string cache = dir / "cache/indexes", file = dir / "x.bin";
  const auto open = [&](int32_t end_of_text = 0) {
    const TokenFiles files(file, "--train-data");
    notices.clear();
    return DocumentIndex(files, 0, 1 << 20, end_of_text, cache, [&](const std::string& n) { notices.push_back(n); });
  };
  const auto expected = [&](const std::vector<uint16_t>& tokens, uint16_t end_of_text = 0) {
    std::vector<int64_t> begins;
    for (size_t i = 0; i < tokens.size(); ++i)
      if (i == 0 || tokens[i] == end_of_text) begins.push_back(static_cast<int64_t>(i));
    return begins;
  };
  const auto all = [](const DocumentIndex& index) {
    OpenFiles files;
    return index.begins(0, index.documents(), files);
  };
  std::vector<uint16_t> tokens = write_documents<uint16_t>(file, random, 2000, 50);
  const DocumentIndex index = open();
  REQUIRE(all(index) == expected(tokens));
  const std::vector<int64_t> before = all(index);
  OpenFiles kept;
  for (size_t i = 0; i < 4; ++i) REQUIRE(index.begins(3, 4, kept)[i] == all(index)[3 + i]);
  REQUIRE(names_in(cache).size() == 1);  // nothing temporary

  // Another file of the same size and time in its place is noticed, without reading all of it.
  const auto time = std::filesystem::last_write_time(file);
  std::vector<uint16_t> others = tokens;
  for (size_t i = 0; i < others.size(); ++i) others[i] = static_cast<uint16_t>(i % 7);
  write_shard(file, others);
  std::filesystem::last_write_time(file, time);
  REQUIRE(all(open()) == expected(others));
  REQUIRE((notices.size() == 1 && notices[0].find("is of another file, or of another state") != std::string::npos));
  write_shard(file, tokens);
  std::filesystem::last_write_time(file, time);
  REQUIRE(all(open()) == before);
  // Found again, even though it is no longer right: not all tokens are read.
  tokens[1] = 0;
  write_shard(file, tokens);
  std::filesystem::last_write_time(file, time);
  REQUIRE(all(open()) == all(index));
  REQUIRE(notices.empty());
  const TokenFiles files(file, "--train-data");
  const PackedShards wrong(files, {.seq_len = 60, .vocab_size = 1 << 20, .index_directory = cache}, no_notice);
  REQUIRE_ERROR(read(wrong, 0, 60), "which the index " + index.path() + " lacks: delete");

  std::filesystem::last_write_time(file, time + std::chrono::nanoseconds(1000));
  REQUIRE(all(open()) == expected(tokens));
  REQUIRE((notices.size() == 1 && notices[0].find("another state of this one") != std::string::npos));
  tokens.push_back(0);
  write_shard(file, tokens);
  std::filesystem::last_write_time(file, time + std::chrono::nanoseconds(1000));
  REQUIRE(all(open()) == expected(tokens));
  REQUIRE(all(open(1)) == expected(tokens, 1));
  REQUIRE(notices.empty());
  REQUIRE(names_in(cache).size() == 2);  // for each end of text

  const std::string good = read_whole(index.path());
  const auto damaged = [&](const std::string& bytes) {
    std::ofstream(index.path(), std::ios::binary) << bytes;
    REQUIRE(all(open()) == expected(tokens));
    REQUIRE((notices.size() == 1 && notices[0].find(index.path()) != std::string::npos));
    REQUIRE(read_whole(index.path()) == good);
  };
  for (size_t i = 0; i < good.size(); i += i + 70 < good.size() ? 37 : 1) {
    std::string bytes = good;
    bytes[i] = static_cast<char>(bytes[i] ^ 4);
    damaged(bytes);
  }
  for (const size_t size : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, good.size() - 1, good.size() - 8})
    damaged(good.substr(0, size));
  damaged(good + good.substr(0, 8));
  damaged(read_whole(open(1).path()));  // of the same file, but another token
  // With a checksum that fits, beginnings that cannot be.
  IndexSeal seal;
  std::memcpy(&seal, good.data() + good.size() - sizeof seal, sizeof seal);
  for (const std::array<int64_t, 2>& begins : {std::array<int64_t, 2>{0, 0}, {-1, 3}, {0, 1 << 20}, {1, 2}}) {
    seal.documents = 2;
    seal.beginnings = XXH3_64bits(begins.data(), sizeof begins);
    seal.seal = seal.hash();
    damaged(std::string(reinterpret_cast<const char*>(begins.data()), sizeof begins) +
            std::string(reinterpret_cast<const char*>(&seal), sizeof seal));
  }
  REQUIRE(index.begins(3, 4, kept) ==
          std::vector<int64_t>(before.begin() + 3, before.begin() + 7));  // of a file replaced since
  std::filesystem::remove(index.path());
  REQUIRE(index.begins(3, 1, kept)[0] == before[3]);
  REQUIRE_ERROR(all(index), "cannot open " + index.path());
}

TEST_CASE("without a cache directory that can be written, an index stays in memory", "[data][packing]") {
  const TempDir dir;
  write_shard<uint16_t>(dir / "x.bin", {3, 0, 4, 0});
  std::ofstream(dir / "file") << "no directory";
  const TokenFiles files(dir / "x.bin", "--train-data");
  for (const bool is_known : {true, true, false}) {
    std::vector<std::string> notices;
    const DocumentIndex index(files, 0, 5, 0, is_known ? dir / "file/cache" : "",
                              [&](const std::string& n) { notices.push_back(n); });
    OpenFiles none;
    REQUIRE(index.begins(0, index.documents(), none) == std::vector<int64_t>{0, 1, 3});
    REQUIRE(notices.size() == 1);
    REQUIRE_THAT(notices[0],
                 Catch::Matchers::ContainsSubstring("x.bin cannot be kept, so every run makes it again") &&
                     Catch::Matchers::ContainsSubstring(is_known ? "file/cache" : "set HOME or XDG_CACHE_HOME"));
  }
  REQUIRE_ERROR(DocumentIndex(files, 0, 4, 0, dir / "cache", no_notice), "x.bin: token 4 at position 2 is outside");
  REQUIRE(names_in(dir / "cache").empty());
}
