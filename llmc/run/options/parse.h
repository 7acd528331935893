// parse.h: reads options from the command line and from --config files, and rejects combinations that do not work.
#pragma once
#include <CLI/CLI.hpp>

#include "core/check.h"
#include "core/files.h"
#include "core/words.h"
#include "run/options/choose_layout.h"
#include "run/options/ignored.h"
#include "run/options/option_files.h"
#include "schedule/pipeline.h"
#include "schedule/stage_partition.h"

namespace llmc {

namespace detail {

// Rejects words after one dash that CLI11 would misread: -inf, or a letter joined to a path.
inline void refuse_words_after_one_dash(const Words& words) {
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string &word = words[i], &before = words[i - 1];
    if (word == "--") return;
    if (word.size() < 2 || word[0] != '-' || !is_letter(word[1])) continue;
    const bool infinite = plain_name(word) == "inf" || plain_name(word) == "nan";
    CHECK(!infinite || !before.starts_with('-'), "{} {}: expected a finite number; text would be given as {}={}",
          shown(before), word, shown(before), word);
    CHECK(!is_word_after_one_dash(word) || word.starts_with("-h") || word.find('/') == std::string::npos,
          "{}: put a space between the letter and its value: {} {}", shown(word), word.substr(0, 2),
          shown(word.substr(2)));
  }
}

// Rejects "--lr=", for which CLI11 would take the next word as the value, and empty values, which options would take
// for none at all. (Unknown options are named all at once.)
inline void refuse_missing_values(const Words& words) {
  for (const Argument& a : split_arguments(words)) {
    if (!a.known || !a.has_value || !a.value.empty()) continue;
    CHECK(a.words.size() > 1, "{}: the value after '=' is missing; leave the option out for its default",
          shown(a.words[0]));
    refuse_empty_value(a.name, a.name);
  }
}

// The words of a command line; the several that --tokenize and --average take (patterns, expanded) joined by commas.
inline Words joined_words(const Words& given) {
  Words words;
  enum { none, first, more } files = none;  // what the next word may be
  for (const std::string& word : given) {
    const bool option = word.starts_with('-');
    if (files == more && !option) {
      words.back() += "," + word;
      continue;
    }
    words.push_back(word);
    const bool joined = word.starts_with("--tokenize=") || word.starts_with("--average=");
    files = word == "--tokenize" || word == "--average" ? first : joined || (files == first && !option) ? more : none;
  }
  return words;
}

// Rejects a word that belongs to no option.
[[noreturn]] inline void refuse_stray_word(const std::string& word, const std::string& before) {
  Options o;
  std::string flag;
  for (const OptionRow& row : option_rows(o))
    if (row.field.is_flag() && (before == row.name || before == row.letter)) flag = row.name;
  CHECK(flag.empty(), "{} takes no value: leave out '{}', or write {}=false to switch it off; see --help", flag, word,
        flag);
  // "generate", "-?", and "–lr", with a dash made by a text processor
  const bool dash = word.starts_with("\u2013") || word.starts_with("\u2014") || word.starts_with("\u2212");
  CHECK(!dash, "{}: options begin with one or two hyphens (-), and this is another kind of dash: retype it",
        shown(word));
  const std::vector<std::string> similar = our_similar_names(word == "-?" ? "help" : word);
  const bool named = similar.size() == 1 && plain_name(similar[0]) == (word == "-?" ? "help" : plain_name(word));
  CHECK(!named, "{}: an argument without an option; did you mean {}?", shown(word), similar[0]);
  throw Error(formatted("{}: an argument without an option; quote file patterns ('data/*_train_*.bin'); see --help",
                        shown(word)));
}

}  // namespace detail

// "1020 or 1026": the multiples of n on either side of x.
inline std::string multiples_beside(int64_t x, int64_t n) {
  return x < n ? formatted("{}", n) : formatted("{} or {}", x / n * n, (x / n + 1) * n);
}

// The tokens of a micro-batch of each of the readers, the ranks that take their own.
inline int64_t micro_batch_tokens(const Options& o, int64_t readers) {
  const int64_t tokens = o.batch_size * o.seq_len;  // each is at most largest_size
  CHECK(tokens <= std::numeric_limits<int64_t>::max() / readers,
        "--batch-size {} x --seq-len {} x {} ranks that take samples of their own: more tokens than 64 bits count: use "
        "a smaller --batch-size",
        o.batch_size, o.seq_len, readers);
  return tokens * readers;
}

// Checks options that may not go with an asynchronous pipeline, whose stages each update after every micro-batch.
inline void validate_pipedream(const Options& o, int64_t readers) {
  auto refuse = [](bool asked, const std::string& option, const char* why, const char* remedy) {
    CHECK(!asked, "{} with --schedule pipedream: {}; {}, or use --schedule 1f1b", option, why, remedy);
  };
  const int64_t micro = micro_batch_tokens(o, readers);
  if (o.total_batch_size)
    refuse(*o.total_batch_size != micro, formatted("--total-batch-size {}", *o.total_batch_size),
           formatted("a step is one micro-batch of each data-parallel rank, {} x {} x {} = {} tokens", o.batch_size,
                     o.seq_len, readers, micro)
               .c_str(),
           "leave it out, or change --batch-size");
  refuse(o.qk_clip.has_value(), formatted("--qk-clip {}", o.qk_clip.value_or(0)),
         "a stage makes its update while later micro-batches are computed with other weights, whose logits it would "
         "shrink again",
         "leave it out");
  refuse(o.skip_loss_z || o.skip_grad_z, o.skip_loss_z ? "--skip-loss-z" : "--skip-grad-z",
         "the loss and the norm of the whole model tell outliers, and a stage updates before they are known",
         "leave it out");
  refuse(o.on_spike == OnSpike::skip, "--on-spike skip",
         "a stage makes its update before the loss and the norm of the whole model are known",
         "use --on-spike stop or rollback");
  refuse(o.checkpoint_minutes.value_or(0) > 0, formatted("--checkpoint-minutes {}", o.checkpoint_minutes.value_or(0)),
         "a checkpoint empties the pipeline, and where that happens changes what the run learns, so a clock would "
         "decide it",
         "use --checkpoint-every");
}

// The number of slices into which --token-slices cuts sequences; none: auto.
inline std::optional<int64_t> token_slices(const Options& o) {
  if (o.token_slices == "auto") return std::nullopt;
  const int64_t slices = number_from<int64_t>(o.token_slices).value_or(0);
  CHECK(slices >= 1 && slices <= most_pipeline_passes,
        "--token-slices '{}': expected a whole number from 1 to {}, or auto", shown(o.token_slices),
        most_pipeline_passes);
  return slices;
}

// A range of numbers, N or N-M, as an option names it. expected: such as "the number of a draw".
struct NumberRange {
  uint64_t first;
  std::optional<uint64_t> last;  // none: N alone
};
inline NumberRange number_range(const char* option, const std::string& text, const char* expected) {
  const auto number = [&](const std::string& digits) {
    constexpr uint64_t none = std::numeric_limits<uint64_t>::max();
    const uint64_t value = number_from<uint64_t>(digits).value_or(none);
    CHECK(value != none, "{} '{}': expected {}, such as 123, or a range, 120-129", option, shown(text), expected);
    return value;
  };
  const size_t dash = text.find('-');
  NumberRange range{number(text.substr(0, dash)), std::nullopt};
  if (dash != text.npos) range.last = number(text.substr(dash + 1));
  CHECK(!range.last || *range.last >= range.first, "{} {}: the range ends before it begins", option, text);
  return range;
}

// The draws that --selftest-draws names; none: it was not given.
inline std::optional<NumberRange> selftest_draws(const Options& o) {
  if (o.selftest_draws.empty()) return std::nullopt;
  return number_range("--selftest-draws", o.selftest_draws, "the number of a draw");
}

// Checks the options of the self-test.
inline void validate_selftest(const Options& o) {
  CHECK(o.selftest_draws.empty() || o.selftest_layouts == Options().selftest_layouts,
        "--selftest-layouts {} with --selftest-draws, which leaves those layouts out: choose one of them",
        o.selftest_layouts);
  selftest_draws(o);
}

// Checks how the ranks share a step.
inline void validate_layout(const Options& o) {
  std::string group, values;  // "--tp and --cp", "--tp 2 with --cp 2"
  for (const auto& [name, size] : {std::pair{"--pp", o.pp}, std::pair{"--tp", o.tp}, std::pair{"--cp", o.cp}}) {
    if (size == 1) continue;
    group += (group.empty() ? "" : " and ") + std::string(name);
    values += (values.empty() ? "" : " with ") + formatted("{} {}", name, size);
  }
  const int64_t together = o.tp * o.cp * o.pp, readers = o.ranks / together;
  CHECK(o.ranks % together == 0,
        "{} needs a multiple of {} ranks, and there are {}: change --local-ranks, the number of processes, or {}",
        values, together, o.ranks, group);
  CHECK(readers % o.dp_replicate == 0, "--dp-replicate {} does not divide the {} {}", o.dp_replicate, readers,
        together == 1 ? "ranks" : "data-parallel ranks, each of which is a group of " + group);
  CHECK(o.verify_updates == 0 || o.dp_replicate > 1 || (o.zero_stage == 0 && o.ranks > o.tp * o.pp),
        "--verify-updates {}: with --zero-stage {} and one replica, every update is made by one rank alone, and nobody "
        "can compare it: {}, or leave it out",
        o.verify_updates, o.zero_stage,
        readers > 1 ? formatted("use --dp-replicate {}", divisors(readers)[1]) : "use more data-parallel ranks");
  CHECK(o.verify_updates == 0 || (o.optimizer != Optimizer::muon && o.dp_sync == DpSync::all_reduce),
        "--verify-updates {} with {}: one rank makes the update, and sends it to the others: use --check-replicas",
        o.verify_updates, o.optimizer == Optimizer::muon ? "--optimizer muon" : formatted("--dp-sync {}", o.dp_sync));
  const int64_t pieces = 2 * o.cp;  // the model may have no positions for longer sequences
  CHECK(o.cp == 1 || o.seq_len % pieces == 0,
        "--cp {} cuts sequences into {} equal slices, and {} does not divide --seq-len {}: use {}, or another --cp",
        o.cp, pieces, pieces, o.seq_len, std::max<int64_t>(1, o.seq_len / pieces) * pieces);
  CHECK(o.cp_attention == ContextAttention::ring || o.cp > 1,
        "--cp-attention {}: there is nothing to share with --cp 1; leave it out, or raise --cp", o.cp_attention);
  CHECK(o.sequence_parallel == OnOff::on || o.tp > 1,
        "--sequence-parallel off: there is none with --tp 1; leave it out, or raise --tp");
  CHECK(!o.tp_overlap || o.tp > 1,
        "--tp-overlap: there is nothing to overlap with --tp 1; leave it out, or raise --tp");
  Layout layout = choose_layout(o);
  if (const auto slices = token_slices(o); slices != 1) {
    CHECK(slices.value_or(1) <= o.seq_len,
          "--token-slices {} with --seq-len {}: a slice has at least one token: use at most {}", o.token_slices,
          o.seq_len, o.seq_len);
    layout.pipeline.slices.resize(static_cast<size_t>(slices.value_or(2)));
  }
  layout_faults(layout).refuse();
  if (o.schedule == Schedule::pipedream) validate_pipedream(o, readers);
  const int64_t micro = micro_batch_tokens(o, readers);
  CHECK(!o.total_batch_size || *o.total_batch_size % micro == 0,
        "--total-batch-size {} is not a multiple of --batch-size {} x --seq-len {} x {} {} = {} tokens: use {}, or "
        "another --batch-size",
        *o.total_batch_size, o.batch_size, o.seq_len, readers,
        together == 1 ? "rank(s)" : "group(s) of " + group + " ranks", micro,
        std::max<int64_t>(1, *o.total_batch_size / micro) * micro);
}

inline void validate_trace(const Options& o) {
  CHECK(!o.trace_step || !o.trace.empty(), "--trace-step {} is for --trace: name its file, or leave out --trace-step",
        o.trace_step.value_or(0));
  CHECK(!o.trace_step || !o.plan, "--trace-step {} with --plan: all steps of a plan are equal: leave it out",
        o.trace_step.value_or(0));
  CHECK(o.trace.empty() || !o.profile,
        "--trace with --profile, which makes ops wait for each other: leave out one of them");
}

// Checks how long a run is.
inline void validate_length(const Options& o) {
  std::vector<std::string> given;
  if (o.max_steps) given.push_back(formatted("--max-steps {}", *o.max_steps));
  if (o.tokens) given.push_back(formatted("--tokens {}", *o.tokens));
  if (o.epochs) given.push_back(formatted("--epochs {}", *o.epochs));
  CHECK(given.size() <= 1, "{} with {}: each says how long the run is: give one of them", given[0], given[1]);
  CHECK(!o.price || !given.empty() || !o.stages.empty(),
        "--price {} is for the price of a run, and this plan has no length: give {}, or leave out --price",
        o.price.value_or(0), o.plan_auto ? "--max-steps or --tokens" : "--max-steps, --tokens or --epochs");
}

inline void validate_optimizer(const Options& o) {
  CHECK(!o.decay_steps || o.lr_schedule == LrShape::wsd,
        "--decay-steps {} is for --lr-schedule wsd: add it, or leave out --decay-steps", o.decay_steps.value_or(0));
  CHECK(!o.decay_tokens || o.lr_schedule == LrShape::wsd,
        "--decay-tokens {} is for --lr-schedule wsd: add it, or leave out --decay-tokens", o.decay_tokens->text);
  CHECK(!o.decay_tokens || !o.decay_steps, "--decay-tokens {} with --decay-steps {}: give one of them",
        o.decay_tokens->text, *o.decay_steps);
  CHECK(!o.warmup_tokens || o.warmup_steps == 0, "--warmup-tokens {} with --warmup-steps {}: give one of them",
        o.warmup_tokens->text, o.warmup_steps);
  if (o.weight_decay_tokens) {
    const std::string given = "--weight-decay-tokens " + o.weight_decay_tokens->text;
    CHECK(o.weight_decay == Options().weight_decay, "{} with --weight-decay {}: give one of them", given,
          o.weight_decay);
    CHECK(o.lr > 0, "{} with --lr 0, at which nothing decays: use an --lr above 0", given);
    CHECK(o.optimizer != Optimizer::sgd,
          "{} with --optimizer sgd, whose weight decay is a part of the gradient and so of the momentum: use "
          "--weight-decay",
          given);
  }
  CHECK(!o.beta2 || rule_of(o.optimizer).usual_beta2,
        "--beta2 {} with --optimizer {}, which has no second moment: leave it out", o.beta2.value_or(0), o.optimizer);
  CHECK(o.adam_eps == Options{}.adam_eps || rule_of(o.optimizer).uses_eps,
        "--adam-eps {} with --optimizer {}, which divides by nothing: leave it out", o.adam_eps, o.optimizer);
  CHECK(
      !o.ema || (o.dtype == WeightType::fp32 && !o.plan_auto) || o.master_weights == MasterWeights::fp32,
      "--ema {} with --master-weights {}, but it averages fp32 weights: use --master-weights fp32, or leave out --ema",
      o.ema.value_or(0), o.master_weights);
  for (const OptionText& option : option_texts(o))
    CHECK(o.optimizer == Optimizer::muon || option.text == option.usual ||
              !(option.name.starts_with("--muon-") || option.name == "--cautious-decay"),
          "{} with --optimizer {}: it is for the matrices of muon: use --optimizer muon, or leave it out", option.name,
          o.optimizer);
  const bool scaled = o.parametrization != Parametrization::standard,
             by_depth = o.parametrization == Parametrization::completep;
  for (const auto& [base, option, used] :
       {std::tuple{o.base_width, "--base-width", scaled}, std::tuple{o.base_depth, "--base-depth", by_depth},
        std::tuple{o.base_head_size, "--base-head-size", scaled}})
    CHECK(!base || used, "{} {} with --parametrization {}, which does not use it: {}", option, base.value_or(0),
          o.parametrization,
          scaled ? "use --parametrization completep, or leave it out" : "add --parametrization mup, or leave it out");
  CHECK(!scaled || o.base_width,
        "--parametrization {} needs --base-width, the --n-embd of the model for which --lr was chosen",
        o.parametrization);
  CHECK(!by_depth || o.base_depth,
        "--parametrization {} needs --base-depth, the --n-layer of the model for which --lr was chosen",
        o.parametrization);
  CHECK(!scaled || o.optimizer != Optimizer::sgd,
        "--parametrization {} with --optimizer {}: its rates are for adamw, lion and muon: use one of them, or "
        "--parametrization standard",
        o.parametrization, o.optimizer);
  for (const auto& [rate, option] :
       {std::pair{o.embed_lr, "--embed-lr"}, std::pair{o.head_lr, "--head-lr"}, std::pair{o.scalar_lr, "--scalar-lr"}})
    CHECK(!rate || o.lr > 0, "{} {} with --lr 0, of whose schedule it is a part: use an --lr above 0", option,
          rate.value_or(0));
}

inline void validate_spikes(const Options& o) {
  CHECK(o.rolls_back() || o.max_rollbacks == Options().max_rollbacks,
        "--max-rollbacks {} is for --on-spike rollback: add it, or leave out --max-rollbacks", o.max_rollbacks);
  if (!o.rolls_back()) return;
  CHECK(o.checkpoint_every > 0,
        "--on-spike rollback returns to a checkpoint of --checkpoint-every, and there are none with --checkpoint-every "
        "0 (when those of --checkpoint-minutes are saved depends on the clock, and the results must not): give it, "
        "such as --checkpoint-every 500");
  CHECK(!o.overfit_batch,
        "--on-spike rollback with --overfit-batch, which trains on one batch: there are no other samples to go on "
        "with; leave out one of them");
}

inline void validate_local_checkpoints(const Options& o) {
  const Options usual;
  const bool local = !o.checkpoint_local.empty();
  CHECK(local || o.checkpoint_local_every == 0,
        "--checkpoint-local-every {}: where are these checkpoints saved? Give --checkpoint-local a directory on each "
        "node's own disk, or leave out --checkpoint-local-every",
        o.checkpoint_local_every);
  CHECK(local || o.checkpoint_local_keep == usual.checkpoint_local_keep,
        "--checkpoint-local-keep {} is for --checkpoint-local: add it, or leave out --checkpoint-local-keep",
        o.checkpoint_local_keep);
  CHECK(local || o.checkpoint_local_copies == OnOff::on,
        "--checkpoint-local-copies off is for --checkpoint-local: add it, or leave out --checkpoint-local-copies");
  if (!local) return;
  CHECK(o.checkpoint_local_every > 0,
        "--checkpoint-local {}: how often? Give --checkpoint-local-every, such as 50 updates",
        shown(o.checkpoint_local));
  CHECK(o.schedule != Schedule::pipedream,
        "--checkpoint-local with --schedule pipedream: a checkpoint empties the pipeline, which changes what the run "
        "learns; use --checkpoint-every alone");
  std::error_code none;
  const auto real = [&](const std::string& path) { return std::filesystem::weakly_canonical(path, none); };
  const std::filesystem::path out = real(o.out_dir), dir = real(o.checkpoint_local);
  CHECK(std::mismatch(out.begin(), out.end(), dir.begin(), dir.end()).first != out.end(),
        "--checkpoint-local {} is in --out-dir {}, which all nodes share: name a directory on each node's own disk, or "
        "in /dev/shm",
        shown(o.checkpoint_local), shown(o.out_dir));
}

inline void validate_experts(const Options& o) {
  CHECK(!o.moe_capacity_factor || o.moe_dispatch == Dispatch::capacity,
        "--moe-capacity-factor {} with --moe-dispatch dropless, which has no capacity: use --moe-dispatch capacity, or "
        "leave it out",
        o.moe_capacity_factor.value_or(0));
}

inline void validate_generation(const Options& o) {
  CHECK(!o.prompt.empty() + !o.prompt_file.empty() + o.interactive <= 1,
        "--prompt, --prompt-file and --interactive each say what to continue: choose one of them");
  CHECK(o.seed <= std::numeric_limits<int64_t>::max() - o.num_samples,
        "--seed {} with --num-samples {}: the last of the seeds is beyond 64 bits", o.seed, o.num_samples);
}

inline void validate_evaluation(const Options& o) {
  require_trained_model("--evaluate", o.model);
  CHECK(!o.from_scratch,
        "--evaluate with --from-scratch: random weights are not worth evaluating; leave out one of them");
  const bool has_data = !o.val_data.empty() || !o.val.empty();
  CHECK(has_data || !o.eval_choices.empty(),
        "--evaluate has nothing to evaluate on: give --val-data, --eval-choices or both");
  CHECK(o.val_steps.value_or(1) == 1 || has_data, "--val-steps {} is a part of --val-data: give --val-data",
        o.val_steps.value_or(0));
  CHECK(o.schedule != Schedule::pipedream, "--schedule pipedream with --evaluate, which updates nothing: leave it out");
}

inline void validate_tokenize(const Options& o) {
  CHECK(!o.tokenize_out.empty() && !o.tokenize_out.ends_with('/'),
        "--out '{}': expected what the shards' names begin with, such as data/mine/mine", shown(o.tokenize_out));
  CHECK(o.tokenizer != "auto", "--tokenize needs a --tokenizer: bytes, or a tokenizer.json");
}

// Checks combinations of options that the mode uses, as far as the options alone decide.
inline void validate(const Options& o) {
  if (!o.tokenize.empty()) return validate_tokenize(o);
  CHECK(o.average.empty() || !o.tokenize_out.empty(), "--average {} needs --out with the directory to make", o.average);
  if (!o.average.empty()) return;
  validate_selftest(o);
  CHECK(!o.plan_ranks || (o.local_ranks == 0 && !o.world_size),
        "--ranks {} with --local-ranks or --world-size, for which it stands: leave out one of them",
        o.plan_ranks.value_or(0));
  CHECK(!o.plan_auto || !o.machine.empty(), "--plan-auto searches the layouts of a machine: name it by --machine");
  CHECK(!o.plan_auto || o.machine != local_machine,
        "--plan-auto searches the layouts of a machine with GPUs, and --machine {} is measured for one layout: name "
        "another machine, or use --plan",
        local_machine);
  CHECK(o.machine != local_machine || o.device != DeviceChoice::cuda,
        "--machine {} measures processors, and --device is cuda: leave out one of them; a plan for a GPU that is here "
        "has the times of its datasheet",
        local_machine);
  if (!o.coord_check.empty()) return validate_optimizer(o);
  if (o.plan_auto) return validate_optimizer(o), validate_length(o);
  if (o.print_schedule || o.plan_examples) return;
  const LayoutKind layers = pipeline_layout_from_name(o.pp_layout).kind;
  CHECK(o.pp > 1 || layers == LayoutKind::even,
        "--pp-layout {} is for the stages of a pipeline, and --pp 1 has one: give --pp, or leave out --pp-layout",
        shown(o.pp_layout));
  if (o.selftest) return;
  CHECK(!o.generate || !o.from_scratch,
        "--generate with --from-scratch: random weights generate nothing useful; leave out one of them");
  if (o.generate) return validate_generation(o);
  CHECK(o.prompt != "-", "--prompt - stands for stdin, which --generate reads, not training: give a text");
  validate_optimizer(o), validate_spikes(o), validate_local_checkpoints(o), validate_experts(o), validate_length(o),
      validate_trace(o);
  if (o.stages.empty()) validate_layout(o);  // that of each stage: recipe.h
  if (o.evaluate) return validate_evaluation(o);
  if (!o.print_samples.empty()) number_range("--print-samples", o.print_samples, "the number of a step");
  if (o.plan || o.print_stages) return;
  CHECK(!o.train_data.empty() || !o.data.empty(),
        "--train-data is missing: name the token shards to train on (data/tokenize_text.py makes them), or see --help");
  CHECK(!o.restart || o.resume == "auto" || o.resume == "never",
        "--restart starts a run over, --resume {} resumes one: leave out one of them", o.resume);
  CHECK(o.branch_from.empty() || !o.restart,
        "--branch-from with --restart: a branch begins in a new --out-dir: choose one, and leave out --restart");
  CHECK(o.branch_from.empty() || o.resume == "auto",
        "--branch-from {} with --resume {}: a branch begins at its parent's checkpoint and then resumes from its own: "
        "leave out --resume",
        o.branch_from, o.resume);
}

// The parsed command line.
struct Command {
  Options options;
  bool version = false;   // print the version and stop
  std::string text = {};  // print it and stop, unless it is empty
};

template <class TakePlace>
Command parse_command_line(const std::vector<std::string>& given, TakePlace&& take_place);

namespace detail {

// The first fault in the values of a command line, each checked on its own and for the mode; "": none.
inline std::string fault_of_values(const Words& words) {
  struct ValuesAreRight {};
  try {
    parse_command_line(words, [](Options&) { throw ValuesAreRight(); });
  } catch (const ValuesAreRight&) {
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace detail

// given: the words, with that of the program. take_place(options): sets the number of ranks, and which of them are this
// process's.
template <class TakePlace>
Command parse_command_line(const std::vector<std::string>& given, TakePlace&& take_place) {
  const std::vector<std::string> words = detail::joined_words(given);
  Command command;
  Options& o = command.options;
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  std::map<std::string, std::string> texts;  // CLI11 splits the command line, OptionField parses
  const std::vector<OptionRow> rows = option_rows(o);
  for (const OptionRow& row : rows) {
    const std::string both = *row.letter ? formatted("{},{}", row.letter, row.name) : row.name;
    const auto last = CLI::MultiOptionPolicy::TakeLast, join = CLI::MultiOptionPolicy::Join;
    std::string& text = texts[row.name];
    if (row.field.is_flag())
      app.add_flag(both + "{true}" + (row.field.has_negation() ? "," + row.negation() + "{false}" : ""), text)
          ->multi_option_policy(last);
    else if (row.field.is_list())
      app.add_option(both, text)->multi_option_policy(join)->delimiter(';')->allow_extra_args(false);
    else app.add_option(both, text)->multi_option_policy(last);
  }
  bool help = false, print_config = false, markdown = false;
  std::vector<std::string> configs;
  app.add_option("--config", configs)->allow_extra_args(false);
  app.add_flag("-h,--help", help);
  app.add_flag("--print-config", print_config);
  app.add_flag("--print-options-markdown", markdown);
  app.add_flag("--version", command.version);
  detail::refuse_words_after_one_dash(words);
  detail::refuse_missing_values(given);
  refuse_unknown_options(words, detail::fault_of_values);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend() - 1));  // from the last to the first
  } catch (const CLI::ArgumentMismatch& error) {                            // "--lr: 1 required TEXT missing"
    const std::string text = error.what();
    throw Error(formatted("{} needs a value; see --help", text.substr(0, text.find(':'))));
  } catch (const CLI::ParseError& error) {
    throw Error(formatted("{}; see --help", error.what()));
  }
  if (help || markdown) {
    command.text = help ? help_text(app.remaining().empty() ? "" : app.remaining().front())
                        : options_markdown() + "\n\n" + foreign_markdown();
    return command;
  }
  for (const std::string& word : app.remaining()) {
    const auto at = std::find(words.begin() + 1, words.end(), word);
    detail::refuse_stray_word(word, at < words.end() ? *(at - 1) : "");
  }
  if (command.version) return command;
  for (const std::string& path : configs) detail::read_config(o, path);
  for (const OptionRow& row : rows) {
    if (app.count(row.name) == 0) continue;
    row.field.clear_list();
    row.field.parse(row.name, texts[row.name]);
    o.config_lines.erase(row.name);
    const bool files = row.name == std::string("--train-data") || row.name == std::string("--val-data");
    const std::vector<std::string>& values = app.get_option(row.name)->results();
    if (files && std::ranges::any_of(values, [&](const std::string& value) { return value != values.back(); }))
      o.repeated.emplace_back(row.name);
  }
  try {
    check_limits(o);
    if (print_config) {
      command.text = config_text(o);
      return command;
    }
    drop_ignored(o, [&](const std::string& name) { return app.count(name) > 0; });
    if ((o.evaluate || o.generate) && app.count("--seq-len") == 0 && !o.config_lines.contains("--seq-len"))
      o.seq_len = default_length(o);
    if (reads_train_data(o) || o.plan_auto) take_vocabulary(o);
    take_place(o);
    validate(o);
  } catch (const Error& error) {
    throw Error(with_config_lines(error.what(), o.config_lines), error.status());
  }
  return command;
}

}  // namespace llmc
