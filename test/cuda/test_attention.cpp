// The attention kernels against the CPU op.
#include "cuda/device_test.h"
#include "ops/cuda/attention.cuh"
#include "ops/ops_attention.h"

using namespace llmc;

namespace {

enum class Documents : uint8_t { no, yes };

// The tensor-core instructions that this GPU has; the emulator has all.
std::vector<cuda::TensorCores> all_tensor_cores() {
  std::vector<cuda::TensorCores> all{cuda::TensorCores::of_warp};
#ifdef __CUDACC__
  if (cuda::tensor_cores() == cuda::TensorCores::of_warp) return all;
#endif
  if (cuda::compiled_for_warpgroups) all.push_back(cuda::TensorCores::of_warpgroup);
  return all;
}

// Positions of packed documents of uneven lengths: of one row, of less than a tile, of several tiles.
std::vector<int32_t> document_positions(const AttentionShape& s) {
  std::vector<int32_t> positions;
  const int64_t lengths[] = {37, 1, 90, 11, 300};
  for (int64_t b = 0; b < s.B; ++b) {
    int64_t left = 0, document = b;
    for (int64_t t = 0, position = 0; t < s.T; ++t, ++position, --left) {
      if (left == 0) left = lengths[document++ % 5], position = 0;
      positions.push_back(static_cast<int32_t>(position));
    }
  }
  return positions;
}

// Inputs of one size, and the CPU's results.
template <class T>
struct Case {
  AttentionShape s;
  Documents documents = Documents::no;
  float size = 1;  // of queries, keys and values
  cuda::TensorCores instructions = cuda::TensorCores::of_warp;
  std::vector<T> qkv = normal_values<T>(s.B * s.T * (s.Hq + 2 * s.Hkv) * s.D, 1, 0, size),
                 dout = normal_values<T>(s.B * s.T * s.Hq * s.D, 2);
  std::vector<int32_t> positions = document_positions(s);
  AttentionBlock block = whole_sequences(s);

  // Heads from `first` on of rows of `n` heads.
  template <class X>
  HeadRows<X> heads(X* array, int64_t n, int64_t first) const {
    return {array + first * s.D, n * s.D};
  }
  AttentionInputs<T> inputs(const T* x, const int32_t* document_positions) const {
    const int64_t n = s.Hq + 2 * s.Hkv;
    return {heads(x, n, 0), heads(x, n, s.Hq), heads(x, n, s.Hq + s.Hkv), document_positions};
  }
  AttentionGradients<T, float> outputs_in(T* dqkv) const {
    const int64_t n = s.Hq + 2 * s.Hkv;
    return {heads(dqkv, n, 0), heads(dqkv, n, s.Hq), heads(dqkv, n, s.Hq + s.Hkv)};
  }

  struct Forward {
    std::vector<T> out;
    std::vector<float> lse, largest;
    Outputs outputs() const { return {{"out", out}, {"lse", lse}, {"largest", largest}}; }
  } forward = cpu_forward();

  const int32_t* places() const { return documents == Documents::yes ? positions.data() : nullptr; }
  Forward cpu_forward() const {
    const std::vector<float> statistic(static_cast<size_t>(s.B * s.Hq * s.T));
    Forward f{std::vector<T>(dout.size()), statistic, statistic};
    std::vector<std::byte> scratch(static_cast<size_t>(cpu::attention_forward_scratch(block, sizeof(float), 1)));
    cpu::attention_forward<T>({heads(f.out.data(), s.Hq, 0), f.lse.data(), {}, f.largest.data()},
                              inputs(qkv.data(), places()), scratch.data(), block, 1);
    return f;
  }
  Outputs cpu() const {
    std::vector<T> dqkv(qkv.size());
    std::vector<std::byte> scratch(static_cast<size_t>(cpu::attention_backward_scratch(block, sizeof(float), 1)));
    cpu::attention_backward<T>(outputs_in(dqkv.data()), dout.data(), forward.out.data(), forward.lse.data(),
                               inputs(qkv.data(), places()), scratch.data(), block, 1);
    return joined(gradients(dqkv), forward.outputs());
  }
  Outputs cuda() const {
    Outputs outputs = cuda_backward();
    const Outputs others = cuda_forward();
    outputs.insert(outputs.end(), others.begin(), others.end());
    return outputs;
  }
  Outputs cuda_forward() const {
    DeviceArray<T> out(static_cast<int64_t>(dout.size())), in(qkv);
    DeviceArray<float> lse(s.B * s.Hq * s.T), largest(s.B * s.Hq * s.T);
    DeviceArray<int32_t> device_positions(positions);
    cuda::attention_forward<T>(
        {heads<T>(out, s.Hq, 0), lse, {}, largest},
        inputs(in, documents == Documents::yes ? static_cast<int32_t*>(device_positions) : nullptr), nullptr, block,
        nullptr, instructions);
    return {{"out", out.host()}, {"lse", lse.host()}, {"largest", largest.host()}};
  }
  // From the CPU's outputs.
  Outputs cuda_backward() const {
    DeviceArray<T> dqkv(static_cast<int64_t>(qkv.size())), douts(dout), out(forward.out), in(qkv);
    DeviceArray<float> lse(forward.lse), scratch(cuda::attention_backward_scratch(block));
    DeviceArray<int32_t> device_positions(positions);
    cuda::attention_backward<T>(
        outputs_in(dqkv), douts, out, lse,
        inputs(in, documents == Documents::yes ? static_cast<int32_t*>(device_positions) : nullptr), scratch, block,
        nullptr, instructions);
    return gradients(dqkv.host());
  }

  Outputs gradients(const std::vector<T>& dqkv) const {
    if (s.T == 1) return {{"dqkv", dqkv}};  // a row that sees one key: dq and dk are 0, or a rounding error
    const auto columns = [&](int64_t begin, int64_t end) {
      std::vector<T> part;
      for (int64_t row = 0; row < s.B * s.T; ++row) {
        const auto first = dqkv.begin() + row * (s.Hq + 2 * s.Hkv) * s.D;
        part.insert(part.end(), first + begin * s.D, first + end * s.D);
      }
      return part;
    };
    return {
        {"dq", columns(0, s.Hq)}, {"dk", columns(s.Hq, s.Hq + s.Hkv)}, {"dv", columns(s.Hq + s.Hkv, s.Hq + 2 * s.Hkv)}};
  }
};

// New rows after `begin` earlier ones of a sequence, whose keys and values are cached.
template <class T>
struct CachedCase {
  AttentionShape s;
  int64_t begin;
  float size = 1;
  std::vector<T> qkv = normal_values<T>(s.T * (s.Hq + 2 * s.Hkv) * s.D, 1, 0, size),
                 cache = normal_values<T>((begin + s.T) * 2 * s.Hkv * s.D, 2, 0, size);
  AttentionBlock block = continuation(s, begin, begin + s.T);

  AttentionInputs<T> inputs(const T* x, const T* rows) const {
    const int64_t width = s.Hkv * s.D;
    return {{x, s.Hq * s.D + 2 * width}, {rows, 2 * width}, {rows + width, 2 * width}, nullptr};
  }
  Outputs cpu() const {
    std::vector<T> rows = cache, out(static_cast<size_t>(s.T * s.Hq * s.D));
    std::vector<std::byte> scratch(static_cast<size_t>(cpu::attention_forward_scratch(block, sizeof(float), 1)));
    cpu::cache_append(rows.data() + begin * 2 * s.Hkv * s.D, qkv.data(), s);
    cpu::attention_forward<T>({{out.data(), s.Hq * s.D}}, inputs(qkv.data(), rows.data()), scratch.data(), block, 1);
    return {{"cache", rows}, {"out", out}};
  }
  Outputs cuda() const {
    DeviceArray<T> rows(cache), in(qkv), out(s.T * s.Hq * s.D);
    DeviceArray<float> scratch(cuda::attention_forward_scratch(block));
    cuda::cache_append<T>(rows + begin * 2 * s.Hkv * s.D, in, s, nullptr);
    cuda::attention_forward<T>({{out, s.Hq * s.D}}, inputs(in, rows), scratch, block, nullptr);
    return {{"cache", rows.host()}, {"out", out.host()}};
  }
};

// In bf16 the tensor cores take rounded probabilities and gradients, unlike the CPU.
template <class T>
constexpr double tolerance = sizeof(T) == 2 ? 0x1p-7 : 2e-6;

}  // namespace

TEMPLATE_TEST_CASE("attention kernels match the CPU", "[cuda]", float, bf16) {
  // One row; a head that is not a whole pack; an odd one; heads that need zero padding; a row more than a tile, also
  // with documents; a ragged last tile; several blocks; documents that end within tiles and skip some.
  const auto [s, documents] = GENERATE(table<AttentionShape, Documents>({
      {{2, 1, 6, 1, 64}, Documents::no},
      {{1, 7, 4, 2, 6}, Documents::yes},
      {{2, 33, 2, 1, 16}, Documents::yes},
      {{1, 64, 1, 1, 128}, Documents::no},
      {{1, 65, 1, 1, 80}, Documents::no},
      {{1, 129, 2, 1, 7}, Documents::yes},
      {{1, 460, 1, 1, 8}, Documents::yes},
      {{1, 200, 1, 1, 64}, Documents::yes},
  }));
  INFO("B = " << s.B << ", T = " << s.T << ", Hq = " << s.Hq << ", Hkv = " << s.Hkv << ", D = " << s.D);
  const Case<TestType> c{s, documents};
  check_kernel([&] { return c.cuda(); }, c.cpu(), tolerance<TestType>);
}

TEST_CASE("heads whose rows do not fit into the L2 cache together run in groups that fill the GPU", "[cuda]") {
  const int64_t L2 = cuda::device_attribute(cudaDevAttrL2CacheSize),
                processors = cuda::device_attribute(cudaDevAttrMultiProcessorCount);
  const auto groups = [&](int64_t heads, int64_t blocks, int64_t bytes) {
    const dim3 grid = cuda::grid_of_heads<bf16>(heads, blocks, bytes / 8, 2);
    REQUIRE(int64_t{grid.x} * grid.z >= heads);
    REQUIRE(int64_t{grid.x} * (grid.z - 1) < heads);
    REQUIRE(grid.y == blocks);
    return grid.z;
  };
  REQUIRE(groups(8, processors, L2 / 16) == 1);   // all fit
  REQUIRE(groups(17, processors, L2 / 16) == 3);  // six at a time, the last five
  REQUIRE(groups(17, 1, L2) == 1);                // not even one fits
}

TEST_CASE("heads that run in groups, of which the last has fewer, match the CPU", "[cuda]") {
  const Case<float> c{{1, 65, 17, 17, 4}};
  const Outputs got = c.cuda(), wanted = c.cpu();
  for (size_t i = 0; i < got.size(); ++i) REQUIRE(relative_error(got[i].values, wanted[i].values) < tolerance<float>);
#ifndef __CUDACC__
  REQUIRE(cuda::grid_of_heads<float>(17, 2, 65, 4).z > 1);  // on a GPU its cache holds all of them
#endif
}

TEST_CASE("attention kernels of warpgroups match the CPU", "[cuda]") {
  if (all_tensor_cores().size() == 1) return;
  // Heads that fill their panels and others, both sizes; a row more than a tile; one and several blocks and warpgroups;
  // heads that share keys; documents that end within tiles and skip some.
  const auto [s, documents] = GENERATE(table<AttentionShape, Documents>({
      {{1, 65, 2, 1, 64}, Documents::no},
      {{2, 33, 1, 1, 16}, Documents::yes},
      {{1, 66, 1, 1, 128}, Documents::no},
      {{1, 130, 1, 1, 72}, Documents::yes},
      {{1, 200, 1, 1, 64}, Documents::yes},
  }));
  INFO("B = " << s.B << ", T = " << s.T << ", Hq = " << s.Hq << ", Hkv = " << s.Hkv << ", D = " << s.D);
  const Case<bf16> c{s, documents, 1, cuda::TensorCores::of_warpgroup};
  check_kernel([&] { return c.cuda(); }, c.cpu(), tolerance<bf16>);
}

TEST_CASE("attention kernels match the CPU with the largest heads", "[attention][cuda]") {
  const int64_t D = GENERATE(256, 129);
  INFO("D = " << D);
  const Case<float> c{{1, 33, 1, 1, D}};
  check_kernel([&] { return c.cuda(); }, c.cpu(), tolerance<float>);
  const CachedCase<float> cached{{1, 1, 1, 1, D}, 5};
  check_kernel([&] { return cached.cuda(); }, cached.cpu(), tolerance<float>);
}

TEMPLATE_TEST_CASE("attention kernels need every barrier", "[cuda]", float, bf16) {
  const auto instructions = GENERATE(from_range(all_tensor_cores()));
  if (sizeof(TestType) != 2 && instructions == cuda::TensorCores::of_warpgroup) return;
  const Case<TestType> c{{1, 130, 1, 1, 16}, Documents::no, 1, instructions};  // three tiles
  // The kernels share their pipeline; each of them must fail without its barriers.
  check_barriers([&] { return c.cuda_forward(); });
  for (const bool of_queries : {true, false}) {
    INFO("of the kernel that writes " << (of_queries ? "dq" : "dk and dv"));
    std::vector<std::string> of_dq_alone;  // barriers that dK and dV do not need
    if (!of_queries && instructions == cuda::TensorCores::of_warpgroup)
      of_dq_alone = {"attention_wgmma.cuh: __syncwarp();  // the terms are written"};
    check_barriers(
        [&] {
          Outputs gradients = c.cuda_backward();
          std::erase_if(gradients, [&](const Output& o) { return (o.name == "dq") != of_queries; });
          return gradients;
        },
        of_dq_alone);
  }
}

TEMPLATE_TEST_CASE("attention of new rows to a cache matches the CPU", "[cuda]", float, bf16) {
  // The very first row; several; one against a full part, and one more; against three parts.
  const auto [s, begin] = GENERATE(table<AttentionShape, int64_t>({
      {{1, 1, 2, 1, 64}, 0},
      {{1, 5, 6, 1, 6}, 0},
      {{1, 1, 4, 2, 80}, 255},
      {{1, 2, 2, 2, 128}, 256},
      {{1, 3, 1, 1, 7}, 600},
  }));
  INFO("T = " << s.T << ", begin = " << begin << ", Hq = " << s.Hq << ", Hkv = " << s.Hkv << ", D = " << s.D);
  const CachedCase<TestType> c{s, begin};
  check_kernel([&] { return c.cuda(); }, c.cpu(), tolerance<TestType>);
}

TEMPLATE_TEST_CASE("attention handles scores whose exponentials overflow a float", "[cuda]", float, bf16) {
  constexpr float size = 20;  // scores of some hundreds
  const Case<TestType> c{{1, 70, 1, 1, 64}, Documents::no, size};
  check_kernel([&] { return c.cuda_forward(); }, c.forward.outputs(), 0x1p-7);
  const CachedCase<TestType> cached{{1, 2, 1, 1, 64}, 600, size};
  check_kernel([&] { return cached.cuda(); }, cached.cpu(), 0x1p-7);
}

TEMPLATE_TEST_CASE("attention of new rows to a cache needs every barrier", "[cuda]", float, bf16) {
  const CachedCase<TestType> c{{1, 3, 1, 1, 7}, 600};
  // The maximum and the sum over a block use two arrays, neither of which is written again.
  check_barriers([&] { return c.cuda(); },
                 {"reduce.cuh: __syncthreads();  // partial is read; the next call may write it"});
}

TEST_CASE("attention refuses heads that are too large for its kernels", "[attention][cuda]") {
  REQUIRE_THROWS_WITH(
      cuda::attention_forward<bf16>({}, {}, nullptr, whole_sequences(AttentionShape{1, 1, 1, 1, 160}), nullptr),
      Catch::Matchers::ContainsSubstring("heads of up to 128 channels in bf16, not 160"));
}

#ifndef __CUDACC__
TEST_CASE("attention's kernels say at the start where fewer of their blocks run at a time than they are meant to",
          "[attention][cuda]") {
  const auto notices = [](int registers, DType dtype, int64_t D) {
    cuda_on_cpu::set_kernel_registers(registers);
    std::vector<std::string> said;
    try {
      said = attention_notices({DeviceKind::cuda}, dtype, D);
    } catch (const Error& error) {
      said = {error.what()};
    }
    cuda_on_cpu::set_kernel_registers(0);
    return said;
  };
  for (const int64_t D : {16, 64, 80, 128}) {
    INFO(D);
    REQUIRE(notices(255, DType::bf16, D).empty());  // as the compiler reports for sm_90
    REQUIRE(notices(255, DType::fp32, D).empty());
  }
  REQUIRE(notices(255, DType::fp32, 256).empty());  // shared memory has room for one block
  const std::vector<std::string> slow = notices(300, DType::bf16, 128);
  REQUIRE(slow.size() == 3);
  REQUIRE(slow[1].find("attention_backward_keys_kernel for heads of 128 channels in bf16 has 1 of 2 blocks") !=
          std::string::npos);
  REQUIRE(slow[1].find("its threads have 300 registers each") != std::string::npos);
  REQUIRE(notices(1000, DType::bf16, 64).at(0).find("launching ") == 0);  // not one
}
#endif
