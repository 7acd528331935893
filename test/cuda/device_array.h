// device_array.h: device arrays, random inputs and comparable outputs, for tests and benchmarks of kernels.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/vec.cuh"

namespace llmc {

// An array in device memory, initialised with NaN or from the host.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t n) : n_(n) {
    CUDA_CHECK(cudaMalloc(&data_, bytes()));
    CUDA_CHECK(cudaMemset(data_, 0xff, bytes()));
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(static_cast<int64_t>(from.size())) {
    CUDA_CHECK(cudaMemcpy(data_, from.data(), bytes(), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  operator T*() { return data_; }
  size_t bytes() const { return static_cast<size_t>(n_) * sizeof(T); }
  // Waits for the whole device first.
  std::vector<T> host() const {
    std::vector<T> copy(static_cast<size_t>(n_));
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(copy.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return copy;
  }

 private:
  int64_t n_;
  T* data_ = nullptr;
};

// Normal numbers, rounded to T.
template <class T>
std::vector<T> normal_values(int64_t n, uint64_t seed, float mean = 0, float scale = 1) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> draw(mean, scale);
  std::vector<T> values(static_cast<size_t>(n));
  for (T& value : values) value = T(draw(random));
  return values;
}

// What a kernel computed, or should compute.
struct Output {
  std::string name;
  std::vector<float> values;
  int digits;  // of a value's significand, in bits
  template <class T>
  Output(std::string name_, const std::vector<T>& from)
      : name(std::move(name_)), values(from.size()), digits(sizeof(T) == 2 ? 8 : 24) {
    for (size_t i = 0; i < from.size(); ++i) values[i] = static_cast<float>(from[i]);
  }
};
using Outputs = std::vector<Output>;

// A NaN in an output differs from anything but the same NaN.
inline bool same_bits(const Outputs& a, const Outputs& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    const size_t n = a[i].values.size();
    if (n != b[i].values.size()) return false;
    if (n > 0 && std::memcmp(a[i].values.data(), b[i].values.data(), n * sizeof(float)) != 0) return false;
  }
  return true;
}

// ||got - wanted|| / ||wanted||; NaN if either has a NaN.
inline double relative_error(const std::vector<float>& got, const std::vector<float>& wanted) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += (double{got[i]} - wanted[i]) * (double{got[i]} - wanted[i]);
    size += double{wanted[i]} * wanted[i];
  }
  return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

// How far `got` is from what was wanted, in words: over all values, and the worst of them in units in the last place
// (ulps) of what was wanted there, or of a typical value where that is larger.
inline std::string describe_error(const Output& got, const Output& wanted) {
  double squares = 0, worst = -1;
  size_t at = 0;
  const size_t n = wanted.values.size();
  for (const float value : wanted.values) squares += double{value} * value;
  const double typical = std::sqrt(squares / static_cast<double>(std::max<size_t>(1, n)));
  for (size_t i = 0; i < n; ++i) {
    const double size = std::max({std::abs(double{wanted.values[i]}), typical, 0x1p-126});
    const double ulps = std::abs(double{got.values[i]} - wanted.values[i]) /
                        std::ldexp(1, std::ilogb(std::isfinite(size) ? size : 1.0) - wanted.digits + 1);
    if (ulps <= worst || worst == std::numeric_limits<double>::infinity()) continue;
    worst = std::isnan(ulps) ? std::numeric_limits<double>::infinity() : ulps, at = i;
  }
  char text[200];
  std::snprintf(text, sizeof text, "%s: %.2e of the norm; at most %.1f ulps of %s, value %zu of %zu: %.9g, wanted %.9g",
                wanted.name.c_str(), relative_error(got.values, wanted.values), worst,
                wanted.digits == 8 ? "bf16" : "fp32", at, n, n == 0 ? 0.0 : double{got.values[at]},
                n == 0 ? 0.0 : double{wanted.values[at]});
  return text;
}

}  // namespace llmc
