// peak.h: the machine's matmul peak, measured once with the library that training uses, and cached: MFU is against
// this.
#pragma once
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "core/files.h"
#include "device/gpu.h"
#include "ops/ops.h"

namespace llmc {

inline std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown processor";
}

// Flops per second of the best of several square products in `dtype`.
inline double measure_matmul_peak(const Device& device, DType dtype) {
  const int64_t size = device.kind == DeviceKind::cuda ? 8192 : 1536;
  double best = 0;
  int64_t scratch_bytes = 0;
  for (const Device& on : {device.on_paper(), device}) {  // plan the scratch, then run
    best = 0;
    const int64_t matrix = round_up(size * size * size_of(dtype), Arena::alignment);
    Arena arena(on, 3 * matrix), scratch(on, scratch_bytes);
    Stream stream(on, scratch);
    auto square = [&](const char* name) { return arena.alloc("peak", name, dtype, {size, size}); };
    const Tensor out = square("out"), x = square("x"), weight = square("weight");
    for (const Tensor& t : {x, weight}) init_normal(t, 1, 0, 0, t.name, stream);  // zeros would cost less power
    for (int i = 0; i < 8; ++i) {
      stream.synchronize();
      const auto begin = std::chrono::steady_clock::now();
      linear_forward(out, x, weight, {}, stream);
      stream.synchronize();
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      if (i > 0) best = std::max(best, 2.0 * static_cast<double>(size * size * size) / seconds);
    }
    scratch_bytes = scratch.high_water();
  }
  return best;
}

inline std::string peak_cache_file() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (cache != nullptr && *cache != '\0') return std::string(cache) + "/train_gpt/peak.json";
  return std::string(home != nullptr && *home != '\0' ? home : "/tmp") + "/.cache/train_gpt/peak.json";
}

// The best that was ever measured for this processor, library, dtype and number of threads: measured anew at every
// start (a fraction of a second) and cached, because a machine that is busy at one start is not at all of them. A cache
// that cannot be read or written is done without.
inline double matmul_peak(const Device& device, DType dtype) {
  const std::string key =
      device.kind == DeviceKind::cuda
          ? formatted("{} | {} | {}{}", gpu_info(device.gpu).name, matmul_library(device), dtype,
                      device.tf32 == Tf32::yes ? " | tf32" : "")
          : formatted("{} | {} | {} | {} threads", processor_name(), matmul_library(device), dtype, device.threads);
  const std::string file = peak_cache_file();
  nlohmann::json cache = nlohmann::json::object();
  if (std::ifstream in(file); in) {
    nlohmann::json found = nlohmann::json::parse(in, nullptr, false);
    if (found.is_object()) cache = std::move(found);
  }
  const double cached = cache.contains(key) && cache[key].is_number() ? cache[key].get<double>() : 0;
  const double measured = measure_matmul_peak(device, dtype);
  if (measured <= cached) return cached;
  cache[key] = measured;
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(file).parent_path(), ignored);
  std::ofstream(file) << cache.dump(1) << "\n";
  return measured;
}

}  // namespace llmc
