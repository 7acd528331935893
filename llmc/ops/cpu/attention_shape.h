// attention_shape.h: how attention on CPUs is divided, the same for all instruction sets.
#pragma once
#include <algorithm>

#include "core/shape.h"
#include "ops/cpu/matmul_shape.h"
#include "ops/types.h"

namespace llmc::cpu {

// Blocks of queries and keys whose scores stay in a core's caches, and what a thread needs for them. Results depend on
// them, and not on the number of threads.
struct AttentionTiles {
  static constexpr int64_t keys = 256;              // of a block, at most
  static constexpr int64_t forward_queries = 256;   // for which a thread packs keys and values once
  static constexpr int64_t backward_queries = 112;  // whose scores are in memory at a time, at most

  AttentionBlock s;
  int64_t element;  // bytes of an accumulator
  AttentionTiles(const AttentionBlock& block, size_t size) : s(block), element(static_cast<int64_t>(size)) {}

  // One or two rows against more keys, as when a text is generated token by token: packing the keys would take longer
  // than the attention.
  bool few_rows() const { return s.queries.rows < 3 && s.queries.rows < s.keys.rows; }
  int64_t key_blocks() const { return ceil_div(s.keys.rows, keys); }

  // Bytes for each thread.
  int64_t forward_bytes() const {
    if (few_rows()) return bytes({s.D + s.keys.rows});
    const int64_t K = std::min(keys, s.keys.rows) + most, Q = std::min(forward_queries, s.queries.rows) + most;
    return bytes({K * D(), K * D(), Q * D(), Q * D(), 2 * Q, K * most, K * most, most * most});
  }
  int64_t backward_bytes() const {
    const int64_t K = std::min(keys, s.keys.rows) + most, Q = std::min(backward_queries, s.queries.rows) + most;
    const int64_t block = K * D(), tile = Q * D();
    return bytes({block, block, block, block, block, tile, tile, tile, tile, most * D(), Q * most, Q * most, Q * most,
                  Q * K, most * most});
  }
  // Elements of what all heads and sequences have added up of dQ, and the mean of dP for each of its rows.
  int64_t query_gradients() const {
    const int64_t rows = s.queries.rows + (s.queries.rows > backward_queries - most / 2 ? backward_queries : most);
    return s.B * s.Hq * rows * (D() + 1);
  }

 private:
  static constexpr int64_t most = 32;  // rows and columns of a tile of any instruction set

  // Channels in whole tiles of any instruction set.
  int64_t D() const { return std::max({round_up(s.D, int64_t{6}), round_up(s.D, int64_t{14}), round_up(s.D, most)}); }
  int64_t bytes(std::initializer_list<int64_t> counts) const {
    constexpr int64_t beyond = 128;  // of an array: what packing writes, and what aligns the next one
    int64_t sum = 0;
    for (const int64_t count : counts) sum += (count + beyond) * element;
    return round_up(sum, int64_t{64});
  }
};

// Bytes of scratch for all threads. `element`: bytes of an accumulator
inline int64_t attention_forward_scratch(const AttentionBlock& s, int64_t element, int threads) {
  return threads * AttentionTiles(s, static_cast<size_t>(element)).forward_bytes() + 64;
}
inline int64_t attention_backward_scratch(const AttentionBlock& s, int64_t element, int threads) {
  const AttentionTiles tiles(s, static_cast<size_t>(element));
  return threads * tiles.backward_bytes() + tiles.query_gradients() * element +
         s.B * s.Hkv * tiles.key_blocks() * static_cast<int64_t>(sizeof(int64_t)) + 3 * 64;
}

}  // namespace llmc::cpu
