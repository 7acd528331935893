// rendezvous.h: the processes of a job meet, agree, and from then on can talk.
//
// Process 0 listens. Each other process connects, proves that it knows the token (handshake.h) and says what it is
// (agreement.h). Once all are there or something is wrong (meeting.h), process 0 tells all of them who they are and
// where they listen, or why the job cannot begin. What they say later goes through process 0 too. Process 1 is
// connected with everyone as well, so that somebody can speak to all when process 0 is gone.
//
// A job ends for one reason, the fault: the first one that process 0, or in its absence process 1, learns of.
#pragma once
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "net/agreement.h"
#include "net/control.h"
#include "net/data_door.h"
#include "net/gatherings.h"
#include "net/listener.h"
#include "net/meeting.h"
#include "net/meeting_point.h"

namespace llmc {

class ControlPlane {
 public:
  // Blocks until all processes have met and agree. If they cannot, it throws the same error on all of them.
  ControlPlane(const Greeting& greeting, Rendezvous at)
      : me_(greeting),
        token_(at.token),
        answer_seconds_(std::min(60.0, at.init_timeout)),
        gatherings_(greeting.processes) {
    CHECK(me_.processes >= 1 && me_.process >= 0 && me_.process < me_.processes);
    if (processes() == 1) {
      peers_ = {introduction(me_, at, 0).peer};
      return;
    }
    control_ = std::make_unique<Control>(
        Control::Events{.received = [this](int line, Message message) { received(line, std::move(message)); },
                        .closed = [this](int line, const std::string& why) { closed(line, why); }});
    process() == 0 ? hold_meeting(at) : attend_meeting(at);
    connect_with_deputy();
  }

  // Tells the others that this process has ended, unless it has failed: then they had better find it gone.
  ~ControlPlane() {
    std::lock_guard lock(mutex_);
    if (!aborted_ && fault_.empty() && std::uncaught_exceptions() == 0) broadcast({Kind::end, {}});
  }
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  int process() const { return me_.process; }
  int processes() const { return me_.processes; }
  int local_ranks() const { return me_.local_ranks; }
  const std::vector<Peer>& peers() const { return peers_; }  // by process
  // This process among those on its machine, and their number.
  int local_process() const { return count_here(process()); }
  int local_processes() const { return count_here(processes()); }
  // "rank 3 on HOST"
  std::string name_of_rank(int rank) const {
    return formatted("rank {} on {}", rank, peers_.at(static_cast<size_t>(rank / local_ranks())).host);
  }

  // The texts of all processes, by process. All of them call it, each topic from one thread at a time. For small texts:
  // of at most a megabyte.
  std::vector<std::string> all_gather(const std::string& topic, const std::string& text, const Limit& limit = Limit()) {
    if (processes() == 1) return {text};
    std::unique_lock lock(mutex_);
    check_alive();
    process() == 0 ? contribute(0, topic, text) : control_->send(line_to(0), {Kind::text, {topic, text}});
    const auto complete = [&] { return gathered_[topic].size() == static_cast<size_t>(processes()); };
    if (!wait(lock, limit, [&] { return complete() || aborted_ || !fault_.empty() || ended_.contains(0); }))
      fail(formatted("{} has not answered within {} s",
                     process() == 0 ? named(gatherings_.missing(topic), local_ranks()) : name_of(0), answer_seconds_));
    if (!complete()) check_alive();
    if (!complete()) throw Error(formatted("{} has ended while others wait for it at \"{}\"", name_of(0), topic));
    auto texts = std::move(gathered_[topic]);
    gathered_.erase(topic);
    return texts;
  }
  void barrier(const std::string& topic) { all_gather(topic, ""); }

  // This process has failed: all_gather() ends with a PeerError, now and from now on.
  void abort() {
    std::lock_guard lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }
  // This process has failed for this reason, of which all others learn.
  void report_failure(const std::string& why) {
    std::lock_guard lock(mutex_);
    for (const auto& [line, process] : lines_)
      if (process <= 1) control_->send(line, {Kind::failed, {why}});
    suspect(process(), why);
  }
  // The job cannot go on for this reason; said by process 0, or by process 1 in its absence.
  void end_job(const std::string& why) {
    std::lock_guard lock(mutex_);
    fail(why);
  }
  // The fault; waits for it until the limit or until done(), which is looked at after wake(). Empty: there is none.
  std::string wait_for_fault(const Limit& limit, const std::function<bool()>& done) {
    std::unique_lock lock(mutex_);
    wait(lock, limit, [&] { return !fault_.empty() || done(); });
    return fault_;
  }
  void wake() {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

  // Tells processes 0 and 1 something; it does not wait.
  void post(const std::vector<std::string>& parts) {
    std::lock_guard lock(mutex_);
    for (const auto& [line, process] : lines_)
      if (process <= 1) control_->send(line, {Kind::board, parts});
  }
  // Of processes 0 and 1: the last post of each other process since the last call; and those that have said farewell.
  std::pair<std::map<int, std::vector<std::string>>, std::set<int>> take_posts() {
    std::lock_guard lock(mutex_);
    return {std::exchange(posts_, {}), ended_};
  }

  // Connects to another process of the job. Throws ConnectionError.
  Socket connect(int process, ConnectionPurpose purpose, const std::array<int32_t, 3>& numbers,
                 const Limit& limit) const {
    const Peer& peer = peers_.at(static_cast<size_t>(process));
    const Hello hello{.purpose = purpose, .to_process = process, .numbers = numbers, .job = id_};
    return detail::connect_to_any({peer.address, peer.port}, hello, token_, name_of(process), limit).first;
  }
  // Takes the data connections of other processes; called on another thread.
  void serve_data(DataDoor::Take take) { data_door_.serve(std::move(take)); }

 private:
  enum Kind : uint32_t { greeting = 1, verdict, text, gathered, fault, end, failed, board };

  // ---- The meeting

  void hold_meeting(Rendezvous& at) {
    id_ = random_nonce();
    Endpoint endpoint;
    std::optional<MeetingFile> file;
    Socket listening = std::move(at.listening);
    if (const auto path = at.file()) {
      std::tie(listening, endpoint) = listen_anywhere(at.token, at.address);
      file.emplace(*path, endpoint, id_);
    } else {
      endpoint = parse_endpoint(at.where);
      if (!listening) listening = listen_at_meeting_point(endpoint, at.token);
    }
    if (token_.empty())
      at.say("notice: without a token (TRAIN_GPT_TOKEN) every program on this machine may join this job");
    std::unique_lock lock(mutex_);
    meeting_.emplace(introduction(me_, at, endpoint.port), at);
    listen(std::move(listening), at.say);
    NowAndThen reminder(std::min(5.0, at.init_timeout / 4));
    while (!(verdict_ = meeting_->verdict())) {
      changed_.wait_until(lock, std::min(meeting_->next().deadline, reminder.next().deadline));
      if (reminder.due() && !meeting_->missing().empty()) at.say(meeting_->waiting());
    }
    if (verdict_->empty()) {
      peers_ = meeting_->peers();
      for (int p = 1; p < processes(); ++p) lines_[meeting_->line_of(p)] = p;
    }
    for (const int line : meeting_->lines()) tell_verdict(line);
    if (verdict_->empty()) return;
    changed_.wait_until(lock, Limit::after(at.patience), [&] { return meeting_->is_over(); });
    throw Error(*verdict_);
  }

  void attend_meeting(Rendezvous& at) {
    Reached reached = reach_process_0(at, process());
    id_ = reached.job;
    const std::string address_0 = address_there(reached.socket).endpoint().host;
    Address free_port = address_here(reached.socket);
    free_port.set_port(0);
    const bool loopback = token_.empty() || detail::is_loopback_name(reached.endpoint.host);
    Socket listening = loopback ? listen_at(free_port) : listen_everywhere(0);
    const int port = address_here(listening).endpoint().port;
    listen(std::move(listening), at.say);

    std::unique_lock lock(mutex_);
    const int line = control_->add(std::move(reached.socket));
    lines_[line] = 0;
    control_->send(line, {Kind::greeting, introduction(me_, at, port).parts()});
    const double seconds = at.init_timeout + std::min(5.0, answer_seconds_);
    CHECK(changed_.wait_until(lock, Limit::after(seconds), [&] { return verdict_ || !fault_.empty(); }),
          "the rendezvous at {} has not answered within {} s", at.where, seconds);
    CHECK(verdict_, "the rendezvous at {} has ended before all processes had met; see what process 0 says", at.where);
    if (!verdict_->empty()) throw Error(*verdict_);
    for (Peer& peer : peers_)
      if (peer.address.empty()) peer.address = address_0;
  }

  void tell_verdict(int line) {
    std::vector<std::string> parts = parts_of(peers_);
    parts.insert(parts.begin(), *verdict_);
    control_->send(line, {Kind::verdict, parts});
  }

  // Every process but 0 and 1 connects with process 1; which also shows that they can reach each other.
  void connect_with_deputy() {
    std::string fault;
    if (process() >= 2) try {
        Socket socket =
            connect(1, ConnectionPurpose::control, {process(), 0, 0}, Limit::seconds(2 * handshake_seconds));
        std::lock_guard lock(mutex_);
        lines_[control_->add(std::move(socket))] = 1;
      } catch (const Error& error) {
        fault = formatted("{} cannot connect with {} at {}: {}", name_of(process()), name_of(1),
                          Endpoint{peers_[1].address, peers_[1].port}.text(), error.what());
      }
    for (const std::string& text : all_gather("deputy", fault, Limit::seconds(answer_seconds_)))
      if (!text.empty()) throw Error(text);
  }

  // ---- Connections with other processes; on the listener's thread

  void listen(Socket listening, const Say& say) {
    auto take = [this](const Hello& hello, Socket socket, const Address& from) {
      if (hello.purpose == ConnectionPurpose::data)
        return data_door_.arrive({hello.numbers[0], hello.numbers[1], hello.numbers[2]}, std::move(socket));
      std::lock_guard lock(mutex_);
      const int line = control_->add(std::move(socket));
      if (process() == 0) seen_at_[line] = from.endpoint().host;
      else lines_[line] = hello.numbers[0];
    };
    listener_ =
        std::make_unique<Listener>(std::move(listening), process(), id_, token_,
                                   Listener::Guests{[this](const Hello& hello) { return accept(hello); }, take}, say);
  }

  Answer accept(const Hello& hello) {
    if (hello.purpose == ConnectionPurpose::data) {
      if (hello.version != protocol_version) return Answer::wrong_version;
      return process_of(hello.numbers[2]) == process() ? Answer::welcome : Answer::wrong_process;
    }
    if (hello.purpose != ConnectionPurpose::control) return Answer::unknown;
    std::lock_guard lock(mutex_);
    if (process() == 0) return verdict_ && verdict_->empty() ? Answer::complete : Answer::welcome;
    return process() == 1 ? Answer::welcome : Answer::wrong_process;
  }

  // ---- Messages; on the control's thread

  void received(int line, Message message) try {
    std::lock_guard lock(mutex_);
    const std::vector<std::string>& parts = message.parts;
    const auto known = lines_.find(line);
    const int from = known == lines_.end() ? -1 : known->second;
    switch (message.kind) {
      case Kind::greeting: return arrived(line, Introduction::from(parts));
      case Kind::verdict: {
        verdict_ = parts.at(0);
        peers_ = peers_from({parts.begin() + 1, parts.end()});
        return changed_.notify_all();
      }
      case Kind::text: return contribute(from, parts.at(0), parts.at(1));
      case Kind::gathered: {
        gathered_[parts.at(0)].push_back(parts.at(1));
        return changed_.notify_all();
      }
      case Kind::fault: return fail(parts.at(0));
      case Kind::failed: return suspect(from, parts.at(0));
      case Kind::board: {
        posts_[from] = std::move(message.parts);
        return;
      }
      case Kind::end: {
        ended_.insert(from);
        check_gatherings();
        return changed_.notify_all();
      }
      default: throw Error("unknown");
    }
  } catch (const std::exception& error) {  // of the parts, and nothing was changed
    closed(line, "it sent a message of the wrong form");
  }

  void closed(int line, const std::string& why) {
    std::lock_guard lock(mutex_);
    if (meeting_) meeting_->leave(line);
    const auto known = lines_.find(line);
    if (known != lines_.end() && !ended_.contains(known->second))
      suspect(known->second, formatted("{} has gone: {}", peers_.empty() ? "another process" : name_of(known->second),
                                       Socket::is_end(why) ? "its process has ended" : why));
    changed_.notify_all();
  }

  void arrived(int line, Introduction introduction) {
    CHECK(process() == 0 && !lines_.contains(line));
    if (introduction.peer.address.empty()) introduction.peer.address = seen_at_[line];
    if (verdict_ && verdict_->empty())  // it was welcome a moment ago
      return control_->send(line, {Kind::verdict, {reason(Answer::complete)}});
    meeting_->arrive(line, std::move(introduction));
    if (verdict_) tell_verdict(line);
    changed_.notify_all();
  }

  // ---- What the processes say to all: each to process 0, which passes it on

  void check_alive() const {
    if (!fault_.empty()) throw PeerError(fault_);
    if (aborted_) throw PeerError();
  }

  // Of process 0.
  void contribute(int from, const std::string& topic, const std::string& text) {
    if (const auto texts = gatherings_.add(from, topic, text)) {
      for (const std::string& its : *texts) broadcast({Kind::gathered, {topic, its}});
      gathered_[topic] = *texts;
      changed_.notify_all();
    }
    check_gatherings();
  }
  // Nobody waits for a process that has ended.
  void check_gatherings() {
    if (const auto ended = gatherings_.waits_for(ended_))
      fail(formatted("{} has ended while others wait for it at \"{}\"", name_of(ended->first), ended->second));
  }

  // ---- The fault

  // A process has failed, or is gone. All shall learn the same reason: so process 0 decides, or process 1 about process
  // 0; and if neither is there any more, nobody tells within a moment.
  void suspect(int which, const std::string& why) {
    if (suspicion_.empty()) suspicion_ = why, suspicion_due_ = Limit::seconds(1);
    if (process() == 0 || (process() == 1 && which == 0)) fail(suspicion_);
    changed_.notify_all();
  }
  void fail(const std::string& why) {
    if (!fault_.empty()) return;
    fault_ = why;
    if (process() <= 1) broadcast({Kind::fault, {fault_}});
    changed_.notify_all();
  }
  // False: not before the limit.
  template <class Done>
  bool wait(std::unique_lock<std::mutex>& lock, const Limit& limit, Done&& done) {
    while (!done()) {
      if (limit.passed()) return false;
      const bool suspects = fault_.empty() && !suspicion_.empty();
      if (suspects && suspicion_due_.passed()) fail(suspicion_);
      else changed_.wait_until(lock, suspects ? std::min(limit.deadline, suspicion_due_.deadline) : limit.deadline);
    }
    return true;
  }

  void broadcast(const Message& message) {
    for (const auto& [line, process] : lines_) control_->send(line, message);
  }

  int process_of(int rank) const { return rank / local_ranks(); }
  std::string name_of(int process) const {
    return formatted("{} on {}", named({process}, local_ranks()), peers_.at(static_cast<size_t>(process)).host);
  }
  int line_to(int process) const {
    return std::find_if(lines_.begin(), lines_.end(), [&](const auto& l) { return l.second == process; })->first;
  }
  int count_here(int end) const {
    const std::string& here = peers_[static_cast<size_t>(process())].machine;
    return static_cast<int>(
        std::count_if(peers_.begin(), peers_.begin() + end, [&](const Peer& p) { return p.machine == here; }));
  }

  Greeting me_;
  std::string token_;
  double answer_seconds_;    // a process that was here a moment ago takes no longer
  Nonce id_{};               // of the job
  std::vector<Peer> peers_;  // set once all have met

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::optional<Meeting> meeting_;      // of process 0
  std::map<int, std::string> seen_at_;  // of process 0: where connections come from
  std::optional<std::string> verdict_;  // why the job cannot begin; empty: it can
  std::map<int, int> lines_;            // the number of a connection in control_, and the process at its other end
  std::set<int> ended_;                 // processes that have said that they end
  Gatherings gatherings_;               // of process 0
  std::map<std::string, std::vector<std::string>> gathered_;  // by topic: the texts of all processes
  std::map<int, std::vector<std::string>> posts_;             // by process
  std::string fault_;                                         // why no process can go on
  std::string suspicion_;                                     // what it may be
  Limit suspicion_due_;                                       // when nobody knows better
  bool aborted_ = false;

  DataDoor data_door_;

  std::unique_ptr<Control> control_;  // last: their threads use all of this
  std::unique_ptr<Listener> listener_;
};

}  // namespace llmc
