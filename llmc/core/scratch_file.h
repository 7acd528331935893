// scratch_file.h: a file that serves as memory (--offload-dir). Nobody but the process that made it ever reads it: its
// name is removed as soon as it is open, so that it takes no room once the process has ended, however that ends, and no
// other run can have it. Its whole size is taken from the disk before it is used: so a disk that is too small is found
// at the start and, unless its file system writes every change to a new place, no write fails later for want of room.
//
// It is read and written by calls, and not mapped, because an error of the disk is then an error of a call, which names
// the file and the place; in mapped memory it would be a signal that ends the process. Reads and writes go through the
// system's cache, which keeps what memory nobody else needs. A write to the cache succeeds even if the disk fails
// later, and the cache may then forget what was written: so each read first asks whether the bytes got to the disk.
#pragma once
#include <atomic>

#include "core/files.h"

namespace llmc {

// Any number of threads may use it at the same time, each of them other bytes.
class ScratchFile {
 public:
  // Replaces a file of this name: one that is left of a process that was killed. what, remedy: for errors
  ScratchFile(const std::string& path, int64_t bytes, const std::string& what, const std::string& remedy)
      : file_(create(path, what, remedy)), bytes_(bytes) {
    CHECK(::unlink(path.c_str()) == 0 || errno == ENOENT, "cannot remove the name of {}: {}", path,
          std::strerror(errno));
    if (bytes == 0) return;
    const std::string parent = std::filesystem::path(path).parent_path();
    const double free = free_bytes(parent.empty() ? "." : parent).value_or(0);
    const int error = file_.allocate(bytes);
    CHECK(error != ENOSPC && error != EFBIG && error != EDQUOT,
          "cannot make {}, for {}: it needs {} bytes, and {:.0f} bytes are free there: {}: {}", path, what, bytes, free,
          std::strerror(error), remedy);
    CHECK(error == 0, "cannot make {}, for {} of {} bytes: {}: {}", path, what, bytes, std::strerror(error), remedy);
  }

  const std::string& path() const { return file_.path(); }
  int64_t bytes() const { return bytes_; }

  void read(void* to, int64_t bytes, int64_t offset) const {
    require(bytes, offset);
    file_.end_write_back(offset, bytes);
    file_.read_at(to, bytes, offset);
  }
  void write(const void* from, int64_t bytes, int64_t offset) {
    require(bytes, offset);
    blank_ = false;
    file_.write_at(from, bytes, offset);
    file_.begin_write_back(offset, bytes);
  }
  void fill(std::byte value, int64_t bytes, int64_t offset) {
    if (blank_ && value == std::byte{0}) return;
    std::array<std::byte, 1 << 16> all;
    all.fill(value);
    for (int64_t at = 0; at < bytes; at += std::ssize(all))
      write(all.data(), std::min<int64_t>(std::ssize(all), bytes - at), offset + at);
  }

 private:
  static File create(const std::string& path, const std::string& what, const std::string& remedy) {
    for (int tries = 0;; ++tries) {
      CHECK(::unlink(path.c_str()) == 0 || errno == ENOENT, "cannot replace {}, for {}: {}: {}", path, what,
            std::strerror(errno), remedy);
      try {
        return File::create_new(path);
      } catch (const Error& error) {
        const bool is_another = errno == EEXIST;  // of a process that has made one in the meantime, and removes it now
        CHECK(is_another && tries < 100, "{}, for {}: {}", error.what(), what, remedy);
      }
    }
  }
  void require(int64_t bytes, int64_t offset) const {
    CHECK(offset >= 0 && bytes >= 0 && offset + bytes <= bytes_, "{}: bytes {} to {} of {}", path(), offset,
          offset + bytes, bytes_);
  }

  File file_;
  int64_t bytes_;
  std::atomic<bool> blank_ = true;  // nothing was written: all is 0
};

}  // namespace llmc
