// peak.h: the device's matmul and memory peaks, measured with training's kernels, and the peak that MFU refers to; a
// cache of such measurements.
#pragma once
#include <chrono>
#include <filesystem>
#include <fstream>

#include "core/clock.h"
#include "core/environment.h"
#include "core/files.h"
#include "core/json.h"
#include "device/gpu.h"
#include "ops/ops.h"
#include "run/reports/gpu_peaks.h"

namespace llmc {

inline std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown processor";
}

// Best time in seconds of each of the ops, which get three tensors of `shape` and a stream. They take turns, so that a
// busy spell of the machine hits all of them; on a GPU, each is timed as one of several back to back.
template <class... Ops>
std::array<double, sizeof...(Ops)> best_seconds(const Device& device, DType dtype, const Shape& shape,
                                                const Ops&... ops) {
  std::array<double, sizeof...(Ops)> best;
  best.fill(std::numeric_limits<double>::infinity());
  int64_t scratch_bytes = 0;
  for (const Device& on : {device.on_paper(), device}) {  // plan the scratch, then run
    const int64_t bytes = round_up(shape.numel() * size_of(dtype), Arena::alignment);
    Arena arena(on, 3 * bytes), scratch(on, scratch_bytes);
    Stream stream(on, scratch);
    auto tensor = [&](const char* name) { return arena.alloc("peak", name, dtype, shape); };
    const Tensor out = tensor("out"), x = tensor("x"), y = tensor("y");
    for (const Tensor& t : {x, y}) {
      if (on.kind == DeviceKind::cuda)
        init_normal(t, 1, {}, 0, t.name, stream);  // zeros draw less power and run faster
      else zero(t, stream);
    }
    const int calls = on.kind == DeviceKind::cuda ? 4 : 1;
    const auto seconds = [&](const auto& op) {
      stream.synchronize();
      const auto begin = Clock::now();
      for (int call = 0; call < calls; ++call) op(out, x, y, stream);
      stream.synchronize();
      return seconds_since(begin) / calls;
    };
    for (int i = 0; i < 8; ++i) {
      const std::array<double, sizeof...(Ops)> now = {seconds(ops)...};
      for (size_t op = 0; op < now.size(); ++op)
        if (i > 0 && on.kind != DeviceKind::null) best[op] = std::min(best[op], now[op]);
    }
    scratch_bytes = scratch.high_water();
  }
  return best;
}

// Best time of a product of square matrices.
inline double product_seconds(const Device& device, DType dtype, int64_t size) {
  return best_seconds(device, dtype, {size, size},
                      [](Tensor out, Tensor x, Tensor y, Stream& stream) { linear_forward(out, x, y, {}, stream); })[0];
}

// Elements per tensor for three to take half of a GPU's free memory: other programs may use the GPU, too.
inline int64_t most_elements(const Device& device, DType dtype) {
  return free_memory_of_own(device.gpu) / 2 / 3 / size_of(dtype);
}

// Matmul flops per second in `dtype`: from registers on a CPU, of a square matrix on a GPU.
inline double measure_matmul_peak(const Device& device, DType dtype) {
  if (device.kind == DeviceKind::cpu) {
    double peak = 0;
    with_type(dtype,
              [&](auto tag) { peak = cpu::products<typename decltype(tag)::type>().register_peak(device.threads); });
    return peak;
  }
  int64_t size = 64;
  double best = product_seconds(device, dtype, size);
  // A larger product keeps a GPU busier, unless one of this size already takes a long time.
  const int64_t most = dtype == DType::fp32 ? 4096 : 8192;
  while (best < 2e-3 && size < most && 4 * size * size <= most_elements(device, dtype))
    best = product_seconds(device, dtype, size *= 2);
  return 2.0 * static_cast<double>(size * size * size) / best;
}

// Bytes per second, counting reads and writes, of a copy. A CPU also reads the memory that it writes, which is useless
// to a copy: there the fastest of a copy, a sum and a doubling in place, and an AdamW step counts; the step reads four
// arrays and writes three of them. All run on the threads of the device, a rank's own.
inline double measure_bandwidth(const Device& device) {
  int64_t n = (int64_t{1} << 26) - 200'000;  // arrays a power of two apart would evict each other from the caches
  if (device.kind == DeviceKind::cuda) n = std::min(4 * n, most_elements(device, DType::fp32));
  const auto copied = [](Tensor out, Tensor x, Tensor, Stream& stream) { copy(out, x, stream); };
  const auto rate = [&](double bytes, double seconds) { return bytes * static_cast<double>(n) / seconds; };
  if (device.kind == DeviceKind::cuda) return rate(8, best_seconds(device, DType::fp32, {n}, copied)[0]);
  const auto summed = [](Tensor, Tensor x, Tensor y, Stream& stream) { add_to(x, y, stream); };
  const auto doubled = [](Tensor, Tensor x, Tensor, Stream& stream) { add_to(x, x, stream); };
  const auto updated = [n](Tensor, Tensor x, Tensor y, Stream& stream) {
    const auto half = [n](const Tensor& t, int64_t i) { return t.slice(i * (n / 2), {n / 2}); };
    constexpr OptimizerOptions options{
        .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0, .step = 1};
    auto scope = stream.scratch().scope();
    const Tensor control = stream.scratch().alloc("scratch", "control", DType::fp64, {4});
    fill(control, 1, stream);  // the update is allowed
    update_weights(Optimizer::adamw, half(x, 0), {}, {half(x, 1), half(y, 0)}, half(y, 1), control, options, stream);
  };
  const std::array<double, 4> seconds = best_seconds(device, DType::fp32, {n}, copied, summed, doubled, updated);
  return std::max({rate(8, seconds[0]), rate(12, seconds[1]), rate(8, seconds[2]), rate(14, seconds[3])});
}

// What was measured before, by what it is of: a JSON object in a file of the user's cache directory. Works without a
// readable or writable cache: then it is measured again.
class MeasurementCache {
 public:
  explicit MeasurementCache(const std::string& name) : file_(cache_path(name)) {
    try {
      if (path_exists(file_)) all_ = read_json(file_);
    } catch (const Error&) {
    }
    if (!all_.is_object()) all_ = nlohmann::json::object();
  }
  // Null: there is none, or it is not younger than `seconds`, or nobody knows. Clocks of hosts may differ by a minute.
  nlohmann::json find(const std::string& key, double seconds = forever) const {
    constexpr double ahead = 60;
    if (!all_.contains(key) || !all_[key].is_object()) return {};
    const nlohmann::json& entry = all_[key];
    const double age = age_of(entry);
    return seconds == forever || (age > -ahead && age < seconds) ? entry : nlohmann::json();
  }
  // seconds: what is older goes. What comes from a clock that is ahead of this host's stays.
  void keep(const std::string& key, nlohmann::json entry, double seconds = forever) {
    std::erase_if(all_.get_ref<nlohmann::json::object_t&>(), [&](const auto& e) {
      return !e.second.is_object() || (seconds != forever && !(age_of(e.second) < seconds));
    });
    entry["measured_at"] = now();
    all_[key] = std::move(entry);
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(file_).parent_path(), ignored);
    try {
      write_text_durably(file_, all_.dump(1) + "\n");
    } catch (const Error&) {
    }
  }
  const std::string& file() const { return file_; }

 private:
  static constexpr double forever = std::numeric_limits<double>::infinity();
  static double now() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }
  // In seconds; NaN: not known.
  static double age_of(const nlohmann::json& entry) {
    const nlohmann::json at = member(entry, "measured_at");
    return at.is_number() ? now() - at.get<double>() : std::numeric_limits<double>::quiet_NaN();
  }

  std::string file_;
  nlohmann::json all_ = nlohmann::json::object();
};

// The best ever measured for this processor, library, dtype and number of threads. It is cached, because the machine
// may be busy now and idle next time, and measured again (a fraction of a second) after ten minutes.
inline double matmul_peak(const Device& device, DType dtype) {
  const std::string key =
      device.kind == DeviceKind::cuda
          ? formatted("{} | {} | {}{}", gpu_info(device.gpu).name, matmul_library(device), dtype,
                      device.tf32 == Tf32::yes ? " | tf32" : "")
          : formatted("{} | {} | {} | {} threads", processor_name(), matmul_library(device), dtype, device.threads);
  MeasurementCache cache("peak.json");
  const auto flops_of = [](const nlohmann::json& entry) {
    return entry.is_object() && entry.contains("flops") && entry["flops"].is_number() ? entry["flops"].get<double>()
                                                                                      : 0.0;
  };
  constexpr double ten_minutes = 600;
  if (const double recent = flops_of(cache.find(key, ten_minutes)); recent > 0) return recent;
  const double best = std::max(flops_of(cache.find(key)), measure_matmul_peak(device, dtype));
  cache.keep(key, {{"flops", best}});
  return best;
}

// The peaks that the speed of a run or a rank is compared with.
struct Peaks {
  double measured = 0;                  // flops per second of matmul on this machine: the speed of light
  double bandwidth = 0;                 // bytes per second of memory that one rank reaches while the others rest
  std::optional<double> promised = {};  // flops per second that MFU refers to; none: unknown
  std::string source;                   // where `promised` comes from

  Peaks times(double factor) const {
    return {measured * factor, bandwidth, promised ? std::optional(*promised * factor) : std::nullopt, source};
  }
  // A step faster than the measured peak proves it too low: the machine was busy then. Returns whether it was.
  bool raise(double flops_per_s) {
    if (measured == 0 || flops_per_s <= measured) return false;
    if (promised && source == from_measurement) promised = flops_per_s;
    measured = flops_per_s;
    return true;
  }
  static constexpr const char* from_measurement = "measured";
  Peaks of_rank(int64_t ranks) const { return times(1 / static_cast<double>(ranks)); }
};

// For one device. MFU refers to --peak-tflops or a GPU's datasheet; on a CPU, which has none, to the measured peak.
inline Peaks find_peaks(const Device& device, DType dtype, const std::optional<double>& peak_tflops) {
  Peaks peaks;
  peaks.measured = matmul_peak(device, dtype);
  if (peak_tflops) return peaks.promised = *peak_tflops * 1e12, peaks.source = "--peak-tflops", peaks;
  if (device.kind != DeviceKind::cuda)
    return peaks.promised = peaks.measured, peaks.source = Peaks::from_measurement, peaks;
  const std::optional<GpuPeaks> chip = gpu_peaks(gpu_info(device.gpu).name);
  peaks.source = "no datasheet peak known for this GPU and dtype";
  if (dtype == DType::bf16 && chip && chip->bf16) peaks.promised = *chip->bf16 * 1e12, peaks.source = chip->source;
  return peaks;
}

// GPUs that reach their datasheet's peaks, for a plan's clock. None: it lacks some, for fp32, or ranks without NVLink.
inline std::shared_ptr<const Machine> datasheet_machine(const GpuPeaks& chip, DType dtype, int ranks) {
  if (dtype != DType::bf16 || !chip.bf16 || !chip.bandwidth || (ranks > 1 && !chip.link)) return nullptr;
  return ideal_machine(*chip.bf16 * 1e12, *chip.bandwidth * 1e9,
                       chip.link ? *chip.link * 1e9 : std::numeric_limits<double>::infinity());
}

}  // namespace llmc
