// ops_layers.h: norms, linear layers, activations, sums. Conventions: ops.h.
#pragma once
#include "ops/ops_quantise.h"
#include "ops/row_sums.h"

namespace llmc {

// The matmul library of this device, and its version.
inline std::string matmul_library([[maybe_unused]] const Device& device) {
#ifdef TRAIN_GPT_CUDA
  if (device.computes_as() == DeviceKind::cuda) return formatted("cuBLASLt {}", cublasLtGetVersion());
#endif
  return formatted("our own, for {}", cpu::recorded_isa());
}

// out = (x - mean) rstd weight + bias over the last axis.   x, out (N, C); mean, rstd (N); weight, bias (C)
inline void layernorm_forward(Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor weight, Tensor bias, float eps,
                              Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1];
  CHECK_TENSOR(out, x.dtype, N, C);
  CHECK_TENSORS((mean, rstd), accumulator_of(x.dtype), N);
  CHECK_TENSORS((weight, bias), x.dtype, C);
  RUN_OP(layernorm_forward, x.dtype, detail::bytes_of({out, x}), (out, mean, rstd), out.data<X>(), mean.data<A>(),
         rstd.data<A>(), x.data<X>(), weight.data<X>(), bias.data<X>(), eps, N, C);
}

// sum (N, C) = a + b, and its layernorm, with the same bits as from the two ops. sum must not be a or b.
inline void residual_layernorm_forward(Tensor out, Tensor mean, Tensor rstd, Tensor sum, Tensor a, Tensor b,
                                       Tensor weight, Tensor bias, float eps, Stream& stream) {
  const int64_t N = a.shape[0], C = a.shape[1];
  CHECK_TENSORS((out, sum, b), a.dtype, N, C);
  CHECK_TENSORS((mean, rstd), accumulator_of(a.dtype), N);
  CHECK_TENSORS((weight, bias), a.dtype, C);
  RUN_OP(residual_layernorm_forward, a.dtype, detail::bytes_of({out, sum, a, b}), (sum, out, mean, rstd), out.data<X>(),
         mean.data<A>(), rstd.data<A>(), sum.data<X>(), a.data<X>(), b.data<X>(), weight.data<X>(), bias.data<X>(), eps,
         N, C);
}

// For the start of a run: throws Error if the backward of its norms has no room for rows of C channels on this GPU.
inline void check_norm_fits([[maybe_unused]] const Device& device, [[maybe_unused]] DType dtype,
                            [[maybe_unused]] Centred centred, [[maybe_unused]] int64_t C) {
#ifdef TRAIN_GPT_CUDA
  if (device.kind != DeviceKind::cuda) return;
  CUDA_CHECK(cudaSetDevice(device.gpu));
  with_type(dtype, [&]<class T>(type_tag<T>) {
    if constexpr (std::is_same_v<T, double>) detail::refuse_fp64();
    else if (centred == Centred::yes) cuda::check_norm_fits<Centred::yes, T>(C);
    else cuda::check_norm_fits<Centred::no, T>(C);
  });
#endif
}

namespace detail {

// dx is read too if it is added to.
inline double norm_backward_bytes(const Tensor& dx, const Tensor& dout, const Tensor& x, Accumulate accumulate_dx) {
  return bytes_of({dx, dout, x}) + (accumulate_dx == Accumulate::yes ? bytes_of({dx}) : 0);
}

}  // namespace detail

// dx = or += (as requested), dweight +=, dbias +=.
inline void layernorm_backward(Tensor dx, Tensor dweight, Tensor dbias, Tensor dout, Tensor x, Tensor weight,
                               Tensor mean, Tensor rstd, Accumulate accumulate_dx, Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1];
  const DType stat = accumulator_of(x.dtype);
  CHECK_TENSORS((dx, dout), x.dtype, N, C);
  CHECK_TENSORS((dweight, dbias), stat, C);
  CHECK_TENSOR(weight, x.dtype, C);
  CHECK_TENSORS((mean, rstd), stat, N);
  auto scope = stream.scratch().scope();
  const detail::PartsOfSums partials(stream, "layernorm partial sums", {dweight, dbias}, cpu::row_partitions * 2 * C,
                                     ON_GPU(cuda::layernorm_backward_scratch(N, C)));
  RUN_OP(layernorm_backward, x.dtype, detail::norm_backward_bytes(dx, dout, x, accumulate_dx), (dx, dweight, dbias),
         dx.data<X>(), dweight.data<A>(), dbias.data<A>(), partials.template room<A>(), dout.data<X>(), x.data<X>(),
         weight.data<X>(), mean.data<A>(), rstd.data<A>(), N, C, accumulate_dx);
}

// out = x rstd weight over the last axis, rstd = 1 / sqrt(mean of x^2 + eps).   x, out (N, C); rstd (N); weight (C)
inline void rmsnorm_forward(Tensor out, Tensor rstd, Tensor x, Tensor weight, float eps, Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1];
  CHECK_TENSOR(out, x.dtype, N, C);
  CHECK_TENSOR(rstd, accumulator_of(x.dtype), N);
  CHECK_TENSOR(weight, x.dtype, C);
  RUN_OP(rmsnorm_forward, x.dtype, detail::bytes_of({out, x}), (out, rstd), out.data<X>(), rstd.data<A>(), x.data<X>(),
         weight.data<X>(), eps, N, C);
}

// sum (N, C) = a + b, and its rmsnorm, with the same bits as from the two ops. sum must not be a or b.
inline void residual_rmsnorm_forward(Tensor out, Tensor rstd, Tensor sum, Tensor a, Tensor b, Tensor weight, float eps,
                                     Stream& stream) {
  const int64_t N = a.shape[0], C = a.shape[1];
  CHECK_TENSORS((out, sum, b), a.dtype, N, C);
  CHECK_TENSOR(rstd, accumulator_of(a.dtype), N);
  CHECK_TENSOR(weight, a.dtype, C);
  RUN_OP(residual_rmsnorm_forward, a.dtype, detail::bytes_of({out, sum, a, b}), (sum, out, rstd), out.data<X>(),
         rstd.data<A>(), sum.data<X>(), a.data<X>(), b.data<X>(), weight.data<X>(), eps, N, C);
}

// dx = or += (as requested), dweight +=.
inline void rmsnorm_backward(Tensor dx, Tensor dweight, Tensor dout, Tensor x, Tensor weight, Tensor rstd,
                             Accumulate accumulate_dx, Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1];
  const DType stat = accumulator_of(x.dtype);
  CHECK_TENSORS((dx, dout), x.dtype, N, C);
  CHECK_TENSOR(dweight, stat, C);
  CHECK_TENSOR(weight, x.dtype, C);
  CHECK_TENSOR(rstd, stat, N);
  auto scope = stream.scratch().scope();
  const detail::PartsOfSums partials(stream, "rmsnorm partial sums", {dweight}, cpu::row_partitions * C,
                                     ON_GPU(cuda::rmsnorm_backward_scratch(N, C)));
  RUN_OP(rmsnorm_backward, x.dtype, detail::norm_backward_bytes(dx, dout, x, accumulate_dx), (dx, dweight),
         dx.data<X>(), dweight.data<A>(), partials.template room<A>(), dout.data<X>(), x.data<X>(), weight.data<X>(),
         rstd.data<A>(), N, C, accumulate_dx);
}

// out = a + b
inline void residual_forward(Tensor out, Tensor a, Tensor b, Stream& stream) {
  CHECK_TENSORS((a, b), out.dtype, out.shape);
  RUN_OP(residual_forward, out.dtype, detail::bytes_of({out, a, b}), (out), out.data<X>(), a.data<X>(), b.data<X>(),
         out.numel());
}

namespace detail {

struct ProductEpilogue {
  Epilogue kind = Epilogue::none;  // others: on GPUs
  Tensor z = {};                   // (M, N)
};

// c (M, N) = or += op(a) op(b) + bias, summing K products per element.   bias (N), or an empty tensor. Or c (B, M, N),
// and a and b are B matrices, without a bias.
inline void matmul(const char* name, Tensor c, const Operand& first, const Operand& second, int64_t K, Tensor bias,
                   Accumulate accumulate, Stream& stream, const ProductEpilogue& epilogue = {}) {
  const int axis = c.shape.rank() - 2;
  const int64_t B = axis > 0 ? c.shape[0] : 1, M = c.shape[axis], N = c.shape[axis + 1];
  const Tensor a = first.values, b = second.values;
  const Transpose a_as = first.as, b_as = second.as;
  const Bias with_bias = bias.empty() ? Bias::no : Bias::yes;
  const double flops = 2.0 * static_cast<double>(c.numel()) * static_cast<double>(K);
  const bool has_z = epilogue.kind != Epilogue::none;
  const double bytes =
      bytes_of({a, b, c}) + (accumulate == Accumulate::yes ? bytes_of({c}) : 0) + (has_z ? bytes_of({epilogue.z}) : 0);
  const OpCost cost{.name = name, .flops = flops, .bytes = bytes, .product = {M, N, K, B, a.dtype == DType::e4m3}};
  auto scope = stream.scratch().scope();
  if (stream.device().computes_as() == DeviceKind::cuda) {
    const Tensor workspace = stream.scratch().alloc("scratch", "matmul", DType::int32, {gpu_matmul_workspace / 4});
    const Tensor also = epilogue.kind == Epilogue::gelu ? epilogue.z : Tensor{};
    return stream.run(cost, {c, also}, [=, &stream] {
#ifdef TRAIN_GPT_CUDA
      if (a.dtype == DType::fp64) refuse_fp64();
      const auto second_of_batch = [&](const Tensor& t) { return B > 1 ? t.bytes + t.size_bytes() / B : nullptr; };
      const int alignment = cuda::alignment_of({c.bytes, a.bytes, b.bytes, bias.bytes, second_of_batch(c),
                                                second_of_batch(a), second_of_batch(b), epilogue.z.bytes});
      stream.kept<cuda::MatmulPlans>().run(
          {M, N, K, a_as, b_as, accumulate, a.dtype, c.dtype, with_bias, stream.device().tf32, alignment, first.scaled,
           second.scaled, B, epilogue.kind},
          {c.bytes, a.bytes, b.bytes, bias.bytes, workspace.bytes, first.scales.bytes, second.scales.bytes,
           epilogue.z.bytes},
          stream.cuda());
#else
      (void)workspace, (void)stream;  // planned only
#endif
    });
  }
  const cpu::MatmulShape shape = {M,          N,       K,       a_as,      b_as,
                                  accumulate, a.dtype, c.dtype, with_bias, stream.device().threads};
  const DType sum = accumulator_of(a.dtype);
  CHECK(c.dtype == a.dtype || c.dtype == sum, "matmul cannot write {} from {} inputs: use {} or {}; {}", c.dtype,
        a.dtype, a.dtype, sum, cpu::to_string(shape));
  const Tensor scratch =
      stream.scratch().alloc("scratch", "matmul", DType::int32, {ceil_div(cpu::matmul_scratch(shape), int64_t{4})});
  run_op(stream, a.dtype, cost, {c}, [=]<class X, class A>(OpTypes<X, A>) {
    const X* bias_data = data_or_null<X>(bias);
    for (int64_t i = 0; i < B; ++i) {
      const X *const of_a = a.data<X>() + i * M * K, *const of_b = b.data<X>() + i * K * N;
      const int64_t at = i * M * N;
      if (c.dtype == a.dtype) cpu::products<X>().matmul(c.data<X>() + at, of_a, of_b, bias_data, scratch.bytes, shape);
      else cpu::products<X>().matmul_sum(c.data<A>() + at, of_a, of_b, bias_data, scratch.bytes, shape);
    }
  });
}

}  // namespace detail

// out = x weight^T + bias.   out (N, O); x (N, I), or kept in fp8 along its rows; weight (O, I); bias (O), or an empty
// tensor
inline void linear_forward(Tensor out, const detail::Operand& x, Tensor weight, Tensor bias, Stream& stream,
                           const Reading& read) {
  const int64_t N = x.values.shape[0], I = x.values.shape[1], O = weight.shape[0];
  CHECK_TENSOR(out, weight.dtype, N, O);
  CHECK_TENSOR(weight, weight.dtype, O, I);
  if (!bias.empty()) CHECK_TENSOR(bias, weight.dtype, O);
  auto scope = stream.scratch().scope();
  const detail::Operand b = detail::second_operand(weight, Transpose::yes, detail::Role::weights, read, stream);
  detail::matmul("linear_forward", out, x, b, I, bias, Accumulate::no, stream);
}
// The same from a tensor; what reads x in fp8 rounds it here.
inline void linear_forward(Tensor out, Tensor x, Tensor weight, Tensor bias, Stream& stream, const Reading& read = {}) {
  CHECK_TENSOR(weight, x.dtype, weight.shape[0], x.shape[1]);
  auto scope = stream.scratch().scope();
  linear_forward(out, detail::first_operand(x, Transpose::no, detail::Role::activations, read, stream), weight, bias,
                 stream, read);
}

namespace detail {

// out = x weight^T + bias, with an epilogue. On GPUs alone.
inline void linear_with(const char* name, Tensor out, Tensor x, Tensor weight, Tensor bias,
                        const ProductEpilogue& epilogue, Stream& stream) {
  const int64_t N = x.shape[0], I = x.shape[1], O = weight.shape[0];
  check_tensor(name, "out", out, x.dtype, {N, O});
  check_tensor(name, "z", epilogue.z, x.dtype, {N, O});
  check_tensor(name, "weight", weight, x.dtype, {O, I});
  if (!bias.empty()) check_tensor(name, "bias", bias, x.dtype, {O});
  matmul(name, out, {x, Transpose::no}, {weight, Transpose::yes}, I, bias, Accumulate::no, stream, epilogue);
}

}  // namespace detail

// out (N, O) = residual + x weight^T + bias. On a GPU by the product, which does not round its sums first.
inline void linear_residual_forward(Tensor out, Tensor residual, Tensor x, Tensor weight, Tensor bias, Stream& stream) {
  if (stream.device().computes_as() != DeviceKind::cuda) {
    linear_forward(out, x, weight, bias, stream);
    return residual_forward(out, residual, out, stream);
  }
  detail::linear_with("linear_residual_forward", out, x, weight, bias, {Epilogue::residual, residual}, stream);
}

// GELU, tanh form, elementwise; dx may be dout.
inline void gelu_forward(Tensor out, Tensor x, Stream& stream) {
  CHECK_TENSOR(out, x.dtype, x.shape);
  RUN_OP(gelu_forward, x.dtype, detail::bytes_of({out, x}), (out), out.data<X>(), x.data<X>(), x.numel());
}
inline void gelu_backward(Tensor dx, Tensor dout, Tensor x, Stream& stream) {
  CHECK_TENSORS((dx, dout), x.dtype, x.shape);
  RUN_OP(gelu_backward, x.dtype, detail::bytes_of({dx, dout, x}), (dx), dx.data<X>(), dout.data<X>(), x.data<X>(),
         x.numel());
}

// dx = dout weight.
inline void linear_backward_input(Tensor dx, Tensor dout, Tensor weight, Stream& stream, const Reading& read = {}) {
  const int64_t N = dout.shape[0], I = weight.shape[1], O = weight.shape[0];
  CHECK_TENSOR(dx, dout.dtype, N, I);
  CHECK_TENSOR(dout, weight.dtype, N, O);
  auto scope = stream.scratch().scope();
  const detail::Operand a = detail::first_operand(dout, Transpose::no, detail::Role::gradients, read, stream),
                        b = detail::second_operand(weight, Transpose::no, detail::Role::weights, read, stream);
  detail::matmul("linear_backward_input", dx, a, b, O, {}, Accumulate::no, stream);
}

// z = x weight^T + bias, out = GELU(z). On a GPU by the product, from sums that are not rounded to z's dtype first, and
// only in bf16.   z, out (N, O)
inline void linear_gelu_forward(Tensor out, Tensor z, Tensor x, Tensor weight, Tensor bias, Stream& stream) {
  if (stream.device().computes_as() != DeviceKind::cuda) {
    linear_forward(z, x, weight, bias, stream);
    return gelu_forward(out, z, stream);
  }
  detail::linear_with("linear_gelu_forward", out, x, weight, bias, {Epilogue::gelu, z}, stream);
}
// dz = dout weight times GELU's derivative at z: the gradient of z, from that of GELU(z) weight^T.
inline void linear_gelu_backward_input(Tensor dz, Tensor dout, Tensor weight, Tensor z, Stream& stream) {
  if (stream.device().computes_as() != DeviceKind::cuda) {
    linear_backward_input(dz, dout, weight, stream);
    return gelu_backward(dz, dz, z, stream);
  }
  const int64_t N = dout.shape[0], I = weight.shape[1], O = weight.shape[0];
  CHECK_TENSORS((dz, z), dout.dtype, N, I);
  CHECK_TENSOR(dout, weight.dtype, N, O);
  detail::matmul("linear_gelu_backward_input", dz, {dout, Transpose::no}, {weight, Transpose::no}, O, {},
                 Accumulate::no, stream, {Epilogue::gelu_backward, z});
}

namespace detail {

// For sums over the rows of (N, O).
inline PartsOfSums parts_of_columns(Tensor sums, [[maybe_unused]] int64_t N, int64_t O, Stream& stream) {
  return {stream, "bias partial sums", {sums}, cpu::row_partitions * O, ON_GPU(cuda::column_sum_scratch(N, O))};
}

}  // namespace detail

// dbias += column sums of dout.   dbias (O), dout (N, O)
inline void linear_backward_bias(Tensor dbias, Tensor dout, Stream& stream) {
  const int64_t N = dout.shape[0], O = dout.shape[1];
  CHECK_TENSOR(dbias, accumulator_of(dout.dtype), O);
  auto scope = stream.scratch().scope();
  const detail::PartsOfSums partials = detail::parts_of_columns(dbias, N, O, stream);
  RUN_OP(column_sum, dout.dtype, detail::bytes_of({dout}), (dbias), dbias.data<A>(), partials.template room<A>(),
         dout.data<X>(), N, O);
}

namespace detail {

// dweight = or += dout^T x, from dout as that product reads it.
inline void weight_gradient(Tensor dweight, const Operand& dout_turned, Tensor x, Accumulate accumulate, Stream& stream,
                            const Reading& read) {
  auto scope = stream.scratch().scope();
  const Operand b = second_operand(x, Transpose::no, Role::activations, read, stream);
  matmul("linear_backward_weight", dweight, dout_turned, b, x.shape[0], {}, accumulate, stream);
}

}  // namespace detail

// dweight = or += (as requested) dout^T x, dbias += column sums of dout (dbias may be empty).
inline void linear_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor x, Accumulate accumulate_dweight,
                                   Stream& stream, const Reading& read = {}) {
  CHECK_TENSOR(dout, x.dtype, x.shape[0], dout.shape[1]);
  CHECK_TENSOR(dweight, accumulator_of(x.dtype), dout.shape[1], x.shape[1]);
  {
    auto scope = stream.scratch().scope();
    const detail::Operand turned = detail::first_operand(dout, Transpose::yes, detail::Role::gradients, read, stream);
    detail::weight_gradient(dweight, turned, x, accumulate_dweight, stream, read);
  }
  if (!dbias.empty()) linear_backward_bias(dbias, dout, stream);
}

// dx = dout weight, dweight = or += (as requested) dout^T x, from dout in fp8 along its rows and its columns. dx first:
// its rows tell which sequence a number that is not finite came from. dx may be x, if that is kept in fp8.
inline void linear_backward(Tensor dx, Tensor dweight, const detail::Quantised& dout, Tensor x, Tensor weight,
                            Accumulate accumulate_dweight, Stream& stream, const Reading& read) {
  CHECK_TENSOR(dx, x.dtype, x.shape[0], weight.shape[1]);
  CHECK_TENSOR(dweight, accumulator_of(x.dtype), weight.shape[0], x.shape[1]);
  {
    auto scope = stream.scratch().scope();
    const detail::Operand w = detail::second_operand(weight, Transpose::no, detail::Role::weights, read, stream);
    detail::matmul("linear_backward_input", dx, detail::first_operand(dout, Transpose::no), w, weight.shape[0], {},
                   Accumulate::no, stream);
  }
  detail::weight_gradient(dweight, detail::first_operand(dout, Transpose::yes), x, accumulate_dweight, stream, read);
}

// linear_backward_weight() and linear_backward_input(), which in fp8 then read dout once.
inline void linear_backward(Tensor dx, Tensor dweight, Tensor dbias, Tensor dout, Tensor x, Tensor weight,
                            Accumulate accumulate_dweight, Stream& stream, const Reading& read = {}) {
  if (read.operands == Operands::as_stored) {
    linear_backward_weight(dweight, dbias, dout, x, accumulate_dweight, stream);
    return linear_backward_input(dx, dout, weight, stream);
  }
  CHECK_TENSOR(dout, x.dtype, x.shape[0], weight.shape[0]);
  auto scope = stream.scratch().scope();
  const detail::Quantised q =
      detail::quantise(dout, detail::Role::gradients, detail::SumAlong::both, read.operands, stream);
  linear_backward(dx, dweight, q, x, weight, accumulate_dweight, stream, read);
  if (!dbias.empty()) linear_backward_bias(dbias, dout, stream);
}

// gelu_backward(), and dbias (C) += the column sums of dx (N, C), with the bits of linear_backward_bias(), which would
// read dx again.
inline void gelu_backward_with_bias(Tensor dx, Tensor dbias, Tensor dout, Tensor x, Stream& stream) {
  const int64_t N = x.shape[0], C = x.shape[1];
  CHECK_TENSOR(dx, x.dtype, N, C);
  CHECK_TENSOR(dbias, accumulator_of(x.dtype), C);
  CHECK_TENSOR(dout, x.dtype, N, C);
  auto scope = stream.scratch().scope();
  const detail::PartsOfSums partials = detail::parts_of_columns(dbias, N, C, stream);
  RUN_OP(gelu_backward_with_bias, x.dtype, detail::bytes_of({dx, dout, x}), (dx, dbias), dx.data<X>(), dbias.data<A>(),
         partials.template room<A>(), dout.data<X>(), x.data<X>(), N, C);
}

namespace detail {

// The number of rows, on the device; nullptr: all.
inline const int32_t* rows_on_device(const Tensor& rows) {
  if (rows.empty()) return nullptr;
  CHECK_TENSOR(rows, DType::int32, 1);
  return rows.data<int32_t>();
}

}  // namespace detail

// out = silu(gate) up.   out (N, F); gate_up (N, 2 F): per row the gates, then the ups. rows (1) int32: how many rows
// are read and written; or an empty tensor: all
inline void swiglu_forward(Tensor out, Tensor gate_up, Stream& stream, Tensor rows = {}) {
  const int64_t N = out.shape[0], F = out.shape[1];
  CHECK_TENSOR(gate_up, out.dtype, N, 2 * F);
  const int32_t* count = detail::rows_on_device(rows);
  const Tensor checked = rows.empty() ? out : Tensor{};
  RUN_OP(swiglu_forward, out.dtype, detail::bytes_of({out, gate_up}), (checked), out.data<X>(), gate_up.data<X>(), N, F,
         count);
}
inline void swiglu_backward(Tensor dgate_up, Tensor dout, Tensor gate_up, Stream& stream, Tensor rows = {}) {
  const int64_t N = dout.shape[0], F = dout.shape[1];
  CHECK_TENSORS((gate_up, dgate_up), dout.dtype, N, 2 * F);
  const int32_t* count = detail::rows_on_device(rows);
  const Tensor checked = rows.empty() ? dgate_up : Tensor{};
  RUN_OP(swiglu_backward, dout.dtype, detail::bytes_of({dgate_up, dout, gate_up}), (checked), dgate_up.data<X>(),
         dout.data<X>(), gate_up.data<X>(), N, F, count);
}

// Whether SwiGLU and its gradient, of F gates and ups, can be written as products in fp8 read them, for tensor cores.
inline bool swiglu_writes_fp8(Operands read, int64_t F, const Device& device) {
  return detail::multiplies_fp8(read, device) && F % fp8_block == 0;
}
// swiglu_forward() in fp8: its rows in scratch memory that the caller has opened, its columns in `columns`; the bits of
// quantise() after it.
inline detail::Operand swiglu_forward_in_fp8(const detail::Operand& columns, Tensor gate_up, Operands read,
                                             Stream& stream) {
  const int64_t N = gate_up.shape[0], F = gate_up.shape[1] / 2;
  const detail::Operand rows =
      detail::room_in_fp8(gate_up.slice(0, {N, F}), detail::Role::activations, detail::SumAlong::rows, read,
                          stream.device(), stream.scratch(), "scratch")
          .rows;
  const double bytes = detail::bytes_of({rows.values, rows.scales, columns.values, columns.scales, gate_up});
  RUN_OP_ON_GPU(swiglu_forward_fp8, gate_up.dtype, bytes, detail::pointers_of(rows), detail::pointers_of(columns),
                gate_up.data<X>(), N, F);
  return rows;
}
// swiglu_backward() in fp8, its rows and its columns in scratch memory that the caller has opened.
inline detail::Quantised swiglu_backward_in_fp8(Tensor dout, Tensor gate_up, Operands read, Stream& stream) {
  const int64_t N = dout.shape[0], F = dout.shape[1];
  CHECK_TENSOR(gate_up, dout.dtype, N, 2 * F);
  const detail::Quantised q = detail::room_in_fp8(gate_up, detail::Role::gradients, detail::SumAlong::both, read,
                                                  stream.device(), stream.scratch(), "scratch");
  const detail::Operand a = q.rows, b = q.columns;
  const double bytes = detail::bytes_of({a.values, a.scales, b.values, b.scales, dout, gate_up});
  RUN_OP_ON_GPU(swiglu_backward_fp8, dout.dtype, bytes, detail::pointers_of(a), detail::pointers_of(b), dout.data<X>(),
                gate_up.data<X>(), N, F);
  return q;
}

// out (N, C) = parts[0] + parts[1] + ... + parts[P - 1] + bias: added in this order in the accumulator dtype and
// rounded once (contract 12).   parts (P, N, C) or (P N, C); bias (C), or an empty tensor
inline void merge_parts(Tensor out, Tensor parts, Tensor bias, Stream& stream) {
  const int64_t N = out.shape[0], C = out.shape[1], P = exact_div(parts.numel(), out.numel(), "merge_parts: elements");
  if (parts.shape.rank() == 3) CHECK_TENSOR(parts, out.dtype, P, N, C);
  else CHECK_TENSOR(parts, out.dtype, P * N, C);
  if (!bias.empty()) CHECK_TENSOR(bias, out.dtype, C);
  RUN_OP(merge_parts, out.dtype, detail::bytes_of({out, parts}), (out), out.data<X>(), parts.data<X>(),
         detail::data_or_null<X>(bias), P, N, C);
}

}  // namespace llmc
