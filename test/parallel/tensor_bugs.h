// tensor_bugs.h: bugs of tensor parallelism that tests plant, in the manner of layout_bugs.h. The exchanges of
// parallel/tensor_layers.h are told apart by the names of their buffers.
#pragma once
#include <string_view>
#include <utility>

#include "parallel/layout_bugs.h"

namespace tensor_bugs {

using namespace llmc;

// A kind of exchange that does not happen: what arrives is what was there before.
template <const std::string_view& skipped>
struct Skips final : Comm {
  static constexpr std::string_view groups[] = {"activations"};
  explicit Skips(Comm&& group) : Comm(std::move(group)) {}
  void exchange(Tensor out, int to, Tensor in, int from, Stream& stream) override {
    if (std::string_view(in.name) != skipped) Comm::exchange(out, to, in, from, stream);
    else zero(in, stream);  // finite, so that the result is wrong and not NaN
  }
};
inline constexpr std::string_view gathered = "gathered", gathered_again = "gathered again",
                                  gathered_gradient = "gathered gradient", partial_sums = "partial sums",
                                  sum_over_ranks = "sum over the ranks", head_rows = "gathered rows of the head";

// What rank() - 1 computes arrives as if it were of rank() - 2, and the other way round.
struct SwapsRanks final : Comm {
  static constexpr std::string_view groups[] = {"activations"};
  explicit SwapsRanks(Comm&& group) : Comm(std::move(group)) {}
  void exchange(Tensor out, int to, Tensor in, int from, Stream& stream) override {
    const int P = size(), r = rank();
    if (P > 2 && std::string_view(in.name) == gathered && from != (r + 1) % P) {
      const bool previous = from == (r + P - 1) % P;
      if (previous || from == (r + P - 2) % P) {
        const int64_t slice = in.numel();
        const int other = previous ? (r + P - 2) % P : (r + P - 1) % P;
        in.bytes += (other - from) * slice * size_of(in.dtype);
      }
    }
    Comm::exchange(out, to, in, from, stream);
  }
};

// Changes the three numbers per row that another rank sends for the loss.
template <void (*change)(float* largest_sum_target)>
struct ChangesLoss final : Comm {
  static constexpr std::string_view groups[] = {"activations"};
  explicit ChangesLoss(Comm&& group) : Comm(std::move(group)) {}
  void exchange(Tensor out, int to, Tensor in, int from, Stream& stream) override {
    Comm::exchange(out, to, in, from, stream);
    if (std::string_view(in.name) != "largest, sum, target") return;
    stream.enqueue([in] {
      for (int64_t n = 0; n < in.shape[0]; ++n) change(in.data<float>() + 3 * n);
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
