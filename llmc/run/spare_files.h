// spare_files.h: while a process waits as a spare, it reads what it would have to read first: so the files are known to
// be intact, and their pages are in the memory of this machine.
#pragma once
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "core/log.h"
#include "run/checkpoints/checkpoint.h"

namespace llmc {

class SpareFiles {
 public:
  using Say = std::function<void(const std::string&)>;

  SpareFiles(std::string out_dir, Say say)
      : out_dir_(std::move(out_dir)), say_(std::move(say)), thread_([this] { run(); }) {}
  // What is being read is read to its end: a resume would need it next.
  ~SpareFiles() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  SpareFiles(const SpareFiles&) = delete;
  SpareFiles& operator=(const SpareFiles&) = delete;

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!ending_) {
      lock.unlock();
      look();
      lock.lock();
      changed_.wait_for(lock, std::chrono::seconds(1), [this] { return ending_; });
    }
  }
  // Reads the newest checkpoint, if it is another one than the last time.
  void look() try {
    const std::vector<int64_t> steps = checkpoint_steps(out_dir_);
    const std::string path = steps.empty() ? "" : checkpoint_path(out_dir_, steps.back());
    if (path == last_) return;
    last_ = path;
    const auto begin = std::chrono::steady_clock::now();
    const std::optional<std::string> fault = checkpoint_fault(path);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (!fault) say_(formatted("{} is read, and intact ({:.1f} s)", path, seconds));
    else if (path_exists(path)) say_(formatted("WARNING: {} is damaged: {}", path, *fault));  // not pruned meanwhile
  } catch (const std::exception& error) {
    say_(formatted("WARNING: cannot look at {}: {}", out_dir_, error.what()));
  }

  std::string out_dir_;
  Say say_;
  std::string last_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false;
  std::thread thread_;  // last: it uses all of them
};

}  // namespace llmc
