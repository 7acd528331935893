// append_file.h: a file that grows line by line during a run. A full disk does not end the run: text that does not fit
// stays in memory and is written before the next line.
#pragma once
#include <cerrno>

#include "core/files.h"

namespace llmc {

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

}  // namespace llmc
