// Data order (contract 8), invalid shards, learning rates, the byte tokenizer.
#include <bit>
#include <list>
#include <map>
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "data/dataloader.h"
#include "data/verify_data.h"
#include "helpers.h"
#include "text/tokenizer.h"
#include "train/choices.h"
#include "train/lr_schedule.h"

using namespace llmc;

namespace {

// Shards in which every token is its own position: 0, 1, 2 ... across all of them.
struct CountingShards {
  TempDir dir;
  static constexpr int64_t T = 5;
  // 23 tokens hold 4 samples, 31 hold 6, 4 hold none, 11 hold 2; one shard is uint32.
  CountingShards() {
    uint16_t next = 0;
    auto take = [&](size_t n) {
      std::vector<uint16_t> tokens(n);
      for (uint16_t& t : tokens) t = next++;
      return tokens;
    };
    write_shard(dir / "s_0.bin", take(23));
    const auto second = take(31);
    write_shard(dir / "s_1.bin", std::vector<uint32_t>(second.begin(), second.end()));
    write_shard(dir / "s_2.bin", take(4));
    write_shard(dir / "s_3.bin", take(11));
  }
  std::string pattern() const { return dir / "s_*.bin"; }
};
const std::vector<int32_t> first_tokens = {0, 5, 10, 15, 23, 28, 33, 38, 43, 48, 58, 63};

struct Batch {
  std::vector<int32_t> tokens, targets, positions;
  bool operator==(const Batch&) const = default;
};

Batch read(DataLoader& loader, int64_t cursor, int64_t micro_batch, const DataLoader::Reader& who) {
  Batch b;
  loader.read_batch(cursor, micro_batch, who, b.tokens, b.targets, b.positions);
  return b;
}

// The first token of each of `n` samples from stream position `cursor` on.
std::vector<int32_t> stream_of(DataLoader& loader, int64_t cursor, int64_t n) {
  std::vector<int32_t> firsts;
  for (int64_t i = 0; i < n; ++i) firsts.push_back(read(loader, cursor + i, 0, {}).tokens[0]);
  return firsts;
}

}  // namespace

TEST_CASE("a file that is no shard is refused with what it seems to be", "[data]") {
  const TempDir dir;
  const std::string file = dir / "train.bin";
  const auto refusal = [&](const std::string& contents) {
    std::ofstream(file, std::ios::binary) << contents;
    try {
      open_token_file(file);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto bytes = [](const auto& numbers) {
    return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof numbers[0]);
  };
  const auto ends = [&](const std::string& contents, const std::string& part) {
    const std::string r = refusal(contents);
    INFO(r);
    REQUIRE(r.find(part) != std::string::npos);
  };
  std::vector<uint16_t> gpt2(100'000), letters(3000);
  std::vector<uint32_t> llama(50'000);
  for (size_t i = 0; i < gpt2.size(); ++i) gpt2[i] = static_cast<uint16_t>(i * 7919 % 50257);
  for (size_t i = 0; i < letters.size(); ++i) letters[i] = static_cast<uint16_t>(i * 7919 % 65);
  for (size_t i = 0; i < llama.size(); ++i) llama[i] = static_cast<uint32_t>(i * 7919 % 128'256);
  ends(bytes(letters), "uint16 tokens without a header, as nanoGPT writes them: --data-format nanogpt");
  ends(bytes(gpt2), "--data-format nanogpt");
  ends(bytes(llama), "uint32 tokens without a header, as OLMo's tools write them: --data-format olmo");
  ends(std::string(100, 'a') + "\n", "it seems to be text: data/tokenize_text.py makes shards of it");
  std::string text = "x";
  for (int i = 0; i < 60'000; ++i) text += "\u4e16";
  ends(text, "it seems to be text");
  for (uint16_t& t : letters) t = static_cast<uint16_t>(t * 1009);
  REQUIRE(refusal(bytes(letters)).ends_with("says nanogpt or olmo"));  // anything
  std::vector<uint16_t> weights(3000);
  for (size_t i = 0; i < weights.size(); ++i) {  // -1.5 to 1.5, in bf16
    const float value = static_cast<float>(i * 7919 % 3001) / 1000 - 1.5f;
    weights[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  }
  REQUIRE(refusal(bytes(weights)).ends_with("says nanogpt or olmo"));
  const std::string header = R"({"w":{"dtype":"BF16","shape":[3000],"data_offsets":[0,6000]}})";
  const std::vector<uint64_t> size = {header.size()};
  ends(bytes(size) + header + bytes(weights), "it seems to be a model's weights (safetensors)");
  std::string wide;
  for (int i = 0; i < 3000; ++i) wide += std::string{"The cat\n"[i % 8], '\0'};
  ends(wide, "it seems to be text in UTF-16: convert it with iconv");
  REQUIRE(refusal(std::string(4096, '\0')).ends_with("says nanogpt or olmo"));
  std::vector<int32_t> hellaswag(256);
  hellaswag[0] = 20240522, hellaswag[1] = 1;
  ends(bytes(hellaswag), "llm.c's multiple-choice questions: let data/hellaswag.py write them for --eval-choices");
  REQUIRE_ERROR(ChoiceSet(file, 50257, 64), "these are llm.c's questions, with a header of magic 20240522");
  hellaswag[0] = 20240326;
  ends(bytes(hellaswag), "a model of llm.c; --model takes the Hugging Face directory");
}

TEST_CASE("without shuffling samples come in file order in every epoch, and targets are the next tokens", "[data]") {
  const CountingShards data;
  const TokenShards shards(data.pattern(), data.T);
  REQUIRE(shards.tokens() == 69);
  REQUIRE(shards.samples() == 12);
  DataLoader loader(shards, {.vocab_size = 69});
  std::vector<int32_t> twice = first_tokens;
  twice.insert(twice.end(), first_tokens.begin(), first_tokens.end());
  REQUIRE(stream_of(loader, 0, 24) == twice);
  const Batch b = read(loader, 11, 0, {.batch_size = 2});  // straddles the epochs
  REQUIRE(b.tokens == std::vector<int32_t>{63, 64, 65, 66, 67, 0, 1, 2, 3, 4});
  REQUIRE(b.targets == std::vector<int32_t>{64, 65, 66, 67, 68, 1, 2, 3, 4, 5});
  REQUIRE(b.positions == std::vector<int32_t>{0, 1, 2, 3, 4, 0, 1, 2, 3, 4});
}

TEST_CASE("threads read the rows that one reads, and say what it says of the first that is wrong", "[data]") {
  const CountingShards data;
  const TokenShards shards(data.pattern(), data.T);
  const DataLoader::Reader who{.rank = 1, .ranks = 2, .batch_size = 7};
  for (const auto end_of_text : {std::optional<int32_t>(), std::optional(30)}) {
    const DataLoader::Config config{.seed = 4, .shuffle = true, .vocab_size = 69, .end_of_text = end_of_text};
    DataLoader one(shards, config), five(shards, config);
    one.read_on(1), five.read_on(5);
    for (int64_t cursor = 0; cursor < 24; ++cursor) REQUIRE(read(one, cursor, 0, who) == read(five, cursor, 0, who));
  }
  DataLoader loader(shards, {.vocab_size = 30});
  for (const int64_t threads : {1, 5}) {
    loader.read_on(threads);
    REQUIRE_ERROR(read(loader, 0, 0, {.batch_size = 9}), "token 30 at position 7 is outside");
  }
}

TEST_CASE("with shuffling every epoch has each sample once, in an order that depends only on seed and epoch",
          "[data]") {
  const CountingShards data;
  const TokenShards shards(data.pattern(), data.T);
  DataLoader loader(shards, {.seed = 4, .shuffle = true, .vocab_size = 69}),
      same(shards, {.seed = 4, .shuffle = true, .vocab_size = 69}),
      other(shards, {.seed = 5, .shuffle = true, .vocab_size = 69});
  std::vector<std::vector<int32_t>> epochs;
  for (int64_t e = 0; e < 3; ++e) {
    epochs.push_back(stream_of(loader, e * 12, 12));
    std::vector<int32_t> sorted = epochs.back();
    std::sort(sorted.begin(), sorted.end());
    REQUIRE(sorted == first_tokens);
  }
  REQUIRE(epochs[0] != epochs[1]);
  REQUIRE(epochs[1] != epochs[2]);
  REQUIRE(stream_of(same, 24, 12) == epochs[2]);  // without reading the earlier epochs
  REQUIRE(stream_of(other, 0, 12) != epochs[0]);
}

TEST_CASE("a seed that comes in the middle of an epoch takes what is left of it, each sample once", "[data]") {
  const TempDir dir;
  write_shard(dir / "x.bin", std::vector<uint16_t>(4 * 53 + 1, 3));
  const TokenShards shards(dir / "x.bin", 4);
  const int64_t n = shards.samples();
  REQUIRE(n == 53);
  // In the middle of epoch 0, twice; again in it; at the beginning of epoch 2; at the last sample of epoch 3.
  const std::vector<Reseed> reseeds = {{0, 20, 2}, {0, 31, 3}, {0, 31, 4}, {2, 0, 5}, {3, n - 1, 6}};
  for (size_t count = 1; count <= reseeds.size(); ++count) {
    const std::vector<Reseed> some(reseeds.begin(), reseeds.begin() + static_cast<int64_t>(count));
    DataLoader fewer(shards, {.seed = 1, .reseeds = {some.begin(), some.end() - 1}, .shuffle = true, .vocab_size = 4}),
        loader(shards, {.seed = 1, .reseeds = some, .shuffle = true, .vocab_size = 4});
    const int64_t position = some.back().epoch * n + some.back().block;
    bool differs = false;
    for (int64_t epoch = 0; epoch < 6; ++epoch) {
      std::vector<int64_t> seen(static_cast<size_t>(n));
      for (int64_t i = epoch * n; i < (epoch + 1) * n; ++i) {
        ++seen[static_cast<size_t>(loader.sample_at(i))];
        if (i < position) REQUIRE(loader.sample_at(i) == fewer.sample_at(i));  // what was before stays
        else differs |= loader.sample_at(i) != fewer.sample_at(i);
      }
      REQUIRE(seen == std::vector<int64_t>(static_cast<size_t>(n), 1));
    }
    REQUIRE(differs);
  }
  // From an epoch's beginning on it is the order of that seed alone.
  DataLoader after(shards, {.seed = 1, .reseeds = {{2, 0, 5}}, .shuffle = true, .vocab_size = 4}),
      alone(shards, {.seed = 5, .shuffle = true, .vocab_size = 4});
  for (int64_t i = 2 * n; i < 4 * n; ++i) REQUIRE(after.sample_at(i) == alone.sample_at(i));
  DataLoader in_order(shards, {.seed = 1, .reseeds = reseeds, .vocab_size = 4});
  for (int64_t i = 0; i < 2 * n; ++i) REQUIRE(in_order.sample_at(i) == i % n);
}

TEST_CASE("any split of a step into micro-batches and ranks reads the same samples, none twice, none skipped",
          "[data]") {
  const CountingShards data;
  const TokenShards shards(data.pattern(), data.T);
  auto step_samples = [&](int64_t micro_batches, int64_t ranks, int64_t batch_size) {
    DataLoader loader(shards, {.seed = 9, .shuffle = true, .vocab_size = 69});
    std::vector<int32_t> all;
    for (int64_t cursor : {0, 8, 16})
      for (int64_t m = 0; m < micro_batches; ++m)
        for (int64_t r = 0; r < ranks; ++r) {
          const Batch b = read(loader, cursor, m, {.rank = r, .ranks = ranks, .batch_size = batch_size});
          for (size_t row = 0; row < static_cast<size_t>(batch_size); ++row) all.push_back(b.tokens[row * data.T]);
        }
    return all;
  };
  const auto one = step_samples(1, 1, 8);
  REQUIRE(one == step_samples(8, 1, 1));
  REQUIRE(one == step_samples(2, 2, 2));
  REQUIRE(one == step_samples(1, 4, 2));
}

TEST_CASE("invalid shards are refused by name", "[data]") {
  const TempDir dir;
  const std::string path = dir / "x.bin";
  auto refuse = [&](const std::string& part) { REQUIRE_ERROR(TokenShards(path, 4), part); };
  std::ofstream(path) << "short";
  refuse("x.bin: 5 bytes");
  write_shard<uint16_t>(path, std::vector<uint16_t>(100, 1));
  const std::string good = read_whole(path);
  REQUIRE(TokenShards(path, 4).samples() == 24);
  auto with = [&](size_t at, int32_t value, size_t bytes) {
    std::string changed = good.substr(0, bytes);
    std::memcpy(changed.data() + at, &value, 4);
    std::ofstream(path, std::ios::binary) << changed;
  };
  with(0, 7, good.size());
  refuse("magic 7");
  with(4, 2, good.size());
  refuse("version 2");
  with(8, 99, good.size());
  refuse("says 99 tokens");
  with(8, 100, good.size() - 2);
  refuse("truncated");
  with(8, 100, good.size() - 1);
  refuse("truncated");
  write_shard<uint16_t>(path, {});
  refuse(path + ": holds no tokens, in 1 file(s)");
  write_shard<uint16_t>(path, {1, 2, 3, 4});
  refuse("no file holds a sample of --seq-len 4 + 1 tokens (4 tokens in 1 file(s))");
  REQUIRE_ERROR(TokenShards(dir / "none_*.bin", 4, "--val-data"), "--val-data");
}

TEST_CASE("a token outside the vocabulary is refused with file, position and value", "[data]") {
  const TempDir dir;
  std::vector<uint32_t> tokens(20, 3);
  tokens[13] = 4000000000u;
  write_shard(dir / "x.bin", tokens);
  const TokenShards shards(dir / "x.bin", 4);
  DataLoader loader(shards, {.vocab_size = 4});
  read(loader, 1, 0, {});
  REQUIRE_ERROR(read(loader, 3, 0, {}), "token 4000000000 at position 13");
}

TEST_CASE("training works with more shards than the limit of open files, shuffled and on several ranks", "[data]") {
  const TempDir dir;
  for (uint16_t shard = 0; shard < 200; ++shard) {
    std::vector<uint16_t> tokens(17);  // two samples of 8
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>((shard * 31 + i * 7) % 211);
    write_shard(dir / formatted("s_{:03}.bin", int{shard}), tokens);
  }
  auto train = [&](const std::string& out) {
    return run_program(
        "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 8 --batch-size 5 --local-ranks 2 "
        "--max-steps 45 --threads 2 --train-data '" +
        (dir / "s_*.bin") + "' --val-data '" + (dir / "s_0*.bin") + "' --out-dir " + (dir / out));
  };
  const ProgramResult many = train("many");
  INFO(many.err);
  REQUIRE(many.status == 0);
  {
    const FewOpenFiles limit(64);
    const ProgramResult few = train("few");
    INFO(few.err);
    REQUIRE(few.status == 0);
    const TokenShards shards(dir / "s_*.bin", 8);
    std::vector<int32_t> sample;
    for (int64_t i = 0; i < 400; ++i) {
      shards.read_sample(i * 7 % 400, 211, sample);
      REQUIRE(sample[1] == (i * 7 % 400 / 2 * 31 + i * 7 % 2 * 56 + 7) % 211);
    }
    REQUIRE(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}) < 50);
    std::list<TokenShards> sources;  // together they keep no more open than one
    for (int i = 0; i < 32; ++i) sources.emplace_back(dir / "s_*.bin", 8);
    for (int64_t i = 0; i < 400; ++i)
      for (const TokenShards& source : sources) source.read_sample(i, 211, sample);
  }
  REQUIRE(read_whole(dir / "few/step-000045/model.safetensors") ==
          read_whole(dir / "many/step-000045/model.safetensors"));
}

TEST_CASE("a file whose name has characters of patterns is itself", "[data]") {
  const TempDir dir;
  for (const char* name : {"a[1].bin", "a1.bin", "b?.bin"}) write_shard(dir / name, std::vector<uint16_t>(9));
  using Paths = std::vector<std::string>;
  REQUIRE(expand_glob(dir / "a[1].bin", "--data") == Paths{dir / "a[1].bin"});
  REQUIRE(expand_glob(dir / "a[12].bin", "--data") == Paths{dir / "a1.bin"});
  REQUIRE(expand_glob(dir / "?1.bin", "--data") == Paths{dir / "a1.bin"});
  REQUIRE(expand_glob(dir / "b?.bin", "--data") == Paths{dir / "b?.bin"});
}

TEST_CASE("suspicious data gets a notice, valid data none", "[data]") {
  const TempDir dir;
  std::vector<uint16_t> bytes(97), words(97);  // 12 samples of 8
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint16_t>(i * 5 % 250);
    words[i] = static_cast<uint16_t>(i * 7 % 600);
  }
  write_shard(dir / "bytes.bin", bytes);
  write_shard(dir / "words.bin", words);
  auto train = [&](const std::string& data, const std::string& val, int batch_size) {
    const ProgramResult r = run_program(formatted(
        "--model d1 --n-embd 12 --n-head 2 --vocab-size 600 --seq-len 8 --max-steps 1 --threads 1 --train-data "
        "{} --val-data {} --batch-size {} --out-dir {}",
        dir / data, dir / val, batch_size, dir / formatted("out{}", batch_size)));
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out;
  };
  const std::string wrong = train("bytes.bin", "./bytes.bin", 13), right = train("words.bin", "bytes.bin", 12);
  REQUIRE_THAT(wrong, Catch::Matchers::ContainsSubstring("13 samples but the training data have 12") &&
                          Catch::Matchers::ContainsSubstring("look like bytes") &&
                          Catch::Matchers::ContainsSubstring("is also training data"));
  for (const char* word : {"samples but the training", "look like bytes", "is also"})
    REQUIRE_THAT(right, !Catch::Matchers::ContainsSubstring(word));
}

TEST_CASE("tokens that are in no sample get a notice if they are more than a hundredth", "[data]") {
  const TempDir dir;
  const auto told = [&](const std::vector<int>& files, const std::string& more = "") {
    for (size_t i = 0; i < files.size(); ++i)
      write_shard(dir / formatted("x{}.bin", i), std::vector<uint16_t>(static_cast<size_t>(files[i]), 256));
    const ProgramResult r = run_program(
        "--model d1 --n-embd 12 --n-head 2 --vocab-size 257 --seq-len 8 -b 1 --max-steps 1 --threads 1 --restart "
        "--train-data '" +
        (dir / "x*.bin") + "' --out-dir " + (dir / "run") + more);
    INFO(r.err);
    REQUIRE(r.status == 0);
    const size_t notice = r.out.find("notice: --train-data: ");
    return notice == r.out.npos ? "" : r.out.substr(notice, r.out.find('\n', notice) - notice);
  };
  REQUIRE(told({801}).empty());  // 100 samples
  REQUIRE(told({809, 17}).empty());
  REQUIRE(told({814}).empty());  // five tokens are left over
  REQUIRE(told({9, 15, 17, 5, 8}) ==
          "notice: --train-data: 19 of 54 tokens (35.2%) are in no sample, which has 8 + 1 tokens of one file: 2 of 5 "
          "file(s) are shorter; a shorter --seq-len or larger files lose fewer");
  REQUIRE(told({9, 15, 17, 9, 9})
              .find(" (10.2%) are in no sample, which has 8 + 1 tokens of one file: the ends of files "
                    "are left over; ") != std::string::npos);
  REQUIRE(told({9, 15, 17, 5, 8}, " --pack best-fit").empty());
  const std::string empty = "notice: --train-data: 2 of 5 file(s) hold no tokens and are left out, such as ";
  REQUIRE(told({9, 0, 17, 9, 0}) == empty + (dir / "x1.bin"));
  REQUIRE(TokenFiles(dir / "x*.bin", "--train-data").paths() ==
          std::vector<std::string>{dir / "x0.bin", dir / "x2.bin", dir / "x3.bin"});
}

TEST_CASE("tokens of a tokenizer that is far smaller than the vocabulary get a notice", "[data]") {
  const TempDir dir;
  std::vector<uint16_t> tokens(64 * 64 + 1);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i * 7 % 500);
  write_shard(dir / "words.bin", tokens);
  write_shard(dir / "few.bin", std::vector<uint16_t>(tokens.begin(), tokens.begin() + 1000));
  const auto told = [&](const std::string& options) {
    const ProgramResult r = run_program("--threads 1 " + options);
    INFO(r.err);
    REQUIRE(r.status == 0);
    const size_t notice = r.out.find("notice: the largest ");
    return notice == r.out.npos ? "" : r.out.substr(notice, r.out.find('\n', notice) - notice);
  };
  const auto trained = [&](const std::string& data, int vocabulary) {
    std::filesystem::remove_all(dir / "run");
    return told(
        formatted("--model d1 --n-embd 12 --n-head 2 --seq-len 64 --max-steps 1 --batch-size 1 --vocab-size {} "
                  "--train-data {} --out-dir {}",
                  vocabulary, dir / data, dir / "run"));
  };
  REQUIRE(trained("words.bin", 2000) ==
          "notice: the largest of the first 4,160 tokens of the training data is 499, and the model has a vocabulary "
          "of 2000: were they made with a smaller tokenizer? --tokenizer names it, and a new model takes its "
          "vocabulary from it");
  REQUIRE(trained("words.bin", 1999).empty());
  REQUIRE(trained("few.bin", 50000).empty());  // others may have larger ones
  const std::string verify = "--verify-data --train-data " + dir / "words.bin" + " --vocab-size ";
  REQUIRE(told(verify + "2000") ==
          "notice: the largest token is 499 of a vocabulary of 2000: were these made with a smaller tokenizer? "
          "--tokenizer names it");
  REQUIRE(told(verify + "1999").empty());
}

TEST_CASE("a validation of a part of the data takes samples from all shards; with --no-shuffle the first", "[data]") {
  const TempDir dir;
  write_shard<uint16_t>(dir / "train.bin", std::vector<uint16_t>(2001, 1));
  write_shard<uint16_t>(dir / "val_0.bin", std::vector<uint16_t>(801, 1));
  write_shard<uint16_t>(dir / "val_1.bin", std::vector<uint16_t>(801, 2));
  auto validation_loss = [&](const std::string& more) {
    const ProgramResult r = run_program(
        "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 8 --batch-size 20 "
        "--max-steps 10 --lr 0.1 --val-steps 1 --threads 1 --train-data " +
        (dir / "train.bin") + " --val-data '" + (dir / "val_*.bin") + "' --out-dir " +
        (dir / (more.empty() ? "spread" : "in_order")) + more);
    INFO(r.err);
    REQUIRE(r.status == 0);
    const std::string metrics = read_whole(dir / (more.empty() ? "spread/metrics.jsonl" : "in_order/metrics.jsonl"));
    const size_t last = metrics.rfind("{\"kind\":\"val\"");
    return nlohmann::json::parse(metrics.substr(last, metrics.find('\n', last) - last))["loss"].get<double>();
  };
  REQUIRE(validation_loss(" --no-shuffle") < 0.1);  // what was learned
  REQUIRE(validation_loss("") > 1);
}

TEST_CASE("a shard that is replaced while a run reads it is detected", "[data]") {
  const TempDir dir;
  write_shard<uint16_t>(dir / "x.bin", std::vector<uint16_t>(20, 3));
  const TokenShards shards(dir / "x.bin", 4);
  write_shard<uint16_t>(dir / "x.bin", std::vector<uint16_t>(40, 3));
  std::vector<int32_t> sample;
  REQUIRE_ERROR(shards.read_sample(0, 4, sample), "x.bin: its size has changed");
}

TEST_CASE("the learning rate rises to its peak with the warm-up and reaches its final value at the last step",
          "[data]") {
  const double tolerance = 1e-12;
  LrSchedule s{.shape = LrShape::cosine, .peak = 2, .warmup = 4, .length = 14, .final_frac = 0.1};
  REQUIRE(learning_rate(s, 1) == 0.5);
  REQUIRE(learning_rate(s, 4) == 2);
  REQUIRE(std::abs(learning_rate(s, 5) - 1.955950864665638) < tolerance);  // 0.2 + 0.9 (1 + cos 18 degrees)
  REQUIRE(std::abs(learning_rate(s, 9) - 1.1) < tolerance);                // half way
  s.shape = LrShape::linear;
  REQUIRE(std::abs(learning_rate(s, 5) - 1.82) < tolerance);
  REQUIRE(std::abs(learning_rate(s, 9) - 1.1) < tolerance);
  s.shape = LrShape::constant;
  REQUIRE(learning_rate(s, 1) == 0.5);
  REQUIRE(learning_rate(s, 14) == 2);
  s = {.shape = LrShape::wsd, .peak = 1, .warmup = 0, .length = 100, .final_frac = 0};
  REQUIRE(learning_rate(s, 1) == 1);
  REQUIRE(learning_rate(s, 80) == 1);
  REQUIRE(std::abs(learning_rate(s, 85) - 0.5) < tolerance);  // a quarter into the decay
  s = {.shape = LrShape::linear, .peak = 1, .warmup = 0, .length = 5, .final_frac = 0};
  for (const int64_t step : {1, 2, 3, 4, 5})
    REQUIRE(learning_rate(s, step) == 1 - 0.25 * static_cast<double>(step - 1));

  for (const LrShape shape : {LrShape::cosine, LrShape::linear, LrShape::wsd})
    for (const int64_t warmup : {0, 1, 3, 9}) {
      s = {.shape = shape, .peak = 3e-4, .warmup = warmup, .length = 10, .final_frac = 0.1};
      INFO(name_of(shape) << ", warm-up " << warmup);
      REQUIRE(learning_rate(s, std::max<int64_t>(1, warmup)) == 3e-4);
      REQUIRE(learning_rate(s, 10) == 3e-4 * 0.1);
      s.warmup = 10;
      REQUIRE(learning_rate(s, 10) == 3e-4);  // no step is left for a decay
      s.length = 1;
      for (s.warmup = 0; s.warmup <= 1; ++s.warmup) REQUIRE(learning_rate(s, 1) == 3e-4);
    }
}

TEST_CASE("bytes round-trip through tokens; the end of text and unknown ids are visible", "[data]") {
  const auto tokenizer = make_tokenizer("bytes");
  const std::string text = "Grüße\n\xff";
  REQUIRE(tokenizer->decode(tokenizer->encode(text)) == text);
  const std::vector<int32_t> odd = {104, 256, 300};
  REQUIRE(tokenizer->decode(odd) == "h<|endoftext|><300>");
  REQUIRE_ERROR(make_tokenizer("gpt2"), "--tokenizer gpt2");
}

TEST_CASE("shards over 4 GiB and over 2^31 and 2^32 tokens are read to the end", "[data]") {
  const TempDir dir;
  // Sparse files: the tokens in between are zeros without disk space. The last shard has one more sample than its size.
  for (const int64_t tokens : {(int64_t{1} << 31) + 12, (int64_t{1} << 32) + 12}) {
    const std::string path = dir / "large.bin";
    write_shard<uint16_t>(path, {7, 8, 9});
    std::filesystem::resize_file(path, static_cast<uintmax_t>(1024 + 2 * tokens));
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    const uint32_t count = static_cast<uint32_t>(tokens);  // modulo 2^32
    file.seekp(8).write(reinterpret_cast<const char*>(&count), 4);
    const uint16_t last[2] = {30, 31};
    file.seekp(1024 + 2 * (tokens - 2)).write(reinterpret_cast<const char*>(last), 4);
    file.close();
    const int64_t T = 11;
    const TokenShards shards(path, T);
    REQUIRE(shards.tokens() == tokens);
    REQUIRE(shards.samples() == (tokens - 1) / T);
    std::vector<int32_t> sample;
    shards.read_sample(0, 50, sample);
    REQUIRE(sample[2] == 9);
    shards.read_sample(shards.samples() - 1, 50, sample);
    const int64_t first = (shards.samples() - 1) * T;
    for (int64_t i = 0; i <= T; ++i)
      REQUIRE(sample[static_cast<size_t>(i)] == (first + i == tokens - 2 ? 30 : first + i == tokens - 1 ? 31 : 0));
    DataLoader shuffled(shards, {.seed = 1, .shuffle = true, .vocab_size = 50});
    for (int64_t i = 0; i < 100; ++i) REQUIRE(shuffled.sample_at(shards.samples() + i) < shards.samples());
    std::filesystem::remove(path);
  }
}

TEST_CASE("every token of a shard over 2^31 tokens is verified", "[data][long]") {
  const TempDir dir;
  const int64_t tokens = (int64_t{1} << 31) + 12;
  write_shard<uint16_t>(dir / "large.bin", {});
  std::filesystem::resize_file(dir / "large.bin", static_cast<uintmax_t>(1024 + 2 * tokens));
  std::fstream file(dir / "large.bin", std::ios::binary | std::ios::in | std::ios::out);
  const uint32_t count = static_cast<uint32_t>(tokens);
  file.seekp(8).write(reinterpret_cast<const char*>(&count), 4);
  const uint16_t last = 300;
  file.seekp(1024 + 2 * (tokens - 1)).write(reinterpret_cast<const char*>(&last), 2);
  file.close();
  REQUIRE(verify_shard(dir / "large.bin", DataFormat::llmc, 301, -1, [](int64_t) {}).error.empty());
  const ShardReport r = verify_shard(dir / "large.bin", DataFormat::llmc, 300, -1, [](int64_t) {});
  REQUIRE(r.tokens == tokens);
  REQUIRE(r.outside == 1);
  REQUIRE(r.error.find(formatted("position {}", tokens - 1)) != std::string::npos);
}

TEST_CASE("--verify-data counts tokens, and names every bad shard with its error", "[data]") {
  const TempDir dir;
  write_shard<uint16_t>(dir / "a_0.bin", {256, 1, 2, 256, 3});
  write_shard<uint32_t>(dir / "a_1.bin", {256, 255});
  const std::string options = " --vocab-size 257 --verify-data --train-data '" + (dir / "a_*.bin") + "'";
  const ProgramResult good = run_program(options + " --val-data '" + (dir / "a_1.bin") + "'");
  INFO(good.out << good.err);
  REQUIRE(good.status == 0);
  REQUIRE(good.out.find("2 good, 0 bad") != std::string::npos);
  REQUIRE(good.out.find("1 good, 0 bad") != std::string::npos);
  REQUIRE(good.out.find("3 (end of text is 256)") != std::string::npos);
  REQUIRE(good.out.find("256 of a vocabulary of 257") != std::string::npos);

  write_shard<uint32_t>(dir / "a_2.bin", {256, 300, 301, 70000});
  write_shard<uint32_t>(dir / "a_4.bin", {4000000000u});  // would be negative as int32
  std::ofstream(dir / "a_3.bin") << "no shard";
  const ProgramResult bad = run_program(options);
  INFO(bad.err);
  REQUIRE(bad.status == 1);
  REQUIRE(bad.out.find("2 good, 3 bad") != std::string::npos);
  REQUIRE(bad.err.find("a_2.bin: token 300 at position 1 ") != std::string::npos);
  REQUIRE(bad.err.find("a_3.bin: 8 bytes") != std::string::npos);
  REQUIRE(bad.err.find("token 4000000000") != std::string::npos);
}

TEST_CASE("llm.c's gpt2_tokenizer.bin prints tokens; damaged ones are refused", "[data]") {
  const TempDir dir;
  const std::string path = dir / "gpt2_tokenizer.bin";
  auto write = [&](uint32_t magic, uint32_t version, uint32_t count, const std::string& table) {
    uint32_t header[256] = {magic, version, count, 2};
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char*>(header), sizeof header);
    out << table;
  };
  write(20240328, 2, 3, std::string("\1a\4 b\n\xff\5<end>"));
  const auto tokenizer = make_tokenizer(path);
  REQUIRE(tokenizer->decode(std::vector<int32_t>{0, 1, 2, 3}) == "a b\n\xff<end><3>");
  REQUIRE(tokenizer->end_of_text() == 2);
  REQUIRE(tokenizer->encode("").empty());
  REQUIRE_ERROR(tokenizer->encode("x"), "--prompt");
  std::string all;
  for (int i = 0; i < 50'257; ++i) all += "\1a";
  write(20240328, 1, 50'257, all);
  REQUIRE(make_tokenizer(path)->end_of_text() == 50256);
  write(20240328, 1, 1, std::string("\1a"));
  REQUIRE_ERROR(make_tokenizer(path), "the end of text is token 50256 of 1");
  write(20240520, 1, 1, std::string("\1a"));
  REQUIRE_ERROR(make_tokenizer(path), "20240520");
  write(20240328, 2, 3, std::string("\1a\4 b"));
  REQUIRE_ERROR(make_tokenizer(path), "token 1 of 3");
  write(20240328, 2, 2, std::string("\1a\1b"));
  REQUIRE_ERROR(make_tokenizer(path), "the end of text is token 2 of 2");
  write(20240328, 2, 1, std::string("\1abc"));
  REQUIRE_ERROR(make_tokenizer(path), "2 bytes");
  REQUIRE_ERROR(make_tokenizer(dir / "none.bin"), "none.bin");
  REQUIRE_ERROR(make_tokenizer("gpt2"), "--tokenizer gpt2");
}
