// Every version of the kernel ladders in dev/cuda/ against the CPU op.
#include "cuda/device_test.h"
#include "cuda/ladder.h"
#include "ops/cuda/attention_wgmma.cuh"

using namespace llmc;
using namespace llmc::cuda;

namespace {

// An emulated GPU has every kernel's instructions.
#ifdef __CUDACC__
const TensorCores instructions = tensor_cores();
#else
const TensorCores instructions = TensorCores::of_warpgroup;
#endif

Outputs outputs_of(const Ladder& ladder, const Ladder::Version& version) {
  ladder.prepare();
  version.run();
  return ladder.outputs();
}

}  // namespace

TEST_CASE("every version of a kernel ladder matches the CPU", "[cuda]") {
  const int which = GENERATE(0, 1, 2, 3);
  const Ladder ladder = which == 0   ? layernorm_ladder(5, 264)
                        : which == 1 ? classifier_ladder(3, 1003)
                        : which == 2 ? adamw_ladder(1000)
                                     : attention_ladder(2, 75, 2, instructions);
  for (const Ladder::Version& version : ladder.versions) {
    INFO(ladder.op << ": " << version.idea);
    check_kernel([&] { return outputs_of(ladder, version); }, ladder.reference, ladder.tolerance);
  }
}

TEST_CASE("the versions of a kernel ladder need every barrier", "[cuda]") {
  const Ladder layernorm = layernorm_ladder(3, 264), attention = attention_ladder(1, 75, 1, instructions);
  check_barriers([&] { return outputs_of(layernorm, layernorm.versions[1]); });
  for (const size_t in_tiles : {2, 3, 6, 7, 8})
    check_barriers([&] { return outputs_of(attention, attention.versions[in_tiles]); });
}
