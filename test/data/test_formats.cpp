// Files of tokens that other tools wrote (test/golden/make_token_files.py): they give the samples that those tools read
// from them, and are refused where they are not what they are said to be.
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "catch2.h"
#include "core/json.h"
#include "data/dataloader.h"
#include "data/document_index.h"
#include "data/packed_shards.h"
#include "data/verify_data.h"
#include "helpers.h"

using namespace llmc;
namespace fs = std::filesystem;

namespace {

const std::string foreign = "test/golden/token_files/";
constexpr int64_t vocabulary = 120, end_of_text = 119;

std::vector<std::string> foreign_files() {
  std::vector<std::string> files = {"nanogpt.bin", "olmo.npy"};
  for (const TokenType type : all_values<TokenType>())
    if (type != TokenType::uint32) files.push_back(formatted("megatron_{}.bin", name_of(type)));
  return files;
}
DataFormat format_of(const std::string& file) {
  return file.starts_with("nano")   ? DataFormat::nanogpt
         : file.starts_with("olmo") ? DataFormat::olmo
                                    : DataFormat::megatron;
}
template <class T>
void write_numbers(const std::string& path, const std::vector<T>& numbers) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(numbers.data()), static_cast<std::streamsize>(numbers.size() * sizeof(T)));
}
template <class T>
void patch(const std::string& path, int64_t byte, T value) {
  std::fstream(path, std::ios::binary | std::ios::in | std::ios::out)
      .seekp(byte)
      .write(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

TEST_CASE("files of nanoGPT, Megatron and OLMo give the samples that those tools give", "[data][formats]") {
  const nlohmann::json golden = read_json(foreign + "samples.json");
  for (const std::string& file : foreign_files()) {
    INFO(file);
    const auto theirs = golden.at(file).at("samples").get<std::vector<std::vector<int32_t>>>();
    const int64_t T = golden.at("T");
    // Megatron is recognised; the others must be named.
    const DataFormat named = format_of(file), format = named == DataFormat::megatron ? DataFormat::automatic : named;
    const TokenShards shards(foreign + file, T, "--train-data", format);
    const TokenFile opened = open_token_file(foreign + file, format);
    REQUIRE(opened.format == named);
    REQUIRE(name_of(opened.type) == golden[file]["type"].get<std::string>());
    REQUIRE(shards.samples() == std::ssize(theirs));
    DataLoader loader(shards, {.vocab_size = vocabulary});
    std::vector<int32_t> inputs, targets, positions;
    for (int64_t i = 0; i < shards.samples(); ++i) {
      std::vector<int32_t> expected = theirs[static_cast<size_t>(i)];
      loader.read_batch(i, 0, {}, inputs, targets, positions);
      // OLMo's chunks have no target for their last token.
      std::vector<int32_t> ours = inputs;
      if (named != DataFormat::olmo) ours.push_back(targets.back());
      REQUIRE(ours == expected);
      expected.erase(expected.begin());
      targets.resize(expected.size());
      REQUIRE(targets == expected);
    }
  }
}

TEST_CASE("documents begin where each format says", "[data][formats]") {
  const nlohmann::json golden = read_json(foreign + "samples.json");
  constexpr int64_t T = 11;
  for (const std::string& file : foreign_files()) {
    INFO(file);
    const TokenShards shards(foreign + file, T, "--train-data", format_of(file));
    std::vector<int32_t> all(static_cast<size_t>(shards.tokens()));
    shards.read(0, 0, shards.tokens(), vocabulary, all);
    std::vector<int64_t> starts;
    if (golden[file].contains("documents")) starts = golden[file]["documents"].get<std::vector<int64_t>>();
    else
      for (size_t t = 1; t < all.size(); ++t)
        if (all[t - 1] == end_of_text) starts.push_back(static_cast<int64_t>(t));
    DataLoader loader(shards, {.vocab_size = vocabulary, .end_of_text = end_of_text});
    std::vector<int32_t> inputs, targets, positions;
    for (int64_t i = 0; i < shards.samples(); ++i) {
      loader.read_batch(i, 0, {}, inputs, targets, positions);
      int64_t begin = i * T;
      for (int64_t t = i * T; t < (i + 1) * T; ++t) {
        if (std::ranges::find(starts, t) != starts.end()) begin = t;
        REQUIRE(positions[static_cast<size_t>(t - i * T)] == t - begin);
      }
    }
  }
}

TEST_CASE("documents that are packed begin where each format says", "[data][formats][packing]") {
  const TempDir dir;
  const nlohmann::json golden = read_json(foreign + "samples.json");
  std::vector<std::string> notices;
  const auto notice = [&](const std::string& line) { notices.push_back(line); };
  const auto begins_of = [&](const std::string& path, DataFormat format) {
    const DocumentIndex index(TokenFiles(path, "--train-data", format), 0, vocabulary, end_of_text, dir / "cache",
                              notice);
    OpenFiles files;
    return index.begins(0, index.documents(), files);
  };
  for (const std::string& file : foreign_files()) {
    INFO(file);
    const TokenFiles files(foreign + file, "--train-data", format_of(file));
    std::vector<int32_t> all;
    files.read(0, 0, files.tokens(), vocabulary, all);
    std::set<int64_t> begins{0};
    if (golden[file].contains("documents"))
      for (const int64_t start : golden[file]["documents"].get<std::vector<int64_t>>()) begins.insert(start);
    else
      for (size_t t = 1; t < all.size(); ++t)
        if (all[t - 1] == end_of_text) begins.insert(static_cast<int64_t>(t));
    begins.erase(files.tokens());  // of a document without tokens
    REQUIRE(begins_of(foreign + file, format_of(file)) == std::vector<int64_t>(begins.begin(), begins.end()));
    // In rows of whole documents, every document is in one piece: its tokens, and as target of the last the next one.
    const int64_t T = files.tokens();
    const PackedShards shards(
        files, {.seq_len = T, .vocab_size = vocabulary, .end_of_text = end_of_text, .index_directory = dir / "cache"},
        notice);
    std::vector<int32_t> tokens(all.size()), targets(all.size()), positions(all.size());
    shards.read_sample(0, vocabulary, tokens.data(), targets.data(), positions.data(), PositionsIn::document);
    std::multiset<int64_t> expected, found;
    for (auto at = begins.begin(); at != begins.end(); ++at)
      expected.insert((std::next(at) == begins.end() ? T - 1 : *std::next(at)) - *at);
    expected.erase(0);
    for (size_t t = 0, size = 0; t < targets.size() && targets[t] >= 0; ++t)
      if (++size; t + 1 == targets.size() || targets[t + 1] < 0 || positions[t + 1] == 0)
        found.insert(static_cast<int64_t>(std::exchange(size, 0)));
    REQUIRE(found == expected);
  }
  REQUIRE(notices.empty());

  // The token that ends a document, at the end of a block that is read.
  std::vector<uint16_t> tokens((1 << 18) + 5, 1);
  tokens[(1 << 18) - 1] = tokens.back() = end_of_text;
  write_numbers(dir / "x.bin", tokens);
  REQUIRE(begins_of(dir / "x.bin", DataFormat::nanogpt) == std::vector<int64_t>{0, 1 << 18});
  tokens.assign(100, 1);
  write_numbers(dir / "y.bin", tokens);
  const TokenFiles unmarked(dir / "y.bin", "--train-data", DataFormat::nanogpt);
  const PackedShards::Config config{
      .seq_len = 8, .vocab_size = vocabulary, .end_of_text = end_of_text, .index_directory = dir / "cache"};
  REQUIRE_ERROR(PackedShards(unmarked, config, notice),
                "none of the 100 tokens of --train-data is 119, the end of "
                "text, which ends documents");

  // Another index of Megatron's beside the same tokens.
  for (const char* name : {"megatron_int32.bin", "megatron_int32.idx"}) fs::copy_file(foreign + name, dir / name);
  const std::vector<int64_t> before = begins_of(dir / "megatron_int32.bin", DataFormat::megatron);
  fs::last_write_time(dir / "megatron_int32.idx",
                      fs::last_write_time(dir / "megatron_int32.idx") - std::chrono::hours(1));
  REQUIRE(begins_of(dir / "megatron_int32.bin", DataFormat::megatron) == before);
  REQUIRE((notices.size() == 1 && notices[0].find("another state of this one") != std::string::npos));
}

TEST_CASE("tokens without a header are read only if their format is named, and is theirs", "[data][formats]") {
  const TempDir dir;
  const std::string path = dir / "train.bin";
  std::vector<uint16_t> narrow(1000);
  for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = static_cast<uint16_t>(i * 7919 % 50257);
  narrow[0] = 0x8b1f;  // the two bytes with which gzip's files begin
  write_numbers(path, narrow);
  REQUIRE_ERROR(open_token_file(path),
                "tokens without a header are read only if --data-format says nanogpt or olmo; it "
                "seems to be uint16 tokens without a header, as nanoGPT writes them: "
                "--data-format nanogpt");
  REQUIRE(open_token_file(path, DataFormat::nanogpt).tokens == 1000);
  REQUIRE_ERROR(open_token_file(path, DataFormat::olmo), "these seem to be uint16 tokens: --data-format nanogpt");
  REQUIRE_ERROR(open_token_file(path, DataFormat::llmc), "--data-format nanogpt");
  REQUIRE_ERROR(open_token_file(path, DataFormat::megatron), "needs its index beside it, " + (dir / "train.idx"));
  write_numbers(path, std::vector<uint32_t>(narrow.begin(), narrow.end()));
  REQUIRE(open_token_file(path, DataFormat::olmo).tokens == 1000);
  REQUIRE_ERROR(open_token_file(path, DataFormat::nanogpt), "these seem to be uint32 tokens: --data-format olmo");
  // A vocabulary of a few characters looks the same either way, and is taken as it is said to be.
  for (uint16_t& t : narrow) t %= 4;
  write_numbers(path, narrow);
  REQUIRE(open_token_file(path, DataFormat::nanogpt).tokens == 1000);

  const auto refused = [&](const std::string& contents, DataFormat format, const std::string& part) {
    std::ofstream(path, std::ios::binary) << contents;
    REQUIRE_ERROR(open_token_file(path, format), path);
    REQUIRE_ERROR(open_token_file(path, format), part);
  };
  for (const DataFormat format : {DataFormat::nanogpt, DataFormat::olmo}) {
    refused("", format, "holds no tokens");
    refused("12345", format, "5 bytes are no whole number");
    refused("\x93NUMPY" + std::string(200, '\1'), format, "numpy's with a header");
    refused(std::string(1000, 'a'), format, "it seems to be text");
    refused(read_whole(foreign + "megatron_int32.idx"), format, "Megatron's index: name the .bin beside it");
    write_shard<uint16_t>(path, std::vector<uint16_t>(100, 7));
    REQUIRE_ERROR(open_token_file(path, format), "a token shard of llm.c, which --data-format auto reads");
    REQUIRE_ERROR(open_token_file(foreign + "megatron_int32.bin", format),
                  "its index " + foreign + "megatron_int32.idx");
  }
  REQUIRE_ERROR(open_token_file(foreign + "megatron_int32.idx"), "Megatron's index: name the .bin beside it");
  REQUIRE_ERROR(open_token_file(foreign + "megatron_int32.idx", DataFormat::megatron), "name the .bin beside it");
}

TEST_CASE("a Megatron file without sequences is one of no tokens, which is left out among others", "[data][formats]") {
  const TempDir dir;
  std::string index("MMIDIDX\0\0\1\0\0\0\0\0\0\0\10", 18);
  index += std::string(8, '\0') + '\1' + std::string(15, '\0');  // no sequences; one boundary, at 0
  std::ofstream(dir / "x.idx", std::ios::binary) << index;
  std::ofstream(dir / "x.bin", std::ios::binary).close();
  REQUIRE(open_token_file(dir / "x.bin").tokens == 0);
  REQUIRE_ERROR(TokenFiles(dir / "*.bin", "--train-data"), "--train-data " + (dir / "*.bin") + ": holds no tokens");
  fs::copy_file(foreign + "megatron_uint16.bin", dir / "y.bin");
  fs::copy_file(foreign + "megatron_uint16.idx", dir / "y.idx");
  REQUIRE(TokenFiles(dir / "*.bin", "--train-data").tokens_of_files() == std::vector<int64_t>{110});
}

TEST_CASE("an index of Megatron's that does not add up is refused with the number that is wrong", "[data][formats]") {
  const TempDir dir;
  const std::string data = dir / "x.bin", index = dir / "x.idx";
  // 18 sequences and 13 boundaries: lengths from byte 34 on, pointers from 106, boundaries from 250; 354 bytes.
  constexpr int64_t lengths = 34, pointers = 106, boundaries = 250;
  const auto refused = [&](const std::string& part, auto change) {
    fs::copy_file(foreign + "megatron_uint16.bin", data, fs::copy_options::overwrite_existing);
    fs::copy_file(foreign + "megatron_uint16.idx", index, fs::copy_options::overwrite_existing);
    REQUIRE(open_token_file(data).tokens == 110);
    change();
    INFO(part);
    REQUIRE_ERROR(open_token_file(data, DataFormat::megatron), part);
    REQUIRE_ERROR(open_token_file(data, DataFormat::megatron), dir.path() + "/x.");
  };
  const auto with = [&](const std::string& part, int64_t byte, auto value) {
    refused(part, [&] { patch(index, byte, value); });
  };
  with("begins with MMIDIDX", 0, 'X');
  with("version 2 of Megatron's index, expected 1", 9, uint64_t{2});
  with("version 4294967297", 13, uint32_t{1});
  with("type code 7 is of floating-point numbers", 17, uint8_t{7});
  for (const int code : {0, 9, 255}) with(formatted("unknown type code {}", code), 17, static_cast<uint8_t>(code));
  with("sequence 1 is at byte 8, expected 4", 17, uint8_t{1});
  with("sequence 1 is at byte 8, expected 16", 17, uint8_t{4});
  for (const uint64_t count : {uint64_t{0}, uint64_t{17}, uint64_t{19}, ~uint64_t{0}, uint64_t{1} << 61,
                               uint64_t{1} << 63, (~uint64_t{0} - 103) / 12 + 19}) {
    with(formatted("{} sequences and 13 document boundaries take 12 and 8 bytes each, but 320", count), 18, count);
    if (count != 0) with(formatted("18 sequences and {} document boundaries", count), 26, count);
  }
  // With 64 bits these would add up.
  with("4611686018427387922 sequences and 13", 18, (uint64_t{1} << 62) + 18);
  with("18 sequences and 2305843009213693965", 26, (uint64_t{1} << 61) + 13);
  with("sequence 3 has -1 tokens", lengths + 12, int32_t{-1});
  with("sequence 4 is at byte 12, expected 16", lengths + 12, int32_t{4});
  with("sequence 17, of 2147483647 tokens from byte 212 on, ends beyond", lengths + 4 * 17, int32_t{2147483647});
  with("describes 109 tokens of 2 bytes", lengths + 4 * 17, int32_t{3});
  with("sequence 2 is at byte 9, expected 8", pointers + 16, int64_t{9});
  with("sequence 0 is at byte -9223372036854775808, expected 0", pointers, std::numeric_limits<int64_t>::min());
  with("document 0 begins at sequence 1, expected 0", boundaries, int64_t{1});
  with("document 2 begins at sequence 2, expected at least 3", boundaries + 16, int64_t{2});
  with("document 3 begins at sequence -1", boundaries + 24, int64_t{-1});
  with("ends before sequence 19, expected 18", boundaries + 8 * 12, int64_t{19});
  refused("truncated or damaged", [&] { fs::resize_file(index, 353); });
  refused("header of 34 bytes", [&] { fs::resize_file(index, 33); });
  refused("modes of sequences", [&] { fs::resize_file(index, 354 + 18); });
  refused("ends beyond", [&] { fs::resize_file(data, 218); });
  refused("describes 110 tokens of 2 bytes", [&] { fs::resize_file(data, 221); });
  refused("it is a directory", [&] { fs::remove(index), fs::create_directory(index); });
}

TEST_CASE("tokens of an index beyond 2^32 are read, with their documents", "[data][formats]") {
  const TempDir dir;
  // Five documents of 2^30 tokens in a sparse file.
  constexpr int64_t n = 5, length = int64_t{1} << 30;
  std::string index("MMIDIDX\0\0", 9);
  const auto put = [&](auto value) { index.append(reinterpret_cast<const char*>(&value), sizeof value); };
  put(uint64_t{1}), put(uint8_t{8}), put(uint64_t{n}), put(uint64_t{n + 1});
  for (int64_t i = 0; i < n; ++i) put(static_cast<int32_t>(length));
  for (int64_t i = 0; i < n; ++i) put(2 * length * i);
  for (int64_t i = 0; i <= n; ++i) put(i);
  std::ofstream(dir / "x.idx", std::ios::binary) << index;
  std::ofstream(dir / "x.bin");
  fs::resize_file(dir / "x.bin", 2 * n * length);
  patch(dir / "x.bin", 2 * (4 * length - 1), uint16_t{7});
  const TokenShards shards(dir / "x.bin", 1000);
  REQUIRE(shards.tokens() == n * length);
  std::vector<int32_t> tokens;
  shards.read(0, 4 * length - 3, 6, 8, tokens);
  REQUIRE(tokens == std::vector<int32_t>{0, 0, 7, 0, 0, 0});
  std::vector<uint8_t> begins;
  shards.find_documents(0, 4 * length - 3, tokens, 0, begins);
  REQUIRE(begins == std::vector<uint8_t>{0, 0, 0, 1, 0, 0});
  const File file = File::open_read(dir / "x.idx");
  const auto starts = MegatronIndex(file, File::open_read(dir / "x.bin")).document_starts(file, length, 3 * length);
  REQUIRE(starts == std::vector<int64_t>{length, 2 * length});
}

TEST_CASE("negative tokens, and those outside the vocabulary, are refused with file, position and value",
          "[data][formats]") {
  const TempDir dir;
  for (const std::string& file : foreign_files()) {
    INFO(file);
    const std::string path = dir / file;
    fs::copy_file(foreign + file, path);
    if (format_of(file) == DataFormat::megatron)
      fs::copy_file(MegatronIndex::path_for(foreign + file), MegatronIndex::path_for(path));
    const TokenFile opened = open_token_file(path, format_of(file));
    with_type(opened.type, [&]<class T>() {
      const T bad = static_cast<T>(std::is_signed_v<T> ? -5 : 250);
      patch(path, opened.byte_of(13), bad);
      const std::string part = formatted("{}: token {} at position 13 is outside the", path, int64_t{bad});
      const TokenShards shards(path, 4, "--train-data", opened.format);
      std::vector<int32_t> sample;
      shards.read_sample(0, vocabulary, sample);
      REQUIRE_ERROR(shards.read_sample(3, vocabulary, sample), part);
      const ShardReport report = verify_shard(path, opened.format, vocabulary, end_of_text, [](int64_t) {});
      REQUIRE(report.error.find(part) == 0);
      REQUIRE(report.outside == 1);
    });
  }
}

TEST_CASE("--verify-data counts tokens and documents of every format", "[data][formats]") {
  const nlohmann::json golden = read_json(foreign + "samples.json");
  const auto verify = [](const std::string& file, const std::string& more) {
    const ProgramResult r = run_program("--verify-data --vocab-size 257 --train-data '" + foreign + file + "'" + more);
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    return r.out;
  };
  using Catch::Matchers::ContainsSubstring;
  REQUIRE_THAT(verify("nanogpt.bin", " --data-format nanogpt"),
               ContainsSubstring("146 tokens of uint16 (nanogpt)") && ContainsSubstring("0 (end of text is 256)"));
  REQUIRE_THAT(verify("olmo.npy", " --data-format olmo"), ContainsSubstring("146 tokens of uint32 (olmo)"));
  REQUIRE_THAT(verify("megatron_int*.bin", ""), ContainsSubstring("110 tokens of int8 (megatron)") &&
                                                    ContainsSubstring("110 tokens of int64 (megatron)") &&
                                                    ContainsSubstring("4 good, 0 bad") &&
                                                    ContainsSubstring("48 (as the index says)"));
  const ProgramResult unnamed = run_program("--verify-data --vocab-size 257 --train-data " + foreign + "olmo.npy");
  REQUIRE(unnamed.status == 1);
  REQUIRE_THAT(unnamed.err, ContainsSubstring(foreign + "olmo.npy") && ContainsSubstring("--data-format olmo"));
}

TEST_CASE("a run on files of another tool is the run on shards of the same tokens; it notices a changed index",
          "[data][formats]") {
  const TempDir dir;
  const auto train = [&](const std::string& out, const std::string& more) {
    return run_program(
        "--model d1 --n-embd 12 --n-head 2 --vocab-size 257 --seq-len 8 --batch-size 2 --max-steps 3 "
        "--threads 1 --out-dir " +
        (dir / out) + " " + more);
  };
  const auto losses = [&](const std::string& out) {
    std::string all;
    std::ifstream metrics(dir / (out + "/metrics.jsonl"));
    for (std::string line; std::getline(metrics, line);) {
      const nlohmann::json step = nlohmann::json::parse(line);
      if (step["kind"] == "train") all += formatted("{:.17g} ", step["loss"].get<double>());
    }
    return all;
  };
  for (const std::string file : {"megatron_int32.bin", "nanogpt.bin", "olmo.npy"}) {
    const TokenFiles tokens(foreign + file, "", format_of(file));
    std::vector<int32_t> all;
    tokens.read(0, 0, tokens.tokens(), vocabulary, all);
    write_shard(dir / (file + ".shard"), std::vector<uint16_t>(all.begin(), all.end()));
    const std::string data =
        format_of(file) == DataFormat::megatron ? "" : formatted(" --data-format {}", name_of(format_of(file)));
    const ProgramResult ours = train(file + "1", "--train-data " + (dir / (file + ".shard"))),
                        theirs = train(file + "2",
                                       "--train-data " + foreign + file + data + " --val-data " + foreign + file);
    INFO(ours.err << theirs.err);
    REQUIRE(ours.status + theirs.status == 0);
    REQUIRE(losses(file + "1").size() > 20);
    REQUIRE(losses(file + "1") == losses(file + "2"));
  }
  fs::copy_file(foreign + "megatron_uint8.bin", dir / "x.bin");
  fs::copy_file(foreign + "megatron_uint8.idx", dir / "x.idx");
  const std::string options = "--train-data " + (dir / "x.bin");
  REQUIRE(train("again", options).status == 0);
  patch(dir / "x.idx", 250 + 8, int64_t{1});  // the first document ends earlier
  const ProgramResult again = train("again", options + " --max-steps 4");
  INFO(again.err);
  REQUIRE(again.status == 1);
  REQUIRE(again.err.find("x.bin has changed since the run began") != std::string::npos);
}

TEST_CASE("data/README.md has the table of formats", "[data][formats]") {
  const std::string page = read_whole("data/README.md");
  const std::map<DocumentMark, std::string> marks = {{DocumentMark::end_of_text_before, "begin with the end of text"},
                                                     {DocumentMark::end_of_text_after, "end with the end of text"},
                                                     {DocumentMark::index, "as the index says"}};
  struct FormatRow {
    DataFormat format;
    const char *recognised, *header, *types;  // recognised: by what, with --data-format auto
  };
  for (const FormatRow& row : {
           FormatRow{DataFormat::llmc, "magic 20240520 or 20240801", "1024 bytes", "uint16, uint32"},
           FormatRow{DataFormat::nanogpt, "never: it must be named", "none", "uint16"},
           FormatRow{DataFormat::megatron, "FILE.idx beside FILE.bin, magic MMIDIDX", "none", "as the index says"},
           FormatRow{DataFormat::olmo, "never: it must be named", "none", "uint32"},
       }) {
    const std::string line = formatted("| `{}` | {} | {} | {} | {} |\n", name_of(row.format), row.recognised,
                                       row.header, row.types, marks.at(document_mark_of(row.format)));
    INFO(line);
    REQUIRE(page.find(line) != std::string::npos);
  }
}
