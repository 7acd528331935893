// nccl_transfer.cpp: a rank begins a collective when all others have begun it too, so that none is more than one ahead.
// Then, for each chunk: it waits until all have taken the previous one, puts its own into its slot, waits until all
// have done so, and takes what it needs from the slots of all.
#include "cuda_on_cpu/nccl/nccl_transfer.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "cuda_on_cpu/emulator.h"

namespace cuda_on_cpu::detail {

Transfer::Transfer(Segment& segment, const Call& call)
    : segment_(segment),
      call_(call),
      total_(bytes_of(call) * (call.kind == Kind::reduce_scatter ? static_cast<size_t>(call.ranks) : 1)),
      to_(std::min(total_, Segment::chunk_bytes)) {}

bool Transfer::all(std::atomic<uint64_t> Member::*counter, uint64_t at_least) const {
  for (int rank = 0; rank < call_.ranks; ++rank)
    if (segment_.member(rank).*counter < at_least) return false;
  return true;
}
void Transfer::next_chunk(State again) {
  from_ = to_;
  to_ = std::min(total_, to_ + Segment::chunk_bytes);
  state_ = from_ < total_ ? again : State::done;
}

bool Transfer::step() {
  if (is_between_two(call_.kind)) return step_of_two();
  Member& own = segment_.member(call_.rank);
  switch (state_) {
    case State::begin:
      number_ = own.arrived;
      own.calls[number_ % 2] = call_;
      ++own.arrived;
      state_ = State::arrive;
      return true;
    case State::arrive:
      if (!all(&Member::arrived, number_ + 1)) return false;
      check_agreement();
      state_ = total_ > 0 ? State::write : State::done;
      return true;
    case State::write:
      if (!all(&Member::read, own.written)) return false;
      write();
      ++own.written;
      state_ = State::read;
      return true;
    case State::read:
      if (!all(&Member::written, own.written)) return false;
      read();
      ++own.read;
      next_chunk(State::write);
      return true;
    case State::done: break;
  }
  return false;
}

void Transfer::check_agreement() const {
  for (int rank = 0; rank < call_.ranks; ++rank) {
    const Call& other = segment_.member(rank).calls[number_ % 2];
    if (!agree(call_, other))
      throw Failure("collective " + std::to_string(number_ + 1) + ": rank " + std::to_string(call_.rank) + " calls " +
                    to_string(call_) + " where rank " + std::to_string(rank) + ", of another process, calls " +
                    to_string(other));
  }
}

void Transfer::write() const {
  if (bytes_sent(call_) > 0)
    std::memcpy(segment_.slot(call_.rank), static_cast<const std::byte*>(call_.send) + from_, to_ - from_);
}

void Transfer::read() const {
  if (bytes_received(call_) == 0) return;
  auto* const out = static_cast<std::byte*>(call_.receive);
  const size_t bytes = bytes_of(call_), shard = static_cast<size_t>(call_.rank) * bytes;
  switch (call_.kind) {
    case Kind::all_gather:
      for (int rank = 0; rank < call_.ranks; ++rank)
        std::memcpy(out + static_cast<size_t>(rank) * bytes + from_, segment_.slot(rank), to_ - from_);
      return;
    case Kind::broadcast: std::memcpy(out + from_, segment_.slot(call_.other), to_ - from_); return;
    default: break;
  }
  // A sum, of which a rank keeps [first, last) in a reduce-scatter.
  const bool scatter = call_.kind == Kind::reduce_scatter;
  const size_t first = scatter ? shard : 0, last = scatter ? shard + bytes : total_;
  const size_t begin = std::max(from_, first), end = std::min(to_, last);
  if (begin >= end) return;
  std::vector<Call> inputs(static_cast<size_t>(call_.ranks), call_);
  for (int rank = 0; rank < call_.ranks; ++rank)
    inputs[static_cast<size_t>(rank)].send = segment_.slot(rank) + (begin - from_);
  reduce(out + (begin - first), inputs, (end - begin) / element_bytes(call_));
}

bool Transfer::step_of_two() {
  const bool sends = call_.kind == Kind::send;
  const int from = sends ? call_.rank : call_.other, to = sends ? call_.other : call_.rank;
  Channel& channel = segment_.channel(from, to);
  if (done() || (channel.sent == channel.taken) != sends) return false;
  if (sends) {
    channel.call = call_;
    std::memcpy(segment_.data(from, to), static_cast<const std::byte*>(call_.send) + from_, to_ - from_);
    ++channel.sent;
  } else {
    if (!agree(channel.call, call_))
      throw Failure("from rank " + std::to_string(from) + " to " + std::to_string(to) + ": the former calls " +
                    to_string(channel.call) + " where the latter calls " + to_string(call_));
    std::memcpy(static_cast<std::byte*>(call_.receive) + from_, segment_.data(from, to), to_ - from_);
    ++channel.taken;
  }
  next_chunk(State::begin);
  return true;
}

bool step(std::vector<Transfer>& transfers) {
  std::set<std::pair<Kind, int>> before;  // what is not done yet; collectives are done one after the other
  bool any = false;
  for (Transfer& transfer : transfers) {
    const Call& call = transfer.call();
    const auto key = is_between_two(call.kind) ? std::pair(call.kind, call.other) : std::pair(Kind::all_reduce, -1);
    if (before.count(key) == 0) any = transfer.step() || any;
    if (!transfer.done()) before.insert(key);
  }
  return any;
}

std::string names_of_missing(const Segment& segment, int rank) {
  std::string names;
  for (int other = 0; other < segment.ranks(); ++other)
    if (segment.member(other).arrived < segment.member(rank).arrived) names += " " + std::to_string(other);
  return names;
}

}  // namespace cuda_on_cpu::detail
