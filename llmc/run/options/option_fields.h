// option_fields.h: the values of all options (options.h), with their defaults; and the place of a process in its job.
#pragma once
#include "comm/layout.h"
#include "data/packing.h"
#include "data/token_format.h"
#include "model/activations.h"
#include "model/parametrization.h"
#include "ops/cpu/isa.h"
#include "ops/optimizers.h"
#include "run/options/option_values.h"
#include "train/lr_schedule.h"

namespace llmc {

// This process among those of the job, and its ranks among all ranks. A process alone has all ranks.
struct Place {
  int64_t process = 0, processes = 1, hosts = 1;
  int64_t local_ranks = 1;                      // of each process
  int64_t ranks_on_host = 1, rank_on_host = 0;  // ranks on this host; this process's first among them
  int64_t sharers = 1;                          // processes that may use the same processors
  bool own_gpus = false;                        // the launcher shows each process GPUs of its own
  bool by_mpi = false;                          // MPI has started the processes
  std::string started_by = {};
  std::vector<std::string> host_of_process = {};

  int64_t first_rank() const { return process * local_ranks; }
};

inline constexpr const char* local_machine = "local";  // for --machine: this one

struct Options {
  std::string train_data, val_data;
  TextList data, val;  // NAME=PATTERN:WEIGHT[:MAX_EPOCHS]; NAME=PATTERN
  std::string stages;  // a file
  DataFormat data_format = DataFormat::automatic;
  Packing pack = Packing::stream;
  DataChanged data_changed = DataChanged::refuse;
  std::optional<bool> shuffle;  // none: as before on resume, otherwise true
  bool shuffled() const { return shuffle.value_or(true); }
  bool mask_documents = false;
  std::string tokenizer = "auto";

  std::string model = "d12";
  bool from_scratch = false;
  std::optional<int64_t> n_layer, n_head, n_kv_head, n_embd, n_ffn, vocab_size;
  std::optional<double> init_std, rope_theta, rope_factor;  // none: the model's

  int64_t batch_size = 4, seq_len = 1024;
  std::optional<int64_t> total_batch_size;

  std::optional<int64_t> max_steps;  // none of the three: one epoch
  std::optional<TokenCount> tokens;
  std::optional<double> epochs;
  std::string out_dir = "out/run";
  std::string resume = "auto", branch_from;
  bool restart = false;
  int64_t log_every = 1;
  std::optional<double> time_limit;  // minutes
  int64_t seed = 42;
  bool overfit_batch = false;

  Optimizer optimizer = Optimizer::adamw;
  double lr = 3e-4;
  int64_t warmup_steps = 0;
  std::optional<TokenCount> warmup_tokens;  // instead
  LrShape lr_schedule = LrShape::cosine;
  std::optional<int64_t> decay_steps;      // of wsd; none: the last fifth
  std::optional<TokenCount> decay_tokens;  // instead
  double final_lr_frac = 0, weight_decay = 0.1, beta1 = 0.9, adam_eps = 1e-8, grad_clip = 1;
  std::optional<double> beta2;  // none: the optimizer's, if it has one
  std::optional<double> beta2_in_use() const { return beta2 ? beta2 : rule_of(optimizer).usual_beta2; }
  std::optional<TokenCount> weight_decay_tokens;  // instead of weight_decay
  OnOff decay_embeddings = OnOff::on;
  double z_loss = 0;
  std::optional<double> ema;  // none: no average of the weights
  bool noise_scale = false;
  std::optional<double> embed_lr, head_lr, scalar_lr;  // none: --lr
  NewtonSchulz muon_ns = NewtonSchulz::quintic;
  MuonScale muon_scale = MuonScale::rms;
  HeadGroups muon_heads = HeadGroups::together;
  MuonRows muon_rows = MuonRows::plain;
  MuonProducts muon_products = MuonProducts::automatic;
  double muon_momentum = 0.95;
  bool cautious_decay = false;
  std::optional<double> qk_clip;  // none: logits of any size
  Parametrization parametrization = Parametrization::standard;
  std::optional<int64_t> base_width, base_depth, base_head_size;
  std::optional<double> skip_loss_z, skip_grad_z;  // none: no loss or norm is an outlier
  std::optional<OnSpike> on_spike;                 // none: outliers are skipped, what is not finite stops the run
  bool rolls_back() const { return on_spike == OnSpike::rollback; }
  int64_t max_rollbacks = 3;

  int64_t val_every = 250;
  std::optional<int64_t> val_steps;  // none: usual_val_steps, or with --evaluate all of the data
  std::string eval_choices;
  int64_t sample_every = 0, sample_tokens = 256;
  std::string prompt, prompt_file;
  int64_t num_samples = 1;
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;

  int64_t checkpoint_every = 0, keep_checkpoints = 0, keep_every = 0;
  std::optional<double> checkpoint_minutes;  // none: 15; with pipedream, never
  double minutes_between_checkpoints() const {
    return checkpoint_minutes.value_or(schedule == Schedule::pipedream ? 0 : 15);
  }
  bool keep_best = false;
  OnFailure checkpoint_errors = OnFailure::retry;
  CheckpointMode checkpoint_mode = CheckpointMode::async;
  std::string checkpoint_local;
  int64_t checkpoint_local_every = 0, checkpoint_local_keep = 2;
  OnOff checkpoint_local_copies = OnOff::on;
  int64_t check_replicas = 0, verify_updates = 0;
  bool check_devices = false;
  WeightType dtype = WeightType::fp32;
  Operands products = Operands::as_stored;
  SkippedBlocks fp8_skip = {};
  RecomputeChoice recompute = {};
  Offload offload = {};
  std::string offload_dir;
  OffloadUpdate offload_update = OffloadUpdate::device;
  int64_t head_chunks = 0;
  MasterWeights master_weights = MasterWeights::fp32;
  MomentType moment1_dtype = MomentType::fp32, moment2_dtype = MomentType::fp32;
  std::optional<double> memory_limit;  // GiB; none: what the machine has
  Schedule schedule = Schedule::one_f_one_b;
  std::string token_slices = "1";
  int64_t pp = 1;
  std::optional<int64_t> pp_chunks;  // none: the fewest that --schedule has
  std::string pp_layout = "even";
  int64_t local_ranks = 0, zero_stage = 0, dp_replicate = 1, tp = 1, cp = 1, ep = 1;
  OnOff sequence_parallel = OnOff::on;
  ContextAttention cp_attention = ContextAttention::ring;
  bool tp_overlap = false;
  DpSync dp_sync = DpSync::all_reduce;
  GradReduceChoice grad_reduce = GradReduceChoice::automatic;
  WeightType reduce_dtype = WeightType::fp32;
  GatherType gather_dtype = GatherType::dtype;
  std::optional<double> moe_aux_loss;  // none: as transformers would for this config.json
  double moe_z_loss = 0, moe_bias_rate = 0;
  Dispatch moe_dispatch = Dispatch::dropless;
  std::optional<double> moe_capacity_factor;  // with capacity
  double capacity_factor() const { return moe_capacity_factor.value_or(1.25); }
  double moe_imbalance = 1;
  DeviceChoice device = DeviceChoice::automatic;
  CommChoice comm = CommChoice::automatic;
  GpuAttention attention = GpuAttention::own;
  GpuEpilogue gelu = GpuEpilogue::own, residual = GpuEpilogue::own;
  bool tf32 = false, tune_matmul = false;
  OnOff cuda_graphs = OnOff::on;
  std::optional<double> peak_tflops;
  int64_t log_gpu_every = 0, threads = 0;
  std::string cpu_isa = "auto";
  std::optional<int64_t> rank, world_size;
  std::string rendezvous;
  double init_timeout = 600, comm_timeout = 300;  // seconds
  bool spare = false;
  double spare_wait = 30;  // seconds
  std::string tokenize, tokenize_out, tokenize_field = "text";
  std::string average;  // directories, with commas between them
  TokenizeSplit tokenize_split = TokenizeSplit::train;
  int64_t shard_size = 100'000'000;
  bool evaluate = false, generate = false, interactive = false, plan = false, selftest = false, verify_data = false,
       profile = false;
  std::string trace;                  // a file; empty: none
  std::optional<int64_t> trace_step;  // of this start; none: usually the third
  SelftestLayouts selftest_layouts = SelftestLayouts::pairs;
  std::optional<double> selftest_minutes;
  std::string selftest_draws;
  bool plan_auto = false, plan_examples = false;
  std::optional<int64_t> plan_ranks;
  std::string machine;                    // to plan for; empty: this one
  std::optional<double> price;            // of a GPU-hour
  std::string coord_check, coord_depths;  // widths, depths; empty: none
  bool print_schedule = false, print_stages = false, json = false;
  std::string print_samples;
  std::optional<int64_t> micro_batches;  // to draw; none: twice --pp

  // Not options, but derived from them, the model and the launcher:
  double usual_aux_loss = 0;      // the default of --moe-aux-loss
  int64_t preset_vocabulary = 0;  // the preset's, if --vocab-size comes from the tokenizer; 0: it does not
  int64_t ranks = 1;              // of all processes
  Place place;
  // Where a --config file sets an option, unless the command line does: {"--lr", "run.ini:3"}.
  std::map<std::string, std::string> config_lines;
  // The stage of --stages whose options these are: 'stage "b" of st.toml'.
  struct Stage {
    std::string name;
    bool ramps;  // sizes of its steps follow from a ramp
  };
  std::optional<Stage> stage;
  std::vector<std::string> unused;    // options of --config files that the mode does not use: they have their defaults
  std::vector<std::string> repeated;  // options given more than once that take the files of one set: the last counts
};

}  // namespace llmc
