// ops_attention.h: attention, and the ops that prepare queries and keys. Conventions: ops.h.
#pragma once
#include "ops/cpu/attention.h"
#include "ops/cpu/rmsnorm.h"
#include "ops/cpu/rotary.h"
#include "ops/ops_memory.h"

namespace llmc {

namespace detail {

inline void check_qkv(const char* op, const char* argument, const Tensor& qkv, const AttentionShape& s) {
  check_tensor(op, argument, qkv, qkv.dtype, {s.B * s.T, (s.Hq + 2 * s.Hkv) * s.D});
}
inline void check_attention(const char* op, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                            const Tensor& positions, const AttentionShape& s) {
  if (!positions.empty()) check_tensor(op, "positions", positions, DType::int32, {s.B * s.T});
  CHECK(s.Hkv > 0 && s.Hq % s.Hkv == 0, "{}: {} query heads are not a multiple of {} key-value heads", op, s.Hq, s.Hkv);
  check_qkv(op, "qkv", qkv, s);
  check_tensor(op, "out", out, qkv.dtype, {s.B * s.T, s.Hq * s.D});
  check_tensor(op, "lse", lse, accumulator_of(qkv.dtype), {s.B, s.Hq, s.T});
}
// Causal attention: two products of 2 T T D / 2 flops a head.
inline double attention_flops(const AttentionShape& s) {
  return 2.0 * static_cast<double>(s.B * s.Hq) * static_cast<double>(s.T) * static_cast<double>(s.T + 1) *
         static_cast<double>(s.D);
}

// Checked on the null device too: a plan is refused whenever the run would be.
inline void check_heads_of_gpu([[maybe_unused]] Stream& stream, [[maybe_unused]] DType dtype,
                               [[maybe_unused]] const AttentionShape& shape) {
#ifdef TRAIN_GPT_CUDA
  if (stream.device().computes_as() != DeviceKind::cuda || dtype == DType::fp64) return;
  dtype == DType::bf16 ? cuda::check_head_size<bf16>(shape) : cuda::check_head_size<float>(shape);
#endif
}

}  // namespace detail

// table (P, D) = the cosines and sines of P positions, for rotary_embedding.
inline void rotary_table(Tensor table, const Rotary& rotary, Stream& stream) {
  const int64_t P = table.shape[0], D = table.shape[1];
  CHECK(D % 2 == 0, "rotary embedding rotates pairs: the head size {} is odd", D);
  stream.run({"rotary_table", 0, detail::bytes_of({table})}, {table}, [=, &stream] {
    with_type(table.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      if constexpr (!std::is_same_v<X, bf16>) CALL_OP(stream, X, rotary_table, table.data<X>(), rotary, P, D);
    });
  });
}

// In place: rotates every query and key head of a row by its position; Turn::backward rotates the gradient back.
// qkv (B T, (Hq + 2 Hkv) D); table (P, D) in the accumulator dtype; positions (B T) int32, all below P
inline void rotary_embedding(Tensor qkv, Tensor table, Tensor positions, const AttentionShape& shape, Turn turn,
                             Stream& stream) {
  detail::check_qkv("rotary_embedding", "qkv", qkv, shape);
  CHECK_TENSOR(positions, DType::int32, shape.B * shape.T);
  CHECK_TENSOR(table, accumulator_of(qkv.dtype), table.shape[0], shape.D);
  stream.run({"rotary_embedding", 0, 2 * detail::bytes_of({qkv})}, {qkv}, [=, &stream] {
    with_type(qkv.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      CALL_OP(stream, X, rotary, qkv.data<X>(), table.data<accumulator_t<X>>(), positions.data<int32_t>(), shape, turn);
    });
  });
}

// rmsnorm of every query head with q_weight (D) and every key head with k_weight (D); the values are copied.
// out, qkv (B T, (Hq + 2 Hkv) D); rstd (B T, Hq + Hkv)
inline void qk_norm_forward(Tensor out, Tensor rstd, Tensor qkv, Tensor q_weight, Tensor k_weight, float eps,
                            const AttentionShape& shape, Stream& stream) {
  detail::check_qkv("qk_norm_forward", "qkv", qkv, shape);
  detail::check_tensor("qk_norm_forward", "out", out, qkv.dtype, qkv.shape);
  CHECK_TENSOR(rstd, accumulator_of(qkv.dtype), shape.B * shape.T, shape.Hq + shape.Hkv);
  CHECK_TENSOR(q_weight, qkv.dtype, shape.D);
  CHECK_TENSOR(k_weight, qkv.dtype, shape.D);
  stream.run({"qk_norm_forward", 0, detail::bytes_of({out, qkv})}, {out, rstd}, [=, &stream] {
    with_type(qkv.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      CALL_OP(stream, X, qk_norm_forward, out.data<X>(), rstd.data<accumulator_t<X>>(), qkv.data<X>(),
              q_weight.data<X>(), k_weight.data<X>(), eps, shape);
    });
  });
}

// dqkv: in, the gradient of out; out, the gradient of qkv. dq_weight, dk_weight +=.
inline void qk_norm_backward(Tensor dqkv, Tensor dq_weight, Tensor dk_weight, Tensor qkv, Tensor q_weight,
                             Tensor k_weight, Tensor rstd, const AttentionShape& shape, Stream& stream) {
  const DType stat = accumulator_of(qkv.dtype);
  detail::check_qkv("qk_norm_backward", "qkv", qkv, shape);
  detail::check_tensor("qk_norm_backward", "dqkv", dqkv, qkv.dtype, qkv.shape);
  CHECK_TENSOR(rstd, stat, shape.B * shape.T, shape.Hq + shape.Hkv);
  CHECK_TENSOR(dq_weight, stat, shape.D);
  CHECK_TENSOR(dk_weight, stat, shape.D);
  auto scope = stream.scratch().scope();
  const Tensor partials =
      detail::scratch(stream, "query-key norm partial sums", stat, cpu::row_partitions * 2 * shape.D,
                      ON_GPU(cuda::qk_norm_backward_scratch(shape)));
  stream.run({"qk_norm_backward", 0, detail::bytes_of({dqkv, dqkv, qkv})}, {dqkv, dq_weight, dk_weight}, [=, &stream] {
    with_type(qkv.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      using A = accumulator_t<X>;
      CALL_OP(stream, X, qk_norm_backward, dqkv.data<X>(), dq_weight.data<A>(), dk_weight.data<A>(), partials.data<A>(),
              qkv.data<X>(), q_weight.data<X>(), k_weight.data<X>(), rstd.data<A>(), shape);
    });
  });
}

#ifdef TRAIN_GPT_CUDNN
namespace detail {

// Does cuDNN compute attention? Its work space, under `scratch`.
inline bool by_cudnn(Stream& stream, DType dtype) {
  if (stream.device().computes_as() != DeviceKind::cuda || !stream.device().cudnn) return false;
  CHECK(dtype == DType::bf16, "--attention cudnn computes only in bf16, not in {}: use --attention own", dtype);
  return true;
}
inline Tensor cudnn_scratch(Stream& stream, cuda::AttentionPass pass, const AttentionShape& shape) {
  const int64_t bytes = stream.kept<cuda::AttentionPlans>().workspace_bytes(pass, shape);
  return stream.scratch().alloc("scratch", "cuDNN attention", DType::int32, {ceil_div(bytes, 4)});
}
inline const int32_t* data_or_null(const Tensor& ids) { return ids.empty() ? nullptr : ids.data<int32_t>(); }

}  // namespace detail
#endif

// Causal softmax(q k^T / sqrt(D)) v per head; query head h reads key-value head h / (Hq / Hkv).
// out (B T, Hq D); lse (B, Hq, T): log of the sum of exponentials, for the backward; qkv (B T, (Hq + 2 Hkv) D);
// positions (B T) int32, for packed documents, which must not attend to each other: a row at position p attends to
// itself and the p rows before it; or an empty tensor
inline void attention_forward(Tensor out, Tensor lse, Tensor qkv, Tensor positions, const AttentionShape& shape,
                              Stream& stream) {
  detail::check_attention("attention_forward", out, lse, qkv, positions, shape);
  const int threads = stream.device().threads;
  auto scope = stream.scratch().scope();
#ifdef TRAIN_GPT_CUDNN
  if (detail::by_cudnn(stream, qkv.dtype)) {
    const Tensor work = detail::cudnn_scratch(stream, cuda::AttentionPass::forward, shape);
    return stream.run({"attention_forward", detail::attention_flops(shape), detail::bytes_of({out, qkv})}, {out, lse},
                      [=, &stream] {
                        stream.kept<cuda::AttentionPlans>().forward(out.data<bf16>(), lse.data<float>(),
                                                                    qkv.data<bf16>(), detail::data_or_null(positions),
                                                                    work.bytes, shape, stream.cuda());
                      });
  }
#endif
  detail::check_heads_of_gpu(stream, qkv.dtype, shape);
  const Tensor scratch =
      detail::scratch(stream, "attention", lse.dtype, cpu::attention_forward_scratch(shape, threads), 0);
  stream.run(
      {"attention_forward", detail::attention_flops(shape), detail::bytes_of({out, qkv})}, {out, lse}, [=, &stream] {
        with_type(qkv.dtype, [&](auto tag) {
          using X = typename decltype(tag)::type;
          using A = accumulator_t<X>;
          const int32_t* documents = positions.empty() ? nullptr : positions.data<int32_t>();
          RUN_ON_DEVICE(
              stream, X,
              cuda::attention_forward(out.data<X>(), lse.data<A>(), qkv.data<X>(), documents, shape, stream.cuda()),
              cpu::attention_forward(out.data<X>(), lse.data<A>(), qkv.data<X>(), documents, scratch.data<A>(), shape,
                                     threads));
        });
      });
}

// dqkv = ... (overwrites all of it)
inline void attention_backward(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, Tensor lse, Tensor positions,
                               const AttentionShape& shape, Stream& stream) {
  detail::check_attention("attention_backward", out, lse, qkv, positions, shape);
  detail::check_tensor("attention_backward", "dqkv", dqkv, qkv.dtype, qkv.shape);
  detail::check_tensor("attention_backward", "dout", dout, out.dtype, out.shape);
  const int threads = stream.device().threads;
  auto scope = stream.scratch().scope();
#ifdef TRAIN_GPT_CUDNN
  if (detail::by_cudnn(stream, qkv.dtype)) {
    const Tensor work = detail::cudnn_scratch(stream, cuda::AttentionPass::backward, shape);
    return stream.run(
        {"attention_backward", 2.5 * detail::attention_flops(shape), detail::bytes_of({dqkv, dout, out, qkv})}, {dqkv},
        [=, &stream] {
          stream.kept<cuda::AttentionPlans>().backward(
              dqkv.data<bf16>(), dout.data<bf16>(), out.data<bf16>(), qkv.data<bf16>(), lse.data<float>(),
              detail::data_or_null(positions), work.bytes, shape, stream.cuda());
        });
  }
#endif
  const Tensor scratch =
      detail::scratch(stream, "attention", lse.dtype, cpu::attention_backward_scratch(shape, threads),
                      ON_GPU(cuda::attention_backward_scratch(shape)));
  stream.run({"attention_backward", 2.5 * detail::attention_flops(shape), detail::bytes_of({dqkv, dout, out, qkv})},
             {dqkv}, [=, &stream] {
               with_type(qkv.dtype, [&](auto tag) {
                 using X = typename decltype(tag)::type;
                 using A = accumulator_t<X>;
                 const int32_t* documents = positions.empty() ? nullptr : positions.data<int32_t>();
                 RUN_ON_DEVICE(
                     stream, X,
                     cuda::attention_backward(dqkv.data<X>(), dout.data<X>(), out.data<X>(), qkv.data<X>(),
                                              lse.data<A>(), documents, scratch.data<A>(), shape, stream.cuda()),
                     cpu::attention_backward(dqkv.data<X>(), dout.data<X>(), qkv.data<X>(), lse.data<A>(), documents,
                                             scratch.data<A>(), shape, threads));
               });
             });
}

// Writes the keys and values of qkv's rows to the cache, at rows `begin` and up.   cache (rows, 2 Hkv D): per row the
// key heads, then the value heads; qkv (T, (Hq + 2 Hkv) D)
inline void cache_append(Tensor cache, Tensor qkv, int64_t begin, const AttentionShape& shape, Stream& stream) {
  const int64_t width = 2 * shape.Hkv * shape.D;
  detail::check_qkv("cache_append", "qkv", qkv, shape);
  CHECK(shape.B == 1);
  CHECK_TENSOR(cache, qkv.dtype, cache.shape[0], width);
  const Tensor rows = cache.slice(begin * width, {shape.T, width});
  stream.run({"cache_append", 0, 2 * detail::bytes_of({rows})}, {rows}, [=, &stream] {
    with_type(qkv.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      CALL_OP(stream, X, cache_append, rows.data<X>(), qkv.data<X>(), shape);
    });
  });
}

// attention_forward for the rows of a sequence from `begin` on, whose keys and values are already cached.   out (T, Hq
// D); qkv (T, (Hq + 2 Hkv) D); cache (rows, 2 Hkv D)
inline void attention_cached(Tensor out, Tensor qkv, Tensor cache, int64_t begin, const AttentionShape& shape,
                             Stream& stream) {
  detail::check_qkv("attention_cached", "qkv", qkv, shape);
  CHECK(shape.B == 1 && begin + shape.T <= cache.shape[0]);
  CHECK_TENSOR(cache, qkv.dtype, cache.shape[0], 2 * shape.Hkv * shape.D);
  CHECK_TENSOR(out, qkv.dtype, shape.T, shape.Hq * shape.D);
  detail::check_heads_of_gpu(stream, qkv.dtype, shape);
  const int threads = stream.device().threads;
  auto scope = stream.scratch().scope();
  const Tensor scratch = detail::scratch(stream, "attention", accumulator_of(qkv.dtype),
                                         cpu::attention_cached_scratch(shape, begin, threads),
                                         ON_GPU(cuda::attention_cached_scratch(shape, begin)));
  const double flops = 4.0 * static_cast<double>(shape.Hq * shape.D * shape.T * (begin + shape.T));
  stream.run({"attention_cached", flops, detail::bytes_of({out, qkv, cache})}, {out}, [=, &stream] {
    with_type(qkv.dtype, [&](auto tag) {
      using X = typename decltype(tag)::type;
      using A = accumulator_t<X>;
      RUN_ON_DEVICE(stream, X,
                    cuda::attention_cached(out.data<X>(), qkv.data<X>(), cache.data<X>(), scratch.data<A>(), begin,
                                           shape, stream.cuda()),
                    cpu::attention_cached(out.data<X>(), qkv.data<X>(), cache.data<X>(), scratch.data<A>(), begin,
                                          shape, threads));
    });
  });
}

}  // namespace llmc
