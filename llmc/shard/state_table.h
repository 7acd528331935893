// state_table.h: the state that a rank holds, entry by entry: what checkpoints and checks of copies iterate, which know
// no optimizer and no layout; and the numbers of an entry in host memory.
#pragma once
#include "device/host_copy.h"
#include "ops/optimizers.h"
#include "shard/params.h"

namespace llmc {

enum class StateKind : uint8_t { weight, master, average, slot, row_moment };
constexpr auto names_of_values(StateKind) {
  return std::array{"weight", "master", "average", "slot", llmc::row_moment.name};
}

// One entry of the StateTable: the elements [begin, begin + tensor.numel()) of param->box(), held by this rank.
struct StateEntry {
  const ParamSpec* param;
  StateKind kind;
  int64_t begin;
  Tensor tensor;    // flat, without padding rows
  size_t slot = 0;  // which one of the parameter's rule
  // Of state in few bits (StateView). Slots in 8 bits: their whole blocks, of which the tensor begins at element
  // `in_block`, and the scales of these; masters in halves: the weights. Slots in bf16 have neither.
  Tensor blocks = {}, scales = {}, weight = {};
  int64_t in_block = 0;
  bool small() const { return !blocks.empty() || !weight.empty() || is_bf16_slot(); }
  bool is_bf16_slot() const { return kind == StateKind::slot && tensor.dtype == DType::bf16; }
  // "weight", "master", "average" or the name of the slot, such as "moment1".
  const char* name() const { return kind == StateKind::slot ? rule_of(param->rule).slots[slot].name : name_of(kind); }
  Elements elements() const { return param->elements_from(begin); }  // where they are in the whole parameter

  // Calls f(i, index, n) for each row, or part of one: elements [i, i + n) of the tensor are those of the parameter
  // from `index` on.
  template <class F>
  void for_each_row(F&& f) const {
    const Elements where = elements();
    for (int64_t i = 0, n; i < tensor.numel(); i += n) {
      n = std::min(tensor.numel() - i, where.columns - (where.begin + i) % where.columns);
      f(i, where.index(i), n);
    }
  }
};
using StateTable = std::vector<StateEntry>;

// The elements `r` of a unit, from a tensor that holds the elements `held`.
inline Tensor slice_of(const Tensor& t, const Range& held, const Range& r) {
  return t.slice(r.begin - held.begin, {r.size});
}

namespace detail {

// The numbers of whole blocks, in 8 bits.
inline std::vector<float> numbers_of_blocks(const Tensor& blocks, const Tensor& scales, Stream& stream) {
  const HostView codes(blocks, stream), factors(scales, stream);
  std::vector<float> numbers(static_cast<size_t>(blocks.numel()));
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto bits = static_cast<uint8_t>(codes.tensor().bytes[i]);
    numbers[i] = blocks.dtype == DType::e5m3 ? static_cast<float>(e5m3{bits}) : static_cast<float>(e4m3{bits});
    numbers[i] *= factors.data<float>()[i / state_block];
  }
  return numbers;
}

}  // namespace detail

// The numbers of an entry after all work enqueued so far: in its dtype if ops compute in it, else in fp32. State in few
// bits (ops/optimizers.h) is seen as the fp32 numbers that it stands for, and is set from such numbers, rounded to the
// nearest: so checkpoints hold fp32 whatever a run keeps. Numbers that were read are set again without a change.
class StateView {
 public:
  StateView(const StateEntry& e, Stream& stream) {
    if (!e.small()) {
      held_.emplace(e.tensor, stream);
      tensor_ = held_->tensor();
      return;
    }
    if (e.tensor.dtype == DType::int16) {
      const HostView lower(e.tensor, stream), upper(e.weight, stream);
      numbers_.reserve(static_cast<size_t>(e.tensor.numel()));
      for (int64_t i = 0; i < e.tensor.numel(); ++i)
        numbers_.push_back(joined_halves(upper.data<bf16>()[i].bits, lower.data<int16_t>()[i]));
    } else if (e.is_bf16_slot()) {
      const HostView held(e.tensor, stream);
      numbers_.reserve(static_cast<size_t>(e.tensor.numel()));
      for (int64_t i = 0; i < e.tensor.numel(); ++i) numbers_.push_back(static_cast<float>(held.data<bf16>()[i]));
    } else {
      const std::vector<float> all = detail::numbers_of_blocks(e.blocks, e.scales, stream);
      numbers_.assign(all.begin() + e.in_block, all.begin() + e.in_block + e.tensor.numel());
    }
    tensor_ = {e.tensor.name, DType::fp32, e.tensor.shape, reinterpret_cast<std::byte*>(numbers_.data())};
  }
  const Tensor& tensor() const { return tensor_; }

 private:
  std::optional<HostView> held_;
  std::vector<float> numbers_;
  Tensor tensor_;
};

// f(host tensor) writes all numbers of an entry, in the dtype in which a StateView has them. A master in halves is set
// with the weight that it rounds to, which has an entry of its own.
template <class F>
void write_state(const StateEntry& e, Stream& stream, F&& f) {
  if (!e.small()) return write_on_host(e.tensor, stream, std::forward<F>(f));
  std::vector<float> numbers(static_cast<size_t>(e.tensor.numel()));
  f(Tensor{e.tensor.name, DType::fp32, e.tensor.shape, reinterpret_cast<std::byte*>(numbers.data())});
  if (e.tensor.dtype == DType::int16)
    return write_on_host(e.tensor, stream, [&](const Tensor& host) {
      for (size_t i = 0; i < numbers.size(); ++i) host.data<int16_t>()[i] = lower_half(splittable(numbers[i]));
    });
  if (e.is_bf16_slot())
    return write_on_host(e.tensor, stream, [&](const Tensor& host) {
      for (size_t i = 0; i < numbers.size(); ++i) host.data<bf16>()[i] = bf16(numbers[i]);
    });
  // Numbers of its first and last block may be other entries'.
  std::vector<float> all = detail::numbers_of_blocks(e.blocks, e.scales, stream);
  std::copy(numbers.begin(), numbers.end(), all.begin() + e.in_block);
  std::vector<float> scales;
  for (size_t begin = 0; begin < all.size(); begin += state_block) {
    float largest = 0;
    for (size_t i = begin; i < begin + state_block; ++i) largest = std::max(largest, std::abs(all[i]));
    scales.push_back(state_scale(e.blocks.dtype, largest));
  }
  write_on_host(e.scales, stream, [&](const Tensor& host) { std::ranges::copy(scales, host.data<float>()); });
  write_on_host(e.blocks, stream, [&](const Tensor& host) {
    for (size_t i = 0; i < all.size(); ++i) {
      const float x = all[i] * reciprocal_of_power(scales[i / state_block]);
      host.bytes[i] = static_cast<std::byte>(e.blocks.dtype == DType::e5m3 ? e5m3::of(x).bits : e4m3::of(x).bits);
    }
  });
}

}  // namespace llmc
