// Attention over several blocks of keys and queries, by every instruction set that this processor has, against its
// definition in fp64; with any number of threads, and no more scratch than planned.
#include "ops/op_bench.h"
#include "ops/sets_here.h"

using namespace llmc;
using cpu::Isa;

namespace {

// Rows of queries, keys and values in one matrix (as of a layer), of which a block takes some.
struct Inputs {
  AttentionBlock s;
  std::vector<double> q, kv, dout;
  std::vector<int32_t> positions;  // or empty

  int64_t group() const { return s.Hq / s.Hkv; }
  int64_t query(int64_t b, int64_t i, int64_t h) const {
    return ((b * s.queries.length + s.queries.first + i) * s.Hq + h) * s.D;
  }
  int64_t key(int64_t b, int64_t j, int64_t h) const {
    return ((b * s.keys.length + s.keys.first + j) * 2 * s.Hkv + h / group()) * s.D;
  }
  int64_t value(int64_t b, int64_t j, int64_t h) const { return key(b, j, h) + s.Hkv * s.D; }
  bool sees(int64_t b, int64_t i, int64_t j) const {
    const int64_t own = i + s.offset;
    return j <= own &&
           (positions.empty() || j >= own - positions[static_cast<size_t>(b * s.queries.length + s.queries.first + i)]);
  }
};
// What attention makes of them: in fp64, or widened from what an instruction set gives.
struct Results {
  std::vector<double> out, lse, dq, dkv;
  double dq_of_out = 0, dkv_of_out = 0;  // how far they may be off because the rows of `out` are, by a unit of each
};

Inputs random_inputs(std::mt19937_64& random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  constexpr int64_t sizes[] = {64, 80, 128, 32, 33, 1, 14, 256};
  const int64_t keys = 1 + below(below(2) ? 40 : 650), queries = 1 + below(below(2) ? 40 : 500), Hkv = 1 + below(2);
  Inputs x{{1 + below(2), Hkv * (1 + below(3)), Hkv, sizes[below(8)], {}, {}}, {}, {}, {}, {}};
  AttentionBlock& s = x.s;
  s.queries = {queries + below(4), 0, queries};
  s.queries.first = s.queries.length - queries;
  s.keys = {keys + below(4), 0, keys};
  s.offset = below(3) == 0 ? std::max<int64_t>(keys - queries, 0) : below(keys + queries) - queries;
  std::normal_distribution<double> draw;
  const auto fill = [&](std::vector<double>& values, int64_t n) {
    values.resize(static_cast<size_t>(n));
    for (double& value : values) value = static_cast<double>(bf16(static_cast<float>(draw(random))));
  };
  fill(x.q, s.B * s.queries.length * s.Hq * s.D);
  fill(x.kv, s.B * s.keys.length * 2 * s.Hkv * s.D);
  fill(x.dout, s.B * s.queries.length * s.Hq * s.D);
  if (below(2)) {
    const int64_t longest = 1 + below(below(2) ? 20 : 400);
    for (int64_t t = 0, at = 0; t < s.B * s.queries.length; ++t, ++at) {
      if (below(longest) == 0) at = 0;
      x.positions.push_back(static_cast<int32_t>(at));
    }
  }
  return x;
}

// Row by row. Of rows that see no key, nothing is said: out and lse are 0.
Results defined(const Inputs& x) {
  const AttentionBlock& s = x.s;
  Results r{std::vector<double>(x.q.size()), std::vector<double>(static_cast<size_t>(s.B * s.Hq * s.queries.length)),
            std::vector<double>(x.q.size()), std::vector<double>(x.kv.size())};
  std::vector<double> dq_of_out(x.q.size()), dkv_of_out(x.kv.size());
  const double scale = 1 / std::sqrt(static_cast<double>(s.D));
  const auto times = [&](const std::vector<double>& a, int64_t i, const std::vector<double>& b, int64_t j) {
    return std::inner_product(a.begin() + i, a.begin() + i + s.D, b.begin() + j, 0.0);
  };
  const auto add = [&](std::vector<double>& to, int64_t i, double factor, const std::vector<double>& from, int64_t j) {
    for (int64_t d = 0; d < s.D; ++d) to[static_cast<size_t>(i + d)] += factor * from[static_cast<size_t>(j + d)];
  };
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t h = 0; h < s.Hq; ++h)
      for (int64_t i = 0; i < s.queries.rows; ++i) {
        std::vector<double> p(static_cast<size_t>(s.keys.rows)), dp = p;
        double total = 0, mean = 0;
        for (size_t j = 0; j < p.size(); ++j)
          if (x.sees(b, i, static_cast<int64_t>(j)))
            total += p[j] = std::exp(scale * times(x.q, x.query(b, i, h), x.kv, x.key(b, static_cast<int64_t>(j), h)));
        if (total == 0) continue;
        r.lse[static_cast<size_t>((b * s.Hq + h) * s.queries.length + s.queries.first + i)] = std::log(total);
        for (size_t j = 0; j < p.size(); ++j) {
          const int64_t value = x.value(b, static_cast<int64_t>(j), h);
          p[j] /= total;
          dp[j] = times(x.dout, x.query(b, i, h), x.kv, value);
          mean += p[j] * dp[j];
          add(r.out, x.query(b, i, h), p[j], x.kv, value);
          add(r.dkv, value, p[j], x.dout, x.query(b, i, h));
        }
        double of_out = 0;  // the mean is taken from dout and out
        for (int64_t d = x.query(b, i, h); d < x.query(b, i, h) + s.D; ++d)
          of_out += std::abs(x.dout[static_cast<size_t>(d)] * r.out[static_cast<size_t>(d)]);
        for (size_t j = 0; j < p.size(); ++j) {
          add(dq_of_out, x.query(b, i, h), scale * p[j] * of_out, x.kv, x.key(b, static_cast<int64_t>(j), h));
          add(dkv_of_out, x.key(b, static_cast<int64_t>(j), h), scale * p[j] * of_out, x.q, x.query(b, i, h));
          const double ds = scale * p[j] * (dp[j] - mean);
          add(r.dq, x.query(b, i, h), ds, x.kv, x.key(b, static_cast<int64_t>(j), h));
          add(r.dkv, x.key(b, static_cast<int64_t>(j), h), ds, x.q, x.query(b, i, h));
        }
      }
  const auto norm = [](const std::vector<double>& v) {
    return std::sqrt(std::inner_product(v.begin(), v.end(), v.begin(), 0.0));
  };
  r.dq_of_out = norm(dq_of_out) / std::max(norm(r.dq), 1e-300);
  r.dkv_of_out = norm(dkv_of_out) / std::max(norm(r.dkv), 1e-300);
  return r;
}

template <class T>
std::vector<T> narrowed(const std::vector<double>& x) {
  std::vector<T> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) store(y[i], static_cast<accumulator_t<T>>(x[i]));
  return y;
}
template <class T>
std::vector<double> widened(const std::vector<T>& x) {
  std::vector<double> y(x.size());
  std::transform(x.begin(), x.end(), y.begin(), [](T value) { return static_cast<double>(value); });
  return y;
}

// Scratch of exactly the planned size, behind which nothing may be written.
struct GuardedScratch {
  std::vector<std::byte> bytes;
  explicit GuardedScratch(int64_t size) : bytes(static_cast<size_t>(size) + 4096, std::byte{0xff}) {}
  ~GuardedScratch() {
    const bool whole = std::all_of(bytes.end() - 4096, bytes.end(), [](std::byte b) { return b == std::byte{0xff}; });
    if (!whole) std::abort();
  }
};

// Requires that rows outside of the block are still NaN, and sets them to 0; then so are all others that are NaN
// wrongly.
template <class A>
void require_outside_untouched(std::vector<A>& x, int64_t B, const SequenceRows& rows, int64_t width) {
  for (int64_t r = 0; r < B * rows.length; ++r)
    if (r % rows.length < rows.first || r % rows.length >= rows.first + rows.rows)
      for (int64_t i = r * width; i < (r + 1) * width; ++i) {
        REQUIRE(std::isnan(static_cast<double>(x[static_cast<size_t>(i)])));
        store(x[static_cast<size_t>(i)], accumulator_t<A>(0));
      }
}

// merges: through running sums, into which the keys are merged in two blocks if there are as many; gradients are added
// to a half. Whatever is to be overwritten is NaN before.
template <class T>
Results computed(const Inputs& x, Isa isa, int threads, bool merges) {
  using A = accumulator_t<T>;
  const AttentionBlock& s = x.s;
  const int64_t width = s.Hq * s.D, kv_width = 2 * s.Hkv * s.D;
  const std::vector<T> q = narrowed<T>(x.q), kv = narrowed<T>(x.kv), dout = narrowed<T>(x.dout);
  std::vector<T> out(q.size(), T(NAN)), dq(merges ? 0 : q.size(), T(NAN)), dkv(merges ? 0 : kv.size(), T(NAN));
  std::vector<A> lse(static_cast<size_t>(s.B * s.Hq * s.queries.length), A(NAN)), sums(q.size()),
      dq_sums(q.size(), A(0.5)), dkv_sums(kv.size(), A(0.5)), largest(lse.size(), -std::numeric_limits<A>::infinity()),
      total(lse.size());
  const AttentionInputs<T> from{{q.data(), width},
                                {kv.data(), kv_width},
                                {kv.data() + s.Hkv * s.D, kv_width},
                                x.positions.empty() ? nullptr : x.positions.data()};
  AttentionOutputs<T, A> to{{out.data(), width}, lse.data()};
  AttentionGradients<T, A> gradients{{dq.data(), width}, {dkv.data(), kv_width}, {dkv.data() + s.Hkv * s.D, kv_width}};
  std::vector<AttentionBlock> blocks = {s};
  if (merges) {
    to = {{}, nullptr, {sums.data(), width}, largest.data(), total.data()};
    gradients = {
        {}, {}, {}, {dq_sums.data(), width}, {dkv_sums.data(), kv_width}, {dkv_sums.data() + s.Hkv * s.D, kv_width}};
    if (const int64_t half = s.keys.rows / 2; half > 0) {
      blocks.push_back(s);
      blocks[0].keys.rows = half;
      blocks[1].keys.first += half, blocks[1].keys.rows -= half, blocks[1].offset -= half;
    }
    for (AttentionBlock& block : blocks) block.all_keys = false;
  }
  const cpu::ProductsOf<T>& products = cpu::products_of<T>(isa);
  for (const AttentionBlock& block : blocks)
    products.attention_forward(to, from,
                               GuardedScratch(cpu::attention_forward_scratch(block, sizeof(A), threads)).bytes.data(),
                               block, threads);
  for (size_t i = 0; merges && i < lse.size(); ++i) {
    lse[i] = total[i] == 0 ? A(0) : largest[i] + std::log(total[i]);
    const size_t b = i / static_cast<size_t>(s.Hq * s.queries.length), t = i % static_cast<size_t>(s.queries.length),
                 h = i / static_cast<size_t>(s.queries.length) % static_cast<size_t>(s.Hq),
                 at = ((b * static_cast<size_t>(s.queries.length) + t) * static_cast<size_t>(s.Hq) + h) *
                      static_cast<size_t>(s.D);
    for (size_t d = at; d < at + static_cast<size_t>(s.D); ++d)
      store(out[d], total[i] == 0 ? A(0) : sums[d] / total[i]);
  }
  if (!merges) {
    require_outside_untouched(out, s.B, s.queries, width);
    require_outside_untouched(lse, s.B * s.Hq, s.queries, 1);
  }
  for (const AttentionBlock& block : blocks)
    products.attention_backward(gradients, dout.data(), out.data(), lse.data(), from,
                                GuardedScratch(cpu::attention_backward_scratch(block, sizeof(A), threads)).bytes.data(),
                                block, threads);
  if (!merges) {
    require_outside_untouched(dq, s.B, s.queries, width);
    require_outside_untouched(dkv, s.B, s.keys, kv_width);
    return {widened(out), widened(lse), widened(dq), widened(dkv)};
  }
  for (auto* gradient : {&dq_sums, &dkv_sums})
    for (A& value : *gradient) value -= A(0.5);
  return {widened(out), widened(lse), widened(dq_sums), widened(dkv_sums)};
}

// Relative distances: what fp32 gives; in bf16, a few roundings to 8 bits, and what the rounding of `out` makes of
// gradients that cancel.
template <class T>
void check(const Inputs& x, bool merges) {
  const Results expected = defined(x);
  const auto distance = [](const std::vector<double>& found, const std::vector<double>& exact) {
    return relative_distance(found.data(), exact.data(), static_cast<int64_t>(found.size()));
  };
  const AttentionBlock& s = x.s;
  INFO("B " << s.B << ", heads " << s.Hq << " and " << s.Hkv << " of " << s.D << ", " << s.queries.rows << " queries, "
            << s.keys.rows << " keys, offset " << s.offset << ", documents " << !x.positions.empty() << ", "
            << name_of(dtype_of<T>()) << (merges ? ", merged" : ""));
  for (const Isa isa : sets_here()) {
    if (std::is_same_v<T, double> && isa != Isa::portable) continue;
    const Results found = computed<T>(x, isa, 1, merges), with_three = computed<T>(x, isa, 3, merges);
    const double unit = sizeof(T) == 8 ? 1e-13 : sizeof(T) == 4 ? 2e-6 : 0x1p-8, of_out = sizeof(T) == 2 ? 0x1p-9 : 0;
    INFO(cpu::name_of(isa) << ": out " << distance(found.out, expected.out) << ", lse "
                           << distance(found.lse, expected.lse) << ", dq " << distance(found.dq, expected.dq)
                           << ", dkv " << distance(found.dkv, expected.dkv));
    REQUIRE(distance(found.out, expected.out) <= unit);
    REQUIRE(distance(found.lse, expected.lse) <= std::min(unit, 2e-6));
    REQUIRE(distance(found.dq, expected.dq) <= 2 * unit + of_out * expected.dq_of_out);
    REQUIRE(distance(found.dkv, expected.dkv) <= 2 * unit + of_out * expected.dkv_of_out);
    for (const auto part : {&Results::out, &Results::lse, &Results::dq, &Results::dkv})
      REQUIRE(found.*part == with_three.*part);
  }
}

void random_attention(int count, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int i = 0; i < count; ++i) {
    const Inputs x = random_inputs(random);
    bool all_see = x.s.offset >= 0;  // a row that sees no key can only be merged
    for (int64_t b = 0; b < x.s.B; ++b)
      for (int64_t r = 0; r < x.s.queries.rows && all_see; ++r) {
        bool any = false;
        for (int64_t j = 0; j < x.s.keys.rows && !any; ++j) any = x.sees(b, r, j);
        all_see = any;
      }
    const bool merges = !all_see || random() % 2 == 0;
    switch (random() % 3) {
      case 0: check<float>(x, merges); break;
      case 1: check<bf16>(x, merges); break;
      default: check<double>(x, merges);
    }
  }
}

}  // namespace

TEST_CASE("random blocks of attention are as defined, by every instruction set, with any threads", "[ops][attention]") {
  random_attention(12, 3);
}

// The product of a score and the scale is off by far more than 1: where an instruction subtracts before it rounds, it
// must not show.
TEST_CASE("scores beyond what fp32 resolves give one key all of the probability, by every instruction set",
          "[ops][attention]") {
  Inputs x{{1, 2, 1, 24, {40, 0, 40}, {40, 0, 40}}, {}, {}, {}, {}};
  std::mt19937_64 random(4);
  std::normal_distribution<double> draw;
  for (auto& [values, heads, size] : {std::tuple{&x.q, 2, 1e6}, {&x.kv, 2, 1e6}, {&x.dout, 2, 1.0}})
    for (int64_t i = 0; i < 40 * heads * 24; ++i)
      values->push_back(static_cast<double>(bf16(static_cast<float>(size * draw(random)))));
  for (const Isa isa : sets_here()) {
    INFO(cpu::name_of(isa));
    const auto check_type = [&]<class T>(T) {
      const Results found = computed<T>(x, isa, 2, false);
      for (int64_t i = 0; i < 40; ++i)
        for (int64_t h = 0; h < 2; ++h) {
          const auto score = [&](int64_t j) {
            return std::inner_product(x.q.begin() + x.query(0, i, h), x.q.begin() + x.query(0, i, h) + 24,
                                      x.kv.begin() + x.key(0, j, h), 0.0);
          };
          int64_t most = 0;
          for (int64_t j = 1; j <= i; ++j)
            if (score(j) > score(most)) most = j;
          for (int64_t d = 0; d < 24; ++d) {
            const double value = x.kv[static_cast<size_t>(x.value(0, most, h) + d)];
            REQUIRE(std::abs(found.out[static_cast<size_t>(x.query(0, i, h) + d)] - value) <= 1e-5 * std::abs(value));
          }
        }
      for (const auto* part : {&found.dq, &found.dkv})
        for (const double value : *part) REQUIRE(std::isfinite(value));
    };
    check_type(float{});
    check_type(bf16{});
  }
}

TEST_CASE("five hundred random blocks of attention are as defined", "[ops][attention][long]") {
  random_attention(500, 1);
}
