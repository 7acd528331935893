// groups.h: one rank among all: its coordinates, its groups (the table in comm/mesh.h), and the streams on which
// gradients are reduced, weights gathered, activations exchanged and keys passed on while the compute stream computes.
#pragma once
#include "comm/comm.h"
#include "comm/layout.h"
#include "comm/stage_links.h"

namespace llmc {

class Groups;

// The destructor waits for streams whose tasks use objects that are destroyed after it. If it runs because of an error,
// or a stream has failed, it first aborts the world: a task may wait for a peer, and that peer for this rank.
class Drain {
 public:
  Drain(const Groups& groups, std::vector<Stream*> streams) : groups_(groups), streams_(std::move(streams)) {}
  ~Drain();
  Drain(const Drain&) = delete;
  Drain& operator=(const Drain&) = delete;

  // The exception that ends the scope is not a failure: all ranks leave at the same place, as when a run is stopped and
  // still has to save.
  void all_leave() { all_leave_ = true; }

 private:
  const Groups& groups_;
  std::vector<Stream*> streams_;
  int exceptions_ = std::uncaught_exceptions();
  bool all_leave_ = false;
};

// The members of a group of the table, ascending.
inline std::vector<int> members_of(const GroupRow& row, const Layout& layout, int rank) {
  const bool needed = row.needed == Needed::with_experts    ? layout.expert.count > 0
                      : row.needed == Needed::with_matrices ? rule_of(layout.zero.optimizer).of_matrices
                      : row.needed == Needed::asynchronous  ? layout.pipeline.asynchronous()
                      : row.needed == Needed::many_ranks    ? layout.ranks() > most_in_one_ring
                                                            : true;
  if (!needed) return {rank};
  const Mesh mesh = layout.mesh();
  if (row.view == View::experts)
    return layout.experts_apart() ? expert_view(mesh, layout.expert).group(rank, row.axes) : std::vector{rank};
  const std::vector<int> along = mesh.group(rank, row.axes);
  const auto here = std::find(along.begin(), along.end(), rank);
  if (row.view == View::same_head) {  // they follow one another
    const int copies = layout.tensor.head_copies;
    const auto first = along.begin() + (here - along.begin()) / copies * copies;
    return {first, first + copies};
  }
  if (row.view == View::ends) {
    if (along.size() == 1 || (rank != along.front() && rank != along.back())) return {rank};
    return {along.front(), along.back()};
  }
  if (row.view == View::row || row.view == View::column) {
    const int length = row_length(layout.ranks());
    std::vector<int> members;
    for (const int other : along)
      if (row.view == View::row ? other / length == rank / length : other % length == rank % length)
        members.push_back(other);
    return members;
  }
  return along;
}

class Groups {
 public:
  using Join = std::function<std::unique_ptr<Comm>(const std::string& name, const std::vector<int>& members)>;

  // join: makes the group of these ranks, of which this rank is one; all ranks call it in the same order
  Groups(const Layout& layout, int rank, const Device& device, const Join& join, const Hooks& hooks = no_hooks,
         std::span<const GroupRow> table = group_table)
      : layout(layout),
        me(layout.coordinates(rank)),
        hooks(hooks),
        table_(table),
        streams_(make_streams(layout, device)),
        comms_(join_all(table, layout, rank, join)),
        links(layout, rank, device, scratch_bytes, join),
        drain_(*this, streams()) {}

  const Layout layout;
  const Coordinates me;
  const Hooks& hooks;

  Comm& operator[](GroupName id) const { return *comms_[static_cast<size_t>(id)]; }
  std::span<const GroupRow> table() const { return table_; }

  // The stream of a lane; none: the compute stream does its work.
  Stream* find_stream(Lane lane) const {
    const auto& own = streams_[static_cast<size_t>(lane)];
    return own ? &own->stream : nullptr;
  }
  Stream& stream(Lane lane, Stream& compute) const {
    Stream* const own = find_stream(lane);
    return own != nullptr ? *own : compute;
  }
  Stream& reduce_stream() const { return *find_stream(Lane::reduce); }
  Stream& gather_stream() const { return *find_stream(Lane::gather); }
  // How many streams have work space of their own for transfers.
  int64_t streams_with_scratch() const {
    const Offload& offload = layout.zero.offload;
    return std::ssize(streams()) - (offload.any_in_file() ? 2 : 0) - (offload.updates_at_host() ? 1 : 0);
  }
  // All streams except the compute stream.
  std::vector<Stream*> streams() const {
    std::vector<Stream*> all;
    for (const auto& own : streams_)
      if (own) all.push_back(&own->stream);
    links.for_each([&](StageLink& link) { all.push_back(&link.stream()); });
    return all;
  }
  std::vector<Comm*> tensor_groups() const {
    std::vector<Comm*> all;
    for (size_t i = 0; i < table_.size(); ++i)
      if (table_[i].traffic != Traffic::text) all.push_back(comms_[i].get());
    links.for_each([&](StageLink& link) { all.push_back(&link.comm()); });
    return all;
  }
  // Throws if an exchange between the ranks has failed; called while the host waits for a stream.
  void check() const {
    for (const Comm* comm : tensor_groups()) comm->check();
  }
  // This rank has failed: nobody waits for it any more, and it waits for nobody.
  void abort() const { (*this)[GroupName::scalars].abort(); }

  // Gathers the rows of all ranks: (ranks, n), of which this rank has its own.
  void gather_scalars(const Tensor& rows, Stream& compute) const {
    if (ranks() <= most_in_one_ring) return (*this)[GroupName::scalars].all_gather(rows, compute);
    const int64_t length = row_length(ranks()) * rows.shape[1];
    (*this)[GroupName::scalar_rows].all_gather(rows.slice(me.rank / row_length(ranks()) * length, {length}), compute);
    (*this)[GroupName::scalar_columns].all_gather(rows, compute);
  }

  // Groups one after another, through which a few numbers get from every rank to all others.
  std::vector<Comm*> scalar_tiers() const {
    using enum GroupName;
    if (ranks() <= most_in_one_ring) return {&(*this)[scalars]};
    return {&(*this)[scalar_rows], &(*this)[scalar_columns]};
  }

  // The groups that share a unit within a replica, and which shard of it this rank has.
  struct Sharers {
    Comm &gradients, &weights;
    int shard;
  };
  Sharers sharers(Sharing sharing) const {
    using enum GroupName;
    if (sharing == Sharing::experts && layout.experts_apart())
      return {(*this)[expert_gradients], (*this)[expert_weights], me.expert_shard};
    return {(*this)[gradients], (*this)[weights], me.shard};
  }

  int rank() const { return me.rank; }
  int ranks() const { return layout.ranks(); }
  int stages() const { return layout.pipeline.stages; }
  int ranks_of_stage() const { return ranks() / stages(); }
  bool first() const { return me.rank == 0; }
  bool first_of_stage() const { return me.rank % ranks_of_stage() == 0; }
  // How many groups of ranks read different samples, and which of them this rank is in: tensor- and context-parallel
  // ranks and the stages of a pipeline read the same samples.
  int readers() const { return layout.readers(); }
  int reader() const { return me.rank % ranks_of_stage() / (layout.tensor.ranks * layout.context.ranks); }

  // One chunk of the ring, in the widest dtype.
  static constexpr int64_t scratch_bytes = ring::chunk_elements * 8;

  // Groups over null transports with the same sizes as in the layout: nothing moves, bytes are counted.
  static Join null_groups(int rank) {
    return [rank](const std::string& name, const std::vector<int>& members) {
      const auto index = std::find(members.begin(), members.end(), rank) - members.begin();
      auto comm = std::make_unique<Comm>(
          name, std::make_unique<NullTransport>(static_cast<int>(index), static_cast<int>(members.size())));
      comm->set_members(members);
      return comm;
    };
  }

 private:
  struct OwnStream {
    Arena scratch;
    Stream stream;
    OwnStream(const Device& device, int64_t bytes)
        : scratch(device, bytes), stream(device, scratch, Precedence::communication) {}
  };
  using Streams = std::array<std::unique_ptr<OwnStream>, lanes>;

  // The device whose streams are threads of the host. threads: of each op
  static Device host_of(Device device, int threads) {
    if (device.kind == DeviceKind::cuda) device.kind = DeviceKind::cpu;
    device.threads = threads;
    if (device.computes_as() != DeviceKind::cuda) return device;
    device.planned = DeviceKind::cpu;
    if (device.machine) device.machine = std::make_shared<const Machine>(device.machine->host());
    return device;
  }
  // Which lanes have a stream of their own.
  static Streams make_streams(const Layout& layout, const Device& device) {
    Streams streams;
    const auto make = [&](Lane lane, bool needed) {
      const int64_t bytes = layout.ranks() > 1 || layout.zero.offload.any() ? scratch_bytes : 0;
      if (needed) streams[static_cast<size_t>(lane)] = std::make_unique<OwnStream>(device, bytes);
    };
    make(Lane::reduce, true);
    make(Lane::gather, true);
    make(Lane::exchange, layout.tensor.overlap);
    make(Lane::context, layout.context.ranks > 1);
    make(Lane::expert, layout.expert.ranks > 1);
    make(Lane::to_device, layout.zero.offload.any());
    make(Lane::to_host, layout.zero.offload.any());
    for (const Lane lane : {Lane::from_file, Lane::to_file})
      if (layout.zero.offload.any_in_file())
        streams[static_cast<size_t>(lane)] = std::make_unique<OwnStream>(host_of(device, 1), 0);
    if (layout.zero.offload.updates_at_host())
      streams[static_cast<size_t>(Lane::host_update)] = std::make_unique<OwnStream>(host_of(device, device.threads), 0);
    return streams;
  }
  static std::vector<std::unique_ptr<Comm>> join_all(std::span<const GroupRow> table, const Layout& layout, int rank,
                                                     const Join& join) {
    std::vector<std::unique_ptr<Comm>> comms;
    for (const GroupRow& row : table) comms.push_back(join(row.name, members_of(row, layout, rank)));
    return comms;
  }

  std::span<const GroupRow> table_;
  Streams streams_;
  std::vector<std::unique_ptr<Comm>> comms_;  // of the rows of the table

 public:
  StageLinks links;  // to and from the neighbours of this stage

 private:
  Drain drain_;  // last: the streams are idle before anything else is destroyed
};

inline Drain::~Drain() {
  if (!all_leave_ && std::uncaught_exceptions() > exceptions_) groups_.abort();
  for (Stream* s : streams_) try {
      s->synchronize();
    } catch (...) {  // already reported, or a peer's
      groups_.abort();
    }
}

}  // namespace llmc
