// meeting.h: what process 0 decides when the processes of a job come together: who is still missing, whether the job
// can begin, and if not, why.
#pragma once
#include <fstream>

#include "core/clock.h"
#include "net/meeting/agreement.h"
#include "net/meeting/meeting_point.h"

namespace llmc {

// The introduction of this process, which listens at this port.
inline Introduction introduction(const Greeting& greeting, const Rendezvous& at, int port) {
  std::string boot = "unknown";
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return {protocol_version, greeting, {greeting.process, host_name(), host_name() + " " + boot, at.address, port}};
}
// How process 0 describes all processes to the others; without loopback addresses, which mean other machines elsewhere.
constexpr size_t parts_of_a_peer = 4;
inline std::vector<std::string> parts_of(const std::vector<Peer>& peers) {
  std::vector<std::string> parts;
  for (const Peer& p : peers)
    parts.insert(parts.end(),
                 {p.host, p.machine, detail::is_loopback_name(p.address) ? "" : p.address, std::to_string(p.port)});
  return parts;
}
// Adds the processes that follow these.
inline void add_peers(std::vector<Peer>& peers, std::span<const std::string> parts) {
  for (; parts.size() >= parts_of_a_peer; parts = parts.subspan(parts_of_a_peer))
    peers.push_back({static_cast<int>(peers.size()), shown(parts[0], most_of_a_name), parts[1], parts[2],
                     std::atoi(parts[3].c_str())});
}

// Packets of full size are lost where a host or switch takes only smaller ones; those of a handshake are small.
constexpr const char* same_mtu = "do all hosts and switches have the same MTU?";

// To a process that has not met the others yet: what became of process 0, whose connection ended like this.
inline std::string end_before_all_met(const std::string& why) {
  return Socket::is_end(why)
             ? "has ended before all processes had met; see what process 0 says"
             : formatted(
                   "was reached, but answers no more ({}): its host is gone, or packets of full size are lost; {}", why,
                   same_mtu);
}

class Meeting {
 public:
  Meeting(Introduction process_0, const Rendezvous& at)
      : where_(at.where), init_timeout_(at.init_timeout), patience_(at.patience), end_(at.init_timeout) {
    for (int p = 0; p < process_0.greeting.processes; ++p) missing_.insert(missing_.end(), p);
    add({no_line, std::move(process_0)});
  }

  // A process has connected from this address, and is to introduce itself.
  void connected(int line, std::string address) {
    silent_[line] = {std::move(address), Limit::seconds(introduction_seconds)};
  }
  // It has. Returns the address, from where long messages do arrive.
  std::string introduced(int line) {
    const auto known = silent_.extract(line);
    if (!known) return "";
    std::erase_if(silent_, [&](const auto& s) { return s.second.is_late() && s.second.from == known.mapped().from; });
    return known.mapped().from;
  }
  void arrive(int line, Introduction introduction) {
    last_arrival_ = Clock::now();
    lines_.insert(line);
    add({line, std::move(introduction)});
  }
  void leave(int line) {
    lines_.erase(line);
    if (const auto found = silent_.find(line); found != silent_.end() && !found->second.is_late()) silent_.erase(found);
    for (const Arrival& a : all_)
      if (a.line == line && left_.empty())
        left_ = formatted("{} on {} has ended before all had met at {}", named({a.it.greeting.process}, local_ranks()),
                          a.it.peer.host, where_);
  }

  // Why the job cannot begin; none known: it can; nothing: more processes are to come.
  std::optional<Fault> verdict() {
    if (!left_.empty()) return Fault{left_};
    if (const std::string error = impostor(); !error.empty()) return Fault{error, ExitStatus::refused};
    std::string difference = differs_ ? refused() : "";
    if (differs_ && difference.empty()) difference = disagreement(introductions());
    if (differs_ && !last_call_) last_call_ = Limit::seconds(patience_);
    if (missing_.empty() || (last_call_ && last_call_->passed())) return Fault{difference, ExitStatus::refused};
    if (!end_.passed()) return std::nullopt;
    const std::vector<int> missing = this->missing();
    return Fault{formatted("{} {} not arrived at {} within {} s (--init-timeout){}", named(missing, local_ranks()),
                           missing.size() == 1 ? "has" : "have", where_, init_timeout_, silent())};
  }
  // Calls wait(Limit), which waits until somebody comes, verdict() may change, or these seconds are over. While this
  // process is stopped, nobody can come.
  template <class Wait>
  void wait(double seconds, Wait&& wait) {
    const bool was_stopped = end_.wait(seconds, [&](Limit limit) {
      if (last_call_) limit.deadline = std::min(limit.deadline, last_call_->deadline);
      wait(limit);
    });
    if (was_stopped) last_arrival_ = Clock::now();
  }
  // The verdict has been given, and everyone has read it.
  bool is_over() const { return missing_.empty() && lines_.empty(); }

  Clock::time_point last_arrival() const { return last_arrival_; }
  // Why a spare cannot take any place; empty: it can.
  std::string fault_of_spare(Introduction spare) const {
    const int number = spare.greeting.process = all_[0].it.greeting.processes;  // beyond all others
    const std::string text = disagreement({all_[0].it, spare});
    return text.empty() ? text : formatted("{} ({} is the spare)", text, named({number}, local_ranks()));
  }

  bool misses(int process) const { return !first_.contains(process); }
  std::vector<int> missing() const { return {missing_.begin(), missing_.end()}; }
  std::string waiting() const {
    return formatted("waiting for {} of {} at {}{}", named(missing(), local_ranks()), all_[0].it.greeting.processes,
                     where_, silent());
  }

  // Call once the job can begin.
  std::vector<Peer> peers() const {
    std::vector<Peer> peers;
    for (size_t p = 0; p < all_.size(); ++p) peers.push_back(arrival_of(static_cast<int>(p)).it.peer);
    return peers;
  }
  int line_of(int process) const { return arrival_of(process).line; }
  // The connections with those who have come and not left.
  std::set<int> lines() const { return lines_; }

 private:
  static constexpr int no_line = -1;
  static constexpr double introduction_seconds = 2;  // it takes milliseconds
  struct Arrival {
    int line;
    Introduction it;
  };

  struct Silent {
    std::string from;
    Limit limit;
    bool is_late() const { return limit.passed(); }
  };

  // What verdict() needs to know is kept with each arrival: it is asked after each of thousands.
  void add(Arrival arrival) {
    const Greeting& its = arrival.it.greeting;
    first_.emplace(its.process, all_.size());
    missing_.erase(its.process);
    differs_ |= refuses(its) || (!all_.empty() && !disagreement({all_[0].it, arrival.it}).empty());
    all_.push_back(std::move(arrival));
  }
  // From where a process has connected that then says nothing; empty: from nowhere.
  std::string silent() const {
    for (const auto& [line, it] : silent_)
      if (it.is_late())
        return formatted("; from {} a process has connected, but what it sends next does not arrive: {}", it.from,
                         same_mtu);
    return "";
  }
  static bool refuses(const Greeting& greeting) {
    return std::ranges::any_of(greeting.agree, [](const auto& a) { return a.first == refusal; });
  }
  // The first one that came with this number.
  const Arrival& arrival_of(int process) const { return all_[first_.at(process)]; }
  int local_ranks() const { return all_[0].it.greeting.local_ranks; }
  std::vector<Introduction> introductions() const {
    std::vector<Introduction> out;
    for (const Arrival& a : all_) out.push_back(a.it);
    return out;
  }
  // The error of a process that cannot take part; empty: there is none.
  std::string refused() const {
    for (const Arrival& a : all_)
      for (const auto& [option, error] : a.it.greeting.agree)
        if (option == refusal)
          return formatted("{} on {}: {}", named({a.it.greeting.process}, local_ranks()), a.it.peer.host, error);
    return "";
  }
  // The error of two processes with the same number; empty: there is none.
  std::string impostor() const {
    if (first_.size() == all_.size()) return "";
    for (const Arrival& a : all_)
      if (const Arrival& first = arrival_of(a.it.greeting.process); &first != &a)
        return formatted(
            "two processes say that they are {} of the job at {}, on {} and on {}: each needs its own number",
            named({a.it.greeting.process}, local_ranks()), where_, first.it.peer.host, a.it.peer.host);
    return "";
  }

  std::string where_;
  double init_timeout_, patience_;  // seconds
  RunningLimit end_;
  std::vector<Arrival> all_;     // process 0 first
  std::map<int, size_t> first_;  // by process: its place in all_
  std::set<int> missing_;
  bool differs_ = false;          // one that has come is refused, or not like process 0
  std::set<int> lines_;           // the open ones
  std::map<int, Silent> silent_;  // lines without an introduction; those that were late also once they are closed
  Clock::time_point last_arrival_ = Clock::now();
  std::string left_;                // who has ended, as a sentence
  std::optional<Limit> last_call_;  // set once the processes here differ
};

}  // namespace llmc
