// generate.h: --generate: prompts from the command line, a file, stdin or a dialogue, and how a model continues them.
#pragma once
#include <iostream>
#include <sstream>

#include "core/files.h"
#include "core/utf8.h"
#include "run/reports/report.h"
#include "run/setup.h"
#include "train/sample.h"

namespace llmc {

inline constexpr int64_t most_prompt_bytes = 1 << 26;

// Writes generated text to stdout: byte for byte to a pipe or a file; to a terminal as whole characters, escaped if
// they could do anything but display.
class TextOut {
 public:
  void add(std::string_view bytes) { put(terminal_ ? characters_.add(bytes) : std::string(bytes)); }
  // The text that follows does not continue a character.
  void end(std::string_view after) {
    put(characters_.rest());
    put(after);
  }

 private:
  static void put(std::string_view bytes) {
    const bool good = std::fwrite(bytes.data(), 1, bytes.size(), stdout) == bytes.size() && std::fflush(stdout) == 0;
    CHECK(good, "cannot write to stdout: {}", std::strerror(errno));
  }
  bool terminal_ = isatty(STDOUT_FILENO) == 1;
  PrintableStream characters_;
};

namespace detail {

// A line without its line break; none: there are no more.
inline std::optional<std::string> read_line(std::istream& in) {
  std::string line;
  if (!std::getline(in, line)) return std::nullopt;
  if (line.ends_with('\r')) line.pop_back();
  return line;
}

// All of stdin, without a line break at its end.
inline std::string read_stdin() {
  std::string text;
  std::vector<char> piece(1 << 16);
  for (size_t n = 0; (n = std::fread(piece.data(), 1, piece.size(), stdin)) > 0;) {
    text.append(piece.data(), n);
    CHECK(std::ssize(text) <= most_prompt_bytes, "--prompt -: stdin has more than {} bytes, too many for a prompt",
          most_prompt_bytes);
  }
  CHECK(std::ferror(stdin) == 0, "--prompt -: cannot read stdin: {}", std::strerror(errno));
  if (text.ends_with('\n')) text.pop_back();
  if (text.ends_with('\r')) text.pop_back();
  return text;
}

struct Prompt {
  std::string text, where;  // where: how errors begin, "--prompt"
};

// The prompts known before the first one is continued; with --interactive there are none.
inline std::vector<Prompt> given_prompts(const Options& o) {
  if (o.prompt_file.empty()) return {{o.prompt == "-" ? read_stdin() : o.prompt, "--prompt"}};
  std::string text = read_text(o.prompt_file, most_prompt_bytes);
  if (text.starts_with(utf8_mark)) text.erase(0, utf8_mark.size());
  std::istringstream lines(std::move(text));
  std::vector<Prompt> prompts;
  int64_t number = 0;
  while (const std::optional<std::string> line = read_line(lines)) {
    ++number;
    if (!line->empty()) prompts.push_back({*line, formatted("--prompt-file {}:{}", o.prompt_file, number)});
  }
  CHECK(!prompts.empty(), "--prompt-file {} has no prompt: expected one in each line", o.prompt_file);
  return prompts;
}

}  // namespace detail

// --generate: loads a model and prints how it continues the prompts, token by token.
inline void run_generate(const Options& o) {
  require_trained_model("--generate", o.model);
  StepConfig config{
      .model = choose_model(o), .precision = choose_precision(o), .layout = {.zero = {.holds = Holds::weights}}};
  CHECK(o.seq_len <= config.model.n_positions, "--seq-len {} exceeds the {} positions of --model {}: use at most {}",
        o.seq_len, config.model.n_positions, o.model, config.model.n_positions);
  config.batch = {1, o.seq_len};
  take_trained_biases(config, o.model);
  require_countable(config);
  const Device device = choose_device(o);
  const auto tokenizer = choose_tokenizer(o, config.model);
  const auto tokens_of = [&](const detail::Prompt& prompt) {
    return prompt_tokens(*tokenizer, prompt.text, config.model, prompt.where);
  };
  const auto prompts = o.interactive ? std::vector<detail::Prompt>() : detail::given_prompts(o);
  for (const detail::Prompt& prompt : prompts) tokens_of(prompt);  // rejects a bad one before the first is continued
  const Plan plan = make_plan(config, device);
  require_memory(o, config, plan, device);
  require_whole_weights(o, check_alone);
  World world{Mesh()};
  Run run(config, plan, device, world, 0);
  initialise(run, o);
  if (o.interactive || !prompts[0].text.empty())
    for (const std::string& notice : detail::tokenizer_notices(o, config.model, *tokenizer, nullptr))
      print_error(notice);
  TextOut out;
  int64_t texts = 0;
  bool cut = false;  // a prompt
  const auto print_text = [&](const detail::Prompt& prompt, int64_t sample) {
    std::vector<int32_t> tokens = tokens_of(prompt);
    if (std::ssize(tokens) > o.seq_len && !std::exchange(cut, true))
      print_error(formatted("notice: {} has {} tokens, and only its last {} are used: --seq-len {} is {}", prompt.where,
                            tokens.size(), o.seq_len, o.seq_len,
                            o.seq_len < config.model.n_positions
                                ? formatted("less; the model has {} positions", config.model.n_positions)
                                : std::string("as many as the model has positions")));
    if (texts++ > 0 && !o.interactive) out.end("---\n");
    out.add(prompt.text);
    generate(run.trainer, std::move(tokens), o.sample_tokens, sample_options(o),
             Philox(static_cast<uint64_t>(o.seed + sample), "generate"), [&](int32_t token) {
               if (token == tokenizer->end_of_text()) return false;
               out.add(tokenizer->decode({&token, 1}));
               return true;
             });
    out.end("\n");
  };
  for (const detail::Prompt& prompt : prompts)
    for (int64_t sample = 0; sample < o.num_samples; ++sample) print_text(prompt, sample);
  if (!o.interactive) return;
  const bool asks = isatty(STDIN_FILENO) == 1;
  for (int64_t sample = 0;;) {
    if (asks) std::fputs("> ", stderr);
    const std::optional<std::string> line = detail::read_line(std::cin);
    if (!line) break;
    try {
      for (int64_t i = 0; i < o.num_samples; ++i) print_text({*line, "this line"}, sample++);
    } catch (const Error& error) {
      if (!asks) throw;
      print_error(error.what());
    }
  }
  if (asks) std::fputs("\n", stderr);
}

}  // namespace llmc
