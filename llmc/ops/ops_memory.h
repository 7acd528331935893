// ops_memory.h: ops on flat memory, and what all ops share. Conventions: ops.h.
#pragma once
#include <cstring>
#include <initializer_list>
#include <string_view>

#include "device/arena.h"
#include "device/device.h"
#include "device/tensor.h"
#include "ops/cpu/elementwise.h"
#include "ops/types.h"

namespace llmc {

inline DType accumulator_of(DType dtype) { return dtype == DType::fp64 ? DType::fp64 : DType::fp32; }

namespace detail {

inline void check_tensor(const char* op, const char* argument, const Tensor& t, DType dtype, const Shape& shape) {
  CHECK(t.dtype == dtype && t.shape == shape, "{}: {} ({}) is {} {}, expected {} {}", op, argument, t.name, t.dtype,
        to_string(t.shape), dtype, to_string(shape));
}
#define CHECK_TENSOR(tensor, dtype, ...) \
  ::llmc::detail::check_tensor(__func__, #tensor, tensor, dtype, Shape{__VA_ARGS__})

inline double bytes_of(std::initializer_list<Tensor> tensors) {
  double bytes = 0;
  for (const Tensor& t : tensors) bytes += static_cast<double>(t.size_bytes());
  return bytes;
}

}  // namespace detail

// out = 0
inline void zero(Tensor out, Stream& stream) {
  stream.run({"zero", 0, detail::bytes_of({out})}, {out}, [=] { cpu::zero(out.bytes, out.size_bytes()); });
}

// out = x, same dtype and shape
inline void copy(Tensor out, Tensor x, Stream& stream) {
  detail::check_tensor("copy", "x", x, out.dtype, out.shape);
  stream.run({"copy", 0, detail::bytes_of({out, x})}, {out},
             [=] { std::memcpy(out.bytes, x.bytes, static_cast<size_t>(x.size_bytes())); });
}

// out = x in the dtype of out, rounded to nearest even
inline void convert(Tensor out, Tensor x, Stream& stream) {
  CHECK(out.shape == x.shape, "convert: {} against {}", to_string(out.shape), to_string(x.shape));
  stream.run({"convert", 0, detail::bytes_of({out, x})}, {out}, [=] {
    with_type(out.dtype, [&](auto to) {
      with_type(x.dtype, [&](auto from) {
        cpu::convert(out.data<typename decltype(to)::type>(), x.data<typename decltype(from)::type>(), x.numel());
      });
    });
  });
}

// out = constant
inline void fill(Tensor out, float value, Stream& stream) {
  stream.run({"fill", 0, detail::bytes_of({out})}, {out}, [=] {
    with_type(out.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      std::fill_n(out.data<T>(), out.numel(), T(value));
    });
  });
}

// out = NaN, bit by bit: what is not to be read any longer shows where it is.
inline void poison(Tensor out, Stream& stream) {
  stream.run({"poison", 0, detail::bytes_of({out})}, {},
             [=] { std::fill_n(out.bytes, static_cast<size_t>(out.size_bytes()), std::byte{0xff}); });
}

// out += x   (n)
inline void add_to(Tensor out, Tensor x, Stream& stream) {
  detail::check_tensor("add_to", "x", x, out.dtype, out.shape);
  stream.run({"add_to", 0, detail::bytes_of({out, out, x})}, {out}, [=] {
    with_type(out.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      cpu::residual_forward(out.data<T>(), out.data<T>(), x.data<T>(), out.numel());
    });
  });
}

// out *= factor
inline void scale(Tensor out, float factor, Stream& stream) {
  stream.run({"scale", 0, 2 * detail::bytes_of({out})}, {out}, [=] {
    with_type(out.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (int64_t i = 0; i < out.numel(); ++i)
        out.data<T>()[i] = T(static_cast<accumulator_t<T>>(out.data<T>()[i]) * accumulator_t<T>(factor));
    });
  });
}

// out = normal numbers keyed by (seed, name, global index), rounded to its dtype; it holds the elements from `begin` on
// (contract 7).
inline void init_normal(Tensor out, float stddev, int64_t begin, uint64_t seed, std::string_view name, Stream& stream) {
  const Philox rng(seed, name);
  stream.run({"init_normal", 0, detail::bytes_of({out})}, {out}, [=] {
    with_type(out.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      cpu::init_normal(out.data<T>(), begin, out.numel(), stddev, rng);
    });
  });
}

}  // namespace llmc
