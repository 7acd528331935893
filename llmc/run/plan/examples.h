// examples.h: --plan-examples: published runs, planned as a user's are, beside what was measured. The machines'
// constants are fitted on the first table alone.
#pragma once
#include "core/json.h"
#include "model/layout_faults.h"
#include "model/presets.h"
#include "run/plan/machines.h"
#include "run/plan/report_time.h"

namespace llmc {

// A run of a paper: a GPT of this shape with a vocabulary of 51,200 unless a preset is named.
struct PublishedRun {
  std::string name;
  int64_t heads = 0, width = 0, layers = 0;
  int tp = 1, pp = 1;
  int64_t batch = 1;                // sequences of a micro-batch
  int chunks = 1;                   // of each stage
  int64_t gpus = 0, sequences = 0;  // of a step
  double measured = 0;              // seconds of a step, or TFLOP/s per GPU
  int stage = 0;                    // of ZeRO
  Recompute recompute = Recompute::block;
  bool sequence_parallel = false;
  int cp = 1;
  int64_t T = 2048;
  std::string preset = {};
  ModelOverrides overrides = {};
  double tokens = 0, gpu_hours = 0;  // of the whole training, if published
  int ep = 1;
  Schedule schedule = Schedule::interleaved;  // of several chunks a stage
  std::optional<Experts> experts = {};

  double planned_gpu_hours(double step_seconds) const {
    return tokens / static_cast<double>(sequences * T) * step_seconds * static_cast<double>(gpus) / 3600;
  }
};
enum class Measured : uint8_t { seconds, tflops };
struct PublishedTable {
  std::string title, machine;  // JSON
  std::vector<PublishedRun> runs;
  std::string why;  // planned and measured times differ
  Measured measured = Measured::seconds;
  bool shown_only = false;  // the run computed something else than its plan: its error is none of the model of time
};

namespace detail {

inline PublishedRun selective(PublishedRun run, double seconds) {
  run.measured = seconds;
  run.recompute = Recompute::none;
  run.sequence_parallel = true;
  return run;
}
// Llama 3 405B on H100s; its first and last chunk have no layer.
inline PublishedRun llama3(int64_t gpus, int cp, int64_t T, double tflops) {
  constexpr int64_t tokens = 1 << 24;
  PublishedRun run{.name = formatted("T {}", T),
                   .tp = 8,
                   .pp = 16,
                   .chunks = 8,
                   .gpus = gpus,
                   .sequences = tokens / T,
                   .measured = tflops,
                   .stage = 1,
                   .recompute = Recompute::none,
                   .sequence_parallel = true,
                   .cp = cp,
                   .T = T,
                   .preset = "llama3:405B"};
  if (gpus == 16384 && cp == 1) run.tokens = 15.6e12, run.gpu_hours = 30.84e6;  // most of the training ran like this
  return run;
}

// DeepSeek-V3 (671B) as near as this program comes: heads that share keys and values stand for latent attention,
// softmax scores for sigmoids, zb-v for DualPipe, bf16 for fp8, and there is no second token to predict. The paper
// names 2,048 GPUs, pp 16, ep 64, ZeRO-1, 15,360 sequences of 4,096 tokens, and 180,000 hours per trillion tokens.
inline PublishedRun deepseek_v3() {
  constexpr double tokens = 14.8e12, hours = 2.664e6;  // 2.788M with longer sequences and what followed
  PublishedRun run{
      .name = "V3 (671B)",
      .pp = 16,
      .chunks = 2,
      .gpus = 2048,
      .sequences = 15360,
      .stage = 1,
      .recompute = Recompute::activation,
      .T = 4096,
      .preset = "qwen3:235B-A22B",
      .overrides = {61, 128, 8, 7168, 18432, 129280},
      .tokens = tokens,
      .gpu_hours = hours,
      .ep = 64,
      .schedule = Schedule::zb_v,
      .experts = Experts{
          .count = 256, .per_token = 8, .width = 2048, .shared = 2048, .normalised = true, .dense_layers = {0, 1, 2}}};
  run.measured = hours * 3600 / static_cast<double>(run.gpus) / (tokens / static_cast<double>(run.sequences * run.T));
  return run;
}

inline std::vector<PublishedTable> published_tables() {
  // Before flash attention, a kernel wrote the scores and read them again: 13 bytes per score in fp16, with dropout.
  const std::string selene = R"({"like": "a100x8", "score_bytes": 13})";
  const PublishedRun small{"22B", 64, 6144, 48, 8, 1, 4, 1, 8, 4, 1.42},
      gpt3{"175B", 96, 12288, 96, 8, 8, 1, 3, 64, 64, 18.13},
      large{"530B", 128, 20480, 105, 8, 35, 1, 3, 280, 280, 49.05},
      largest{"1T", 160, 25600, 128, 8, 64, 1, 1, 512, 512, 94.42};
  return {
      {"Megatron-LM (Narayanan et al. 2021, arXiv 2104.04473), table 1: the fit",
       selene,
       {{"1.7B", 24, 2304, 24, 1, 1, 4, 1, 32, 512, 3.53},
        {"3.6B", 32, 3072, 30, 2, 1, 4, 1, 64, 512, 3.70},
        {"7.5B", 32, 4096, 36, 4, 1, 4, 1, 128, 512, 3.70},
        {"18.4B", 48, 6144, 40, 8, 1, 4, 1, 256, 1024, 9.40},
        {"39.1B", 64, 8192, 48, 8, 2, 2, 2, 512, 1536, 14.45},
        {"76.1B", 80, 10240, 60, 8, 4, 2, 3, 1024, 1792, 16.06},
        {"145.6B", 96, 12288, 80, 8, 8, 2, 2, 1536, 2304, 24.82},
        {"310.1B", 128, 16384, 96, 8, 16, 1, 3, 1920, 2160, 37.61},
        {"529.6B", 128, 20480, 105, 8, 35, 1, 3, 2520, 2520, 54.1},
        {"1008B", 160, 25600, 128, 8, 64, 1, 2, 3072, 3072, 102.6}},
       "the paper names neither micro-batches nor chunks, which are guesses; a plan has no dropout, and hides the "
       "reduction of gradients behind the last backward"},
      {"the same paper, table 2: tensor and pipeline parallelism",
       selene,
       {{"174.6B", 96, 12288, 96, 8, 12, 1, 1, 384, 1536, 153},
        {"174.6B", 96, 12288, 96, 8, 12, 1, 1, 768, 1536, 149},
        {"174.6B", 96, 12288, 96, 8, 12, 1, 1, 1536, 1536, 141},
        {"529.6B", 128, 20480, 105, 8, 35, 1, 1, 560, 2240, 171},
        {"529.6B", 128, 20480, 105, 8, 35, 1, 1, 1120, 2240, 167},
        {"529.6B", 128, 20480, 105, 8, 35, 1, 1, 2240, 2240, 159}},
       "as above",
       Measured::tflops},
      {"the same table: ZeRO-3 alone, through one card of each server",
       R"({"like": "a100x8", "score_bytes": 13, "rails": false})",
       {{"174.6B", 96, 12288, 96, 1, 1, 4, 1, 384, 1536, 144, 3},
        {"174.6B", 96, 12288, 96, 1, 1, 2, 1, 768, 1536, 88, 3},
        {"174.6B", 96, 12288, 96, 1, 1, 1, 1, 1536, 1536, 44, 3},
        {"529.6B", 128, 20480, 105, 1, 1, 4, 1, 640, 2560, 138, 3},
        {"529.6B", 128, 20480, 105, 1, 1, 2, 1, 1120, 2240, 98, 3},
        {"529.6B", 128, 20480, 105, 1, 1, 1, 1, 2240, 2240, 48, 3}},
       "DeepSpeed's gathers of 2021 reached the rate of one card per server, and hid less behind computation where "
       "that takes as long; NCCL's rings use all cards (rails: true), by which the last step would take a quarter",
       Measured::tflops},
      {"Korthikanti et al. 2022 (arXiv 2205.05198), table 5: blocks recomputed",
       selene,
       {small, gpt3, large, largest},
       "as above"},
      {"the same, with sequence parallelism and attention recomputed",
       selene,
       {selective(small, 1.10), selective(gpt3, 13.75), selective(large, 37.83), selective(largest, 71.49)},
       "Megatron-LM hid communication here that is exposed in a plan, and its kernels were faster than those of 2021"},
      {"Llama 3 405B (arXiv 2407.21783), table 4",
       R"({"like": "h100x8"})",
       {llama3(8192, 1, 8192, 430), llama3(16384, 1, 8192, 400), llama3(16384, 16, 131072, 380)},
       "the paper does not say how it counts attention, half of the work at 131,072 tokens: in full is assumed",
       Measured::tflops},
      {"Llama 1 65B (arXiv 2302.13971), 380 tokens/s per GPU",
       R"({"like": "a100x8"})",
       {{.name = "65B",
         .gpus = 2048,
         .sequences = 2048,
         .measured = 2048 / 380.0,
         .stage = 3,
         .recompute = Recompute::norm,
         .preset = "llama2:70B",
         .overrides = {{}, {}, 64, {}, 22016, {}},
         .tokens = 1.4e12,
         .gpu_hours = 1022362}},
       "how the ranks divided the model is not published"},
      {"DeepSeek-V3 (arXiv 2412.19437), 2.788M H800 hours in all, on the nearest model that this program has, in bf16",
       R"({"like": "h100x8", "links": [{"ranks": 8, "gb_per_s": 200, "share": 0.8, "us": 1.9},
                                      {"gb_per_s": 50, "share": 0.85, "us": 4}]})",
       {deepseek_v3()},
       "to plan the run itself would need latent attention, products in fp8, a sigmoid router with node-limited "
       "choices, multi-token prediction, and DualPipe, which hides the exchange of rows behind another micro-batch",
       Measured::seconds,
       true},
  };
}

inline StepConfig step_of(const PublishedRun& run) {
  StepConfig step{.model = resolve_model(run.preset.empty() ? "gpt2:124M" : run.preset, run.overrides),
                  .precision = DType::bf16,
                  .batch = {run.batch, run.T},
                  .recompute = run.recompute,
                  .generates = false};
  ModelConfig& m = step.model;
  if (run.preset.empty()) {
    m.n_layer = run.layers, m.n_head = m.n_kv_head = run.heads, m.n_embd = run.width, m.n_ffn = 4 * run.width;
    m.head_size = run.width / run.heads, m.vocab_size = 51200, m.n_positions = run.T;
  }
  if (run.experts) m.experts = *run.experts;
  const int readers = static_cast<int>(run.gpus) / (run.tp * run.pp * run.cp);
  step.layout = {.zero = {.shards = readers * run.cp},
                 .tensor = tensor_parallel(m, run.tp, run.sequence_parallel),
                 .context = {.ranks = run.cp},
                 .expert = expert_parallel(m, run.ep),
                 .pipeline = {.schedule = run.chunks > 1 ? run.schedule : Schedule::one_f_one_b,
                              .stages = run.pp,
                              .chunks_per_stage = run.chunks}};
  step.layout.zero.set_stage(run.stage);
  if (const int64_t chunks = run.pp * run.chunks; run.pp > 1 && chunks > m.n_layer) {
    step.layout.pipeline.layers.assign(static_cast<size_t>(chunks), 1);  // Llama 3's first and last chunk have none
    step.layout.pipeline.layers.front() = step.layout.pipeline.layers.back() = 0;
  }
  step.micro_batches = run.sequences / readers / run.batch;
  layout_faults(step.layout, m).refuse();
  return step;
}

// The flops of a step as these papers count them: attention in full, and what is recomputed, but for the logits.
inline double published_flops(const StepConfig& step) {
  const ModelConfig& m = step.model;
  const double of_token = training_flops_per_token(m, step.batch.T) +
                          6.0 * static_cast<double>(m.n_layer * m.q_size() * step.batch.T),
               again = step.recompute == Recompute::block
                           ? of_token / 3 - 2.0 * static_cast<double>(m.vocab_size * m.n_embd)
                           : 0;
  return (of_token + again) * static_cast<double>(step.tokens());
}

}  // namespace detail

// A run, planned: seconds of a step.
struct PlannedRun {
  double measured, planned;
  int64_t bytes;  // of the rank that needs most
  double error() const { return 100 * (planned / measured - 1); }
};
inline PlannedRun plan_published(const PublishedTable& table, const PublishedRun& run) {
  Device device{DeviceKind::cuda};
  device.elsewhere = true;
  device.collectives = Collectives::library;
  const nlohmann::json machine = detail::whole_machine(table.title, parse_json(table.machine, table.title));
  device.machine =
      std::make_shared<const Machine>(detail::MachineReader(table.title, machine).read(DType::bf16, false));
  const StepConfig step = detail::step_of(run);
  const Plan plan = make_plan(step, device);
  const double measured = table.measured == Measured::seconds
                              ? run.measured
                              : detail::published_flops(step) / (run.measured * 1e12 * static_cast<double>(run.gpus));
  return {measured, detail::step_time(step, plan, device)->step(), plan.total_bytes()};
}

// Median and largest of the absolute errors.
struct Errors {
  double median, largest;
};
inline Errors errors_of(std::vector<double> errors) {
  for (double& e : errors) e = std::abs(e);
  std::ranges::sort(errors);
  const size_t n = errors.size();
  return {(errors[(n - 1) / 2] + errors[n / 2]) / 2, errors.back()};
}

// Bytes of weights, gradients and AdamW's state of each of N ranks, for each parameter (ZeRO, Rajbhandari et al. 2020,
// table 1). gradient: bytes of one; 2 in the paper, 4 here
inline double state_bytes(int stage, double N, double gradient) {
  const double optimizer = 12;
  return stage == 1   ? 2 + gradient + optimizer / N
         : stage == 2 ? 2 + (gradient + optimizer) / N
                      : (2 + gradient + optimizer) / N;
}
inline Rows zero_rows() {
  Rows rows;
  for (const auto& [name, parameters] : {std::pair{"7.5B", 7.5}, std::pair{"128B", 128.0}, std::pair{"1T", 1000.0}})
    for (const double N : {4.0, 16.0, 64.0, 256.0, 1024.0}) {
      std::string text;
      for (const double gradient : {2.0, 4.0}) {
        text += gradient == 2 ? "the paper's, of 2-byte gradients:" : "; this trainer's, of 4:";
        for (const int stage : {1, 2, 3}) text += formatted(" {:7.1f}", parameters * state_bytes(stage, N, gradient));
      }
      rows.emplace_back(formatted("{} on {} ranks", name, static_cast<int>(N)), text);
    }
  return rows;
}

// What hybrid sharding saves between servers (Zhao et al. 2023, PyTorch FSDP, section 3.2.2): 405B on 24,576 ranks, in
// one group and in 3,072 groups of 8. In numbers of a model of Psi parameters, P ranks of a group and Q groups: a rank
// gathers the weights twice and reduces gradients once, 3 (P - 1) / P Psi within its group; the groups all-reduce their
// shards, 2 (Q - 1) / Q Psi / P of a rank, so that a whole group sends Psi once to reduce and once to gather.
struct Sharding {
  std::string name;
  double within, between;  // numbers that a rank sends in its group and between groups, over Psi: counted by a plan
  double law_within, law_between;
};
inline std::vector<Sharding> hybrid_sharding() {
  std::vector<Sharding> all;
  for (const int replicas : {1, 3072}) {
    StepConfig step{.model = resolve_model("llama3:405B", {}),
                    .precision = DType::bf16,
                    .batch = {1, 8192},
                    .recompute = Recompute::block,
                    .generates = false};
    const int shards = 24576 / replicas;
    step.layout.zero.shards = shards;
    step.layout.zero.replicas = replicas;
    step.layout.zero.set_stage(3);
    const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
    const double Psi = static_cast<double>(count_parameters(parameter_table(step.model)));
    const double P = shards, Q = replicas;
    Sharding s{formatted("{} group{} of {}", replicas, replicas == 1 ? "" : "s", shards), 0, 0, 3 * (P - 1) / P,
               2 * (Q - 1) / Q / P};
    for (const auto& [group, bytes] : plan.step_traffic) {
      const double of_rank = static_cast<double>(bytes) / Psi;
      if (group == "weights") s.within += of_rank / 2;
      if (group == "gradients") s.within += of_rank / 4;
      if (group == "replicas") s.between += of_rank / 4;
    }
    all.push_back(s);
  }
  return all;
}
inline Rows hybrid_rows() {
  Rows rows;
  for (const Sharding& s : hybrid_sharding())
    rows.emplace_back(s.name, formatted("within a group {:.4f} Psi of each rank (3 (P - 1) / P = {:.4f}), between "
                                        "groups {:.4f} (2 (Q - 1) / (Q P) = {:.4f})",
                                        s.within, s.law_within, s.between, s.law_between));
  rows.emplace_back("between servers",
                    "all ranks of a server of 8 together send 3 Psi in one group, whose rings leave the server at one "
                    "rank each, and 2 Psi with a group in each server: once to reduce and once to gather");
  return rows;
}

// Prints each published run with its planned time, and the errors of each table.
inline void report_examples(Log& log) {
  for (const PublishedTable& table : detail::published_tables()) {
    Rows rows;
    std::vector<double> errors;
    for (const PublishedRun& run : table.runs) {
      const PlannedRun r = plan_published(table, run);
      errors.push_back(r.error());
      rows.emplace_back(
          run.name,
          formatted("{:6} GPUs, tp {}, pp {:2}, cp {:2}: measured {:8.2f} s, planned {:8.2f} s, {:6.1f}%; {:10}",
                    run.gpus, run.tp, run.pp, run.cp, r.measured, r.planned, r.error(), human_bytes(r.bytes)));
      if (run.tokens > 0) {
        const double planned = run.planned_gpu_hours(r.planned);
        rows.emplace_back(
            "",
            formatted("all of {:.1f} trillion tokens: published {:.2f} million GPU-hours, planned {:.2f}, {:6.1f}%",
                      run.tokens * 1e-12, run.gpu_hours * 1e-6, planned * 1e-6, 100 * (planned / run.gpu_hours - 1)));
      }
    }
    const Errors e = errors_of(errors);
    rows.emplace_back(table.shown_only ? "not alike" : "error",
                      table.shown_only
                          ? table.why
                          : formatted("median {:.1f}%, largest {:.1f}%: {}", e.median, e.largest, table.why));
    log.table(table.title, rows);
  }
  log.table("ZeRO (Rajbhandari et al. 2020), table 1: GB of state of each rank in stages 1, 2, 3", zero_rows());
  log.table("hybrid sharding: numbers that a rank of 24,576 sends in a step of 405B, in parameters Psi", hybrid_rows());
}

}  // namespace llmc
