// modes.h: modes other than training: --selftest, --verify-data, --plan, --plan-auto, --plan-examples,
// --print-schedule, --print-stages, --print-samples. --generate, --evaluate, --tokenize, --average and --coord-check
// have their own files.
#pragma once
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>

#include "core/environment.h"
#include "core/log.h"
#include "data/verify_data.h"
#include "run/checkpoints/recipe_record.h"
#include "run/checkpoints/run_record.h"
#include "run/length.h"
#include "run/options/parse.h"
#include "run/plan/examples.h"
#include "run/plan/local_machine.h"
#include "run/plan/plan_json.h"
#include "run/plan/report_search.h"
#include "run/processes.h"
#include "run/recipe/print_stages.h"
#include "run/recipe/run_data.h"
#include "run/reports/report.h"
#include "run/requirements.h"
#include "run/selftest/selftest.h"
#include "run/setup.h"
#include "run/trace/plan_trace.h"
#include "schedule/picture.h"

namespace llmc {

namespace detail {

// The layouts of layouts.h.
inline bool compare_layouts(Log& log, const Options& o, const selftest::Machine& machine) {
  std::vector<selftest::ModelLayouts> models = selftest::all_layouts(static_cast<int>(o.ranks));
  if (o.selftest_layouts == SelftestLayouts::pairs) {
    const int64_t all = selftest::count_layouts(models);
    models = selftest::every_pair(models);
    log.line(formatted(
        "self-test: every pair of choices occurs in these {} of {} layouts; --selftest-layouts all compares all",
        selftest::count_layouts(models), all));
  }
  return run_selftest(log, models, machine);
}

// The command that repeats a draw of the self-test that these options began.
inline std::string repeat_command(Options o, uint64_t draw) {
  o.selftest_layouts = Options().selftest_layouts;
  o.selftest_minutes.reset();
  o.selftest_draws = std::to_string(draw);
  return command_line(o);
}

// Draws of models, options and layouts: with --selftest-draws those; otherwise a few in which every choice occurs, then
// those of --selftest-minutes.
inline bool compare_draws(Log& log, const Options& o, const selftest::Machine& machine) {
  const std::optional<NumberRange> draws = selftest_draws(o);
  const auto command = [&](uint64_t draw) { return repeat_command(o, draw); };
  const int max_ranks = static_cast<int>(o.ranks);
  const bool good =
      draws || run_sweep(log, {.list = selftest::covering_draws(max_ranks), .max_ranks = max_ranks, .command = command},
                         machine);
  if (!draws && !o.selftest_minutes) return good;
  selftest::Sweep sweep{.first = draws ? draws->first : selftest::fresh_draw(machine.processes),
                        .last = draws ? draws->last : std::nullopt,
                        .minutes = o.selftest_minutes,
                        .max_ranks = max_ranks,
                        .lists_all = !o.selftest_minutes,
                        .command = command};
  if (draws && !sweep.last && !sweep.minutes) sweep.last = sweep.first;
  return run_sweep(log, sweep, machine) && good;
}

}  // namespace detail

// --selftest: compares layouts of the available ranks with one CPU rank.
inline void run_selftest_mode(const Options& o, const Processes& processes) {
  Log log = make_log(o, processes);
  selftest::Machine machine{.device = rank_device(choose_device(o), o.place)};
  machine.device.threads = 1;
  machine.backend = choose_backend(o, machine.device);
  require_same(processes, "what was found",
               {{formatted("the transport, of --comm {}", o.comm), name_of(machine.backend)},
                {formatted("the device, of --device {}", o.device), name_of(machine.device.kind)}});
  if (machine.device.kind == DeviceKind::cuda) machine.gpus = visible_gpus().count;
  if (!processes.alone()) machine.processes = &processes;
  bool good = !o.selftest_draws.empty() || detail::compare_layouts(log, o, machine);
  good &= detail::compare_draws(log, o, machine);
  if (!good)
    throw SharedError("--selftest: the layouts above that say FAILED differ from one rank", ExitStatus::diverged);
}

// --verify-data: checks the shards and names every bad one.
inline void run_verify_data(const Options& o) {
  const ModelConfig model = choose_model(o);
  omp_set_num_threads(threads_of_process(o));
  Log log = make_log(o);
  std::optional<int64_t> end_of_text = end_of_text_of(model.vocab_size);
  if (o.tokenizer != "auto") end_of_text = choose_tokenizer(o, model)->end_of_text();
  std::string bad;
  for (const SourceText& source : source_texts(o))
    bad += verify_data(log, train_option(source.name).c_str(), source.pattern, o.data_format, model.vocab_size,
                       end_of_text);
  for (const SourceText& set : validation_texts(o))
    bad += verify_data(log, val_option(set.name).c_str(), set.pattern, o.data_format, model.vocab_size, end_of_text);
  CHECK(bad.empty(), "--verify-data found bad shards:{}", bad);
}

namespace detail {

inline std::vector<int64_t> epoch_tokens_of(const Options& o, const Recipe& recipe) {
  Sources sources(recipe.sources, recipe.longest(), o.pack);
  pack(sources, o, [](const std::string&) {});
  return sources.epoch_tokens();
}

// For runs in epochs.
inline void require_data(const Options& o, const char* mode) {
  CHECK(!o.train_data.empty() || !o.data.empty(),
        "{} with {}: how many steps that is depends on --train-data: name the data, or give --max-steps or --tokens "
        "instead",
        length_text(o), mode);
}

// Looks at the data only if the length of the run depends on them.
inline Course course_on_paper(const Options& o, const Recipe& recipe) {
  const bool in_epochs =
      recipe.staged ? std::ranges::any_of(recipe.stages, [](const RecipeStage& s) { return s.epochs.has_value(); })
                    : !o.max_steps && !o.tokens;
  const bool known = !o.train_data.empty() || !o.data.empty();
  if (in_epochs && !recipe.staged) require_data(o, "--print-stages");
  const Course course(recipe, in_epochs && known ? epoch_tokens_of(o, recipe) : std::vector<int64_t>());
  course.require_allowed_epochs();
  return course;
}

// A rank of a plan, with the machine that it is timed by: of --machine, or that of its own GPU's datasheet, if it has
// one. log: says that it measures; none: silent
inline Device planned_rank(const Options& o, const StepConfig& step, const Device& device, Log* log) {
  Device rank = first_rank_device(device, o);
  const int ranks = step.layout.ranks();
  const bool own_gpu = rank.kind == DeviceKind::cuda && rank.sharers == 1 && !is_gpu_elsewhere(rank);
  const auto chip = own_gpu && o.place.hosts == 1 ? gpu_peaks(gpu_info(rank.gpu).name) : std::nullopt;
  if (chip) rank.machine = datasheet_machine(*chip, step.precision.products, ranks);
  if (o.machine == local_machine) {
    CHECK(o.place.local_ranks == ranks,
          "--machine {} measures ranks that are threads of one process, and {} of {} would be elsewhere: use "
          "--local-ranks {}, or a machine with GPUs",
          local_machine, ranks - o.place.local_ranks, ranks, ranks);
    rank.machine = measured_machine(step, rank, log);
  }
  return rank;
}

// For --plan of a run of stages: the options of the stretch whose step needs most memory, and figures of all stretches,
// which are printed if there is a log, and their sums.
struct PlannedStages {
  Options largest = {};
  OrderedJson stretches = {};
  std::optional<PlannedRun> run = {};
};
inline PlannedStages plan_stages(const Options& asked, Log* log) {
  const Recipe recipe = read_recipe(asked);
  const Course course = course_on_paper(asked, recipe);
  const Device device = choose_device(asked);
  PlannedStages planned{.stretches = OrderedJson::array(),
                        .run = PlannedRun{.asked = "--stages " + shown(asked.stages)}};
  int64_t most = -1;
  Rows rows;
  for (size_t i = 0; i < course.stretches().size(); ++i) {
    const Stretch& s = course.stretches()[i];
    const auto [step, rank, plan] = in_stage(recipe.stages[s.stage], [&] {
      const StepConfig chosen = with_token_slices(choose_step(s.options), s.options, device);
      const Device on = planned_rank(s.options, chosen, device, log);
      return std::tuple(chosen, on, plan_run(s.options, chosen, on));
    });
    if (plan.total_bytes() > most)
      most = plan.total_bytes(), planned.largest = with_warmup(recipe.stages[s.stage], s.options);
    const auto time = step_time(step, plan, rank);
    planned.run->add(s.steps, step, time);
    planned.stretches.push_back(
        {{"stage", recipe.stages[s.stage].name},
         {"first_step", s.first_step + 1},
         {"steps", s.steps},
         {"tokens_per_step", s.tokens_per_step},
         {"seq_len", s.seq_len},
         {"batch_size", step.batch.B},
         {"micro_batches", step.micro_batches},
         {"memory_bytes", plan.total_bytes()},
         {"step_seconds", time ? OrderedJson(time->step()) : OrderedJson()},
         {"seconds", time ? OrderedJson(time->step() * static_cast<double>(s.steps)) : OrderedJson()}});
    rows.emplace_back(recipe.stages[s.stage].name,
                      formatted("{} steps of {} tokens, length {}: {} per rank{}", s.steps,
                                human_count(s.tokens_per_step), s.seq_len, human_bytes(plan.total_bytes()),
                                time ? formatted(", {:.3g} s a step, {} in all", time->step(),
                                                 human_duration(time->step() * static_cast<double>(s.steps)))
                                     : ""));
  }
  rows.emplace_back("all", formatted("{} steps, {} tokens{}", course.steps(), human_count(course.tokens()),
                                     planned.run->seconds ? ", " + human_duration(*planned.run->seconds) : ""));
  if (log != nullptr) log->table("stages of " + asked.stages, rows);
  planned.largest.stages.clear();
  return planned;
}

}  // namespace detail

// --plan: the memory of a step by name and its work by op, from the null device, and its time on this machine's GPUs if
// they have datasheets.
inline void run_plan(const Options& asked) {
  source_texts(asked);  // both refuse what the run would
  validation_texts(asked);
  Log log = make_log(asked);
  const detail::PlannedStages staged = asked.stages.empty() ? detail::PlannedStages{.largest = asked}
                                                            : detail::plan_stages(asked, asked.json ? nullptr : &log);
  const Options& o = staged.largest;
  const KeptLists kept;
  const Device device = choose_device(o);
  const StepConfig config = with_token_slices(choose_step(o), o, device);
  require_fp8_can(config, device);
  require_norms_can(config, device);
  require_gelu_can(config, device, o);
  require_residual_can(config, device, o);
  const Device rank = detail::planned_rank(o, config, device, o.json ? nullptr : &log);
  const Plan plan = plan_run(o, config, rank);
  std::optional<detail::PlannedRun> run = staged.run;
  if (!run && (o.max_steps || o.tokens || o.epochs)) {
    if (o.epochs) detail::require_data(o, "--plan");
    const int64_t epoch_tokens = o.epochs ? detail::epoch_tokens_of(o, read_recipe(o))[0] : 0;
    run = detail::PlannedRun{.asked = length_text(o)};
    run->add(choose_steps(o, config.tokens(), epoch_tokens), config, detail::step_time(config, plan, rank));
  }
  if (!o.trace.empty()) {
    require_writable_trace(o.trace);
    write_trace(o.trace, plan_trace(config, rank, plan));
  }
  if (!o.json) return report_plan(log, o, rank, config, plan, run);
  std::printf("%s\n", plan_json(o, rank, config, plan, run, staged.stretches).c_str());
  if (o.memory_limit && !fits(plan, memory_limit(o, rank))) throw Error(detail::memory_verdict(o, config, plan, rank));
}

// --plan-auto. Where fp32 is asked for, or nothing fits, bf16 is offered, too.
inline void run_plan_auto(const Options& asked) {
  std::vector<SearchFor> precisions;
  const auto add = [&](const Options& o) {
    const Device device = first_rank_device(choose_device(o), o);
    CHECK(device.kind == DeviceKind::cuda,
          "--plan-auto searches the layouts of a machine with GPUs, and --machine {} has none: use --plan, or another "
          "machine",
          shown(o.machine));
    SearchFor what;
    what.step.model = choose_model(o);
    what.step.precision = choose_precision(o);
    what.step.batch = {1, o.seq_len};
    what.step.generates = o.sample_every > 0;
    what.step.z_loss = o.z_loss;
    what.step.qk_clip = o.qk_clip;
    const ZeroConfig zero = choose_zero(o);
    what.step.layout.zero.optimizer = zero.optimizer;
    what.step.layout.zero.muon = zero.muon;
    require_updates_can(what.step.model, o);
    require_gelu_can(what.step, device, o);
    require_residual_can(what.step, device, o);
    what.ranks = o.ranks;
    what.device = device;
    what.memory = memory_limit(o, device);
    CHECK(o.seq_len <= what.step.model.n_positions,
          "--seq-len {} exceeds the {} positions of --model {}: use at most {}", o.seq_len, what.step.model.n_positions,
          o.model, what.step.model.n_positions);
    what.step.experts = choose_experts(o, what.step.model);
    const int64_t tokens = o.total_batch_size.value_or(usual_sequences(o.ranks, o.seq_len) * o.seq_len);
    CHECK(tokens % o.seq_len == 0, "--total-batch-size {} is no multiple of --seq-len {}: use {}", tokens, o.seq_len,
          round_up(tokens, o.seq_len));
    what.sequences = tokens / o.seq_len;
    what.less_exact = o.master_weights != asked.master_weights;
    precisions.push_back(std::move(what));
  };
  Options o = asked;
  add(o);
  if (o.dtype == WeightType::fp32 && has_bf16(asked.machine)) o.dtype = WeightType::bf16, add(o);
  if (o.dtype == WeightType::bf16 && o.master_weights == MasterWeights::fp32 && !o.ema)
    o.master_weights = MasterWeights::none, add(o);
  if (asked.json) return void(std::printf("%s\n", search_json(asked, precisions).c_str()));
  Log log = make_log(asked);
  if (const std::string notice = detail::vocabulary_notice(asked, precisions[0].step.model); !notice.empty())
    log.line(notice);
  report_search(log, asked, precisions);
}

// --plan-examples.
inline void run_plan_examples(const Options& o) {
  Log log = make_log(o);
  report_examples(log);
}

// The pipeline that the options describe.
inline Pipeline pipeline_to_draw(const Options& o) {
  CHECK(o.token_slices != "auto",
        "--token-slices auto: their number depends on the times of a model, which --print-schedule does not know: give "
        "a number");
  CHECK(o.pp_layout == "even",
        "--pp-layout {} with --print-schedule, which draws all chunks equally long: leave it out, and see "
        "--plan for what the layers cost",
        shown(o.pp_layout));
  const PipelineParallel chosen = choose_pipeline(o);
  const Pipeline p{.schedule = chosen.schedule,
                   .stages = chosen.stages,
                   .chunks_per_stage = chosen.chunks_per_stage,
                   .micro_batches = o.micro_batches.value_or(2 * o.pp),
                   .slices = static_cast<int>(token_slices(o).value_or(1))};
  pipeline_faults(p).refuse();
  return p;
}

// --print-stages.
inline void run_print_stages(const Options& o) {
  const Recipe recipe = read_recipe(o);
  const Course course = detail::course_on_paper(o, recipe);
  std::printf("%s\n", (o.json ? stages_json(course) : stages_text(course)).c_str());
}

namespace detail {

// The rollbacks of the run in --out-dir, if it has these options and, where no checkpoint says what its data are, names
// them alike; none: there is no such run.
inline std::vector<Rollback> recorded_rollbacks(const Options& o, const std::optional<ResumePoint>& from) {
  const std::string file = o.out_dir + "/run.json";
  if (!path_exists(file)) return {};
  const RunRecord record = read_run_record(file);
  if (record.rollbacks.empty()) return {};
  const std::string changes =
      option_changes(file, record.options, o).refused + (from ? "" : changed_names_of_data(record.options, o));
  if (changes.empty()) return record.rollbacks;
  print_error(formatted("notice: {} records rollbacks of a run with other options, which are not taken into account:{}",
                        file, changes));
  return {};
}

// The checkpoint at which a run with these options goes on, in --out-dir or of --branch-from; none: it is a new run.
inline std::optional<ResumePoint> goes_on_from(const Options& o) {
  if (o.restart || o.resume == "never") return std::nullopt;
  const std::vector<int64_t> own = checkpoint_steps(o.out_dir);
  if (own.empty() && o.branch_from.empty()) return std::nullopt;
  const Begin begin = own.empty() ? Begin::branch : Begin::resume;
  const std::string path = own.empty() ? o.branch_from : checkpoint_path(o.out_dir, own.back()),
                    file = path + "/trainer.json";
  const nlohmann::json trainer = read_json(file);
  const std::optional<int64_t> step = whole_number(member(trainer, "step"));
  CHECK(step, "{}: \"step\" is {}, expected a whole number; the file is damaged", file, member(trainer, "step"));
  const std::string changes = option_changes(file, member(trainer, "options"), o, begin).refused;
  if (changes.empty()) return ResumePoint{path, *step, trainer, begin};
  print_error(
      formatted("notice: {} is of a run with other options; these are the samples of a new run:{}", path, changes));
  return std::nullopt;
}

// The course from there on; none: it is of a run with other data.
inline std::optional<ResumedCourse> course_from(const ResumePoint& from, const Resuming& run) {
  const std::string files = changed_names_of_data(member(from.trainer, "options"), run.asked);
  try {
    return resumed_course(from, run);
  } catch (const Error& error) {
    if (files.empty() || from.begin == Begin::branch || run.asked.data_changed == DataChanged::accept) throw;
    print_error(formatted("notice: {} is of a run with other data; these are the samples of a new run:{} ({})",
                          from.path, files, error.what()));
  }
  return std::nullopt;
}

}  // namespace detail

// --print-samples: of the run in --out-dir as it goes on from its newest checkpoint; if there is none, of a new one.
inline void run_print_samples(Options o) {
  o.val_data.clear(), o.val = {};
  Recipe recipe = read_recipe(o);
  RunData data(o, recipe);
  const std::optional<ResumePoint> from = detail::goes_on_from(o);
  std::vector<Rollback> rollbacks = detail::recorded_rollbacks(o, from);
  take_known_name(recipe, rollbacks);
  std::optional<ResumedCourse> resumed;
  if (from) resumed = detail::course_from(*from, {o, recipe, data, rollbacks});
  if (from && !resumed) rollbacks.clear();
  if (!rollbacks.empty())
    print_error(formatted("notice: without the samples that the {} rollback(s) in {}/run.json leave out",
                          rollbacks.size(), o.out_dir));
  if (resumed) {
    if (!resumed->changes.data_fault.empty()) throw Error(resumed->changes.data_fault);
    if (!o.shuffle && !shuffled(member(from->trainer, "options"))) o.shuffle = false;
    data.orders = resumed->changes.orders;
  }
  const Course course =
      resumed ? std::move(resumed->course)
              : Course(recipe, data.train.epoch_tokens(), {}, skips_of(rollbacks, recipe_checksum(recipe)));
  course.require_allowed_epochs();
  const NumberRange steps = number_range("--print-samples", o.print_samples, "the number of a step");
  const int64_t first = static_cast<int64_t>(steps.first),
                last = static_cast<int64_t>(steps.last.value_or(steps.first));
  const int64_t begin = course.origin().step;
  CHECK(first > begin && last <= course.steps(), "--print-samples {}: the run has steps {} to {}{}", o.print_samples,
        begin + 1, course.steps(), begin > 0 ? "; earlier ones were of another recipe" : "");
  for (int64_t step = first; step <= last; ++step) {
    const Stretch& stretch = course.stretches()[course.stretch_of(step)];
    DataLoader loader = data.loader(course, stretch, o.shuffled(), 1, std::nullopt);
    nlohmann::ordered_json json = {{"step", step},
                                   {"stage", stretch.stage + 1},
                                   {"seq_len", stretch.seq_len},
                                   {"tokens_per_step", stretch.tokens_per_step},
                                   {"lr", stretch.learning_rate(step)}};
    const int64_t before = stretch.samples_after(step) - stretch.samples - stretch.samples_per_step;
    for (int64_t i = 0; i < stretch.samples_per_step; ++i) {
      const DataLoader::Sample s = loader.sample(before + i);
      json["samples"].push_back(
          nlohmann::ordered_json::array({data.train[s.source].name, s.index, s.begin, s.targets}));
    }
    std::printf("%s\n", json.dump().c_str());
  }
}

// --print-schedule: as wide as the terminal, and in colour if it has colours.
inline void run_print_schedule(const Options& o) {
  const Pipeline p = pipeline_to_draw(o);
  PictureStyle style;
  winsize terminal{};
  if (detail::person_reads(o)) {
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &terminal) == 0 && terminal.ws_col > 0) style.width = terminal.ws_col;
    style.colour = !environment_variable("NO_COLOR");
  }
  std::printf("%s\n", (o.json ? schedule_json(p) : picture_of(p, style)).c_str());
}

}  // namespace llmc
