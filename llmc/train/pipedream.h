// pipedream.h: the steps of an asynchronous pipeline (Narayanan et al. 2019, PipeDream): a stage updates its weights
// after the backward of every micro-batch, and does not wait for the other stages.
//
// A step is one micro-batch of each data-parallel rank. Step t begins with its forward; on stage s of P its backward
// and its update come P - 1 - s steps later, or at a flush. The backward reads the version of the weights that the
// forward read (weight stashing), so the gradients are those of one function, at weights of different ages:
//   w(t + 1) = w(t) - AdamW of grad f(w_0(t - (P - 1)), ..., w_s(t - (P - 1 - s)), ..., w_(P-1)(t))
// the paper's equation, in which weights before a flush count as those of the flush. So the gradients of stage s are
// P - 1 - s updates old, and P - s versions of its weights are kept (WeightVersions in shard/units.h).
//
// A flush runs the backwards and updates that are left. Afterwards all stages have made the same updates and no old
// version is needed: a checkpoint then has the whole state, and a run resumes from it bit for bit.
//
// Gradients are clipped stage by stage, by the norm of the stage's own gradients. The loss and the norm of the whole
// model are only for the report: they are exchanged on a stream of their own, so that no stage waits for them.
#pragma once
#include <deque>

#include "train/interpreter.h"
#include "train/step_scalars.h"

namespace llmc {

class Pipedream {
 public:
  // row (losses + notices + units) fp64: this rank's losses, to which the stage adds, notices and square sums. control:
  // of the update.
  Pipedream(const StepConfig& config, const Context& context, ModelState& state, Interpreter& interpreter,
            const Tensor& row, const Tensor& control)
      : config_(config),
        context_(context),
        state_(state),
        interpreter_(interpreter),
        groups_(state.groups()),
        row_(row),
        control_(control),
        of_stage_(config, context, groups_.ranks_of_stage(), static_cast<int64_t>(state.size())),
        of_all_(config, context, groups_.ranks(), static_cast<int64_t>(state.size())),
        report_control_(GroupScalars::room(context, "report", {4})) {
    CHECK(config.micro_batches == 1 && config.layout.zero.stage == 0 && config.layout.zero.sync == DpSync::all_reduce &&
          !config.model.tied);
    // The first stage, P - 1 steps behind, completes a report: with room for more, no stage waits to make its next row.
    for (int i = 0; i < 2 * config.layout.pipeline.stages; ++i) {
      reports_.push_back({GroupScalars::room(context, "scalars of a step", row.shape), {}, {}});
      reports_.back().free.signal();
    }
    zero(report_control_, groups_.gather_stream());
  }
  Pipedream(const Pipedream&) = delete;
  Pipedream& operator=(const Pipedream&) = delete;

  bool flushed() const { return !pass_; }

  // If reading the batch throws, the step has not begun.
  PendingStep begin_step(const BatchSource& batches, const OptimizerOptions& optimizer, const UpdateRule& rule,
                         const NoticeSource& notices) {
    CHECK(std::isinf(rule.largest_loss) && std::isinf(rule.largest_norm),
          "an asynchronous pipeline cannot skip outliers of the whole model's loss or norm");
    HostBatch batch = batches(0);
    if (!pass_) open();
    const int64_t k = begun_++;
    under_way_.push_back({optimizer, rule, notices, PendingStep(static_cast<double>(config_.tokens()) / rule.scale)});
    PendingStep pending = under_way_.back().result;
    run_turn(k, [&](int64_t) { return std::move(batch); });
    return pending;
  }

  // Runs the backwards and updates that are left. Returns whether there was anything to do.
  bool flush() {
    if (flushed()) return false;
    for (int64_t turn = begun_; turn < begun_ + config_.layout.pipeline.stages - 1; ++turn)
      run_turn(turn, [](int64_t) -> HostBatch { throw Error("a flush begins no micro-batch"); });
    state_.versions.forget_old(context_.compute);
    context_.compute.wait(groups_.gather_stream().record());  // it is the next to use the group of all ranks
    begun_ = 0;
    pass_.reset();
    scope_.reset();
    return true;
  }

 private:
  // A step that has begun and is not reported.
  struct Step {
    OptimizerOptions optimizer;
    UpdateRule rule;
    NoticeSource notices;
    PendingStep result;
  };
  // This rank's row of a step, until it is reported.
  struct Report {
    Tensor row;
    Event ready, free;
  };

  // The memory of the steps until the next flush.
  void open() {
    // With n micro-batches in flight, each uses the memory of the n-th one before it.
    std::vector<Action> steady;
    const int64_t steps = 2 * (config_.layout.pipeline.stages - groups_.me.stage);
    for (int64_t turn = 0; turn < steps + config_.layout.pipeline.stages - 1; ++turn)
      for (const Action& a : pipedream_turn(config_.layout.pipeline.stages, groups_.me.stage, turn, steps))
        steady.push_back(a);
    scope_.emplace(context_.arena);
    pass_.emplace(interpreter_.begin(steady, {.purpose = Purpose::train, .shape = config_.batch}, steps));
  }

  void run_turn(int64_t turn, const BatchSource& batches) {
    for (const Action& a : pipedream_turn(config_.layout.pipeline.stages, groups_.me.stage, turn, begun_)) {
      if (a.kind == ActionKind::update) {
        update(a.micro_batch);
        continue;
      }
      if (a.kind == ActionKind::forward) state_.versions.begin_forward(a.micro_batch);
      if (a.kind == ActionKind::backward) {
        state_.versions.begin_backward(a.micro_batch);
        zero(row_, context_.compute);
        const int64_t before = config_.scalars_before_squares();
        state_.gradients.begin(context_.compute, row_.slice(before, {row_.numel() - before}));
      }
      interpreter_.enqueue(a, *pass_, batches);
    }
    if (groups_.stages() > 1) interpreter_.read_headers();
    // Reports the step whose backward the first stage, the last to run it, has just finished.
    if (const int64_t done = turn - (config_.layout.pipeline.stages - 1); done >= 0) report(done);
  }

  const Step& step(int64_t k) const { return under_way_[under_way_.size() - static_cast<size_t>(begun_ - k)]; }

  // The update of this stage with the gradients of step k.
  void update(int64_t k) {
    Stream& compute = context_.compute;
    const StreamRange traced(compute, [&] {
      return action_span({ActionKind::update, groups_.me.stage, k}, config_.pipeline());
    });
    state_.gradients.finish(compute);
    if (const NoticeSource& notices = step(k).notices)
      upload(row_.slice(config_.loss_sums(), {Notices::count}), notices().values(), compute);
    Report& report = reports_[static_cast<size_t>(k) % reports_.size()];
    compute.wait(report.free);
    copy(report.row, row_, compute);
    report.ready = compute.record();
    of_stage_.gather(row_, groups_[GroupName::stage_scalars], compute);
    of_stage_.combine(config_, 1, compute);
    of_stage_.decide(control_, step(k).rule, compute);
    state_.versions.begin_version(compute);
    state_.update(control_, step(k).optimizer, compute);
  }

  // Loss and gradient norm of the whole model in step k, on the gather stream, which has no weights to gather here.
  void report(int64_t k) {
    Stream& stream = groups_.gather_stream();
    Report& report = reports_[static_cast<size_t>(k) % reports_.size()];
    stream.wait(report.ready);
    of_all_.gather(report.row, groups_[GroupName::scalars], stream);
    of_all_.combine(config_, config_.layout.pipeline.stages, stream);
    of_all_.decide(report_control_, {}, stream);
    report.free = stream.record();
    under_way_.front().result.enqueued(of_all_.losses, report_control_, interpreter_.take_headers(), stream);
    under_way_.pop_front();
  }

  const StepConfig& config_;
  Context context_;
  ModelState& state_;
  Interpreter& interpreter_;
  Groups& groups_;
  Tensor row_, control_;
  GroupScalars of_stage_, of_all_;
  Tensor report_control_;
  std::vector<Report> reports_;  // used by the steps in turn
  std::deque<Step> under_way_;
  int64_t begun_ = 0;  // steps since the last flush
  std::optional<Arena::Scope> scope_;
  std::optional<Interpreter::OpenPass> pass_;
};

}  // namespace llmc
