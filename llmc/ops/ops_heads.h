// ops_heads.h: the ops that prepare queries and keys for attention: rotary positions, query-key norms. Conventions:
// ops.h.
#pragma once
#include "ops/row_sums.h"

namespace llmc {

// The positions of rows.   table (P, D) in the accumulator dtype; of_row (B T) int32, all below P
struct RotaryPositions {
  Tensor table, of_row;
};

namespace detail {

inline void check_qkv(const char* op, const char* argument, const Tensor& qkv, const AttentionShape& s) {
  check_tensor(op, argument, qkv, qkv.dtype, {s.B * s.T, (s.Hq + 2 * s.Hkv) * s.D});
}
inline void check_rotary(const char* op, const Tensor& qkv, const RotaryPositions& positions, const AttentionShape& s) {
  const auto& [table, of_row] = positions;
  check_tensor(op, "positions", of_row, DType::int32, {s.B * s.T});
  check_tensor(op, "the table of angles", table, accumulator_of(qkv.dtype), {table.shape[0], s.D});
}

}  // namespace detail

// table (P, D) = the cosines and sines of P positions, for rotary_embedding.
inline void rotary_table(Tensor table, const Rotary& rotary, Stream& stream) {
  const int64_t P = table.shape[0], D = table.shape[1];
  CHECK(D % 2 == 0, "rotary embedding rotates pairs: the head size {} is odd", D);
  RUN_OP(rotary_table, table.dtype, detail::bytes_of({table}), (table), table.data<A>(), rotary, P, D);
}

// In place: rotates every query and key head of a row by its position; Turn::backward rotates the gradient back.
// qkv (B T, (Hq + 2 Hkv) D)
inline void rotary_embedding(Tensor qkv, const RotaryPositions& positions, const AttentionShape& shape, Turn turn,
                             Stream& stream) {
  detail::check_qkv("rotary_embedding", "qkv", qkv, shape);
  detail::check_rotary("rotary_embedding", qkv, positions, shape);
  RUN_OP(rotary, qkv.dtype, 2 * detail::bytes_of({qkv}), (qkv), qkv.data<X>(), positions.table.data<A>(),
         positions.of_row.data<int32_t>(), shape, turn);
}

// rmsnorm of every query head with q_weight (D) and every key head with k_weight (D); the values are copied. Given
// positions, the normed heads are rotated, with the same bits as from the two ops.
// out, qkv (B T, (Hq + 2 Hkv) D); rstd (B T, Hq + Hkv)
inline void qk_norm_forward(Tensor out, Tensor rstd, Tensor qkv, Tensor q_weight, Tensor k_weight,
                            const std::optional<RotaryPositions>& positions, float eps, const AttentionShape& shape,
                            Stream& stream) {
  detail::check_qkv("qk_norm_forward", "qkv", qkv, shape);
  CHECK_TENSOR(out, qkv.dtype, qkv.shape);
  CHECK_TENSOR(rstd, accumulator_of(qkv.dtype), shape.B * shape.T, shape.Hq + shape.Hkv);
  CHECK_TENSORS((q_weight, k_weight), qkv.dtype, shape.D);
  if (positions) detail::check_rotary("qk_norm_forward", qkv, *positions, shape);
  const RotaryPositions rotation = positions.value_or(RotaryPositions{});
  RUN_OP(qk_norm_forward, qkv.dtype, detail::bytes_of({out, qkv}), (out, rstd), out.data<X>(), rstd.data<A>(),
         qkv.data<X>(), q_weight.data<X>(), k_weight.data<X>(), detail::data_or_null<A>(rotation.table),
         detail::data_or_null<int32_t>(rotation.of_row), eps, shape);
}

// dqkv: in, the gradient of out; out, the gradient of qkv. dq_weight, dk_weight +=.
inline void qk_norm_backward(Tensor dqkv, Tensor dq_weight, Tensor dk_weight, Tensor qkv, Tensor q_weight,
                             Tensor k_weight, Tensor rstd, const std::optional<RotaryPositions>& positions,
                             const AttentionShape& shape, Stream& stream) {
  const DType stat = accumulator_of(qkv.dtype);
  detail::check_qkv("qk_norm_backward", "qkv", qkv, shape);
  CHECK_TENSOR(dqkv, qkv.dtype, qkv.shape);
  CHECK_TENSOR(rstd, stat, shape.B * shape.T, shape.Hq + shape.Hkv);
  CHECK_TENSORS((dq_weight, dk_weight), stat, shape.D);
  if (positions) detail::check_rotary("qk_norm_backward", qkv, *positions, shape);
  auto scope = stream.scratch().scope();
  const detail::PartsOfSums partials(stream, "query-key norm partial sums", {dq_weight, dk_weight},
                                     cpu::row_partitions * 2 * shape.D, ON_GPU(cuda::qk_norm_backward_scratch(shape)));
  const RotaryPositions rotation = positions.value_or(RotaryPositions{});
  RUN_OP(qk_norm_backward, qkv.dtype, detail::bytes_of({dqkv, dqkv, qkv}), (dqkv, dq_weight, dk_weight), dqkv.data<X>(),
         dq_weight.data<A>(), dk_weight.data<A>(), partials.template room<A>(), qkv.data<X>(), q_weight.data<X>(),
         k_weight.data<X>(), rstd.data<A>(), detail::data_or_null<A>(rotation.table),
         detail::data_or_null<int32_t>(rotation.of_row), shape);
}

// ---- Query-key norm of whole projections (OLMo 2, OLMoE): the heads of a row, on all of its tensor-parallel ranks
// (HeadShares), share a root mean square. Each rank first sums over its own heads; then all ranks use the sums of all.

namespace detail {

// sums (N, 2) = x^2 summed over the query channels and over the key channels of a row; or, given the gradient of the
// normed projections and the weights, gradient * weight * x.
inline void projection_sums(Tensor sums, Tensor qkv, Tensor dout, Tensor q_weight, Tensor k_weight,
                            const AttentionShape& shape, Stream& stream) {
  check_qkv("projection_norm_sums", "qkv", qkv, shape);
  CHECK_TENSOR(sums, accumulator_of(qkv.dtype), shape.B * shape.T, 2);
  RUN_OP_AT(projection_sums, qkv.dtype, (OpCost{"projection_norm_sums", 0, bytes_of({qkv, dout})}), (sums),
            sums.data<A>(), qkv.data<X>(), data_or_null<X>(dout), data_or_null<X>(q_weight), data_or_null<X>(k_weight),
            shape);
}
inline void check_projections(const char* op, const Tensor& rstd, const Tensor& sums, const Tensor& qkv,
                              const Tensor& q_weight, const Tensor& k_weight, DType weights,
                              const AttentionShape& shape, const HeadShares& shares) {
  const int64_t N = shape.B * shape.T;
  const DType stat = accumulator_of(qkv.dtype);
  check_qkv(op, "qkv", qkv, shape);
  CHECK(
      shares.key_copies >= 1 && shares.ranks % shares.key_copies == 0 && shares.rank >= 0 && shares.rank < shares.ranks,
      "{}: rank {} of {}, of which {} have the same key heads", op, shares.rank, shares.ranks, shares.key_copies);
  check_tensor(op, "rstd", rstd, stat, {N, 2});
  check_tensor(op, "sums", sums, stat, {shares.ranks, N, 2});
  check_tensor(op, "q_weight", q_weight, weights, {shape.Hq * shape.D});
  check_tensor(op, "k_weight", k_weight, weights, {shape.Hkv * shape.D});
}

}  // namespace detail

// sums (N, 2) = the sum of the squares of a row's query channels, and that of its key channels.
inline void projection_norm_sums(Tensor sums, Tensor qkv, const AttentionShape& shape, Stream& stream) {
  detail::projection_sums(sums, qkv, {}, {}, {}, shape, stream);
}

// out = the query channels normed together with q_weight (Hq D), the key channels with k_weight (Hkv D); the values are
// copied. rstd (N, 2): of the queries, of the keys.   sums (ranks, N, 2): projection_norm_sums() of all ranks
inline void projection_norm_forward(Tensor out, Tensor rstd, Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor sums,
                                    float eps, const AttentionShape& shape, const HeadShares& shares, Stream& stream) {
  detail::check_projections("projection_norm_forward", rstd, sums, qkv, q_weight, k_weight, qkv.dtype, shape, shares);
  CHECK_TENSOR(out, qkv.dtype, qkv.shape);
  RUN_OP(projection_norm_forward, qkv.dtype, detail::bytes_of({out, qkv}), (out, rstd), out.data<X>(), rstd.data<A>(),
         qkv.data<X>(), q_weight.data<X>(), k_weight.data<X>(), sums.data<A>(), eps, shape, shares);
}

// sums (N, 2) = gradient * weight * channel summed over a row's query channels, and over its key channels.   dout: the
// gradient of the normed projections
inline void projection_norm_backward_sums(Tensor sums, Tensor dout, Tensor qkv, Tensor q_weight, Tensor k_weight,
                                          const AttentionShape& shape, Stream& stream) {
  detail::check_tensor("projection_norm_sums", "dout", dout, qkv.dtype, qkv.shape);
  CHECK_TENSOR(q_weight, qkv.dtype, shape.Hq * shape.D);
  CHECK_TENSOR(k_weight, qkv.dtype, shape.Hkv * shape.D);
  detail::projection_sums(sums, qkv, dout, q_weight, k_weight, shape, stream);
}

// dqkv: in, the gradient of out; out, the gradient of qkv. dq_weight, dk_weight +=.   sums (ranks, N, 2):
// projection_norm_backward_sums() of all ranks. Ranks with the same key heads have a part of their gradient each, here
// too.
inline void projection_norm_backward(Tensor dqkv, Tensor dq_weight, Tensor dk_weight, Tensor qkv, Tensor q_weight,
                                     Tensor k_weight, Tensor rstd, Tensor sums, const AttentionShape& shape,
                                     const HeadShares& shares, Stream& stream) {
  const DType stat = accumulator_of(qkv.dtype);
  detail::check_projections("projection_norm_backward", rstd, sums, qkv, q_weight, k_weight, qkv.dtype, shape, shares);
  detail::check_projections("projection_norm_backward", rstd, sums, qkv, dq_weight, dk_weight, stat, shape, shares);
  CHECK_TENSOR(dqkv, qkv.dtype, qkv.shape);
  auto scope = stream.scratch().scope();
  const detail::PartsOfSums partials(stream, "query-key norm partial sums", {dq_weight, dk_weight},
                                     cpu::row_partitions * (shape.Hq + shape.Hkv) * shape.D,
                                     ON_GPU(cuda::projection_norm_backward_scratch(shape)));
  RUN_OP(projection_norm_backward, qkv.dtype, detail::bytes_of({dqkv, dqkv, qkv}), (dqkv, dq_weight, dk_weight),
         dqkv.data<X>(), dq_weight.data<A>(), dk_weight.data<A>(), partials.template room<A>(), qkv.data<X>(),
         q_weight.data<X>(), k_weight.data<X>(), rstd.data<A>(), sums.data<A>(), shape, shares);
}

}  // namespace llmc
