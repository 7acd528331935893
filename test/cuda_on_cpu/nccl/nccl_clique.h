// nccl_clique.h: private to nccl/: the ranks of a communicator in this process, and the matching of their calls.
#pragma once
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "cuda_on_cpu/nccl/nccl_call.h"
#include "cuda_on_cpu/nccl/nccl_proxy.h"
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

// All ranks of a communicator that are in this process.
struct Clique {
  int number, ranks;
  uint64_t failures;
  std::vector<ncclComm*> members;                                           // null: has not joined
  std::vector<std::optional<std::string>> gone;                             // why a member has left
  std::map<uint64_t, GatheringPtr> collectives;                             // by number; those that wait for calls
  std::map<std::pair<int, int>, std::deque<GatheringPtr>> sends, receives;  // by (from, to); those not matched yet
  bool aborted = false, refused = false, settled = false;
  std::optional<std::string> broken;

  std::shared_ptr<Segment> segment = nullptr;  // until all ranks have joined; then only if some are in other processes

  bool complete() const {
    return segment ? segment->complete() : std::count(members.begin(), members.end(), nullptr) == 0;
  }
  std::string name() const { return "communicator " + std::to_string(number); }
};

}  // namespace cuda_on_cpu::detail

namespace cuda_on_cpu::detail {

// Calls that are launched together.
struct Batch {
  ncclComm* comm;
  CUstream_st* stream;
  std::vector<Call> calls;
};

}  // namespace cuda_on_cpu::detail

struct ncclComm {
  std::shared_ptr<cuda_on_cpu::detail::Clique> clique;
  int rank, device;
  bool needs_group = false;  // its host thread also has other ranks
  uint64_t collectives = 0;  // called so far
  cuda_on_cpu::detail::MarkPtr last = nullptr;
  std::unique_ptr<cuda_on_cpu::detail::Proxy> proxy = nullptr;  // if there are ranks in other processes

  // Not blocking: some calls only take effect when ncclCommGetAsyncError has been asked this often.
  bool blocking = true, finalizing = false;
  int pending = 0;
  std::vector<cuda_on_cpu::detail::Batch> held = {};
  std::mt19937 random = {};
};

namespace cuda_on_cpu::detail {

struct Library {  // guarded by the runtime's mutex
  int cliques = 0;
  std::map<std::string, std::shared_ptr<Segment>> made;    // by unique id: of ncclGetUniqueId
  std::map<std::string, std::shared_ptr<Clique>> joining;  // of this process's ranks, until all have joined
  std::map<int, MarkPtr> last_exchange;                    // by device
  std::set<const ncclComm*> live;
};
Library& library();

// Keeps the text for ncclGetLastError.
ncclResult_t error(ncclResult_t result, const std::string& text);
// The calls of this host thread's ncclGroupStart.
struct Group {
  int depth = 0;
  std::vector<Batch> batches;                            // by communicator and stream
  std::vector<std::pair<ncclComm_t*, ncclComm*>> inits;  // started, not complete
};
Group& group();
ncclResult_t await_all(Lock& lock, ncclComm_t* handle, ncclComm* comm);
ncclResult_t post(Batch batch);
// Whether a communicator that does not block does so with its next call; the schedule's seed decides.
bool takes_effect_later(ncclComm& comm);
// Have all ranks joined, and is none lost?
ncclResult_t state_of(ncclComm& comm);
// The communicator, or Failure if it is not one.
ncclComm& check(ncclComm* comm);
std::string name_of(const ncclComm& comm);
// Enqueues these calls of one rank, or launches them as a node of a graph: they join gatherings, which need not be
// complete. Failure if they do not match the calls of other ranks.
void gather(ncclComm* comm, const std::vector<Call>& calls, Task& task);

}  // namespace cuda_on_cpu::detail
