// slice_attention.h: attention of a micro-batch that goes through the model in slices of its sequences (Li et al. 2021,
// TeraPipe). Slice k attends to the keys of slices 0 to k, and so the forward goes from the first slice to the last.
// The backward goes from the last to the first: when it comes to slice k, the slices after it have added their parts to
// the gradients of its keys and values, and its own part completes them. They are added up in fp32 (contract 12).
//
//   keys of slice    0 1 2 3
//   queries of 0     c
//              1     # c           c: causal, #: all of them
//              2     # # c
//              3     # # # c
//
// Whole sequences compute the same pairs of queries and keys, and add them up in another order: the difference is
// rounding (contract 5).
#pragma once
#include "model/activations.h"
#include "ops/ops.h"
#include "parallel/context_attention.h"

namespace llmc {

// Attention of one slice.
class SliceAttention {
 public:
  // shape: of the slice; slice: which tokens of each sequence
  SliceAttention(const SliceKeys& keys, const AttentionShape& shape, const SequenceRows& slice,
                 const parallel::Group& group)
      : keys_(keys), shape_(shape), slice_(slice), g_(group) {}

  // Appends the slice's keys and values to those of the slices before, and attends to all of them.
  void forward(const parallel::AttentionTensors& a) const {
    copy_box(keys_.keys_values, in_sequences(), a.qkv, in_slice(), box(), g_.compute);
    auto scope = g_.arena.scope();
    const RowStatistics rows = a.rows(g_);
    attention_forward(a.out, rows, a.qkv, keys_.keys_values, a.positions, pairs(), g_.compute);
    a.record(rows.largest, g_);
  }
  // dqkv (B T_k, (Hq + 2 Hkv) D) = ... (overwrites all of it); the gradient of the keys += ... for the slices before.
  void backward(Tensor dqkv, Tensor dout, const parallel::AttentionTensors& a) const {
    Stream& stream = g_.compute;
    auto scope = g_.arena.scope();
    const int64_t rows = shape_.B * shape_.T;
    const Tensor dq = g_.temporary("gradient of queries", accumulator_of(a.qkv.dtype), {rows, query_width()});
    zero(dq, stream);
    if (slice_.first + slice_.rows == slice_.length) zero(keys_.gradient, stream);
    attention_backward(dq, keys_.gradient, dout, a.out, a.qkv, keys_.keys_values, a.lse, a.positions, pairs(),
                       Accumulate::yes, stream);
    copy_box(dqkv, {0, dqkv.shape[1], 0}, dq, {0, query_width(), 0}, {rows, 1, query_width()}, stream);
    copy_box(dqkv, in_slice(), keys_.gradient, in_sequences(), box(), stream);
  }

 private:
  // The slice's queries against all keys up to its own.
  AttentionBlock pairs() const {
    return {.B = shape_.B,
            .Hq = shape_.Hq,
            .Hkv = shape_.Hkv,
            .D = shape_.D,
            .queries = {slice_.rows, 0, slice_.rows},
            .keys = {slice_.length, 0, slice_.first + slice_.rows},
            .offset = slice_.first};
  }
  // Where the slice's keys and values are, in a matrix of whole sequences and in one of the slice's rows; and how many.
  int64_t query_width() const { return shape_.Hq * shape_.D; }
  int64_t key_width() const { return 2 * shape_.Hkv * shape_.D; }
  BoxStrides in_sequences() const { return {slice_.first * key_width(), slice_.length * key_width(), key_width()}; }
  BoxStrides in_slice() const {
    const int64_t width = query_width() + key_width();
    return {query_width(), slice_.rows * width, width};
  }
  BoxSizes box() const { return {shape_.B, slice_.rows, key_width()}; }

  const SliceKeys& keys_;
  AttentionShape shape_;
  SequenceRows slice_;
  const parallel::Group& g_;
};

}  // namespace llmc
