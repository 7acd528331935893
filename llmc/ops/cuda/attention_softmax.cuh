// attention_softmax.cuh: what the kernels for a warp's and for a warpgroup's products share: the running softmax of the
// forward and what it writes, and the terms from which the backward recomputes probabilities.
#pragma once
#include "ops/cuda/attention_keys.cuh"

namespace llmc::cuda {

// For the rows that a lane holds: the maximum score so far, and this lane's part of the sum of exponentials.
template <int M>
struct OnlineSoftmax {
  float largest[M][2], sum[M][2];

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i) {
      largest[i / 2][i % 2] = -INFINITY;
      sum[i / 2][i % 2] = 0;
    }
  }
  // scores = 2^(scores scale - maximum). Returns the factor to the new maximum, for what was summed with an earlier
  // one.
  template <int N>
  __device__ float exponentials(Accumulators<M, N>& scores, int m, int half, float scale) {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < N; ++n) most = fmaxf(most, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
    most = fmaxf(largest[m][half], quad_reduce(most, Max{}));
    const float shift = most == -INFINITY ? 0 : most * scale;  // a row may have seen no key yet
    const float correction = fast_exp2(largest[m][half] * scale - shift);
    largest[m][half] = most;
    float sums[2] = {sum[m][half] * correction, 0};  // two, so that additions do not wait for each other
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[m][n][2 * half + i];
        score = fast_exp2(score * scale - shift);
        sums[i] += score;
      }
    sum[m][half] = sums[0] + sums[1];
    return correction;
  }
  // The same, and rescales outs.
  template <int N, int ND>
  __device__ void update(Accumulators<M, N>& scores, Accumulators<M, ND>& outs, int m, int half, float scale) {
    scale_row(outs, m, half, exponentials(scores, m, half, scale));
  }
};

// Where the forward writes; see AttentionOutputs. Rows are counted like the keys.
template <class T>
struct KernelOutputs {
  Heads<T> out;
  Heads<float> sums;
  float *lse, *largest, *total;  // from row 0 on
};

// out = outs / softmax's sums, and the statistics of the rows.
template <Copy copy, int M, int ND, class T>
__device__ void store_outputs(const KernelOutputs<T>& to, const KernelBlock& s, const BlockOfQueries& at, int first,
                              const OnlineSoftmax<M>& softmax, Accumulators<M, ND>& outs, float scale) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_reduce(softmax.sum[m][half], Sum{});
      scale_row(outs, m, half, 1.0f / total);
      const int row = first + 16 * m + fragment_row(2 * half);
      if (row >= s.offset + s.rows || fragment_column(0) != 0) continue;
      const float largest = softmax.largest[m][half] * scale * ln_2;
      if (to.lse != nullptr) s.statistic(to.lse, at.b, at.h)[row] = largest + logf(total);
      if (to.largest != nullptr) s.statistic(to.largest, at.b, at.h)[row] = largest;
    }
  store_rows<copy>(to.out.of(at.b, at.h), first, outs);
}

// Adds the block to the running sums, each weighted by the exponential of its largest score minus the larger of both.
template <int M, int ND, class T>
__device__ void merge_outputs(const KernelOutputs<T>& to, const KernelBlock& s, const BlockOfQueries& at, int first,
                              const OnlineSoftmax<M>& softmax, Accumulators<M, ND>& outs, float scale) {
  float kept[M][2];  // weights of the running sums
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_reduce(softmax.sum[m][half], Sum{});
      const int row = first + 16 * m + fragment_row(2 * half);
      float weight = 0;
      kept[m][half] = 1;
      // Rows that see no key have a total of 0; rows with NaNs a total of NaN. The first lane of a quad reads and
      // writes the row's statistics for all four.
      if (total != 0 && row < s.offset + s.rows && fragment_column(0) == 0) {
        float &before = s.statistic(to.largest, at.b, at.h)[row], &sum = s.statistic(to.total, at.b, at.h)[row];
        const float added = softmax.largest[m][half] * scale * ln_2, largest = fmaxf(before, added);
        kept[m][half] = fast_exp2((before - largest) * log2_e);
        weight = fast_exp2((added - largest) * log2_e);
        before = largest;
        sum = sum * kept[m][half] + total * weight;
      }
      kept[m][half] = __shfl_sync(all_lanes, kept[m][half], 0, 4);
      scale_row(outs, m, half, __shfl_sync(all_lanes, weight, 0, 4));
    }
  update_rows(to.sums.of(at.b, at.h), first, outs,
              [&](int m, int half, float sum, float x) { return sum * kept[m][half] + x; });
}

// Per query row: P = 2^(S scale - lse_log2).
struct alignas(8) RowTerms {
  float lse_log2, delta;
};
struct alignas(16) RowTermsPair {
  RowTerms of[2];
};

namespace detail {

// Rows of terms per head: whole tiles of every kernel. Those past the block's are {infinity, 0}, so P and dS are 0.
__host__ __device__ constexpr int64_t terms_rows(int64_t rows) { return (rows + 127) / 128 * 128; }

}  // namespace detail

// The terms of a head's rows [begin, begin + count), by a warp, whose other lanes see them after a barrier. lse and
// terms: row 0's
template <int count, Copy copy, int DP, class T>
__device__ void find_row_terms(RowTerms* terms, const Head<const T>& dout, const Head<const T>& out,
                               const float* __restrict__ lse, int begin) {
  constexpr int pack = copy == Copy::packs ? full_pack<T> : 1, lanes = DP / pack < warp_size ? DP / pack : warp_size;
  const int lane = lane_of_thread() % lanes, end = begin + count;
#pragma unroll 1
  for (int row = begin + lane_of_thread() / lanes; row < end; row += warp_size / lanes) {
    const bool valid = row < dout.rows;
    float delta = 0;
    if (valid)
      for (int d = lane * pack; d < dout.D; d += lanes * pack) {
        const auto gs = Packed<T, pack>::load(dout.data + row * dout.stride + d),
                   os = Packed<T, pack>::load(out.data + row * out.stride + d);
        for (int i = 0; i < pack; ++i) delta += gs[i] * os[i];
      }
    delta = warp_reduce<lanes>(delta, Sum{});
    if (lane == 0) terms[row] = {valid ? lse[row] * log2_e : INFINITY, delta};
  }
}

}  // namespace llmc::cuda
