// nccl_clique.h: private to nccl.cpp and nccl_gather.cpp: the ranks of a communicator, and the matching of their calls.
#pragma once
#include <algorithm>
#include <map>
#include <set>

#include "cuda_on_cpu/nccl/nccl_call.h"
#include "cuda_on_cpu/runtime/runtime.h"

namespace cuda_on_cpu::detail {

// The matched calls of some ranks; party i is rank ranks[i] of the clique.
struct Gathering : Meeting {
  Gathering(std::string name_, std::vector<int> ranks_) : name(std::move(name_)), ranks(std::move(ranks_)) {
    parties.resize(ranks.size());
    calls.resize(ranks.size());
  }
  void run() override {
    std::vector<Call> all;
    for (const auto& call : calls) all.push_back(*call);
    perform(all);  // unobserved: its variables are on one host's stack but serve the streams of many
    for (const Call& call : all) {
      observe_read(call.send, bytes_sent(call));
      observe_write(call.receive, bytes_received(call));
    }
  }
  std::string waits_for() const override {
    std::string text = name;
    for (size_t i = 0; i < ranks.size(); ++i)
      text += (i == 0 ? ": " : "; ") + ("rank " + std::to_string(ranks[i])) +
              (calls[i] ? " calls " + to_string(*calls[i]) : " has not arrived");
    return text + remark + (nobody_comes ? ", and will not: " + *nobody_comes : "");
  }
  std::string name;
  std::vector<int> ranks;
  std::vector<std::optional<Call>> calls;
  std::string remark;
};
using GatheringPtr = std::shared_ptr<Gathering>;

// All ranks of a communicator.
struct Clique {
  int number, ranks;
  uint64_t failures;
  std::vector<ncclComm*> members;                                           // null: has not joined
  std::vector<std::optional<std::string>> gone;                             // why a member has left
  std::map<uint64_t, GatheringPtr> collectives;                             // by number; those that wait for calls
  std::map<std::pair<int, int>, std::deque<GatheringPtr>> sends, receives;  // by (from, to); those not matched yet
  bool aborted = false, refused = false;
  std::optional<std::string> broken;

  bool complete() const { return std::count(members.begin(), members.end(), nullptr) == 0; }
  std::string name() const { return "communicator " + std::to_string(number); }
};

}  // namespace cuda_on_cpu::detail

struct ncclComm {
  std::shared_ptr<cuda_on_cpu::detail::Clique> clique;
  int rank, device;
  bool needs_group = false;  // its host thread also has other ranks
  uint64_t collectives = 0;  // called so far
  cuda_on_cpu::detail::MarkPtr last = nullptr;
};

namespace cuda_on_cpu::detail {

struct Library {  // guarded by the runtime's mutex
  int cliques = 0;
  std::map<std::string, std::shared_ptr<Clique>> joining;  // by unique id
  std::set<const ncclComm*> live;
};
Library& library();

// The communicator, or Failure if it is not one.
ncclComm& check(ncclComm* comm);
std::string name_of(const ncclComm& comm);
// Enqueues these calls of one rank, or launches them as a node of a graph: they join gatherings, which need not be
// complete. Failure if they do not match the calls of other ranks.
void gather(ncclComm* comm, const std::vector<Call>& calls, Task& task);

}  // namespace cuda_on_cpu::detail
