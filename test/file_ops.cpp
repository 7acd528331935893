// file_ops.so: intercepts the trainer's C library calls (LD_PRELOAD) and numbers the operations that change files under
// $FILE_OPS_ROOT.
//   FILE_OPS_KILL=n    kills the process (SIGKILL) before operation n; half of the bytes of a write are written
//   FILE_OPS_KILL_AT=t the same before the first operation with t in its words
//   FILE_OPS_MOVE=n    renames $FILE_OPS_ROOT to $FILE_OPS_ROOT.moved before operation n
//   FILE_OPS_LOG=f     logs each operation to file f, with the bytes of writes: test_durable.cpp replays them
//   FILE_OPS_SLEEP=s   the first operation takes s seconds
//   FILE_OPS_FULL=t    writes to files with t in their path fail as on a full disk; FILE_OPS_FULL_WRITES=n: the first n
//   FILE_OPS_HANG=t    writes to files with t in their path never end
//   FILE_OPS_FAIL=n    operation n fails, with the number FILE_OPS_ERRNO (default: EIO); FILE_OPS_FAIL_ALL=1: and all
//                      that come later
//   FILE_OPS_FAIL_AT=t the first operation with t in its words fails (FILE_OPS_ERRNO); also "pread PATH", which is not
//                      counted and logged as others are; FILE_OPS_FAIL_AT_AFTER=n: after n others with t
//   FILE_OPS_CLOCK=s   each look at the clock on the wall jumps by up to s seconds, forwards or backwards
//   FILE_OPS_NO_THREADS_AFTER=t  no thread can be started after the first operation with t in its words
//   FILE_OPS_LOCK_ERRNO=n  no file can be locked, with the number n: ENOLCK on some network file systems
//   FILE_OPS_HANGUP=1  takes SIGHUP before main() begins, as UCX does, which Open MPI 5 is linked with
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <string>

namespace {

std::mutex mutex;
long count = 0, failed = 0;
std::atomic<bool> no_threads = false;

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

__attribute__((constructor)) void take_hangup() {
  if (getenv("FILE_OPS_HANGUP") != nullptr) signal(SIGHUP, [](int) {});
}

void die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}
int failure() { return getenv("FILE_OPS_ERRNO") != nullptr ? atoi(getenv("FILE_OPS_ERRNO")) : EIO; }
// Is it the operation at which FILE_OPS_FAIL_AT tells to fail?
bool fails_at(const std::string& words) {
  static long seen = 0;
  const char* at = getenv("FILE_OPS_FAIL_AT");
  if (at == nullptr || words.find(at) == std::string::npos) return false;
  const char* after = getenv("FILE_OPS_FAIL_AT_AFTER");
  return seen++ == (after == nullptr ? 0 : atol(after));
}
// Records one operation: its words, and the bytes of a write. Kills the process if it must die here. Returns false, and
// sets errno, if the operation fails. The last operation of a process that dies in a write is half of it: at `halfway`.
template <class Halfway>
bool operation(const std::string& words, const void* bytes, size_t n, Halfway&& halfway) {
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
  const auto first = [](const char* variable) { return getenv(variable) == nullptr ? -1 : atol(getenv(variable)); };
  ++count;
  if (const char* at = getenv("FILE_OPS_NO_THREADS_AFTER"); at != nullptr && words.find(at) != std::string::npos)
    no_threads = true;
  const auto is_now = [&](const char* variable) { return count == first(variable); };
  if (is_now("FILE_OPS_MOVE"))
    syscall(SYS_renameat2, AT_FDCWD, root(), AT_FDCWD, (std::string(root()) + ".moved").c_str(), 0);
  if (is_now("FILE_OPS_KILL")) halfway(), die();
  if (const char* at = getenv("FILE_OPS_KILL_AT"); at != nullptr && words.find(at) != std::string::npos) die();
  const bool fails =
      is_now("FILE_OPS_FAIL") ||
      (getenv("FILE_OPS_FAIL_ALL") != nullptr && first("FILE_OPS_FAIL") > 0 && count > first("FILE_OPS_FAIL")) ||
      fails_at(words);
  if (fails) errno = failure();
  return !fails;
}
// Has the disk no room for a write to this file?
bool is_full(const std::string& path) {
  const char *full = getenv("FILE_OPS_FULL"), *most = getenv("FILE_OPS_FULL_WRITES");
  return full != nullptr && path.find(full) != std::string::npos && (most == nullptr || failed++ < atol(most));
}
bool change(const std::string& path, const std::string& words) {
  std::lock_guard lock(mutex);
  return !watched(path) || is_lock(path) || operation(words, nullptr, 0, [] {});
}
// An operation on an open file.
bool change(int fd, const char* what) {
  std::lock_guard lock(mutex);
  const auto file = files().find(fd);
  return file == files().end() || operation(what + file->second, nullptr, 0, [] {});
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
  if (writes && !change(path, ((flags & O_TRUNC) != 0 ? "create " : "append ") + std::string(path))) return -1;
  const int fd = real(path, flags, mode);
  std::lock_guard lock(mutex);
  if (fd >= 0 && watched(path) && !is_lock(path)) files()[fd] = path;
  return fd;
}

}  // namespace

extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  if (no_threads) return EAGAIN;
  return next(&pthread_create, "pthread_create")(thread, attributes, run, argument);
}

int flock(int fd, int how) {
  const char* error = getenv("FILE_OPS_LOCK_ERRNO");
  if (error == nullptr) return next(::flock, "flock")(fd, how);
  errno = atoi(error);
  return -1;
}

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
  const bool good = change(fd, "close ");
  {
    std::lock_guard lock(mutex);
    files().erase(fd);
  }
  const int why = errno, status = next(&close, "close")(fd);
  if (!good) errno = why;
  return good ? status : -1;
}
ssize_t write(int fd, const void* bytes, size_t n) {
  if (const char* stuck = getenv("FILE_OPS_HANG")) {
    std::unique_lock lock(mutex);
    const auto file = files().find(fd);
    const bool hangs = file != files().end() && file->second.find(stuck) != std::string::npos;
    lock.unlock();
    while (hangs) pause();
  }
  {
    std::lock_guard lock(mutex);
    const auto file = files().find(fd);
    if (file != files().end() && is_full(file->second)) {
      errno = ENOSPC;
      return -1;
    }
    if (file != files().end() &&
        !operation("write " + file->second, bytes, n, [&] { syscall(SYS_write, fd, bytes, n / 2); }))
      return -1;
  }
  return next(&write, "write")(fd, bytes, n);
}
ssize_t pwrite(int fd, const void* bytes, size_t n, off_t at) {
  return change(fd, "pwrite ") ? next(&pwrite, "pwrite")(fd, bytes, n, at) : -1;
}
ssize_t pread(int fd, void* bytes, size_t n, off_t at) {
  {
    std::lock_guard lock(mutex);
    const auto file = files().find(fd);
    if (file != files().end() && fails_at("pread " + file->second)) {
      errno = failure();
      return -1;
    }
  }
  return next(&pread, "pread")(fd, bytes, n, at);
}
int posix_fallocate(int fd, off_t at, off_t n) {
  {
    std::lock_guard lock(mutex);
    const auto file = files().find(fd);
    if (file != files().end() && is_full(file->second)) return ENOSPC;
  }
  return change(fd, "allocate ") ? next(&posix_fallocate, "posix_fallocate")(fd, at, n) : errno;
}
int fsync(int fd) { return change(fd, "fsync ") ? next(&fsync, "fsync")(fd) : -1; }
int sync_file_range(int fd, off64_t from, off64_t n, unsigned flags) {
  return change(fd, "begin-fsync ") ? next(&sync_file_range, "sync_file_range")(fd, from, n, flags) : -1;
}
int rename(const char* from, const char* to) noexcept {
  if (!change(to, "rename " + std::string(from) + " " + to)) return -1;
  return next(&rename, "rename")(from, to);
}
int mkdir(const char* path, mode_t mode) noexcept {
  if (!change(path, "mkdir " + std::string(path))) return -1;
  return next(&mkdir, "mkdir")(path, mode);
}
int symlink(const char* target, const char* path) noexcept {
  if (!change(path, "create " + std::string(path))) return -1;  // creates the name only
  return next(&symlink, "symlink")(target, path);
}
int unlink(const char* path) noexcept {
  if (!change(path, "unlink " + std::string(path))) return -1;
  return next(&unlink, "unlink")(path);
}
int remove(const char* path) noexcept {
  if (!change(path, "unlink " + std::string(path))) return -1;
  return next(&remove, "remove")(path);
}
int unlinkat(int directory, const char* path, int flags) noexcept {
  const std::string whole = of_directory(directory, path);
  if (!change(whole, "unlink " + whole)) return -1;
  return next(&unlinkat, "unlinkat")(directory, path, flags);
}
int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const int status = static_cast<int>(syscall(SYS_clock_gettime, clock, now));
  if (const char* most = getenv("FILE_OPS_CLOCK"); most != nullptr && clock == CLOCK_REALTIME) {
    static std::atomic<unsigned> looks = 0;
    const long span = atol(most);
    now->tv_sec += static_cast<long>(++looks * 2654435761u) % (2 * span + 1) - span;
  }
  return status;
}
time_t time(time_t* to) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (to != nullptr) *to = now.tv_sec;
  return now.tv_sec;
}

}  // extern "C"
