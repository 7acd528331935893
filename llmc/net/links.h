// links.h: bytes between ranks of different processes, by TCP (tcp_links.h) or MPI (comm/comm_mpi.h); comm/ uses them.
#pragma once
#include "core/std.h"

namespace llmc {

// Bytes for a rank, and bytes from one. Rank -1: none.
struct ToRank {
  int rank = -1;
  const void* data = nullptr;
  int64_t bytes = 0;
};
struct FromRank {
  int rank = -1;
  void* data = nullptr;
  int64_t bytes = 0;
};

// One per process, shared by its ranks. Ranks are global; groups have numbers, equal on all of their members.
class Links {
 public:
  virtual ~Links() = default;
  // Rank `self` of this process sends and receives at the same time, in this group, and returns when both are done.
  // Bytes between two ranks of a group arrive in the order in which they were sent. Several threads may call it, but
  // only one at a time for each (group, self). Throws PeerError after abort(), and ConnectionError if the connection
  // breaks: then the other process may be gone.
  virtual void exchange(int group, int self, const ToRank& out, const FromRank& in) = 0;
  // A rank has failed: every exchange ends with a PeerError, now and from now on. From any thread.
  virtual void abort() = 0;
  virtual std::string name() const = 0;  // "TCP", "Open MPI 4.1.4"
};

}  // namespace llmc
