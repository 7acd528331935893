// device_check.h: --check-devices: before the first step all ranks multiply and copy for some milliseconds, at the same
// time. One whose device is much slower would keep the others waiting in every step: it is named.
#pragma once
#include <nlohmann/json.hpp>
#include <thread>

#include "core/clock.h"
#include "core/environment.h"
#include "core/log.h"
#include "run/processes.h"
#include "run/rank_device.h"
#include "run/reports/peak.h"

namespace llmc {

// Of one rank, while the others are measured, too.
struct DeviceSpeed {
  double flops = 0, bytes = 0;  // per second: of a product, and of a copy, read and written
};

inline DeviceSpeed measure_speed(const Device& device, DType dtype) {
  const bool gpu = device.kind == DeviceKind::cuda;
  const int64_t size = gpu ? 4096 : 256, n = gpu ? int64_t{1} << 26 : int64_t{1} << 22;
  const double product = product_seconds(device, dtype, size);
  const double copied = best_seconds(device, DType::fp32, {n},
                                     [](Tensor out, Tensor x, Tensor, Stream& stream) { copy(out, x, stream); })[0];
  return {2.0 * static_cast<double>(size * size * size) / product, 8.0 * static_cast<double>(n) / copied};
}

// A line for each rank that is much slower than the median of the others, in either way.
inline std::vector<std::string> slow_devices(const std::vector<DeviceSpeed>& speeds,
                                             const std::function<std::string(int)>& name_of_rank) {
  constexpr double much = 0.75;  // of the median; devices of one kind differ by some percent
  std::vector<std::string> lines;
  for (size_t rank = 0; rank < speeds.size(); ++rank) {
    std::string slow;
    const auto judge = [&](double DeviceSpeed::*which, double unit, const char* what) {
      std::vector<double> others;
      for (size_t r = 0; r < speeds.size(); ++r)
        if (r != rank) others.push_back(speeds[r].*which);
      if (others.empty()) return;
      const double middle = median(others);
      if (!(speeds[rank].*which >= much * middle))
        slow += formatted("{}{:.3g} {}, {:.3g} is the median of the others", slow.empty() ? "" : "; ",
                          speeds[rank].*which / unit, what, middle / unit);
    };
    judge(&DeviceSpeed::flops, 1e12, "TFLOP/s in a product");
    judge(&DeviceSpeed::bytes, 1e9, "GB/s in a copy");
    if (!slow.empty()) lines.push_back(formatted("{} is slow: {}", name_of_rank(static_cast<int>(rank)), slow));
  }
  return lines;
}

// The speeds of this process's ranks, all measured at once.
inline std::vector<DeviceSpeed> measure_local_speeds(const Device& device, const Place& place, DType dtype) {
  std::vector<DeviceSpeed> speeds(static_cast<size_t>(place.local_ranks));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < speeds.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        speeds[i] = measure_speed(rank_device(device, place, static_cast<int64_t>(i)), dtype);
      } catch (const std::exception&) {  // no memory, say: the run will report it; until then it is slow
      }
    });
  for (std::thread& thread : threads) thread.join();
  return speeds;
}

// Called by all processes.
inline void check_devices(const Processes& processes, const Device& device, const Place& place, DType dtype, Log& log) {
  const auto begin = Clock::now();
  processes.all_gather("devices to check", "");  // at the same time
  nlohmann::json mine = nlohmann::json::array();
  for (const DeviceSpeed& s : measure_local_speeds(device, place, dtype)) mine.push_back({s.flops, s.bytes});
  std::vector<DeviceSpeed> all;
  for (const std::string& text : processes.all_gather("devices", mine.dump()))
    for (const nlohmann::json& s : parse_json(text, "a process's devices")) all.push_back({s.at(0), s.at(1)});
  const auto name = [&](int rank) {
    const auto process = static_cast<size_t>(rank / place.local_ranks);
    return formatted("rank {} on {}", rank, processes.alone() ? host_name() : place.host_of_process.at(process));
  };
  const std::vector<std::string> slow = slow_devices(all, name);
  for (const std::string& line : slow) log.line("WARNING: --check-devices: " + line);
  if (slow.empty())
    log.line(formatted("--check-devices: {} ranks are alike, {:.0f} ms", all.size(), 1e3 * seconds_since(begin)));
}

}  // namespace llmc
