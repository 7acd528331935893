// padding.h: evaluates sequences that the ranks of a context-parallel group cannot divide: they are padded at their
// ends, where there are no targets.
#pragma once
#include "train/step_config.h"

namespace llmc {

// The batches with sequences of T tokens, padded.
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

// Reports the losses of padded sequences without those of the padding.
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

}  // namespace llmc
