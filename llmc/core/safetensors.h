// safetensors.h: the safetensors format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes.
// https://huggingface.co/docs/safetensors. Knows no model.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/checksum.h"
#include "core/dtype.h"

namespace llmc {

struct TensorInfo {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
  int64_t numel() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  int64_t bytes() const { return numel() * size_of(dtype); }
};

namespace detail {
inline constexpr std::pair<DType, const char*> safetensors_dtypes[] = {
    {DType::fp32, "F32"}, {DType::bf16, "BF16"}, {DType::fp16, "F16"}, {DType::fp64, "F64"}, {DType::int32, "I32"}};
}  // namespace detail

// Tensors are written in the order of the list, each in any number of pieces.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, const std::vector<TensorInfo>& tensors) : file_(path) {
    nlohmann::ordered_json header;
    header["__metadata__"] = {{"format", "pt"}};
    for (const TensorInfo& t : tensors) {
      const char* dtype = nullptr;
      for (const auto& [d, name] : detail::safetensors_dtypes)
        if (d == t.dtype) dtype = name;
      header[t.name] = {{"dtype", dtype}, {"shape", t.shape}, {"data_offsets", {left_, left_ + t.bytes()}}};
      left_ += t.bytes();
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t length = text.size();
    file_.write(&length, sizeof length);
    file_.write(text.data(), static_cast<int64_t>(text.size()));
  }
  void write(const void* data, int64_t bytes) {
    file_.write(data, bytes);
    left_ -= bytes;
  }
  FileRecord finish() {
    CHECK(left_ == 0);
    return file_.finish();
  }

 private:
  RecordedFile file_;
  int64_t left_ = 0;
};

class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path) : file_(File::open_read(path)) {
    const int64_t size = file_.size();
    uint64_t length = 0;
    CHECK(size >= 8, "{}: {} bytes are too few for a safetensors file", path, size);
    file_.read_at(&length, 8, 0);
    CHECK(length <= static_cast<uint64_t>(size - 8),
          "{}: a header of {} bytes in a file of {}; not a safetensors file, or truncated", path, length, size);
    std::string text(length, '\0');
    file_.read_at(text.data(), static_cast<int64_t>(length), 8);
    const nlohmann::json header = nlohmann::json::parse(text, nullptr, false);
    CHECK(header.is_object(), "{}: the header is not JSON; not a safetensors file, or damaged", path);
    data_begin_ = 8 + static_cast<int64_t>(length);
    for (const auto& [name, entry] : header.items())
      if (name != "__metadata__") add(name, entry, size - data_begin_);
  }

  const std::string& path() const { return file_.path(); }
  bool has(const std::string& name) const { return tensors_.contains(name); }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, entry] : tensors_) all.push_back(name);
    return all;
  }
  const TensorInfo& info(const std::string& name) const { return find(name).info; }
  void read(const std::string& name, void* out) const {
    const Entry& e = find(name);
    file_.read_at(out, e.info.bytes(), data_begin_ + e.begin);
  }
  // `n` elements from element `first` of the flat contents.
  void read(const std::string& name, void* out, int64_t first, int64_t n) const {
    const Entry& e = find(name);
    CHECK(first >= 0 && first + n <= e.info.numel());
    file_.read_at(out, n * size_of(e.info.dtype), data_begin_ + e.begin + first * size_of(e.info.dtype));
  }

 private:
  struct Entry {
    TensorInfo info;
    int64_t begin;
  };

  const Entry& find(const std::string& name) const {
    const auto found = tensors_.find(name);
    CHECK(found != tensors_.end(), "{}: has no tensor {}", path(), name);
    return found->second;
  }

  void add(const std::string& name, const nlohmann::json& entry, int64_t data_bytes) {
    Entry e{{name, DType::fp32, {}}, 0};
    int64_t end = 0;
    std::string dtype;
    try {
      dtype = entry.at("dtype").get<std::string>();
      e.info.shape = entry.at("shape").get<std::vector<int64_t>>();
      e.begin = entry.at("data_offsets").at(0).get<int64_t>();
      end = entry.at("data_offsets").at(1).get<int64_t>();
    } catch (const nlohmann::json::exception&) {
      throw Error(formatted("{}: the entry of tensor {} is {}, expected dtype, shape and data_offsets", path(), name,
                            entry.dump()));
    }
    const auto* known = std::find_if(std::begin(detail::safetensors_dtypes), std::end(detail::safetensors_dtypes),
                                     [&](const auto& d) { return dtype == d.second; });
    CHECK(known != std::end(detail::safetensors_dtypes), "{}: tensor {} has dtype {}, supported are F32, BF16 and F16",
          path(), name, dtype);
    e.info.dtype = known->first;
    for (int64_t d : e.info.shape)
      CHECK(d >= 0 && d < (int64_t{1} << 48), "{}: tensor {} has the dimension {}", path(), name, d);
    CHECK(e.begin >= 0 && end <= data_bytes && end - e.begin == e.info.bytes(),
          "{}: tensor {} lies at bytes {} to {} of {}, but its shape ({}) needs {}; the file is truncated or damaged",
          path(), name, e.begin, end, data_bytes, e.info.shape, e.info.bytes());
    tensors_.emplace(name, std::move(e));
  }

  File file_;
  int64_t data_begin_ = 0;
  std::map<std::string, Entry> tensors_;
};

}  // namespace llmc
