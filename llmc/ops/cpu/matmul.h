// matmul.h: C = op(A) op(B) on the CPU: oneDNN where it was built in, else (and always in double) a blocked product of
// our own. Contracts: ops/ops.h.
#pragma once
#include <omp.h>

#include <map>
#include <memory>
#include <tuple>

#include "ops/cpu/simd.h"
#ifdef TRAIN_GPT_ONEDNN
#include "ops/cpu/onednn.h"
#endif

namespace llmc::cpu {

enum class Transpose : uint8_t { no, yes };
enum class Bias : uint8_t { no, yes };

// C (M, N) = or += op(A) op(B) + bias. Row-major and dense; A is stored (M, K) or, transposed, (K, M); B (K, N) or (N,
// K); bias (N) in the dtype of A and B. C is in the same dtype, or fp32 where they are bf16. Sums are in fp32 (fp64 for
// fp64).
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
  return formatted("{} matmul {} x {} x {} to {}", s.in, s.M, s.N, s.K, s.out);
}

namespace detail {

// Tiles of C in parallel; for each, panels of op(A) and op(B) are packed and widened, then multiplied in the cache.
// Each element is added up in the order of k, whatever the number of threads.
template <class T, class Out>
void blocked_matmul(Out* c, const T* a, const T* b, const T* bias, const MatmulShape& s) {
  using A = accumulator_t<T>;
  constexpr int64_t MB = 64, NB = 64, KB = 256;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t m0 = 0; m0 < s.M; m0 += MB)
    for (int64_t n0 = 0; n0 < s.N; n0 += NB) {
      alignas(64) A tile[MB * NB], panel_a[MB * KB], panel_b[KB * NB];
      const int64_t m = std::min(MB, s.M - m0), n = std::min(NB, s.N - n0);
      std::fill(tile, tile + MB * NB, A(0));
      if (n < NB) std::fill(panel_b, panel_b + KB * NB, A(0));
      for (int64_t k0 = 0; k0 < s.K; k0 += KB) {
        const int64_t k = std::min(KB, s.K - k0);
        if (s.a == Transpose::no)
          for (int64_t i = 0; i < m; ++i) widen(panel_a + i * KB, a + (m0 + i) * s.K + k0, k);
        else
          for (int64_t j = 0; j < k; ++j)
            for (int64_t i = 0; i < m; ++i) panel_a[i * KB + j] = static_cast<A>(a[(k0 + j) * s.M + m0 + i]);
        if (s.b == Transpose::no)
          for (int64_t j = 0; j < k; ++j) widen(panel_b + j * NB, b + (k0 + j) * s.N + n0, n);
        else
          for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j < k; ++j) panel_b[j * NB + i] = static_cast<A>(b[(n0 + i) * s.K + k0 + j]);
        small_matmul(tile, NB, panel_a, KB, int64_t{1}, panel_b, NB, m, NB, k, Accumulate::yes);
      }
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
          Out& to = c[(m0 + i) * s.N + n0 + j];
          A value = tile[i * NB + j];
          if (bias != nullptr) value += static_cast<A>(bias[n0 + j]);
          if (s.accumulate == Accumulate::yes) value += static_cast<A>(to);
          to = Out(value);
        }
    }
}

}  // namespace detail

// A prepared product; cheap to copy.
class Matmul {
 public:
  // Remembered by shape, for each host thread.
  static Matmul prepare(const MatmulShape& shape) {
    const DType sum = shape.in == DType::fp64 ? DType::fp64 : DType::fp32;
    CHECK(shape.out == shape.in || shape.out == sum, "no {}", to_string(shape));
    Matmul product;
    product.shape_ = shape;
#ifdef TRAIN_GPT_ONEDNN
    if (shape.in == DType::fp64 || (shape.in == DType::bf16 && !onednn::bf16_is_native())) return product;
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

  int64_t scratch_bytes() const {
#ifdef TRAIN_GPT_ONEDNN
    if (onednn_) return onednn_->scratch_bytes();
#endif
    return 0;
  }

  // On a thread whose OpenMP thread count is shape.threads.
  void run(void* c, const void* a, const void* b, const void* bias, void* scratch) const {
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

// Does this processor multiply bf16 as it is, or is it widened to fp32 first (right, but slow)?
inline bool bf16_is_native() {
#ifdef TRAIN_GPT_ONEDNN
  return onednn::bf16_is_native();
#else
  return false;
#endif
}

}  // namespace llmc::cpu
