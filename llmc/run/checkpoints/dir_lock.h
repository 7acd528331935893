// dir_lock.h: the lock of an out directory. The process that holds OUT/.lock is its only writer, provided that the lock
// is still the file of that name: a directory may be moved or deleted while a run is using it.
#pragma once
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <filesystem>

#include "core/files.h"

namespace llmc {

class DirectoryLock {
 public:
  // False: another process holds it.
  bool take(const std::string& directory) {
    const std::string file = directory + "/.lock";
    const int error = lock_.take(file);  // again if a --restart has moved the directory meanwhile
    CHECK(error != ELOOP, "--out-dir {}: {} is a symbolic link, expected a file: remove it", directory, file);
    CHECK(error == 0 || error == EWOULDBLOCK, "--out-dir {}: cannot write there: {}", directory, std::strerror(error));
    return error == 0;
  }
  // A warning that the lock, although taken, keeps no second run out. "": it does.
  std::string warning() const { return lock_.warning("run"); }
  bool in_place() const { return lock_.in_place(); }

  // The directory where the held lock is now, for example after a move; empty: none, or the system does not say.
  std::string directory() const {
    std::array<char, PATH_MAX> text;
    const ssize_t n = ::readlink(formatted("/proc/self/fd/{}", lock_.fd()).c_str(), text.data(), text.size());
    const std::string name(text.data(), static_cast<size_t>(std::max<ssize_t>(n, 0)));
    return n > 0 && same_file(lock_.fd(), name) ? std::filesystem::path(name).parent_path().string() : "";
  }

 private:
  FileLock lock_;
};

}  // namespace llmc
