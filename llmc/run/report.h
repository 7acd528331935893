// report.h: what the user sees before and after a run: the header (machine, model, data, memory, batch arithmetic) and
// the summary with the exact next commands.
#pragma once
#if __has_include("build_info.h")
#include "build_info.h"  // written by the Makefile
#endif
#include <unistd.h>

#include <filesystem>
#include <string>
#include <tuple>

#include "core/host_name.h"
#include "core/log.h"
#include "data/dataloader.h"
#include "dist/world.h"
#include "model/hf_config.h"
#include "run/options/print.h"
#include "run/peak.h"
#include "run/remedy.h"
#include "run/report_ranks.h"
#include "text/tokenizer.h"

#ifndef TRAIN_GPT_GIT_HASH
#define TRAIN_GPT_GIT_HASH "unknown"
#define TRAIN_GPT_COMPILER "unknown compiler"
#define TRAIN_GPT_FLAGS ""
#endif

namespace llmc {

inline std::string version_text() {
  return formatted("train_gpt {}\ncompiler: {}\nflags: {}\nmatmul: {}\ndevices: {}\nprocesses: TCP, {}",
                   TRAIN_GPT_GIT_HASH, TRAIN_GPT_COMPILER, TRAIN_GPT_FLAGS, matmul_library({}),
                   built_for_gpus ? formatted("cpu, cuda ({})", nccl_version()) : std::string("cpu"), mpi_version());
}

// The device: "NVIDIA H200 (sm_90, 139.8 GiB)".
inline std::string describe(const Device& device) {
  if (device.computes_as() != DeviceKind::cuda)
    return formatted("{}, {} thread{}", processor_name(), device.threads, device.threads == 1 ? "" : "s");
  if (is_gpu_elsewhere(device)) return "a GPU that is not in this machine";
  const GpuInfo gpu = gpu_info(device.gpu);
  return formatted("GPU {}: {} (sm_{}{}), {}, {}", device.gpu, gpu.name, gpu.major, gpu.minor,
                   human_bytes(gpu.total_bytes), gpu.software);
}

// Its datasheet peaks: "989.5 TFLOP/s of bf16, 1979.0 of fp8, dense; 4800.0 GB/s of memory".
inline std::string describe(const GpuPeaks& chip) {
  const auto number = [](const std::optional<double>& n) { return n ? formatted("{:.1f}", *n) : std::string("n/a"); };
  return formatted("{} TFLOP/s of bf16, {} of fp8, dense; {} GB/s of memory", number(chip.bf16), number(chip.fp8),
                   number(chip.bandwidth));
}

using Rows = std::vector<std::pair<std::string, std::string>>;

namespace detail {

inline std::string layout_text(const StepConfig& step) {
  const ZeroConfig& zero = step.zero;
  const TensorParallel& tensor = step.tensor;
  if (step.ranks() == 1) return "1 rank";
  std::string text;
  if (tensor.ranks > 1)
    text = formatted("{} tensor-parallel ranks{}{}", tensor.ranks, tensor.sequence ? " with sequence parallelism" : "",
                     tensor.overlap ? ", overlapped" : "");
  if (step.context.ranks > 1)
    text = formatted("{} context-parallel {}, {} attention", step.context.ranks,
                     text.empty() ? "ranks" : "groups of " + text, step.context.attention);
  if (step.stages > 1) {
    std::vector<size_t> layers(static_cast<size_t>(step.stages));
    const std::vector<Chunk> chunks = step.model_chunks();
    for (size_t c = 0; c < chunks.size(); ++c)
      layers[static_cast<size_t>(step.pipeline().stage_of(static_cast<int>(c)))] += chunks[c].layers.size();
    text = formatted("{} stages of {} layers, {}{}{}{}", step.stages, layers, step.schedule,
                     step.asynchronous() ? formatted(" with up to {} versions of weights", step.stages) : "",
                     step.chunks > step.stages ? formatted(" in {} chunks", step.chunks / step.stages) : "",
                     text.empty() ? "" : ", each " + text);
  }
  if (step.zero.ranks() == 1) return text;
  const std::string sharding =
      formatted("{} replica(s) x {} shard(s){}, ZeRO stage {}, gradients reduced every {}{}", zero.replicas,
                zero.shards, step.context.ranks > 1 && step.readers() > zero.replicas ? " of shard x cp" : "",
                zero.stage, zero.grad_reduce == GradReduce::step ? "step" : "micro-batch",
                zero.sync == DpSync::all_reduce ? "" : formatted(", {}", zero.sync));
  if (step.readers() == 1) return text + ": " + sharding;
  return formatted("{} data-parallel {}: {}", step.readers(), text.empty() ? "ranks" : "groups of " + text, sharding);
}

// The traffic of every --dp-sync beside that of the one chosen, where a run has the choice.
inline void report_links(Log& log, const StepConfig& step) {
  const ZeroConfig& zero = step.zero;
  if (zero.ranks() == 1 || zero.stage > 0 || zero.replicas > 1 || step.ranks() > step.readers()) return;
  int64_t elements = 0;
  for (const UnitSpec& unit : parameter_table(step.model)) elements += UnitLayout(unit, zero.ranks()).size;
  const int64_t R = zero.grad_reduce == GradReduce::step ? 1 : step.micro_batches,
                G = elements * size_of(accumulator_of(step.dtype)), W = elements * size_of(step.dtype);
  Rows rows = {{"G", formatted("{} of gradients, R = {} reduction(s)", human_bytes(G), R)},
               {"W", formatted("{} of weights", human_bytes(W))}};
  for (const LinkTraffic& link : link_traffic(zero.ranks(), G * R, W))
    rows.emplace_back(name_of(link.sync), formatted("{:-13} out {:-11} {:10} | in {:-11} {:10}{}", link.of,
                                                    link.out_law, human_bytes(link.out), link.in_law,
                                                    human_bytes(link.in), link.sync == zero.sync ? " <= chosen" : ""));
  log.table(formatted("traffic of one rank's link per step, by --dp-sync: P = {}, f = (P - 1) / P", zero.ranks()),
            rows);
}

// A run as described by the options alone.
inline Rows run_rows(const Options& o, const StepConfig& step) {
  const ModelConfig& m = step.model;
  return {{"model", formatted("{} ({}): {} layers, {} heads{} of {}, C {}, F {}, vocabulary {}, {} positions", o.model,
                              m.family.model_type, m.n_layer, m.n_head,
                              m.n_kv_head == m.n_head ? "" : formatted(" ({} key-value heads)", m.n_kv_head),
                              m.head_size, m.n_embd, m.n_ffn, m.vocab_size, m.n_positions)},
          {"parameters", formatted("{} ({:.3f} MFLOP per token)", human_count(count_parameters(parameter_table(m))),
                                   training_flops_per_token(m, o.seq_len) * 1e-6)},
          {"numerics", formatted("{}, recompute {}", o.dtype, step.recompute)},
          {"batch", formatted("{} tokens per step = {} micro-batch(es) x {} sequences x {} tokens x {} {}",
                              human_count(step.tokens()), step.micro_batches, o.batch_size, o.seq_len, step.readers(),
                              step.ranks() == step.readers() ? "rank(s)" : "group(s) of ranks")},
          {"layout", layout_text(step)},
          {"optimizer", formatted("AdamW, lr {:.2e} {} after {} warm-up steps, weight decay {}, clip {}", o.lr,
                                  o.lr_schedule, o.warmup_steps, o.weight_decay, o.grad_clip) +
                            (step.asynchronous() ? ", stage by stage by its own norm" : "")}};
}

inline Rows memory_rows(const Plan& plan) {
  Rows rows;
  for (const MemoryLine& line : plan.memory)
    if (line.bytes > 0) rows.emplace_back(line.label, human_bytes(line.bytes));
  int64_t total = 0;
  for (const MemoryLine& line : plan.memory) total += line.bytes;
  rows.emplace_back("total", human_bytes(total));
  return rows;
}

// more: rows for the end of the table.
inline void report_memory(Log& log, const StepConfig& step, const Plan& plan, const Rows& more = {}) {
  Rows rows = memory_rows(plan);
  rows.insert(rows.end(), more.begin(), more.end());
  log.table(step.ranks() == 1 ? "memory"
            : plan.others     ? "memory of rank 0, the server"
            : step.stages > 1 ? "memory per rank of stage 0"
                              : "memory per rank",
            rows);
  if (plan.others) log.table("memory of each other rank", memory_rows(*plan.others));
  for (size_t s = 1; s < plan.stages.size(); ++s)
    log.table(formatted("memory per rank of stage {}", s), memory_rows(*plan.stages[s]));
}

// The time of a planned step, at the rates that its clock assumes. Of servers, which do not run in step with the ranks
// they serve, the clock knows nothing.
inline Rows time_rows(const StepConfig& step, const Plan& plan, const std::optional<Rates>& rates) {
  if (!rates || plan.others) return {};
  const double ms = plan.step_seconds * 1e3, exposed_ms = plan.exposed_seconds * 1e3;
  Rows rows = {{"compute", formatted("{:.3f} ms", ms - exposed_ms)}};
  if (step.ranks() > 1)
    rows.emplace_back("exposed communication", formatted("{:.3f} ms, which no computation hides", exposed_ms));
  rows.emplace_back("step", formatted("{:.3f} ms: {:.0f} tokens/s", ms, static_cast<double>(step.tokens()) / ms * 1e3));
  const std::string link = step.ranks() == 1 ? std::string()
                                             : formatted(", {:.1f} GB/s of link and {:.1f} us for a message",
                                                         rates->link_bytes_per_s * 1e-9, rates->link_latency_s * 1e6);
  rows.emplace_back("rates", formatted("{:.1f} TFLOP/s, {:.1f} GB/s of memory{}; no time for launches",
                                       rates->flops_per_s * 1e-12, rates->bytes_per_s * 1e-9, link));
  return rows;
}

// What a GPU's memory holds besides what is planned.
inline std::string not_counted_text(const StepConfig& step) {
  return formatted("about {} for the CUDA context and cuBLASLt{}{}", human_bytes(gpu_reserve),
                   step.ranks() > 1 ? formatted(", {} for NCCL's buffers", human_bytes(nccl_reserve)) : "",
                   built_for_gpus ? "" : "; some MiB of op scratch, which only a build for GPUs counts");
}

// A notice for those who know d24 and larger from llm.c.
inline std::string depth_notice(const Options& o) {
  for (const auto& [name, channels, heads] : {std::tuple("d24", 1024, 16), {"d36", 1280, 20}, {"d48", 1600, 25}})
    if (o.model == name && !o.n_embd && !o.n_head)
      return formatted("notice: {} has 64 channels per layer here; llm.c's {} is {} --n-embd {} --n-head {}", name,
                       name, name, channels, heads);
  return "";
}

// Ranks are threads of one process: a notice where there are more than one machine takes, or than this one has room
// for.
inline std::string too_many_ranks_notice(const Device& device, int ranks) {
  constexpr int largest_server = 16;  // in GPUs
  const bool elsewhere = is_gpu_elsewhere(device);
  const bool gpus = device.computes_as() == DeviceKind::cuda;
  if (elsewhere ? ranks <= largest_server : gpus ? device.sharers <= 1 : ranks <= available_processors()) return "";
  const std::string shared = elsewhere ? formatted("each with a GPU of its own in one machine")
                             : device.computes_as() == DeviceKind::cuda
                                 ? formatted("which share {} GPU(s)", visible_gpus().count)
                                 : formatted("which share {} processor(s)", available_processors());
  return formatted(
      "notice: {} ranks would be threads of one process, {}; scripts/multi_node/ starts processes on several hosts",
      ranks, shared);
}

}  // namespace detail

// Refuses a run, or a generation, that needs more memory than --memory-limit or the machine allows.
inline void require_memory(const Options& o, const StepConfig& step, const Plan& plan, const Device& device,
                           Begun begun = Begun::no) {
  if (fits(plan, memory_limit(o, device))) return;
  std::string message =
      formatted("{} needs {} and {}",
                step.ranks() == 1 ? "the run"
                : plan.others     ? "the server, rank 0,"
                                  : "each rank",
                human_bytes(plan.total_bytes()), detail::memory_verdict(o, step, plan, device, begun));
  for (const auto& [name, value] : detail::memory_rows(plan)) message += formatted("\n  {:-22} {}", name, value);
  throw Error(message);
}

namespace detail {

// "activations (--tp)": a group of ranks, and the option that makes it, unless all layouts have it.
inline std::string axis_of_group(const std::string& name) {
  const bool tensor = name == "activations" || name == "partial gradients" || name == "head gradients";
  return name == "keys and values" ? "attention (--cp)" : name + (tensor ? " (--tp)" : "");
}

}  // namespace detail

// --plan: prints what a run needs without running it; refused if that exceeds --memory-limit.
inline void report_plan(Log& log, const Options& o, const Device& device, const StepConfig& step, const Plan& plan) {
  log.table("plan for " + describe(device), detail::run_rows(o, step));
  if (const std::string notice = detail::depth_notice(o); !notice.empty()) log.line(notice);
  Rows not_counted;
  if (device.computes_as() == DeviceKind::cuda) not_counted = {{"not counted", detail::not_counted_text(step)}};
  detail::report_memory(log, step, plan, not_counted);
  if (step.ranks() > 1) {
    auto rows = [](const Plan& p) {
      Rows traffic;
      for (const auto& [group, bytes] : p.step_traffic)
        if (bytes > 0) traffic.emplace_back(detail::axis_of_group(group), human_bytes(bytes));
      return traffic;
    };
    // Partial gradients of --tp are reduced by the ranks whose shard they are in.
    const bool alike = !plan.others && step.stages == 1 && (step.tensor.ranks == 1 || step.zero.shards == 1);
    log.table(alike ? "sent per rank and step" : "sent by rank 0 per step", rows(plan));
    if (plan.others) log.table("sent by rank 1 per step", rows(*plan.others));
    detail::report_links(log, step);
  }
  Rows ops;
  double flops = 0, bytes = 0;
  for (const auto& [name, t] : plan.step_ops) {
    if (t.flops == 0 && t.bytes < 1e4) continue;  // a few scalars that ranks exchange
    ops.emplace_back(name, formatted("{:8} calls {:14.3f} GFLOP {:12.3f} GB", t.calls, t.flops * 1e-9, t.bytes * 1e-9));
    flops += t.flops;
    bytes += t.bytes;
  }
  ops.emplace_back("total", formatted("{:8}       {:14.3f} GFLOP {:12.3f} GB", "", flops * 1e-9, bytes * 1e-9));
  log.table(o.ranks == 1                     ? "work per step"
            : plan.others || step.stages > 1 ? "work of rank 0 per step"
                                             : "work per rank and step",
            ops);
  if (const Rows time = detail::time_rows(step, plan, device.rates); !time.empty())
    log.table("time of a step on paper, by the GPU's datasheet", time);
  if (const std::string notice = detail::too_many_ranks_notice(device, step.ranks()); !notice.empty()) log.line(notice);
  const std::string verdict = detail::memory_verdict(o, step, plan, device);
  if (o.memory_limit && !fits(plan, memory_limit(o, device))) throw Error(verdict);
  log.line("=> " + verdict);
}

namespace detail {

// Notices about a tokenizer that is probably not the data's, or not the one that transformers would use.
inline std::vector<std::string> tokenizer_notices(const Options& o, const ModelConfig& model,
                                                  const Tokenizer& tokenizer, const TokenShards* train) {
  if (o.tokenizer == "auto" && dynamic_cast<const ByteTokenizer*>(&tokenizer) &&
      model.vocab_size != ByteTokenizer::vocab_size)
    return {
        formatted("notice: no tokenizer is known for this vocabulary of {}: prompts and samples are taken as bytes; "
                  "name one with --tokenizer",
                  model.vocab_size)};
  std::vector<std::string> notices;
  std::vector<int32_t> sample;
  if (train != nullptr) train->read_sample(0, std::numeric_limits<int64_t>::max(), sample);
  if (!sample.empty() && sample[0] != tokenizer.end_of_text())
    notices.push_back(
        formatted("notice: the training data begin with token {}, not with the tokenizer's end of text, {}: "
                  "were they made with another tokenizer?",
                  sample[0], tokenizer.end_of_text()));
  if (model.family.model_type == std::string("qwen2") && (o.tokenizer != "auto" || model_preset(o.model)))
    notices.push_back(
        "notice: transformers' AutoTokenizer takes the tokenizer of qwen2 checkpoints for Qwen's own, which splits "
        "differently: load it with PreTrainedTokenizerFast");
  return notices;
}

// Notices about data that can be trained on but are probably a mistake.
inline void report_unlikely_data(Log& log, const Options& o, const StepConfig& step, const TokenShards& train,
                                 const TokenShards* val) {
  const int64_t samples = step.tokens() / o.seq_len, V = step.model.vocab_size;
  if (samples > train.samples())
    log.line(formatted("notice: a step takes {} samples but the training data have {}: it uses some more than once",
                       samples, train.samples()));
  int32_t largest = 0;
  std::vector<int32_t> sample;
  constexpr int64_t looked_at = 64;
  for (int64_t i = 0; i < std::min(looked_at, train.samples()); ++i) {
    train.read_sample(i, std::numeric_limits<int64_t>::max(),
                      sample);  // training refuses tokens outside the vocabulary
    largest = std::max(largest, *std::max_element(sample.begin(), sample.end()));
  }
  if (look_like_bytes(largest, V))
    log.line(
        formatted("notice: the first tokens of the training data look like bytes, but the model has a vocabulary of "
                  "{}: for bytes --vocab-size 257 is enough",
                  V));
  if (val == nullptr) return;
  for (const std::string& path : val->paths())
    if (train.has(path)) {
      log.line(formatted("notice: {} is also training data: the validation loss will look too good", path));
      break;
    }
}

}  // namespace detail

inline void report_header(Log& log, const Options& o, const Device& device, Backend backend, const StepConfig& step,
                          int64_t max_steps, const TokenShards& train, const TokenShards* val, const Plan& plan,
                          const Peaks& peaks, std::optional<int32_t> document_begin, const Tokenizer& tokenizer) {
  Rows rows = {
      {"machine", formatted("{}: {}", host_name(), describe(device))},
      {"matmul",
       formatted("{}, {}, peak {:.3f} TFLOP/s measured here", matmul_library(device), o.dtype, peaks.measured * 1e-12)},
      {"MFU", peaks.promised ? formatted("a share of {:.3f} TFLOP/s: {}", *peaks.promised * 1e-12, peaks.source)
                             : formatted("n/a: {}; set it with --peak-tflops", peaks.source)}};
  if (device.kind == DeviceKind::cuda)
    if (const auto chip = gpu_peaks(gpu_info(device.gpu).name)) rows.emplace_back("datasheet", describe(*chip));
  for (auto& row : detail::run_rows(o, step)) rows.push_back(std::move(row));
  rows.emplace_back(
      "steps",
      formatted("{} = {} tokens = {:.2f} epochs", max_steps, human_count(max_steps * step.tokens()),
                static_cast<double>(max_steps * (step.tokens() / o.seq_len)) / static_cast<double>(train.samples())));
  rows.emplace_back("training data", formatted("{}: {} shard(s), {} tokens, {} samples of {}{}", o.train_data,
                                               train.count(), human_count(train.tokens()), human_count(train.samples()),
                                               o.seq_len, o.shuffled() ? ", shuffled" : ", in file order"));
  rows.emplace_back("documents",
                    document_begin
                        ? formatted("masked from each other within a sequence; token {} begins one", *document_begin)
                        : std::string("attend to each other within a sequence"));
  rows.emplace_back("validation data", val == nullptr ? "none"
                                                      : formatted("{}: {} shard(s), {} tokens", o.val_data,
                                                                  val->count(), human_count(val->tokens())));
  rows.emplace_back("output", o.out_dir);
  log.table("train_gpt " TRAIN_GPT_GIT_HASH, rows);
  if (step.ranks() > 1) report_ranks(log, o, device, backend, step.mesh());
  if (step.zero.sync != DpSync::all_reduce) detail::report_links(log, step);
  detail::report_memory(log, step, plan);
  detail::report_unlikely_data(log, o, step, train, val);
  for (const std::string& notice : detail::tokenizer_notices(o, step.model, tokenizer, &train)) log.line(notice);
  if (const std::string notice = detail::depth_notice(o); !notice.empty()) log.line(notice);
  if (device.kind == DeviceKind::cpu && o.place.local_ranks > device.threads)
    log.line(formatted("notice: {} ranks share {} processors: fine for tests and for learning, slower than one rank",
                       o.place.local_ranks, device.threads));
  if (device.kind == DeviceKind::cpu && o.dtype == "bf16" && !cpu::bf16_is_native())
    log.line("notice: this processor or build has no bf16 products: they are widened to fp32, correct but slow");
}

// The time of each op in a rank's training steps, the longest first, and what share of its roof it reached: the time
// that its flops take at the matmul peak, or its bytes at the copy peak, whichever is longer.
inline void report_profile(Log& log, const OpLedger& ops, int64_t steps, const Peaks& roof) {
  std::vector<std::pair<std::string, OpTotals>> sorted(ops.begin(), ops.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  double total = 0;
  for (const auto& [name, t] : sorted) total += t.seconds;
  Rows rows;
  for (const auto& [name, t] : sorted)
    rows.emplace_back(name,
                      formatted("{:8.3f} ms/step {:5.1f}% {:7} calls {:9.1f} GFLOP/s {:7.1f} GB/s {:5.1f}% of roof",
                                t.seconds * 1e3 / static_cast<double>(steps), 100 * t.seconds / total, t.calls / steps,
                                t.flops * 1e-9 / t.seconds, t.bytes * 1e-9 / t.seconds,
                                100 * std::max(t.flops / roof.measured, t.bytes / roof.bandwidth) / t.seconds));
  log.table(formatted("ops per rank; roof: {:.1f} TFLOP/s of matmul, {:.1f} GB/s of a copy, measured here",
                      roof.measured * 1e-12, roof.bandwidth * 1e-9),
            rows);
}

namespace detail {

// "out/run" for "out/run-continued" and "out/run-continued-2".
inline std::string without_continued(const std::string& out) {
  const size_t digits = out.find_last_not_of("0123456789") + 1;
  const bool numbered = digits > 0 && digits < out.size() && out[digits - 1] == '-';
  const std::string name = numbered ? out.substr(0, digits - 1) : out, ending = "-continued";
  return name.ends_with(ending) ? name.substr(0, name.size() - ending.size()) : out;
}

}  // namespace detail

// The next commands, to be pasted where `program` was called: each works as it stands.
inline void report_next_steps(Log& log, const Options& o, const std::string& checkpoint, const std::string& program) {
  Options more = o, made;
  more.model = checkpoint;  // which knows its own shape
  more.from_scratch = false;
  more.n_layer = more.n_head = more.n_kv_head = more.n_embd = more.n_ffn = more.vocab_size = std::nullopt;
  more.resume = Options().resume;
  more.restart = false;
  const std::string out = o.out_dir.substr(0, o.out_dir.find_last_not_of('/') + 1);
  const std::string first = detail::without_continued(out);
  more.out_dir = first + "-continued";
  for (int i = 2; path_exists(more.out_dir); ++i) more.out_dir = formatted("{}-continued-{}", first, i);
  made.generate = true;
  made.model = checkpoint;
  made.dtype = o.dtype;
  made.tokenizer = o.tokenizer;
  made.prompt = o.prompt;
  made.temperature = o.temperature;
  made.top_k = o.top_k;
  made.top_p = o.top_p;
  Rows rows = {{"train further", command_line(more, program)}, {"generate", command_line(made, program)}};
  const std::string plot = (std::filesystem::path(program).parent_path() / "scripts/plot.py").lexically_normal();
  if (path_exists(plot)) rows.emplace_back("plot", formatted("python3 {} {}", shell_word(plot), shell_word(out)));
  log.table("next: train further from these weights (with a new optimizer), generate, plot", rows);
}

}  // namespace llmc
