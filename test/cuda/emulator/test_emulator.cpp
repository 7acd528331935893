// The emulator itself: it computes what a GPU would, and detects each kind of bug.
#include <thread>

#include "cuda/emulator/emulator_test.h"
#include "ops/cuda/reduce.cuh"

using namespace llmc;
using namespace planted;

namespace {

constexpr unsigned threads = 128;

template <class F>
Outputs outputs(int64_t n, F&& launch_on) {
  DeviceArray<float> out(n);
  launch_on(out);
  return {{"out", out.host()}};
}

template <Bug bug>
Outputs run_reverse() {
  DeviceArray<float> x(counted(threads));
  return outputs(threads, [&](float* out) { launch(reverse<bug>, 1, threads, 0, nullptr, out, x); });
}
template <Bug bug, bool warp>
Outputs run_add_neighbours() {
  const unsigned n = warp ? 32 : threads;
  DeviceArray<float> x(counted(n));
  return outputs(n, [&](float* out) { launch(add_neighbours<bug, warp>, 1, n, 0, nullptr, out, x); });
}
template <Bug bug>
Outputs run_pipeline(int tiles = 3) {
  DeviceArray<float> x(counted(4 * threads * tiles));
  return outputs(4 * threads, [&](float* out) {
    launch(pipeline<bug>, 1, threads, 2 * threads * sizeof(float4), nullptr, reinterpret_cast<float4*>(out),
           reinterpret_cast<const float4*>(static_cast<float*>(x)), tiles);
  });
}
template <Bug bug>
Outputs run_chain_of_blocks() {
  return outputs(5, [&](float* out) { launch(chain_of_blocks<bug>, 5, 32, 0, nullptr, out); });
}
template <Bug bug>
Outputs run_last_block_wins() {
  return outputs(5, [&](float* out) { launch(last_block_wins<bug>, 5, 32, 0, nullptr, out); });
}
// Two streams pass an array to and fro; without a wait for the event one overtakes the other.
template <bool wait_forth, bool wait_back>
Outputs run_two_streams() {
  constexpr int n = 64;
  cudaStream_t a, b;
  cudaEvent_t forth, back;
  CUDA_CHECK(cudaStreamCreate(&a));
  CUDA_CHECK(cudaStreamCreate(&b));
  CUDA_CHECK(cudaEventCreate(&forth));
  CUDA_CHECK(cudaEventCreate(&back));
  const Outputs out = [&]() -> Outputs {
    DeviceArray<float> x(counted(n)), y(counted(n));
    launch(add_one<Bug::none>, 1, 32, 0, a, y, x, n);
    CUDA_CHECK(cudaEventRecord(forth, a));
    if (wait_forth) CUDA_CHECK(cudaStreamWaitEvent(b, forth));  // y is written
    launch(add_one<Bug::none>, 1, 32, 0, b, x, y, n);
    CUDA_CHECK(cudaEventRecord(back, b));
    if (wait_back) CUDA_CHECK(cudaStreamWaitEvent(a, back));  // x is written again, and y is read
    launch(add_one<Bug::none>, 1, 32, 0, a, y, x, n);
    return {{"y", y.host()}};
  }();
  CUDA_CHECK(cudaEventDestroy(forth));
  CUDA_CHECK(cudaEventDestroy(back));
  CUDA_CHECK(cudaStreamDestroy(a));
  CUDA_CHECK(cudaStreamDestroy(b));
  return out;
}

}  // namespace

// ---- Bugs that some schedule exposes --------------------------------------------------------------------------------

TEST_CASE("kernels without a bug give the same under every schedule", "[cuda][emulator]") {
  std::vector<float> reversed = counted(threads), sums = counted(threads), forth = counted(64);
  std::reverse(reversed.begin(), reversed.end());
  check_kernel(run_reverse<Bug::none>, {{"out", reversed}}, 1e-30);
  for (float& y : forth) y += 3;
  check_kernel(run_two_streams<true, true>, {{"y", forth}}, 1e-30);
  std::vector<float> pipelined(4 * threads);
  for (size_t i = 0; i < pipelined.size(); ++i)
    for (size_t tile = 0; tile < 3; ++tile)
      pipelined[i] += static_cast<float>(tile * 4 * threads + (i + 4) % (4 * threads) + 1);
  check_kernel([] { return run_pipeline<Bug::none>(); }, {{"out", pipelined}}, 1e-30);
  for (const bool warp : {true, false}) {
    sums = counted(warp ? 32 : threads);
    for (int step = 0; step < 3; ++step) {
      const std::vector<float> before = sums;
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += before[(i + 1) % sums.size()];
    }
    check_kernel(warp ? run_add_neighbours<Bug::none, true> : run_add_neighbours<Bug::none, false>, {{"out", sums}},
                 1e-30);
  }
}

#ifndef __SANITIZE_THREAD__  // which kills the program at these bugs: see below

TEST_CASE("a missing barrier shows under some schedule", "[cuda][emulator]") {
  REQUIRE(differs(run_reverse<Bug::no_barrier>, run_reverse<Bug::none>()));
  REQUIRE(differs(run_add_neighbours<Bug::no_barrier, false>, run_add_neighbours<Bug::none, false>()));
  REQUIRE(differs(run_add_neighbours<Bug::no_barrier, true>, run_add_neighbours<Bug::none, true>()));
  REQUIRE(differs([] { return run_pipeline<Bug::no_barrier>(); }, run_pipeline<Bug::none>()));
}

TEST_CASE("a write that overtakes a read shows under some schedule", "[cuda][emulator]") {
  REQUIRE(differs(run_add_neighbours<Bug::no_second_barrier, false>, run_add_neighbours<Bug::none, false>()));
  REQUIRE(differs(run_add_neighbours<Bug::no_second_barrier, true>, run_add_neighbours<Bug::none, true>()));
  REQUIRE(differs([] { return run_pipeline<Bug::no_second_barrier>(); }, run_pipeline<Bug::none>()));
}

TEST_CASE("a missing wait for cp.async shows under some schedule", "[cuda][emulator]") {
  REQUIRE(differs([] { return run_pipeline<Bug::no_copy_wait>(); }, run_pipeline<Bug::none>()));
}

TEST_CASE("a race between blocks shows under some schedule", "[cuda][emulator]") {
  REQUIRE(differs(run_chain_of_blocks<Bug::no_barrier>, run_chain_of_blocks<Bug::no_barrier>()));
  REQUIRE(differs(run_last_block_wins<Bug::no_barrier>, run_last_block_wins<Bug::no_barrier>()));
  REQUIRE_FALSE(differs(run_last_block_wins<Bug::none>, run_last_block_wins<Bug::none>()));
}

TEST_CASE("a missing wait for an event shows under some schedule", "[cuda][emulator]") {
  REQUIRE(differs(run_two_streams<false, true>, run_two_streams<true, true>()));
  REQUIRE(differs(run_two_streams<true, false>, run_two_streams<true, true>()));
}

TEST_CASE("disabled barriers and waits are detected", "[cuda][emulator]") {
  check_barriers(run_reverse<Bug::none>);
  check_barriers([] { return run_pipeline<Bug::none>(); });
  check_barriers(run_two_streams<true, true>);
  const auto count = [](Outputs (*run)()) {
    const Outputs right = run();
    const cuda_on_cpu::Mutants mutants = cuda_on_cpu::find_mutants([&] { return same_bits(run(), right); });
    return std::pair(mutants.killed.size(), mutants.survivors.size());
  };
  REQUIRE(count([] { return run_pipeline<Bug::none>(); }) == std::pair(size_t{3}, size_t{0}));
  // With two tiles no buffer is overwritten: the pipeline's last barrier is not needed, and is reported as such.
  REQUIRE(count([] { return run_pipeline<Bug::none>(2); }) == std::pair(size_t{2}, size_t{1}));
  check_barriers([] { return run_pipeline<Bug::none>(2); },
                 {"planted_bugs.h: if constexpr (bug != Bug::no_second_barrier) __syncthreads();  // the tile is read: "
                  "the next fetch may overwrite it"});
}

TEST_CASE("a barrier that not all threads reach is reported with kernel, block, threads and line", "[cuda][emulator]") {
  const std::string divergent = failure_of(run_reverse<Bug::too_few_threads>);
  REQUIRE_THAT(divergent, ContainsSubstring("kernel void planted::reverse<(planted::Bug)5>(float*, float const*)"));
  REQUIRE_THAT(divergent, ContainsSubstring("block (0, 0, 0): divergent barrier"));
  REQUIRE_THAT(divergent, ContainsSubstring("64 of 128 threads, the first is thread (64, 0, 0), have ended"));
  REQUIRE_THAT(divergent,
               ContainsSubstring("64 of 128 threads, the first is thread (0, 0, 0), wait in __syncthreads at "
                                 "test/cuda/emulator/planted_bugs.h:"));
  const std::string early = failure_of(run_reverse<Bug::early_return>);
  REQUIRE_THAT(early, ContainsSubstring("1 of 128 threads, the first is thread (70, 0, 0), have ended"));
  check_kernel(run_reverse<Bug::none>, run_reverse<Bug::none>(), 1e-30);  // a failure leaves nothing behind
}

#endif

// ---- Misuse that stops a kernel or is refused -----------------------------------------------------------------------

namespace misuse {

// Even threads meet at one line, odd ones at another.
template <int lines>
__global__ void two_lines() {
  if (threadIdx.x % lines == 0) __syncthreads();
  else __syncthreads();
}
template <unsigned mask>
__global__ void half_a_warp() {
  if (threadIdx.x < 16) __syncwarp(mask);
}
template <unsigned mask>
__global__ void foreign_lane(float* out) {
  if (mask >> threadIdx.x & 1) out[threadIdx.x] = __shfl_xor_sync(mask, 1.0f, 16);
}
template <int n>
__global__ void much_shared(float* out) {
  SHARED(float, first, n);
  SHARED(float, second, n);
  out[0] = first[0] + second[0];
}
template <int n>
__global__ void unwritten_shared(float* out) {
  SHARED(float, tile, n);
  out[threadIdx.x] = tile[threadIdx.x];
}

}  // namespace misuse
using namespace misuse;

TEST_CASE("other misuse is reported", "[cuda][emulator]") {
  const auto finish = [] { CUDA_CHECK(cudaDeviceSynchronize()); };
  REQUIRE_THAT(failure_of([&] { launch(two_lines<2>, 1, 64, 0, nullptr), finish(); }), ContainsSubstring("divergent"));
  REQUIRE_THAT(failure_of([&] { launch(half_a_warp<~0u>, 1, 32, 0, nullptr), finish(); }),
               ContainsSubstring("wait in __syncwarp"));
  REQUIRE(failure_of([&] { launch(half_a_warp<0xffffu>, 1, 32, 0, nullptr), finish(); }) == "no failure");
  DeviceArray<float> out(32);
  REQUIRE_THAT(failure_of([&] { launch(foreign_lane<0xffffu>, 1, 32, 0, nullptr, out), finish(); }),
               ContainsSubstring("reads lane 16, which is not in its mask"));
  REQUIRE_THAT(failure_of([&] { launch(much_shared<7000>, 1, 1, 0, nullptr, out), finish(); }),
               ContainsSubstring("56000 bytes of shared arrays"));
  launch(unwritten_shared<32>, 1, 32, 0, nullptr, out);
  for (const float value : out.host()) REQUIRE(std::isnan(value));

  REQUIRE_THROWS_WITH(launch(much_shared<1>, 1, 1025, 0, nullptr, out),
                      ContainsSubstring("much_shared<1>(float*) with a grid of 1 x 1 x 1, 1025 x 1 x 1 threads") &&
                          ContainsSubstring("cudaErrorInvalidConfiguration"));
  REQUIRE_THROWS_WITH(launch(much_shared<1>, 1, 1, 300000, nullptr, out), ContainsSubstring("cudaErrorInvalidValue"));
  REQUIRE(cudaGetLastError() == cudaSuccess);

  float host[64];
  REQUIRE_THAT(failure_of([&] { cudaMemcpy(host, out, 33 * sizeof(float), cudaMemcpyDeviceToHost); }),
               ContainsSubstring("132 bytes from byte 0 of an allocation of 128"));
  REQUIRE_THAT(failure_of([&] { cudaMemcpy(host, host + 32, 4, cudaMemcpyDeviceToHost); }),
               ContainsSubstring("not device memory"));
}

TEST_CASE("several host threads launch kernels, each on its own stream", "[cuda][emulator]") {
  std::vector<std::vector<float>> results(3);
  std::vector<std::thread> hosts;
  for (auto& result : results)
    hosts.emplace_back([&result] {
      cudaStream_t stream;
      cudaStreamCreate(&stream);
      {
        DeviceArray<float> x(counted(threads)), y(threads), z(threads);
        for (int i = 0; i < 5; ++i) {
          launch(reverse<Bug::none>, 1, threads, 0, stream, y, x);
          launch(add_neighbours<Bug::none, false>, 1, threads, 0, stream, z, y);
          cudaStreamSynchronize(stream);
        }
        result = z.host();
      }
      cudaStreamDestroy(stream);
    });
  for (std::thread& host : hosts) host.join();
  REQUIRE(results[0][0] == 128 + 3 * 127 + 3 * 126 + 125);
  REQUIRE(results[1] == results[0]);
  REQUIRE(results[2] == results[0]);
}

// ---- Bugs that a sanitizer reports: each is a hidden test case, run by this program again ---------------------------

#ifdef __SANITIZE_ADDRESS__

TEST_CASE("planted: past global memory", "[.planted]") {
  outputs(31, [](float* out) { launch(past_global<Bug::past_the_end>, 1, 32, 0, nullptr, out, 31); });
}
TEST_CASE("planted: past a shared array", "[.planted]") {
  outputs(32, [](float* out) { launch(past_shared<Bug::past_the_end, false>, 1, 32, 128, nullptr, out); });
}
TEST_CASE("planted: past dynamic shared memory", "[.planted]") {
  outputs(32, [](float* out) { launch(past_shared<Bug::past_the_end, true>, 1, 32, 128, nullptr, out); });
}
TEST_CASE("planted: misaligned pack", "[.planted]") {
  DeviceArray<float> x(counted(132));
  outputs(128, [&](float* out) { launch(misaligned_pack<Bug::past_the_end>, 1, 32, 0, nullptr, out, x); });
}
TEST_CASE("planted: the host reads device memory", "[.planted]") {
  DeviceArray<float> x(counted(4));
  REQUIRE(static_cast<float*>(x)[0] == 1);
}

TEST_CASE("AddressSanitizer and UndefinedBehaviorSanitizer end the program at bad addresses", "[cuda][emulator]") {
  REQUIRE(outputs(31, [](float* out) { launch(past_global<Bug::none>, 1, 32, 0, nullptr, out, 31); }).size() == 1);
  REQUIRE(outputs(32, [](float* out) { launch(past_shared<Bug::none, true>, 1, 32, 128, nullptr, out); }).size() == 1);
  for (const auto& [bug, report] : {
           std::pair{"past global memory", "AddressSanitizer: heap-buffer-overflow"},
           std::pair{"past a shared array", "AddressSanitizer: use-after-poison"},
           std::pair{"past dynamic shared memory", "AddressSanitizer: use-after-poison"},
           std::pair{"misaligned pack", "misaligned address"},
           std::pair{"the host reads device memory", "AddressSanitizer: use-after-poison"},
       }) {
    INFO(bug);
    const std::string printed = output_of_failing(std::string("planted: ") + bug);
    REQUIRE_THAT(printed, ContainsSubstring(report));
    if (std::string(bug).starts_with("past")) REQUIRE_THAT(printed, ContainsSubstring("planted_bugs.h:"));
  }
}

#elif defined(__SANITIZE_THREAD__)

TEST_CASE("planted: missing barrier", "[.planted]") { run_reverse<Bug::no_barrier>(); }
TEST_CASE("planted: missing barrier of a warp", "[.planted]") { run_add_neighbours<Bug::no_barrier, true>(); }
TEST_CASE("planted: write after read", "[.planted]") { run_add_neighbours<Bug::no_second_barrier, false>(); }
TEST_CASE("planted: write after read in a warp", "[.planted]") { run_add_neighbours<Bug::no_second_barrier, true>(); }
TEST_CASE("planted: blocks in a chain", "[.planted]") { run_chain_of_blocks<Bug::no_barrier>(); }
TEST_CASE("planted: blocks that write the same", "[.planted]") { run_last_block_wins<Bug::no_barrier>(); }
TEST_CASE("planted: missing wait forth", "[.planted]") { run_two_streams<false, true>(); }
TEST_CASE("planted: missing wait back", "[.planted]") { run_two_streams<true, false>(); }
TEST_CASE("planted: pipeline overtaken", "[.planted]") { run_pipeline<Bug::no_second_barrier>(); }

TEST_CASE("ThreadSanitizer ends the program at races", "[cuda][emulator]") {
  for (const char* bug : {"missing barrier", "missing barrier of a warp", "write after read",
                          "write after read in a warp", "blocks in a chain", "blocks that write the same",
                          "missing wait forth", "missing wait back", "pipeline overtaken"}) {
    INFO(bug);
    const std::string printed = output_of_failing(std::string("planted: ") + bug);
    REQUIRE_THAT(printed, ContainsSubstring("ThreadSanitizer: data race") && ContainsSubstring("planted_bugs.h:"));
  }
}

#endif
