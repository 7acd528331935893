// What a launch is refused for: more than 65,535 blocks in the y or z dimension of a grid, and too much shared memory.
// Grids as large as that are captured, and not run.
#include "cuda/device_test.h"
#include "device/cuda_queue.cuh"
#include "ops/cuda/expert_ranks.cuh"
#include "ops/cuda/grouped_matmul.cuh"
#include "ops/cuda/norms.cuh"
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

template <int = 0>
__global__ void nothing_kernel() {}

TEST_CASE("a launch that fails says what is too large", "[cuda]") {
  using Catch::Matchers::ContainsSubstring;
  const int64_t room = cuda::device_shared_bytes();
  REQUIRE_THROWS_WITH(cuda::launch(nothing_kernel<>, cuda::Grid(1, many), 32, 0, nullptr),
                      ContainsSubstring("grid are at most 65535: use a smaller --batch-size"));
  REQUIRE_THROWS_WITH(cuda::launch(nothing_kernel<>, 1, 32, room + 1, nullptr),
                      ContainsSubstring(formatted("a block on this GPU has {}, of which", room)));
}

TEST_CASE("norms refuse rows for which a block has no room, the fixed arrays of its sums included", "[cuda]") {
  // In bf16 a channel takes 8 bytes of sums, or 4 without biases, and 2 each of x and dout.
  const auto most = [](int64_t of_channel) {
    return (cuda::device_shared_bytes() - cuda::most_static_shared_bytes) / of_channel;
  };
  const auto refuses = [](auto check, int64_t C) {
    try {
      check(C);
      return false;
    } catch (const Error&) {
      return true;
    }
  };
  const auto layernorm = [](int64_t C) { cuda::check_norm_fits<Centred::yes, bf16>(C); };
  const auto rmsnorm = [](int64_t C) { cuda::check_norm_fits<Centred::no, bf16>(C); };
  REQUIRE_FALSE(refuses(layernorm, most(12)));
  REQUIRE(refuses(layernorm, most(12) + 1));
  REQUIRE_FALSE(refuses(rmsnorm, most(8)));
  REQUIRE(refuses(rmsnorm, most(8) + 1));
  REQUIRE_FALSE(refuses(layernorm, 8192));  // in registers
}
