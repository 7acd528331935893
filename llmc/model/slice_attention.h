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
#include "dist/parallel.h"
#include "model/activations.h"
#include "ops/ops.h"

namespace llmc {

namespace detail {

// The slice's queries against all keys up to its own. `shape`: of the slice
inline AttentionBlock slice_block(const AttentionShape& shape, const SequenceRows& slice) {
  return {.B = shape.B,
          .Hq = shape.Hq,
          .Hkv = shape.Hkv,
          .D = shape.D,
          .queries = {slice.rows, 0, slice.rows},
          .keys = {slice.length, 0, slice.first + slice.rows},
          .offset = slice.first};
}
// Where the slice's keys and values are, in a matrix of whole sequences and in one of the slice's rows; and how many.
struct SliceBox {
  BoxStrides in_sequences, in_slice;
  BoxSizes sizes;
  SliceBox(const AttentionShape& s, const SequenceRows& slice)
      : SliceBox(s.B, 2 * s.Hkv * s.D, s.Hq * s.D, (s.Hq + 2 * s.Hkv) * s.D, slice) {}

 private:
  SliceBox(int64_t B, int64_t keys, int64_t queries, int64_t width, const SequenceRows& slice)
      : in_sequences{slice.first * keys, slice.length * keys, keys},
        in_slice{queries, slice.rows * width, width},
        sizes{B, slice.rows, keys} {}
};

}  // namespace detail

// Appends the slice's keys and values to those of the slices before, and attends to all of them.
// out (B T_k, Hq D); lse (B, Hq, T_k); qkv (B T_k, (Hq + 2 Hkv) D); positions (B T_k), or an empty tensor; shape: of
// the slice; slice: which tokens of each sequence
inline void slice_attention_forward(Tensor out, Tensor lse, Tensor qkv, const SliceKeys& keys, Tensor positions,
                                    const AttentionShape& shape, const SequenceRows& slice, Stream& stream) {
  const detail::SliceBox box(shape, slice);
  copy_box(keys.keys_values, box.in_sequences, qkv, box.in_slice, box.sizes, stream);
  attention_forward(out, lse, qkv, keys.keys_values, positions, detail::slice_block(shape, slice), stream);
}

// dqkv (B T_k, (Hq + 2 Hkv) D) = ... (overwrites all of it); keys.gradient += ... for the slices before.
inline void slice_attention_backward(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, Tensor lse,
                                     const SliceKeys& keys, Tensor positions, const AttentionShape& shape,
                                     const SequenceRows& slice, const parallel::Group& p) {
  Stream& stream = p.compute;
  auto scope = p.arena.scope();
  const int64_t query_width = shape.Hq * shape.D;
  const Tensor dq = p.temporary("gradient of queries", accumulator_of(qkv.dtype), {shape.B * shape.T, query_width});
  zero(dq, stream);
  if (slice.first + slice.rows == slice.length) zero(keys.gradient, stream);
  attention_backward(dq, keys.gradient, dout, out, qkv, keys.keys_values, lse, positions,
                     detail::slice_block(shape, slice), Accumulate::yes, stream);
  copy_box(dqkv, {0, dqkv.shape[1], 0}, dq, {0, query_width, 0}, {shape.B * shape.T, 1, query_width}, stream);
  const detail::SliceBox box(shape, slice);
  copy_box(dqkv, box.in_slice, keys.gradient, box.in_sequences, box.sizes, stream);
}

}  // namespace llmc
