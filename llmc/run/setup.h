// setup.h: the options translated into the trainer's terms: the device and each rank's part of it, the model, the
// layout, the step, the schedule, the tokenizer, the first weights.
#pragma once
#include "core/json.h"
#include "data/dataloader.h"
#include "device/gpu.h"
#include "model/presets.h"
#include "run/checkpoints/checkpoint.h"
#include "run/length.h"
#include "run/options/options.h"
#include "run/options/parse.h"
#include "run/plan/machines.h"
#include "run/plan/planner.h"
#include "run/rank_device.h"
#include "run/ranks.h"
#include "text/tokenizer.h"
#include "train/sample.h"
#include "train/slice_times.h"
#include "train/step_statistics.h"

namespace llmc {

// --threads, or this process's share of the processors.
inline int threads_of_process(const Options& o) {
  if (o.threads > 0) return static_cast<int>(o.threads);
  return std::max(1, available_processors() / static_cast<int>(o.place.sharers));
}

inline Device choose_device(const Options& o) {
  Device device{DeviceKind::cpu, threads_of_process(o)};
  device.tf32 = o.tf32 ? Tf32::yes : Tf32::no;
  device.graphs = o.cuda_graphs == OnOff::on;
  device.cudnn = o.attention == GpuAttention::cudnn;
  device.gelu_in_products = o.gelu == GpuEpilogue::cublaslt;
  device.residual_in_products = o.residual == GpuEpilogue::cublaslt;
  CHECK(built_with_cudnn || !device.cudnn,
        "--attention cudnn: this train_gpt was built without cuDNN; build with `make USE_CUDNN=1`, or use --attention "
        "own");
  if (o.machine == local_machine) return device;
  if (!o.machine.empty()) {
    device.elsewhere = true;
    device.machine = choose_machine(o.machine, o.dtype == WeightType::bf16 ? DType::bf16 : DType::fp32, o.tf32,
                                    {.ranks = o.place.local_ranks, .threads = o.threads});
    const int64_t cores = device.machine->cores;
    CHECK(cores > 0 || o.device != DeviceChoice::cpu,
          "--machine {} has GPUs, and --device is cpu: leave out one of them", shown(o.machine));
    CHECK(cores == 0 || o.device != DeviceChoice::cuda,
          "--machine {} has processors and no GPUs, and --device is cuda: leave out one of them", shown(o.machine));
    if (cores == 0) device.kind = DeviceKind::cuda;
    else if (o.threads == 0) device.threads = static_cast<int>(cores);
    return device;
  }
  if (o.device == DeviceChoice::cpu) return device;
  const VisibleGpus gpus = visible_gpus();
  const bool elsewhere = o.device == DeviceChoice::cuda && o.plan && gpus.count == 0;  // a plan for a GPU needs no GPU
  CHECK(gpus.count > 0 || o.device == DeviceChoice::automatic || elsewhere, "--device cuda: {}", gpus.why_none);
  CHECK(!elsewhere || !device.cudnn, "--attention cudnn: cuDNN's work space can only be planned on a GPU: {}",
        gpus.why_none);
  if (gpus.count > 0 || elsewhere) device.kind = DeviceKind::cuda;
  if (gpus.count > 0) require_code_for_gpus(gpus_of_process(o.place));
  return device;
}

// The GPUs of this host that --device and --machine leave to the ranks.
inline int64_t gpus_here(const Options& o) {
  return o.device == DeviceChoice::cpu || !o.machine.empty() ? 0 : visible_gpus().count;
}

// One per visible GPU; on a CPU, as few as --pp, --tp, --cp and --ep allow; one in modes that are not about ranks.
inline int64_t default_ranks(const Options& o) {
  if (!has_ranks(o)) return 1;
  return std::max(o.pp * std::lcm(o.tp * o.cp, o.ep), gpus_here(o));
}

// The model, with the base of --parametrization, and the rotary positions of --rope-theta and --rope-factor, which make
// room for longer sequences.
inline ModelConfig choose_model(const Options& o) {
  ModelConfig model = resolve_model(o.model, {o.n_layer, o.n_head, o.n_kv_head, o.n_embd, o.n_ffn, o.vocab_size});
  if (o.parametrization != Parametrization::standard && o.base_width)
    model.base = {*o.base_width, o.base_depth.value_or(model.n_layer), o.base_head_size.value_or(model.head_size)};
  if (o.init_std) {
    CHECK(o.from_scratch || model_preset(o.model),
          "--init-std {} with --model {}, whose weights are read: add --from-scratch, or leave it out", *o.init_std,
          o.model);
    model.init_std = static_cast<float>(*o.init_std);
  }
  if (!o.rope_theta && !o.rope_factor) return model;
  CHECK(model.family.positions == Positions::rotary,
        "{} is for rotary positions, and --model {} learns its positions: leave it out",
        o.rope_theta ? formatted("--rope-theta {}", *o.rope_theta) : formatted("--rope-factor {}", *o.rope_factor),
        o.model);
  Rotary& rotary = model.rotary;
  if (o.rope_theta) {
    rotary.theta = *o.rope_theta;
    model.n_positions = std::max(model.n_positions, o.seq_len);
  }
  if (o.rope_factor) {
    if (!rotary.scaled) rotary.scaling.original_positions = static_cast<double>(model.n_positions);
    rotary.scaled = true;
    rotary.scaling.factor = *o.rope_factor;
    model.n_positions = std::max(
        o.rope_theta ? model.n_positions : int64_t{1},
        static_cast<int64_t>(std::min(largest_size, rotary.scaling.original_positions * rotary.scaling.factor)));
  }
  return model;
}

// Rejects updates by the host of what is not in its memory, or needs more than its elements.
inline void refuse_host_updates(const Options& o, const Precision& precision) {
  if (o.offload_update == OffloadUpdate::device) return;
  CHECK(!rule_of(o.optimizer).of_matrices,
        "--offload-update host with --optimizer {}, whose updates are products of whole matrices: use --optimizer "
        "adamw, or leave out --offload-update",
        o.optimizer);
  CHECK(!o.qk_clip,
        "--offload-update host with --qk-clip {}, which shrinks weights on the device: leave out one of them",
        o.qk_clip.value_or(0));
  CHECK(!precision.averages || precision.keeps_masters(),
        "--offload-update host with --ema and {}, whose averages only the device has: leave out one of them{}",
        o.dtype == WeightType::fp32 ? formatted("--dtype {}", o.dtype)
                                    : formatted("--master-weights {}", o.master_weights),
        o.dtype == WeightType::fp32 ? ", or use --dtype bf16" : "");
  Offload needed = o.offload;
  needed.add(Offloaded::moments);
  if (precision.keeps_masters()) needed.add(Offloaded::master);
  CHECK(needed == o.offload,
        "--offload-update host with --offload {}: the host updates what is in its memory, which all state of the "
        "optimizer must be: use --offload {}",
        std::string(o.offload), std::string(needed));
}

inline Precision choose_precision(const Options& o) {
  Precision precision = o.dtype == WeightType::bf16 ? DType::bf16 : DType::fp32;
  precision.masters = o.master_weights != MasterWeights::none;
  precision.split_masters = o.master_weights == MasterWeights::split;
  precision.averages = o.ema.has_value();
  const auto in_few_bits = [](MomentType type, DType in_8_bits) -> std::optional<DType> {
    if (type == MomentType::fp32) return std::nullopt;
    return type == MomentType::bf16 ? DType::bf16 : in_8_bits;
  };
  precision.moment1 = in_few_bits(o.moment1_dtype, DType::e4m3);
  precision.moment2 = in_few_bits(o.moment2_dtype, DType::e5m3);
  CHECK(!precision.split_masters || o.dtype == WeightType::bf16,
        "--master-weights split with --dtype {}: the weights are their own masters: use --dtype bf16, or leave it out",
        o.dtype);
  CHECK(!precision.split_masters || o.schedule != Schedule::pipedream,
        "--master-weights split with --schedule pipedream, which keeps several versions of the weights: use "
        "--master-weights fp32");
  CHECK(!precision.split_masters || !o.qk_clip,
        "--master-weights split with --qk-clip, which needs whole fp32 weights: use --master-weights fp32");
  CHECK(o.optimizer != Optimizer::muon || !precision.small_state(),
        "--optimizer muon keeps its momentum and masters in fp32: leave out --moment1-dtype, --moment2-dtype and "
        "--master-weights split, or use --optimizer adamw");
  CHECK(!precision.moment2 || rule_of(o.optimizer).slots.size() > 1,
        "--moment2-dtype {} with --optimizer {}, which has no second moment: leave it out", o.moment2_dtype,
        o.optimizer);
  CHECK(!o.offload.has(Offloaded::master) || precision.keeps_masters(),
        "--offload master with {}: there are no master weights: {}",
        o.dtype == WeightType::fp32 ? formatted("--dtype {}, whose weights are their own", o.dtype)
                                    : formatted("--master-weights {}", o.master_weights),
        !rule_of(o.optimizer).of_matrices ? "use --offload moments"
        : o.dtype == WeightType::fp32     ? "leave out master, or use --dtype bf16"
                                          : "leave out master, or use --master-weights fp32");
  CHECK(o.offload_dir.empty() || o.offload.has(Offloaded::moments),
        "--offload-dir {} with --offload {}: the moments of the optimizer are all that may be in a file: add moments "
        "to --offload, or leave out --offload-dir",
        shown(o.offload_dir), std::string(o.offload));
  refuse_host_updates(o, precision);
  CHECK(!o.noise_scale || !o.offload.has(Offloaded::gradients),
        "--noise-scale reads whole sums of gradients, which --offload gradients has in host memory: leave out one of "
        "them");
  precision.linear = o.products;
  precision.fp8_skip = o.fp8_skip;
  CHECK(!o.fp8_skip.any() || o.products != Operands::as_stored,
        "--fp8-skip {} with --products {}, where no block has products in fp8: leave it out, or use --products {}",
        std::string(o.fp8_skip), o.products, Operands::fp8_block);
  precision.gathers_fp8 = o.gather_dtype == GatherType::fp8;
  CHECK(!precision.gathers_fp8 || o.zero_stage == 3,
        "--gather-dtype fp8 with --zero-stage {}, where weights are gathered once per update: use --zero-stage 3, or "
        "leave it out",
        o.zero_stage);
  CHECK(!precision.gathers_fp8 || o.products == Operands::fp8_block || o.products == Operands::fp8,
        "--gather-dtype fp8 with --products {}, {}: use --products fp8-block or fp8, or leave it out", o.products,
        o.products == Operands::mxfp8        ? "whose weights are other numbers in the backward than in the forward"
        : o.products == Operands::fp8_tensor ? "whose matrices have one scale each"
                                             : "which multiplies the weights as they are stored");
  CHECK(!precision.gathers_fp8 || !o.offload.has(Offloaded::weights),
        "--gather-dtype fp8 with --offload {}: shards in fp8 are made of weights on the device: leave out one of them",
        std::string(o.offload));
  if (o.reduce_dtype == WeightType::bf16) precision.wire = DType::bf16;
  CHECK(o.reduce_dtype == WeightType::fp32 || o.dp_sync == DpSync::all_reduce,
        "--reduce-dtype bf16 with --dp-sync {}: servers add gradients in fp32: use --dp-sync all-reduce, or "
        "--reduce-dtype fp32",
        o.dp_sync);
  return precision;
}

// All ranks together have this many times the peak of this process's device: the number of GPUs that they use, or the
// number of processes. device: working_device(). Processes that share `processors` processors and have more threads
// than that count for less.
inline double devices_in_use(const Device& device, const Options& o, int processors = available_processors()) {
  if (device.kind == DeviceKind::cuda)
    return static_cast<double>(o.ranks) / static_cast<double>(rank_device(device, o.place).sharers);
  const double threads = static_cast<double>(o.place.sharers) * device.threads;
  return static_cast<double>(o.place.processes) * std::min(1.0, std::max(processors, device.threads) / threads);
}

// The device of this process's first rank, and who moves its tensors: NCCL on a GPU of its own, even in a plan for a
// GPU that is not here.
inline Device first_rank_device(const Device& device, const Options& o) {
  Device rank = rank_device(device, o.place);
  rank.collectives = collectives_of(rank, o.ranks, o.comm);
  return rank;
}

// The transport between the ranks.
inline Backend choose_backend(const Options& o, const Device& rank_device) {
  const bool own_gpus = rank_device.kind == DeviceKind::cuda && rank_device.sharers == 1;
  if (o.comm == CommChoice::nccl) {
    CHECK(built_for_gpus, "--comm nccl: {}", visible_gpus().why_none);
    CHECK(built_with_nccl, "--comm nccl: this train_gpt was built without NCCL; install libnccl-dev and rebuild");
    const bool take_turns = rank_device.kind == DeviceKind::cuda && o.place.local_ranks == 1 && nccl_shares_gpus();
    CHECK(own_gpus || take_turns,
          "--comm nccl needs a GPU for each rank, or NCCL 2.30 and processes of one rank each ({} is here): {} rank(s) "
          "on "
          "{} GPU(s) of this host, --device {}; use --comm auto",
          nccl_version(), o.place.ranks_on_host, visible_gpus().count, rank_device.kind);
    if (take_turns && o.ranks > 1) return Backend::nccl;
  }
  const bool several = o.place.processes > 1;
  CHECK(o.comm != CommChoice::threads || !several,
        "--comm threads is for the ranks of one process, and there are {} processes; use --comm auto",
        o.place.processes);
  CHECK((o.comm != CommChoice::mpi && o.comm != CommChoice::tcp) || several,
        "--comm {} is for several processes, and this is the only one: start more, or use --comm auto", o.comm);
  CHECK(o.comm != CommChoice::mpi || o.place.by_mpi,
        "--comm mpi: MPI has not started these processes ({}), so it does not know them: start them with mpirun or "
        "srun --mpi=pmix, or use --comm tcp",
        o.place.started_by);
  if ((o.comm == CommChoice::automatic || o.comm == CommChoice::nccl) && own_gpus && built_with_nccl && o.ranks > 1)
    return Backend::nccl;
  return !several ? Backend::threads : o.place.by_mpi && o.comm != CommChoice::tcp ? Backend::mpi : Backend::tcp;
}

// The layers of each chunk of a pipeline; none without one.
inline std::vector<int64_t> choose_layers(const Options& o, const StepConfig& step) {
  if (step.layout.pipeline.stages == 1) return {};
  const PipelineLayout layout = pipeline_layout_from_name(o.pp_layout);
  switch (layout.kind) {
    case LayoutKind::even: return even_layers(step.model.n_layer, step.stages_of_chunks());
    case LayoutKind::balanced: return balanced_layers(count_costs(step), step.stages_of_chunks());
    case LayoutKind::list:
      return listed_layers(layout.layers, step.model.n_layer, step.layout.pipeline.stages,
                           step.layout.pipeline.chunks_per_stage);
  }
  return {};
}

// The default of --moe-aux-loss.
inline double usual_aux_loss(const ModelConfig& model) {
  const Experts& e = model.experts;
  return e.count > 0 && e.adds_aux_loss ? e.aux_loss * static_cast<double>(e.per_token) : 0;
}

// The expert options. Rejects --moe-* for a dense model, and what cannot be computed.
inline ExpertOptions choose_experts(const Options& o, const ModelConfig& model) {
  const Experts& e = model.experts;
  if (e.count == 0) {
    Options asked = o;
    if (o.moe_aux_loss == 0) asked.moe_aux_loss.reset();  // 0: no loss, as without the option
    for (const OptionText& given : option_texts(asked))
      CHECK(!given.name.starts_with("--moe-") || given.text == given.usual,
            "{} {} is for models with experts, and --model {} has none: leave it out, or use one such as d12-e8 or "
            "mixtral:8x7B",
            given.name, given.text, o.model);
    return {};
  }
  ExpertOptions experts{.aux_loss = o.moe_aux_loss.value_or(usual_aux_loss(model)),
                        .z_loss = o.moe_z_loss,
                        .bias_rate = o.moe_bias_rate,
                        .imbalance = o.moe_imbalance};
  CHECK(o.ep > 1 || o.moe_imbalance == 1,
        "--moe-imbalance {} without --ep: no rank gets more than its share: leave it out", o.moe_imbalance);
  CHECK(o.moe_imbalance <= static_cast<double>(o.ep),
        "--moe-imbalance {} with --ep {}: a rank gets at most {} times its equal share: use a number from 1 to that",
        o.moe_imbalance, o.ep, o.ep);
  if (o.moe_dispatch == Dispatch::capacity) experts.capacity_factor = o.capacity_factor();
  const bool whole = token_slices(o) == 1;
  CHECK(whole || experts.aux_loss == 0,
        "--token-slices {} with --moe-aux-loss {}{}: the loss is of whole sequences, which the last slice completes; "
        "leave out --token-slices, or use --moe-aux-loss 0",
        o.token_slices, experts.aux_loss, o.moe_aux_loss ? "" : ", from router_aux_loss_coef in config.json");
  CHECK(whole || !experts.capacity_factor,
        "--token-slices {} with --moe-dispatch capacity: a slice does not know how many choices of an expert came "
        "before it; leave out --token-slices, or use --moe-dispatch dropless",
        o.token_slices);
  return experts;
}

// Refuses options of the optimizer that the model cannot have.
inline void require_updates_can(const ModelConfig& model, const Options& o) {
  CHECK(!o.head_lr || !model.tied, "--head-lr {} with --model {}, whose output layer is its embedding: use --embed-lr",
        o.head_lr.value_or(0), o.model);
  CHECK(!o.qk_clip || model.family.qk_norm == QkNorm::none,
        "--qk-clip {} with --model {}, whose queries and keys are normalised: the size of their weights is that of no "
        "logit: leave it out",
        o.qk_clip.value_or(0), o.model);
}

// The step that the options describe. Checks everything that the options alone decide.
inline StepConfig choose_step(const Options& o) {
  StepConfig step{.model = choose_model(o),
                  .precision = choose_precision(o),
                  .batch = {o.batch_size, o.seq_len},
                  .recompute = o.recompute.what,
                  .segment = o.recompute.segment,
                  .generates = o.sample_every > 0,
                  .documents = o.mask_documents ? Documents::apart : Documents::together};
  CHECK(o.seq_len <= step.model.n_positions, "--seq-len {} exceeds the {} positions of --model {}: use at most {}",
        o.seq_len, step.model.n_positions, o.model, step.model.n_positions);
  CHECK(o.fp8_skip.first <= step.model.n_layer && o.fp8_skip.last <= step.model.n_layer - o.fp8_skip.first,
        "--fp8-skip {}: --model {} has {} blocks: skip at most so many", std::string(o.fp8_skip), o.model,
        step.model.n_layer);
  require_updates_can(step.model, o);
  step.qk_clip = o.qk_clip;
  step.experts = choose_experts(o, step.model);
  step.layout = choose_layout(o, step.model);
  if (o.total_batch_size)
    step.micro_batches =
        *o.total_batch_size / (step.batch.rows() * step.layout.readers());  // validated with the options
  step.head_chunks = o.head_chunks;
  step.z_loss = o.z_loss;
  step.noise_scale = o.noise_scale;
  CHECK(!o.noise_scale || noise_fault(step).empty(), "--noise-scale: {}; or leave out --noise-scale",
        noise_fault(step));
  CHECK(!o.offload.has(Offloaded::activations) || (o.recompute.what == Recompute::block && o.token_slices == "1"),
        "--offload activations is for the inputs of blocks that are recomputed, of whole sequences, and this is "
        "--recompute {}, --token-slices {}: use --recompute block and --token-slices 1",
        o.recompute, o.token_slices);
  require_countable(step);
  step.layout.pipeline.layers = choose_layers(o, step);
  const int64_t blocks = largest_chunk(step.model_chunks());
  CHECK(step.segment <= blocks,
        "--recompute {} with {} block{} in {}: a segment must not be longer; the square-root rule gives {}",
        o.recompute, blocks, blocks == 1 ? "" : "s",
        step.layout.pipeline.stages == 1 ? "the model" : "the largest chunk of a stage",
        std::string(square_root_recomputation(step)));
  return step;
}

// The step, with its sequences cut by --token-slices.
inline StepConfig with_token_slices(StepConfig step, const Options& o, const Device& device) {
  const std::optional<int64_t> slices = token_slices(o);  // validated with the options
  step.layout.pipeline.slices =
      slices ? even_token_slices(step.batch.T, *slices) : planned_token_slices(step, device.computes_as()).lengths;
  if (step.layout.pipeline.slices.size() == 1) step.layout.pipeline.slices.clear();
  pipeline_faults(step.pipeline()).refuse();
  return step;
}

// The samples in this many steps, at most all.
inline int64_t samples_of_steps(const TokenShards& data, int64_t steps, int64_t samples_per_step) {
  return steps > data.samples() / samples_per_step ? data.samples() : steps * samples_per_step;
}

// The share of the weights after update `step` in a moving average that decays by `decay`. The first 1 / (1 - decay)
// weights count equally, so that the initial ones do not count for long.
inline double average_share(double decay, int64_t step) { return std::max(1 - decay, 1 / static_cast<double>(step)); }

// tokens: of this step
inline OptimizerOptions optimizer_options(const Options& o, double lr, int64_t step, int64_t tokens) {
  const auto part = [&](const std::optional<double>& rate) { return rate ? static_cast<float>(*rate / o.lr) : 1.0f; };
  return {.lr = static_cast<float>(lr),
          .beta1 = static_cast<float>(o.beta1),
          .beta2 = static_cast<float>(o.beta2_in_use().value_or(0)),
          .eps = static_cast<float>(o.adam_eps),
          .weight_decay = static_cast<float>(weight_decay(o, tokens)),
          .step = step,
          .seed = static_cast<uint64_t>(o.seed),
          .momentum = static_cast<float>(o.muon_momentum),
          .decay = o.cautious_decay ? Decay::cautious : Decay::always,
          .decays_embeddings = o.decay_embeddings == OnOff::on,
          .rates = {1, part(o.embed_lr), part(o.head_lr), part(o.scalar_lr)},
          .average_share = o.ema ? average_share(*o.ema, step) : 0};
}

// Rejects a --model whose files do not hold the tensors of its config.json, before taking memory for them, and one of
// our checkpoints if its weights do not match its manifest.
inline void require_whole_weights(const Options& o, const CheckpointCheck& check) {
  if (o.from_scratch || model_preset(o.model)) return;
  if (path_exists(o.model + "/manifest.json"))
    if (const auto fault = check(o.model, Part::model))
      throw Error(
          formatted("--model {}: {}; use another checkpoint, or remove manifest.json if the files were changed "
                    "on purpose",
                    o.model, *fault));
  const auto files = open_all(model_files(o.model));
  match_hf_names(files, hf_tensors(choose_model(o), files));
}

// The experts' biases in this trainer.json, of all layers (--moe-bias-rate); empty: there are none.   file: for
// messages
inline std::vector<float> recorded_expert_biases(const nlohmann::json& trainer, const std::string& file) {
  const nlohmann::json biases = trainer.value("expert_biases", nlohmann::json::array());
  CHECK(biases.is_array() && std::all_of(biases.begin(), biases.end(), [](auto& b) { return b.is_number(); }),
        "{}: \"expert_biases\" is {}, expected a list of numbers; the file is damaged", file, biases);
  return biases.get<std::vector<float>>();
}

// Those of one of our checkpoints, for this model; empty: it has none.
inline std::vector<float> trained_expert_biases(const std::string& checkpoint, const ModelConfig& model) {
  const std::string file = checkpoint + "/trainer.json";
  if (model.experts.count == 0 || !path_exists(file)) return {};
  std::vector<float> biases = recorded_expert_biases(read_json(file), file);
  const int64_t expected = model.sparse_layers() * model.experts.count;
  CHECK(biases.empty() || std::ssize(biases) == expected,
        "{}: \"expert_biases\" has {} numbers, expected {}; the checkpoint is damaged", file, biases.size(), expected);
  return biases;
}

// A step that only computes forwards has the biases with which the model was trained.
inline void take_trained_biases(StepConfig& step, const std::string& checkpoint) {
  if (!trained_expert_biases(checkpoint, step.model).empty()) step.experts.bias_rate = 1;  // nothing is updated
}

// The initial weights: those of the directory, unless --from-scratch or a preset asks for random ones.
inline void initialise(Run& run, const Options& o, const Advance& advance = {}) {
  if (!o.from_scratch && !model_preset(o.model))
    load_model(o.model, run.trainer.config().model, run.trainer.state(), run.stream, advance);
  else init_weights(run.trainer.state(), static_cast<uint64_t>(o.seed), run.stream);
  if (!o.from_scratch && run.trainer.config().experts.bias_rate > 0)
    if (const std::vector<float> biases = trained_expert_biases(o.model, run.trainer.config().model); !biases.empty())
      run.trainer.set_expert_biases(biases);
  run.stream.synchronize();
}

inline SampleOptions sample_options(const Options& o) { return {o.temperature, o.top_k, o.top_p}; }

inline std::unique_ptr<Tokenizer> choose_tokenizer(const Options& o, const ModelConfig& model) {
  return make_tokenizer(o.tokenizer, model_preset(o.model) ? std::nullopt : std::optional(o.model), model.vocab_size);
}

// The tokenizer files that checkpoints keep. The byte tokenizer is saved only for a vocabulary of bytes: with other
// vocabularies it stands in for a tokenizer that was not given or is not supported.
inline std::map<std::string, std::string> tokenizer_files(const Tokenizer& tokenizer, const ModelConfig& model) {
  const bool bytes = dynamic_cast<const ByteTokenizer*>(&tokenizer) != nullptr;
  return bytes && model.vocab_size != ByteTokenizer::vocab_size ? std::map<std::string, std::string>()
                                                                : tokenizer.files();
}

// Are the vocabulary's tokens known? The byte tokenizer also stands in for one that was not given.
inline bool knows_tokens(const Options& o, const Tokenizer& tokenizer, const ModelConfig& model) {
  return o.tokenizer != "auto" || !tokenizer_files(tokenizer, model).empty();
}

// The tokens at which texts begin and end, for config.json; generate() of transformers stops there. They are the
// tokenizer's, unless a directory's own tokens are in the vocabulary and, with another --tokenizer, end texts as it
// does. Without a tokenizer, a published vocabulary keeps its own, which transformers knows; other vocabularies get
// null, because otherwise transformers would assume tokens that do not exist or that stand for a letter.
inline std::map<std::string, std::string> choose_special_tokens(const Options& o, const Tokenizer& tokenizer,
                                                                const ModelConfig& model) {
  std::map<std::string, std::string> own = model.special_tokens;  // a directory's; JSON
  const auto ids = [&](const char* name) {
    std::vector<int64_t> all;
    if (!own.contains(name) || own.at(name).empty()) return all;
    const nlohmann::json value = parse_json(own.at(name), formatted("--model {}: {}", o.model, name));
    for (const nlohmann::json& id : value.is_array() ? value : nlohmann::json::array({value}))
      if (!id.is_null()) all.push_back(whole_number(id).value_or(-1));
    return all;
  };
  const std::vector<int64_t> begins = ids("bos_token_id"), ends = ids("eos_token_id");
  const auto in_vocabulary = [&](const std::vector<int64_t>& all) {
    return std::ranges::all_of(all, [&](int64_t id) { return id >= 0 && id < model.vocab_size; });
  };
  if (!in_vocabulary(ids("pad_token_id"))) own["pad_token_id"] = "null";
  const int64_t end = tokenizer.end_of_text();
  const bool known = knows_tokens(o, tokenizer, model) && end < model.vocab_size;
  const bool same_end = o.tokenizer == "auto" || !known || std::ranges::find(ends, end) != ends.end();
  if (!ends.empty() && in_vocabulary(begins) && in_vocabulary(ends) && same_end) return own;
  if (known) {
    const std::vector<int32_t> prefix = tokenizer.prefix();
    own["bos_token_id"] = formatted("{}", prefix[0] < model.vocab_size ? prefix[0] : end);
    own["eos_token_id"] = formatted("{}", end);
  } else if (!in_vocabulary(ends) || !knows_special_tokens(model)) {
    own["bos_token_id"] = own["eos_token_id"] = "null";
  }
  return own;
}

// If no tokenizer gives the end of text, it is that of a known vocabulary of this size.
inline int32_t choose_document_begin(const char* option, const Options& o, const Tokenizer& tokenizer,
                                     const ModelConfig& model) {
  const bool guessed = !knows_tokens(o, tokenizer, model);
  const std::optional<int64_t> known = end_of_text_of(model.vocab_size);
  CHECK(!guessed || known, "{}: the end of text of a vocabulary of {} is unknown: give the data's --tokenizer", option,
        model.vocab_size);
  const int64_t end = guessed ? *known : tokenizer.end_of_text();
  CHECK(end < model.vocab_size, "{}: the end of text of --tokenizer {}, {}, is outside the model's vocabulary of {}",
        option, o.tokenizer, end, model.vocab_size);
  return static_cast<int32_t>(end);
}

// The prompt as tokens: the tokenizer's prefix, as far as the vocabulary has it, then the text; token 0 if both are
// empty. Rejects a prompt that the tokenizer or the model cannot take.
inline std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, const std::string& prompt,
                                          const ModelConfig& model, const std::string& where = "--prompt") {
  std::vector<int32_t> tokens;
  for (int32_t token : tokenizer.prefix())
    if (token < model.vocab_size) tokens.push_back(token);
  for (int32_t token : tokenizer.encode(prompt, where)) tokens.push_back(token);
  if (tokens.empty()) tokens.push_back(0);
  for (int32_t token : tokens)
    CHECK(token < model.vocab_size,
          "{}: token {} is outside the model's vocabulary of {}; use a --tokenizer that fits the model", where, token,
          model.vocab_size);
  return tokens;
}

}  // namespace llmc
