// device_test.h: what tests of kernels share. They are written against the CUDA runtime alone: compiled by a C++
// compiler they run on the emulator under every schedule and with every barrier switched off in turn, compiled by nvcc
// they run once on a GPU.
#pragma once
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "catch2.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/vec.cuh"
#ifndef __CUDACC__
#include "cuda_on_cpu/mutation.h"
#endif

namespace llmc {

// An array in device memory: NaN, or a copy of the host's.
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

// What a kernel has computed, or should have.
struct Output {
  std::string name;
  std::vector<float> values;
  template <class T>
  Output(std::string name_, const std::vector<T>& from) : name(std::move(name_)), values(from.size()) {
    for (size_t i = 0; i < from.size(); ++i) values[i] = static_cast<float>(from[i]);
  }
};
using Outputs = std::vector<Output>;

// A NaN in an output counts as different from anything but the same NaN.
inline bool same_bits(const Outputs& a, const Outputs& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i].values.size() != b[i].values.size() ||
        std::memcmp(a[i].values.data(), b[i].values.data(), a[i].values.size() * sizeof(float)) != 0)
      return false;
  return a.size() == b.size();
}

// ||got - wanted|| / ||wanted||; NaN where there is a NaN.
inline double relative_error(const std::vector<float>& got, const std::vector<float>& wanted) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += (double{got[i]} - wanted[i]) * (double{got[i]} - wanted[i]);
    size += double{wanted[i]} * wanted[i];
  }
  return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

// `run` launches kernels on fresh, poisoned outputs and returns these. They must be within `tolerance` of `reference`,
// and on the emulator the same bits under every schedule. Returns them.
inline Outputs check_kernel(const std::function<Outputs()>& run, const Outputs& reference, double tolerance) {
#ifndef __CUDACC__
  cuda_on_cpu::set_schedule({});
#endif
  const Outputs first = run();
  REQUIRE(first.size() == reference.size());
  for (size_t i = 0; i < first.size(); ++i) {
    INFO(reference[i].name);
    REQUIRE(first[i].values.size() == reference[i].values.size());
    REQUIRE(relative_error(first[i].values, reference[i].values) < tolerance);
  }
#ifndef __CUDACC__
  for (const cuda_on_cpu::Schedule& schedule : cuda_on_cpu::all_schedules()) {
    INFO("under the schedule " << cuda_on_cpu::to_string(schedule));
    cuda_on_cpu::set_schedule(schedule);
    const bool same = same_bits(run(), first);
    cuda_on_cpu::set_schedule({});
    REQUIRE(same);
  }
#endif
  return first;
}

// Each barrier and each wait that `run` executes is switched off in turn, and must then be missed: the outputs change
// under some schedule. `expected_survivors`: those that may be missing, as Site::source() writes them; the list is
// exact.
inline void check_barriers(const std::function<Outputs()>& run, std::vector<std::string> expected_survivors = {}) {
#ifndef __CUDACC__
  const Outputs right = run();
  if (cuda_on_cpu::thread_sanitizer) {  // it would stop at the first mutant: that is what it is there for
    REQUIRE(same_bits(run(), right));
    return;
  }
  const cuda_on_cpu::Mutants mutants = cuda_on_cpu::find_mutants([&] { return same_bits(run(), right); });
  SUCCEED(mutants.killed.size() << " barriers and waits are missed, " << mutants.survivors.size() << " are not");
  std::vector<std::string> survivors;
  for (const cuda_on_cpu::Site& site : mutants.survivors) {
    survivors.push_back(site.source());
    UNSCOPED_INFO("not missed: " << site.to_string());
  }
  for (const cuda_on_cpu::Site& site : mutants.killed) UNSCOPED_INFO("missed: " << site.to_string());
  std::sort(survivors.begin(), survivors.end());
  std::sort(expected_survivors.begin(), expected_survivors.end());
  REQUIRE(survivors == expected_survivors);
  REQUIRE(!(mutants.killed.empty() && mutants.survivors.empty()));
#else
  (void)run, (void)expected_survivors;
#endif
}

}  // namespace llmc
