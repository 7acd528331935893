// host_group.h: a group of ranks whose hosts send each other texts; comm.h adds the tensors.
#pragma once
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/ring.h"
#include "core/check.h"
#include "core/pulse.h"
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
    if (rank() != root) {
      for (const std::string* part : {&topic, &text}) send_text(root, *part);
      return all;
    }
    for (int r = 0; r < size(); ++r) {
      if (r == root) continue;
      require_topic(r, receive_text(r), topic);
      all[static_cast<size_t>(r)] = receive_text(r);
    }
    return all;
  }
  void barrier() { all_gather_text("barrier", ""); }

 protected:
  std::string name_;
  std::shared_ptr<CountingTransport> transport_;
  std::shared_ptr<Attendance> place_;  // none: nothing is recorded

 private:
  void require_topic(int sender, const std::string& its, const std::string& topic) const {
    CHECK(its == topic, "{}: rank {} sent \"{}\" while rank {} was sending \"{}\"", name_, sender, its, rank(), topic);
  }
  void send_text(int to, const std::string& text) {
    const uint64_t bytes = text.size();
    transport_->exchange({to, &bytes, 8}, {});
    transport_->exchange({to, text.data(), static_cast<int64_t>(bytes)}, {});
  }
  std::string receive_text(int from) {
    uint64_t bytes = 0;
    transport_->exchange({}, {from, &bytes, 8});
    std::string text(bytes, '\0');
    transport_->exchange({}, {from, text.data(), static_cast<int64_t>(bytes)});
    return text;
  }
  std::vector<std::string> exchange_text(const std::string& text) {
    std::vector<std::string> all(static_cast<size_t>(size()), text);
    if (!transport_->moves_data()) return all;
    const Attending attending(place_.get(), "exchange", "", formatted("\"{}\"", text.substr(0, text.find('\n'))));
    for (int s = 1; s < size(); ++s) {
      const int to = (rank() + s) % size(), from = (rank() - s + size()) % size();
      std::string& in = all[static_cast<size_t>(from)];
      uint64_t out_bytes = text.size(), in_bytes = 0;
      transport_->exchange({to, &out_bytes, 8}, {from, &in_bytes, 8});
      in.resize(in_bytes);
      transport_->exchange({to, text.data(), static_cast<int64_t>(out_bytes)},
                           {from, in.data(), static_cast<int64_t>(in_bytes)});
    }
    return all;
  }
};

}  // namespace llmc
