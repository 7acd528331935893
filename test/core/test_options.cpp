// run/options/: what refusals say: the line of a --config file, other trainers' names.
#include <fstream>
#include <string>
#include <vector>

#include "catch2.h"
#include "helpers.h"
#include "run/options/parse.h"

using namespace llmc;

namespace {

Options parse(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"train_gpt", "--train-data", "x"});
  std::vector<const char*> argv;
  for (const std::string& a : arguments) argv.push_back(a.c_str());
  return parse_command_line(static_cast<int>(argv.size()), argv.data(), [](Options& o) { o.ranks = 4; }).options;
}

std::string refusal(const std::vector<std::string>& arguments) {
  try {
    parse(arguments);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("what a --config file has wrong is refused with its line") {
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
  REQUIRE(both.starts_with(file + ":1: --cp 4 cuts sequences into 8 equal slices, and --seq-len 1001"));
  REQUIRE(both.ends_with(" (--seq-len: " + file + ":2)"));
  REQUIRE(refusal({"--config", file, "--cp", "2", "--seq-len", "33"}).starts_with("--cp 2 cuts sequences"));
  REQUIRE(refusal({"--config", file, "--seq-len", "33"}).starts_with(file + ":1: --cp 4 cuts sequences into 8"));
  REQUIRE(refused("val-data=\"x\"\nplan=true\ngenerate=true\n").ends_with(formatted(" (--plan: {}:2)", file)));
}

TEST_CASE("what is found wrong later, with the option of a --config file, has its line too") {
  const TempDir dir;
  const std::string file = dir / "run.ini";
  std::ofstream(file) << "n-head=5\nout-dir=\"" + (dir / "run") + "\"\n";
  const ProgramResult r = run_program("--config " + file + " --model d2 --n-embd 64 --plan");
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.starts_with("train_gpt: " + file + ":1: --n-head 5 does not divide --n-embd 64"));
}
