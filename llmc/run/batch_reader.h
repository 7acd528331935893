// batch_reader.h: the batches of a rank's steps, each read by a thread while the step before it is computed.
#pragma once
#include <chrono>
#include <future>
#include <system_error>
#include <vector>

#include "data/dataloader.h"
#include "train/interpreter.h"

namespace llmc {

class BatchReader {
 public:
  BatchReader(const DataLoader& loader, const DataLoader::Reader& who, int64_t micro_batches)
      : loader_(loader), ahead_loader_(loader), who_(who), micro_batches_(micro_batches) {}
  BatchReader(const BatchReader&) = delete;

  // A micro-batch of the step that begins at this position of the stream, read now.
  HostBatch read(int64_t cursor, int64_t micro_batch) { return read(loader_, cursor, micro_batch); }
  std::string name_of_sample(int64_t cursor, int64_t micro_batch, int64_t row) {
    return loader_.name_of_sample(cursor + (micro_batch * who_.ranks + who_.rank) * who_.batch_size + row);
  }

  struct Step {
    std::vector<HostBatch> micro_batches;  // this rank's
    int64_t targets = 0;                   // of all ranks
  };
  // All of a step. While it is computed, those of the step at `next` are read; none: nothing follows.
  // Throws Error if they cannot be read.
  Step take(int64_t cursor, std::optional<int64_t> next) {
    const auto begin = std::chrono::steady_clock::now();
    if (!ahead_.valid() || ahead_cursor_ != cursor) begin_reading(cursor);
    Step step = ahead_.get();
    waited_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (next) begin_reading(*next);
    return step;
  }
  // How long the last take() waited, in seconds.
  double waited() const { return waited_; }

 private:
  HostBatch read(DataLoader& loader, int64_t cursor, int64_t micro_batch) const {
    HostBatch host;
    loader.read_batch(cursor, micro_batch, who_, host.tokens, host.targets, host.positions);
    return host;
  }
  void begin_reading(int64_t cursor) {
    if (ahead_.valid()) ahead_.wait();
    ahead_cursor_ = cursor;
    const auto all = [this, cursor] {
      Step step;
      for (int64_t m = 0; m < micro_batches_; ++m) step.micro_batches.push_back(read(ahead_loader_, cursor, m));
      step.targets = ahead_loader_.targets(cursor, micro_batches_ * who_.ranks * who_.batch_size);
      return step;
    };
    try {
      ahead_ = std::async(std::launch::async, all);
    } catch (const std::system_error&) {  // no thread could be started
      ahead_ = std::async(std::launch::deferred, all);
    }
  }

  DataLoader loader_, ahead_loader_;
  DataLoader::Reader who_;
  int64_t micro_batches_;
  int64_t ahead_cursor_ = 0;
  std::future<Step> ahead_;  // last: it ends before what it uses
  double waited_ = 0;
};

}  // namespace llmc
