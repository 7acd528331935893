// trace_file.h: the traces of all streams of a rank, in a run or on paper, and the file of --trace.
#pragma once
#include <cstdio>
#include <deque>
#include <filesystem>

#include "comm/groups.h"
#include "core/files.h"
#include "core/trace.h"
#include "train/step_config.h"

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

namespace detail {

inline std::string unfinished_trace(const std::string& path) { return path + ".partial"; }

}  // namespace detail

// The file appears under its name once it is complete.
inline void write_trace(const std::string& path, const std::string& text) {
  const std::string unfinished = detail::unfinished_trace(path);
  try {
    write_text_durably(unfinished, text);
    std::filesystem::rename(unfinished, path);
  } catch (const std::exception& error) {  // Error, or one of std::filesystem
    std::remove(unfinished.c_str());
    throw Error(formatted("--trace {}: {}", path, error.what()));
  }
}

// Rejects a file that cannot be written, before anything is computed for it.
inline void require_writable_trace(const std::string& path) {
  CHECK(!is_directory(path), "--trace {} is a directory: name a file, such as {}/trace.json", path, path);
  const std::string unfinished = detail::unfinished_trace(path);
  try {
    File::create(unfinished);
  } catch (const Error& error) {
    throw Error(
        formatted("--trace {}: {}: name a file in a directory that exists and may be written to", path, error.what()));
  }
  std::remove(unfinished.c_str());
}

// What a trace says of the step that it shows. kind: "run" or "plan"; times: how they were found
inline TraceArgs about_trace(const StepConfig& step, const char* kind, const std::string& times) {
  const Pipeline p = step.pipeline();
  return {{"program", "train_gpt"},           {"kind", kind},       {"times", times},
          {"schedule", name_of(p.schedule)},  {"stages", p.stages}, {"chunks_per_stage", p.chunks_per_stage},
          {"micro_batches", p.micro_batches}, {"slices", p.slices}, {"ranks", step.layout.ranks()}};
}

}  // namespace llmc
