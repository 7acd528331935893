// gathered_weights.h: the weights of stage 3, whole only while they are used: a unit is gathered one acquire() ahead,
// and released after it was used. At the other stages the weights are always whole.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "shard/units.h"

namespace llmc {

class GatheredWeights {
 public:
  GatheredWeights(Units& units, Arena& arena) : units_(units) {
    if (sharded()) buffers_ = UnitBuffers(units, "gathered weights", units.precision().weights, 2, arena);
  }

  // Whether acquire() must be foretold by start_pass().
  bool sharded() const { return units_.zero_config().stage == 3; }
  // `order`: the units in the order in which acquire() will be called for them.
  void start_pass(std::vector<size_t> order, Stream& compute) {
    if (!sharded()) return;
    // Frees the buffers that an interrupted pass had gathered ahead or still held.
    for (Buffer* buffer : gathered_) held_.emplace_back(0, buffer);
    gathered_.clear();
    for (const auto& [u, buffer] : held_) {
      compute.wait(buffer->ready);
      buffer->release(compute);
    }
    held_.clear();
    order_ = std::move(order);
    acquired_ = issued_ = 0;
    updated_weights_ = compute.record();
    gather_ahead();
  }
  const UnitState& acquire(size_t u, Stream& compute) {
    if (!sharded()) return units_.unit(u);
    CHECK(acquired_ < issued_ && order_[acquired_] == u);
    Buffer* buffer = gathered_.front();
    gathered_.erase(gathered_.begin());
    compute.wait(buffer->ready);
    units_.unit(u).attach_weights(buffer->memory);
    held_.emplace_back(u, buffer);
    ++acquired_;
    gather_ahead();
    return units_.unit(u);
  }
  void release(size_t u, Stream& compute) {
    if (!sharded()) return;
    const auto held = std::find_if(held_.begin(), held_.end(), [&](const auto& h) { return h.first == u; });
    CHECK(held != held_.end());
    units_.groups().hooks.released(held->second->memory, compute);
    held->second->release(compute);
    held_.erase(held);
    gather_ahead();
  }
  // Calls f(unit) with all of its weights, for a checkpoint; called by all ranks of the shard group.
  template <class F>
  void with_whole_unit(size_t u, Stream& compute, F&& f) {
    start_pass({u}, compute);
    const UnitState& unit = acquire(u, compute);
    compute.synchronize();
    f(unit);
    release(u, compute);
  }

 private:
  using Buffer = UnitBuffers::Buffer;

  // Issues the gather of the next unit of order_, if it has not been issued and a buffer is free.
  void gather_ahead() {
    if (issued_ > acquired_ || issued_ == order_.size()) return;
    const size_t u = order_[issued_];
    Buffer* buffer = buffers_.take(u);
    if (buffer == nullptr) return;
    gathered_.push_back(buffer);
    ++issued_;
    Stream& stream = units_.groups().gather_stream();
    stream.wait(updated_weights_);
    stream.wait(buffer->free);
    const UnitState& unit = units_.unit(u);
    const Tensor all = unit.in_buffer(buffer->memory);
    copy(all.slice(unit.shard_range().begin, {unit.shard_range().size}), unit.weight_shard(), stream);
    units_.sharers(u).weights.all_gather(all, stream);
    buffer->ready = stream.record();
  }

  Units& units_;
  UnitBuffers buffers_;
  std::vector<size_t> order_;                     // the units to acquire in this pass
  size_t issued_ = 0, acquired_ = 0;              // how many of them have their gather begun, and are acquired
  std::vector<Buffer*> gathered_;                 // issued and not yet acquired
  std::vector<std::pair<size_t, Buffer*>> held_;  // unit and buffer, between acquire and release
  Event updated_weights_;
};

}  // namespace llmc
