// log.h: what a run prints: aligned lines and tables on stdout, a live progress line on a terminal, and metrics.jsonl.
#pragma once
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/files.h"

namespace llmc {

// 1234 -> "1,234"; 124439808 -> "124.4M"
inline std::string human_count(int64_t n) {
  if (n >= 10'000'000'000) return formatted("{:.1f}B", static_cast<double>(n) * 1e-9);
  if (n >= 10'000'000) return formatted("{:.1f}M", static_cast<double>(n) * 1e-6);
  std::string digits = formatted("{}", n);
  for (size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, 1, ',');
  return digits;
}

inline std::string human_bytes(int64_t n) {
  const double b = static_cast<double>(n);
  if (b >= 1 << 30) return formatted("{:.2f} GiB", b / (1 << 30));
  if (b >= 1 << 20) return formatted("{:.1f} MiB", b / (1 << 20));
  return formatted("{:.1f} KiB", b / (1 << 10));
}

inline std::string human_duration(double seconds) {
  const int64_t s = std::llround(seconds);
  return s >= 3600 ? formatted("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60) : formatted("{}:{:02}", s / 60, s % 60);
}

struct TrainLine {
  int64_t step, max_steps;
  double loss, grad_norm, lr, ms, tokens_per_s;
  std::optional<double> mfu;                            // 0 to 1; none: the peak is unknown
  std::optional<double> speed_of_light = std::nullopt;  // 0 to 1, of the measured peak; none: MFU refers to it
  double eta_s;                                         // seconds left
  bool skipped = false;                                 // whether the update was
};
struct ValLine {
  int64_t step;
  double loss;
  std::optional<double> choices = std::nullopt,
                        choices_normalized = std::nullopt;  // fractions of questions answered right
};

class Log {
 public:
  Log() : terminal_(isatty(STDOUT_FILENO) == 1) {}
  // For ranks that print nothing.
  static Log silent() {
    Log log;
    log.silent_ = true;
    log.terminal_ = false;
    return log;
  }

  // From now on also appends to out_dir/metrics.jsonl.
  void open_metrics(const std::string& out_dir) { metrics_.emplace(File::append(out_dir + "/metrics.jsonl")); }
  // Syncs the metrics written so far to disk.
  void sync_metrics() {
    if (metrics_) metrics_->sync();
  }

  void line(const std::string& text) {
    if (silent_) return;
    erase_progress();
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
  }

  // A title and rows of name and value.
  void table(const std::string& title, const std::vector<std::pair<std::string, std::string>>& rows) {
    line(title);
    for (const auto& [name, value] : rows) line(formatted("  {:-22} {}", name, value));
  }

  // print: also on the console.
  void train(const TrainLine& t, bool print = true) {
    const int digits = static_cast<int>(formatted("{}", t.max_steps).size());
    if (print)
      line(formatted("step {:" + std::to_string(digits) +
                         "}/{} | loss {:7.4f} | norm {:8.4f} | lr {:.2e} | {:8.1f} ms | {:9} tok/s | {} MFU{} | ETA {}",
                     t.step, t.max_steps, t.loss, t.grad_norm, t.lr, t.ms, human_count(std::llround(t.tokens_per_s)),
                     share(t.mfu), t.speed_of_light ? formatted(" | {} SOL", share(t.speed_of_light)) : std::string(),
                     human_duration(t.eta_s)));
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
    write(object);
  }

  void val(const ValLine& v) {
    std::string text =
        formatted("validation at step {} | loss {:.4f} | perplexity {:.3f}", v.step, v.loss, std::exp(v.loss));
    nlohmann::ordered_json object = {{"kind", "val"}, {"step", v.step}, {"loss", v.loss}};
    if (v.choices) {
      text += formatted(" | choices_acc {:.2f}%", 100 * *v.choices);
      object["choices_acc"] = *v.choices;
    }
    if (v.choices_normalized) {
      text += formatted(", choices_acc_norm {:.2f}%", 100 * *v.choices_normalized);
      object["choices_acc_norm"] = *v.choices_normalized;
    }
    line(text);
    write(object);
  }

  // The GPU's readings after a step.
  void gpu(int64_t step, const std::string& text, const nlohmann::ordered_json& readings) {
    line(text);
    nlohmann::ordered_json object = {{"kind", "gpu"}, {"step", step}};
    object.update(readings);
    write(object);
  }

  // A line that the next one overwrites; prints nothing if stdout is not a terminal.
  void progress(const std::string& what, int64_t done, int64_t total) {
    if (!terminal_) return;
    std::printf("\r\033[K%s %lld/%lld", what.c_str(), static_cast<long long>(done), static_cast<long long>(total));
    std::fflush(stdout);
    progress_shown_ = true;
  }

 private:
  static std::string share(const std::optional<double>& of_one) {
    return of_one ? formatted("{:5.1f}%", 100 * *of_one) : std::string("  n/a");
  }
  void erase_progress() {
    if (progress_shown_) std::printf("\r\033[K");
    progress_shown_ = false;
  }
  // One object per line; doubles round-trip, non-finite ones are written as null.
  void write(const nlohmann::ordered_json& object) {
    if (!metrics_) return;
    const std::string text = object.dump() + "\n";
    metrics_->write(text.data(), static_cast<int64_t>(text.size()));
  }

  bool terminal_, progress_shown_ = false, silent_ = false;
  std::optional<File> metrics_;
};

}  // namespace llmc
