// host_copy.h: tensor contents on the host, and memory of the host for them. Only devices, ops and transports
// dereference a tensor's pointer; all other code uses these.
#pragma once
#include "device/arena.h"

namespace llmc {

namespace detail {

inline size_t bytes_of(const Tensor& t) { return static_cast<size_t>(t.size_bytes()); }

// `t` with its data at `host`.
inline Tensor at_host(Tensor t, std::byte* host) {
  t.bytes = host;
  t.file = nullptr;
  return t;
}

}  // namespace detail

// to = from, complete on return. gpu: a stream of the GPU that holds both; nullptr: both are in host memory.
inline void copy_now(void* to, const void* from, int64_t bytes, [[maybe_unused]] Stream* gpu) {
#ifdef TRAIN_GPT_CUDA
  if (gpu != nullptr) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, gpu->cuda()));
    return gpu->synchronize();
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// A read-only host view of `t` after all work enqueued so far: `t` itself where the device uses host memory.
class HostView {
 public:
  HostView(const Tensor& t, Stream& stream) : tensor_(t) {
    stream.synchronize();  // a peer's error ends this wait, but not that of the pageable copy
    if (t.file == nullptr && stream.device().kind != DeviceKind::cuda) return;
    copy_ = std::make_unique_for_overwrite<std::byte[]>(detail::bytes_of(t));
    tensor_ = detail::at_host(t, copy_.get());
    if (t.file != nullptr) t.file->read(copy_.get(), t.size_bytes(), Arena::offset_of(t));
    else copy_now(copy_.get(), t.bytes, t.size_bytes(), &stream);
  }
  const Tensor& tensor() const { return tensor_; }
  template <class T>
  const T* data() const {
    return tensor_.data<T>();
  }

 private:
  Tensor tensor_;
  std::unique_ptr<std::byte[]> copy_;  // if the tensor is in device memory, or in a file
};

// The values of `t` after all work enqueued so far.
template <class X>
std::vector<X> values_of(const Tensor& t, Stream& stream) {
  const HostView view(t, stream);
  std::vector<X> values(static_cast<size_t>(t.numel()));
  with_type(t.dtype, [&](auto tag) {
    const auto* from = view.data<typename decltype(tag)::type>();
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<X>(from[i]);
  });
  return values;
}

// Are all numbers of a tensor in host memory finite?
inline bool all_finite(const Tensor& host) {
  bool finite = true;
  with_type(host.dtype, [&](auto tag) {
    using X = typename decltype(tag)::type;
    const X* x = host.data<X>();
    std::conditional_t<std::is_same_v<X, double>, double, float> sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < host.numel(); ++i) sum += static_cast<decltype(sum)>(x[i]) * 0;  // NaN, if x[i] is not
    finite = sum == 0;
  });
  return finite;
}

// The values of a small fp64 tensor after all work enqueued so far, copied to the host asynchronously.
class Readback {
 public:
  Readback() = default;
  Readback(const Tensor& t, Stream& stream) : size_(static_cast<size_t>(t.numel())) {
    CHECK(t.dtype == DType::fp64);
    if (stream.device().kind == DeviceKind::null) return;
    moves_data_ = true;
#ifdef TRAIN_GPT_CUDA
    if (stream.device().kind == DeviceKind::cuda) {
      arrival_ = stream.gpu().download(t.bytes, detail::bytes_of(t));
      return;
    }
#endif
    host_ = std::make_shared<std::vector<double>>(size_);
    stream.enqueue([t, host = host_] { std::memcpy(host->data(), t.bytes, detail::bytes_of(t)); });
    copied_ = stream.record();
  }

  bool moves_data() const { return moves_data_; }  // the null device does not
  // Waits for the values; throws the errors of earlier work. Zeros on the null device.
  std::vector<double> values() const {
    std::vector<double> all(size_);
#ifdef TRAIN_GPT_CUDA
    if (arrival_) std::memcpy(all.data(), arrival_->wait(), size_ * sizeof(double));
#endif
    if (host_) copied_.wait(), all = *host_;
    return all;
  }

 private:
  size_t size_ = 0;
  bool moves_data_ = false;
  std::shared_ptr<std::vector<double>> host_;
  Event copied_;
#ifdef TRAIN_GPT_CUDA
  std::unique_ptr<cuda::Queue::Arrival> arrival_;
#endif
};

// f(host tensor) writes all of `t`, after everything enqueued so far.
template <class F>
void write_on_host(const Tensor& t, Stream& stream, F&& f) {
  stream.synchronize();
  if (t.file == nullptr && stream.device().kind != DeviceKind::cuda) return f(t);
  const auto host = std::make_unique_for_overwrite<std::byte[]>(detail::bytes_of(t));
  f(detail::at_host(t, host.get()));
  if (t.file != nullptr) t.file->write(host.get(), t.size_bytes(), Arena::offset_of(t));
  else copy_now(t.bytes, host.get(), t.size_bytes(), &stream);
}

// t = 0, in memory of the host that a GPU may read too, or in a file, after everything enqueued so far.
inline void zero_at_host(const Tensor& t, Stream& stream) {
  if (t.empty() || stream.device().kind == DeviceKind::null) return;
  stream.synchronize();
  if (t.file != nullptr) return t.file->fill(std::byte{0}, t.size_bytes(), Arena::offset_of(t));
  std::memset(t.bytes, 0, detail::bytes_of(t));
}

// t = values, in stream order.
template <class T>
void upload(const Tensor& t, std::vector<T> values, Stream& stream) {
  if (stream.device().kind == DeviceKind::null) return;
  CHECK(t.dtype == dtype_of<T>() && static_cast<int64_t>(values.size()) == t.numel(),
        "{} values for tensor {} of {} {}", values.size(), t.name, t.numel(), t.dtype);
#ifdef TRAIN_GPT_CUDA
  if (stream.device().kind == DeviceKind::cuda) return stream.gpu().upload(t.bytes, values.data(), detail::bytes_of(t));
#endif
  stream.enqueue([t, values = std::move(values)] { std::memcpy(t.bytes, values.data(), detail::bytes_of(t)); });
}

// Host memory for one message in each direction, through which tensors of a GPU go to another process.
class Staging {
 public:
  explicit Staging(int64_t bytes) : memory_(static_cast<size_t>(2 * bytes)), bytes_(bytes) {}
  std::byte* out() { return memory_.data(); }
  std::byte* in() { return out() + bytes_; }
  int64_t bytes() const { return bytes_; }  // per message

 private:
#ifdef TRAIN_GPT_CUDA
  cuda::PinnedMemory memory_;
#else
  std::vector<std::byte> memory_;
#endif
  int64_t bytes_;
};

// f(floats of t) is called in stream order, at the latest when the host waits for the stream. `t` is of a
// floating-point dtype.
template <class F>
void download(const Tensor& t, Stream& stream, F&& f) {
  if (stream.device().kind == DeviceKind::null) return;
  auto hand_over = [t, f = std::forward<F>(f)](const std::byte* bytes) mutable {
    std::vector<float> host(static_cast<size_t>(t.numel()));
    with_type(t.dtype, [&](auto tag) {
      const auto* from = reinterpret_cast<const typename decltype(tag)::type*>(bytes);
      for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(from[i]);
    });
    f(std::move(host));
  };
#ifdef TRAIN_GPT_CUDA
  if (stream.device().kind == DeviceKind::cuda)
    return stream.gpu().download(t.bytes, detail::bytes_of(t), std::move(hand_over));
#endif
  stream.enqueue([t, hand_over = std::move(hand_over)]() mutable { hand_over(t.bytes); });
}

// Memory of the host for copies of what a device holds, counted by an arena; for a GPU pinned: copies run at bus speed.
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
