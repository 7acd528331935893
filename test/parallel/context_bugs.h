// context_bugs.h: bugs of context parallelism that tests plant, in the manner of layout_bugs.h. The exchanges of
// parallel/context_attention.h are told apart by the names of their buffers.
#pragma once
#include <algorithm>
#include <string_view>
#include <utility>

#include "parallel/layout_bugs.h"

namespace context_bugs {

using namespace llmc;

inline constexpr std::string_view keys = "keys and values", key_gradients = "gradient of keys that arrives",
                                  heads = "heads to send", rows = "rows to send";

// ---- The ring ------------------------------------------------------------------------------------------------------

// An exchange of the ring, of the buffers with one name.
template <const std::string_view& which, class Change>
struct Exchange final : Comm {
  static constexpr std::string_view groups[] = {"keys and values"};
  explicit Exchange(Comm&& group) : Comm(std::move(group)) {}
  void exchange(Tensor out, int to, Tensor in, int from, Stream& stream) override {
    if (std::string_view(in.name) != which) return Comm::exchange(out, to, in, from, stream);
    if (Change::other_way) std::swap(to, from);
    if (Change::happens) Comm::exchange(out, to, in, from, stream);
    Change::after(out, in, stream);
  }
};
struct Nothing {
  static constexpr bool happens = true, other_way = false;
  static void after(Tensor, Tensor, Stream&) {}
};
// What is sent on arrives here: a rank's own keys in every step.
struct Stale : Nothing {
  static constexpr bool happens = false;
  static void after(Tensor out, Tensor in, Stream& stream) { copy(in, out, stream); }
};
struct Dropped : Nothing {
  static constexpr bool happens = false;
  static void after(Tensor, Tensor in, Stream& stream) { zero(in, stream); }
};
struct WrongNeighbour : Nothing {
  static constexpr bool other_way = true;
};
// The later slice of the last of two sequences.
struct WithoutASlice : Nothing {
  static void after(Tensor, Tensor in, Stream& stream) { zero(in.slice(in.numel() / 4 * 3, {in.numel() / 4}), stream); }
};
// The two slices of a rank in the other order.
struct SwappedSlices : Nothing {
  static void after(Tensor, Tensor in, Stream& stream) {
    stream.enqueue([in] {
      const auto slice = in.size_bytes() / 4;  // of two sequences
      for (std::byte* sequence : {in.bytes, in.bytes + 2 * slice})
        std::swap_ranges(sequence, sequence + slice, sequence + slice);
    });
  }
};
struct RoundedToBf16 : Nothing {
  static void after(Tensor, Tensor in, Stream& stream) {
    stream.enqueue([in] {
      for (int64_t i = 0; i < in.numel(); ++i)
        in.data<float>()[i] = static_cast<float>(static_cast<bf16>(in.data<float>()[i]));
    });
  }
};

// ---- All-gather ----------------------------------------------------------------------------------------------------

struct GathersOwnKeys final : Comm {
  static constexpr std::string_view groups[] = {"keys and values"};
  explicit GathersOwnKeys(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor buffer, Stream& stream) override {
    const int64_t n = buffer.numel() / size();
    for (int r = 0; r < size(); ++r)
      if (r != rank()) copy(buffer.slice(n * r, {n}), buffer.slice(n * rank(), {n}), stream);
  }
};
// What other ranks add to the gradients of a rank's keys is lost.
struct KeepsOwnGradients final : Comm {
  static constexpr std::string_view groups[] = {"keys and values"};
  explicit KeepsOwnGradients(Comm&& group) : Comm(std::move(group)) {}
  void reduce_scatter(Tensor, Stream&) override {}
};

// ---- Ulysses -------------------------------------------------------------------------------------------------------

// Each rank gets what is meant for the one before it.
template <const std::string_view& which>
struct Rotated final : Comm {
  static constexpr std::string_view groups[] = {"keys and values"};
  explicit Rotated(Comm&& group) : Comm(std::move(group)) {}
  void all_to_all(Tensor out, Tensor in, Stream& stream) override {
    if (std::string_view(in.name) == which)
      stream.enqueue([in, shard = in.size_bytes() / size()] {
        std::rotate(in.bytes, in.bytes + shard, in.bytes + in.size_bytes());
      });
    Comm::all_to_all(out, in, stream);
  }
};

// ---- What follows from it in the rest of a step --------------------------------------------------------------------

// The loss is divided by a rank's own targets: its gradient is that many times too large.
struct OwnDivisor final : Comm {
  static constexpr std::string_view groups[] = {"gradients"};
  explicit OwnDivisor(Comm&& group) : Comm(std::move(group)) {}
  void reduce_scatter(Tensor buffer, Stream& stream) override {  // which all_reduce() calls, too
    Comm::reduce_scatter(buffer, stream);
    const int64_t n = buffer.numel() / size();
    scale(buffer.slice(n * rank(), {n}), static_cast<float>(size()), stream);
  }
};
struct NoSum final : Comm {
  static constexpr std::string_view groups[] = {"gradients"};
  explicit NoSum(Comm&& group) : Comm(std::move(group)) {}
  void reduce_scatter(Tensor, Stream&) override {}  // which all_reduce() calls, too
};
// The loss of rank 0 is taken for that of every rank.
struct LossOfRank0 final : Comm {
  static constexpr std::string_view groups[] = {"scalars"};
  explicit LossOfRank0(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor buffer, Stream& stream) override {
    Comm::all_gather(buffer, stream);
    for (int r = 1; r < size(); ++r) copy(buffer.slice(buffer.numel() / size() * r, {1}), buffer.slice(0, {1}), stream);
  }
};

// ---- The data ------------------------------------------------------------------------------------------------------

// The slice that row t of a sequence is in, and the row within a rank's two slices.
inline int64_t row_of_rank(const StepConfig& step, int64_t t) {
  const int64_t L = step.layout.context.slice_rows(step.batch.T);
  return t / L < step.layout.context.ranks ? t % L : L + t % L;
}
// Every rank counts its rows from 0.
inline HostBatch positions_of_each_rank(const StepConfig& step, int reader, int64_t micro_batch) {
  HostBatch batch = selftest::read_batch(step, reader, micro_batch);
  for (int32_t& position : batch.positions) position = static_cast<int32_t>(row_of_rank(step, position));
  return batch;
}
inline HostBatch positions_of_each_slice(const StepConfig& step, int reader, int64_t micro_batch) {
  HostBatch batch = selftest::read_batch(step, reader, micro_batch);
  for (int32_t& position : batch.positions)
    position %= static_cast<int32_t>(step.layout.context.slice_rows(step.batch.T));
  return batch;
}
// Rank r reads slices 2 r and 2 r + 1.
inline HostBatch slices_in_plain_order(const StepConfig& step, int reader, int64_t micro_batch) {
  const HostBatch batch = selftest::read_batch(step, reader, micro_batch);
  HostBatch moved = batch;
  const int64_t T = step.batch.T, share = T / step.layout.context.ranks;
  for (int64_t b = 0; b < step.batch.B; ++b)
    for (int rank = 0; rank < step.layout.context.ranks; ++rank)
      for (int64_t i = 0; i < share; ++i) {
        const size_t to = static_cast<size_t>(b * T + step.layout.context.row_of_all(i, T, rank)),
                     from = static_cast<size_t>(b * T + rank * share + i);
        moved.tokens[to] = batch.tokens[from];
        moved.targets[to] = batch.targets[from];
        moved.positions[to] = batch.positions[from];
      }
  return moved;
}
// Targets are those of the micro-batch's first rows on every rank.
inline HostBatch targets_of_rank_0(const StepConfig& step, int reader, int64_t micro_batch) {
  HostBatch batch = selftest::read_batch(step, reader, micro_batch);
  const std::vector<int32_t> targets = step.layout.context.share_of(batch.targets, step.batch.T, 0);
  const int64_t share = step.layout.context.share(step.batch.T);
  for (size_t row = 0; row < batch.targets.size(); ++row) {
    const int64_t b = static_cast<int64_t>(row) / step.batch.T, t = static_cast<int64_t>(row) % step.batch.T;
    batch.targets[row] = targets[static_cast<size_t>(b * share + row_of_rank(step, t))];
  }
  return batch;
}

}  // namespace context_bugs
