// ops_memory.h: ops on flat memory, and helpers that all ops share. Conventions: ops.h.
#pragma once
#include "core/precision.h"
#include "ops/dispatch.h"
#include "ops/types.h"

namespace llmc {

namespace detail {

inline void check_tensor(const char* op, const char* argument, const Tensor& t, DType dtype, const Shape& shape) {
  CHECK(t.dtype == dtype && t.shape == shape, "{}: {} ({}) is {} {}, expected {} {}", op, argument, t.name, t.dtype,
        to_string(t.shape), dtype, to_string(shape));
}
// The same for several tensors, which `arguments` names: "(x, out)".
inline void check_tensors(const char* op, std::string_view arguments, std::initializer_list<Tensor> tensors,
                          DType dtype, const Shape& shape) {
  for (const Tensor& t : tensors) {
    arguments.remove_prefix(arguments.find_first_not_of("(, "));
    const std::string argument(arguments.substr(0, arguments.find_first_of(",)")));
    check_tensor(op, argument.c_str(), t, dtype, shape);
    arguments.remove_prefix(argument.size());
  }
}
// CHECK_TENSOR(x, dtype, shape...) and CHECK_TENSORS((x, out), dtype, shape...), under the name of the function that
// has them.
#define CHECK_TENSOR(tensor, dtype, ...) \
  ::llmc::detail::check_tensor(__func__, #tensor, tensor, dtype, Shape{__VA_ARGS__})
#define CHECK_TENSORS(tensors, dtype, ...) \
  ::llmc::detail::check_tensors(__func__, #tensors, {LIST_OF tensors}, dtype, Shape{__VA_ARGS__})
#define LIST_OF(...) __VA_ARGS__

// Scratch for the op about to run, with as many elements as its implementation on this device needs.
inline Tensor scratch(Stream& stream, const char* name, DType dtype, int64_t on_cpu, int64_t on_gpu) {
  const int64_t n = stream.device().computes_as() == DeviceKind::cuda ? on_gpu : on_cpu;
  return stream.scratch().alloc("scratch", name, dtype, {n});
}

template <class T>
T* data_or_null(const Tensor& t) {
  return t.empty() ? nullptr : t.data<T>();
}

inline double bytes_of(std::initializer_list<Tensor> tensors) {
  double bytes = 0;
  for (const Tensor& t : tensors) bytes += static_cast<double>(t.size_bytes());
  return bytes;
}

// The type that an op computes in, and the one that it sums in.
template <class X, class A>
struct OpTypes {};

// Runs an op that is written for all floating-point types: f(OpTypes<X, A>()), with X the type of `dtype`.
template <class Outputs = std::initializer_list<Tensor>, class F>
void run_op(Stream& stream, DType dtype, const OpCost& cost, const Outputs& outputs, F&& f) {
  stream.run(cost, outputs, [dtype, f = std::forward<F>(f)] {
    with_type(dtype, [&]<class X>(type_tag<X>) { f(OpTypes<X, accumulator_t<X>>()); });
  });
}

// Calls f<Out, X, Both>() with the types of two dtypes; Both is double if one of them is.
template <class F>
void with_types(DType out, DType x, F&& f) {
  with_type(out, [&]<class Out>(type_tag<Out>) {
    with_type(x, [&]<class X>(type_tag<X>) {
      f.template operator()<Out, X, std::conditional_t<std::is_same_v<Out, double>, Out, X>>();
    });
  });
}

}  // namespace detail

// RUN_OP(f, dtype, bytes, (outputs), arguments...): the same for CALL_OP(stream, X, f, arguments...), which costs these
// bytes, under the name of the function that has it. The arguments may name X and A.
// RUN_OP_AT(f, dtype, cost, (outputs), arguments...): with another name or cost.
// RUN_OP_ON_GPU(f, dtype, bytes, arguments...): an op that only GPUs have, and others only plan, under its
// own name; no output is checked.
// RUN_UNTYPED_OP(f, bytes, (outputs), arguments...): an op that is not written for several types.
#define RUN_OP(f, dtype, bytes, outputs, ...) RUN_OP_AT(f, dtype, (OpCost{__func__, 0, bytes}), outputs, __VA_ARGS__)
#define RUN_OP_AT(f, dtype, cost, outputs, ...) \
  ::llmc::detail::run_op(                       \
      stream, dtype, cost, {LIST_OF outputs},   \
      [=, &stream]<class X, class A>(::llmc::detail::OpTypes<X, A>) { CALL_OP(stream, X, f, __VA_ARGS__); })
#define RUN_OP_ON_GPU(f, dtype, bytes, ...)                                                        \
  ::llmc::detail::run_op(stream, dtype, {#f, 0, bytes}, {},                                        \
                         [=, &stream]<class X, class A>(::llmc::detail::OpTypes<X, A>) {           \
                           RUN_ON_DEVICE(stream, X, cuda::f(__VA_ARGS__, stream.cuda()), (void)0); \
                         })
#define RUN_UNTYPED_OP(f, bytes, outputs, ...) \
  stream.run({__func__, 0, bytes}, {LIST_OF outputs}, [=, &stream] { CALL_OP(stream, void, f, __VA_ARGS__); })

// out = 0
inline void zero(Tensor out, Stream& stream) {
  RUN_UNTYPED_OP(zero, detail::bytes_of({out}), (out), out.bytes, out.size_bytes());
}

// The same for several tensors: on a GPU, one launch for many that are small.
inline void zero(const std::vector<Tensor>& all, Stream& stream) {
  if (all.empty()) return;
  double bytes = 0;
  for (const Tensor& t : all) bytes += detail::bytes_of({t});
  stream.run({"zero", 0, bytes}, all, [all, &stream] {
    [[maybe_unused]] const auto each = [&](auto&& f) {
      for (const Tensor& t : all) f(t.bytes, t.size_bytes());
    };
    RUN_ON_DEVICE(stream, void, cuda::zero_each(each, stream.cuda()), each(cpu::ops<void>().zero));
  });
}

// out = x, same dtype and shape
inline void copy(Tensor out, Tensor x, Stream& stream) {
  CHECK_TENSOR(x, out.dtype, out.shape);
  RUN_UNTYPED_OP(copy, detail::bytes_of({out, x}), (out), out.bytes, x.bytes, x.size_bytes());
}

// The same between the memories of a device and of its host: over the bus, if the device is a GPU.
inline constexpr const char* host_copies = "host memory";
namespace detail {
inline void copy_between(const char* op, const Tensor& out, const Tensor& x, const HostBytes& bytes, Stream& stream) {
  check_tensor(op, "x", x, out.dtype, out.shape);
  stream.run({.name = op, .bytes = bytes_of({out, x}), .group = host_copies, .host = bytes}, {out},
             [=, &stream] { CALL_OP(stream, void, copy, out.bytes, x.bytes, x.size_bytes()); });
}
}  // namespace detail
inline void copy_to_device(Tensor out, Tensor x, Stream& stream) {
  detail::copy_between("copy_to_device", out, x, {.to_device = detail::bytes_of({x})}, stream);
}
inline void copy_to_host(Tensor out, Tensor x, Stream& stream) {
  detail::copy_between("copy_to_host", out, x, {.to_host = detail::bytes_of({x})}, stream);
}
// The same for what the host has updated, unless that was skipped: x is then what an earlier update left. control (4)
// fp64 (clip_control()) is in host memory, and final when a GPU's copy is enqueued.
inline constexpr const char* host_updates = "updates by the host";
inline void copy_updated_to_device(Tensor out, Tensor x, Tensor control, Stream& stream) {
  CHECK_TENSOR(control, DType::fp64, 4);
  CHECK_TENSOR(x, out.dtype, out.shape);
  const double bytes = detail::bytes_of({x});
  stream.run({.name = "copy_to_device", .bytes = 2 * bytes, .group = host_updates, .host = {.to_device = bytes}}, {out},
             [=, &stream] {
               if (control.data<double>()[2] != 0) CALL_OP(stream, void, copy, out.bytes, x.bytes, x.size_bytes());
             });
}

// out = x in the dtype of out, rounded to nearest even
inline void convert(Tensor out, Tensor x, Stream& stream) {
  CHECK(out.shape == x.shape, "convert: shapes {} and {} differ", to_string(out.shape), to_string(x.shape));
  stream.run({"convert", 0, detail::bytes_of({out, x})}, {out}, [=, &stream] {
    detail::with_types(out.dtype, x.dtype, [&]<class Out, class X, class Both>() {
      RUN_ON_DEVICE(stream, Both, cuda::convert(out.data<Out>(), x.data<X>(), x.numel(), stream.cuda()),
                    cpu::ops<X>().template convert<Out>()(out.data<Out>(), x.data<X>(), x.numel()));
    });
  });
}

// A box of out = a box of x, in the dtype of out, rounded to nearest even: sizes.outer times sizes.inner runs of
// sizes.run elements. Its output is not checked for NaN: the rest of `out` may not have been written yet.
inline void copy_box(Tensor out, const BoxStrides& to, Tensor x, const BoxStrides& from, const BoxSizes& sizes,
                     Stream& stream) {
  const int64_t n = sizes.outer * sizes.inner * sizes.run;
  if (n == 0) return;
  const auto require_inside = [&](const Tensor& t, const BoxStrides& at) {
    CHECK(at.begin >= 0 &&
              at.begin + (sizes.outer - 1) * at.outer + (sizes.inner - 1) * at.inner + sizes.run <= t.numel(),
          "copy_box: a box is not in {} {}", t.name, to_string(t.shape));
  };
  require_inside(out, to), require_inside(x, from);
  stream.run({"copy_box", 0, static_cast<double>(n * (size_of(out.dtype) + size_of(x.dtype)))}, {}, [=, &stream] {
    detail::with_types(out.dtype, x.dtype, [&]<class Out, class X, class Both>() {
      RUN_ON_DEVICE(stream, Both, cuda::copy_box(out.data<Out>(), to, x.data<X>(), from, sizes, stream.cuda()),
                    cpu::ops<X>().template copy_box<Out>()(out.data<Out>(), to, x.data<X>(), from, sizes));
    });
  });
}

// out = constant
inline void fill(Tensor out, float value, Stream& stream) {
  RUN_OP(fill, out.dtype, detail::bytes_of({out}), (out), out.data<X>(), value, out.numel());
}

// out = NaN (all bits set), so that reads of stale data show up.
inline void poison(Tensor out, Stream& stream) {
  RUN_UNTYPED_OP(poison, detail::bytes_of({out}), (), out.bytes, out.size_bytes());
}

// out += x   (n)
inline void add_to(Tensor out, Tensor x, Stream& stream) {
  CHECK_TENSOR(x, out.dtype, out.shape);
  RUN_OP(residual_forward, out.dtype, detail::bytes_of({out, out, x}), (out), out.data<X>(), out.data<X>(), x.data<X>(),
         out.numel());
}

namespace detail {

// The same for arrays of `n` elements, fp64 on GPUs as well: in stream order on a GPU, at once in host memory.
template <class T>
void add_arrays(T* out, const T* x, int64_t n, Stream* gpu) {
  if (gpu == nullptr) return cpu::ops<T>().residual_forward(out, out, x, n);
  RUN_ON_DEVICE(*gpu, void, cuda::add_to(out, x, n, gpu->cuda()), cpu::ops<T>().residual_forward(out, out, x, n));
}

}  // namespace detail

// out *= factor
inline void scale(Tensor out, float factor, Stream& stream) {
  RUN_OP(scale, out.dtype, 2 * detail::bytes_of({out}), (out), out.data<X>(), factor, out.numel());
}

// out = normal numbers keyed by (seed, name, global index), rounded to its dtype; out holds these elements of the
// parameter (contract 7).
inline void init_normal(Tensor out, float stddev, const Elements& elements, uint64_t seed, std::string_view name,
                        Stream& stream) {
  const Philox rng(seed, name);
  RUN_OP(init_normal, out.dtype, detail::bytes_of({out}), (out), out.data<X>(), elements, out.numel(), stddev, rng);
}

}  // namespace llmc
