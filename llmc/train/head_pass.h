// head_pass.h: the head of the model over the rows of a micro-batch, some of them at a time, so that the logits of only
// these exist: losses, their gradients, or the logits of one row.
#pragma once
#include "train/in_flight.h"

namespace llmc {

class HeadPass {
 public:
  // loss_sums (StepConfig::loss_sums()) fp64: the losses of every micro-batch are added to them
  HeadPass(const StepConfig& config, const Context& context, const parallel::Group& group, const Tensor& loss_sums)
      : config_(config), context_(context), model_(config.part()), parallel_(group), loss_sums_(loss_sums) {}

  // Adds the losses of x (S, C) to the sum, and passes the loss of every row to pass.row_losses if it is set.
  void evaluate(const Head& head, const Tensor& x, const Slot& slot, const Pass& pass, int64_t micro_batch) {
    auto scope = context_.arena.scope();
    const HeadNorm norm(model_, context_.arena.alloc("head", "ln_f", x.dtype, x.shape), context_.arena);
    head.forward(norm, x);
    const Losses losses(*this, x, Gradient::no);
    const std::vector<Range> rows = for_chunks(norm.out, slot, [&](const Part& part) {
      head.forward(part.logits, part.norm);
      losses.of(part, head);
    });
    losses.add();
    if (!pass.row_losses) return;
    const int64_t R = config_.share(pass.shape, pass.purpose).rows();
    const auto row_of_all = [context = config_.layout.context, T = pass.shape.T, rank = parallel_.ranks.me.context](
                                int64_t row) { return static_cast<size_t>(context.row_of_all(row, T, rank)); };
    download(losses.values, context_.compute,
             [rows, R, micro_batch, row_of_all, all = static_cast<size_t>(pass.shape.rows()),
              report = pass.row_losses](const std::vector<float>& found) {
               std::vector<float> by_row(all);
               auto from = found.begin();
               for (const Range& range : rows)
                 for (int64_t row = range.begin; row < range.end(); ++row, ++from)
                   if (row < R) by_row[row_of_all(row)] = *from;
               report(micro_batch, by_row);
             });
  }

  // logits = the head on one row of x (S, C) only.
  void compute_logits(const Tensor& logits, const Head& head, const Tensor& x, const Pass& pass) {
    auto scope = context_.arena.scope();
    const int64_t S = x.shape[0], C = x.shape[1];
    const HeadNorm norm(model_, context_.arena.alloc("head", "ln_f", x.dtype, {1, C}), context_.arena);
    const Logits rows(model_, 1, config_.layout.tensor, x.dtype, context_.arena);
    // With sequence parallelism one rank has the row; the other ranks compute rows that are not used.
    head.forward(norm, x.slice(pass.logits_row % S * C, {1, C}));
    head.forward(rows, norm.out);
    const Tensor mine = rows.values.slice(pass.logits_row / S * rows.values.shape[1], {rows.values.shape[1]});
    copy(logits, parallel::gather_vocabulary(mine, parallel_), context_.compute);
  }

  // Final norm, logits and loss of x (S, C), forward and backward; slot.gradient = the gradient of x.
  void train(const Head& head, const Tensor& x, const Slot& slot) {
    auto scope = context_.arena.scope();
    const HeadNorm norm(model_, slot.gradient, context_.arena);  // until the gradient comes there
    const Tensor dnorm = context_.arena.alloc("head", "gradient of ln_f", x.dtype, x.shape);
    head.forward(norm, x);
    const Losses losses(*this, x, Gradient::yes);
    for_chunks(norm.out, slot, [&](const Part& part) {
      head.forward(part.logits, part.norm);
      losses.of(part, head);
      head.backward(dnorm.slice(part.rows[0].begin * x.shape[1], part.norm.shape), part.logits, part.norm);
    });
    losses.add();
    head.backward(slot.gradient, norm, dnorm, x);
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
  // Some of the rows: a chunk.
  struct Part {
    Logits logits;
    Tensor norm, targets;     // (n, C) (N)
    std::vector<Range> rows;  // the logits' rows in the micro-batch; with sequence parallelism some of each rank
    int64_t before;           // rows of logits in the chunks before
  };
  // Calls f(part) for parts of the rows of norm (S, C), each with logits of its own. Returns the rows of all logits.
  template <class F>
  std::vector<Range> for_chunks(const Tensor& norm, const Slot& slot, F&& f) {
    const int64_t S = norm.shape[0], C = norm.shape[1], most = config_.head_rows(S);
    std::vector<Range> all;
    for (int64_t begin = 0; begin < S; begin += most) {
      const int64_t n = std::min(most, S - begin);
      auto scope = context_.arena.scope();
      std::vector<Range> rows;
      for (int p = 0; p < slices(); ++p) rows.push_back({S * p + begin, n});
      f(Part{Logits(model_, n, config_.layout.tensor, norm.dtype, context_.arena), norm.slice(begin * C, {n, C}),
             targets_of(rows, slot), rows, begin * slices()});
      all.insert(all.end(), rows.begin(), rows.end());
    }
    return all;
  }
  // Ranks whose rows the logits have.
  int slices() const { return config_.layout.tensor.by_rows() ? config_.layout.tensor.ranks : 1; }
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

  // The losses of all rows, in the order of the chunks, which are then added to the sums.
  struct Losses {
    HeadPass& pass;
    Gradient gradient;
    Tensor values, z_squares;  // (N) each, of all chunks; no squares: an empty tensor

    Losses(HeadPass& head_pass, const Tensor& x, Gradient wanted) : pass(head_pass), gradient(wanted) {
      const auto alloc = [&](const char* name) {
        return pass.context_.arena.alloc("head", name, accumulator_of(x.dtype), {x.shape[0] * pass.slices()});
      };
      values = alloc("losses");
      if (gradient == Gradient::yes && pass.config_.z_loss > 0) z_squares = alloc("squares of log Z");
    }
    // With Gradient::yes the logits become the gradient of the mean loss (contract 9: over the tokens of all ranks).
    void of(const Part& part, const Head& head) const {
      const Shape n{part.logits.values.shape[0]};
      HeadZLoss z;
      if (!z_squares.empty()) z = {pass.config_.z_loss, z_squares.slice(part.before, n)};
      head.loss(values.slice(part.before, n), part.logits, part.targets,
                1.0 / static_cast<double>(pass.config_.tokens()), gradient, z);
    }
    void add() const {
      add_losses(pass.loss_sums_.slice(0, {1}), values, pass.context_.compute);
      if (!z_squares.empty()) add_losses(pass.loss_sums_.slice(1, {1}), z_squares, pass.context_.compute);
    }
  };

  const StepConfig& config_;
  Context context_;
  ModelConfig model_;  // the shape of this rank's part
  parallel::Group parallel_;
  Tensor loss_sums_;
  std::vector<float> logits_;
};

}  // namespace llmc
