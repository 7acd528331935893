// link_costs.h: on the null device, what the exchanges of a group cost: bytes, and the path that they take.
#pragma once
#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/host_group.h"
#include "device/machine.h"

namespace llmc {

class LinkCosts {
 public:
  void set_members(std::vector<int> ranks) { members_ = std::move(ranks); }

  // Adds to the cost of a collective what `run` sends over a transport that only counts. On a plan's machine, which is
  // always the same, also the path; none: no machine.
  void add_to(OpCost& cost, CountingTransport& counting, const Machine* machine, const std::function<void()>& run) {
    cost.link_bytes = static_cast<double>(count(cost, counting, run));
    cost.members = &members_;
    if (machine == nullptr) return;
    std::optional<LinkPath>& path = paths_[static_cast<size_t>(cost.pattern)];
    if (!path) path = machine->path_of(cost);
    cost.path = &*path;
  }

 private:
  // Returns the bytes that are sent or received, whichever are more. The rings of shards, whose steps are many, are run
  // once for each size and then remembered.
  int64_t count(const OpCost& cost, CountingTransport& counting, const std::function<void()>& run) {
    const std::string_view op = cost.name;
    const bool repeats = op == "reduce_scatter" || op == "all_gather";
    const std::pair key(op, static_cast<int64_t>(cost.bytes));
    if (const auto known = rings_.find(key); repeats && known != rings_.end()) {
      counting.sent += known->second.first, counting.received += known->second.second;
      return std::max(known->second.first, known->second.second);
    }
    const int64_t sent = counting.sent, received = counting.received;
    run();
    const std::pair counted(counting.sent - sent, counting.received - received);
    if (repeats) rings_.emplace(key, counted);
    return std::max(counted.first, counted.second);
  }

  std::vector<int> members_;
  std::array<std::optional<LinkPath>, 3> paths_;                                       // by Pattern
  std::map<std::pair<std::string_view, int64_t>, std::pair<int64_t, int64_t>> rings_;  // bytes sent and received
};

}  // namespace llmc
