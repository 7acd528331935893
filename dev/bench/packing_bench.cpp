// packing_bench.cpp: what --pack does to documents of lengths that are drawn, and to those of token shards; and how
// long it takes.
//
//   make packing-bench && build/packing_bench ['SHARDS' END_OF_TEXT T...]
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <map>

#include "core/rng.h"
#include "data/dataloader.h"
#include "data/packed_shards.h"

using namespace llmc;

namespace {

// Each process has its own: several may run at the same time.
std::string index_directory() {
  return std::filesystem::temp_directory_path() / formatted("packing_bench-{}", ::getpid());
}

// Seconds of this processor that f() takes.
double seconds_of(const std::function<void()>& f) {
  const std::clock_t begin = std::clock();
  f();
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

void print_row(const std::string& name, int64_t T, const std::map<Packing, PackingCounts>& of, double seconds) {
  const auto percent = [](int64_t part, int64_t whole) {
    return formatted("{:.2f}%", 100 * static_cast<double>(part) / static_cast<double>(whole));
  };
  const auto row = [&](Packing packing) { return of.at(packing); };
  const PackingCounts stream = row(Packing::stream), best = row(Packing::best_fit),
                      start = row(Packing::document_start);
  std::printf("| %s | %lld | %lld | %s | %s | %s | %s | %s | %.0f |\n", name.c_str(), static_cast<long long>(T),
              static_cast<long long>(best.documents), percent(stream.cut, stream.documents).c_str(),
              percent(best.padded, best.rows * T).c_str(), percent(best.cut, best.documents).c_str(),
              percent(start.dropped, start.tokens).c_str(), percent(start.cut, start.documents).c_str(),
              1e9 * seconds / static_cast<double>(best.documents));
  std::fflush(stdout);
}

// Thirty windows of documents of lengths that are drawn.
void pack_drawn(const std::string& name, int64_t T, const std::function<double()>& length) {
  std::map<Packing, PackingCounts> counts;
  double seconds = 0;
  for (int window = 0; window < 30; ++window) {
    std::vector<Range> documents;
    for (int64_t end = 0; end < 1024 * T; end = documents.back().end())
      documents.push_back({end, std::max<int64_t>(1, std::llround(length()))});
    for (const Packing packing : all_values<Packing>()) {
      PackedRows rows;
      const double taken = seconds_of([&] { rows = pack_rows(packing, documents, T); });
      if (packing == Packing::best_fit) seconds += taken;
      counts[packing] += counts_of(rows, documents, T);
    }
  }
  print_row(name, T, counts, seconds);
}

void time_samples(const std::string& pattern, int32_t end_of_text, int64_t T) {
  const std::string directory = index_directory();
  std::filesystem::remove_all(directory);
  const TokenShards shards(pattern, T, "SHARDS");
  constexpr int64_t V = int64_t{1} << 31, samples = 20'000;
  const auto silent = [](const std::string&) {};
  PackedShards::Config config{.seq_len = T, .vocab_size = V, .end_of_text = end_of_text, .index_directory = directory};
  const double made = seconds_of([&] { PackedShards(shards, config, silent); }),
               found = seconds_of([&] { PackedShards(shards, config, silent); });
  int64_t bytes = 0;
  for (const std::string& file : names_in(directory))
    bytes += static_cast<int64_t>(std::filesystem::file_size(directory + "/" + file));
  std::printf("%lld tokens, T %lld: %.2f s without an index, %.3f s with it (%lld bytes)\n",
              static_cast<long long>(shards.tokens()), static_cast<long long>(T), made, found,
              static_cast<long long>(bytes));
  std::vector<int32_t> sample, tokens(static_cast<size_t>(T)), targets = tokens, positions = tokens;
  const auto report = [&](const char* what, double seconds) {
    std::printf("  %-52s %6.1f us a sample, %6.1f million tokens/s\n", what, 1e6 * seconds / samples,
                1e-6 * static_cast<double>(samples * T) / seconds);
  };
  const Permutation order(shards.samples(), 1, "order");
  report("stream, shuffled", seconds_of([&] {
           for (int64_t i = 0; i < samples; ++i) shards.read_sample(order(i % shards.samples()), V, sample);
         }));
  for (const int64_t kept : {config.most_kept, int64_t{0}}) {
    config.most_kept = kept;
    const PackedShards packed(shards, config, silent);
    const Permutation packed_order(packed.samples(), 1, "order");
    const auto read = [&] {
      for (int64_t i = 0; i < samples; ++i)
        packed.read_sample(packed_order(i % packed.samples()), V, tokens.data(), targets.data(), positions.data());
    };
    if (kept > 0) read();  // packs all windows
    report(kept > 0 ? "best-fit, shuffled, packed windows in memory"
                    : "best-fit, shuffled, each sample's window packed anew",
           seconds_of(read));
  }
}

}  // namespace

int main(int count, char** arguments) try {
  CHECK(count == 1 || count > 3, "usage: packing_bench ['SHARDS' END_OF_TEXT T...]");
  std::puts(
      "| lengths | T | documents | stream: cut | best-fit: padded | cut | document-start: dropped | cut | best-fit, ns "
      "a "
      "document |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
  const Philox draw(1, "lengths");
  uint64_t at = 0;
  for (const int64_t T : {1024, 8192, 65536}) {
    const double size = static_cast<double>(T);
    pack_drawn("log-normal, median T / 4, sigma 1", T,
               [&] { return size / 4 * std::exp(static_cast<double>(draw.normals(at++)[0])); });
    pack_drawn("Zipf's, 1 to 64 T", T, [&] { return std::exp(draw.uniform(at++) * std::log(64 * size)); });
    pack_drawn("all between T / 2 and T", T, [&] { return size / 2 * (1 + draw.uniform(at++)); });
  }
  for (int i = 3; i < count; ++i) {
    const int64_t T = std::atoll(arguments[i]);
    const int32_t end_of_text = std::atoi(arguments[2]);
    const TokenFiles files(arguments[1], "SHARDS");
    std::map<Packing, PackingCounts> counts;
    double seconds = 0;
    for (const Packing packing : all_values<Packing>()) {
      const PackedShards::Config config{.packing = packing,
                                        .seq_len = T,
                                        .vocab_size = int64_t{1} << 31,
                                        .end_of_text = end_of_text,
                                        .index_directory = index_directory()};
      const double taken = seconds_of([&] { counts[packing] = PackedShards(files, config, [](auto&) {}).counts(); });
      if (packing == Packing::best_fit) seconds = taken;
    }
    print_row(arguments[1], T, counts, seconds);
  }
  for (int i = 3; i < count; ++i) time_samples(arguments[1], std::atoi(arguments[2]), std::atoll(arguments[i]));
  std::filesystem::remove_all(index_directory());
} catch (const Error& error) {
  std::filesystem::remove_all(index_directory());
  std::fprintf(stderr, "packing_bench: %s\n", error.what());
  return 1;
}
