// A clock that jumps; a rank that is stopped and goes on, again and again; shards of tokens that change while a run
// reads them.
#include <csignal>
#include <fstream>

#include "catch2.h"
#include "faults/fault_run.h"

using namespace llmc;
namespace fs = std::filesystem;

TEST_CASE("a clock that jumps by days changes nothing", "[faults][checkpoint]") {
  const std::string saves = "--max-steps 12 --checkpoint-every 3 --checkpoint-minutes 5 --time-limit 60 ";
  for (const FaultRun& run : {FaultRun{"one rank", saves}, FaultRun{"two processes", saves + "--zero-stage 1", 2}}) {
    const TempDir dir(in_memory());
    const Ended whole = run.start(dir / "whole", "");
    INFO(whole.said);
    REQUIRE(whole.good());
    const Ended jumps = run.start(dir / "jumps", shim(dir, "FILE_OPS_CLOCK=900000"), {});
    INFO(jumps.said);
    REQUIRE(jumps.good());
    REQUIRE(result_of(dir / "jumps") == result_of(dir / "whole"));
    REQUIRE(checkpoint_steps(dir / "jumps") == checkpoint_steps(dir / "whole"));
    for (const auto& [step, seconds] : metric(dir / "jumps", "train", "elapsed_s"))
      REQUIRE((seconds >= 0 && seconds < 3600));
  }
}

TEST_CASE("a rank that is stopped for less than the timeout, again and again, is waited for", "[faults][failures]") {
  const FaultRun run{"two processes", "--max-steps 200 --checkpoint-every 50 --zero-stage 2 --comm-timeout 5", 2};
  const TempDir dir(in_memory());
  const Ended whole = run.start(dir / "whole", "");
  INFO(whole.said);
  REQUIRE(whole.good());
  // The second process starts a shell beside itself that stops it for a fifth of a second each time.
  std::ofstream(dir / "flap") << "#!/bin/bash\n"
                                 "(while sleep 0.1 && kill -s STOP $$; do sleep 0.2; kill -s CONT $$; echo >>"
                              << dir / "stops"
                              << "; done) >/dev/null 2>&1 &\n"
                                 "exec \"$@\"\n";
  fs::permissions(dir / "flap", fs::perms::owner_all);
  const Ended flaps = run.start(dir / "flaps", dir / "flap", 1);
  INFO(flaps.said);
  REQUIRE(flaps.good());
  REQUIRE(!read_whole(dir / "stops").empty());
  REQUIRE(result_of(dir / "flaps") == result_of(dir / "whole"));
}
