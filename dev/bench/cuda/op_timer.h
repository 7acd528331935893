// op_timer.h: times single ops of llmc/ops/ops.h on a GPU: memory, random inputs, and the median time of an op whose
// inputs are not cached.
#pragma once
#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "device/host_copy.h"
#include "ops/ops.h"

namespace llmc {

struct OpTime {
  std::string op, shape;
  double calls;         // per training step
  double flops, bytes;  // per call, as booked by the op
  double seconds, fastest;
};

class OpTimer {
 public:
  struct Settings {
    int64_t repeats, flush_bytes;
  };
  struct Memory {
    int64_t arena = 0, scratch = 0;
  };

  OpTimer(const Device& device, const Memory& memory, const Settings& settings)
      : settings_(settings),
        arena_(device, memory.arena),
        scratch_(device, memory.scratch),
        stream_(device, scratch_),
        flush_sum_(tensor(DType::fp64, {1})),
        flush_partials_(tensor(DType::fp64, {ceil_div(settings.flush_bytes / 4, square_sum_block)})),
        flush_(filled(0, {settings.flush_bytes / 4})) {}

  // Calls `measure(timer)` twice: on the null device to find how much memory it needs, then on the device.
  template <class Measure>
  static std::vector<OpTime> run(const Device& device, const Settings& settings, Measure&& measure) {
    OpTimer paper(device.on_paper(), {}, settings);
    measure(paper);
    OpTimer timer(device, {paper.arena_.high_water(), paper.scratch_.high_water()}, settings);
    measure(timer);
    return timer.times_;
  }

  Stream& stream() { return stream_; }
  [[nodiscard]] Arena::Scope scope() { return arena_.scope(); }

  Tensor tensor(DType dtype, const Shape& shape) { return arena_.alloc("ops", "operand", dtype, shape); }
  detail::Quantised room_in_fp8(const Tensor& t, detail::Role role, detail::SumAlong sum, Operands read) {
    return detail::room_in_fp8(t, role, sum, read, stream_.device(), arena_, "ops");
  }
  // Zeros would draw less power, and so run faster, than real training data.
  Tensor normal(const Shape& shape, float stddev = 1) {
    const Tensor t = tensor(DType::bf16, shape);
    init_normal(t, stddev, {}, seed_++, "normal", stream_);
    return t;
  }
  Tensor filled(float value, const Shape& shape) {
    const Tensor t = tensor(DType::fp32, shape);
    fill(t, value, stream_);
    return t;
  }
  Tensor integers(std::vector<int32_t> values) {
    const Tensor t = tensor(DType::int32, {static_cast<int64_t>(values.size())});
    upload(t, std::move(values), stream_);
    return t;
  }
  // Token ids distributed as in text (Zipf's law).
  Tensor token_ids(int64_t n, int64_t vocabulary) {
    std::mt19937_64 random(seed_++);
    std::uniform_real_distribution<double> logarithm(0, std::log(static_cast<double>(vocabulary)));
    std::vector<int32_t> ids(static_cast<size_t>(n));
    for (int32_t& id : ids) id = static_cast<int32_t>(std::exp(logarithm(random))) - 1;
    return integers(std::move(ids));
  }

  // Times each op that `ops` enqueues. Before each op it reads a large array, which evicts the inputs from the caches
  // and keeps the GPU busy while the host launches, so that the time excludes launch latency.
  void measure(const std::string& shape, double calls, const std::function<void()>& ops) {
    constexpr int64_t warm_up = 3;
    const bool on_paper = stream_.device().kind == DeviceKind::null;
    std::map<std::string, std::vector<double>> seconds;
    OpLedger ledger;
    for (int64_t i = 0; i < (on_paper ? 1 : warm_up + settings_.repeats); ++i) {
      stream_.synchronize();
      ledger.clear();
      stream_.set_ledger(&ledger);
      flush_caches();
      ops();
      stream_.synchronize();
      stream_.set_ledger(nullptr);
      if (i < warm_up) continue;
      for (const auto& [op, totals] : ledger) seconds[op].push_back(totals.seconds);
    }
    for (auto& [op, times] : seconds) {
      std::sort(times.begin(), times.end());
      times_.push_back({op, shape, calls, ledger[op].flops, ledger[op].bytes, times[times.size() / 2], times[0]});
    }
  }

 private:
  void flush_caches() {
    stream_.enqueue([this] {
      cuda::square_sum(flush_sum_.data<double>(), flush_partials_.data<double>(), flush_.data<float>(), flush_.numel(),
                       Accumulate::no, stream_.cuda());
    });
  }

  Settings settings_;
  Arena arena_, scratch_;
  Stream stream_;
  Tensor flush_sum_, flush_partials_, flush_;
  uint64_t seed_ = 1;
  std::vector<OpTime> times_;
};

}  // namespace llmc
