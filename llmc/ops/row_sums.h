// row_sums.h: gradients of biases and of norm weights are sums over rows. On a GPU the blocks of an op sum parts of the
// rows, and another kernel adds up the parts: of one op, or of all ops of a layer at once.
#pragma once
#include "ops/ops_memory.h"

namespace llmc {
namespace detail {

// A stream's sums whose parts are there, on a GPU or on paper.
struct WaitingSums {
  Tensor room = {};                  // (n) fp32, for the parts; an empty tensor: sums do not wait
  int64_t used = 0;                  // of its elements
  std::vector<Tensor> outputs = {};  // what they are added to
  std::vector<RowSum> sums = {};     // on a GPU

  void add(Stream& stream) {
    if (outputs.empty()) return;
    stream.run({"add_row_sums", 0, bytes_of({room.slice(0, {used})})}, outputs,
               [this, &stream] { RUN_ON_DEVICE(stream, void, cuda::add_partials(sums, stream.cuda()), (void)0); });
    used = 0;
    outputs.clear(), sums.clear();
  }
  void add_later(const Tensor& output) {
    for (const Tensor& other : outputs)
      CHECK(other.bytes != output.bytes, "two sums over rows that wait are to be added to {}", output.name);
    outputs.push_back(output);
  }
};

// Scratch for the parts of an op's sums, which wait if there is room for them.
class PartsOfSums {
 public:
  // on_cpu, on_gpu: elements; outputs: what the sums are added to, or empty tensors
  PartsOfSums(Stream& stream, const char* name, std::initializer_list<Tensor> outputs, int64_t on_cpu, int64_t on_gpu) {
    WaitingSums& all = stream.kept<WaitingSums>();
    const int64_t n = round_up(on_gpu, Arena::alignment / size_of(DType::fp32));
    if (all.room.empty() || n > all.room.numel()) {
      parts_ = scratch(stream, name, outputs.begin()->dtype, on_cpu, on_gpu);
      return;
    }
    if (all.used + n > all.room.numel()) all.add(stream);
    parts_ = all.room.slice(all.used, {n});
    waiting_ = &all.sums;
    all.used += n;
    for (const Tensor& output : outputs)
      if (!output.empty()) all.add_later(output);
  }
  template <class A>
  RowParts<A> room() const {
    return {parts_.data<A>(), waiting_};
  }

 private:
  Tensor parts_;
  std::vector<RowSum>* waiting_ = nullptr;
};

}  // namespace detail

// While one exists, ops on the stream leave the parts of their sums for add(), if they compute on a GPU. No two of them
// may add to the same gradient.
class RowSumsTogether {
 public:
  // bytes: of room for the parts; when it is full, they are added up early
  explicit RowSumsTogether(Stream& stream, int64_t bytes = 16 << 20)
      : stream_(stream), scope_(stream.scratch().scope()) {
    CHECK(waiting().room.empty(), "sums over rows of this stream are added up together already");
    if (stream.device().computes_as() == DeviceKind::cuda)
      waiting().room = stream.scratch().alloc("scratch", "sums over rows", DType::fp32, {bytes / size_of(DType::fp32)});
  }
  RowSumsTogether(const RowSumsTogether&) = delete;
  RowSumsTogether& operator=(const RowSumsTogether&) = delete;
  ~RowSumsTogether() { waiting() = {}; }

  void add() { waiting().add(stream_); }

 private:
  detail::WaitingSums& waiting() const { return stream_.kept<detail::WaitingSums>(); }
  Stream& stream_;
  Arena::Scope scope_;
};

}  // namespace llmc
