// head_pass.h: the head of the model over the rows of a micro-batch, some of them at a time, so that the logits of only
// these exist: losses, their gradients, or the logits of one row.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "train/in_flight.h"
#include "train/step_config.h"

namespace llmc {

class HeadPass {
 public:
  // loss_sums (StepConfig::loss_sums()) fp64: the losses of every micro-batch are added to them
  HeadPass(const StepConfig& config, const Context& context, const parallel::Group& group, const Tensor& loss_sums)
      : config_(config), context_(context), model_(config.part()), parallel_(group), loss_sums_(loss_sums) {}

  // Adds the losses of x (S, C) to the sum, and passes the loss of every row to pass.row_losses if it is set.
  void evaluate(const Head& head, const Tensor& x, const Slot& slot, const Pass& pass, int64_t micro_batch) {
    const int64_t R = config_.share(pass.shape, pass.purpose).rows();
    const auto losses =
        std::make_shared<std::vector<float>>(pass.row_losses ? static_cast<size_t>(pass.shape.rows()) : 0);
    const auto row_of_all = [context = config_.layout.context, T = pass.shape.T, rank = parallel_.ranks.me.context](
                                int64_t row) { return static_cast<size_t>(context.row_of_all(row, T, rank)); };
    for_chunks(x, slot, [&](const HeadActivations& acts, Tensor part, Tensor targets, const auto& rows) {
      head.forward(acts, part);
      add_loss(head, acts, targets, Gradient::no);
      if (!pass.row_losses) return;
      const bool last = rows[0].end() == x.shape[0];
      download(acts.losses, context_.compute,
               [losses, rows, R, last, micro_batch, row_of_all,
                report = pass.row_losses](const std::vector<float>& of_part) {
                 auto from = of_part.begin();
                 for (const Range& range : rows)
                   for (int64_t row = range.begin; row < range.end(); ++row, ++from)
                     if (row < R) (*losses)[row_of_all(row)] = *from;
                 if (last) report(micro_batch, *losses);
               });
    });
  }

  // logits = the head on one row of x (S, C) only.
  void compute_logits(const Tensor& logits, const Head& head, const Tensor& x, const Pass& pass) {
    auto scope = context_.arena.scope();
    const int64_t S = x.shape[0], C = x.shape[1];
    const HeadActivations acts(model_, 1, config_.layout.tensor, config_.precision.activations, context_.arena);
    // With sequence parallelism one rank has the row; the other ranks compute rows that are not used.
    head.forward(acts, x.slice(pass.logits_row % S * C, {1, C}));
    const Tensor mine = acts.logits.slice(pass.logits_row / S * acts.logits.shape[1], {acts.logits.shape[1]});
    copy(logits, parallel::gather_vocabulary(mine, parallel_), context_.compute);
  }

  // Final norm, logits and loss of x (S, C), forward and backward; slot.gradient = the gradient of x.
  void train(const Head& head, const Tensor& x, const Slot& slot) {
    for_chunks(x, slot, [&](const HeadActivations& acts, Tensor part, Tensor targets, const auto& rows) {
      head.forward(acts, part);
      add_loss(head, acts, targets, Gradient::yes);
      head.backward(slot.gradient.slice(rows[0].begin * x.shape[1], part.shape), acts, part);
    });
  }

  // The logits (V) of the last forward for Purpose::generate; read with the stream idle.
  const std::vector<float>& logits() const { return logits_; }
  // Room for the logits of all tensor-parallel ranks, padding included.
  Tensor logits_room() const {
    const int64_t V = model_.padded_vocab() * config_.layout.tensor.ranks;
    return context_.arena.alloc("head", "logits of all ranks", config_.precision.activations, {V});
  }
  // Copies complete logits, which all ranks have, to the host.
  void deliver_logits(const Tensor& all) {
    const int64_t V = config_.model.vocab_size, part = model_.vocab_size, stored = model_.padded_vocab();
    download(all, context_.compute, [this, V, part, stored](const std::vector<float>& host) {
      logits_.clear();  // without the padding of each part
      for (size_t begin = 0; static_cast<int64_t>(logits_.size()) < V; begin += static_cast<size_t>(stored)) {
        const int64_t count = std::min(part, V - static_cast<int64_t>(logits_.size()));
        logits_.insert(logits_.end(), host.begin() + static_cast<int64_t>(begin),
                       host.begin() + static_cast<int64_t>(begin) + count);
      }
    });
  }

 private:
  // Calls f(head, part of x, targets, rows) for parts of the rows of x (S, C), each with activations of its own. rows:
  // the rows of the micro-batch that the logits and targets belong to; with sequence parallelism some from each rank.
  template <class F>
  void for_chunks(const Tensor& x, const Slot& slot, F&& f) {
    const int64_t S = x.shape[0], C = x.shape[1], most = config_.head_rows(S);
    const int slices = config_.layout.tensor.by_rows() ? config_.layout.tensor.ranks : 1;
    for (int64_t begin = 0; begin < S; begin += most) {
      const int64_t n = std::min(most, S - begin);
      auto scope = context_.arena.scope();
      std::vector<Range> rows;
      for (int p = 0; p < slices; ++p) rows.push_back({S * p + begin, n});
      f(HeadActivations(model_, n, config_.layout.tensor, config_.precision.activations, context_.arena),
        x.slice(begin * C, {n, C}), targets_of(rows, slot), rows);
    }
  }
  Tensor targets_of(const std::vector<Range>& rows, const Slot& slot) {
    const int64_t n = rows[0].size;
    if (rows.size() == 1) return slot.inputs.targets.slice(rows[0].begin, {n});
    const Tensor targets =
        context_.arena.alloc("head", "targets", DType::int32, {n * static_cast<int64_t>(rows.size())});
    for (size_t p = 0; p < rows.size(); ++p)
      copy(targets.slice(n * static_cast<int64_t>(p), {n}), slot.inputs.targets.slice(rows[p].begin, {n}),
           context_.compute);
    return targets;
  }

  // Adds the losses to the sums; with Gradient::yes the logits become the gradient of the step's mean loss (contract 9:
  // divided by the tokens of all ranks).
  void add_loss(const Head& head, const HeadActivations& acts, const Tensor& targets, Gradient gradient) {
    auto scope = context_.arena.scope();
    HeadZLoss z;
    if (gradient == Gradient::yes && config_.z_loss > 0)
      z = {config_.z_loss, context_.arena.alloc("head", "squares of log Z", acts.losses.dtype, acts.losses.shape)};
    head.loss(acts, targets, 1.0 / static_cast<double>(config_.tokens()), gradient, z);
    add_losses(loss_sums_.slice(0, {1}), acts.losses, context_.compute);
    if (!z.squares.empty()) add_losses(loss_sums_.slice(1, {1}), z.squares, context_.compute);
  }

  const StepConfig& config_;
  Context context_;
  ModelConfig model_;  // the shape of this rank's part
  parallel::Group parallel_;
  Tensor loss_sums_;
  std::vector<float> logits_;
};

}  // namespace llmc
