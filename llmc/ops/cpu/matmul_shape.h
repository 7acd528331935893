// matmul_shape.h: the arguments of a product on CPUs, the same for all instruction sets.
#pragma once
#include "core/dtype.h"
#include "core/shape.h"
#include "ops/types.h"

namespace llmc::cpu {

// C (M, N) = or += op(A) op(B) + bias. Row-major and contiguous; A is stored (M, K) or, transposed, (K, M); B (K, N) or
// (N, K); bias (N) in the dtype of A and B. C has that dtype too, or fp32 for bf16 inputs. Accumulates in fp32 (fp64
// for fp64), in the order of k, whatever the number of threads and of other rows and columns.
struct MatmulShape {
  int64_t M, N, K;
  Transpose a, b;
  Accumulate accumulate;
  DType in, out;
  Bias bias;
  int threads;
};

inline std::string to_string(const MatmulShape& s) {
  return formatted("C ({}, {}) {} {} {}{}, A and B in {}, C in {}, {} threads", s.M, s.N,
                   s.accumulate == Accumulate::yes ? "+=" : "=",
                   s.a == Transpose::yes ? formatted("A ({}, {})^T", s.K, s.M) : formatted("A ({}, {})", s.M, s.K),
                   s.b == Transpose::yes ? formatted("B ({}, {})^T", s.N, s.K) : formatted("B ({}, {})", s.K, s.N),
                   s.bias == Bias::yes ? " + bias" : "", s.in, s.out, s.threads);
}

// Elements that packing may write beyond the end of the panels (panels.h).
inline constexpr int64_t beyond_panels = 64;

// How a product is divided: into rectangles of C that threads take one after another, each with packed panels of its
// own; within one, into blocks of rows, strips of columns and blocks of k. None of this changes a bit of C, so threads
// and caches decide it, but not the instruction set, or a plan for another processor would be wrong.
struct MatmulBlocks {
  static constexpr int64_t most_depth = 1024, most_elements = 1 << 20, most_columns = 1024;  // elements: of packed A
  static constexpr int64_t strip = 128;      // columns of packed B: panels of up to 32
  static constexpr int64_t least_rows = 56;  // of a rectangle, or packing takes too much of the time
  static constexpr int64_t least_columns = 64;
  int64_t rectangle_rows, rectangle_columns;
  int64_t rows, columns, depth;

  explicit MatmulBlocks(const MatmulShape& s)
      : rectangle_rows(std::max<int64_t>(s.M, 1)), rectangle_columns(std::max<int64_t>(s.N, 1)) {
    // Each row of rectangles packs B anew, each column of them A; lines that are not contiguous along k cost twice.
    const int64_t cost_a = s.a == Transpose::no ? 1 : 2, cost_b = s.b == Transpose::yes ? 1 : 2;
    const auto count = [&] { return ceil_div(s.M, rectangle_rows) * ceil_div(s.N, rectangle_columns); };
    while (count() < wanted(s)) {
      const bool rows_can = rectangle_rows >= 2 * least_rows, columns_can = rectangle_columns >= 2 * least_columns;
      if (!rows_can && !columns_can) break;
      const bool by_rows = rows_can && (!columns_can || rectangle_columns * cost_b < rectangle_rows * cost_a);
      int64_t& divided = by_rows ? rectangle_rows : rectangle_columns;
      divided = round_up(ceil_div(divided, 2), by_rows ? least_rows : least_columns);
    }
    depth = std::clamp<int64_t>(s.K, 1, most_depth);
    rows =
        std::clamp(most_elements / depth / least_rows * least_rows, least_rows, round_up(rectangle_rows, least_rows));
    columns = depth >= s.K ? rectangle_columns : std::min(rectangle_columns, most_columns);
  }

  // Bytes for each thread: packed blocks of A and panels of B, the sums of a block whose K is divided. Instruction sets
  // round rows and depth up to whole tiles, of at most 32.
  int64_t thread_bytes(const MatmulShape& s) const {
    const int64_t element = s.in == DType::fp64 ? 8 : 4, whole_rows = rows + 32;
    const int64_t packed =
        ((whole_rows + strip) * (s.in == DType::bf16 ? round_up(depth, int64_t{32}) : depth) + 2 * beyond_panels) *
        element;
    const int64_t sums = depth >= s.K ? 0 : whole_rows * round_up(columns, strip) * element;
    return round_up(packed, int64_t{64}) + round_up(sums, int64_t{64}) + 64;
  }

 private:
  static int64_t wanted(const MatmulShape& s) { return s.threads <= 4 ? s.threads : 2 * s.threads; }
};

// Bytes of scratch that matmul() needs; it begins at the first whole cache line of them.
inline int64_t matmul_scratch(const MatmulShape& s) { return s.threads * MatmulBlocks(s).thread_bytes(s) + 64; }
inline std::byte* aligned_scratch(std::byte* scratch) {
  return reinterpret_cast<std::byte*>(round_up(reinterpret_cast<intptr_t>(scratch), intptr_t{64}));
}

// The tiles of the products of experts; one thread computes a tile.
struct GroupedTile {
  static constexpr int64_t rows = 448, columns = 512;
};
inline MatmulShape grouped_tile_shape(int64_t M, int64_t N, int64_t K, DType in) {
  return {.M = M,
          .N = N,
          .K = K,
          .a = Transpose::no,
          .b = Transpose::no,
          .accumulate = Accumulate::no,
          .in = in,
          .out = in,
          .bias = Bias::no,
          .threads = 1};
}
// Bytes of scratch for each thread, and for all, for products that sum at most K elements.
inline int64_t grouped_thread_bytes(int64_t K, DType in) {
  const MatmulShape most = grouped_tile_shape(GroupedTile::rows, GroupedTile::columns, K, in);
  return MatmulBlocks(most).thread_bytes(most);
}
inline int64_t grouped_scratch(int64_t K, DType in, int threads) { return threads * grouped_thread_bytes(K, in) + 64; }

}  // namespace llmc::cpu
