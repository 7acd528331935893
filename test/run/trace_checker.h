// trace_checker.h: is a trace true to the format, to itself, and to the lists of its schedule?
#pragma once
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "schedule/messages.h"

namespace trace_checker {

using Json = nlohmann::json;
using llmc::formatted;

// A span in nanoseconds.
struct Seen {
  std::string name, kind;
  int64_t begin, end;
  Json args;
};
struct Arrow {
  int64_t process, track, at;
  std::string of;  // the name of the action in which it lies
};

class Checker {
 public:
  explicit Checker(const Json& file) : file_(file) {}

  // What is wrong; empty: nothing.
  std::vector<std::string> faults() {
    try {
      read();
      for (auto& [track, spans] : tracks_) check_nesting(track, spans);
      check_arrows();
      check_processes();
      check_actions();
    } catch (const Json::exception& error) {
      faults_.push_back(formatted("not the schema: {}", error.what()));
    }
    return faults_;
  }

 private:
  using TrackId = std::pair<int64_t, int64_t>;

  template <class... Args>
  void fault(Args&&... args) {
    faults_.push_back(formatted(std::forward<Args>(args)...));
  }
  int64_t ns(const Json& microseconds) {
    const double value = microseconds.get<double>() * 1000, whole = std::round(value);
    if (std::abs(value - whole) > 1e-3) fault("{} us is no whole number of nanoseconds", microseconds.dump());
    return static_cast<int64_t>(whole);
  }

  void read() {
    static const std::set<std::string> kinds = {"step", "action", "layer", "op", "transfer", "wait", "host"};
    about_ = file_.at("otherData");
    if (about_.at("times").get<std::string>().empty()) fault("no word about where the times are from");
    for (const Json& e : file_.at("traceEvents")) {
      const std::string ph = e.at("ph"), name = e.at("name");
      const TrackId track{e.at("pid"), e.at("tid")};
      if (ph == "M") {
        if (name == "process_name") processes_[track.first] = e.at("args").at("name");
        if (name == "thread_name" && !names_.emplace(track, e.at("args").at("name")).second)
          fault("track {} of process {} has two names", track.second, track.first);
      } else if (ph == "X") {
        const Seen s{name, e.at("cat"), ns(e.at("ts")), ns(e.at("ts")) + ns(e.at("dur")), e.value("args", Json())};
        if (!kinds.contains(s.kind)) fault("{} is of an unknown kind, {}", name, s.kind);
        if (s.end < s.begin) fault("{} ends before it begins", name);
        if (s.begin < 0) fault("{} begins before time 0", name);
        if (s.kind == "transfer" && (s.args.at("group").get<std::string>().empty() || s.args.at("bytes") < 0))
          fault("{} has no group and bytes", name);
        tracks_[track].push_back(s);
      } else if (ph == "s" || ph == "f") {
        if (ph == "f" && e.at("bp") != "e") fault("an arrow does not end in its span");
        (ph == "s" ? sent_ : received_)[e.at("id")].push_back({track.first, track.second, ns(e.at("ts")), ""});
      } else {
        fault("an event of an unknown phase, {}", ph);
      }
    }
  }

  // Spans nest or follow one another; ops, transfers and waits contain nothing, an action no action.
  void check_nesting(const TrackId& track, std::vector<Seen>& spans) {
    if (!names_.contains(track)) fault("track {} of process {} has no name", track.second, track.first);
    std::ranges::stable_sort(
        spans, [](const Seen& a, const Seen& b) { return a.begin != b.begin ? a.begin < b.begin : a.end > b.end; });
    std::vector<const Seen*> open;
    for (const Seen& s : spans) {
      while (!open.empty() && open.back()->end <= s.begin) open.pop_back();
      if (!open.empty() && s.end > open.back()->end)
        fault("process {}, {}: {} at {} ns overlaps {}", track.first, names_[track], s.name, s.begin,
              open.back()->name);
      const bool leaf = !open.empty() &&
                        (open.back()->kind == "op" || open.back()->kind == "transfer" || open.back()->kind == "wait");
      if (leaf && s.end > s.begin)
        fault("process {}, {}: {} lies in {}", track.first, names_[track], s.name, open.back()->name);
      for (const Seen* outer : open)
        if (s.kind == "action" && outer->kind == "action")
          fault("process {}, {}: {} lies in {}", track.first, names_[track], s.name, outer->name);
      open.push_back(&s);
    }
  }

  // The clocks of two ranks agree to within this.
  int64_t uncertainty(int64_t a, int64_t b) {
    int64_t sum = 0;
    for (const Json& rank : about_.value("ranks_of_run", Json::array()))
      if (rank.at("rank") == a || rank.at("rank") == b) sum += ns(rank.at("clock_uncertainty_us"));
    return sum;
  }
  const Seen* action_around(const Arrow& a) {
    for (const Seen& s : tracks_[{a.process, a.track}])
      if (s.kind == "action" && s.begin <= a.at && a.at <= s.end) return &s;
    fault("an arrow lies in no action");
    return nullptr;
  }
  void check_arrows() {
    std::set<int64_t> ids;
    for (const auto& [id, at] : sent_) ids.insert(id);
    for (const auto& [id, at] : received_) ids.insert(id);
    for (const int64_t id : ids) {
      if (sent_[id].size() != 1 || received_[id].size() != 1) {
        fault("message {} is sent {} times and received {} times", id, sent_[id].size(), received_[id].size());
        continue;
      }
      const Arrow &s = sent_[id][0], &r = received_[id][0];
      if (s.process == r.process) fault("message {} goes from process {} to itself", id, s.process);
      if (r.at + uncertainty(s.process, r.process) < s.at) fault("message {} is received before it is sent", id);
      const Seen *from = action_around(s), *to = action_around(r);
      if (from == nullptr || to == nullptr) continue;
      const bool activations = from->args.at("kind") == "sending of activations";
      const int step = activations ? 1 : -1;
      if (to->args.at("kind") != (activations ? "receiving of activations" : "receiving of gradients") ||
          to->args.at("chunk") != from->args.at("chunk").get<int>() + step ||
          to->args.at("micro_batch") != from->args.at("micro_batch") || to->args.at("slice") != from->args.at("slice"))
        fault("the arrow of message {} goes from {} to {}", id, from->name, to->name);
    }
  }

  bool is_plan() { return about_.at("kind") == "plan"; }
  int64_t processes_expected() { return about_.at(is_plan() ? "stages" : "ranks"); }
  void check_processes() {
    for (int64_t p = 0; p < processes_expected(); ++p) {
      if (!processes_.contains(p)) fault("process {} is missing", p);
      const auto of_p = [&](const auto& track) { return track.first.first == p && track.second == "compute"; };
      if (std::ranges::count_if(names_, of_p) != 1) fault("process {} has no track of its compute stream", p);
    }
    if (std::ssize(processes_) != processes_expected()) fault("there are {} processes", processes_.size());
  }

  // What the schedule says that a process does.
  llmc::ActionList list_of(int64_t process, const std::vector<llmc::ActionList>& lists, const llmc::Pipeline& p) {
    const auto stage = static_cast<int>(process / (processes_expected() / p.stages));
    if (p.stages == 1) return llmc::training_actions(p.schedule, p.chunks_per_stage, p.micro_batches, p.slices);
    if (p.schedule == llmc::Schedule::pipedream && !is_plan()) {
      const int64_t step = about_.at("step");
      return llmc::pipedream_turn(p.stages, stage, step - 1, step);
    }
    return lists[static_cast<size_t>(stage)];
  }
  void check_actions() {
    const llmc::Pipeline p{.schedule = *llmc::from_name<llmc::Schedule>(about_.at("schedule").get<std::string>()),
                           .stages = about_.at("stages"),
                           .chunks_per_stage = about_.at("chunks_per_stage"),
                           .micro_batches = about_.at("micro_batches"),
                           .slices = about_.at("slices")};
    const std::vector<llmc::ActionList> lists = p.stages == 1 ? std::vector<llmc::ActionList>() : pipeline_actions(p);
    const auto text = [](const std::string& kind, int64_t chunk, int64_t micro_batch, int64_t slice) {
      return formatted("{} of chunk {}, micro-batch {}, slice {}", kind, chunk, micro_batch, slice);
    };
    for (int64_t process = 0; process < processes_expected(); ++process) {
      std::vector<std::string> listed, computed;   // in order
      std::multiset<std::string> messages, found;  // in any
      for (const llmc::Action& a : list_of(process, lists, p)) {
        const std::string what = text(name_of(a.kind), a.chunk, a.micro_batch, a.slice);
        if (computes(a.kind) || a.kind == llmc::ActionKind::update) listed.push_back(what);
        else messages.insert(what);
      }
      for (const auto& [track, spans] : tracks_)
        for (const Seen& s : spans) {
          if (track.first != process || s.kind != "action") continue;
          const std::string what =
              text(s.args.at("kind"), s.args.at("chunk"), s.args.at("micro_batch"), s.args.at("slice"));
          if (names_[track] == "compute") computed.push_back(what);
          else found.insert(what);
        }
      const auto [is, should] = std::ranges::mismatch(computed, listed);
      if (is != computed.end() || should != listed.end())
        fault("process {} computes {} where the schedule has {}", process, is == computed.end() ? "nothing" : *is,
              should == listed.end() ? "nothing" : *should);
      check_order(process, p);
      std::vector<std::string> differ;
      std::ranges::set_symmetric_difference(messages, found, std::back_inserter(differ));
      for (const std::string& what : differ)
        fault("process {}: {}: {} times, expected {}", process, what, found.count(what), messages.count(what));
    }
  }

  // A pass begins once its message is there; a message is sent once its pass has ended.
  void check_order(int64_t process, const llmc::Pipeline& p) {
    std::map<std::tuple<std::string, int, int64_t, int>, const Seen*> found;
    for (const auto& [track, spans] : tracks_)
      for (const Seen& s : spans)
        if (track.first == process && s.kind == "action")
          found[{s.args.at("kind"), s.args.at("chunk"), s.args.at("micro_batch"), s.args.at("slice")}] = &s;
    const auto after = [&](const Seen& later, const std::string& kind, const llmc::Action& a) {
      const auto earlier = found.find({kind, a.chunk, a.micro_batch, a.slice});
      if (earlier != found.end() && earlier->second->end > later.begin)
        fault("process {}: {} begins before {} ends", process, later.name, earlier->second->name);
    };
    using enum llmc::ActionKind;
    const char* const backward_of = p.splits_backward() ? name_of(backward_input) : name_of(backward);
    for (const auto& [key, span] : found) {
      const auto& [kind, chunk, micro_batch, slice] = key;
      const llmc::Action a{forward, chunk, micro_batch, slice};
      if (kind == name_of(forward)) after(*span, name_of(receive_activations), a);
      if (kind == backward_of) after(*span, name_of(receive_gradients), a), after(*span, name_of(forward), a);
      if (kind == name_of(send_activations)) after(*span, name_of(forward), a);
      if (kind == name_of(send_gradients)) after(*span, backward_of, a);
      if (kind == name_of(backward_weight)) after(*span, name_of(backward_input), a);
    }
  }

  const Json& file_;
  Json about_;
  std::map<int64_t, std::string> processes_;
  std::map<TrackId, std::string> names_;
  std::map<TrackId, std::vector<Seen>> tracks_;
  std::map<int64_t, std::vector<Arrow>> sent_, received_;
  std::vector<std::string> faults_;
};

}  // namespace trace_checker

// What is wrong with a trace, one fault a line; "": nothing.
inline std::string trace_faults(const nlohmann::json& file) {
  std::string text;
  for (const std::string& f : trace_checker::Checker(file).faults()) text += f + "\n";
  return text;
}
