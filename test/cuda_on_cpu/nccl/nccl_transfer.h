// nccl_transfer.h: private to nccl/: one rank's part in a collective with ranks of other processes, chunk by chunk
// through shared memory. Sums have the order of addition that they have within one process.
#pragma once
#include <vector>

#include "cuda_on_cpu/nccl/nccl_segment.h"

namespace cuda_on_cpu::detail {

class Transfer {
 public:
  Transfer(Segment& segment, const Call& call);
  const Call& call() const { return call_; }
  bool done() const { return state_ == State::done; }
  // Goes on as far as it can without waiting; returns whether it got any further. Failure if the ranks' calls do not
  // match.
  bool step();

 private:
  enum class State { begin, arrive, write, read, done };
  bool step_of_two();
  bool all(std::atomic<uint64_t> Member::*counter, uint64_t at_least) const;
  void check_agreement() const;
  void write() const;
  void read() const;
  void next_chunk(State again);

  Segment& segment_;
  Call call_;
  State state_ = State::begin;
  uint64_t number_ = 0;           // of the collective
  size_t total_, from_ = 0, to_;  // the chunk, in bytes
};

// Lets each of one rank's calls go on, except those that must wait for an earlier one; returns whether any did.
bool step(std::vector<Transfer>& transfers);
// Which ranks have not arrived at the collective that this rank waits in: " 1 3".
std::string names_of_missing(const Segment& segment, int rank);

}  // namespace cuda_on_cpu::detail
