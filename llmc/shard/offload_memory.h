// offload_memory.h: what has the offloaded state of a rank (core/precision.h): memory of its host, or a file.
#pragma once
#include "core/precision.h"
#include "device/arena.h"

namespace llmc {

struct OffloadMemory {
  Arena *host = nullptr, *file = nullptr;  // none: nothing is there

  // Where this part of the state is; if it is not offloaded, in the device's memory.
  Arena& of(Offloaded part, const Offload& offload, Arena& device) const {
    Arena* const arena = offload.in_file(part) ? file : offload.has(part) ? host : &device;
    CHECK(arena != nullptr, "--offload {}: there is no {}", std::string(offload),
          offload.in_file(part) ? "file" : "host memory");
    return *arena;
  }
};

}  // namespace llmc
