// continuation.h: incremental generation: a text with a key-value cache, so that each token is computed once.
#pragma once
#include <bit>

#include "train/trainer.h"

namespace llmc {

// The cache stays allocated in the arena as long as this object lives.
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

}  // namespace llmc
