// pipeline.h: a pipeline as a value: which schedule, how many stages, chunks, micro-batches and slices; which stage has
// which chunk; what its actions are called; and the laws of its bubble and its memory.
//
// The model is cut by layers: stage s of P holds some layers, and the micro-batches pass through the stages, forward
// and then backward. A stage waits until the first micro-batch reaches it, and while the last one returns: the bubble.
//   gpipe        all forwards, then all backwards (Huang et al. 2019)
//   1f1b         each backward as soon as it can run: less memory, the same bubble (Narayanan et al. 2019, 2021)
//   interleaved  each stage has V chunks: a bubble V times shorter, for V times the messages (Narayanan 2021)
//   zb-h1        the weight part of the backward waits until there is nothing better to do (Qi et al. 2023)
//   zb-v         the same with two chunks per stage, placed down and up again: the last chunk is on the first stage
//   pipedream    1f1b that updates after every micro-batch, without waiting for the others (Narayanan et al. 2019)
#pragma once
#include "core/trace.h"
#include "schedule/actions.h"

namespace llmc {

struct Pipeline {
  Schedule schedule = Schedule::one_f_one_b;
  int stages = 1;             // P
  int chunks_per_stage = 1;   // V
  int64_t micro_batches = 1;  // M, in a step; with pipedream, between two flushes
  int slices = 1;             // K, of the sequence of each micro-batch (TeraPipe, Li et al. 2021)

  int chunks() const { return stages * chunks_per_stage; }
  int64_t passes() const { return micro_batches * slices; }  // of each chunk

  int stage_of(int chunk) const {
    if (schedule == Schedule::zb_v) return chunk < stages ? chunk : 2 * stages - 1 - chunk;
    return chunk % stages;
  }
  int chunk_of(int stage, int v) const {
    if (schedule == Schedule::zb_v && v == 1) return 2 * stages - 1 - stage;
    return v * stages + stage;
  }
  // Whether there is a chunk `other`, and another stage has it.
  bool elsewhere(int chunk, int other) const {
    return other >= 0 && other < chunks() && stage_of(other) != stage_of(chunk);
  }
  // The place of a chunk among those of its stage.
  int place_of(int chunk) const { return chunk / stages; }

  bool splits_backward() const { return schedule == Schedule::zb_h1 || schedule == Schedule::zb_v; }
  bool operator==(const Pipeline&) const = default;
};

// The most forwards that can be listed; bounds the memory of the lists.
inline constexpr int64_t most_pipeline_passes = 1 << 20;

// The values among these that the schedule does not allow; the messages name the options.
inline Faults pipeline_faults(const Pipeline& p) {
  Faults faults;
  faults.unless(p.stages >= 1, "--pp {}: a pipeline has at least 1 stage", p.stages);
  faults.unless(p.micro_batches >= 1, "{} micro-batches: a step has at least 1", p.micro_batches);
  faults.unless(p.chunks_per_stage >= 1, "--pp-chunks {}: a stage has at least 1 chunk", p.chunks_per_stage);
  faults.unless(p.slices >= 1, "--token-slices {}: a micro-batch has at least 1 slice", p.slices);
  faults.unless(has_chunks(p.schedule) || p.chunks_per_stage == 1,
                "--pp-chunks {} with --schedule {}, whose stages have 1 chunk each: use --schedule interleaved, or "
                "leave out --pp-chunks",
                p.chunks_per_stage, p.schedule);
  faults.unless(p.schedule != Schedule::zb_v || p.chunks_per_stage == 2,
                "--pp-chunks {} with --schedule zb-v, whose stages have 2 chunks each, one on the way down and one on "
                "the way up: leave out --pp-chunks",
                p.chunks_per_stage);
  faults.unless(has_slices(p.schedule) || p.slices == 1,
                "--token-slices with --schedule {}: only gpipe and 1f1b take a micro-batch in slices; leave out "
                "--token-slices, or use one of them",
                p.schedule);
  const double passes = static_cast<double>(p.stages) * p.chunks_per_stage * static_cast<double>(p.micro_batches) *
                        static_cast<double>(p.slices);
  faults.unless(passes <= static_cast<double>(most_pipeline_passes),
                "{} stages x {} chunks x {} micro-batches x {} slices are more than {} forwards: too many to list",
                p.stages, p.chunks_per_stage, p.micro_batches, p.slices, most_pipeline_passes);
  return faults;
}

// ---- Names of actions -----------------------------------------------------------------------------------------------

// "the forward of micro-batch 3 in chunk 1"
inline std::string text_of(const Pipeline& p, const Action& a) {
  return formatted("the {} of micro-batch {}{} in chunk {}", a.kind, a.micro_batch,
                   p.slices > 1 ? formatted(", slice {},", a.slice) : std::string(), a.chunk);
}

// The span of an action in a trace: "forward 3" of micro-batch 3; with slices and chunks, "forward 3.1 of chunk 2".
inline TraceSpan action_span(const Action& a, const Pipeline& p) {
  constexpr const char* names[] = {"forward",        "backward",          "input part",
                                   "weight part",    "send activations",  "receive activations",
                                   "send gradients", "receive gradients", "update"};
  return {.kind = SpanKind::action,
          .name = formatted("{} {}{}{}", names[static_cast<int>(a.kind)], a.micro_batch,
                            p.slices > 1 ? formatted(".{}", a.slice) : std::string(),
                            p.chunks_per_stage > 1 ? formatted(" of chunk {}", a.chunk) : std::string()),
          .args = {{"kind", name_of(a.kind)}, {"chunk", a.chunk}, {"micro_batch", a.micro_batch}, {"slice", a.slice}}};
}

// The same of a send or a receive, with its arrow. column: which of so many equal pipelines side by side it belongs to
inline TraceSpan message_span(const Action& a, const Pipeline& p, int column, int columns) {
  TraceSpan span = action_span(a, p);
  const int maker = is_send(a.kind) ? a.chunk : chunk_before(a);
  const int64_t pass = (a.micro_batch * p.slices + a.slice) * p.chunks() + maker;
  span.flow = {(2 * pass + (goes_forward(a.kind) ? 0 : 1)) * columns + column,
               is_send(a.kind) ? FlowEnd::send : FlowEnd::receive};
  return span;
}

// ---- Laws, for chunks that take equally long, and messages that take no time ----------------------------------------

// The bubble: the fraction of a step's time in which a stage idles. None: there is no law for these numbers, only the
// simulation. For zb-h1 and zb-v the law holds if forward, input part and weight part take equally long.
struct Law {
  double bubble;
  const char* formula;
};
inline std::optional<Law> bubble_law(const Pipeline& p) {
  const double P = p.stages, M = static_cast<double>(p.micro_batches), V = p.chunks_per_stage, K = p.slices;
  // fewest: micro-batches from which on it holds; parts: of work, each as long as one that fills the pipeline
  const auto law = [&](int64_t fewest, double parts, const char* formula) -> std::optional<Law> {
    if (p.micro_batches < fewest) return std::nullopt;
    return Law{(P - 1) / (parts + P - 1), formula};
  };
  switch (p.schedule) {
    case Schedule::gpipe:
    case Schedule::one_f_one_b:
      return law(1, M * K, p.slices == 1 ? "(P - 1) / (M + P - 1)" : "(P - 1) / (K M + P - 1)");
    case Schedule::interleaved: return law(p.stages, V * M, "(P - 1) / (V M + P - 1)");
    case Schedule::zb_h1: return law(p.stages, 3 * M, "(P - 1) / (3 M + P - 1)");
    case Schedule::zb_v: return law(2 * p.stages - 1, 6 * M, "(P - 1) / (6 M + P - 1)");
    case Schedule::pipedream: return law(1, M, "(P - 1) / (M + P - 1)");
  }
  return std::nullopt;
}

// How many versions of its weights a stage keeps with pipedream, so that each backward finds the version of its
// forward. From 2 (P - s) - 1 micro-batches on, exactly this many are needed.
inline int64_t weight_versions(const Pipeline& p, int stage) {
  return p.schedule == Schedule::pipedream ? p.stages - stage : 1;
}

}  // namespace llmc
