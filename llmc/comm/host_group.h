// host_group.h: a group of ranks whose hosts send each other texts; comm.h adds the tensors.
#pragma once
#include "comm/mesh.h"
#include "comm/ring.h"
#include "core/check.h"
#include "core/threads.h"
#include "core/utf8.h"
#include "net/watching/board.h"

namespace llmc {

// A transport that moves nothing, so that bytes can be counted without sending them.
class NullTransport final : public Transport {
 public:
  NullTransport(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void exchange(const ToRank&, const FromRank&, Stream*) override {}
  bool moves_data() const override { return false; }

 private:
  int rank_, size_;
};

// Counts the bytes that are sent and received.
struct CountingTransport final : Transport {
  explicit CountingTransport(std::unique_ptr<Transport> t) : inner(std::move(t)) {}
  int rank() const override { return inner->rank(); }
  int size() const override { return inner->size(); }
  bool moves_data() const override { return inner->moves_data(); }
  void exchange(const ToRank& out, const FromRank& in, Stream* gpu = nullptr) override {
    if (out.rank >= 0) sent += out.bytes;
    if (in.rank >= 0) received += in.bytes;
    for (const int other : {out.rank, in.rank})
      if (between_two && other >= 0 && other != rank()) partners.insert(other);
    inner->exchange(out, in, gpu);
    pulse();
  }
  std::unique_ptr<Transport> inner;
  int64_t sent = 0, received = 0;
  bool between_two = false;  // not in a collective; set only where a call is counted at once, not in tasks
  std::set<int> partners;
};

class HostGroup {
 public:
  HostGroup(std::string name, std::shared_ptr<CountingTransport> transport)
      : name_(std::move(name)), transport_(std::move(transport)) {}

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  const std::string& name() const { return name_; }
  // From now on the group records at `place` what it is doing.
  void report_to(std::shared_ptr<Attendance> place) { place_ = std::move(place); }

  // An all-gather of text between the hosts, not on a stream: the text of every rank, indexed by rank. `topic`: what
  // the text is about; must be the same on all ranks.
  std::vector<std::string> all_gather_text(const std::string& topic, const std::string& text) {
    std::vector<std::string> all = exchange_text(topic + '\n' + text);
    for (size_t r = 0; r < all.size(); ++r) {
      require_topic(static_cast<int>(r), all[r].substr(0, all[r].find('\n')), topic);
      all[r].erase(0, topic.size() + 1);
    }
    return all;
  }
  // The same, but only `root` gets the texts, which may be large; the others get none.
  std::vector<std::string> gather_text(int root, const std::string& topic, const std::string& text) {
    std::vector<std::string> all(static_cast<size_t>(rank() == root ? size() : 0), text);
    if (!transport_->moves_data()) return all;
    const Attending attending(place_.get(), "exchange", "", formatted("\"{}\"", topic));
    std::string its_topic, nothing;
    if (rank() != root) {
      for (const std::string* part : {&topic, &text}) exchange_texts(root, *part, nobody, nothing);
      return all;
    }
    for (int r = 0; r < size(); ++r) {
      if (r == root) continue;
      exchange_texts(nobody, nothing, r, its_topic);
      require_topic(r, its_topic, topic);
      exchange_texts(nobody, nothing, r, all[static_cast<size_t>(r)]);
    }
    return all;
  }
  void barrier() { all_gather_text("barrier", ""); }

 protected:
  std::string name_;
  std::shared_ptr<CountingTransport> transport_;
  std::shared_ptr<Attendance> place_;  // none: nothing is recorded

 private:
  static constexpr int nobody = -1;
  void require_topic(int sender, const std::string& its, const std::string& topic) const {
    CHECK(its == topic, "{}: rank {} sent \"{}\" while rank {} was sending \"{}\"", name_, sender, shown(its), rank(),
          topic);
  }
  // Sends a text to one rank and receives one from another, each as its size and then pieces: so that a wrong size
  // takes no memory for what never comes.
  void exchange_texts(int to, const std::string& out, int from, std::string& in) {
    constexpr uint64_t piece = 16 << 20;
    uint64_t to_send = to == nobody ? 0 : out.size(), to_come = 0;
    transport_->exchange({to, &to_send, to == nobody ? 0 : 8}, {from, &to_come, from == nobody ? 0 : 8});
    in.clear();
    for (uint64_t at = 0; at < std::max(to_send, to_come); at += piece) {
      const uint64_t sent = std::min(piece, to_send - std::min(at, to_send)),
                     received = std::min(piece, to_come - std::min(at, to_come));
      in.resize(in.size() + received);
      transport_->exchange(
          {sent > 0 ? to : nobody, out.data() + std::min<uint64_t>(at, out.size()), static_cast<int64_t>(sent)},
          {received > 0 ? from : nobody, in.data() + in.size() - received, static_cast<int64_t>(received)});
    }
  }
  // Around a ring, in which a rank passes on what it has received: it is connected with its two neighbours, while
  // connections between all pairs would be more than large groups can have. More than most_in_one_ring do so in two
  // tiers, along rows, and along columns with all texts of a row at once: of 4096 ranks each waits for 126, not 4095.
  std::vector<std::string> exchange_text(const std::string& text) {
    const int P = size(), length = P > most_in_one_ring ? row_length(P) : P;
    if (!transport_->moves_data()) return std::vector<std::string>(static_cast<size_t>(P), text);
    const Attending attending(place_.get(), "exchange", "", formatted("\"{}\"", text.substr(0, text.find('\n'))));
    std::vector<std::string> all = around_ring(length, rank() / length * length, 1, text);
    if (length == P) return all;
    std::string row;
    for (const std::string& t : all) {
      const uint64_t bytes = t.size();
      row.append(reinterpret_cast<const char*>(&bytes), sizeof bytes) += t;
    }
    all.clear();
    for (const std::string& texts : around_ring(P / length, rank() % length, length, row)) {
      size_t at = 0;
      for (int i = 0; i < length; ++i) {
        uint64_t bytes = 0;
        const bool whole = texts.size() - at >= sizeof bytes;
        if (whole) std::memcpy(&bytes, texts.data() + at, sizeof bytes);
        CHECK(whole && bytes <= texts.size() - at - sizeof bytes, "{}: the texts of a row of ranks break off", name_);
        all.push_back(texts.substr(at + sizeof bytes, bytes));
        at += sizeof bytes + bytes;
      }
    }
    return all;
  }
  // The texts of `n` ranks, of which this is one: `first`, and others `stride` apart.
  std::vector<std::string> around_ring(int n, int first, int stride, const std::string& text) {
    std::vector<std::string> all(static_cast<size_t>(n), text);
    const int me = (rank() - first) / stride;
    const auto rank_of = [&](int i) { return first + ring::detail::wrap(i, n) * stride; };
    const auto of = [&](int i) -> std::string& { return all[static_cast<size_t>(ring::detail::wrap(i, n))]; };
    for (int s = 1; s < n; ++s) exchange_texts(rank_of(me + 1), of(me - s + 1), rank_of(me - 1), of(me - s));
    return all;
  }
};

}  // namespace llmc
