// comm_processes.h: a transport between ranks of several processes. Ranks of this process talk through its memory, and
// with other ranks through Links (TCP or MPI). Private to world.h.
#pragma once
#include "comm/comm_threads.h"
#include "net/links.h"

namespace llmc {

class Watchdog;

// The ranks of the job that this process runs, as threads: `count` ranks from `first` on.
struct LocalRanks {
  int first = 0, count = 0;      // count 0: all ranks are here
  Links* links = nullptr;        // to ranks of other processes
  Watchdog* watchdog = nullptr;  // of several ranks

  bool here(int rank) const { return count == 0 || (rank >= first && rank < first + count); }
};

class ProcessesTransport final : public Transport {
 public:
  // members: the global ranks of the group; index: this rank's place among them. group: a number, equal on all members.
  ProcessesTransport(std::shared_ptr<ThreadsHub> hub, int index, std::vector<int> members, int group, LocalRanks local)
      : hub_(std::move(hub)), index_(index), members_(std::move(members)), group_(group), local_(local) {}
  int rank() const override { return index_; }
  int size() const override { return static_cast<int>(members_.size()); }

  void exchange(const ToRank& out, const FromRank& in, Stream* gpu) override {
    const bool sends = out.rank >= 0 && out.bytes > 0, receives = in.rank >= 0 && in.bytes > 0;
    const bool sends_here = sends && local_.here(member(out.rank)),
               receives_here = receives && local_.here(member(in.rank));
    // Posting a local send does not wait, so if it comes first, the order of the rest cannot deadlock.
    std::optional<ThreadsHub::Post> post;
    if (sends_here) post.emplace(*hub_, index_, out.rank, out.data, out.bytes);
    if (sends != sends_here || receives != receives_here)
      remote(sends == sends_here ? ToRank{} : ToRank{member(out.rank), out.data, out.bytes},
             receives == receives_here ? FromRank{} : FromRank{member(in.rank), in.data, in.bytes}, gpu);
    if (receives_here) hub_->take(in.rank, index_, in.data, in.bytes, gpu);
    if (post) post->wait_taken();
  }

 private:
  int member(int index) const { return members_[static_cast<size_t>(index)]; }

  // To and from ranks of the world.
  void remote(const ToRank& out, const FromRank& in, Stream* gpu) {
    const int self = member(index_);
    if (gpu == nullptr) return local_.links->exchange(group_, self, out, in);
    // A GPU's memory goes through the host's, part by part; the receiver expects the same parts.
    if (!staging_) staging_ = std::make_unique<Staging>(ring::chunk_elements * 8);
    const std::byte* source = static_cast<const std::byte*>(out.data);
    std::byte* target = static_cast<std::byte*>(in.data);
    for (int64_t begin = 0; begin < std::max(out.bytes, in.bytes); begin += staging_->bytes()) {
      const int64_t sent = std::clamp<int64_t>(out.bytes - begin, 0, staging_->bytes()),
                    received = std::clamp<int64_t>(in.bytes - begin, 0, staging_->bytes());
      if (sent > 0) copy_now(staging_->out(), source + begin, sent, gpu);
      local_.links->exchange(group_, self, {sent > 0 ? out.rank : -1, staging_->out(), sent},
                             {received > 0 ? in.rank : -1, staging_->in(), received});
      if (received > 0) copy_now(target + begin, staging_->in(), received, gpu);
    }
  }

  std::shared_ptr<ThreadsHub> hub_;
  int index_;
  std::vector<int> members_;
  int group_;
  LocalRanks local_;
  std::unique_ptr<Staging> staging_;
};

}  // namespace llmc
