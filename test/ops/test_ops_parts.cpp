// Ops on a part of a parameter or of the vocabulary, and ops that merge what several ranks computed.
#include "catch2.h"
#include "ops/op_bench.h"

using namespace llmc;

namespace {

// Rows [row, row + rows) x columns [column, column + columns) of a matrix of `stride` columns.
struct BoxOf {
  int64_t row, rows, column, columns, stride;
  Elements from(int64_t begin) const {
    return {.begin = begin, .first = row * stride + column, .columns = columns, .stride = stride};
  }
};

// Is out the elements of `whole` that `elements` says?
template <class T>
void require_elements(const Tensor& out, const Tensor& whole, const Elements& elements) {
  int64_t different = 0;
  for (int64_t i = 0; i < out.numel(); ++i)
    different += std::memcmp(out.data<T>() + i, whole.data<T>() + elements.index(i), sizeof(T)) != 0;
  INFO(out.numel() << " elements, first " << elements.first << ", columns " << elements.columns << " of "
                   << elements.stride << ", from " << elements.begin);
  REQUIRE(different == 0);
}

// All of it, some rows, columns that begin at multiples of four or not, more elements than are drawn at once.
const BoxOf boxes[] = {{0, 130, 0, 92, 92}, {7, 13, 0, 92, 92},  {0, 130, 4, 40, 92}, {5, 9, 23, 23, 92},
                       {0, 150, 1, 30, 61}, {149, 1, 60, 1, 61}, {3, 100, 17, 43, 61}};

// How a vocabulary is cut: into parts of `each` tokens, the last ones with fewer or none.
std::vector<Vocabulary> parts_of(int64_t V, int64_t parts) {
  const int64_t each = parts == 8 ? 14 : ceil_div(V, parts);  // 14: the last of 8 parts of 97 has none
  std::vector<Vocabulary> cut;
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t first = std::min(V, each * p);
    cut.push_back({first, std::min(V, each * (p + 1)) - first});
  }
  return cut;
}

}  // namespace

TEST_CASE("a part of a parameter has the initial numbers of the whole", "[ops]") {
  Bench b;
  for (const BoxOf& box : boxes)
    for (const int64_t skipped : {0, 3, 4, 29}) {
      const auto scope = b.arena.scope();
      const int64_t whole_size = 151 * box.stride, n = box.rows * box.columns - skipped;
      if (n <= 0) continue;
      const Tensor whole = b.poisoned(DType::fp32, {whole_size}), out = b.poisoned(DType::fp32, {n});
      const Tensor whole16 = b.poisoned(DType::bf16, {whole_size}), out16 = b.poisoned(DType::bf16, {n});
      for (const Tensor& t : {whole, whole16}) init_normal(t, 0.5f, {}, 7, "w", b.stream);
      for (const Tensor& t : {out, out16}) init_normal(t, 0.5f, box.from(skipped), 7, "w", b.stream);
      b.stream.synchronize();
      require_elements<float>(out, whole, box.from(skipped));
      require_elements<bf16>(out16, whole16, box.from(skipped));
    }
}

TEST_CASE("stochastic rounding of a part of a parameter draws the numbers of the whole", "[ops]") {
  Bench b;
  for (const BoxOf& box : boxes)
    for (const int64_t skipped : {0, 3, 4, 29}) {
      const auto scope = b.arena.scope();
      const int64_t whole_size = 151 * box.stride, n = box.rows * box.columns - skipped;
      if (n <= 0) continue;
      const Elements elements = box.from(skipped);
      struct State {
        Tensor weight, moment1, moment2, gradient;
      };
      auto state = [&](int64_t size) {
        return State{b.poisoned(DType::bf16, {size}), b.zeros(DType::fp32, {size}), b.zeros(DType::fp32, {size}),
                     b.poisoned(DType::fp32, {size})};
      };
      const State whole = state(whole_size), part = state(n);
      init_normal(whole.weight, 1, {}, 1, "w", b.stream);
      init_normal(whole.gradient, 1, {}, 2, "w", b.stream);
      b.stream.synchronize();
      for (int64_t i = 0; i < n; ++i) {
        part.weight.data<bf16>()[i] = whole.weight.data<bf16>()[elements.index(i)];
        part.gradient.data<float>()[i] = whole.gradient.data<float>()[elements.index(i)];
      }
      const Tensor control = b.zeros(DType::fp64, {4});
      control.data<double>()[1] = control.data<double>()[2] = 1;
      const OptimizerOptions options{
          .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 1, .seed = 3};
      auto update = [&](const State& s, const Elements& e) {
        update_weights_stochastic(Optimizer::adamw, s.weight, {s.moment1, s.moment2}, s.gradient, control, "w", e,
                                  options, b.stream);
      };
      update(whole, {});
      update(part, elements);
      b.stream.synchronize();
      require_elements<bf16>(part.weight, whole.weight, elements);
      require_elements<float>(part.moment1, whole.moment1, elements);
      require_elements<float>(part.moment2, whole.moment2, elements);
    }
}

TEST_CASE("the parts of a vocabulary embed their own tokens alone", "[ops]") {
  constexpr int64_t N = 150, V = 97, C = 70, stored = 100;
  Bench b;
  for (const DType d : {DType::fp64, DType::bf16})
    for (const int64_t count : {1, 2, 3, 8}) {
      const auto scope = b.arena.scope();
      std::vector<int32_t> ids, places;
      for (int64_t n = 0; n < N; ++n)
        ids.push_back(static_cast<int32_t>(n * n % V)), places.push_back(static_cast<int32_t>(n % 5));
      const Tensor tokens = b.integers(ids), positions = b.integers(places);
      const Tensor wte = b.as(d, b.normal({V, C})), wpe = b.as(d, b.normal({5, C})), dout = b.as(d, b.normal({N, C}));
      const DType grad = accumulator_of(d);
      const Tensor dwte = b.zeros(grad, {V, C}), dwpe = b.zeros(grad, {5, C}), placed = b.poisoned(d, {N, C});
      embedding_forward(placed, tokens, positions, wte, wpe, b.stream);
      embedding_backward(dwte, dwpe, dout, tokens, positions, b.stream);
      const Tensor outs = b.poisoned(d, {count, N, C}), sum = b.poisoned(d, {N, C});
      const auto parts = parts_of(V, count);
      for (size_t p = 0; p < parts.size(); ++p) {
        const Vocabulary part = parts[p];
        const int64_t begin = part.first * C, size = part.size * C;
        const Tensor table = b.poisoned(d, {stored, C}), dtable = b.poisoned(grad, {stored, C}),
                     dplaces = b.zeros(grad, {5, C}), out = outs.slice(static_cast<int64_t>(p) * N * C, {N, C});
        b.stream.synchronize();
        std::memcpy(table.bytes, wte.bytes + begin * size_of(d), static_cast<size_t>(size * size_of(d)));
        std::memset(dtable.bytes, 0, static_cast<size_t>(size * size_of(grad)));
        const Tensor padding = dtable.slice(size, {stored * C - size}), sevens = b.poisoned(grad, padding.shape);
        for (const Tensor& t : {padding, sevens}) fill(t, 7, b.stream);
        embedding_forward(out, tokens, positions, table, {}, b.stream, part);
        embedding_backward(dtable, dplaces, dout, tokens, positions, b.stream, part);
        b.stream.synchronize();
        REQUIRE(bits_of(dtable.slice(0, {size})) == bits_of(dwte.slice(begin, {size})));
        REQUIRE(bits_of(padding) == bits_of(sevens));  // rows of no token
        REQUIRE(bits_of(dplaces) == bits_of(dwpe));
        const std::string zeros(static_cast<size_t>(C * size_of(d)), '\0');
        REQUIRE(std::all_of(ids.begin(), ids.end(), [&, n = 0](int32_t id) mutable {
          return part.has(id) != (bits_of(out.slice(n++ * C, {C})) == zeros);
        }));
        embedding_forward(out, tokens, positions, table, wpe, b.stream, part);  // with positions
        const Tensor other = b.zeros(d, {N, C});
        embedding_forward(other, tokens, positions, table, {}, b.stream, part);
        add_positions(other, positions, wpe, b.stream);
        b.stream.synchronize();
        REQUIRE(bits_of(out) == bits_of(other));
        embedding_forward(out, tokens, positions, table, {}, b.stream, part);
      }
      // Merged, with the positions added once: the whole embedding.
      merge_parts(sum, outs, {}, b.stream);
      add_positions(sum, positions, wpe, b.stream);
      b.stream.synchronize();
      REQUIRE(bits_of(sum) == bits_of(placed));
    }
  const Tensor ids = b.integers({0}), out = b.zeros(DType::fp32, {1, 4}), table = b.zeros(DType::fp32, {8, 4});
  REQUIRE_ERROR(embedding_forward(out, ids, ids, table, {}, b.stream, {4, 9}), "9 tokens from 4 on");
  REQUIRE_ERROR(embedding_backward(table, {}, out, ids, ids, b.stream, {4, 9}), "has 8 rows");
}

TEST_CASE("positions: finite differences; added with one rounding, their gradients in row order", "[ops]") {
  Bench b;
  const Tensor x = b.normal({6, 5}), wpe = b.normal({3, 5}), dout = b.normal({6, 5}),
               dwpe = b.zeros(DType::fp64, {3, 5}), out = b.poisoned(DType::fp64, {6, 5}),
               places = b.integers({0, 1, 2, 2, 0, 1});
  add_positions_backward(dwpe, dout, places, b.stream);
  b.stream.synchronize();
  require_gradient(wpe, dwpe, [&] {
    copy(out, x, b.stream);
    add_positions(out, places, wpe, b.stream);
    b.stream.synchronize();
    return dot(out, dout);
  });
  const Tensor x16 = b.as(DType::bf16, x), wpe16 = b.as(DType::bf16, wpe), dout16 = b.as(DType::bf16, dout);
  const Tensor sum = b.as(DType::bf16, x), sums = b.zeros(DType::fp32, {3, 5}), wte = b.zeros(DType::fp32, {1, 5}),
               both = b.zeros(DType::fp32, {3, 5});
  add_positions(sum, places, wpe16, b.stream);
  add_positions_backward(sums, dout16, places, b.stream);
  embedding_backward(wte, both, dout16, b.integers({0, 0, 0, 0, 0, 0}), places, b.stream);
  b.stream.synchronize();
  for (int64_t i = 0; i < 30; ++i) {
    const bf16 position = wpe16.data<bf16>()[places.data<int32_t>()[i / 5] * 5 + i % 5];
    REQUIRE(sum.data<bf16>()[i].bits ==
            bf16(static_cast<float>(x16.data<bf16>()[i]) + static_cast<float>(position)).bits);
  }
  REQUIRE(bits_of(sums) == bits_of(both));
}

TEST_CASE("parts are merged in order, in the accumulator dtype, and rounded once", "[ops]") {
  Bench b;
  for (const DType d : {DType::fp64, DType::fp32, DType::bf16})
    for (const auto& [P, N, C] : {std::tuple{1, 3, 5}, std::tuple{2, 1, 1}, std::tuple{8, 7, 600}}) {
      const auto scope = b.arena.scope();
      const Tensor parts = b.as(d, b.normal({P, N, C})), bias = b.as(d, b.normal({C}));
      for (const Tensor& with : {bias, Tensor{}}) {
        const Tensor out = b.poisoned(d, {N, C}), flat = b.poisoned(d, {N, C}), right = b.poisoned(d, {N, C});
        merge_parts(out, parts, with, b.stream);
        merge_parts(flat, parts.reshaped({P * N, C}), with, b.stream);
        with_type(d, [&, P = P, N = N, C = C](auto tag) {
          using T = typename decltype(tag)::type;
          using A = accumulator_t<T>;
          for (int64_t i = 0; i < N * C; ++i) {
            A sum = static_cast<A>(parts.data<T>()[i]);
            for (int64_t p = 1; p < P; ++p) sum += static_cast<A>(parts.data<T>()[p * N * C + i]);
            if (!with.empty()) sum += static_cast<A>(with.data<T>()[i % C]);
            right.data<T>()[i] = T(sum);
          }
        });
        b.stream.synchronize();
        REQUIRE(bits_of(out) == bits_of(right));
        REQUIRE(bits_of(flat) == bits_of(right));
      }
    }
  const Tensor out = b.zeros(DType::fp32, {2, 3});
  REQUIRE_ERROR(merge_parts(out, b.zeros(DType::fp32, {7}), {}, b.stream), "7 is not a multiple of 6");
  REQUIRE_ERROR(merge_parts(out, b.zeros(DType::fp32, {2, 3, 2}), {}, b.stream), "merge_parts: parts");
  REQUIRE_ERROR(merge_parts(out, b.zeros(DType::fp32, {2, 2, 3}), b.zeros(DType::fp32, {2}), b.stream),
                "merge_parts: bias");
}

TEST_CASE("the loss of a vocabulary in parts is that of the whole, also with large logits and an empty part", "[ops]") {
  constexpr int64_t N = 9, V = 97, padded = 52, whole_padded = 112;
  const std::vector<int32_t> wanted = {0, 96, 13, -1, 48, 49, 32, 33, 97 - 7};
  Bench b;
  for (const DType d : {DType::fp64, DType::fp32, DType::bf16})
    for (const double spread : {3.0, 1e4})
      for (const int64_t count : {1, 2, 3, 8}) {
        INFO(name_of(d) << ", logits of up to " << spread << ", " << count << " parts");
        const auto scope = b.arena.scope();
        const DType stat = accumulator_of(d);
        const double tolerance = d == DType::fp64 ? 1e-13 : d == DType::fp32 ? 3e-6 : 0x1p-8, scale = 0.25;
        const int64_t columns = count == 1 ? whole_padded : padded;
        const Tensor targets = b.integers(wanted), numbers = b.normal({N, whole_padded}, spread / 3);
        const Tensor whole = b.as(d, numbers), losses = b.poisoned(stat, {N});
        const Tensor logits = b.poisoned(d, {count, N, columns}), stats = b.poisoned(stat, {count, N, 3});
        const auto parts = parts_of(V, count);
        auto row = [&](const Tensor& t, int64_t width, int64_t n) { return t.bytes + n * width * size_of(d); };
        auto of_rank = [](const Tensor& t, size_t p) {
          return t.slice(static_cast<int64_t>(p) * t.numel() / t.shape[0], {t.shape[1], t.shape[2]});
        };
        for (size_t p = 0; p < parts.size(); ++p) {  // the padding stays NaN
          for (int64_t n = 0; n < N; ++n)
            std::memcpy(row(of_rank(logits, p), columns, n), row(whole, whole_padded, n) + parts[p].first * size_of(d),
                        static_cast<size_t>(parts[p].size * size_of(d)));
          const std::string before = bits_of(of_rank(logits, p));
          cross_entropy_stats(of_rank(stats, p), of_rank(logits, p), targets, parts[p], b.stream);
          b.stream.synchronize();
          REQUIRE(bits_of(of_rank(logits, p)) == before);
        }
        if (count == 8) {
          REQUIRE(parts[7].size == 0);
          const Tensor empty = b.as(DType::fp64, of_rank(stats, 7));
          for (int64_t n = 0; n < N; ++n) {
            REQUIRE(empty.data<double>()[3 * n] == -std::numeric_limits<double>::infinity());
            REQUIRE(empty.data<double>()[3 * n + 1] == 0);
            REQUIRE(empty.data<double>()[3 * n + 2] == 0);
          }
        }
        const Tensor expected = b.as(DType::fp64, whole), expected_losses = b.poisoned(DType::fp64, {N});
        const HeadZLoss expected_z{0.01, b.poisoned(DType::fp64, {N})}, z{0.01, b.poisoned(stat, {N})};
        cross_entropy(expected_losses, expected, targets, V, scale, Gradient::yes, b.stream, expected_z);
        std::string losses_of_first;
        for (size_t p = 0; p < parts.size(); ++p) {
          const Tensor mine = of_rank(logits, p), kept = b.poisoned(d, mine.shape);
          copy(kept, mine, b.stream);
          for (const Gradient gradient : {Gradient::no, Gradient::yes}) {
            poison(losses, b.stream);
            poison(z.squares, b.stream);
            cross_entropy_merge(losses, mine, stats, targets, parts[p], scale, gradient, b.stream, z);
            b.stream.synchronize();
            if (losses_of_first.empty()) losses_of_first = bits_of(losses);
            REQUIRE(bits_of(losses) == losses_of_first);  // the same on every rank
            if (gradient == Gradient::no) REQUIRE(bits_of(mine) == bits_of(kept));
          }
          const Tensor got = b.as(DType::fp64, mine), right = b.zeros(DType::fp64, {N, columns});
          for (int64_t n = 0; n < N; ++n)
            std::copy_n(expected.data<double>() + n * whole_padded + parts[p].first, parts[p].size,
                        right.data<double>() + n * columns);
          double error = 0;
          bool zeros = true;  // in the padding and in the ignored row
          for (int64_t i = 0; i < N * columns; ++i) {
            const double found = got.data<double>()[i], exact = right.data<double>()[i];
            error =
                std::max(error, std::isnan(found) ? 1e9 : std::abs(found - exact) / std::max(std::abs(exact), scale));
            if (i % columns >= parts[p].size || wanted[static_cast<size_t>(i / columns)] < 0) zeros &= found == 0;
          }
          INFO("part " << p);
          REQUIRE(error < tolerance);
          REQUIRE(zeros);
        }
        const Tensor got = b.as(DType::fp64, losses);
        REQUIRE(relative_distance(got.data<double>(), expected_losses.data<double>(), N) <
                (d == DType::fp64 ? 1e-14 : 1e-6));
        REQUIRE(got.data<double>()[3] == 0);
        const Tensor squares = b.as(DType::fp64, z.squares);
        REQUIRE(relative_distance(squares.data<double>(), expected_z.squares.data<double>(), N) <
                (d == DType::fp64 ? 1e-14 : 2e-6));
        REQUIRE(squares.data<double>()[3] == 0);
      }
  const Tensor logits = b.zeros(DType::fp32, {1, 8}), stats = b.zeros(DType::fp32, {1, 3}), targets = b.integers({0});
  REQUIRE_ERROR(cross_entropy_stats(stats, logits, targets, {16, 9}, b.stream), "9 tokens from 16 on in 8 columns");
  REQUIRE_ERROR(cross_entropy_stats(stats, logits, targets, {}, b.stream), "cross_entropy_stats: -1 tokens");
}

TEST_CASE("one part that is the whole vocabulary has the loss and the gradients of cross_entropy", "[ops]") {
  Bench b;
  const Tensor numbers = b.normal({5, 24}, 2), targets = b.integers({0, 20, 3, -1, 7});
  for (const DType d : {DType::fp64, DType::fp32, DType::bf16}) {
    const Tensor one = b.as(d, numbers), other = b.as(d, numbers), losses = b.poisoned(accumulator_of(d), {5}),
                 merged = b.poisoned(accumulator_of(d), {5}), stats = b.poisoned(accumulator_of(d), {1, 5, 3});
    cross_entropy(losses, one, targets, 21, 0.5, Gradient::yes, b.stream);
    cross_entropy_stats(stats.reshaped({5, 3}), other, targets, {0, 21}, b.stream);
    cross_entropy_merge(merged, other, stats, targets, {0, 21}, 0.5, Gradient::yes, b.stream);
    b.stream.synchronize();
    REQUIRE(bits_of(one) == bits_of(other));
    REQUIRE(bits_of(losses) == bits_of(merged));
  }
}

TEST_CASE("a copied box has the elements of a loop, in the dtype of the output, and no other changes", "[ops]") {
  Bench b;
  for (const DType to : {DType::fp64, DType::fp32, DType::bf16})
    for (const DType from : {DType::fp64, DType::fp32, DType::bf16})
      for (const auto& [out_at, x_at, sizes] :
           {std::tuple<BoxStrides, BoxStrides, BoxSizes>{{3, 60, 12}, {7, 9, 50}, {3, 4, 5}},
            {{0, 40, 10}, {0, 40, 10}, {4, 4, 10}},
            {{1, 0, 70}, {2, 0, 1}, {1, 3, 40}},
            {{5, 0, 0}, {5, 0, 0}, {1, 1, 77}}}) {
        const Tensor x = b.as(from, b.normal({250})), out = b.poisoned(to, {250}), expected = b.poisoned(to, {250}),
                     converted = b.as(to, x);
        for (int64_t i = 0; i < sizes.outer; ++i)
          for (int64_t j = 0; j < sizes.inner; ++j)
            for (int64_t k = 0; k < sizes.run; ++k)
              std::memcpy(expected.slice(out_at.begin + i * out_at.outer + j * out_at.inner + k, {1}).bytes,
                          converted.slice(x_at.begin + i * x_at.outer + j * x_at.inner + k, {1}).bytes,
                          static_cast<size_t>(size_of(to)));
        copy_box(out, out_at, x, x_at, sizes, b.stream);
        b.stream.synchronize();
        INFO(name_of(from) << " to " << name_of(to));
        REQUIRE(bits_of(out) == bits_of(expected));
      }
  const Tensor nans = b.poisoned(DType::bf16, {6}), out = b.zeros(DType::bf16, {6});
  nans.bytes[0] = std::byte{0x81}, nans.bytes[1] = std::byte{0x7f};  // a signalling NaN
  copy_box(out, {0, 0, 3}, nans, {0, 0, 3}, {1, 2, 3}, b.stream);
  b.stream.synchronize();
  REQUIRE(bits_of(out) == bits_of(nans));
  REQUIRE_ERROR(copy_box(out, {0, 0, 3}, nans, {1, 0, 3}, {1, 2, 3}, b.stream), "copy_box: a box is not in test (6)");
  REQUIRE_ERROR(copy_box(out, {-1, 0, 3}, nans, {0, 0, 3}, {1, 2, 3}, b.stream), "copy_box: a box is not in test (6)");
}

TEST_CASE("square sums add up, and the scalars of tensor-parallel ranks are combined in the order of the contract",
          "[ops]") {
  Bench b;
  const Tensor x = b.normal({70001}), y = b.normal({30}), sum = b.poisoned(DType::fp64, {1}),
               each = b.poisoned(DType::fp64, {2});
  square_sum(sum, x, b.stream);
  square_sum(sum, y, b.stream, Accumulate::yes);
  square_sum(each.slice(0, {1}), x, b.stream);
  square_sum(each.slice(1, {1}), y, b.stream);
  // 2 replicas x 3 shards x 2 tensor-parallel ranks, 2 units: rank r has loss 2^r, notices r and 11 - r, of which the
  // largest are those of the last and the first rank, and 100 r + u for unit u.
  const Tensor gathered = b.poisoned(DType::fp64, {12, 5}), loss = b.poisoned(DType::fp64, {1}),
               notices = b.poisoned(DType::fp64, {2}), sums = b.poisoned(DType::fp64, {2 * 2 * 3});
  for (int64_t r = 0; r < 12; ++r) {
    double* row = gathered.data<double>() + 5 * r;
    row[0] = std::ldexp(1, static_cast<int>(r)), row[1] = static_cast<double>(r), row[2] = 11 - row[1];
    row[3] = 100 * row[1], row[4] = row[3] + 1;
  }
  combine_scalars(loss, notices, sums, gathered, 3, 2, 1, b.stream);
  b.stream.synchronize();
  REQUIRE(sum.data<double>()[0] == each.data<double>()[0] + each.data<double>()[1]);
  REQUIRE(loss.data<double>()[0] == 1 + 4 + 16 + 64 + 256 + 1024);
  REQUIRE((notices.data<double>()[0] == 11 && notices.data<double>()[1] == 11));
  const std::vector<double> found(sums.data<double>(), sums.data<double>() + 12);
  REQUIRE(found == std::vector<double>{0, 200, 400, 100, 300, 500, 1, 201, 401, 101, 301, 501});
  REQUIRE_ERROR(combine_scalars(loss, notices, sums, gathered, 3, 5, 1, b.stream),
                "12 ranks are not 1 stages of replicas of 3 shards x 5");
}

TEST_CASE("the gradient of a bias alone has the bits that it has beside the weight's", "[ops]") {
  for (const DType d : {DType::fp64, DType::bf16}) {
    Bench b;
    const Tensor x = b.as(d, b.normal({70, 5})), dout = b.as(d, b.normal({70, 9}));
    const DType grad = accumulator_of(d);
    const Tensor dw = b.zeros(grad, {9, 5}), beside = b.zeros(grad, {9}), alone = b.zeros(grad, {9});
    linear_backward_weight(dw, beside, dout, x, Accumulate::yes, b.stream);
    linear_backward_bias(alone, dout, b.stream);
    b.stream.synchronize();
    REQUIRE(bits_of(alone) == bits_of(beside));
    const Tensor wide = b.as(DType::fp64, dout), sums = b.as(DType::fp64, alone);
    for (int64_t o = 0; o < 9; ++o) {
      double sum = 0;
      for (int64_t n = 0; n < 70; ++n) sum += wide.data<double>()[n * 9 + o];
      REQUIRE(std::abs(sums.data<double>()[o] - sum) < (d == DType::fp64 ? 1e-12 : 1e-4));
    }
    REQUIRE_ERROR(linear_backward_bias(b.zeros(grad, {8}), dout, b.stream), "linear_backward_bias: dbias");
  }
}
