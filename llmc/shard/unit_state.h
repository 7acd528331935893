// unit_state.h: which part of a unit's weights, gradients, master weights and optimizer slots a rank holds; and the
// corresponding entries of the StateTable (state_table.h). No other file computes an offset from a number of ranks.
//
// A unit's flat buffer divides into as many equal shards as the shard group has ranks. Two ranges of it matter to a
// rank; they differ only at stage 0:
//
//   shard_range()    the shard of this rank: it reduces its gradients and contributes its square sum to the norm
//   update_range()   the part that this rank updates, and so holds masters and slots for: the whole unit at stage 0,
//                    where every rank repeats the same update; its own shard at stages 1 to 3. With a parameter server:
//                    the whole unit on the server, nothing on the other ranks; with partitioned ones: its own shard
//
// What is offloaded (core/offload.h) is in the host's memory or in a file, and the StateTable finds it there. An
// update reads and writes a piece of it that is attached on the device (host_state.h), or in host memory
// (host_update.h).
//
// llmc/README.md draws how a unit goes through a step at each stage.
#pragma once
#include "comm/groups.h"
#include "ops/ops.h"
#include "shard/fp8_weights.h"
#include "shard/unit_slots.h"

namespace llmc {

// What has the offloaded state of a rank (core/offload.h): memory of its host, or a file.
struct OffloadMemory {
  Arena *host = nullptr, *file = nullptr;  // none: nothing is there

  // Where this part of the state is; if it is not offloaded, in the device's memory.
  Arena& of(Offloaded part, const Offload& offload, Arena& device) const {
    Arena* const arena = offload.in_file(part) ? file : offload.has(part) ? host : &device;
    CHECK(arena != nullptr, "--offload {}: there is no {}", std::string(offload),
          offload.in_file(part) ? "file" : "host memory");
    return *arena;
  }
};

class UnitState {
 public:
  // versions: how many versions of the weights are kept; one is used at a time
  UnitState(const UnitSpec& spec, const Precision& precision, const ZeroConfig& zero, int shard, Arena& arena,
            const OffloadMemory& elsewhere = {}, int64_t versions = 1)
      : spec_(spec), layout_(spec, zero.ranks()), small_(precision.small_state()), zero_(zero) {
    const DType dtype = precision.weights, state = precision.state;
    find_copies();
    find_matrices();
    shard_range_ = {layout_.size / zero.shards * shard, layout_.size / zero.shards};
    update_range_ = update_range_of(layout_.size, zero, shard);
    auto flat = [&](const char* label, DType d, const Range& r, std::optional<Offloaded> part = std::nullopt) {
      Arena& memory = part ? elsewhere.of(*part, zero.offload, arena) : arena;
      return r.size == 0 ? Tensor{} : memory.alloc(label, spec_.name.c_str(), d, {r.size});
    };
    const Range whole{0, layout_.size};
    if (zero.stage == 3) {
      weight_shard_ = flat("weights", dtype, shard_range_, Offloaded::weights);
    } else {
      while (std::ssize(versions_) < versions)
        versions_.push_back(flat(versions_.empty() ? "weights" : "weight versions", dtype, whole));
      use_version(0);
    }
    if (spec_.block && precision.linear_of(*spec_.block) != Operands::as_stored)
      linear_ = linear_matrices_of(spec_, layout_);
    if (zero.stage != 3) fp8_ = Fp8Weights(linear_, versions_, precision.linear, spec_.name.c_str(), arena);
    if (zero.holds == Holds::weights) return;
    if (precision.keeps_masters())
      master_ = flat("master weights", precision.master_dtype(), update_range_, Offloaded::master);
    if (precision.averages) {
      CHECK(precision.keeps_masters() || dtype == state, "{} weights without a master copy have no average", dtype);
      average_ = flat("moving average of weights", state, update_range_, Offloaded::master);
    }
    if (zero.grad_reduce == GradReduce::step) gradients_ = flat("gradients", state, whole);
    else gradient_sum_ = flat("gradients", state, update_range_, Offloaded::gradients);
    slots_ = UnitSlots(spec_, layout_, zero, update_range_, precision,
                       elsewhere.of(Offloaded::moments, zero.offload, arena));
    if (zero.muon.rows == MuonRows::normalised) slots_.add_row_moments(spec_, shard, update_range_, state, arena);
  }

  const UnitSpec& spec() const { return spec_; }
  int64_t size() const { return layout_.size; }
  const Range& shard_range() const { return shard_range_; }
  const Range& update_range() const { return update_range_; }

  // A parameter, by a suffix of its name; `fused`: this many adjacent parameters as one matrix or vector.
  Tensor weight(const std::string& suffix, int fused = 1) const { return view(weights_, suffix, fused); }
  Tensor gradient(const std::string& suffix, int fused = 1) const { return view(gradients_, suffix, fused); }
  bool has(const std::string& suffix) const {
    return std::ranges::any_of(spec_.params, [&](const ParamSpec& p) { return p.name.ends_with(suffix); });
  }

  Tensor weights() const { return weights_; }  // of the whole unit; at stage 3 only while it is gathered
  // Which rows of the vocabulary this rank's part of a table has.
  Vocabulary vocabulary(const std::string& suffix) const {
    const Box box = spec_.params[param_index(spec_, suffix)].box();
    return {box.row, box.rows};
  }
  Tensor weight_shard() const { return weight_shard_; }
  // Gradients of the whole unit, from this rank's samples; with GradReduce::micro only between start and reduction.
  Tensor gradients() const { return gradients_; }
  // Gradients of update_range(), summed over all ranks.
  Tensor reduced_gradients() const {
    return gradient_sum_.empty() ? gradients_.slice(update_range_.begin, {update_range_.size}) : gradient_sum_;
  }
  Tensor reduced_gradients(const Range& r) const { return here(slice_of(reduced_gradients(), update_range_, r)); }
  // The part of shard `k`, summed over all ranks, that this rank counts in the gradient norm. `k` is its own shard, or
  // on a parameter server any; if several tensor-parallel ranks have the same elements, the first of them counts them.
  std::vector<Tensor> counted_gradients(int k) const {
    std::vector<Tensor> counted;
    for (const Range& r : counted_)
      if (const Range in_shard = overlap(r, {shard_range_.size * k, shard_range_.size}); in_shard.size > 0)
        counted.push_back(reduced_gradients(in_shard));
    return counted;
  }
  // Elements for which each of `copies` tensor-parallel ranks has a partial gradient.
  struct PartialSum {
    Range range;
    int copies;
  };
  const std::vector<PartialSum>& partial_sums() const { return partial_sums_; }
  Tensor gradient_sum() const { return gradient_sum_; }
  // What this rank counts of gradients(), from its samples alone, without partial sums.
  std::vector<Tensor> own_gradients() const {
    std::vector<Tensor> own;
    for (const Range& counted : counted_) {
      std::vector<Range> partial;
      for (const PartialSum& sum : partial_sums_)
        if (const Range r = overlap(sum.range, counted); r.size > 0)
          partial.push_back({r.begin - counted.begin, r.size});
      for (const Range& r : gaps(partial, counted.size))
        own.push_back(gradients_.slice(counted.begin + r.begin, {r.size}));
    }
    return own;
  }
  // What own_gradients() leaves out, of the sums over all ranks and in this rank's shard.
  std::vector<Tensor> counted_partial_sums() const {
    std::vector<Tensor> counted;
    for (const PartialSum& partial : partial_sums_)
      for (const Range& c : counted_)
        if (const Range r = overlap(overlap(partial.range, c), shard_range_); r.size > 0)
          counted.push_back(slice_of(reduced_gradients(), update_range_, r));
    return counted;
  }

  // This unit's part of a buffer that several units share in turn.
  Tensor in_buffer(const Tensor& buffer) const {
    Tensor mine = buffer.slice(0, {layout_.size});
    mine.name = spec_.name.c_str();
    return mine;
  }
  void attach_weights(const Tensor& buffer) { weights_ = in_buffer(buffer); }
  // The matrices that --products in fp8 is about, and what lies between them; none in other runs.
  const std::vector<LinearMatrix>& linear_matrices() const { return linear_; }
  std::vector<Range> besides_linear_matrices() const {
    std::vector<Range> all;
    for (const LinearMatrix& m : linear_) all.push_back({m.begin, m.whole().n});
    return gaps(all, layout_.size);
  }
  // How a linear layer reads this matrix of weights(), and its other operands, in training.
  Reading reading(Operands read, const Tensor& matrix) const { return fp8_.reading(read, matrix); }
  // From here on, the numbers in fp8 of weights() are not theirs, until make_fp8_again().
  void weights_changed() { fp8_.changed(weights_); }
  void make_fp8_again(Stream& stream) { fp8_.make_again(weights_, stream); }
  // From here on, weights() are those of this version.
  void use_version(size_t index) {
    weights_ = versions_[index];
    weight_shard_ = weights_.slice(shard_range_.begin, {shard_range_.size});
  }
  const Tensor& version(size_t index) const { return versions_[index]; }
  void attach_gradients(const Tensor& buffer) { gradients_ = in_buffer(buffer); }

  // Begins a sum in gradients(). Matrices, which are nearly all of it, are not zeroed: the first product writes them.
  // Appends the rest to `zeroed`, which the caller zeroes.
  void begin_sum(std::vector<Tensor>& zeroed) {
    std::vector<Tensor>& unwritten = unwritten_[gradients_.bytes] = {};
    for (const Range& r : matrices_)
      if (r.size > 0) unwritten.push_back(gradients_.slice(r.begin, {r.size}));
    for (const Range& r : rest_) zeroed.push_back(gradients_.slice(r.begin, {r.size}));
  }
  // For a product that is about to write `matrix` or to add to it: whether it adds.
  Accumulate accumulate(const Tensor& matrix) const {
    std::vector<Tensor>& unwritten = unwritten_[gradients_.bytes];
    const auto overlaps = [&](const Tensor& t) {
      return t.bytes < matrix.bytes + matrix.size_bytes() && matrix.bytes < t.bytes + t.size_bytes();
    };
    const auto found = std::find_if(unwritten.begin(), unwritten.end(), overlaps);
    if (found == unwritten.end()) return Accumulate::yes;
    CHECK(found->bytes == matrix.bytes && found->numel() == matrix.numel(),
          "unit {}: a product writes a part of the gradient of {}", spec_.name, matrix.name);
    unwritten.erase(found);
    return Accumulate::no;
  }
  // Before anything but a product adds to the gradients, or reads them.
  void zero_unwritten(Stream& stream) const { zero(std::exchange(unwritten_[gradients_.bytes], {}), stream); }
  // A graph has repeated what was captured while products wrote them.
  void all_written() { unwritten_.clear(); }

  void zero_all(Stream& stream) const {
    const auto zero_part = [&](Offloaded part, const Tensor& t) {
      if (zero_.offload.has(part)) zero_at_host(t, stream);
      else if (!t.empty()) zero(t, stream);
    };
    zero_part(Offloaded::weights, zero_.stage == 3 ? weight_shard_ : weights_);
    zero_part(Offloaded::master, master_);
    for (const UnitSlots::OfRule& s : slots_.rules())
      for (const SlotTensors& all : {s.tensors, s.scales})
        for (const Tensor& t : all) zero_part(Offloaded::moments, t);
    if (!row_moments().empty()) zero(row_moments(), stream);
  }

  // The second moments of a parameter's rows; of the whole unit
  Tensor row_moments(size_t param) const { return slots_.row_moments(param); }
  const Tensor& row_moments() const { return slots_.row_moments(); }

  // The gradients of matrices become the directions of their updates, and their momenta follow. What
  // shard/matrix_updates.h makes of them must be in the same place when update() is called.
  void begin_matrices(const Tensor& control, const OptimizerOptions& options, Stream& stream) const {
    for (const UnitSlots::OfRule& s : slots_.rules())
      if (rule_of(s.rule).of_matrices)
        for (const Range& r : s.runs)
          muon_direction(reduced_gradients(r), slots_.of(s.rule, r).slots[0], control, options.momentum, stream);
  }

  struct StatePart {
    Offloaded what;
    Tensor tensor;
  };
  // The state of these elements, which this rank updates.
  std::vector<StatePart> state_of(const Range& r) const {
    std::vector<StatePart> all;
    const auto add = [&](Offloaded what, const Tensor& t) {
      if (!t.empty()) all.push_back({what, slice_of(t, update_range_, r)});
    };
    add(Offloaded::weights, weights_in_update_range());
    add(Offloaded::master, master_);
    add(Offloaded::master, average_);
    add(Offloaded::gradients, reduced_gradients());
    for (const UnitSlots::OfRule& s : slots_.rules()) {
      const Range held = s.of(r);
      for (size_t i = 0; i < s.tensors.size() && held.size > 0; ++i) {
        if (!s.tensors[i].empty()) all.push_back({Offloaded::moments, s.tensors[i].slice(held.begin, {held.size})});
        if (s.scales[i].empty()) continue;
        const Range blocks{held.begin / state_block, ceil_div(held.size, state_block)};
        all.push_back({Offloaded::moments, s.scales[i].slice(blocks.begin, {blocks.size})});
      }
    }
    return all;
  }
  // From here on, update() and what follows it work on the elements `r` alone. State is where `moved` says: pairs of
  // tensors where it is held and where it is updated.
  using Moved = std::vector<std::pair<Tensor, Tensor>>;
  void attach(const Range& r, Moved moved) { attached_ = r, moved_ = std::move(moved); }
  void detach() { attached_.reset(), moved_.clear(); }

  void update(Tensor control, const OptimizerOptions& options, Stream& stream) const {
    if (rounds_stochastically() && !small_) return update_stochastic(control, options, stream);
    const auto alike = [&](const ParamSpec& a, const ParamSpec& b) {
      return a.rule == b.rule && decays(a, options) == decays(b, options) && a.eps == b.eps && a.rate == b.rate &&
             options.rate(a.rates) == options.rate(b.rates);
    };
    for_neighbours(spec_, layout_, alike, [&](const ParamSpec& p, const Range& all) {
      const Range r = overlap(all, in_reach());
      if (r.size == 0) return;
      const Tensor weight = part_of_weights(r), master = part_of_master(r), gradient = reduced_gradients(r);
      const auto [slots, scales] = slots_for_step(p.rule, r);
      if (small_)
        update_small_state(p.rule, weight, master, slots, scales, gradient, control, spec_.name, r.begin,
                           options_for(p, options), stream);
      else update_weights(p.rule, weight, master, slots, gradient, control, options_for(p, options), stream);
    });
  }

  // QK-clip, after update(). largest (Hq) fp64: the largest logit of each head
  void clip_heads(const Tensor& largest, double limit, const Tensor& control, const OptimizerOptions& options,
                  Stream& stream) const {
    for_each_in_reach([&](const ParamSpec& p, const Range& r, const Elements& elements) {
      if (p.clip == ClipShare::none) return;
      llmc::clip_heads(part_of_weights(r), part_of_master(r), largest, control, p.name, elements,
                       {.limit = limit, .share = p.clip, .elements = p.numel() / largest.numel()}, options, stream);
    });
  }

  // The moving average of the weights begins at them; follows an update; and takes their place, and they its, which a
  // second time undoes, bit for bit.
  void begin_average(Stream& stream) const {
    if (!average_.empty()) copy(average_, master_.empty() ? weights_in_update_range() : master_, stream);
  }
  void follow_average(Tensor control, const OptimizerOptions& options, Stream& stream) const {
    if (!average_.empty()) average_weights(average(), updated_weights(), control, options.average_share, stream);
  }
  void exchange_average(Stream& stream) const {
    if (average_.empty()) return;
    exchange(average(), updated_weights(), stream);
    if (!master_.empty()) convert(part_of_weights(in_reach()), part_of_master(in_reach()), stream);
  }

  // The boxes of all parameters. `weights`: weights(), or a copy of them.
  StateTable whole_weights(const Tensor& weights) const {
    StateTable all;
    for (size_t i = 0; i < spec_.params.size(); ++i)
      all.push_back(
          {&spec_.params[i], StateKind::weight, 0, weights.slice(layout_.offsets[i], {spec_.params[i].box().numel()})});
    return all;
  }

  void append_to(StateTable& table) const {
    for (size_t i = 0; i < spec_.params.size(); ++i) {
      if (zero_.stage == 3) append(table, i, StateKind::weight, weight_shard_, shard_range_);
      else append(table, i, StateKind::weight, weights_, {0, layout_.size});
      append(table, i, StateKind::master, master_, update_range_);
      const Range updated = overlap(range_of(i), update_range_);
      if (!master_.empty() && master_.dtype == DType::int16 && updated.size > 0)
        table.back().weight = part_of_weights(updated);
      append(table, i, StateKind::average, average_, update_range_);
      if (updated.size == 0 || slots_.rules().empty()) continue;
      const Optimizer rule = spec_.params[i].rule;
      const SlotTensors slots = slots_.of(rule, updated).slots;
      const int64_t first = updated.begin / state_block * state_block;
      const auto [blocks, scales] = slots_.of(rule, {first, round_up(updated.end(), state_block) - first});
      for (size_t slot = 0; slot < slots.size(); ++slot) {
        append(table, i, StateKind::slot, slots[slot], updated, slot);
        if (slots[slot].empty() || size_of(slots[slot].dtype) > 1) continue;
        table.back().blocks = blocks[slot];
        table.back().scales = scales[slot];
        table.back().in_block = updated.begin - first;
      }
    }
    slots_.append_row_moments_to(table);
  }

  // Appends the reduced gradients that this rank holds, like append_to().
  void append_gradients_to(StateTable& table) const {
    for (size_t i = 0; i < spec_.params.size(); ++i)
      append(table, i, StateKind::weight, reduced_gradients(), update_range_);
  }

 private:
  // Where the elements of a parameter's box are, without padding rows.
  Range range_of(size_t param) const { return {layout_.offsets[param], spec_.params[param].box().numel()}; }
  // Appends what `t`, which has the elements `held` of the unit, has of a parameter.
  void append(StateTable& table, size_t i, StateKind kind, const Tensor& t, const Range& held, size_t slot = 0) const {
    const Range param = range_of(i), r = overlap(param, held);
    if (!t.empty() && r.size > 0)
      table.push_back({&spec_.params[i], kind, r.begin - param.begin, slice_of(t, held, r), slot});
  }
  // Calls f(parameter, its elements in reach, where they are in the whole parameter) for each that has any.
  template <class F>
  void for_each_in_reach(F&& f) const {
    for (size_t i = 0; i < spec_.params.size(); ++i)
      if (const Range r = overlap(range_of(i), in_reach()); r.size > 0)
        f(spec_.params[i], r, spec_.params[i].elements_from(r.begin - layout_.offsets[i]));
  }
  void find_copies() {
    std::vector<Range> copies;
    for (size_t i = 0; i < spec_.params.size(); ++i) {
      const ParamSpec& p = spec_.params[i];
      const Range range{layout_.offsets[i], p.stored_shape().numel()};
      if (!p.first_copy) copies.push_back(range);
      if (!p.partial) continue;
      const bool continues = i > 0 && spec_.params[i - 1].partial && spec_.params[i - 1].copies == p.copies;
      if (!continues) partial_sums_.push_back({range, p.copies});
      // The range includes the gap that follows, so that most numbers of ranks divide it.
      Range& all = partial_sums_.back().range;
      all.size = round_up(range.end(), UnitLayout::alignment) - all.begin;
    }
    counted_ = gaps(copies, layout_.size);
  }

  // Parameters that products multiply by, each with those adjacent to it; and what is between them.
  void find_matrices() {
    for (size_t i = 0; i < spec_.params.size(); ++i) {
      const ParamSpec& p = spec_.params[i];
      if (p.shape.rank() != 2) continue;
      if (p.placement == Placement::aligned) matrices_.push_back({layout_.offsets[i], 0});
      matrices_.back().size += p.stored_shape().numel();
    }
    rest_ = gaps(matrices_, layout_.size);
  }

  UnitSlots::Parts slots_for_step(Optimizer rule, const Range& r) const {
    UnitSlots::Parts parts = rule_of(rule).of_matrices ? UnitSlots::Parts{} : slots_.of(rule, r);
    for (SlotTensors* all : {&parts.slots, &parts.scales})
      for (Tensor& t : *all) t = here(t);
    return parts;
  }

  // The elements that an update works on.
  Range in_reach() const {
    CHECK(attached_ || !zero_.offload.has_state() || update_range_.size == 0, "unit {}: its state is in host memory",
          spec_.name);
    return attached_.value_or(update_range_);
  }
  // A part of the state: on the device, if it is attached there.
  Tensor here(Tensor t) const {
    for (const auto& [home, device] : moved_)
      if (t.bytes >= home.bytes && t.bytes < home.bytes + home.size_bytes()) {
        t.bytes = device.bytes + (t.bytes - home.bytes);
        t.file = nullptr;
        break;
      }
    return t;
  }

  // The weights of update_range(), in the training dtype; and those in reach, as they are updated.
  Tensor weights_in_update_range() const { return update_range_ == shard_range_ ? weight_shard_ : weights_; }
  Tensor updated_weights() const { return master_.empty() ? part_of_weights(in_reach()) : part_of_master(in_reach()); }
  Tensor average() const { return here(slice_of(average_, update_range_, in_reach())); }
  bool rounds_stochastically() const { return master_.empty() && weight_shard_.dtype == DType::bf16; }

  // One parameter at a time: each has its own random numbers.
  void update_stochastic(Tensor control, const OptimizerOptions& options, Stream& stream) const {
    for_each_in_reach([&](const ParamSpec& p, const Range& r, const Elements& elements) {
      update_weights_stochastic(p.rule, part_of_weights(r), slots_for_step(p.rule, r).slots, reduced_gradients(r),
                                control, p.name, elements, options_for(p, options), stream);
    });
  }

  // The weights, and the master copies, of elements that this rank updates.
  Tensor part_of_weights(const Range& r) const { return here(slice_of(weights_in_update_range(), update_range_, r)); }
  Tensor part_of_master(const Range& r) const {
    return master_.empty() ? master_ : here(slice_of(master_, update_range_, r));
  }

  Tensor view(const Tensor& buffer, const std::string& suffix, int fused) const {
    CHECK(!buffer.empty(), "unit {}: {} is used while the unit is not gathered", spec_.name, suffix);
    const size_t first = param_index(spec_, suffix);
    Shape shape = spec_.params[first].stored_shape();
    for (int i = 1; i < fused; ++i) {
      const ParamSpec& next = spec_.params[first + static_cast<size_t>(i)];
      CHECK(next.placement == Placement::adjacent);
      shape[0] += next.stored_shape()[0];
    }
    Tensor param = buffer.slice(layout_.offsets[first], shape);
    param.name = spec_.params[first].name.c_str();
    return param;
  }

  UnitSpec spec_;
  UnitLayout layout_;
  bool small_;  // state in few bits
  ZeroConfig zero_;
  std::optional<Range> attached_;  // the elements that an update works on; none: all
  Moved moved_;
  Range shard_range_, update_range_;
  std::vector<Range> counted_, matrices_, rest_;
  std::vector<PartialSum> partial_sums_;
  Tensor weights_, weight_shard_;  // in the training dtype
  std::vector<Tensor> versions_;   // the buffers of all versions; weights_ is one of them
  std::vector<LinearMatrix> linear_;
  Fp8Weights fp8_;
  Tensor gradients_, gradient_sum_;  // fp32; with GradReduce::micro the sum of the reduced micro-batches
  // Matrices of gradients that nothing has been added to since their sums began, by the buffer that they are in.
  mutable std::map<const std::byte*, std::vector<Tensor>> unwritten_;
  Tensor master_, average_;  // fp32, or masters int16: of update_range_, as the slots are
  UnitSlots slots_;
};

}  // namespace llmc
