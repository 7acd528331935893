// ops_muon.h: Muon (Jordan et al. 2024): the momentum of a matrix becomes the nearest matrix whose singular values are
// all one, by five steps of a Newton-Schulz iteration. Conventions: ops.h.
#pragma once
#include "ops/ops_layers.h"
#include "ops/ops_step.h"

namespace llmc {

inline double scale_of(MuonScale scale, double rows, double columns) {
  return scale == MuonScale::rms ? 0.2 * std::sqrt(std::max(rows, columns)) : std::sqrt(std::max(1.0, rows / columns));
}

namespace detail {

// A step is x = a x + b (x x^T) x + c (x x^T)^2 x.
struct NewtonSchulzStep {
  double a, b, c;
};
inline constexpr size_t newton_schulz_steps = 5;
using NewtonSchulzSteps = std::array<NewtonSchulzStep, newton_schulz_steps>;

inline constexpr NewtonSchulzStep quintic = {3.4445, -4.7750, 2.0315};
inline constexpr NewtonSchulzSteps quintic_steps = {quintic, quintic, quintic, quintic, quintic};
// For singular values from 1e-3 on, with the margin below (the coefficients of modded-nanogpt).
inline constexpr NewtonSchulzSteps polar_express_steps = {{
    {8.156554524902461, -22.48329292557795, 15.878769915207462},
    {4.042929935166739, -2.808917465908714, 0.5000178451051316},
    {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
    {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
    {2.3465413258596377, -1.7097828382687081, 0.42323551169305323},
}};
inline constexpr double polar_express_margin = 1.02;

}  // namespace detail

// The products of newton_schulz() for a matrix.
inline double newton_schulz_flops(int64_t rows, int64_t columns) {
  const double small = static_cast<double>(std::min(rows, columns)),
               large = static_cast<double>(std::max(rows, columns));
  return detail::newton_schulz_steps * (4 * small * small * large + 2 * small * small * small);
}

// With g the gradient times control[1]: momentum = beta momentum + (1 - beta) g; gradient = what Nesterov's momentum
// makes of the two, beta momentum + (1 - beta) g. Nothing changes where control forbids the update.
// gradient, momentum (n); control (4) fp64
inline void muon_direction(Tensor gradient, Tensor momentum, Tensor control, float beta, Stream& stream) {
  CHECK_TENSOR(momentum, gradient.dtype, gradient.numel());
  CHECK_TENSOR(control, DType::fp64, 4);
  RUN_OP(muon_direction, gradient.dtype, 2 * detail::bytes_of({gradient, momentum}), (gradient, momentum),
         gradient.data<A>(), momentum.data<A>(), control.data<double>(), gradient.numel(), A(beta));
}

// x = x / max(margin sqrt(square_sum), 1e-7).   x any shape; square_sum (1) fp64
inline void divide_by_norm(Tensor x, Tensor square_sum, double margin, Stream& stream) {
  CHECK_TENSOR(square_sum, DType::fp64, 1);
  constexpr double least = 1e-7;
  RUN_OP(divide_by_norm, x.dtype, 2 * detail::bytes_of({x}), (x), x.data<X>(), square_sum.data<double>(), x.numel(),
         margin, least);
}

// out = a x + b y, rounded once; out may be x.   y in the accumulator dtype
inline void linear_combination(Tensor out, double a, Tensor x, double b, Tensor y, Stream& stream) {
  CHECK_TENSOR(x, out.dtype, out.shape);
  CHECK_TENSOR(y, accumulator_of(out.dtype), out.shape);
  RUN_OP(linear_combination, out.dtype, detail::bytes_of({out, x, y}), (out), out.data<X>(), A(a), x.data<X>(), A(b),
         y.data<A>(), out.numel());
}

// x (rows, columns), or (B, rows, columns): each matrix = scale times the one with its singular vectors, and singular
// values of about one. Products are of its dtype and work on the smaller side; the norm that it is first divided by is
// exact.
inline void newton_schulz(Tensor x, NewtonSchulz coefficients, double scale, Stream& stream) {
  const int axis = x.shape.rank() - 2;
  const int64_t B = axis > 0 ? x.shape[0] : 1, rows = x.shape[axis], columns = x.shape[axis + 1],
                n = std::min(rows, columns), K = std::max(rows, columns);
  x = x.reshaped({B, rows, columns});
  const bool wide = rows <= columns, polar = coefficients == NewtonSchulz::polar_express;
  const DType sum = accumulator_of(x.dtype);
  auto scope = stream.scratch().scope();
  const Tensor square = stream.scratch().alloc("scratch", "norm of a matrix", DType::fp64, {1});
  const Tensor gram = stream.scratch().alloc("scratch", "Gram matrix", x.dtype, {B, n, n});
  const Tensor product = stream.scratch().alloc("scratch", "product with a Gram matrix", sum, {B, rows, columns});
  const Tensor gram_square = product.slice(0, {B, n, n});
  for (int64_t i = 0; i < B; ++i) {
    const Tensor matrix = x.slice(i * rows * columns, {rows * columns});
    square_sum(square, matrix, stream);
    divide_by_norm(matrix, square, polar ? detail::polar_express_margin : 1, stream);
  }
  const auto multiply = [&](Tensor c, Tensor a, Transpose a_as, Tensor b, Transpose b_as, int64_t inner) {
    detail::matmul("newton_schulz", c, {a, a_as}, {b, b_as}, inner, {}, Accumulate::no, stream);
  };
  using enum Transpose;
  const detail::NewtonSchulzSteps& steps = polar ? detail::polar_express_steps : detail::quintic_steps;
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto [a, b, c] = steps[i];
    const double s = i + 1 == steps.size() ? scale : 1;
    multiply(gram, x, wide ? no : yes, x, wide ? yes : no, K);
    multiply(gram_square, gram, no, gram, no, n);
    linear_combination(gram, b, gram, c, gram_square, stream);
    if (wide) multiply(product, gram, no, x, no, n);
    else multiply(product, x, no, gram, no, n);
    linear_combination(x, s * a, x, s, product, stream);
  }
}

// NorMuon (Li et al. 2025): an orthogonal update is nearly so by columns or by rows alone, and its rows may differ in
// size by far. Each is divided by the root of its second moment, a running mean of its mean square, then all by one
// number, so that the matrix is as large as before. A forbidden update leaves the moments.
// x (rows, columns); second_moments (rows) in the accumulator dtype; control (4) fp64
inline void normalise_rows(Tensor x, Tensor second_moments, Tensor control, double beta2, Stream& stream) {
  const int64_t rows = x.shape[0], columns = x.shape[1];
  CHECK_TENSOR(second_moments, accumulator_of(x.dtype), rows);
  CHECK_TENSOR(control, DType::fp64, 4);
  auto scope = stream.scratch().scope();
  const Tensor sums = stream.scratch().alloc("scratch", "square sums of rows", DType::fp64, {2 * rows + 1});
  RUN_OP(normalise_rows, x.dtype, 3 * detail::bytes_of({x}), (x, second_moments), x.data<X>(), second_moments.data<A>(),
         sums.data<double>(), control.data<double>(), rows, columns, beta2);
}

}  // namespace llmc
