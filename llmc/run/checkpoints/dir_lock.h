// dir_lock.h: the lock of an out directory. The process that holds OUT/.lock is its only writer, provided that the lock
// is still the file of that name: a directory may be moved or deleted while a run is using it.
#pragma once
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>

#include "core/files.h"

namespace llmc {

class DirectoryLock {
 public:
  DirectoryLock() = default;
  DirectoryLock& operator=(DirectoryLock&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(file_, other.file_);
    std::swap(fault_, other.fault_);
    return *this;
  }
  ~DirectoryLock() {
    if (fd_ >= 0) ::close(fd_);  // which releases it
  }

  // False: another process holds it.
  bool take(const std::string& directory) {
    file_ = directory + "/.lock";
    for (;;) {
      if (fd_ >= 0) ::close(fd_);
      fd_ = ::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
      CHECK(fd_ >= 0 || errno != ELOOP, "--out-dir {}: {} is a symbolic link, expected a file: remove it", directory,
            file_);
      CHECK(fd_ >= 0, "--out-dir {}: cannot write there: {}", directory, std::strerror(errno));
      fault_.clear();
      if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) return false;
        fault_ = std::strerror(errno);
      }
      if (same_file(fd_, file_)) return true;  // false if a --restart has moved the directory meanwhile
    }
  }
  // Why the lock, although taken, keeps no other process out: the file system has no locks. "": it does.
  const std::string& fault() const { return fault_; }
  bool in_place() const { return same_file(fd_, file_); }

  // The directory where the held lock is now, for example after a move; empty: none, or the system does not say.
  std::string directory() const {
    std::array<char, PATH_MAX> text;
    const ssize_t n = ::readlink(formatted("/proc/self/fd/{}", fd_).c_str(), text.data(), text.size());
    const std::string name(text.data(), static_cast<size_t>(std::max<ssize_t>(n, 0)));
    return n > 0 && same_file(fd_, name) ? std::filesystem::path(name).parent_path().string() : "";
  }

 private:
  int fd_ = -1;
  std::string file_, fault_;
};

}  // namespace llmc
