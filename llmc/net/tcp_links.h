// tcp_links.h: bytes between ranks of different processes over TCP. Each channel, from one rank to another within a
// group, is a connection of its own, made by the sender when it first sends; a message is its length, 8 bytes, and its
// bytes.
#pragma once
#include <mutex>

#include "net/links.h"
#include "net/meeting/rendezvous.h"

namespace llmc {

class TcpLinks final : public Links {
 public:
  // The job must outlive it.
  explicit TcpLinks(ControlPlane& job) : job_(job) {
    job.serve_data([this](const Channel& channel, Socket socket) { arrived(channel, std::move(socket)); });
  }
  ~TcpLinks() override { job_.serve_data(nullptr); }

  void exchange(int group, int self, const ToRank& out, const FromRank& in) override {
    Transfer sending(const_cast<void*>(out.data), out.rank >= 0 ? out.bytes : none);
    Transfer receiving(in.data, in.rank >= 0 ? in.bytes : none);
    receiving.length = 0;  // the other side tells it
    const Socket* there = out.rank >= 0 ? &outgoing({group, self, out.rank}) : nullptr;
    Incoming* here = in.rank >= 0 ? &incoming({group, in.rank, self}) : nullptr;
    while (!sending.done() || !receiving.done()) {
      if (aborted_) throw PeerError();
      const size_t moved =
          (sending.done() ? 0 : send(*there, sending, out.rank)) +
          (receiving.done() || !has_come(*here) ? 0 : receive(here->socket, receiving, in.rank, self, in.bytes));
      if (moved > 0) continue;
      std::array<pollfd, 2> waits{};
      size_t n = 0;
      if (!sending.done()) waits[n++] = {there->fd(), POLLOUT, 0};
      if (!receiving.done()) waits[n++] = {here->in_use ? here->socket.fd() : here->arrival->fd(), POLLIN, 0};
      wait_for({waits.data(), n}, {.stop = &stop_});
    }
  }

  void abort() override {
    aborted_ = true;
    stop_.wake();
  }
  std::string name() const override { return "TCP"; }

 private:
  static constexpr int64_t none = -1;
  static constexpr double connect_seconds = 20;
  static constexpr size_t piece_bytes = 256 << 10;  // moved at once: still in the cache when the other side copies it

  // The part of a message, its length and its bytes, that is still to be moved.
  struct Transfer {
    Transfer(void* data, int64_t bytes)
        : length(static_cast<uint64_t>(bytes)),
          data(static_cast<char*>(data)),
          total(bytes < 0 ? 0 : sizeof length + length) {}
    uint64_t length;
    char* data;
    size_t total, moved = 0;
    bool done() const { return moved == total; }
    // The next part of it, for sendmsg() and recvmsg().
    std::array<iovec, 2> rest() {
      const size_t of_length = std::min(moved, sizeof length), of_data = moved - of_length;
      return {{{reinterpret_cast<char*>(&length) + of_length, sizeof length - of_length},
               {data + of_data, std::min(piece_bytes, total - sizeof length - of_data)}}};
    }
  };
  // Its first message may be waited for before the connection is made.
  struct Incoming {
    Socket socket;
    std::unique_ptr<Waker> arrival = std::make_unique<Waker>();
    bool in_use = false;  // by the rank that receives, which needs no lock from then on
  };

  size_t send(const Socket& socket, Transfer& t, int to) try {
    const auto parts = t.rest();
    const size_t n = socket.send_some(parts.data(), parts.size());
    t.moved += n;
    return n;
  } catch (const ConnectionError& error) {
    gone(to, error);
  }
  size_t receive(const Socket& socket, Transfer& t, int from, int self, int64_t expected) try {
    const auto parts = t.rest();
    const size_t n = socket.receive_some(parts.data(), parts.size());
    t.moved += n;
    CHECK(t.moved < sizeof t.length || t.length == static_cast<uint64_t>(expected),
          "{} sent {} bytes to rank {}, which expected {}", job_.name_of_rank(from), t.length, self, expected);
    return n;
  } catch (const ConnectionError& error) {
    gone(from, error);
  }
  [[noreturn]] void gone(int rank, const ConnectionError& error) const {
    if (aborted_) throw PeerError();
    throw ConnectionError(formatted("{} has gone: {}", job_.name_of_rank(rank), error.what()));
  }

  const Socket& outgoing(const Channel& channel) {
    {
      std::lock_guard lock(mutex_);
      if (const auto found = outgoing_.find(channel); found != outgoing_.end()) return found->second;
    }
    Socket socket = connect(channel);  // without the lock: only this thread may want this channel
    std::lock_guard lock(mutex_);
    return outgoing_.emplace(channel, std::move(socket)).first->second;
  }
  Socket connect(const Channel& c) const try {
    return job_.connect(c.to / job_.local_ranks(), ConnectionPurpose::data, {c.group, c.from, c.to},
                        Limit::seconds(connect_seconds, &stop_));
  } catch (const ConnectionError& error) {
    gone(c.to, error);
  }

  Incoming& incoming(const Channel& channel) {
    std::lock_guard lock(mutex_);
    return incoming_[channel];
  }
  bool has_come(Incoming& channel) {
    if (channel.in_use) return true;
    std::lock_guard lock(mutex_);
    if (!channel.socket) return false;
    channel.in_use = true;
    channel.arrival.reset();
    return true;
  }
  void arrived(const Channel& channel, Socket socket) {
    std::lock_guard lock(mutex_);
    Incoming& place = incoming_[channel];
    if (place.in_use) return;          // a channel is made once; closing this one tells its maker
    place.socket = std::move(socket);  // again, if its maker missed that it was welcome
    place.arrival->wake();
  }

  ControlPlane& job_;
  std::mutex mutex_;  // guards the maps, whose elements stay where they are
  std::map<Channel, Socket> outgoing_;
  std::map<Channel, Incoming> incoming_;
  std::atomic<bool> aborted_ = false;
  Waker stop_;
};

}  // namespace llmc
