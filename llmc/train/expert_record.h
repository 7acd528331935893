// expert_record.h: what a run asks of experts, and what the steps of training record of them: the losses and the
// entropy of their routers, how often each expert was chosen, what was dropped; and the biases that balance them.
#pragma once
#include <algorithm>
#include <span>
#include <vector>

#include "train/step_config.h"

namespace llmc {

class ExpertRecord {
 public:
  ExpertRecord(const StepConfig& config, const Context& context) : config_(config) {
    const ModelConfig& model = config.model;
    for (int64_t l = 0; l < model.n_layer; ++l) index_of_layer_.push_back(model.is_sparse(l) ? layers_++ : -1);
    if (layers_ == 0) return;
    const int64_t E = model.experts.count;
    record_ = context.arena.alloc("balance of experts", "record of a step", DType::fp64, {others + layers_ * E});
    if (config.experts.bias_rate > 0)
      biases_ =
          context.arena.alloc("balance of experts", "biases of experts", accumulator_of(config.dtype), {layers_, E});
  }
  ExpertRecord(const ExpertRecord&) = delete;
  ExpertRecord& operator=(const ExpertRecord&) = delete;

  bool empty() const { return layers_ == 0; }
  // (4 + layers E) fp64: what the functions below give, summed over the micro-batches of a step.
  const Tensor& record() const { return record_; }
  const Tensor& biases() const { return biases_; }  // (layers with experts, E); an empty tensor: none

  Tensor bias_of(int64_t layer) const {
    const int64_t E = config_.model.experts.count;
    return biases_.empty() ? Tensor{} : biases_.slice(index_of(layer) * E, {E});
  }
  ExpertTraining training_of(int64_t layer) const {
    const int64_t E = config_.model.experts.count, T = config_.batch.T;
    const double layers = static_cast<double>(layers_), tokens = static_cast<double>(config_.tokens());
    const ExpertOptions& o = config_.experts;
    return {.losses = {.balance = static_cast<float>(o.aux_loss * static_cast<double>(T) / (layers * tokens)),
                       .z = static_cast<float>(o.z_loss / (layers * tokens)),
                       .sequence = T},
            .capacity = o.capacity(T, config_.model.experts),
            .totals = record_.slice(0, {others}),
            .chosen = record_.slice(others + index_of(layer) * E, {E})};
  }

  // From the record of all ranks.
  ExpertStatistics statistics(std::span<const double> record) const {
    const double layers = static_cast<double>(layers_), tokens = static_cast<double>(config_.tokens()),
                 T = static_cast<double>(config_.batch.T), k = static_cast<double>(config_.model.experts.per_token),
                 E = static_cast<double>(config_.model.experts.count);
    const auto chosen = record.subspan(others);
    const auto [least, most] = std::minmax_element(chosen.begin(), chosen.end());
    return {.balance_loss = record[0] * T / (layers * tokens),
            .z_loss = record[1] / (layers * tokens),
            .entropy = record[2] / (layers * tokens),
            .dropped = record[3] / (layers * tokens * k),
            .largest = *most * E / (tokens * k),
            .smallest = *least * E / (tokens * k)};
  }

 private:
  static constexpr int64_t others = 4;  // besides how often experts were chosen
  int64_t index_of(int64_t layer) const { return index_of_layer_[static_cast<size_t>(layer)]; }

  const StepConfig& config_;
  int64_t layers_ = 0;                   // with experts
  std::vector<int64_t> index_of_layer_;  // among them; -1: a dense one
  Tensor record_, biases_;
};

}  // namespace llmc
