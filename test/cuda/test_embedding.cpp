// The embedding kernels against the CPU op, and the sort used by its backward.
#include <algorithm>
#include <numeric>

#include "cuda/device_test.h"
#include "ops/cpu/embedding.h"
#include "ops/cuda/embedding.cuh"

using namespace llmc;

namespace {

enum class Spread : uint8_t { even, frequent, same };  // of ids: uniform; a few much more frequent; only one

std::vector<int32_t> some_ids(int64_t N, int64_t V, Spread spread, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> ids(static_cast<size_t>(N));
  for (int32_t& id : ids) {
    const auto drawn = static_cast<int64_t>(random() % static_cast<uint64_t>(V));
    const bool rare = random() % 4 == 0;
    if (spread == Spread::even) id = static_cast<int32_t>(drawn);
    if (spread == Spread::frequent) id = static_cast<int32_t>(rare ? drawn : drawn % std::min<int64_t>(V, 3));
    if (spread == Spread::same) id = static_cast<int32_t>(V - 1);
  }
  return ids;
}

// The sorted ids and their rows, with `space` on both sides of the scratch.
Outputs cuda_sort(const std::vector<int32_t>& ids, int64_t V, int64_t space) {
  const int64_t N = static_cast<int64_t>(ids.size());
  DeviceArray<int32_t> in(ids), scratch(space + cuda::sort_rows_scratch(N) + space);
  const auto got = cuda::sort_rows(scratch + space, in, N, V, nullptr);
  const std::vector<int32_t> all = scratch.host();
  const auto part = [&](const int32_t* at) {
    const auto begin = all.begin() + (at - static_cast<int32_t*>(scratch));
    return std::vector<int32_t>(begin, begin + N);
  };
  return {{"ids", part(got.ids)}, {"rows", part(got.rows)}};
}

template <class T>
struct Case {
  int64_t N, C, V, P;
  Spread spread;
  bool with_positions = true;
  Vocabulary part = {};
  std::vector<T> wte = normal_values<T>(V * C, 1), wpe = normal_values<T>(P * C, 2), dout = normal_values<T>(N * C, 3);
  std::vector<float> dwte = normal_values<float>(V * C, 4), dwpe = normal_values<float>(P * C, 5);
  std::vector<int32_t> tokens = some_ids(N, V, spread, 6), positions = std::vector<int32_t>(static_cast<size_t>(N));

  Case(int64_t N_, int64_t C_, int64_t V_, int64_t P_, Spread spread_, bool with_positions_ = true)
      : N(N_), C(C_), V(V_), P(P_), spread(spread_), with_positions(with_positions_) {
    for (int64_t n = 0; n < N; ++n) positions[static_cast<size_t>(n)] = static_cast<int32_t>(n % P);
  }

  Outputs cpu() const {
    std::vector<T> out(dout.size());
    std::vector<float> te = dwte, pe = dwpe;
    cpu::embedding_forward(out.data(), tokens.data(), positions.data(), wte.data(),
                           with_positions ? wpe.data() : nullptr, N, C, part);
    cpu::embedding_backward(te.data(), with_positions ? pe.data() : nullptr, dout.data(), tokens.data(),
                            positions.data(), N, C, part);
    return {{"out", out}, {"dwte", te}, {"dwpe", pe}};
  }
  Outputs cuda() const {
    DeviceArray<T> out(N * C), te(wte), pe(wpe), gradient(dout);
    DeviceArray<float> dte(dwte), dpe(dwpe);
    DeviceArray<int32_t> ids(tokens), places(positions),
        scratch(cuda::embedding_backward_scratch(N, C, with_positions ? 2 : 1));
    cuda::embedding_forward<T>(out, ids, places, te, with_positions ? static_cast<T*>(pe) : nullptr, N, C, part,
                               nullptr);
    cuda::embedding_backward<T>({dte, with_positions ? static_cast<float*>(dpe) : nullptr,
                                 part.size < 0 ? V : part.size, with_positions ? P : 0},
                                scratch, gradient, ids, places, N, C, part, nullptr);
    return {{"out", out.host()}, {"dwte", dte.host()}, {"dwpe", dpe.host()}};
  }
};

}  // namespace

TEST_CASE("rows are sorted by id, and rows of one id stay in order", "[cuda]") {
  // One row, one tile of a warp, several blocks; ids of one digit, of two, of two of the largest size, of three.
  const auto [N, V] = GENERATE(std::pair{1, 1}, std::pair{33, 2}, std::pair{1000, 300}, std::pair{5003, 1000},
                               std::pair{3100, 151936}, std::pair{40, 600000});
  const Spread spread = GENERATE(Spread::even, Spread::frequent, Spread::same);
  INFO("N = " << N << ", V = " << V);
  const std::vector<int32_t> ids = some_ids(N, V, spread, 1);
  std::vector<int32_t> rows(ids.size()), sorted;
  std::iota(rows.begin(), rows.end(), 0);
  std::stable_sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
  for (const int32_t row : rows) sorted.push_back(ids[static_cast<size_t>(row)]);
  const Outputs right = {{"ids", sorted}, {"rows", rows}};
  REQUIRE(same_bits(check_kernel([&, V = V] { return cuda_sort(ids, V, 0); }, right, 1e-30), right));
}

TEST_CASE("the sort needs every barrier", "[cuda]") {
  const std::vector<int32_t> ids = some_ids(1000, 300, Spread::frequent, 1);
  // Lanes meet at votes, which do not order memory: only ThreadSanitizer sees a barrier missing before them.
  check_barriers([&] { return cuda_sort(ids, 300, 1000); },  // the space: rows go to places a little outside
                 {"sort.cuh: __syncwarp();  // all places are written",
                  "sort.cuh: __syncwarp();  // the places are those after these rows"});
}

TEMPLATE_TEST_CASE("the embedding kernels match the CPU", "[cuda]", float, bf16) {
  const auto [N, C] =
      GENERATE(std::pair{1, 1}, std::pair{31, 7}, std::pair{100, 24}, std::pair{333, 40}, std::pair{70, 1032});
  const Spread spread = GENERATE(Spread::even, Spread::frequent, Spread::same);
  INFO("N = " << N << ", C = " << C);
  const Case<TestType> c(N, C, 97, 16, spread);
  check_kernel([&] { return c.cuda(); }, c.cpu(), 1e-6);
}

TEST_CASE("the rows of a token may begin and end at segment boundaries of the sorted rows", "[cuda]") {
  Case<float> c(150, 8, 4, 16, Spread::even);
  for (int32_t n = 0; n < 150; ++n)  // sorted: 32 rows, 40, 56, the rest
    c.tokens[static_cast<size_t>(n)] = n < 32 ? 0 : n < 72 ? 1 : n < 128 ? 2 : 3;
  check_kernel([&] { return c.cuda(); }, c.cpu(), 1e-6);
}

TEST_CASE("an embedding without positions", "[cuda]") {
  const Case<bf16> c(50, 16, 20, 4, Spread::even, false);
  check_kernel([&] { return c.cuda(); }, c.cpu(), 1e-6);
}

TEST_CASE("a token with up to 32 rows sums them in the CPU's order, bit by bit", "[cuda]") {
  std::vector<int32_t> ids(64);  // two segments of the sorted rows, no token in both
  for (size_t n = 0; n < ids.size(); ++n) ids[n] = static_cast<int32_t>(n % 8);
  Case<float> c(64, 16, 8, 64, Spread::even);
  c.tokens = ids;
  REQUIRE(same_bits(c.cuda(), c.cpu()));
}

TEMPLATE_TEST_CASE("a part of the vocabulary: tokens outside of it give zeros and get nothing", "[cuda]", float, bf16) {
  const auto [N, C] = GENERATE(std::pair{1, 1}, std::pair{100, 24}, std::pair{333, 40});
  const Vocabulary part = GENERATE(Vocabulary{0, 40}, Vocabulary{30, 33}, Vocabulary{57, 40}, Vocabulary{97, 0});
  const Spread spread = GENERATE(Spread::even, Spread::frequent, Spread::same);
  INFO("N = " << N << ", C = " << C << ", tokens from " << part.first << " on");
  Case<TestType> c(N, C, 40, 16, spread, C != 24);
  c.tokens = some_ids(N, 97, spread, 6);
  c.part = part;
  check_kernel([&] { return c.cuda(); }, c.cpu(), 1e-6);
}

TEST_CASE("the rows of a part's tokens may end anywhere among the sorted rows", "[cuda]") {
  const int32_t last = GENERATE(0, 1, 31, 32, 33, 40, 64, 65, 150);  // rows of tokens 3 to 6, in order; then others
  Case<float> c(150, 8, 4, 16, Spread::even);
  for (int32_t n = 0; n < 150; ++n) c.tokens[static_cast<size_t>(n)] = n < last ? 3 + n * 4 / last : n % 2 == 0 ? 7 : 2;
  c.part = {3, 4};
  check_kernel([&] { return c.cuda(); }, c.cpu(), 1e-6);
}

TEMPLATE_TEST_CASE("positions are added, and their gradients, as on the CPU", "[cuda]", float, bf16) {
  using T = TestType;
  const auto [N, C] = GENERATE(std::pair{1, 1}, std::pair{31, 7}, std::pair{100, 24}, std::pair{70, 1032});
  const Case<T> c(N, C, 1, 16, Spread::even);
  const auto right = [&, N = N, C = C]() -> Outputs {
    std::vector<T> x = c.dout;
    std::vector<float> pe = c.dwpe;
    float* const no_table = nullptr;
    cpu::add_positions(x.data(), c.positions.data(), c.wpe.data(), N, C);
    cpu::embedding_backward(no_table, pe.data(), c.dout.data(), nullptr, c.positions.data(), N, C);
    return {{"x", x}, {"dwpe", pe}};
  };
  const auto run = [&, N = N, C = C]() -> Outputs {
    DeviceArray<T> x(c.dout), pe(c.wpe), gradient(c.dout);
    DeviceArray<float> dpe(c.dwpe);
    DeviceArray<int32_t> places(c.positions), scratch(cuda::embedding_backward_scratch(N, C, 1));
    cuda::add_positions<T>(x, places, pe, N, C, nullptr);
    cuda::embedding_backward<T>({nullptr, dpe, 0, c.P}, scratch, gradient, nullptr, places, N, C, {}, nullptr);
    return {{"x", x.host()}, {"dwpe", dpe.host()}};
  };
  REQUIRE(same_bits({check_kernel(run, right(), 1e-6)[0]}, {right()[0]}));
}
