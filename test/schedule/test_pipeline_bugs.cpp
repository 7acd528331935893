// Planted bugs of pipelines, in the manner of layout_bugs.h: the comparison with one stage must find them, or else the
// words in each message that say what it is.
#include <algorithm>
#include <string_view>
#include <utility>

#include "helpers.h"
#include "parallel/layout_bugs.h"
#include "schedule/pipeline_layouts.h"

using namespace pipeline_layouts;

namespace {

constexpr std::string_view down = "stages down", up = "stages up";

// ---- Messages ------------------------------------------------------------------------------------------------------

// A link whose messages a bug changes: all but the words at their end that say what they are.
template <const std::string_view& direction, class Change>
struct Changed final : Comm {
  explicit Changed(Comm&& group) : Comm(std::move(group)) {}
  void send(Tensor buffer, int to, Stream& stream) override {
    Change::before(payload_of(buffer), stream);
    Comm::send(buffer, to, stream);
  }
  static Tensor payload_of(const Tensor& buffer) {
    return buffer.slice(0, {buffer.numel() - 32 / size_of(buffer.dtype)});
  }
};
template <class Bug, const std::string_view& direction>
struct OnLinks : Poison {
  std::unique_ptr<Comm> joined(std::unique_ptr<Comm> group) const override {
    if (group->size() == 1 || !group->name().starts_with(direction)) return group;
    return std::make_unique<Bug>(std::move(*group));
  }
};

struct Lost {
  static void before(const Tensor& t, Stream& stream) { zero(t, stream); }
};
struct Doubled {
  static void before(const Tensor& t, Stream& stream) { scale(t, 2, stream); }
};
struct DividedByStages {
  static void before(const Tensor& t, Stream& stream) { scale(t, 0.5f, stream); }
};
struct RoundedToBf16 {
  static void before(const Tensor& t, Stream& stream) {
    stream.enqueue([t] {
      for (int64_t i = 0; i < t.numel(); ++i)
        t.data<float>()[i] = static_cast<float>(static_cast<bf16>(t.data<float>()[i]));
    });
  }
};
struct SwappedSequences {  // of two
  static void before(const Tensor& t, Stream& stream) {
    stream.enqueue([t, half = t.size_bytes() / 2] { std::swap_ranges(t.bytes, t.bytes + half, t.bytes + half); });
  }
};
struct WithoutTheLastRow {
  static void before(const Tensor& t, Stream& stream) { zero(t.slice(t.numel() / 19 * 18, {t.numel() / 19}), stream); }
};

// Each message but the first has the numbers of the one before: as if its buffer had been sent before it was filled.
template <const std::string_view& direction>
struct PreviousMessage final : Comm {
  Tensor previous;
  std::vector<std::byte> bytes;
  explicit PreviousMessage(Comm&& group) : Comm(std::move(group)) {}
  void send(Tensor buffer, int to, Stream& stream) override {
    const Tensor payload = Changed<direction, Lost>::payload_of(buffer);
    stream.enqueue([this, payload] {
      std::vector<std::byte> now(payload.bytes, payload.bytes + payload.size_bytes());
      if (bytes.size() == now.size()) std::copy(bytes.begin(), bytes.end(), payload.bytes);
      bytes = std::move(now);
    });
    Comm::send(buffer, to, stream);
  }
};

// Two messages leave in the other order.
struct OutOfOrder final : Comm {
  std::vector<std::byte> first;
  int sent = 0;
  explicit OutOfOrder(Comm&& group) : Comm(std::move(group)) {}
  void send(Tensor buffer, int to, Stream& stream) override {
    if (++sent > 2) return Comm::send(buffer, to, stream);
    if (sent == 1) {
      stream.enqueue([this, buffer] { first.assign(buffer.bytes, buffer.bytes + buffer.size_bytes()); });
      return;
    }
    Comm::send(buffer, to, stream);
    stream.enqueue([this, buffer] { std::copy(first.begin(), first.end(), buffer.bytes); });
    Comm::send(buffer, to, stream);
  }
};

// ---- What follows from it in the rest of a step --------------------------------------------------------------------

struct TiedPartsApart final : Comm {
  static constexpr std::string_view groups[] = {"tied gradients"};
  explicit TiedPartsApart(Comm&& group) : Comm(std::move(group)) {}
  void all_reduce(Tensor, Stream&) override {}
};
struct TiedMean final : Comm {
  static constexpr std::string_view groups[] = {"tied gradients"};
  explicit TiedMean(Comm&& group) : Comm(std::move(group)) {}
  void all_reduce(Tensor buffer, Stream& stream) override {
    Comm::all_reduce(buffer, stream);
    if (size() > 1) scale(buffer, 0.5f, stream);
  }
};
// Each stage knows only the norm of its own gradients.
struct OwnNorm final : Comm {
  static constexpr std::string_view groups[] = {"scalars"};
  explicit OwnNorm(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor buffer, Stream& stream) override {
    Comm::all_gather(buffer, stream);
    const int64_t n = buffer.numel() / size();
    for (int r = 0; r < size(); ++r)
      if (r != rank()) zero(buffer.slice(n * r + 1, {n - 1}), stream);
  }
};
// The first stage's loss, which is none, is taken for that of all.
struct LossOfTheFirstStage final : Comm {
  static constexpr std::string_view groups[] = {"scalars"};
  explicit LossOfTheFirstStage(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor buffer, Stream& stream) override {
    Comm::all_gather(buffer, stream);
    for (int r = 1; r < size(); ++r) zero(buffer.slice(buffer.numel() / size() * r, {1}), stream);
  }
};
// The copy of a tied table on the last stage counts in the norm as well.
struct TiedCountsTwice final : Comm {
  static constexpr std::string_view groups[] = {"scalars"};
  explicit TiedCountsTwice(Comm&& group) : Comm(std::move(group)) {}
  void all_gather(Tensor buffer, Stream& stream) override {
    Comm::all_gather(buffer, stream);
    const int64_t n = buffer.numel() / size(), embedding = StepConfig().scalars_before_squares();
    copy(buffer.slice(n * (size() - 1) + embedding, {1}), buffer.slice(embedding, {1}), stream);
  }
};

// ---- The data ------------------------------------------------------------------------------------------------------

// The targets of the micro-batch after: what the last stage would compare with if it counted from 1.
HostBatch targets_of_the_next(const StepConfig& step, int reader, int64_t micro_batch) {
  HostBatch batch = selftest::read_batch(step, reader, micro_batch);
  batch.targets = selftest::read_batch(step, reader, (micro_batch + 1) % step.micro_batches).targets;
  return batch;
}

template <template <class> class With, class Bug>
const Hooks& hooks_of() {
  static const With<Bug> hooks;
  return hooks;
}
template <class Bug, const std::string_view& direction>
const Hooks& on_links() {
  static const OnLinks<Bug, direction> hooks;
  return hooks;
}

}  // namespace

TEST_CASE("planted bugs of pipelines change what a step computes", "[pp]") {
  const Model untied{"qwen3", false, DType::fp32, 8, 2}, tied{"gpt2", true, DType::fp32, 8, 8};
  const LayoutCase layout{3, Schedule::one_f_one_b}, chunks{2, Schedule::interleaved, 2};
  const std::pair<const char*, const Hooks*> of_messages[] = {
      {"activations lost", &on_links<Changed<down, Lost>, down>()},
      {"activations doubled", &on_links<Changed<down, Doubled>, down>()},
      {"activations in bf16", &on_links<Changed<down, RoundedToBf16>, down>()},
      {"sequences in another order", &on_links<Changed<down, SwappedSequences>, down>()},
      {"a row missing", &on_links<Changed<down, WithoutTheLastRow>, down>()},
      {"activations of the micro-batch before", &on_links<PreviousMessage<down>, down>()},
      {"gradients lost", &on_links<Changed<up, Lost>, up>()},
      {"gradients divided by the stages", &on_links<Changed<up, DividedByStages>, up>()},
      {"gradients in bf16", &on_links<Changed<up, RoundedToBf16>, up>()},
      {"gradients of the micro-batch before", &on_links<PreviousMessage<up>, up>()},
  };
  const std::pair<const char*, const Hooks*> of_steps[] = {
      {"each stage its own norm", &hooks_of<layout_bugs::Replaces, OwnNorm>()},
      {"the loss of the first stage", &hooks_of<layout_bugs::Replaces, LossOfTheFirstStage>()},
  };
  const std::pair<const char*, const Hooks*> of_ties[] = {
      {"parts of a tied gradient not added", &hooks_of<layout_bugs::Replaces, TiedPartsApart>()},
      {"their mean", &hooks_of<layout_bugs::Replaces, TiedMean>()},
      {"a tied table counted twice", &hooks_of<layout_bugs::Replaces, TiedCountsTwice>()},
  };
  const Outcome of_untied = run(step_of(untied, {}, 4)), of_tied = run(step_of(tied, {}, 4));
  REQUIRE(agrees(run(step_of(untied, layout, 4)), of_untied, false));
  REQUIRE(agrees(run(step_of(untied, chunks, 4)), of_untied, false));
  REQUIRE(agrees(run(step_of(tied, layout, 4)), of_tied, true));
  for (const auto& [name, hooks] : of_messages) {
    INFO(name);
    REQUIRE(!agrees(run(step_of(untied, layout, 4), *hooks), of_untied, false));
    REQUIRE(!agrees(run(step_of(untied, chunks, 4), *hooks), of_untied, false));
  }
  for (const auto& [name, hooks] : of_steps) {
    INFO(name);
    REQUIRE(!agrees(run(step_of(untied, layout, 4), *hooks), of_untied, false));
  }
  for (const auto& [name, hooks] : of_ties) {
    INFO(name);
    const Outcome found = run(step_of(tied, layout, 4), *hooks);
    REQUIRE((found.fault != "" || !agrees(found, of_tied, true)));
  }
  const Outcome others_targets = selftest::run_layout(step_of(untied, layout, 4), {}, {.read = targets_of_the_next});
  REQUIRE(!agrees(others_targets, of_untied, false));
}

TEST_CASE("a message of another micro-batch than expected is refused by what it says of itself", "[pp]") {
  const Model model{"gpt2", false, DType::fp32, 8, 8};
  const StepConfig step = step_of(model, {2, Schedule::gpipe}, 4);
  REQUIRE_ERROR(run(step, on_links<OutOfOrder, down>()),
                "expected activations of chunk 0, micro-batch 0, slice 0, and received activations of chunk 0, "
                "micro-batch 1, slice 0");
}
