// emulator_test.h: shared by the tests of the emulator itself.
#pragma once
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_test.h"
#include "cuda/emulator/planted_bugs.h"

namespace llmc {

using Catch::Matchers::ContainsSubstring;

inline std::vector<float> counted(int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) values[static_cast<size_t>(i)] = static_cast<float>(i + 1);
  return values;
}

// Does a kernel give the same bits as `right` under each schedule?
inline bool differs(Outputs (*run)(), const Outputs& right) {
  bool any = false;
  for (const cuda_on_cpu::Schedule& schedule : cuda_on_cpu::all_schedules()) {
    cuda_on_cpu::set_schedule(schedule);
    any = any || !same_bits(run(), right);
  }
  cuda_on_cpu::set_schedule({});
  return any;
}

template <class F>
std::string failure_of(F&& run) {
  try {
    run();
  } catch (const cuda_on_cpu::Failure& failure) {
    return failure.what();
  }
  return "no failure";
}

// Runs this program again for one hidden test case; returns its output if it failed.
inline std::string output_of_failing(const std::string& test_case) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  FILE* out = popen((program + " '" + test_case + "' 2>&1").c_str(), "r");
  REQUIRE(out != nullptr);
  std::string text;
  for (int c = 0; (c = fgetc(out)) != EOF;) text += static_cast<char>(c);
  return pclose(out) == 0 ? "it passed" : text;
}

// REQUIRE for threads other than the test's own: Catch2's assertions are not thread-safe.
inline void demand(bool holds, const cuda_on_cpu::Location& where = cuda_on_cpu::Location::current()) {
  if (!holds) throw std::runtime_error("not as demanded at line " + std::to_string(where.line()));
}

// Sets up emulated devices, and one of the usual size again at the end; the test fails if streams or memory are left.
class Devices {
 public:
  explicit Devices(int count, size_t bytes_each = size_t{1} << 20) { cuda_on_cpu::set_devices(count, bytes_each); }
  ~Devices() {
    if (const std::string left = close(); !left.empty()) FAIL_CHECK(left);
  }
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;
  std::string close() {  // what is left
    const bool first = std::exchange(open_, false);
    try {
      if (first) cuda_on_cpu::set_devices(1);
    } catch (const cuda_on_cpu::Failure& failure) {
      return failure.what();
    }
    return "";
  }

 private:
  bool open_ = true;
};

class TestStream {
 public:
  explicit TestStream(unsigned flags = cudaStreamNonBlocking) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, flags));
  }
  ~TestStream() { cudaStreamDestroy(stream_); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};
class TestEvent {
 public:
  TestEvent() { CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~TestEvent() { cudaEventDestroy(event_); }
  TestEvent(const TestEvent&) = delete;
  TestEvent& operator=(const TestEvent&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Pinned memory of the host.
class Pinned {
 public:
  explicit Pinned(size_t n, float value = 0) {
    CUDA_CHECK(cudaHostAlloc(&data_, n * sizeof(float), cudaHostAllocDefault));
    for (size_t i = 0; i < n; ++i) data_[i] = value;
  }
  ~Pinned() { cudaFreeHost(data_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  operator float*() const { return data_; }

 private:
  float* data_ = nullptr;
};

}  // namespace llmc
