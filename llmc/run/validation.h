// validation.h: the loss on --val-data and the answers to --eval-choices, computed by all ranks together; the same for
// training and for --evaluate.
#pragma once
#include <algorithm>
#include <functional>
#include <optional>

#include "core/log.h"
#include "data/dataloader.h"
#include "train/choices.h"
#include "train/trainer.h"

namespace llmc {

// The inputs of a validation. A part of the data is drawn from all of it: the same part every time, for every --seed.
struct ValidationInputs {
  const TokenShards* data = nullptr;   // none: no loss
  int64_t samples = 0;                 // of the data
  bool shuffled = true;                // takes a part from all of the data, not from its beginning
  const ChoiceSet* choices = nullptr;  // none: no questions
  std::optional<int32_t> document_begin = std::nullopt;

  DataLoader::Config loader(int64_t vocab_size) const {
    return {.seed = 0,
            .shuffle = shuffled && data != nullptr && samples < data->samples(),
            .vocab_size = vocab_size,
            .end_of_text = document_begin};
  }
};

// Called alike on every rank.
struct ValidationHooks {
  std::function<void()> poll;                                                      // may end the run
  std::function<void(const char* what, int64_t done, int64_t total)> micro_batch;  // begins; done counts from 1
  // This rank cannot read its samples; it goes on without them until a poll ends all ranks. None: throws the error.
  std::function<void(const Error& error)> cannot_read = {};
};

class Validation {
 public:
  Validation(Trainer& trainer, Groups& groups, const ValidationInputs& inputs)
      : trainer_(trainer), groups_(groups), inputs_(inputs) {
    if (inputs.data != nullptr) loader_.emplace(*inputs.data, inputs.loader(trainer.config().model.vocab_size));
  }

  // The mean over all targets. Every sample counts once in any layout: padding rows after the last do not count.
  double loss(const ValidationHooks& hooks) {
    const StepConfig& step = trainer_.config();
    const int64_t B = step.batch.B, T = step.batch.T, readers = step.layout.readers();
    const int64_t micro_batches = ceil_div(inputs_.samples, B * readers);
    double sum = 0;
    for (int64_t begin = 0; begin < micro_batches; hooks.poll(), begin += in_one_list)
      sum += trainer_.evaluate(std::min(in_one_list, micro_batches - begin), 1, [&](int64_t in_list) {
        const int64_t m = begin + in_list;
        before("validation", m, micro_batches, hooks);
        HostBatch host = read(m, hooks);
        const int64_t rows = inputs_.samples - (m * readers + groups_.reader()) * B;
        for (int64_t b = std::max<int64_t>(rows, 0); b < B; ++b) std::fill_n(host.targets.begin() + b * T, T, -1);
        return host;
      });
    return sum / static_cast<double>(inputs_.samples * T);
  }

  ChoiceScore answers(const ValidationHooks& hooks) {
    return evaluate_choices(trainer_, *inputs_.choices, groups_,
                            [&](int64_t m, int64_t count) { before("multiple choice", m, count, hooks); });
  }

  // The loss and the answers, as far as there are any, after this many updates.
  ValLine line(int64_t step, const ValidationHooks& hooks) {
    ValLine found{.step = step, .loss = loss(hooks)};
    if (inputs_.choices == nullptr) return found;
    const ChoiceScore score = answers(hooks);
    found.choices = score.accuracy;
    found.choices_normalized = score.normalized_accuracy;
    return found;
  }

 private:
  HostBatch read(int64_t m, const ValidationHooks& hooks) try {
    const StepConfig& step = trainer_.config();
    HostBatch host;
    loader_->read_batch(0, m, {.rank = groups_.reader(), .ranks = step.layout.readers(), .batch_size = step.batch.B},
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

  static constexpr int64_t in_one_list = 256;  // micro-batches in one list of actions

  Trainer& trainer_;
  Groups& groups_;
  ValidationInputs inputs_;
  std::optional<DataLoader> loader_;
};

}  // namespace llmc
