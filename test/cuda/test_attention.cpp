// Attention's kernels against the CPU's op.
#include "cuda/device_test.h"
#include "ops/cpu/attention.h"
#include "ops/cuda/attention_backward.cuh"
#include "ops/cuda/attention_forward.cuh"

using namespace llmc;

namespace {

enum class Documents : uint8_t { no, yes };

// Positions of packed documents of uneven lengths: of one row, of less than a tile, of several tiles.
std::vector<int32_t> document_positions(const AttentionShape& s) {
  std::vector<int32_t> positions;
  const int64_t lengths[] = {37, 1, 90, 11, 70};
  for (int64_t b = 0; b < s.B; ++b) {
    int64_t left = 0, document = b;
    for (int64_t t = 0, position = 0; t < s.T; ++t, ++position, --left) {
      if (left == 0) left = lengths[document++ % 5], position = 0;
      positions.push_back(static_cast<int32_t>(position));
    }
  }
  return positions;
}

// Inputs of one size, and what the CPU makes of them.
template <class T>
struct Case {
  AttentionShape s;
  Documents documents = Documents::no;
  std::vector<T> qkv = normal_values<T>(s.B * s.T * (s.Hq + 2 * s.Hkv) * s.D, 1),
                 dout = normal_values<T>(s.B * s.T * s.Hq * s.D, 2);
  std::vector<int32_t> positions = document_positions(s);

  int64_t out_size() const { return s.B * s.T * s.Hq * s.D; }
  int64_t lse_size() const { return s.B * s.Hq * s.T; }

  Outputs cpu() const {
    const int32_t* places = documents == Documents::yes ? positions.data() : nullptr;
    std::vector<T> out(static_cast<size_t>(out_size())), dqkv(qkv.size());
    std::vector<float> lse(static_cast<size_t>(lse_size())),
        scratch(std::max(cpu::attention_forward_scratch(s, 1), cpu::attention_backward_scratch(s, 1)));
    cpu::attention_forward(out.data(), lse.data(), qkv.data(), places, scratch.data(), s, 1);
    cpu::attention_backward(dqkv.data(), dout.data(), out.data(), qkv.data(), lse.data(), places, scratch.data(), s, 1);
    return {{"out", out}, {"lse", lse}, {"dqkv", dqkv}};
  }
  Outputs cuda() const {
    DeviceArray<T> out(out_size()), dqkv(static_cast<int64_t>(qkv.size())), in(qkv), douts(dout);
    DeviceArray<float> lse(lse_size()), scratch(cuda::attention_backward_scratch(s));
    DeviceArray<int32_t> all_places(positions);
    const int32_t* places = documents == Documents::yes ? static_cast<int32_t*>(all_places) : nullptr;
    cuda::attention_forward<T>(out, lse, in, places, s, nullptr);
    cuda::attention_backward<T>(dqkv, douts, out, in, lse, places, scratch, s, nullptr);
    return {{"out", out.host()}, {"lse", lse.host()}, {"dqkv", dqkv.host()}};
  }
};

template <class T>
constexpr double tolerance = sizeof(T) == 2 ? 4e-3 : 2e-6;

}  // namespace

TEMPLATE_TEST_CASE("attention's kernels compute what the CPU does", "[cuda]", float, bf16) {
  // One row; a head that is no whole pack; one that needs zeros; a row more than a tile; the last tile ragged.
  const auto [s, documents] = GENERATE(table<AttentionShape, Documents>({
      {{2, 1, 1, 1, 64}, Documents::no},
      {{1, 7, 2, 2, 6}, Documents::yes},
      {{2, 33, 4, 2, 16}, Documents::yes},
      {{1, 64, 1, 1, 128}, Documents::no},
      {{1, 65, 6, 1, 7}, Documents::no},
      {{1, 130, 2, 1, 80}, Documents::yes},
      {{1, 200, 2, 2, 64}, Documents::no},
      {{1, 200, 1, 1, 64}, Documents::yes},
  }));
  INFO("B = " << s.B << ", T = " << s.T << ", Hq = " << s.Hq << ", Hkv = " << s.Hkv << ", D = " << s.D);
  const Case<TestType> c{s, documents};
  check_kernel([&] { return c.cuda(); }, c.cpu(), tolerance<TestType>);
}

TEMPLATE_TEST_CASE("attention's kernels have no barrier too many", "[cuda]", float, bf16) {
  const Case<TestType> c{{1, 200, 1, 1, 16}};
  check_barriers([&] { return c.cuda(); });
}
