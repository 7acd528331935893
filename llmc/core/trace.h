// trace.h: a timeline as a file, in Chrome's trace format as a JSON object, which https://ui.perfetto.dev and
// chrome://tracing open. A rank is a process of the file, a stream a track of it. The spans of a track nest or follow
// one another; arrows go from the sending of a message to its receipt.
#pragma once
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace llmc {

// The category of a span, by which Perfetto can filter.
//   action    what a list of the schedule says: a forward, a message, an update
//   layer     the part of an action that one layer takes
//   transfer  a collective, or the bytes of a message; it lasts until the others have come and all bytes are there
//   wait      for another stream
enum class SpanKind : uint8_t { step, action, layer, op, transfer, wait, host };
constexpr auto names_of_values(SpanKind) {
  return std::array{"step", "action", "layer", "op", "transfer", "wait", "host"};
}

using TraceArgs = nlohmann::ordered_json;

// One end of the arrow of a message. Both ends have the same id.
enum class FlowEnd : uint8_t { send, receive };
struct Flow {
  int64_t id;
  FlowEnd end;
};

struct TraceSpan {
  SpanKind kind;
  std::string name;
  TraceArgs args = nullptr;  // null: none
  std::optional<Flow> flow = {};
  double begin = 0, end = 0;  // seconds
};

struct Track {
  std::string name;
  std::vector<TraceSpan> spans;  // by begin; the outer span first
};

namespace detail {

inline int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }
// The format's unit is the microsecond.
inline double as_microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

}  // namespace detail

// The events of one process as JSON, separated by commas. shift_ns: what is added to all times
inline std::string trace_events(int64_t process, const std::string& process_name, const std::vector<Track>& tracks,
                                int64_t shift_ns = 0) {
  using detail::as_microseconds;
  std::string text;
  const auto add = [&](const TraceArgs& event) { text += (text.empty() ? "" : ",\n") + event.dump(); };
  const auto describe = [&](const char* what, int64_t track, const TraceArgs& args) {
    add({{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", track}, {"args", args}});
  };
  describe("process_name", 0, {{"name", process_name}});
  describe("process_sort_index", 0, {{"sort_index", process}});
  for (size_t t = 0; t < tracks.size(); ++t) {
    const auto track = static_cast<int64_t>(t);
    describe("thread_name", track, {{"name", tracks[t].name}});
    describe("thread_sort_index", track, {{"sort_index", track}});
    for (const TraceSpan& s : tracks[t].spans) {
      const int64_t begin = detail::nanoseconds(s.begin) + shift_ns, end = detail::nanoseconds(s.end) + shift_ns;
      TraceArgs event = {{"ph", "X"},
                         {"name", s.name},
                         {"cat", name_of(s.kind)},
                         {"pid", process},
                         {"tid", track},
                         {"ts", as_microseconds(begin)},
                         {"dur", as_microseconds(end - begin)}};
      if (!s.args.is_null()) event["args"] = s.args;
      add(event);
      if (!s.flow) continue;
      // An arrow is bound to the span in which its end lies: one that has ended is not that span any more.
      const bool sends = s.flow->end == FlowEnd::send;
      TraceArgs arrow = {{"ph", sends ? "s" : "f"},
                         {"name", "message"},
                         {"cat", "message"},
                         {"id", s.flow->id},
                         {"pid", process},
                         {"tid", track},
                         {"ts", as_microseconds(sends || end == begin ? begin : end - 1)}};
      if (!sends) arrow["bp"] = "e";
      add(arrow);
    }
  }
  return text;
}

// A whole file. about: what the file is, and how its times were found; processes: their trace_events()
inline std::string trace_file(const TraceArgs& about, const std::vector<std::string>& processes) {
  std::string text = "{\"displayTimeUnit\": \"ms\",\n\"otherData\": " + about.dump(2) + ",\n\"traceEvents\": [\n";
  bool first = true;
  for (const std::string& events : processes) {
    if (!std::exchange(first, false)) text += ",\n";
    text += events;
  }
  return text + "\n]}\n";
}

}  // namespace llmc
