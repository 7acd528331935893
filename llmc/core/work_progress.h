// work_progress.h: how much of long work is done, and how long the rest of it takes.
#pragma once
#include "core/clock.h"
#include "core/log.h"

namespace llmc {

// A line that shows it: always on a terminal, otherwise every minute.
class WorkProgress {
 public:
  explicit WorkProgress(Log& log) : log_(log) {}

  // what: the work; another one, or less of it than before, begins anew. count: "sample 3 of 10"
  void show(const std::string& what, int64_t done, int64_t total, const std::string& count) {
    const auto now = Clock::now();
    if (what != what_ || done < done_) what_ = what, begin_ = next_ = now, next_line_ = now + between_lines;
    done_ = done;
    if (now < (log_.live() ? next_ : next_line_)) return;
    next_ = now + std::chrono::milliseconds(100), next_line_ = now + between_lines;
    const double share = static_cast<double>(done) / static_cast<double>(std::max<int64_t>(1, total));
    const std::string text =
        formatted("{}: {}{}", what, count,
                  done > 0 && done <= total
                      ? formatted(", {} left",
                                  human_duration(std::chrono::duration<double>(now - begin_).count() * (1 / share - 1)))
                      : "");
    if (log_.live()) log_.progress(text);
    else log_.line(text);
  }
  // The same for bytes.
  Advance of_bytes(const std::string& what) {
    return [this, what](int64_t done, int64_t total) {
      show(what, done, total, formatted("{} of {}", human_bytes(done), human_bytes(total)));
    };
  }

 private:
  static constexpr std::chrono::seconds between_lines{60};
  Log& log_;
  std::string what_;
  int64_t done_ = 0;
  Clock::time_point begin_, next_, next_line_;
};

}  // namespace llmc
