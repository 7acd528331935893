// Runs with --products in fp8: the same bits where only the work is divided otherwise, and rounding where sums are;
// resumed exactly; refused where blocks would not be whole.
#include <algorithm>
#include <map>

#include "catch2.h"
#include "core/rng.h"
#include "tiny_run.h"

using namespace llmc;

namespace {

// Llama of two layers, 2 heads of 128 and an untied output layer (contract 4), and 48 sequences of 256 tokens in which
// some tokens follow others.
struct Setting {
  TempDir dir;
  Setting() {
    std::vector<uint16_t> tokens;
    const Philox rng(3, "fp8 runs");
    for (uint64_t i = 0; i < 48 * 256 + 1; ++i)
      tokens.push_back(static_cast<uint16_t>(i % 3 == 2 ? tokens[i - 1] * 7 % 61 : rng.bits(i) % 61));
    write_shard<uint16_t>(dir / "data.bin", tokens);
  }
  std::string options(const std::string& name, const std::string& more) const {
    return "--model llama3:8B --n-layer 2 --n-head 2 --n-kv-head 2 --n-embd 256 --n-ffn 256 --vocab-size 61 --seq-len "
           "256 "
           "--batch-size 1 --total-batch-size 1024 --lr 3e-3 --max-steps 4 --dtype bf16 --products fp8-block "
           "--train-data " +
           (dir / "data.bin") + " --out-dir " + (dir / name) + " " + more;
  }
  // The same tokens, for another model and kind of products.
  std::map<int64_t, double> losses_of(const std::string& model, const std::string& products, const std::string& more,
                                      const std::string& name = "run") const {
    run_well(
        "--restart --vocab-size 61 --seq-len 256 --batch-size 1 --total-batch-size 1024 --lr 3e-3 --max-steps 4 "
        "--dtype bf16 --train-data " +
        (dir / "data.bin") + " --out-dir " + (dir / name) + " --model " + model + " --products " + products + " " +
        more);
    return losses(dir / name);
  }
  std::map<int64_t, double> losses_of(const std::string& name, const std::string& more) const {
    run_well(options(name, more));
    return losses(dir / name);
  }
  std::string weights(const std::string& name) const {
    return read_whole(checkpoint_path(dir / name, 4) + "/model.safetensors");
  }
};

double largest_distance(const std::map<int64_t, double>& a, const std::map<int64_t, double>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (const auto& [step, loss] : a) largest = std::max(largest, std::fabs(loss - b.at(step)));
  return largest;
}

}  // namespace

TEST_CASE("products in fp8 give the same bits with every micro-batch, schedule, recomputation and stage of ZeRO",
          "[run][fp8]") {
  const Setting s;
  const auto one = s.losses_of("one", "--local-ranks 1");
  REQUIRE(one.size() == 4);
  for (const char* same : {"--recompute activation", "--recompute block", "--pp 2 --local-ranks 2",
                           "--pp 2 --local-ranks 2 --schedule zb-h1"}) {
    INFO(same);
    REQUIRE(s.losses_of("same", std::string(same) +
                                    (std::string(same).find("ranks") == std::string::npos ? " --local-ranks 1" : "") +
                                    " --restart") == one);
  }
  const auto two = s.losses_of("two", "--local-ranks 2");
  for (const char* stage : {"1", "2", "3"})
    REQUIRE(s.losses_of("stage", formatted("--local-ranks 2 --restart --grad-reduce step --zero-stage {}", stage)) ==
            two);
}

TEST_CASE("products in fp8 differ between layouts by at most twice as much as from products in bf16", "[run][fp8]") {
  const Setting s;
  for (const auto& [length, layouts] :
       {std::pair{"256", std::vector<const char*>{"--local-ranks 2", "--tp 2 --local-ranks 2",
                                                  "--local-ranks 1 --batch-size 4"}},
        std::pair{"512", std::vector<const char*>{"--cp 2 --local-ranks 2"}}}) {
    const auto losses_of = [&, length = length](const std::string& more) {
      return s.losses_of("run", formatted("{} --seq-len {} --restart", more, length));
    };
    const auto one = losses_of("--local-ranks 1");
    const double allowed = 2 * largest_distance(losses_of("--local-ranks 1 --products dtype"), one);
    REQUIRE(allowed > 0);
    for (const char* layout : layouts) {
      INFO(layout);
      REQUIRE(largest_distance(losses_of(layout), one) <= allowed);
    }
  }
}

TEST_CASE("weights gathered in fp8 are those that products read: the same bits, with half the bytes", "[run][fp8]") {
  const Setting s;
  const std::string three = "--local-ranks 2 --zero-stage 3 --val-every 2 --val-steps 1 --val-data " +
                            (s.dir / "data.bin") + " --recompute block ";
  const std::string model =
      GENERATE("d2-e4", "llama3:1B --n-layer 2 --n-head 2 --n-kv-head 2 --n-embd 208 --n-ffn 240");
  const auto as_stored = s.losses_of(model, "fp8", three, "bf16");
  REQUIRE(s.losses_of(model, "fp8", three + "--gather-dtype fp8", "fp8") == as_stored);
  REQUIRE(validations(s.dir / "fp8") == validations(s.dir / "bf16"));
}

TEST_CASE("a gather in fp8 sends one byte for each weight of a linear layer instead of two", "[run][fp8]") {
  const auto mib_sent = [](const char* gather) {
    const std::string plan = said(
        "--plan --model d8 --dtype bf16 --products fp8-block --local-ranks 2 --zero-stage 3 "
        "--seq-len 256 --batch-size 1 --total-batch-size 512 --gather-dtype " +
        std::string(gather));
    const size_t sent = plan.find("sent per rank and step"), line = plan.find("  weights ", sent);
    REQUIRE(line != std::string::npos);
    return std::stod(plan.substr(line + 10));
  };
  // 8 layers of 12 x 512 x 512 weights are gathered twice; a rank sends half of them.
  REQUIRE(std::fabs(mib_sent("dtype") - mib_sent("fp8") - 8 * 12 * 512 * 512 / 0x1p20) < 0.2);
}

TEST_CASE("a run in fp8 resumes exactly, and a change of --products is noticed", "[run][fp8]") {
  const Setting s;
  s.losses_of("whole", "--local-ranks 1");
  s.losses_of("stopped", "--local-ranks 1 --checkpoint-every 2");
  std::filesystem::remove_all(checkpoint_path(s.dir / "stopped", 4));
  s.losses_of("stopped", "--local-ranks 1 --checkpoint-every 2");
  REQUIRE(s.weights("stopped") == s.weights("whole"));
  std::filesystem::remove_all(checkpoint_path(s.dir / "stopped", 4));
  REQUIRE(said(s.options("stopped", "--local-ranks 1 --products dtype")).find("--products") != std::string::npos);
  REQUIRE(s.weights("stopped") != s.weights("whole"));
}

TEST_CASE(
    "--fp8-skip leaves blocks in bf16: all of them, the run without fp8, bit for bit; resumed exactly, and a change is "
    "noticed",
    "[run][fp8]") {
  const Setting s;
  s.losses_of("bf16", "--local-ranks 1 --products dtype");
  s.losses_of("none", "--local-ranks 1 --fp8-skip 1,1");
  REQUIRE(s.weights("none") == s.weights("bf16"));
  s.losses_of("whole", "--local-ranks 1 --fp8-skip 1");
  s.losses_of("stopped", "--local-ranks 1 --fp8-skip 1 --checkpoint-every 2");
  REQUIRE(s.weights("whole") != s.weights("bf16"));
  std::filesystem::remove_all(checkpoint_path(s.dir / "stopped", 4));
  s.losses_of("stopped", "--local-ranks 1 --fp8-skip 1 --checkpoint-every 2");
  REQUIRE(s.weights("stopped") == s.weights("whole"));
  std::filesystem::remove_all(checkpoint_path(s.dir / "stopped", 4));
  REQUIRE(said(s.options("stopped", "--local-ranks 1 --fp8-skip 0,1")).find("--fp8-skip") != std::string::npos);
  REQUIRE(s.weights("stopped") != s.weights("whole"));

  refused(s.options("no", "--local-ranks 1 --fp8-skip 2,1"), "has 2 blocks: skip at most so many");
  refused(s.options("no", "--local-ranks 1 --fp8-skip 1,"), "expected N or N,M");
  refused(s.options("no", "--local-ranks 1 --fp8-skip -1"), "expected N or N,M");
  refused(s.options("no", "--local-ranks 1 --fp8-skip 1 --products dtype"), "use --products fp8-block");
}

TEST_CASE("validation uses the weights as they are stored, not in fp8", "[run][fp8]") {
  const Setting s;
  const std::string validate = "--local-ranks 1 --val-every 4 --val-steps 1 --val-data " + (s.dir / "data.bin");
  run_well(s.options("fp8", validate));
  run_well(s.options("bf16", validate + " --products dtype"));
  REQUIRE(validations(s.dir / "fp8").at(0) == validations(s.dir / "bf16").at(0));
  REQUIRE(losses(s.dir / "fp8").at(1) != losses(s.dir / "bf16").at(1));
}

TEST_CASE("layouts whose blocks would not be whole are refused in fp8", "[run][fp8]") {
  const Setting s;
  refused(s.options("no", "--local-ranks 1 --seq-len 64"),
          "a rank multiplies 64 tokens of a sequence at a time, and blocks have 128: use a --seq-len that is a "
          "multiple of 128");
  refused(s.options("no", "--local-ranks 2 --cp 2"), "use a --seq-len that is a multiple of 512");
  refused(s.options("no", "--local-ranks 2 --tp 2 --n-ffn 384"),
          "the 192 channels of the feed-forward of a rank are no");
  refused(s.options("no", "--local-ranks 1 --token-slices 4"),
          "a rank multiplies 64 tokens of a sequence at a time, and blocks have 128: use --token-slices 2, or");
  refused(s.options("no", "--local-ranks 1 --seq-len 100 --total-batch-size 100 --token-slices 2"),
          "use a --seq-len that is a multiple of 256");
  refused(s.options("no", "--local-ranks 2 --tp 2 --n-embd 24"),
          "the 24 channels of the model are no multiple of 16: use another --n-embd or --model, or");
  refused(s.options("no", "--local-ranks 1 --plan --machine a100x1"), "has no tflops in fp8");
  refused(s.options("no", "--local-ranks 2 --zero-stage 3 --gather-dtype fp8 --products mxfp8"),
          "whose weights are other numbers in the backward than in the forward");
  refused(s.options("no", "--local-ranks 2 --zero-stage 1 --gather-dtype fp8"), "use --zero-stage 3");
  const std::string tensor = "--local-ranks 2 --products fp8-tensor ";
  refused(s.options("no", tensor + "--tp 2"), "use --tp 1, or --products fp8 or fp8-block");
  refused(
      "--plan --machine h100x8 --ranks 3 --model gpt2:124M --dtype bf16 --products fp8-block --tp 3 --tp-overlap -b 1",
      "a rank's part of 1024 tokens is a product of its own, and with --tp 3 no multiple of 16");
  refused(s.options("no", tensor + "--cp 2 --seq-len 512"), "use --cp 1, or --products fp8 or fp8-block");
  refused(s.options("no", tensor + "--pp 2 --token-slices 2"), "leave out --token-slices");
  refused(s.options("no", tensor + "--zero-stage 3 --gather-dtype fp8"), "whose matrices have one scale each");
  refused(
      "--model d2-e4 --vocab-size 61 --seq-len 256 --batch-size 1 --total-batch-size 1024 --dtype bf16 --train-data " +
          (s.dir / "data.bin") + " --out-dir " + (s.dir / "no") + " --ep 2 " + tensor,
      "use --ep 1, or --products fp8 or fp8-block");
}
