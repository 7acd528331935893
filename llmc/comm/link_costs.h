// link_costs.h: on the null device, what the exchanges of a group cost: bytes, and the path that they take.
#pragma once
#include "comm/host_group.h"
#include "device/machine.h"

namespace llmc {

class LinkCosts {
 public:
  void set_members(std::vector<int> ranks) { members_ = std::move(ranks); }

  // Adds to the cost of a collective of `ranks` what `run` sends over a transport that only counts. On a plan's
  // machine, which is always the same, also the path; none: no machine.
  void add_to(OpCost& cost, CountingTransport& counting, int ranks, const Machine* machine,
              const std::function<void()>& run) {
    cost.link_bytes = static_cast<double>(count(cost, counting, ranks, run));
    cost.members = &members_;
    if (machine == nullptr) return;
    std::optional<LinkPath>& path = paths_[static_cast<size_t>(cost.pattern)];
    if (!path) path = machine->path_of(cost);
    cost.path = &*path;
  }

 private:
  // Returns the bytes that are sent or received, whichever are more. The rings of shards, whose steps are many, follow
  // their law: every rank sends, and receives, all shards but one.
  static int64_t count(const OpCost& cost, CountingTransport& counting, int ranks, const std::function<void()>& run) {
    const std::string_view op = cost.name;
    if (op == "reduce_scatter" || op == "all_gather") {
      const int64_t bytes = (ranks - 1) * (static_cast<int64_t>(cost.bytes) / ranks);
      counting.sent += bytes, counting.received += bytes;
      return bytes;
    }
    const int64_t sent = counting.sent, received = counting.received;
    run();
    return std::max(counting.sent - sent, counting.received - received);
  }

  std::vector<int> members_;
  std::array<std::optional<LinkPath>, 3> paths_;  // by Pattern
};

}  // namespace llmc
