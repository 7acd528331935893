// ops.h: every op: its contract, its checks, and the dispatch on the stream's device. The CPU source of op X is
// ops/cpu/X.h. Arguments in one order: outputs, inputs, sizes, stream. Work is enqueued on the stream; an op returns at
// once. On the null device only the cost is booked and scratch memory counted.
//
// Sizes: N rows (batch times sequence), B batch, T sequence, C channels, V vocabulary, H heads, D head size.
// dtype: activations and weights of one call share a dtype (fp32, bf16; fp64 for finite differences). Statistics,
// softmax, losses and weight gradients are in its accumulator type: fp32, or fp64 for fp64.
#pragma once
#include <functional>
#include <limits>
#include <optional>
#include <string_view>

#include "device/arena.h"
#include "device/device.h"
#include "device/tensor.h"
#include "ops/cpu/adamw.h"
#include "ops/cpu/attention.h"
#include "ops/cpu/cross_entropy.h"
#include "ops/cpu/elementwise.h"
#include "ops/cpu/embedding.h"
#include "ops/cpu/layernorm.h"
#include "ops/cpu/matmul.h"

namespace llmc {

using cpu::Accumulate;
using cpu::AttentionShape;
using cpu::Gradient;
using AdamWOptions = cpu::AdamW;

inline DType accumulator_of(DType dtype) { return dtype == DType::fp64 ? DType::fp64 : DType::fp32; }

namespace detail {

inline void check_tensor(const char* op, const char* argument, const Tensor& t, DType dtype, const Shape& shape) {
  CHECK(t.dtype == dtype && t.shape == shape, "{}: {} ({}) is {} {}, expected {} {}", op, argument, t.name, t.dtype,
        to_string(t.shape), dtype, to_string(shape));
}
#define CHECK_TENSOR(tensor, dtype, ...) \
  ::llmc::detail::check_tensor(__func__, #tensor, tensor, dtype, Shape{__VA_ARGS__})

inline double bytes_of(std::initializer_list<Tensor> tensors) {
  double bytes = 0;
  for (const Tensor& t : tensors) bytes += static_cast<double>(t.size_bytes());
  return bytes;
}

}  // namespace detail

// out = 0
inline void zero(Tensor out, Stream& stream) {
  stream.run({"zero", 0, detail::bytes_of({out})}, {out}, [=] { cpu::zero(out.bytes, out.size_bytes()); });
}

// out = x, same dtype and shape
inline void copy(Tensor out, Tensor x, Stream& stream) {
  detail::check_tensor("copy", "x", x, out.dtype, out.shape);
  stream.run({"copy", 0, detail::bytes_of({out, x})}, {out},
             [=] { std::memcpy(out.bytes, x.bytes, static_cast<size_t>(x.size_bytes())); });
}

// out = x in the dtype of out, rounded to nearest even
inline void convert(Tensor out, Tensor x, Stream& stream) {
  CHECK(out.shape == x.shape, "convert: {} against {}", to_string(out.shape), to_string(x.shape));
  stream.run({"convert", 0, detail::bytes_of({out, x})}, {out}, [=] {
    with_type(out.dtype, [&](auto to) {
      with_type(x.dtype, [&](auto from) {
        cpu::convert(out.data<typename decltype(to)::type>(), x.data<typename decltype(from)::type>(), x.numel());
      });
    });
  });
}

// out = constant
inline void fill(Tensor out, float value, Stream& stream) {
  stream.run({"fill", 0, detail::bytes_of({out})}, {out}, [=] {
    with_type(out.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      std::fill_n(out.data<T>(), out.numel(), T(value));
    });
  });
}

// out = NaN, bit by bit: what is not to be read any longer shows where it is.
inline void poison(Tensor out, Stream& stream) {
  stream.run({"poison", 0, detail::bytes_of({out})}, {},
             [=] { std::fill_n(out.bytes, static_cast<size_t>(out.size_bytes()), std::byte{0xff}); });
}

// out += x   (n)
inline void add_to(Tensor out, Tensor x, Stream& stream) {
  detail::check_tensor("add_to", "x", x, out.dtype, out.shape);
  stream.run({"add_to", 0, detail::bytes_of({out, out, x})}, {out}, [=] {
    with_type(out.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      cpu::residual_forward(out.data<T>(), out.data<T>(), x.data<T>(), out.numel());
    });
  });
}

// out *= factor
inline void scale(Tensor out, float factor, Stream& stream) {
  stream.run({"scale", 0, 2 * detail::bytes_of({out})}, {out}, [=] {
    with_type(out.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (int64_t i = 0; i < out.numel(); ++i)
        out.data<T>()[i] = T(static_cast<accumulator_t<T>>(out.data<T>()[i]) * accumulator_t<T>(factor));
    });
  });
}

// out = normal numbers keyed by (seed, name, global index), rounded to its dtype; it holds the elements from `begin` on
// (contract 7).
inline void init_normal(Tensor out, float stddev, int64_t begin, uint64_t seed, std::string_view name, Stream& stream) {
  const Philox rng(seed, name);
  stream.run({"init_normal", 0, detail::bytes_of({out})}, {out}, [=] {
    with_type(out.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      cpu::init_normal(out.data<T>(), begin, out.numel(), stddev, rng);
    });
  });
}

// out (N, C) = wte[tokens] + wpe[positions].   tokens, positions (N) int32; wte (V, C); wpe (P, C)
inline void embedding_forward(Tensor out, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe, Stream& stream) {
  const int64_t N = out.shape[0], C = out.shape[1];
  CHECK_TENSOR(tokens, DType::int32, N);
  CHECK_TENSOR(positions, DType::int32, N);
  CHECK_TENSOR(wte, out.dtype, wte.shape[0], C);
  CHECK_TENSOR(wpe, out.dtype, wpe.shape[0], C);
  stream.run({"embedding_forward", 0, 3 * detail::bytes_of({out})}, {out}, [=] {
    with_type(out.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      cpu::embedding_forward(out.data<X>(), tokens.data<int32_t>(), positions.data<int32_t>(), wte.data<X>(),
                             wpe.data<X>(), N, C);
    });
  });
}

// dwte[tokens] += dout, dwpe[positions] += dout, in the order of the rows.
inline void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions, Stream& stream) {
  const int64_t N = dout.shape[0], C = dout.shape[1];
  const DType grad = accumulator_of(dout.dtype);
  CHECK_TENSOR(tokens, DType::int32, N);
  CHECK_TENSOR(positions, DType::int32, N);
  CHECK_TENSOR(dwte, grad, dwte.shape[0], C);
  CHECK_TENSOR(dwpe, grad, dwpe.shape[0], C);
  stream.run({"embedding_backward", 0, 5 * detail::bytes_of({dout})}, {dwte, dwpe}, [=] {
    with_type(dout.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      using A = accumulator_t<X>;
      cpu::embedding_backward(dwte.data<A>(), dwpe.data<A>(), dout.data<X>(), tokens.data<int32_t>(),
                              positions.data<int32_t>(), N, C);
    });
  });
}

// out = (x - mean) rstd weight + bias over the last axis.   x, out (N, C); mean, rstd (N); weight, bias (C)
inline void layernorm_forward(Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor weight, Tensor bias, float eps,
                              Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1];
  const DType stat = accumulator_of(x.dtype);
  CHECK_TENSOR(out, x.dtype, N, C);
  CHECK_TENSOR(mean, stat, N);
  CHECK_TENSOR(rstd, stat, N);
  CHECK_TENSOR(weight, x.dtype, C);
  CHECK_TENSOR(bias, x.dtype, C);
  stream.run({"layernorm_forward", 0, detail::bytes_of({out, x})}, {out, mean, rstd}, [=] {
    with_type(x.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      using A = accumulator_t<X>;
      cpu::layernorm_forward(out.data<X>(), mean.data<A>(), rstd.data<A>(), x.data<X>(), weight.data<X>(),
                             bias.data<X>(), eps, N, C);
    });
  });
}

// dx = or += (as asked), dweight += , dbias +=.
inline void layernorm_backward(Tensor dx, Tensor dweight, Tensor dbias, Tensor dout, Tensor x, Tensor weight,
                               Tensor mean, Tensor rstd, Accumulate accumulate_dx, Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1];
  const DType stat = accumulator_of(x.dtype);
  CHECK_TENSOR(dx, x.dtype, N, C);
  CHECK_TENSOR(dout, x.dtype, N, C);
  CHECK_TENSOR(dweight, stat, C);
  CHECK_TENSOR(dbias, stat, C);
  CHECK_TENSOR(weight, x.dtype, C);
  CHECK_TENSOR(mean, stat, N);
  CHECK_TENSOR(rstd, stat, N);
  auto scope = stream.scratch().scope();
  const Tensor partials =
      stream.scratch().alloc("scratch", "layernorm partial sums", stat, {cpu::row_partitions, 2 * C});
  stream.run({"layernorm_backward", 0, detail::bytes_of({dx, dout, x})}, {dx, dweight, dbias}, [=] {
    with_type(x.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      using A = accumulator_t<X>;
      cpu::layernorm_backward(dx.data<X>(), dweight.data<A>(), dbias.data<A>(), partials.data<A>(), dout.data<X>(),
                              x.data<X>(), weight.data<X>(), mean.data<A>(), rstd.data<A>(), N, C, accumulate_dx);
    });
  });
}

namespace detail {

inline void matmul(const char* name, Tensor c, Tensor a, Tensor b, Tensor bias, const cpu::MatmulShape& shape,
                   Stream& stream) {
  const cpu::Matmul product = cpu::Matmul::prepare(shape);
  auto scope = stream.scratch().scope();
  Tensor scratch;
  if (product.scratch_bytes() > 0)
    scratch = stream.scratch().alloc("scratch", "matmul", DType::int32, {ceil_div(product.scratch_bytes(), 4)});
  const double flops = 2.0 * static_cast<double>(shape.M) * static_cast<double>(shape.N) * static_cast<double>(shape.K);
  stream.run({name, flops, bytes_of({a, b, c})}, {c},
             [=] { product.run(c.bytes, a.bytes, b.bytes, bias.bytes, scratch.bytes); });
}

}  // namespace detail

// out = x weight^T + bias.   out (N, O); x (N, I); weight (O, I); bias (O), or an empty tensor
inline void linear_forward(Tensor out, Tensor x, Tensor weight, Tensor bias, Stream& stream) {
  const int64_t N = x.shape[0], I = x.shape[1], O = weight.shape[0];
  CHECK_TENSOR(out, x.dtype, N, O);
  CHECK_TENSOR(weight, x.dtype, O, I);
  if (!bias.empty()) CHECK_TENSOR(bias, x.dtype, O);
  detail::matmul("linear_forward", out, x, weight, bias,
                 {.M = N,
                  .N = O,
                  .K = I,
                  .a = cpu::Transpose::no,
                  .b = cpu::Transpose::yes,
                  .accumulate = Accumulate::no,
                  .in = x.dtype,
                  .out = x.dtype,
                  .bias = bias.empty() ? cpu::Bias::no : cpu::Bias::yes,
                  .threads = stream.device().threads},
                 stream);
}

// dx = dout weight.
inline void linear_backward_input(Tensor dx, Tensor dout, Tensor weight, Stream& stream) {
  const int64_t N = dout.shape[0], I = weight.shape[1], O = weight.shape[0];
  CHECK_TENSOR(dx, dout.dtype, N, I);
  CHECK_TENSOR(dout, weight.dtype, N, O);
  detail::matmul("linear_backward_input", dx, dout, weight, {},
                 {.M = N,
                  .N = I,
                  .K = O,
                  .a = cpu::Transpose::no,
                  .b = cpu::Transpose::no,
                  .accumulate = Accumulate::no,
                  .in = dout.dtype,
                  .out = dout.dtype,
                  .bias = cpu::Bias::no,
                  .threads = stream.device().threads},
                 stream);
}

// dweight += dout^T x, dbias += column sums of dout (dbias may be empty).
inline void linear_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor x, Stream& stream) {
  const int64_t N = x.shape[0], I = x.shape[1], O = dout.shape[1];
  const DType grad = accumulator_of(x.dtype);
  CHECK_TENSOR(dout, x.dtype, N, O);
  CHECK_TENSOR(dweight, grad, O, I);
  detail::matmul("linear_backward_weight", dweight, dout, x, {},
                 {.M = O,
                  .N = I,
                  .K = N,
                  .a = cpu::Transpose::yes,
                  .b = cpu::Transpose::no,
                  .accumulate = Accumulate::yes,
                  .in = x.dtype,
                  .out = grad,
                  .bias = cpu::Bias::no,
                  .threads = stream.device().threads},
                 stream);
  if (dbias.empty()) return;
  CHECK_TENSOR(dbias, grad, O);
  auto scope = stream.scratch().scope();
  const Tensor partials = stream.scratch().alloc("scratch", "bias partial sums", grad, {cpu::row_partitions, O});
  stream.run({"linear_backward_bias", 0, detail::bytes_of({dout})}, {dbias}, [=] {
    with_type(dout.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      using A = accumulator_t<X>;
      cpu::column_sum(dbias.data<A>(), partials.data<A>(), dout.data<X>(), N, O);
    });
  });
}

// GELU, tanh form, elementwise; dx may be dout.
inline void gelu_forward(Tensor out, Tensor x, Stream& stream) {
  detail::check_tensor("gelu_forward", "out", out, x.dtype, x.shape);
  stream.run({"gelu_forward", 0, detail::bytes_of({out, x})}, {out}, [=] {
    with_type(x.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      cpu::gelu_forward(out.data<X>(), x.data<X>(), x.numel());
    });
  });
}
inline void gelu_backward(Tensor dx, Tensor dout, Tensor x, Stream& stream) {
  detail::check_tensor("gelu_backward", "dx", dx, x.dtype, x.shape);
  detail::check_tensor("gelu_backward", "dout", dout, x.dtype, x.shape);
  stream.run({"gelu_backward", 0, detail::bytes_of({dx, dout, x})}, {dx}, [=] {
    with_type(x.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      cpu::gelu_backward(dx.data<X>(), dout.data<X>(), x.data<X>(), x.numel());
    });
  });
}

// out = a + b
inline void residual_forward(Tensor out, Tensor a, Tensor b, Stream& stream) {
  detail::check_tensor("residual_forward", "a", a, out.dtype, out.shape);
  detail::check_tensor("residual_forward", "b", b, out.dtype, out.shape);
  stream.run({"residual_forward", 0, detail::bytes_of({out, a, b})}, {out}, [=] {
    with_type(out.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      cpu::residual_forward(out.data<X>(), a.data<X>(), b.data<X>(), out.numel());
    });
  });
}

namespace detail {

inline void check_attention(const char* op, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                            const AttentionShape& s) {
  CHECK(s.Hkv > 0 && s.Hq % s.Hkv == 0, "{}: {} query heads do not share {} key-value heads evenly", op, s.Hq, s.Hkv);
  check_tensor(op, "qkv", qkv, qkv.dtype, {s.B * s.T, (s.Hq + 2 * s.Hkv) * s.D});
  check_tensor(op, "out", out, qkv.dtype, {s.B * s.T, s.Hq * s.D});
  check_tensor(op, "lse", lse, accumulator_of(qkv.dtype), {s.B, s.Hq, s.T});
}
// Causal attention: two products of 2 T T D / 2 flops a head.
inline double attention_flops(const AttentionShape& s) {
  return 2.0 * static_cast<double>(s.B * s.Hq) * static_cast<double>(s.T) * static_cast<double>(s.T + 1) *
         static_cast<double>(s.D);
}

}  // namespace detail

// Causal softmax(q k^T / sqrt(D)) v by heads; query head h reads key-value head h / (Hq / Hkv).
// out (B T, Hq D); lse (B, Hq, T): log of the sum of exponentials, for the backward; qkv (B T, (Hq + 2 Hkv) D)
inline void attention_forward(Tensor out, Tensor lse, Tensor qkv, const AttentionShape& shape, Stream& stream) {
  detail::check_attention("attention_forward", out, lse, qkv, shape);
  const int threads = stream.device().threads;
  auto scope = stream.scratch().scope();
  const Tensor scratch =
      stream.scratch().alloc("scratch", "attention", lse.dtype, {cpu::attention_forward_scratch(shape, threads)});
  stream.run({"attention_forward", detail::attention_flops(shape), detail::bytes_of({out, qkv})}, {out, lse}, [=] {
    with_type(qkv.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      using A = accumulator_t<X>;
      cpu::attention_forward(out.data<X>(), lse.data<A>(), qkv.data<X>(), scratch.data<A>(), shape, threads);
    });
  });
}

// dqkv = (all of it is written)
inline void attention_backward(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, Tensor lse,
                               const AttentionShape& shape, Stream& stream) {
  detail::check_attention("attention_backward", out, lse, qkv, shape);
  detail::check_tensor("attention_backward", "dqkv", dqkv, qkv.dtype, qkv.shape);
  detail::check_tensor("attention_backward", "dout", dout, out.dtype, out.shape);
  const int threads = stream.device().threads;
  auto scope = stream.scratch().scope();
  const Tensor scratch =
      stream.scratch().alloc("scratch", "attention", lse.dtype, {cpu::attention_backward_scratch(shape, threads)});
  stream.run({"attention_backward", 2.5 * detail::attention_flops(shape), detail::bytes_of({dqkv, dout, out, qkv})},
             {dqkv}, [=] {
               with_type(qkv.dtype, [&](auto tag) {
                 using X = typename decltype(tag)::type;
                 using A = accumulator_t<X>;
                 cpu::attention_backward(dqkv.data<X>(), dout.data<X>(), out.data<X>(), qkv.data<X>(), lse.data<A>(),
                                         scratch.data<A>(), shape, threads);
               });
             });
}

// losses (N) = -log softmax(logits)[target] over the first V of the V_padded columns, in the accumulator dtype. With
// Gradient::yes, logits become d(scale * sum of losses) / d logits, zero in the padding. A target of -1 does not count:
// its loss and its gradients are zero.   targets (N) int32
inline void cross_entropy(Tensor losses, Tensor logits, Tensor targets, int64_t V, double scale, Gradient gradient,
                          Stream& stream) {
  const int64_t N = logits.shape[0], V_padded = logits.shape[1];
  CHECK_TENSOR(losses, accumulator_of(logits.dtype), N);
  CHECK_TENSOR(targets, DType::int32, N);
  CHECK(V <= V_padded, "cross_entropy: vocabulary {} exceeds the {} columns of the logits", V, V_padded);
  stream.run({"cross_entropy", 0, 2 * detail::bytes_of({logits})}, {losses, logits}, [=] {
    with_type(logits.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      using A = accumulator_t<X>;
      cpu::cross_entropy(losses.data<A>(), logits.data<X>(), targets.data<int32_t>(), N, V, V_padded, A(scale),
                         gradient);
    });
  });
}

// sum (1) fp64 += all of losses (N), in order
inline void add_losses(Tensor sum, Tensor losses, Stream& stream) {
  CHECK_TENSOR(sum, DType::fp64, 1);
  stream.run({"add_losses", 0, detail::bytes_of({losses})}, {sum}, [=] {
    with_type(losses.dtype, [&](auto tag) {
      using A = typename decltype(tag)::type;
      for (int64_t n = 0; n < losses.numel(); ++n) *sum.data<double>() += static_cast<double>(losses.data<A>()[n]);
    });
  });
}

// out (1) fp64 = sum of squares of x (n), added in a fixed order (contract 10)
inline void square_sum(Tensor out, Tensor x, Stream& stream) {
  CHECK_TENSOR(out, DType::fp64, 1);
  auto scope = stream.scratch().scope();
  const Tensor partials =
      stream.scratch().alloc("scratch", "square sum", DType::fp64, {ceil_div(x.numel(), cpu::square_sum_block)});
  stream.run({"square_sum", 0, detail::bytes_of({x})}, {out}, [=] {
    with_type(x.dtype, [&](auto tag) {
      using G = typename decltype(tag)::type;
      cpu::square_sum(out.data<double>(), partials.data<double>(), x.data<G>(), x.numel());
    });
  });
}

// The scalars of all ranks become one: loss (1) fp64 = the sum over the ranks; square_sums (units shards) fp64, unit by
// unit and within a unit shard by shard (contract 10). gathered (ranks, 1 + units): each rank's loss, then the sums of
// its shards; the first `shards` ranks have one shard each, further ones are replicas.
inline void combine_scalars(Tensor loss, Tensor square_sums, Tensor gathered, int64_t shards, Stream& stream) {
  const int64_t ranks = gathered.shape[0], units = gathered.shape[1] - 1;
  CHECK_TENSOR(loss, DType::fp64, 1);
  CHECK_TENSOR(square_sums, DType::fp64, units * shards);
  stream.run({"combine_scalars", 0, detail::bytes_of({gathered})}, {}, [=] {
    const double* all = gathered.data<double>();
    double total = 0;
    for (int64_t r = 0; r < ranks; ++r) total += all[r * (1 + units)];
    *loss.data<double>() = total;
    for (int64_t u = 0; u < units; ++u)
      for (int64_t s = 0; s < shards; ++s) square_sums.data<double>()[u * shards + s] = all[s * (1 + units) + 1 + u];
  });
}

// What the update reads, on the device, so that the host need not wait: control (3) fp64 = {gradient norm, factor on
// the gradients, 1 if the update may happen}. The factor clips to max_norm (0: never) as torch's clip_grad_norm_ does;
// a loss or norm that is not finite, or beyond its largest value, forbids the update.   square_sums fp64, added in
// order; loss (1) fp64
struct UpdateRule {
  double max_norm = 0;
  double largest_loss = std::numeric_limits<double>::infinity(), largest_norm = largest_loss;
};
inline void clip_control(Tensor control, Tensor square_sums, Tensor loss, const UpdateRule& rule, Stream& stream) {
  CHECK_TENSOR(control, DType::fp64, 3);
  CHECK_TENSOR(loss, DType::fp64, 1);
  stream.run({"clip_control", 0, detail::bytes_of({square_sums})}, {}, [=] {
    double total = 0;
    for (int64_t i = 0; i < square_sums.numel(); ++i) total += square_sums.data<double>()[i];
    const double norm = std::sqrt(total);
    double* c = control.data<double>();
    c[0] = norm;
    c[1] = rule.max_norm > 0 ? std::min(1.0, rule.max_norm / (norm + 1e-6)) : 1.0;
    const double l = loss.data<double>()[0];
    c[2] = std::isfinite(norm) && std::isfinite(l) && l <= rule.largest_loss && norm <= rule.largest_norm ? 1.0 : 0.0;
  });
}

// AdamW on one segment: weight, master, moment1, moment2 change in place; gradient is read. master is fp32 when weight
// is bf16, else empty (the weight is its own master copy). Nothing changes where control forbids the update.
inline void adamw_update(Tensor weight, Tensor master, Tensor moment1, Tensor moment2, Tensor gradient, Tensor control,
                         const AdamWOptions& options, Stream& stream) {
  const DType state = accumulator_of(weight.dtype);
  const int64_t n = weight.numel();
  CHECK(master.empty() == (weight.dtype == state), "adamw_update: weights in {} {} a master copy", weight.dtype,
        master.empty() ? "need" : "are their own and need not");
  CHECK_TENSOR(moment1, state, n);
  CHECK_TENSOR(moment2, state, n);
  CHECK_TENSOR(gradient, state, n);
  CHECK_TENSOR(control, DType::fp64, 3);
  stream.run({"adamw_update", 0, 2 * detail::bytes_of({weight, moment1, moment2}) + detail::bytes_of({gradient})},
             {weight, master, moment1, moment2}, [=] {
               if (control.data<double>()[2] == 0) return;
               with_type(weight.dtype, [&](auto tag) {
                 using W = typename decltype(tag)::type;
                 using A = accumulator_t<W>;
                 cpu::adamw_update(weight.data<W>(), master.empty() ? nullptr : master.data<A>(), moment1.data<A>(),
                                   moment2.data<A>(), gradient.data<A>(), n, options, A(control.data<double>()[1]));
               });
             });
}

}  // namespace llmc
