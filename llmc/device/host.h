// host.h: the processors and memory that this process may use, within the limits of its control groups (cgroups).
// Containers and batch systems set these; limits nest, and the tightest applies.
#pragma once
#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "core/std.h"

namespace llmc {

struct HostLimits {
  int64_t memory = std::numeric_limits<int64_t>::max();         // bytes
  int64_t free_memory = std::numeric_limits<int64_t>::max();    // of them, those that no program uses
  double processors = std::numeric_limits<double>::infinity();  // average CPU time, in processors
};

namespace detail {

// The directories of a group and of all its ancestors below a controller's mount point. In a container the mount may
// begin at the container's own group while the path is the host's: directories that do not exist are skipped.
inline std::vector<std::string> group_directories(const std::string& mount, std::string group) {
  std::vector<std::string> directories;
  for (;;) {
    directories.push_back(mount + group);
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos) return directories;
    group.resize(slash);
  }
}

// The files of a group's limit, and of what its programs use, to which cached files are added that can be dropped.
inline void limit_memory(HostLimits& limits, const std::string& directory, const char* limit, const char* usage) {
  int64_t most = 0, used = 0, cached = 0;  // "max" does not parse as a number
  if (!(std::ifstream(directory + limit) >> most) || most <= 0) return;
  limits.memory = std::min(limits.memory, most);
  if (!(std::ifstream(directory + usage) >> used)) return;
  std::ifstream statistics(directory + "/memory.stat");
  for (std::string name; statistics >> name;)
    if (name == "inactive_file") statistics >> cached;
  limits.free_memory = std::clamp<int64_t>(most - std::max<int64_t>(0, used - cached), 0, limits.free_memory);
}

// The limits of a group with this directory, in the files of version 2 or of version 1.
inline void limit(HostLimits& limits, const std::string& directory) {
  limit_memory(limits, directory, "/memory.max", "/memory.current");
  limit_memory(limits, directory, "/memory.limit_in_bytes", "/memory.usage_in_bytes");
  double quota = 0, period = 0;  // "max" does not parse as a number; a quota of -1: none
  if (!(std::ifstream(directory + "/cpu.max") >> quota >> period)) {
    std::ifstream(directory + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(directory + "/cpu.cfs_period_us") >> period;
  }
  if (quota > 0 && period > 0) limits.processors = std::min(limits.processors, quota / period);
}

}  // namespace detail

// The cgroup limits of this process. `root`: prefix of /proc and /sys; tests provide their own.
inline HostLimits group_limits(const std::string& root = "") {
  HostLimits limits;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // NUMBER:CONTROLLERS:GROUP; version 2 has no controllers
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string group = line.substr(second + 1);
    std::vector<std::string> mounts;
    if (first + 1 == second) mounts = {"", "/unified"};
    std::istringstream controllers(line.substr(first + 1, second - first - 1));
    for (std::string controller; std::getline(controllers, controller, ',');) mounts.push_back("/" + controller);
    for (const std::string& mount : mounts)
      for (const std::string& directory : detail::group_directories(root + "/sys/fs/cgroup" + mount, group))
        detail::limit(limits, directory);
  }
  return limits;
}

// The numbers of the processors that the threads of this process may run on: "0 1 ".
inline std::string processor_set() {
  std::string text;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return "unknown";
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &set)) text += std::to_string(i) + ' ';
  return text;
}

// The processors that this process may use: taskset and containers may leave fewer than the machine has. A fraction of
// a processor counts as a whole one.
inline int available_processors(const std::string& root = "") {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : omp_get_num_procs();
  return std::max(1, static_cast<int>(std::min<double>(processors, std::ceil(group_limits(root).processors))));
}

// Bytes of memory that this process may use: the machine's, or the cgroup limit if lower.
inline int64_t host_memory(const std::string& root = "") {
  const int64_t bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  return std::min(bytes, group_limits(root).memory);
}

// Bytes of memory that a program may still take: files that the system only caches count as free. As much as there is,
// if the system does not say.
inline int64_t free_host_memory(const std::string& root = "") {
  int64_t free = host_memory(root);
  std::ifstream machine(root + "/proc/meminfo");
  for (std::string line; std::getline(machine, line);)
    if (line.starts_with("MemAvailable:")) free = std::min<int64_t>(free, std::stoll(line.substr(13)) * 1024);
  return std::min(free, group_limits(root).free_memory);
}

// Bytes of memory that this process uses now (its resident set); 0: unknown.
inline int64_t resident_bytes() {
  int64_t size = 0, resident = 0;  // pages
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * sysconf(_SC_PAGE_SIZE);
}
// The most that it has used so far; 0: unknown.
inline int64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  return 0;
}

}  // namespace llmc
