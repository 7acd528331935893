// local_copies.h: a copy of every part of a local checkpoint (local_parts.h) on another node's disk, so that it
// survives the loss of a node. The processes form a ring: each sends its part to the one some places further on, and
// writes what comes from the one as many places before it, in the background, block by block:
//
//   process      0        1        2        3          two on each of two nodes: distance 2
//   sends to     2        3        0        1
//   on its disk  0 and 2  1 and 3  2 and 0  3 and 1
//
// A copy is complete or absent, under the same name as the part.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "core/files.h"
#include "core/json.h"
#include "core/log.h"
#include "net/links.h"
#include "run/checkpoints/checkpoint.h"
#include "run/checkpoints/local_parts.h"

namespace llmc {

// Where a process saves its parts.
struct NodeDisk {
  std::string host, directory;
};

// How far each process's copies go in the ring: to other hosts if possible, else to other directories; 0: nowhere.
inline int copy_distance(const std::vector<NodeDisk>& disks) {
  const size_t n = disks.size();
  size_t best = 0, most = 0;
  for (size_t distance = 1; distance < n; ++distance) {
    size_t good = 0;
    for (size_t p = 0; p < n; ++p) {
      const NodeDisk &from = disks[p], &to = disks[(p + distance) % n];
      good += from.host != to.host ? n + 1 : from.directory != to.directory ? 1 : 0;
    }
    if (good > most) best = distance, most = good;
  }
  return static_cast<int>(best);
}

class LocalCopies {
 public:
  // The ranks of other processes that a part goes to and comes from, and the number of the group in which they talk.
  struct Ring {
    Links* links;
    int group, self, to, from;
  };
  LocalCopies(const Ring& ring, std::string directory)
      : ring_(ring), directory_(std::move(directory)), thread_([this] { run(); }) {}
  // All that was begun is finished, unless another process has gone.
  ~LocalCopies() {
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

  // Begins to copy a part of the directory; all processes do so for the same step.
  void begin(const std::string& name) {
    std::lock_guard lock(mutex_);
    if (!ended_) names_.push_back(name);
    changed_.notify_all();
  }
  // Waits for what was begun. Returns why some of it was not copied; empty: all was.
  std::string wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return names_.empty(); });
    return std::exchange(fault_, {});
  }

 private:
  static constexpr int64_t block = 4 << 20;

  // The files of a part, as one sequence of bytes.
  struct Listed {
    std::string name;  // of the part
    std::vector<std::pair<std::string, int64_t>> files;
    int64_t bytes() const {
      int64_t all = 0;
      for (const auto& file : files) all += file.second;
      return all;
    }
  };
  // Goes through them from beginning to end: at each piece, use(name, offset in the file, the file's size, bytes).
  struct Walk {
    const Listed& listed;
    size_t file = 0;
    int64_t at = 0;
    template <class Use>
    void pass(char* bytes, int64_t n, Use&& use) {
      while (n > 0) {
        const auto& [name, size] = listed.files[file];
        const int64_t some = std::min(n, size - at);
        if (some > 0) use(name, at, size, bytes, some);
        at += some, bytes += some, n -= some;
        if (at == size) ++file, at = 0;
      }
    }
  };

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !names_.empty() || ended_; });
      if (names_.empty()) return;
      const std::string name = names_.front();
      lock.unlock();
      std::string fault;
      bool gone = false;  // another process: the job ends
      try {
        fault = copy(name);
      } catch (const std::exception& error) {
        fault = failure_text(error), gone = true;
      }
      lock.lock();
      if (gone || fault_.empty()) fault_ = std::move(fault);
      if (gone) names_.clear(), ended_ = true;
      else names_.pop_front();
      changed_.notify_all();
    }
  }

  void exchange(const void* out, int64_t sent, void* in, int64_t received) const {
    ring_.links->exchange(ring_.group, ring_.self, {sent > 0 ? ring_.to : -1, out, sent},
                          {received > 0 ? ring_.from : -1, in, received});
  }

  // Sends one part, and writes another one. Returns why it could not do either.
  std::string copy(const std::string& name) const {
    detail::FirstFault fault;
    Listed mine{name, {}};
    fault.attempt([&] {
      for (const std::string& file : names_in(directory_ + "/" + name))
        mine.files.emplace_back(file, File::open_read(directory_ + "/" + name + "/" + file).size());
    });
    if (!fault.text.empty()) mine.files.clear();
    const Listed theirs = exchange_lists(mine);
    const std::string temporary = directory_ + "/.tmp-copy-" + theirs.name, path = directory_ + "/" + theirs.name;
    std::error_code none;
    std::filesystem::remove_all(temporary, none);
    const bool wanted = !path_exists(path);  // else both have the same disk
    fault.attempt([&] {
      if (!wanted) return;
      detail::require_space(directory_, theirs.bytes());
      std::filesystem::create_directories(temporary);
    });
    std::vector<char> out(static_cast<size_t>(block)), in(out.size());
    Walk sending{mine}, receiving{theirs};
    std::optional<File> from, to;
    for (int64_t sent = 0, received = 0; sent < mine.bytes() || received < theirs.bytes();) {
      const int64_t send = std::min(block, mine.bytes() - sent), receive = std::min(block, theirs.bytes() - received);
      sending.pass(out.data(), send, [&](const std::string& file, int64_t at, int64_t, char* bytes, int64_t n) {
        fault.attempt([&] {
          if (at == 0 || !from) from = File::open_read(directory_ + "/" + name + "/" + file);
          from->read_at(bytes, n, at);
        });
      });
      exchange(out.data(), send, in.data(), receive);
      receiving.pass(in.data(), receive,
                     [&](const std::string& file, int64_t at, int64_t size, char* bytes, int64_t n) {
                       fault.attempt([&] {
                         if (!wanted) return;
                         if (at == 0) to = File::create(temporary + "/" + file);
                         to->write(bytes, n);
                         if (at + n == size) to->sync_and_close();
                       });
                     });
      sent += send, received += receive;
    }
    const char good = fault.text.empty() ? 1 : 0;
    char theirs_good = 0;
    exchange(&good, 1, &theirs_good, 1);
    if (wanted && theirs_good == 1)
      fault.attempt([&] {
        fsync_directory(temporary);
        std::filesystem::rename(temporary, path);
        fsync_directory(directory_);
      });
    if (!fault.text.empty() || theirs_good != 1) std::filesystem::remove_all(temporary, none);
    return fault.text;
  }

  Listed exchange_lists(const Listed& mine) const {
    const std::string text = nlohmann::json{mine.name, mine.files}.dump();
    uint64_t out = text.size(), in = 0;
    exchange(&out, sizeof out, &in, sizeof in);
    CHECK(in > 0 && in < uint64_t{1} << 30, "a list of files of {} bytes", in);
    std::string theirs(in, '\0');
    exchange(text.data(), std::ssize(text), theirs.data(), std::ssize(theirs));
    const nlohmann::json list = parse_json(theirs, "another process");
    Listed found{list.at(0), list.at(1)};
    CHECK(LocalName::from(found.name), "{} is no name of a part", shown(found.name));
    for (const auto& [file, size] : found.files)
      CHECK(is_file_name(file) && size >= 0, "{} is no file of a part", shown(file));
    std::erase_if(found.files, [](const auto& file) { return file.second == 0; });
    return found;
  }

  const Ring ring_;
  const std::string directory_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::string> names_;  // to copy; the first is being copied
  std::string fault_;
  bool ended_ = false;
  std::jthread thread_;  // last: it uses all of them
};

}  // namespace llmc
