// device_test.h: shared by the kernel tests, which use only the CUDA runtime: compiled by a C++ compiler they run on
// the emulator under every schedule and with every barrier disabled one by one; compiled by nvcc they run once on a
// GPU.
#pragma once
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "catch2.h"
#include "cuda/device_array.h"
#ifndef __CUDACC__
#include "cuda_on_cpu/mutation.h"
#endif

namespace llmc {

// `run` launches kernels on fresh, poisoned outputs and returns them. They must be within `tolerance` of `reference`
// and, on the emulator, bitwise the same under every schedule (without LONG in the environment, of random orders only
// the first). Returns them. ONE_SCHEDULE in the environment skips the other schedules and the mutants of
// check_barriers.
inline Outputs check_kernel(const std::function<Outputs()>& run, const Outputs& reference, double tolerance) {
#ifndef __CUDACC__
  cuda_on_cpu::set_schedule({});
#endif
  const Outputs first = run();
  REQUIRE(first.size() == reference.size());
  for (size_t i = 0; i < first.size(); ++i) {
    INFO(reference[i].name);
    REQUIRE(first[i].values.size() == reference[i].values.size());
    const double error = relative_error(first[i].values, reference[i].values);
    if (!(error < tolerance)) UNSCOPED_INFO(describe_error(first[i], reference[i]));
    EXPECT(error < tolerance);  // of every output: on a GPU all are to be seen at once
  }
#ifndef __CUDACC__
  if (std::getenv("ONE_SCHEDULE") != nullptr) return first;
  const char* wanted = std::getenv("LONG");
  const bool all = wanted != nullptr && *wanted != '\0';
  for (const cuda_on_cpu::Schedule& schedule : cuda_on_cpu::all_schedules()) {
    if (schedule == cuda_on_cpu::Schedule{}) continue;  // that of the first
    if (schedule.seed > 1 && !all) continue;
    INFO("under the schedule " << cuda_on_cpu::to_string(schedule));
    cuda_on_cpu::set_schedule(schedule);
    const bool same = same_bits(run(), first);
    cuda_on_cpu::set_schedule({});
    REQUIRE(same);
  }
#endif
  return first;
}

// The outputs of two runs.
inline Outputs joined(Outputs a, const Outputs& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Disables each barrier and wait that `run` executes, one by one; the outputs must then change under some schedule.
// `expected_survivors`: those that may be missing, in the form of Site::source(); the list must be exact.
inline void check_barriers(const std::function<Outputs()>& run, std::vector<std::string> expected_survivors = {}) {
#ifndef __CUDACC__
  if (std::getenv("ONE_SCHEDULE") != nullptr) return;
  const Outputs right = run();
  if (cuda_on_cpu::thread_sanitizer) {  // it would stop at the first mutant, as it should
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
