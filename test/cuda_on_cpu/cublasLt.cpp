// cublasLt.cpp: matrix products as defined by cuBLASLt. Each is one task of its stream: sums in fp32 in the order of k,
// rounded once to the output's type. Errors that the real library returns as a status are returned likewise; all others
// throw Failure.
//
// It offers algorithms with different requirements, like the real library, the most demanding first, so that a caller
// who states its constraints wrongly gets one that refuses to run or rounds too often.
#include "cuda_on_cpu/cublasLt.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "cuda_on_cpu/sanitizers.h"

struct cublasLtContext {};
struct cublasLtMatrixLayout {
  cudaDataType_t type;
  int64_t rows, columns, ld;
  int32_t batch = 1;
  int64_t stride = 0;  // elements between the matrices of a batch
};
struct cublasLtMatmulDesc {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void *bias = nullptr, *aux = nullptr;
  int64_t aux_ld = 0;
  int32_t a_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, b_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  const float *a_scales = nullptr, *b_scales = nullptr;
};
struct cublasLtMatmulPreference {
  uint64_t workspace = 0;
  uint32_t reduction_schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignment[4] = {256, 256, 256, 256};  // A, B, C, D
};

namespace {

using llmc::bf16;
using llmc::e4m3;

size_t size_of(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 ? 1 : type == CUDA_R_16BF ? 2 : 4; }

// Scales for blocks of one of the operands, (k, n) or (k, m) in column-major order and 128 numbers of a column or 128 x
// 128 sharing one: the library's two layouts of them.
int64_t scale_at(int32_t mode, int64_t k, int64_t column, int64_t K, int64_t columns) {
  const int64_t of_k = (K + 127) / 128;
  return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ? k / 128 * columns + column
                                                         : column / 128 * ((of_k + 3) / 4 * 4) + k / 128;
}
int64_t scale_count(int32_t mode, int64_t K, int64_t columns) {
  const int64_t of_k = (K + 127) / 128;
  return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ? of_k * columns
                                                         : (columns + 127) / 128 * ((of_k + 3) / 4 * 4);
}
bool is_block_mode(int32_t mode) {
  return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

// Its tanh form, and its derivative.
float gelu(float x) {
  return static_cast<float>(x / 2 * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x))));
}
float gelu_slope(float x) {
  const double root = std::sqrt(2 / std::numbers::pi), t = std::tanh(root * (x + 0.044715 * x * x * x));
  return static_cast<float>((1 + t) / 2 + x * (1 - t * t) / 2 * root * (1 + 3 * 0.044715 * x * x));
}

struct Algorithm {
  uint64_t parts;  // number of splits of k, added at the end
  uint32_t reduction_scheme;
  uintptr_t alignment;  // required alignment of every column
};
constexpr Algorithm algorithms[] = {{2, CUBLASLT_REDUCTION_SCHEME_INPLACE, 16},
                                    {2, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE, 16},
                                    {2, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 16},
                                    {1, CUBLASLT_REDUCTION_SCHEME_NONE, 16},
                                    {1, CUBLASLT_REDUCTION_SCHEME_NONE, 1}};
constexpr uint64_t algorithm_mark = 0x637562616c676f00;  // tag of an algorithm's data, plus its number

const Algorithm* algorithm_of(const cublasLtMatmulAlgo_t& algo) {
  const uint64_t number = algo.data[0] - algorithm_mark;
  return number < std::size(algorithms) ? &algorithms[number] : nullptr;
}

// A complete problem: op(A) (m, k), op(B) (k, n), D (m, n).
struct Problem {
  cublasLtMatmulDesc operation;
  cublasLtMatrixLayout a, b, d;
  int64_t m, n, k;

  bool has_bias() const { return (operation.epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }
  bool has_aux() const { return (operation.epilogue & 128) != 0; }
  size_t workspace(const Algorithm& algorithm) const {
    const size_t part = algorithm.reduction_scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE ? size_of(d.type) : 4;
    if (algorithm.reduction_scheme == CUBLASLT_REDUCTION_SCHEME_INPLACE)
      return static_cast<size_t>(d.batch) * 256;  // counters
    return algorithm.parts == 1 ? 0 : algorithm.parts * static_cast<size_t>(d.batch * m * n) * part;
  }
  // Whether all columns have the alignment that the algorithm needs, given those of the first columns.
  bool suits(const Algorithm& algorithm, uintptr_t a_at, uintptr_t b_at, uintptr_t c_at, uintptr_t d_at) const {
    const auto aligned = [&](uintptr_t at, const cublasLtMatrixLayout& layout) {
      const auto between = static_cast<uintptr_t>(layout.ld | layout.stride) * size_of(layout.type);
      return (at | between) % algorithm.alignment == 0;
    };
    const auto of = [&](const void* array) { return reinterpret_cast<uintptr_t>(array) % algorithm.alignment == 0; };
    return (!has_bias() || of(operation.bias)) && aligned(a_at, a) && aligned(b_at, b) && aligned(c_at, d) &&
           aligned(d_at, d);
  }
};

cublasStatus_t make_problem(Problem* problem, cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                            cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                            cublasLtMatrixLayout_t d) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (operation == nullptr || a == nullptr || b == nullptr || c == nullptr || d == nullptr)
    return CUBLAS_STATUS_INVALID_VALUE;
  const bool turn_a = operation->transpose_a != CUBLAS_OP_N, turn_b = operation->transpose_b != CUBLAS_OP_N;
  *problem = {*operation, *a, *b, *d, d->rows, d->columns, turn_a ? a->rows : a->columns};
  const auto is = [](cublasLtMatrixLayout_t layout, int64_t rows, int64_t columns) {
    return layout->rows == rows && layout->columns == columns && rows > 0 && columns > 0 && layout->ld >= rows;
  };
  const int64_t m = problem->m, n = problem->n, k = problem->k;
  if (!is(a, turn_a ? k : m, turn_a ? m : k) || !is(b, turn_b ? n : k, turn_b ? k : n) || !is(c, m, n) || !is(d, m, n))
    return CUBLAS_STATUS_INVALID_VALUE;
  for (const auto* layout : {b, c, d})
    if (layout->batch != a->batch) return CUBLAS_STATUS_INVALID_VALUE;
  const bool fp8 = a->type == CUDA_R_8F_E4M3;  // of Hopper: sums along both columns
  if (fp8 &&
      (!turn_a || turn_b || m % 16 != 0 || n % 16 != 0 || k % 16 != 0 || !is_block_mode(operation->a_mode) ||
       !is_block_mode(operation->b_mode) ||
       (operation->a_mode == operation->b_mode && operation->a_mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (a->batch > 1 && (fp8 || operation->epilogue != CUBLASLT_EPILOGUE_DEFAULT)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (a->type != b->type || c->type != d->type || c->ld != d->ld ||
      (d->type != (fp8 ? CUDA_R_16BF : a->type) && d->type != CUDA_R_32F) || operation->scale != CUDA_R_32F ||
      (operation->compute == CUBLAS_COMPUTE_32F_FAST_TF32 && a->type != CUDA_R_32F))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (problem->has_aux() && (d->type != CUDA_R_16BF || operation->aux_ld < d->rows || operation->aux_ld % 8 != 0 ||
                             reinterpret_cast<uintptr_t>(operation->aux) % 16 != 0))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  return CUBLAS_STATUS_SUCCESS;
}

// ---- The products ---------------------------------------------------------------------------------------------------

struct Arrays {
  const void *a, *b, *c;
  void *d, *workspace;
  float alpha, beta;
};

// Rounds to TF32: 10 mantissa bits, to nearest.
float tf32(float x) { return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x1000u) & 0xffffe000u); }

constexpr int64_t side_by_side = 16;  // rows of a column whose sums are added at the same time
using Sums = std::array<float, side_by_side>;

template <class In, class Out, class Part>
void multiply(const Problem& p, const Arrays& arrays, int64_t parts, bool in_place) {
  const auto* c = static_cast<const Out*>(arrays.c);
  auto* d = static_cast<Out*>(arrays.d);
  const auto* bias = static_cast<const Out*>(p.operation.bias);
  auto* partial = static_cast<Part*>(arrays.workspace);

  // The operands in fp32, in row-major order: a (k, m and what fills the last Sums), b (n, k).
  const int64_t rows = (p.m + side_by_side - 1) / side_by_side * side_by_side;
  std::vector<float> a(static_cast<size_t>(p.k * rows)), b(static_cast<size_t>(p.n * p.k));
  const auto read = [&](const void* operand, int32_t transpose, int64_t ld, int64_t row, int64_t column) {
    const int64_t place = transpose == CUBLAS_OP_N ? row + column * ld : row * ld + column;
    const auto x = static_cast<float>(static_cast<const In*>(operand)[place]);
    return p.operation.compute == CUBLAS_COMPUTE_32F_FAST_TF32 ? tf32(x) : x;
  };
  for (int64_t k = 0; k < p.k; ++k) {
    for (int64_t i = 0; i < p.m; ++i)
      a[static_cast<size_t>(k * rows + i)] = read(arrays.a, p.operation.transpose_a, p.a.ld, i, k);
    for (int64_t j = 0; j < p.n; ++j)
      b[static_cast<size_t>(j * p.k + k)] = read(arrays.b, p.operation.transpose_b, p.b.ld, k, j);
  }

  // Rows i, i + 1, ... of column j, summed over one part of k.
  const auto dots = [&](int64_t i, int64_t j, int64_t part) {
    Sums sums{};
    const int64_t end = (part + 1) * p.k / parts;
    for (int64_t k = part * p.k / parts; k < end;) {
      Sums block{};
      const int64_t first = k, last = std::is_same_v<In, e4m3> ? std::min(end, (k / 128 + 1) * 128) : end;
      for (; k < last; ++k) {
        const float *of_a = a.data() + k * rows + i, of_b = b[static_cast<size_t>(j * p.k + k)];
        for (size_t r = 0; r < side_by_side; ++r) block[r] += of_a[r] * of_b;
      }
      for (size_t r = 0; r < side_by_side; ++r)
        if constexpr (std::is_same_v<In, e4m3>) {
          const int64_t row = std::min(i + static_cast<int64_t>(r), p.m - 1);
          sums[r] += block[r] * p.operation.a_scales[scale_at(p.operation.a_mode, first, row, p.k, p.m)] *
                     p.operation.b_scales[scale_at(p.operation.b_mode, first, j, p.k, p.n)];
        } else sums[r] += block[r];
    }
    return sums;
  };
  const auto put = [&](int64_t i, int64_t j, auto sum_of_part) {
    float sum = sum_of_part(0);
    if (parts > 1 && !in_place) {
      sum = 0;
      for (int64_t part = 0; part < parts; ++part) {
        Part& kept = partial[(part * p.n + j) * p.m + i];
        kept = Part(sum_of_part(part));
        sum += static_cast<float>(kept);
      }
    }
    float value = arrays.alpha * sum;
    if (arrays.beta != 0) value += arrays.beta * static_cast<float>(c[i + j * p.d.ld]);
    for (int64_t part = 1; part < parts && in_place; ++part)
      value = static_cast<float>(Out(value)) + arrays.alpha * sum_of_part(part);
    if (p.has_bias()) value += static_cast<float>(bias[i]);
    if (p.has_aux()) {
      Out& z = static_cast<Out*>(p.operation.aux)[i + j * p.operation.aux_ld];
      if (p.operation.epilogue == CUBLASLT_EPILOGUE_DGELU) value *= gelu_slope(static_cast<float>(z));
      else z = Out(value), value = gelu(value);
    }
    d[i + j * p.d.ld] = Out(value);
  };
  std::vector<Sums> sums(static_cast<size_t>(parts));
  for (int64_t i = 0; i < p.m; i += side_by_side)
    for (int64_t j = 0; j < p.n; ++j) {
      for (int64_t part = 0; part < parts; ++part) sums[static_cast<size_t>(part)] = dots(i, j, part);
      for (int64_t row = i; row < std::min(i + side_by_side, p.m); ++row)
        put(row, j, [&](int64_t part) { return sums[static_cast<size_t>(part)][static_cast<size_t>(row - i)]; });
    }
}

template <class In, class Out>
void solve(const Problem& p, const Arrays& arrays, const Algorithm& algorithm) {
  const auto parts = static_cast<int64_t>(algorithm.parts);
  for (int64_t i = 0; i < p.d.batch; ++i) {
    Arrays of_one = arrays;
    of_one.a = static_cast<const In*>(arrays.a) + i * p.a.stride;
    of_one.b = static_cast<const In*>(arrays.b) + i * p.b.stride;
    of_one.c = static_cast<const Out*>(arrays.c) + i * p.d.stride;
    of_one.d = static_cast<Out*>(arrays.d) + i * p.d.stride;
    const bool in_place = algorithm.reduction_scheme == CUBLASLT_REDUCTION_SCHEME_INPLACE;
    if (algorithm.reduction_scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE)
      multiply<In, Out, Out>(p, of_one, parts, in_place);
    else multiply<In, Out, float>(p, of_one, parts, in_place);
  }
}

void require_matrix(const void* first, const cublasLtMatrixLayout& layout, const char* what) {
  const auto elements =
      static_cast<size_t>((layout.batch - 1) * layout.stride + (layout.columns - 1) * layout.ld + layout.rows);
  cuda_on_cpu::require_device_memory(first, elements * size_of(layout.type), what);
}

// f(first byte, bytes) for each column.
template <class F>
void each_column(const void* first, const cublasLtMatrixLayout& layout, F f) {
  const auto size = static_cast<int64_t>(size_of(layout.type));
  for (int64_t i = 0; i < layout.batch; ++i)
    for (int64_t j = 0; j < layout.columns; ++j)
      f(static_cast<char*>(const_cast<void*>(first)) + (i * layout.stride + j * layout.ld) * size,
        static_cast<size_t>(layout.rows * size));
}
// What a product reads and writes, for ThreadSanitizer. (It is not observed itself: its variables are on the stack of
// the host thread that runs the task, perhaps another host's.)
void observe(const Problem& p, const Arrays& arrays, const Algorithm& algorithm) {
  if (!cuda_on_cpu::thread_sanitizer) return;
  using cuda_on_cpu::observe_read, cuda_on_cpu::observe_write;
  each_column(arrays.a, p.a, observe_read);
  each_column(arrays.b, p.b, observe_read);
  if (arrays.beta != 0) each_column(arrays.c, p.d, observe_read);
  if (p.has_bias()) observe_read(p.operation.bias, static_cast<size_t>(p.m) * size_of(p.d.type));
  if (p.a.type == CUDA_R_8F_E4M3) {
    observe_read(p.operation.a_scales, static_cast<size_t>(scale_count(p.operation.a_mode, p.k, p.m)) * sizeof(float));
    observe_read(p.operation.b_scales, static_cast<size_t>(scale_count(p.operation.b_mode, p.k, p.n)) * sizeof(float));
  }
  if (p.has_aux()) {
    cublasLtMatrixLayout aux = p.d;
    aux.ld = p.operation.aux_ld;
    each_column(p.operation.aux, aux,
                [reads = p.operation.epilogue == CUBLASLT_EPILOGUE_DGELU](void* column, size_t bytes) {
                  reads ? observe_read(column, bytes) : observe_write(column, bytes);
                });
  }
  observe_write(arrays.workspace, p.workspace(algorithm));
  each_column(arrays.d, p.d, observe_write);
}

// A product may write C, but no byte of what it multiplies: threads that read late would get a sum.
void require_apart(const void* read, const cublasLtMatrixLayout& layout, const void* d,
                   const cublasLtMatrixLayout& d_layout, const char* what) {
  std::vector<std::pair<char*, char*>> of[2];
  each_column(read, layout, [&](char* column, size_t bytes) { of[0].emplace_back(column, column + bytes); });
  each_column(d, d_layout, [&](char* column, size_t bytes) { of[1].emplace_back(column, column + bytes); });
  for (auto& columns : of) std::sort(columns.begin(), columns.end());
  for (size_t i = 0, j = 0; i < of[0].size() && j < of[1].size();) {
    const auto &x = of[0][i], &y = of[1][j];
    if (x.second > y.first && y.second > x.first) throw cuda_on_cpu::Failure(std::string(what) + " overlaps D");
    ++(x.second <= y.first ? i : j);
  }
}

template <class Object, class... Values>
cublasStatus_t create(Object** object, Values... values) {
  if (object == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *object = new Object{values...};
  return CUBLAS_STATUS_SUCCESS;
}
template <class Object>
cublasStatus_t destroy(Object* object) {
  delete object;
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t set(T& attribute, const void* value, size_t bytes) {
  if (value == nullptr || bytes != sizeof attribute) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&attribute, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

// ---- The library's functions ----------------------------------------------------------------------------------------

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "unknown";
}
const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED: return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE: return "an invalid value was used as an argument";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "the device architecture does not have this feature";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the function failed to launch on the device";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "an internal operation failed";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the functionality is not supported";
  }
  return "unknown";
}
size_t cublasLtGetVersion() { return 0; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return create(handle); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy(handle); }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
  return create(layout, type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), ld);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy(layout); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return set(layout->batch, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return set(layout->stride, value, bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  return create(operation, compute, scale);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) { return destroy(operation); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return set(operation->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return set(operation->transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return set(operation->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(operation->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return set(operation->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return set(operation->aux_ld, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return set(operation->a_scales, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return set(operation->b_scales, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE: return set(operation->a_mode, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE: return set(operation->b_mode, value, bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) { return create(preference); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { return destroy(preference); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return set(preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return set(preference->reduction_schemes, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return set(preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
  if (preference == nullptr || results == nullptr || found == nullptr || requested <= 0)
    return CUBLAS_STATUS_INVALID_VALUE;
  *found = 0;
  Problem problem;
  const cublasStatus_t status = make_problem(&problem, handle, operation, a, b, c, d);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const auto& aligned = preference->alignment;
  for (uint64_t number = 0; number < std::size(algorithms) && *found < requested; ++number) {
    const Algorithm& algorithm = algorithms[number];
    const bool scheme_allowed = (algorithm.reduction_scheme & ~preference->reduction_schemes) == 0;
    if (!scheme_allowed || problem.workspace(algorithm) > preference->workspace ||
        !problem.suits(algorithm, aligned[0], aligned[1], aligned[2], aligned[3]))
      continue;
    results[(*found)++] = {{{algorithm_mark + number}}, problem.workspace(algorithm), CUBLAS_STATUS_SUCCESS, 1, {}};
  }
  return *found > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                       cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  if (algorithm == nullptr || result == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  Problem problem;
  const cublasStatus_t status = make_problem(&problem, handle, operation, a, b, c, d);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const Algorithm* known = algorithm_of(*algorithm);
  if (known == nullptr) return CUBLAS_STATUS_NOT_SUPPORTED;
  result->workspaceSize = problem.workspace(*known);
  result->state = CUBLAS_STATUS_SUCCESS;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  if (algorithm == nullptr) throw cuda_on_cpu::Failure("cublasLtMatmul: not emulated without an algorithm");
  Problem problem;
  const cublasStatus_t status = make_problem(&problem, handle, operation, a_layout, b_layout, c_layout, d_layout);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const Algorithm* known = algorithm_of(*algorithm);
  if (known == nullptr || algorithm->data[0] - algorithm_mark == cuda_on_cpu::refused_algorithm)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  const auto at = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const bool has_bias = problem.has_bias(), has_aux = problem.has_aux();
  const auto is = [&](auto... epilogues) { return ((operation->epilogue == uint32_t{epilogues}) || ...); };
  if (alpha == nullptr || beta == nullptr || a == nullptr || b == nullptr || c == nullptr || d == nullptr ||
      !is(CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX,
          CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU) ||
      (has_bias && operation->bias == nullptr) || (has_aux && operation->aux == nullptr) || at(workspace) % 256 != 0 ||
      workspace_bytes < problem.workspace(*known))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (!problem.suits(*known, at(a), at(b), at(c), at(d))) return CUBLAS_STATUS_NOT_SUPPORTED;

  require_matrix(a, *a_layout, "cublasLtMatmul, A");
  require_matrix(b, *b_layout, "cublasLtMatmul, B");
  require_matrix(c, *c_layout, "cublasLtMatmul, C");
  require_matrix(d, *d_layout, "cublasLtMatmul, D");
  require_apart(a, *a_layout, d, *d_layout, "cublasLtMatmul, A");
  require_apart(b, *b_layout, d, *d_layout, "cublasLtMatmul, B");
  if (has_bias)
    cuda_on_cpu::require_device_memory(operation->bias, static_cast<size_t>(problem.m) * size_of(d_layout->type),
                                       "cublasLtMatmul, bias");
  if (has_aux)
    cuda_on_cpu::require_device_memory(
        operation->aux, static_cast<size_t>((problem.n - 1) * operation->aux_ld + problem.m) * size_of(d_layout->type),
        "cublasLtMatmul, auxiliary matrix");
  if (a_layout->type == CUDA_R_8F_E4M3)
    for (const auto& [scales, mode, columns] : {std::tuple{operation->a_scales, operation->a_mode, problem.m},
                                                {operation->b_scales, operation->b_mode, problem.n}}) {
      if (scales == nullptr || at(scales) % 16 != 0) return CUBLAS_STATUS_INVALID_VALUE;
      cuda_on_cpu::require_device_memory(scales, static_cast<size_t>(scale_count(mode, problem.k, columns)) * 4,
                                         "cublasLtMatmul, scales");
    }
  if (problem.workspace(*known) > 0)
    cuda_on_cpu::require_device_memory(workspace, workspace_bytes, "cublasLtMatmul, workspace");

  Arrays arrays{a, b, c, d, workspace, 0, 0};
  std::memcpy(&arrays.alpha, alpha, sizeof arrays.alpha);
  std::memcpy(&arrays.beta, beta, sizeof arrays.beta);
  auto* run = a_layout->type == CUDA_R_8F_E4M3 ? (d_layout->type == CUDA_R_32F ? solve<e4m3, float> : solve<e4m3, bf16>)
              : a_layout->type == CUDA_R_32F   ? solve<float, float>
              : d_layout->type == CUDA_R_32F   ? solve<bf16, float>
                                               : solve<bf16, bf16>;
  const cudaError_t enqueued = cuda_on_cpu::enqueue_call(stream, [problem, arrays, known, run] {
    observe(problem, arrays, *known);
    run(problem, arrays, *known);
    cuda_on_cpu::count_kernel();
  });
  return enqueued == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
