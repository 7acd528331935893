// tensor_parallel.h: how tensor parallelism (Shoeybi et al. 2019) divides a layer's vocabulary, and with sequence
// parallelism (Korthikanti et al. 2022) the rows of the residual stream, among the ranks of a group. Pure functions;
// shard/params.h divides the parameters, parallel/ has the layers.
#pragma once
#include "core/shape.h"

namespace llmc {

inline constexpr int64_t vocab_multiple = 128;  // rows of a vocabulary that a rank stores are a multiple of this

struct TensorParallel {
  int ranks = 1;
  bool sequence = true;  // sequence parallelism: between the products each rank has some rows of the residual stream
  bool overlap = false;  // exchange one piece of a product while another is computed (parallel/group.h)
  int head_copies = 1;   // ranks that have the same key-value head: more than one if there are fewer heads than ranks

  bool by_rows() const { return ranks > 1 && sequence; }
  // How many of R rows each rank exchanges with every other; those of the last ranks may be padding.
  int64_t slice_rows(int64_t R) const { return ceil_div(R, ranks); }
  int64_t padded_rows(int64_t R) const { return slice_rows(R) * ranks; }
  // How many rows of the residual stream a rank has, padding included.
  int64_t stream_rows(int64_t R) const { return by_rows() ? slice_rows(R) : R; }
  // How many rows of a vocabulary of V a rank stores, padding included.
  int64_t stored_vocab(int64_t V) const { return round_up(ceil_div(V, ranks), vocab_multiple); }
};

}  // namespace llmc
