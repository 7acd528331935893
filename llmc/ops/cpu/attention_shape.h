// attention_shape.h: how attention on CPUs is divided, the same for all instruction sets.
#pragma once
#include "core/shape.h"
#include "ops/cpu/matmul_shape.h"
#include "ops/types.h"

namespace llmc::cpu {

// Sizes of the blocks of queries and keys whose scores stay in a core's caches, and the scratch that a thread needs.
// Results depend on these sizes, but not on the number of threads.
struct AttentionTiles {
  static constexpr int64_t keys = 256;              // per block, at most
  static constexpr int64_t forward_queries = 256;   // for which a thread packs keys and values once
  static constexpr int64_t backward_queries = 112;  // scores are in memory for at most this many at a time

  AttentionBlock s;
  int64_t element;  // bytes of an accumulator
  AttentionTiles(const AttentionBlock& block, int64_t bytes_of_sum) : s(block), element(bytes_of_sum) {}

  // One or two rows against more keys, as when a text is generated token by token: packing the keys would take longer
  // than the attention.
  bool few_rows() const { return s.queries.rows < 3 && s.queries.rows < s.keys.rows; }
  int64_t key_blocks() const { return ceil_div(s.keys.rows, keys); }

  // Bytes for each thread.
  int64_t forward_bytes() const {
    if (few_rows()) return bytes({s.D + s.keys.rows});
    const int64_t K = std::min(keys, s.keys.rows) + max_tile, Q = std::min(forward_queries, s.queries.rows) + max_tile;
    return bytes({K * padded_channels(), K * padded_channels(), Q * padded_channels(), Q * padded_channels(), 2 * Q,
                  K * max_tile, K * max_tile, max_tile * max_tile});
  }
  int64_t backward_bytes() const {
    const int64_t K = std::min(keys, s.keys.rows) + max_tile, Q = std::min(backward_queries, s.queries.rows) + max_tile;
    const int64_t block = K * padded_channels(), tile = Q * padded_channels();
    return bytes({block, block, block, block, block, tile, tile, tile, tile, max_tile * padded_channels(), Q * max_tile,
                  Q * max_tile, Q * max_tile, Q * K, max_tile * max_tile});
  }
  // Elements of dQ of all heads and sequences, in whole tiles, and a delta for each row.
  int64_t query_gradients() const {
    const int64_t rows = std::max({in_tiles(112), in_tiles(108), in_tiles(96)});  // query tiles of the sets
    return s.B * s.Hq * rows * (round_up(s.D, max_tile) + 1);
  }

 private:
  static constexpr int64_t max_tile = 32;  // rows and columns of a tile of any instruction set

  // Query rows in tiles of `rows`, or in one tile that is as high as they need.
  int64_t in_tiles(int64_t rows) const {
    return s.queries.rows > rows ? round_up(s.queries.rows, rows) : std::min(rows, s.queries.rows + max_tile - 1);
  }
  // Channels in whole tiles of any instruction set.
  int64_t padded_channels() const {
    return std::max({round_up(s.D, int64_t{6}), round_up(s.D, int64_t{14}), round_up(s.D, max_tile)});
  }
  int64_t bytes(std::initializer_list<int64_t> counts) const {
    int64_t sum = 0;
    for (const int64_t count : counts)  // room for packing beyond an array, and for aligning the next one
      sum += (count + 2 * beyond_panels) * element;
    return round_up(sum, int64_t{64});
  }
};

// Bytes of scratch for all threads. `element`: bytes of an accumulator
inline int64_t attention_forward_scratch(const AttentionBlock& s, int64_t element, int threads) {
  return threads * AttentionTiles(s, element).forward_bytes() + 64;
}
inline int64_t attention_backward_scratch(const AttentionBlock& s, int64_t element, int threads) {
  const AttentionTiles tiles(s, element);
  return threads * tiles.backward_bytes() + tiles.query_gradients() * element +
         s.B * s.Hkv * tiles.key_blocks() * static_cast<int64_t>(sizeof(int64_t)) + 3 * 64;
}

}  // namespace llmc::cpu
