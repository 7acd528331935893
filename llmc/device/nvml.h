// nvml.h: GPU readings during a run: utilisation, memory, clocks, power, temperature. They come from NVIDIA's
// management library (NVML), which the driver installs; it is opened at run time with our own prototypes, because not
// every toolkit has its header ("NVML API Reference Guide", NVIDIA). A run never fails for lack of readings.
#pragma once
#include <dlfcn.h>

#include <bit>
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace llmc {

// One reading. None: the GPU does not report the value, as with some values of MIG instances, virtual GPUs and GPUs
// without memory of their own.
struct GpuReading {
  std::optional<int> busy_percent;  // share of the time in which any kernel ran, not the share of the GPU in use
  std::optional<int64_t> memory_used, memory_total;  // bytes; all processes
  std::optional<int> sm_mhz, sm_mhz_max;
  std::optional<double> watts, watts_limit;
  std::optional<int> celsius;
  std::optional<std::string> throttle;  // why clocks are reduced; "none"
  bool operator==(const GpuReading&) const = default;
};

// The bits of nvmlClocksEventReasons.
inline std::string throttle_reasons(uint64_t bits) {
  // In the order of the bits. "hardware slowdown" comes with the cause, if known: thermal or power brake.
  static constexpr std::array<const char*, 11> words = {
      "idle",       "clocks set by the user", "power cap",   "hardware slowdown", "sync boost",
      "thermal",    "hardware thermal",       "power brake", "display clocks",    "board limit",
      "reliability"};
  std::string text;
  for (; bits != 0; bits &= bits - 1) {
    const auto bit = static_cast<size_t>(std::countr_zero(bits));
    text += (text.empty() ? "" : ", ") + (bit < words.size() ? words[bit] : formatted("unknown bit {}", bit));
  }
  return text.empty() ? "none" : text;
}

// One line for the console.
inline std::string to_string(const GpuReading& r) {
  constexpr double GiB = 1 << 30;
  std::string text = "GPU";
  const auto add = [&](const std::string& part) { text += (text == "GPU" ? " " : " | ") + part; };
  const auto add_of = [&](const char* pattern, const char* unit, auto value, auto limit, double scale) {
    if (!value) return;
    const std::string most = limit ? " of " + formatted(pattern, static_cast<double>(*limit) / scale) : "";
    add(formatted(pattern, static_cast<double>(*value) / scale) + most + unit);
  };
  if (r.busy_percent) add(formatted("{}% busy", *r.busy_percent));
  add_of("{:.1f}", " GiB", r.memory_used, r.memory_total, GiB);
  add_of("{:.0f}", " MHz", r.sm_mhz, r.sm_mhz_max, 1);
  add_of("{:.0f}", " W", r.watts, r.watts_limit, 1);
  if (r.celsius) add(formatted("{} C", *r.celsius));
  if (r.throttle) add("throttled by: " + *r.throttle);
  return text;
}

// For metrics.jsonl; values that the GPU does not report are left out.
inline nlohmann::ordered_json to_json_object(const GpuReading& r) {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  const auto add = [&](const char* name, const auto& value) {
    if (value) object[name] = *value;
  };
  add("gpu_busy_percent", r.busy_percent);
  add("gpu_memory_used", r.memory_used);
  add("gpu_memory_total", r.memory_total);
  add("gpu_sm_mhz", r.sm_mhz);
  add("gpu_sm_mhz_max", r.sm_mhz_max);
  add("gpu_watts", r.watts);
  add("gpu_watts_limit", r.watts_limit);
  add("gpu_celsius", r.celsius);
  add("gpu_throttle", r.throttle);
  return object;
}

// One GPU. Several monitors, each in its own thread, may watch the same or different GPUs.
class GpuMonitor {
 public:
  // `pci_bus_id`: from cudaDeviceGetPCIBusId, "0000:3b:00.0". (NVML numbers devices differently from CUDA.)
  explicit GpuMonitor(const std::string& pci_bus_id, const std::string& library = "libnvidia-ml.so.1")
      : title_("GPU " + pci_bus_id), library_(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) {
      const char* error = dlerror();
      why_not_ =
          formatted("no readings of {}: cannot open NVIDIA's management library, which comes with the driver: {}",
                    title_, error == nullptr ? library.c_str() : error);
      return;
    }
    if (!succeeds(call("nvmlInit_v2"), "does not start")) return;
    started_ = true;
    void* device = nullptr;
    if (succeeds(call("nvmlDeviceGetHandleByPciBusId_v2", pci_bus_id.c_str(), &device), "does not find it"))
      device_ = device;
  }
  ~GpuMonitor() {
    if (started_) call("nvmlShutdown");
  }

  // None: why_not() says why. Takes up to milliseconds: not for every step.
  std::optional<GpuReading> read() {
    if (device_ == nullptr) return std::nullopt;
    constexpr unsigned clock_of_sm = 1, sensor_of_gpu = 0;
    GpuReading r;
    int refused = 0;  // the last error status
    const auto answered = [&](int status) { return status == 0 || (refused = status, false); };
    const auto number = [&](const char* name, auto... which) {
      unsigned value = 0;
      return answered(call(name, device_, which..., &value)) ? std::optional<unsigned>(value) : std::nullopt;
    };
    if (Utilization u; answered(call("nvmlDeviceGetUtilizationRates", device_, &u)))
      r.busy_percent = static_cast<int>(u.gpu);
    if (Memory m; answered(call("nvmlDeviceGetMemoryInfo", device_, &m))) {
      r.memory_used = static_cast<int64_t>(m.used);
      r.memory_total = static_cast<int64_t>(m.total);
    }
    r.sm_mhz = number("nvmlDeviceGetClockInfo", clock_of_sm);
    r.sm_mhz_max = number("nvmlDeviceGetMaxClockInfo", clock_of_sm);
    r.celsius = number("nvmlDeviceGetTemperature", sensor_of_gpu);
    if (const auto mW = number("nvmlDeviceGetPowerUsage")) r.watts = *mW * 1e-3;
    if (const auto mW = number("nvmlDeviceGetEnforcedPowerLimit")) r.watts_limit = *mW * 1e-3;
    // Renamed in driver 535.
    for (const char* name : {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"})
      if (unsigned long long bits = 0; !r.throttle && answered(call(name, device_, &bits)))
        r.throttle = throttle_reasons(bits);
    if (r != GpuReading{}) return r;
    succeeds(refused, "returned no readings");
    return std::nullopt;
  }

  const std::string& why_not() const { return why_not_; }

 private:
  struct Utilization {
    unsigned gpu, memory;
  };
  struct Memory {
    unsigned long long total, free, used;
  };
  struct Close {
    void operator()(void* library) const { dlclose(library); }
  };
  static constexpr int function_not_found = 13;

  // The argument types are the prototype. All functions return a status; 0 is success. A function that this version of
  // the library lacks counts as unsupported by the GPU.
  template <class... Arguments>
  int call(const char* name, Arguments... arguments) const {
    const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library_.get(), name));
    return function == nullptr ? function_not_found : function(arguments...);
  }
  bool succeeds(int status, const char* what_it_does_not) {
    if (status == 0) return true;
    const auto error = reinterpret_cast<const char* (*)(int)>(dlsym(library_.get(), "nvmlErrorString"));
    why_not_ = formatted("no readings of {}: NVIDIA's management library {}: {} (status {})", title_, what_it_does_not,
                         error == nullptr ? "it is another library" : error(status), status);
    return false;
  }

  std::string title_, why_not_;
  std::unique_ptr<void, Close> library_;
  bool started_ = false;
  void* device_ = nullptr;  // the library's handle
};

}  // namespace llmc
