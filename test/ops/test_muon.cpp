// Muon's ops: what a Newton-Schulz iteration makes of singular values, on either side of a square, in every dtype.
#include "catch2.h"
#include "ops/op_bench.h"

using namespace llmc;

namespace {

// A matrix (rows, columns) in fp64: the reflection of another by a random vector on each side, which keeps its singular
// values.
void reflect(std::mt19937_64& random, double* x, int64_t rows, int64_t columns) {
  std::normal_distribution<double> draw;
  for (const bool left : {true, false}) {
    std::vector<double> v(static_cast<size_t>(left ? rows : columns));
    double square = 0;
    for (double& e : v) e = draw(random), square += e * e;
    const int64_t n = std::ssize(v), others = left ? columns : rows;
    const auto at = [&](int64_t i, int64_t j) -> double& { return left ? x[i * columns + j] : x[j * columns + i]; };
    for (int64_t j = 0; j < others; ++j) {
      double along = 0;
      for (int64_t i = 0; i < n; ++i) along += v[static_cast<size_t>(i)] * at(i, j);
      for (int64_t i = 0; i < n; ++i) at(i, j) -= 2 * along / square * v[static_cast<size_t>(i)];
    }
  }
}

// A matrix of norm 1 whose singular values go from 0.002 of the largest possible to the largest that its norm allows,
// and what the iteration makes of each: the same reflections of the values that five steps give.
struct Known {
  Tensor x, expected;
  std::vector<double> before, after;
};

double stepped(double s, NewtonSchulz coefficients) {
  const bool polar = coefficients == NewtonSchulz::polar_express;
  if (polar) s /= detail::polar_express_margin;
  for (const auto& [a, b, c] : polar ? detail::polar_express_steps : detail::quintic_steps)
    s = a * s + b * s * s * s + c * s * s * s * s * s;
  return s;
}

Known known_matrix(Bench& b, int64_t rows, int64_t columns, NewtonSchulz coefficients) {
  const int64_t n = std::min(rows, columns);
  Known known{b.zeros(DType::fp64, {rows, columns}), b.zeros(DType::fp64, {rows, columns}), {}, {}};
  double square = 0;
  for (int64_t i = 0; i < n; ++i) {  // one large value, the others evenly in their logarithm up to a tenth
    const double s = i == 0 ? 0 : 0.002 * std::pow(50.0, static_cast<double>(i - 1) / static_cast<double>(n - 1));
    known.before.push_back(s), square += s * s;
  }
  known.before[0] = std::sqrt(1 - square);
  for (int64_t i = 0; i < n; ++i) {
    const double s = known.before[static_cast<size_t>(i)];
    known.after.push_back(stepped(s, coefficients));
    known.x.data<double>()[i * columns + i] = s;
    known.expected.data<double>()[i * columns + i] = known.after.back();
  }
  for (const Tensor& t : {known.x, known.expected}) {
    std::mt19937_64 same(7);
    for (int i = 0; i < 3; ++i) reflect(same, t.data<double>(), rows, columns);
  }
  return known;
}

double frobenius(const Tensor& t) { return std::sqrt(dot(t, t)); }

// The largest singular value of a - b, by the power method.
double spectral_distance(const Tensor& a, const Tensor& b) {
  const int64_t rows = a.shape[0], columns = a.shape[1];
  std::vector<double> v(static_cast<size_t>(columns), 1), u(static_cast<size_t>(rows));
  const auto d = [&](int64_t i, int64_t j) {
    return a.data<double>()[i * columns + j] - b.data<double>()[i * columns + j];
  };
  double size = 0;
  for (int turn = 0; turn < 100; ++turn) {
    double square = 0;
    for (int64_t i = 0; i < rows; ++i) {
      u[static_cast<size_t>(i)] = 0;
      for (int64_t j = 0; j < columns; ++j) u[static_cast<size_t>(i)] += d(i, j) * v[static_cast<size_t>(j)];
    }
    for (int64_t j = 0; j < columns; ++j) {
      v[static_cast<size_t>(j)] = 0;
      for (int64_t i = 0; i < rows; ++i) v[static_cast<size_t>(j)] += d(i, j) * u[static_cast<size_t>(i)];
      square += v[static_cast<size_t>(j)] * v[static_cast<size_t>(j)];
    }
    size = std::sqrt(std::sqrt(square));
    for (double& e : v) e /= square > 0 ? std::sqrt(square) : 1;
  }
  return size;
}

}  // namespace

TEST_CASE("Newton-Schulz takes singular values from 0.002 to 1 to the stated range, whichever side is longer",
          "[ops][muon]") {
  for (const NewtonSchulz coefficients : {NewtonSchulz::quintic, NewtonSchulz::polar_express})
    for (const auto& [rows, columns] : {std::pair{24, 40}, {40, 24}, {32, 32}, {1, 7}, {7, 1}}) {
      INFO(name_of(coefficients) << ", " << rows << " x " << columns);
      Bench b;
      const Known known = known_matrix(b, rows, columns, coefficients);
      const bool quintic = coefficients == NewtonSchulz::quintic;
      for (const double s : known.after) REQUIRE((s > (quintic ? 0.68 : 0.85) && s < (quintic ? 1.21 : 1.15)));
      newton_schulz(known.x, coefficients, 1, b.stream);
      b.stream.synchronize();
      REQUIRE(spectral_distance(known.x, known.expected) < 1e-11);
    }
}

TEST_CASE("Newton-Schulz of several matrices has the bits of one after the other", "[ops][muon]") {
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const auto& [rows, columns] : {std::pair{17, 30}, {30, 17}}) {
      Bench b;
      const int64_t B = 3, each = rows * columns;
      const Tensor together = b.as(dtype, b.normal({B, rows, columns})), apart = b.as(dtype, together);
      newton_schulz(together, NewtonSchulz::quintic, 2, b.stream);
      for (int64_t i = 0; i < B; ++i)
        newton_schulz(apart.slice(i * each, {rows, columns}), NewtonSchulz::quintic, 2, b.stream);
      b.stream.synchronize();
      REQUIRE(std::memcmp(together.bytes, apart.bytes, static_cast<size_t>(together.size_bytes())) == 0);
    }
}

TEST_CASE("Newton-Schulz scales its result, by what each kind of scale says", "[ops][muon]") {
  REQUIRE(scale_of(MuonScale::rms, 100, 25) == 2);
  REQUIRE(scale_of(MuonScale::rms, 25, 100) == 2);
  REQUIRE(scale_of(MuonScale::spectral, 100, 25) == 2);
  REQUIRE(scale_of(MuonScale::spectral, 25, 100) == 1);
  Bench b;
  const Known known = known_matrix(b, 12, 20, NewtonSchulz::quintic);
  newton_schulz(known.x, NewtonSchulz::quintic, 3, b.stream);
  b.stream.synchronize();
  for (int64_t i = 0; i < known.x.numel(); ++i)
    REQUIRE(std::abs(known.x.data<double>()[i] - 3 * known.expected.data<double>()[i]) < 1e-11);
}

// Every rounding to bf16 of a matrix M, x or a Gram matrix, moves elements by up to 2^-9 of their size, in all
// directions alike: by the law of the largest singular value of a random matrix, by about 2^-9 |M| (1 / sqrt(rows) +
// 1 / sqrt(columns)) / sqrt(3), |M| its Frobenius norm. Until the end, each of the remaining steps multiplies that by
// at most its slope at 0. A step rounds x once, and its two Gram matrices with as large an effect. fp32: the same with
// 2^-24, and with the sums of its products, of as many elements as a side has.
TEST_CASE("Newton-Schulz in bf16 and fp32 is as near to fp64 as its roundings allow", "[ops][muon]") {
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const NewtonSchulz coefficients : {NewtonSchulz::quintic, NewtonSchulz::polar_express})
      for (const auto& [rows, columns] : {std::pair{96, 160}, {160, 96}}) {
        INFO(name_of(dtype) << " " << name_of(coefficients) << ", " << rows << " x " << columns);
        Bench b;
        const Known known = known_matrix(b, rows, columns, coefficients);
        const double spread = (1 / std::sqrt(rows) + 1 / std::sqrt(columns)) / std::sqrt(3);
        const double unit = dtype == DType::bf16 ? 0x1p-9 : 0x1p-24 * std::sqrt(std::max(rows, columns));
        std::vector<double> values = known.before;
        double bound = 2 * unit * spread;  // of the input, and of its quotient by the norm
        for (size_t step = 0; step < detail::newton_schulz_steps; ++step) {
          const auto& [sa, sb, sc] =
              coefficients == NewtonSchulz::quintic ? detail::quintic_steps[step] : detail::polar_express_steps[step];
          double x = 0, gram = 0, sum = 0, largest = 0;  // square sums of the values of x, x x^T and b x x^T + ...
          for (double& s : values) {
            const double square = s * s, both = sb * square + sc * square * square;
            largest = std::max(largest, s);
            gram += square * square, sum += both * both;
            s = sa * s + both * s, x += s * s;
          }
          const double roundings = std::sqrt(x) + largest * (std::abs(sb) * std::sqrt(gram) + std::sqrt(sum));
          bound = bound * sa + unit * spread * roundings;
        }
        const Tensor found = b.as(dtype, known.x);
        newton_schulz(found, coefficients, 1, b.stream);
        b.stream.synchronize();
        const double distance = spectral_distance(b.as(DType::fp64, found), known.expected);
        INFO("distance " << distance << ", bound " << bound);
        REQUIRE(distance < bound);
        REQUIRE(frobenius(known.expected) > 5);
      }
}

TEST_CASE("the momentum of Muon follows the clipped gradient, and stands still where an update is forbidden",
          "[ops][muon]") {
  for (const double allowed : {1.0, 0.0}) {
    Bench b;
    const int64_t n = 37;
    const Tensor gradient = b.normal({n}), momentum = b.normal({n}), control = b.zeros(DType::fp64, {4});
    control.data<double>()[1] = 0.5, control.data<double>()[2] = allowed;
    const std::vector<double> g(gradient.data<double>(), gradient.data<double>() + n),
        m(momentum.data<double>(), momentum.data<double>() + n);
    muon_direction(gradient, momentum, control, 0.75f, b.stream);
    b.stream.synchronize();
    for (size_t i = 0; i < g.size(); ++i) {
      const double now = allowed > 0 ? 0.75 * m[i] + 0.25 * 0.5 * g[i] : m[i];
      REQUIRE(std::abs(momentum.data<double>()[i] - now) < 1e-12);
      REQUIRE(std::abs(gradient.data<double>()[i] - (allowed > 0 ? 0.75 * now + 0.25 * 0.5 * g[i] : g[i])) < 1e-12);
    }
  }
}

TEST_CASE("a matrix of zeros stays one", "[ops][muon]") {
  Bench b;
  const Tensor x = b.zeros(DType::fp32, {6, 9});
  newton_schulz(x, NewtonSchulz::quintic, 2, b.stream);
  b.stream.synchronize();
  for (int64_t i = 0; i < x.numel(); ++i) REQUIRE(x.data<float>()[i] == 0);
}

TEST_CASE("NorMuon divides rows by the roots of their second moments and leaves the size of the matrix",
          "[ops][muon]") {
  for (const DType dtype : {DType::fp64, DType::fp32, DType::bf16}) {
    Bench b;
    constexpr int64_t rows = 5, columns = 33;
    const Tensor control = b.zeros(DType::fp64, {4}), moments = b.zeros(accumulator_of(dtype), {rows});
    const double unit = dtype == DType::fp64 ? 1e-14 : dtype == DType::fp32 ? 1e-6 : 0x1p-8;
    for (const double allowed : {1.0, 0.0, 1.0}) {
      const Tensor x = b.normal({rows, columns});
      for (int64_t i = 0; i < rows * columns; ++i) x.data<double>()[i] *= 1 + static_cast<double>(i / columns);
      const Tensor given = b.as(dtype, x), before = b.as(DType::fp64, given), old = b.as(DType::fp64, moments);
      control.data<double>()[2] = allowed;
      normalise_rows(given, moments, control, 0.75, b.stream);
      b.stream.synchronize();
      const Tensor now = b.as(DType::fp64, given), second = b.as(DType::fp64, moments);
      REQUIRE(std::abs(std::sqrt(dot(now, now) / dot(before, before)) - 1) < unit);
      std::vector<double> scales;  // by what the divided rows are multiplied
      for (int64_t i = 0; i < rows; ++i) {
        const Tensor row = before.slice(i * columns, {columns}), its = now.slice(i * columns, {columns});
        const double mean = dot(row, row) / columns, was = old.data<double>()[i], is = second.data<double>()[i];
        REQUIRE(std::abs(is - (allowed > 0 ? 0.75 * was + 0.25 * mean : was)) <= 2 * unit * is);
        scales.push_back(std::sqrt(dot(its, its) / dot(row, row)) / row_factor(is));
      }
      for (const double s : scales) REQUIRE(std::abs(s / scales[0] - 1) < 4 * unit);
    }
  }
}

TEST_CASE("NorMuon leaves a matrix of zeros", "[ops][muon]") {
  Bench b;
  const Tensor x = b.zeros(DType::fp32, {4, 9}), moments = b.zeros(DType::fp32, {4}),
               control = b.zeros(DType::fp64, {4});
  control.data<double>()[2] = 1;
  normalise_rows(x, moments, control, 0.75, b.stream);
  b.stream.synchronize();
  for (int64_t i = 0; i < x.numel(); ++i) REQUIRE(x.data<float>()[i] == 0);
}
