// recordings.h: what the processes of a job say to each other, recorded in a real meeting by a relay in between.
#pragma once
#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "net/meetings.h"
#include "net/watching/watchdog.h"

namespace {

// Passes the bytes of one connection on, both ways, to a port of this machine, until both ends are closed.
class Relay {
 public:
  explicit Relay(int port)
      : listening_(listen_at(resolve({"127.0.0.1", 0}).at(0))), thread_([this, port] { run(port); }) {}
  ~Relay() {
    if (thread_.joinable()) thread_.join();
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  int port() const { return address_here(listening_).endpoint().port; }
  // What the side that connects has said, and what the other one; once the connection is closed.
  std::array<std::string, 2> said() {
    thread_.join();
    return said_;
  }

 private:
  void run(int port) {
    pollfd coming{listening_.fd(), POLLIN, 0};
    if (::poll(&coming, 1, 20'000) != 1) return;
    const std::array<Socket, 2> ends = {Socket(::accept4(listening_.fd(), nullptr, nullptr, SOCK_NONBLOCK)),
                                        connect_when_ready(port)};
    std::array<char, 4096> buffer;
    const iovec in{buffer.data(), buffer.size()};
    for (bool open = true; open;) {
      std::array<pollfd, 2> polled = {pollfd{ends[0].fd(), POLLIN, 0}, pollfd{ends[1].fd(), POLLIN, 0}};
      if (::poll(polled.data(), 2, 20'000) <= 0) return;
      for (size_t i = 0; i < 2; ++i) try {
          while (const size_t n = ends[i].receive_some(&in, 1)) {
            said_[i].append(buffer.data(), n);
            send_all(ends[1 - i], buffer.data(), n, Limit::seconds(20));
          }
        } catch (const ConnectionError&) {  // closed
          open = false;
        }
    }
  }

  Socket listening_;
  std::array<std::string, 2> said_;
  std::thread thread_;
};

inline std::vector<Message> messages_of(std::string bytes) {
  std::vector<Message> all;
  for (Message m; m.decode_from(bytes);) all.push_back(m);
  return all;
}

// A job of three processes that meet, watch each other, exchange texts and end: what process 2 and process 0 said to
// each other.
struct Recording {
  std::string hello, proof, reply, verdict;      // the handshake
  std::vector<Message> of_member, of_process_0;  // what followed

  static Recording make() {
    Lines lines;
    const int port = free_port();
    Relay relay(port);
    const auto errors = on_threads(3, [&](int p) {
      ControlPlane job(greeting(p, 3), at(formatted("127.0.0.1:{}", p == 2 ? relay.port() : port), lines));
      Watchdog watchdog(job, {.init = 60, .comm = 0.4});  // boards every 50 ms, and no update that could be late
      const auto group = watchdog.board.join(p, "weights", {0, 1, 2});
      group->begin("all_gather", "unit ", "blocks.3");
      watchdog.board.at_step(p, 7);
      for (const char* topic : {"options", "weights"}) {
        job.all_gather(topic, formatted("text of process {}", p));
        std::this_thread::sleep_for(std::chrono::milliseconds(80));
      }
    });
    require_all(errors, "");
    auto [there, back] = relay.said();
    Recording r;
    const auto take = [](std::string& from, size_t bytes) {
      const std::string part = from.substr(0, bytes);
      from.erase(0, bytes);
      return part;
    };
    r.hello = take(there, sizeof(Hello)), r.proof = take(there, sizeof(Mac));
    r.reply = take(back, sizeof(Reply)), r.verdict = take(back, sizeof(Verdict));
    r.of_member = messages_of(there), r.of_process_0 = messages_of(back);
    return r;
  }
};

}  // namespace
