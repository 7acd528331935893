// last_resort.h: ends the process where its own threads cannot: stuck in MPI, in a file system, in a GPU's driver.
#pragma once
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/check.h"

namespace llmc {

// If the scope has not been left within `seconds`, prints the error and ends the process with this exit status. Where
// the system starts no thread for that, it does nothing.
class LastResort {
 public:
  LastResort(double seconds, std::string error, ExitStatus status = ExitStatus::lost) {
    try {
      thread_ = std::thread([this, seconds, status, line = "train_gpt: " + std::move(error) + "\n"] {
        std::unique_lock lock(mutex_);
        if (changed_.wait_for(lock, std::chrono::duration<double>(std::min(seconds, 1e9)), [&] { return left_; }))
          return;
        // Not by stdio, whose locks other threads may hold; nor to a reader that has stopped.
        pollfd room{STDERR_FILENO, POLLOUT, 0};
        int ready = 0;
        while ((ready = ::poll(&room, 1, 1000)) < 0 && errno == EINTR) {
        }
        if (ready == 1) (void)!::write(STDERR_FILENO, line.data(), line.size());
        ::_exit(static_cast<int>(status));
      });
    } catch (const std::system_error&) {  // no further thread
    }
  }
  ~LastResort() {
    {
      std::lock_guard lock(mutex_);
      left_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  LastResort(const LastResort&) = delete;
  LastResort& operator=(const LastResort&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool left_ = false;   // no stop_token: libstdc++ 12 may wake for one with false, as if the time were over
  std::thread thread_;  // last: it uses all of them
};

}  // namespace llmc
