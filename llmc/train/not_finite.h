// not_finite.h: where the first number of a step that is not finite comes from, found by doing the step again with a
// look at every tensor that is written.
#pragma once
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "core/signals.h"
#include "device/host_copy.h"
#include "train/trainer.h"

namespace llmc {

// The first tensor of a step that holds a number that is not finite.
struct NotFinite {
  std::string tensor, op;
  std::string place;               // "forward of blocks.3"
  int64_t micro_batch = -1;        // -1: none, it was there before the step
  std::vector<int64_t> sequences;  // of the micro-batch, that hold one; empty: the tensor is not of sequences
};

inline bool all_finite(const Tensor& tensor, Stream& stream) {
  bool finite = true;
  if (tensor.dtype == DType::int32) return finite;
  const HostView t(tensor, stream);
  with_type(tensor.dtype, [&](auto tag) {
    using X = typename decltype(tag)::type;
    const X* x = t.data<X>();
    for (int64_t i = 0; i < tensor.numel() && finite; ++i) finite = std::isfinite(static_cast<double>(x[i]));
  });
  return finite;
}

namespace detail {

inline bool is_gradient(const ModelState& state, const Tensor& t) {
  for (size_t u = 0; u < state.size(); ++u) {
    const Tensor all = state.unit(u).gradients();
    if (!all.empty() && t.bytes >= all.bytes && t.bytes < all.bytes + all.size_bytes()) return true;
  }
  return false;
}

}  // namespace detail

// Does a step's forwards and backwards once more, looking at everything that is written. The weights stay.
inline std::optional<NotFinite> find_not_finite(Trainer& trainer, const BatchSource& batches) {
  Stream& stream = trainer.stream();
  const StepConfig& config = trainer.config();
  stream.synchronize();
  std::optional<NotFinite> found;
  for (const StateEntry& e : trainer.state().state_table())
    if (!found && !all_finite(e.tensor, stream))
      found = NotFinite{e.param->name, formatted("{}, before the step", e.kind), "", -1, {}};
  // Where one rank's state is bad already, no rank does the step again.
  for (const std::string& bad : trainer.state().dp().control->all_gather_text("bad state", found ? "yes" : ""))
    if (!bad.empty()) return found;
  struct Inspection {
    Stream& stream;
    ~Inspection() { stream.set_inspector(nullptr); }
  } inspection{stream};
  stream.set_inspector([&](const char* op, const Tensor& t) {
    if (found || all_finite(t, stream)) return;
    found = NotFinite{t.name, op, trainer.place().what, trainer.place().micro_batch, {}};
    const int64_t B = config.batch.B, each = t.numel() / B;  // elements of a sequence, where it is of sequences
    if (detail::is_gradient(trainer.state(), t) || t.numel() < config.batch.rows()) return;
    for (int64_t b = 0; b < B; ++b)
      if (!all_finite(t.slice(b * each, {each}), stream)) found->sequences.push_back(b);
  });
  trainer.accumulate_gradients(batches);
  stream.synchronize();
  return found;
}

// Where it is, in words. sample_of(micro-batch, sequence of it): the sample of the data that this was.
template <class SampleOf>
std::string describe(const NotFinite& first, const Trainer& trainer, SampleOf&& sample_of) {
  if (first.micro_batch < 0) return formatted("{} ({}) holds one", first.tensor, first.op);
  const DataParallel& dp = trainer.state().dp();
  std::vector<int64_t> samples;
  for (int64_t b = 0; b < trainer.config().batch.B; ++b)
    if (first.sequences.empty() ||
        std::find(first.sequences.begin(), first.sequences.end(), b) != first.sequences.end())
      samples.push_back(sample_of(first.micro_batch, b));
  return formatted("the first such number is in {}, written by {} in the {}, {}micro-batch {}, {} {}", first.tensor,
                   first.op, first.place, dp.ranks() > 1 ? formatted("rank {}, ", dp.rank) : std::string(),
                   first.micro_batch, samples.size() == 1 ? "sample" : "samples", samples);
}

// The same, of the lowest rank that finds one; all ranks call it.
template <class SampleOf>
std::string where_not_finite(Trainer& trainer, const BatchSource& batches, SampleOf&& sample_of) {
  std::string mine;
  try {
    if (const std::optional<NotFinite> first = find_not_finite(trainer, batches))
      mine = describe(*first, trainer, sample_of);
  } catch (const Interrupted& stop) {  // on all ranks alike
    mine = formatted("the search for its origin was interrupted by {}", stop.reason);
  }
  for (const std::string& found : trainer.state().dp().control->all_gather_text("first not finite", mine))
    if (!found.empty()) return found;
  return "no tensor holds one: a sum overflowed";
}

}  // namespace llmc
