// action_span.h: an action as a span of a trace (core/trace.h), and its message as an arrow.
#pragma once
#include "core/trace.h"
#include "schedule/pipeline.h"

namespace llmc {

// "forward 3", of micro-batch 3; "forward 3.1 of chunk 2" with slices, and where stages have several chunks.
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

// The span of a send or a receive, with its arrow. column: which of so many equal pipelines side by side it belongs to
inline TraceSpan message_span(const Action& a, const Pipeline& p, int column, int columns) {
  const bool sends = a.kind == ActionKind::send_activations || a.kind == ActionKind::send_gradients;
  const bool activations = a.kind == ActionKind::send_activations || a.kind == ActionKind::receive_activations;
  const int maker = sends ? a.chunk : activations ? a.chunk - 1 : a.chunk + 1;
  TraceSpan span = action_span(a, p);
  const int64_t pass = (a.micro_batch * p.slices + a.slice) * p.chunks() + maker;
  span.flow = {(2 * pass + (activations ? 0 : 1)) * columns + column, sends ? FlowEnd::send : FlowEnd::receive};
  return span;
}

}  // namespace llmc
