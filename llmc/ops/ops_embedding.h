// ops_embedding.h: token and position embedding. Conventions: ops.h.
#pragma once
#include "ops/ops_memory.h"

namespace llmc {

namespace detail {

inline void check_rows(const char* op, const Vocabulary& part, const Tensor& table) {
  CHECK(part.size <= table.shape[0], "{}: {} tokens from {} on, but {} has {} rows", op, part.size, part.first,
        table.name, table.shape[0]);
}

// Bytes of the rows of a table (or of no table) that N tokens use. A row that several use comes from memory once.
inline double bytes_of_rows(const Tensor& table, int64_t N) {
  if (table.empty()) return 0;
  return static_cast<double>(std::min(N, table.shape[0]) * table.shape[1] * size_of(table.dtype));
}

}  // namespace detail

// out (N, C) = wte[tokens] + wpe[positions]. wte holds the rows of the tokens in `part`; other tokens contribute zero.
// tokens, positions (N) int32; wte (V, C); wpe (P, C), or an empty tensor
inline void embedding_forward(Tensor out, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe, Stream& stream,
                              const Vocabulary& part = {}) {
  const int64_t N = out.shape[0], C = out.shape[1];
  CHECK_TENSORS((tokens, positions), DType::int32, N);
  CHECK_TENSOR(wte, out.dtype, wte.shape[0], C);
  detail::check_rows("embedding_forward", part, wte);
  if (!wpe.empty()) CHECK_TENSOR(wpe, out.dtype, wpe.shape[0], C);
  const double bytes = detail::bytes_of({out}) + detail::bytes_of_rows(wte, N) + detail::bytes_of_rows(wpe, N);
  RUN_OP(embedding_forward, out.dtype, bytes, (out), out.data<X>(), tokens.data<int32_t>(), positions.data<int32_t>(),
         wte.data<X>(), detail::data_or_null<X>(wpe), N, C, part);
}

// dwte[tokens] += dout, dwpe[positions] += dout (dwpe may be empty), in row order. dwte holds the rows of the tokens in
// `part`; other tokens are skipped.
inline void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions, Stream& stream,
                               const Vocabulary& part = {}) {
  const int64_t N = dout.shape[0], C = dout.shape[1];
  const DType grad = accumulator_of(dout.dtype);
  CHECK_TENSORS((tokens, positions), DType::int32, N);
  CHECK_TENSOR(dwte, grad, dwte.shape[0], C);
  detail::check_rows("embedding_backward", part, dwte);
  if (!dwpe.empty()) CHECK_TENSOR(dwpe, grad, dwpe.shape[0], C);
  [[maybe_unused]] const int64_t V = dwte.shape[0], P = dwpe.empty() ? 0 : dwpe.shape[0];
  auto scope = stream.scratch().scope();
  [[maybe_unused]] const Tensor scratch =
      detail::scratch(stream, "embedding rows in order", DType::int32, 0,
                      ON_GPU(cuda::embedding_backward_scratch(N, C, dwpe.empty() ? 1 : 2)));
  const double bytes = detail::bytes_of({dout}) + 2 * (detail::bytes_of_rows(dwte, N) + detail::bytes_of_rows(dwpe, N));
  detail::run_op(stream, dout.dtype, {"embedding_backward", 0, bytes}, {dwte, dwpe},
                 [=, &stream]<class X, class A>(detail::OpTypes<X, A>) {
                   A* const dwpe_data = detail::data_or_null<A>(dwpe);
                   const int32_t *ids = tokens.data<int32_t>(), *places = positions.data<int32_t>();
                   RUN_ON_DEVICE(stream, X,
                                 cuda::embedding_backward({dwte.data<A>(), dwpe_data, V, P}, scratch.data<int32_t>(),
                                                          dout.data<X>(), ids, places, N, C, part, stream.cuda()),
                                 cpu::ops<X>().embedding_backward(dwte.data<A>(), dwpe_data, dout.data<X>(), ids,
                                                                  places, N, C, part));
                 });
}

// x (N, C) += wpe[positions], rounded once.   positions (N) int32; wpe (P, C)
inline void add_positions(Tensor x, Tensor positions, Tensor wpe, Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1];
  CHECK_TENSOR(positions, DType::int32, N);
  CHECK_TENSOR(wpe, x.dtype, wpe.shape[0], C);
  RUN_OP(add_positions, x.dtype, 3 * detail::bytes_of({x}), (x), x.data<X>(), positions.data<int32_t>(), wpe.data<X>(),
         N, C);
}

// dwpe[positions] += dout, in row order.   dwpe (P, C); dout (N, C)
inline void add_positions_backward(Tensor dwpe, Tensor dout, Tensor positions, Stream& stream) {
  const int64_t N = dout.shape[0], C = dout.shape[1];
  [[maybe_unused]] const int64_t P = dwpe.shape[0];
  CHECK_TENSOR(positions, DType::int32, N);
  CHECK_TENSOR(dwpe, accumulator_of(dout.dtype), P, C);
  auto scope = stream.scratch().scope();
  [[maybe_unused]] const Tensor scratch = detail::scratch(stream, "embedding rows in order", DType::int32, 0,
                                                          ON_GPU(cuda::embedding_backward_scratch(N, C, 1)));
  const double bytes = detail::bytes_of({dout}) + 2 * detail::bytes_of_rows(dwpe, N);
  detail::run_op(stream, dout.dtype, {"add_positions_backward", 0, bytes}, {dwpe},
                 [=, &stream]<class X, class A>(detail::OpTypes<X, A>) {
                   A* const no_table = nullptr;
                   const int32_t* places = positions.data<int32_t>();
                   RUN_ON_DEVICE(stream, X,
                                 cuda::embedding_backward({nullptr, dwpe.data<A>(), 0, P}, scratch.data<int32_t>(),
                                                          dout.data<X>(), nullptr, places, N, C, {}, stream.cuda()),
                                 cpu::ops<X>().embedding_backward(no_table, dwpe.data<A>(), dout.data<X>(), nullptr,
                                                                  places, N, C, {}));
                 });
}

}  // namespace llmc
