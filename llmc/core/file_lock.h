// file_lock.h: a file as a lock: one process at a time holds it. Its holder may remove the file; a process that then
// locks the removed file, which it had opened before, starts over with the one of that name.
#pragma once
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

#include "core/check.h"
#include "core/files.h"

namespace llmc {

class FileLock {
 public:
  FileLock() = default;
  FileLock(FileLock&& other) noexcept { *this = std::move(other); }
  FileLock& operator=(FileLock&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(path_, other.path_);
    std::swap(fault_, other.fault_);
    return *this;
  }
  ~FileLock() { close(); }  // which releases it

  // Makes the file if there is none. Returns 0 if this process now holds it, or if the file system has no locks (then
  // there is a warning()); EWOULDBLOCK if another process holds it; or why the file cannot be opened or locked: ELOOP
  // if it is a symbolic link.
  int take(const std::string& path) {
    path_ = path;
    for (;;) {
      close();
      fault_.clear();
      fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
      if (fd_ < 0) return errno;
      if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
        const int error = errno;
        if (error == EINTR) continue;
        if (error == EWOULDBLOCK || error == EACCES) return close(), EWOULDBLOCK;  // EACCES: on some network disks
        if (error != ENOLCK && error != ENOSYS && error != EOPNOTSUPP && error != EINVAL) return close(), error;
        fault_ = std::strerror(error);
      }
      if (in_place()) return 0;
    }
  }
  // A warning that the lock, although taken, keeps no second process out, such as a second "run". "": it does.
  std::string warning(const std::string& second) const {
    if (fault_.empty()) return "";
    return formatted(
        "WARNING: {} cannot be locked, on a file system without locks ({}): nothing keeps a second {} from writing "
        "there, too",
        path_, fault_, second);
  }
  bool in_place() const { return same_file(fd_, path_); }
  int fd() const { return fd_; }

  // Removes the file while holding it: who locks it afterwards finds that it is gone.
  void remove() {
    if (fd_ >= 0 && in_place()) ::unlink(path_.c_str());
    close();
  }

 private:
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

  int fd_ = -1;
  std::string path_, fault_;  // fault_: of a file system without locks
};

}  // namespace llmc
