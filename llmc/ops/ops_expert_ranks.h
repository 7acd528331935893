// ops_expert_ranks.h: mixture of experts on several ranks: rows that arrive from others, sequences that are spread over
// ranks, and the biases that balance experts. Conventions: ops.h and ops_experts.h. Nothing here waits for the host.
#pragma once
#include "ops/ops_experts.h"

namespace llmc {

// counts (E) int32 = how many rows each expert has.   offsets (E + 1) int32
inline void expert_counts(Tensor counts, Tensor offsets, Stream& stream) {
  const int64_t E = counts.numel();
  CHECK_TENSOR(counts, DType::int32, E);
  CHECK_TENSOR(offsets, DType::int32, E + 1);
  RUN_UNTYPED_OP(expert_counts, detail::bytes_of({counts, offsets}), (), counts.data<int32_t>(),
                 offsets.data<int32_t>(), E);
}

// Orders by expert the rows that have arrived from P ranks. counts (P, E): the rows that each rank has sent for each of
// this rank's E experts. Rows arrive by rank, and within a rank by expert; those of rank p begin right after those of
// rank p - 1 or, with a stride, at p * stride, with padding after them. offsets (E + 1); places (A, 1) = where each
// arrival is in the order (expert, rank, arrival), -1 for padding. All int32. So dispatch_rows(rows, arrived, places)
// brings arrivals into the order of experts, and combine_rows(arrived, rows, {}, places) brings them back, with zeros
// in the padding. All ranks together may send at most A rows and, with a stride, each rank at most `stride`.
inline void arrival_plan(Tensor places, Tensor offsets, Tensor counts, int64_t stride, Stream& stream) {
  const int64_t P = counts.shape[0], E = counts.shape[1], A = places.numel();
  CHECK_TENSOR(counts, DType::int32, P, E);
  CHECK_TENSOR(places, DType::int32, A, 1);
  CHECK_TENSOR(offsets, DType::int32, E + 1);
  CHECK(stride >= 0 && (stride == 0 || A == P * stride), "arrival_plan: room for {} rows of {} ranks, {} of each", A, P,
        stride);
  CHECK(A <= std::numeric_limits<int32_t>::max(), "arrival_plan: {} rows are too many for 32 bits", A);
  auto scope = stream.scratch().scope();
  const Tensor scratch =
      detail::scratch(stream, "order of arrivals", DType::int32, P, ON_GPU(cuda::arrival_plan_scratch(P, E)));
  RUN_UNTYPED_OP(arrival_plan, detail::bytes_of({places, counts}), (), places.data<int32_t>(), offsets.data<int32_t>(),
                 scratch.data<int32_t>(), counts.data<int32_t>(), P, E, A, stride);
}

// How the segments of several ranks, at most S on each, make up B sequences. A segment's id: rank * S + segment.
struct SegmentOrder {
  Tensor sequences;  // (ranks, S) int32: the sequence of each segment; -1 for one that is not there
  Tensor ids;        // (at least begins[B]) int32, by sequence and place in it
  Tensor begins;     // (B + 1) int32: where each sequence begins in `ids`

  int64_t ranks() const { return sequences.shape[0]; }
  int64_t segments() const { return sequences.shape[1]; }
  int64_t count() const { return begins.numel() - 1; }
  void check(const char* op) const {
    detail::check_tensor(op, "sequences", sequences, DType::int32, {ranks(), segments()});
    detail::check_tensor(op, "ids", ids, DType::int32, {ids.numel()});
    detail::check_tensor(op, "begins", begins, DType::int32, {count() + 1});
  }
};

// counts (B, E), probabilities (B, E) and sums (B, 2) of whole sequences = those of their segments, added in order.
// all_counts (ranks, S, E), all_probabilities (ranks, S, E), all_sums (ranks, S, 2): router_statistics() of all ranks
inline void join_segments(Tensor counts, Tensor probabilities, Tensor sums, Tensor all_counts, Tensor all_probabilities,
                          Tensor all_sums, const SegmentOrder& order, Stream& stream) {
  const int64_t G = order.ranks(), S = order.segments(), B = order.count(), E = counts.shape[1];
  const DType wide = accumulator_of(probabilities.dtype);
  order.check("join_segments");
  CHECK_TENSOR(counts, DType::int32, B, E);
  CHECK_TENSOR(probabilities, wide, B, E);
  CHECK_TENSOR(sums, wide, B, 2);
  CHECK_TENSOR(all_counts, DType::int32, G, S, E);
  CHECK_TENSOR(all_probabilities, wide, G, S, E);
  CHECK_TENSOR(all_sums, wide, G, S, 2);
  RUN_OP(join_segments, wide, detail::bytes_of({all_counts, all_probabilities}), (counts, probabilities, sums),
         counts.data<int32_t>(), probabilities.data<A>(), sums.data<A>(), all_counts.data<int32_t>(),
         all_probabilities.data<A>(), all_sums.data<A>(), order.ids.data<int32_t>(), order.begins.data<int32_t>(), B,
         E);
}

// The counts that a rank's own ops need for sequences that it shares, one row per segment: counts (S, E) int32 = those
// of the segment's whole sequence, for router_backward(); starts (S, E) int32 = those of the segments before it in the
// sequence, for dispatch_plan(). Zeros for a segment that is not there.   all_counts (ranks, S, E)
inline void segment_starts(Tensor counts, Tensor starts, Tensor all_counts, const SegmentOrder& order, int64_t rank,
                           Stream& stream) {
  const int64_t G = order.ranks(), S = order.segments(), E = counts.shape[1];
  order.check("segment_starts");
  CHECK(rank >= 0 && rank < G, "segment_starts: rank {} of {}", rank, G);
  CHECK_TENSORS((counts, starts), DType::int32, S, E);
  CHECK_TENSOR(all_counts, DType::int32, G, S, E);
  RUN_UNTYPED_OP(segment_starts, detail::bytes_of({all_counts}), (), counts.data<int32_t>(), starts.data<int32_t>(),
                 all_counts.data<int32_t>(), order.sequences.data<int32_t>(), order.ids.data<int32_t>(),
                 order.begins.data<int32_t>(), rank, S, E);
}

// totals (E) fp64 += counts (B, E) int32 of sequences: whole numbers, so that ranks may add theirs in any order
inline void add_expert_counts(Tensor totals, Tensor counts, Stream& stream) {
  const int64_t B = counts.shape[0], E = counts.shape[1];
  CHECK_TENSOR(totals, DType::fp64, E);
  CHECK_TENSOR(counts, DType::int32, B, E);
  RUN_UNTYPED_OP(add_expert_counts, detail::bytes_of({counts, totals}), (totals), totals.data<double>(),
                 counts.data<int32_t>(), B, E);
}

// biases (E) fp32 += rate * sign(mean count - count), from the counts (E) fp64 of a whole step on all ranks (Wang et
// al. 2024; DeepSeek-V3). Nothing changes where control forbids the update, as in update_weights().
inline void update_expert_biases(Tensor biases, Tensor counts, Tensor control, float rate, Stream& stream) {
  const int64_t E = biases.numel();
  CHECK_TENSOR(biases, DType::fp32, E);
  CHECK_TENSOR(counts, DType::fp64, E);
  CHECK_TENSOR(control, DType::fp64, 4);
  RUN_UNTYPED_OP(update_expert_biases, detail::bytes_of({biases, counts}), (biases), biases.data<float>(),
                 counts.data<double>(), control.data<double>(), E, rate);
}

}  // namespace llmc
