// profiler_range.h: named ranges for NVIDIA's profilers (NVTX); no-ops in other builds.
#pragma once
#if defined(TRAIN_GPT_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define TRAIN_GPT_CUDA_NVTX
#endif

namespace llmc {

class [[nodiscard]] ProfilerRange {
 public:
#ifdef TRAIN_GPT_CUDA_NVTX
  explicit ProfilerRange(const char* name) { nvtxRangePushA(name); }
  ~ProfilerRange() { nvtxRangePop(); }
#else
  explicit ProfilerRange(const char*) {}
  ~ProfilerRange() {}
#endif
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace llmc
