// emulator.h: runs a CUDA kernel on the CPU, each CUDA thread as a fiber that runs until it has to wait for others. A
// Schedule chooses what runs first; a correct kernel gives the same bits under each schedule.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/threads.h"
#include "cuda_on_cpu/sanitizers.h"
#include "cuda_on_cpu/types.h"

namespace cuda_on_cpu {

using Location = std::source_location;

// Thrown for a kernel bug or a misuse of the runtime: from the call that waits for the stream, or at once.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// ---- Schedules ------------------------------------------------------------------------------------------------------

// Which thread runs when several can. forward and reverse sweep over all threads, so that none passes a barrier of any
// kind before the others have come close; the depth-first orders let the first (last) warp run as far ahead as
// possible. The reverse orders also run blocks from last to first.
enum class Order : uint8_t { forward, reverse, depth_first, depth_first_reverse, random };
// Whether cp.async writes when issued, or only when a wait requires it.
enum class AsyncCopy : uint8_t { eager, lazy };

struct Schedule {
  Order order = Order::forward;
  AsyncCopy async_copy = AsyncCopy::eager;
  uint64_t seed = 0;  // of Order::random
  bool operator==(const Schedule&) const = default;
};
std::string to_string(const Schedule& schedule);
// Every order, the random one with two seeds; each with lazy copies too if a kernel has used cp.async since
// set_schedule was called. Under ThreadSanitizer, which sees races in any order, a single order.
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
  std::string source()
      const;  // "reduce.cuh: __syncthreads();  // its comment": unchanged when lines are inserted above
  std::string to_string() const;  // "llmc/ops/cuda/reduce.cuh:35 (__syncthreads)"
};

// From now on (until called with nullptr) adds every executed site to `sites`, once.
void record_sites(std::vector<Site>* sites);
// Disables this site from now on.
void switch_off(std::optional<Site> site);
// Called by a site: is it the disabled one?
bool is_switched_off(const char* what, const Location& where);

// ---- Running a kernel -----------------------------------------------------------------------------------------------

inline constexpr unsigned max_block_threads = 1024;
inline constexpr size_t max_static_shared = 48 << 10, max_shared = 227 << 10;  // bytes for one block, sm_90

struct Launch {
  const char* kernel;  // its name, for messages
  dim3 grid, block;
  size_t dynamic_shared;  // bytes
  size_t shared_limit;    // bytes of dynamic and fixed arrays together
  llmc::Work call;        // the kernel with its arguments, as one thread runs it
};

// Runs all blocks, one after the other, on the calling host thread.
void run(const Launch& launch);

// Kernels that ran so far, a library's matrix products among them.
int64_t kernels_run();
void count_kernel();

// ---- Called by running CUDA threads ---------------------------------------------------------------------------------

const uint3& thread_index();
const uint3& block_index();
const dim3& block_size();
const dim3& grid_size();
unsigned lane();

[[noreturn]] void fail(const std::string& what, const Location& where);

// A barrier for all threads of the block.
void meet_block(const char* what, const Location& where);

// A barrier for all lanes of `mask`, each with a record; once all have arrived, one of them calls exchange(records,
// mask), with records[lane] as passed by the lanes.
using Exchange = void (*)(void* const* records, uint32_t mask);
void meet_warp(const char* what, uint32_t mask, void* record, Exchange exchange, const Location& where);
template <class Record, class F>
void meet_warp(const char* what, uint32_t mask, Record& record, F, const Location& where) {
  meet_warp(
      what, mask, &record,
      [](void* const* records, uint32_t lanes) { F{}(reinterpret_cast<Record* const*>(records), lanes); }, where);
}

// __syncwarp: the only warp-level meeting that also orders memory.
void sync_warp(uint32_t mask, const Location& where);

// Shared memory of the block: the same bytes for every thread that uses the same key, initially NaN (all bits set),
// surrounded by redzones.
void* shared_memory(const void* key, size_t bytes);
void* dynamic_shared_memory();
template <class Where>
inline char shared_key;  // `Where`, a type that only one place in the source has, stands for that place
template <class T, size_t N, class Where>
auto shared_array() -> T (&)[N] {
  return *static_cast<T(*)[N]>(shared_memory(&shared_key<Where>, sizeof(T) * N));
}

// cp.async: copies `bytes` bytes, then zeros up to `size`.
void async_copy(void* to, const void* from, int size, int bytes, const Location& where);
void async_commit();
void async_wait(int groups_left);

// Orders this thread's memory accesses with those of others that call it.
void thread_fence();

}  // namespace cuda_on_cpu
