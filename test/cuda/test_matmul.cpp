// Matrix products by cuBLASLt, or its emulation on the CPU, against the CPU op.
#include "cuda/device_test.h"
#include "ops/cpu/matmul.h"
#include "ops/cuda/matmul.cuh"

using namespace llmc;
using Catch::Matchers::ContainsSubstring;
using cuda::alignment_of;
using cuda::MatmulPlans;
using cuda::MatmulShape;

namespace {

constexpr int64_t workspace_bytes = 1 << 20;
using Workspace = DeviceArray<char>;

MatmulShape shape_of(int64_t M, int64_t N, int64_t K, DType in, DType out) {
  return {M, N, K, Transpose::no, Transpose::no, Accumulate::no, in, out, Bias::no};
}

// Inputs of one shape, and the CPU's results. `offset`: elements before each array, in aligned memory.
template <class T, class Out>
struct Case {
  MatmulShape shape;
  int64_t offset = 0;
  std::vector<T> a = normal_values<T>(offset + shape.M * shape.K, 1),
                 b = normal_values<T>(offset + shape.K * shape.N, 2), bias = normal_values<T>(offset + shape.N, 3);
  std::vector<Out> c = normal_values<Out>(offset + shape.M * shape.N, 4);

  bool has_bias() const { return shape.bias == Bias::yes; }

  Outputs cpu() const {
    std::vector<Out> sum = c;
    const cpu::MatmulShape s{shape.M,          shape.N,  shape.K,   shape.a,    shape.b,
                             shape.accumulate, shape.in, shape.out, shape.bias, 1};
    std::vector<std::byte> scratch(static_cast<size_t>(cpu::matmul_scratch(s)));
    cpu::matmul(sum.data() + offset, a.data() + offset, b.data() + offset, has_bias() ? bias.data() + offset : nullptr,
                scratch.data(), s);
    return {{"c", std::vector<Out>(sum.begin() + offset, sum.end())}};
  }

  Outputs cuda(MatmulPlans& plans) const {
    DeviceArray<T> as(a), bs(b), biases(bias);
    DeviceArray<Out> cs(shape.accumulate == Accumulate::yes ? c : std::vector<Out>(c.size(), Out(NAN)));
    Workspace workspace(workspace_bytes);
    MatmulShape aligned = shape;
    const T* bias_at = has_bias() ? biases + offset : nullptr;
    aligned.alignment = alignment_of({cs + offset, as + offset, bs + offset, bias_at});
    plans.prepare(aligned).run({cs + offset, as + offset, bs + offset, bias_at, workspace}, nullptr);
    const std::vector<Out> sum = cs.host();
    return {{"c", std::vector<Out>(sum.begin() + offset, sum.end())}};
  }
};

// A sum in bf16 is rounded once; cuBLASLt may round a product, or one with its bias, before it adds the product to C.
template <class T>
constexpr double tolerance(const MatmulShape& s) {
  return sizeof(T) == 4 ? 2e-6 : s.accumulate == Accumulate::yes ? 0x1p-8 : 1e-3;
}

template <class T, class Out>
void check_all(int64_t M, int64_t N, int64_t K, int64_t offset = 0) {
  for (const Transpose a : {Transpose::no, Transpose::yes})
    for (const Transpose b : {Transpose::no, Transpose::yes})
      for (const Accumulate accumulate : {Accumulate::no, Accumulate::yes})
        for (const Bias bias : {Bias::no, Bias::yes}) {
          if (bias == Bias::yes && !std::is_same_v<T, Out>) continue;
          const Case<T, Out> c{{M, N, K, a, b, accumulate, dtype_of<T>(), dtype_of<Out>(), bias}, offset};
          INFO(to_string(c.shape) << ", " << offset << " elements away from it");
          MatmulPlans plans(workspace_bytes);
          check_kernel([&] { return c.cuda(plans); }, c.cpu(), tolerance<Out>(c.shape));
        }
}

template <class F>
std::string error_of(F&& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// One product with the heuristic's first choice in every transposition, as the text that a run would record.
std::string exported_plans() {
  MatmulPlans plans(workspace_bytes);
  for (const Transpose b : {Transpose::no, Transpose::yes}) {
    MatmulShape shape = shape_of(16, 24, 32, DType::bf16, DType::bf16);
    shape.b = b;
    plans.prepare(shape);
  }
  return plans.exported();
}

}  // namespace

TEST_CASE("matrix products match the CPU in every transposition and dtype", "[matmul][cuda]") {
  // One element; multiples of 8; rows at odd addresses, as from heads of 21 or 50 channels; a padded vocabulary.
  const auto [M, N, K] = GENERATE(std::tuple{1, 1, 1}, std::tuple{16, 64, 32}, std::tuple{5, 21, 50},
                                  std::tuple{33, 104, 7}, std::tuple{3, 50, 264}, std::tuple{24, 320, 16});
  check_all<float, float>(M, N, K);
  check_all<bf16, bf16>(M, N, K);
  check_all<bf16, float>(M, N, K);
}

TEST_CASE("matrix products of arrays at any alignment", "[matmul][cuda]") {
  check_all<float, float>(8, 16, 24, 1);
  check_all<bf16, bf16>(8, 16, 24, 1);
  check_all<bf16, float>(8, 16, 24, 1);
  check_all<bf16, float>(8, 16, 24, 4);
}

TEST_CASE("an algorithm that needs more than the workspace is not used", "[matmul][cuda]") {
  const Case<bf16, float> c{shape_of(16, 24, 32, DType::bf16, DType::fp32)};
  MatmulPlans none(0);
  check_kernel([&] { return c.cuda(none); }, c.cpu(), tolerance<float>(c.shape));
}

TEST_CASE("a bf16 product is rounded once", "[matmul][cuda]") {
  const Case<bf16, bf16> rounded{shape_of(48, 40, 256, DType::bf16, DType::bf16)};
  const Case<bf16, float> exact{shape_of(48, 40, 256, DType::bf16, DType::fp32)};
  MatmulPlans plans(workspace_bytes);
  std::vector<float> once = exact.cuda(plans)[0].values;
  for (float& x : once) x = static_cast<float>(bf16(x));
  REQUIRE(relative_error(rounded.cuda(plans)[0].values, once) < 3e-4);
}

TEST_CASE("products compute GELU, and its derivative, from sums that are not rounded first", "[matmul][cuda]") {
  const auto [M, N, K] = GENERATE(std::tuple{1, 8, 8}, std::tuple{33, 104, 72});
  MatmulPlans plans(workspace_bytes);
  Case<bf16, float> exact{shape_of(M, N, K, DType::bf16, DType::fp32)};
  exact.shape.b = Transpose::yes;
  std::vector<float> sums = exact.cuda(plans)[0].values;
  const auto gelu_of = [](double x) {
    return x / 2 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
  };
  const auto rounded = [](std::vector<float> values) {
    for (float& x : values) x = static_cast<float>(bf16(x));
    return values;
  };
  const auto run = [&](Epilogue epilogue, Bias bias, std::vector<bf16> z) {
    MatmulShape shape = exact.shape;
    shape.out = DType::bf16, shape.epilogue = epilogue, shape.bias = bias;
    DeviceArray<bf16> as(exact.a), bs(exact.b), biases(exact.bias), zs(z), cs(std::vector<bf16>(z.size(), bf16(NAN)));
    Workspace workspace(workspace_bytes);
    plans.prepare(shape).run(
        {cs, as, bs, bias == Bias::yes ? static_cast<const bf16*>(biases) : nullptr, workspace, nullptr, nullptr, zs},
        nullptr);
    return Outputs{{"c", cs.host()}, {"z", zs.host()}};
  };
  for (const Bias bias : {Bias::no, Bias::yes}) {
    std::vector<float> z = sums, gelu(z.size());
    for (size_t i = 0; i < z.size(); ++i) {
      if (bias == Bias::yes) z[i] += static_cast<float>(exact.bias[i % static_cast<size_t>(N)]);
      gelu[i] = static_cast<float>(gelu_of(static_cast<double>(z[i])));
    }
    const Outputs expected{{"c", rounded(gelu)}, {"z", rounded(z)}};
    check_kernel([&] { return run(Epilogue::gelu, bias, std::vector<bf16>(z.size(), bf16(NAN))); }, expected,
                 tolerance<bf16>(exact.shape));
  }
  const auto z = normal_values<bf16>(M * N, 5);
  std::vector<float> slopes(sums.size()), zs(sums.size());
  for (size_t i = 0; i < sums.size(); ++i) {
    const double x = static_cast<double>(static_cast<float>(z[i])), h = 1e-5;
    slopes[i] = static_cast<float>(static_cast<double>(sums[i]) * (gelu_of(x + h) - gelu_of(x - h)) / (2 * h));
    zs[i] = static_cast<float>(z[i]);
  }
  const Outputs expected{{"c", rounded(slopes)}, {"z", zs}};
  check_kernel([&] { return run(Epilogue::gelu_backward, Bias::no, z); }, expected, tolerance<bf16>(exact.shape));

  MatmulShape odd = exact.shape;
  odd.out = DType::bf16, odd.epilogue = Epilogue::gelu, odd.N = 12;
  REQUIRE_THAT(error_of([&] { plans.prepare(odd); }), ContainsSubstring("rows of a multiple of 8"));
  REQUIRE_THAT(error_of([&] { plans.prepare(odd); }), ContainsSubstring("z, C = GELU(z)"));
}

TEMPLATE_TEST_CASE("products add a residual to sums that are not rounded first", "[matmul][cuda]", float, bf16) {
  using T = TestType;
  const DType dtype = sizeof(T) == 4 ? DType::fp32 : DType::bf16;
  const auto [M, N, K] = GENERATE(std::tuple{1, 8, 8}, std::tuple{33, 107, 70});
  MatmulPlans plans(workspace_bytes);
  Case<T, float> exact{shape_of(M, N, K, dtype, DType::fp32)};
  const std::vector<float> products = exact.cuda(plans)[0].values;
  const std::vector<T> residual = normal_values<T>(M * N, 5);
  for (const Bias bias : {Bias::no, Bias::yes}) {
    MatmulShape shape = exact.shape;
    shape.out = dtype, shape.epilogue = Epilogue::residual, shape.bias = bias;
    Outputs expected{{"c", products}, {"residual", residual}};
    for (size_t i = 0; i < products.size(); ++i) {
      float sum = products[i] + static_cast<float>(residual[i]);
      if (bias == Bias::yes) sum += static_cast<float>(exact.bias[i % static_cast<size_t>(N)]);
      expected[0].values[i] = static_cast<float>(T(sum));
    }
    const auto run = [&] {
      DeviceArray<T> as(exact.a), bs(exact.b), biases(exact.bias), zs(residual),
          cs(std::vector<T>(residual.size(), T(NAN)));
      Workspace workspace(workspace_bytes);
      shape.alignment = alignment_of({cs, as, bs, biases, zs});
      plans.prepare(shape).run(
          {cs, as, bs, bias == Bias::yes ? static_cast<const T*>(biases) : nullptr, workspace, nullptr, nullptr, zs},
          nullptr);
      return Outputs{{"c", cs.host()}, {"residual", zs.host()}};
    };
    check_kernel(run, expected, tolerance<T>(exact.shape));
  }
  MatmulShape twice = exact.shape;
  twice.epilogue = Epilogue::residual, twice.accumulate = Accumulate::yes;
  REQUIRE_THAT(error_of([&] { plans.prepare(twice); }), ContainsSubstring("adds a residual once"));
  REQUIRE_THAT(error_of([&] { plans.prepare(twice); }), ContainsSubstring(" + z"));
}

TEST_CASE("fp32 is multiplied as fp32 unless TF32 is requested", "[matmul][cuda]") {
  Case<float, float> c{shape_of(32, 48, 64, DType::fp32, DType::fp32)};
  MatmulPlans plans(workspace_bytes);
  REQUIRE(relative_error(c.cuda(plans)[0].values, c.cpu()[0].values) < 1e-6);
  c.shape.tf32 = Tf32::yes;
  const double error = relative_error(c.cuda(plans)[0].values, c.cpu()[0].values);
  REQUIRE(error > 1e-5);
  REQUIRE(error < 2e-3);
}

TEST_CASE("products of empty matrices", "[matmul][cuda]") {
  MatmulPlans plans(workspace_bytes);
  MatmulShape shape = shape_of(4, 8, 0, DType::bf16, DType::fp32);
  const auto sum = [&] {
    DeviceArray<float> c(std::vector<float>(32, 3.0f));
    REQUIRE(plans.prepare(shape).scratch_bytes() == 0);
    plans.prepare(shape).run({c, nullptr, nullptr, nullptr, nullptr}, nullptr);
    return c.host();
  };
  REQUIRE(sum() == std::vector<float>(32, 0.0f));
  shape.accumulate = Accumulate::yes;
  REQUIRE(sum() == std::vector<float>(32, 3.0f));
  shape.M = 0;
  plans.prepare(shape).run({}, nullptr);
}

TEST_CASE("a product on one stream waits for another stream's writes, and for the workspace", "[matmul][cuda]") {
  constexpr int64_t n = 16;
  const auto x = normal_values<float>(n * n, 1), y = normal_values<float>(n * n, 2);
  MatmulPlans plans(workspace_bytes);
  const auto product = plans.prepare(shape_of(n, n, n, DType::fp32, DType::fp32));
  const auto run = [&] {
    cudaStream_t first, second;
    cudaEvent_t written, read;
    CUDA_CHECK(cudaStreamCreate(&first));
    CUDA_CHECK(cudaStreamCreate(&second));
    CUDA_CHECK(cudaEventCreate(&written));
    CUDA_CHECK(cudaEventCreate(&read));
    const Outputs out = [&]() -> Outputs {
      DeviceArray<float> xs(x), ys(y), xy(n * n), xyy(n * n);
      Workspace workspace(workspace_bytes);
      product.run({xy, xs, ys, nullptr, workspace}, first);
      CUDA_CHECK(cudaEventRecord(written, first));
      CUDA_CHECK(cudaStreamWaitEvent(second, written));  // xy is there
      product.run({xyy, xy, ys, nullptr, workspace}, second);
      CUDA_CHECK(cudaEventRecord(read, second));
      CUDA_CHECK(cudaStreamWaitEvent(first, read));  // xy is free again, and so is the workspace
      product.run({xy, ys, xs, nullptr, workspace}, first);
      return {{"xyy", xyy.host()}, {"yx", xy.host()}};
    }();
    CUDA_CHECK(cudaEventDestroy(written));
    CUDA_CHECK(cudaEventDestroy(read));
    CUDA_CHECK(cudaStreamDestroy(first));
    CUDA_CHECK(cudaStreamDestroy(second));
    return out;
  };
  check_barriers(run);
}

TEST_CASE("recorded algorithms are reused", "[matmul][cuda]") {
  Case<bf16, float> c{shape_of(16, 24, 32, DType::bf16, DType::fp32)};
  c.shape.accumulate = Accumulate::yes;
  MatmulPlans tuned(workspace_bytes);
  DeviceArray<bf16> a(c.a), b(c.b);
  DeviceArray<float> sum(c.c);
  Workspace workspace(workspace_bytes);
  const cuda::MatmulTiming timing = tuned.tune(c.shape, {sum, a, b, nullptr, workspace}, nullptr);
  REQUIRE(timing.candidates >= 1);
#ifndef __CUDACC__
  REQUIRE(timing.candidates == 5);  // a sum in fp32 may be made in place, or of parts in the type of C
#endif
  REQUIRE(timing.best_ms > 0);
  REQUIRE(timing.best_ms <= timing.first_ms);
  const Outputs first = c.cuda(tuned);
  REQUIRE(relative_error(first[0].values, c.cpu()[0].values) < tolerance<float>(c.shape));

  const std::string text = tuned.exported();
  REQUIRE_THAT(text,
               ContainsSubstring("C (16, 24) = A (16, 32) B (32, 24), A and B in bf16, C in fp32, aligned to 16"));
  MatmulPlans restored(workspace_bytes);
  restored.restore(text);
  REQUIRE(restored.exported() == text);
  REQUIRE(same_bits(c.cuda(restored), first));
  REQUIRE(restored.exported() == text);
  REQUIRE_THAT(error_of([&] { restored.restore(text); }), ContainsSubstring("restored after 1 were chosen"));
}

TEST_CASE("a product that is written has the bits of one added to zeros: both have one algorithm", "[matmul][cuda]") {
  Case<bf16, float> c{shape_of(16, 24, 512, DType::bf16, DType::fp32)};
  MatmulPlans plans(workspace_bytes);
  const Outputs written = c.cuda(plans);  // where NaN was
  const std::string chosen = plans.exported();
  c.shape.accumulate = Accumulate::yes;
  std::fill(c.c.begin(), c.c.end(), 0.0f);
  REQUIRE(same_bits(c.cuda(plans), written));
  REQUIRE(plans.exported() == chosen);
}

#ifndef __CUDACC__

TEST_CASE("products of several matrices have the bits of one after the other, whatever the workspace",
          "[matmul][cuda]") {
  const int64_t M = 24, N = 40, K = 16, batch = 3;
  for (const Transpose turned : {Transpose::no, Transpose::yes})
    for (const int64_t workspace : {2 * M * N * 4, workspace_bytes}) {  // for both halves of one sum, or of all
      MatmulShape one = shape_of(M, N, K, DType::bf16, DType::fp32);
      one.a = turned;
      MatmulShape all = one;
      all.batch = batch;
      const std::vector<bf16> a = normal_values<bf16>(batch * M * K, 1), b = normal_values<bf16>(batch * K * N, 2);
      DeviceArray<bf16> as(a), bs(b);
      DeviceArray<float> together(std::vector<float>(batch * M * N, NAN)),
          apart(std::vector<float>(batch * M * N, NAN));
      Workspace scratch(workspace);
      MatmulPlans plans(workspace);
      plans.run(all, {together + 0, as + 0, bs + 0, nullptr, scratch}, nullptr);
      for (int64_t i = 0; i < batch; ++i)
        plans.run(one, {apart + i * M * N, as + i * M * K, bs + i * K * N, nullptr, scratch}, nullptr);
      REQUIRE(together.host() == apart.host());
      REQUIRE(std::ranges::none_of(together.host(), [](float x) { return std::isnan(x); }));
    }
}

TEST_CASE("tuning skips an algorithm that the library proposes and then refuses", "[matmul][cuda]") {
  Case<bf16, float> c{shape_of(16, 24, 32, DType::bf16, DType::fp32)};
  DeviceArray<bf16> a(c.a), b(c.b);
  DeviceArray<float> out(c.c);
  Workspace workspace(workspace_bytes);
  for (uint64_t refused = 0; refused < 4; ++refused) {
    cuda_on_cpu::refused_algorithm = refused;
    MatmulPlans plans(workspace_bytes);
    plans.tune(c.shape, {out, a, b, nullptr, workspace}, nullptr);
    const Outputs computed = c.cuda(plans);
    cuda_on_cpu::refused_algorithm = ~uint64_t{0};
    REQUIRE(relative_error(computed[0].values, c.cpu()[0].values) < tolerance<float>(c.shape));
  }
}

#endif

TEST_CASE("recorded algorithms of another library, device or workspace are refused, and so are damaged ones",
          "[matmul][cuda]") {
  const std::string text = exported_plans();
  MatmulPlans other(workspace_bytes / 2);
  REQUIRE_THAT(error_of([&] { other.restore(text); }), ContainsSubstring("with 524288 bytes of workspace'; choose"));
  MatmulPlans plans(workspace_bytes);
  const auto refusal = [&](const std::string& damaged) {
    return error_of([&] { MatmulPlans(workspace_bytes).restore(damaged); });
  };
  REQUIRE(refusal(text) == "no error");
  REQUIRE_THAT(refusal(text.substr(0, text.size() - 4)), ContainsSubstring("line 3 of the recorded"));
  REQUIRE_THAT(refusal(text + "anything\n"), ContainsSubstring("is 'anything', not 'SHAPE: 8 numbers'"));
  const std::string last_line = text.substr(text.rfind('\n', text.size() - 2) + 1);
  REQUIRE_THAT(refusal(text + last_line), ContainsSubstring("repeats '"));
}

TEST_CASE("a product that cuBLASLt cannot do is refused", "[matmul][cuda]") {
  MatmulPlans plans(workspace_bytes);
  const auto refusal = [&](auto change) {
    MatmulShape shape = shape_of(8, 16, 24, DType::bf16, DType::bf16);
    change(shape);
    return error_of([&] { plans.prepare(shape); });
  };
  REQUIRE(refusal([](MatmulShape&) {}) == "no error");
  REQUIRE_THAT(refusal([](MatmulShape& s) { s.in = DType::fp64; }),
               ContainsSubstring("on GPUs cannot read fp64: use fp32 or"));
  REQUIRE_THAT(refusal([](MatmulShape& s) { s.in = DType::fp32; }), ContainsSubstring("write bf16 from fp32"));
  REQUIRE_THAT(refusal([](MatmulShape& s) { s.out = DType::fp32, s.bias = Bias::yes; }),
               ContainsSubstring("adds a bias in the dtype of C, which is fp32, not bf16; C (8, 16) = A (8, 24) B"));
  REQUIRE_THAT(refusal([](MatmulShape& s) { s.N = -1; }), ContainsSubstring("a size is negative"));
  REQUIRE_THAT(refusal([](MatmulShape& s) { s.K = 0, s.bias = Bias::yes; }), ContainsSubstring("with K = 0"));
  REQUIRE_THAT(refusal([](MatmulShape& s) { s.alignment = 12; }), ContainsSubstring("use alignment_of"));

  Case<bf16, bf16> c{shape_of(8, 16, 24, DType::bf16, DType::bf16), 1};
  DeviceArray<bf16> a(c.a), b(c.b), sum(c.c);
  Workspace workspace(workspace_bytes);
  const cuda::Matmul product = plans.prepare(c.shape);
  REQUIRE(product.scratch_bytes() == workspace_bytes);
  REQUIRE_THAT(error_of([&] {
                 product.run({sum, a + 1, b, nullptr, workspace}, nullptr);
               }),
               ContainsSubstring("an array is aligned to 2 bytes only"));
  REQUIRE_THAT(error_of([&] {
                 product.run({sum, a, b, a, workspace}, nullptr);
               }),
               ContainsSubstring("a bias is given"));
}

#ifndef __CUDACC__
TEST_CASE("the emulated cuBLASLt refuses what the library refuses", "[matmul][cuda]") {
  MatmulPlans plans(workspace_bytes);
  const MatmulShape shape = shape_of(8, 16, 24, DType::bf16, DType::bf16);
  const Case<bf16, bf16> c{shape};
  const cuda::Matmul product = plans.prepare(shape);
  DeviceArray<bf16> a(c.a), b(c.b), sum(c.c);
  Workspace workspace(workspace_bytes), small(256);
  REQUIRE_THAT(error_of([&] {
                 product.run({sum, a, b, nullptr, workspace + 64}, nullptr);
               }),
               ContainsSubstring("cublasLtMatmul failed: an invalid value was used as an argument "
                                 "(CUBLAS_STATUS_INVALID_VALUE) for C (8, 16) = A (8, 24) B (24, 16)"));
  REQUIRE_THROWS_WITH(
      product.run({sum, a, b, nullptr, small}, nullptr),
      ContainsSubstring("cublasLtMatmul, workspace: 1048576 bytes from byte 0 of an allocation of 256"));
  REQUIRE_THROWS_WITH(product.run({sum, b + 8 * 25, b, nullptr, workspace}, nullptr),
                      ContainsSubstring("cublasLtMatmul, B: 384 bytes from byte 400 of"));  // our A is its B
  alignas(16) bf16 on_host[8 * 24];
  REQUIRE_THROWS_WITH(product.run({sum, on_host, b, nullptr, workspace}, nullptr),
                      ContainsSubstring("not device memory"));
  REQUIRE_THROWS_WITH(product.run({b + 256, a, b, nullptr, workspace}, nullptr),  // its end
                      ContainsSubstring("cublasLtMatmul, A overlaps D"));
  REQUIRE_THROWS_WITH(product.run({a + 64, a, b, nullptr, workspace}, nullptr),
                      ContainsSubstring("cublasLtMatmul, B overlaps D"));

  // An invalid algorithm, from a file.
  std::string text = plans.exported();
  text = text.substr(0, text.find(':')) + ": 1 2 3 4 5 6 7 8\n";
  MatmulPlans restored(workspace_bytes);
  restored.restore(text);
  REQUIRE_THAT(error_of([&] { restored.prepare(shape); }),
               ContainsSubstring("the recorded algorithm does not compute C (8, 16) = A (8, 24) B (24, 16)"));
}

TEST_CASE("the emulated cuBLASLt checks sizes, types and attributes", "[matmul][cuda]") {
  using cuda::detail::MatrixLayout;
  using cuda::detail::Owned;
  cublasLtHandle_t created = nullptr;
  REQUIRE(cublasLtCreate(&created) == CUBLAS_STATUS_SUCCESS);
  const Owned<cublasLtHandle_t> library(created);
  const auto layout = [](cudaDataType_t type, uint64_t rows, uint64_t columns, int64_t ld) {
    cublasLtMatrixLayout_t made = nullptr;
    REQUIRE(cublasLtMatrixLayoutCreate(&made, type, rows, columns, ld) == CUBLAS_STATUS_SUCCESS);
    return MatrixLayout(made);
  };
  cublasLtMatmulDesc_t described = nullptr;
  REQUIRE(cublasLtMatmulDescCreate(&described, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS);
  const Owned<cublasLtMatmulDesc_t> operation(described);
  const auto status = [&](const MatrixLayout& a, const MatrixLayout& b, const MatrixLayout& d) {
    cublasLtMatmulAlgo_t algorithm{};
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(created, described, a.get(), b.get(), d.get(), d.get(), &algorithm, &result);
  };
  const MatrixLayout a = layout(CUDA_R_16BF, 4, 6, 4), b = layout(CUDA_R_16BF, 6, 8, 6),
                     d = layout(CUDA_R_32F, 4, 8, 4);
  REQUIRE(status(a, b, d) == CUBLAS_STATUS_NOT_SUPPORTED);  // not a valid algorithm
  REQUIRE(status(layout(CUDA_R_16BF, 4, 6, 3), b, d) == CUBLAS_STATUS_INVALID_VALUE);
  REQUIRE(status(a, layout(CUDA_R_16BF, 8, 6, 8), d) == CUBLAS_STATUS_INVALID_VALUE);
  REQUIRE(status(a, b, layout(CUDA_R_32F, 4, 7, 4)) == CUBLAS_STATUS_INVALID_VALUE);
  const int32_t transposed = CUBLAS_OP_T;
  REQUIRE(cublasLtMatmulDescSetAttribute(described, CUBLASLT_MATMUL_DESC_TRANSB, &transposed, 8) ==
          CUBLAS_STATUS_INVALID_VALUE);
  REQUIRE(cublasLtMatmulDescSetAttribute(described, CUBLASLT_MATMUL_DESC_TRANSB, &transposed, 4) ==
          CUBLAS_STATUS_SUCCESS);
  REQUIRE(status(a, b, d) == CUBLAS_STATUS_INVALID_VALUE);

  // An operation and preferences with all defaults: no workspace, full alignment.
  cublasLtMatmulPreference_t preference = nullptr;
  REQUIRE(cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS);
  const Owned<cublasLtMatmulPreference_t> owned(preference);
  cublasLtMatmulHeuristicResult_t results[4];
  int found = 0;
  const MatrixLayout b_turned = layout(CUDA_R_16BF, 8, 6, 8);
  REQUIRE(cublasLtMatmulAlgoGetHeuristic(created, described, a.get(), b_turned.get(), d.get(), d.get(), preference, 4,
                                         results, &found) == CUBLAS_STATUS_SUCCESS);
  REQUIRE(found == 1);  // only one supports columns of 8 bytes, and it needs no workspace
  REQUIRE(results[0].workspaceSize == 0);
}
#endif
