// comm.h: collectives and point-to-point on the groups of a mesh, asynchronous on a stream. Every member of a group
// calls the same collectives in the same order. The backends are threads of this process and paper (the null device).
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

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  const std::string& name() const { return name_; }
  Transport& transport() { return *transport_; }           // for other forms of collectives (dev/comm)
  int64_t bytes_sent() const { return transport_->sent; }  // by this rank; call with the streams idle
  void reset_bytes_sent() { transport_->sent = 0; }

  // Shard rank() of buffer = its sum over the ranks; the other shards are lost.
  void reduce_scatter(Tensor buffer, Stream& stream) {
    const int64_t n = exact_div(buffer.numel(), size(), "reduce_scatter: elements over ranks");
    run("reduce_scatter", buffer, stream,
        [=, this]<class T>(T* x, T* scratch) { ring::reduce_scatter(*transport_, x, n, scratch); });
  }
  // buffer = the shards of all ranks.
  void all_gather(Tensor buffer, Stream& stream) {
    const int64_t n = exact_div(buffer.numel(), size(), "all_gather: elements over ranks");
    run("all_gather", buffer, stream, [=, this]<class T>(T* x, T*) { ring::all_gather(*transport_, x, n); });
  }
  // buffer = its sum over the ranks: a reduce-scatter and an all-gather of the same shards (contract 3).
  void all_reduce(Tensor buffer, Stream& stream) {
    reduce_scatter(buffer, stream);
    all_gather(buffer, stream);
  }
  void broadcast(Tensor buffer, int root, Stream& stream) {
    run("broadcast", buffer, stream,
        [=, this, n = buffer.numel()]<class T>(T* x, T*) { ring::broadcast(*transport_, x, n, root); });
  }
  // The root's buffer = the sum over the ranks; the others' are lost.
  void reduce(Tensor buffer, int root, Stream& stream) {
    run("reduce", buffer, stream,
        [=, this, n = buffer.numel()]<class T>(T* x, T* scratch) { ring::reduce(*transport_, x, n, root, scratch); });
  }
  // Shard k of out = shard rank() of rank k's in.
  void all_to_all(Tensor out, Tensor in, Stream& stream) {
    const int64_t n = exact_div(in.numel(), size(), "all_to_all: elements over ranks");
    CHECK(out.dtype == in.dtype && out.numel() == in.numel());
    run("all_to_all", out, stream,
        [=, this]<class T>(T* x, T*) { ring::all_to_all(*transport_, x, reinterpret_cast<const T*>(in.bytes), n); });
  }
  void send(Tensor buffer, int to, Stream& stream) {
    run("send", buffer, stream, [=, this, bytes = buffer.size_bytes()]<class T>(T* x, T*) {
      transport_->exchange(to, x, bytes, -1, nullptr, 0);
    });
  }
  void receive(Tensor buffer, int from, Stream& stream) {
    run("receive", buffer, stream, [=, this, bytes = buffer.size_bytes()]<class T>(T* x, T*) {
      transport_->exchange(-1, nullptr, 0, from, x, bytes);
    });
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
      transport_->exchange(to, &out_bytes, 8, from, &in_bytes, 8);
      in.resize(in_bytes);
      transport_->exchange(to, text.data(), static_cast<int64_t>(out_bytes), from, in.data(),
                           static_cast<int64_t>(in_bytes));
    }
    return all;
  }

  // Counts what goes through.
  struct Counter final : Transport {
    explicit Counter(std::unique_ptr<Transport> t) : inner(std::move(t)) {}
    int rank() const override { return inner->rank(); }
    int size() const override { return inner->size(); }
    bool moves_data() const override { return inner->moves_data(); }
    void exchange(int to, const void* out, int64_t out_bytes, int from, void* in, int64_t in_bytes) override {
      if (to >= 0) sent += out_bytes;
      inner->exchange(to, out, out_bytes, from, in, in_bytes);
    }
    std::unique_ptr<Transport> inner;
    int64_t sent = 0;
  };

  template <class F>
  void run(const char* op, Tensor buffer, Stream& stream, F&& body) {
    if (size() == 1 && buffer.size_bytes() > 0 && std::string_view(op) != "all_to_all") return;
    auto scope = stream.scratch().scope();
    const Tensor scratch = stream.scratch().alloc("scratch", "ring chunk", buffer.dtype, {ring::chunk_elements});
    auto task = [=] {
      with_type(buffer.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        body(reinterpret_cast<T*>(buffer.bytes), reinterpret_cast<T*>(scratch.bytes));
      });
    };
    stream.run({op, 0, static_cast<double>(buffer.size_bytes())}, {buffer}, task);
    if (!transport_->moves_data()) task();  // on paper: counted at once
  }

  std::string name_;
  std::unique_ptr<Counter> transport_;
};

// All ranks of a run, and the meeting points of their groups. Threads backend: one object, shared by the threads.
class World {
 public:
  explicit World(Mesh mesh) : mesh_(std::move(mesh)) {}
  const Mesh& mesh() const { return mesh_; }

  // Rank `rank`'s part in the group along these axes; `name` tells groups of the same axes apart.
  std::unique_ptr<Comm> join(int rank, const std::string& name, const std::vector<Axis>& along) {
    const std::vector<int> members = mesh_.group(rank, along);
    int place = 0;
    while (members[static_cast<size_t>(place)] != rank) ++place;
    std::lock_guard lock(mutex_);
    if (failed_) throw PeerError();
    auto& hub = hubs_[formatted("{} of rank {}", name, members[0])];
    if (!hub) {
      hub = std::make_shared<ThreadsHub>(static_cast<int>(members.size()));
      hub->throttle(seconds_per_byte_);
    }
    return std::make_unique<Comm>(name, std::make_unique<ThreadsTransport>(hub, place));
  }

  // A rank has failed: nobody waits for it any longer.
  void abort() {
    std::lock_guard lock(mutex_);
    failed_ = true;
    for (auto& [name, hub] : hubs_) hub->abort();
  }
  void throttle(double seconds_per_byte) { seconds_per_byte_ = seconds_per_byte; }

 private:
  Mesh mesh_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<ThreadsHub>> hubs_;
  bool failed_ = false;
  double seconds_per_byte_ = 0;
};

}  // namespace llmc
