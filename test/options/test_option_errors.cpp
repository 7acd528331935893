// run/options/: the texts of errors: the line of a --config file, other trainers' names.
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "catch2.h"
#include "helpers.h"
#include "run/length.h"
#include "run/options/parse.h"

using namespace llmc;

namespace {

Options parse(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"train_gpt", "--train-data", "x"});
  return parse_command_line(arguments, [](Options& o) { o.ranks = 4; }).options;
}

std::string refusal(const std::vector<std::string>& arguments) {
  try {
    parse(arguments);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// The refusal of a command whose words need no quotes.
std::string refusal_of(const std::string& command) {
  std::istringstream in(command);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return detail::fault_of_values(words);
}

}  // namespace

TEST_CASE("what a --config file has wrong is refused with its line", "[options]") {
  const TempDir dir;
  const std::string file = dir / "run.ini";
  const auto refused = [&](const std::string& text) {
    std::ofstream(file) << text;
    return refusal({"--config", file});
  };
  REQUIRE(refused("# Data\n\nlr=fast\n") == file + ":3: --lr 'fast': expected a number");
  REQUIRE(refused("seed=1\nlr=200\n") == file + ":2: --lr 200: expected a number from 0 to 100");
  REQUIRE(refused("dtype=int8\n").starts_with(file + ":1: --dtype int8: expected one of fp32, bf16"));
  REQUIRE(refused("tf32=yes\n") == file + ":1: --tf32 'yes': expected true or false");
  REQUIRE(refused("\nbach-size=3\n").starts_with(file + ":2: --bach-size: there is no such option; did you mean"));
  REQUIRE(refused("lr=0.1\nseed=1\nlr=0.1\n") == file + ":3: --lr: line 1 sets it too; leave out one of them");
  REQUIRE(refused("config=\"other.ini\"\n") == file + ":1: --config: give this on the command line");
  REQUIRE(refused(std::string("seed=1\nval-data=\"a\0\"\n", 20)) ==
          file + ":2: a NUL byte, which no option has: the file is damaged");
  REQUIRE(refused("just words\n").starts_with(file + ":1: 'just words': expected NAME=VALUE"));
  REQUIRE(refused("prompt=\"Once\n").starts_with(file + ":1: --prompt '\"Once': a quote is missing"));
  REQUIRE(refused("out-dir=out/a # mine\n").starts_with(file + ":1: --out-dir 'out/a # mine': write the comment"));
  REQUIRE(refused("prompt=\"a\xff\"\n").starts_with(file + ":1: --prompt: byte 2 is not UTF-8"));
  REQUIRE(refused("prompt=\"\x1b[31m\"\nlr=\x1b\n") == file + ":2: --lr '\\x1b': expected a number");
  REQUIRE(refused(std::string(2 << 20, '#')).find("at most 1048576") != std::string::npos);
  REQUIRE(refusal({"--config", dir / "none.ini"}) == "--config " + (dir / "none.ini") + ": there is no such file");

  // Combinations: the lines of all that the refusal names, but for what the command line sets.
  REQUIRE(refused("tp=3\n").starts_with(file + ":1: --tp 3 needs a multiple of 3 ranks"));
  const std::string both = refused("cp=4\nseq-len=1001\n");
  REQUIRE(
      both.starts_with(file + ":1: --cp 4 cuts sequences into 8 equal slices, and 8 does not divide --seq-len 1001"));
  REQUIRE(both.ends_with(" (--seq-len: " + file + ":2)"));
  REQUIRE(refusal({"--config", file, "--cp", "2", "--seq-len", "33"}).starts_with("--cp 2 cuts sequences"));
  REQUIRE(refusal({"--config", file, "--seq-len", "33"}).starts_with(file + ":1: --cp 4 cuts sequences into 8"));
  REQUIRE(refused("val-data=\"x\"\nplan=true\ngenerate=true\n").find("--plan: " + file + ":2") != std::string::npos);
}

TEST_CASE("all options of another trainer are named at once, with the command that would do", "[options]") {
  const std::string r = refusal_of(
      "./train_gpt --output_dir out/x --learning_rate 3e-4 --num_train_epochs=3 --bf16 True "
      "--gradient_accumulation_steps 4 --fp16 --batch_size 8 --zebra 1 -i data.bin --report_to none "
      "--gradient_checkpointing false --prompt x");
  INFO(r);
  REQUIRE(
      r.starts_with("--output_dir, --learning_rate, --num_train_epochs, --bf16, --gradient_accumulation_steps, --fp16, "
                    "--batch_size, --zebra, --report_to and --gradient_checkpointing: there are no such options;"));
  for (const char* row : {"\n  --learning_rate 3e-4                 --lr 3e-4\n", "  --bf16 True  ", " --dtype bf16\n",
                          " ? --total-batch-size: in tokens: ", " ? no counterpart: fp32 and bf16 only", " ? unknown\n",
                          "  --gradient_checkpointing false       leave it out\n"})
    REQUIRE(r.find(row) != std::string::npos);
  REQUIRE(r.ends_with(
      "\nthe command for train_gpt, without the options marked \"?\":\n  ./train_gpt --out-dir out/x --lr 3e-4 "
      "--epochs 3 --dtype bf16 --batch-size 8 -i data.bin --prompt x"));

  // llm.c's letters; a value that is none here is named in turn.
  REQUIRE(refusal_of("./train_gpt -i x -sl 0 -sg 7 -nk 3 -y 1 -pn 2 -b 4 -r 1 -w 0")
              .ends_with(
                  "\nthe command for train_gpt, without the options marked \"?\":\n  ./train_gpt -i x --skip-grad-z 7 "
                  "--keep-checkpoints 3 -b 4 --recompute activation --master-weights none"));
  REQUIRE(refusal_of("./train_gpt -i x -a 1 -f 1 -h 0 -y 0 -nk 3")
              .ends_with("\nthe command for train_gpt:\n  ./train_gpt -i x --overfit-batch --tf32 --resume never "
                         "--keep-checkpoints 3"));
  REQUIRE(refusal_of("./train_gpt -a 0 -nk 3")
              .ends_with("\nthe command for train_gpt:\n  ./train_gpt --keep-checkpoints 3"));
  REQUIRE(refusal_of("./train_gpt --max_iters=10 --block_size=8 --dtype=float16")
              .ends_with("\nthe command for train_gpt:\n  ./train_gpt --max-steps 10 --seq-len 8 --dtype=float16\nin "
                         "which this must still change: --dtype float16: expected one of fp32, bf16"));
  // One of them, and words that need quotes.
  REQUIRE(refusal_of("./train_gpt --learning_rate 1 -i d*") ==
          "--learning_rate: there is no such option; --learning_rate of llm.c's train_gpt2.py is --lr here; see "
          "--help\nthe command for train_gpt:\n  ./train_gpt --lr 1 -i 'd*'");
  // Megatron's and nanoGPT's meanings of one name.
  REQUIRE(refusal_of("./train_gpt --eval-iters 3 --micro-batch-size 2").find("--val-steps 3\n") != std::string::npos);
  REQUIRE(refusal_of("./train_gpt --eval_iters=3 --block_size=2").find(" ? --val-steps: batches of a step") !=
          std::string::npos);
}

TEST_CASE("--tokens takes numbers with suffixes; --max-steps, --tokens and --epochs exclude each other", "[options]") {
  const auto tokens = [](const char* text) { return parse({"--tokens", text}).tokens->tokens; };
  REQUIRE(tokens("1000000") == 1'000'000);
  REQUIRE(tokens("9223372036854775807") == std::numeric_limits<int64_t>::max());
  REQUIRE(tokens("300M") == 300'000'000);
  REQUIRE(tokens("1.5b") == 1'500'000'000);
  REQUIRE(tokens("20G") == 20'000'000'000);
  REQUIRE(tokens("15T") == 15'000'000'000'000);
  REQUIRE(tokens("2e9") == 2'000'000'000);
  REQUIRE(tokens("0.5k") == 500);
  for (const char* bad : {"M", "1.5", "0.1234k", "10 B", "10BB", "ten", "inf", "nan", "1e30", "0x10", "10Q"})
    REQUIRE(refusal({"--tokens", bad}) ==
            formatted("--tokens '{}': expected a whole number of tokens, such as 1000000, 300M or 1.5B", bad));
  REQUIRE(refusal({"--tokens", "0"}) == "--tokens 0: expected a number from 1 on");
  REQUIRE(refusal({"--tokens=-1M"}) == "--tokens -1M: expected a number from 1 on");
  REQUIRE(refusal({"--epochs", "0"}) == "--epochs 0: expected a number above 0");
  REQUIRE(refusal({"--tokens", "1B", "--epochs", "2"}) ==
          "--tokens 1B with --epochs 2: each says how long the run is: give one of them");
  REQUIRE(
      refusal({"--max-steps", "5", "--tokens", "1B", "--plan"}).starts_with("--max-steps 5 with --tokens 1B: each"));
  REQUIRE(command_line(parse({"--tokens", "1.5b"})) == "./train_gpt --train-data x --tokens 1.5b");
  REQUIRE(config_text(parse({"--tokens", "1.5b"})).find("\ntokens=1.5b\n") != std::string::npos);
}

TEST_CASE("--tokens and --epochs come to a number of updates, rounded up", "[options]") {
  const auto steps = [](std::vector<std::string> arguments) { return choose_steps(parse(arguments), 1000, 100'000); };
  REQUIRE(steps({}) == 100);
  REQUIRE(steps({"--max-steps", "7"}) == 7);
  REQUIRE(steps({"--tokens", "7k"}) == 7);
  REQUIRE(steps({"--tokens", "7001"}) == 8);
  REQUIRE(steps({"--tokens", "1"}) == 1);
  REQUIRE(steps({"--tokens", "9223372036854775000"}) == 9223372036854775);
  REQUIRE(steps({"--epochs", "2"}) == 200);
  REQUIRE(steps({"--epochs", "0.07"}) == 7);  // 7.000000000000001
  REQUIRE(steps({"--epochs", "0.071"}) == 8);
  REQUIRE(steps({"--epochs", "1e-9"}) == 1);
  // Of 8 samples, 5 in a step: 16 steps of 5 are 10 epochs. No epoch is rounded, whether it has more samples or fewer.
  REQUIRE(choose_steps(parse({"--epochs", "10"}), 5, 8) == 16);
  REQUIRE(choose_steps(parse({"--epochs", "3"}), 3, 4) == 4);
  REQUIRE(choose_steps(parse({"--epochs", "3"}), 4, 2) == 2);
  REQUIRE(choose_steps(parse({"--epochs", "1"}), 5, 8) == 2);
  REQUIRE(choose_steps(parse({}), 5, 8) == 1);  // whole steps, and so no sample twice
  REQUIRE_ERROR(steps({"--epochs", "1e300"}), "--epochs 1e+300 is more steps of 1000 tokens than 64 bits count");
}

TEST_CASE("what is found wrong later, with the option of a --config file, has its line too", "[options]") {
  const TempDir dir;
  const std::string file = dir / "run.ini";
  std::ofstream(file) << "n-head=5\nout-dir=\"" + (dir / "run") + "\"\n";
  const ProgramResult r = run_program("--config " + file + " --model d2 --n-embd 64 --plan");
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.starts_with("train_gpt: " + file + ":1: --n-head 5 does not divide --n-embd 64"));
}
