// comm_mpi.h: bytes between processes through MPI. Private to comm/.
#pragma once
#include <exception>
#include <future>
#include <thread>

#include "comm/comm_mpi_thread.h"
#include "core/check.h"
#include "net/links.h"
#include "net/meeting/launch.h"

namespace llmc {

#ifdef TRAIN_GPT_MPI
inline constexpr bool built_with_mpi = true;

// Ranks are numbered process by process: rank r is in process r / local_ranks.
class MpiLinks final : public Links {
 public:
  // Starts MPI; returns when all processes have done so. local_ranks: ranks of each process. part_bytes: the longest
  // message passed to MPI, which counts in int.
  explicit MpiLinks(int local_ranks, int64_t part_bytes = largest_part)
      : local_ranks_(local_ranks), mpi_(std::make_shared<detail::MpiThread>(part_bytes)) {
    CHECK(local_ranks >= 1 && part_bytes >= 1 && part_bytes <= largest_part);
    std::promise<void> promise;
    std::future<void> started = promise.get_future();
    thread_ = std::thread([mpi = mpi_, promise = std::move(promise)]() mutable {
      try {
        mpi->start();
      } catch (...) {
        promise.set_exception(std::current_exception());
        return;
      }
      promise.set_value();
      mpi->run();
    });
    try {
      started.get();
    } catch (...) {
      thread_.join();
      throw;
    }
  }
  // Ends MPI, which waits for the other processes to do so too; after abort() MPI is not ended.
  ~MpiLinks() override {
    if (std::uncaught_exceptions() > 0) abort();
    if (mpi_->close()) thread_.join();
    else thread_.detach();
  }

  int process() const { return mpi_->process; }
  int processes() const { return mpi_->processes; }
  std::string name() const override { return mpi_version(); }

  // Returns the text of process 0 on all processes; all of them call it.
  std::string broadcast_text(const std::string& text) {
    const auto move = [&](int to, int from, void* data, size_t bytes) {
      detail::MpiThread::Exchange e;
      e.out = {to, 0, static_cast<std::byte*>(data), static_cast<int64_t>(bytes)};
      e.in = {from, 0, static_cast<std::byte*>(data), static_cast<int64_t>(bytes)};
      mpi_->exchange(e);
    };
    std::string all = text;
    uint64_t bytes = all.size();
    for (int p = 1; p < processes() && process() == 0; ++p) {
      move(p, -1, &bytes, sizeof bytes);
      move(p, -1, all.data(), bytes);
    }
    if (process() > 0) {
      move(-1, 0, &bytes, sizeof bytes);
      all.resize(bytes);
      move(-1, 0, all.data(), bytes);
    }
    return all;
  }

  void exchange(int group, int self, const ToRank& out, const FromRank& in) override {
    detail::MpiThread::Exchange e;
    e.group = group, e.self = self, e.to = out.rank, e.from = in.rank;
    // MPI does not write to the buffer that it sends.
    if (out.rank >= 0)
      e.out = {out.rank / local_ranks_, tag(group, self, out.rank),
               static_cast<std::byte*>(const_cast<void*>(out.data)), out.bytes};
    if (in.rank >= 0)
      e.in = {in.rank / local_ranks_, tag(group, in.rank, self), static_cast<std::byte*>(in.data), in.bytes};
    mpi_->exchange(e);
  }
  void abort() override { mpi_->abort(); }

 private:
  static constexpr int64_t largest_part = int64_t{1} << 30;

  // MPI tells messages between two processes apart by their tags. Tag 0 is for text.
  int tag(int group, int from, int to) const {
    const int64_t L = local_ranks_, tag = 1 + (group * L + from % L) * L + to % L;
    CHECK(
        group >= 0 && tag <= mpi_->tag_limit,
        "{} has {} tags, and group {} of {} ranks in each process needs tag {}: use fewer --local-ranks, or --comm tcp",
        mpi_version(), mpi_->tag_limit, group, L, tag);
    return static_cast<int>(tag);
  }

  int local_ranks_;
  std::shared_ptr<detail::MpiThread> mpi_;
  std::thread thread_;
};

#else
inline constexpr bool built_with_mpi = false;

inline std::string mpi_version() { return "no MPI"; }

class MpiLinks final : public Links {
 public:
  explicit MpiLinks(int, int64_t = 0) {
    throw Error(
        "--comm mpi: this train_gpt was built without MPI; install libopenmpi-dev and rebuild, or use --comm tcp");
  }
  int process() const { return 0; }
  int processes() const { return 1; }
  std::string name() const override { return mpi_version(); }
  std::string broadcast_text(const std::string& text) { return text; }
  void exchange(int, int, const ToRank&, const FromRank&) override {}
  void abort() override {}
};
#endif

// The MPI library whose launchers MPI_Init understands.
inline MpiLibrary mpi_library() {
#if defined(OMPI_MAJOR_VERSION)
  return MpiLibrary::open_mpi;
#elif defined(TRAIN_GPT_MPI)
  return MpiLibrary::mpich;
#else
  return MpiLibrary::none;
#endif
}

}  // namespace llmc
