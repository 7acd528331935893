// attention_wgmma.cuh: the attention kernels for Hopper's tensor cores, in bf16. They do what the kernels of
// attention_forward.cuh and attention_backward.cuh do (for heads of up to 64, with the same sums in the same order),
// but a warpgroup multiplies tiles that it reads from shared memory, where a warp loads its operands into registers
// first: 1.3 to 1.7 times as fast on an H200. Contracts: ops/ops_attention.h.
#pragma once
#include "ops/cuda/attention_rows.cuh"

namespace llmc::cuda {

// Which tensor-core instructions a product of tiles uses: a warp's, which every GPU has since Ampere, or a warpgroup's,
// which only Hopper has, in code for sm_90a.
enum class TensorCores : uint8_t { of_warp, of_warpgroup };
#if !defined(__CUDACC__) || defined(TRAIN_GPT_WGMMA)
inline constexpr bool compiled_for_warpgroups = true;
#else
inline constexpr bool compiled_for_warpgroups = false;
#endif
// Those of the current device.
inline TensorCores tensor_cores() {
  return compiled_for_warpgroups && device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 ? TensorCores::of_warpgroup
                                                                                             : TensorCores::of_warp;
}

template <class T, Copy copy>
inline constexpr bool fits_warpgroups = compiled_for_warpgroups && sizeof(T) == 2 && copy == Copy::packs;

// Each of the block's `groups` warpgroups holds 64 rows, of queries or of keys, and reads tiles of `tile_rows` rows of
// the opposite kind. blocks: meant to share a multiprocessor; measured on an H200.
template <int groups, int tile_rows, int DP_, int blocks_>
struct WarpgroupBlock : BlockSize<1, 4 * groups, tile_rows, DP_, bf16> {
  static constexpr int DP = DP_, blocks = blocks_;
};

// A tile of rows of DP elements in shared memory, as panels of 64 columns, each a WgmmaTile.
template <int rows, int DP>
struct PanelTile {
  static constexpr int panel_bytes = rows * 128;
  bf16* data;
  __device__ bf16* at(int row, int chunk) const {
    return data + (chunk / 8 * rows + row) * 64 + (chunk % 8 ^ row % 8) * 8;
  }
  // For a product over columns [column, column + 16), or over rows [row, row + 16); row: a multiple of 8.
  __device__ WgmmaTile columns(int column, int row = 0) const {
    return WgmmaTile(data, panel_bytes).after(column / 64 * panel_bytes + row * 128 + column % 64 * 2);
  }
};

// x, which is the same in a whole warp, so that the compiler knows it: it then computes with it once per warp.
__device__ inline int uniform(int x) { return __shfl_sync(all_lanes, x, 0); }
// The first row of the thread's warpgroup.
template <class Block>
__device__ int row_of_warpgroup() {
  return Block::threads == 128 ? 0 : uniform(warp_of_thread() / 4 * 64);
}

// The block copies the tile's rows of a head, from `first` on, zero-padded; see load_rows.
template <class Block, int rows, int DP>
__device__ void load_panels(const PanelTile<rows, DP>& tile, const Head<const bf16>& from, int first) {
  constexpr int chunks = DP / 8, step = Block::threads / chunks;
  static_assert(Block::threads % chunks == 0 && rows % step == 0 && step % 8 == 0);
  const int c = static_cast<int>(threadIdx.x) % chunks, begin = static_cast<int>(threadIdx.x) / chunks;
  const bf16* x =
      from.data + uint64_t{static_cast<uint32_t>(first + begin)} * static_cast<uint32_t>(from.stride) + c * 8;
  bf16* to = tile.at(begin, c);  // the same chunk `step` rows on is `step` rows further
  const auto copy = [&](auto valid) {
#pragma unroll
    for (int row = 0; row < rows; row += step, x += step * from.stride)
      cp_async_16(to + row * 64, valid(row) ? x : from.data, valid(row) ? 16 : 0);
  };
  if (first + rows <= from.rows && from.D == DP) copy([](int) { return true; });
  else copy([&](int row) { return first + begin + row < from.rows && c * 8 < from.D; });
}

// Issues sums (64, 8 N) = rows [row, row + 64) of a times b^T.
template <int N, int DP, int rows>
__device__ void issue_transposed(float (&sums)[N][4], const PanelTile<rows, DP>& a, int row,
                                 const PanelTile<8 * N, DP>& b) {
#pragma unroll
  for (int d = 0; d < DP; d += 16) wgmma_transposed(sums, a.columns(d, row), b.columns(d), d > 0);
}
// A warpgroup's operand of bf16 in registers.
template <int K>
struct WarpgroupOperand {
  uint32_t registers[K / 2][4];
  WarpgroupOperand() = default;
  __device__ explicit WarpgroupOperand(const float (&x)[K][4]) {
#pragma unroll
    for (int k = 0; k < K; k += 2)
#pragma unroll
      for (int i = 0; i < 4; ++i)  // see multiply
        registers[k / 2][i] = bf16_pair(x[k + i / 2][i % 2 * 2], x[k + i / 2][i % 2 * 2 + 1]);
  }
};
// Issues sums (64, DP) += a times b.
template <int ND, int K, int DP>
__device__ void issue(float (&sums)[ND][4], const WarpgroupOperand<K>& a, const PanelTile<8 * K, DP>& b) {
#pragma unroll
  for (int k = 0; k < K / 2; ++k) wgmma(sums, a.registers[k], b.columns(0, 16 * k));
}

// double_buffered for tiles that products read. use(i) waits for its products.
template <class Load, class Use>
__device__ void double_buffered_tiles(int begin, int end, Load load, Use use) {
  double_buffered(
      begin, end, load, [&](int i) { use(uniform(i)); }, [] { fence_async_proxy(); });
}

// Two buffers of two tiles.
template <class Block>
struct PanelBuffers {
  using Tile = PanelTile<Block::tile_rows, Block::DP>;
  bf16* data;
  __device__ Tile tile(int i, int which) const { return {data + (2 * (i & 1) + which) * Block::tile_rows * Block::DP}; }
};
// for_tiles_of_keys, in panels.
template <class Block, class Use>
__device__ void for_panels_of_keys(const PanelBuffers<Block>& buffers, const Head<const bf16>& keys,
                                   const Head<const bf16>& values, const RowRange& rows, Use use) {
  constexpr int n = Block::tile_rows;
  double_buffered_tiles(
      max(rows.smallest, 0) / n, (rows.end + n - 1) / n,
      [&](int i) {
        load_panels<Block>(buffers.tile(i, 0), keys, i * n);
        load_panels<Block>(buffers.tile(i, 1), values, i * n);
      },
      [&](int i) { use(buffers.tile(i, 0), buffers.tile(i, 1), i * n); });
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

// As attention_forward_kernel.
template <class Block>
__global__ void __launch_bounds__(Block::threads, Block::blocks)
    attention_forward_wgmma_kernel(KernelOutputs<bf16> to, Heads<const bf16> queries, Heads<const bf16> keys,
                                   Heads<const bf16> values, const int32_t* __restrict__ positions, KernelBlock s) {
  constexpr int DP = Block::DP, n = Block::tile_rows;
  const BlockOfQueries at(s, Block::rows);
  if (at.b >= static_cast<unsigned>(s.B)) return;
  const SeenKeys seen(positions, s, at.b);
  const int group_row = row_of_warpgroup<Block>(), first = at.first + 16 * warp_of_thread();
  DYN_SHARED_TILES(bf16, memory);
  const PanelTile<Block::rows, DP> query_tile{memory};
  load_panels<Block>(query_tile, queries.of(at.b, at.h), at.first - s.offset);

  const RowRange block_rows(seen, at.first, at.first + Block::rows),
      group_rows(seen, at.first + group_row, at.first + group_row + 64);
  const float scale = log2_e / sqrtf(static_cast<float>(s.D));  // exp(x / sqrt(D)) = 2^(x scale)
  OnlineSoftmax<1> softmax;
  Accumulators<1, Block::ND> outs = {};
  using Tile = PanelTile<n, DP>;
  const auto use = [&](const Tile& key_tile, const Tile& value_tile, int key) {
    if (!group_rows.sees_any(key, key + n - 1)) return;
    const bool all_seen = group_rows.sees_all(key, key + n - 1);
    Accumulators<1, Block::N> p;
    wgmma_fence();
    issue_transposed(p[0], query_tile, group_row, key_tile);
    wgmma_commit();
    wgmma_wait<0>(p[0]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!all_seen) for_unseen_apart(p, 0, half, seen, first, key, [](float& x) { x = -INFINITY; });
      softmax.update(p, outs, 0, half, scale);
    }
    const WarpgroupOperand probabilities(p[0]);
    wgmma_fence();
    issue(outs[0], probabilities, value_tile);
    wgmma_commit();
    wgmma_wait<0>(outs[0]);
  };
  for_panels_of_keys<Block>({memory + Block::rows * DP}, keys.of(at.b, at.kv), values.of(at.b, at.kv), block_rows, use);
  if (to.sums.data == nullptr) store_outputs<Copy::packs>(to, s, at, first, softmax, outs, scale);
  else merge_outputs(to, s, at, first, softmax, outs, scale);
}

// As attention_backward_keys_kernel.
template <class Block>
__global__ void __launch_bounds__(Block::threads, Block::blocks)
    attention_backward_keys_wgmma_kernel(GradientRows<bf16> dkeys, GradientRows<bf16> dvalues, Heads<const bf16> douts,
                                         Heads<const bf16> queries, Heads<const bf16> keys, Heads<const bf16> values,
                                         const RowTerms* __restrict__ terms, const int32_t* __restrict__ positions,
                                         KernelBlock s) {
  constexpr int DP = Block::DP, n = Block::tile_rows;
  const unsigned b = head_of_block() / static_cast<unsigned>(s.Hkv),
                 kv = head_of_block() % static_cast<unsigned>(s.Hkv);
  if (b >= static_cast<unsigned>(s.B)) return;
  const SeenKeys seen(positions, s, b);
  const int group = static_cast<int>(s.Hq / s.Hkv);
  const int begin = static_cast<int>(blockIdx.y) * Block::rows, group_row = row_of_warpgroup<Block>();
  const int first = begin + 16 * warp_of_thread();                         // the warp's keys
  const int group_first = begin + group_row, last = group_first + 64 - 1;  // the warpgroup's keys
  const int64_t terms_rows = detail::terms_rows(s.rows);

  DYN_SHARED_TILES(bf16, memory);
  const PanelTile<Block::rows, DP> key_tile{memory}, value_tile{memory + Block::rows * DP};
  const PanelBuffers<Block> buffers{memory + 2 * Block::rows * DP};
  RowTerms* terms_buffers = reinterpret_cast<RowTerms*>(buffers.data + 4 * n * DP);
  load_panels<Block>(key_tile, keys.of(b, kv), begin);
  load_panels<Block>(value_tile, values.of(b, kv), begin);

  Accumulators<1, Block::ND> dk = {}, dv = {};
  const float scale = s.scale;
  // Tiles of queries of the first head, then of the second, ...
  const TilesOfQueries of_head(seen, s, begin, Block::rows, n);
  struct Place {
    int tile, head;
    __device__ int next(const TilesOfQueries& all) {  // returns the tile's first row
      const int row = tile * n;
      if (++tile == all.first + all.count) tile = all.first, ++head;
      return row;
    }
  } loads = {uniform(of_head.first), static_cast<int>(kv) * group}, uses = loads;
  const auto load = [&](int i) {
    const int h = loads.head, row = loads.next(of_head);
    load_panels<Block>(buffers.tile(i, 0), queries.of(b, h), row);
    load_panels<Block>(buffers.tile(i, 1), douts.of(b, h), row);
    if (threadIdx.x < n / 2)
      cp_async_16(terms_buffers + (i & 1) * n + threadIdx.x * 2,
                  terms + (b * s.Hq + h) * terms_rows + row + threadIdx.x * 2);
  };
  const auto use = [&](int i) {
    const int row = s.offset + uses.next(of_head);
    const RowRange rows(seen, row, row + n);
    if (!rows.sees_any(group_first, last)) return;
    const auto query_tile = buffers.tile(i, 0), dout_tile = buffers.tile(i, 1);
    const auto terms_of = [&](int j) {  // of the lane's two columns of sums[j]
      return reinterpret_cast<const RowTermsPair*>(terms_buffers + (i & 1) * n)[4 * j + fragment_column(0) / 2];
    };
    const bool all_seen = last <= rows.begin && group_first >= rows.largest;  // or past the last: not stored
    Accumulators<1, Block::N> p, ds;                                          // transposed: the keys are the rows
    wgmma_fence();
    issue_transposed(p[0], key_tile, group_row, query_tile);
    wgmma_commit();
    issue_transposed(ds[0], value_tile, group_row, dout_tile);
    wgmma_commit();
    wgmma_wait<1>(p[0]);
#pragma unroll
    for (int j = 0; j < Block::N; ++j) {
      const RowTermsPair pair = terms_of(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) p[0][j][i] = fast_exp2(p[0][j][i] * (scale * log2_e) - pair.of[i % 2].lse_log2);
    }
    if (!all_seen)  // by itself: as a condition of each element it took half of the loop's instructions
      for_each(p, [&](float& x, int, int j, int i) {
        const int row_of_x = row + 8 * j + fragment_column(i), key = first + fragment_row(i);
        if (key > row_of_x || key < seen.first(row_of_x)) x = 0;
      });
    const WarpgroupOperand probabilities(p[0]);
    wgmma_wait<0>(ds[0]);
    wgmma_fence();
    issue(dv[0], probabilities, dout_tile);
    wgmma_commit();
#pragma unroll
    for (int j = 0; j < Block::N; ++j) {
      const RowTermsPair pair = terms_of(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[0][j][i] = p[0][j][i] * (ds[0][j][i] - pair.of[i % 2].delta);
    }
    const WarpgroupOperand score_gradients(ds[0]);
    wgmma_fence();
    issue(dk[0], score_gradients, query_tile);
    wgmma_commit();
    wgmma_wait<0>(dv[0]);
    wgmma_wait<0>(dk[0]);
  };
  double_buffered_tiles(0, group * of_head.count, load, use);

  for_each(dk, [&](float& x, int, int, int) { x *= scale; });
  dkeys.put<Copy::packs>(b, kv, first, dk);
  dvalues.put<Copy::packs>(b, kv, first, dv);
}

// As attention_backward_queries_kernel.
template <class Block>
__global__ void __launch_bounds__(Block::threads, Block::blocks)
    attention_backward_queries_wgmma_kernel(GradientRows<bf16> dqueries, RowTerms* terms, Heads<const bf16> douts,
                                            Heads<const bf16> outs, const float* __restrict__ lse,
                                            Heads<const bf16> queries, Heads<const bf16> keys, Heads<const bf16> values,
                                            const int32_t* __restrict__ positions, KernelBlock s) {
  constexpr int DP = Block::DP, n = Block::tile_rows;
  const BlockOfQueries at(s, Block::rows);
  if (at.b >= static_cast<unsigned>(s.B)) return;
  const SeenKeys seen(positions, s, at.b);
  const int group_row = row_of_warpgroup<Block>(), first = at.first + 16 * warp_of_thread();
  terms += (at.b * s.Hq + at.h) * detail::terms_rows(s.rows);
  DYN_SHARED_TILES(bf16, memory);
  const PanelTile<Block::rows, DP> query_tile{memory}, dout_tile{memory + Block::rows * DP};
  load_panels<Block>(query_tile, queries.of(at.b, at.h), at.first - s.offset);
  load_panels<Block>(dout_tile, douts.of(at.b, at.h), at.first - s.offset);
  find_row_terms<16, Copy::packs, DP>(terms + s.offset, douts.of(at.b, at.h), outs.of(at.b, at.h),
                                      s.statistic(lse, at.b, at.h) + s.offset, first - s.offset);
  __syncwarp();  // the terms are written

  const RowRange block_rows(seen, at.first, at.first + Block::rows),
      group_rows(seen, at.first + group_row, at.first + group_row + 64);
  Accumulators<1, Block::ND> dq = {};
  const float scale = s.scale;
  RowTerms row_terms[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) row_terms[half] = terms[first + fragment_row(2 * half)];
  using Tile = PanelTile<n, DP>;
  const auto use = [&](const Tile& key_tile, const Tile& value_tile, int key) {
    if (!group_rows.sees_any(key, key + n - 1)) return;
    const bool all_seen = group_rows.sees_all(key, key + n - 1);
    Accumulators<1, Block::N> p, ds;
    wgmma_fence();
    issue_transposed(p[0], query_tile, group_row, key_tile);
    wgmma_commit();
    issue_transposed(ds[0], dout_tile, group_row, value_tile);
    wgmma_commit();
    wgmma_wait<1>(p[0]);
    for_each(p, [&](float& x, int, int, int i) { x = fast_exp2(x * (scale * log2_e) - row_terms[i / 2].lse_log2); });
    wgmma_wait<0>(ds[0]);
    for_each(ds, [&](float& x, int m, int j, int i) { x = p[m][j][i] * (x - row_terms[i / 2].delta); });
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (!all_seen) for_unseen(ds, 0, half, seen, first, key, [](float& x) { x = 0; });
    const WarpgroupOperand score_gradients(ds[0]);
    wgmma_fence();
    issue(dq[0], score_gradients, key_tile);
    wgmma_commit();
    wgmma_wait<0>(dq[0]);
  };
  for_panels_of_keys<Block>({memory + 2 * Block::rows * DP}, keys.of(at.b, at.kv), values.of(at.b, at.kv), block_rows,
                            use);
  for_each(dq, [&](float& x, int, int, int) { x *= scale; });
  dqueries.put<Copy::packs>(at.b, at.h, first, dq);
}

}  // namespace llmc::cuda
