// describe.h: describes a run in words, from its options: the device, the model, the layout.
#pragma once
#include "core/log.h"
#include "run/length.h"
#include "run/plan/planner.h"
#include "run/rank_device.h"
#include "run/reports/gpu_peaks.h"
#include "run/reports/peak.h"

namespace llmc {

// The device: "NVIDIA H200 (sm_90, 139.8 GiB)".
inline std::string describe(const Device& device) {
  const std::string threads = formatted("{} thread{}", device.threads, device.threads == 1 ? "" : "s");
  if (has_server(device))
    return formatted("{} ({}), {} for each rank", device.machine->name, device.machine->source, threads);
  if (device.computes_as() != DeviceKind::cuda) return formatted("{}, {}", processor_name(), threads);
  if (device.elsewhere) return formatted("{} ({})", device.machine->name, device.machine->source);
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

// "2, 2, 2", or of many numbers "1 (510 times), 2, 0".
inline std::string numbers_text(const std::vector<int64_t>& numbers) {
  std::string text;
  for (size_t i = 0, n; i < numbers.size(); i += n) {
    n = 1;
    while (numbers.size() > 8 && i + n < numbers.size() && numbers[i + n] == numbers[i]) ++n;
    text += formatted("{}{}{}", text.empty() ? "" : ", ", numbers[i], n > 1 ? formatted(" ({} times)", n) : "");
  }
  return text;
}

inline std::string layout_text(const StepConfig& step) {
  const ZeroConfig& zero = step.layout.zero;
  const TensorParallel& tensor = step.layout.tensor;
  if (step.layout.ranks() == 1) return "1 rank";
  std::string text;
  if (tensor.ranks > 1)
    text = formatted("{} tensor-parallel ranks{}{}", tensor.ranks, tensor.sequence ? " with sequence parallelism" : "",
                     tensor.overlap ? ", overlapped" : "");
  if (step.layout.context.ranks > 1)
    text = formatted("{} context-parallel {}, {} attention", step.layout.context.ranks,
                     text.empty() ? "ranks" : "groups of " + text, step.layout.context.attention);
  const PipelineParallel& pipeline = step.layout.pipeline;
  if (pipeline.stages > 1) {
    std::vector<int64_t> layers(static_cast<size_t>(pipeline.stages));
    const std::vector<Chunk> chunks = step.model_chunks();
    for (size_t c = 0; c < chunks.size(); ++c)
      layers[static_cast<size_t>(step.pipeline().stage_of(static_cast<int>(c)))] += std::ssize(chunks[c].layers);
    text = formatted("{} stages of {} layers, {}{}{}{}", pipeline.stages, numbers_text(layers), pipeline.schedule,
                     pipeline.chunks_per_stage > 1 ? formatted(", {} chunks per stage", pipeline.chunks_per_stage) : "",
                     pipeline.asynchronous() ? formatted(" with up to {} versions of weights", pipeline.stages) : "",
                     text.empty() ? "" : ", each " + text);
  }
  const std::string experts = step.layout.expert.ranks > 1
                                  ? formatted("; experts divided among groups of {} ranks", step.layout.expert.ranks)
                                  : "";
  if (step.layout.zero.ranks() == 1) return text + experts;
  const std::string sharding = formatted(
      "{} replica(s) x {} shard(s){}, ZeRO stage {}{}{}{}", zero.replicas, zero.shards,
      step.layout.context.ranks > 1 && step.layout.readers() > zero.replicas ? " of shard x cp" : "", zero.stage,
      zero.holds == Holds::weights           ? ""
      : zero.grad_reduce == GradReduce::step ? ", gradients reduced every step"
                                             : ", gradients reduced every micro-batch",
      zero.ranks() > 1 && step.precision.wire != step.precision.state ? formatted(" in {}", step.precision.wire) : "",
      zero.sync == DpSync::all_reduce ? "" : formatted(", {}", zero.sync));
  if (step.layout.readers() == 1) return text + ": " + sharding + experts;
  return formatted("{} data-parallel {}: {}{}", step.layout.readers(), text.empty() ? "ranks" : "groups of " + text,
                   sharding, experts);
}

// The traffic of every --dp-sync beside that of the chosen one, where a run has the choice; with experts it has none.
inline void report_links(Log& log, const StepConfig& step) {
  const ZeroConfig& zero = step.layout.zero;
  if (step.precision.wire != step.precision.state) return;  // servers have no choice
  if (zero.ranks() == 1 || zero.stage > 0 || zero.replicas > 1 || step.layout.ranks() > step.layout.readers()) return;
  if (step.model.experts.count > 0) return;
  int64_t elements = 0;
  for (const UnitSpec& unit : parameter_table(step.model)) elements += UnitLayout(unit, zero.ranks()).size;
  const int64_t R = zero.grad_reduce == GradReduce::step ? 1 : step.micro_batches,
                G = elements * size_of(step.precision.wire), W = elements * size_of(step.precision.weights);
  Rows rows = {{"G", formatted("{} of gradients, R = {} reduction(s)", human_bytes(G), R)},
               {"W", formatted("{} of weights", human_bytes(W))}};
  for (const LinkTraffic& link : link_traffic(zero.ranks(), G * R, W))
    rows.emplace_back(name_of(link.sync), formatted("{:-13} out {:-11} {:10} | in {:-11} {:10}{}", link.of,
                                                    link.out_law, human_bytes(link.out), link.in_law,
                                                    human_bytes(link.in), link.sync == zero.sync ? " <= chosen" : ""));
  log.table(formatted("traffic of one rank's link per step, by --dp-sync: P = {}, f = (P - 1) / P", zero.ranks()),
            rows);
}

// The cost of a pipeline: how long its stages idle if all chunks take equally long, and how many micro-batches would
// bring that below 20%; or how old the gradients of an asynchronous one are.
inline std::string pipeline_text(const StepConfig& step) {
  if (step.layout.pipeline.asynchronous())
    return formatted("gradients of stage s are P - 1 - s = {} - s updates old: the numbers differ from those of 1f1b",
                     step.layout.pipeline.stages - 1);
  Pipeline p = step.pipeline();
  const auto law = bubble_law(p);
  const double idle = law ? law->bubble : simulate(p, *KeptLists::of(pipeline_actions, p)).bubble();
  const std::string text = formatted("{} stages, {} micro-batch{}: on paper each stage idles {:.0f}% of a step",
                                     p.stages, p.micro_batches, p.micro_batches == 1 ? "" : "es", 100 * idle);
  if (idle <= 0.2) return text;
  const int64_t tokens = step.tokens() / p.micro_batches;  // of all readers' micro-batches
  p.micro_batches = 4 * p.stages;
  return text + formatted("; {} micro-batches (--total-batch-size {}) would leave {:.0f}%", p.micro_batches,
                          tokens * p.micro_batches, 100 * bubble_law(p)->bubble);
}

// The traffic between ranks that share a layer's experts.
inline std::string exchange_text(const StepConfig& step) {
  const ExpertPlacement e = step.expert_placement();
  const int64_t S = step.layout.tensor.stream_rows(step.share(step.batch, Purpose::train).rows());
  if (const int64_t rows = e.stride(S); rows > 0)
    return formatted("{} rows from each rank to each other rank, some of them padding: no host waits for their number",
                     rows);
  std::string text = formatted(
      "rows in rounds of at most {} on a rank; hosts wait once a layer to learn how many there are", e.room(S));
  if (e.capacity) {
    const double needed = static_cast<double>(e.ranks * e.most_to_each(S)) / static_cast<double>(e.per_token * S);
    text += formatted("; with --moe-imbalance {:.2f} they would not, for more memory", std::ceil(100 * needed) / 100);
  }
  return text;
}

// For a model with experts: how many there are, how they are balanced, and what is dropped.
inline Rows expert_rows(const StepConfig& step) {
  const Experts& e = step.model.experts;
  const ExpertOptions& o = step.experts;
  const int64_t layers = step.model.sparse_layers();
  std::string balance;
  const auto add = [&](double value, const char* text) {
    if (value > 0) balance += formatted("{}{} {}", balance.empty() ? "" : ", ", text, value);
  };
  add(o.aux_loss, "balancing loss x");
  add(o.z_loss, "z-loss x");
  add(o.bias_rate, "biases that change by");
  const std::string dispatch =
      o.capacity_factor
          ? formatted("at most {} choices of an expert in a sequence (capacity factor {}), later ones are dropped",
                      *o.capacity(step.batch.T, e), *o.capacity_factor)
          : std::string("dropless");
  Rows rows = {{"experts",
                formatted("{} of width {} in {}, {} for each token{}; {}", e.count, e.width,
                          layers == step.model.n_layer ? "each layer" : formatted("{} of the layers", layers),
                          e.per_token, e.shared > 0 ? formatted(", and a shared one of {}", e.shared) : "", dispatch)},
               {"balance", balance.empty() ? "left to the router: see --moe-aux-loss and --moe-bias-rate" : balance}};
  if (step.layout.expert.ranks > 1) rows.emplace_back("exchange", exchange_text(step));
  return rows;
}

// A notice if the vocabulary is not the preset's.
inline std::string vocabulary_notice(const Options& o, const ModelConfig& m) {
  if (o.preset_vocabulary == 0) return "";
  return formatted("notice: {} tokens, those of --tokenizer, instead of the {} of {}; --vocab-size overrides this",
                   human_count(m.vocab_size), human_count(o.preset_vocabulary), o.model);
}

// ", in host memory master, moments in files, updated by the host"; empty: all is on the device.
inline std::string offload_text(Offload offload) {
  const bool in_file = offload.any_in_file(), by_host = offload.updates_at_host();
  if (in_file) offload.parts[static_cast<size_t>(Offloaded::moments)] = false;
  return (offload.any() ? ", in host memory " + std::string(offload) : "") + (in_file ? ", moments in files" : "") +
         (by_host ? ", updated by the host" : "");
}

// "after 100 warm-up steps"; tokens stay as many when the batch changes.
inline std::string warmup_text(const Options& o) {
  if (o.warmup_tokens ? o.warmup_tokens->tokens == 0 : o.warmup_steps == 0) return "without warm-up";
  return "after " + (o.warmup_tokens ? counted(o.warmup_tokens->tokens, "warm-up token")
                                     : counted(o.warmup_steps, "warm-up step"));
}

// A run as its options alone describe it.
inline Rows run_rows(const Options& o, const StepConfig& step) {
  const ModelConfig& m = step.model;
  const double flops = training_flops_per_token(m, o.seq_len);
  Rows rows = {
      {"model", formatted("{} ({}): {}, {}{} of {}, C {}, F {}, vocabulary {}, {} positions", o.model,
                          m.family.model_type, counted(m.n_layer, "layer"), counted(m.n_head, "head"),
                          m.n_kv_head == m.n_head ? "" : formatted(" ({} key-value heads)", m.n_kv_head), m.head_size,
                          m.n_embd, m.n_ffn, m.vocab_size, m.n_positions)},
      {"parameters",
       formatted(
           "{}{} ({} per token, {} per step)", human_count(count_parameters(parameter_table(m))),
           m.experts.count == 0 ? "" : formatted(", of which a token uses {}", human_count(count_active_parameters(m))),
           human_flops(flops), human_flops(flops * static_cast<double>(step.tokens())))},
      {"numerics",
       formatted("{}, recompute {}{}", o.dtype, step.recomputation(), offload_text(step.layout.zero.offload))},
      {"batch",
       formatted("{} tokens per step = {} micro-batch(es) x {} sequences x {} tokens x {} {}",
                 human_count(step.tokens()), step.micro_batches, o.batch_size, o.seq_len, step.layout.readers(),
                 step.layout.ranks() == step.layout.readers() ? "rank(s)" : "group(s) of ranks")},
      {"layout", layout_text(step)},
      {"optimizer",
       formatted("{}, lr {:.2e} {} {}, weight decay {}{}, clip {}", rule_of(step.layout.zero.optimizer).title, o.lr,
                 o.lr_schedule, warmup_text(o), weight_decay(o, step.tokens()),
                 o.decay_embeddings == OnOff::on ? "" : " (but embeddings)", o.grad_clip) +
           (o.z_loss > 0 ? formatted(", z-loss x {}", o.z_loss) : "") +
           (o.ema ? formatted(", weights averaged with decay {}", *o.ema) : "") +
           (o.qk_clip ? formatted(", logits to {}", *o.qk_clip) : "") +
           (step.layout.pipeline.asynchronous() ? ", stage by stage by its own norm" : "")}};
  if (const std::string notice = vocabulary_notice(o, m); !notice.empty())
    rows.insert(rows.begin() + 1, {"vocabulary", notice});
  if (const Growth by = m.growth(); m.base)
    rows.emplace_back(
        "parametrization",
        formatted("{}: {} channels for {} of the base (x {}), {} layers for {} (x {}), heads of {} for {} (x {})",
                  o.parametrization, m.n_embd, m.base->width, by.width, m.n_layer, m.base->depth, by.depth, m.head_size,
                  m.base->head_size, by.head_size));
  if (m.experts.count > 0)
    for (auto& row : expert_rows(step)) rows.insert(rows.end() - 1, std::move(row));
  if (step.layout.pipeline.stages > 1) rows.insert(rows.end() - 1, {"pipeline", pipeline_text(step)});
  if (!step.layout.pipeline.slices.empty())
    rows.insert(rows.end() - 1,
                {"token slices", formatted("{} of each sequence, of {} tokens", step.layout.pipeline.slices.size(),
                                           step.layout.pipeline.slices)});
  return rows;
}

// A notice for those who know d24 and larger from llm.c.
inline std::string depth_notice(const Options& o) {
  for (const auto& [name, channels, heads] :
       {std::tuple{"d24", 1024, 16}, std::tuple{"d36", 1280, 20}, std::tuple{"d48", 1600, 25}})
    if (o.model == name && !o.n_embd && !o.n_head)
      return formatted("notice: {} has 64 channels per layer here; llm.c's {} is {} --n-embd {} --n-head {}", name,
                       name, name, channels, heads);
  return "";
}

}  // namespace detail

}  // namespace llmc
