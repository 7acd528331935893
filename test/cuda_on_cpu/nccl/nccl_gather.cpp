// nccl_gather.cpp: matching the calls of a communicator's ranks.
#include <utility>

#include "cuda_on_cpu/nccl/nccl_clique.h"

namespace cuda_on_cpu::detail {

Library& library() {
  static auto* the_library = new Library;
  return *the_library;
}

ncclComm& check(ncclComm* comm) {
  if (library().live.count(comm) == 0)
    throw Failure("a communicator is used that was never created, or is destroyed or aborted");
  return *comm;
}
std::string name_of(const ncclComm& comm) { return "rank " + std::to_string(comm.rank) + " of " + comm.clique->name(); }

namespace {

// The gathering that this call belongs to; `ahead`: earlier calls of the same task that have not joined yet.
GatheringPtr find_gathering(const ncclComm& comm, const Call& call, size_t ahead) {
  Clique& clique = *comm.clique;
  if (call.kind != Kind::send && call.kind != Kind::receive) {
    const auto found = clique.collectives.find(comm.collectives + ahead);
    return found == clique.collectives.end() ? nullptr : found->second;
  }
  const bool sends = call.kind == Kind::send;
  const auto& others = sends ? clique.receives : clique.sends;
  const auto found = others.find(sends ? std::pair(comm.rank, call.other) : std::pair(call.other, comm.rank));
  return found == others.end() || found->second.size() <= ahead ? nullptr : found->second[ahead];
}

void check_agreement(const ncclComm& comm, const std::vector<Call>& calls) {
  std::map<std::pair<Kind, int>, size_t> ahead;  // collectives count together
  for (const Call& call : calls) {
    const bool between_two = call.kind == Kind::send || call.kind == Kind::receive;
    size_t& before = ahead[between_two ? std::pair(call.kind, call.other) : std::pair(Kind::all_reduce, -1)];
    const GatheringPtr gathering = find_gathering(comm, call, before++);
    if (gathering == nullptr) continue;
    for (size_t i = 0; i < gathering->ranks.size(); ++i) {
      if (!gathering->calls[i] || agree(*gathering->calls[i], call)) continue;
      Clique& clique = *comm.clique;
      clique.broken = gathering->name + ": rank " + std::to_string(comm.rank) + " calls " + to_string(call) +
                      " where rank " + std::to_string(gathering->ranks[i]) + " calls " +
                      to_string(*gathering->calls[i]);
      gathering->nobody_comes = clique.broken;
      throw Failure(*clique.broken);
    }
  }
}

void leave_open(Clique& clique, Gathering& gathering) {
  for (const int rank : gathering.ranks)
    if (const auto& gone = clique.gone[static_cast<size_t>(rank)]) gathering.nobody_comes = gone;
}

void join(ncclComm& comm, const Call& call, Task& task) {
  Clique& clique = *comm.clique;
  GatheringPtr gathering = find_gathering(comm, call, 0);
  size_t party = static_cast<size_t>(comm.rank);
  if (call.kind == Kind::send || call.kind == Kind::receive) {
    const bool sends = call.kind == Kind::send;
    const std::pair path = sends ? std::pair(comm.rank, call.other) : std::pair(call.other, comm.rank);
    party = sends ? 0 : 1;
    if (gathering != nullptr) {
      (sends ? clique.receives : clique.sends)[path].pop_front();
    } else {
      gathering = std::make_shared<Gathering>(
          clique.name() + ", from rank " + std::to_string(path.first) + " to " + std::to_string(path.second),
          std::vector{path.first, path.second});
      (sends ? clique.sends : clique.receives)[path].push_back(gathering);
    }
  } else {
    const uint64_t number = comm.collectives++;
    if (gathering == nullptr) {
      std::vector<int> ranks;
      for (int rank = 0; rank < clique.ranks; ++rank) ranks.push_back(rank);
      gathering = std::make_shared<Gathering>(clique.name() + ", collective " + std::to_string(number + 1), ranks);
      clique.collectives[number] = gathering;
    }
  }
  gathering->parties[party] = &task;
  gathering->calls[party] = call;
  const auto& calls = gathering->calls;
  if (std::all_of(calls.begin(), calls.end(), [](const auto& each) { return each.has_value(); }))
    std::erase_if(clique.collectives, [&](const auto& each) { return each.second == gathering; });
  else leave_open(clique, *gathering);
  task.parts.push_back({gathering});
}

// Exchanges of a device are done in the order in which they were enqueued, which NCCL_LAUNCH_ORDER_IMPLICIT makes that
// of the real library too: nobody waits in one while its peers wait in another.
void add_exchange(const ncclComm& comm, const std::vector<Call>& calls, Task& task) {
  const auto exchange = std::make_shared<Exchange>(name_of(comm), comm.clique->segment, calls, task);
  task.parts.push_back({exchange});
  comm.proxy->add(exchange);
  MarkPtr& last = library().last_exchange[comm.device];
  if (last != nullptr && !last->reached) task.after.push_back(last);
  if (task.mark == nullptr) task.mark = std::make_shared<Mark>();
  last = task.mark;
}

}  // namespace

void gather(ncclComm* live_or_not, const std::vector<Call>& calls, Task& task) {
  ncclComm& comm = check(live_or_not);
  const Clique& clique = *comm.clique;
  if (clique.aborted) throw Failure(clique.name() + " is used after a rank of it was aborted");
  if (clique.broken) throw Failure(clique.name() + " is broken: " + *clique.broken);
  if (clique.failures != runtime().failures)
    throw Failure(clique.name() + " is broken since this failed: " + runtime().last_failure);
  if (comm.proxy != nullptr) {
    add_exchange(comm, calls, task);
  } else {
    check_agreement(comm, calls);
    for (const Call& call : calls) join(comm, call, task);
  }
  if (comm.last != nullptr && !comm.last->reached) task.after.push_back(comm.last);
  if (task.mark == nullptr) task.mark = std::make_shared<Mark>();
  task.mark->stream = task.stream;
  comm.last = task.mark;
}

}  // namespace cuda_on_cpu::detail
