// machine_block.cpp: what the threads of a block share: meetings, shared memory, and termination if one of them fails.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <map>

#include "cuda_on_cpu/machine.h"

namespace cuda_on_cpu::detail {

static std::string triple(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}
std::string at(const Location& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line()) + " in " + where.function_name();
}

static bool same_place(const Location& a, const Location& b) {
  return a.line() == b.line() && (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

// ---- Meetings -------------------------------------------------------------------------------------------------------

void Machine::meet_block(const char* what, const Location& where) {
  Unobserved unobserved;
  Thread& thread = *running_;
  void* sync = block_sync(thread.block_meetings++ & 1);
  release(sync);
  if (++block_waiting_ == size_) {
    block_waiting_ = 0;
    thread.where = where;
    thread.what = what;
    thread.state = State::at_block;
    for (unsigned number = 0; number < size_; ++number)
      if (!same_place(threads_[number]->where, where)) report_stuck();
    for (unsigned number = 0; number < size_; ++number) set_ready(*threads_[number]);
    wait(State::ready, what, 0, nullptr, where);
  } else {
    wait(State::at_block, what, 0, nullptr, where);
  }
  acquire(sync);
}

void Machine::meet_warp(const char* what, uint32_t mask, void* record, Exchange exchange, const Location& where) {
  Unobserved unobserved;
  Thread& thread = *running_;
  const unsigned lane = thread.number % 32, first = thread.number - lane;
  if ((mask >> lane & 1) == 0)
    cuda_on_cpu::fail(std::string(what) + ": its mask does not name lane " + std::to_string(lane) + ", which calls it",
                      where);
  thread.what = what;
  thread.where = where;
  thread.mask = mask;
  thread.record = record;
  thread.state = State::at_warp;
  unsigned& waiting = warp_waiting_[first / 32];
  const unsigned wanted = static_cast<unsigned>(std::popcount(mask));
  const auto is_here = [&](const Thread& other) {
    return other.state == State::at_warp && other.mask == mask && other.what == what && same_place(other.where, where);
  };
  bool all = ++waiting >= wanted;
  for (unsigned l = 0; all && l < 32; ++l)
    if (mask >> l & 1) all = first + l < size_ && threads_[first + l] != nullptr && is_here(*threads_[first + l]);
  if (!all) return wait(State::at_warp, what, mask, record, where);

  waiting -= wanted;
  void* records[32] = {};
  for (unsigned l = 0; l < 32; ++l)
    if (mask >> l & 1) records[l] = threads_[first + l]->record;
  if (exchange != nullptr) exchange(records, mask);
  for (unsigned l = 0; l < 32; ++l)
    if (mask >> l & 1) set_ready(*threads_[first + l]);
  wait(State::ready, what, mask, record, where);
}

// Consecutive meetings have different addresses, or a late thread would also acquire what an early one did afterwards.
void Machine::sync_warp(uint32_t mask, const Location& where) {
  Thread& thread = *running_;
  void* sync = warp_sync(thread.number / 32, mask == ~0u ? thread.warp_meetings++ & 1 : 2);
  release(sync);
  meet_warp("__syncwarp", mask, nullptr, nullptr, where);
  acquire(sync);
}

// ---- Failures -------------------------------------------------------------------------------------------------------

void Machine::fail(const std::string& what, const std::string& where) {
  const uint3& t = running_->index;
  throw Failure(place() + ", thread " + triple(t.x, t.y, t.z) + ": " + what + " (" + where + ")");
}

std::string Machine::place() const {
  return std::string("kernel ") + launch_->kernel + ", block " + triple(block_.x, block_.y, block_.z);
}

std::string Machine::describe(const std::vector<unsigned>& group) const {
  const uint3 index = index_of(group.front());
  std::string text = std::to_string(group.size()) + " of " + std::to_string(size_) + " threads, the first is thread " +
                     triple(index.x, index.y, index.z) + ", ";
  if (has_ended(group.front())) return text + "have ended";
  const Thread& one = *threads_[group.front()];
  text += std::string("wait in ") + one.what + " at " + at(one.where);
  if (one.state != State::at_warp) return text;
  char mask[16];
  std::snprintf(mask, sizeof mask, "0x%08x", one.mask);
  return text + " for the lanes " + mask;
}

void Machine::report_stuck() {
  std::map<std::string, std::vector<unsigned>> groups;
  for (unsigned number = 0; number < size_; ++number) {
    const Thread* t = threads_[number];
    groups[has_ended(number) ? "" : at(t->where) + std::to_string(t->mask)].push_back(number);
  }
  std::string text = place() + ": divergent barrier, no thread can proceed:";
  for (const auto& [key, group] : groups) text += "\n  " + describe(group);
  throw Failure(text);
}

// ---- Shared memory --------------------------------------------------------------------------------------------------

void Machine::prepare_shared() {
  if (shared_ != nullptr && thread_sanitizer) {  // forget earlier accesses: another block's threads are not a race
    unmap_memory(shared_, shared_mapped);
    shared_ = nullptr;
  }
  if (shared_ == nullptr) shared_ = map_memory(shared_mapped);
  poison_memory(shared_, std::max(shared_used_, size_t{1} << 16));
  arrays_.clear();
  shared_used_ = redzone;
  shared_held_ = 0;
  if (launch_->dynamic_shared > 0) shared_memory(nullptr, launch_->dynamic_shared);
}

void* Machine::shared_memory(const void* key, size_t bytes) {
  Unobserved unobserved;
  for (const SharedArray& array : arrays_)
    if (array.key == key) return array.memory;
  shared_held_ += (bytes + 15) / 16 * 16;
  const size_t fixed = shared_held_ - (launch_->dynamic_shared + 15) / 16 * 16;
  if (key != nullptr && (fixed > max_static_shared || shared_held_ > launch_->shared_limit))
    throw Failure(place() + ": " + std::to_string(fixed) + " bytes of shared arrays and " +
                  std::to_string(launch_->dynamic_shared) + " dynamic ones; a block has " +
                  std::to_string(max_static_shared) + " for arrays and " + std::to_string(launch_->shared_limit) +
                  " in all, unless more is requested");
  std::byte* memory = shared_ + shared_used_;
  shared_used_ += (bytes + redzone + 127) / 128 * 128;
  poison_memory(memory, shared_ + shared_used_ - memory);
  unpoison_memory(memory, bytes);
  std::memset(memory, 0xff, bytes);
  arrays_.push_back({key, memory, bytes});
  return memory;
}

bool Machine::in_shared(const void* p, size_t bytes) const {
  const auto* address = static_cast<const std::byte*>(p);
  return std::any_of(arrays_.begin(), arrays_.end(), [&](const SharedArray& array) {
    return address >= array.memory && address + bytes <= array.memory + array.bytes;
  });
}

}  // namespace cuda_on_cpu::detail
