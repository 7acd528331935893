// comm.h: collectives and point-to-point on the groups of a mesh, asynchronous on a stream. Every member of a group
// calls the same collectives in the same order. The backends are threads of this process, NCCL, and
// paper (the null device).
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device/arena.h"
#include "device/device.h"
#include "dist/comm_nccl.h"
#include "dist/comm_null.h"
#include "dist/comm_threads.h"
#include "dist/mesh.h"
#include "dist/ring.h"

namespace llmc {

// One rank's membership of a group. Buffers are flat: of size() shards where a collective shards.
class Comm {
 public:
  Comm(std::string name, std::unique_ptr<Transport> transport)
      : name_(std::move(name)), transport_(std::make_unique<Counter>(std::move(transport))) {}
  // Tensors go through `library`, on paper through the transport; it moves words alone.
  Comm(std::string name, std::unique_ptr<Transport> transport, std::shared_ptr<GpuCollectives> library)
      : Comm(std::move(name), std::move(transport)) {
    library_ = std::move(library);
    paper_ = std::make_unique<Counter>(std::make_unique<NullTransport>(rank(), size()));
  }

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  const std::string& name() const { return name_; }
  Transport& transport() { return *transport_; }  // for other forms of collectives (dev/comm)
  // By this rank, of tensors; call with the streams idle.
  int64_t bytes_sent() const { return (paper_ ? paper_ : transport_)->sent; }
  void reset_bytes_sent() { (paper_ ? paper_ : transport_)->sent = 0; }
  // Throws what went wrong in the library, here or at a peer.
  void check() const {
    if (library_) library_->check();
  }

  // Shard rank() of buffer = its sum over the ranks; the other shards are lost.
  void reduce_scatter(Tensor buffer, Stream& stream) {
    const int64_t n = exact_div(buffer.numel(), size(), "reduce_scatter: elements over ranks");
    run(
        "reduce_scatter", buffer, stream,
        [=]<class T>(const Link& link, T* x, T* scratch) { ring::reduce_scatter(link, x, n, scratch); },
        [=](GpuCollectives& g, Stream& s) { g.reduce_scatter(buffer, n, s); });
  }
  // buffer = the shards of all ranks.
  void all_gather(Tensor buffer, Stream& stream) {
    const int64_t n = exact_div(buffer.numel(), size(), "all_gather: elements over ranks");
    run(
        "all_gather", buffer, stream, [=]<class T>(const Link& link, T* x, T*) { ring::all_gather(link, x, n); },
        [=](GpuCollectives& g, Stream& s) { g.all_gather(buffer, n, s); });
  }
  // buffer = its sum over the ranks: a reduce-scatter and an all-gather of the same shards (contract 3).
  void all_reduce(Tensor buffer, Stream& stream) {
    reduce_scatter(buffer, stream);
    all_gather(buffer, stream);
  }
  void broadcast(Tensor buffer, int root, Stream& stream) {
    const int64_t n = buffer.numel();
    run(
        "broadcast", buffer, stream, [=]<class T>(const Link& link, T* x, T*) { ring::broadcast(link, x, n, root); },
        [=](GpuCollectives& g, Stream& s) { g.broadcast(buffer, n, root, s); });
  }
  // The root's buffer = the sum over the ranks; the others' are lost.
  void reduce(Tensor buffer, int root, Stream& stream) {
    const int64_t n = buffer.numel();
    run(
        "reduce", buffer, stream,
        [=]<class T>(const Link& link, T* x, T* scratch) { ring::reduce(link, x, n, root, scratch); },
        [=](GpuCollectives& g, Stream& s) { g.reduce(buffer, n, root, s); });
  }
  // Shard k of out = shard rank() of rank k's in.
  void all_to_all(Tensor out, Tensor in, Stream& stream) {
    const int64_t n = exact_div(in.numel(), size(), "all_to_all: elements over ranks");
    CHECK(out.dtype == in.dtype && out.numel() == in.numel());
    run(
        "all_to_all", out, stream,
        [=]<class T>(const Link& link, T* x, T*) {
          ring::all_to_all(link, x, reinterpret_cast<const T*>(in.bytes), n);
        },
        [=](GpuCollectives& g, Stream& s) { g.all_to_all(out, in, n, s); });
  }
  void send(Tensor buffer, int to, Stream& stream) {
    run(
        "send", buffer, stream,
        [=]<class T>(const Link& link, T* x, T*) { link.exchange(to, x, buffer.size_bytes(), -1, nullptr, 0); },
        [=](GpuCollectives& g, Stream& s) { g.send(buffer, to, s); });
  }
  void receive(Tensor buffer, int from, Stream& stream) {
    run(
        "receive", buffer, stream,
        [=]<class T>(const Link& link, T* x, T*) { link.exchange(-1, nullptr, 0, from, x, buffer.size_bytes()); },
        [=](GpuCollectives& g, Stream& s) { g.receive(buffer, from, s); });
  }

  // The host's own words, not on a stream: every rank gets every rank's text, by rank. `topic`: what it is about, the
  // same on all ranks.
  std::vector<std::string> all_gather_text(const std::string& topic, const std::string& text) {
    std::vector<std::string> all = gather_words(topic + '\n' + text);
    for (size_t r = 0; r < all.size(); ++r) {
      CHECK(all[r].starts_with(topic + '\n'), "rank {} of {} speaks of \"{}\" while rank {} speaks of \"{}\"", r, name_,
            all[r].substr(0, all[r].find('\n')), rank(), topic);
      all[r].erase(0, topic.size() + 1);
    }
    return all;
  }
  void barrier() { all_gather_text("barrier", ""); }

 private:
  std::vector<std::string> gather_words(const std::string& text) {
    std::vector<std::string> all(static_cast<size_t>(size()), text);
    if (!transport_->moves_data()) return all;
    for (int s = 1; s < size(); ++s) {
      const int to = (rank() + s) % size(), from = (rank() - s + size()) % size();
      std::string& in = all[static_cast<size_t>(from)];
      uint64_t out_bytes = text.size(), in_bytes = 0;
      transport_->exchange(to, &out_bytes, 8, from, &in_bytes, 8, nullptr);
      in.resize(in_bytes);
      transport_->exchange(to, text.data(), static_cast<int64_t>(out_bytes), from, in.data(),
                           static_cast<int64_t>(in_bytes), nullptr);
    }
    return all;
  }

  // Counts what goes through.
  struct Counter final : Transport {
    explicit Counter(std::unique_ptr<Transport> t) : inner(std::move(t)) {}
    int rank() const override { return inner->rank(); }
    int size() const override { return inner->size(); }
    bool moves_data() const override { return inner->moves_data(); }
    void exchange(int to, const void* out, int64_t out_bytes, int from, void* in, int64_t in_bytes,
                  Stream* gpu) override {
      if (to >= 0) sent += out_bytes;
      inner->exchange(to, out, out_bytes, from, in, in_bytes, gpu);
    }
    std::unique_ptr<Transport> inner;
    int64_t sent = 0;
  };

  // By the library if there is one: then `ring` is counted, on paper. Else by `ring` over the transport.
  template <class Ring, class Library>
  void run(const char* op, Tensor buffer, Stream& stream, Ring&& ring, Library&& library) {
    if (size() == 1 && buffer.size_bytes() > 0 && std::string_view(op) != "all_to_all") return;
    auto scope = stream.scratch().scope();
    const Tensor scratch = stream.scratch().alloc("scratch", "ring chunk", buffer.dtype, {ring::chunk_elements});
    auto through = [=](Counter& transport, Stream* gpu) {
      with_type(buffer.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        ring(Link{transport, gpu}, reinterpret_cast<T*>(buffer.bytes), reinterpret_cast<T*>(scratch.bytes));
      });
    };
    const OpCost cost{op, 0, static_cast<double>(buffer.size_bytes())};
    if (library_) {
      stream.run(cost, {buffer}, [=, this, &stream] { library(*library_, stream); });
      through(*paper_, nullptr);
    } else {
      Stream* const gpu = stream.device().kind == DeviceKind::cuda ? &stream : nullptr;
      stream.run(cost, {buffer}, [=, this] { through(*transport_, gpu); });
      if (!transport_->moves_data()) through(*transport_, nullptr);  // on paper: counted at once
    }
  }

  std::string name_;
  std::unique_ptr<Counter> transport_, paper_;
  std::shared_ptr<GpuCollectives> library_;
};

// Who moves tensors between ranks: threads of this process, or NCCL between GPUs of their own.
enum class Backend : uint8_t { threads, nccl };
inline const char* name_of(Backend b) { return b == Backend::threads ? "threads" : "nccl"; }

// All ranks of a run, and the meeting points of their groups. One object, shared by the ranks' threads.
class World {
 public:
  explicit World(Mesh mesh, Backend backend = Backend::threads) : mesh_(std::move(mesh)), backend_(backend) {
    if (backend == Backend::nccl) prepare_nccl();
  }
  const Mesh& mesh() const { return mesh_; }
  Backend backend() const { return backend_; }

  // Rank `rank`'s part in the group along these axes; `name` tells groups of the same axes apart. All members call it
  // at the same time. gpu: the rank's own; moves_tensors: else words alone.
  std::unique_ptr<Comm> join(int rank, const std::string& name, const std::vector<Axis>& along, int gpu = 0,
                             bool moves_tensors = true) {
    const std::vector<int> members = mesh_.group(rank, along);
    const int size = static_cast<int>(members.size());
    int place = 0;
    while (members[static_cast<size_t>(place)] != rank) ++place;
    auto comm = std::make_unique<Comm>(name, transport(formatted("{} of rank {}", name, members[0]), place, size));
    if (backend_ == Backend::threads || size == 1 || !moves_tensors) return comm;
    const std::string id = comm->all_gather_text("id of " + name, place == 0 ? nccl_unique_id() : "")[0];
    std::shared_ptr<GpuCollectives> group = make_nccl_group(id, place, size, gpu);
    {
      std::lock_guard lock(mutex_);
      if (failed_) throw PeerError();
      groups_.push_back(group);
    }
    return std::make_unique<Comm>(name, transport(formatted("{} of rank {}", name, members[0]), place, size), group);
  }

  // A rank has failed: nobody waits for it any longer.
  void abort() {
    std::lock_guard lock(mutex_);
    failed_ = true;
    for (auto& [name, hub] : hubs_) hub->abort();
    std::vector<std::shared_ptr<GpuCollectives>> alive;
    for (const auto& group : groups_)
      if (auto its = group.lock()) alive.push_back(std::move(its));
    for (const auto& group : alive) group->expect_abort();
    for (const auto& group : alive) group->abort();
  }
  void throttle(double seconds_per_byte) { seconds_per_byte_ = seconds_per_byte; }

 private:
  std::unique_ptr<Transport> transport(const std::string& group, int place, int size) {
    std::lock_guard lock(mutex_);
    if (failed_) throw PeerError();
    auto& hub = hubs_[group];
    if (!hub) {
      hub = std::make_shared<ThreadsHub>(size);
      hub->throttle(seconds_per_byte_);
    }
    return std::make_unique<ThreadsTransport>(hub, place);
  }

  Mesh mesh_;
  Backend backend_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<ThreadsHub>> hubs_;
  std::vector<std::weak_ptr<GpuCollectives>> groups_;
  bool failed_ = false;
  double seconds_per_byte_ = 0;
};

}  // namespace llmc
