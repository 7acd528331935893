// host_buffer.h: memory of the host for copies of what a device holds, counted by an arena. For a GPU it is pinned, so
// that copies run at the speed of the bus.
#pragma once
#include "device/arena.h"

namespace llmc {

class HostBuffer {
 public:
  // label: its line in a table of memory
  HostBuffer(const Device& device, const char* label, int64_t bytes) : arena_(on_host(device)) {
    const int64_t size = round_up(bytes, Arena::alignment);
    if (size == 0 || device.kind == DeviceKind::null) return;
#ifdef TRAIN_GPT_CUDA
    if (device.kind == DeviceKind::cuda) try {
        pinned_.emplace(static_cast<size_t>(size));
        bytes_ = {pinned_->data(), pinned_->size()};
        return;
      } catch (const Error& error) {  // `ulimit -l`, or the limit of a container
        not_pinned_ = error.what();
      }
#endif
    arena_.reserve(size);
    bytes_ = {arena_.alloc(label, label, DType::int32, {size / size_of(DType::int32)}).bytes,
              static_cast<size_t>(size)};
  }
  std::span<std::byte> bytes() const { return bytes_; }
  // Why a GPU's copies go to memory that is not pinned, which is slower; empty: they do not.
  const std::string& not_pinned() const { return not_pinned_; }
  void touch() { arena_.touch(); }

 private:
  static Device on_host(Device device) {
    device.kind = DeviceKind::cpu;
    return device;
  }
  Arena arena_;
  std::span<std::byte> bytes_;
  std::string not_pinned_;
#ifdef TRAIN_GPT_CUDA
  std::optional<cuda::PinnedMemory> pinned_;
#endif
};

}  // namespace llmc
