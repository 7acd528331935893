// file_ops.so: intercepts the trainer's C library calls (LD_PRELOAD) and numbers the operations that change files under
// $FILE_OPS_ROOT.
//   FILE_OPS_KILL=n    kills the process (SIGKILL) before operation n; half of the bytes of a write are written
//   FILE_OPS_MOVE=n    renames $FILE_OPS_ROOT to $FILE_OPS_ROOT.moved before operation n
//   FILE_OPS_LOG=f     logs each operation to file f, with the bytes of writes: test_durable.cpp replays them
//   FILE_OPS_SLEEP=s   the first operation takes s seconds
//   FILE_OPS_FULL=t    writes to files with t in their path fail as on a full disk; FILE_OPS_FULL_WRITES=n: the first n
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

std::mutex mutex;
long count = 0, failed = 0;

const char* root() {
  static const char* value = getenv("FILE_OPS_ROOT");
  return value;
}
std::map<int, std::string>& files() {  // of open file descriptors under the root
  static auto* all = new std::map<int, std::string>;
  return *all;
}
bool watched(const std::string& path) { return root() != nullptr && path.rfind(root(), 0) == 0; }
bool is_lock(const std::string& path) { return path.size() > 6 && path.compare(path.size() - 6, 6, "/.lock") == 0; }

template <class F>
F next(F, const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

// Records one operation: its words, and the bytes of a write. Returns true if the process must die here.
bool operation(const std::string& words, const void* bytes = nullptr, size_t n = 0) {
  if (const char* log = getenv("FILE_OPS_LOG")) {
    const int fd =
        static_cast<int>(syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    const std::string line = words + " " + std::to_string(n) + "\n";
    syscall(SYS_write, fd, line.data(), line.size());
    if (n > 0) syscall(SYS_write, fd, bytes, n);
    syscall(SYS_close, fd);
  }
  if (const char* seconds = getenv("FILE_OPS_SLEEP"); seconds != nullptr && count == 0)
    usleep(static_cast<useconds_t>(1e6 * atof(seconds)));
  const auto is_now = [](const char* variable) {
    const char* at = getenv(variable);
    return at != nullptr && count == atol(at);
  };
  ++count;
  if (is_now("FILE_OPS_MOVE"))
    syscall(SYS_renameat2, AT_FDCWD, root(), AT_FDCWD, (std::string(root()) + ".moved").c_str(), 0);
  return is_now("FILE_OPS_KILL");
}
void die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}
void change(const std::string& path, const std::string& words) {
  std::lock_guard lock(mutex);
  if (watched(path) && !is_lock(path) && operation(words)) die();
}
std::string of_directory(int directory, const char* path) {
  if (path[0] == '/' || directory == AT_FDCWD) return path;
  char link[64], name[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
  const ssize_t n = readlink(link, name, sizeof name);
  return n < 0 ? path : std::string(name, static_cast<size_t>(n)) + "/" + path;
}

int open_file(const char* path, int flags, mode_t mode, decltype(&::open) real) {
  const bool writes = (flags & O_ACCMODE) != O_RDONLY;
  if (writes) change(path, ((flags & O_TRUNC) != 0 ? "create " : "append ") + std::string(path));
  const int fd = real(path, flags, mode);
  std::lock_guard lock(mutex);
  if (fd >= 0 && watched(path) && !is_lock(path)) files()[fd] = path;
  return fd;
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return open_file(path, flags, mode, next(&open, "open"));
}
int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return open_file(path, flags, mode, next(&open, "open64"));
}
int close(int fd) {
  {
    std::lock_guard lock(mutex);
    files().erase(fd);
  }
  return next(&close, "close")(fd);
}
ssize_t write(int fd, const void* bytes, size_t n) {
  {
    std::lock_guard lock(mutex);
    const auto file = files().find(fd);
    if (const char* full = getenv("FILE_OPS_FULL"); full != nullptr && file != files().end())
      if (const char* most = getenv("FILE_OPS_FULL_WRITES");
          file->second.find(full) != std::string::npos && (most == nullptr || failed++ < atol(most))) {
        errno = ENOSPC;
        return -1;
      }
    if (file != files().end() && operation("write " + file->second, bytes, n)) {
      syscall(SYS_write, fd, bytes, n / 2);
      die();
    }
  }
  return next(&write, "write")(fd, bytes, n);
}
int fsync(int fd) {
  {
    std::lock_guard lock(mutex);
    const auto file = files().find(fd);
    if (file != files().end() && operation("fsync " + file->second)) die();
  }
  return next(&fsync, "fsync")(fd);
}
int rename(const char* from, const char* to) noexcept {
  change(to, "rename " + std::string(from) + " " + to);
  return next(&rename, "rename")(from, to);
}
int mkdir(const char* path, mode_t mode) noexcept {
  change(path, "mkdir " + std::string(path));
  return next(&mkdir, "mkdir")(path, mode);
}
int symlink(const char* target, const char* path) noexcept {
  change(path, "create " + std::string(path));  // creates the name only
  return next(&symlink, "symlink")(target, path);
}
int unlink(const char* path) noexcept {
  change(path, "unlink " + std::string(path));
  return next(&unlink, "unlink")(path);
}
int remove(const char* path) noexcept {
  change(path, "unlink " + std::string(path));
  return next(&remove, "remove")(path);
}
int unlinkat(int directory, const char* path, int flags) noexcept {
  const std::string whole = of_directory(directory, path);
  change(whole, "unlink " + whole);
  return next(&unlinkat, "unlinkat")(directory, path, flags);
}

}  // extern "C"
