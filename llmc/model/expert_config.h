// expert_config.h: the experts of a model.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/types.h"

namespace llmc {

// The experts of sparse layers (Shazeer et al. 2017): for each token the router chooses some of them, whose outputs are
// added with weights: their scores, normalised or not, times the scaling.
struct Experts {
  int64_t count = 0;         // E; 0: a dense model
  int64_t per_token = 0;     // k
  int64_t width = 0;         // of the feed-forward of each expert
  int64_t shared = 0;        // width of the expert that every token passes through; 0: none
  bool shared_gate = false;  // its output is multiplied by the sigmoid of a product of the token and a vector
  RouterScores scores = RouterScores::softmax;
  bool normalised = false;  // the scores of the chosen experts are divided by their sum
  float scaling = 1;
  int64_t every = 1;                       // layers l with (l + 1) % every == 0 are sparse
  std::vector<int64_t> dense_layers = {};  // except these
  double aux_loss = 0;                     // the coefficient of the balancing loss, as config.json has it
  bool adds_aux_loss = false;              // whether transformers adds that loss ("output_router_logits")

  // Of the part that one rank computes: ranks that share the experts of a layer, and the rows that it has room for,
  // over those that it gets if all experts are chosen equally often.
  int64_t ranks = 1;
  double imbalance = 1;
  bool spread = false;  // a sequence is spread over context-parallel ranks
  int64_t own() const { return count / ranks; }
  // Rows of its experts, if every rank has S rows.
  int64_t room(int64_t S) const {
    const int64_t share = per_token * S;
    return ranks == 1 ? share : static_cast<int64_t>(std::ceil(imbalance * static_cast<double>(share)));
  }
};

}  // namespace llmc
