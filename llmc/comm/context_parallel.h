// context_parallel.h: how context parallelism divides a sequence among the ranks of a group. A sequence is cut into 2 P
// equal slices; rank r has slices r and 2 P - 1 - r, so all ranks have the same causal work (Llama Team 2024). Pure
// functions; attention over the group is in parallel/context_attention.h.
#pragma once
#include "core/shape.h"

namespace llmc {

// How a rank's queries meet the keys and values of the others.
enum class ContextAttention : uint8_t {
  ring,        // keys and values go round a ring while the ranks compute (Liu et al. 2023)
  all_gather,  // every rank gathers them all (Llama Team 2024)
  ulysses,     // each rank computes some heads of whole sequences (Jacobs et al. 2023)
};
constexpr auto names_of_values(ContextAttention) { return std::array{"ring", "all-gather", "ulysses"}; }

struct ContextParallel {
  int ranks = 1;
  ContextAttention attention = ContextAttention::ring;

  int slices() const { return ranks == 1 ? 1 : 2 * ranks; }
  // How many of the T rows of a sequence a rank has, and how many a slice has.
  int64_t share(int64_t T) const { return exact_div(T, slices(), "rows over the slices of --cp") * (slices() / ranks); }
  int64_t slice_rows(int64_t T) const { return T / slices(); }
  // Slice i of a rank; its slices are in the order of their rows.
  int slice_of(int rank, int i) const { return i == 0 ? rank : 2 * ranks - 1 - rank; }
  // T rounded up to a number of rows that can be divided into slices.
  int64_t padded(int64_t T) const { return round_up(T, slices()); }

  // A rank has rows (B share(T)) of B sequences; returns the index of its row `row` among all rows (B T).
  int64_t row_of_all(int64_t row, int64_t T, int rank) const {
    const int64_t mine = share(T), L = slice_rows(T), in_share = row % mine;
    return row / mine * T + slice_of(rank, static_cast<int>(in_share / L)) * L + in_share % L;
  }
  // The elements of x (B T) that a rank has, in the order of its rows.
  template <class X>
  std::vector<X> share_of(std::vector<X> x, int64_t T, int rank) const {
    if (ranks == 1) return x;
    std::vector<X> mine(x.size() / static_cast<size_t>(ranks));
    for (size_t row = 0; row < mine.size(); ++row)
      mine[row] = x[static_cast<size_t>(row_of_all(static_cast<int64_t>(row), T, rank))];
    return mine;
  }
};

}  // namespace llmc
