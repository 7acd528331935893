// tensor.h: a non-owning view of memory: name, dtype, shape, pointer and where the memory is.
#pragma once
#include "core/dtype.h"
#include "core/shape.h"

namespace llmc {

class ScratchFile;

struct Tensor {
  const char* name = "";  // the allocation's; for messages
  DType dtype = DType::fp32;
  Shape shape;
  std::byte* bytes = nullptr;
  ScratchFile* file = nullptr;  // that has it instead of memory; `bytes` is then a place in the file (arena.h)

  int64_t numel() const { return shape.numel(); }
  int64_t size_bytes() const { return numel() * size_of(dtype); }
  bool empty() const { return bytes == nullptr; }

  template <class T>
  T* data() const {
    CHECK(dtype == dtype_of<T>(), "tensor {} holds {}, asked for as {}", name, dtype, dtype_of<T>());
    return reinterpret_cast<T*>(bytes);
  }

  // `n` elements from element `begin` of the flat contents, with another shape.
  Tensor slice(int64_t begin, const Shape& as) const {
    CHECK(begin >= 0 && begin + as.numel() <= numel());
    Tensor part = *this;
    part.bytes = bytes + begin * size_of(dtype);
    part.shape = as;
    return part;
  }
  Tensor reshaped(const Shape& as) const {
    CHECK(as.numel() == numel());
    return slice(0, as);
  }
};

}  // namespace llmc
