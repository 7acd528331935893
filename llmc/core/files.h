// files.h: POSIX files with every result checked; errors name the file, the operation and the system's reason.
#pragma once
#include <fcntl.h>
#include <glob.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <list>
#include <mutex>

#include "core/check.h"
#include "core/threads.h"

namespace llmc {

// What long work calls with the bytes that are done, and all of them; empty: nobody wants to know.
using Advance = std::function<void(int64_t done, int64_t total)>;

// Is the open file still the one with this name? Also true if the system cannot tell, as during a network outage.
inline bool same_file(int fd, const std::string& path) {
  struct stat held {
  }, there{};
  if (::stat(path.c_str(), &there) != 0) return errno != ENOENT && errno != ENOTDIR;
  return ::fstat(fd, &held) == 0 && held.st_dev == there.st_dev && held.st_ino == there.st_ino;
}

// Which file or directory a name stands for; {0, 0}: none.
using FileIdentity = std::pair<dev_t, ino_t>;
inline FileIdentity identity_of(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? FileIdentity{info.st_dev, info.st_ino} : FileIdentity{};
}

// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }  // the caller closes it

 private:
  int fd_ = -1;
};

// Closes itself after reading or an exception; writers call sync_and_close().
class File {
 public:
  // Only regular files: reading a FIFO or a terminal would wait for ever for someone to write.
  static File open_read(const std::string& path) { return File(path, O_RDONLY, "open"); }
  // Does not follow a symbolic link: replacing the file later would lose the link.
  static File open_own(const std::string& path) { return File(path, O_RDONLY | O_NOFOLLOW, "open"); }
  static File create(const std::string& path) { return File(path, O_WRONLY | O_CREAT | O_TRUNC, "create"); }
  // Writes over the beginning of a file that exists.
  static File update(const std::string& path) { return File(path, O_WRONLY | O_NOFOLLOW, "write to"); }
  // For reading and writing at any place; there must be none with this name, be it a symbolic link.
  static File create_new(const std::string& path) { return File(path, O_RDWR | O_CREAT | O_EXCL, "create"); }
  // Does not follow a symbolic link: the text would be appended to another file.
  static File append(const std::string& path) {
    return File(path, O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW, "append to");
  }

  const std::string& path() const { return path_; }
  bool in_place() const { return same_file(fd_.fd(), path_); }

  int64_t size() const { return static_cast<int64_t>(status().st_size); }
  // When it was last written to, in nanoseconds of an unknown clock.
  int64_t modified() const {
    const timespec time = status().st_mtim;
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  }

  // Exactly `bytes` bytes from `offset`.
  void read_at(void* out, int64_t bytes, int64_t offset) const {
    char* to = static_cast<char*>(out);
    while (bytes > 0) {
      const ssize_t n = ::pread(fd_.fd(), to, static_cast<size_t>(bytes), offset);
      if (n < 0 && errno == EINTR) continue;
      CHECK(n >= 0, "cannot read {} at byte {}: {}", path_, offset, std::strerror(errno));
      CHECK(n > 0, "{}: ends at byte {}, expected {} more; the file is truncated", path_, offset, bytes);
      pulse();
      to += n;
      offset += n;
      bytes -= n;
    }
  }

  // Exactly `bytes` bytes, from `offset` on.
  void write_at(const void* data, int64_t bytes, int64_t offset) const {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t n = ::pwrite(fd_.fd(), from, static_cast<size_t>(bytes), offset);
      if (n < 0 && errno == EINTR) continue;
      CHECK(n > 0, "cannot write to {} at byte {}: {}", path_, offset, std::strerror(errno));
      pulse();
      from += n;
      offset += n;
      bytes -= n;
    }
  }
  // Takes the room of so many bytes on the disk, which are then zeros. Returns 0, or the error's number.
  int allocate(int64_t bytes) const {
    int error = EINTR;
    while (error == EINTR) error = ::posix_fallocate(fd_.fd(), 0, bytes);
    return error;
  }

  void write(const void* data, int64_t bytes) { check(write_some(data, bytes) == bytes, "write to"); }
  // Returns how many of the bytes were written; if not all, errno says why.
  int64_t write_some(const void* data, int64_t bytes) {
    int64_t written = 0;
    while (written < bytes) {
      const ssize_t n =
          ::write(fd_.fd(), static_cast<const char*>(data) + written, static_cast<size_t>(bytes - written));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      pulse();
      written += n;
    }
    return written;
  }

  // Begins to write bytes [begin, end) to disk, and waits for those before that were begun: so little is left to sync()
  // that a long file does not stand still in it.
  void write_back(int64_t begin, int64_t end) {
    hint(begin, end - begin, SYNC_FILE_RANGE_WRITE);
    if (begin > 0) hint(0, begin, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    pulse();
  }

  // Begins to write these bytes to disk.
  void begin_write_back(int64_t offset, int64_t bytes) const { hint(offset, bytes, SYNC_FILE_RANGE_WRITE); }
  // Waits for these bytes, if they are being written to disk, and reports an error of that.
  void end_write_back(int64_t offset, int64_t bytes) const { hint(offset, bytes, SYNC_FILE_RANGE_WAIT_BEFORE); }

  void truncate(int64_t bytes) const { check(::ftruncate(fd_.fd(), bytes) == 0, "truncate"); }
  void sync() { check(::fsync(fd_.fd()) == 0, "fsync"); }
  // Syncs to disk, then closes.
  void sync_and_close() {
    sync();
    check(::close(fd_.release()) == 0, "close");
  }

 private:
  File(const std::string& path, int flags, const char* operation)
      : path_(path), fd_(::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0644)) {
    CHECK(fd_ || errno != ELOOP || (flags & O_NOFOLLOW) == 0,
          "cannot {} {}: it is a symbolic link, expected a file: remove it, or replace it by what it links to",
          operation, path_);
    check(static_cast<bool>(fd_), operation);
    const mode_t mode = status().st_mode;
    CHECK(S_ISREG(mode), "cannot {} {}: it is {}, expected a file", operation, path_, kind_of(mode));
  }
  struct stat status() const {
    struct stat info {};
    check(::fstat(fd_.fd(), &info) == 0, "stat");
    return info;
  }
  // Not all systems know how.
  void hint(int64_t from, int64_t bytes, unsigned flags) const {
    const bool known = ::sync_file_range(fd_.fd(), from, bytes, flags) == 0 || errno == ENOSYS || errno == EINVAL;
    CHECK(known, "cannot write to {} at byte {}: {}", path_, from, std::strerror(errno));
  }
  static const char* kind_of(mode_t mode) {
    return S_ISDIR(mode)                    ? "a directory"
           : S_ISFIFO(mode)                 ? "a pipe"
           : S_ISSOCK(mode)                 ? "a socket"
           : S_ISCHR(mode) || S_ISBLK(mode) ? "a device"
                                            : "something else";
  }
  void check(bool good, const char* operation) const {
    CHECK(good, "cannot {} {}: {}", operation, path_, std::strerror(errno));
  }

  std::string path_;
  Descriptor fd_;
};

// A cache of files open for reading. The most recently used of all caches stay open, within half of the process's
// limit, whose other half is for everything else. Thread-safe.
class OpenFiles {
 public:
  OpenFiles() = default;
  OpenFiles(const OpenFiles&) = delete;
  OpenFiles& operator=(const OpenFiles&) = delete;
  ~OpenFiles() {
    const std::lock_guard lock(all().mutex);
    for (auto place = all().places.lower_bound({this, ""});
         place != all().places.end() && place->first.first == this;) {
      all().files.erase(place->second);
      place = all().places.erase(place);
    }
  }

  std::shared_ptr<const File> open_read(const std::string& path) {
    const Key key(this, path);
    if (std::shared_ptr<const File> file = find(key)) return file;
    auto file = std::make_shared<const File>(File::open_read(path));  // may take long, so others do not wait for it
    const std::lock_guard lock(all().mutex);
    if (const auto place = all().places.find(key); place != all().places.end()) return place->second->second;
    while (!all().files.empty() && all().files.size() >= most()) {
      all().places.erase(all().files.back().first);
      all().files.pop_back();  // stays open for a thread still reading it
    }
    all().files.emplace_front(key, file);
    all().places.emplace(key, all().files.begin());
    return file;
  }

 private:
  using Key = std::pair<const OpenFiles*, std::string>;  // the cache and the path
  using Files = std::list<std::pair<Key, std::shared_ptr<const File>>>;
  struct All {
    std::mutex mutex;
    Files files;  // most recently used first
    std::map<Key, Files::iterator> places;
  };
  static All& all() {
    static All files;
    return files;
  }
  static size_t most() {
    rlimit limit{};
    const bool known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0;
    return std::clamp<size_t>((known ? limit.rlim_cur : 256) / 2, 1, 4096);
  }
  static std::shared_ptr<const File> find(const Key& key) {
    const std::lock_guard lock(all().mutex);
    const auto place = all().places.find(key);
    if (place == all().places.end()) return nullptr;
    all().files.splice(all().files.begin(), all().files, place->second);
    return place->second->second;
  }
};

// Reads a whole file, of at most `most` bytes.
inline std::string read_text(const std::string& path, int64_t most = int64_t{1} << 30) {
  const File file = File::open_read(path);
  CHECK(file.size() <= most, "{}: {} bytes are too many for a file of this kind, which has at most {}", path,
        file.size(), most);
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read_at(text.data(), static_cast<int64_t>(text.size()), 0);
  return text;
}

inline void write_text_durably(const std::string& path, std::string_view text) {
  File file = File::create(path);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.sync_and_close();
}

// Replaces a file `to`. A rename is durable only once its directory is synced.
inline void rename_path(const std::string& from, const std::string& to) {
  std::error_code error;
  std::filesystem::rename(from, to, error);
  CHECK(!error, "cannot rename {} to {}: {}", from, to, error.message());
}
inline void fsync_directory(const std::string& path) {
  const Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  CHECK(directory, "cannot open directory {}: {}", path, std::strerror(errno));
  const bool done = ::fsync(directory.fd()) == 0;
  const bool cannot = errno == EINVAL || errno == EOPNOTSUPP || errno == ENOSYS;  // this file system syncs files alone
  CHECK(done || cannot, "cannot fsync directory {}: {}", path, std::strerror(errno));
}

// Whether a file or directory exists; it is an error if the system cannot tell.
inline bool path_exists(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) return true;
  CHECK(errno == ENOENT || errno == ENOTDIR, "cannot stat {}: {}", path, std::strerror(errno));
  return false;
}

// Whether it is a directory; false if the system cannot tell.
inline bool is_directory(const std::string& path) {
  std::error_code none;
  return std::filesystem::is_directory(path, none);
}

// Bytes that are free on the disk of a directory; none: not known.
inline std::optional<double> free_bytes(const std::string& directory) {
  struct statvfs disk {};
  if (::statvfs(directory.c_str(), &disk) != 0 || disk.f_blocks == 0) return std::nullopt;
  return static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize);
}

// The names in a directory, sorted.
inline std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error))
    names.push_back(entry->path().filename());
  CHECK(!error, "cannot read directory {}: {}", directory, error.message());
  std::sort(names.begin(), names.end());
  return names;
}

// For errors: what exists where no file matches a pattern: files that begin like it, files with the same extension, or
// not even the directory.
inline std::string instead_of(const std::string& pattern) {
  const std::filesystem::path path(pattern), parent = path.has_parent_path() ? path.parent_path() : ".";
  if (parent.string().find_first_of("*?[") != std::string::npos) return "check the path";
  std::error_code none;
  if (!std::filesystem::exists(parent, none))
    return formatted("there is no directory {} (data/README.md says what makes token shards)", parent.string());
  if (!is_directory(parent)) return formatted("{} is no directory", parent.string());
  const std::vector<std::string> names = names_in(parent);
  const auto listed = [&](auto&& has) -> std::string {
    constexpr size_t most = 3;
    std::string text;
    size_t count = 0;
    for (const std::string& name : names)
      if (has(name) && ++count <= most) text += (count > 1 ? ", " : "") + name;
    if (count == 0) return "";
    return formatted("{} has {}{}", parent.string(), text, count > most ? formatted(" and {} more", count - most) : "");
  };
  const std::string begin = path.filename(), end = path.extension();
  const auto begins = [&](const std::string& name) { return !begin.empty() && name.starts_with(begin); };
  if (const std::string shards = listed(begins); !shards.empty())
    return formatted("{}: name them with a quoted pattern, '{}*{}'", shards, pattern,
                     std::filesystem::path(*std::ranges::find_if(names, begins)).extension().string());
  const std::string alike =
      listed([&](const std::string& name) { return end.empty() || std::filesystem::path(name).extension() == end; });
  if (!alike.empty()) return alike;
  return formatted("{} has no file {}", parent.string(), end.empty() ? "at all" : "*" + end);
}

// The matching files, sorted; errors name `option`.   suffix: of the files that it usually takes
inline std::vector<std::string> expand_glob(const std::string& pattern, const char* option,
                                            const char* suffix = ".bin") {
  std::vector<std::string> paths;
  if (path_exists(pattern)) paths = {pattern};  // whose name may have characters of patterns
  else {
    glob_t found{};
    const int status = ::glob(pattern.c_str(), 0, nullptr, &found);
    paths.assign(found.gl_pathv, found.gl_pathv + (status == 0 ? found.gl_pathc : 0));
    ::globfree(&found);
  }
  CHECK(!paths.empty(), "{} {}: {}: {}", option, pattern,
        pattern.find_first_of("*?[") == pattern.npos ? "no such file" : "no file matches", instead_of(pattern));
  for (const std::string& path : paths) {
    CHECK(!utf8_fault(path), "{} {}: the file's name is not UTF-8, as records of a run are: rename it", option,
          shown(path));
    CHECK(!is_directory(path), "{} {} is a directory: name its files with a quoted pattern, such as '{}/*{}'", option,
          path, path, suffix);
  }
  return paths;
}

// A file that grows line by line during a run. A full disk does not end the run: text that does not fit stays in memory
// and is written before the next line.
class AppendFile {
 public:
  explicit AppendFile(const std::string& path) : file_(File::append(path)) {}

  const std::string& path() const { return file_.path(); }

  // Appends as much of the text as the disk takes. Returns why the rest was not written, once for each time that
  // writing begins to fail; otherwise "".
  std::string append(const std::string& text) {
    waiting_ += text;
    const bool failed_before = !fault_.empty();
    write_waiting();
    return failed_before ? "" : fault_;
  }

  // If the file was deleted, or moved with its directory, recreates it with all its contents; if another file has taken
  // its name, appends to that one. Returns whether either was the case.
  bool ensure_in_place() {
    if (file_.in_place()) return false;
    std::string before;  // read before the new file is made: if this fails, everything can be tried again
    if (!path_exists(path())) {
      before.resize(static_cast<size_t>(file_.size()));
      file_.read_at(before.data(), static_cast<int64_t>(before.size()), 0);
    }
    file_ = File::append(path());
    waiting_.insert(0, before);
    write_waiting();
    return true;
  }

  // Returns when everything so far is on the disk; throws Error if that is impossible.
  void sync() {
    write_waiting();
    CHECK(fault_.empty(), "cannot write to {}: {}", path(), fault_);
    file_.sync();
  }

 private:
  void write_waiting() {
    waiting_.erase(0, static_cast<size_t>(file_.write_some(waiting_.data(), static_cast<int64_t>(waiting_.size()))));
    fault_ = waiting_.empty() ? "" : std::strerror(errno);
  }

  File file_;
  std::string waiting_, fault_;
};

// A file as a lock: one process at a time holds it. Its holder may remove the file; a process that then locks the
// removed file, which it had opened before, starts over with the one of that name.
class FileLock {
 public:
  // Makes the file if there is none. Returns 0 if this process now holds it, or if the file system has no locks (then
  // there is a warning()); EWOULDBLOCK if another process holds it; or why the file cannot be opened or locked: ELOOP
  // if it is a symbolic link.
  int take(const std::string& path) {
    path_ = path;
    for (;;) {
      release();
      fault_.clear();
      fd_ = Descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
      if (!fd_) return errno;
      if (::flock(fd_.fd(), LOCK_EX | LOCK_NB) != 0) {
        const int error = errno;
        if (error == EINTR) continue;
        if (error == EWOULDBLOCK || error == EACCES) return release(), EWOULDBLOCK;  // EACCES: on some network disks
        if (error != ENOLCK && error != ENOSYS && error != EOPNOTSUPP && error != EINVAL) return release(), error;
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
  bool in_place() const { return same_file(fd_.fd(), path_); }
  int fd() const { return fd_.fd(); }

  // Removes the file while holding it: who locks it afterwards finds that it is gone.
  void remove() {
    if (fd_ && in_place()) ::unlink(path_.c_str());
    release();
  }

 private:
  void release() { fd_ = Descriptor(); }

  Descriptor fd_;
  std::string path_, fault_;  // fault_: of a file system without locks
};

}  // namespace llmc
