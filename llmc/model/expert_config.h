// expert_config.h: the experts of a model.
#pragma once
#include "core/shape.h"
#include "ops/types.h"

namespace llmc {

// The experts of sparse layers (Shazeer et al. 2017): for each token the router chooses some experts, and their outputs
// are added with weights: their scores, normalised or not, times the scaling.
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
};

// Where the experts of a layer are, and the rows of a rank that go to them: the ranks that share the experts, and how
// many rows a rank has room for.
struct ExpertPlacement {
  int64_t count = 0, per_token = 0;      // as in Experts
  int64_t ranks = 1;                     // those that share the experts of a layer
  double imbalance = 1;                  // rows that a rank has room for, divided by an equal share of all choices
  int64_t sequence = 1, segment = 1;     // rows of a training sequence, and of a contiguous part that a rank has
  bool spread = false;                   // a sequence may be spread over ranks
  bool cut = false;                      // a rank's rows may begin within a segment
  std::optional<int64_t> capacity = {};  // rows of an expert from one training sequence; none: any number (dropless)

  bool exchanged() const { return ranks > 1; }  // rows go to experts of other ranks
  int64_t own() const { return count / ranks; }

  // If every rank has S rows: the most rows that the capacity lets through from any rank to any other.
  int64_t most_to_each(int64_t S) const {
    const int64_t segments = cut ? Segments{segment}.most(S) : ceil_div(S, segment);
    return std::min(std::min(per_token, own()) * S, segments * own() * std::min(*capacity, segment));
  }
  // The same, if a rank has room for that many rows from every rank, by the capacities of all experts or by
  // `imbalance`. 0: it has no such room, or there is no capacity.
  int64_t stride(int64_t S) const {
    if (ranks == 1 || !capacity) return 0;
    const int64_t most = most_to_each(S), all = ranks * most;
    const bool of_capacities = all * sequence <= count * *capacity * S,
               of_imbalance = static_cast<double>(all) <= imbalance * static_cast<double>(per_token * S) + 0.5;
    return of_capacities || of_imbalance ? most : 0;
  }
  // How many rows a rank has room for, for its experts.
  int64_t room(int64_t S) const {
    const int64_t share = per_token * S, padded = ranks * stride(S);
    if (padded > 0) return padded;
    return ranks == 1 ? share : static_cast<int64_t>(std::ceil(imbalance * static_cast<double>(share)));
  }
  // How many rows, in the order of experts, a rank sends.
  int64_t sent(int64_t S) const { return std::max(per_token * S, ranks * stride(S)); }
};

}  // namespace llmc
