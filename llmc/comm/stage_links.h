// stage_links.h: how the stages of a pipeline pass activations and gradients on: one link from each stage to each of
// its neighbours, with a stream of its own at both ends, so that messages travel while the stages compute. A message
// goes through a buffer at either end; its last bytes are a header that says what it is.
//
// No ranks wait in a cycle. A link has a direction, and a group of its two ranks that nothing else uses: where
// neighbours send both ways at the same time, these are two groups on two streams, so that neither waits behind the
// other. (NCCL needs a group call only where a send and a receive share a communicator and a stream.) The first message
// of a communicator may block the host until its peer gets there, too, and NCCL runs the work that a rank has enqueued
// on all of its communicators in the order of enqueueing (comm_nccl.h): in both cases it is as if sends and receives
// blocked, and check.h proves that the lists complete even then. The groups themselves are made in rounds, two for each
// colour of the pipeline's edges: edges of one colour share no stage, so a rank joins at most one group in a round, and
// all ranks go through the rounds in the same order.
#pragma once
#include "comm/comm.h"
#include "comm/layout.h"
#include "device/host_copy.h"
#include "ops/ops_memory.h"
#include "schedule/pipeline.h"

namespace llmc {

// What a message is: kind, chunk that made it, micro-batch, slice. Doubles, like other scalars that go to the host:
// they are exact far beyond most_pipeline_passes.
using MessageHeader = std::array<double, 4>;

// The headers of received messages, on their way to the host. The host never waits for a message directly: the message
// may depend on work that this host has not enqueued yet.
struct ReceivedHeaders {
  std::vector<MessageHeader> expected;
  Readback received;

  // Waits for the messages; throws if one was not the expected one.
  void check() const {
    const std::vector<double> all = received.values();
    if (!received.moves_data()) return;
    for (size_t i = 0; i < expected.size(); ++i) {
      const MessageHeader& e = expected[i];
      const double* got = all.data() + i * e.size();
      CHECK(std::equal(e.begin(), e.end(), got),
            "a stage of the pipeline expected {} of chunk {}, micro-batch {}, slice {}, and received {} of chunk {}, "
            "micro-batch {}, slice {}",
            e[0] == 0 ? "activations" : "gradients", e[1], e[2], e[3], got[0] == 0 ? "activations" : "gradients",
            got[1], got[2], got[3]);
    }
  }
};

// One end of a link.
class StageLink {
 public:
  // span(action): of a message, in a trace
  StageLink(const Device& device, int64_t scratch_bytes, std::unique_ptr<Comm> comm, int peer,
            std::function<TraceSpan(const Action&)> span)
      : scratch_(device, scratch_bytes),
        stream_(device, scratch_, Precedence::communication),
        comm_(std::move(comm)),
        peer_(peer),
        span_(std::move(span)) {}

  Stream& stream() { return stream_; }
  Comm& comm() { return *comm_; }
  int peer() const { return peer_; }  // its index among the two members
  const Comm& comm() const { return *comm_; }

  // Makes room for `count` messages of at most `elements` of this dtype; called before each pass. All of it is free:
  // the first message of a pass depends on what its receiver computed last in the pass before.
  void reserve(DType dtype, int64_t elements, int64_t count, Arena& arena) {
    buffers_.assign(static_cast<size_t>(count), {});
    posted_.clear();
    for (Buffer& b : buffers_) {
      b.memory = arena.alloc("messages", "message between stages", dtype, {message_elements(dtype, elements)});
      b.free = Event();
      b.free.signal();
    }
    turn_ = 0;
  }

  void send(const Tensor& payload, const MessageHeader& header, Stream& compute) {
    Buffer& b = next();
    const Tensor message = message_of(b, payload.numel());
    compute.wait(b.free);
    copy(message.slice(0, payload.shape), payload, compute);
    stream_.wait(compute.record());
    const StreamRange traced(
        stream_, [&] { return span_of(header, ActionKind::send_activations, ActionKind::send_gradients, 0); });
    if (stream_.device().kind != DeviceKind::null)
      upload(header_of(message), std::vector<double>(header.begin(), header.end()), stream_);
    comm_->send(message, peer_, stream_);
    b.free = stream_.record();
  }
  // Begins to receive the next message of the link, of this many elements; take() waits for it.
  void post(const MessageHeader& expected, int64_t elements) {
    auto in_use = [&](const Buffer& b) { return std::find(posted_.begin(), posted_.end(), &b) != posted_.end(); };
    while (in_use(buffers_[turn_ % buffers_.size()])) ++turn_;
    Buffer& b = next();
    const Tensor message = message_of(b, elements);
    b.header = expected;
    stream_.wait(b.free);
    {
      const StreamRange traced(stream_, [&] {
        return span_of(expected, ActionKind::receive_activations, ActionKind::receive_gradients, 1);
      });
      comm_->receive(message, peer_, stream_);
    }
    b.arrived = stream_.record();
    posted_.push_back(&b);
  }
  // payload = the posted message with this header. Messages are not always used in the order in which they arrive:
  // activations and gradients from the same stage may overtake each other.
  // received (4) fp64 = the header in the message
  void take(const Tensor& payload, const MessageHeader& expected, const Tensor& received, Stream& compute) {
    const auto found =
        std::find_if(posted_.begin(), posted_.end(), [&](const Buffer* b) { return b->header == expected; });
    CHECK(found != posted_.end(), "a message between stages was used before it was received");
    Buffer& b = **found;
    posted_.erase(found);
    compute.wait(b.arrived);
    copy(payload, b.memory.slice(0, payload.shape), compute);
    copy(received, header_of(message_of(b, payload.numel())), compute);
    b.free = compute.record();
  }

 private:
  struct Buffer {
    Tensor memory;
    MessageHeader header;  // of the posted message
    Event free, arrived;
  };
  Buffer& next() { return buffers_[turn_++ % buffers_.size()]; }
  // A message as one of two actions, of the chunk so many after the one that made it, in the direction of the message.
  TraceSpan span_of(const MessageHeader& h, ActionKind of_activations, ActionKind of_gradients, int after) const {
    const int chunk = static_cast<int>(h[1]), slice = static_cast<int>(h[3]);
    const auto micro_batch = static_cast<int64_t>(h[2]);
    return span_(h[0] == 0 ? Action{of_activations, chunk + after, micro_batch, slice}
                           : Action{of_gradients, chunk - after, micro_batch, slice});
  }
  // The size of a message with its header, which begins at a multiple of 8 bytes.
  static int64_t message_elements(DType dtype, int64_t elements) {
    const auto align = static_cast<int64_t>(sizeof(double)), header = static_cast<int64_t>(sizeof(MessageHeader));
    return (round_up(elements * size_of(dtype), align) + header) / size_of(dtype);
  }
  static Tensor message_of(const Buffer& b, int64_t elements) {
    return b.memory.slice(0, {message_elements(b.memory.dtype, elements)});
  }
  // The header: the last bytes of a message.
  static Tensor header_of(const Tensor& message) {
    Tensor header = message;
    header.bytes += message.size_bytes() - static_cast<int64_t>(sizeof(MessageHeader));
    header.dtype = DType::fp64;
    header.shape = {4};
    header.name = "what a message is";
    return header;
  }

  Arena scratch_;
  Stream stream_;
  std::unique_ptr<Comm> comm_;
  int peer_;
  std::function<TraceSpan(const Action&)> span_;
  std::vector<Buffer> buffers_;
  size_t turn_ = 0;
  std::vector<Buffer*> posted_;
};

// The links of a stage to and from its neighbours.
class StageLinks {
 public:
  // f(name, members): the group of these two ranks, ascending; the same names in the same order on all ranks.
  template <class Join>
  StageLinks(const Layout& layout, int rank, const Device& device, int64_t scratch_bytes, Join&& join)
      : stage_(layout.coordinates(rank).stage) {
    const int stages = layout.pipeline.stages;
    if (stages == 1) return;
    const int stage = stage_, inner = layout.ranks() / stages, first = rank - stage * inner;
    const Pipeline pipeline = layout.pipeline.pipeline();
    const auto span = [=](const Action& a) { return message_span(a, pipeline, first, inner); };
    // The ring's edges e, from stage e to e + 1, in two or three colours: edges of one colour share no stage.
    const int edges = stages == 2 ? 1 : layout.pipeline.wraps() ? stages : stages - 1;
    const auto colour = [&](int e) { return e == stages - 1 && stages % 2 == 1 ? 2 : e % 2; };
    for (int c = 0; c < 3; ++c)
      for (const bool down : {true, false}) {
        int mine = -1;  // the edge of this colour at this stage
        for (int e = 0; e < edges; ++e)
          if (colour(e) == c && (e == stage || (e + 1) % stages == stage)) mine = e;
        const std::string name = formatted("stages {} {}", down ? "down" : "up", c);
        if (mine < 0) {
          unused_.push_back(join(name, std::vector<int>{rank}));
          continue;
        }
        const int upper = mine, lower = (mine + 1) % stages, from = down ? upper : lower, to = down ? lower : upper;
        const auto [one, other] = std::minmax(upper, lower);
        const std::vector<int> members = {first + one * inner, first + other * inner};
        const int peer = stage == one ? 1 : 0;
        links_.push_back(
            {from, to, std::make_unique<StageLink>(device, scratch_bytes, join(name, members), peer, span)});
      }
  }

  // Room for the headers of as many messages as may be taken before read_headers() is called.
  void reserve_headers(Arena& arena) {
    expected_.clear();
    headers_ = arena.alloc("messages", "what messages are", DType::fp64, {4 * most_headers});
  }
  bool has_room_for_header() const { return static_cast<int64_t>(expected_.size()) < most_headers; }
  void take(int from, const Tensor& payload, const MessageHeader& expected, Stream& compute) {
    const auto taken = static_cast<int64_t>(expected_.size());
    find(from, stage_).take(payload, expected, headers_.slice(4 * taken, {4}), compute);
    expected_.push_back(expected);
  }
  // The headers of the messages taken since the last call.
  ReceivedHeaders read_headers(Stream& compute) {
    const Tensor taken = headers_.slice(0, {4 * static_cast<int64_t>(expected_.size())});
    return {std::exchange(expected_, {}), Readback(taken, compute)};
  }

  // The link from this stage to another one, and the link back.
  StageLink& to(int stage) { return find(stage_, stage); }
  StageLink& from(int stage) { return find(stage, stage_); }
  template <class F>
  void for_each(F&& f) const {
    for (const Entry& e : links_) f(*e.link);
  }
  // Calls f(link, from, to) for each link, with the stages at its ends.
  template <class F>
  void for_each_with_ends(F&& f) const {
    for (const Entry& e : links_) f(*e.link, e.from, e.to);
  }

 private:
  struct Entry {
    int from, to;
    std::unique_ptr<StageLink> link;
  };
  StageLink& find(int from, int to) {
    for (const Entry& e : links_)
      if (e.from == from && e.to == to) return *e.link;
    throw Error(formatted("no link from stage {} to stage {}", from, to));
  }

  static constexpr int64_t most_headers = 1024;

  int stage_;
  std::vector<Entry> links_;
  Tensor headers_;                       // fp64, 4 of each message
  std::vector<MessageHeader> expected_;  // headers of the messages taken
  std::vector<std::unique_ptr<Comm>> unused_;
};

}  // namespace llmc
