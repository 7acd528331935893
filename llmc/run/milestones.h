// milestones.h: what is due after some steps of a run: a validation, a sample, a checkpoint, a comparison of copies.
#pragma once
#include <cerrno>  // program_invocation_name, from glibc

#include "run/spikes.h"
#include "run/training_rank.h"
#include "run/validation.h"
#include "train/sample.h"

namespace llmc {

// All ranks call its functions together, with no update under way.
class Milestones {
 public:
  struct Hooks {
    std::function<void()> poll;             // may end the run
    std::function<HostBatch()> last_batch;  // a micro-batch of the last update that was made
  };
  Milestones(TrainingRank& rank, Hooks hooks) : r_(rank), o_(rank.options()), hooks_(std::move(hooks)) {
    if (!r_.job.data->val.empty()) validation_.emplace(r_.run.trainer, r_.run.groups, r_.job.validation());
    r_.checkpoints.when_best_is_lost([this](int64_t step) {
      if (r_.progress.best_step == step) std::tie(r_.progress.best_step, r_.progress.best_val) = best_before_;
      else if (best_before_.first == step) best_before_ = none;
    });
  }

  // Is anything due after this step?
  bool after(int64_t step) const {
    return due(step, o_.check_replicas) || due(step, o_.verify_updates) || due(step, validation_ ? o_.val_every : 0) ||
           due(step, o_.sample_every) || due(step, o_.checkpoint_every) || step == r_.job.last_step() ||
           r_.checkpoints.retries_at(step) || r_.checkpoints.local_due(step);
  }
  // Does what is due after the last update.
  void reach() {
    Progress& progress = r_.progress;
    if (validation_ && due(progress.done, o_.val_every) && !progress.validated)
      r_.report.timed(Task::validation, [&] { validate(); });
    if (progress.done == 0) return;
    if (due(progress.done, o_.verify_updates)) r_.checkpoints.verify_update(progress.done, r_.run);
    if (o_.keep_best && progress.best_step == 0 && progress.done == r_.job.max_steps)
      r_.log.line(
          formatted("notice: --keep-best: no validation loss is below that of the weights that the run began with, "
                    "{:.4f}, so there is no {}/best",
                    progress.best_val, o_.out_dir));
    if (progress.done > r_.first && due(progress.done, o_.sample_every))
      r_.report.timed(Task::sample, [&] { sample(); });
    const bool best = o_.keep_best && progress.best_step == progress.done, last = progress.done == r_.job.last_step();
    const bool by_rule = last || best || due(progress.done, o_.checkpoint_every);
    if (!by_rule && !r_.checkpoints.retries_at(progress.done)) {
      if (r_.checkpoints.local_due(progress.done)) return save({.wait = false, .where = Where::local});
      if (due(progress.done, o_.check_replicas)) r_.checkpoints.compare_copies(progress.done, r_.run);
      return;
    }
    const Because because = by_rule ? Because::rule : r_.checkpoints.retries_because();
    save({.on_failure = last ? OnFailure::fail : o_.checkpoint_errors, .because = because, .best = best, .wait = last});
  }
  void save(const Save& how) {
    const double loss = loss_of_last_data();
    if (!std::isfinite(loss) && o_.rolls_back() && how.because != Because::rule) {  // as if it were not saved here
      r_.checkpoints.put_off_retry(r_.progress.done);
      return r_.log.line(formatted("WARNING: with the weights after step {} the loss is {}, so they are not saved",
                                   r_.progress.done, loss));
    }
    require_finite(loss, "");
    r_.checkpoints.save(r_.progress, r_.run, how);
  }

 private:
  bool due(int64_t step, int64_t every) const { return every > 0 && (step == r_.job.max_steps || step % every == 0); }

  // The loss of a step is computed with the weights before its update. A checkpoint therefore evaluates one more
  // micro-batch, from the data of its last update: the weights may be finite and their loss not. Data of updates that
  // were skipped say nothing about the weights.
  double loss_of_last_data() const {
    if (finite_after_ == r_.progress.done || r_.progress.last_made() <= r_.first) return 0;
    const StepConfig& step = r_.job.step;
    return r_.run.trainer.evaluate(1, step.batch.rows() * step.layout.readers(),
                                   [this](int64_t) { return hooks_.last_batch(); });
  }
  // Otherwise the run ends, or returns to an earlier step.
  void require_finite(double loss, const char* which) {
    const int64_t step = r_.progress.done;
    if (std::isfinite(loss)) {
      finite_after_ = step;
      return;
    }
    r_.checkpoints.settle(r_.progress, r_.run);  // may be the one to return to
    const int64_t point = r_.progress.rollback_point;
    std::string history;
    if (o_.rolls_back() && point < step) {
      history = why_no_rollback(r_.job, point);
      const Spike spike{.step = step,
                        .loss = loss,
                        .grad_norm = loss,
                        .what = formatted("with the weights after it the {}loss is {}", which, loss),
                        .rollback_point = point,
                        .changed_after = r_.progress.changed_after()};
      require_same_spike(spike, history.empty() ? OnSpike::rollback : OnSpike::stop, r_.control());
      if (history.empty()) throw RollsBack{spike};
    }
    throw SharedError(
        formatted("the last update diverged: with the weights after step {} the {}loss is {}, so they "
                  "were not saved.{} Lower --lr, add --warmup-steps or check the data; {}",
                  step, which, loss, history, way_back(r_.job, r_.checkpoints.last(), program_invocation_name)),
        ExitStatus::diverged);
  }

  void validate() {
    Progress& progress = r_.progress;
    WorkProgress work(r_.log);
    const ValidationHooks hooks{
        .poll = hooks_.poll, .micro_batch = shows_micro_batches(work), .cannot_read = [&](const Error& error) {
          r_.cannot_read(error.what(), formatted("the validation after step {}", progress.done));
        }};
    ValLine found = validation_->line(progress.done, hooks);
    if (o_.ema)
      found.averaged.push_back(r_.run.trainer.with_averages([&] { return validation_->line(progress.done, hooks); }));
    r_.log.val(found);
    require_finite(found.loss, "validation ");
    if (found.loss < progress.best_val)
      best_before_ = {std::exchange(progress.best_step, progress.done), std::exchange(progress.best_val, found.loss)};
    progress.validated = true;
  }

  void sample() try {
    const Job& job = r_.job;
    std::vector<int32_t> made;
    WorkProgress work(r_.log);
    generate(r_.run.trainer, prompt_tokens(*job.tokenizer, o_.prompt, job.step.model), o_.sample_tokens,
             sample_options(o_), Philox(static_cast<uint64_t>(o_.seed), formatted("sample {}", r_.progress.done)),
             [&](int32_t token) {
               hooks_.poll();
               made.push_back(token);
               work.show("sampling", std::ssize(made), o_.sample_tokens,
                         formatted("token {} of {}", made.size(), o_.sample_tokens));
               return token != job.tokenizer->end_of_text();
             });
    r_.log.line(formatted("sample at step {}: {}{}", r_.progress.done, o_.prompt, job.tokenizer->decode(made)));
  } catch (const LogitsNotFinite& error) {  // whether the run ends is decided by its losses
    r_.log.line(formatted("WARNING: no sample at step {}: {}", r_.progress.done, error.what()));
  }

  TrainingRank& r_;
  const Options& o_;
  Hooks hooks_;
  std::optional<Validation> validation_;
  int64_t finite_after_ = -1;  // the loss after this step was seen to be finite; -1: after none yet
  // Step and loss of the best validation before the last improvement.
  static constexpr std::pair<int64_t, double> none{-1, std::numeric_limits<double>::infinity()};
  std::pair<int64_t, double> best_before_ = none;
};

}  // namespace llmc
