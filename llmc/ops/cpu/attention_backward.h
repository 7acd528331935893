// attention_backward.h: the gradients of attention.h, by blocks of keys. With P the probabilities, dO the gradient of
// the output, and scores S = Q K^T / sqrt(D):
//   dV = P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(P dP)),   dQ = dS K / sqrt(D),   dK = dS^T Q / sqrt(D)
// P is recomputed from the saved log-sum-exp (Dao 2023, FlashAttention-2). The row sum of P dP equals that of dO O.
// Where one key has nearly all of the probability, O is nearly its value, and the two terms of dS cancel; so the sum is
// computed by the products that give dP, and has the same rounding.
#pragma once
#include <omp.h>

#include <atomic>

#include "ops/cpu/attention_tiles.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// A block of keys of one head and sequence: dK and dV of its keys, and what it adds to dQ.
template <class T, class How, class A>
struct KeyBlockGradients {
  using Packed = typename How::Packed;
  static constexpr int64_t R = How::rows, C = How::columns, key_block = AttentionTiles::keys,
                           query_tile = AttentionTiles::backward_queries / R * R;  // keys, rows of queries
  static_assert(key_block % C == 0);

  static int64_t tile_rows_of(const AttentionBlock& s) { return std::min(query_tile, round_up(s.queries.rows, R)); }

  const AttentionBlock& s;
  const AttentionInputs<T>& from;
  int64_t b, hk, key, keys;  // sequence, key-value head, keys [key, key + keys)
  const int32_t* positions = positions_of(from.positions, s.queries, b);
  A scale = A(1) / std::sqrt(static_cast<A>(s.D));
  int64_t depth = round_up(s.D, How::step), keys_depth = round_up(keys, How::step);  // elements of packed lines
  int64_t D_rows = round_up(s.D, R);
  int64_t tile_rows = tile_rows_of(s), tile_keys = round_up(keys, C);  // memory is allocated for these

  // Operands: `rows` have a line of D elements for each key or query; `channels` have a line for each channel.
  Packed *k_rows, *v_rows, *k_channels;
  Packed *q_rows, *g_rows, *o_rows, *q_channels, *g_channels;  // a tile of queries; g is dO
  A *p, *dp;                                                   // (queries, C), of the tile and a panel of keys
  Packed *packed, *ds_rows;
  A *dk, *dv;  // transposed: a panel (D, C) for every C keys
  A* square;

  KeyBlockGradients(const AttentionBlock& block, const AttentionInputs<T>& inputs, int64_t sequence, int64_t head,
                    int64_t first, std::byte* scratch)
      : s(block), from(inputs), b(sequence), hk(head), key(first), keys(std::min(key_block, block.keys.rows - first)) {
    ScratchCursor cursor{scratch};
    for (Packed** rows : {&k_rows, &v_rows}) *rows = cursor.take<Packed>(tile_keys * depth);
    k_channels = cursor.take<Packed>(round_up(s.D, C) * tile_keys);
    for (Packed** rows : {&q_rows, &g_rows}) *rows = cursor.take<Packed>(tile_rows * depth);
    o_rows = cursor.take<Packed>(round_up(R, C) * depth);
    for (Packed** channels : {&q_channels, &g_channels}) *channels = cursor.take<Packed>(D_rows * tile_rows);
    for (A** scores : {&p, &dp}) *scores = cursor.take<A>(tile_rows * C);
    packed = cursor.take<Packed>(tile_rows * C);
    ds_rows = cursor.take<Packed>(tile_rows * tile_keys);
    for (A** gradient : {&dk, &dv}) {
      *gradient = cursor.take<A>(tile_keys * D_rows);
      std::fill_n(*gradient, tile_keys * D_rows, A(0));
    }
    square = cursor.take<A>(C * 32);

    const T *first_key = head_of(from.keys, s.keys, b, hk, s.D) + key * from.keys.stride,
            *first_value = head_of(from.values, s.keys, b, hk, s.D) + key * from.values.stride;
    pack_b<How>(k_rows, Lines<T>{first_key, from.keys.stride, 1}, keys, s.D);
    pack_b<How>(k_channels, Lines<T>{first_key, 1, from.keys.stride}, s.D, keys);
    pack_b<How>(v_rows, Lines<T>{first_value, from.values.stride, 1}, keys, s.D);
  }

  // Packs n rows of Q and of dO, and both transposed.
  void pack_queries(const T* q, int64_t q_stride, const T* dout, int64_t dout_stride, int64_t n) const {
    pack_a<How>(q_rows, Lines<T>{q, q_stride, 1}, n, s.D);
    pack_a<How>(g_rows, Lines<T>{dout, dout_stride, 1}, n, s.D);
    pack_a<How>(q_channels, Lines<T>{q, 1, q_stride}, s.D, n);
    pack_a<How>(g_channels, Lines<T>{dout, 1, dout_stride}, s.D, n);
  }

  // delta (n) = the diagonal of dO O^T, in tiles.
  void delta_of_rows(A* delta, const T* out, int64_t stride, int64_t n) const {
    for (int64_t i = 0; i < n; i += R) {
      alignas(64) A products[R * round_up(R, C)];
      const int64_t rows = std::min(R, n - i);
      pack_b<How>(o_rows, Lines<T>{out + i * stride, stride, 1}, rows, s.D);
      for (int64_t r = 0; r < rows; r += C)
        multiply_panels<How>(products + r * R, {g_rows + i * depth, depth}, o_rows + r * depth, rows, s.D,
                             Accumulate::no);
      for (int64_t r = 0; r < rows; ++r) delta[i + r] = products[r / C * R * C + r * C + r % C];
    }
  }

  // For n query rows, from row `begin` of the block on: adds their part to dK and dV; dq (D / C, tile_rows, C) = or +=
  // the part of these keys. lse, delta: of the rows
  void add_queries(A* dq, const A* lse, const A* delta, int64_t begin, int64_t n, Accumulate accumulate) const {
    // The keys that each row sees and, in whole panels, the keys of this block that any row of a tile sees.
    KeyRange visible[query_tile], of_rows[query_tile / R];
    for (int64_t i = 0; i < n; ++i) visible[i] = keys_of_row(s, positions, begin + i);
    for (int64_t i = 0; i < n; i += R) {
      const KeyRange any = keys_of_rows(s, positions, begin + i, std::min(R, n - i)).within(key, key + keys);
      of_rows[i / R] = any.empty() ? KeyRange{} : KeyRange{(any.first - key) / C * C, any.last - key};
    }
    for (int64_t j = 0; j < keys; j += C) {
      KeyRange seeing{n, 0};  // rows, in whole tiles, that see any of these keys
      for (int64_t i = 0; i < n; i += R)
        if (of_rows[i / R].overlaps(j, j + C)) seeing = {std::min(seeing.first, i), std::min(i + R, n)};
      if (!seeing.empty()) add_panel(j, seeing.first, seeing.last - seeing.first, n, lse, delta, visible);
    }
    for (int64_t d = 0; d < s.D; d += C)
      for (int64_t i = 0; i < n; i += R) {
        const auto [first, last] = of_rows[i / R];
        multiply_panels<How>(dq + d * tile_rows + i * C, {ds_rows + i * keys_depth, keys_depth, first},
                             k_channels + d * keys_depth + first * C, std::min(R, n - i), last - first, accumulate);
      }
  }

  void write(const AttentionGradients<T, A>& to, const KeyRange& written) const {
    const GradientHead dkeys(to.keys, to.key_sums, s.keys, b, hk, s.D),
        dvalues(to.values, to.value_sums, s.keys, b, hk, s.D);
    for (int64_t j = 0; j < keys; j += C)
      for (int64_t d = 0; d < s.D; d += 32) {
        const int64_t channels = std::min(int64_t{32}, s.D - d);
        for (const auto& [head, x, factor] : {std::tuple{&dkeys, dk, scale}, std::tuple{&dvalues, dv, A(1)}}) {
          transposed_lines(square, x + j * D_rows + d * C, C, channels);
          for (int64_t i = 0; i < std::min(C, keys - j); ++i)
            if (written.covers(key + j + i, key + j + i + 1))
              head->write(key + j + i, d, square + i * channels, factor, channels);
        }
      }
  }

 private:
  // Rows [i0, i0 + rows) of the n of a tile, and the panel of keys from j on: adds to dK and dV, stores dS in ds_rows.
  void add_panel(int64_t j, int64_t i0, int64_t rows, int64_t n, const A* lse, const A* delta,
                 const KeyRange* visible) const {
    multiply_panels<How>(p, {q_rows + i0 * depth, depth}, k_rows + j * depth, rows, s.D, Accumulate::no);
    multiply_panels<How>(dp, {g_rows + i0 * depth, depth}, v_rows + j * depth, rows, s.D, Accumulate::no);
    score_gradients<How>(p, dp, scale, rows, key + j, lse + i0, delta + i0, visible + i0);
    for (int64_t i = 0; i < rows; i += R) {
      const int64_t height = panel_height<How>(rows - i), width = std::min(C, keys - j);
      alignas(64) Packed panel[R * C + beyond_panels];
      pack_a<How>(panel, Lines<A>{dp + i * C, C, 1}, std::min(R, rows - i), width);
      std::copy_n(panel, height * round_up(width, How::step), ds_rows + (i0 + i) * keys_depth + height * j);
    }
    const int64_t n_depth = round_up(n, How::step);
    multiply_panels<How>(dv + j * D_rows, {g_channels, n_depth, i0}, pack_columns<How>(packed, p, rows), s.D, rows,
                         Accumulate::yes);
    multiply_panels<How>(dk + j * D_rows, {q_channels, n_depth, i0}, pack_columns<How>(packed, dp, rows), s.D, rows,
                         Accumulate::yes);
  }
};

}  // namespace detail

// A task is a (sequence, key-value head, block of keys), and owns their dK and dV. dQ is added in the order of the
// blocks: before each tile of rows, a task waits until the previous block has been added to it. All first blocks, which
// see the most rows and wait for nobody, come before all second ones, so that waits are rare. scratch:
// attention_backward_scratch() bytes
template <class T, class How = Multiply<accumulator_t<T>>, class A = accumulator_t<T>>
void attention_backward(const AttentionGradients<T, A>& to, const T* dout, const T* out, const A* lse,
                        const AttentionInputs<T>& from, std::byte* scratch, const AttentionBlock& s, int threads) {
  using namespace detail;
  using KeyBlock = KeyBlockGradients<T, How, A>;
  constexpr int64_t C = How::columns;
  const AttentionTiles tiling(s, sizeof(A));
  const int64_t blocks = tiling.key_blocks(), tile_rows = KeyBlock::tile_rows_of(s),
                tiles = ceil_div(s.queries.rows, tile_rows), group = s.Hq / s.Hkv,
                stride = s.Hq * s.D;  // row length of dout and out
  const int64_t dq_elements = tile_rows * round_up(s.D, C);
  const bool adds = to.query_sums.data != nullptr;

  scratch = aligned_scratch(scratch);
  A* const dq_tiles = reinterpret_cast<A*>(scratch + threads * tiling.backward_bytes());  // each followed by its delta
  std::byte* const behind = reinterpret_cast<std::byte*>(dq_tiles + tiling.query_gradients());
  // The steps that each task has finished; a step is a query head of the group and a tile of its rows.
  int64_t* const finished = reinterpret_cast<int64_t*>(aligned_scratch(behind));
  const int64_t heads = s.B * s.Hkv;
  std::fill_n(finished, heads * blocks, int64_t{0});
  std::atomic<int64_t> next = 0;
#pragma omp parallel num_threads(threads)
  for (int64_t task = next++; task < heads * blocks; task = next++) {
    const int64_t block = task / heads, b = task % heads / s.Hkv, hk = task % s.Hkv;
    [[maybe_unused]] const typename How::Session session;
    const KeyBlock k(s, from, b, hk, block * KeyBlock::key_block,
                     scratch + omp_get_thread_num() * tiling.backward_bytes());
    for (int64_t step = 0; step < group * tiles; ++step) {
      const int64_t h = hk * group + step / tiles, tile = step % tiles, begin = tile * tile_rows,
                    n = std::min(tile_rows, s.queries.rows - begin);
      const KeyRange seen = keys_of_rows(s, k.positions, begin, n);
      A *dq = dq_tiles + ((b * s.Hq + h) * tiles + tile) * (dq_elements + tile_rows), *delta = dq + dq_elements;
      const GradientHead dqueries(to.queries, to.query_sums, s.queries, b, h, s.D);
      const auto write_dq = [&] {
        for (int64_t i = 0; i < n; ++i)
          for (int64_t d = 0; d < s.D; d += C)
            dqueries.write(begin + i, d, dq + d * tile_rows + i * C, k.scale, std::min(C, s.D - d));
      };
      if (seen.empty() && block == 0 && !adds) {
        std::fill_n(dq, dq_elements, A(0));
        write_dq();
      }
      if (!seen.overlaps(k.key, k.key + k.keys)) continue;
      const int64_t row = b * s.queries.length + s.queries.first + begin, at = row * stride + h * s.D;
      k.pack_queries(head_of(from.queries, s.queries, b, h, s.D) + begin * from.queries.stride, from.queries.stride,
                     dout + at, stride, n);
      const bool first_block = seen.first >= k.key, last_block = seen.last <= k.key + k.keys;
      if (first_block) {
        k.delta_of_rows(delta, out + at, stride, n);
      } else {
        const std::atomic_ref before(finished[task - heads]);
        for (int64_t steps; (steps = before.load(std::memory_order_acquire)) <= step;) before.wait(steps);
      }
      k.add_queries(dq, lse + (b * s.Hq + h) * s.queries.length + s.queries.first + begin, delta, begin, n,
                    first_block ? Accumulate::no : Accumulate::yes);
      if (last_block) write_dq();
      const std::atomic_ref own(finished[task]);
      own.store(step + 1, std::memory_order_release);
      own.notify_all();
    }
    const KeyRange all{k.key, k.key + k.keys};
    k.write(to, adds ? keys_of_rows(s, k.positions, 0, s.queries.rows).within(all.first, all.last) : all);
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
