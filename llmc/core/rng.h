// rng.h: counter-based random numbers keyed by (seed, stream name, index), so that a value depends on what it is for,
// never on which rank draws it or in what order (contracts 7 and 8).
#pragma once
#include <bit>
#include <numbers>

#include "core/check.h"

namespace llmc {

// FNV-1a, 64 bits: turns a parameter's name into a stream number.
inline uint64_t hash_name(std::string_view name) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (unsigned char c : name) h = (h ^ c) * 0x100000001b3ull;
  return h;
}

// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four random words per (key,
// counter). Every counter costs the same: a slice of a tensor is drawn without what precedes it. constexpr: kernels
// call it too.
class Philox {
 public:
  Philox(uint64_t seed, std::string_view stream) : seed_(seed), stream_(hash_name(stream)) {}

  constexpr std::array<uint32_t, 4> words(uint64_t index) const {
    return rounds({lo(index), hi(index), lo(stream_), hi(stream_)}, lo(seed_), hi(seed_));
  }

  // The block function itself: counter c, key (k0, k1).
  static constexpr std::array<uint32_t, 4> rounds(std::array<uint32_t, 4> c, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
      c = {hi(p1) ^ c[1] ^ k0, lo(p1), hi(p0) ^ c[3] ^ k1, lo(p0)};
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return c;
  }

  constexpr uint64_t bits(uint64_t index) const {
    const auto w = words(index);
    return (static_cast<uint64_t>(w[0]) << 32) | w[1];
  }

  // In [0, 1), 53 bits.
  constexpr double uniform(uint64_t index) const { return static_cast<double>(bits(index) >> 11) * 0x1p-53; }

  // Standard normal values of elements 4 block to 4 block + 3.
  constexpr std::array<float, 4> normals(uint64_t block) const {
    const auto w = words(block);
    const auto first = box_muller(w[0], w[1]), second = box_muller(w[2], w[3]);
    return {first[0], first[1], second[0], second[1]};
  }

  // out[i] = the normal value of global element begin + i: mean 0, standard deviation `stddev`.
  void fill_normal(float* out, int64_t begin, int64_t n, float stddev) const {
    const int64_t end = begin + n;
    for (int64_t block = begin / 4; block * 4 < end; ++block) {
      const auto z = normals(static_cast<uint64_t>(block));
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t index = block * 4 + i;
        if (index >= begin && index < end) out[index - begin] = stddev * z[static_cast<size_t>(i)];
      }
    }
  }

 private:
  static constexpr uint32_t lo(uint64_t x) { return static_cast<uint32_t>(x); }
  static constexpr uint32_t hi(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

  // Two normal values from two words (Box & Muller 1958), using only operations that IEEE 754 rounds in one way, so
  // that every compiler, processor and GPU gets the same bits; libm functions differ. Sums that contain a product are
  // written as fma, or each compiler would decide for itself.
  static constexpr std::array<float, 2> box_muller(uint32_t a, uint32_t b) {
    const float u = (static_cast<float>(a >> 8) + 0.5f) * 0x1p-24f;  // in (0, 1]: its logarithm is finite
    const float radius = std::sqrt(-2.0f * logarithm(u));
    const auto [cosine, sine] = cos_sin(b >> 8);
    return {radius * cosine, radius * sine};
  }

  // log u = log m + k log 2 with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh s, s = (m - 1) / (m + 1), by its series.
  static constexpr float logarithm(float u) {
    const int32_t bits = std::bit_cast<int32_t>(u), k = (bits - 0x3f3504f3) >> 23;  // sqrt(1/2)
    const float m = std::bit_cast<float>(bits - (k << 23)), s = (m - 1.0f) / (m + 1.0f), z = s * s;
    float series = std::fma(z, 1.0f / 9, 1.0f / 7);
    series = std::fma(z, series, 1.0f / 5);
    series = std::fma(z, series, 1.0f / 3);
    return std::fma(static_cast<float>(k), std::numbers::ln2_v<float>, std::fma(2.0f * s * z, series, 2.0f * s));
  }

  // Cosine and sine of `turn` / 2^24 of a full turn: whole quarters, and a remainder within an eighth by Taylor series.
  static constexpr std::array<float, 2> cos_sin(uint32_t turn) {
    const uint32_t quarters = (turn + (1u << 21)) >> 22;
    const int32_t rest = static_cast<int32_t>(turn) - static_cast<int32_t>(quarters << 22);
    const float x = static_cast<float>(rest) * (2 * std::numbers::pi_v<float> * 0x1p-24f), z = x * x;
    float s = std::fma(z, 1.0f / 362880, -1.0f / 5040);
    s = std::fma(z, s, 1.0f / 120);
    s = std::fma(z, s, -1.0f / 6);
    s = std::fma(x * z, s, x);
    float c = std::fma(z, -1.0f / 3628800, 1.0f / 40320);
    c = std::fma(z, c, -1.0f / 720);
    c = std::fma(z, c, 1.0f / 24);
    c = std::fma(z, c, -1.0f / 2);
    c = std::fma(z, c, 1.0f);
    switch (quarters % 4) {
      case 0: return {c, s};
      case 1: return {-s, c};
      case 2: return {-c, -s};
      default: return {s, -c};
    }
  }

  uint64_t seed_, stream_;
};

// A permutation of [0, n) that is computed, not stored: a keyed Feistel network over the smallest even number of bits
// that holds n, repeated until the result is below n (Black & Rogaway 2002, "Ciphers with arbitrary finite domains").
class Permutation {
 public:
  Permutation(int64_t n, uint64_t seed, std::string_view stream) : n_(static_cast<uint64_t>(n)), rng_(seed, stream) {
    CHECK(n > 0);
    while ((uint64_t{1} << (2 * half_bits_)) < n_) ++half_bits_;
  }
  int64_t operator()(int64_t index) const {
    CHECK(index >= 0 && static_cast<uint64_t>(index) < n_);
    uint64_t x = static_cast<uint64_t>(index);
    do x = encrypt(x);
    while (x >= n_);
    return static_cast<int64_t>(x);
  }

 private:
  uint64_t encrypt(uint64_t x) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = x >> half_bits_, right = x & mask;
    for (uint64_t round = 0; round < 6; ++round) {
      const uint64_t mixed = left ^ (rng_.bits((round << 40) ^ right) & mask);
      left = right;
      right = mixed;
    }
    return (left << half_bits_) | right;
  }

  uint64_t n_;
  Philox rng_;
  int half_bits_ = 1;
};

}  // namespace llmc
