// train_gpt.cu: the trainer. main() reads straight down: options -> plan -> model -> loop.
#include <cerrno>  // program_invocation_name, of glibc
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>

#include "core/log.h"
#include "core/options_parse.h"
#include "core/signals.h"
#include "device/gpu.h"
#include "device/nvml.h"
#include "train/checkpoint.h"
#include "train/choices.h"
#include "train/dataloader.h"
#include "train/detector.h"
#include "train/lr_schedule.h"
#include "train/not_finite.h"
#include "train/peak.h"
#include "train/report.h"
#include "train/run.h"
#include "train/run_dir.h"
#include "train/sample.h"
#include "train/selftest.h"
#include "train/tokenizer.h"
#include "train/verify_data.h"

namespace llmc {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Device choose_device(const Options& o) {
  Device device{DeviceKind::cpu, o.threads > 0 ? static_cast<int>(o.threads) : available_processors()};
  device.tf32 = o.tf32 ? Tf32::yes : Tf32::no;
  device.graphs = o.cuda_graphs == "on";
  device.cudnn = o.attention == "cudnn";
  CHECK(built_with_cudnn || !device.cudnn,
        "--attention cudnn: this train_gpt was built without cuDNN; build with `make USE_CUDNN=1`, or use --attention "
        "own");
  if (o.device == "cpu") return device;
  const VisibleGpus gpus = visible_gpus();
  CHECK(gpus.count > 0 || o.device == "auto", "--device cuda: {}", gpus.why_none);
  if (gpus.count > 0) device.kind = DeviceKind::cuda;
  return device;
}

ModelConfig choose_model(const Options& o) {
  return resolve_model(o.model, {o.n_layer, o.n_head, o.n_kv_head, o.n_embd, o.n_ffn, o.vocab_size});
}

DType choose_dtype(const Options& o) { return o.dtype == "bf16" ? DType::bf16 : DType::fp32; }

// How the ranks share the state.
ZeroConfig choose_layout(const Options& o) {
  ZeroConfig zero;
  zero.replicas = static_cast<int>(o.dp_replicate);
  zero.shards = static_cast<int>(o.local_ranks / o.dp_replicate);
  zero.reduce_by_stage = o.grad_reduce == "auto";
  zero.set_stage(static_cast<int>(o.zero_stage));
  if (o.grad_reduce != "auto") zero.grad_reduce = grad_reduce_from_name(o.grad_reduce);
  zero.master_weights = o.master_weights == "fp32";
  return zero;
}

// One rank's part of the device: some of the threads, or the GPU whose turn it is.
Device rank_device(Device device, int64_t ranks, int64_t rank = 0) {
  const int64_t parts = device.kind == DeviceKind::cuda ? visible_gpus().count : 1;
  device.threads = std::max(1, device.threads / static_cast<int>(ranks));
  device.gpu = static_cast<int>(rank % parts);
  device.sharers = static_cast<int>(ceil_div(ranks, parts));
  return device;
}

// GPUs that the ranks compute on; a CPU is one.
int64_t devices_in_use(const Device& device, int64_t ranks) {
  return device.kind == DeviceKind::cuda ? std::min<int64_t>(ranks, visible_gpus().count) : 1;
}

// Who moves tensors between the ranks.
Backend choose_backend(const Options& o, const Device& rank_device) {
  const bool own_gpus = rank_device.kind == DeviceKind::cuda && rank_device.sharers == 1;
  if (o.comm == "nccl") {
    CHECK(built_with_nccl, "--comm nccl: this train_gpt was built without NCCL; install libnccl-dev and build anew");
    CHECK(own_gpus,
          "--comm nccl needs a GPU for each rank: --local-ranks {} on {} GPU(s), --device {}; use --comm auto",
          o.local_ranks, visible_gpus().count, rank_device.kind);
  }
  return o.comm != "threads" && own_gpus && built_with_nccl && o.local_ranks > 1 ? Backend::nccl : Backend::threads;
}

// What a step computes; everything that the options alone can tell is checked here.
StepConfig choose_step(const Options& o) {
  StepConfig step{.model = choose_model(o),
                  .dtype = choose_dtype(o),
                  .batch = {o.batch_size, o.seq_len},
                  .schedule = schedule_from_name(o.schedule),
                  .recompute = recompute_from_name(o.recompute),
                  .zero = choose_layout(o),
                  .generates = o.sample_every > 0,
                  .documents = o.mask_documents ? Documents::apart : Documents::together};
  CHECK(o.seq_len <= step.model.n_positions, "--seq-len {} exceeds the {} positions of --model {}: use at most {}",
        o.seq_len, step.model.n_positions, o.model, step.model.n_positions);
  if (o.total_batch_size)
    step.micro_batches = *o.total_batch_size / (step.batch.rows() * o.local_ranks);  // validated with the options
  step.head_chunks = o.head_chunks;
  require_countable(step);
  return step;
}

LrSchedule choose_lr_schedule(const Options& o, int64_t max_steps) {
  return {o.lr_schedule, o.lr, o.warmup_steps, max_steps, o.final_lr_frac};
}

// The weights of a fresh run: a directory's, unless --from-scratch or a preset asks for new ones.
void initialise(Run& run, const Options& o) {
  if (!o.from_scratch && !model_preset(o.model))
    load_model(o.model, run.trainer.config().model, run.trainer.state(), run.stream);
  else init_weights(run.trainer.state(), static_cast<uint64_t>(o.seed), run.stream);
  run.stream.synchronize();
}

SampleOptions sample_options(const Options& o) { return {o.temperature, o.top_k, o.top_p}; }

std::unique_ptr<Tokenizer> choose_tokenizer(const Options& o, const ModelConfig& model) {
  return make_tokenizer(o.tokenizer, model_preset(o.model) ? std::nullopt : std::optional(o.model), model.vocab_size);
}

// The prompt in tokens: what begins a text, then the text; a vocabulary without the former starts at its first token. A
// prompt that the tokenizer or the model does not take is refused.
std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, const Options& o, const ModelConfig& model) {
  std::vector<int32_t> tokens;
  for (int32_t token : tokenizer.prefix())
    if (token < model.vocab_size) tokens.push_back(token);
  for (int32_t token : tokenizer.encode(o.prompt)) tokens.push_back(token);
  if (tokens.empty()) tokens.push_back(0);
  for (int32_t token : tokens)
    CHECK(token < model.vocab_size,
          "--prompt: token {} is outside the model's vocabulary of {}; use a --tokenizer that fits the model", token,
          model.vocab_size);
  return tokens;
}

// --generate: load a model, print the continuation of the prompt as it comes.
void run_generate(const Options& o) {
  CHECK(!model_preset(o.model),
        "--generate needs a trained model: --model {} is a preset; name a checkpoint's directory", o.model);
  StepConfig config{.model = choose_model(o), .dtype = choose_dtype(o), .zero = {.holds = Holds::weights}};
  config.batch = {1, std::min(trained_seq_len(o.model).value_or(o.seq_len), config.model.n_positions)};
  require_countable(config);
  const Device device = choose_device(o);
  const auto tokenizer = choose_tokenizer(o, config.model);
  const Plan plan = make_plan(config, device);
  require_memory(o, config, plan, device);
  World world{Mesh()};
  Run run(config, plan, device, world, 0);
  initialise(run, o);
  std::printf("%s", o.prompt.c_str());
  generate(run.trainer, prompt_tokens(*tokenizer, o, config.model), o.sample_tokens, sample_options(o),
           static_cast<uint64_t>(o.seed), "generate", [&](int32_t token) {
             if (token == tokenizer->end_of_text()) return false;
             std::printf("%s", tokenizer->decode({&token, 1}).c_str());
             std::fflush(stdout);
             return true;
           });
  std::printf("\n");
}

// --selftest: every layout of the ranks at hand against one rank of the CPU.
void run_selftest_mode(const Options& o) {
  Log log;
  selftest::Machine machine{.device = rank_device(choose_device(o), o.local_ranks)};
  machine.device.threads = 1;
  machine.backend = choose_backend(o, machine.device);
  if (machine.device.kind == DeviceKind::cuda) machine.gpus = visible_gpus().count;
  if (!run_selftest(log, o.local_ranks, PlantedBug::none, machine))
    throw Error("--selftest: the layouts above that say FAILED differ from one rank", ExitStatus::diverged);
}

// --verify-data: what the shards hold; every bad one is named.
void run_verify_data(const Options& o) {
  const ModelConfig model = choose_model(o);
  omp_set_num_threads(choose_device(o).threads);
  Log log;
  std::string bad = verify_data(log, "--train-data", o.train_data, model.vocab_size);
  if (!o.val_data.empty()) bad += verify_data(log, "--val-data", o.val_data, model.vocab_size);
  CHECK(bad.empty(), "--verify-data found bad shards:{}", bad);
}

// --plan: the memory by name and the work by op of a step, from the null device.
void run_plan(const Options& o) {
  const Device device = choose_device(o);
  const StepConfig config = choose_step(o);
  const Device rank = rank_device(device, o.local_ranks);
  const Plan plan = make_plan(config, rank);
  if (o.memory_limit) require_memory(o, config, plan, rank);
  Log log;
  report_plan(log, o, rank, config, plan);
}

// What is to be done. Everything is checked here, before anything is made.
struct Job {
  Options options;
  StopCondition::Clock::time_point begin;  // of the process
  Device device, rank_device;              // of the process, of rank 0
  Backend backend;                         // between ranks
  StepConfig step;
  std::unique_ptr<Tokenizer> tokenizer;
  std::map<std::string, std::string> tokenizer_files;  // read once: every checkpoint of a run has the same
  TokenShards train;
  std::optional<TokenShards> val;
  std::optional<ChoiceSet> choices;
  std::optional<int32_t> document_end;  // the token behind which --mask-documents begins a document
  int64_t samples_per_step, max_steps, val_samples = 0;
  Plan plan;

  Job(const Options& o, StopCondition::Clock::time_point process_begin)
      : options(o),
        begin(process_begin),
        device(choose_device(o)),
        rank_device(llmc::rank_device(device, o.local_ranks)),
        backend(choose_backend(o, rank_device)),
        step(choose_step(o)),
        tokenizer(choose_tokenizer(o, step.model)),
        tokenizer_files(tokenizer->files()),
        train(o.train_data, o.seq_len),
        samples_per_step(step.tokens() / o.seq_len),
        max_steps(o.max_steps.value_or(std::max<int64_t>(1, train.samples() / samples_per_step))) {
    prompt_tokens(*tokenizer, o, step.model);  // which the samples, and the commands that come next, begin with
    const int64_t most_steps = std::numeric_limits<int64_t>::max() / step.tokens();
    CHECK(max_steps <= most_steps, "--max-steps {} x {} tokens a step are more than can be counted: use at most {}",
          max_steps, step.tokens(), most_steps);
    CHECK(o.warmup_steps <= max_steps, "--warmup-steps {} exceeds the {} steps of the run", o.warmup_steps, max_steps);
    if (!o.val_data.empty()) {
      val.emplace(o.val_data, o.seq_len, "--val-data");
      val_samples = o.val_steps > val->samples() / samples_per_step ? val->samples() : o.val_steps * samples_per_step;
    }
    if (!o.eval_choices.empty()) {
      CHECK(val && o.val_every > 0,
            "--eval-choices is asked with every validation: it needs --val-data and --val-every");
      choices.emplace(o.eval_choices, step.model.vocab_size, o.seq_len);
    }
    if (o.mask_documents) document_end = choose_document_end();
    CHECK(!o.keep_best || (val && o.val_every > 0), "--keep-best needs --val-data and --val-every");
    require_gpu_for("--log-gpu-every", o.log_gpu_every > 0);
    require_gpu_for("--tf32", o.tf32);
    require_gpu_for("--tune-matmul", o.tune_matmul);
    require_gpu_for("--attention cudnn", device.cudnn);
    CHECK(
        !device.cudnn || (step.dtype == DType::bf16 && !o.mask_documents),
        "--attention cudnn computes in bf16 and lets documents see each other: leave out --mask-documents, use --dtype "
        "bf16, or --attention own");
    plan = make_plan(step, rank_device);
    // What a checkpoint records may take less.
    if (o.resume == "never" || (o.resume == "auto" && checkpoint_steps(o.out_dir).empty()))
      require_memory(o, step, plan, rank_device);
  }

  void require_gpu_for(const char* option, bool asked) const {
    CHECK(!asked || device.kind == DeviceKind::cuda, "{} is for GPUs, and this run is not on one{}", option,
          options.device == "cpu" ? ", by --device cpu" : ": " + visible_gpus().why_none);
  }

  // Without a tokenizer that says so, the end of text is that of the vocabulary, where its size tells which it is.
  int32_t choose_document_end() const {
    const bool guessed = options.tokenizer == "auto" && tokenizer_files.empty();
    const std::optional<int64_t> known = end_of_text_of(step.model.vocab_size);
    CHECK(!guessed || known,
          "--mask-documents needs the end of text of a vocabulary of {}: give the data's --tokenizer",
          step.model.vocab_size);
    const int64_t end = guessed ? *known : tokenizer->end_of_text();
    CHECK(end < step.model.vocab_size,
          "--mask-documents: the end of text of --tokenizer {}, {}, is outside the model's vocabulary of {}",
          options.tokenizer, end, step.model.vocab_size);
    return static_cast<int32_t>(end);
  }

  // Where --grad-reduce is auto, gradients go on being reduced as they were, because the other way rounds otherwise; if
  // that does not fit into memory, as the stage has it.
  void go_on(const ResumePoint& from, Log& log) {
    const nlohmann::json choices = from.trainer.value("choices", nlohmann::json::object());
    const bool recorded = choices.is_object() && choices.value("grad_reduce", nlohmann::json()).is_string();
    if (recorded && step.zero.reduce_by_stage) {
      StepConfig as_before = step;
      as_before.zero.grad_reduce = grad_reduce_from_name(choices["grad_reduce"]);
      if (as_before.zero.grad_reduce != step.zero.grad_reduce) {
        const Plan planned = make_plan(as_before, rank_device);
        if (fits(planned, memory_limit(options, rank_device))) step = as_before, plan = planned;
        else
          log.line(
              formatted("notice: --grad-reduce {}, with which the run began, needs {}, which does not fit: "
                        "gradients are now reduced every {}, and round otherwise",
                        as_before.zero.grad_reduce, human_bytes(planned.total_bytes()), step.zero.grad_reduce));
      }
    }
    require_memory(options, step, plan, rank_device);
  }
};

// A run from its first update, or from a checkpoint, to its last. Step s is the s-th update.
class Training {
 public:
  Training(const Job& job, RunDirectory& directory, Log& log, const std::optional<ResumePoint>& resume,
           const Peaks& peaks, World& world, int rank)
      : job_(job),
        o_(job.options),
        directory_(directory),
        log_(log),
        stop_(o_.time_limit, job.begin,
              static_cast<double>(checkpoint_bytes(job.step.model, job.step.dtype, job.step.zero.master_weights)) /
                  assumed_bytes_per_second),
        peaks_(peaks),
        rank_(rank),
        run_(job.step, job.plan, rank_device(job.device, o_.local_ranks, rank), world, rank),
        schedule_(choose_lr_schedule(o_, job.max_steps)),
        train_(job.train, loader_config(o_.shuffle)) {
    if (job.val) val_.emplace(*job.val, loader_config(false));
    if (resume) restore(*resume);
    else initialise(run_, o_);
    if (rank_ == 0 && o_.log_gpu_every > 0) monitor_.emplace(gpu_info(job.rank_device.gpu).bus_id);
    if (rank_ == 0) {
      detail::require_space(o_.out_dir, checkpoint_bytes(job.step.model, job.step.dtype, job.step.zero.master_weights));
      directory.claim(o_);
      validated_ = directory.cut_metrics(done_);
      log.open_metrics(o_.out_dir);
      report_header(log, o_, job.device, job.backend, job.step, job.max_steps, job.train, job.val ? &*job.val : nullptr,
                    job.plan, peaks_, job_.document_end);
    }
    validated_ = !run_.dp.control->all_gather_text("validated", validated_ ? "yes" : "")[0].empty();
    if (resume) log.line(formatted("resuming behind step {} from {}", done_, resume->path));
  }

  void run() {
    first_ = begun_ = done_;
    try {
      choose_matmuls();
      duties();  // validation at step 0 shows where the run starts; a resumed run does what was left undone
      while (begun_ < job_.max_steps) {
        poll();
        update();
        if (!something_due(begun_)) continue;
        finish();
        duties();
      }
    } catch (const Interrupted& stop) {
      finish();
      if (done_ > 0) save();
      throw Error(formatted("stopped by {} after step {} of {}{}; the same command goes on from there", stop.reason,
                            done_, job_.max_steps, done_ > 0 ? ", which is saved as " + checkpoint_ : std::string()),
                  ExitStatus::requeue);
    }
    report_summary();
  }

 private:
  DataLoader::Config loader_config(bool shuffle) const {
    return {
        .seed = seed(), .shuffle = shuffle, .vocab_size = job_.step.model.vocab_size, .end_of_text = job_.document_end};
  }
  uint64_t seed() const { return static_cast<uint64_t>(o_.seed); }

  // Leaves if it is time to; asked between micro-steps, tokens of a sample and updates.
  // All ranks leave together, if one of them is to.
  void poll() const {
    const std::string reason = stop_.reason(under_way_ ? last_seconds_ : 0);
    for (const std::string& other : run_.dp.control->all_gather_text("time to stop", reason))
      if (!other.empty()) throw Interrupted{other};
  }

  HostBatch read(DataLoader& loader, int64_t cursor, int64_t micro_batch) {
    poll();
    HostBatch host;
    loader.read_batch(cursor, micro_batch, {.rank = rank_, .ranks = ranks(), .batch_size = o_.batch_size}, host.tokens,
                      host.targets, host.positions);
    return host;
  }
  int64_t ranks() const { return job_.step.zero.ranks(); }

  int64_t cursor(int64_t step) const { return o_.overfit_batch ? 0 : (step - 1) * job_.samples_per_step; }

  BatchSource batches_of(int64_t step) {
    return [this, step](int64_t m) {
      if (job_.step.micro_batches > 1)
        log_.progress(formatted("step {}: micro-batch", step), m + 1, job_.step.micro_batches);
      return read(train_, cursor(step), m);
    };
  }

  // An update that was begun and not yet reported.
  struct Update {
    int64_t step;
    double lr;
    PendingStep result;
  };

  // Begins one update: step begun_ + 1. While it runs, the one before is reported; where the host must know how a step
  // went before it begins the next one, it is reported itself.
  void update() {
    const int64_t step = begun_ + 1;
    if (!under_way_) clock_ = std::chrono::steady_clock::now();
    const double lr = learning_rate(schedule_, step);
    const double infinity = std::numeric_limits<double>::infinity();
    if (o_.profile) run_.stream.set_ledger(&ops_);
    PendingStep result =
        run_.trainer.begin_step(batches_of(step),
                                {.lr = static_cast<float>(lr),
                                 .beta1 = static_cast<float>(o_.beta1),
                                 .beta2 = static_cast<float>(o_.beta2),
                                 .eps = static_cast<float>(o_.adam_eps),
                                 .weight_decay = static_cast<float>(o_.weight_decay),
                                 .step = step,
                                 .seed = seed()},
                                {.max_norm = o_.grad_clip,
                                 .largest_loss = o_.skip_loss_z ? losses_.limit(*o_.skip_loss_z) : infinity,
                                 .largest_norm = o_.skip_grad_z ? norms_.limit(*o_.skip_grad_z) : infinity});
    finish();
    under_way_.emplace(Update{step, lr, std::move(result)});
    begun_ = step;
    if (o_.profile || o_.skip_loss_z || o_.skip_grad_z) finish();
  }

  void log_gpu(int64_t step) {
    if (const auto reading = monitor_->read()) return log_.gpu(step, to_string(*reading), to_json_object(*reading));
    log_.line("notice: " + monitor_->why_not());
    monitor_.reset();
  }

  // Waits for the update under way, if there is one, and reports it.
  void finish() {
    if (!under_way_) return;
    const Update update = std::move(*under_way_);
    under_way_.reset();
    const StepResult result = update.result.wait();
    if (o_.profile) run_.stream.synchronize(), run_.stream.set_ledger(nullptr);
    const int64_t step = update.step;
    const double seconds = seconds_since(clock_);
    clock_ = std::chrono::steady_clock::now();
    last_seconds_ = seconds;
    step_seconds_ += seconds;
    losses_.add(result.loss);
    norms_.add(result.grad_norm);
    last_loss_ = result.loss;
    const double tokens = static_cast<double>(job_.step.tokens());
    const double left =
        seconds_since(begin_) / static_cast<double>(step - first_) * static_cast<double>(job_.max_steps - step);
    log_.train(
        {.step = step,
         .max_steps = job_.max_steps,
         .loss = result.loss,
         .grad_norm = result.grad_norm,
         .lr = update.lr,
         .ms = seconds * 1e3,
         .tokens_per_s = tokens / seconds,
         .mfu = share_of(peaks_.promised, seconds),
         .speed_of_light = job_.device.kind == DeviceKind::cuda ? share_of(peaks_.measured, seconds) : std::nullopt,
         .eta_s = left,
         .skipped = !result.applied});
    if (!result.finite()) diverged(step, result, batches_of(step));
    if (monitor_ && step % o_.log_gpu_every == 0) log_gpu(step);
    if (!result.applied) log_.line(formatted("step {} is an outlier: its update was skipped", step));
    done_ = step;
    validated_ = false;
  }

  // Of the flops that a peak would allow in so many seconds, what a step needs.
  std::optional<double> share_of(std::optional<double> peak, double seconds) const {
    return peak ? std::optional(flops_per_step() / seconds / *peak) : std::nullopt;
  }

  double flops_per_step() const {
    return training_flops_per_token(job_.step.model, o_.seq_len) * static_cast<double>(job_.step.tokens());
  }

  // The step is done again, with a look at every tensor, to say where it began.
  [[noreturn]] void diverged(int64_t step, const StepResult& result, const BatchSource& batches) {
    log_.line("looking for the first number that is not finite ...");
    std::optional<NotFinite> first;
    std::string mine;
    try {
      first = find_not_finite(run_.trainer, batches);
    } catch (const Interrupted& stop) {  // on all ranks alike
      mine = formatted("the search for its origin was interrupted by {}", stop.reason);
    }
    if (first && first->micro_batch < 0) mine = formatted("{} ({}) holds one", first->tensor, first->op);
    if (first && first->micro_batch >= 0) {
      std::vector<int64_t> samples;
      for (int64_t b = 0; b < o_.batch_size; ++b)
        if (first->sequences.empty() ||
            std::find(first->sequences.begin(), first->sequences.end(), b) != first->sequences.end())
          samples.push_back(
              train_.sample_at(cursor(step) + (first->micro_batch * ranks() + rank_) * o_.batch_size + b));
      mine =
          formatted("the first such number is in {}, written by {} in the {}, {}micro-batch {}, {} {}", first->tensor,
                    first->op, first->place, ranks() > 1 ? formatted("rank {}, ", rank_) : std::string(),
                    first->micro_batch, samples.size() == 1 ? "sample" : "samples", samples);
    }
    std::string where = "no tensor holds one: a sum overflowed";
    const std::vector<std::string> all = run_.dp.control->all_gather_text("first not finite", mine);
    for (size_t r = all.size(); r-- > 0;)
      if (!all[r].empty()) where = all[r];
    throw Error(formatted("step {} diverged: loss {} or gradient norm {} is not finite; {}. The weights were not "
                          "updated. Lower --lr, add "
                          "--warmup-steps or check the data; {}",
                          step, result.loss, result.grad_norm, where,
                          checkpoint_.empty() ? "no checkpoint was written" : "the last checkpoint is " + checkpoint_),
                ExitStatus::diverged);
  }

  // Behind a step, is there anything to do for which it must be finished?
  bool something_due(int64_t step) const {
    return due(step, val_ ? o_.val_every : 0) || due(step, o_.sample_every) || due(step, o_.checkpoint_every) ||
           step == job_.max_steps;
  }
  bool due(int64_t step, int64_t every) const { return every > 0 && (step == job_.max_steps || step % every == 0); }

  // Algorithms of a GPU's products that a checkpoint of the same GPU and library recorded, or by --tune-matmul.
  void choose_matmuls() {
    if (job_.device.kind != DeviceKind::cuda) return;
    const std::string here = matmul_choices(run_.stream);  // nothing is chosen yet: its title alone
    const bool fits = !matmul_choices_.empty() && matmul_choices_.starts_with(here);
    bool all_fit = true;
    for (const std::string& other : run_.dp.control->all_gather_text("matmul algorithms fit", fits ? "yes" : "no"))
      all_fit &= other == "yes";
    if (all_fit) return set_matmul_choices(matmul_choices_, run_.stream);
    if (!matmul_choices_.empty())
      log_.line(
          "notice: the checkpoint's matmul algorithms are for another GPU or cuBLASLt: products may round otherwise");
    matmul_choices_.clear();
    if (!o_.tune_matmul || begun_ == job_.max_steps) return;
    log_.line("timing matmul algorithms ...");
    matmul_choices_ = run_.trainer.tune(batches_of(begun_ + 1));
  }

  // What is due behind step done_.
  void duties() {
    if (val_ && due(done_, o_.val_every) && !validated_) validate();
    if (done_ == 0) return;
    if (done_ > first_ && due(done_, o_.sample_every)) sample();
    const bool best = o_.keep_best && best_step_ == done_;
    if (done_ != job_.max_steps && !best && !due(done_, o_.checkpoint_every)) return;
    save();
    if (rank_ != 0) return;
    if (best) directory_.link_best(done_);
    directory_.prune(o_.keep_checkpoints, o_.keep_every, o_.keep_best ? std::optional(best_step_) : std::nullopt);
  }

  void validate() {
    // Every sample once, whatever the layout: rows behind the last one do not count.
    const int64_t micro_batches = ceil_div(job_.val_samples, o_.batch_size * ranks());
    double sum = 0;
    for (int64_t begin = 0; begin < micro_batches; begin += validation_pass)
      sum += run_.trainer.evaluate(std::min(validation_pass, micro_batches - begin), 1, [&](int64_t in_pass) {
        const int64_t m = begin + in_pass;
        log_.progress("validation: micro-batch", m + 1, micro_batches);
        HostBatch host = read(*val_, 0, m);
        const int64_t rows = job_.val_samples - (m * ranks() + rank_) * o_.batch_size;
        for (int64_t b = std::max<int64_t>(rows, 0); b < o_.batch_size; ++b)
          std::fill_n(host.targets.begin() + b * o_.seq_len, o_.seq_len, -1);
        return host;
      });
    const double loss = sum / static_cast<double>(job_.val_samples * o_.seq_len);
    std::optional<ChoiceScore> score;
    if (job_.choices)
      score = evaluate_choices(run_.trainer, *job_.choices, run_.dp, [&](int64_t m, int64_t count) {
        poll();
        log_.progress("multiple choice: micro-batch", m + 1, count);
      });
    log_.val({.step = done_,
              .loss = loss,
              .choices = score ? std::optional(score->accuracy) : std::nullopt,
              .choices_normalized = score ? score->normalized_accuracy : std::nullopt});
    if (loss < best_val_) best_val_ = loss, best_step_ = done_;
    validated_ = true;
  }

  void sample() {
    std::vector<int32_t> made;
    generate(run_.trainer, prompt_tokens(*job_.tokenizer, o_, job_.step.model), o_.sample_tokens, sample_options(o_),
             seed(), formatted("sample {}", done_), [&](int32_t token) {
               poll();
               made.push_back(token);
               log_.progress("sampling", static_cast<int64_t>(made.size()), o_.sample_tokens);
               return token != job_.tokenizer->end_of_text();
             });
    log_.line(formatted("sample at step {}: {}{}", done_, o_.prompt, job_.tokenizer->decode(made)));
  }

  // The checkpoint of step done_, unless there is one.
  void save() {
    if (checkpoint_ == checkpoint_path(o_.out_dir, done_)) return;
    const auto begin = std::chrono::steady_clock::now();
    log_.progress("writing checkpoint", 0, 1);
    log_.sync_metrics();  // what a resumed run finds in front of it
    nlohmann::ordered_json best;
    if (std::isfinite(best_val_)) best = {{"step", best_step_}, {"loss", best_val_}};
    checkpoint_ = write_checkpoint(
        o_.out_dir, done_, job_.step.model, run_.trainer.state(), job_.step.dtype,
        {{"format", 1},
         {"step", done_},
         {"tokens", done_ * job_.step.tokens()},
         {"tokens_per_step", job_.step.tokens()},
         {"data_cursor", done_ * job_.samples_per_step},
         {"data_samples", job_.train.samples()},
         {"seq_len", o_.seq_len},
         {"document_end", job_.document_end ? nlohmann::ordered_json(*job_.document_end) : nlohmann::ordered_json()},
         {"seed", o_.seed},
         {"best_validation", best},
         {"detectors", {{"loss", losses_.values()}, {"grad_norm", norms_.values()}}},
         {"choices", {{"grad_reduce", name_of(job_.step.zero.grad_reduce)}, {"matmul", matmul_choices_}}},
         {"layout", detail::layout_text(job_.step.zero)},
         {"options", options_json(o_)}},
        run_.stream, job_.tokenizer_files);
    stop_.saved(seconds_since(begin));
    log_.line("checkpoint: " + checkpoint_);
  }

  void restore(const ResumePoint& from) {
    const std::string file = from.path + "/trainer.json";
    auto expect = [&](const char* field, int64_t now, const char* what) {
      const nlohmann::json then = from.trainer.value(field, nlohmann::json());
      CHECK(then == now, "{}: \"{}\" is {}, and is {} in this run: {}", file, field, then.dump(), now, what);
    };
    expect("step", from.step, "the directory was renamed");
    expect("tokens_per_step", job_.step.tokens(), "give the former as --total-batch-size");
    if (job_.document_end)
      expect("document_end", *job_.document_end,
             "--mask-documents needs the same end of text: give the same --tokenizer");
    const nlohmann::json before = config_to_hf(
                             config_from_hf(read_json(from.path + "/config.json"), from.path + "/config.json"),
                             job_.step.dtype),
                         now = config_to_hf(job_.step.model, job_.step.dtype);
    for (const auto& [field, value] : before.items())
      CHECK(now.value(field, nlohmann::json()) == value,
            "{}/config.json: \"{}\" is {}, and is {} in --model {} now: {}", from.path, field, value.dump(),
            now.value(field, nlohmann::json()).dump(), o_.model,
            "the model's directory has changed; --resume never and another --out-dir begin anew");
    expect("data_samples", job_.train.samples(), "--train-data has changed");
    expect("data_cursor", from.step * job_.samples_per_step, "the checkpoint is damaged, or of another program");
    load_checkpoint(from.path, job_.step.model, run_.trainer.state(), run_.stream);
    run_.stream.synchronize();
    try {
      losses_ = OutlierDetector(from.trainer.at("detectors").at("loss").get<std::vector<double>>());
      norms_ = OutlierDetector(from.trainer.at("detectors").at("grad_norm").get<std::vector<double>>());
      if (const auto& best = from.trainer.at("best_validation"); best.is_object())
        best.at("step").get_to(best_step_), best.at("loss").get_to(best_val_);
    } catch (const nlohmann::json::exception& error) {
      throw Error(formatted("{} is damaged: {}", file, error.what()));
    }
    if (const nlohmann::json choices = from.trainer.value("choices", nlohmann::json::object());
        choices.is_object() && choices.value("matmul", nlohmann::json()).is_string())
      matmul_choices_ = choices["matmul"];
    done_ = from.step;
    if (from.path == checkpoint_path(o_.out_dir, done_)) checkpoint_ = from.path;
  }

  void report_summary() {
    const double steps = static_cast<double>(job_.max_steps - first_), tokens = static_cast<double>(job_.step.tokens());
    if (done_ == first_) return log_.line("done: only the validation was left");
    log_.table(
        "done",
        {{"time", formatted("{} in all, {} in training steps", human_duration(seconds_since(begin_)),
                            human_duration(step_seconds_))},
         {"throughput",
          formatted("{:.0f} tokens/s, {}", tokens * steps / step_seconds_,
                    peaks_.promised ? formatted("{:.1f}% MFU", 100 * *share_of(peaks_.promised, step_seconds_ / steps))
                                    : std::string("MFU n/a"))},
         {"training loss", formatted("{:.4f} at step {}", last_loss_, job_.max_steps)},
         {"validation loss",
          std::isfinite(best_val_) ? formatted("{:.4f} at best, at step {}", best_val_, best_step_) : "not measured"},
         {"checkpoint", checkpoint_},
         {"metrics", o_.out_dir + "/metrics.jsonl"}});
    if (o_.profile) report_profile(log_, ops_, job_.max_steps - first_, peaks_.of_rank(ranks()));
    report_next_steps(log_, o_, checkpoint_, program_invocation_name);
  }

  static constexpr int64_t validation_pass = 4096;  // micro-batches whose actions are listed at a time

  const Job& job_;
  const Options& o_;
  RunDirectory& directory_;
  Log& log_;
  StopCondition stop_;
  Peaks peaks_;
  int64_t rank_;
  std::optional<GpuMonitor> monitor_;
  OpLedger ops_;  // before the stream that books in it
  Run run_;
  LrSchedule schedule_;
  DataLoader train_;
  std::optional<DataLoader> val_;

  int64_t done_ = 0, begun_ = 0, first_ = 0;  // updates done, begun, and done when this process began
  std::optional<Update> under_way_;
  std::chrono::steady_clock::time_point clock_;  // when the last update was finished, or this one begun
  bool validated_ = false;                       // behind step done_
  OutlierDetector losses_, norms_;
  double best_val_ = std::numeric_limits<double>::infinity();
  int64_t best_step_ = -1;
  std::string matmul_choices_;  // recorded with the run: tuned ones
  std::string checkpoint_;      // the last one in the out directory
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  double step_seconds_ = 0;  // of all steps, without validation, sampling and checkpoints
  double last_loss_ = 0, last_seconds_ = 0;
};

void run_training(const Options& o, StopCondition::Clock::time_point process_begin) {
  note_stop_signals();
  Job job(o, process_begin);
  Log log;
  RunDirectory directory(log, o);
  const std::optional<ResumePoint> resume = directory.resume_point(log, o);
  // Stopped behind the last update, a run may still lack its last validation.
  const bool validation_left =
      resume && resume->step == job.max_steps && job.val && o.val_every > 0 && !directory.validated(resume->step);
  if (resume && resume->step >= job.max_steps && !validation_left) {
    log.line(formatted("already complete: {} is at step {} of {}", o.out_dir, resume->step, job.max_steps));
    return report_next_steps(log, o, resume->path, program_invocation_name);
  }
  if (resume) job.go_on(*resume, log);
  const Peaks peaks = find_peaks(job.device, job.step.dtype, o.peak_tflops, o.profile)
                          .times(static_cast<double>(devices_in_use(job.device, o.local_ranks)));
  World world(job.step.zero.mesh(), job.backend);
  run_ranks(world, [&](int rank) {
    Log silent = Log::silent();
    Training(job, directory, rank == 0 ? log : silent, resume, peaks, world, rank).run();
  });
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
  using namespace llmc;
  const auto begin = StopCondition::Clock::now();
  wait_without_spinning(argv);
  try {
    const Command command = parse_command_line(argc, argv);
    if (command.print) std::printf("%s\n", command.text.c_str());  // --help, --print-config and the like
    else if (command.version) std::printf("%s\n", version_text().c_str());
    else if (command.options.selftest) run_selftest_mode(command.options);
    else if (command.options.verify_data) run_verify_data(command.options);
    else if (command.options.plan) run_plan(command.options);
    else if (command.options.generate) run_generate(command.options);
    else run_training(command.options, begin);
    return static_cast<int>(ExitStatus::done);
  } catch (const Error& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return static_cast<int>(error.status());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: internal error: %s\n", error.what());
    return static_cast<int>(ExitStatus::refused);
  }
}
