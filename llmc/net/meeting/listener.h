// listener.h: the door of a process: a thread that accepts connections and lets them prove who they are. Strangers get
// nothing but this thread's attention for a few seconds each, a bounded number at a time. Connections for data that
// have come in are held until somebody takes them.
#pragma once
#include <compare>
#include <list>
#include <mutex>
#include <stop_token>
#include <thread>

#include "net/meeting/handshake.h"

namespace llmc {

using Say = std::function<void(const std::string&)>;  // prints a line; called by several threads

class Listener {
 public:
  static constexpr size_t most_strangers = 64;  // at a time; beyond that, the oldest go

  // Handlers for connections that have proved that they know the token; both are called on the listener's thread.
  struct Guests {
    std::function<Answer(const Hello&)> accept;
    std::function<void(const Hello&, Socket, const Address& from)> take;  // accept() said welcome
  };

  Listener(Socket listening, int process, const Nonce& job, std::string token, Guests guests, Say say)
      : listening_(std::move(listening)),
        token_(std::move(token)),
        guests_(std::move(guests)),
        say_(std::move(say)),
        us_{.process = process, .job = job},
        thread_([this](const std::stop_token& ending) { run(ending); }) {}
  ~Listener() {
    thread_.request_stop();
    waker_.wake();
  }

 private:
  void run(const std::stop_token& ending) {
    std::vector<pollfd> polled;
    while (!ending.stop_requested()) {
      polled.assign({{waker_.fd(), POLLIN, 0}, {listening_.fd(), static_cast<short>(full_ ? 0 : POLLIN), 0}});
      Limit limit = full_ ? Limit::seconds(0.1) : Limit{};
      for (const Stranger& s : strangers_) {
        polled.push_back({s.socket.fd(), POLLIN, 0});
        limit.deadline = std::min(limit.deadline, s.limit.deadline);
      }
      if (::poll(polled.data(), polled.size(), limit.milliseconds()) < 0) continue;  // EINTR
      size_t i = 2;
      for (auto s = strangers_.begin(); s != strangers_.end();) {
        const auto next = std::next(s);
        if (polled[i++].revents != 0 || s->limit.passed()) attend(s);
        s = next;
      }
      full_ = false;
      if (polled[1].revents != 0 || polled[1].events == 0) accept_some();
    }
  }

  // Accepts only a few at a time, so that strangers already here are attended to.
  void accept_some() {
    for (size_t i = 0; i < most_strangers / 4; ++i) {
      Socket socket(::accept4(listening_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        // No file descriptor, or no memory, is left: the oldest stranger makes room, and the others wait a moment.
        full_ = errno != EAGAIN && errno != EWOULDBLOCK;
        const bool no_room = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
        if (no_room && full_report_.due())
          say_(formatted("no connection can be accepted, so that they wait: {}{}", std::strerror(errno),
                         errno == EMFILE ? "; raise `ulimit -n`" : ""));
        if (full_ && !strangers_.empty()) refuse(strangers_.begin(), "there was no room for it");
        return;
      }
      detail::tune(socket);
      if (strangers_.size() == most_strangers) refuse(strangers_.begin(), "there were too many at the same time");
      strangers_.emplace_back(std::move(socket));
    }
  }

  void attend(std::list<Stranger>::iterator s) {
    try {
      const Stranger::State state = s->proceed(us_, token_, guests_.accept);
      if (state == Stranger::State::pending) {
        if (s->limit.passed()) refuse(s, s->too_slow());
        return;
      }
      if (state == Stranger::State::refused) return refuse(s, s->why);
      const Address from = address_there(s->socket);
      guests_.take(s->hello, std::move(s->socket), from);
      strangers_.erase(s);  // last: an error refuses it
    } catch (const Error& error) {
      refuse(s, error.what());
    }
  }

  // Reports the refusal, but not too often.
  void refuse(std::list<Stranger>::iterator s, const std::string& why) {
    ++refused_;
    if (report_.due()) {
      say_(formatted("a connection from {} was refused: {}{}", s->from, why,
                     refused_ > 1 ? formatted(" ({} more since the last such line)", refused_ - 1) : std::string()));
      refused_ = 0;
    }
    strangers_.erase(s);
  }

  Socket listening_;
  std::string token_;
  Guests guests_;
  Say say_;
  Reply us_;
  std::list<Stranger> strangers_;  // oldest first
  bool full_ = false;
  int64_t refused_ = 0;  // since the last line about it
  NowAndThen report_{0, 1}, full_report_{0, 10};
  Waker waker_;
  std::jthread thread_;  // last: it uses all of them
};

// A one-way connection for data, from a rank of another process to a rank of this one.
struct Channel {
  int group = 0, from = 0, to = 0;
  auto operator<=>(const Channel&) const = default;
};

class DataDoor {
 public:
  using Take = std::function<void(const Channel&, Socket)>;

  // Sets who takes the connections, including those that have already come. Empty: nobody from now on.
  void serve(Take take) {
    std::lock_guard lock(mutex_);
    take_ = std::move(take);
    if (!take_) return;
    for (auto& [channel, socket] : early_) take_(channel, std::move(socket));
    early_.clear();
  }
  void arrive(const Channel& channel, Socket socket) {
    std::lock_guard lock(mutex_);
    if (take_) take_(channel, std::move(socket));
    else early_.emplace_back(channel, std::move(socket));
  }

 private:
  std::mutex mutex_;
  Take take_;
  std::vector<std::pair<Channel, Socket>> early_;
};

}  // namespace llmc
