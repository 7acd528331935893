// rendezvous.h: how the processes of a job come together: the part of ControlPlane that is over once they have met; and
// a spare, a process beyond their number. It waits at the rendezvous, also while the job runs; when the job starts
// again and a process stays away, process 0 gives it that one's place. Then it comes again, as that one.
#pragma once
#include "core/clock.h"
#include "net/meeting/control_plane.h"

namespace llmc {

inline void ControlPlane::hold_meeting(Rendezvous& at) {
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
  std::unique_lock lock(mutex_);
  meeting_.emplace(introduction(me_, at, endpoint.port), at);
  listen(std::move(listening), at.say);
  NowAndThen reminder = at.reminder();
  while (!(verdict_ = meeting_->verdict())) {
    const Limit places = give_places(at.spare_wait);
    meeting_->wait(poll_seconds, [&](const Limit& soon) {
      changed_.wait_until(lock, std::min({soon.deadline, reminder.next().deadline, places.deadline}));
    });
    if (reminder.due() && !meeting_->missing().empty()) at.say(meeting_->waiting());
  }
  verdict_->why = Fault::limited(verdict_->why);
  if (!verdict_->known()) {
    peers_ = meeting_->peers();
    for (int p = 1; p < processes(); ++p) lines_[meeting_->line_of(p)] = p;
  }
  tell_verdict(meeting_->lines());
  if (!verdict_->known()) return;
  changed_.wait_until(lock, Limit::after(at.patience), [&] { return meeting_->is_over(); });
  throw SharedError(verdict_->why, verdict_->status);
}

// Gives spares the places of processes that stay away: once nobody has come for so long. Returns when to try again.
inline Limit ControlPlane::give_places(double spare_wait) {
  if (spares_.empty()) return Limit{};
  const auto seconds = Limit::lasting(spare_wait);
  const Limit due{std::max(meeting_->last_arrival(), last_given_) + seconds};
  if (!due.passed()) return due;
  last_given_ = Clock::now();
  for (const int process : meeting_->missing()) {
    if (spares_.empty()) break;
    const auto spare = spares_.extract(spares_.begin());
    given_.insert(process);
    control_->send(spare.key(), {Kind::place, {std::to_string(process)}});
    say_(formatted("the spare on {} takes the place of {}", spare.mapped(), named({process}, local_ranks())));
  }
  return Limit{last_given_ + seconds};
}

inline void ControlPlane::attend_meeting(Rendezvous& at) {
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
  const auto lost = [&](const std::string& how) {
    return Error(formatted("the rendezvous at {} {}", at.where, how), ExitStatus::lost);
  };
  if (!wait_running(lock, seconds, [&] { return verdict_ || fault_.known(); }))
    throw lost(formatted("has not answered within {} s", seconds));
  if (!verdict_) throw lost(fault_.why);
  if (verdict_->known()) throw SharedError(verdict_->why, verdict_->status);
  for (Peer& peer : peers_)
    if (peer.address.empty()) peer.address = address_0;
}

inline void ControlPlane::tell_verdict(const std::set<int>& lines) {
  for (const Message& piece : in_pieces(Kind::verdict, verdict_->parts(), parts_of(peers_), parts_of_a_peer))
    control_->send(lines, piece);
}

// Every process but 0 and 1 connects with process 1; which also shows that they can reach each other.
inline void ControlPlane::connect_with_deputy() {
  std::string fault;
  if (process() >= 2) try {
      Socket socket =
          connect(1, ConnectionPurpose::control, {process(), 0, 0}, Limit::seconds(answer_seconds_ / 2, &fault_known_));
      std::lock_guard lock(mutex_);
      lines_[control_->add(std::move(socket))] = 1;
    } catch (const Error& error) {
      fault = formatted("{} cannot connect with {} at {}: {}", name_of(process()), name_of(1),
                        Endpoint{peers_[1].address, peers_[1].port}.text(), error.what());
    }
  for (const std::string& text : all_gather("deputy", fault, answer_seconds_))
    if (!text.empty()) throw Error(Fault::limited(text), ExitStatus::lost);
  std::lock_guard lock(mutex_);
  connected_ = true;
}

// Waits for a place: the number of the process that it was. None: the job has ended. Throws if process 0 refuses this
// process, and if it cannot be reached within --init-timeout, also after it has gone. silence: seconds after which a
// process 0 that says nothing counts as gone.
inline std::optional<int> wait_as_spare(Greeting me, const Rendezvous& at, double silence) {
  me.process = spare_process;
  struct Heard {
    std::optional<int> place;
    std::optional<Fault> verdict;
    bool waits = false, ended = false, closed = false;
    Limit silent;
  } heard;
  std::mutex mutex;
  std::condition_variable changed;
  for (bool again = false;; again = true) {
    Reached reached = reach_process_0(at, spare_process);
    heard = {};
    heard.silent = Limit::seconds(silence);
    const auto received = [&](int, const Message& message) {
      const std::lock_guard lock(mutex);
      try {
        switch (message.kind) {
          case Kind::place: heard.place = std::stoi(message.parts.at(0)); break;
          case Kind::verdict: heard.verdict = Fault::from(message.parts); break;
          case Kind::end: heard.ended = true; break;
          case Kind::beat:
            if (!std::exchange(heard.waits, true))
              at.say(formatted("waits as a spare{} at {}", again ? " again" : "", at.where));
            heard.silent = Limit::seconds(silence);
            break;
          default: break;
        }
      } catch (const std::exception&) {  // of the wrong form
        heard.closed = true;
      }
      changed.notify_all();
    };
    const auto closed = [&](int, const std::string&) {
      const std::lock_guard lock(mutex);
      heard.closed = true;
      changed.notify_all();
    };
    Control control({received, closed});
    std::unique_lock lock(mutex);
    control.send(control.add(std::move(reached.socket)), {Kind::greeting, introduction(me, at, 1).parts()});
    const auto over = [&] { return heard.place || heard.verdict || heard.ended || heard.closed; };
    while (!over() && !heard.silent.passed()) changed.wait_until(lock, heard.silent.deadline);
    if (heard.verdict) throw Error(heard.verdict->why, heard.verdict->status);
    if (heard.place) {
      CHECK(*heard.place > 0 && *heard.place < me.processes, "process 0 gave a spare the place of process {} of {}",
            *heard.place, me.processes);
      return heard.place;
    }
    if (heard.ended) return std::nullopt;
    at.say("process 0 has gone: waiting until the job starts again");
  }
}

}  // namespace llmc
