// step_trace.h: --trace in a run: records one step of every rank; rank 0 writes the file. The clocks of several
// machines are compared over messages (as in NTP, Mills 1991), so that the times of all ranks fit into one trace.
#pragma once
#include <chrono>
#include <sstream>

#include "core/clock.h"
#include "core/environment.h"
#include "core/json.h"
#include "core/log.h"
#include "run/ranks.h"
#include "run/trace/trace_file.h"

namespace llmc {

// How far this clock is ahead of rank 0's. The error is at most the uncertainty.
struct ClockOffset {
  int64_t ns = 0, uncertainty_ns = 0;
};

// Equal for processes that have the same steady clock: those of one running kernel.
inline std::string name_of_clock() {
  std::string boot;
  try {
    boot = read_text("/proc/sys/kernel/random/boot_id");
  } catch (const Error&) {  // the name of the host must do
  }
  return host_name() + " " + boot;
}

// A text that takes d from rank 0 to this rank, by their own clocks, has taken d - offset; one that takes d' back,
// d' + offset. Both are positive, so the offset lies between -d' and d: in the middle, if both take equally long. Of
// several texts the fastest count, and of the ranks with the same clock the one that knows best.
// All ranks call it, between two steps. clock: equal for ranks with the same clock; now(): its time in nanoseconds
inline ClockOffset compare_clocks(HostGroup& control, const std::string& clock, const std::function<int64_t()>& now) {
  constexpr int rounds = 8;
  const std::vector<std::string> clocks = control.all_gather_text("clocks", clock);
  const size_t ranks = clocks.size(), me = static_cast<size_t>(control.rank());
  if (std::ranges::count(clocks, clocks[0]) == std::ssize(clocks)) return {};
  std::vector<int64_t> fastest(ranks, std::numeric_limits<int64_t>::max());  // from each rank to this one
  for (int round = 0; round < rounds; ++round) {
    const std::vector<std::string> sent = control.all_gather_text("time", std::to_string(now()));
    const int64_t arrived = now();
    for (size_t r = 0; r < ranks; ++r) fastest[r] = std::min(fastest[r], arrived - int64_t{std::stoll(sent[r])});
  }
  std::string mine = std::to_string(fastest[0]);
  if (me == 0)
    for (size_t r = 1; r < ranks; ++r) mine += " " + std::to_string(fastest[r]);
  const std::vector<std::string> all = control.all_gather_text("times between clocks", mine);
  if (clock == clocks[0]) return {};
  ClockOffset best{0, std::numeric_limits<int64_t>::max()};
  std::istringstream to_first(all[0]);
  for (size_t r = 0; r < ranks; ++r) {
    int64_t to = 0;
    to_first >> to;
    if (clocks[r] != clock) continue;
    const int64_t from = std::stoll(all[r]), uncertainty = (from + to) / 2;
    if (uncertainty < best.uncertainty_ns) best = {(from - to) / 2, uncertainty};
  }
  return best;
}

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
