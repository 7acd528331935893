// spare.h: a process beyond the number of a job's processes. It waits at the rendezvous, also while the job runs; when
// the job starts again and a process stays away, process 0 gives it that one's place. Then it comes again, as that one.
#pragma once
#include <condition_variable>
#include <mutex>

#include "net/meeting/meeting.h"
#include "net/wire/control.h"

namespace llmc {

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
