// ops_quantise.h: operands of products in fp8. Conventions: ops.h.
//
// A block of numbers is divided by a power of two, so that the largest of them is within the range of E4M3 or E5M2, and
// each is rounded (core/fp8.h). Blocks are fixed parts of an operand, so that numbers do not depend on the micro-batch:
//
//               activations, gradients       weights                 gradients are
//   fp8-block   128 along the sum            128 x 128               E4M3            DeepSeek-AI 2024
//   fp8         128 along the sum            128 x 128               E5M2            Micikevicius et al. 2022
//   mxfp8        32 along the sum             32 along the sum       E4M3            Open Compute Project 2023; scales
//                                                                                    rounded up: Mishra et al. 2025
//   fp8-tensor   the operand, all of it       the matrix             E5M2            Micikevicius et al. 2022, with the
//                                                                                    largest number of now
//
// With fp8-tensor numbers do depend on the micro-batch; it is there to compare with the others.
// Weights in squares are the same numbers along rows and along columns. On Hopper tensor cores multiply fp8-block; in
// all other cases the numbers keep the dtype of the operand, in which they are exact, and are multiplied in it.
#pragma once
#include "core/fp8.h"
#include "core/precision.h"
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

// What an operand is.
enum class Role : uint8_t { activations, weights, gradients };

struct Fp8Recipe {
  int64_t block = fp8_block;  // ScaleBlock::all: an operand is one
  bool weights_in_squares = true;
  Fp8Format gradients = Fp8Format::e4m3;

  // Has an operand the same numbers for sums along its rows as along its columns?
  bool alike(Role role) const { return block == ScaleBlock::all || (role == Role::weights && weights_in_squares); }
  // Blocks of an operand along whose rows, or columns, a product sums.
  ScaleBlock blocks_of(Role role, SumAlong sum) const {
    if (block == ScaleBlock::all) return ScaleBlock::whole();
    if (role == Role::weights && weights_in_squares) return {block, block};
    return sum == SumAlong::rows ? ScaleBlock{1, block} : ScaleBlock{block, 1};
  }
  Fp8Format format_of(Role role) const { return role == Role::gradients ? gradients : Fp8Format::e4m3; }
};
constexpr Fp8Recipe recipe_of(Operands read) {
  return read == Operands::mxfp8        ? Fp8Recipe{32, false}
         : read == Operands::fp8        ? Fp8Recipe{fp8_block, true, Fp8Format::e5m2}
         : read == Operands::fp8_tensor ? Fp8Recipe{ScaleBlock::all, true, Fp8Format::e5m2}
                                        : Fp8Recipe{};
}
// Do tensor cores multiply the numbers in fp8?
inline bool multiplies_fp8(Operands read, const Device& device) {
  return read == Operands::fp8_block && device.computes_as() == DeviceKind::cuda;
}

// out = x (R, C) or (G, R, C), each matrix rounded to fp8 in blocks. rows: on the device, how many there are of (R, C);
// or an empty tensor: all
inline void round_to_fp8(Tensor out, Tensor x, ScaleBlock block, Fp8Format format, Stream& stream, Tensor rows = {}) {
  const int64_t C = x.shape[x.shape.rank() - 1], R = x.shape[x.shape.rank() - 2], G = x.numel() / (R * C);
  const int32_t* const count = data_or_null<int32_t>(rows);
  const Tensor checked = rows.empty() ? out : Tensor{};
  if (!block.is_whole())
    return RUN_OP(round_to_fp8, x.dtype, bytes_of({out, x}), (checked), out.data<X>(), x.data<X>(), G, R, C, block,
                  format, count);
  auto scope = stream.scratch().scope();
  const Tensor maxima = scratch(stream, "largest numbers", DType::fp32, G, ON_GPU(G * cuda::whole_parts));
  RUN_OP(round_whole_to_fp8, x.dtype, bytes_of({out, x, x}), (checked), out.data<X>(), maxima.data<float>(),
         x.data<X>(), G, R, C, format, count);
}

// Memory for x (R, C), or (G, R, C) in fp8: numbers in x's dtype and order; or for tensor cores E4M3 and scales, (R, C)
// for sums along rows and (C, R) for those along columns.
inline Quantised room_in_fp8(const Tensor& x, Role role, SumAlong sum, Operands read, const Device& device,
                             Arena& arena, const char* label) {
  const bool along_rows = sum != SumAlong::columns, along_columns = sum != SumAlong::rows;
  Quantised q;
  if (!multiplies_fp8(read, device) || x.shape.rank() > 2) {
    const bool alike = recipe_of(read).alike(role);
    const auto room = [&] { return Operand{arena.alloc(label, "fp8 operand", x.dtype, x.shape)}; };
    if (along_rows || alike) q.rows = room();
    if (along_columns) q.columns = alike ? q.rows : room();
    return q;
  }
  const int64_t R = x.shape[0], C = x.shape[1];
  CHECK(R % 16 == 0 && C % 16 == 0, "{} {}: a matrix in fp8 has multiples of 16 rows and columns on a GPU", x.name,
        to_string(x.shape));
  const ScaledBy by = role == Role::weights ? ScaledBy::tiles : ScaledBy::segments;
  const auto room = [&](int64_t M, int64_t K) {
    const Tensor values = arena.alloc(label, "fp8 operand", DType::e4m3, {M, K}),
                 scales = arena.alloc(label, "scales of an fp8 operand", DType::fp32, scales_of(by, M, K));
    return Operand{values, Transpose::no, scales, by};
  };
  if (along_rows) q.rows = room(R, C);
  if (along_columns) q.columns = room(C, R);
  return q;
}

#ifdef TRAIN_GPT_CUDA
inline cuda::Fp8Operand pointers_of(const Operand& o) {
  return o.values.empty() ? cuda::Fp8Operand{} : cuda::Fp8Operand{o.values.data<e4m3>(), o.scales.data<float>()};
}
#endif

// q = x in fp8. rows: as of round_to_fp8()
inline void quantise(const Quantised& q, Tensor x, Role role, Operands read, Stream& stream, Tensor rows = {}) {
  const Operand a = q.rows, b = q.columns;
  if (a.scales.empty() && b.scales.empty()) {
    const Fp8Recipe recipe = recipe_of(read);
    const auto round = [&](const Operand& to, SumAlong sum) {
      if (!to.values.empty())
        round_to_fp8(to.values, x, recipe.blocks_of(role, sum), recipe.format_of(role), stream, rows);
    };
    round(a, SumAlong::rows);
    if (b.values.bytes != a.values.bytes) round(b, SumAlong::columns);
    return;
  }
  const double bytes = bytes_of({x, a.values, a.scales, b.values, b.scales});
  RUN_OP_ON_GPU(quantise, x.dtype, bytes, pointers_of(a), pointers_of(b), x.data<X>(), x.shape[0], x.shape[1],
                a.scales.empty() ? b.scaled : a.scaled);
}
// The same in scratch memory that the caller has opened.
inline Quantised quantise(Tensor x, Role role, SumAlong sum, Operands read, Stream& stream, Tensor rows = {}) {
  const Quantised q = room_in_fp8(x, role, sum, read, stream.device(), stream.scratch(), "scratch");
  quantise(q, x, role, read, stream, rows);
  return q;
}

// Parts of matrices (G, R, C) in tiles that each have a scale, of weights in squares: for a rank that has a shard of
// them. maxima (tiles) fp32 = the largest size of numbers in `part` of each tile; 0 where it has none; infinity where
// one is not finite.   x (part.n)
inline void tile_maxima(Tensor maxima, Tensor x, const TiledPart& part, Stream& stream) {
  CHECK_TENSOR(maxima, DType::fp32, part.tiles());
  CHECK_TENSOR(x, x.dtype, part.n);
  RUN_OP(tile_maxima, x.dtype, bytes_of({maxima, x}), (maxima), maxima.data<float>(), x.data<X>(), part);
}
// scales (tiles) of E4M3, from the maxima of all ranks.   maxima (ranks, tiles)
inline void scales_of_ranks(Tensor scales, Tensor maxima, Stream& stream) {
  const int64_t n = scales.numel(), ranks = maxima.shape[0];
  CHECK_TENSOR(scales, DType::fp32, n);
  CHECK_TENSOR(maxima, DType::fp32, ranks, n);
  RUN_UNTYPED_OP(scales_of_ranks, bytes_of({maxima, scales}), (scales), scales.data<float>(), maxima.data<float>(),
                 ranks, n);
}
// out (part.n) E4M3 = x (part.n) divided by the scales, and back.
inline void tiles_to_fp8(Tensor out, Tensor x, Tensor scales, const TiledPart& part, Stream& stream) {
  CHECK_TENSOR(out, DType::e4m3, part.n);
  CHECK_TENSOR(x, x.dtype, part.n);
  CHECK_TENSOR(scales, DType::fp32, part.tiles());
  RUN_OP(tiles_to_fp8, x.dtype, bytes_of({out, x}), (), out.data<e4m3>(), x.data<X>(), scales.data<float>(), part);
}
inline void tiles_from_fp8(Tensor out, Tensor x, Tensor scales, const TiledPart& part, Stream& stream) {
  CHECK_TENSOR(out, out.dtype, part.n);
  CHECK_TENSOR(x, DType::e4m3, part.n);
  CHECK_TENSOR(scales, DType::fp32, part.tiles());
  RUN_OP(tiles_from_fp8, out.dtype, bytes_of({out, x}), (out), out.data<X>(), x.data<e4m3>(), scales.data<float>(),
         part);
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

}  // namespace llmc::detail

namespace llmc {

// How a linear layer reads its operands, and its weights as it reads them, if they are kept. kept_input: where the
// forward leaves its input for the gradient of the weights; or nothing
struct Reading {
  Operands operands = Operands::as_stored;
  detail::Quantised weight = {};
  detail::Operand kept_input = {};
  Reading(Operands o = Operands::as_stored) : operands(o) {}  // NOLINT: implicit
  Reading(Operands o, const detail::Quantised& kept) : operands(o), weight(kept) {}
};

}  // namespace llmc

namespace llmc::detail {

inline Operand first_operand(Tensor a, Transpose as, Role role, const Reading& read, Stream& stream) {
  if (read.operands == Operands::as_stored) return {a, as};
  if (role == Role::activations && !read.kept_input.values.empty()) {
    Quantised q = room_in_fp8(a, role, SumAlong::rows, read.operands, stream.device(), stream.scratch(), "scratch");
    q.columns = read.kept_input;
    quantise(q, a, role, read.operands, stream);
    return first_operand(q, as);
  }
  const SumAlong sum = as == Transpose::no ? SumAlong::rows : SumAlong::columns;
  return first_operand(quantise(a, role, sum, read.operands, stream), as);
}
inline Operand second_operand(Tensor b, Transpose as, Role role, const Reading& read, Stream& stream) {
  if (read.operands == Operands::as_stored) return {b, as};
  if (role == Role::weights && !read.weight.rows.values.empty()) return second_operand(read.weight, as);
  if (role == Role::activations && !read.kept_input.values.empty()) return second_operand({{}, read.kept_input}, as);
  const SumAlong sum = as == Transpose::yes ? SumAlong::rows : SumAlong::columns;
  return second_operand(quantise(b, role, sum, read.operands, stream), as);
}

}  // namespace llmc::detail
