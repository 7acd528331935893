// host_copy.h: a tensor's contents on the host. Only devices, ops and transports follow a tensor's pointer; everyone
// else goes through these.
#pragma once
#include <cstring>
#include <utility>
#include <vector>

#include "device/device.h"

namespace llmc {

// The contents of `t` behind everything enqueued so far, as a tensor in the host's memory, to be read: `t` itself where
// the device works in the host's memory.
class HostView {
 public:
  HostView(const Tensor& t, Stream& stream) : tensor_(t) { stream.synchronize(); }
  const Tensor& tensor() const { return tensor_; }
  template <class T>
  const T* data() const {
    return tensor_.data<T>();
  }

 private:
  Tensor tensor_;
};

// f(host tensor) writes all of `t`, behind everything enqueued so far.
template <class F>
void write_on_host(const Tensor& t, Stream& stream, F&& f) {
  stream.synchronize();
  f(t);
}

// t = values, when the stream gets there.
template <class T>
void upload(const Tensor& t, std::vector<T> values, Stream& stream) {
  if (stream.device().kind == DeviceKind::null) return;
  CHECK(t.dtype == dtype_of<T>() && static_cast<int64_t>(values.size()) == t.numel(),
        "{} values for tensor {} of {} {}", values.size(), t.name, t.numel(), t.dtype);
  stream.enqueue(
      [t, values = std::move(values)] { std::memcpy(t.bytes, values.data(), static_cast<size_t>(t.size_bytes())); });
}

// f(floats of t) is called when the stream gets there. `t` is of a floating-point dtype.
template <class F>
void download(const Tensor& t, Stream& stream, F&& f) {
  if (stream.device().kind == DeviceKind::null) return;
  stream.enqueue([t, f = std::forward<F>(f)]() mutable {
    std::vector<float> host(static_cast<size_t>(t.numel()));
    with_type(t.dtype, [&](auto tag) {
      const auto* from = t.data<typename decltype(tag)::type>();
      for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(from[i]);
    });
    f(std::move(host));
  });
}

}  // namespace llmc
