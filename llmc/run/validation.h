// validation.h: the loss on --val-data and the answers to --eval-choices, computed by all ranks together; the same for
// training and for --evaluate.
#pragma once
#include "core/work_progress.h"
#include "data/dataloader.h"
#include "train/choices.h"
#include "train/trainer.h"

namespace llmc {

// The inputs of a validation. A part of the data is drawn from all of it: the same part every time, for every --seed.
struct ValidationInputs {
  struct Set {
    std::string name;  // empty: the only one
    const TokenShards* shards;
    int64_t samples;  // of them
  };
  std::vector<Set> sets = {};          // none: no loss
  bool shuffled = true;                // takes a part from all of the data, not from its beginning
  const ChoiceSet* choices = nullptr;  // none: no questions
  std::optional<int32_t> document_begin = std::nullopt;

  DataLoader loader(const Set& set, int64_t vocab_size) const {
    return DataLoader(*set.shards, {.seed = 0,
                                    .shuffle = shuffled && set.samples < set.shards->samples(),
                                    .vocab_size = vocab_size,
                                    .end_of_text = document_begin});
  }
  int64_t samples() const {
    int64_t all = 0;
    for (const Set& set : sets) all += set.samples;
    return all;
  }
};

// Called alike on every rank.
struct ValidationHooks {
  std::function<void()> poll;                                                      // may end the run
  std::function<void(const char* what, int64_t done, int64_t total)> micro_batch;  // begins; done counts from 1
  // This rank cannot read its samples; it goes on without them until a poll ends all ranks. None: throws the error.
  std::function<void(const Error& error)> cannot_read = {};
};

// ValidationHooks::micro_batch of a rank that says how far it is.
inline auto shows_micro_batches(WorkProgress& progress) {
  return [&progress](const char* what, int64_t m, int64_t count) {
    progress.show(what, m - 1, count, formatted("micro-batch {} of {}", m, count));
  };
}

class Validation {
 public:
  Validation(Trainer& trainer, Groups& groups, const ValidationInputs& inputs)
      : trainer_(trainer), groups_(groups), inputs_(inputs) {
    for (const ValidationInputs::Set& set : inputs_.sets)
      loaders_.push_back(inputs_.loader(set, trainer.config().model.vocab_size));
  }

  // The mean over all targets of each set, in the order of the sets.
  std::vector<double> losses(const ValidationHooks& hooks) {
    std::vector<double> all;
    for (size_t set = 0; set < loaders_.size(); ++set) all.push_back(loss(set, hooks));
    return all;
  }
  // The mean over the targets of all sets.
  double mean(const std::vector<double>& losses) const {
    if (losses.size() == 1) return losses[0];
    double sum = 0;
    for (size_t i = 0; i < losses.size(); ++i) sum += losses[i] * static_cast<double>(inputs_.sets[i].samples);
    return sum / static_cast<double>(inputs_.samples());
  }
  ChoiceScore answers(const ValidationHooks& hooks) {
    return evaluate_choices(
        trainer_, *inputs_.choices, groups_,
        [&](int64_t m, int64_t count) { before("multiple choice", m, count, hooks); }, hooks.poll);
  }

  // The loss and the answers, as far as there are any, after this many updates.
  ValLine line(int64_t step, const ValidationHooks& hooks) {
    const std::vector<double> each = losses(hooks);
    ValLine found{.step = step, .loss = mean(each)};
    for (size_t i = 0; i < each.size(); ++i)
      if (!inputs_.sets[i].name.empty()) found.sets.emplace_back(inputs_.sets[i].name, each[i]);
    if (inputs_.choices == nullptr) return found;
    const ChoiceScore score = answers(hooks);
    found.choices = score.accuracy;
    found.choices_normalized = score.normalized_accuracy;
    return found;
  }

 private:
  // Every sample counts once in any layout: padding rows after the last do not count.
  double loss(size_t set, const ValidationHooks& hooks) {
    const StepConfig& step = trainer_.config();
    const int64_t B = step.batch.B, T = step.batch.T, readers = step.layout.readers();
    const int64_t samples = inputs_.sets[set].samples, micro_batches = ceil_div(samples, B * readers);
    double sum = 0;
    for (int64_t begin = 0; begin < micro_batches; hooks.poll(), begin += evaluated_in_one_list)
      sum += trainer_.evaluate(std::min(evaluated_in_one_list, micro_batches - begin), 1, [&](int64_t in_list) {
        const int64_t m = begin + in_list;
        before(inputs_.sets[set].name.empty() ? "validation" : ("validation " + inputs_.sets[set].name).c_str(), m,
               micro_batches, hooks);
        HostBatch host = read(set, m, hooks);
        const int64_t rows = samples - (m * readers + groups_.reader()) * B;
        for (int64_t b = std::max<int64_t>(rows, 0); b < B; ++b) std::fill_n(host.targets.begin() + b * T, T, -1);
        return host;
      });
    return sum / static_cast<double>(samples * T);
  }

  HostBatch read(size_t set, int64_t m, const ValidationHooks& hooks) try {
    const StepConfig& step = trainer_.config();
    HostBatch host;
    loaders_[set].read_batch(0, m,
                             {.rank = groups_.reader(), .ranks = step.layout.readers(), .batch_size = step.batch.B},
                             host.tokens, host.targets, host.positions);
    return host;
  } catch (const Error& error) {
    if (!hooks.cannot_read) throw;
    hooks.cannot_read(error);
    const size_t tokens = static_cast<size_t>(trainer_.config().batch.rows());
    return {std::vector(tokens, 0), std::vector(tokens, -1), std::vector(tokens, 0)};
  }

  void before(const char* what, int64_t m, int64_t count, const ValidationHooks& hooks) const {
    // Not in a pipeline: there, a host may be waiting for a message from a stage that is at another point of its list.
    if (trainer_.config().layout.pipeline.stages == 1) hooks.poll();
    hooks.micro_batch(what, m + 1, count);
  }

  Trainer& trainer_;
  Groups& groups_;
  ValidationInputs inputs_;
  std::vector<DataLoader> loaders_;
};

}  // namespace llmc
