// Optimizer state in few bits: codes against plain references, the CPU op against the update in fp32, kernels against
// the CPU op.
#include <cmath>
#include <vector>

#include "cuda/device_test.h"
#include "ops/cpu/small_state.h"
#include "ops/cuda/small_state.cuh"

using namespace llmc;

namespace {

constexpr OptimizerOptions options = {
    .lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 3, .seed = 5};
constexpr double allowed[] = {7.0, 0.5, 1.0};
constexpr int64_t some_blocks = 5, n = some_blocks * state_block, first = 3 * state_block;

// Sizes that differ by 2^8, as those of the gradients of a tensor do.
std::vector<float> gradients(uint64_t seed) {
  std::vector<float> x = normal_values<float>(n, seed);
  for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)] *= std::ldexp(1.0f, static_cast<int>(i % 9) - 8);
  return x;
}

// The numbers of a slot, in host memory.
struct Slot {
  DType dtype;
  std::vector<float> fp32 = std::vector<float>(n);
  std::vector<bf16> half = std::vector<bf16>(n);
  std::vector<uint8_t> codes = std::vector<uint8_t>(n);
  std::vector<float> scales = std::vector<float>(n / state_block);

  bool has_scales() const { return size_of(dtype) == 1; }
  StateArray array() {
    void* values = dtype == DType::fp32   ? static_cast<void*>(fp32.data())
                   : dtype == DType::bf16 ? static_cast<void*>(half.data())
                                          : codes.data();
    return {dtype, values, has_scales() ? scales.data() : nullptr};
  }
  float operator[](int64_t i) const {
    const size_t at = static_cast<size_t>(i);
    const float scale = scales[at / state_block];
    if (dtype == DType::bf16) return static_cast<float>(half[at]);
    if (dtype == DType::e4m3) return static_cast<float>(e4m3{codes[at]}) * scale;
    if (dtype == DType::e5m3) return static_cast<float>(e5m3{codes[at]}) * scale;
    return fp32[at];
  }
};

struct Weights {
  Masters masters;
  std::vector<float> fp32;
  std::vector<bf16> half = std::vector<bf16>(n);
  std::vector<int16_t> lower = std::vector<int16_t>(n);

  explicit Weights(Masters m) : masters(m), fp32(normal_values<float>(n, 1)) {
    for (size_t i = 0; i < fp32.size(); ++i) {
      fp32[i] = splittable(fp32[i]);
      half[i] = bf16(fp32[i]);
      lower[i] = lower_half(fp32[i]);
    }
  }
  void into(SmallUpdate& u) {
    u.masters = masters;
    u.weight = masters == Masters::weights ? static_cast<void*>(fp32.data()) : half.data();
    u.master = masters == Masters::copy    ? static_cast<void*>(fp32.data())
               : masters == Masters::split ? lower.data()
                                           : nullptr;
  }
};

SmallUpdate update_of(int64_t step, Weights& weights, Slot& one, Slot& two, const std::vector<float>& gradient) {
  SmallUpdate u{.slots = {one.array(), two.array()},
                .gradient = gradient.data(),
                .control = allowed,
                .first = first,
                .n = n,
                .words = state_words(options.seed, "a unit", step),
                .weight_words = rounding_words(options.seed, "a unit", step)};
  weights.into(u);
  return u;
}
void run_on_cpu(Optimizer optimizer, int64_t steps, Weights& weights, Slot& one, Slot& two) {
  for (int64_t step = 1; step <= steps; ++step) {
    OptimizerOptions o = options;
    o.step = step;
    const std::vector<float> gradient = gradients(static_cast<uint64_t>(step));
    cpu::update_small_state(optimizer, update_of(step, weights, one, two, gradient), o);
  }
}

}  // namespace

TEST_CASE("codes in 8 bits: every one is a number that rounds to itself, in order", "[optimizer]") {
  float last = -1;
  for (int code = 0; code < 256; ++code) {
    const float x = static_cast<float>(e5m3{static_cast<uint8_t>(code)});
    REQUIRE(x > last);
    last = x;
    REQUIRE(e5m3::of(x).bits == code);
    for (const uint32_t random : {0u, 0x8000u, 0xffffu}) REQUIRE(e5m3::stochastic(x, random).bits == code);
    const e4m3 y{static_cast<uint8_t>(code)};
    if ((code & 0x7f) == 0x7f) continue;  // NaN
    for (const uint32_t random : {0u, 0x8000u, 0xffffu})
      REQUIRE(static_cast<float>(e4m3::stochastic(static_cast<float>(y), random)) == static_cast<float>(y));
  }
  REQUIRE(last == e5m3::largest);
  REQUIRE(e5m3::of(1e-30f).bits == 1);
  REQUIRE(e5m3::stochastic(1e-30f, 0).bits == 1);
  for (const float largest : {1e-38f, 3.0f, 122880.0f, 122881.0f, 1e30f, 3e38f}) {
    REQUIRE(largest / fp8_scale<e5m3>(largest) <= e5m3::largest);
    REQUIRE((fp8_scale<e5m3>(largest) == 0x1p-111f || largest / fp8_scale<e5m3>(largest) > e5m3::largest / 2));
  }
}

TEST_CASE("stochastic rounding to 8 bits is unbiased, to one of the two neighbours", "[optimizer]") {
  for (const float x : {300.5f, -1.03f, 0.0171f, 0.0045f, 0.0007f}) {
    const float size = std::abs(x), signed_step = std::max(size * 0.125f, 0x1p-9f), step = size * 0.125f;
    double mean4 = 0, mean5 = 0;
    bool near = true;
    for (uint32_t random = 0; random < 0x10000u; ++random) {
      const float a = static_cast<float>(e4m3::stochastic(x, random)),
                  b = static_cast<float>(e5m3::stochastic(size, random));
      near = near && std::abs(a - x) < signed_step && std::abs(b - size) < step;
      mean4 += static_cast<double>(a) / 0x10000, mean5 += static_cast<double>(b) / 0x10000;
    }
    REQUIRE(near);
    // Over all 2^16 words the mean is off by less than two words' share of the distance between the neighbours.
    REQUIRE(std::abs(mean4 - static_cast<double>(x)) <= static_cast<double>(signed_step) * 0x1p-15);
    REQUIRE(std::abs(mean5 - static_cast<double>(size)) <= static_cast<double>(step) * 0x1p-15);
  }
}

TEST_CASE("a bf16 weight and 16 bits are a master in fp32, ties included", "[optimizer]") {
  const auto joins = [](uint32_t bits) {
    const float master = splittable(std::bit_cast<float>(bits));
    return std::bit_cast<uint32_t>(joined_halves(bf16::rounded_bits(master), lower_half(master))) ==
           std::bit_cast<uint32_t>(master);
  };
  for (uint32_t upper = 0; upper < 0x7f80u; upper += 57)
    for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      REQUIRE((joins(upper << 16 | lower) && joins(0x80000000u | upper << 16 | lower)));
  REQUIRE(splittable(0x1.0102p0f) == 0x1.0102p0f);  // no tie
  REQUIRE(splittable(0x1.01p0f) < 0x1.01p0f);       // between 1, even, and 1 + 2^-7
  REQUIRE(bf16::rounded_bits(splittable(0x1.01p0f)) == bf16::rounded_bits(0x1.01p0f));
  REQUIRE(splittable(0x1.03p0f) == 0x1.03p0f);  // the tie that rounds up
}

TEST_CASE("state in fp32 and masters in halves: the update in fp32, bit for bit", "[optimizer]") {
  for (const Optimizer optimizer : {Optimizer::adamw, Optimizer::lion, Optimizer::sgd}) {
    Weights split(Masters::split), copy(Masters::copy), plain(Masters::copy);
    Slot s1{DType::fp32}, s2{DType::fp32}, c1{DType::fp32}, c2{DType::fp32}, p1{DType::fp32}, p2{DType::fp32};
    run_on_cpu(optimizer, 5, split, s1, s2);
    run_on_cpu(optimizer, 5, copy, c1, c2);
    for (int64_t step = 1; step <= 5; ++step) {
      OptimizerOptions o = options;
      o.step = step;
      cpu::update_weights(optimizer, plain.half.data(), plain.fp32.data(), p1.fp32.data(), p2.fp32.data(),
                          gradients(static_cast<uint64_t>(step)).data(), allowed, n, o);
    }
    REQUIRE(s1.fp32 == c1.fp32);
    REQUIRE(plain.fp32 == copy.fp32);
    for (size_t i = 0; i < copy.fp32.size(); ++i) {
      REQUIRE(split.half[i].bits == copy.half[i].bits);
      REQUIRE(joined_halves(split.half[i].bits, split.lower[i]) == copy.fp32[i]);
    }
  }
}

TEST_CASE("moments in few bits follow those in fp32 within the stated error", "[optimizer]") {
  for (const auto& [first_dtype, second_dtype] :
       {std::pair{DType::bf16, DType::bf16}, {DType::e4m3, DType::e5m3}, {DType::fp32, DType::e5m3}}) {
    INFO(name_of(first_dtype) << ", " << name_of(second_dtype));
    Weights weights(Masters::copy), reference(Masters::copy);
    Slot one{first_dtype}, two{second_dtype}, m{DType::fp32}, v{DType::fp32};
    run_on_cpu(Optimizer::adamw, 1, weights, one, two);
    run_on_cpu(Optimizer::adamw, 1, reference, m, v);
    REQUIRE(weights.fp32 == reference.fp32);  // a step reads what was stored before it
    for (int64_t block = 0; block < n; block += state_block) {
      float largest = 0, largest_square = 0;
      for (int64_t i = block; i < block + state_block; ++i) {
        largest = std::max(largest, std::abs(m[i]));
        largest_square = std::max(largest_square, v[i]);
      }
      for (int64_t i = block; i < block + state_block; ++i) {
        const float step = first_dtype == DType::bf16 ? 0x1p-7f : 0x1p-3f;
        REQUIRE(std::abs(one[i] - m[i]) <= std::max(step * std::abs(m[i]), 0x1p-16f * largest));
        const float least =
            second_dtype == DType::bf16 ? 0x1p-7f * v[i] : std::max(0x1p-3f * v[i], 0x1p-30f * largest_square);
        REQUIRE(std::abs(two[i] - v[i]) <= least);
        REQUIRE((two[i] > 0) == (v[i] > 0));
      }
    }
  }
}

TEST_CASE("random words belong to elements: a part of a segment is rounded as in the whole", "[optimizer]") {
  Weights whole(Masters::none), parts(Masters::none);
  Slot w1{DType::e4m3}, w2{DType::e5m3}, p1{DType::e4m3}, p2{DType::e5m3};
  const std::vector<float> gradient = gradients(1);
  SmallUpdate all = update_of(1, whole, w1, w2, gradient);
  cpu::update_small_state(Optimizer::adamw, all, options);
  for (int64_t begin = 0; begin < n; begin += 2 * state_block) {
    SmallUpdate u = update_of(1, parts, p1, p2, gradient);
    u.weight = parts.half.data() + begin;
    for (StateArray& s : u.slots) {
      s.values = static_cast<uint8_t*>(s.values) + begin;
      s.scales += begin / state_block;
    }
    u.gradient += begin, u.first += begin, u.n = std::min(2 * state_block, n - begin);
    cpu::update_small_state(Optimizer::adamw, u, options);
  }
  REQUIRE(w1.codes == p1.codes);
  REQUIRE(w2.codes == p2.codes);
  REQUIRE(w1.scales == p1.scales);
  for (size_t i = 0; i < whole.half.size(); ++i) REQUIRE(whole.half[i].bits == parts.half[i].bits);
}

TEST_CASE("kernels on state in few bits match the CPU", "[optimizer][cuda]") {
  const auto [optimizer, one, two] = GENERATE(
      std::tuple(Optimizer::adamw, DType::e4m3, DType::e5m3), std::tuple(Optimizer::adamw, DType::bf16, DType::bf16),
      std::tuple(Optimizer::adamw, DType::fp32, DType::e5m3), std::tuple(Optimizer::lion, DType::e4m3, DType::fp32));
  const Masters masters = GENERATE(Masters::weights, Masters::copy, Masters::split, Masters::none);
  Weights weights(masters), before(masters);
  Slot s1{one}, s2{two};
  run_on_cpu(optimizer, 2, weights, s1, s2);
  Slot start1{one}, start2{two};
  Weights start(masters);
  run_on_cpu(optimizer, 1, start, start1, start2);
  const auto run = [&]() -> Outputs {
    const std::vector<float> gradient = gradients(2);
    DeviceArray<float> wide(start.fp32), gradients_there(gradient), one_fp32(start1.fp32), two_fp32(start2.fp32),
        one_scales(start1.scales), two_scales(start2.scales);
    DeviceArray<bf16> half(start.half), one_half(start1.half), two_half(start2.half);
    DeviceArray<int16_t> lower(start.lower);
    DeviceArray<uint8_t> one_codes(start1.codes), two_codes(start2.codes);
    DeviceArray<double> control(std::vector<double>(std::begin(allowed), std::end(allowed)));
    SmallUpdate u = update_of(2, start, start1, start2, gradient);
    u.gradient = gradients_there, u.control = control;
    if (u.weight != nullptr) u.weight = masters == Masters::weights ? static_cast<void*>(wide + 0) : half + 0;
    if (u.master != nullptr) u.master = masters == Masters::copy ? static_cast<void*>(wide + 0) : lower + 0;
    const auto there = [](StateArray& a, float* fp32, bf16* halves, uint8_t* codes, float* scales) {
      a.values = a.dtype == DType::fp32   ? static_cast<void*>(fp32)
                 : a.dtype == DType::bf16 ? static_cast<void*>(halves)
                                          : codes;
      if (a.scales != nullptr) a.scales = scales;
    };
    there(u.slots[0], one_fp32, one_half, one_codes, one_scales);
    there(u.slots[1], two_fp32, two_half, two_codes, two_scales);
    OptimizerOptions o = options;
    o.step = 2;
    cuda::update_small_state(optimizer, u, o, nullptr);
    Slot now1{one}, now2{two};
    now1.fp32 = one_fp32.host(), now1.half = one_half.host(), now1.codes = one_codes.host(),
    now1.scales = one_scales.host();
    now2.fp32 = two_fp32.host(), now2.half = two_half.host(), now2.codes = two_codes.host(),
    now2.scales = two_scales.host();
    std::vector<float> a, b, masters_now;
    for (int64_t i = 0; i < n; ++i) a.push_back(now1[i]), b.push_back(now2[i]);
    return {{"weight", half.host()}, {"master", wide.host()}, {"moment1", a}, {"moment2", b}};
  };
  std::vector<float> a, b;
  for (int64_t i = 0; i < n; ++i) a.push_back(s1[i]), b.push_back(s2[i]);
  // A contraction may move a number across a random word: then it is one step of its code off.
  check_kernel(run, {{"weight", weights.half}, {"master", weights.fp32}, {"moment1", a}, {"moment2", b}}, 1e-2);
}
