// not_finite.h: where the first number of a step that is not finite comes from, found by doing the step again with a
// look at every tensor that is written.
#pragma once
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "device/host_copy.h"
#include "train/step.h"

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

}  // namespace llmc
