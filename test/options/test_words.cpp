// Names of options: similar ones, and those of other trainers.
#include "catch2.h"
#include "core/words.h"
#include "helpers.h"
#include "run/options/parse.h"

using namespace llmc;

namespace {

// What the program says to these arguments.
std::string answer(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "train_gpt");
  try {
    const Command command = parse_command_line(arguments, [](const Options&) {});
    return command.text.empty() ? "accepted" : command.text;
  } catch (const Error& error) {
    return error.what();
  }
}

void answers(const std::vector<std::string>& arguments, const std::string& part) {
  const std::string found = answer(arguments);
  INFO(found);
  REQUIRE(found.find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("the edit distance counts insertions, deletions, replacements and swaps", "[options]") {
  REQUIRE(edit_distance("", "abc") == 3);
  REQUIRE(edit_distance("kitten", "sitting") == 3);
  REQUIRE(edit_distance("dtpye", "dtype") == 1);
  REQUIRE(edit_distance("same", "same") == 0);
}

TEST_CASE("an unknown option is answered with a name that it begins, shares parts with, or resembles, or with none",
          "[options]") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--batch", "did you mean --batch-size?"},
      {"--Batch_Size", "did you mean --batch-size?"},
      {"--bath-size", "did you mean --batch-size?"},
      {"--dtpye", "did you mean --dtype?"},
      {"--layer", "did you mean --n-layer?"},
      {"--my-batch-size", "did you mean --batch-size?"},
      {"--max-train-steps", "did you mean --max-steps?"},
      {"--learning-rate", "learning_rate of llm.c's train_gpt2.py is --lr here"},
      {"--save-every", "it is --checkpoint-every here"},
      {"--bf16", "--bf16 of Hugging Face's Trainer is --dtype bf16 here"},
      {"--steps", "it is --max-steps here"},
      {"--block_size=128", "block_size of nanoGPT is --seq-len here"},
      {"--per_device_train_batch_size", "--per_device_train_batch_size of Hugging Face's Trainer is --batch-size here"},
      {"--global-batch-size", "--global-batch-size of Megatron-LM is --total-batch-size here (in tokens"},
      {"--num-experts", "--num-experts of Megatron-LM is --model here (d<N>-e<E>, a preset such as mixtral:8x7B"},
  };
  for (const auto& [word, part] : cases)
    answers({word, "1"}, word.substr(0, word.find('=')) + ": there is no such option"), answers({word, "1"}, part);
  for (const char* word : {"--zebra", "--qqq", "--seeds-of-doubt-and-despair"}) {
    INFO(word);
    REQUIRE(answer({word}) == formatted("{}: there is no such option; see --help", word));
  }
}

TEST_CASE("llm.c's two-letter options and -h N are refused by name, never split into a letter and a value",
          "[options]") {
  for (const auto& [word, part] : std::vector<std::pair<std::string, std::string>>{{"-sl", "--skip-loss-z"},
                                                                                   {"-sg", "--skip-grad-z"},
                                                                                   {"-lg", "--log-gpu-every"},
                                                                                   {"-nk", "--keep-checkpoints"},
                                                                                   {"-nm", "--keep-every"},
                                                                                   {"-ge", "has no counterpart here"},
                                                                                   {"-pn", "--world-size"},
                                                                                   {"-pi", "--rendezvous"},
                                                                                   {"-y", "--resume"},
                                                                                   {"-f", "--tf32"},
                                                                                   {"-lr", "--lr"},
                                                                                   {"-out", "--out"},
                                                                                   {"-wd", "--weight-decay"},
                                                                                   {"-n-layer", "--n-layer"},
                                                                                   {"-batch_size", "--batch-size"},
                                                                                   {"-h", "--eval-choices"}}) {
    answers({word, "1"}, word + ": there is no such option");
    answers({word, "1"}, part);
  }
  answers({"-h1"}, "-h1: there is no such option");
  answers({"-h"}, "train_gpt pretrains");
  answers({"-h", "--lr", "1"}, "train_gpt pretrains");
  answers({"-a", "1"}, "--overfit-batch takes no value: leave out '1'");
  answers({"--shuffle", "0"}, "--shuffle takes no value: leave out '0'");
  answers({"help"}, "did you mean --help?");
  answers({"-?"}, "did you mean --help?");
  answers({"generate", "--model", "x"}, "generate: an argument without an option; did you mean --generate?");
  answers({"\u2013lr", "1"}, "\u2013lr: options begin with one or two hyphens (-)");
  answers({"a/generate"}, "quote file patterns");
  answers({"-i", "x", "-b4", "-l", "1e-3", "-k", "cosine", "--prompt", "- x"}, "accepted");
}

TEST_CASE("what other trainers' options are here exists here, and dev/docs/options.md has the tables", "[options]") {
  const std::string help = help_text(), document = read_whole("dev/docs/options.md");
  for (const ForeignTrainer& trainer : foreign_trainers())
    for (const ForeignOption& option : trainer.options) {
      const std::string ours = option.ours;
      INFO(trainer.name << ": " << option.name);
      if (ours.empty()) REQUIRE(*option.note != '\0');
      else REQUIRE(help.find(" " + ours.substr(0, ours.find(' ')) + " ") != std::string::npos);
    }
  INFO("run scripts/update_options.sh to write the tables into dev/docs/options.md");
  REQUIRE(document.find(foreign_markdown()) != std::string::npos);
}
