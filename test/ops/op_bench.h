// op_bench.h: shared by the op tests: poisoned memory and a stream, finite differences, the golden files.
#pragma once
#include <random>

#include "catch2.h"
#include "core/safetensors.h"
#include "helpers.h"
#include "ops/ops.h"

namespace llmc {

// Memory and a stream for one case. Allocations are poisoned (NaN), so that unwritten outputs show.
struct Bench {
  Device device;
  Arena arena, scratch;
  Stream stream;
  std::mt19937_64 random{3};
  explicit Bench(int threads = 2, int64_t bytes = 64 << 20)
      : device{DeviceKind::cpu, threads}, arena(device, bytes), scratch(device, bytes), stream(device, scratch) {
    arena.poison_free();
    scratch.poison_free();
  }
  Tensor poisoned(DType dtype, const Shape& shape) {
    const Tensor t = arena.alloc("test", "test", dtype, shape);
    std::memset(t.bytes, 0xff, static_cast<size_t>(t.size_bytes()));  // it may be where a scope ended
    return t;
  }
  Tensor zeros(DType dtype, const Shape& shape) {
    const Tensor t = poisoned(dtype, shape);
    std::memset(t.bytes, 0, static_cast<size_t>(t.size_bytes()));
    return t;
  }
  Tensor normal(const Shape& shape, double scale = 1) {
    const Tensor t = poisoned(DType::fp64, shape);
    std::normal_distribution<double> draw(0, scale);
    for (int64_t i = 0; i < t.numel(); ++i) t.data<double>()[i] = draw(random);
    return t;
  }
  Tensor integers(const std::vector<int32_t>& values) {
    const Tensor t = poisoned(DType::int32, {static_cast<int64_t>(values.size())});
    std::copy(values.begin(), values.end(), t.data<int32_t>());
    return t;
  }
  // A copy in another dtype.
  Tensor as(DType dtype, const Tensor& x) {
    const Tensor t = poisoned(dtype, x.shape);
    convert(t, x, stream);
    stream.synchronize();
    return t;
  }
};

inline std::string bits_of(const Tensor& t) {
  return {reinterpret_cast<const char*>(t.bytes), static_cast<size_t>(t.size_bytes())};
}

inline double dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (int64_t i = 0; i < a.numel(); ++i) sum += a.data<double>()[i] * b.data<double>()[i];
  return sum;
}

// Compares the derivative of value() with respect to every element of x, by central differences, with `gradient`.
template <class F>
void require_gradient(const Tensor& x, const Tensor& gradient, F&& value) {
  constexpr double h = 1e-5;
  std::vector<double> numeric(static_cast<size_t>(x.numel()));
  for (int64_t i = 0; i < x.numel(); ++i) {
    double& element = x.data<double>()[i];
    const double before = element;
    element = before + h;
    const double above = value();
    element = before - h;
    const double below = value();
    element = before;
    numeric[static_cast<size_t>(i)] = (above - below) / (2 * h);
  }
  REQUIRE(relative_distance(gradient.data<double>(), numeric.data(), x.numel()) < 1e-7);
}

// Where an op with bf16 outputs rounds: only its outputs, or also intermediate values.
enum class Rounding { once, inside_too };

// The golden tensors, in the dtype of a test case.
struct Golden {
  DType dtype;
  SafetensorsReader fp32{"test/golden/ops.safetensors"}, bf16{"test/golden/ops_bf16.safetensors"};

  explicit Golden(DType d) : dtype(d) {}
  const SafetensorsReader& file(const std::string& name) const {
    return dtype == DType::bf16 && bf16.has(name) ? bf16 : fp32;
  }
  // In fp32, whatever the file's dtype.
  Tensor wide(Bench& b, const std::string& name, const Shape& shape) const {
    const SafetensorsReader& from = file(name);
    REQUIRE(from.info(name).numel() == shape.numel());
    const Tensor t = b.poisoned(from.info(name).dtype, shape);
    from.read(name, t.bytes);
    return t.dtype == DType::fp32 ? t : b.as(DType::fp32, t);
  }
  Tensor load(Bench& b, const std::string& name, DType as, const Shape& shape) const {
    const Tensor t = wide(b, name, shape);
    return as == DType::fp32 ? t : b.as(as, t);
  }
  Tensor integers(Bench& b, const std::string& name) const {
    const Tensor t = b.poisoned(DType::int32, {file(name).info(name).numel()});
    file(name).read(name, t.bytes);
    return t;
  }
  // fp32 outputs are within 1e-5 of the exact ones, for bf16 inputs too: products of bf16 numbers are exact in fp32, in
  // which ops compute and gradients accumulate (contract 12). bf16 outputs are within 2^-8, half the distance between
  // bf16 numbers, and, where the golden file has PyTorch's bf16, within 1.5 times PyTorch's error plus one rounding.
  // Rounding::once holds each element to a relative 2^-8, up to fp32 errors.
  void require(Bench& b, const Tensor& found, const std::string& name, Rounding rounding = Rounding::once) const {
    b.stream.synchronize();
    const Tensor expected = wide(b, name, found.shape), ours = b.as(DType::fp32, found);
    const int64_t n = expected.numel();
    const float *e = expected.data<float>(), *o = ours.data<float>();
    INFO(name << " in " << name_of(dtype));
    const double error = relative_distance(o, e, n);
    if (found.dtype != DType::bf16) {
      REQUIRE(error < 1e-5);
      return;
    }
    REQUIRE(error < 0x1p-8);
    if (bf16.has("torch." + name))
      REQUIRE(error < 1.5 * relative_distance(wide(b, "torch." + name, found.shape).data<float>(), e, n) + 0x1p-9);
    if (rounding == Rounding::inside_too) return;
    float largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(e[i]));
    for (int64_t i = 0; i < n; ++i) {
      INFO("element " << i << ": " << o[i] << ", expected " << e[i]);
      REQUIRE(std::abs(o[i] - e[i]) <= 0x1p-8f * std::abs(e[i]) + 1e-5f * largest);
    }
  }
};

}  // namespace llmc
