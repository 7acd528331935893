// The machine's processors and memory under cgroup limits of both versions, in a simulated directory tree.
#include <sys/wait.h>

#include "catch2.h"
#include "device/device.h"
#include "helpers.h"

using namespace llmc;

namespace {

struct FakeRoot {
  TempDir dir;
  void put(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(dir / path).parent_path());
    std::ofstream(dir / path) << text << "\n";
  }
  HostLimits limits() const { return group_limits(dir.path()); }
};

constexpr int64_t MiB = 1 << 20;

}  // namespace

TEST_CASE("while this process's processors are not known, threads stay bound as OpenMP is told", "[device]") {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    setenv("OMP_WAIT_POLICY", "passive", 1);
    setenv("OMP_PROC_BIND", "true", 1);
    std::string program = "test", option = "--no-option-of-this-program";
    char* argv[] = {program.data(), option.data(), nullptr};
    set_openmp_environment(argv);  // would execute this program with the option
    _exit(std::getenv("OMP_PROC_BIND") == nullptr ? 1 : 0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(status == 0);
}

TEST_CASE("the tightest of nested version 2 cgroups applies, at any level", "[device]") {
  const FakeRoot root;
  root.put("proc/self/cgroup", "0::/system.slice/slurm/job_7/step_0");
  const std::string top = "sys/fs/cgroup/system.slice";
  REQUIRE(root.limits().memory == std::numeric_limits<int64_t>::max());
  REQUIRE(std::isinf(root.limits().processors));
  root.put(top + "/slurm/job_7/step_0/memory.max", "max");
  root.put(top + "/slurm/job_7/memory.max", std::to_string(64 * MiB));
  root.put(top + "/slurm/memory.max", std::to_string(96 * MiB));
  root.put(top + "/slurm/cpu.max", "150000 100000");
  root.put(top + "/slurm/job_7/cpu.max", "max 100000");
  root.put("sys/fs/cgroup/elsewhere/memory.max", "1");
  REQUIRE(root.limits().memory == 64 * MiB);
  REQUIRE(root.limits().processors == 1.5);
  // Free is what programs of the group do not use; cached files can be dropped.
  REQUIRE(root.limits().free_memory == std::numeric_limits<int64_t>::max());
  root.put(top + "/slurm/job_7/memory.current", std::to_string(50 * MiB));
  root.put(top + "/slurm/job_7/memory.stat", "anon 7\ninactive_file " + std::to_string(20 * MiB) + "\nfile 9");
  root.put(top + "/slurm/memory.current", std::to_string(90 * MiB));
  REQUIRE(root.limits().free_memory == 6 * MiB);
  root.put("proc/meminfo", "MemTotal: 999999 kB\nMemFree: 1 kB\nMemAvailable:   5120 kB");
  REQUIRE(free_host_memory(root.dir.path()) == 5 * MiB);
  root.put(top + "/memory.max", std::to_string(32 * MiB));
  root.put("sys/fs/cgroup/cpu.max", "50000 200000");
  REQUIRE(root.limits().memory == 32 * MiB);
  REQUIRE(root.limits().processors == 0.25);
  REQUIRE(host_memory(root.dir.path()) == 32 * MiB);
  REQUIRE(available_processors(root.dir.path()) == 1);
}

TEST_CASE("version 1 cgroups are found by controller, also in hybrid mode", "[device]") {
  const FakeRoot root;
  root.put("proc/self/cgroup",
           "12:pids:/a\n4:memory:/slurm/uid_1/job_2\n3:cpu,cpuacct:/slurm/uid_1/job_2\n1:name=systemd:/a:b\n0::/s/t");
  const std::string memory = "sys/fs/cgroup/memory/slurm", cpu = "sys/fs/cgroup/cpu/slurm";
  root.put(memory + "/uid_1/job_2/memory.limit_in_bytes", "9223372036854771712");  // none
  root.put(memory + "/uid_1/memory.limit_in_bytes", std::to_string(48 * MiB));
  root.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  root.put(cpu + "/uid_1/job_2/cpu.cfs_quota_us", "-1");
  root.put(cpu + "/uid_1/job_2/cpu.cfs_period_us", "100000");
  root.put(cpu + "/cpu.cfs_quota_us", "300000");
  root.put(cpu + "/cpu.cfs_period_us", "100000");
  REQUIRE(root.limits().memory == 48 * MiB);
  REQUIRE(root.limits().processors == 3);
  root.put("sys/fs/cgroup/unified/s/memory.max", std::to_string(40 * MiB));
  REQUIRE(root.limits().memory == 40 * MiB);
}

TEST_CASE("in a container whose mount begins at its own cgroup the host's path is skipped", "[device]") {
  const FakeRoot root;
  root.put("proc/self/cgroup", "5:memory:/docker/0123abc\n0::/docker/0123abc");
  root.put("sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(80 * MiB));
  root.put("sys/fs/cgroup/cpu.max", "200000 100000");
  REQUIRE(root.limits().memory == 80 * MiB);
  REQUIRE(root.limits().processors == 2);
}

TEST_CASE("missing or invalid cgroup files impose no limit", "[device]") {
  const FakeRoot root;
  const int processors = available_processors(root.dir.path());
  REQUIRE(processors >= 1);
  REQUIRE(host_memory(root.dir.path()) > 0);
  root.put("proc/self/cgroup", "\nx\n1\n0::\n:\n7:cpu\n0:::\n0::/..");
  root.put("sys/fs/cgroup/memory.max", "-5");
  root.put("sys/fs/cgroup/cpu.max", "0 0");
  REQUIRE(root.limits().memory == std::numeric_limits<int64_t>::max());
  REQUIRE(available_processors(root.dir.path()) == processors);
  root.put("sys/fs/cgroup/cpu.max", "1000000000000 100000");
  REQUIRE(available_processors(root.dir.path()) == processors);
}
