// attention_backward.h: the gradients of attention.h, by blocks of keys. With P the probabilities, dO the gradient of
// the output, and scores S = Q K^T / sqrt(D):
//   dV = P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(P dP)),   dQ = dS K / sqrt(D),   dK = dS^T Q / sqrt(D)
// P is recomputed from the saved log-sum-exp (Dao 2023, FlashAttention-2). The row sum of P dP is the one of dO O.
// Where one key has nearly all of the probability, O is its value, and the two terms of dS cancel; so the sum is taken
// by the products that give dP, whose rounding is then the same.
#pragma once
#include <omp.h>

#include <atomic>
#include <thread>

#include "ops/cpu/attention_tiles.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

namespace detail {

// A block of keys of one head and sequence: dK and dV of its keys, and what it adds to dQ.
template <class T, class How, class A>
struct KeyBlockGradients {
  using Packed = typename How::Packed;
  static constexpr int64_t R = How::rows, C = How::columns, of_block = AttentionTiles::keys,
                           of_tile = AttentionTiles::backward_queries / R * R;  // keys, rows of queries
  static_assert(of_block % C == 0);

  static int64_t rows_of_tile(const AttentionBlock& s) { return std::min(of_tile, round_up(s.queries.rows, R)); }

  const AttentionBlock& s;
  const AttentionInputs<T>& from;
  int64_t b, hk, key, keys;  // sequence, key-value head, keys [key, key + keys)
  const int32_t* places = places_of(from.positions, s.queries, b);
  A scale = A(1) / std::sqrt(static_cast<A>(s.D));
  int64_t depth = round_up(s.D, How::step), keys_depth = round_up(keys, How::step);  // of packed lines
  int64_t D_rows = round_up(s.D, R);
  int64_t tile_rows = rows_of_tile(s), tile_keys = round_up(keys, C);  // what there is memory for

  // Operands: those called rows have a line for each key or query, of D elements; the others a line for each channel.
  Packed *k_rows, *v_rows, *k_channels;
  Packed *q_rows, *g_rows, *o_rows, *q_channels, *g_channels;  // of a tile of queries; g is dO
  A *p, *dp;                                                   // (queries, C), of the tile and a panel of keys
  Packed *packed, *ds_rows;
  A *dk, *dv;  // transposed: a panel (D, C) for every C keys
  A* square;

  KeyBlockGradients(const AttentionBlock& block, const AttentionInputs<T>& inputs, int64_t sequence, int64_t head,
                    int64_t first, std::byte* scratch)
      : s(block), from(inputs), b(sequence), hk(head), key(first), keys(std::min(of_block, block.keys.rows - first)) {
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

  // n rows of queries from `begin` on, and dO; both transposed as well.
  void take_queries(const T* q, int64_t q_stride, const T* dout, int64_t dout_stride, int64_t n) const {
    pack_a<How>(q_rows, Lines<T>{q, q_stride, 1}, n, s.D);
    pack_a<How>(g_rows, Lines<T>{dout, dout_stride, 1}, n, s.D);
    pack_a<How>(q_channels, Lines<T>{q, 1, q_stride}, s.D, n);
    pack_a<How>(g_channels, Lines<T>{dout, 1, dout_stride}, s.D, n);
  }

  // means (n) = the diagonal of dO O^T, in tiles.
  void means_of_rows(A* means, const T* out, int64_t stride, int64_t n) const {
    for (int64_t i = 0; i < n; i += R) {
      alignas(64) A products[R * round_up(R, C)];
      const int64_t rows = std::min(R, n - i);
      pack_b<How>(o_rows, Lines<T>{out + i * stride, stride, 1}, rows, s.D);
      for (int64_t r = 0; r < rows; r += C)
        multiply_panels<How>(products + r * R, {g_rows + i * depth, depth}, o_rows + r * depth, rows, s.D,
                             Accumulate::no);
      for (int64_t r = 0; r < rows; ++r) means[i + r] = products[r / C * R * C + r * C + r % C];
    }
  }

  // Adds what n rows of queries, from row `begin` of the block on, give dK and dV; dq (D / C, tile_rows, C) = or +=
  // what the keys give theirs. lse, means: of the rows
  void add_queries(A* dq, const A* lse, const A* means, int64_t begin, int64_t n, Accumulate accumulate) const {
    // The keys that each row sees, and in whole panels those of this block that any of a tile's rows sees.
    KeyRange visible[of_tile], of_rows[of_tile / R];
    for (int64_t i = 0; i < n; ++i) visible[i] = keys_of_row(s, places, begin + i);
    for (int64_t i = 0; i < n; i += R) {
      const KeyRange any = keys_of_rows(s, places, begin + i, std::min(R, n - i)).within(key, key + keys);
      of_rows[i / R] = any.empty() ? KeyRange{} : KeyRange{(any.first - key) / C * C, any.last - key};
    }
    for (int64_t j = 0; j < keys; j += C) {
      KeyRange seeing{n, 0};  // rows, in whole tiles, that see any of these keys
      for (int64_t i = 0; i < n; i += R)
        if (of_rows[i / R].overlaps(j, j + C)) seeing = {std::min(seeing.first, i), std::min(i + R, n)};
      if (!seeing.empty()) add_panel(j, seeing.first, seeing.last - seeing.first, n, lse, means, visible);
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
        for (const auto& [head, x, factor] : {std::tuple{&dkeys, dk, scale}, {&dvalues, dv, A(1)}}) {
          transposed_lines(square, x + j * D_rows + d * C, C, channels);
          for (int64_t i = 0; i < std::min(C, keys - j); ++i)
            if (written.covers(key + j + i, key + j + i + 1))
              head->write(key + j + i, d, square + i * channels, factor, channels);
        }
      }
  }

 private:
  // Rows [i0, i0 + rows) of the n of a tile, with the panel of keys from j on: adds to dK and dV, sets dS in ds_rows.
  void add_panel(int64_t j, int64_t i0, int64_t rows, int64_t n, const A* lse, const A* means,
                 const KeyRange* visible) const {
    multiply_panels<How>(p, {q_rows + i0 * depth, depth}, k_rows + j * depth, rows, s.D, Accumulate::no);
    multiply_panels<How>(dp, {g_rows + i0 * depth, depth}, v_rows + j * depth, rows, s.D, Accumulate::no);
    score_gradients<How>(p, dp, scale, rows, key + j, lse + i0, means + i0, visible + i0);
    for (int64_t i = 0; i < rows; i += R) {
      const int64_t height = std::min(R, rows - i), width = std::min(C, keys - j),
                    of_panel = (How::group_a == 32 ? R : height) * round_up(width, How::step);
      alignas(64) Packed panel[R * C + 64];  // packing writes beyond its end
      pack_a<How>(panel, Lines<A>{dp + i * C, C, 1}, height, width);
      std::copy_n(panel, of_panel, ds_rows + (i0 + i) * keys_depth + of_panel / round_up(width, How::step) * j);
    }
    const int64_t n_depth = round_up(n, How::step);
    multiply_panels<How>(dv + j * D_rows, {g_channels, n_depth, i0}, pack_columns<How>(packed, p, rows), s.D, rows,
                         Accumulate::yes);
    multiply_panels<How>(dk + j * D_rows, {q_channels, n_depth, i0}, pack_columns<How>(packed, dp, rows), s.D, rows,
                         Accumulate::yes);
  }
};

}  // namespace detail

// One thread per (sequence, key-value head, block of keys), which has dK and dV of them. What it adds to dQ is added in
// the order of the blocks: a thread waits until the block before has been added to the rows that it comes to. Blocks
// are begun in that order too, and the first one waits for nobody.
// scratch: attention_backward_scratch() bytes
template <class T, class How = Multiply<accumulator_t<T>>, class A = accumulator_t<T>>
void attention_backward(const AttentionGradients<T, A>& to, const T* dout, const T* out, const A* lse,
                        const AttentionInputs<T>& from, std::byte* scratch, const AttentionBlock& s, int threads) {
  using namespace detail;
  using KeyBlock = KeyBlockGradients<T, How, A>;
  constexpr int64_t C = How::columns;
  const AttentionTiles tiling(s, sizeof(A));
  const int64_t blocks = tiling.key_blocks(), tile_rows = KeyBlock::rows_of_tile(s),
                tiles = ceil_div(s.queries.rows, tile_rows), group = s.Hq / s.Hkv,
                stride = s.Hq * s.D;  // of dout and out
  const int64_t dq_elements = tile_rows * round_up(s.D, C);
  const bool adds = to.query_sums.data != nullptr;

  scratch = aligned_scratch(scratch);
  A* const sums = reinterpret_cast<A*>(scratch + threads * tiling.backward_bytes());  // of each tile dQ, and the means
  std::byte* const behind = reinterpret_cast<std::byte*>(sums + tiling.query_gradients());
  // How many (query head of the group, tile of query rows) each block of keys has been added to.
  int64_t* const added = reinterpret_cast<int64_t*>(aligned_scratch(behind));
  std::fill_n(added, s.B * s.Hkv * blocks, int64_t{0});
  std::atomic<int64_t> next = 0;
#pragma omp parallel num_threads(threads)
  for (int64_t task = next++; task < s.B * s.Hkv * blocks; task = next++) {
    const int64_t b = task / blocks / s.Hkv, hk = task / blocks % s.Hkv, block = task % blocks;
    [[maybe_unused]] const typename How::Session session;
    const KeyBlock k(s, from, b, hk, block * KeyBlock::of_block,
                     scratch + omp_get_thread_num() * tiling.backward_bytes());
    for (int64_t step = 0; step < group * tiles; ++step) {
      const int64_t h = hk * group + step / tiles, tile = step % tiles, begin = tile * tile_rows,
                    n = std::min(tile_rows, s.queries.rows - begin);
      const KeyRange seen = keys_of_rows(s, k.places, begin, n);
      A *dq = sums + ((b * s.Hq + h) * tiles + tile) * (dq_elements + tile_rows), *means = dq + dq_elements;
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
      k.take_queries(head_of(from.queries, s.queries, b, h, s.D) + begin * from.queries.stride, from.queries.stride,
                     dout + at, stride, n);
      const bool first_block = seen.first >= k.key, last_block = seen.last <= k.key + k.keys;
      if (first_block) k.means_of_rows(means, out + at, stride, n);
      while (!first_block && std::atomic_ref(added[task - 1]).load(std::memory_order_acquire) <= step)
        std::this_thread::yield();
      k.add_queries(dq, lse + (b * s.Hq + h) * s.queries.length + s.queries.first + begin, means, begin, n,
                    first_block ? Accumulate::no : Accumulate::yes);
      if (last_block) write_dq();
      std::atomic_ref(added[task]).store(step + 1, std::memory_order_release);
    }
    const KeyRange all{k.key, k.key + k.keys};
    k.write(to, adds ? keys_of_rows(s, k.places, 0, s.queries.rows).within(all.first, all.last) : all);
  }
}

}  // namespace CPU_ISA
}  // namespace llmc::cpu
