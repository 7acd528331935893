// append_file.h: a file that grows line by line while a run goes on, and that a full disk does not end: what the disk
// does not take stays in memory and is written before the next line.
#pragma once
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "core/files.h"

namespace llmc {

class AppendFile {
 public:
  explicit AppendFile(const std::string& path) : file_(File::append(path)) {}

  const std::string& path() const { return file_.path(); }

  // Appends the text as far as the disk takes it. Returns why it did not take all of it, once for each time that it
  // begins to fail; otherwise "".
  std::string append(const std::string& text) {
    waiting_ += text;
    const bool failed_before = !fault_.empty();
    write_waiting();
    return failed_before ? "" : fault_;
  }

  // If the file was deleted, or moved with its directory, it is made again with all that it had; another one that has
  // taken its name is appended to. Returns whether that was so.
  bool ensure_in_place() {
    if (file_.in_place()) return false;
    std::string before;  // read before there is a new one: if that fails, all can be tried again
    if (!path_exists(path())) {
      before.resize(static_cast<size_t>(file_.size()));
      file_.read_at(before.data(), static_cast<int64_t>(before.size()), 0);
    }
    file_ = File::append(path());
    waiting_.insert(0, before);
    write_waiting();
    return true;
  }

  // Everything so far is on the disk when this returns; it is an error if that cannot be.
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

}  // namespace llmc
