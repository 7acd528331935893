// rank_trace.h: the traces of all streams of a rank, in a run or on paper.
#pragma once
#include <deque>

#include "comm/groups.h"
#include "device/device.h"

namespace llmc {

// Most ops in a file, of all ranks: about as many as a browser shows.
inline constexpr int64_t most_traced_ops = 1'000'000;

// From now until take(), the streams record. It outlives them, or is taken: their tasks use it.
class RankTrace {
 public:
  RankTrace(Stream& compute, const Groups& groups) : zero_(compute.trace_zero()) {
    add("compute", compute, groups);
    for (int lane = 0; lane < lanes; ++lane)
      if (Stream* const stream = groups.find_stream(static_cast<Lane>(lane)))
        add(name_of(static_cast<Lane>(lane)), *stream, groups);
    groups.links.for_each_with_ends(
        [&](StageLink& link, int from, int to) { add(to_or_from(groups.me.stage, from, to), link.stream(), groups); });
  }
  RankTrace(const RankTrace&) = delete;
  RankTrace& operator=(const RankTrace&) = delete;

  static std::string to_or_from(int stage, int from, int to) {
    return from == stage ? formatted("to stage {}", to) : formatted("from stage {}", from);
  }

  static bool is_link(const std::string& track) { return track.starts_with("to ") || track.starts_with("from "); }

  const TraceZero& zero() const { return zero_; }
  // Waits for the streams. Tracks without a span are left out, except the first, of the compute stream.
  std::vector<Track> take() {
    for (Stream* s : streams_) s->synchronize();
    for (Stream* s : std::exchange(streams_, {})) s->set_trace(nullptr);
    std::vector<Track> tracks;
    for (StreamTrace& t : traces_) {
      Track track = t.take();
      if (tracks.empty() || !track.spans.empty()) tracks.push_back(std::move(track));
    }
    return tracks;
  }
  int64_t ops_left_out() const {
    int64_t sum = 0;
    for (const StreamTrace& t : traces_) sum += t.ops_left_out();
    return sum;
  }

 private:
  void add(const std::string& name, Stream& stream, const Groups& groups) {
    traces_.emplace_back(name, zero_, most_traced_ops / groups.ranks());
    streams_.push_back(&stream);
    stream.set_trace(&traces_.back());
  }

  TraceZero zero_;
  std::deque<StreamTrace> traces_;  // of streams_
  std::vector<Stream*> streams_;
};

}  // namespace llmc
