// The building blocks of kernels: packs, block sums, shuffles, votes, atomics, warp-level matrix products.
#include <numeric>

#include "cuda/device_test.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/reduce.cuh"

using namespace llmc;
using namespace llmc::cuda;

namespace foundations {

template <class Op>
__global__ void reduce_rows(float* out, const float* x, Op op) {
  float values[2] = {x[blockIdx.x * blockDim.x + threadIdx.x], 0};
  values[1] = -values[0];
  block_reduce(values, op);
  out[2 * (blockIdx.x * blockDim.x + threadIdx.x)] = values[0];
  out[2 * (blockIdx.x * blockDim.x + threadIdx.x) + 1] = values[1];
}

// out (8, warp_size)
template <class T>
__global__ void exchange(T* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const T value = static_cast<T>(100 + lane);
  const T row[8] = {__shfl_sync(all_lanes, value, 5),
                    __shfl_sync(all_lanes, value, 1, 8),
                    __shfl_xor_sync(all_lanes, value, 3),
                    __shfl_up_sync(all_lanes, value, 2),
                    __shfl_down_sync(all_lanes, value, 30),
                    static_cast<T>(__ballot_sync(all_lanes, lane % 3 == 0) % 1000000u),
                    static_cast<T>(__any_sync(all_lanes, lane == 7)),
                    static_cast<T>(__all_sync(all_lanes, lane < 31))};
  for (int i = 0; i < 8; ++i) out[i * warp_size + lane] = row[i];
}

template <class T>
__global__ void count(T* out) {
  const T i = static_cast<T>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&out[0], i);
  atomicMax(&out[1], i);
  atomicMin(&out[2], i);
  if (atomicCAS(&out[3], static_cast<T>(0), i + 1) == 0) atomicExch(&out[4], static_cast<T>(7));
}

// The last block to arrive adds up what all have written: one fence before the counter, one after.
template <int blocks>
__global__ void sum_in_last_block(unsigned* out, unsigned* part, unsigned* arrived) {
  part[blockIdx.x] = blockIdx.x + 1;
  __threadfence();
  if (atomicAdd(arrived, 1) != blocks - 1) return;
  __threadfence();
  *out = 0;
  for (int i = 0; i < blocks; ++i) *out += part[i];
}

template <class T>
__global__ void where_am_i(T* out) {
  const T block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const T thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = 1000 * block + thread;
}

// d (16, 8) = a (16, 16) b, with b (16, 8) row-major or (8, 16) column-major. Only the first `rows` rows of a exist;
// the others are zero-filled.
template <bool b_by_rows>
__global__ void multiply(float* d, const bf16* a, const bf16* b, int rows) {
  SHARED(bf16, a_tile, 16 * 16);
  SHARED(bf16, b_tile, 16 * 16);  // two of 8 columns; the second is not used
  const int lane = static_cast<int>(threadIdx.x), row = lane / 2;
  const bool valid = row < rows;
  cp_async_16(a_tile + 8 * lane, valid ? a + 8 * lane : a, valid ? 16 : 0);
  cp_async_16(b_tile + 8 * lane, b + 8 * (lane % 16));
  cp_async_commit();
  cp_async_wait<0>();  // this thread's copies are there
  __syncwarp();        // and everyone's
  uint32_t a_parts[4], b_parts[4];
  ldmatrix_x4(a_parts, a_tile + lane % 16 * 16 + lane / 16 * 8);
  if constexpr (b_by_rows) ldmatrix_x4_trans(b_parts, b_tile + lane * 8);
  else ldmatrix_x4(b_parts, b_tile + lane % 8 * 16 + lane / 8 % 2 * 8);
  float sums[4] = {};
  mma_m16n8k16_bf16(sums, a_parts, {b_parts[0], b_parts[1]});
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

template <class T, int pack>
__global__ void copy_packs(T* out, const T* x) {
  using Pack = Packed<T, pack>;
  const int64_t i = static_cast<int64_t>(blockIdx.x * blockDim.x + threadIdx.x) * pack;
  const Pack streamed = Pack::load_streaming(x + i), loaded = Pack::load(x + i);
  Pack doubled;
  for (int j = 0; j < pack; ++j) doubled.set(j, streamed[j] + loaded[j]);
  doubled.store_streaming(out + i);
}

}  // namespace foundations

TEST_CASE("block sums and maxima are correct in every thread", "[cuda]") {
  for (const int64_t warps : {1, 3, 32}) {
    const int64_t blocks = 3, n = warps * warp_size;
    const auto x = normal_values<float>(blocks * n, 1, 0.5f);
    std::vector<float> sums(static_cast<size_t>(2 * blocks * n)), maxima(sums.size());
    for (int64_t block = 0; block < blocks; ++block) {
      const auto begin = x.begin() + block * n, end = begin + n;
      const float sum = static_cast<float>(std::accumulate(begin, end, 0.0));
      const float largest = *std::max_element(begin, end), smallest = *std::min_element(begin, end);
      for (int64_t i = 2 * block * n; i < 2 * (block + 1) * n; ++i) {
        sums[static_cast<size_t>(i)] = i % 2 == 0 ? sum : -sum;
        maxima[static_cast<size_t>(i)] = i % 2 == 0 ? largest : -smallest;
      }
    }
    const auto run = [&]() -> Outputs {
      DeviceArray<float> xs(x), sum(2 * blocks * n), most(2 * blocks * n);
      launch(foundations::reduce_rows<Sum>, blocks, n, 0, nullptr, sum, xs, Sum{});
      launch(foundations::reduce_rows<Max>, blocks, n, 0, nullptr, most, xs, Max{});
      return {{"sum", sum.host()}, {"max", most.host()}};
    };
    check_kernel(run, {{"sum", sums}, {"max", maxima}}, 1e-6);
  }
}

TEMPLATE_TEST_CASE("shuffles and votes reach the right lanes", "[cuda]", int, float, double) {
  DeviceArray<TestType> out(8 * warp_size);
  launch(foundations::exchange<TestType>, 1, warp_size, 0, nullptr, out);
  const std::vector<TestType> rows = out.host();
  unsigned thirds = 0;
  for (unsigned lane = 0; lane < 32; lane += 3) thirds |= 1u << lane;
  for (int lane = 0; lane < warp_size; ++lane) {
    const int expected[8] = {105,
                             100 + lane / 8 * 8 + 1,
                             100 + (lane ^ 3),
                             100 + (lane < 2 ? lane : lane - 2),
                             100 + (lane < 2 ? lane + 30 : lane),
                             static_cast<int>(thirds % 1000000u),
                             1,
                             0};
    for (int i = 0; i < 8; ++i) {
      INFO("lane " << lane << ", row " << i);
      REQUIRE(rows[static_cast<size_t>(i * warp_size + lane)] == static_cast<TestType>(expected[i]));
    }
  }
}

TEMPLATE_TEST_CASE("atomics of integers count every thread once", "[cuda]", int, unsigned, unsigned long long) {
  const auto run = []() -> Outputs {
    DeviceArray<TestType> out(std::vector<TestType>{0, 0, 1000, 0, 0});
    launch(foundations::count<TestType>, 5, 64, 0, nullptr, out);
    std::vector<TestType> values = out.host();
    REQUIRE(values[3] != 0);  // whichever came first
    values[3] = 0;
    return {{"counts", values}};
  };
  check_kernel(run, {{"counts", std::vector<float>{320 * 319 / 2, 319, 0, 0, 7}}}, 1e-30);
}

TEST_CASE("the last block sees what all others wrote before their fences", "[cuda]") {
  const auto run = []() -> Outputs {
    DeviceArray<unsigned> out(1), part(5), arrived(std::vector<unsigned>{0});
    launch(foundations::sum_in_last_block<5>, 5, 1, 0, nullptr, out, part, arrived);
    return {{"sum", out.host()}};
  };
  check_kernel(run, {{"sum", std::vector<float>{15}}}, 1e-30);
}

TEST_CASE("threads and blocks have the right indices in three dimensions", "[cuda]") {
  DeviceArray<int> out(2 * 3 * 4 * 5 * 6 * 7);
  launch(foundations::where_am_i<int>, dim3(2, 3, 4), dim3(5, 6, 7), 0, nullptr, out);
  const std::vector<int> places = out.host();
  for (int i = 0; i < static_cast<int>(places.size()); ++i) REQUIRE(places[i] == i / 210 * 1000 + i % 210);
}

TEST_CASE("a warp multiplies matrices from shared memory", "[cuda]") {
  const int rows = GENERATE(16, 11);
  const auto a = normal_values<bf16>(16 * 16, 1), b = normal_values<bf16>(16 * 8, 2);  // b (16, 8)
  std::vector<bf16> b_columns(b.size());
  std::vector<float> product(16 * 8, 0.0f);
  for (size_t k = 0; k < 16; ++k)
    for (size_t n = 0; n < 8; ++n) {
      b_columns[n * 16 + k] = b[k * 8 + n];
      for (size_t m = 0; m < static_cast<size_t>(rows); ++m)
        product[m * 8 + n] += static_cast<float>(a[m * 16 + k]) * static_cast<float>(b[k * 8 + n]);
    }
  const auto run = [&]() -> Outputs {
    DeviceArray<bf16> as(a), by_rows(b), by_columns(b_columns);
    DeviceArray<float> first(16 * 8), second(16 * 8);
    launch(foundations::multiply<true>, 1, warp_size, 0, nullptr, first, as, by_rows, rows);
    launch(foundations::multiply<false>, 1, warp_size, 0, nullptr, second, as, by_columns, rows);
    return {{"b by rows", first.host()}, {"b by columns", second.host()}};
  };
  check_kernel(run, {{"b by rows", product}, {"b by columns", product}}, 1e-6);
  check_barriers(run);
}

TEMPLATE_TEST_CASE("packs move and convert every element", "[cuda]", float, bf16) {
  const auto x = normal_values<TestType>(128, 1);
  std::vector<float> doubled;
  for (const TestType value : x) doubled.push_back(2 * static_cast<float>(value));
  const auto run = [&]() -> Outputs {
    DeviceArray<TestType> xs(x), full(128), single(128);
    launch(foundations::copy_packs<TestType, full_pack<TestType>>, 2, 64 / full_pack<TestType>, 0, nullptr, full, xs);
    launch(foundations::copy_packs<TestType, 1>, 2, 64, 0, nullptr, single, xs);
    return {{"full packs", full.host()}, {"single", single.host()}};
  };
  check_kernel(run, {{"full packs", doubled}, {"single", doubled}}, 1e-30);
}

TEST_CASE("an error is described in ulps of the worst value", "[cuda]") {
  const Output wanted{"out", std::vector<float>{1.5f, -0.25f, 1e-9f, 2}};
  const Output near{"out", std::vector<float>{1.5f, -0.25f, 1e-9f, 2 + 0x1p-21f}};
  REQUIRE(describe_error(near, wanted) ==
          "out: 1.90e-07 of the norm; at most 2.0 ulps of fp32, value 3 of 4: 2.00000048, wanted 2");
  const Output rounded{"dx", std::vector<bf16>{bf16(1.5f), bf16(3)}},
      off{"dx", std::vector<bf16>{bf16(1.5078125f), bf16(3)}};
  REQUIRE_THAT(describe_error(off, rounded),
               Catch::Matchers::ContainsSubstring("at most 0.5 ulps of bf16, value 0 of 2"));
  const Output hole{"out", std::vector<float>{1.5f, std::nanf(""), 1e-9f, 3}};
  REQUIRE_THAT(describe_error(hole, wanted), Catch::Matchers::ContainsSubstring("inf ulps of fp32, value 1 of 4: nan"));
}
