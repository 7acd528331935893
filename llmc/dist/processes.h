// processes.h: the processes of a job: how they meet, and who carries bytes between their ranks.
#pragma once
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dist/comm_mpi.h"
#include "dist/world.h"
#include "net/launch.h"
#include "net/rendezvous.h"
#include "net/tcp_links.h"

namespace llmc {

// This process and those it shares a job with. One that is alone meets nobody.
class Processes {
 public:
  Processes() = default;
  // Meets the others; blocks until all are there and agree, or throws on all of them. mpi: tensors go by MPI where it
  // has started the processes, otherwise by TCP.
  Processes(const Launched& launch, Greeting greeting, Rendezvous at, bool mpi) : greeting_(greeting) {
    if (launch.processes == 1) return;
    if (launch.by == Launched::By::mpi) {
      auto links = std::make_unique<MpiLinks>(greeting.local_ranks);
      greeting_.process = links->process();
      greeting_.processes = links->processes();
      CHECK(greeting_.process == launch.process && greeting_.processes == launch.processes,
            "MPI says that this is process {} of {}, and the environment of {} that it is {} of {}: the program was "
            "built with another MPI than the one that started it",
            greeting_.process, greeting_.processes, launch.how, launch.process, launch.processes);
      if (at.where.empty()) tell_by_mpi(*links, at);
      links_ = std::move(links);
    }
    control_ = std::make_unique<ControlPlane>(greeting_, std::move(at));
    if (!mpi || !links_) tcp_ = std::make_unique<TcpLinks>(*control_);
  }

  bool alone() const { return control_ == nullptr; }
  int process() const { return alone() ? 0 : control_->process(); }
  int count() const { return alone() ? 1 : control_->processes(); }
  ControlPlane* control() const { return control_.get(); }  // none: alone
  LocalRanks local_ranks() const {
    if (alone()) return {};
    return {.first = process() * greeting_.local_ranks, .count = greeting_.local_ranks, .links = &links()};
  }
  Links& links() const {
    if (tcp_) return *tcp_;
    return *links_;
  }

  // An all-gather of text between the processes, by process.
  std::vector<std::string> all_gather(const std::string& topic, const std::string& text) const {
    return alone() ? std::vector<std::string>{text} : control_->all_gather(topic, text);
  }

 private:
  // MPI knows the processes already: it tells them where process 0 listens, and a token that nobody else knows.
  static void tell_by_mpi(MpiLinks& mpi, Rendezvous& at) {
    if (at.token.empty()) at.token = mpi.broadcast_text(mpi.process() == 0 ? random_token() : "");
    std::string where;
    if (mpi.process() == 0) {
      auto [socket, endpoint] = listen_anywhere(at.token, at.address);
      at.listening = std::move(socket);
      where = endpoint.text();
    }
    at.where = mpi.broadcast_text(where);
  }

  Greeting greeting_;
  std::unique_ptr<MpiLinks> links_;
  std::unique_ptr<ControlPlane> control_;
  std::unique_ptr<TcpLinks> tcp_;
};

}  // namespace llmc
