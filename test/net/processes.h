// processes.h: the processes of a job as threads of a test, and what each of them says and how it ends.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "helpers.h"
#include "net/meeting/rendezvous.h"

inline const std::string token = "a token of the tests, and of nobody else";

// What a process printed.
class Lines {
 public:
  llmc::Say say() {
    return [this](const std::string& line) {
      std::lock_guard lock(mutex_);
      text_ += line + "\n";
    };
  }
  std::string text() const {
    std::lock_guard lock(mutex_);
    return text_;
  }
  bool contain(const std::string& part) const { return text().find(part) != std::string::npos; }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

inline llmc::Greeting greeting(int process, int processes) {
  return {process, processes, 1, "a build", {{"--lr", "0.001"}, {"--seed", "1"}}};
}
inline llmc::Rendezvous at(const std::string& where, Lines& lines, double init_timeout = 20) {
  llmc::Rendezvous at;
  at.where = where;
  at.token = token;
  at.init_timeout = init_timeout;
  at.patience = 0.1;
  at.say = lines.say();
  return at;
}

// Runs f(i) on n threads. Returns the error of each; empty: none.
inline std::vector<std::string> on_threads(int n, const std::function<void(int)>& f) {
  std::vector<std::string> errors(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i)
    threads.emplace_back([&, i] {
      try {
        f(i);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(i)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// A job of n processes that meet at a file, until the end of the scope.
class Jobs {
 public:
  explicit Jobs(int n, int local_ranks = 1) : jobs(static_cast<size_t>(n)) {
    const auto errors = on_threads(n, [&](int p) {
      llmc::Greeting it = greeting(p, n);
      it.local_ranks = local_ranks;
      jobs[static_cast<size_t>(p)] = std::make_unique<llmc::ControlPlane>(it, at("file:" + dir_ / "meeting", lines));
    });
    for (const std::string& error : errors) REQUIRE(error == "");
  }
  ~Jobs() {
    on_threads(size(), [&](int p) { jobs[static_cast<size_t>(p)].reset(); });
  }
  llmc::ControlPlane& operator[](int p) { return *jobs[static_cast<size_t>(p)]; }
  int size() const { return static_cast<int>(jobs.size()); }

  Lines lines;
  std::vector<std::unique_ptr<llmc::ControlPlane>> jobs;

 private:
  TempDir dir_;
};

// A port of the loopback addresses at which nobody listens now.
inline int free_port() {
  return llmc::address_here(llmc::listen_at(llmc::resolve({"127.0.0.1", 0}).at(0))).endpoint().port;
}

inline size_t entries(const std::string& directory) {
  size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) ++n;
  return n;
}

// Makes hostile connections as test/scripts/python/hostile_connections.py does; true: none was believed.
inline bool attack(int port, int count, const std::string& options, const std::string& environment = "") {
  return std::system(llmc::formatted(
                         "{} python3 test/scripts/python/hostile_connections.py 127.0.0.1 {} --count {} {} >/dev/null",
                         environment, port, count, options)
                         .c_str()) == 0;
}
