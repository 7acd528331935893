// plan_trace.h: --trace with --plan: a step on paper as a file like that of a run. Each stage of a pipeline is a
// process: its ranks all do the same. What a stage does within an action is that of its trainer on the null device;
// when the action begins follows from the simulation of all stages (schedule/simulate.h), as in a plan's times.
#pragma once
#include <iterator>

#include "run/plan/report_time.h"
#include "run/trace/trace_file.h"

namespace llmc {

namespace detail {

// A step of a stage that never waits for the others, by the clock of the null device.
struct StageAlone {
  std::vector<Track> tracks = {};      // the first: of the compute stream
  std::vector<PassTime> actions = {};  // when each of the stage's list begins and ends; of pipedream, those of one turn
  double begin = 0, end = 0;
};
inline StageAlone stage_alone(const StepConfig& config, const Device& target, int stage) {
  Device device = target.on_paper();
  device.links = std::make_shared<LinkTimes>();
  device.links->in_order = target.collectives == Collectives::library;
  Arena arena(device), scratch(device), host(device, 0, MemoryOf::host), file(device, 0, MemoryOf::file);
  Stream stream(device, scratch);
  const int rank = stage * (config.layout.ranks() / config.layout.pipeline.stages);
  Groups groups(config.layout, rank, device, Groups::null_groups(rank));
  Trainer trainer(config, {arena, stream, &groups, &host, nullptr, &file});
  trainer.follow_another_step();
  if (ends_updates(config.layout)) trainer.flush();
  RankTrace trace(stream, groups);
  StageAlone alone{.begin = stream.seconds()};
  trainer.time_actions(&alone.actions);
  trainer.begin_step([](int64_t) { return HostBatch{}; }, {}, {.max_norm = 1});
  if (ends_updates(config.layout) || config.layout.pipeline.asynchronous()) trainer.flush();
  trainer.time_actions(nullptr);
  alone.end = stream.seconds();
  for (Track& track : trace.take()) {
    if (RankTrace::is_link(track.name)) continue;  // the messages are those of the simulation
    std::erase_if(track.spans, [&](const TraceSpan& s) { return s.end < alone.begin; });  // of the update before
    for (TraceSpan& s : track.spans) s.begin = std::max(s.begin, alone.begin);
    alone.tracks.push_back(std::move(track));
  }
  return alone;
}

// The tracks of one stage, filled from front to back.
class StageTracks {
 public:
  explicit StageTracks(const StageAlone& alone) : alone_(alone), next_(alone.tracks.size(), 0) {
    for (const Track& t : alone.tracks) tracks_.push_back({t.name, {}});
  }

  void add(TraceSpan span, double begin, double end) {
    span.begin = begin;
    span.end = end;
    tracks_[0].spans.push_back(std::move(span));
  }
  // What the stage alone does in [begin, end) happens from `at` on: on the compute stream what ends in it, too; the
  // transfers that begin in it on other streams may last longer. An action and the step are added by the caller.
  void add_within(double begin, double end, double at) {
    for (size_t t = 0; t < alone_.tracks.size(); ++t) {
      double& free = next_[t];
      for (const TraceSpan& s : alone_.tracks[t].spans) {
        if (s.begin < begin || s.begin >= end || s.kind == SpanKind::action || s.kind == SpanKind::step) continue;
        TraceSpan placed = s;
        placed.begin = at + (s.begin - begin);
        placed.end = at + (s.end - begin);
        if (t == 0) {
          if (s.end > end) continue;
          placed.end = std::min(placed.end, at + (end - begin));
        } else {  // one after the other
          placed.begin = std::max(placed.begin, free);
          free = placed.end = placed.begin + (s.end - s.begin);
        }
        tracks_[t].spans.push_back(std::move(placed));
      }
    }
  }
  // A message. In the simulation they do not slow each other down: those that overlap are on several tracks.
  void add_message(const std::string& name, TraceSpan span, const PassTime& time) {
    std::vector<Track>& of_link = messages_[name];
    auto track = std::ranges::find_if(of_link, [&](const Track& t) { return t.spans.back().end <= time.begin; });
    if (track == of_link.end())
      track = of_link.insert(track, {of_link.empty() ? name : formatted("{} ({})", name, of_link.size() + 1), {}});
    span.begin = time.begin;
    span.end = time.end;
    track->spans.push_back(std::move(span));
  }
  std::vector<Track> take() {
    std::vector<Track> all = {std::move(tracks_[0])};
    for (size_t t = 1; t < tracks_.size(); ++t)
      if (!tracks_[t].spans.empty()) all.push_back(std::move(tracks_[t]));
    for (auto& [name, of_link] : messages_) std::ranges::move(of_link, std::back_inserter(all));
    return all;
  }

 private:
  const StageAlone& alone_;
  std::vector<double> next_;  // when a track is free
  std::vector<Track> tracks_;
  std::map<std::string, std::vector<Track>> messages_;
};

// When a stage does an action in the step that it makes alone. With pipedream, all passes of a kind take equally long.
inline PassTime time_alone(const StageAlone& alone, const Action& a, size_t index) {
  if (!alone.actions.empty()) return alone.actions[index];
  for (const TraceSpan& s : alone.tracks[0].spans)
    if (s.kind == SpanKind::action && s.args["kind"] == name_of(a.kind)) return {s.begin, s.end};
  return {};  // a message
}

// The events of all stages of a pipeline.
inline std::vector<std::string> events_of_stages(const StepConfig& config, const Device& target, const Pipeline& p) {
  const bool flushes = !config.layout.pipeline.asynchronous();  // at the end of a step
  const std::vector<ActionList> lists = pipeline_actions(p);
  std::vector<StageAlone> stages;
  PassCosts costs{.message = message_seconds(config, *target.machine)};
  double start = 0;  // of the first action: before it, gradients are set to zero
  for (size_t s = 0; s < lists.size(); ++s) {
    stages.push_back(stage_alone(config, target, static_cast<int>(s)));
    std::vector<double> seconds;
    for (size_t i = 0; i < lists[s].size(); ++i) {
      const PassTime time = time_alone(stages[s], lists[s][i], i);
      seconds.push_back(time.end - time.begin);
    }
    costs.actions.push_back(std::move(seconds));
    if (flushes) start = std::max(start, stages[s].actions.front().begin - stages[s].begin);
  }
  const Simulation sim = simulate(p, lists, costs);
  std::vector<std::string> events;
  for (size_t s = 0; s < lists.size(); ++s) {
    const StageAlone& alone = stages[s];
    const int stage = static_cast<int>(s), ranks = config.layout.ranks() / p.stages, first = stage * ranks;
    StageTracks tracks(alone);
    const double done = start + sim.makespan;  // the norm of all gradients is known once all stages have theirs
    if (flushes) {
      tracks.add({.kind = SpanKind::step, .name = "step"}, 0, done + (alone.end - alone.actions.back().end));
      tracks.add_within(alone.begin, alone.actions.front().begin, 0);
    }
    for (size_t i = 0; i < lists[s].size(); ++i) {
      const Action& a = lists[s][i];
      const PassTime time{start + sim.times[s][i].begin, start + sim.times[s][i].end};
      if (computes(a.kind) || a.kind == ActionKind::update) {
        const PassTime then = time_alone(alone, a, i);
        tracks.add(action_span(a, p), time.begin, time.end);
        tracks.add_within(then.begin, then.end, time.begin);
      } else {
        const int other = p.stage_of(is_send(a.kind) ? chunk_after(a) : chunk_before(a));
        tracks.add_message(
            is_send(a.kind) ? RankTrace::to_or_from(stage, stage, other) : RankTrace::to_or_from(stage, other, stage),
            message_span(a, p, 0, 1), time);
      }
    }
    if (flushes) tracks.add_within(alone.actions.back().end, std::numeric_limits<double>::infinity(), done);
    events.push_back(trace_events(stage,
                                  ranks == 1 ? formatted("stage {} (rank {})", s, first)
                                             : formatted("stage {} (ranks {}-{})", s, first, first + ranks - 1),
                                  tracks.take()));
  }
  return events;
}

}  // namespace detail

// The file of a plan. whole: the plan; device: of a rank
inline std::string plan_trace(const StepConfig& config, const Device& device, const Plan& whole) {
  CHECK(device.machine,
        "--trace with --plan: the plan has no times, because it is for no known machine: name one by --machine, such "
        "as --machine h100x8");
  CHECK(!whole.others, "--trace with --plan: there is no clock for --dp-sync {}: leave it out",
        config.layout.zero.sync);
  const KeptLists kept;
  TraceArgs about =
      about_trace(config, "plan",
                  formatted("computed for {}: nothing ran. A stage's actions take what the clock of --plan says, and "
                            "wait for each other as in a simulation of the stages; its peers in data, tensor, context "
                            "and expert parallelism do the same at the same time",
                            device.machine->name));
  Pipeline p = config.pipeline();
  if (p.stages == 1) {
    const detail::StageAlone alone = detail::stage_alone(config, device, 0);
    const int ranks = config.layout.ranks();
    const std::string name = ranks == 1 ? std::string("rank 0") : formatted("ranks 0-{}", ranks - 1);
    return trace_file(about, {trace_events(0, name, alone.tracks, -detail::nanoseconds(alone.begin))});
  }
  if (config.layout.pipeline.asynchronous()) about["micro_batches"] = p.micro_batches = 2 * p.stages;
  return trace_file(about, detail::events_of_stages(config, device, p));
}

}  // namespace llmc
