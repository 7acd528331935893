// tensor_bugs.h: bugs of tensor parallelism that tests plant, in the manner of layout_bugs.h. The exchanges of
// parallel/tensor_layers.h are told apart by the names of their buffers.
#pragma once
#include <algorithm>
#include <string_view>
#include <utility>

#include "parallel/layout_bugs.h"

namespace tensor_bugs {

using namespace llmc;

// The slices of a gathered buffer, as (P, S) elements of T.
template <class T>
T* slice_of(const Tensor& all, int rank, int size) {
  return all.data<T>() + all.numel() / size * rank;
}

// A kind of exchange that does not happen. What arrives is finite, so that the result is wrong and not NaN.
template <const std::string_view& skipped>
struct Skips final : Comm {
  static constexpr std::string_view groups[] = {"activations"};
  explicit Skips(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor all, Stream& stream) override {
    if (std::string_view(all.name) != skipped) return Comm::all_gather(all, stream);
    const int64_t slice = all.numel() / size();
    for (int r = 0; r < size(); ++r)
      if (r != rank()) zero(all.slice(slice * r, {slice}), stream);
  }
  void all_to_all_rows(Tensor out, Tensor in, const std::vector<Range>& send, const std::vector<Range>& receive,
                       Stream& stream) override {
    if (std::string_view(out.name) != skipped) return Comm::all_to_all_rows(out, in, send, receive, stream);
    zero(out, stream);
    const auto mine = [&](const Tensor& t, const std::vector<Range>& blocks) {
      const Range& b = blocks[static_cast<size_t>(rank())];
      return t.slice(b.begin * t.shape[1], {b.size, t.shape[1]});
    };
    copy(mine(out, receive), mine(in, send), stream);
  }
};
inline constexpr std::string_view gathered = "gathered", gathered_again = "gathered again",
                                  gathered_gradient = "gathered gradient", partial_sums = "partial sums",
                                  sum_over_ranks = "sum over the ranks", head_rows = "gathered rows of the head";

// What rank() - 1 computes arrives as if it were of rank() - 2, and the other way round.
struct SwapsRanks final : Comm {
  static constexpr std::string_view groups[] = {"activations"};
  explicit SwapsRanks(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor all, Stream& stream) override {
    Comm::all_gather(all, stream);
    if (std::string_view(all.name) != gathered || size() < 3) return;
    stream.enqueue([all, P = size(), a = (rank() + size() - 1) % size(), b = (rank() + size() - 2) % size()] {
      float *const first = slice_of<float>(all, a, P), *const second = slice_of<float>(all, b, P);
      std::swap_ranges(first, first + all.numel() / P, second);
    });
  }
};

// Changes the three numbers per row that another rank sends for the loss.
template <void (*change)(float* largest_sum_target)>
struct ChangesLoss final : Comm {
  static constexpr std::string_view groups[] = {"activations"};
  explicit ChangesLoss(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor all, Stream& stream) override {
    Comm::all_gather(all, stream);
    if (std::string_view(all.name) != "largest, sum, target") return;
    stream.enqueue([all, me = rank(), P = size()] {
      for (int r = 0; r < P; ++r)
        for (int64_t n = 0; r != me && n < all.shape[0] / P; ++n) change(slice_of<float>(all, r, P) + 3 * n);
    });
  }
};
inline void without_the_largest(float* stats) { stats[0] = 0; }
inline void with_a_padding_column(float* stats) { stats[1] += std::exp(-stats[0]); }
inline void without_the_target(float* stats) { stats[2] = 0; }

// The parts of a gradient, or of this group's gradients, are not summed.
template <const std::string_view& group_name>
struct SkipsSum final : Comm {
  static constexpr std::string_view groups[] = {group_name};
  explicit SkipsSum(Comm&& group) : Comm(std::move(group)) {}
  void all_reduce(Tensor, Stream&) override {}
};
inline constexpr std::string_view partial_gradients = "partial gradients", head_gradients = "head gradients";

// They are averaged.
struct Averages final : Comm {
  static constexpr std::string_view groups[] = {partial_gradients, head_gradients};
  explicit Averages(Comm&& group) : Comm(std::move(group)) {}
  void all_reduce(Tensor buffer, Stream& stream) override {
    Comm::all_reduce(buffer, stream);
    scale(buffer, 1.0f / static_cast<float>(size()), stream);
  }
};

// Each rank decides by its own scalars: the norm of its part of the model alone.
struct OwnNorm final : Comm {
  static constexpr std::string_view groups[] = {"scalars"};
  explicit OwnNorm(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor buffer, Stream& stream) override {
    const int64_t n = buffer.numel() / size();
    for (int r = 0; r < size(); ++r)
      if (r != rank()) copy(buffer.slice(n * r, {n}), buffer.slice(n * rank(), {n}), stream);
  }
};

}  // namespace tensor_bugs
