// control_plane.h: the processes of a job meet, agree, and from then on can talk.
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
#include <mutex>

#include "core/clock.h"
#include "net/meeting/gatherings.h"
#include "net/meeting/meeting.h"
#include "net/meeting/roster.h"

namespace llmc {

class ControlPlane : public Roster {
 public:
  // Blocks until all processes have met and agree. If they do not, it throws the same SharedError on all of them.
  ControlPlane(const Greeting& greeting, Rendezvous at)
      : Roster(greeting, at.token),
        answer_seconds_(std::min(60.0, at.init_timeout)),
        say_(at.say),
        gatherings_(greeting.processes) {
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

  // The job is about to end, and is likely to start again: spares are not told, and wait for that.
  void keep_spares() {
    const std::lock_guard lock(mutex_);
    spares_.clear();
  }
  // Tells the others that this process has ended, unless it has failed: then they should find it gone.
  ~ControlPlane() {
    std::unique_lock lock(mutex_);
    // The process at the other end of a cut connection asks whether this one is alive: so it stays until asked.
    if (cut_from_ && process() <= 1)
      changed_.wait_until(lock, Limit::seconds(1).deadline, [&] { return asked_by_.contains(*cut_from_); });
    if (!aborted_ && !fault_.known() && std::uncaught_exceptions() == 0) {
      broadcast({Kind::end, {}});
      for (const auto& [line, host] : spares_) control_->send(line, {Kind::end, {}});
    }
    ending_ = true;
  }

  // The texts of all processes, by process. All of them call it, each topic from one thread at a time. A text may have
  // at most a megabyte. seconds: how long process 0 waits; none: for ever.
  std::vector<std::string> all_gather(const std::string& topic, const std::string& text,
                                      std::optional<double> seconds = {}) {
    if (processes() == 1) return {text};
    std::unique_lock lock(mutex_);
    check_alive();
    const Message said{Kind::text, {topic, text}};
    said.require_short();  // also of process 0, which passes it on
    process() == 0 ? contribute(0, topic, text) : control_->send(line_to(0), said);
    // The others wait longer, so that process 0 says who is missing.
    const double longer = process() == 0 ? 0 : std::min(5.0, seconds.value_or(0));
    const auto complete = [&] { return gathered_[topic].size() == static_cast<size_t>(processes()); };
    const auto over = [&] { return complete() || aborted_ || fault_.known() || ended_.contains(0); };
    if (!seconds) wait(lock, Limit(), over);
    else if (!wait_running(lock, *seconds + longer, over))
      fail({formatted("no answer within {} s from {}", *seconds + longer,
                      names_of(process() == 0 ? gatherings_.missing(topic) : std::vector<int>{0}))});
    if (!complete()) check_alive();
    if (!complete()) throw PeerError(formatted("{} has ended while others wait for it at \"{}\"", name_of(0), topic));
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
  // This process has failed for this reason, which all others learn, unless it already knows why the job ends.
  void report_failure(Fault fault) {
    std::lock_guard lock(mutex_);
    if (fault_.known()) return;  // the judges know it, too
    fault.why = Fault::limited(fault.why);
    tell_judges({Kind::failed, fault.parts()});
    suspect(process(), fault);
  }
  // The job cannot go on for this reason; said by process 0, or by process 1 in its absence.
  void end_job(const std::string& why) {
    std::lock_guard lock(mutex_);
    fail({why});
  }
  // Returns the fault, if there is one; waits for it until the limit or done(), which is checked after wake().
  Fault wait_for_fault(const Limit& limit, const std::function<bool()>& done) {
    std::unique_lock lock(mutex_);
    wait(lock, limit, [&] { return fault_.known() || done(); });
    return fault_;
  }
  void wake() {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

  // Tells processes 0 and 1 something; it does not wait. Each post replaces the last one.
  void post(const std::vector<std::string>& parts) {
    std::lock_guard lock(mutex_);
    send_regular(lines_to_first(2), {Kind::board, parts});
  }
  // On processes 0 and 1: the last post of each other process since the last call; and those that have said farewell.
  std::pair<std::map<int, std::vector<std::string>>, std::set<int>> take_posts() {
    std::lock_guard lock(mutex_);
    return {std::exchange(posts_, {}), ended_};
  }

  // Processes 0 and 1, which judge the others, tell them that they are there.
  void beat() {
    std::lock_guard lock(mutex_);
    if (process() <= 1) send_regular(lines_to_first(processes()), {Kind::beat, {}});
    for (const auto& [line, host] : spares_) control_->send(line, {Kind::beat, {}});
  }
  // Which of processes 0 and 1 have said anything since the last call; and the processes that have said farewell.
  std::pair<std::set<int>, std::set<int>> take_heard() {
    std::lock_guard lock(mutex_);
    return {std::exchange(heard_, {}), ended_};
  }

  // Takes the data connections of other processes; called on another thread.
  void serve_data(DataDoor::Take take) { data_door_.serve(std::move(take)); }

 private:
  // ---- The meeting (rendezvous.h)

  void hold_meeting(Rendezvous& at);    // on process 0
  void attend_meeting(Rendezvous& at);  // on the others
  void tell_verdict(const std::set<int>& lines);
  void connect_with_deputy();
  Limit give_places(double spare_wait);

  // ---- Connections with other processes; on the listener's thread

  void listen(Socket listening, const Say& say) {
    auto take = [this](const Hello& hello, Socket socket, const Address& from) {
      if (hello.purpose == ConnectionPurpose::data)
        return data_door_.arrive({hello.numbers[0], hello.numbers[1], hello.numbers[2]}, std::move(socket));
      std::lock_guard lock(mutex_);
      if (hello.purpose == ConnectionPurpose::question) {
        asked_by_.insert(hello.numbers[0]);
        return changed_.notify_all();
      }
      const int line = control_->add(std::move(socket));
      if (process() == 0) {
        if (hello.numbers[1] != 0) were_spares_.insert(line);
        return meeting_->connected(line, from.endpoint().host);
      }
      std::erase_if(lines_, [&](const auto& l) { return l.second == hello.numbers[0]; });  // it has tried again
      lines_[line] = hello.numbers[0];
    };
    listener_ =
        std::make_unique<Listener>(std::move(listening), process(), id_, token_,
                                   Listener::Guests{[this](const Hello& hello) { return accept(hello); }, take}, say);
  }

  Answer accept(const Hello& hello) {
    // Only a process that connects to process 0 may not know the job yet.
    if (hello.job != id_ && (process() != 0 || hello.purpose == ConnectionPurpose::data)) return Answer::wrong_job;
    if (hello.purpose != ConnectionPurpose::control) return answer_to(hello);
    std::lock_guard lock(mutex_);
    const int32_t from = hello.numbers[0];
    if (process() == 0)
      return from != spare_process && verdict_ && !verdict_->known() ? Answer::complete : Answer::welcome;
    return process() == 1 && from >= 2 && from < processes() ? Answer::welcome : Answer::wrong_process;
  }

  // ---- Messages; on the control's thread

  void received(int line, Message message) try {
    std::lock_guard lock(mutex_);
    const std::vector<std::string>& parts = message.parts;
    const auto known = lines_.find(line);
    const auto sender = known == lines_.end() ? std::nullopt : std::optional(known->second);
    CHECK(may_say(message.kind, sender, process()));
    const int from = sender.value_or(0);  // a greeting has no sender yet
    if (process() > 1 && from <= 1) heard_.insert(from);
    switch (message.kind) {
      case Kind::greeting: return arrived(line, Introduction::from(parts));
      case Kind::verdict: {  // with the next of the peers; it holds once all are known
        const Fault verdict = Fault::from(parts);
        std::vector<Peer> peers = peers_;
        add_peers(peers, std::span(parts).subspan(2));
        CHECK(!verdict_ && (verdict.known() || (peers.size() > peers_.size() && std::ssize(peers) <= processes())));
        peers_ = std::move(peers);
        if (verdict.known() || std::ssize(peers_) == processes()) verdict_ = verdict;
        return changed_.notify_all();
      }
      case Kind::text: return contribute(from, parts.at(0), parts.at(1));
      case Kind::gathered: {  // the next of the texts
        CHECK(parts.size() > 1);
        std::vector<std::string>& texts = gathered_[parts[0]];
        texts.insert(texts.end(), parts.begin() + 1, parts.end());
        return changed_.notify_all();
      }
      case Kind::fault: return fail(Fault::from(parts));
      case Kind::failed: return suspect(from, Fault::from(parts));
      case Kind::board: posts_[from] = std::move(message.parts); return;
      case Kind::end: {
        ended_.insert(from);
        check_gatherings();
        return changed_.notify_all();
      }
      default: return;  // a beat
    }
  } catch (const std::exception& error) {  // in the parts, before anything was changed
    closed(line, "it sent a message of the wrong form");
  }

  void closed(int line, const std::string& why) {
    std::unique_lock lock(mutex_);
    if (meeting_) meeting_->leave(line);
    if (ending_) return;  // the others close their ends, too
    if (const auto spare = spares_.extract(line)) say_(formatted("the spare on {} has gone", spare.mapped()));
    const auto known = lines_.find(line);
    // Until all are connected, process 1 cannot tell whether one tries again; process 0 notices one that ends.
    const bool counts = connected_ || process() == 0 || (known != lines_.end() && known->second == 0);
    if (known != lines_.end() && counts && !ended_.contains(known->second)) {
      const int other = known->second;
      const bool broke = !fault_.known() && connected_ && !std::string_view(why).starts_with("it sent ");
      lock.unlock();
      const bool cut = broke && is_alive(other);
      lock.lock();
      if (cut) cut_from_ = other;
      suspect(other, {cut              ? cut_between(process(), other)
                      : peers_.empty() ? end_before_all_met(why)
                                       : formatted("{} has gone: {}", name_of(other),
                                                   Socket::is_end(why) ? "its process has ended" : why)});
    }
    changed_.notify_all();
  }
  void arrived(int line, Introduction introduction) {
    const std::string from = meeting_->introduced(line);
    introduction.check();
    if (introduction.greeting.process == spare_process) return spare_arrived(line, introduction);
    if (introduction.peer.address.empty()) introduction.peer.address = from;
    if (verdict_ && !verdict_->known())  // it was welcome a moment ago
      return control_->send(line, {Kind::verdict, Fault{reason(Answer::complete), ExitStatus::refused}.parts()});
    // Where a spare has been sent, its owner may come back: who comes first has the place.
    const int process = introduction.greeting.process;
    if ((given_.contains(process) || were_spares_.contains(line)) && !meeting_->misses(process))
      return control_->send(line, {Kind::verdict, Fault{"another process has taken the place of this one: with --spare "
                                                        "it waits for another one"}
                                                      .parts()});
    meeting_->arrive(line, std::move(introduction));
    if (verdict_) tell_verdict({line});
    changed_.notify_all();
  }

  // It waits from now on, also if the job has begun.
  void spare_arrived(int line, const Introduction& spare) {
    constexpr size_t most_spares = 64;
    std::string fault = meeting_->fault_of_spare(spare);
    if (fault.empty() && spares_.size() == most_spares) fault = formatted("there are {} spares already", most_spares);
    if (fault.empty()) {
      spares_[line] = spare.peer.host;
      control_->send(line, {Kind::beat, {}});
      say_(formatted("a spare waits on {}", spare.peer.host));
    } else {
      control_->send(line, {Kind::verdict, Fault{fault, ExitStatus::refused}.parts()});
      say_(formatted("a spare on {} was refused: {}", spare.peer.host, fault));
    }
    changed_.notify_all();
  }

  // ---- Messages to all processes: each goes to process 0, which passes it on

  void check_alive() const {
    if (fault_.known()) throw PeerError(fault_.why, fault_.status);
    if (aborted_) throw PeerError();
  }

  // On process 0.
  void contribute(int from, const std::string& topic, const std::string& text) {
    if (const auto texts = gatherings_.add(from, topic, text)) {
      for (const Message& piece : in_pieces(Kind::gathered, {topic}, *texts)) broadcast(piece);
      gathered_[topic] = *texts;
      changed_.notify_all();
    }
    check_gatherings();
  }
  // Nobody waits for a process that has ended.
  void check_gatherings() {
    if (const auto ended = gatherings_.waits_for(ended_))
      fail({formatted("{} has ended while others wait for it at \"{}\"", name_of(ended->first), ended->second)});
  }

  // ---- The fault

  // A process has failed, or is gone. All should learn the same reason: so process 0 decides, or process 1 about
  // process 0. If both are gone and no reason arrives within a second, this one counts.
  void suspect(int which, const Fault& fault) {
    if (!suspicion_.known()) suspicion_ = fault, suspicion_due_ = Limit::seconds(1);
    if (process() == 0 || (process() == 1 && which == 0)) fail(suspicion_);
    changed_.notify_all();
  }
  void fail(const Fault& fault) {
    if (fault_.known()) return;
    fault_ = {Fault::limited(fault.why), fault.status};
    fault_known_.wake();
    // Process 0 or 1 may have been stopped: it should not take the end of this process for the cause.
    process() <= 1 ? broadcast({Kind::fault, fault_.parts()}) : tell_judges({Kind::failed, fault_.parts()});
    changed_.notify_all();
  }
  // False: the limit came first.
  template <class Done>
  bool wait(std::unique_lock<std::mutex>& lock, const Limit& limit, Done&& done) {
    while (!done()) {
      if (limit.passed()) return false;
      const bool suspects = !fault_.known() && suspicion_.known();
      if (suspects && suspicion_due_.passed()) fail(suspicion_);
      else changed_.wait_until(lock, suspects ? std::min(limit.deadline, suspicion_due_.deadline) : limit.deadline);
    }
    return true;
  }

  // The same in seconds in which this process runs.
  template <class Done>
  bool wait_running(std::unique_lock<std::mutex>& lock, double seconds, Done&& done) {
    for (RunningLimit limit(seconds); !done();) {
      if (limit.passed()) return false;
      limit.wait(poll_seconds, [&](const Limit& soon) { wait(lock, soon, done); });
    }
    return true;
  }

  // A process that is alone has no control_, and no lines.
  void tell_judges(const Message& message) { send(lines_to_first(2), message); }
  void broadcast(const Message& message) { send(lines_to_first(processes()), message); }
  void send(const std::set<int>& lines, const Message& message) {
    if (!lines.empty()) control_->send(lines, message);
  }
  void send_regular(const std::set<int>& lines, const Message& message) {
    if (!lines.empty()) control_->send_regular(lines, message);
  }

  // The connections with the first n processes.
  std::set<int> lines_to_first(int n) const {
    std::set<int> lines;
    for (const auto& [line, process] : lines_)
      if (process < n) lines.insert(lines.end(), line);
    return lines;
  }

  int line_to(int process) const {
    return std::find_if(lines_.begin(), lines_.end(), [&](const auto& l) { return l.second == process; })->first;
  }
  static constexpr double poll_seconds = 0.5;  // of waits during which this process may be stopped

  double answer_seconds_;  // a process that was here a moment ago takes no longer

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::optional<Meeting> meeting_;     // on process 0
  std::set<int> were_spares_;          // on process 0: the connections of those that were sent to a place
  std::set<int> given_;                // on process 0: the processes whose places these are
  std::map<int, std::string> spares_;  // on process 0: the connections of those that wait, and their hosts
  Clock::time_point last_given_{};     // on process 0: when they were given places
  Say say_;
  std::optional<Fault> verdict_;  // why the job cannot begin; none known: it can
  std::map<int, int> lines_;      // the number of a connection in control_, and the process at its other end
  std::set<int> ended_;           // processes that have said that they end
  std::optional<int> cut_from_;   // a live process whose connection to this one was cut
  std::set<int> asked_by_;        // processes that have asked whether this one is alive
  Gatherings gatherings_;         // on process 0
  std::map<std::string, std::vector<std::string>> gathered_;  // by topic: the texts of all processes
  std::map<int, std::vector<std::string>> posts_;             // by process
  std::set<int> heard_;                                       // which of processes 0 and 1 were heard from
  bool connected_ = false;                                    // all are connected with processes 0 and 1
  Fault fault_;                                               // why no process can go on
  Fault suspicion_;                                           // what the fault may be
  Limit suspicion_due_;                                       // when it becomes the fault
  Waker fault_known_;
  bool aborted_ = false, ending_ = false;

  DataDoor data_door_;

  std::unique_ptr<Control> control_;  // last: their threads use all of this
  std::unique_ptr<Listener> listener_;
};

}  // namespace llmc
