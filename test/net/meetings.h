// meetings.h: processes that meet in a test: as they should, each in its own way, and odd ones.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "helpers.h"
#include "net/processes.h"

namespace {

using namespace llmc;

inline double seconds_of(const std::function<void()>& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Processes meet, each with what change(process, greeting) makes of its greeting; the error of each.
inline std::vector<std::string> meet(int n, const std::function<void(int, Greeting&)>& change,
                                     double init_timeout = 20) {
  const TempDir dir;
  Lines lines;
  return on_threads(n, [&](int p) {
    Greeting it = greeting(p, n);
    change(p, it);
    Rendezvous where = at("file:" + dir / "meeting", lines, init_timeout);
    where.patience = 10;  // all come, on a busy machine some of them late
    const ControlPlane job(it, std::move(where));
  });
}
inline void require_all(const std::vector<std::string>& errors, const std::string& expected) {
  for (const std::string& error : errors) REQUIRE(error == expected);
}

// A process that says what it likes: it has reached process 0, and introduced itself with this number.
struct Odd {
  Odd(const std::string& where, Lines& lines, int process, int processes, int port = 1)
      : reached(reach_process_0(at(where, lines), process)),
        control({[](int, const Message&) {}, [](int, const std::string&) {}}),
        line(control.add(std::move(reached.socket))) {
    say({Kind::board, {"before the greeting"}});
    introduce(process, processes, port);
  }
  void introduce(int process, int processes, int port) {
    const Introduction it{protocol_version, greeting(process, processes), {process, "elsewhere", "", "", port}};
    say({Kind::greeting, it.parts()});
  }
  void say(const Message& message) { control.send(line, message); }

  Reached reached;
  Control control;
  int line;
};

inline Socket connect_when_ready(int port) {
  for (const Limit limit = Limit::seconds(20);;) try {
      return connect_to(resolve({"127.0.0.1", port}).at(0), Limit::seconds(5));
    } catch (const ConnectionError&) {
      if (limit.passed()) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
}

}  // namespace
