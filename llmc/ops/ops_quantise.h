// ops_quantise.h: operands of products in fp8. Conventions: ops.h.
//
// A block of numbers is divided by a power of two, so that the largest of them is within E4M3's range, and each is
// rounded to E4M3 (core/fp8.h). Blocks are fixed parts of an operand, so that numbers do not depend on the micro-batch:
// 128 that follow each other along the sum, for activations and gradients, whose rows differ in size; 128 x 128 for
// weights, which are then the same numbers along rows and along columns (DeepSeek-AI 2024).
#pragma once
#include "core/fp8.h"
#include "ops/ops_memory.h"

namespace llmc::detail {

// An operand of a product, and how it is stored.
struct Operand {
  Tensor values = {};
  Transpose as = Transpose::no;
  Tensor scales = {};  // fp32
  ScaledBy scaled = ScaledBy::nothing;
};

// Scales of an operand (M, K) as cuBLASLt takes them: of segments (ceil(K / 128), M), of tiles (ceil(M / 128), ceil(K /
// 128) rounded up to 4).
inline Shape scales_of(ScaledBy by, int64_t M, int64_t K) {
  const int64_t of_K = ceil_div(K, fp8_block);
  return by == ScaledBy::segments ? Shape{of_K, M} : Shape{ceil_div(M, fp8_block), round_up(of_K, int64_t{4})};
}

// A matrix as products in fp8 read it that sum along its rows, along its columns, or both.
struct Quantised {
  Operand rows, columns;
};
enum class SumAlong : uint8_t { rows, columns, both };

// x (R, C) in fp8, in scratch memory that the caller has opened. On a CPU the same numbers in x's dtype and order; on a
// GPU E4M3 and scales, (R, C) for sums along rows and (C, R) for those along columns.
inline Quantised quantise(Tensor x, SumAlong sum, ScaledBy by, Stream& stream) {
  const int64_t R = x.shape[0], C = x.shape[1];
  const bool tiles = by == ScaledBy::tiles, along_rows = sum != SumAlong::columns,
             along_columns = sum != SumAlong::rows;
  Quantised q;
  if (stream.device().computes_as() != DeviceKind::cuda) {
    const auto round = [&](int64_t rows, int64_t columns) {
      const Tensor out = stream.scratch().alloc("scratch", "fp8 operand", x.dtype, x.shape);
      stream.run({"quantise", 0, bytes_of({out, x})}, {out}, [=] {
        with_type(x.dtype, [&]<class X>(type_tag<X>) {
          cpu::ops<X>().round_to_fp8(out.data<X>(), x.data<X>(), R, C, rows, columns);
        });
      });
      return Operand{out};
    };
    if (along_rows) q.rows = round(tiles ? fp8_block : 1, fp8_block);
    if (along_columns) q.columns = round(fp8_block, tiles ? fp8_block : 1);
    return q;
  }
  CHECK(R % 16 == 0 && C % 16 == 0, "{} {}: a matrix in fp8 has multiples of 16 rows and columns on a GPU", x.name,
        to_string(x.shape));
  const auto room = [&](int64_t M, int64_t K) {
    const Tensor values = stream.scratch().alloc("scratch", "fp8 operand", DType::e4m3, {M, K}),
                 scales =
                     stream.scratch().alloc("scratch", "scales of an fp8 operand", DType::fp32, scales_of(by, M, K));
    return Operand{values, Transpose::no, scales, by};
  };
  if (along_rows) q.rows = room(R, C);
  if (along_columns) q.columns = room(C, R);
  const Operand a = q.rows, b = q.columns;
  stream.run({"quantise", 0, bytes_of({x, a.values, a.scales, b.values, b.scales})}, {}, [=, &stream] {
#ifdef TRAIN_GPT_CUDA
    const auto pointers = [](const Operand& o) {
      return o.values.empty() ? cuda::Fp8Operand{} : cuda::Fp8Operand{o.values.data<e4m3>(), o.scales.data<float>()};
    };
    with_type(x.dtype, [&]<class X>(type_tag<X>) {
      if constexpr (std::is_same_v<X, double>) refuse_fp64();
      else cuda::quantise(pointers(a), pointers(b), x.data<X>(), R, C, by, stream.cuda());
    });
#else
    (void)a, (void)b, (void)stream;  // planned only
#endif
  });
  return q;
}

// The first operand of a product, op(A) (M, K), where A is stored as `as` says, and the second, op(B) (K, N).
inline Operand first_operand(const Quantised& a, Transpose as) {
  Operand o = as == Transpose::no ? a.rows : a.columns;
  o.as = o.scales.empty() ? as : Transpose::no;
  return o;
}
inline Operand second_operand(const Quantised& b, Transpose as) {
  Operand o = as == Transpose::yes ? b.rows : b.columns;
  o.as = o.scales.empty() ? as : Transpose::yes;
  return o;
}
inline Operand first_operand(Tensor a, Transpose as, ScaledBy by, Operands read, Stream& stream) {
  if (read == Operands::as_stored) return {a, as};
  return first_operand(quantise(a, as == Transpose::no ? SumAlong::rows : SumAlong::columns, by, stream), as);
}
inline Operand second_operand(Tensor b, Transpose as, ScaledBy by, Operands read, Stream& stream) {
  if (read == Operands::as_stored) return {b, as};
  return second_operand(quantise(b, as == Transpose::yes ? SumAlong::rows : SumAlong::columns, by, stream), as);
}

}  // namespace llmc::detail
