// nccl_proxy.cpp: see nccl_proxy.h.
#include "cuda_on_cpu/nccl/nccl_proxy.h"

#include <algorithm>

#include "cuda_on_cpu/runtime/runtime_tasks.h"

namespace cuda_on_cpu::detail {

std::string Exchange::waits_for() const {
  std::string text = name;
  for (const Call& call : calls) text += (&call == calls.data() ? " calls " : ", ") + to_string(call);
  const std::string missing = names_of_missing(*segment, calls[0].rank);
  return text + (missing.empty() ? "" : "; of its peers these have not arrived:" + missing);
}
void Exchange::finish() {
  for (Part& part : parties[0]->parts) part.done = part.done || part.meeting.get() == this;
  std::fill(parties.begin(), parties.end(), nullptr);
  something_changed();
}

Proxy::~Proxy() {
  if (thread_.joinable()) thread_.join();
}
void Proxy::add(std::shared_ptr<Exchange> exchange) {
  waiting_.push_back(std::move(exchange));
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  something_changed();
}
void Proxy::stop() {
  for (const auto& exchange : waiting_)
    if (!exchange->finished()) exchange->finish();
  stopping_ = true;
  segment_->ring();
  something_changed();
}

void Proxy::work() {
  Lock lock;
  host().device = device_.number;
  while (!stopping_) {
    if (waiting_.empty()) {
      lock.wait(std::chrono::seconds(1));
      continue;
    }
    const std::shared_ptr<Exchange> next = waiting_.front();
    if (next->finished()) {
      waiting_.pop_front();
      continue;
    }
    try {
      if (has_come(*next->parties[0])) transfer(lock, *next);
      else run_what_comes_before(lock);
    } catch (const Failure&) {  // the hosts are told of it
    }
  }
}

// How long it leaves that to the hosts, which may be about to wait.
constexpr std::chrono::duration<double> grace{0.01};

void Proxy::run_what_comes_before(Lock& lock) {
  const Runtime& r = runtime();
  const uint64_t progress = r.progress;
  const Clock::time_point begin = Clock::now();
  while (!stopping_ && progress == r.progress && Clock::now() - begin < grace) lock.wait(grace);
  if (stopping_ || r.failing || device_.attended > 0 || progress != r.progress) return;
  OpenedMemory memory;
  if (Task* task = choose(device_, nullptr)) run_task(lock, *task, memory);
}

void Proxy::transfer(Lock& lock, Exchange& exchange) {
  std::vector<Transfer> transfers;
  for (const Call& call : exchange.calls) transfers.emplace_back(*segment_, call);
  const auto done = [&] {
    return std::all_of(transfers.begin(), transfers.end(), [](const Transfer& each) { return each.done(); });
  };
  while (!exchange.finished() && !done()) {
    const uint32_t bell = segment_->bell();
    bool any = false;
    try {
      OpenedMemory memory;
      memory.open(device_);
      any = step(transfers);
    } catch (const Failure& failure) {
      fail(lock, std::make_exception_ptr(Failure(exchange.name + ", " + failure.what())));
    }
    if (any) ++runtime().progress;
    lock.unlock();
    if (any) segment_->ring();
    else segment_->wait(bell, std::chrono::milliseconds(100));
    lock.lock();
  }
  if (!exchange.finished()) exchange.finish();
}

}  // namespace cuda_on_cpu::detail
