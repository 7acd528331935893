// step_trace.h: --trace in a run: records one step of every rank; rank 0 writes the file.
#pragma once
#include <chrono>

#include "core/json.h"
#include "core/log.h"
#include "run/ranks.h"
#include "run/trace/clocks.h"
#include "run/trace/rank_trace.h"
#include "run/trace/trace_file.h"

namespace llmc {

// The step that is recorded: by default the third that this start makes, whose memory has been touched before, or the
// last if there are fewer. done: those before this start
inline int64_t traced_step(std::optional<int64_t> asked, int64_t done, int64_t max_steps) {
  constexpr int64_t usual = 3;
  const int64_t left = max_steps - done;
  CHECK(!asked || *asked <= left, "--trace-step {}: only {} step{} left{}: use at most {}", *asked, left,
        left == 1 ? " is" : "s are", done > 0 ? formatted(" after step {}", done) : std::string(), left);
  return done + std::min(asked.value_or(usual), left);
}

class StepTrace {
 public:
  // path: empty: nothing is recorded
  StepTrace(std::string path, Log& log) : path_(std::move(path)), log_(log) {}

  void choose_step(std::optional<int64_t> asked, int64_t done, int64_t max_steps) {
    if (!path_.empty()) step_ = traced_step(asked, done, max_steps);
  }
  // Before what the host does for the step; the streams are recorded from begin_streams() on.
  void begin(int64_t step) {
    if (step == step_) recording_ = std::make_unique<Recording>();
  }
  void begin_streams(Run& run) {
    if (recording_) recording_->streams.emplace(run.stream, run.groups);
  }
  // Runs `f`, which the host does, as a span of its own track.
  template <class F>
  auto timed(const char* what, F&& f) {
    if (!recording_) return f();
    const HostRange range(recording_->host, what);
    return f();
  }
  // All work of the step is enqueued: waits for it. The host is recorded until write().
  void end_of_step() {
    if (!recording_) return;
    timed("wait for the streams", [&] { recording_->take_streams(); });
  }
  // All ranks call it, between two steps.
  void write(const StepConfig& config, Run& run) {
    if (!recording_) return;
    const std::unique_ptr<Recording> recording = std::exchange(recording_, nullptr);
    const int64_t step = *std::exchange(step_, std::nullopt);
    Comm& control = run.groups[GroupName::control];
    std::vector<Track>& tracks = recording->tracks;
    tracks.insert(tracks.begin(), recording->host.take());
    const ClockOffset offset = compare_clocks(control, name_of_clock(), [] { return steady_ns(Clock::now()); });
    const int64_t zero = steady_ns(recording->zero.host) - offset.ns;  // by rank 0's clock
    int64_t first = zero;
    for (const std::string& theirs : control.all_gather_text("begin of the trace", std::to_string(zero)))
      first = std::min<int64_t>(first, std::stoll(theirs));
    const std::string coordinates = config.layout.mesh().coordinates(run.groups.rank());
    const std::string name =
        formatted("rank {}{}", run.groups.rank(), coordinates.empty() ? "" : " (" + coordinates + ")");
    const TraceArgs mine = {
        {"rank", run.groups.rank()},
        {"host", host_name()},
        {"clock_uncertainty_us",
         detail::as_microseconds(offset.uncertainty_ns + recording->streams->zero().uncertainty_ns)},
        {"ops_left_out", recording->streams->ops_left_out()}};
    const std::string text = mine.dump() + "\n" + trace_events(run.groups.rank(), name, tracks, zero - first);
    const std::vector<std::string> all = control.gather_text(0, "trace", text);
    if (!run.groups.first()) return;
    TraceArgs about = about_trace(config, "run", times_text(run.stream.device()));
    about["step"] = step;
    about["ranks_of_run"] = TraceArgs::array();
    std::vector<std::string> events;
    for (const std::string& theirs : all) {
      const size_t line = theirs.find('\n');
      about["ranks_of_run"].push_back(parse_json<TraceArgs>(theirs.substr(0, line), "the trace of another rank"));
      events.push_back(theirs.substr(line + 1));
    }
    try {
      write_trace(path_, trace_file(about, events));
      log_.line(formatted("trace of step {}: {}; open it in https://ui.perfetto.dev", step, path_));
    } catch (const Error& error) {  // the run is worth more
      log_.line(formatted("warning: the trace of step {} was not written: {}", step, error.what()));
    }
  }
  // The run ends early.
  void report_missing() const {
    if (step_) log_.line(formatted("notice: --trace {}: no trace was written: step {} was not reached", path_, *step_));
  }

 private:
  using Clock = std::chrono::steady_clock;
  static int64_t steady_ns(Clock::time_point t) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
  }

  struct Recording {
    TraceZero zero;  // of all tracks
    StreamTrace host{"host", zero};
    std::optional<RankTrace> streams;
    std::vector<Track> tracks;
    void take_streams() {
      tracks = streams->take();
      const double later = std::chrono::duration<double>(streams->zero().host - zero.host).count();
      for (Track& track : tracks)
        for (TraceSpan& span : track.spans) span.begin += later, span.end += later;
    }
  };
  class HostRange {
   public:
    HostRange(StreamTrace& host, const char* what) : host_(host) {
      host_.open({.kind = SpanKind::host, .name = what}, host_.now());
    }
    ~HostRange() { host_.close(host_.now()); }
    HostRange(const HostRange&) = delete;
    HostRange& operator=(const HostRange&) = delete;

   private:
    StreamTrace& host_;
  };

  static std::string times_text(const Device& device) {
    return device.kind == DeviceKind::cuda
               ? "measured by CUDA events of each stream; a CUDA graph is shown as its action, without layers and ops; "
                 "where a stream waits for another, there is a gap; the host by its clock, with which the events agree "
                 "to within some 10 us; a transfer lasts until the other ranks have come and the data are there"
               : "measured by the clock of the threads that do the work of each stream; a transfer lasts until the "
                 "other ranks have come and the data are there";
  }

  std::string path_;
  Log& log_;
  std::optional<int64_t> step_;  // none: nothing to record, or written
  std::unique_ptr<Recording> recording_;
};

}  // namespace llmc
