// arena.h: a bump allocator: every allocation has a name, scopes free in reverse order, and a table lists what was live
// at the high-water mark.
#pragma once
#include <sys/mman.h>

#include <cerrno>

#include "core/scratch_file.h"
#include "device/device.h"

namespace llmc {

// One line of the memory table: all live bytes under one label.
struct MemoryLine {
  std::string label;
  int64_t bytes = 0;
};

// Whose memory an arena takes: the device's, or its host's, which a GPU reads and writes over the bus. For a CPU both
// are the same memory. Or a file's: only HostView and its like (host_copy.h) and shard/host_state.h read and write
// that, and pointers to it are places in the file, where no memory is.
enum class MemoryOf : uint8_t { device, host, file };

class Arena {
 public:
  static constexpr int64_t alignment = 256;

  // capacity: in bytes. The null device has no memory and no limit; it only counts.
  Arena(Device device, int64_t capacity = 0, MemoryOf whose = MemoryOf::device) : device_(device), whose_(whose) {
    if (whose == MemoryOf::host) base_ = nowhere(41);
    if (whose == MemoryOf::file) base_ = file_begin();
    reserve(capacity);
  }
  // Takes the memory, once, before the first tensor: for an arena made before others, such as NCCL, take theirs.
  void reserve(int64_t capacity) {
    CHECK(capacity_ == 0, "an arena takes its memory once");
    if (device_.kind == DeviceKind::null) return;
    const int64_t wanted = round_up(capacity, alignment);
    if (wanted == 0) return;
    CHECK(whose_ != MemoryOf::file, "an arena of a file takes that file");
    base_ = take(static_cast<size_t>(wanted));
    capacity_ = wanted;
  }
  void reserve(std::unique_ptr<ScratchFile> file) {
    CHECK(whose_ == MemoryOf::file && capacity_ == 0, "an arena takes its file once");
    file_ = std::move(file);
    capacity_ = file_->bytes();
  }
  // Where in its file a tensor is that a file has.
  static int64_t offset_of(const Tensor& t) { return t.bytes - file_begin(); }
  // On a CPU, faults in all pages, on all threads; contents are kept. If the system refuses, first use does it.
  void touch() {
    if (device_.kind != DeviceKind::cpu || whose_ == MemoryOf::file) return;
    constexpr int64_t piece = 16 << 20;
#pragma omp parallel for schedule(dynamic) num_threads(device_.threads)
    for (int64_t begin = 0; begin < capacity_; begin += piece) {
      const int64_t bytes = std::min(piece, capacity_ - begin);
#ifdef MADV_POPULATE_WRITE
      if (madvise(base_ + begin, static_cast<size_t>(bytes), MADV_POPULATE_WRITE) == 0 || errno != EINVAL) continue;
#endif
      for (int64_t i = begin; i < begin + bytes; i += 4096) {  // kernels before 5.14 do not know the flag
        volatile std::byte& at = base_[i];
        at = at;
      }
    }
  }
  ~Arena() {
    if (device_.kind == DeviceKind::null || capacity_ == 0 || file_) return;
#ifdef TRAIN_GPT_CUDA
    if (device_.kind == DeviceKind::cuda && whose_ == MemoryOf::device) cuda::release(base_);
#endif
    if (device_.kind == DeviceKind::cpu) munmap(base_, static_cast<size_t>(capacity_));
  }

  // Uninitialised memory under `label` (the line of the table) for a tensor called `name`.
  Tensor alloc(const char* label, const char* name, DType dtype, const Shape& shape) {
    const int64_t bytes = round_up(shape.numel() * size_of(dtype), alignment);
    CHECK(device_.kind == DeviceKind::null || used_ + bytes <= capacity_,
          "the arena is full: {} ({}) needs {} bytes, {} of {} are in use; the plan missed this allocation", name,
          label, bytes, used_, capacity_);
    Tensor tensor{.name = name, .dtype = dtype, .shape = shape, .bytes = base_ + used_, .file = file_.get()};
    if (used_ + bytes > high_water_) high_water_ = used_ + bytes, rising_ = true;
    else keep_table();
    used_ += bytes;
    line(label).bytes += bytes;
    stack_.emplace_back(label, bytes);
    return tensor;
  }

  // Frees everything allocated during its lifetime.
  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), mark_(arena.stack_.size()) {}
    ~Scope() { arena_.release_to(mark_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    size_t mark_;
  };
  [[nodiscard]] Scope scope() { return Scope(*this); }

  int64_t used() const { return used_; }
  const Device& device() const { return device_; }
  int64_t high_water() const { return high_water_; }
  const std::vector<MemoryLine>& table() const { return rising_ ? live_ : table_at_high_water_; }

  // Fills free memory with NaN (in every floating-point dtype), so that tests find reads of uninitialised memory.
  void poison_free() {
    if (capacity_ == 0 || device_.kind == DeviceKind::null) return;
    if (file_) return file_->fill(std::byte{0xff}, capacity_ - used_, used_);
#ifdef TRAIN_GPT_CUDA
    if (device_.kind == DeviceKind::cuda && whose_ == MemoryOf::device)
      return cuda::fill_now(base_ + used_, 0xff, capacity_ - used_);
#endif
    std::fill(base_ + used_, base_ + capacity_, std::byte{0xff});
  }

 private:
  std::byte* take(size_t bytes) {
#ifdef TRAIN_GPT_CUDA
    if (device_.kind == DeviceKind::cuda && whose_ == MemoryOf::device) return cuda::allocate(device_.gpu, bytes);
    if (device_.kind == DeviceKind::cuda) return pinned_.emplace(bytes).data();
#endif
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<std::byte*>(memory);
  }
  MemoryLine& line(const char* label) {
    for (size_t i = 0; i < live_.size(); ++i)  // labels are literals: most are found by their address
      if (labels_[i] == label) return live_[i];
    for (MemoryLine& l : live_)
      if (l.label == label) return l;
    labels_.push_back(label);
    return live_.emplace_back(MemoryLine{label, 0});
  }
  // What is live at the high-water mark is copied once it changes.
  void keep_table() {
    if (std::exchange(rising_, false)) table_at_high_water_ = live_;
  }
  void release_to(size_t mark) {
    if (stack_.size() > mark) keep_table();
    while (stack_.size() > mark) {
      const auto& [label, bytes] = stack_.back();
      used_ -= bytes;
      line(label).bytes -= bytes;
      stack_.pop_back();
    }
  }

  Device device_;
  MemoryOf whose_;
  int64_t capacity_ = 0, used_ = 0, high_water_ = 0;
  static std::byte* file_begin() { return nowhere(42); }
  static std::byte* nowhere(int bit) { return reinterpret_cast<std::byte*>(uintptr_t{1} << bit); }
  std::byte* base_ = nowhere(40);      // null device: never dereferenced
  std::unique_ptr<ScratchFile> file_;  // none: memory
  std::vector<std::pair<const char*, int64_t>> stack_;
  std::vector<MemoryLine> live_, table_at_high_water_;
  std::vector<const char*> labels_;  // of the lines that are live
  bool rising_ = false;              // the lines that are live are those of the high-water mark
#ifdef TRAIN_GPT_CUDA
  std::optional<cuda::PinnedMemory> pinned_;
#endif
};

}  // namespace llmc
