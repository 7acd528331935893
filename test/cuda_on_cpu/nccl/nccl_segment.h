// nccl_segment.h: private to nccl/: memory that the processes of a communicator share. It has no name: the unique id
// says through which process and descriptor others open it, so nothing is left of it however its processes end.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "cuda_on_cpu/nccl/nccl_call.h"

namespace cuda_on_cpu::detail {

enum class Presence : int { absent, joined, left, aborted };

// What a rank shows the others. Counters only grow.
struct Member {
  std::atomic<Presence> presence;
  int pid, gpu;                   // the GPU's number in the machine
  std::atomic<uint64_t> arrived;  // collectives that it has begun; their calls are in `calls`, by parity
  std::atomic<uint64_t> written;  // chunks that it has put into its slot
  std::atomic<uint64_t> read;     // and chunks of all ranks that it has taken
  Call calls[2];
};
// From one rank to another; holds one chunk while sent != taken.
struct Channel {
  std::atomic<uint64_t> sent, taken;
  Call call;  // the sender's
};

class Segment {
 public:
  static constexpr size_t chunk_bytes = size_t{64} << 10;

  static std::shared_ptr<Segment> create();                         // null: errno says why
  static std::shared_ptr<Segment> open(const std::string& its_id);  // null if it is gone
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  const std::string& id() const { return id_; }

  // Returns what is wrong, or "".
  std::string join(int ranks, int rank, int gpu);
  void leave(int rank, Presence how);
  bool complete() const;  // have all ranks joined?
  bool in_one_process() const;
  std::optional<int> shares_gpu() const;  // a rank that has the same GPU as another one
  // A rank that will take no further part: it was aborted, or its process has ended without leaving.
  std::optional<int> lost() const;
  std::string names_of_absent() const;  // " 1 3"

  int ranks() const { return ranks_; }
  Member& member(int rank) const;
  std::byte* slot(int rank) const;  // a chunk
  Channel& channel(int from, int to) const;
  std::byte* data(int from, int to) const;  // the channel's chunk

  // Everybody who waits is woken by ring(), unless bell() has changed since it was read.
  uint32_t bell() const;
  void ring();
  void wait(uint32_t since, std::chrono::milliseconds longest);

 private:
  struct Header;
  Segment(int descriptor, std::string id);
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  bool map(size_t bytes);

  int descriptor_;
  std::string id_;
  std::byte* memory_ = nullptr;
  size_t bytes_ = 0;
  int ranks_ = 0;
};

}  // namespace cuda_on_cpu::detail
