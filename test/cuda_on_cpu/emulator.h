// emulator.h: runs a CUDA kernel on the CPU, each CUDA thread as a fiber that goes on until it has to wait for others.
// What runs first is chosen by a Schedule; a kernel that is right gives the same bits under each of them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_on_cpu/sanitizers.h"
#include "cuda_on_cpu/types.h"

namespace cuda_on_cpu {

using Location = std::source_location;

// What a wrong kernel or a wrong use of the runtime throws: out of the call that waits for the stream, or at once.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// ---- Schedules ------------------------------------------------------------------------------------------------------

// Which thread goes on where several could. forward and reverse sweep over all of them, so that nobody passes a barrier
// of any kind before the others have come near; the depth-first ones let the first (last) warp run as far ahead of the
// others as it may. The reverse ones also take blocks from the last to the first.
enum class Order : uint8_t { forward, reverse, depth_first, depth_first_reverse, random };
// Whether cp.async writes when it is issued, or only when a wait demands it.
enum class AsyncCopy : uint8_t { eager, lazy };

struct Schedule {
  Order order = Order::forward;
  AsyncCopy async_copy = AsyncCopy::eager;
  uint64_t seed = 0;  // of Order::random
};
std::string to_string(const Schedule& schedule);
// Every order, the random one with two seeds; all of them with lazy copies too if a kernel has used cp.async since
// set_schedule was called. Under ThreadSanitizer, which sees races whatever the order, one order.
std::vector<Schedule> all_schedules();

void set_schedule(const Schedule& schedule);
const Schedule& schedule();

// ---- Sites: the places that order threads or streams ----------------------------------------------------------------

// A call of __syncthreads, __syncwarp, cp_async_wait or cudaStreamWaitEvent in the source.
struct Site {
  std::string what, file;
  int line;
  bool operator==(const Site&) const = default;
  auto operator<=>(const Site&) const = default;
  std::string source() const;     // "reduce.cuh: __syncthreads();  // its comment": stays when lines are inserted above
  std::string to_string() const;  // "llmc/ops/cuda/reduce.cuh:35 (__syncthreads)"
};

// From now on (until it is given nullptr) every site that is executed is added to `sites`, once.
void record_sites(std::vector<Site>* sites);
// From now on this site does nothing.
void switch_off(std::optional<Site> site);
// Called by a site: is it the one that is switched off?
bool is_switched_off(const char* what, const Location& where);

// ---- Running a kernel -----------------------------------------------------------------------------------------------

inline constexpr unsigned max_block_threads = 1024;
inline constexpr size_t max_static_shared = 48 << 10, max_shared = 227 << 10;  // bytes for one block, sm_90

struct Launch {
  const char* kernel;  // its name, for messages
  dim3 grid, block;
  size_t dynamic_shared;       // bytes
  size_t shared_limit;         // bytes of dynamic and fixed arrays together
  std::function<void()> call;  // the kernel with its arguments, as one thread runs it
};

// Runs all blocks, one after the other, on the calling host thread.
void run(const Launch& launch);

// ---- What a running CUDA thread asks for ----------------------------------------------------------------------------

const uint3& thread_index();
const uint3& block_index();
const dim3& block_size();
const dim3& grid_size();
unsigned lane();

[[noreturn]] void fail(const std::string& what, const Location& where);

// All threads of the block meet here.
void meet_block(const char* what, const Location& where);

// All lanes of `mask` meet here, each with a record; once they have, one of them exchanges: exchange(records, mask)
// with records[lane] as the lanes gave them.
using Exchange = void (*)(void* const* records, uint32_t mask);
void meet_warp(const char* what, uint32_t mask, void* record, Exchange exchange, const Location& where);
template <class Record, class F>
void meet_warp(const char* what, uint32_t mask, Record& record, F, const Location& where) {
  meet_warp(
      what, mask, &record,
      [](void* const* records, uint32_t lanes) { F{}(reinterpret_cast<Record* const*>(records), lanes); }, where);
}

// __syncwarp: the only meeting of a warp that also orders its memory.
void sync_warp(uint32_t mask, const Location& where);

// Shared memory of the block: the same bytes for every thread that asks with the same key, NaN (all bits set) at first,
// with redzones around them.
void* shared_memory(const void* key, size_t bytes);
void* dynamic_shared_memory();
template <class Where>
inline char shared_key;  // `Where`, a type that only one place in the source has, stands for that place
template <class T, size_t N, class Where>
auto shared_array() -> T (&)[N] {
  return *static_cast<T(*)[N]>(shared_memory(&shared_key<Where>, sizeof(T) * N));
}

// cp.async: `bytes` bytes are copied, then zeros up to `size`.
void async_copy(void* to, const void* from, int size, int bytes, const Location& where);
void async_commit();
void async_wait(int groups_left);

// Orders this thread's memory against that of others who do the same.
void thread_fence();

}  // namespace cuda_on_cpu
