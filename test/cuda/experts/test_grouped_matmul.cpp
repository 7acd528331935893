// The products of each expert's rows with its weights, against the CPU ops.
#include "cuda/device_test.h"
#include "ops/cpu/grouped_matmul.h"
#include "ops/cuda/grouped_matmul.cuh"

using namespace llmc;

namespace {

template <class T>
struct Case {
  std::vector<int32_t> rows;  // of each expert
  int64_t O, I;
  std::vector<int32_t> offsets = {0};
  int64_t E = 0, R = 0, used = 0;
  std::vector<T> x, dout, weight;
  std::vector<float> dweight;

  Case(const std::vector<int32_t>& rows_, int64_t O_, int64_t I_) : rows(rows_), O(O_), I(I_) {
    for (const int32_t n : rows) offsets.push_back(offsets.back() + n);
    E = static_cast<int64_t>(rows.size()), used = offsets.back(), R = used + 5;
    x = normal_values<T>(R * I, 1), dout = normal_values<T>(R * O, 2), weight = normal_values<T>(E * O * I, 3);
    dweight = normal_values<float>(E * O * I, 4);
    for (const auto& [all, width] : {std::pair{&x, I}, {&dout, O}})  // stale rows
      std::memset(static_cast<void*>(all->data() + used * width), 0xff, static_cast<size_t>(5 * width) * sizeof(T));
  }
  std::vector<T> used_rows(std::vector<T> all, int64_t width) const {
    REQUIRE(std::all_of(all.begin() + used * width, all.end(), [](T e) { return std::isnan(static_cast<float>(e)); }));
    all.resize(static_cast<size_t>(used * width));
    return all;
  }
  // dw: added to; written: where NaN was
  Outputs outputs(const std::vector<T>& out, const std::vector<T>& dx, const std::vector<float>& dw,
                  const std::vector<float>& written) const {
    return {{"out", used_rows(out, O)}, {"dx", used_rows(dx, I)}, {"dweight +=", dw}, {"dweight =", written}};
  }
  Outputs cpu() const {
    std::vector<T> out = dout, dx = x;  // NaN in the stale rows
    std::vector<float> dw = dweight, written(dw.size(), NAN);
    std::vector<std::byte> bytes(
        static_cast<size_t>(cpu::grouped_scratch(std::max({R, O, I}), dtype_of<T>(), omp_get_max_threads())));
    std::byte* scratch = bytes.data();
    cpu::grouped_linear(out.data(), x.data(), weight.data(), offsets.data(), scratch, R, E, O, I, Transpose::yes);
    cpu::grouped_linear(dx.data(), dout.data(), weight.data(), offsets.data(), scratch, R, E, I, O, Transpose::no);
    for (const auto& [to, accumulate] : {std::pair{&dw, Accumulate::yes}, {&written, Accumulate::no}})
      cpu::grouped_linear_backward_weight(to->data(), dout.data(), x.data(), offsets.data(), scratch, R, E, O, I,
                                          accumulate);
    return outputs(out, dx, dw, written);
  }
  Outputs cuda() const {
    DeviceArray<T> in(x), gradient(dout), w(weight), out(R * O), dx(R * I);
    DeviceArray<float> dw(dweight), written(std::vector<float>(dweight.size(), NAN));
    DeviceArray<int32_t> at(offsets);
    cuda::grouped_linear_forward<T>(out, in, w, at, R, E, O, I, nullptr);
    cuda::grouped_linear_backward_input<T>(dx, gradient, w, at, R, E, O, I, nullptr);
    cuda::grouped_linear_backward_weight<T>(dw, gradient, in, at, E, O, I, Accumulate::yes, nullptr);
    cuda::grouped_linear_backward_weight<T>(written, gradient, in, at, E, O, I, Accumulate::no, nullptr);
    return outputs(out.host(), dx.host(), dw.host(), written.host());
  }
};

}  // namespace

TEMPLATE_TEST_CASE("grouped products match the CPU", "[cuda]", float, bf16) {
  using T = TestType;
  // One row; experts without rows; more rows than a tile, and a ragged depth; several tiles of columns; more experts
  // than a warp.
  std::vector<int32_t> many(40);
  many[3] = 2, many[35] = 1;
  const auto c = GENERATE_REF(Case<T>({1}, 1, 1), Case<T>({0, 3, 0, 17, 0}, 24, 72), Case<T>({130, 2}, 9, 70),
                              Case<T>({5}, 136, 40), Case<T>(many, 8, 16), Case<T>({0, 0}, 8, 8));
  check_kernel([&] { return c.cuda(); }, c.cpu(), sizeof(T) == 2 ? 2e-3 : 1e-6);
}

TEMPLATE_TEST_CASE("the grouped products need every barrier and wait", "[cuda]", float, bf16) {
  const Case<TestType> c({136}, 64, 64);  // the gradient of the weights is at least three tiles deep
  check_barriers([&] { return c.cuda(); });
}
