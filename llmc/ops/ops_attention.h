// ops_attention.h: attention, and its key-value cache. Conventions: ops.h.
#pragma once
#include "ops/ops_heads.h"

namespace llmc {

namespace detail {

// t: a matrix of queries, of keys and values, or of all three, that has these rows of B sequences.
inline void check_rows(const char* op, const char* argument, const Tensor& t, DType dtype, int64_t B,
                       const SequenceRows& rows, int64_t least_width) {
  CHECK(rows.first >= 0 && rows.rows > 0 && rows.first + rows.rows <= rows.length, "{}: rows {} to {} of {}", op,
        rows.first, rows.first + rows.rows, rows.length);
  CHECK(t.shape.rank() == 2 && t.shape[1] >= least_width, "{}: {} ({}) is {}", op, argument, t.name,
        to_string(t.shape));
  check_tensor(op, argument, t, dtype, {B * rows.length, t.shape[1]});
}
inline void check_attention(const char* op, const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& kv,
                            const Tensor& positions, const AttentionBlock& b) {
  CHECK(b.Hkv > 0 && b.Hq % b.Hkv == 0, "{}: {} query heads are not a multiple of {} key-value heads", op, b.Hq, b.Hkv);
  check_rows(op, "q", q, q.dtype, b.B, b.queries, b.Hq * b.D);
  check_rows(op, "kv", kv, q.dtype, b.B, b.keys, 2 * b.Hkv * b.D);
  const int64_t rows = b.B * b.queries.length;
  check_tensor(op, "out", out, out.dtype, {rows, b.Hq * b.D});
  if (!positions.empty()) check_tensor(op, "positions", positions, DType::int32, {rows});
  if (!lse.empty()) check_tensor(op, "lse", lse, accumulator_of(q.dtype), {b.B, b.Hq, b.queries.length});
}
// Two products of two flops for each pair and channel.
inline double attention_flops(const AttentionBlock& b) {
  return 4.0 * static_cast<double>(b.B * b.Hq) * static_cast<double>(b.pairs()) * static_cast<double>(b.D);
}
// passes: over the scores
inline AttentionSize attention_size(const AttentionBlock& b, double passes = 1) {
  return {b.keys.length, b.D,
          passes * static_cast<double>(b.B * b.Hq) * static_cast<double>(b.queries.length * b.keys.length)};
}
// Bytes of a tensor with the shape of the queries, and of one with that of the keys and values.
inline double query_bytes(const AttentionBlock& b, DType dtype) {
  return static_cast<double>(size_of(dtype) * b.B * b.D * b.Hq * b.queries.rows);
}
inline double key_bytes(const AttentionBlock& b, DType dtype) {
  return static_cast<double>(size_of(dtype) * b.B * b.D * 2 * b.Hkv * b.keys.rows);
}
// The rows that an op writes in a matrix of all rows of the sequences: one tensor per sequence, or the whole matrix.
inline std::vector<Tensor> rows_written(const Tensor& t, int64_t B, const SequenceRows& rows) {
  if (rows.rows == rows.length) return {t};
  std::vector<Tensor> written;
  for (int64_t b = 0; b < B; ++b)
    written.push_back(t.slice((b * rows.length + rows.first) * t.shape[1], {rows.rows, t.shape[1]}));
  return written;
}

// Queries are the first Hq heads of a row, keys and values the last 2 Hkv.
template <class T>
HeadRows<T> queries_of(const Tensor& t) {
  return {t.data<std::remove_const_t<T>>(), t.shape[1]};
}
template <class T>
HeadRows<T> keys_of(const Tensor& t, const AttentionBlock& b) {
  return {t.data<std::remove_const_t<T>>() + t.shape[1] - 2 * b.Hkv * b.D, t.shape[1]};
}
template <class T>
HeadRows<T> values_of(const Tensor& t, const AttentionBlock& b) {
  return {t.data<std::remove_const_t<T>>() + t.shape[1] - b.Hkv * b.D, t.shape[1]};
}
template <class T>
AttentionInputs<T> attention_inputs(const Tensor& q, const Tensor& kv, const Tensor& positions,
                                    const AttentionBlock& b) {
  return {queries_of<const T>(q), keys_of<const T>(kv, b), values_of<const T>(kv, b), data_or_null<int32_t>(positions)};
}

// on_cpu: a function that returns bytes; on_gpu: accumulators
inline Tensor attention_scratch(Stream& stream, DType dtype, int64_t (*on_cpu)(const AttentionBlock&, int64_t, int),
                                int64_t on_gpu, const AttentionBlock& block) {
  const DType stat = accumulator_of(dtype);
  const int64_t element = size_of(stat);
  return scratch(stream, "attention", stat, ceil_div(on_cpu(block, element, stream.device().threads), element), on_gpu);
}

// Checked on the null device too: a plan is refused whenever the run would be.
inline void check_heads_of_gpu([[maybe_unused]] Stream& stream, [[maybe_unused]] DType dtype,
                               [[maybe_unused]] int64_t head_size) {
#ifdef TRAIN_GPT_CUDA
  if (stream.device().computes_as() != DeviceKind::cuda || dtype == DType::fp64) return;
  dtype == DType::bf16 ? cuda::check_head_size<bf16>(head_size) : cuda::check_head_size<float>(head_size);
#endif
}

#ifdef TRAIN_GPT_CUDNN
// Does cuDNN compute this attention? It takes whole sequences; our own kernels take the new rows of generated text.
// cudnn_scratch(): its work space.
inline bool by_cudnn(Stream& stream, const Tensor& q, const Tensor& kv, const AttentionBlock& b) {
  if (stream.device().computes_as() != DeviceKind::cuda || !stream.device().cudnn || q.bytes != kv.bytes) return false;
  CHECK(q.dtype == DType::bf16, "--attention cudnn computes only in bf16, not in {}: use --attention own", q.dtype);
  CHECK(b.queries.rows == b.queries.length && b.keys.rows == b.keys.length && b.offset == 0);
  return true;
}
inline AttentionShape shape_of(const AttentionBlock& b) { return {b.B, b.queries.length, b.Hq, b.Hkv, b.D}; }
inline Tensor cudnn_scratch(Stream& stream, cuda::AttentionPass pass, const AttentionShape& shape) {
  const int64_t bytes = stream.kept<cuda::AttentionPlans>().workspace_bytes(pass, shape);
  return stream.scratch().alloc("scratch", "cuDNN attention", DType::int32, {ceil_div(bytes, 4)});
}
#endif

}  // namespace detail

// ---- Attention -----------------------------------------------------------------------------------------------------

// Notices about the kernels for heads of D channels on this GPU, for the start of a run: which of them are slower there
// than intended, if any. Throws Error if one of them cannot run there at all.
inline std::vector<std::string> attention_notices([[maybe_unused]] const Device& device, [[maybe_unused]] DType dtype,
                                                  [[maybe_unused]] int64_t D) {
#ifdef TRAIN_GPT_CUDA
  if (device.kind == DeviceKind::cuda) {
    CUDA_CHECK(cudaSetDevice(device.gpu));
    return dtype == DType::bf16 ? cuda::attention_occupancy_notices<bf16>(D)
                                : cuda::attention_occupancy_notices<float>(D);
  }
#endif
  return {};
}

// Statistics of attention's rows, (B, Hq, queries.length) each; empty tensors where they are not wanted.
struct RowStatistics {
  Tensor lse;      // log of the sum of exponentials, for the backward
  Tensor largest;  // score, for QK-clip (ops_step.h)
  RowStatistics(Tensor lse_ = {}, Tensor largest_ = {}) : lse(lse_), largest(largest_) {}
};

// softmax(q k^T / sqrt(D)) v per head, for the block's query rows over the keys that they see; query head h reads
// key-value head h / (Hq / Hkv).
// out (B queries.length, Hq D); q (B queries.length, Hq D or more): the first heads of a row; kv (B keys.length, 2 Hkv
// D or more): the last ones, keys and then values; positions (B queries.length) int32, for packed documents, which must
// not attend to each other: a row at position p sees itself and the p keys before it; or an empty tensor. For the
// backward no row may see an earlier key than the row before it does
inline void attention_forward(Tensor out, RowStatistics rows, Tensor q, Tensor kv, Tensor positions,
                              const AttentionBlock& block, Stream& stream) {
  detail::check_attention("attention_forward", out, rows.lse, q, kv, positions, block);
  if (!rows.largest.empty())
    detail::check_tensor("attention_forward", "largest", rows.largest, accumulator_of(q.dtype),
                         {block.B, block.Hq, block.queries.length});
  CHECK_TENSOR(out, q.dtype, out.shape);
  CHECK(block.all_keys && block.offset >= 0, "attention_forward: every row must see a key; see attention_merge()");
  const OpCost cost{.name = "attention_forward",
                    .flops = detail::attention_flops(block),
                    .bytes = 2 * detail::query_bytes(block, q.dtype) + detail::key_bytes(block, q.dtype),
                    .attention = detail::attention_size(block)};
  auto scope = stream.scratch().scope();
#ifdef TRAIN_GPT_CUDNN
  if (detail::by_cudnn(stream, q, kv, block)) {
    CHECK(rows.largest.empty(), "cuDNN's attention returns no largest scores: use --attention own");
    const AttentionShape shape = detail::shape_of(block);
    const Tensor work = detail::cudnn_scratch(stream, cuda::AttentionPass::forward, shape);
    return stream.run(cost, {out, rows.lse}, [=, &stream] {
      stream.kept<cuda::AttentionPlans>().forward(out.data<bf16>(), rows.lse.data<float>(), q.data<bf16>(),
                                                  detail::data_or_null<int32_t>(positions), work.bytes, shape,
                                                  stream.cuda());
    });
  }
#endif
  detail::check_heads_of_gpu(stream, q.dtype, block.D);
  const int threads = stream.device().threads;
  const Tensor scratch = detail::attention_scratch(stream, q.dtype, cpu::attention_forward_scratch,
                                                   ON_GPU(cuda::attention_forward_scratch(block)), block);
  detail::run_op(stream, q.dtype, cost, detail::rows_written(out, block.B, block.queries),
                 [=, &stream]<class X, class A>(detail::OpTypes<X, A>) {
                   const AttentionOutputs<X, A> to{{out.data<X>(), out.shape[1]},
                                                   detail::data_or_null<A>(rows.lse),
                                                   {},
                                                   detail::data_or_null<A>(rows.largest)};
                   const AttentionInputs<X> from = detail::attention_inputs<X>(q, kv, positions, block);
                   RUN_ON_DEVICE(stream, X, cuda::attention_forward(to, from, scratch.data<A>(), block, stream.cuda()),
                                 cpu::products<X>().attention_forward(to, from, scratch.bytes, block, threads));
                 });
}

// Attention over keys that come in several blocks. Exponentials are relative to the largest score so far, so that none
// overflows, and sums are rescaled when it grows.
struct RunningAttention {
  Tensor sums;            // (B queries.length, Hq D) of values, weighted by exponentials; in the accumulator dtype
  Tensor largest, total;  // (B, Hq, queries.length) score, sum of exponentials
};
// Before the first block: no key has been seen.
inline void attention_begin(const RunningAttention& running, Stream& stream) {
  zero(running.sums, stream);
  fill(running.largest, -std::numeric_limits<float>::infinity(), stream);
  zero(running.total, stream);
}
// Adds a block to its query rows. Rows that see none of its keys do not change.
inline void attention_merge(const RunningAttention& running, Tensor q, Tensor kv, Tensor positions,
                            const AttentionBlock& block, Stream& stream) {
  const DType stat = accumulator_of(q.dtype);
  detail::check_attention("attention_merge", running.sums, running.largest, q, kv, positions, block);
  detail::check_tensor("attention_merge", "sums", running.sums, stat, running.sums.shape);
  detail::check_tensor("attention_merge", "total", running.total, stat, running.largest.shape);
  detail::check_heads_of_gpu(stream, q.dtype, block.D);
  if (block.pairs() == 0) return;
  const int threads = stream.device().threads;
  auto scope = stream.scratch().scope();
  const Tensor scratch = detail::attention_scratch(stream, q.dtype, cpu::attention_forward_scratch, 0, block);
  detail::run_op(stream, q.dtype,
                 {.name = "attention_merge",
                  .flops = detail::attention_flops(block),
                  .bytes = detail::query_bytes(block, q.dtype) + detail::key_bytes(block, q.dtype) +
                           2 * detail::query_bytes(block, stat),
                  .attention = detail::attention_size(block)},
                 {running.sums}, [=, &stream]<class X, class A>(detail::OpTypes<X, A>) {
                   const AttentionOutputs<X, A> to{{},
                                                   nullptr,
                                                   {running.sums.data<A>(), running.sums.shape[1]},
                                                   running.largest.data<A>(),
                                                   running.total.data<A>()};
                   const AttentionInputs<X> from = detail::attention_inputs<X>(q, kv, positions, block);
                   RUN_ON_DEVICE(stream, X, cuda::attention_forward(to, from, scratch.data<A>(), block, stream.cuda()),
                                 cpu::products<X>().attention_forward(to, from, scratch.bytes, block, threads));
                 });
}
// After the last block: out (B T, Hq D) = sums / total, rounded once; lse (B, Hq, T) = largest + log(total).
inline void attention_finish(Tensor out, Tensor lse, const RunningAttention& running, Stream& stream) {
  const int64_t B = lse.shape[0], Hq = lse.shape[1], T = lse.shape[2], D = out.shape[1] / Hq;
  const DType stat = accumulator_of(out.dtype);
  CHECK_TENSOR(out, out.dtype, B * T, Hq * D);
  detail::check_tensor("attention_finish", "sums", running.sums, stat, out.shape);
  for (const Tensor& t : {lse, running.largest, running.total})
    detail::check_tensor("attention_finish", "lse, largest or total", t, stat, lse.shape);
  RUN_OP(attention_finish, out.dtype, detail::bytes_of({out, running.sums}), (out, lse), out.data<X>(), lse.data<A>(),
         running.sums.data<A>(), running.largest.data<A>(), running.total.data<A>(), B, T, Hq, D);
}

// The gradients of attention for the block's query rows and keys. lse, out: over all keys that the rows see, including
// keys outside the block.
// Accumulate::no: dq (with the rows of q) and dkv (with the rows of kv), in the training dtype: their heads are
// overwritten, the rest of each row is left alone. Accumulate::yes: dq, dkv += in the accumulator dtype.
inline void attention_backward(Tensor dq, Tensor dkv, Tensor dout, Tensor out, Tensor q, Tensor kv, Tensor lse,
                               Tensor positions, const AttentionBlock& block, Accumulate accumulate, Stream& stream) {
  const bool add = accumulate == Accumulate::yes;
  const DType stat = accumulator_of(q.dtype), written = add ? stat : q.dtype;
  CHECK(!lse.empty());
  detail::check_attention("attention_backward", out, lse, q, kv, positions, block);
  CHECK_TENSORS((out, dout), q.dtype, out.shape);
  detail::check_rows("attention_backward", "dq", dq, written, block.B, block.queries, block.Hq * block.D);
  detail::check_rows("attention_backward", "dkv", dkv, written, block.B, block.keys, 2 * block.Hkv * block.D);
  CHECK(add || block.pairs() > 0);
  if (block.pairs() == 0) return;
  // Reads q, out, dout, k, v; writes their gradients, which it also reads to add to them.
  const double gradients = detail::query_bytes(block, written) + detail::key_bytes(block, written);
  const OpCost cost{
      .name = "attention_backward",
      .flops = 2.5 * detail::attention_flops(block),
      .bytes = 3 * detail::query_bytes(block, q.dtype) + detail::key_bytes(block, q.dtype) + (add ? 2 : 1) * gradients,
      .attention = detail::attention_size(block, 1.5)};
  auto scope = stream.scratch().scope();
#ifdef TRAIN_GPT_CUDNN
  if (detail::by_cudnn(stream, q, kv, block)) {
    CHECK(dq.bytes == dkv.bytes && !add);
    const AttentionShape shape = detail::shape_of(block);
    const Tensor work = detail::cudnn_scratch(stream, cuda::AttentionPass::backward, shape);
    return stream.run(cost, {dq}, [=, &stream] {
      stream.kept<cuda::AttentionPlans>().backward(dq.data<bf16>(), dout.data<bf16>(), out.data<bf16>(), q.data<bf16>(),
                                                   lse.data<float>(), detail::data_or_null<int32_t>(positions),
                                                   work.bytes, shape, stream.cuda());
    });
  }
#endif
  detail::check_heads_of_gpu(stream, q.dtype, block.D);
  const int threads = stream.device().threads;
  const Tensor scratch = detail::attention_scratch(stream, q.dtype, cpu::attention_backward_scratch,
                                                   ON_GPU(cuda::attention_backward_scratch(block)), block);
  // Tensors that are added to hold the rows of other blocks as well.
  std::vector<Tensor> outputs = add ? std::vector{dq} : detail::rows_written(dq, block.B, block.queries);
  if (dkv.bytes != dq.bytes) outputs.push_back(dkv);
  detail::run_op(stream, q.dtype, cost, outputs, [=, &stream]<class X, class A>(detail::OpTypes<X, A>) {
    AttentionGradients<X, A> to;
    if (add) {
      to.query_sums = detail::queries_of<A>(dq);
      to.key_sums = detail::keys_of<A>(dkv, block);
      to.value_sums = detail::values_of<A>(dkv, block);
    } else {
      to.queries = detail::queries_of<X>(dq);
      to.keys = detail::keys_of<X>(dkv, block);
      to.values = detail::values_of<X>(dkv, block);
    }
    const AttentionInputs<X> from = detail::attention_inputs<X>(q, kv, positions, block);
    RUN_ON_DEVICE(stream, X,
                  cuda::attention_backward(to, dout.data<X>(), out.data<X>(), lse.data<A>(), from, scratch.data<A>(),
                                           block, stream.cuda()),
                  cpu::products<X>().attention_backward(to, dout.data<X>(), out.data<X>(), lse.data<A>(), from,
                                                        scratch.bytes, block, threads));
  });
}

// ---- A cache of keys and values ------------------------------------------------------------------------------------

// Writes the keys and values of qkv's rows to the cache, from row `begin` on.   cache (rows, 2 Hkv D): per row the key
// heads, then the value heads; qkv (T, (Hq + 2 Hkv) D)
inline void cache_append(Tensor cache, Tensor qkv, int64_t begin, const AttentionShape& shape, Stream& stream) {
  const int64_t width = 2 * shape.Hkv * shape.D;
  detail::check_qkv("cache_append", "qkv", qkv, shape);
  CHECK(shape.B == 1);
  CHECK_TENSOR(cache, qkv.dtype, cache.shape[0], width);
  const Tensor rows = cache.slice(begin * width, {shape.T, width});
  RUN_OP(cache_append, qkv.dtype, 2 * detail::bytes_of({rows}), (rows), rows.data<X>(), qkv.data<X>(), shape);
}

}  // namespace llmc
