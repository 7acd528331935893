// weight_versions.h: versions of the weights, for an asynchronous pipeline (PipeDream's weight stashing): the backward
// of a micro-batch reads the version that its forward read.
#pragma once
#include "shard/units.h"

namespace llmc {

class WeightVersions {
 public:
  // There must be no more micro-batches between forward and backward than versions are kept.
  WeightVersions(Units& units, int64_t versions) : units_(units), read_by_(static_cast<size_t>(versions)) {}

  bool several() const { return read_by_.size() > 1; }
  void begin_forward(int64_t micro_batch) {
    use(newest_);
    read_by(micro_batch) = newest_;
  }
  void begin_backward(int64_t micro_batch) { use(read_by(micro_batch)); }
  // The next update makes a new version from a copy of the newest, in the place of the oldest.
  void begin_version(Stream& compute) {
    const size_t before = newest_;
    newest_ = (newest_ + 1) % read_by_.size();
    use(newest_);
    units_.for_each([&](size_t u) {
      if (newest_ != before) copy(units_.unit(u).version(newest_), units_.unit(u).version(before), compute);
      units_.unit(u).weights_changed();
    });
  }
  // After a flush only the newest version is read.
  void forget_old(Stream& compute) {
    units_.for_each([&](size_t u) {
      for (size_t v = 0; v < read_by_.size(); ++v)
        if (v != newest_) units_.groups().hooks.released(units_.unit(u).version(v), compute);
    });
  }

 private:
  void use(size_t version) {
    units_.for_each([&](size_t u) { units_.unit(u).use_version(version); });
  }
  size_t& read_by(int64_t micro_batch) { return read_by_[static_cast<size_t>(micro_batch) % read_by_.size()]; }

  Units& units_;
  size_t newest_ = 0;
  std::vector<size_t> read_by_;  // the version that a micro-batch's forward read
};

}  // namespace llmc
