// batch_reader.h: the batches of a rank's steps, read by threads while the steps before them are computed.
#pragma once
#include <deque>
#include <future>
#include <mutex>
#include <system_error>

#include "core/clock.h"
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
    std::string fault = {};                // why they cannot be read; empty: they can
  };
  // All of a step. While it is computed, those of the steps that follow, which begin at `next`, are read.
  // Throws Error if they cannot be read.
  Step take(int64_t cursor, const std::vector<int64_t>& next) {
    const auto begin = Clock::now();
    if (ahead_.empty() || ahead_.front().cursor != cursor) ahead_.clear(), begin_reading(cursor);
    Reading first = std::move(ahead_.front());
    ahead_.pop_front();
    first.done.get();
    waited_ = seconds_since(begin);
    for (size_t i = ahead_.size(); i < next.size(); ++i) begin_reading(next[i]);
    if (!first.step->fault.empty()) throw Error(first.step->fault);
    return std::move(*first.step);
  }
  // The first of the next n steps that cannot be read: how many steps follow the last one taken, and why.
  std::optional<std::pair<int64_t, std::string>> fault_within(int64_t n) const {
    for (size_t i = 0; i < ahead_.size() && std::cmp_less(i, n); ++i) {
      ahead_[i].done.wait();
      if (const std::string& fault = ahead_[i].step->fault; !fault.empty())
        return std::pair{static_cast<int64_t>(i) + 1, fault};
    }
    return std::nullopt;
  }
  // How long the last take() waited, in seconds.
  double waited() const { return waited_; }

 private:
  HostBatch read(DataLoader& loader, int64_t cursor, int64_t micro_batch) const {
    HostBatch host;
    loader.read_batch(cursor, micro_batch, who_, host.tokens, host.targets, host.positions);
    return host;
  }
  struct Reading {
    int64_t cursor;
    std::unique_ptr<Step> step = std::make_unique<Step>();
    std::future<void> done = {};  // last: it ends before what it uses
  };
  void begin_reading(int64_t cursor) {
    Reading reading{cursor};
    const auto all = [this, cursor, step = reading.step.get()] {
      const std::lock_guard lock(loader_is_used_);
      try {
        for (int64_t m = 0; m < micro_batches_; ++m) step->micro_batches.push_back(read(ahead_loader_, cursor, m));
        step->targets = ahead_loader_.targets(cursor, micro_batches_ * who_.ranks * who_.batch_size);
      } catch (const Error& error) {
        step->fault = error.what();
      }
    };
    try {
      reading.done = std::async(std::launch::async, all);
    } catch (const std::system_error&) {  // no thread could be started
      reading.done = std::async(std::launch::deferred, all);
    }
    ahead_.push_back(std::move(reading));
  }

  DataLoader loader_, ahead_loader_;
  DataLoader::Reader who_;
  int64_t micro_batches_;
  double waited_ = 0;
  std::mutex loader_is_used_;  // ahead_loader_
  std::deque<Reading> ahead_;  // last: they end before what they use
};

}  // namespace llmc
