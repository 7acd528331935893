// board.h: what the ranks of a process are doing, for the watchdog: which collective of each group a rank has reached,
// and whether it waits in it. Ranks write it at every collective; a thread sends it to the judges (judge.h).
#pragma once
#include <cstdlib>
#include <deque>
#include <mutex>

#include "core/check.h"
#include "core/clock.h"
#include "core/threads.h"

namespace llmc {

// "0-3 8 10-30/4": ascending numbers, in runs from the first to the last, by a stride where it is not 1.
inline std::string runs_of(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0, end; i < numbers.size(); i = end) {
    const int stride = i + 1 < numbers.size() ? numbers[i + 1] - numbers[i] : 1;
    for (end = i + 1; end < numbers.size() && numbers[end] - numbers[end - 1] == stride;) ++end;
    if (stride > 1 && end == i + 2) end = i + 1;  // "3 8" rather than "3-8/5"
    if (i > 0) text += ' ';
    text += std::to_string(numbers[i]);
    if (end == i + 1) continue;
    text += formatted("-{}", numbers[end - 1]);
    if (stride > 1) text += formatted("/{}", stride);
  }
  return text;
}
inline std::vector<int> from_runs(const std::string& text) {
  constexpr long most = 1 << 20, end_of_ranks = std::numeric_limits<int>::max();
  std::vector<int> numbers;
  for (const char* at = text.c_str(); *at != '\0';) {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10), last = *end == '-' ? std::strtol(end + 1, &end, 10) : first,
               stride = *end == '/' ? std::strtol(end + 1, &end, 10) : 1;
    CHECK(end != at && first >= 0 && last >= first && last < end_of_ranks && stride >= 1 && stride < end_of_ranks &&
              (last - first) / stride < most - std::ssize(numbers),
          "not a list of ranks");
    for (long n = first; n <= last; n += stride) numbers.push_back(static_cast<int>(n));
    at = *end == ' ' ? end + 1 : end;
  }
  CHECK(!numbers.empty(), "not a list of ranks");
  return numbers;
}

// The members of a group: ranks, ascending. Copies share them, because large groups have many members that know them.
class Members {
 public:
  Members() = default;
  Members(std::vector<int> ranks) : all_(std::make_shared<const All>(All{ranks, runs_of(ranks)})) {}

  const std::vector<int>& ranks() const { return all_->ranks; }
  const std::string& runs() const { return all_->runs; }  // runs_of(ranks())

 private:
  struct All {
    std::vector<int> ranks;
    std::string runs;
  };
  std::shared_ptr<const All> all_ = std::make_shared<const All>();
};
using KnownMembers = std::map<std::string, Members>;  // by runs()

// The state of a rank in one of its groups. A group is known by its name, its first member and its World: a process
// counts its worlds, and 0 stands for what processes do without one.
struct GroupState {
  std::string name;
  int world = 0;
  Members members;
  int64_t begun = 0;                   // collectives
  std::optional<double> waiting = {};  // seconds in the last of them; none: it has ended
  std::string what = {};               // "the all-gather of unit blocks.3"

  bool same_group(const GroupState& other) const {
    return name == other.name && world == other.world && members.ranks().at(0) == other.members.ranks().at(0);
  }
};

// The state of a rank.
struct RankState {
  int64_t step = 0;     // the update that it works on, or did last
  int64_t updates = 0;  // done by this process
  bool saving = false;  // it writes a checkpoint
  double busy = 0;      // seconds that the compute stream is busy in a step, the median of the last ones; 0: not known
  uint64_t pulses = 0;  // the count of its process (core/threads.h)
  std::vector<GroupState> groups;
};

// States of ranks as parts of a message, and back. known: groups of earlier messages; those of this one are added.
inline std::vector<std::string> parts_of(const std::vector<RankState>& ranks) {
  std::vector<std::string> parts;
  for (const RankState& r : ranks) {
    parts.insert(parts.end(),
                 {std::to_string(r.step), std::to_string(r.updates), std::to_string(int{r.saving}),
                  formatted("{:.17g}", r.busy), std::to_string(r.pulses), std::to_string(r.groups.size())});
    for (const GroupState& g : r.groups)
      parts.insert(parts.end(), {g.name, std::to_string(g.world), g.members.runs(), std::to_string(g.begun),
                                 g.waiting ? formatted("{:.3f}", *g.waiting) : std::string(), g.what});
  }
  return parts;
}
inline std::vector<RankState> ranks_from(const std::vector<std::string>& parts, KnownMembers& known) {
  std::vector<RankState> ranks;
  size_t at = 0;
  const auto text = [&]() -> const std::string& { return parts.at(at++); };
  const auto number = [&] { return std::strtoll(text().c_str(), nullptr, 10); };
  while (at < parts.size()) {
    RankState& r = ranks.emplace_back();
    r.step = number();
    r.updates = number();
    r.saving = number() != 0;
    r.busy = std::strtod(text().c_str(), nullptr);
    CHECK(std::isfinite(r.busy), "not a time");
    r.pulses = std::strtoull(text().c_str(), nullptr, 10);
    for (int64_t groups = number(); groups > 0; --groups) {
      GroupState& g = r.groups.emplace_back();
      g.name = text();
      g.world = static_cast<int>(number());
      const std::string& runs = text();
      if (const auto found = known.find(runs); found != known.end()) g.members = found->second;
      else g.members = known[runs] = Members(from_runs(runs));
      g.begun = number();
      if (const std::string& waiting = text(); !waiting.empty()) g.waiting = std::strtod(waiting.c_str(), nullptr);
      g.what = text();
    }
  }
  return ranks;
}

// Where a rank records what it does in one group, written by the one thread that uses the group.
class Attendance {
 public:
  Attendance(std::string name, int world, Members members)
      : state_{.name = std::move(name), .world = world, .members = std::move(members)} {}
  // The next collective: "the OP of SUBJECT".
  void begin(std::string_view op, std::string_view kind, std::string_view subject) {
    std::lock_guard lock(mutex_);
    ++state_.begun;
    state_.waiting = 0;
    op_ = op, kind_ = kind, subject_ = subject;  // strings that have grown before: no memory is allocated
  }
  void end() {
    pulse();
    std::lock_guard lock(mutex_);
    state_.waiting.reset();
  }
  GroupState state() const {
    std::lock_guard lock(mutex_);
    GroupState state = state_;
    std::string op = op_;
    std::replace(op.begin(), op.end(), '_', '-');
    state.what = formatted("the {} of {}{}", op, kind_, subject_);
    return state;
  }

 private:
  mutable std::mutex mutex_;
  GroupState state_;
  std::string op_, kind_, subject_;
};

// A collective that is in progress until the end of the scope; an exception leaves it in progress.
class Attending {
 public:
  Attending(Attendance* place, std::string_view op, std::string_view kind, std::string_view subject)
      : place_(place), exceptions_(std::uncaught_exceptions()) {
    if (place_ != nullptr) place_->begin(op, kind, subject);
  }
  ~Attending() {
    if (place_ != nullptr && std::uncaught_exceptions() == exceptions_) place_->end();
  }
  Attending(const Attending&) = delete;
  Attending& operator=(const Attending&) = delete;

 private:
  Attendance* place_;
  int exceptions_;
};

class Board {
 public:
  Board(int first_rank, int local_ranks, const std::vector<int>& firsts)
      : first_(first_rank), ranks_(static_cast<size_t>(local_ranks)) {
    ranks_[0].places.push_back(processes = std::make_shared<Attendance>("processes", 0, firsts));
  }

  // Texts between the processes, by the main thread; in the name of their first ranks.
  std::shared_ptr<Attendance> processes;

  // A World begins; all processes begin the same worlds.
  void begin_world() {
    std::lock_guard lock(mutex_);
    ++world_;
    for (Rank& r : ranks_) {
      std::erase_if(r.places, [&](const auto& place) { return place != processes; });
      r.updates = 0, r.saving = false, r.busy.clear();
    }
    // A place of this World may get the address of one that is gone.
    std::erase_if(waits_, [&](const auto& wait) { return wait.first != processes.get(); });
  }
  // A rank joins a group of the World.
  std::shared_ptr<Attendance> join(int rank, const std::string& name, const std::vector<int>& members) {
    std::lock_guard lock(mutex_);
    auto place = std::make_shared<Attendance>(name, world_, members);
    of(rank).places.push_back(place);
    return place;
  }
  // A rank works on this update.
  void at_step(int rank, int64_t step) {
    std::lock_guard lock(mutex_);
    of(rank).step = step;
  }
  // A rank begins to write a checkpoint, or has written it.
  void saving(int rank, bool is_saving) {
    std::lock_guard lock(mutex_);
    of(rank).saving = is_saving;
  }
  // A rank has done an update. busy_total: seconds that its compute stream has been busy since it was made.
  void step_done(int rank, double busy_total) {
    std::lock_guard lock(mutex_);
    Rank& r = of(rank);
    if (++r.updates > 1) r.busy.push_back(busy_total - r.busy_total);  // the first one touches all memory
    if (r.busy.size() > steps_compared) r.busy.pop_front();
    r.busy_total = busy_total;
  }

  // The states of all ranks. `seconds` since the last call are added to the waits that are still in progress.
  std::vector<RankState> read(double seconds) {
    std::lock_guard lock(mutex_);
    std::vector<RankState> states;
    std::map<const Attendance*, Wait> waits;  // of those that are still there
    for (Rank& r : ranks_) {
      const double busy = r.busy.size() < steps_compared ? 0 : median({r.busy.begin(), r.busy.end()});
      RankState& s = states.emplace_back(RankState{r.step, r.updates, r.saving, busy, pulses(), {}});
      for (const auto& place : r.places) {
        GroupState g = place->state();
        const Wait before = waits_[place.get()];
        const double waited = g.waiting && before.collective == g.begun ? before.seconds + seconds : 0;
        waits[place.get()] = {g.begun, waited};
        if (g.waiting) g.waiting = waited;
        s.groups.push_back(std::move(g));
      }
    }
    waits_ = std::move(waits);
    return states;
  }

  static constexpr size_t steps_compared = 20;

 private:
  struct Rank {
    int64_t step = 0, updates = 0;
    bool saving = false;
    double busy_total = 0;
    std::deque<double> busy;  // seconds, in the last updates
    std::vector<std::shared_ptr<Attendance>> places;
  };
  struct Wait {
    int64_t collective = 0;
    double seconds = 0;
  };
  Rank& of(int rank) { return ranks_.at(static_cast<size_t>(rank - first_)); }
  int first_;
  std::mutex mutex_;
  int world_ = 0;
  std::vector<Rank> ranks_;
  std::map<const Attendance*, Wait> waits_;
};

}  // namespace llmc
