// Grids of more blocks than their second and third sizes can be, 65,535: captured, and not run.
#include "cuda/device_test.h"
#include "device/cuda_queue.cuh"
#include "ops/cuda/expert_ranks.cuh"
#include "ops/cuda/grouped_matmul.cuh"
#include "ops/cuda/router.cuh"
#include "ops/cuda/swiglu.cuh"

using namespace llmc;

namespace {

constexpr int64_t many = 1 << 16;

// Requires that what `enqueue` launches on a stream can be launched.
template <class F>
void require_launches(F&& enqueue) {
  cuda::Queue queue(0);
  REQUIRE_NOTHROW(queue.capture([&] { enqueue(queue.stream()); }));
}

}  // namespace

TEST_CASE("operands in fp8 have any number of rows", "[cuda]") {
  e4m3 values;
  float scales;
  const cuda::Fp8Operand to{&values, &scales};
  const bf16* const none = nullptr;
  require_launches([&](cudaStream_t stream) {
    for (const ScaledBy by : {ScaledBy::segments, ScaledBy::tiles})
      cuda::quantise<bf16>(to, to, none, many * fp8_block, fp8_block, by, stream);
    cuda::swiglu_forward_fp8<bf16>(to, to, none, many * fp8_block, fp8_block, stream);
    cuda::swiglu_backward_fp8<bf16>(to, to, none, none, many * fp8_block, fp8_block, stream);
    for (const ScaleBlock block : {ScaleBlock{32, 1}, ScaleBlock{fp8_block, fp8_block}})
      cuda::round_to_fp8<bf16>(nullptr, none, 1, many * block.rows, 1, block, Fp8Format::e4m3, nullptr, stream);
  });
}

TEST_CASE("experts compute any number of rows", "[cuda]") {
  const bf16* const none = nullptr;
  require_launches([&](cudaStream_t stream) {
    cuda::grouped_linear_forward<bf16>(nullptr, none, none, nullptr, many * 128, 1, 8, 8, stream);
    cuda::grouped_linear_backward_input<bf16>(nullptr, none, none, nullptr, many * 128, 1, 8, 8, stream);
  });
}

TEST_CASE("a router has statistics of any number of sequences", "[cuda]") {
  require_launches([&](cudaStream_t stream) {
    cuda::router_statistics(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, many, {.E = 2, .k = 1}, {.length = 1},
                            stream);
    cuda::join_segments(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, many, 2, stream);
    cuda::segment_starts(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, many, 2, stream);
  });
}
