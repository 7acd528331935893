// GPU readings, from a fake NVML.
#include <dlfcn.h>

#include "catch2.h"
#include "device/nvml.h"
#include "helpers.h"
#include "nvml_stand_in.h"

using namespace llmc;

namespace {

constexpr const char* library = "build/nvml_stand_in.so";

// Resets the fake's answers to the defaults; the library stays open until the end of the test.
class StandIn {
 public:
  StandIn() : library_(dlopen(library, RTLD_NOW)) {
    INFO((library_ == nullptr ? dlerror() : ""));
    REQUIRE(library_ != nullptr);
    answers_ = static_cast<NvmlStandIn*>(dlsym(library_, "nvml_stand_in"));
    REQUIRE(answers_ != nullptr);
    *answers_ = {};
  }
  ~StandIn() { dlclose(library_); }
  NvmlStandIn* operator->() const { return answers_; }

 private:
  void* library_;
  NvmlStandIn* answers_;
};

}  // namespace

TEST_CASE("a GPU is read by its PCI bus address, in the units of the fields' names", "[device][nvml]") {
  const StandIn gpu;
  {
    GpuMonitor monitor("0000:3b:00.0", library);
    INFO(monitor.why_not());
    const auto reading = monitor.read();
    REQUIRE(reading.has_value());
    REQUIRE(*reading == GpuReading{97, 64ll << 30, 80ll << 30, 1410, 1980, 698'600 * 1e-3, 700.0, 71, "power cap"});
    REQUIRE(to_string(*reading) ==
            "GPU 97% busy | 64.0 of 80.0 GiB | 1410 of 1980 MHz | 699 of 700 W | 71 C | throttled by: power cap");
    REQUIRE(to_json_object(*reading).dump() ==
            R"({"gpu_busy_percent":97,"gpu_memory_used":68719476736,"gpu_memory_total":85899345920,"gpu_sm_mhz":1410,)"
            R"("gpu_sm_mhz_max":1980,"gpu_watts":698.6,"gpu_watts_limit":700.0,"gpu_celsius":71,)"
            R"("gpu_throttle":"power cap"})");

    gpu->celsius = 45;
    gpu->throttle = 0;
    const auto later = monitor.read();
    REQUIRE(later.has_value());
    REQUIRE(later->celsius == 45);
    REQUIRE(later->throttle == "none");
    REQUIRE(gpu->sessions == 1);
  }
  REQUIRE(gpu->sessions == 0);
}

TEST_CASE("all throttle reasons are named, and those of future drivers are shown as bits", "[device][nvml]") {
  REQUIRE(throttle_reasons(0) == "none");
  REQUIRE(throttle_reasons(0x1) == "idle");
  REQUIRE(throttle_reasons(0x24) == "power cap, thermal");
  REQUIRE(throttle_reasons(0x48) == "hardware slowdown, hardware thermal");
  REQUIRE(throttle_reasons(0x88) == "hardware slowdown, power brake");
  REQUIRE(throttle_reasons(0x712) == "clocks set by the user, sync boost, display clocks, board limit, reliability");
  REQUIRE(throttle_reasons(0x8000'0000'1004) == "power cap, unknown bit 12, unknown bit 47");
}

TEST_CASE("values that a GPU does not report are left out", "[device][nvml]") {
  const StandIn gpu;
  constexpr int not_supported = 3;
  for (const char* function : {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMaxClockInfo",
                               "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetCurrentClocksThrottleReasons"})
    gpu->statuses[function] = not_supported;
  GpuMonitor monitor("0000:3b:00.0", library);
  const auto reading = monitor.read();
  REQUIRE(reading.has_value());
  REQUIRE(to_string(*reading) == "GPU 1410 MHz | 699 W | 71 C");
  REQUIRE(to_json_object(*reading).dump() == R"({"gpu_sm_mhz":1410,"gpu_watts":698.6,"gpu_celsius":71})");
}

TEST_CASE("without library, driver or GPU there are no readings but a reason", "[device][nvml]") {
  const StandIn gpu;
  const auto reason = [](GpuMonitor& monitor) {
    REQUIRE(!monitor.read());
    return monitor.why_not();
  };
  GpuMonitor absent("0000:3b:00.0", "build/no_such_library.so");
  REQUIRE_THAT(reason(absent), Catch::Matchers::ContainsSubstring("no_such_library.so") &&
                                   Catch::Matchers::ContainsSubstring("comes with the driver"));
  GpuMonitor other("0000:3b:00.0", "libm.so.6");
  REQUIRE_THAT(reason(other), Catch::Matchers::ContainsSubstring("it is another library"));
  GpuMonitor elsewhere("0000:5e:00.0", library);
  REQUIRE_THAT(reason(elsewhere), Catch::Matchers::ContainsSubstring("GPU 0000:5e:00.0") &&
                                      Catch::Matchers::ContainsSubstring("does not find it: Not Found (status 6)"));
  GpuMonitor machine("ffff:ff:1f.0");  // with the machine's own library, if it has one: no GPU has this address
  REQUIRE_THAT(reason(machine), Catch::Matchers::ContainsSubstring("no readings of GPU ffff:ff:1f.0"));
  gpu->statuses["nvmlInit_v2"] = 9;
  GpuMonitor unstarted("0000:3b:00.0", library);
  REQUIRE_THAT(reason(unstarted), Catch::Matchers::ContainsSubstring("does not start: Unknown Error (status 9)"));
}

TEST_CASE("a GPU that falls off the bus during a run ends its readings, not the run", "[device][nvml]") {
  const StandIn gpu;
  GpuMonitor monitor("0000:3b:00.0", library);
  REQUIRE(monitor.read().has_value());
  constexpr int lost = 15;
  for (const char* what : {"UtilizationRates", "MemoryInfo", "ClockInfo", "MaxClockInfo", "Temperature", "PowerUsage",
                           "EnforcedPowerLimit", "CurrentClocksThrottleReasons"})
    gpu->statuses[std::string("nvmlDeviceGet") + what] = lost;
  REQUIRE(!monitor.read());
  REQUIRE_THAT(monitor.why_not(), Catch::Matchers::ContainsSubstring("returned no readings: GPU is lost (status 15)"));
  gpu->statuses.clear();
  REQUIRE(monitor.read().has_value());
}
