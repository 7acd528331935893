// onednn.h: a small class around oneDNN's matmul primitive, and the only place that handles both versions 2 and 3. Uses
// the C API: nvcc cannot compile dnnl.hpp as C++20.
#pragma once
#include <dnnl.h>
#include <omp.h>

#include <array>
#include <memory>
#include <string>

#include "core/dtype.h"

namespace llmc::cpu::onednn {

inline std::string version() {
  const dnnl_version_t* v = dnnl_version();
  return formatted("oneDNN {}.{}.{}", v->major, v->minor, v->patch);
}

inline void check(dnnl_status_t status, const char* call, const std::string& what) {
  CHECK(status == dnnl_success, "oneDNN: {} failed with status {} for {} ({}); build with ONEDNN=0 to do without it",
        call, static_cast<int>(status), what, version());
}

// C (M, N) = or += op(A) op(B) + bias
struct MatmulProblem {
  int64_t M, N, K;
  bool transpose_a, transpose_b, accumulate, bias;
  DType in, out;
  int threads;
  std::string what;  // for messages
};

inline dnnl_engine_t engine() {
  static const dnnl_engine_t cpu = [] {
    dnnl_engine_t made = nullptr;
    check(dnnl_engine_create(&made, dnnl_cpu, 0), "dnnl_engine_create", "the CPU");
    return made;
  }();
  return cpu;
}

#if DNNL_VERSION_MAJOR >= 3
using MemoryDesc = dnnl_memory_desc_t;
using ConstMemoryDesc = const_dnnl_memory_desc_t;
inline size_t desc_bytes(ConstMemoryDesc desc) { return dnnl_memory_desc_get_size(desc); }
inline ConstMemoryDesc pointer(const MemoryDesc& desc) { return desc; }
inline dnnl_status_t make_desc(MemoryDesc* desc, int rank, const dnnl_dims_t dims, dnnl_data_type_t type,
                               const dnnl_dims_t strides) {
  return dnnl_memory_desc_create_with_strides(desc, rank, dims, type, strides);
}
inline dnnl_status_t add_sum(dnnl_post_ops_t ops) {
  return dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef);
}
inline void destroy_desc(MemoryDesc& desc) { dnnl_memory_desc_destroy(desc); }
#else
using MemoryDesc = dnnl_memory_desc_t;
using ConstMemoryDesc = const dnnl_memory_desc_t*;
inline size_t desc_bytes(ConstMemoryDesc desc) { return dnnl_memory_desc_get_size(desc); }
inline ConstMemoryDesc pointer(const MemoryDesc& desc) { return &desc; }
inline dnnl_status_t make_desc(MemoryDesc* desc, int rank, const dnnl_dims_t dims, dnnl_data_type_t type,
                               const dnnl_dims_t strides) {
  return dnnl_memory_desc_init_by_strides(desc, rank, dims, type, strides);
}
inline dnnl_status_t add_sum(dnnl_post_ops_t ops) { return dnnl_post_ops_append_sum(ops, 1.0f); }
inline void destroy_desc(MemoryDesc&) {}
#endif

inline dnnl_data_type_t type_of(DType dtype) { return dtype == DType::bf16 ? dnnl_bf16 : dnnl_f32; }

// Sets this thread's OpenMP thread count until the end of the scope.
struct ThreadsScope {
  int before = omp_get_max_threads();
  explicit ThreadsScope(int threads) { omp_set_num_threads(threads); }
  ~ThreadsScope() { omp_set_num_threads(before); }
};

inline dnnl_stream_t stream_of_thread() {
  thread_local const dnnl_stream_t stream = [] {
    dnnl_stream_t made = nullptr;
    check(dnnl_stream_create(&made, engine(), dnnl_stream_in_order), "dnnl_stream_create", "the CPU");
    return made;
  }();
  return stream;
}

// A matmul primitive's description. Attributes: fp32 means fp32, whatever DNNL_DEFAULT_FPMATH_MODE says; `scratchpad`:
// whose work space it uses.
inline dnnl_primitive_desc_t describe_matmul(ConstMemoryDesc a, ConstMemoryDesc b, ConstMemoryDesc bias,
                                             ConstMemoryDesc c, bool accumulate, dnnl_scratchpad_mode_t scratchpad,
                                             const std::string& what) {
  dnnl_primitive_attr_t attributes = nullptr;
  dnnl_post_ops_t post_ops = nullptr;
  check(dnnl_primitive_attr_create(&attributes), "dnnl_primitive_attr_create", what);
  check(dnnl_primitive_attr_set_scratchpad_mode(attributes, scratchpad), "set_scratchpad_mode", what);
  check(dnnl_primitive_attr_set_fpmath_mode(attributes, dnnl_fpmath_mode_strict), "set_fpmath_mode", what);
  if (accumulate) {
    check(dnnl_post_ops_create(&post_ops), "dnnl_post_ops_create", what);
    check(add_sum(post_ops), "dnnl_post_ops_append_sum", what);
    check(dnnl_primitive_attr_set_post_ops(attributes, post_ops), "dnnl_primitive_attr_set_post_ops", what);
    dnnl_post_ops_destroy(post_ops);
  }
  dnnl_primitive_desc_t description = nullptr;
#if DNNL_VERSION_MAJOR >= 3
  check(dnnl_matmul_primitive_desc_create(&description, engine(), a, b, bias, c, attributes),
        "dnnl_matmul_primitive_desc_create", what);
#else
  dnnl_matmul_desc_t operation;
  check(dnnl_matmul_desc_init(&operation, a, b, bias, c), "dnnl_matmul_desc_init", what);
  check(dnnl_primitive_desc_create(&description, &operation, attributes, engine(), nullptr),
        "dnnl_primitive_desc_create", what);
#endif
  dnnl_primitive_attr_destroy(attributes);
  return description;
}

class Matmul {
 public:
  explicit Matmul(const MatmulProblem& p) : what_(p.what) {
    const ThreadsScope scope(p.threads);  // a primitive is built for the current thread count
    make_matrix(a_, p.M, p.K, p.in, p.transpose_a);
    make_matrix(b_, p.K, p.N, p.in, p.transpose_b);
    make_matrix(c_, p.M, p.N, p.out, false);
    if (p.bias) make_matrix(bias_, 1, p.N, p.in, false);
    dnnl_primitive_desc_t description = describe_matmul(pointer(a_), pointer(b_), p.bias ? pointer(bias_) : nullptr,
                                                        pointer(c_), p.accumulate, dnnl_scratchpad_mode_user, what_);
    scratch_ = dnnl_primitive_desc_query_md(description, dnnl_query_scratchpad_md, 0);
    scratch_bytes_ = static_cast<int64_t>(desc_bytes(scratch_));
    check(dnnl_primitive_create(&primitive_, description), "dnnl_primitive_create", what_);
    description_ = description;
  }
  ~Matmul() {
    dnnl_primitive_destroy(primitive_);
    dnnl_primitive_desc_destroy(description_);
    for (MemoryDesc* desc : {&a_, &b_, &c_, &bias_}) destroy_desc(*desc);
  }
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  int64_t scratch_bytes() const { return scratch_bytes_; }

  void run(void* c, const void* a, const void* b, const void* bias, void* scratch) const {
    const dnnl_stream_t stream = stream_of_thread();
    dnnl_exec_arg_t arguments[5];  // an array: nvcc crashes on a vector of this unnamed struct
    int count = 0;
    auto add = [&](int which, ConstMemoryDesc desc, const void* data) {
      dnnl_memory_t memory = nullptr;
      check(dnnl_memory_create(&memory, desc, engine(), const_cast<void*>(data)), "dnnl_memory_create", what_);
      arguments[count++] = {which, memory};
    };
    add(DNNL_ARG_SRC, pointer(a_), a);
    add(DNNL_ARG_WEIGHTS, pointer(b_), b);
    add(DNNL_ARG_DST, pointer(c_), c);
    if (bias != nullptr) add(DNNL_ARG_BIAS, pointer(bias_), bias);
    if (scratch_bytes_ > 0) add(DNNL_ARG_SCRATCHPAD, scratch_, scratch);
    const dnnl_status_t status = dnnl_primitive_execute(primitive_, stream, count, arguments);
    for (int i = 0; i < count; ++i) dnnl_memory_destroy(arguments[i].memory);
    check(status, "dnnl_primitive_execute", what_);
    check(dnnl_stream_wait(stream), "dnnl_stream_wait", what_);
  }

 private:
  void make_matrix(MemoryDesc& desc, int64_t rows, int64_t columns, DType dtype, bool transposed) {
    const dnnl_dims_t dims = {rows, columns};
    const dnnl_dims_t strides = {transposed ? 1 : columns, transposed ? rows : 1};
    check(make_desc(&desc, 2, dims, type_of(dtype), strides), "memory descriptor", what_);
  }

  std::string what_;
  MemoryDesc a_{}, b_{}, c_{}, bias_{};
  ConstMemoryDesc scratch_ = nullptr;
  int64_t scratch_bytes_ = 0;
  dnnl_primitive_desc_t description_ = nullptr;
  dnnl_primitive_t primitive_ = nullptr;
};

// C (M, N) = or += op(A) op(B), C in fp32, for matrices whose stored rows are lda, ldb and ldc elements apart. One
// primitive multiplies all sizes, because those of experts change with every step; it uses one thread.
class AnyMatmul {
 public:
  AnyMatmul(DType in, bool transpose_a, bool transpose_b, bool accumulate)
      : in_(in), a_transposed_(transpose_a), b_transposed_(transpose_b) {
    constexpr int64_t any = DNNL_RUNTIME_DIM_VAL;
    const Operand a(any, any, any, in, transpose_a), b(any, any, any, in, transpose_b),
        c(any, any, any, DType::fp32, false);
    dnnl_primitive_desc_t description = describe_matmul(pointer(a.desc), pointer(b.desc), nullptr, pointer(c.desc),
                                                        accumulate, dnnl_scratchpad_mode_library, what);
    check(dnnl_primitive_create(&primitive_, description), "dnnl_primitive_create", what);
    dnnl_primitive_desc_destroy(description);
  }
  ~AnyMatmul() { dnnl_primitive_destroy(primitive_); }
  AnyMatmul(const AnyMatmul&) = delete;
  AnyMatmul& operator=(const AnyMatmul&) = delete;

  // This thread's: a primitive keeps its work space.
  static const AnyMatmul& of_thread(DType in, bool transpose_a, bool transpose_b, bool accumulate) {
    thread_local std::unique_ptr<const AnyMatmul> made[2][2][2][2];
    auto& entry = made[in == DType::bf16][transpose_a][transpose_b][accumulate];
    if (!entry) entry = std::make_unique<const AnyMatmul>(in, transpose_a, transpose_b, accumulate);
    return *entry;
  }

  void run(float* c, int64_t ldc, const void* a, int64_t lda, const void* b, int64_t ldb, int64_t M, int64_t N,
           int64_t K) const {
    const dnnl_stream_t stream = stream_of_thread();
    const Operand operands[] = {
        {M, K, lda, in_, a_transposed_}, {K, N, ldb, in_, b_transposed_}, {M, N, ldc, DType::fp32, false}};
    const void* data[] = {a, b, c};
    dnnl_exec_arg_t arguments[3];
    for (int i = 0; i < 3; ++i) {
      dnnl_memory_t memory = nullptr;
      check(dnnl_memory_create(&memory, pointer(operands[i].desc), engine(), const_cast<void*>(data[i])),
            "dnnl_memory_create", what);
      arguments[i] = {std::array{DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST}[static_cast<size_t>(i)], memory};
    }
    const dnnl_status_t status = dnnl_primitive_execute(primitive_, stream, 3, arguments);
    for (const dnnl_exec_arg_t& argument : arguments) dnnl_memory_destroy(argument.memory);
    check(status, "dnnl_primitive_execute", what);
    check(dnnl_stream_wait(stream), "dnnl_stream_wait", what);
  }

 private:
  static constexpr const char* what = "a product of any size";
  struct Operand {
    MemoryDesc desc{};
    Operand(int64_t rows, int64_t columns, int64_t stride, DType dtype, bool transposed) {
      const dnnl_dims_t dims = {rows, columns}, strides = {transposed ? 1 : stride, transposed ? stride : 1};
      check(make_desc(&desc, 2, dims, type_of(dtype), strides), "memory descriptor", what);
    }
    ~Operand() { destroy_desc(desc); }
    Operand(const Operand&) = delete;
    Operand& operator=(const Operand&) = delete;
  };

  DType in_;
  bool a_transposed_, b_transposed_;
  dnnl_primitive_t primitive_ = nullptr;
};

// Does this processor multiply bf16, and may oneDNN use that (DNNL_MAX_CPU_ISA)?
inline bool bf16_is_native() {
  static const bool native =
      __builtin_cpu_supports("avx512bf16") &&
      (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16;
  return native;
}

// Does oneDNN multiply these? The others are our own: doubles, bf16 on processors that do not multiply it, and bf16 of
// depth 63, on every processor alike: there, and only there, oneDNN 2.6.3's kernel for AMX runs with the tiles of
// another depth. It is then wrong, by up to twice the size of the result, or ends with an illegal instruction.
inline bool multiplies(DType in, int64_t K) {
  if (in == DType::bf16) return bf16_is_native() && K != 63;
  return in == DType::fp32;
}

}  // namespace llmc::cpu::onednn
