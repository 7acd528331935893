// host_activations.h: outputs of blocks that wait in host memory for the backward (--offload activations), with
// --recompute block. In the forward a block writes to one of two buffers in turn, from which its output is copied to
// the host while the next block computes; in the backward the outputs come back into two others, one ahead of their
// use:
//
//   compute     forward 0 | forward 1 | forward 2 ...  backward 3 ..... | backward 2 ..... | backward 1
//   to host          `---> out 0 | out 1 | out 2
//   to device                              out 2 | out 1  ^           out 0  ^
//
// A chunk's own input, and the output that the head reads, stay on the device. With A bytes of rows of the residual
// stream and n outputs of a chunk on the host, one of each segment but the last, a micro-batch copies n A each way.
#pragma once
#include "train/in_flight.h"

namespace llmc {

class HostActivations {
 public:
  HostActivations(const StepConfig& config, const Context& context, const Groups& groups)
      : segment_(static_cast<size_t>(config.segment)), compute_(context.compute) {
    if (!config.keeps_at_host(Purpose::train)) return;
    to_device_ = groups.find_stream(Lane::to_device);
    to_host_ = groups.find_stream(Lane::to_host);
    const int64_t rows = config.layout.tensor.stream_rows(config.share(config.batch, Purpose::train).rows());
    for (Buffers* buffers : {&leaving_, &arriving_})
      for (Buffer& b : *buffers)
        b.memory = context.arena.alloc("offloaded activations", "out", config.precision.activations,
                                       {rows, config.part().n_embd});
  }

  // Outputs that are kept in host memory get their place on the device.
  void place(Slot& slot, ActionKind kind) {
    for (size_t l = 0; l < slot.blocks.size(); ++l)
      if (is_at_host(slot, l))
        slot.blocks[l].out =
            buffer(kind == ActionKind::forward ? leaving_ : arriving_, l).memory.slice(0, slot.at_host[l].shape);
  }

  // Before and after the forward of a block.
  void begin_output(const Slot& slot, size_t l) {
    if (is_at_host(slot, l)) compute_.wait(buffer(leaving_, l).event);
  }
  void keep_output(const Slot& slot, size_t l) {
    if (!is_at_host(slot, l)) return;
    to_host_->wait(compute_.record());
    copy_to_host(slot.at_host[l], slot.blocks[l].out, *to_host_);
    buffer(leaving_, l).event = to_host_->record();
  }

  // Before the backward of a chunk: its last outputs begin to come.
  void begin_backward(const Slot& slot) {
    next_ = slot.blocks.size();
    arrived_ = {};
    if (to_host_ == nullptr) return;
    to_device_->wait(to_host_->record());
    for (int i = 0; i < 2; ++i) fetch(slot);
  }
  // Before block `l` is recomputed or goes back: its input is there. After that: nobody reads it any more.
  void need_input(const Slot& slot, size_t l) {
    if (l == 0 || !is_at_host(slot, l - 1) || arrived_ == l) return;
    compute_.wait(buffer(arriving_, l - 1).event);
    arrived_ = l;
  }
  void drop_input(const Slot& slot, size_t l) {
    if (l == 0 || !is_at_host(slot, l - 1)) return;
    buffer(arriving_, l - 1).event = compute_.record();
    fetch(slot);
  }

 private:
  struct Buffer {
    Tensor memory;
    Event event;  // leaving: it is copied; arriving: it is there or, before the next one comes, nobody reads it
    Buffer() { event.signal(); }
  };
  using Buffers = std::array<Buffer, 2>;

  static bool is_at_host(const Slot& slot, size_t l) { return l < slot.at_host.size() && !slot.at_host[l].empty(); }
  Buffer& buffer(Buffers& buffers, size_t l) const { return buffers[l / segment_ % 2]; }
  // The output of the block before those that came last.
  void fetch(const Slot& slot) {
    while (next_ > 0 && !is_at_host(slot, next_ - 1)) --next_;
    if (next_ == 0) return;
    const size_t l = --next_;
    Buffer& b = buffer(arriving_, l);
    to_device_->wait(b.event);
    copy_to_device(slot.blocks[l].out, slot.at_host[l], *to_device_);
    b.event = to_device_->record();
  }

  size_t segment_;
  Stream& compute_;
  Stream *to_device_ = nullptr, *to_host_ = nullptr;  // none: nothing is in host memory
  Buffers leaving_, arriving_;
  size_t next_ = 0;                     // outputs of blocks from here on have been fetched
  std::optional<size_t> arrived_ = {};  // the block whose input was waited for last
};

}  // namespace llmc
