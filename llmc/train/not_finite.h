// not_finite.h: finds the origin of a step's first non-finite number: repeats it with a check of every tensor written.
#pragma once
#include "core/json.h"
#include "core/signals.h"
#include "train/trainer.h"

namespace llmc {

// The first tensor of a step that contains a non-finite number.
struct NotFinite {
  std::string tensor, op;
  Interpreter::Place place = {};  // without a micro-batch: the number was there before the step
  int64_t writes = -1;            // tensors written in the step before it
  // Those of the micro-batch that contain one; empty: the tensor has no sequence axis.
  std::vector<int64_t> sequences = {};
};

inline bool all_finite(const Tensor& tensor, Stream& stream) {
  return tensor.dtype == DType::int32 || all_finite(HostView(tensor, stream).tensor());
}

namespace detail {

inline bool is_gradient(const ModelState& state, const Tensor& t) {
  for (size_t u = 0; u < state.size(); ++u) {
    if (!state.has(u)) continue;
    const Tensor all = state.unit(u).gradients();
    if (!all.empty() && t.bytes >= all.bytes && t.bytes < all.bytes + all.size_bytes()) return true;
  }
  return false;
}

// Rows by expert are not checked, since some of them may hold anything; the tensors computed from them next are.
inline bool is_of_experts(std::string_view op) { return op.starts_with("grouped_") || op.starts_with("combine_"); }

}  // namespace detail

// Repeats the forwards and backwards of a step and checks every tensor that is written. The weights do not change.
inline std::optional<NotFinite> find_not_finite(Trainer& trainer, const BatchSource& batches) {
  Stream& stream = trainer.stream();
  const StepConfig& config = trainer.config();
  stream.synchronize();
  std::optional<NotFinite> found;
  for (const StateEntry& e : trainer.state().state_table())
    if (!found && !(e.small() ? all_finite(StateView(e, stream).tensor()) : all_finite(e.tensor, stream)))
      found = NotFinite{e.param->name, formatted("{}, before the step", e.name())};
  // If the state of one rank is bad already, no rank repeats the step.
  for (const std::string& bad :
       trainer.state().groups()[GroupName::control].all_gather_text("bad state", found ? "yes" : ""))
    if (!bad.empty()) return found;
  int64_t writes = 0;
  const Inspection inspection(stream, [&](const char* op, const Tensor& t) {
    if (std::string_view(op) != "zero") ++writes;         // padding is zeroed at different places on different ranks
    if (found || std::string_view(op) == "fill") return;  // a constant, such as -infinity where no score was seen yet
    if (all_finite(t, stream)) return;
    Interpreter::Place place = trainer.place();
    if (detail::is_of_experts(op)) place.what += ".experts";
    found = NotFinite{t.name, op, place, writes};
    const int64_t B = config.batch.B, rows = config.share(config.batch, Purpose::train, place.slice).rows();
    const int64_t each = t.numel() / B;  // elements per sequence, if it has all rows or sequences
    if (detail::is_gradient(trainer.state(), t) || (t.shape[0] != rows && t.shape[0] != B)) return;
    for (int64_t b = 0; b < B; ++b)
      if (!all_finite(t.slice(b * each, {each}), stream)) found->sequences.push_back(b);
  });
  trainer.accumulate_gradients(batches);
  stream.synchronize();
  return found;
}

// Where it is, in words. sample_of(micro-batch, sequence): the name of the sequence's sample in the data.
template <class SampleOf>
std::string describe(const NotFinite& first, const Trainer& trainer, SampleOf&& sample_of) {
  const Groups& groups = trainer.state().groups();
  if (first.place.micro_batch < 0)
    return formatted(
        "{} ({}) contains a non-finite number{}", first.tensor, first.op,
        groups.layout.tensor.ranks > 1 || groups.stages() > 1 ? formatted(" on rank {}", groups.rank()) : "");
  std::vector<std::string> samples;
  for (int64_t b = 0; b < trainer.config().batch.B; ++b)
    if (first.sequences.empty() || std::ranges::count(first.sequences, b) > 0)
      samples.push_back(formatted("{}", sample_of(first.place.micro_batch, b)));
  return formatted("the first non-finite number is in {}, written by {} in the {}, {}micro-batch {}{}, {} {}",
                   first.tensor, first.op, first.place.what,
                   groups.ranks() > 1 ? formatted("rank {}, ", groups.rank()) : std::string(), first.place.micro_batch,
                   trainer.config().layout.pipeline.slices.size() > 1 ? formatted(", token slice {}", first.place.slice)
                                                                      : std::string(),
                   samples.size() == 1 ? "sample" : "samples", samples);
}

// The same, from the rank where it comes first: the others may have got it from there. The ranks of a stage go through
// the step together, in the order of its list. Stages do not: among these, the one that a micro-batch reaches first
// counts. Among equals, the lowest rank. Called by all ranks.
template <class SampleOf>
std::string where_not_finite(Trainer& trainer, const BatchSource& batches, SampleOf&& sample_of) {
  const Groups& groups = trainer.state().groups();
  std::string mine;
  nlohmann::json first;  // micro-batch, turn, tensors written before; null: nothing was found
  try {
    if (const std::optional<NotFinite> found = find_not_finite(trainer, batches)) {
      mine = describe(*found, trainer, sample_of);
      first = {found->place.micro_batch, found->place.turn, found->writes};
    }
  } catch (const Interrupted& stop) {  // thrown on all ranks
    mine = formatted("the search for its origin was interrupted by {}", stop.reason);
  }
  const std::vector<std::string> all =
      groups[GroupName::control].all_gather_text("first not finite", nlohmann::json{first, mine}.dump());
  std::optional<std::array<int64_t, 2>> earliest;  // micro-batch and turn, of the stages so far
  std::string found = mine;
  for (size_t stage = 0; stage < static_cast<size_t>(groups.stages()); ++stage) {
    std::optional<std::array<int64_t, 3>> of_stage;
    std::string its;
    for (size_t i = 0, n = static_cast<size_t>(groups.ranks_of_stage()); i < n; ++i) {
      const nlohmann::json theirs = parse_json(all[stage * n + i], "what another rank has found");
      if (theirs[0].is_null()) continue;
      const auto at = theirs[0].get<std::array<int64_t, 3>>();
      if (!of_stage || at[2] < (*of_stage)[2]) of_stage = at, its = theirs[1];
    }
    if (!of_stage) continue;
    const std::array<int64_t, 2> begins = {(*of_stage)[0], (*of_stage)[1]};
    if (!earliest || begins < *earliest) earliest = begins, found = its;
  }
  if (!found.empty()) return found;
  // The versions of the weights that an asynchronous step has read are gone.
  return trainer.config().layout.pipeline.asynchronous() ? "repeated with the newest weights, it has none"
                                                         : "no tensor contains one: a sum overflowed";
}

}  // namespace llmc
