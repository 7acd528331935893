// step_config.h: the configuration of a step, its inputs and its results.
#pragma once
#include "model/transformer.h"
#include "schedule/messages.h"
#include "schedule/stage_partition.h"
#include "shard/zero.h"

namespace llmc {

// The memory and streams that a trainer runs on.
struct Context {
  Arena& arena;
  Stream& compute;
  Groups* groups = nullptr;  // none: this rank is the only one
  Arena* host = nullptr;     // memory of the host for what is offloaded; none: nothing is
  Stream* copies = nullptr;  // uploads inputs to a GPU while it computes; none: the compute stream does
  Arena* file = nullptr;     // that has what is in a file instead; none: nothing is
};

enum class Purpose { train, evaluate, generate };  // of a pass over a list of actions

// The settings of experts in a run; a model without experts has the defaults.
struct ExpertOptions {
  double aux_loss = 0, z_loss = 0;             // coefficients of the routers' own losses
  double bias_rate = 0;                        // of the biases that balance experts without a loss; 0: no biases
  std::optional<double> capacity_factor = {};  // none: dropless
  double imbalance = 1;                        // rows that a rank has room for, divided by its share

  // The most rows of an expert from one sequence of T tokens: capacity_factor times an equal share, rounded up.
  std::optional<int64_t> capacity(int64_t T, const Experts& e) const {
    if (!capacity_factor) return std::nullopt;
    const double rows = *capacity_factor * static_cast<double>(T * e.per_token) / static_cast<double>(e.count);
    return static_cast<int64_t>(std::ceil(std::min(rows, static_cast<double>(T))));
  }
};

// What a rank tells all others with its scalars; the largest of all ranks comes back. Numbers from 0 on; 0: nothing.
struct Notices {
  static constexpr int64_t count = 2;
  double urgency = 0;  // of its reason not to go on as before
  double seconds = 0;  // that a step takes
  std::vector<double> values() const { return {urgency, seconds}; }
};

struct StepConfig {
  ModelConfig model;
  Precision precision = {};
  BatchShape batch{1, 1};     // one micro-batch: B sequences of T tokens
  int64_t micro_batches = 1;  // of one step
  Recompute recompute = Recompute::none;
  int64_t segment = 1;  // blocks that share one kept input, with Recompute::block
  Layout layout = {};
  // Parts of a micro-batch that the head takes one after another; 0: as few as head_rows() allows.
  int64_t head_chunks = 0;
  bool generates = true;  // plan memory for a text and its key-value cache
  Documents documents = Documents::together;
  ExpertOptions experts = {};
  double z_loss = 0;                   // coefficient of the output layer's own loss (ZLoss); 0: none
  std::optional<double> qk_clip = {};  // the largest logit of attention that leaves weights as they are; none: any

  bool noise_scale = false;  // estimates the noise of the gradient (step_statistics.h)

  // The sums of losses that a rank keeps: the reported loss and, if there is one, (log Z)^2.
  int64_t loss_sums() const { return z_loss > 0 ? 2 : 1; }
  Pipeline pipeline() const { return layout.pipeline.pipeline(micro_batches); }
  // A rank's row of scalars: its losses, its notices (Notices), then a square sum for each unit.
  int64_t scalars_before_squares() const { return loss_sums() + Notices::count; }
  std::vector<Chunk> model_chunks() const {
    if (!layout.pipeline.layers.empty()) return chunks_of(layout.pipeline.layers);
    return chunks_of(even_layers(model.n_layer, stages_of_chunks()));
  }
  std::vector<int> stages_of_chunks() const {
    std::vector<int> stage_of;
    for (int c = 0; c < layout.pipeline.chunks(); ++c) stage_of.push_back(pipeline().stage_of(c));
    return stage_of;
  }
  // The shape of the part that one rank computes.
  ModelConfig part() const { return model_of_rank(model, layout.tensor); }
  ExpertPlacement expert_placement() const {
    return {.count = model.experts.count,
            .per_token = model.experts.per_token,
            .ranks = layout.expert.ranks,
            .imbalance = experts.imbalance,
            .sequence = batch.T,
            .segment = layout.context.ranks > 1 ? batch.T / (2 * layout.context.ranks) : batch.T,
            .spread = layout.context.ranks > 1 || layout.tensor.by_rows(),
            .cut = layout.tensor.by_rows(),
            .capacity = experts.capacity(batch.T, model.experts)};
  }

  // How many of a rank's S rows of the residual stream the head takes at a time: by head_chunks, or as many as have at
  // most 1 GiB of logits, in whole tiles of a GPU's products.
  int64_t head_rows(int64_t S) const {
    if (head_chunks > 0) return ceil_div(S, std::min(head_chunks, S));
    constexpr int64_t tile = 256;
    const int64_t copies = layout.tensor.by_rows() ? layout.tensor.ranks : 1;  // rows of logits for each of them
    const int64_t row_bytes = copies * layout.tensor.stored_vocab(model.vocab_size) * size_of(precision.activations);
    const int64_t most = std::max<int64_t>((int64_t{1} << 30) / row_bytes, 1);
    const int64_t of_tiles = most / tile * tile;
    if (of_tiles == 0) return ceil_div(S, ceil_div(S, most));
    return std::min(S, round_up(ceil_div(S, ceil_div(S, of_tiles)), tile));
  }
  // A text that is generated is not divided: every context-parallel rank computes all of it.
  ContextParallel context_for(Purpose purpose) const {
    return purpose == Purpose::generate ? ContextParallel{} : layout.context;
  }
  StageUnits stage_units() const {
    StageUnits units;
    if (layout.pipeline.stages == 1) return units;
    const std::vector<Chunk> all = model_chunks();
    const int head = pipeline().stage_of(layout.pipeline.chunks() - 1);
    const std::vector<LayerUnits> of_layers = layer_units(model);
    units.stage_of.push_back(0);  // the embedding
    for (int c = 0; c < layout.pipeline.chunks(); ++c)
      for (const int64_t layer : all[static_cast<size_t>(c)].layers)
        units.stage_of.insert(units.stage_of.end(), of_layers[static_cast<size_t>(layer)].experts ? 2 : 1,
                              pipeline().stage_of(c));
    units.stage_of.push_back(head);
    if (model.tied && head != 0) units.copy_of_embedding = head;
    return units;
  }
  // The part of a micro-batch that a rank has.
  BatchShape share(const BatchShape& all, Purpose purpose) const { return {all.B, context_for(purpose).share(all.T)}; }
  // How many token slices a sequence has; only training has them.
  int64_t slices_for(Purpose purpose) const {
    return purpose == Purpose::train && !layout.pipeline.slices.empty()
               ? static_cast<int64_t>(layout.pipeline.slices.size())
               : 1;
  }
  SequenceRows slice_rows(int k) const {
    const auto begin = layout.pipeline.slices.begin(), end = begin + k;
    return {batch.T, std::accumulate(begin, end, int64_t{0}), *end};
  }
  // The part of slice k of a micro-batch that a rank has.
  BatchShape share(const BatchShape& all, Purpose purpose, int k) const {
    if (slices_for(purpose) == 1) return share(all, purpose);
    return {all.B, layout.pipeline.slices[static_cast<size_t>(k)]};
  }
  // The number of rows of whole sequences whose positions a rank needs.
  int64_t all_position_rows(const BatchShape& all, Purpose purpose) const {
    const ContextParallel c = context_for(purpose);
    const bool needed = c.ranks > 1 && c.attention == ContextAttention::ulysses && documents == Documents::apart;
    return needed ? all.rows() : 0;
  }
  // Whether outputs of blocks wait in host memory for the backward (host_activations.h).
  bool keeps_at_host(Purpose purpose) const {
    return purpose == Purpose::train && layout.zero.offload.has(Offloaded::activations);
  }
  RecomputeChoice recomputation() const { return {recompute, segment}; }
  int64_t segment_for(Purpose purpose) const {
    return purpose == Purpose::train && recompute == Recompute::block ? segment : 1;
  }
  int64_t tokens() const { return batch.rows() * micro_batches * layout.readers(); }  // of one step, over all ranks
};

// The recomputation that needs about the least memory: p passes of n blocks in segments of N keep p n / N + N inputs.
inline RecomputeChoice square_root_recomputation(const StepConfig& step) {
  const Pipeline p = step.pipeline();
  const int64_t n = largest_chunk(step.model_chunks()),
                passes = p.schedule == Schedule::gpipe ? p.micro_batches : std::min<int64_t>(p.micro_batches, p.stages);
  return {Recompute::block, std::clamp<int64_t>(std::llround(std::sqrt(static_cast<double>(passes * n))), 1, n)};
}

// One micro-batch of token ids on the host, of whole sequences, each (B T).
struct HostBatch {
  std::vector<int32_t> tokens, targets, positions;
};

using BatchSource = std::function<HostBatch(int64_t micro_batch)>;
using NoticeSource = std::function<Notices()>;

// Receives the loss of every row (B T) of a micro-batch of this rank, 0 for rows that other context-parallel ranks
// have; called on the stream.
using RowLosses = std::function<void(int64_t micro_batch, std::span<const float> losses)>;

// Sequences that the ranks of a context-parallel group cannot divide are padded to T tokens at their ends, where there
// are no targets: the batches, and a report of the losses without those of the padding.
inline BatchSource padded(const BatchSource& batches, const BatchShape& shape, int64_t T) {
  if (shape.T == T) return batches;
  return [&batches, shape, T](int64_t m) {
    const auto extended = [&](const std::vector<int32_t>& ids, auto&& padding) {
      std::vector<int32_t> all;
      for (int64_t b = 0; b < shape.B; ++b)
        for (int64_t t = 0; t < T; ++t)
          all.push_back(t < shape.T ? ids[static_cast<size_t>(b * shape.T + t)] : padding(t));
      return all;
    };
    HostBatch batch = batches(m);
    if (batch.tokens.empty()) return batch;  // on paper
    batch.tokens = extended(batch.tokens, [](int64_t) { return 0; });
    batch.targets = extended(batch.targets, [](int64_t) { return -1; });
    batch.positions = extended(batch.positions, [](int64_t t) { return static_cast<int32_t>(t); });
    return batch;
  };
}

inline RowLosses without_padding(RowLosses report, const BatchShape& shape, int64_t T) {
  if (!report || shape.T == T) return report;
  return [report = std::move(report), shape, T](int64_t micro_batch, std::span<const float> losses) {
    std::vector<float> asked;
    for (int64_t b = 0; b < shape.B; ++b) {
      const auto row = losses.begin() + b * T;
      asked.insert(asked.end(), row, row + shape.T);
    }
    report(micro_batch, asked);
  };
}

// The statistics of one step, over all ranks, micro-batches and layers with experts.
struct ExpertStatistics {
  double balance_loss, z_loss;  // means over layers, and sequences (or their token slices) or rows; no coefficients
  double entropy;               // of a router's probabilities, in nats: the mean over layers and rows
  double dropped;               // as a share of all choices
  double largest, smallest;     // share of a layer's choices that one expert has, times the number of experts
  int rounds = 1;               // with --ep, the most exchanges that a layer took, in rank 0's group
};

// The largest logits of attention in one step.
struct LogitStatistics {
  double largest;   // 0 if all are negative
  int64_t clipped;  // heads of the model that exceeded the limit
};

// Estimates of one step, without bias (step_statistics.h): the square of the true gradient's norm, and the trace of the
// covariance of the gradients of single tokens. Either may be negative.
struct GradientNoise {
  double square, trace;
};

struct StepResult {
  double loss;       // mean over all target tokens
  double grad_norm;  // before clipping
  bool applied;      // false: the loss or the norm was not finite or above its limit, and no weight has changed
  std::optional<ExpertStatistics> experts = {};  // none: a model without experts
  std::optional<double> z_loss = {};             // the mean of (log Z)^2, without its coefficient; none: no such loss
  std::optional<LogitStatistics> logits = {};    // none: no QK-clip
  std::optional<GradientNoise> noise = {};       // with StepConfig::noise_scale
  Notices notices = {};
  bool finite() const { return std::isfinite(loss) && std::isfinite(grad_norm); }
};

// A step that has begun. The host may begin the next one before it waits for this one; with an asynchronous pipeline it
// has to begin P - 1 further ones first, or flush.
class PendingStep {
 public:
  explicit PendingStep(double targets) : targets_(targets) {}
  // Call when the whole step is enqueued; its results will be in these tensors. losses: with the notices after them
  void enqueued(const Tensor& losses, const Tensor& control, std::vector<ReceivedHeaders> headers, Stream& stream) {
    *results_ = {Readback(losses, stream), Readback(control, stream), std::move(headers), true};
  }
  // A further record of the step. add(result, values): adds to the result what the record's values say
  using Add = std::function<void(StepResult& result, std::span<const double> values)>;
  void enqueued(const Tensor& record, Add add, Stream& stream) {
    results_->records.emplace_back(Readback(record, stream), std::move(add));
  }
  StepResult wait() const {
    CHECK(results_->enqueued, "the caller waits for a step that has only begun: flush first");
    for (const ReceivedHeaders& headers : results_->headers) headers.check();
    const std::vector<double> control = results_->control.values();
    const std::vector<double> losses = results_->losses.values();
    StepResult result{losses[0] / targets_, control[0], control[2] != 0};
    const size_t sums = losses.size() - Notices::count;
    if (sums > 1) result.z_loss = losses[1] / targets_;
    result.notices = {losses[sums], losses[sums + 1]};
    for (const auto& [record, add] : results_->records) add(result, record.values());
    return result;
  }

 private:
  struct Results {
    Readback losses, control;
    std::vector<ReceivedHeaders> headers;
    bool enqueued = false;
    std::vector<std::pair<Readback, Add>> records = {};
  };
  std::shared_ptr<Results> results_ = std::make_shared<Results>();  // shared by all copies
  double targets_;
};

}  // namespace llmc
