// stream_trace.h: records what a stream did when, while a step is traced: one track of a trace (core/trace.h); and
// named ranges for NVIDIA's profilers (NVTX), no-ops in other builds.
#pragma once
#include "core/clock.h"
#include "core/trace.h"
#ifdef TRAIN_GPT_CUDA
#include "device/cuda_api.cuh"
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define TRAIN_GPT_CUDA_NVTX
#endif
#endif

namespace llmc {

class [[nodiscard]] ProfilerRange {
 public:
#ifdef TRAIN_GPT_CUDA_NVTX
  explicit ProfilerRange(const char* name) { nvtxRangePushA(name); }
  ~ProfilerRange() { nvtxRangePop(); }
#else
  explicit ProfilerRange(const char*) {}
  ~ProfilerRange() {}
#endif
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

// Time 0 of the traces of a rank.
struct TraceZero {
  Clock::time_point host = Clock::now();
#ifdef TRAIN_GPT_CUDA
  std::shared_ptr<const cuda::Event> gpu = nullptr;  // recorded at the same time; none: on a CPU
#endif
  int64_t uncertainty_ns = 0;  // of `host`, by which the clocks of a GPU and its host are compared
};

// The thread that runs the stream's work records; others read once the stream is idle and its trace is taken away.
class StreamTrace {
 public:
  // most_ops: further ops are only counted; actions, layers, transfers and waits are always recorded
  StreamTrace(std::string name, TraceZero zero, int64_t most_ops = std::numeric_limits<int64_t>::max())
      : track_{std::move(name), {}}, zero_(std::move(zero)), most_ops_(most_ops) {}

  const std::string& name() const { return track_.name; }
  int64_t ops_left_out() const { return ops_left_out_; }
  double now() const { return seconds_since(zero_.host); }

  // Spans that contain others.
  void open(TraceSpan span, double now) {
    span.begin = span.end = now;
    open_.push_back(track_.spans.size());
    track_.spans.push_back(std::move(span));
  }
  void close(double now) {
    if (open_.empty()) return;
    track_.spans[open_.back()].end = now;
    open_.pop_back();
  }
  // A span that contains no others.
  void add(TraceSpan span, double begin, double end) {
    span.begin = begin;
    span.end = end;
    track_.spans.push_back(std::move(span));
  }
  // Whether one more op is to be recorded; asked by the thread that enqueues it.
  bool takes_op() { return ops_ < most_ops_ ? (++ops_, true) : (++ops_left_out_, false); }

  // The track, once all is recorded. Spans that an error has left open end with the last one recorded.
  Track take() {
    for (const auto& note : std::exchange(later_, {})) note();
    double last = 0;
    for (const TraceSpan& s : track_.spans) last = std::max(last, s.end);
    while (!open_.empty()) close(last);
    return std::move(track_);
  }

#ifdef TRAIN_GPT_CUDA
  // Calls note(seconds) with the time of this event of the stream once it is known: in take().
  void at(cuda::Event event, std::function<void(double seconds)> note) {
    later_.push_back([zero = zero_.gpu, event = std::make_shared<cuda::Event>(std::move(event)),
                      note = std::move(note)] { note(cuda::milliseconds(*zero, *event) * 1e-3); });
  }
#endif

 private:
  Track track_;
  TraceZero zero_;
  int64_t most_ops_, ops_ = 0, ops_left_out_ = 0;
  std::vector<size_t> open_;
  std::vector<std::function<void()>> later_;
};

}  // namespace llmc
