// comm.h: collectives and point-to-point on the groups of a mesh, asynchronous on a stream. Every member of a group
// calls the same collectives in the same order. Tensors go through a transport (threads; between processes TCP or MPI;
// on the null device one that only counts) by the algorithms of ring.h and server.h, or through a library (NCCL).
// Groups are made by world.h. Hooks are what a test installs to watch all this, or to break it on purpose.
//
// A group may be destroyed while stream tasks still use it: the tasks own the parts of it that they use (on GPUs, calls
// to a library return once their work is enqueued). But a task may wait for a peer that waits for this rank; so a rank
// that leaves a group because of an error aborts the world.
#pragma once
#include <exception>

#include "comm/comm_nccl.h"
#include "comm/host_group.h"
#include "comm/server.h"
#include "device/machine.h"

namespace llmc {

// One rank's membership in a group. Buffers are flat, and divided into size() shards where a collective shards. A
// derived class may stand in for a group, and change what its collectives do (Hooks).
class Comm : public HostGroup {
 public:
  Comm(std::string name, std::unique_ptr<Transport> transport)
      : HostGroup(std::move(name), std::make_shared<CountingTransport>(std::move(transport))) {}
  // `library` moves tensors, and a null transport counts their bytes; `transport` carries only the hosts' messages.
  Comm(std::string name, std::unique_ptr<Transport> transport, std::shared_ptr<GpuCollectives> library)
      : Comm(std::move(name), std::move(transport)) {
    library_ = std::move(library);
    counted_ = std::make_unique<CountingTransport>(std::make_unique<NullTransport>(rank(), size()));
  }

  virtual ~Comm() {
    if (std::uncaught_exceptions() > exceptions_) abort();
  }

  // The ranks of the world that are members, for the time that transfers take on paper; unknown: they are neighbours.
  void set_members(std::vector<int> ranks) { members_ = std::move(ranks); }

  Transport& transport() { return *transport_; }  // for other forms of collectives (dev/comm)
  // Bytes of tensors that this rank has sent, and received; call with the streams idle.
  int64_t bytes_sent() const { return counted().sent; }
  int64_t bytes_received() const { return counted().received; }
  // The ranks with which this one has exchanged messages outside of collectives, or in all-to-alls: a library connects
  // to each.
  const std::set<int>& partners() const { return counted().partners; }
  void forget_bytes() {
    for (CountingTransport* c : {transport_.get(), counted_.get()})
      if (c != nullptr) c->sent = c->received = 0;
  }
  // Sets the function that abort() calls: it ends every wait of this rank for a peer, and of peers for it, with a
  // PeerError.
  void on_abort(std::function<void()> abort) { abort_ = std::move(abort); }
  void abort() const {
    if (abort_) abort_();
  }
  // Throws if the library has reported an error, here or at a peer.
  void check() const {
    if (library_) library_->check();
  }

  // Shard rank() of buffer = its sum over the ranks; the contents of the other shards are destroyed.
  virtual void reduce_scatter(Tensor buffer, Stream& stream) {
    const int64_t n = exact_div(buffer.numel(), size(), "reduce_scatter: elements over ranks");
    run(
        {"reduce_scatter", buffer}, stream,
        [=]<class T>(const Link& link, T* x, T* scratch) { ring::reduce_scatter(link, x, n, scratch); },
        [=](GpuCollectives& g, Stream& s) { g.reduce_scatter(buffer, n, s); });
  }
  // buffer = the shards of all ranks.
  virtual void all_gather(Tensor buffer, Stream& stream) {
    const int64_t n = exact_div(buffer.numel(), size(), "all_gather: elements over ranks");
    buffer.dtype = as_moved(buffer.dtype);
    run(
        {"all_gather", buffer}, stream, [=]<class T>(const Link& link, T* x, T*) { ring::all_gather(link, x, n); },
        [=](GpuCollectives& g, Stream& s) { g.all_gather(buffer, n, s); });
  }
  // buffer = its sum over the ranks: a reduce-scatter and an all-gather of the same shards (contract 3). Elements that
  // do not fill a shard on every rank go through rank 0.
  virtual void all_reduce(Tensor buffer, Stream& stream) {
    const int64_t rest = buffer.numel() % size(), shards = buffer.numel() - rest;
    if (shards > 0) {
      reduce_scatter(buffer.slice(0, {shards}), stream);
      all_gather(buffer.slice(0, {shards}), stream);
    }
    if (rest == 0) return;
    reduce(buffer.slice(shards, {rest}), 0, stream);
    broadcast(buffer.slice(shards, {rest}), 0, stream);
  }
  virtual void broadcast(Tensor buffer, int root, Stream& stream) {
    const int64_t n = buffer.numel();
    run(
        {"broadcast", buffer}, stream, [=]<class T>(const Link& link, T* x, T*) { ring::broadcast(link, x, n, root); },
        [=](GpuCollectives& g, Stream& s) { g.broadcast(buffer, n, root, s); });
  }
  // The root's buffer = the sum over the ranks; the contents of the other ranks' buffers are destroyed.
  virtual void reduce(Tensor buffer, int root, Stream& stream) {
    const int64_t n = buffer.numel();
    run(
        {"reduce", buffer}, stream,
        [=]<class T>(const Link& link, T* x, T* scratch) { ring::reduce(link, x, n, root, scratch); },
        [=](GpuCollectives& g, Stream& s) { g.reduce(buffer, n, root, s); });
  }
  // Shard k of out = shard rank() of rank k's in.
  virtual void all_to_all(Tensor out, Tensor in, Stream& stream) {
    const int64_t n = exact_div(in.numel(), size(), "all_to_all: elements over ranks");
    CHECK(out.dtype == in.dtype && out.numel() == in.numel());
    out.dtype = in.dtype = as_moved(in.dtype);
    run(
        {"all_to_all", out, Pattern::all_to_all}, stream,
        [=]<class T>(const Link& link, T* x, T*) {
          ring::all_to_all(link, x, reinterpret_cast<const T*>(in.bytes), n);
        },
        [=](GpuCollectives& g, Stream& s) { g.all_to_all(out, in, n, s); });
  }
  // The same with blocks of rows, of any size: block send[k] of `in` (rows, width) goes to rank k, and block receive[k]
  // of `out` comes from rank k. Other rows stay as they are. Every rank must know how many rows it receives.
  virtual void all_to_all_rows(Tensor out, Tensor in, const std::vector<Range>& send, const std::vector<Range>& receive,
                               Stream& stream) {
    const int64_t width = in.shape[1];
    const auto check_blocks = [&](const char* what, const std::vector<Range>& blocks, const Tensor& t) {
      CHECK(t.shape[1] == width && t.dtype == in.dtype && std::ssize(blocks) == size(),
            "all_to_all_rows of {}: {} blocks of rows to {} between {} ranks, of {} and {} elements", name_,
            blocks.size(), what, size(), width, t.shape[1]);
      for (const Range& b : blocks)
        CHECK(b.begin >= 0 && b.size >= 0 && b.end() <= t.shape[0],
              "all_to_all_rows of {}: {} rows from {} on to {}, of {}", name_, b.size, b.begin, what, t.shape[0]);
    };
    check_blocks("send", send, in);
    check_blocks("receive", receive, out);
    const size_t me = static_cast<size_t>(rank());
    CHECK(send[me].size == receive[me].size, "all_to_all_rows of {}: rank {} sends itself {} rows, and receives {}",
          name_, me, send[me].size, receive[me].size);
    in.dtype = out.dtype = as_moved(in.dtype);
    int messages = 0;
    for (size_t k = 0; k < send.size(); ++k) messages += k != me && (send[k].size > 0 || receive[k].size > 0);
    // Rows between the blocks may hold anything: they are not inspected.
    run(
        {"all_to_all_rows", out, Pattern::all_to_all, messages, Inspect::no}, stream,
        [=]<class T>(const Link& link, T* x, T*) {
          ring::all_to_all_rows(link, x, reinterpret_cast<const T*>(in.bytes), width, send, receive);
        },
        [=](GpuCollectives& g, Stream& s) { g.all_to_all_rows(out, in, send, receive, s); });
  }
  // Sends `out` and receives `in` at the same time.
  virtual void exchange(Tensor out, int to, Tensor in, int from, Stream& stream) {
    run({"exchange", in, Pattern::neighbours, 1}, stream, [=]<class T>(const Link& link, T* x, T*) {
      link.exchange({to, out.bytes, out.size_bytes()}, {from, x, in.size_bytes()});
    });
  }
  virtual void send(Tensor buffer, int to, Stream& stream) {
    run({"send", buffer, Pattern::neighbours, 1}, stream, [=]<class T>(const Link& link, T* x, T*) {
      link.exchange({to, x, buffer.size_bytes()}, {});
    });
  }
  virtual void receive(Tensor buffer, int from, Stream& stream) {
    run({"receive", buffer, Pattern::neighbours, 1}, stream, [=]<class T>(const Link& link, T* x, T*) {
      link.exchange({}, {from, x, buffer.size_bytes()});
    });
  }
  // On rank k, part k of `servers` equal parts of buffer = its sum over the ranks, added in rank order (server.h).
  virtual void push(Tensor buffer, int servers, Stream& stream) {
    const int64_t n = exact_div(buffer.numel(), servers, "push: elements over servers");
    run({"push", buffer, Pattern::neighbours}, stream,
        [=]<class T>(const Link& link, T* x, T* scratch) { server::push(link, x, n, servers, scratch); });
  }
  // Part k of buffer = part k of rank k's buffer.
  virtual void pull(Tensor buffer, int servers, Stream& stream) {
    const int64_t n = exact_div(buffer.numel(), servers, "pull: elements over servers");
    run({"pull", buffer, Pattern::neighbours}, stream,
        [=]<class T>(const Link& link, T* x, T*) { server::pull(link, x, n, servers); });
  }

 protected:
  Comm(Comm&&) = default;  // for hooks, which replace a group before its first collective

 private:
  CountingTransport& counted() const { return counted_ ? *counted_ : *transport_; }

  // Sends and receives of the library.
  struct LibraryTransport final : Transport {
    explicit LibraryTransport(Comm& c) : comm(c) {}
    int rank() const override { return comm.rank(); }
    int size() const override { return comm.size(); }
    bool enqueues() const override { return true; }
    void exchange(const ToRank& out, const FromRank& in, Stream* gpu) override {
      comm.library_->exchange(out, in, *gpu);
    }
    Comm& comm;
  };
  // Integers are moved as floating-point numbers: only the bits are copied.
  static DType as_moved(DType dtype) { return dtype == DType::int32 ? DType::fp32 : dtype; }

  struct ByExchanges {};  // the library has no such collective, only its sends and receives

  enum class Inspect : uint8_t { no, yes };  // whether to look for NaN in the result

  struct Collective {
    const char* op;
    Tensor buffer;
    Pattern pattern = Pattern::ring;
    // The length of the chain of messages that wait for each other; none: size() - 1, from rank to rank. The chunks of
    // a message follow each other closely and count once.
    std::optional<int> messages = std::nullopt;
    Inspect inspect = Inspect::yes;
    Tensor inspected() const { return inspect == Inspect::yes ? buffer : Tensor{}; }
  };

  // Runs `algorithm` over the transport. If there is a library, it runs the collective, and `algorithm` runs over a
  // null transport to count its bytes.
  template <class Algorithm, class Library = ByExchanges>
  void run(const Collective& c, Stream& stream, Algorithm&& algorithm, Library&& library = {}) {
    const Tensor buffer = c.buffer;
    if (size() == 1 && buffer.size_bytes() > 0 && c.pattern != Pattern::all_to_all) return;
    auto scope = stream.scratch().scope();
    const Tensor scratch = stream.scratch().alloc("scratch", "ring chunk", buffer.dtype, {ring::chunk_elements});
    auto through = [=](Transport& transport, Stream* gpu) {
      with_type(buffer.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        algorithm(Link{transport, gpu}, reinterpret_cast<T*>(buffer.bytes), reinterpret_cast<T*>(scratch.bytes));
      });
    };
    OpCost cost{.name = c.op, .bytes = static_cast<double>(buffer.size_bytes()), .group = name_.c_str()};
    if (library_) return run_library(c, cost, stream, through, library);
    if (!transport_->moves_data()) {  // the null device runs no tasks: count now
      count(c, cost, stream, through);
      if (stream.device().kind == DeviceKind::null) return stream.run(cost, {c.inspected()}, [] {});
    }
    Stream* const gpu = stream.device().kind == DeviceKind::cuda ? &stream : nullptr;
    const bool units = traffic_of(name_) == Traffic::units;
    stream.run(cost, {c.inspected()},
               [=, transport = transport_, place = place_, op = c.op, unit = std::string(units ? "unit " : ""),
                tensor = std::string(buffer.name)] {
                 const WaitTimer timer;
                 const Attending attending(place.get(), op, unit, tensor);
                 through(*transport, gpu);
               });
  }
  template <class Through, class Library>
  void run_library(const Collective& c, const OpCost& cost, Stream& stream, const Through& through,
                   const Library& library) {
    stream.run(cost, {c.inspected()}, [=, this, &stream] {
      if constexpr (std::is_same_v<Library, ByExchanges>) {
        LibraryTransport transport(*this);
        through(transport, &stream);
      } else {
        library(*library_, stream);
      }
    });
    counted_->between_two = c.pattern != Pattern::ring;
    through(*counted_, nullptr);
  }

  // On the null device: adds to the cost of a collective the bytes that it sends or receives, whichever are more. The
  // rings of shards, whose steps are many, follow their law: every rank sends, and receives, all shards but one. On a
  // plan's machine, which is always the same, also the path.
  template <class Through>
  void count(const Collective& c, OpCost& cost, const Stream& stream, const Through& through) {
    transport_->between_two = c.pattern != Pattern::ring;
    cost.messages = c.messages.value_or(size() - 1);
    cost.pattern = c.pattern;
    const int64_t sent = transport_->sent, received = transport_->received;
    if (const std::string_view op = cost.name; op == "reduce_scatter" || op == "all_gather") {
      const int64_t bytes = (size() - 1) * (static_cast<int64_t>(cost.bytes) / size());
      transport_->sent += bytes, transport_->received += bytes;
    } else {
      through(*transport_, nullptr);
    }
    cost.link_bytes = static_cast<double>(std::max(transport_->sent - sent, transport_->received - received));
    cost.members = &members_;
    const Machine* const machine = stream.device().machine.get();
    if (machine == nullptr) return;
    std::optional<LinkPath>& path = paths_[static_cast<size_t>(cost.pattern)];
    if (!path) path = machine->path_of(cost);
    cost.path = &*path;
  }

  std::vector<int> members_;
  std::array<std::optional<LinkPath>, 3> paths_;  // by Pattern
  std::unique_ptr<CountingTransport> counted_;
  std::shared_ptr<GpuCollectives> library_;
  std::function<void()> abort_;  // none: nothing waits
  int exceptions_ = std::uncaught_exceptions();
};

// What a test, or --selftest, installs in a World to watch its ranks, or to break them on purpose. Production code
// calls each hook once per event, and the hooks that are installed by default do nothing. One object serves all ranks
// of a World at the same time, so its methods are const. Bugs are planted by replacing a group with a class derived
// from Comm whose collectives skip or change something.
class Hooks {
 public:
  virtual ~Hooks() = default;
  // An arena of a rank, or the scratch of its ops, was created; nothing has been allocated from it yet.
  virtual void arena_created(Arena&) const {}
  // From this point of the stream on, nobody may read `memory` until it is written again.
  virtual void released(const Tensor& memory, Stream&) const { (void)memory; }
  // The same for all of a unit's buffer except `kept`.
  void released_except(const Tensor& unit, const Range& kept, Stream& stream) const {
    released(unit.slice(0, {kept.begin}), stream);
    released(unit.slice(kept.end(), {unit.numel() - kept.end()}), stream);
  }
  // A rank is about to iterate a matrix (Muon): the rows of this parameter from `row` on, or all of them.
  virtual void iterated(const std::string& parameter, int64_t row) const { (void)parameter, (void)row; }
  // A rank has joined this group; the returned group takes its place.
  virtual std::unique_ptr<Comm> joined(std::unique_ptr<Comm> group) const { return group; }
};

// Fills free and released memory, which nobody may read, with bytes that are a NaN in every floating-point dtype, so
// that such reads show.
class Poison : public Hooks {
 public:
  void arena_created(Arena& arena) const override { arena.poison_free(); }
  void released(const Tensor& memory, Stream& stream) const override { poison(memory, stream); }
};

inline const Hooks no_hooks{};
inline const Poison poison_hooks{};

}  // namespace llmc
