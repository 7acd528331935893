// units.h: the units of a model that a rank has: those of its stage of the pipeline, and its part of each; buffers that
// they use in turn; and which version of their weights is in use.
#pragma once
#include "shard/unit_state.h"

namespace llmc {

// Which stage of a pipeline has which unit of a model; empty: one stage has all. copy_of_embedding: the stage that has
// a copy of the embedding because its head is tied to that table; -1: none.
struct StageUnits {
  std::vector<int> stage_of = {};
  int copy_of_embedding = -1;
  bool has(size_t unit, int stage) const {
    return stage_of.empty() || stage_of[unit] == stage || (unit == 0 && stage == copy_of_embedding);
  }
};

// What a rank keeps of the units of its stage.
struct StageState {
  StageUnits stages = {};
  int64_t blocks_open = 1;  // the most blocks whose gradients are begun and not yet reduced at the same time
  int64_t versions = 1;     // of the weights
  OffloadMemory offloaded = {};
};

// In the order of the model: the embedding, the blocks (and their experts, if they have any), the head.
class Units {
 public:
  Units(const ParamTable& table, const Precision& precision, const ZeroConfig& zero, Groups& groups, Arena& arena,
        const StageState& kept)
      : precision_(precision),
        zero_(zero),
        expert_zero_(groups.layout.expert_zero()),
        groups_(groups),
        stages_(kept.stages) {
    for (const UnitSpec& unit : table) {
      sharing_.push_back(unit.sharing);
      if (unit.sharing == Sharing::experts) require_expert_groups(unit);
      units_.push_back(stages_.has(units_.size(), groups.me.stage)
                           ? std::make_unique<UnitState>(unit, precision, zero_config(unit.sharing),
                                                         groups.sharers(unit.sharing).shard, arena, kept.offloaded,
                                                         kept.versions)
                           : nullptr);
    }
  }

  bool has(size_t index) const { return units_[index] != nullptr; }
  // The stage that has a unit; if two have it, the first.
  int stage_of(size_t index) const { return stages_.stage_of.empty() ? 0 : stages_.stage_of[index]; }
  // Whether this rank and another stage have the embedding, because the head is tied to it.
  bool shares_embedding() const { return stages_.copy_of_embedding >= 0 && has(0); }
  const UnitState& unit(size_t index) const { return *units_[index]; }
  UnitState& unit(size_t index) { return *units_[index]; }
  const UnitState& front() const { return *units_.front(); }
  size_t size() const { return units_.size(); }  // of the whole model
  int64_t size_of(size_t index) const { return has(index) ? unit(index).size() : 0; }
  // f(index) for each unit that this rank has.
  template <class F>
  void for_each(F&& f) const {
    for (size_t u = 0; u < size(); ++u)
      if (has(u)) f(u);
  }
  const ZeroConfig& zero_config(Sharing sharing = Sharing::dense) const {
    return sharing == Sharing::experts ? expert_zero_ : zero_;
  }
  Sharing sharing_of(size_t index) const { return sharing_[index]; }
  const Precision& precision() const { return precision_; }
  Groups& groups() const { return groups_; }
  Stream& lane(Lane own) const { return *groups_.find_stream(own); }  // one that has a stream of its own
  Groups::Sharers sharers(size_t index) const { return groups_.sharers(sharing_[index]); }

  StateTable state_table() const {
    StateTable table;
    for_each([&](size_t u) { unit(u).append_to(table); });
    return table;
  }
  StateTable gradient_table() const {
    StateTable table;
    for_each([&](size_t u) { unit(u).append_gradients_to(table); });
    return table;
  }

 private:
  void require_expert_groups(const UnitSpec& unit) const {
    CHECK(
        groups_.layout.tensor.ranks == 1 || groups_.layout.experts_apart(),
        "{}: with {} tensor-parallel ranks it has groups of its own, which were not made: ExpertParallel of {} experts",
        unit.name, groups_.layout.tensor.ranks, groups_.layout.expert.count);
    CHECK(zero_.sync == DpSync::all_reduce, "{}: the servers of --dp-sync {} cannot hold experts", unit.name,
          zero_.sync);
  }

  Precision precision_;
  ZeroConfig zero_, expert_zero_;  // of dense units, of experts
  Groups& groups_;
  StageUnits stages_;
  std::vector<std::unique_ptr<UnitState>> units_;  // none: on another stage
  std::vector<Sharing> sharing_;                   // of each unit of the model
};

// Buffers that units use in turn: one for the embedding, one for the head, some for the blocks, and as many for their
// experts, if any, which differ in size and are needed at the same time as the block.
class UnitBuffers {
 public:
  struct Buffer {
    Tensor memory;
    Event free, ready;
    bool in_use = false;
    explicit Buffer(Tensor m) : memory(m) { free.signal(); }
    // From here on the stream no longer uses it.
    void release(Stream& stream) {
      free = stream.record();
      in_use = false;
    }
  };

  UnitBuffers() = default;
  // for_blocks: how many the blocks use in turn; label: what the memory is for, in plans
  UnitBuffers(const Units& units, const char* label, DType dtype, int64_t for_blocks, Arena& arena) : units_(&units) {
    std::array<int64_t, kinds> largest = {};
    for (size_t u = 0; u < units.size(); ++u) {
      int64_t& size = largest[kind_of(u)];
      size = std::max(size, units.size_of(u));
    }
    for (size_t kind = 0; kind < kinds; ++kind)
      for (int64_t i = 0; i < (kind < blocks ? 1 : for_blocks); ++i)
        turns_[kind].buffers.emplace_back(largest[kind] > 0 ? arena.alloc(label, "unit", dtype, {largest[kind]})
                                                            : Tensor{});
  }

  // A buffer for a unit; none if all that it could have are in use.
  Buffer* take(size_t u) {
    auto& [buffers, turn] = turns_[kind_of(u)];
    size_t next = turn;
    for (size_t tried = 1; tried < buffers.size() && buffers[next % buffers.size()].in_use; ++tried) ++next;
    Buffer& buffer = buffers[next % buffers.size()];
    if (buffer.in_use) return nullptr;
    turn = next + 1;
    buffer.in_use = true;
    return &buffer;
  }

 private:
  static constexpr size_t embedding = 0, head = 1, blocks = 2, experts = 3, kinds = 4;  // of units
  size_t kind_of(size_t u) const {
    if (u == 0 || u + 1 == units_->size()) return u == 0 ? embedding : head;
    return units_->sharing_of(u) == Sharing::experts ? experts : blocks;
  }

  const Units* units_ = nullptr;
  struct Turn {
    std::vector<Buffer> buffers = {};
    size_t next = 0;
  };
  std::array<Turn, kinds> turns_;
};

// Versions of the weights, for an asynchronous pipeline (PipeDream's weight stashing): the backward of a micro-batch
// reads the version that its forward read.
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
