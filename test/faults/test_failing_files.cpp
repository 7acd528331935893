// Operations on files that fail: a run goes on, or ends with a message that names the file and the reason, and the same
// command then ends with the bits of an undisturbed run.
#include <cerrno>
#include <cstring>

#include "catch2.h"
#include "core/rng.h"
#include "faults/fault_run.h"

using namespace llmc;
namespace fs = std::filesystem;

namespace {

enum class Failing { one, all_that_follow };

// Runs in which the operations drawn, or those after one, fail. every: the share of operations, one of so many
int fail_operations(const FaultRun& run, Failing failing, uint64_t every, uint64_t seed) {
  const TempDir dir(in_memory());
  const auto [whole, operations] = run.undisturbed(dir);
  const Philox rng(seed, "failing operations" + run.name);
  int failures = 0;
  for (size_t at = 0; at < operations.size(); ++at) {
    const uint64_t draw = rng.bits(at);
    const bool is_log = operations[at].ends_with("/log.txt");  // every line of it is a write
    if (draw % (is_log ? 8 * every : every) != 0) continue;
    ++failures;
    const int reasons[] = {EIO, ENOSPC, EROFS}, reason = reasons[(draw >> 32) % 3];
    const std::string out = formatted("{}/{}", dir.path(), at);
    const std::string how = formatted("FILE_OPS_FAIL={} FILE_OPS_ERRNO={}{}", at + 1, reason,
                                      failing == Failing::one ? "" : " FILE_OPS_FAIL_ALL=1");
    const Ended r = run.start(out, shim(dir, how));
    INFO(run.name << ", " << how << " of " << operations[at] << ": " << r.said);
    REQUIRE((r.good() || r.all(1)));
    const bool named = r.said.find(std::strerror(reason)) != r.said.npos && r.said.find(dir.path()) != r.said.npos;
    if (r.good()) {
      // Ranks take turns in another order each time, so that only with one rank it is certain which operation failed.
      // A file that was read, or a directory, need not close well.
      REQUIRE((named || run.name != "one rank, sync" || operations[at].starts_with("close ")));
      REQUIRE(result_of(out) == whole);
    } else {
      REQUIRE(named);
      const Ended resumed = run.start(out, "");
      INFO("started again: " << resumed.said);
      REQUIRE(resumed.good());
      REQUIRE(result_of(out) == whole);
    }
    fs::remove_all(out);
  }
  return failures;
}

}  // namespace

TEST_CASE("an operation on a file that fails is survived, or named", "[faults][checkpoint]") {
  for (const FaultRun& run : fault_runs()) {
    if (run.processes > 1 || run.name == "four ranks") continue;
    fail_operations(run, Failing::one, 60, 1);
    fail_operations(run, Failing::all_that_follow, 240, 2);
  }
}
TEST_CASE("operations on files that fail anywhere are survived, or named", "[faults][checkpoint][long]") {
  int failures = 0;
  for (const FaultRun& run : fault_runs()) {
    const bool slow = run.processes > 1 || run.name == "four ranks";
    failures += fail_operations(run, Failing::one, slow ? 32 : 10, 3);
    failures += fail_operations(run, Failing::all_that_follow, slow ? 64 : 20, 4);
  }
  WARN(failures << " failing operations, none of which changed a result");
}
