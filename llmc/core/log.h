// log.h: what a run prints: lines and tables on stdout, which OUT/log.txt keeps, a live progress line on a terminal,
// and OUT/metrics.jsonl, one object for each line of numbers; numbers and failures in words.
#pragma once
#include <chrono>
#include <ctime>
#include <new>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/clock.h"
#include "core/console.h"
#include "core/files.h"

namespace llmc {

// Throws if anything that was printed to stdout is lost, as on a full disk; but not if stdout is a pipe whose reader
// has read enough.
inline void check_printed() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  const int fault = errno;
  struct stat it {};
  if (fault == EPIPE || (::fstat(STDOUT_FILENO, &it) == 0 && S_ISFIFO(it.st_mode))) return;
  throw Error(formatted("cannot write to stdout: {}",
                        fault == 0 ? "a part is lost; free space, or write elsewhere" : std::strerror(fault)));
}

// 1234 -> "1,234"; 124439808 -> "124.4M"
inline std::string human_count(int64_t n) {
  if (n >= 10'000'000'000'000) return formatted("{:.1f}T", static_cast<double>(n) * 1e-12);
  if (n >= 10'000'000'000) return formatted("{:.1f}B", static_cast<double>(n) * 1e-9);
  if (n >= 10'000'000) return formatted("{:.1f}M", static_cast<double>(n) * 1e-6);
  std::string digits = formatted("{}", n);
  for (size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, 1, ',');
  return digits;
}

// "1 step", "1,234 steps"
inline std::string counted(int64_t n, const std::string& what) {
  return formatted("{} {}{}", human_count(n), what, n == 1 ? "" : "s");
}

// Three digits, or a count: 0.0123 -> "0.0123", 12.34 -> "12.3", 1234.5 -> "1,235".
inline std::string human_amount(double x) {
  return !(x >= 999.5 && x <= 1e18) ? formatted("{:.3g}", x) : human_count(std::llround(x));
}

namespace detail {

// Divides x, which is in the first of these units, until it is below `most`; returns the unit that it then is in.
inline const char* scale(double& x, double most, std::initializer_list<const char*> units) {
  const char* const* unit = units.begin();
  for (; !(x < most) && unit + 1 < units.end(); ++unit) x /= 1000;
  return *unit;
}

// ", ulimit -v is 200000 KiB"; "" if there is no such limit.
std::string limit_text(auto resource, const char* name, rlim_t unit, const char* of_unit) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return formatted(", ulimit {} is {}{}", name, limit.rlim_cur / unit, of_unit);
}

}  // namespace detail

// Says in words what ended a process when it is not one of our Errors: the system refused memory or a thread, whatever
// the limit, or the program has a bug.
inline std::string failure_text(const std::exception& error) {
  if (dynamic_cast<const Error*>(&error) != nullptr ||
      dynamic_cast<const std::filesystem::filesystem_error*>(&error) != nullptr)
    return error.what();
  const bool wrong_size = dynamic_cast<const std::bad_array_new_length*>(&error) != nullptr;  // a bug in the program
  if (!wrong_size && dynamic_cast<const std::bad_alloc*>(&error) != nullptr)
    return formatted(
        "the system gave no more memory{}: end other programs, raise a limit (ulimit -v, or a container's), or make "
        "the run smaller (--plan says what it needs)",
        detail::limit_text(RLIMIT_AS, "-v", 1024, " KiB"));
  const auto* const system = dynamic_cast<const std::system_error*>(&error);
  if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again)
    return formatted(
        "the system started no further thread{}{}: raise a limit (ulimit -u and -v, or a container's pids.max), or use "
        "fewer --local-ranks and --threads",
        detail::limit_text(RLIMIT_NPROC, "-u", 1, ""), detail::limit_text(RLIMIT_AS, "-v", 1024, " KiB"));
  if (system != nullptr && system->code() == std::errc::operation_not_permitted)
    return "the system does not allow further threads (clone3: operation not permitted), as an old container runtime's "
           "seccomp profile does: use a newer one, or another profile";
  return formatted("internal error: {}", error.what());
}

// Three digits: 987 -> "987", 39712 -> "39.7k", 1234567 -> "1.23M".
inline std::string human_rate(double x) {
  const char* const unit = detail::scale(x, 999.5, {"", "k", "M", "G", "T"});
  const int decimals = *unit == '\0' || x >= 99.95 ? 0 : x >= 9.995 ? 1 : 2;
  return formatted("{:." + std::to_string(decimals) + "f}{}", x, unit);
}

inline std::string human_bytes(int64_t n) {
  const double b = static_cast<double>(n);
  if (b >= 1 << 30) return formatted("{:.2f} GiB", b / (1 << 30));
  if (b >= 1 << 20) return formatted("{:.1f} MiB", b / (1 << 20));
  return formatted("{:.1f} KiB", b / (1 << 10));
}

// Four digits: 12.5e6 -> "12.50 MFLOP", 2.5331e12 -> "2.533 TFLOP".
inline std::string human_flops(double n) {
  n *= 1e-6;
  const char* const unit = detail::scale(n, 999.95, {"M", "G", "T", "P", "E", "Z", "Y"});
  return formatted("{:#.4g} {}FLOP", n, unit);
}

inline std::string human_duration(double seconds) {
  const int64_t s = std::llround(seconds);
  if (s >= 100 * 3600) return formatted("{:.1f} d", seconds / 86400);
  return s >= 3600 ? formatted("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60) : formatted("{}:{:02}", s / 60, s % 60);
}

// The current time in UTC, in ISO 8601: "2026-01-31T23:59:59Z".
inline std::string time_stamp() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 32> text;
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &utc)};
}

struct TrainLine {
  int64_t step, max_steps;
  double loss, grad_norm, lr, ms, tokens_per_s;
  std::optional<double> mfu;                            // 0 to 1; none: the peak is unknown
  std::optional<double> speed_of_light = std::nullopt;  // 0 to 1, of the measured peak; none: MFU refers to it
  double eta_s;                                         // seconds left
  int64_t tokens;                                       // seen since the first step
  int64_t memory;                                       // bytes in use, of the process or of the rank's GPU
  bool skipped = false;                                 // whether the update was
  // One more console column (title and value, of at most 7 characters each) instead of the speed of light; and numbers
  // that only metrics.jsonl has.
  std::optional<std::pair<std::string, std::string>> column = std::nullopt;
  std::vector<std::pair<const char*, double>> more = {};
};
struct ValLine {
  int64_t step;
  double loss;
  std::vector<std::pair<std::string, double>> sets = {};  // the losses of sets with names
  std::optional<double> choices = std::nullopt,
                        choices_normalized = std::nullopt;  // fractions of questions answered correctly
  std::vector<ValLine> averaged = {};                       // the same with the weights' moving average (one at most)
};

// A checkpoint that has become visible after `step`. stall_s: seconds that training waited; cpu_s: of the processor, in
// the background.
struct CheckpointLine {
  int64_t step;
  std::string path;
  int64_t saved;  // the checkpoint's step
  std::string mode;
  int64_t bytes;
  double stall_s, write_s, cpu_s;
  bool local = false;  // on the nodes' own disks; path: rank 0's part of it
};

// A run has returned to an earlier step, and leaves out some samples of its order.
struct RollbackLine {
  int64_t step, spike;
  double loss, grad_norm;         // of the spike
  std::string from;               // where its state is from: a checkpoint, or ""
  int64_t first_sample, samples;  // left out
};

enum class ProgressLine : uint8_t { none, shown };

// A file of training data whose contents have changed, as checksums, or a setting of the recipe.
struct DataChange {
  std::string shard = {}, setting = {};  // one of them; the other is empty
  std::string before = {}, now = {};
};

class Log {
 public:
  explicit Log(ProgressLine progress = ProgressLine::none) : live_(progress == ProgressLine::shown) {}
  // For ranks that print nothing.
  static Log silent() {
    Log log;
    log.silent_ = true;
    return log;
  }

  // From now on also appends to metrics.jsonl and log.txt in this directory; log.txt begins with the lines so far.
  // elapsed_s: seconds that a resumed run had taken when it was stopped.
  void open(const std::string& out_dir, double elapsed_s) {
    metrics_.emplace(out_dir + "/metrics.jsonl");
    log_file_.emplace(out_dir + "/log.txt");
    elapsed_before_ = elapsed_s;
    opened_ = Clock::now();
    keep(std::exchange(early_, ""));
  }
  // Another file has taken the place of metrics.jsonl: its lines go there now, without those that wait in memory.
  void metrics_replaced() {
    if (metrics_) metrics_.emplace(std::string(metrics_->path()));
  }
  // Syncs the metrics written so far to disk; throws Error if that is impossible.
  void sync_metrics() {
    if (metrics_) metrics_->sync();
  }

  // Recreates either of the two files if it was deleted or moved.
  void ensure_in_place() {
    for (std::optional<AppendFile>* file : {&metrics_, &log_file_}) try {
        if (*file && (*file)->ensure_in_place())
          line(formatted("WARNING: {} was deleted, moved or replaced: its lines go to the file of that name now",
                         (*file)->path()));
      } catch (const std::exception&) {  // the disk or memory may be full: tried again later
      }
  }

  void line(const std::string& text) {
    if (silent_) return;
    const std::string shown = printable(text) + "\n";
    keep(shown);
    print((std::exchange(progress_shown_, false) ? "\r\033[K" : "") + shown);
  }

  // A line for log.txt alone: what the console shows anyway, such as the command or the error that ends the run.
  void file_line(const std::string& text) {
    if (!silent_) keep(printable(text) + "\n");
  }

  // Is a progress line shown?
  bool live() const { return live_; }

  // A title and rows of name and value.
  void table(const std::string& title, const std::vector<std::pair<std::string, std::string>>& rows) {
    line(title);
    size_t width = 22;
    for (const auto& [name, value] : rows) width = std::max(width, name.size());
    const std::string row = "  {:-" + std::to_string(width) + "} {}";
    for (const auto& [name, value] : rows) line(formatted(row, name, value));
  }

  // print: also on the console, as a row of a table of at most 80 columns, whose titles repeat on every screen.
  void train(const TrainLine& t, bool print = true) {
    if (print) {
      const int digits = static_cast<int>(formatted("{}", t.max_steps).size());
      const bool both = digits <= 5;  // "500/20000"; with more steps, "500000"
      const bool sol = !t.column && t.speed_of_light;
      const auto [title, value] = t.column ? *t.column
                                  : sol    ? std::pair<std::string, std::string>("SOL", share(t.speed_of_light))
                                           : std::pair<std::string, std::string>();
      const std::string place = "{:" + std::to_string(std::max(5, both ? 2 * digits + 1 : digits)) + "}",
                        rate_on = t.column ? " {:6} {:7} {:7}"
                                  : sol    ? " {:7} {:7}{:7}"
                                           : " {:7} {:7}{}",
                        row = place + " {:8} {:8} {:9} {:8}" + rate_on + " {:8}";
      if (rows_++ % rows_per_screen == 0)
        line(formatted(row, "step", "loss", "norm", "lr", "ms", "tok/s", "MFU", title, "ETA"));
      line(formatted(row, both ? formatted("{}/{}", t.step, t.max_steps) : formatted("{}", t.step),
                     formatted(t.loss < 1000 ? "{:.4f}" : "{:.2e}", t.loss),
                     formatted(t.grad_norm < 1000 ? "{:.4f}" : "{:.2e}", t.grad_norm), formatted("{:.2e}", t.lr),
                     formatted("{:.1f}", t.ms), human_rate(t.tokens_per_s), share(t.mfu), value,
                     human_duration(t.eta_s)));
    }
    nlohmann::ordered_json object = {{"kind", "train"},
                                     {"step", t.step},
                                     {"loss", t.loss},
                                     {"grad_norm", t.grad_norm},
                                     {"lr", t.lr},
                                     {"ms", t.ms},
                                     {"tokens_per_s", t.tokens_per_s},
                                     {"mfu", t.mfu ? nlohmann::ordered_json(*t.mfu) : nlohmann::ordered_json()}};
    if (t.speed_of_light) object["speed_of_light"] = *t.speed_of_light;
    if (t.skipped) object["skipped"] = true;
    for (const auto& [name, value] : t.more) object[name] = value;
    object["tokens"] = t.tokens;
    object["memory_bytes"] = t.memory;
    write(object);
  }

  void val(const ValLine& v) {
    std::string text = formatted("validation at step {} | ", v.step);
    nlohmann::ordered_json object = {{"kind", "val"}, {"step", v.step}};
    add_results(v, text, object);
    for (const ValLine& averaged : v.averaged) {
      text += " | ema: ";
      object["ema"] = nlohmann::ordered_json::object();
      add_results(averaged, text, object["ema"]);
    }
    line(text);
    write(object);
  }

  void checkpoint(const CheckpointLine& c) {
    const double mb_per_s = static_cast<double>(c.bytes) / std::max(c.write_s, 1e-9) / 1e6;
    line(formatted("checkpoint: {}; training stood still for {:.2f} s; written in {:.2f} s, {:.0f} MB/s", c.path,
                   c.stall_s, c.write_s, mb_per_s));
    nlohmann::ordered_json object = {{"kind", "checkpoint"}, {"step", c.step},   {"saved", c.saved},
                                     {"mode", c.mode},       {"bytes", c.bytes}, {"stall_s", c.stall_s},
                                     {"write_s", c.write_s}, {"cpu_s", c.cpu_s}, {"mb_per_s", mb_per_s}};
    if (c.local) object["local"] = true;
    write(object);
  }

  // After this step all stages of an asynchronous pipeline have made the same updates.
  void flush(int64_t step) { write({{"kind", "flush"}, {"step", step}}); }

  void rollback(const RollbackLine& r) {
    write({{"kind", "rollback"},
           {"step", r.step},
           {"spike", r.spike},
           {"loss", r.loss},
           {"grad_norm", r.grad_norm},
           {"from", r.from},
           {"first_sample", r.first_sample},
           {"samples", r.samples}});
  }

  // From this step on the run reads other data, or reads them otherwise.
  void data_change(int64_t step, const DataChange& change) {
    const bool shard = !change.shard.empty();
    if (shard)  // a setting has had its notice
      line(formatted("notice: {} has changed since step {} (checksum {}, now {}): accepted, by --data-changed accept",
                     change.shard, step, change.before, change.now));
    write({{"kind", "data"},
           {"step", step},
           {shard ? "shard" : "setting", shard ? change.shard : change.setting},
           {"before", change.before},
           {"now", change.now}});
  }

  // Facts of this kind, as text and as JSON: "stage", which begins with this step; "gpu", its readings after the step.
  void facts(const char* kind, int64_t step, const std::string& text, const nlohmann::ordered_json& facts) {
    line(text);
    nlohmann::ordered_json object = {{"kind", kind}, {"step", step}};
    object.update(facts);
    write(object);
  }

  // A line that the next one overwrites; prints nothing without ProgressLine::shown.
  void progress(const std::string& text) {
    if (!live_) return;
    print("\r\033[K" + printable(text));
    progress_shown_ = true;
  }
  void progress(const std::string& what, int64_t done, int64_t total) {
    progress(formatted("{} {}/{}", what, done, total));
  }

 private:
  // The results of a validation, as text and as JSON.
  static void add_results(const ValLine& v, std::string& text, nlohmann::ordered_json& object) {
    text += formatted("loss {:.4f} | perplexity {:.3f}", v.loss, std::exp(v.loss));
    object["loss"] = v.loss;
    for (const auto& [name, loss] : v.sets) {
      text += formatted(" | {} {:.4f}", name, loss);
      object["losses"][name] = loss;
    }
    if (v.choices) {
      text += formatted(" | choices_acc {:.2f}%", 100 * *v.choices);
      object["choices_acc"] = *v.choices;
    }
    if (v.choices_normalized) {
      text += formatted(", choices_acc_norm {:.2f}%", 100 * *v.choices_normalized);
      object["choices_acc_norm"] = *v.choices_normalized;
    }
  }

  static constexpr int rows_per_screen = 25;

  static std::string share(const std::optional<double>& of_one) {
    return of_one ? formatted("{:.1f}%", 100 * *of_one) : std::string("n/a");
  }
  // Lines that log.txt has need not wait for a reader.
  void print(const std::string& text) {
    if (log_file_) return screen_.print(text);
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  }
  // Text for log.txt, kept in memory until the file is opened, when the directory is known to be the run's.
  void keep(const std::string& text) {
    if (log_file_) warn(*log_file_, log_file_->append(text));
    else early_ += text;
  }
  // One object per line, with the time of writing; doubles round-trip, non-finite ones are written as null.
  void write(nlohmann::ordered_json object) {
    if (!metrics_) return;
    object["time"] = time_stamp();
    object["elapsed_s"] = elapsed_before_ + seconds_since(opened_);
    warn(*metrics_, metrics_->append(object.dump() + "\n"));
  }
  void warn(const AppendFile& file, const std::string& fault) {
    if (!fault.empty())
      line(formatted("WARNING: cannot write to {}: {}; its lines wait in memory until there is room", file.path(),
                     fault));
  }

  bool live_, progress_shown_ = false, silent_ = false;
  int rows_ = 0;
  std::optional<AppendFile> metrics_, log_file_;
  Console screen_;
  std::string early_;  // lines for log.txt, before it is open
  double elapsed_before_ = 0;
  Clock::time_point opened_;
};

}  // namespace llmc
