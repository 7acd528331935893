// matmul.h: C = op(A) op(B) on the CPU: by oneDNN if built in, else (and always in double) by our own blocked matmul.
// Contracts: ops/ops.h.
#pragma once
#include <omp.h>

#include <map>
#include <memory>
#include <tuple>

#include "ops/cpu/pack.h"
#ifdef TRAIN_GPT_ONEDNN
#include "ops/cpu/onednn.h"
#endif

namespace llmc::cpu {

using llmc::Bias;
using llmc::Transpose;

// C (M, N) = or += op(A) op(B) + bias. Row-major and contiguous; A is stored (M, K) or, transposed, (K, M); B (K, N) or
// (N, K); bias (N) in the dtype of A and B. C has that dtype too, or fp32 for bf16 inputs. Accumulates in fp32 (fp64
// for fp64).
struct MatmulShape {
  int64_t M, N, K;
  Transpose a, b;
  Accumulate accumulate;
  DType in, out;
  Bias bias;
  int threads;
  auto key() const { return std::make_tuple(M, N, K, a, b, accumulate, in, out, bias, threads); }
};

inline std::string to_string(const MatmulShape& s) {
  return formatted("C ({}, {}) {} {} {}{}, A and B in {}, C in {}, {} threads", s.M, s.N,
                   s.accumulate == Accumulate::yes ? "+=" : "=",
                   s.a == Transpose::yes ? formatted("A ({}, {})^T", s.K, s.M) : formatted("A ({}, {})", s.M, s.K),
                   s.b == Transpose::yes ? formatted("B ({}, {})^T", s.N, s.K) : formatted("B ({}, {})", s.K, s.N),
                   s.bias == Bias::yes ? " + bias" : "", s.in, s.out, s.threads);
}

namespace detail {

// The tiles of C depend on the shape alone, never on the thread count: one thread computes a tile, and each element is
// summed in the order of k.
struct MatmulTiles {
  static constexpr int64_t depth = 192;  // of k: a panel of B, (192, 32) fp32, stays in an L1 cache of 32 KiB
  static constexpr int64_t max_rows = 128;
  int64_t rows, columns;

  // A tile and its packed operands take at most 512 KiB of a thread's stack and fit into an L2 cache.
  static constexpr int64_t max_columns(int64_t element_bytes) { return element_bytes == 8 ? 128 : 256; }
  explicit MatmulTiles(const MatmulShape& s) {
    rows = std::min(max_rows, s.M);
    columns = std::min(max_columns(size_of(s.in)), round_up(s.N, panel_width));
    // At least 32 tiles, unless they become too small to repay the packing.
    while (columns > 64 && ceil_div(s.M, rows) * ceil_div(s.N, columns) < 32)
      columns = round_up(columns / 2, panel_width);
    while (rows > 64 && ceil_div(s.M, rows) * ceil_div(s.N, columns) < 32) rows /= 2;
  }
};

// The tile of C that begins at (m0, n0).
template <class T, class Out, class A = accumulator_t<T>>
void matmul_tile(Out* c, const T* a, const T* b, const T* bias, const MatmulShape& s, const MatmulTiles& tiles,
                 int64_t m0, int64_t n0) {
  constexpr int64_t width = panel_width, depth = MatmulTiles::depth;
  constexpr int64_t columns_at_most = MatmulTiles::max_columns(sizeof(A));
  alignas(64) A tile[MatmulTiles::max_rows * columns_at_most];  // (columns / 32, rows, 32)
  alignas(64) A panels[depth * columns_at_most];
  alignas(64) A packed_a[MatmulTiles::max_rows * depth];  // (rows, depth) or, of a transposed A, (depth, rows)
  const int64_t m = std::min(tiles.rows, s.M - m0), n = std::min(tiles.columns, s.N - n0);
  const int64_t a_row = s.a == Transpose::no ? depth : 1, a_k = s.a == Transpose::no ? 1 : tiles.rows;
  for (int64_t k0 = 0; k0 == 0 || k0 < s.K; k0 += depth) {
    const int64_t k = std::min(depth, s.K - k0);
    if (s.a == Transpose::no)
      for (int64_t i = 0; i < m; ++i) widen(packed_a + i * depth, a + (m0 + i) * s.K + k0, k);
    else
      for (int64_t j = 0; j < k; ++j) widen(packed_a + j * tiles.rows, a + (k0 + j) * s.M + m0, m);
    if (s.b == Transpose::no) panels_of(panels, b + k0 * s.N + n0, s.N, k, n);
    else panels_of_transposed(panels, b + n0 * s.K + k0, s.K, k, n);
    for (int64_t j = 0; j < n; j += width)
      small_matmul(tile + j * tiles.rows, width, packed_a, a_row, a_k, panels + j * k, width, m, width, k,
                   k0 == 0 ? Accumulate::no : Accumulate::yes);
  }
  for (int64_t i = 0; i < m; ++i)
    for (int64_t first = 0; first < n; first += width) {
      const A* from = tile + first * tiles.rows + i * width;
      Out* to = c + (m0 + i) * s.N + n0 + first;
      const int64_t columns = std::min(width, n - first);
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) {
        A value = from[j];
        if (bias != nullptr) value += static_cast<A>(bias[n0 + first + j]);
        if (s.accumulate == Accumulate::yes) value += static_cast<A>(to[j]);
        store(to[j], value);
      }
    }
}

template <class T, class Out>
void blocked_matmul(Out* c, const T* a, const T* b, const T* bias, const MatmulShape& s) {
  const MatmulTiles tiles(s);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(s.threads)
  for (int64_t m0 = 0; m0 < s.M; m0 += tiles.rows)
    for (int64_t n0 = 0; n0 < s.N; n0 += tiles.columns) matmul_tile(c, a, b, bias, s, tiles, m0, n0);
}

}  // namespace detail

// A prepared matmul; cheap to copy.
class Matmul {
 public:
  // Cached by shape, per host thread.
  static Matmul prepare(const MatmulShape& shape) {
    const DType sum = shape.in == DType::fp64 ? DType::fp64 : DType::fp32;
    CHECK(shape.out == shape.in || shape.out == sum, "matmul cannot write {} from {} inputs: use {} or {}; {}",
          shape.out, shape.in, shape.in, sum, to_string(shape));
    CHECK(shape.M >= 0 && shape.N >= 0 && shape.K >= 0 && shape.threads > 0, "matmul: {}", to_string(shape));
    Matmul product;
    product.shape_ = shape;
#ifdef TRAIN_GPT_ONEDNN
    const bool empty = shape.M == 0 || shape.N == 0 || shape.K == 0;
    if (empty || !onednn::multiplies(shape.in, shape.K)) return product;
    thread_local std::map<decltype(shape.key()), std::shared_ptr<const onednn::Matmul>> prepared;
    auto& entry = prepared[shape.key()];
    if (!entry)
      entry = std::make_shared<const onednn::Matmul>(
          onednn::MatmulProblem{shape.M, shape.N, shape.K, shape.a == Transpose::yes, shape.b == Transpose::yes,
                                shape.accumulate == Accumulate::yes, shape.bias == Bias::yes, shape.in, shape.out,
                                shape.threads, to_string(shape)});
    product.onednn_ = entry;
#endif
    return product;
  }

  // Or our own?
  bool by_onednn() const {
#ifdef TRAIN_GPT_ONEDNN
    return onednn_ != nullptr;
#else
    return false;
#endif
  }

  int64_t scratch_bytes() const {
#ifdef TRAIN_GPT_ONEDNN
    if (onednn_) return onednn_->scratch_bytes();
#endif
    return 0;
  }

  // Call on a thread whose OpenMP thread count is shape.threads.
  void run(void* c, const void* a, const void* b, const void* bias, void* scratch) const {
    if (shape_.M == 0 || shape_.N == 0) return;
#ifdef TRAIN_GPT_ONEDNN
    if (onednn_) return onednn_->run(c, a, b, bias, scratch);
#endif
    (void)scratch;
    with_type(shape_.in, [&](auto in) {
      with_type(shape_.out, [&](auto out) {
        using T = typename decltype(in)::type;
        using Out = typename decltype(out)::type;
        if constexpr (std::is_same_v<T, Out> || std::is_same_v<accumulator_t<T>, Out>)
          detail::blocked_matmul(static_cast<Out*>(c), static_cast<const T*>(a), static_cast<const T*>(b),
                                 static_cast<const T*>(bias), shape_);
      });
    });
  }

 private:
  MatmulShape shape_{};
#ifdef TRAIN_GPT_ONEDNN
  std::shared_ptr<const onednn::Matmul> onednn_;
#endif
};

inline std::string matmul_library() {
#ifdef TRAIN_GPT_ONEDNN
  return onednn::version();
#else
  return "our own blocked matmul (oneDNN was not built in)";
#endif
}

// Does this processor multiply bf16 natively, or is bf16 widened to fp32 first (correct, but slow)?
inline bool bf16_is_native() {
#ifdef TRAIN_GPT_ONEDNN
  return onednn::bf16_is_native();
#else
  return false;
#endif
}

}  // namespace llmc::cpu
