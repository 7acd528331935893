// sample.h: generation: a text with a key-value cache, so that each token is computed once, and the next token, which
// is sampled from its logits, with temperature, top-k and top-p.
#pragma once
#include <bit>

#include "core/rng.h"
#include "train/trainer.h"

namespace llmc {

// A text, which grows. The cache stays allocated in the arena as long as this object lives.
class Continuation {
 public:
  explicit Continuation(Trainer& trainer)
      : trainer_(trainer),
        scope_(trainer.arena().scope()),
        cache_(trainer.config(), trainer.arena(), [&](int64_t layer) { return trainer.has_layer(layer); }) {}
  int64_t rows() const { return cache_.rows; }
  void restart(int64_t rows = 0) { cache_.rows = rows; }

  // Appends these tokens to the text, which may have at most T, and returns the logits (V) after the last one. Tokens
  // are computed in powers of two, so that few shapes occur.
  std::vector<float> feed(std::span<const int32_t> tokens) {
    CHECK(!tokens.empty() && rows() + static_cast<int64_t>(tokens.size()) <= trainer_.config().batch.T);
    while (!tokens.empty()) {
      const size_t n = std::bit_floor(tokens.size());
      trainer_.continue_text(tokens.first(n), cache_);
      tokens = tokens.subspan(n);
    }
    return trainer_.logits();
  }

 private:
  Trainer& trainer_;
  Arena::Scope scope_;
  KeyValueCache cache_;
};

struct SampleOptions {
  double temperature = 1.0;  // 0: greedy, always the most likely token
  int64_t top_k = 0;         // only the k most likely tokens; 0: all
  double top_p = 1.0;        // only the smallest set of tokens with this probability (Holtzman et al. 2020)
};

// Thrown if the logits of the next token say nothing.
struct LogitsNotFinite final : Error {
  LogitsNotFinite()
      : Error("the logits of the next token are not finite: the model has diverged; use an earlier checkpoint",
              ExitStatus::diverged) {}
};

// u: uniform in [0, 1). Ties go to the lower id.
inline int32_t sample_token(std::span<const float> logits, const SampleOptions& o, double u) {
  const auto best = std::ranges::max_element(logits);
  const double largest = *best;
  if (!std::isfinite(largest) || std::ranges::any_of(logits, [](float x) { return std::isnan(x); }))
    throw LogitsNotFinite();
  if (o.temperature == 0) return static_cast<int32_t>(best - logits.begin());
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  if (o.top_k > 0 && o.top_k < std::ssize(order)) {
    std::ranges::nth_element(order, order.begin() + o.top_k, before);
    order.resize(static_cast<size_t>(o.top_k));
  }
  std::vector<double> p(logits.size());  // up to a factor
  for (const int32_t id : order)
    p[static_cast<size_t>(id)] =
        std::exp((static_cast<double>(logits[static_cast<size_t>(id)]) - largest) / o.temperature);
  std::erase_if(order, [&](int32_t id) { return p[static_cast<size_t>(id)] == 0; });
  const auto sum = [&](size_t begin, size_t end) {
    double all = 0;
    for (size_t i = begin; i < end; ++i) all += p[static_cast<size_t>(order[i])];
    return all;
  };
  // Puts the likeliest tokens first, as many as are needed for enough(their sum), at most n, the last one in its place;
  // returns their number and their sum without it. Halves what it looks at each time, so that nothing is sorted.
  const auto likeliest = [&](size_t n, auto enough) {
    size_t begin = 0;  // the place of the last one is in [begin, n)
    double before_it = 0;
    while (n - begin > 1) {
      const size_t half = begin + (n - begin) / 2;
      std::ranges::nth_element(order.data() + begin, order.data() + half, order.data() + n, before);
      const double with_half = before_it + sum(begin, half);
      if (enough(with_half)) n = half;
      else begin = half, before_it = with_half;
    }
    return std::pair(n, before_it);
  };
  size_t n = order.size();
  double kept = sum(0, n);
  if (o.top_p < 1) {
    const double wanted = o.top_p * kept;
    std::tie(n, kept) = likeliest(n, [&](double all) { return all >= wanted; });
    kept += p[static_cast<size_t>(order[n - 1])];
  }
  return order[likeliest(n, [&](double all) { return all > u * kept; }).first - 1];
}

// Appends up to `count` tokens to the prompt, which must not be empty, and passes each to `emit`; stops early when emit
// returns false. At the sequence length the older half of the context is dropped. rng draws the tokens.
inline std::vector<int32_t> generate(Trainer& trainer, std::vector<int32_t> tokens, int64_t count,
                                     const SampleOptions& options, const Philox& rng,
                                     const std::function<bool(int32_t)>& emit) {
  const size_t window = static_cast<size_t>(trainer.config().batch.T);
  Continuation sequence(trainer);
  size_t fed = tokens.size() - std::min(tokens.size(), window);  // tokens already in the cache, or dropped
  for (int64_t i = 0; i < count; ++i) {
    if (static_cast<size_t>(sequence.rows()) == window) {
      sequence.restart();
      fed = tokens.size() - (window + 1) / 2;
    }
    const std::vector<float> logits = sequence.feed(std::span(tokens).subspan(fed));
    fed = tokens.size();
    const int32_t token = sample_token(logits, options, rng.uniform(static_cast<uint64_t>(i)));
    tokens.push_back(token);
    if (!emit(token)) break;
  }
  return tokens;
}

}  // namespace llmc
