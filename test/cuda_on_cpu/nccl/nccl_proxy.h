// nccl_proxy.h: private to nccl/: the thread that takes part in the collectives of a communicator of several processes.
#pragma once
#include <deque>
#include <memory>
#include <thread>

#include "cuda_on_cpu/nccl/nccl_transfer.h"
#include "cuda_on_cpu/runtime/runtime.h"

namespace cuda_on_cpu::detail {

// Calls of one rank that ranks of other processes take part in. Its second party never comes: the proxy does its work
// and marks it as done.
struct Exchange : Meeting {
  Exchange(std::string name_, std::shared_ptr<Segment> segment_, std::vector<Call> calls_, Task& task)
      : name(std::move(name_)), segment(std::move(segment_)), calls(std::move(calls_)) {
    parties = {&task, nullptr};
  }
  void run() override {}
  std::string waits_for() const override;
  // Its task may go on without it. The proxy does not touch the buffers any more.
  void finish();
  bool finished() const { return parties[0] == nullptr; }  // or dropped

  std::string name;  // of the rank
  std::shared_ptr<Segment> segment;
  std::vector<Call> calls;
};

// Like a GPU, and unlike the rest of the emulator, it also works while no host waits for it, since other processes may:
// it then runs what its next calls wait for, too. It holds the runtime's mutex while it touches the buffers of a call,
// so that none are touched after an abort.
class Proxy {
 public:
  Proxy(std::shared_ptr<Segment> segment, Device& device) : segment_(std::move(segment)), device_(device) {}
  ~Proxy();  // without the mutex
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;
  void add(std::shared_ptr<Exchange> exchange);  // the mutex is held
  void stop();                                   // likewise: drops what it has not done

 private:
  void work();
  void run_what_comes_before(Lock& lock);
  void transfer(Lock& lock, Exchange& exchange);

  std::shared_ptr<Segment> segment_;
  Device& device_;
  std::deque<std::shared_ptr<Exchange>> waiting_;  // in the order of the calls
  bool stopping_ = false;
  std::thread thread_;  // begins with the first call
};

}  // namespace cuda_on_cpu::detail
