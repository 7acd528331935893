// Every version of the teaching ladders in dev/cuda/ against the CPU's op.
#include "cuda/device_test.h"
#include "cuda/ladder.h"

using namespace llmc;
using namespace llmc::cuda;

TEST_CASE("every version of a ladder computes what the CPU does", "[cuda]") {
  const int which = GENERATE(0, 1, 2, 3);
  const Ladder ladder = which == 0   ? layernorm_ladder(5, 264)
                        : which == 1 ? classifier_ladder(3, 1003)
                        : which == 2 ? adamw_ladder(1000)
                                     : attention_ladder(2, 75, 2);
  for (const Ladder::Version& version : ladder.versions) {
    INFO(ladder.op << ": " << version.idea);
    const auto run = [&] {
      ladder.prepare();
      version.run();
      return ladder.outputs();
    };
    check_kernel(run, ladder.reference, ladder.tolerance);
  }
}
