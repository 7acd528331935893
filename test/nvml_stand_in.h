// nvml_stand_in.h: the answers of the fake NVML; a test that opens build/nvml_stand_in.so sets them.
#pragma once
#include <map>
#include <string>

struct NvmlStandIn {
  int sessions = 0;                         // initialised but not shut down
  std::map<std::string, int> statuses;      // by function; those not named succeed
  std::string pci_bus_id = "0000:3b:00.0";  // of the only GPU
  unsigned busy_percent = 97, sm_mhz = 1410, sm_mhz_max = 1980, milliwatts = 698'600, milliwatts_limit = 700'000,
           celsius = 71;
  unsigned long long memory_used = 64ull << 30, memory_total = 80ull << 30, throttle = 0x4;
};
