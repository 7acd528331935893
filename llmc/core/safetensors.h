// safetensors.h: the safetensors format: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.
// https://huggingface.co/docs/safetensors. Independent of any model.
#pragma once
#include "core/checksum.h"
#include "core/dtype.h"

namespace llmc {

struct TensorInfo {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
  int64_t numel() const { return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()); }
  int64_t bytes() const { return numel() * size_of(dtype); }
};

namespace detail {
inline constexpr std::pair<DType, const char*> safetensors_dtypes[] = {
    {DType::fp32, "F32"}, {DType::bf16, "BF16"}, {DType::fp16, "F16"}, {DType::fp64, "F64"}, {DType::int32, "I32"}};
}  // namespace detail

// Writes tensors in list order, each in any number of pieces.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, const std::vector<TensorInfo>& tensors) : file_(path) {
    nlohmann::ordered_json header;
    header["__metadata__"] = {{"format", "pt"}};
    for (const TensorInfo& t : tensors) {
      const char* dtype = nullptr;
      for (const auto& [d, name] : detail::safetensors_dtypes)
        if (d == t.dtype) dtype = name;
      append_member(header, t.name,
                    {{"dtype", dtype}, {"shape", t.shape}, {"data_offsets", {left_, left_ + t.bytes()}}});
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
    CHECK(length <= static_cast<uint64_t>(size - 8) && length <= largest_header,
          "{}: a header of {} bytes in a file of {}; not a safetensors file, or truncated", path, length, size);
    std::string text(length, '\0');
    file_.read_at(text.data(), static_cast<int64_t>(length), 8);
    const nlohmann::json header = parse_json(text, path + ": the header of a safetensors file");
    CHECK(header.is_object(), "{}: the header is {}, expected a JSON object; not a safetensors file, or damaged", path,
          header);
    data_begin_ = 8 + static_cast<int64_t>(length);
    for (const auto& [name, entry] : header.items())
      if (name != "__metadata__") add(name, entry, size - data_begin_);
    check_places(size - data_begin_);
  }

  const std::string& path() const { return file_.path(); }
  bool has(const std::string& name) const { return tensors_.contains(name); }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, entry] : tensors_) all.push_back(name);
    return all;
  }
  const TensorInfo& info(const std::string& name) const { return find(name).info; }
  void read(const std::string& name, void* out) const { read(name, out, 0, info(name).numel()); }
  // `n` elements of the flat contents, from element `first`.
  void read(const std::string& name, void* out, int64_t first, int64_t n) const {
    const Entry& e = find(name);
    CHECK(first >= 0 && first + n <= e.info.numel());
    file_.read_at(out, n * size_of(e.info.dtype), data_begin_ + e.begin + first * size_of(e.info.dtype));
  }

 private:
  static constexpr uint64_t largest_header = 100'000'000;  // the format's limit

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
    const nlohmann::json dtype = member(entry, "dtype"), shape = member(entry, "shape"),
                         offsets = member(entry, "data_offsets");
    CHECK(dtype.is_string() && shape.is_array() && offsets.is_array(),
          "{}: the entry of tensor {} is {}, expected dtype, shape and data_offsets", path(), shown(name), entry);
    const auto* known = std::find_if(std::begin(detail::safetensors_dtypes), std::end(detail::safetensors_dtypes),
                                     [&](const auto& d) { return dtype == d.second; });
    CHECK(known != std::end(detail::safetensors_dtypes), "{}: tensor {} has dtype {}, expected F32, BF16 or F16",
          path(), shown(name), shown(dtype.get_ref<const std::string&>()));
    Entry e{{name, known->first, {}}, 0};
    int64_t bytes = size_of(known->first);
    for (const nlohmann::json& d : shape) {
      const std::optional<int64_t> dimension = whole_number(d);
      CHECK(dimension, "{}: tensor {} has dimension {}, expected a non-negative integer", path(), shown(name), d);
      CHECK(!__builtin_mul_overflow(bytes, *dimension, &bytes),
            "{}: tensor {} has more bytes than fit into 64 bits: {}", path(), shown(name), shape);
      e.info.shape.push_back(*dimension);
    }
    const std::optional<int64_t> begin = offsets.size() == 2 ? whole_number(offsets[0]) : std::nullopt,
                                 end = offsets.size() == 2 ? whole_number(offsets[1]) : std::nullopt;
    CHECK(begin && end, "{}: tensor {} has data_offsets {}, expected two non-negative integers", path(), shown(name),
          offsets);
    CHECK(*end <= data_bytes && *end - *begin == bytes,
          "{}: tensor {} lies at bytes {} to {} of {}, but its shape ({}) needs {}; the file is truncated or damaged",
          path(), shown(name), *begin, *end, data_bytes, shown(formatted("{}", e.info.shape)), bytes);
    e.begin = *begin;
    tensors_.emplace(name, std::move(e));
  }

  // The format requires every byte to belong to exactly one tensor.
  void check_places(int64_t data_bytes) const {
    std::vector<const Entry*> order;
    for (const auto& [name, entry] : tensors_) order.push_back(&entry);
    std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) {
      return std::pair(a->begin, a->info.bytes()) < std::pair(b->begin, b->info.bytes());
    });
    int64_t at = 0;
    for (const Entry* e : order) {
      CHECK(e->begin >= at, "{}: tensor {} begins at byte {}, before the previous one ends at {}; the file is damaged",
            path(), shown(e->info.name), e->begin, at);
      CHECK(e->begin == at, "{}: bytes {} to {}, before tensor {}, belong to no tensor; the file is damaged", path(),
            at, e->begin, shown(e->info.name));
      at += e->info.bytes();
    }
    CHECK(at == data_bytes, "{}: bytes {} to {} at the end belong to no tensor; the file is damaged", path(), at,
          data_bytes);
  }

  File file_;
  int64_t data_begin_ = 0;
  std::map<std::string, Entry> tensors_;
};

using SafetensorsFiles = std::vector<std::unique_ptr<const SafetensorsReader>>;

}  // namespace llmc
