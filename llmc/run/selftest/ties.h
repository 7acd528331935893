// ties.h: the experts to which a run sends its tokens. If the scores of two experts are closer than rounding,
// a layout that rounds differently may choose the other one, and then differs from one rank by more than rounding.
#pragma once
#include <mutex>

#include "device/host_copy.h"
#include "run/processes.h"
#include "run/ranks.h"

namespace llmc::selftest {

// Ordered so that earlier choices may change later ones: earlier steps, and earlier layers of the same sample.
struct RoutedToken {
  int64_t step, layer, sample, position;  // the sample within the global batch, the position within the sample
  auto operator<=>(const RoutedToken&) const = default;
};
inline std::string to_string(const RoutedToken& t) {
  return formatted("step {}, blocks.{}, sample {}, position {}", t.step, t.layer, t.sample, t.position);
}

struct Route {
  std::vector<int64_t> experts;  // the chosen ones, sorted
  std::vector<double> scores;    // of all experts, with their biases
  std::vector<double> rounding;  // how far scores may differ between layouts
};
using Routes = std::map<RoutedToken, Route>;

// By how much one expert was preferred to another.
struct Margin {
  int64_t chosen = -1, other = -1;
  double by = std::numeric_limits<double>::infinity(), rounding = 0;
  bool is_tie() const { return by <= rounding; }  // false for NaN
};
inline Margin margin_of(const Route& route, int64_t chosen, int64_t other) {
  const size_t a = static_cast<size_t>(chosen), b = static_cast<size_t>(other);
  return {chosen, other, route.scores[a] - route.scores[b], route.rounding[a] + route.rounding[b]};
}
// The largest margin of a chosen expert over one that another layout chose instead.
inline Margin margin_of(const Route& route, const std::vector<int64_t>& others) {
  Margin largest{.by = -std::numeric_limits<double>::infinity()};
  for (const int64_t chosen : route.experts)
    for (const int64_t other : others) {
      if (std::ranges::binary_search(others, chosen) || std::ranges::binary_search(route.experts, other)) continue;
      if (const Margin m = margin_of(route, chosen, other); !(m.by <= largest.by)) largest = m;
    }
  return largest;
}

// Scores, and how much they may differ between two layouts. A row of a layer's input differs, relative to its size, by
// two roundings of the training dtype for each layer so far, after attention and after the feed-forward, and a logit by
// as much of the row's largest. (With drawn weights in bf16, choices that differ have margins of up to 1/7.)
inline Route route_of(std::vector<double> logits, const float* biases, std::vector<int64_t> experts,
                      const StepConfig& step, int64_t layer) {
  double largest = -std::numeric_limits<double>::infinity(), size = 0, total = 0;
  for (const double x : logits) largest = std::max(largest, x), size = std::max(size, std::abs(x));
  for (const double x : logits) total += std::exp(x - largest);
  constexpr double roundings = 2;  // per layer
  const double unit = step.precision.activations == DType::bf16 ? 0x1p-8 : 0x1p-23,
               of_logit = roundings * static_cast<double>(layer + 1) * unit * size;
  Route route{std::move(experts), std::move(logits), {}};
  std::ranges::sort(route.experts);
  for (double& x : route.scores) {
    x = step.model.experts.scores == RouterScores::softmax ? std::exp(x - largest) / total : 1 / (1 + std::exp(-x));
    route.rounding.push_back(x * of_logit);
    if (biases != nullptr) x += *biases++;
  }
  return route;
}

// Watches the routers of one rank, and adds to the routes of all ranks.
class RouteRecorder {
 public:
  RouteRecorder(Routes& all, std::mutex& mutex, const Run& run)
      : all_(all), mutex_(mutex), groups_(run.groups), trainer_(run.trainer) {}

  void begin_step(int64_t step) {
    step_ = step;
    biases_ = trainer_.expert_biases();
  }

 private:
  void look(std::string_view op, const Tensor& t) {
    if (op == "router_logits") logits_ = values_of<double>(t, trainer_.stream());
    if (op != "router_forward" || t.dtype != DType::int32) return;
    const int64_t E = trainer_.config().model.experts.count;
    if (std::ssize(logits_) != t.shape[0] * E) return;          // a shared expert's gate is a router of one expert
    constexpr std::string_view forward = "forward of blocks.";  // skips recomputation
    const Interpreter::Place place = trainer_.place();
    if (place.what.starts_with(forward)) add(t, std::stoll(place.what.substr(forward.size())), place);
  }

  // choices (S, k): for the logits that came before
  void add(const Tensor& choices, int64_t layer, const Interpreter::Place& place) {
    const StepConfig& step = trainer_.config();
    const int64_t E = step.model.experts.count, k = step.model.experts.per_token;
    const int64_t first_row = first_stream_row(place.slice),
                  first_sample = (place.micro_batch * step.layout.readers() + groups_.reader()) * step.batch.B;
    const float* biases = nullptr;
    if (!biases_.empty()) {
      int64_t before = 0;  // layers with experts
      for (int64_t l = 0; l < layer; ++l) before += step.model.is_sparse(l);
      biases = biases_.data() + before * E;
    }
    const HostView view(choices, trainer_.stream());
    const int32_t* chosen = view.data<int32_t>();
    const std::lock_guard lock(mutex_);
    for (int64_t n = 0; n < choices.shape[0]; ++n) {
      const int64_t row = row_of_all(first_row + n, place.slice);
      all_[{step_, layer, first_sample + row / step.batch.T, row % step.batch.T}] =
          route_of({logits_.begin() + n * E, logits_.begin() + (n + 1) * E}, biases,
                   {chosen + n * k, chosen + (n + 1) * k}, step, layer);
    }
  }
  // The first row of the residual stream that this rank holds, among those of its context-parallel rank and its slice.
  int64_t first_stream_row(int slice) const {
    const StepConfig& step = trainer_.config();
    const int64_t N = step.share(step.batch, Purpose::train, slice).rows();
    return step.layout.tensor.by_rows() ? step.layout.tensor.stream_rows(N) * groups_.me.tensor : 0;
  }
  // The place of such a row in the whole micro-batch.
  int64_t row_of_all(int64_t row, int slice) const {
    const StepConfig& step = trainer_.config();
    if (step.slices_for(Purpose::train) == 1)
      return step.layout.context.row_of_all(row, step.batch.T, groups_.me.context);
    const SequenceRows of = step.slice_rows(slice);
    return row / of.rows * of.length + of.first + row % of.rows;
  }

  Routes& all_;
  std::mutex& mutex_;
  const Groups& groups_;
  const Trainer& trainer_;
  int64_t step_ = 1;
  std::vector<float> biases_;
  std::vector<double> logits_;
  Inspection inspection_{trainer_.stream(), [this](const char* op, const Tensor& t) { look(op, t); }};
};

// Completes the routes with the tokens of other processes.
inline void merge(Routes& routes, const Processes& processes) {
  nlohmann::json mine = nlohmann::json::array();
  for (const auto& [t, route] : routes) mine.push_back({t.step, t.layer, t.sample, t.position, route.experts});
  for (const std::string& text : gather_large("routes", mine.dump(), processes))
    for (const auto& t : parse_json(text, "routes"))
      routes[{t[0], t[1], t[2], t[3]}].experts = t[4].get<std::vector<int64_t>>();
}

// The tokens that a layout sends to different experts than one rank does.
struct Rerouted {
  int64_t tokens = 0;
  bool ties = true;   // all at near ties, or because of others at near ties
  std::string first;  // the first token; the first that is not a tie, if there is one
};
inline std::string to_string(const Rerouted& r) {
  if (r.tokens == 0) return "all tokens go to the same experts";
  return formatted("{} choice(s) of other experts, the first in {}", r.tokens, r.first);
}
inline Rerouted rerouted(const Routes& one, const Routes& found) {
  Rerouted all;
  const auto add = [&](bool tie, const std::string& text) {
    if (all.first.empty() || (all.ties && !tie)) all.first = text;
    all.ties = all.ties && tie;
  };
  int64_t first_step = 0;
  std::map<int64_t, int64_t> first_layer;  // by sample
  for (const auto& [token, route] : one) {
    const auto other = found.find(token);
    if (other != found.end() && other->second.experts == route.experts) continue;
    if (all.tokens++ == 0) first_step = token.step;
    if (other == found.end()) {
      add(false, to_string(token) + ", which no rank has routed");
      continue;
    }
    // Earlier rerouted tokens explain the rest.
    if (token.step > first_step || first_layer.try_emplace(token.sample, token.layer).first->second < token.layer)
      continue;
    const Margin m = margin_of(route, other->second.experts);
    add(m.is_tie(),
        formatted(
            "{}: experts {}, but {} on one rank, which chose {} before {} by a margin of {:.1e}: {} rounding, {:.1e}",
            to_string(token), other->second.experts, route.experts, m.chosen, m.other, m.by,
            m.is_tie() ? "a near tie, within" : "more than", m.rounding));
  }
  if (found.size() > one.size()) ++all.tokens, add(false, "tokens that one rank does not have");
  return all;
}

// ---- Weights with which no token is near a tie ----------------------------------------------------------------------

// Replaces fresh weights by f(name, value drawn, element).
template <class F>
void change_weights(const ModelState& state, Stream& stream, F&& f) {
  for (const StateEntry& e : state.state_table()) {
    if (e.kind != StateKind::weight && e.kind != StateKind::master) continue;
    const Elements elements = e.elements();
    const StateView drawn(e, stream);
    write_state(e, stream, [&](const Tensor& host) {
      with_type(host.dtype, [&](auto tag) {
        using X = typename decltype(tag)::type;
        for (int64_t i = 0; i < host.numel(); ++i)
          host.data<X>()[i] = X(f(e.param->name, static_cast<float>(drawn.tensor().data<X>()[i]), elements.index(i)));
      });
    });
  }
}
// Gives each token two experts, chosen in all layers by margins far beyond the rounding of bf16.
inline void init_routes_by_token(const StepConfig& step, const ModelState& state, Stream& stream) {
  const int64_t E = step.model.experts.count, C = step.model.n_embd;
  CHECK(step.model.experts.per_token == 2 && E > 1 && E <= C, "routes by token: {} of {} experts, {} channels",
        step.model.experts.per_token, E, C);
  init_weights(state, 42, stream);
  change_weights(state, stream, [&](const std::string& name, float drawn, int64_t element) {
    const int64_t row = element / C, channel = element % C;
    if (name.ends_with("moe.router.weight")) return channel == row ? 0.5f : 0.0f;
    if (name != "wte.weight" || channel >= E) return drawn;
    // In the first E channels of its embedding, a token is nonzero in two: those of its two experts.
    const int64_t first = row % E, second = (first + 1 + row / E % (E - 1)) % E;
    return channel == first ? 0.25f : channel == second ? 0.1875f : 0.0f;
  });
}
inline void init_drawn(const StepConfig&, const ModelState& state, Stream& stream) { init_weights(state, 42, stream); }

}  // namespace llmc::selftest
