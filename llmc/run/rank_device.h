// rank_device.h: which part of a host's processors or GPUs each rank has.
#pragma once
#include "comm/comm.h"
#include "core/shape.h"
#include "device/gpu.h"
#include "run/options/options.h"

namespace llmc {

// Is the device a GPU for a plan alone, which is not in this machine?
inline bool is_gpu_elsewhere(const Device& device) {
  return device.computes_as() == DeviceKind::cuda && (device.elsewhere || visible_gpus().count == 0);
}

// Is the device the processors of a server of its own for each process, in a plan for another machine?
inline bool has_server(const Device& device) { return device.computes_as() != DeviceKind::cuda && device.elsewhere; }

// The processors of the host, here or in a plan for another machine.
inline int64_t processors_of(const Device& device) {
  return has_server(device) ? device.machine->cores : available_processors();
}

// A process whose ranks compute at once: each has a thread of its own, however few --threads there are, but no more run
// than there are processors.
inline Device working_device(Device device, const Place& place, int processors = available_processors()) {
  device.threads = std::max(device.threads, std::min(static_cast<int>(place.local_ranks), processors));
  return device;
}

// The GPU, among those this process sees, of its rank with this number: round-robin over the host's ranks.
inline int gpu_of_thread(const Place& place, int64_t thread, int64_t gpus) {
  return static_cast<int>(((place.own_gpus ? 0 : place.rank_on_host) + thread) % gpus);
}

// One rank's part of the device: a share of the threads, or one of the host's GPUs, dealt out round-robin. In a plan on
// a host without GPUs, each rank has its own. thread: the rank's number in this process.
inline Device rank_device(Device device, const Place& place, int64_t thread = 0) {
  const int64_t gpus = is_gpu_elsewhere(device) ? 0 : visible_gpus().count,
                ranks = place.own_gpus || has_server(device) ? place.local_ranks : place.ranks_on_host,
                parts = device.kind != DeviceKind::cuda ? 1
                        : gpus > 0                      ? gpus
                                                        : ranks;
  device.threads = std::max(1, device.threads / static_cast<int>(place.local_ranks));
  device.gpu = gpu_of_thread(place, thread, parts);
  device.sharers = static_cast<int>(ceil_div(ranks, parts));
  return device;
}

// Who moves the tensors of this many ranks with --comm: NCCL if ranks have GPUs of their own, even in a plan for GPUs
// that are not here.
inline Collectives collectives_of(const Device& device, int64_t ranks, CommChoice comm) {
  const bool own_gpus = device.computes_as() == DeviceKind::cuda && device.sharers == 1 && ranks > 1;
  const bool found = built_with_nccl || is_gpu_elsewhere(device);
  return own_gpus && found && (comm == CommChoice::automatic || comm == CommChoice::nccl) ? Collectives::library
                                                                                          : Collectives::own;
}

// The GPUs of this process's ranks, each once. The other GPUs that it sees belong to other processes: a context there
// would take some hundred MB of their memory.
inline std::vector<int> gpus_of_process(const Place& place) {
  std::vector<int> own;
  const int64_t gpus = visible_gpus().count;
  for (int64_t thread = 0; thread < std::min(place.local_ranks, gpus); ++thread)
    own.push_back(gpu_of_thread(place, thread, gpus));
  return own;
}

}  // namespace llmc
