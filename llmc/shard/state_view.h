// state_view.h: the numbers of a StateTable's entry in host memory. State in few bits (ops/optimizers.h) is seen as
// the fp32 numbers that it stands for, and is set from such numbers, rounded to the nearest: so checkpoints hold fp32
// whatever a run keeps. Numbers that were read are set again without a change.
#pragma once
#include "device/host_copy.h"
#include "ops/optimizers.h"
#include "shard/unit_state.h"

namespace llmc {

namespace detail {

// The codes of one dtype, by code.
inline float number_of(DType dtype, std::byte code) {
  const auto bits = static_cast<uint8_t>(code);
  return dtype == DType::e5m3 ? static_cast<float>(e5m3{bits}) : static_cast<float>(e4m3{bits});
}
inline std::byte code_of(DType dtype, float x) {
  return static_cast<std::byte>(dtype == DType::e5m3 ? e5m3::of(x).bits : e4m3::of(x).bits);
}
// The numbers of whole blocks.
inline std::vector<float> numbers_of_blocks(const Tensor& blocks, const Tensor& scales, Stream& stream) {
  const HostView codes(blocks, stream), factors(scales, stream);
  std::vector<float> numbers(static_cast<size_t>(blocks.numel()));
  for (size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = number_of(blocks.dtype, codes.tensor().bytes[i]) * factors.data<float>()[i / state_block];
  return numbers;
}

}  // namespace detail

// The numbers of an entry after all work enqueued so far: in its dtype if ops compute in it, else in fp32.
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
      for (int64_t i = 0; i < e.tensor.numel(); ++i)
        numbers_.push_back(joined_halves(upper.data<bf16>()[i].bits, lower.data<int16_t>()[i]));
    } else if (e.is_bf16_slot()) {
      const HostView held(e.tensor, stream);
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
    for (size_t i = 0; i < all.size(); ++i)
      host.bytes[i] = detail::code_of(e.blocks.dtype, all[i] * reciprocal_of_power(scales[i / state_block]));
  });
}

}  // namespace llmc
