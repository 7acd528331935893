// rng.h: counter-based random numbers, keyed by (seed, stream name, index), so that a value depends on what it is for
// and never on who draws it or in which order (contracts 7 and 8).
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

#include "core/check.h"

namespace llmc {

// FNV-1a, 64 bits: turns a parameter's name into a stream number.
inline uint64_t hash_name(std::string_view name) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (unsigned char c : name) h = (h ^ c) * 0x100000001b3ull;
  return h;
}

// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four random words for each
// (key, counter); any counter costs the same, so that a slice of a tensor is drawn without its beginning.
class Philox {
 public:
  Philox(uint64_t seed, std::string_view stream) : seed_(seed), stream_(hash_name(stream)) {}

  std::array<uint32_t, 4> words(uint64_t index) const {
    return rounds({lo(index), hi(index), lo(stream_), hi(stream_)}, lo(seed_), hi(seed_));
  }

  // The block function itself: counter c, key (k0, k1).
  static std::array<uint32_t, 4> rounds(std::array<uint32_t, 4> c, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
      c = {hi(p1) ^ c[1] ^ k0, lo(p1), hi(p0) ^ c[3] ^ k1, lo(p0)};
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return c;
  }

  uint64_t bits(uint64_t index) const {
    const auto w = words(index);
    return (static_cast<uint64_t>(w[0]) << 32) | w[1];
  }

  // In [0, 1), 53 bits.
  double uniform(uint64_t index) const { return static_cast<double>(bits(index) >> 11) * 0x1p-53; }

  // out[i] = mean 0, standard deviation `stddev`, for the global element indices [begin, begin + n): a pure function of
  // the index, four to a Philox call (Box-Muller on the two pairs).
  void fill_normal(float* out, int64_t begin, int64_t n, float stddev) const {
    const int64_t end = begin + n;
    for (int64_t block = begin / 4; block * 4 < end; ++block) {
      const auto w = words(static_cast<uint64_t>(block));
      float z[4];
      box_muller(w[0], w[1], z);
      box_muller(w[2], w[3], z + 2);
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t index = block * 4 + i;
        if (index >= begin && index < end) out[index - begin] = stddev * z[i];
      }
    }
  }

 private:
  static uint32_t lo(uint64_t x) { return static_cast<uint32_t>(x); }
  static uint32_t hi(uint64_t x) { return static_cast<uint32_t>(x >> 32); }
  static void box_muller(uint32_t a, uint32_t b, float* z) {
    const float u = (static_cast<float>(a >> 8) + 0.5f) * 0x1p-24f;  // in (0, 1): its logarithm is finite
    const float radius = std::sqrt(-2.0f * std::log(u));
    const float angle = 2.0f * std::numbers::pi_v<float> * (static_cast<float>(b >> 8) * 0x1p-24f);
    z[0] = radius * std::cos(angle);
    z[1] = radius * std::sin(angle);
  }

  uint64_t seed_, stream_;
};

// A permutation of [0, n) that is computed, not stored: a keyed Feistel network over the smallest even number of bits
// that holds n, walked until it lands inside (Black & Rogaway 2002, "Ciphers with arbitrary finite domains").
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
