// connected_processes.h: the processes of a job: how they meet, and who carries bytes between their ranks.
#pragma once
#include "comm/comm_mpi.h"
#include "comm/world.h"
#include "net/meeting/rendezvous.h"
#include "net/tcp_links.h"
#include "net/watching/watchdog.h"

namespace llmc {

// This process and the others of its job. A process that is alone meets nobody, but its ranks watch each other.
class Processes {
 public:
  Processes() = default;
  Processes(int local_ranks, const Timeouts& timeouts) : timeouts_(timeouts) {
    greeting_.local_ranks = local_ranks;
    if (local_ranks == 1) return;
    control_ = std::make_unique<ControlPlane>(greeting_, Rendezvous());
    watchdog_ = std::make_unique<Watchdog>(*control_, timeouts_);
  }
  // Meets the others; blocks until all are there and agree, or throws on all of them. mpi: tensors go over MPI if it
  // has started the processes, otherwise over TCP.
  Processes(const Launched& launch, Greeting greeting, Rendezvous at, bool mpi, double comm_timeout)
      : greeting_(greeting), timeouts_{at.init_timeout, comm_timeout} {
    if (launch.processes == 1) return;
    if (launch.by == Launched::By::mpi) {
      const LastResort last_resort(
          at.init_timeout,
          formatted("MPI has not started all processes within {} s (--init-timeout)", at.init_timeout));
      auto links = std::make_unique<MpiLinks>(greeting.local_ranks);
      greeting_.process = links->process();
      greeting_.processes = links->processes();
      CHECK(greeting_.process == launch.process && greeting_.processes == launch.processes,
            "MPI says that this is process {} of {}, but the environment of {} says {} of {}: the program was built "
            "with another MPI than the one that started it",
            greeting_.process, greeting_.processes, launch.how, launch.process, launch.processes);
      tell_by_mpi(*links, at);
      links_ = std::move(links);
    }
    control_ = std::make_unique<ControlPlane>(greeting_, std::move(at));
    if (!mpi || !links_) tcp_ = std::make_unique<TcpLinks>(*control_);
    watchdog_ = std::make_unique<Watchdog>(*control_, timeouts_);
  }
  // Shutting down MPI waits for the other processes to do so too; after a failure it is not shut down.
  ~Processes() {
    if (alone()) return;
    const LastResort last_resort(
        failed_ ? Watchdog::grace : timeouts_.comm,
        formatted("{} has not ended: another process keeps it waiting", control_->name_of_rank(local_ranks().first)));
    watchdog_.reset();
    tcp_.reset();
    control_.reset();
    links_.reset();
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  bool alone() const { return greeting_.processes == 1; }
  int process() const { return alone() ? 0 : control_->process(); }
  int count() const { return alone() ? 1 : control_->processes(); }
  ControlPlane* control() const { return control_.get(); }  // alone: of no use
  LocalRanks local_ranks() const {
    if (alone()) return {.watchdog = watchdog_.get()};
    return {.first = process() * greeting_.local_ranks,
            .count = greeting_.local_ranks,
            .links = &links(),
            .watchdog = watchdog_.get()};
  }
  Links& links() const {
    if (tcp_) return *tcp_;
    return *links_;
  }

  // An all-gather of text among the processes; returns one text per process.
  std::vector<std::string> all_gather(const std::string& topic, const std::string& text) const {
    if (alone()) return {text};
    const Attending attending(watchdog_->board.processes.get(), "exchange", "", formatted("\"{}\"", topic));
    return control_->all_gather(topic, text);
  }

  // This process ends with this error. It tells the others, unless the error follows from one that they know. Returns
  // what all of them print, and their status.
  Fault fail(const Fault& error, bool follows) {
    if (alone()) return error;
    failed_ = true;
    Fault fault = watchdog_->fault(follows ? 2 : 0);
    if (!fault.known()) {
      watchdog_->failed(local_ranks().first, error.why, error.status);
      fault = watchdog_->fault();
    }
    links().abort();
    if (links_) links_->abort();
    control_->abort();
    return fault.known() ? fault : error;
  }

 private:
  // MPI already connects the processes: through it, process 0 sends them its token, or a random one, and its address.
  // Every process always calls this, because the environment of one host says nothing about that of another.
  static void tell_by_mpi(MpiLinks& mpi, Rendezvous& at) {
    const bool first = mpi.process() == 0;
    if (first && at.token.empty()) at.token = random_token();
    at.token = mpi.broadcast_text(at.token);
    if (first && at.where.empty()) {
      auto [socket, endpoint] = listen_anywhere(at.token, at.address);
      at.listening = std::move(socket);
      at.where = endpoint.text();
    }
    const std::string told = mpi.broadcast_text(at.where);
    CHECK(at.where.empty() || at.where == told, "--rendezvous {} of process {} differs from {} of process 0", at.where,
          mpi.process(), told);
    at.where = told;
  }

  Greeting greeting_;
  Timeouts timeouts_;
  bool failed_ = false;
  std::unique_ptr<MpiLinks> links_;
  std::unique_ptr<ControlPlane> control_;
  std::unique_ptr<TcpLinks> tcp_;
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace llmc
