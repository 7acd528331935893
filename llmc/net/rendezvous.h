// rendezvous.h: the processes of a job meet, agree, and from then on can talk.
//
// Process 0 listens. Each other process connects, proves that it knows the token (handshake.h) and says what it is
// (agreement.h). Once all are there or something is wrong (meeting.h), process 0 tells all of them who they are and
// where they listen, or why the job cannot begin. What they say later goes through process 0 too. Process 1 is
// connected with everyone as well, so that somebody can speak to all when process 0 is gone.
#pragma once
#include <condition_variable>
#include <exception>
#include <fstream>
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
#include "net/listener.h"
#include "net/meeting.h"
#include "net/meeting_point.h"

namespace llmc {

// A one-way connection for data, from a rank of another process to a rank of this one.
struct Channel {
  int group = 0, from = 0, to = 0;
  auto operator<=>(const Channel&) const = default;
};

class ControlPlane {
 public:
  // Blocks until all processes have met and agree. If they cannot, it throws the same error on all of them.
  ControlPlane(const Greeting& greeting, Rendezvous at) : me_(greeting), token_(at.token) {
    CHECK(me_.processes >= 1 && me_.process >= 0 && me_.process < me_.processes);
    if (processes() == 1) {
      peers_ = {introduce_myself(at, 0).peer};
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
    if (!aborted_ && std::uncaught_exceptions() == 0) broadcast({Kind::end, {}});
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
  std::vector<std::string> all_gather(const std::string& topic, const std::string& text) {
    return all_gather(topic, text, Limit{});
  }
  void barrier(const std::string& topic) { all_gather(topic, ""); }

  // This process has failed: all_gather() ends with a PeerError, now and from now on.
  void abort() {
    std::lock_guard lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }

  // Connects to another process of the job. Throws ConnectionError.
  Socket connect(int process, ConnectionPurpose purpose, const std::array<int32_t, 3>& numbers,
                 const Limit& limit) const {
    const Peer& peer = peers_.at(static_cast<size_t>(process));
    const Hello hello{.purpose = purpose, .to_process = process, .numbers = numbers, .job = id_};
    return detail::connect_to_any({peer.address, peer.port}, hello, token_, name_of(process), limit).first;
  }
  // Who takes the data connections of other processes, also those that have come already; called on another thread.
  // Empty: nobody any more.
  void serve_data(std::function<void(const Channel&, Socket)> take) {
    std::lock_guard lock(data_mutex_);
    take_data_ = std::move(take);
    if (!take_data_) return;
    for (auto& [channel, socket] : early_data_) take_data_(channel, std::move(socket));
    early_data_.clear();
  }

 private:
  enum Kind : uint32_t { greeting = 1, verdict, text, gathered, fault, end };
  static constexpr double answer_seconds = 60;  // a process that was here a moment ago takes no longer

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
    meeting_.emplace(introduce_myself(at, endpoint.port), at);
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
    control_->send(line, {Kind::greeting, introduce_myself(at, port).parts()});
    const double seconds = at.init_timeout + answer_seconds;
    CHECK(changed_.wait_until(lock, Limit::after(seconds), [&] { return verdict_ || !fault_.empty(); }),
          "the rendezvous at {} has not answered within {} s", at.where, seconds);
    CHECK(verdict_, "the rendezvous at {} has ended before all processes had met; see what process 0 says", at.where);
    if (!verdict_->empty()) throw Error(*verdict_);
    for (Peer& peer : peers_)
      if (peer.address.empty()) peer.address = address_0;
  }

  Introduction introduce_myself(const Rendezvous& at, int port) const {
    std::string boot = "unknown";
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
    return {protocol_version, me_, {process(), host_name(), host_name() + " " + boot, at.address, port}};
  }

  void tell_verdict(int line) {
    std::vector<std::string> parts = {*verdict_};
    for (const Peer& p : peers_)
      for (const std::string& part :
           {p.host, p.machine, detail::is_loopback_name(p.address) ? "" : p.address, std::to_string(p.port)})
        parts.push_back(part);
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
    for (const std::string& text : all_gather("deputy", fault, Limit::seconds(answer_seconds)))
      if (!text.empty()) throw Error(text);
  }

  // ---- Connections with other processes; on the listener's thread

  void listen(Socket listening, const Say& say) {
    auto take = [this](const Hello& hello, Socket socket, const Address& from) {
      if (hello.purpose == ConnectionPurpose::data)
        return take_data({hello.numbers[0], hello.numbers[1], hello.numbers[2]}, std::move(socket));
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

  void take_data(const Channel& channel, Socket socket) {
    std::lock_guard lock(data_mutex_);
    if (take_data_) take_data_(channel, std::move(socket));
    else early_data_.emplace_back(channel, std::move(socket));
  }

  // ---- Messages; on the control's thread

  void received(int line, Message message) try {
    std::lock_guard lock(mutex_);
    const std::vector<std::string>& parts = message.parts;
    const auto known = lines_.find(line);
    const int from = known == lines_.end() ? -1 : known->second;
    switch (message.kind) {
      case Kind::greeting: return arrived(line, Introduction::from(parts));
      case Kind::verdict: return told(parts);
      case Kind::text: return contribute(from, parts.at(0), parts.at(1));
      case Kind::gathered: {
        gathered_[parts.at(0)].push_back(parts.at(1));
        return changed_.notify_all();
      }
      case Kind::fault: return fail(parts.at(0));
      case Kind::end: {
        ended_.insert(from);
        if (process() == 0) check_gatherings();
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
      fail(formatted("{} has gone: {}", peers_.empty() ? "another process" : name_of(known->second), why));
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
  void told(const std::vector<std::string>& parts) {
    for (size_t i = 1; i + 4 <= parts.size(); i += 4)
      peers_.push_back(
          {static_cast<int>(i / 4), parts[i], parts[i + 1], parts[i + 2], std::atoi(parts[i + 3].c_str())});
    verdict_ = parts.at(0);
    changed_.notify_all();
  }

  // ---- What the processes say to all: each to process 0, which passes it on

  std::vector<std::string> all_gather(const std::string& topic, const std::string& text, const Limit& limit) {
    if (processes() == 1) return {text};
    std::unique_lock lock(mutex_);
    check_alive();
    process() == 0 ? contribute(0, topic, text) : control_->send(line_to(0), {Kind::text, {topic, text}});
    const auto complete = [&] { return gathered_[topic].size() == static_cast<size_t>(processes()); };
    const bool in_time = changed_.wait_until(
        lock, limit.deadline, [&] { return complete() || aborted_ || !fault_.empty() || ended_.contains(0); });
    if (!in_time)
      fail(formatted("{} has not answered within {} s", process() == 0 ? missing_in(topic) : name_of(0),
                     answer_seconds));
    if (!complete()) check_alive();
    if (!complete()) throw Error(formatted("{} has ended while others wait for it at \"{}\"", name_of(0), topic));
    auto texts = std::move(gathered_[topic]);
    gathered_.erase(topic);
    return texts;
  }
  void check_alive() const {
    if (aborted_) throw PeerError();
    if (!fault_.empty()) throw Error(fault_);
  }

  // Of process 0.
  void contribute(int from, const std::string& topic, const std::string& text) {
    auto& texts = gathering_[topic];
    texts[from] = text;
    if (texts.size() < static_cast<size_t>(processes())) return check_gatherings();
    for (const auto& [process, text] : texts) {
      broadcast({Kind::gathered, {topic, text}});
      gathered_[topic].push_back(text);
    }
    gathering_.erase(topic);
    changed_.notify_all();
  }
  // Nobody waits for a process that has ended.
  void check_gatherings() {
    for (const auto& [topic, texts] : gathering_)
      for (const int process : ended_)
        if (!texts.contains(process))
          return fail(formatted("{} has ended while others wait for it at \"{}\"", name_of(process), topic));
  }
  std::string missing_in(const std::string& topic) {
    std::vector<int> missing;
    for (int p = 0; p < processes(); ++p)
      if (!gathering_[topic].contains(p)) missing.push_back(p);
    return named(missing, local_ranks());
  }

  // No process can go on.
  void fail(const std::string& why) {
    if (fault_.empty()) fault_ = why;
    if (process() == 0) broadcast({Kind::fault, {fault_}});
    changed_.notify_all();
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
  Nonce id_{};               // of the job
  std::vector<Peer> peers_;  // set once all have met

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::optional<Meeting> meeting_;      // of process 0
  std::map<int, std::string> seen_at_;  // of process 0: where connections come from
  std::optional<std::string> verdict_;  // why the job cannot begin; empty: it can
  std::map<int, int> lines_;            // the number of a connection in control_, and the process at its other end
  std::set<int> ended_;                 // processes that have said that they end
  std::map<std::string, std::map<int, std::string>> gathering_;  // of process 0: texts by topic and process
  std::map<std::string, std::vector<std::string>> gathered_;     // by topic: those of all processes
  std::string fault_;                                            // why no process can go on
  bool aborted_ = false;

  std::mutex data_mutex_;
  std::function<void(const Channel&, Socket)> take_data_;
  std::vector<std::pair<Channel, Socket>> early_data_;

  std::unique_ptr<Control> control_;  // last: their threads use all of this
  std::unique_ptr<Listener> listener_;
};

}  // namespace llmc
