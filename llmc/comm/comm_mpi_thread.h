// comm_mpi_thread.h: the thread that makes all MPI calls of a process, because many MPIs accept calls from one thread
// only. It drives the exchanges of all ranks and groups of the process. Private to comm_mpi.h.
#pragma once
#ifdef TRAIN_GPT_MPI
#include <mpi.h>
#include <sched.h>
#include <sys/prctl.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "core/check.h"
#include "core/clock.h"
#include "net/wire/socket.h"

namespace llmc {

// The version of the loaded library: "Open MPI 4.1.4", "MPICH 4.0.2". May be called from any thread, at any time.
inline std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string version(text);  // "Open MPI v4.1.4, package: ...", "MPICH Version:\t4.0.2\nMPICH Release date: ..."
  version.resize(std::min(version.find_first_of(",\n"), version.size()));
  for (const std::string_view between : {" v", " Version:"})
    if (const size_t at = version.find(between); at != std::string::npos)
      version.replace(at, version.find_first_not_of(" \t", at + between.size()) - at, " ");
  return version;
}

namespace detail {

inline std::string mpi_error(int status) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  return shown(text, 400);
}

inline void check_mpi(int status, const char* call) {
  if (status != MPI_SUCCESS) throw Error(formatted("{} failed: {}", call, mpi_error(status)));
}

// The state shared by the thread that makes the MPI calls and the threads that wait for it.
class MpiThread {
 public:
  // One direction of an exchange.
  struct Side {
    int process = -1, tag = 0;  // process -1: none
    std::byte* data = nullptr;
    int64_t bytes = 0;
  };
  struct Exchange {
    Side out, in;
    int group = -1, self = 0, to = -1, from = -1;  // ranks, for errors
    int64_t open = 0;                              // requests that are not complete
    bool done = false;
    std::string error = {};
    std::condition_variable ready = {};
  };

  explicit MpiThread(int64_t part_bytes) : part_bytes_(part_bytes) {}

  int process = 0, processes = 1;
  int tag_limit = 32767;  // the smallest limit that the standard allows

  // ---- On the MPI thread: first start(), then run() until close() or abort() ---------------------------------------

  void start() {
    int level = MPI_THREAD_SINGLE, found = 0;
    int* limit = nullptr;
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    CHECK(level >= MPI_THREAD_FUNNELED, "{} does not work in a program with threads; use --comm tcp", mpi_version());
    for (const MPI_Comm comm : {MPI_COMM_WORLD, MPI_COMM_SELF})
      check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &process), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &processes), "MPI_Comm_size");
    check_mpi(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&limit), &found), "MPI_Comm_get_attr");
    if (found != 0) tag_limit = *limit;
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // ns; by default short sleeps take 50 us more
  }

  void run() {
    std::unique_lock lock(mutex_);
    auto progressed = Clock::now();
    while (!aborted_ && !(closing_ && posted_.empty() && requests_.empty())) {
      taken_.swap(posted_);
      const bool is_new = !taken_.empty();
      std::string fault;
      int completed = 0;
      lock.unlock();
      try {
        for (const Posted& p : taken_) post(p);
        completed = test();
      } catch (const Error& error) {
        fault = error.what();
      }
      taken_.clear();
      lock.lock();
      if (aborted_) break;
      if (!fault.empty()) fail(*waiting_.front(), fault);
      else if (completed > 0) complete(completed);
      if (is_new || completed > 0) progressed = Clock::now();
      else back_off(lock, Clock::now() - progressed);
    }
    if (aborted_) {
      left_mpi_ = true;
      release();
    } else {
      lock.unlock();
      MPI_Finalize();
    }
  }

  // ---- On any other thread -----------------------------------------------------------------------------------------

  void exchange(Exchange& e) {
    std::unique_lock lock(mutex_);
    for (const Side& side : {e.out, e.in})
      if (side.process >= 0) e.open += side.bytes / part_bytes_ + 1;  // as in for_parts()
    if (e.open == 0) return;
    waiting_.push_back(&e);
    posted_.push_back({&e, e.out, e.in});
    work_.notify_one();
    e.ready.wait(lock, [&] { return e.done || released_; });
    std::erase(waiting_, &e);
    if (e.error.starts_with("MPI_")) throw ConnectionError(e.error);  // a call has failed, not a length been wrong
    if (!e.error.empty()) throw Error(e.error);
    if (!e.done) throw PeerError();
  }

  // Buffers may be freed as soon as their exchanges have thrown, so the MPI thread has to leave MPI first. That takes
  // no time, unless MPI itself hangs.
  void abort() {
    std::unique_lock lock(mutex_);
    aborted_ = true;
    work_.notify_one();
    released_now_.wait_for(lock, std::chrono::seconds(1), [&] { return released_; });
    release();
  }

  // Call when no exchange is in progress. Returns whether the MPI thread will end: false if it hangs in a call that
  // abort() gave up waiting for.
  bool close() {
    std::lock_guard lock(mutex_);
    closing_ = true;
    work_.notify_one();
    return !aborted_ || left_mpi_;
  }

 private:
  // Copies the sides of an exchange, which may be gone when an MPI call returns late.
  struct Posted {
    Exchange* exchange;
    Side out, in;
  };
  struct Request {
    Exchange* exchange;
    bool receives;
    int64_t begin, bytes;  // of the part in the message
  };

  // A message consists of as many full parts as fit into it, and a last part of fewer bytes, perhaps none. So a full
  // part means that more follow, and a receiver notices every unexpected length.
  template <class F>
  void for_parts(int64_t bytes, F&& f) const {
    for (int64_t begin = 0; begin <= bytes; begin += part_bytes_) f(begin, std::min(part_bytes_, bytes - begin));
  }

  void post(const Posted& p) {
    const auto post_side = [&](const Side& side, bool receives) {
      if (side.process < 0) return;
      for_parts(side.bytes, [&](int64_t begin, int64_t bytes) {
        MPI_Request request = MPI_REQUEST_NULL;
        const int status = receives ? MPI_Irecv(side.data + begin, static_cast<int>(bytes), MPI_BYTE, side.process,
                                                side.tag, MPI_COMM_WORLD, &request)
                                    : MPI_Isend(side.data + begin, static_cast<int>(bytes), MPI_BYTE, side.process,
                                                side.tag, MPI_COMM_WORLD, &request);
        check_mpi(status, receives ? "MPI_Irecv" : "MPI_Isend");
        requests_.push_back(request);
        of_requests_.push_back({p.exchange, receives, begin, bytes});
        open_bytes_ += bytes;
      });
    };
    post_side(p.in, true);
    post_side(p.out, false);
  }

  // Lets MPI make progress; returns how many requests have completed, listed in indices_ and statuses_.
  int test() {
    if (requests_.empty()) return 0;
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size());
    int completed = 0, error_class = MPI_SUCCESS;
    const int status = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &completed, indices_.data(),
                                    statuses_.data());
    if (status != MPI_SUCCESS) MPI_Error_class(status, &error_class);
    if (error_class != MPI_ERR_IN_STATUS) {
      check_mpi(status, "MPI_Testsome");
      for (MPI_Status& each : statuses_) each.MPI_ERROR = MPI_SUCCESS;  // MPI does not set them in this case
    }
    return completed == MPI_UNDEFINED ? 0 : completed;
  }

  void complete(int completed) {
    for (size_t k = 0; k < static_cast<size_t>(completed) && !aborted_; ++k) {
      const Request& request = of_requests_[static_cast<size_t>(indices_[k])];
      Exchange& e = *request.exchange;
      open_bytes_ -= request.bytes;
      if (const std::string fault = fault_of(request, statuses_[k]); !fault.empty()) fail(e, fault);
      if (--e.open > 0) continue;
      e.done = true;
      e.ready.notify_one();
    }
    size_t kept = 0;
    for (size_t i = 0; i < requests_.size(); ++i)
      if (requests_[i] != MPI_REQUEST_NULL) {
        requests_[kept] = requests_[i];
        of_requests_[kept++] = of_requests_[i];
      }
    requests_.resize(kept);
    of_requests_.resize(kept);
  }

  // Describes an error of the request; empty if there is none.
  std::string fault_of(const Request& request, const MPI_Status& status) const {
    const Exchange& e = *request.exchange;
    int error_class = MPI_SUCCESS, count = 0;
    if (status.MPI_ERROR != MPI_SUCCESS) MPI_Error_class(status.MPI_ERROR, &error_class);
    if (error_class != MPI_SUCCESS && error_class != MPI_ERR_TRUNCATE)
      return formatted("{} of rank {}, {} rank {}, group {}, failed: {}", request.receives ? "MPI_Irecv" : "MPI_Isend",
                       e.self, request.receives ? "from" : "to", request.receives ? e.from : e.to, e.group,
                       mpi_error(status.MPI_ERROR));
    if (!request.receives) return {};
    MPI_Get_count(&status, MPI_BYTE, &count);
    if (error_class == MPI_SUCCESS && count == request.bytes) return {};
    // Not every MPI counts the bytes of a message that is too long; then its error text may say how long it is.
    const bool is_counted = error_class == MPI_SUCCESS || count > request.bytes;
    const char* about = !is_counted ? "more than " : count == part_bytes_ ? "at least " : "";
    return formatted("rank {} sent {}{} bytes to rank {}, which expected {}, in group {}{}", e.from, about,
                     request.begin + (is_counted ? count : request.bytes), e.self, e.in.bytes, e.group,
                     is_counted ? "" : ": " + mpi_error(status.MPI_ERROR));
  }

  // MPI cannot be relied on after an error: all other exchanges end too.
  void fail(Exchange& e, const std::string& fault) {
    e.error = fault;
    e.done = true;
    aborted_ = true;
  }

  void release() {
    if (std::exchange(released_, true)) return;
    for (Exchange* e : waiting_) e->ready.notify_one();
    released_now_.notify_all();
  }

  // Called when nothing has completed since the last look. MPI has no call that sleeps until something completes, and
  // it does not say that a message is moving before it has arrived. So this yields the processor for as long as the
  // open bytes may take at 1 byte/ns; after that it naps for a small part of the time waited so far: with longer naps
  // the waits around a ring would add up.
  void back_off(std::unique_lock<std::mutex>& lock, Clock::duration waited) {
    using namespace std::chrono_literals;
    const auto has_work = [&] { return aborted_ || closing_ || !posted_.empty(); };
    if (requests_.empty()) {
      work_.wait(lock, has_work);
    } else if (waited < 100us + std::chrono::nanoseconds(open_bytes_)) {
      lock.unlock();
      sched_yield();
      lock.lock();
    } else {
      work_.wait_for(lock, std::clamp<Clock::duration>(waited / 32, 50us, 500us), has_work);
    }
  }

  // Used by the MPI thread only.
  int64_t part_bytes_, open_bytes_ = 0;
  std::vector<Posted> taken_;
  std::vector<MPI_Request> requests_;
  std::vector<Request> of_requests_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;

  std::mutex mutex_;  // for all below, and for exchanges
  std::condition_variable work_, released_now_;
  std::vector<Posted> posted_;
  std::vector<Exchange*> waiting_;  // posted, or in progress
  bool closing_ = false, aborted_ = false, left_mpi_ = false;
  bool released_ = false;  // no exchange waits any longer
};

}  // namespace detail
}  // namespace llmc
#endif
