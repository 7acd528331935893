// --generate: where prompts come from, several samples, a dialogue; and what reaches a terminal, a pipe and the log.
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "catch2.h"
#include "core/utf8.h"
#include "helpers.h"
#include "tiny_run.h"

using namespace llmc;

namespace {

// A model of bytes that has learned nothing: hot samples have all of them.
std::string byte_model(const TempDir& dir, const std::string& more = "") {
  write_shard<uint16_t>(dir / "bytes.bin", std::vector<uint16_t>(200, 'a'));
  run_well("--model d1 --n-embd 16 --n-head 2 --vocab-size 257 -t 64 -b 1 -x 1 --lr 1e-9 --threads 1 -i " +
           (dir / "bytes.bin") + " -o " + (dir / "run") + " " + more);
  return dir / "run/step-000001";
}

ProgramResult with_stdin(const std::string& text, const std::string& arguments) {
  const TempDir dir;
  std::ofstream(dir / "in", std::ios::binary) << text;
  const int status = std::system(("CUDA_VISIBLE_DEVICES= ./train_gpt " + arguments + " <" + (dir / "in") + " >" +
                                  (dir / "out") + " 2>" + (dir / "err"))
                                     .c_str());
  return {WEXITSTATUS(status), read_whole(dir / "out"), read_whole(dir / "err")};
}

// What the program writes to a terminal that is its stdout.
std::string on_terminal(const std::string& arguments) {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  REQUIRE((terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0));
  const std::string name = ptsname(terminal);
  const int held = open(name.c_str(), O_RDWR | O_NOCTTY);  // so that what was written stays
  termios raw{};
  REQUIRE(tcgetattr(held, &raw) == 0);
  cfmakeraw(&raw);
  REQUIRE(tcsetattr(held, TCSANOW, &raw) == 0);
  REQUIRE(std::system(("CUDA_VISIBLE_DEVICES= ./train_gpt " + arguments + " >" + name + " </dev/null").c_str()) == 0);
  std::string text;
  pollfd readable{.fd = terminal, .events = POLLIN, .revents = 0};
  while (poll(&readable, 1, 0) == 1) {
    char piece[4096];
    const ssize_t n = read(terminal, piece, sizeof piece);
    REQUIRE(n > 0);
    text.append(piece, static_cast<size_t>(n));
  }
  close(held);
  close(terminal);
  return text;
}

}  // namespace

TEST_CASE("text that comes in pieces is escaped as it is whole, and characters are shown when they are",
          "[run][generate]") {
  const std::string text =
      "a\x1b["
      "31m\x07\tb\n\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82\xc2\x9b\xe2\x80\xae\xe2\x81\xa6\xff\xe2\x82\xc3\x41\xf0\x9f";
  for (size_t step = 1; step <= 4; ++step) {
    PrintableStream stream;
    std::string shown;
    for (size_t at = 0; at < text.size(); at += step) {
      shown += stream.add(text.substr(at, step));
      REQUIRE_FALSE(utf8_fault(shown));  // never a part of a character
    }
    REQUIRE(shown + stream.rest() == printable(text));
    REQUIRE(stream.rest().empty());
  }
  REQUIRE(printable(text) ==
          "a\\x1b[31m\\x07\tb\n\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82\\xc2\\x9b\\xe2\\x80\\xae\\xe2\\x81\\xa6\\xff"
          "\\xe2\\x82\\xc3"
          "A\\xf0\\x9f");
  REQUIRE(PrintableStream().add("\xe2\x82").empty());
}

TEST_CASE("samples reach a pipe as they are, and a terminal and the log with control characters escaped",
          "[run][generate]") {
  const TempDir dir;
  const std::string model = byte_model(dir, "-s 1 -g 200 --prompt 'x\x1b[2J'");
  const std::string generate = "--generate --model " + model + " -g 400 --prompt 'caf\xc3\xa9 \x1b[31m'";
  const ProgramResult piped = run_program(generate);
  REQUIRE(piped.status == 0);
  REQUIRE(piped.out.starts_with("caf\xc3\xa9 \x1b[31m"));
  REQUIRE(std::ranges::any_of(piped.out.substr(11), [](char c) { return c != '\n' && c >= 0 && c < 0x20; }));
  const std::string shown = on_terminal(generate);
  REQUIRE(shown == printable(piped.out));
  REQUIRE(shown.starts_with("caf\xc3\xa9 \\x1b[31m"));
  const std::string log = read_whole(dir / "run/log.txt");
  REQUIRE(log.find("sample at step 1: x\\x1b[2J") != std::string::npos);
  REQUIRE(printable(log) == log);
}

TEST_CASE("prompts come from stdin, from the lines of a file, or one after the other; each sample has its own seed",
          "[run][generate]") {
  const TempDir dir;
  const std::string model = byte_model(dir), generate = "--generate -g 6 --temperature 2 --model " + model;
  auto one = [&](const std::string& prompt, int seed) {
    const ProgramResult r = run_program(generate + formatted(" --seed {} --prompt '{}'", seed, prompt));
    REQUIRE(r.status == 0);
    return r.out;
  };
  const std::string first = one("ab", 42), second = one("ab", 43);
  REQUIRE(first != second);
  const ProgramResult lines = with_stdin("one\ntwo\n", generate + " --prompt -");
  REQUIRE(lines.out == one("one\ntwo", 42));

  std::ofstream(dir / "prompts") << "\xef\xbb\xbf"
                                 << "ab\r\n\ncd";
  const ProgramResult file = run_program(generate + " --num-samples 2 --prompt-file " + (dir / "prompts"));
  INFO(file.err);
  REQUIRE(file.status == 0);
  const std::string cut = "---\n";
  REQUIRE(file.out == first + cut + second + cut + one("cd", 42) + cut + one("cd", 43));

  const ProgramResult dialogue = with_stdin("ab\nab\ncd", generate + " --interactive");
  INFO(dialogue.err);
  REQUIRE(dialogue.status == 0);
  REQUIRE(dialogue.out == first + second + one("cd", 44));
}

TEST_CASE("the model sees as many tokens as in its training, or --seq-len, and a longer prompt is cut with a notice",
          "[run][generate]") {
  const TempDir dir;
  const std::string generate = "--generate -g 4 --temperature 0 --model " + byte_model(dir);
  const std::string end = "of the prompt that is the last sixty-four bytes, as many as trained.";
  REQUIRE(end.size() > 64);
  const auto made = [&](const std::string& prompt, const std::string& more, const std::string& notice) {
    const ProgramResult r = run_program(generate + more + " --prompt '" + prompt + "'");
    INFO(r.err);
    REQUIRE(r.status == 0);
    REQUIRE(r.out.starts_with(prompt));
    REQUIRE(r.err == (notice.empty() ? "" : "notice: --prompt has " + notice + "\n"));
    return r.out.substr(prompt.size());
  };
  const std::string long_prompt = std::string(100, 'x') + end,
                    cut = made(long_prompt, "",
                               "169 tokens, and only its last 64 are used: --seq-len 64 is less; the "
                               "model has 1024 positions");
  REQUIRE(made(end.substr(end.size() - 64), "",
               "65 tokens, and only its last 64 are used: --seq-len 64 is less; the "
               "model has 1024 positions") == cut);  // the end of text is before it
  made(long_prompt, " -t 169", "");
  made(long_prompt, " --seq-len 1024", "");
  std::ofstream(dir / "prompts") << long_prompt << "\n" << long_prompt << "\n";
  const ProgramResult several = run_program(generate + " -t 32 --num-samples 2 --prompt-file " + (dir / "prompts"));
  INFO(several.err);
  REQUIRE(several.err.find("prompts:1 has 169 tokens, and only its last 32 are used") != std::string::npos);
  REQUIRE(std::ranges::count(several.err, '\n') == 1);
  const ProgramResult longer = run_program(generate + " --prompt a -t 1025");
  REQUIRE(longer.status == 1);
  REQUIRE(longer.err.find("--seq-len 1025 exceeds the 1024 positions of --model ") != std::string::npos);
}

TEST_CASE("prompts that cannot be continued are refused by their place before the first text", "[run][generate]") {
  const TempDir dir;
  const std::string model = byte_model(dir), generate = "--generate -g 4 --model " + model;
  auto refused = [&](const std::string& arguments, const std::string& words, const std::string& prefix = "") {
    const ProgramResult r = run_program(arguments, prefix);
    INFO(arguments << "\n" << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.out.empty());
    REQUIRE(r.err.find(words) != std::string::npos);
  };
  std::ofstream(dir / "none") << "\n\n";
  refused(generate + " --prompt-file " + (dir / "none"), "has no prompt: expected one in each line");
  refused(generate + " --prompt-file " + (dir / "missing"), "missing");
  refused(generate + " --prompt a --interactive", "choose one of them");
  refused(generate + " --prompt -", "--prompt -: cannot read stdin: Is a directory", "sh -c '\"$@\" <.' sh");
  const std::string train = "-i x -o " + (dir / "new");
  refused(train + " --interactive", "--interactive is for --generate");
  refused(train + " --num-samples 2", "--num-samples 2 is for --generate");
  refused(train + " --prompt -", "not training");

  const std::string tokenizer = "test/golden/tokenizers/gpt2.json";
  std::ofstream(dir / "lines") << "a\n\xff\n";
  refused(generate + " --tokenizer " + tokenizer + " --prompt-file " + (dir / "lines"), (dir / "lines") + ":2: byte 1");
}

TEST_CASE("a diverged model generates nothing; in training it is the loss that ends a run", "[run][generate]") {
  const TempDir dir;
  const std::string model = byte_model(dir);
  write_changed_model(dir / "nan", model, [](const std::string& name, std::vector<float>& values) {
    if (name.ends_with("wte.weight")) std::fill(values.begin(), values.end(), 3e38f);
  });
  for (const char* greedy : {"", " --temperature 0"}) {
    const ProgramResult r = run_program("--generate -g 4 --prompt a --model " + (dir / "nan") + greedy);
    INFO(r.out << r.err);
    REQUIRE(r.status == 2);
    REQUIRE(r.err.find("the logits of the next token are not finite") != std::string::npos);
  }
  const ProgramResult r = run_program(tiny(
      dir / "diverges",
      "--lr 100 --grad-clip 0 --lr-schedule constant --warmup-steps 0 --batch-size 8 --max-steps 40 --sample-every 1 "
      "--sample-tokens 2"));
  INFO(r.out << r.err);
  REQUIRE(r.status == 2);
  REQUIRE(r.out.find("WARNING: no sample at step ") != std::string::npos);
  REQUIRE(r.err.find("logits") == std::string::npos);
}

TEST_CASE("the command to generate that a run suggests has a prompt, if its tokenizer can encode one",
          "[run][generate]") {
  const TempDir dir;
  auto suggests = [&](const std::string& more) {
    write_shard<uint16_t>(dir / "bytes.bin", std::vector<uint16_t>(200, 'a'));
    std::filesystem::remove_all(dir / "run");
    const ProgramResult r = run_program("--model d1 --n-embd 16 --n-head 2 -t 64 -b 1 -x 1 --threads 1 -i " +
                                        (dir / "bytes.bin") + " -o " + (dir / "run") + " " + more);
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out.substr(r.out.rfind("next:"));
  };
  REQUIRE(suggests("--vocab-size 257").find("--prompt 'Once upon a time'") != std::string::npos);
  REQUIRE(suggests("--vocab-size 257 --prompt Well").find("--prompt Well") != std::string::npos);
  REQUIRE(suggests("--vocab-size 300").find("--prompt") == std::string::npos);
}
