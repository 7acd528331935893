// judge.h: who is to blame when ranks wait too long: a rank that has not arrived where another one waits, and itself
// waits for nobody. Pure functions of what the boards of all ranks say (board.h).
#pragma once
#include "net/watching/board.h"

namespace llmc {

struct Timeouts {
  double init = 600, comm = 300;  // seconds: before and after the first update is done
  // warm: the first update is done.
  double limit(bool warm) const { return warm ? comm : init; }
  double silence(bool warm) const { return limit(warm) + std::min(5.0, limit(warm) / 2); }  // of a process
  std::string option(bool warm) const {
    return warm ? formatted("--comm-timeout {}", comm) : formatted("--init-timeout {}", init);
  }
};

// What the judges know about a rank.
struct Seen {
  RankState state;
  double silent = 0;   // seconds since its process last sent a board
  double still = 0;    // seconds since it last got anything done
  bool stale = false;  // silent for so long that its state may be out of date
  bool ended = false;  // its process has said farewell
};

// For the others: how long processes 0 and 1, which judge them, have said nothing.
class SilenceOfJudges {
 public:
  // Adds these seconds. Returns which of them have been silent for so long, if each that has not ended has; else
  // nobody.
  std::vector<int> add(double seconds, const std::set<int>& heard, const std::set<int>& ended, double most) {
    std::vector<int> silent;
    bool one_speaks = false;
    for (const int process : {0, 1}) {
      double& silence = seconds_[static_cast<size_t>(process)];
      silence = heard.contains(process) ? 0 : silence + seconds;
      if (ended.contains(process)) continue;
      if (silence < most) one_speaks = true;
      else silent.push_back(process);
    }
    return one_speaks ? std::vector<int>() : silent;
  }

 private:
  std::array<double, 2> seconds_{};
};

// "rank 5 on HOST"
using NameOfRank = std::function<std::string(int)>;

class Judge {
 public:
  Judge(const std::vector<Seen>& ranks, const Timeouts& timeouts, const NameOfRank& name)
      : ranks_(ranks), timeouts_(timeouts), name_(name) {}

  // Why the job has to end; none: it can go on.
  std::optional<std::string> verdict() const {
    std::vector<Wait> waits;
    for (int r = 0; r < size(); ++r)
      if (!at(r).stale && !at(r).ended)
        for (const GroupState& g : at(r).state.groups)
          if (g.waiting.value_or(0) >= limit(r)) waits.push_back({r, &g});
    std::stable_sort(waits.begin(), waits.end(),
                     [](const Wait& a, const Wait& b) { return *a.in->waiting > *b.in->waiting; });
    std::vector<Wait> judged;  // in vain: all ranks in a collective wait for the same ones
    for (const Wait& wait : waits) {
      if (std::ranges::any_of(judged, [&](const Wait& w) {
            return w.in->begun == wait.in->begun && limit(w.rank) == limit(wait.rank) && w.in->same_group(*wait.in);
          }))
        continue;
      if (auto line = blame(wait)) return line;
      if (at(wait.rank).still >= limit(wait.rank)) judged.push_back(wait);
    }
    for (int r = 0; r < size(); ++r)  // nobody waits for it so far
      if (!at(r).ended && at(r).silent >= timeouts_.silence(any_warm()))
        return formatted("{} has said nothing for {:.0f} s ({})", name_(r), at(r).silent, timeouts_.option(any_warm()));
    return std::nullopt;
  }

 private:
  struct Wait {
    int rank;
    const GroupState* in;
  };

  int size() const { return static_cast<int>(ranks_.size()); }
  const Seen& at(int rank) const { return ranks_[static_cast<size_t>(rank)]; }

  bool warm(int rank) const { return at(rank).state.updates > 0; }
  bool any_warm() const {
    return std::ranges::any_of(ranks_, [](const Seen& s) { return s.state.updates > 0; });
  }
  double limit(int rank) const { return timeouts_.limit(warm(rank)); }

  // Has this member begun the collective that `wait` waits in?
  bool arrived(int member, const Wait& wait) const {
    const std::vector<GroupState>& groups = at(member).state.groups;
    bool later = false;  // in another World, which begins after all of this one has ended
    for (const GroupState& g : groups) {
      if (g.same_group(*wait.in)) return g.begun >= wait.in->begun;
      later |= g.world > wait.in->world;
    }
    return later && wait.in->world > 0;
  }
  std::vector<int> missing(const Wait& wait) const {
    std::vector<int> ranks;
    for (const int m : wait.in->members.ranks())
      if (m < size() && m != wait.rank && !arrived(m, wait)) ranks.push_back(m);
    return ranks;
  }

  // Finds ranks that are missing where others wait, and that do not themselves wait for a missing rank; each with a
  // wait for it. A wait on a stale board does not count.
  void follow(const Wait& wait, std::set<int>& visited, std::vector<std::pair<int, Wait>>& found) const {
    for (const int m : missing(wait)) {
      if (!visited.insert(m).second) continue;
      bool waits = false;
      if (!at(m).stale && !at(m).ended)
        for (const GroupState& g : at(m).state.groups)
          if (const Wait its{m, &g}; g.waiting && !missing(its).empty()) waits = true, follow(its, visited, found);
      if (!waits) found.emplace_back(m, wait);
    }
  }

  std::optional<std::string> blame(const Wait& wait) const {
    const std::vector<int> absent = missing(wait);
    if (absent.empty()) return blame_within(wait);
    std::set<int> visited;  // without wait.rank: it may wait elsewhere, too, and others for it
    std::vector<std::pair<int, Wait>> found;
    follow(wait, visited, found);
    if (found.empty()) {
      visited.insert(wait.rank);
      for (const int r : visited)
        if (at(r).still < limit(wait.rank)) return std::nullopt;
      return formatted("{} waits for {} at {}, {}, and that rank waits for others, too: none can go on ({})",
                       name_(wait.rank), name_(absent[0]), wait.in->what, how_long(wait),
                       timeouts_.option(warm(wait.rank)));
    }
    std::erase_if(found, [&](const auto& f) { return at(f.first).still < limit(wait.rank); });  // busy
    if (found.empty()) return std::nullopt;
    const auto& [culprit, its] = *std::max_element(found.begin(), found.end(), [&](const auto& a, const auto& b) {
      return std::pair(at(a.first).silent, -a.first) < std::pair(at(b.first).silent, -b.first);
    });
    return formatted("{} has not arrived at {}, {}{}", name_(culprit), its.in->what, how_long(wait), doing(culprit));
  }

  // All have arrived, but the collective does not end.
  std::optional<std::string> blame_within(const Wait& wait) const {
    int silent = wait.rank;
    for (const int m : wait.in->members.ranks()) {
      if (m >= size() || at(m).still < limit(wait.rank)) return std::nullopt;
      if (at(m).silent > at(silent).silent) silent = m;
    }
    if (at(silent).stale)
      return formatted("{} has not finished {}, {}{}", name_(silent), wait.in->what, how_long(wait), doing(silent));
    return formatted("{} waits in {}, {}, where all ranks have arrived: no data passes between them", name_(wait.rank),
                     wait.in->what, how_long(wait));
  }

  std::string doing(int rank) const {
    return at(rank).state.saving ? "; it is writing a checkpoint: does the file system of --out-dir still answer?" : "";
  }
  std::string how_long(const Wait& wait) const {
    return formatted("step {} (waited {:.0f} s, {})", at(wait.rank).state.step, *wait.in->waiting,
                     timeouts_.option(warm(wait.rank)));
  }

  const std::vector<Seen>& ranks_;
  Timeouts timeouts_;
  const NameOfRank& name_;
};

// A line about a rank that computes much longer than the others; none: there is no such rank.
inline std::optional<std::string> straggler(const std::vector<Seen>& ranks, const NameOfRank& name) {
  constexpr double much = 1.5, negligible = 1e-3;  // times; seconds
  std::vector<double> busy;
  for (const Seen& s : ranks) busy.push_back(s.state.busy);
  if (busy.size() < 2 || std::ranges::count(busy, 0) > 0) return std::nullopt;
  const auto slowest = std::ranges::max_element(busy);
  const double its = *slowest;
  const int rank = static_cast<int>(slowest - busy.begin());
  busy.erase(slowest);
  const double usual = median(busy);
  if (its < much * usual || its - usual < negligible) return std::nullopt;
  return formatted("notice: {} computes {:.1f} times as long as the others (median of {} steps)", name(rank),
                   its / usual, Board::steps_compared);
}

}  // namespace llmc
