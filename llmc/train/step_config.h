// step_config.h: what a step is, what goes into it and what comes out of it.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "device/host_copy.h"
#include "dist/schedule.h"
#include "model/transformer.h"

namespace llmc {

// What an op needs besides its tensors.
struct Context {
  Arena& arena;
  Stream& compute;
  DataParallel* dp = nullptr;  // none: this rank is alone
  Stream* copies = nullptr;    // brings the inputs of a GPU while it computes; none: the compute stream does
};

// What actions are run for.
enum class Purpose { train, evaluate, generate };

struct StepConfig {
  ModelConfig model;
  DType dtype = DType::fp32;
  BatchShape batch{1, 1};     // one micro-batch: B sequences of T tokens
  int64_t micro_batches = 1;  // of one step
  Schedule schedule = Schedule::one_f_one_b;
  int chunks = 1;
  Recompute recompute = Recompute::none;
  ZeroConfig zero = {};
  int64_t head_chunks = 0;  // of a micro-batch's rows, whose logits exist one after the other; 0: as few as are small
  bool generates = true;    // the plan has room for a text and its cache
  Documents documents = Documents::together;

  // Rows of such a chunk of N: as asked, or so many that their logits take at most 1 GiB.
  int64_t head_rows(int64_t N) const {
    const int64_t row_bytes = model.padded_vocab() * size_of(dtype);
    const int64_t chunks = head_chunks > 0 ? std::min(head_chunks, N) : ceil_div(N * row_bytes, int64_t{1} << 30);
    return ceil_div(N, chunks);
  }
  // Forward only is as if everything were to be computed again, and never is.
  Recompute recompute_for(Purpose purpose) const { return purpose == Purpose::train ? recompute : Recompute::block; }
  int64_t tokens() const { return batch.rows() * micro_batches * zero.ranks(); }  // of one step, all ranks
};

// One micro-batch of token ids on the host, each (B T).
struct HostBatch {
  std::vector<int32_t> tokens, targets, positions;
};

using BatchSource = std::function<HostBatch(int64_t micro_batch)>;

// Gets the loss of every row (N) of a micro-batch of this rank; called on the stream.
using RowLosses = std::function<void(int64_t micro_batch, std::span<const float> losses)>;

struct StepResult {
  double loss;       // mean over all target tokens
  double grad_norm;  // before clipping
  bool applied;      // false: the loss or the norm was not finite or beyond its largest value, and no weight changed
  bool finite() const { return std::isfinite(loss) && std::isfinite(grad_norm); }
};

// A step that is under way. The host need not wait for it before it begins the next one.
class PendingStep {
 public:
  PendingStep(const Tensor& loss, const Tensor& control, int64_t tokens, Stream& stream)
      : loss_(loss, stream), control_(control, stream), tokens_(static_cast<double>(tokens)) {}
  StepResult wait() const {
    const std::vector<double> control = control_.values();
    return {loss_.values()[0] / tokens_, control[0], control[2] != 0};
  }

 private:
  Readback loss_, control_;
  double tokens_;
};

}  // namespace llmc
