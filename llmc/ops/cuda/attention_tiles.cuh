// attention_tiles.cuh: the building blocks of the attention kernels: tiles of rows in shared memory, warp-level
// products of tiles, and the pipeline that fills them. fp32 and bf16 share the kernels: only the products differ,
// tensor cores for bf16 and FMAs for fp32, with the same accumulator layout.
#pragma once
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vec.cuh"
#include "ops/types.h"

namespace llmc::cuda {

// How heads are read: 16 bytes per access where rows are whole packs, else element by element. fp32 always goes element
// by element: loads do not dominate there, and it halves the kernels to compile.
enum class Copy : uint8_t { packs, elements };

// A block's rows of one head of one sequence: row t is at data + t * stride.
template <class T>
struct Head {
  T* data;
  int64_t stride;
  int rows, D;
};
// The block's rows of all heads and sequences. Made by the host: kernels have no registers to spare.
template <class T>
struct Heads {
  T* data = nullptr;  // row 0's; the block's first row is row `offset`
  int64_t stride = 0, sequence_stride = 0;
  int rows = 0, D = 0;  // rows: one past the last

  Heads(const HeadRows<T>& all, const SequenceRows& r, int64_t head_size, int64_t offset = 0)
      : data(all.data == nullptr ? nullptr : all.data + (r.first - offset) * all.stride),
        stride(all.stride),
        sequence_stride(r.length * all.stride),
        rows(static_cast<int>(offset + r.rows)),
        D(static_cast<int>(head_size)) {}
  __device__ Head<T> of(int64_t b, int64_t h) const { return {data + b * sequence_stride + h * D, stride, rows, D}; }
};
// An AttentionBlock for kernels.
struct KernelBlock {
  int B, Hq, Hkv, D, rows, keys, offset;  // rows: of queries
  int64_t length;                         // of the sequences of queries
  float scale;                            // of scores: 1 / sqrt(D)

  explicit KernelBlock(const AttentionBlock& s)
      : B(static_cast<int>(s.B)),
        Hq(static_cast<int>(s.Hq)),
        Hkv(static_cast<int>(s.Hkv)),
        D(static_cast<int>(s.D)),
        rows(static_cast<int>(s.queries.rows)),
        keys(static_cast<int>(s.keys.rows)),
        offset(static_cast<int>(s.offset)),
        length(s.queries.length),
        scale(1.0f / sqrtf(static_cast<float>(s.D))) {}
  // The part for one head of an array (B, Hq, length).
  template <class T>
  __device__ T* statistic(T* array, int64_t b, int64_t h) const {
    return array + (b * Hq + h) * length;
  }
};
// The element of row 0 in an array per query row, counted like the keys: the block's first row is row s.offset.
template <class T>
T* from_row_0(T* array, const AttentionBlock& s) {
  return array == nullptr ? nullptr : array + (s.queries.first - s.offset);
}

// ---- Accumulators of a warp -----------------------------------------------------------------------------------------

// 16 M rows, 8 N columns, in mma's layout: element i of sums[m][n] is at row 16 m + fragment_row(i), column 8 n +
// fragment_column(i). The four lanes of a quad hold two of every 16 rows.
template <int M, int N>
using Accumulators = float[M][N][4];

__device__ inline int fragment_row(int i) { return lane_of_thread() / 4 + i / 2 * 8; }
__device__ inline int fragment_column(int i) { return lane_of_thread() % 4 * 2 + i % 2; }

// f(sum, m, n, i) for every element that this lane holds.
template <int M, int N, class F>
__device__ void for_each(Accumulators<M, N>& sums, F f) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(sums[m][n][i], m, n, i);
}

// Scales the row that holds elements 2 half and 2 half + 1 of sums[m].
template <int M, int N>
__device__ void scale_row(Accumulators<M, N>& sums, int m, int half, float factor) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) sums[m][n][i] *= factor;
}

template <class Op>
__device__ float quad_reduce(float x, Op op) {
  x = op(x, __shfl_xor_sync(all_lanes, x, 1));
  return op(x, __shfl_xor_sync(all_lanes, x, 2));
}

// Rows of `to` from `first` on = sums; skips rows and columns past the head's.
template <Copy copy, int M, int N, class T>
__device__ void store_rows(const Head<T>& to, int first, const Accumulators<M, N>& sums) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 16 * m + fragment_row(2 * half);
      if (row >= to.rows) continue;
      T* out = to.data + row * to.stride + fragment_column(0);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (8 * n >= to.D) break;
        Packed<T, 2> pair;
        for (int i = 0; i < 2; ++i) pair.set(i, sums[m][n][2 * half + i]);
        if constexpr (copy == Copy::packs) {
          pair.store(out + 8 * n);
        } else {
          for (int i = 0; i < 2; ++i)
            if (8 * n + fragment_column(i) < to.D) out[8 * n + i] = pair.elements[i];
        }
      }
    }
}

// Rows of `to` from `first` on = f(m, half, old value, sum), for elements 2 half and 2 half + 1 of sums[m]; skips rows
// and columns past the head's.
template <int M, int N, class F>
__device__ void update_rows(const Head<float>& to, int first, const Accumulators<M, N>& sums, F f) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 16 * m + fragment_row(2 * half);
      if (row >= to.rows) continue;
      float* out = to.data + row * to.stride + fragment_column(0);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (8 * n + fragment_column(i) < to.D) out[8 * n + i] = f(m, half, out[8 * n + i], sums[m][n][2 * half + i]);
    }
}
// Where the backward writes a gradient: to `rows`, or if `sums` is set, it adds to these.
template <class T>
struct GradientRows {
  Heads<T> rows;
  Heads<float> sums;

  template <Copy copy, int M, int N>
  __device__ void put(int64_t b, int64_t h, int first, const Accumulators<M, N>& values) const {
    if (sums.data == nullptr) store_rows<copy>(rows.of(b, h), first, values);
    else update_rows(sums.of(b, h), first, values, [](int, int, float sum, float x) { return sum + x; });
  }
};

// ---- Tiles ----------------------------------------------------------------------------------------------------------

// Rows of DP elements in shared memory, in chunks of 16 bytes. Chunk c of row r is stored at position c ^ (r & 7), so
// that the same chunk of eight consecutive rows covers all banks.
template <class T, int DP>
struct Tile {
  static constexpr int chunk = 16 / sizeof(T), chunks = DP / chunk;
  T* data;
  __device__ T* at(int row, int c) const { return data + (row * chunks + (c ^ (row & 7))) * chunk; }
  // The tile that begins `rows` rows further, a multiple of 8, so that chunks keep their positions.
  __device__ Tile after(int rows) const { return {data + rows * DP}; }
};

// The block copies `rows` rows of a head, from `first` on, to the tile, zero-padded past the head's rows and its D. The
// copies join the thread's current cp.async group. Each thread copies the same chunk of several rows.
template <int rows, int threads, Copy copy, class T, int DP>
__device__ void load_rows(const Tile<T, DP>& tile, const Head<const T>& from, int first) {
  constexpr int chunk = Tile<T, DP>::chunk, chunks = Tile<T, DP>::chunks, step = threads / chunks;
  static_assert(threads % chunks == 0);
  const int c = static_cast<int>(threadIdx.x) % chunks, d = c * chunk;
  int row = static_cast<int>(threadIdx.x) / chunks;
  const T* x = from.data + (first + row) * from.stride + d;
#pragma unroll 1  // unrolled, the addresses of all rows would take registers
  for (; row < rows; row += step, x += step * from.stride) {
    const bool valid = first + row < from.rows && d < from.D;
    if constexpr (copy == Copy::packs) {
      cp_async_16(tile.at(row, c), valid ? x : from.data, valid ? 16 : 0);
    } else {
#pragma unroll 1
      for (int e = 0; e < chunk; ++e) {
        const bool element_valid = valid && d + e < from.D;
        if constexpr (sizeof(T) == 4)
          cp_async_4(tile.at(row, c) + e, element_valid ? x + e : from.data, element_valid ? 4 : 0);
        else tile.at(row, c)[e] = element_valid ? x[e] : T{};
      }
    }
  }
}

// Calls load(i) and use(i) for i from `begin` to `end`; load(i + 1) fills one of two buffers while use(i) reads the
// other. Copies issued before the call are also complete at the first use. arrived(): after the copies of a thread have
// arrived, before others use them.
template <class Load, class Use, class Arrived>
__device__ void double_buffered(int begin, int end, Load load, Use use, Arrived arrived) {
  if (begin < end) load(begin);
  cp_async_commit();
  for (int i = begin; i < end; ++i) {
    cp_async_wait<0>();  // this thread's copies of i have arrived
    arrived();
    __syncthreads();  // so have everyone's; and nobody reads the other buffer any more
    if (i + 1 < end) load(i + 1);
    cp_async_commit();
    use(i);
  }
}
template <class Load, class Use>
__device__ void double_buffered(int begin, int end, Load load, Use use) {
  double_buffered(begin, end, load, use, [] {});
}

// ---- Products -------------------------------------------------------------------------------------------------------

// sums += rows [row, row + 16 M) of a times (rows [0, 8 N) of b)^T
template <int M, int N, int DP>
__device__ void multiply_transposed(Accumulators<M, N>& sums, const Tile<bf16, DP>& a, int row,
                                    const Tile<bf16, DP>& b) {
  const int lane = lane_of_thread();
#pragma unroll
  for (int k = 0; k < DP / 16; ++k) {
    uint32_t as[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(as[m], a.after(row + 16 * m).at(lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t bs[4];
      ldmatrix_x4(bs, b.after(8 * n).at(lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16_bf16(sums[m][n], as[m], {bs[0], bs[1]});
        mma_m16n8k16_bf16(sums[m][n + 1], as[m], {bs[2], bs[3]});
      }
    }
  }
}
template <int M, int N, int DP>
__device__ void multiply_transposed(Accumulators<M, N>& sums, const Tile<float, DP>& a, int row,
                                    const Tile<float, DP>& b) {
  using Pack = Packed<float>;
#pragma unroll 1
  for (int c = 0; c < DP / 4; ++c) {
    Pack as[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        as[m][half] = Pack::load(a.after(row + 16 * m + 8 * half).at(fragment_row(0), c));
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Pack bs = Pack::load(b.after(8 * n).at(fragment_column(i), c));
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[m][n][2 * half + i] += as[m][half][e] * bs[e];
      }
  }
}

// sums (16 M, 8 N) += p (16 M, 8 K) times rows [0, 8 K), columns [0, 8 N) of b; p is rounded to b's type
template <int M, int K, int N, int DP>
__device__ void multiply(Accumulators<M, N>& sums, const Accumulators<M, K>& p, const Tile<bf16, DP>& b) {
  const int lane = lane_of_thread();
#pragma unroll
  for (int k = 0; k < K; k += 2) {
    uint32_t as[M][4];  // two accumulators of 8 columns have the layout of one operand of 16
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) as[m][i] = bf16_pair(p[m][k + i / 2][i % 2 * 2], p[m][k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t bs[4];
      ldmatrix_x4_trans(bs, b.after(8 * k).at(lane % 16, n + lane / 16));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16_bf16(sums[m][n], as[m], {bs[0], bs[1]});
        mma_m16n8k16_bf16(sums[m][n + 1], as[m], {bs[2], bs[3]});
      }
    }
  }
}
template <int M, int K, int N, int DP>
__device__ void multiply(Accumulators<M, N>& sums, const Accumulators<M, K>& p, const Tile<float, DP>& b) {
  using Pair = Packed<float, 2>;
  const int odd = fragment_column(0) / 4;  // is this lane's pair of each 8 columns in the second chunk of the two?
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float ps[M][2];  // column 8 k + r of p; the lane r / 2 of the quad holds it
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) ps[m][half] = __shfl_sync(all_lanes, p[m][k][2 * half + r % 2], r / 2, 4);
      const float* row = b.data + (8 * k + r) * DP + (odd ^ (r & 1)) * 4 + fragment_column(0) % 4;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const Pair bs = Pair::load(row + ((2 * n) ^ (r & 6)) * 4);  // chunk (2 n + odd) ^ r
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[m][n][j] += ps[m][j / 2] * bs[j % 2];
      }
    }
}

// ---- Sizes ----------------------------------------------------------------------------------------------------------

// Each of the block's `warps` warps holds 16 M rows of a head, of queries or of keys, and reads tiles of `tile_rows`
// rows of the opposite kind. Two blocks are meant to share a multiprocessor: one computes while the other waits for
// memory.
template <int M_, int warps_, int tile_rows_, int DP, class T>
struct BlockSize {
  static constexpr int M = M_, tile_rows = tile_rows_, rows = 16 * M * warps_, threads = warps_ * warp_size, blocks = 2;
  static constexpr int N = tile_rows / 8, ND = DP / 8;  // blocks of 8 columns: of scores and of outputs
  // Shared memory: `operands` tiles of rows, and two buffers of two tiles of tile_rows.
  static constexpr int64_t shared_bytes(int operands) {
    return (operands * rows + 4 * tile_rows) * DP * static_cast<int64_t>(sizeof(T));
  }
};

template <class T>
inline constexpr int64_t largest_head = sizeof(T) == 2 ? 128 : 256;

// Throws Error for heads that are too large for the kernels.
template <class T>
void check_head_size(int64_t D) {
  CHECK(D <= largest_head<T>,
        "attention on GPUs supports heads of up to {} channels in {}, not {}: use more, smaller heads (--n-head){}",
        largest_head<T>, dtype_of<T>(), D,
        sizeof(T) == 2 && D <= largest_head<float> ? ", or, on an A100 or later data-center GPU, --dtype fp32" : "");
}

template <class... Heads>
bool heads_fit_packs(int64_t D, int pack, const Heads&... rows) {
  return rows_fit_packs(D, pack, rows.data...) && ((rows.stride % pack == 0) && ...);
}

// Calls f.operator()<copy>(), with packs if all rows fit them.
template <class T, class F>
void with_copy(bool fit, F&& f) {
  if constexpr (sizeof(T) == 2) {
    if (fit) return f.template operator()<Copy::packs>();
  }
  f.template operator()<Copy::elements>();
}

// Calls f.operator()<DP, copy>(), with DP the head size of the kernel's instantiation; `rows`: all HeadRows of T.
template <class T, class F, class... Heads>
void with_head_size(int64_t D, F&& f, const Heads&... rows) {
  check_head_size<T>(D);
  with_copy<T>(heads_fit_packs(D, full_pack<T>, rows...), [&]<Copy copy>() {
    if (D <= 64) f.template operator()<64, copy>();
    else if (D <= 128) f.template operator()<128, copy>();
    else if constexpr (largest_head<T> > 128) f.template operator()<256, copy>();
  });
}

}  // namespace llmc::cuda
