// roster.h: the processes of a job that have met: their names, and how to connect with them.
#pragma once
#include "net/meeting/agreement.h"
#include "net/meeting/meeting_point.h"

namespace llmc {

class Roster {
 public:
  Roster(const Greeting& me, std::string token) : me_(me), token_(std::move(token)) {
    CHECK(me_.processes >= 1 && me_.process >= 0 && me_.process < me_.processes);
  }
  int process() const { return me_.process; }
  int processes() const { return me_.processes; }
  int local_ranks() const { return me_.local_ranks; }
  const std::vector<Peer>& peers() const { return peers_; }  // by process
  // This process among those on its machine, and their number.
  int local_process() const { return count_here(process()); }
  int local_processes() const { return count_here(processes()); }
  // "rank 3 on HOST"
  std::string name_of_rank(int rank) const { return formatted("rank {} on {}", rank, host_of(rank / local_ranks())); }

  // Tries until the limit, as strangers may take all room at the other process's listener. Throws ConnectionError.
  Socket connect(int process, ConnectionPurpose purpose, const std::array<int32_t, 3>& numbers,
                 const Limit& limit) const {
    for (double pause = 0.01;; pause = std::min(0.5, 2 * pause)) try {
        return connect_once(process, purpose, numbers, limit);
      } catch (const ConnectionError&) {
        if (limit.passed()) throw;
        sleep_until(limit.sooner(pause));
      }
  }

 protected:
  std::string name_of(int process) const {
    return formatted("{} on {}", named({process}, local_ranks()), host_of(process));
  }
  std::string names_of(const std::vector<int>& processes) const {
    constexpr size_t most = 4;
    std::string text;
    for (size_t i = 0; i < std::min(most, processes.size()); ++i) text += (i == 0 ? "" : ", ") + name_of(processes[i]);
    return processes.size() <= most ? text : text + formatted(" and {} more", processes.size() - most);
  }
  // Both sides of a connection that was cut report the same.
  std::string cut_between(int a, int b) const {
    const auto named = [&](int p) { return formatted("process {} ({})", p, host_of(p)); };
    return formatted("the connection between {} and {} was cut", named(std::min(a, b)), named(std::max(a, b)));
  }
  // Does another process still answer new connections? It may be alive although its connections were cut.
  bool is_alive(int other) const try {
    connect_once(other, ConnectionPurpose::question, {process(), 0, 0}, Limit::seconds(0.7));
    return true;
  } catch (const Error&) {
    return false;
  }

  // The answer to a caller that knows the token, but may be of another job or build. Purposes other than data and
  // questions are not for all processes: ControlPlane.
  Answer answer_to(const Hello& hello) const {
    const auto within = [](int32_t number, int begin, int end) { return number >= begin && number < end; };
    if (hello.purpose == ConnectionPurpose::data) {
      if (hello.version != protocol_version) return Answer::wrong_version;
      const auto [group, from, to] = hello.numbers;
      const int first = process() * local_ranks();
      const bool ours =
          group >= 0 && within(from, 0, processes() * local_ranks()) && within(to, first, first + local_ranks());
      return ours ? Answer::welcome : Answer::wrong_process;
    }
    if (hello.purpose != ConnectionPurpose::question) return Answer::unknown;
    return hello.job == id_ && within(hello.numbers[0], 0, processes()) ? Answer::welcome : Answer::wrong_process;
  }

  Greeting me_;
  std::string token_;
  Nonce id_{};               // the job's
  std::vector<Peer> peers_;  // set once all have met

 private:
  const std::string& host_of(int process) const { return peers_.at(static_cast<size_t>(process)).host; }
  Socket connect_once(int process, ConnectionPurpose purpose, const std::array<int32_t, 3>& numbers,
                      const Limit& limit) const {
    const Peer& peer = peers_.at(static_cast<size_t>(process));
    return detail::connect_to_any({peer.address, peer.port},
                                  {.purpose = purpose, .to_process = process, .numbers = numbers, .job = id_}, token_,
                                  name_of(process), limit)
        .socket;
  }
  int count_here(int end) const {
    const std::string& here = peers_[static_cast<size_t>(process())].machine;
    return static_cast<int>(std::ranges::count(peers_.begin(), peers_.begin() + end, here, &Peer::machine));
  }
};

}  // namespace llmc
