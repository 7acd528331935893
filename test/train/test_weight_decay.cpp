// Weight decay: which parameters decay.
#include "run/checkpoints/checkpoint.h"
#include "tiny_run.h"

using namespace llmc;

namespace {

// Llama 2 with a table of 257 tokens, of which the data have the first 211, and an output layer of its own.
std::string untied(const std::string& out, const std::string& more) {
  return tiny(out,
              "--model llama2:7B --n-layer 2 --n-head 2 --n-kv-head 2 --n-embd 16 --n-ffn 24 --vocab-size 257 "
              "--seq-len 32 --total-batch-size 256 --max-steps 4 --warmup-steps 1 --lr-schedule constant " +
                  more);
}

std::map<std::string, std::vector<float>> weights_of(const std::string& checkpoint) {
  std::map<std::string, std::vector<float>> all;
  const SafetensorsFiles files = open_all(model_files(checkpoint));
  for (const auto& file : files)
    for (const std::string& name : file->names()) {
      all[name].resize(static_cast<size_t>(file->info(name).numel()));
      file->read(name, all[name].data());
    }
  return all;
}

// The rows of tokens that no text has: their gradients are zero, so nothing but decay changes them.
std::vector<float> unused_rows(const std::map<std::string, std::vector<float>>& weights) {
  const std::vector<float>& table = weights.at("model.embed_tokens.weight");
  return {table.begin() + 211 * 16, table.end()};
}

}  // namespace

TEST_CASE("with --decay-embeddings off the tables of tokens and positions do not decay, and all other matrices do",
          "[train][decay]") {
  const TempDir dir;
  const auto run = [&](const char* name, const std::string& options) {
    run_well(untied(dir / name, options));
    return weights_of(dir / name + "/step-000004");
  };
  const auto initial = run("initial", "--lr 0"), on = run("on", "--weight-decay 0.5"),
             off = run("off", "--weight-decay 0.5 --decay-embeddings off"), none = run("none", "--weight-decay 0");
  REQUIRE(unused_rows(off) == unused_rows(initial));
  for (size_t i = 0; i < unused_rows(on).size(); ++i) {
    const double expected = unused_rows(initial)[i] * std::pow(1 - 1e-2 * 0.5, 4);
    REQUIRE(std::abs(unused_rows(on)[i] - expected) <= 1e-6 * std::abs(expected));
  }
  for (const auto& [name, values] : off) {
    INFO(name);
    REQUIRE((values != on.at(name)));  // all follow from each other after the first step
    REQUIRE((values != none.at(name)));
  }

  const std::string positions = "--n-layer 2 --max-steps 2 --warmup-steps 0 --weight-decay 0.5 --decay-embeddings off ";
  run_well(tiny(dir / "gpt2", positions));
  run_well(tiny(dir / "gpt2-initial", positions + "--lr 0"));
  const std::vector<float> before = weights_of(dir / "gpt2-initial/step-000002").at("transformer.wpe.weight"),
                           after = weights_of(dir / "gpt2/step-000002").at("transformer.wpe.weight");
  REQUIRE(std::equal(after.begin() + 33 * 12, after.end(), before.begin() + 33 * 12));
  REQUIRE_FALSE(std::equal(after.begin(), after.begin() + 33 * 12, before.begin()));
}

TEST_CASE("--decay-embeddings off is the same in every layout, and a run keeps it", "[train][decay]") {
  const TempDir dir;
  const std::string off = "--weight-decay 0.5 --decay-embeddings off ";
  run_well(untied(dir / "one", off));
  const std::map<int64_t, double> expected = losses(dir / "one");
  const std::vector<float> unused = unused_rows(weights_of(dir / "one/step-000004"));
  for (const char* layout :
       {"--local-ranks 2 --zero-stage 1", "--local-ranks 2 --zero-stage 2 --dp-replicate 2",
        "--local-ranks 2 --zero-stage 3", "--local-ranks 2 --tp 2", "--local-ranks 2 --cp 2", "--local-ranks 2 --pp 2",
        "--local-ranks 4 --tp 2 --pp 2", "--local-ranks 2 --dp-sync parameter-server", "--optimizer muon --tp 2"}) {
    INFO(layout);
    std::filesystem::remove_all(dir / "run");
    run_well(untied(dir / "run", off + layout));
    REQUIRE(unused_rows(weights_of(dir / "run/step-000004")) == unused);
    if (std::string(layout).find("muon") != std::string::npos) continue;
    for (const auto& [step, loss] : losses(dir / "run")) REQUIRE(std::abs(loss / expected.at(step) - 1) < 1e-5);
  }
  refused(untied(dir / "one", "--weight-decay 0.5 --max-steps 6"), "--decay-embeddings was 'off' and is now 'on'");
}

TEST_CASE("--warmup-tokens, --decay-tokens and --weight-decay-tokens are the numbers of steps that they stand for",
          "[train][decay]") {
  const TempDir dir;
  const std::string steps = "--max-steps 12 --weight-decay 0.5 --lr-schedule wsd --decay-steps 3 --warmup-steps 2",
                    tokens =
                        "--max-steps 12 --weight-decay-tokens 51200 --lr-schedule wsd --decay-tokens 600 "
                        "--warmup-tokens 257";
  const auto run = [&](const std::string& name, const std::string& options) {
    run_well(untied(dir / name, "--warmup-steps 0 " + options));
    return metric(dir / name, "train", "lr");
  };
  REQUIRE(run("tokens", tokens) == run("steps", steps));  // 256 tokens a step: 1e-2 * 0.5 = 256 / 51200
  REQUIRE(weights_of(dir / "tokens/step-000012") == weights_of(dir / "steps/step-000012"));
  // Twice the batch decays by as much in as many tokens.
  run("large", "--max-steps 2 --total-batch-size 512 --weight-decay-tokens 51200");
  run("initial", "--lr 0 --max-steps 1");
  const std::vector<float> initial = unused_rows(weights_of(dir / "initial/step-000001")),
                           large = unused_rows(weights_of(dir / "large/step-000002"));
  for (size_t i = 0; i < initial.size(); ++i)
    REQUIRE(std::abs(large[i] - initial[i] * std::pow(1 - 512.0 / 51200, 2)) <= 1e-6 * std::abs(initial[i]));

  for (const auto& [options, why] :
       {std::pair{"--decay-tokens 1M", "--decay-tokens 1M is for --lr-schedule wsd"},
        {"--lr-schedule wsd --decay-tokens 256 --decay-steps 1", "--decay-tokens 256 with --decay-steps 1"},
        {"--warmup-tokens 256 --warmup-steps 1", "--warmup-tokens 256 with --warmup-steps 1"},
        {"--warmup-steps 0 --warmup-tokens 1M", "--warmup-tokens 1M, or 3907 steps, exceeds the 4 steps of the run"},
        {"--weight-decay-tokens 1M --weight-decay 0.5", "--weight-decay-tokens 1M with --weight-decay 0.5"},
        {"--weight-decay-tokens 1M --lr 0", "--weight-decay-tokens 1M with --lr 0"},
        {"--weight-decay-tokens 1M --optimizer sgd", "--weight-decay-tokens 1M with --optimizer sgd"},
        {"--weight-decay-tokens 255", "--weight-decay-tokens 255: a step has 256 tokens"}}) {
    INFO(options);
    refused(untied(dir / "refused", options), why);
  }
}

TEST_CASE("lengths in tokens stay as many tokens when the batch changes", "[recipe]") {
  Options o;
  o.train_data = "x", o.seq_len = 16, o.batch_size = 2;
  o.lr = 1, o.total_batch_size = 256, o.lr_schedule = LrShape::constant, o.max_steps = 60;
  const auto rate = [&](int64_t steps, int64_t tokens) {
    return Course(read_recipe(o), {}, {steps, tokens, tokens / 16, {}}).learning_rate(steps + 1);
  };
  o.warmup_tokens = token_count("10240");
  REQUIRE(rate(12, 12 * 1024) == 1);  // the warmup is over
  REQUIRE(rate(12, 12 * 128) == (12 * 128 + 256) / 10240.0);
  o.total_batch_size = 1024, o.warmup_tokens = token_count("20480");
  REQUIRE(rate(20, 20 * 256) == (20 * 256 + 1024) / 20480.0);
  o.max_steps.reset(), o.tokens = token_count("102400"), o.warmup_tokens.reset(), o.lr_schedule = LrShape::linear;
  REQUIRE(std::abs(rate(20, 20 * 256) - (1 - (20 * 256 + 1024 - 256) / (102400.0 - 256))) < 1e-12);
}
