// matmul.cuh: C = op(A) op(B) on a GPU, by cuBLASLt. Same contract as cpu/matmul.h.
//
// cuBLASLt's matrices are column-major. A row-major (M, N) matrix read that way is an (N, M) one: its own transpose. So
// cuBLASLt computes C^T = op(B)^T op(A)^T: our B is its first operand and our A the second, the sizes are N, M, K, the
// leading dimensions are our row lengths, the transposition flags stay as they are, and a bias along our N runs along
// cuBLASLt's rows, where its epilogue adds it.
//
// Bias gradients use column_sum. cuBLASLt has an epilogue for them (BGRADB, in the weight gradient's product), but it
// overwrites its output, and gradients accumulate over micro-batches.
#pragma once
#include <cublasLt.h>

#include <sstream>

#include "core/dtype.h"
#include "device/device.h"
#include "ops/cuda/launch.cuh"
#include "ops/types.h"

namespace llmc::cuda {

// C (M, N) = or += op(A) op(B) + bias. Row-major and contiguous; A is stored (M, K) or, transposed, (K, M); B (K, N) or
// (N, K). A and B are fp32 or bf16; C has the same dtype or fp32; a bias (N) requires one dtype for all and has it.
// Accumulates in fp32; Tf32::yes lets tensor cores multiply fp32 with 10-bit mantissas.
//
// Or A (M, K) and B (N, K) are E4M3 with scales for blocks (ops_quantise.h), C and the bias bf16 or fp32.
//
// Or each is `batch` such matrices in a row, without a bias and scales.
//
// Or with an epilogue, for which z (M, N) is written or read beside C: GELU in bf16 alone.
struct MatmulShape {
  int64_t M, N, K;
  Transpose a, b;
  Accumulate accumulate;
  DType in, out;
  Bias bias;
  Tf32 tf32 = Tf32::no;
  int alignment = 16;  // bytes; all addresses are multiples of it
  ScaledBy a_scaled = ScaledBy::nothing, b_scaled = ScaledBy::nothing;
  int64_t batch = 1;
  Epilogue epilogue = Epilogue::none;
  auto operator<=>(const MatmulShape&) const = default;

  bool has_gelu() const { return epilogue == Epilogue::gelu || epilogue == Epilogue::gelu_backward; }
};

struct MatmulArrays {
  void* c;
  const void *a, *b, *bias;
  void* scratch;  // aligned to matmul_workspace_alignment, and used by no other stream meanwhile
  const void *a_scales = nullptr, *b_scales = nullptr;
  void* z = nullptr;  // of an epilogue
};

// The largest power of two that divides all addresses, up to 16, the most that any algorithm needs. A null pointer
// counts as aligned.
inline int alignment_of(std::initializer_list<const void*> arrays) {
  uintptr_t bits = 16;
  for (const void* array : arrays) bits |= reinterpret_cast<uintptr_t>(array);
  return static_cast<int>(bits & (~bits + 1));
}

inline std::string to_string(const MatmulShape& s) {
  const auto scaled = [](ScaledBy by) {
    return by == ScaledBy::nothing ? "" : by == ScaledBy::tiles ? " scaled by tiles" : " scaled by segments";
  };
  const auto epilogue = [](Epilogue e) {
    switch (e) {
      case Epilogue::none: return "";
      case Epilogue::gelu: return ", z, C = GELU(z)";
      case Epilogue::gelu_backward: return ", times GELU'(z)";
      case Epilogue::residual: return " + z";
    }
    return "";
  };
  return formatted("C ({}, {}) {} {}{} {}{}{}{}, A and B in {}, C in {}, aligned to {} bytes", s.M, s.N,
                   s.accumulate == Accumulate::yes ? "+=" : "=",
                   s.a == Transpose::yes ? formatted("A ({}, {})^T", s.K, s.M) : formatted("A ({}, {})", s.M, s.K),
                   scaled(s.a_scaled),
                   s.b == Transpose::yes ? formatted("B ({}, {})^T", s.N, s.K) : formatted("B ({}, {})", s.K, s.N),
                   scaled(s.b_scaled), s.bias == Bias::yes ? " + bias" : "", epilogue(s.epilogue),
                   s.tf32 == Tf32::yes ? "tf32" : name_of(s.in), s.out, s.alignment);
}

// From cuBLASLt 12.9 on, on Hopper.
#define LEAST_CUBLAS_FOR_FP8 120900

// The arena's alignment.
inline constexpr int64_t matmul_workspace_alignment = 256;

namespace detail {

inline const char* remedy(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "check that `nvidia-smi` works and that its driver is not older than CUDA";
    case CUBLAS_STATUS_ALLOC_FAILED: return "leave cuBLASLt some device memory";
    case CUBLAS_STATUS_ARCH_MISMATCH:
    case CUBLAS_STATUS_NOT_SUPPORTED: return "make its sizes multiples of 8, or use a newer cuBLASLt";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "an earlier kernel may be the cause: CUDA_LAUNCH_BLOCKING=1 lets each report its own errors";
    default: return "please report it with the command line";
  }
}

inline void check(cublasStatus_t status, const char* call, const MatmulShape* shape) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(formatted("{} failed: {} ({}){}; {}", call, cublasLtGetStatusString(status),
                        cublasLtGetStatusName(status), shape == nullptr ? "" : " for " + to_string(*shape),
                        remedy(status)));
}

struct Destroy {
  void operator()(cublasLtHandle_t library) const { cublasLtDestroy(library); }
  void operator()(cublasLtMatmulDesc_t operation) const { cublasLtMatmulDescDestroy(operation); }
  void operator()(cublasLtMatrixLayout_t layout) const { cublasLtMatrixLayoutDestroy(layout); }
  void operator()(cublasLtMatmulPreference_t preference) const { cublasLtMatmulPreferenceDestroy(preference); }
};
template <class Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;
using MatrixLayout = Owned<cublasLtMatrixLayout_t>;

// What create(&handle, arguments...) makes.
template <class Handle, class... Parameters>
Owned<Handle> created(const char* call, const MatmulShape* shape, cublasStatus_t (*create)(Handle*, Parameters...),
                      std::type_identity_t<Parameters>... arguments) {
  Handle handle = nullptr;
  check(create(&handle, arguments...), call, shape);
  return Owned<Handle>(handle);
}

// A shape as cuBLASLt descriptors.
struct MatmulProblem {
  MatmulShape shape;
  Owned<cublasLtMatmulDesc_t> operation;
  MatrixLayout a, b, c;

  explicit MatmulProblem(const MatmulShape& s)
      : shape(s),
        operation(created("cublasLtMatmulDescCreate", &shape, cublasLtMatmulDescCreate,
                          s.tf32 == Tf32::yes ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F)),
        a(s.a == Transpose::no ? layout(s.in, s.M, s.K) : layout(s.in, s.K, s.M)),
        b(s.b == Transpose::no ? layout(s.in, s.K, s.N) : layout(s.in, s.N, s.K)),
        c(layout(s.out, s.M, s.N)) {
    set(CUBLASLT_MATMUL_DESC_TRANSA, operation_of(s.b));
    set(CUBLASLT_MATMUL_DESC_TRANSB, operation_of(s.a));
    if (s.in == DType::e4m3) set_scale_modes();
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue());
    const auto aligned = static_cast<uintptr_t>(s.alignment);  // tells the heuristic the alignment of bias and z
    if (s.bias == Bias::yes) set_bias(reinterpret_cast<const void*>(aligned));
    if (!s.has_gelu()) return;
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, s.N);
    set_z(reinterpret_cast<void*>(aligned));
  }

  void set_z(void* z) const { set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, z); }
  void set_bias(const void* bias) const { set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias); }
  void set_scales(const void* of_a, const void* of_b) const {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, of_b);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, of_a);
  }

 private:
  uint32_t epilogue() const {
    const bool bias = shape.bias == Bias::yes;
    switch (shape.epilogue) {
      case Epilogue::none:
      case Epilogue::residual: return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
      case Epilogue::gelu: return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
      case Epilogue::gelu_backward: return CUBLASLT_EPILOGUE_DGELU;
    }
    return CUBLASLT_EPILOGUE_DEFAULT;
  }
  void set_scale_modes() const {
#if CUBLAS_VERSION >= LEAST_CUBLAS_FOR_FP8
    const auto mode = [](ScaledBy by) -> int32_t {
      return by == ScaledBy::tiles ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                   : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    };
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode(shape.b_scaled));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode(shape.a_scaled));
    const void* const aligned = reinterpret_cast<const void*>(static_cast<uintptr_t>(shape.alignment));
    set_scales(aligned, aligned);  // tells the heuristic their alignment
#endif
  }
  static int32_t operation_of(Transpose transpose) { return transpose == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N; }
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) const {
    check(cublasLtMatmulDescSetAttribute(operation.get(), attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute", &shape);
  }
  MatrixLayout layout(DType dtype, int64_t rows, int64_t columns) const {
    const cudaDataType_t type = dtype == DType::bf16 ? CUDA_R_16BF : dtype == DType::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_32F;
    MatrixLayout made = created("cublasLtMatrixLayoutCreate", &shape, cublasLtMatrixLayoutCreate, type,
                                static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), columns);
    if (shape.batch > 1) {
      const auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, auto value) {
        check(cublasLtMatrixLayoutSetAttribute(made.get(), attribute, &value, sizeof value),
              "cublasLtMatrixLayoutSetAttribute", &shape);
      };
      set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, narrow<int32_t>(shape.batch));
      set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, rows * columns);
    }
    return made;
  }
};

// (nvcc 13.0 crashes in C++20 on containers of unnamed structs, such as cuBLASLt's.)
struct MatmulAlgorithm {
  cublasLtMatmulAlgo_t value{};
};

// A problem and the algorithm that computes it, whether it is added to C or not: so gradients have the same bits
// whether their first part is written or added to zeros.
struct MatmulPlan {
  MatmulProblem problem;
  cublasLtHandle_t library;
  int64_t workspace_bytes;
  MatmulAlgorithm algorithm = {};

  void run(const MatmulArrays& x, Accumulate accumulate, cudaStream_t stream) const {
    const MatmulShape& s = problem.shape;
    const bool has_residual = s.epilogue == Epilogue::residual;
    const void* addend = has_residual ? x.z : x.c;
    const float alpha = 1, beta = has_residual || accumulate == Accumulate::yes ? 1 : 0;  // with 0, it is not read
    if (s.bias == Bias::yes) problem.set_bias(x.bias);
    if (s.in == DType::e4m3) problem.set_scales(x.a_scales, x.b_scales);
    if (s.has_gelu()) problem.set_z(x.z);
    check(cublasLtMatmul(library, problem.operation.get(), &alpha, x.b, problem.b.get(), x.a, problem.a.get(), &beta,
                         addend, problem.c.get(), x.c, problem.c.get(), &algorithm.value, x.scratch,
                         static_cast<size_t>(workspace_bytes), stream),
          "cublasLtMatmul", &s);
  }

  // The algorithms that cuBLASLt's heuristic offers, presumably fastest first.
  std::vector<MatmulAlgorithm> candidates() const {
    constexpr int most = 32;
    const MatmulShape& s = problem.shape;
    const auto preference = created("cublasLtMatmulPreferenceCreate", &s, cublasLtMatmulPreferenceCreate);
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value),
            "cublasLtMatmulPreferenceSetAttribute", &s);
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace_bytes));
    const auto alignment = static_cast<uint32_t>(s.alignment);
    const auto c_alignment = std::max(alignment, static_cast<uint32_t>(size_of(s.out)));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c_alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c_alignment);
    // With split-K the partial sums are combined in fp32: in a C of bf16 they would be rounded first.
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<uint32_t>(s.out == DType::fp32 ? CUBLASLT_REDUCTION_SCHEME_MASK
                                                   : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));

    cublasLtMatmulHeuristicResult_t results[most];
    int found = 0;
    check(cublasLtMatmulAlgoGetHeuristic(library, problem.operation.get(), problem.b.get(), problem.a.get(),
                                         problem.c.get(), problem.c.get(), preference.get(), most, results, &found),
          "cublasLtMatmulAlgoGetHeuristic", &s);
    std::vector<MatmulAlgorithm> usable;
    for (const auto& result : std::span(results).first(static_cast<size_t>(found)))
      if (result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= static_cast<size_t>(workspace_bytes))
        usable.push_back({result.algo});
    CHECK(!usable.empty(), "cuBLASLt {} has no algorithm for {} with {} bytes of workspace; {}", cublasLtGetVersion(),
          to_string(s), workspace_bytes, remedy(CUBLAS_STATUS_NOT_SUPPORTED));
    return usable;
  }

  // Why the library says that the algorithm, from a file or for one matrix of a batch, does not compute the problem;
  // empty: it does.
  std::string fault() const {
    cublasLtMatmulHeuristicResult_t result{};
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(library, problem.operation.get(), problem.b.get(), problem.a.get(), problem.c.get(),
                                problem.c.get(), &algorithm.value, &result);
    if (status != CUBLAS_STATUS_SUCCESS)
      return formatted("does not compute {}: {} ({})", to_string(problem.shape), cublasLtGetStatusString(status),
                       cublasLtGetStatusName(status));
    if (result.workspaceSize > static_cast<size_t>(workspace_bytes))
      return formatted("for {} needs {} bytes of workspace but has {}", to_string(problem.shape), result.workspaceSize,
                       workspace_bytes);
    return "";
  }
};

}  // namespace detail

// A prepared matmul; cheap to copy. Its MatmulPlans must outlive it.
class Matmul {
 public:
  int64_t scratch_bytes() const { return plan_ == nullptr ? 0 : plan_->workspace_bytes; }

  void run(const MatmulArrays& x, cudaStream_t stream) const {
    if (plan_ != nullptr) {
      const int alignment = alignment_of({x.c, x.a, x.b, x.bias, x.z});
      CHECK(alignment >= shape_.alignment,
            "an array is aligned to {} bytes only for {}; prepare the matmul with alignment_of its arrays", alignment,
            to_string(shape_));
      CHECK((x.z != nullptr) == (shape_.epilogue != Epilogue::none), "z is {} for {}", x.z ? "given" : "missing",
            to_string(shape_));
      CHECK((x.bias != nullptr) == (shape_.bias == Bias::yes), "a bias is {} for {}", x.bias ? "given" : "missing",
            to_string(shape_));
      plan_->run(x, shape_.accumulate, stream);
    } else if (shape_.accumulate == Accumulate::no) {  // an empty sum
      CUDA_CHECK(cudaMemsetAsync(x.c, 0, static_cast<size_t>(shape_.M * shape_.N * size_of(shape_.out)), stream));
    }
  }

 private:
  friend class MatmulPlans;
  Matmul(const MatmulShape& shape, const detail::MatmulPlan* plan) : shape_(shape), plan_(plan) {}
  MatmulShape shape_;
  const detail::MatmulPlan* plan_;  // null: A and B are empty
};

struct MatmulTiming {
  int candidates;
  float first_ms, best_ms;  // the heuristic's first choice, and the chosen algorithm
};

// The library handle, and the algorithm chosen for each shape. For the current device and one host thread at a time.
class MatmulPlans {
 public:
  explicit MatmulPlans(int64_t workspace_bytes = gpu_matmul_workspace)
      : workspace_bytes_(workspace_bytes), library_(detail::created("cublasLtCreate", nullptr, cublasLtCreate)) {
    int device = 0;
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    title_ = formatted("cuBLASLt {} on {} with {} bytes of workspace", cublasLtGetVersion(), properties.name,
                       workspace_bytes);
  }

  // Uses the restored or tuned algorithm of this shape, else the heuristic's first.
  Matmul prepare(const MatmulShape& shape) {
    check_shape(shape);
    if (shape.M == 0 || shape.N == 0 || shape.K == 0) return Matmul(shape, nullptr);
    return Matmul(shape, &plan(planned(shape)));
  }

  // Times the heuristic's candidates on these arrays and keeps the fastest for this shape. Overwrites C; the host
  // waits. Only one rank may tune, and the others restore its export: timings differ between ranks, and different
  // algorithms give different bits.
  MatmulTiming tune(const MatmulShape& shape, const MatmulArrays& arrays, cudaStream_t stream) {
    const Matmul product = prepare(shape);
    if (product.plan_ == nullptr) return {};
    constexpr int repeats = 10;
    detail::MatmulPlan& chosen = plans_.at(planned(shape));
    const auto candidates = chosen.candidates();
    const Event begin(Event::For::timing), end(Event::For::timing);
    MatmulTiming timing{static_cast<int>(candidates.size()), 0, std::numeric_limits<float>::infinity()};
    detail::MatmulAlgorithm best = candidates.front();
    size_t refused = 0;
    for (const detail::MatmulAlgorithm& candidate : candidates) {
      chosen.algorithm = candidate;
      try {
        product.run(arrays, stream);  // loads the kernel
      } catch (const Error&) {        // the heuristic proposed it, but the library refuses it
        if (++refused == candidates.size()) throw;
        continue;
      }
      CUDA_CHECK(cudaEventRecord(begin, stream));
      for (int i = 0; i < repeats; ++i) product.run(arrays, stream);
      CUDA_CHECK(cudaEventRecord(end, stream));
      CUDA_CHECK(cudaEventSynchronize(end));
      const float ms = milliseconds(begin, end) / repeats;
      if (timing.first_ms == 0) timing.first_ms = ms;
      if (ms >= timing.best_ms) continue;
      timing.best_ms = ms;
      best = candidate;
    }
    chosen.algorithm = best;
    return timing;
  }

  // The algorithms in use, and if `all` those restored, too, as text: a title, then a line per shape.
  std::string exported(bool all = true) const {
    auto chosen = all ? restored_ : std::map<std::string, detail::MatmulAlgorithm>{};
    for (const auto& [shape, plan] : plans_) chosen[to_string(shape)] = plan.algorithm;
    std::string text = title_ + "\n";
    for (const auto& [shape, algorithm] : chosen) {
      text += shape + ":";
      for (const uint64_t word : algorithm.value.data) text += formatted(" {}", word);
      text += "\n";
    }
    return text;
  }

  // While on, the first product of each shape tunes it on its own arrays, unless one was restored: for a warm-up run
  // whose results are discarded.
  void set_tuning(bool on) { tuning_ = on; }
  void run(MatmulShape shape, MatmulArrays arrays, cudaStream_t stream) {
    check_shape(shape);
    const int64_t batch = std::exchange(shape.batch, 1);
    if (tuning_ && !plans_.contains(planned(shape)) && !has_restored(planned(shape))) tune(shape, arrays, stream);
    const Matmul one = prepare(shape);
    if (batch > 1 && one.plan_ != nullptr)
      if (const detail::MatmulPlan* all = plan_of_batch(one, batch)) return all->run(arrays, shape.accumulate, stream);
    for (int64_t i = 0; i < batch; ++i) {
      one.run(arrays, stream);
      arrays.c = static_cast<std::byte*>(arrays.c) + shape.M * shape.N * size_of(shape.out);
      arrays.a = static_cast<const std::byte*>(arrays.a) + shape.M * shape.K * size_of(shape.in);
      arrays.b = static_cast<const std::byte*>(arrays.b) + shape.K * shape.N * size_of(shape.in);
    }
  }
  // Forgets all choices.
  void forget() { plans_.clear(), batches_.clear(), restored_.clear(); }

  // Restores another MatmulPlans' export; call before the first product, so that all choices have one source.
  void restore(const std::string& text) {
    CHECK(plans_.empty(), "matmul algorithms are restored after {} were chosen; restore them before the first product",
          plans_.size());
    std::istringstream lines(text);
    std::string line;
    std::getline(lines, line);
    CHECK(line == title_, "the recorded matmul algorithms are for '{}', this is '{}'; choose them again", line, title_);
    for (int number = 2; std::getline(lines, line); ++number) {
      const size_t colon = line.find(':');
      std::istringstream words(colon == std::string::npos ? "" : line.substr(colon + 1));
      detail::MatmulAlgorithm algorithm;
      for (uint64_t& word : algorithm.value.data) words >> word;
      std::string more;
      CHECK(words && !(words >> more), "line {} of the recorded matmul algorithms is '{}', not 'SHAPE: {} numbers'",
            number, line, std::size(algorithm.value.data));
      CHECK(restored_.emplace(line.substr(0, colon), algorithm).second,
            "line {} of the recorded matmul algorithms repeats '{}'; delete one", number, line.substr(0, colon));
    }
  }

 private:
  static void check_shape(const MatmulShape& s) {
    if (s.in == DType::e4m3) return check_fp8(s);
    CHECK(s.in == DType::fp32 || s.in == DType::bf16, "matmul on GPUs cannot read {}: use fp32 or bf16; {}", s.in,
          to_string(s));
    CHECK(s.out == s.in || s.out == DType::fp32, "matmul cannot write {} from {} inputs: use {} or fp32; {}", s.out,
          s.in, s.in, to_string(s));
    CHECK(s.bias == Bias::no || s.out == s.in, "cuBLASLt adds a bias in the dtype of C, which is {}, not {}; {}", s.out,
          s.in, to_string(s));
    CHECK(s.M >= 0 && s.N >= 0 && s.K >= 0, "matmul: a size is negative; {}", to_string(s));
    CHECK(s.K > 0 || (s.bias == Bias::no && s.epilogue == Epilogue::none),
          "matmul: with K = 0 there can be no bias or epilogue; {}", to_string(s));
    // cuBLASLt: "the leading dimension of the auxiliary buffer must be divisible by 8"; its own is 16 bytes.
    CHECK(!s.has_gelu() ||
              (s.in == DType::bf16 && s.out == DType::bf16 && s.N % 8 == 0 && s.alignment == 16 && s.batch == 1 &&
               s.accumulate == Accumulate::no && (s.epilogue == Epilogue::gelu || s.bias == Bias::no)),
          "cuBLASLt computes GELU only in bf16, for rows of a multiple of 8 aligned to 16 bytes: {}", to_string(s));
    CHECK(s.epilogue != Epilogue::residual || (s.out == s.in && s.batch == 1 && s.accumulate == Accumulate::no),
          "a product adds a residual once, of its own dtype: {}", to_string(s));
    CHECK(s.alignment >= size_of(s.in) && s.alignment <= 16 && (s.alignment & (s.alignment - 1)) == 0,
          "matmul: arrays aligned to {} bytes; use alignment_of; {}", s.alignment, to_string(s));
  }

  static void check_fp8(const MatmulShape& s) {
    CHECK(s.epilogue == Epilogue::none, "products of fp8 compute no GELU and add no residual: {}", to_string(s));
    CHECK(
        CUBLAS_VERSION >= LEAST_CUBLAS_FOR_FP8,
        "this train_gpt was built with cuBLASLt {}, which does not multiply fp8 with scales for blocks: build it with "
        "CUDA 12.9 or newer, or leave out --products",
        CUBLAS_VERSION);
    CHECK(s.a == Transpose::no && s.b == Transpose::yes && (s.out == DType::bf16 || s.out == DType::fp32) &&
              s.a_scaled != ScaledBy::nothing && s.b_scaled != ScaledBy::nothing &&
              !(s.a_scaled == ScaledBy::tiles && s.b_scaled == ScaledBy::tiles) && s.M % 16 == 0 && s.N % 16 == 0 &&
              s.K % 16 == 0 && s.alignment == 16,
          "cuBLASLt does not multiply fp8 like this: {}", to_string(s));
  }

  // The shape for which an algorithm is chosen.
  static MatmulShape planned(MatmulShape shape) {
    if (shape.in != DType::fp32) shape.tf32 = Tf32::no;
    shape.accumulate = Accumulate::no;
    return shape;
  }
  detail::MatmulPlan made(const MatmulShape& shape, const detail::MatmulAlgorithm& algorithm) const {
    return {detail::MatmulProblem(shape), library_.get(), workspace_bytes_, algorithm};
  }
  // Whether a restored algorithm computes this shape; one that does not is forgotten.
  bool has_restored(const MatmulShape& shape) {
    const auto restored = restored_.find(to_string(shape));
    if (restored == restored_.end()) return false;
    if (made(shape, restored->second).fault().empty()) return true;
    restored_.erase(restored);
    return false;
  }
  const detail::MatmulPlan& plan(const MatmulShape& shape) {
    const auto known = plans_.find(shape);
    if (known != plans_.end()) return known->second;
    const auto restored = restored_.find(to_string(shape));
    const bool chosen = restored != restored_.end();
    detail::MatmulPlan plan = made(shape, chosen ? restored->second : detail::MatmulAlgorithm{});
    if (chosen) {
      const std::string fault = plan.fault();
      CHECK(fault.empty(), "the recorded algorithm {}; start a new run with --resume never", fault);
    } else {
      plan.algorithm = plan.candidates().front();
    }
    return plans_.emplace(shape, std::move(plan)).first->second;
  }

  // For all matrices of a batch at once, by the algorithm for one: so the bits do not depend on how many there are.
  // None if the library cannot do that.
  const detail::MatmulPlan* plan_of_batch(const Matmul& one, int64_t batch) {
    MatmulShape all = planned(one.shape_);
    all.batch = batch;
    const auto [known, added] = batches_.try_emplace(all);
    if (added) {
      detail::MatmulPlan plan = made(all, one.plan_->algorithm);
      if (plan.fault().empty()) known->second.emplace(std::move(plan));
    }
    return known->second ? &*known->second : nullptr;
  }

  int64_t workspace_bytes_;
  bool tuning_ = false;
  detail::Owned<cublasLtHandle_t> library_;
  std::string title_;
  std::map<MatmulShape, detail::MatmulPlan> plans_;
  std::map<MatmulShape, std::optional<detail::MatmulPlan>> batches_;
  std::map<std::string, detail::MatmulAlgorithm> restored_;  // by the shape's text
};

}  // namespace llmc::cuda
