// nvml_stand_in.so: a fake NVML: the functions that llmc/device/nvml.h calls, with the names and signatures of the
// "NVML API Reference Guide". The answers come from nvml_stand_in.h.
#include "nvml_stand_in.h"

#include <cstring>

namespace {

enum Status { success = 0, uninitialized = 1, invalid_argument = 2, not_supported = 3, not_found = 6, lost = 15 };

int device;  // its address is the handle

}  // namespace

extern "C" {

NvmlStandIn nvml_stand_in;
}

namespace {

int status_of(const char* function) {
  const auto status = nvml_stand_in.statuses.find(function);
  return status == nvml_stand_in.statuses.end() ? success : status->second;
}

// The answer to a query about the device, or an error status.
template <class T>
int answer(const char* function, const void* of, T* to, T value) {
  if (nvml_stand_in.sessions == 0) return uninitialized;
  if (of != &device || to == nullptr) return invalid_argument;
  if (const int status = status_of(function); status != success) return status;
  *to = value;
  return success;
}

}  // namespace

extern "C" {

struct Utilization {
  unsigned gpu, memory;
};
struct Memory {
  unsigned long long total, free, used;
};

int nvmlInit_v2() {
  if (const int status = status_of(__func__); status != success) return status;
  ++nvml_stand_in.sessions;
  return success;
}
int nvmlShutdown() {
  if (nvml_stand_in.sessions == 0) return uninitialized;
  --nvml_stand_in.sessions;
  return success;
}
const char* nvmlErrorString(int status) {
  switch (status) {
    case success: return "Success";
    case uninitialized: return "Uninitialized";
    case invalid_argument: return "Invalid Argument";
    case not_supported: return "Not Supported";
    case not_found: return "Not Found";
    case lost: return "GPU is lost";
  }
  return "Unknown Error";
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  if (nvml_stand_in.sessions == 0) return uninitialized;
  if (nvml_stand_in.pci_bus_id != id) return not_found;
  *handle = &device;
  return status_of(__func__);
}
int nvmlDeviceGetUtilizationRates(void* of, Utilization* to) {
  return answer(__func__, of, to, {nvml_stand_in.busy_percent, 40});
}
int nvmlDeviceGetMemoryInfo(void* of, Memory* to) {
  const NvmlStandIn& s = nvml_stand_in;
  return answer(__func__, of, to, {s.memory_total, s.memory_total - s.memory_used, s.memory_used});
}
int nvmlDeviceGetClockInfo(void* of, unsigned clock, unsigned* to) {
  return answer(__func__, of, to, clock == 1 ? nvml_stand_in.sm_mhz : 0);
}
int nvmlDeviceGetMaxClockInfo(void* of, unsigned clock, unsigned* to) {
  return answer(__func__, of, to, clock == 1 ? nvml_stand_in.sm_mhz_max : 0);
}
int nvmlDeviceGetTemperature(void* of, unsigned sensor, unsigned* to) {
  return sensor == 0 ? answer(__func__, of, to, nvml_stand_in.celsius) : invalid_argument;
}
int nvmlDeviceGetPowerUsage(void* of, unsigned* to) { return answer(__func__, of, to, nvml_stand_in.milliwatts); }
int nvmlDeviceGetEnforcedPowerLimit(void* of, unsigned* to) {
  return answer(__func__, of, to, nvml_stand_in.milliwatts_limit);
}
// As in drivers before 535: the later name does not exist.
int nvmlDeviceGetCurrentClocksThrottleReasons(void* of, unsigned long long* to) {
  return answer(__func__, of, to, nvml_stand_in.throttle);
}
}
