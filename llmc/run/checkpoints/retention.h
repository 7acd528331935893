// retention.h: which checkpoints of an out directory stay.
#pragma once
#include "run/checkpoints/checkpoint.h"

namespace llmc {

// In trainer.json, if saved for --checkpoint-minutes alone, or for --checkpoint-local alone.
inline constexpr const char *saved_by_clock = "clock", *saved_locally = "local";

class Retention {
 public:
  explicit Retention(std::string out_dir) : path_(std::move(out_dir)) {}

  // Deletes all checkpoints except the newest `keep` (0: keeps all), the two newest saved by the clock alone or
  // locally, multiples of `keep_every`, the one that OUT/best links to, and the one to which a rollback would return.
  void prune(int64_t keep, int64_t keep_every, std::optional<int64_t> rollback_point) {
    constexpr size_t keep_by_clock = 2;
    std::error_code none;
    const std::optional<int64_t> best = checkpoint_step(std::filesystem::read_symlink(path_ + "/best", none));
    std::vector<int64_t> by_clock, others;
    for (const int64_t step : checkpoint_steps(path_)) (saved_by_the_clock(step) ? by_clock : others).push_back(step);
    const auto remove_older = [&](std::vector<int64_t> steps, size_t most) {
      steps.resize(steps.size() - std::min(steps.size(), most));
      for (const int64_t step : steps)
        if (!(keep_every > 0 && step % keep_every == 0) && step != best && step != rollback_point) remove(step);
    };
    remove_older(std::move(by_clock), keep_by_clock);
    if (keep > 0) remove_older(std::move(others), static_cast<size_t>(keep));
  }

  // Makes OUT/best a link to the checkpoint with the best validation loss.
  void link_best(int64_t step) const {
    const std::string temporary = path_ + "/.tmp-best";
    std::error_code error;
    std::filesystem::remove(temporary, error);
    std::filesystem::create_symlink(std::filesystem::path(checkpoint_path(path_, step)).filename(), temporary, error);
    if (!error) std::filesystem::rename(temporary, path_ + "/best", error);
    CHECK(!error, "cannot link {}/best: {}", path_, error.message());
  }
  // The directory is a new one, or steps are taken again.
  void forget() { by_clock_.clear(); }

 private:
  // Whether trainer.json says that a checkpoint was saved for --checkpoint-minutes or --checkpoint-local alone.
  bool saved_by_the_clock(int64_t step) {
    const auto [found, is_new] = by_clock_.try_emplace(step, false);
    if (is_new) try {
        const nlohmann::json by =
            read_json(checkpoint_path(path_, step) + "/trainer.json").value("saved_by", nlohmann::json());
        found->second = by == saved_by_clock || by == saved_locally;
      } catch (const std::exception&) {  // do not delete a damaged one early
      }
    return found->second;
  }

  void remove(int64_t step) const {
    const std::string path = checkpoint_path(path_, step), gone = formatted("{}/.tmp-removed-{:06}", path_, step);
    std::error_code error;
    std::filesystem::rename(path, gone, error);  // first, so that half of it is never taken for a checkpoint
    if (!error) std::filesystem::remove_all(gone, error);
    CHECK(!error, "cannot remove {}: {}", path, error.message());
  }

  std::string path_;
  std::map<int64_t, bool> by_clock_;  // of checkpoints whose trainer.json was read
};

}  // namespace llmc
