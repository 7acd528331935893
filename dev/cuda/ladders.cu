// ladders.cu: times every version of every kernel ladder on the GPU; `make ladders && build/ladders`. Each version runs
// for about 200 ms; the arrays are larger than the caches.
#include <algorithm>
#include <cstdio>

#include "cuda/ladder.h"

using namespace llmc;
using namespace llmc::cuda;

namespace {

float milliseconds_of(const std::function<void()>& work) {
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  CUDA_CHECK(cudaEventRecord(begin));
  work();
  CUDA_CHECK(cudaEventRecord(end));
  CUDA_CHECK(cudaEventSynchronize(end));
  float ms = 0;
  CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms;
}

void time_versions(const Ladder& ladder) {
  const bool moves = ladder.flops == 0;
  std::printf("\n| %s | us | %s |\n| --- | --- | --- |\n", ladder.op, moves ? "GB/s" : "TFLOP/s");
  for (const Ladder::Version& version : ladder.versions) {
    ladder.prepare();
    version.run();
    const Outputs got = ladder.outputs();
    for (size_t i = 0; i < got.size(); ++i)
      if (!(relative_error(got[i].values, ladder.reference[i].values) < ladder.tolerance))
        throw Error(formatted("{}: {} is wrong: {}", ladder.op, ladder.reference[i].name, version.idea));
    const float once = milliseconds_of(version.run);
    const int times = std::clamp(static_cast<int>(200 / once), 3, 1000);
    const float ms = milliseconds_of([&] {
                       for (int i = 0; i < times; ++i) version.run();
                     }) /
                     static_cast<float>(times);
    std::printf("| %s | %.1f | %.*f |\n", version.idea, 1e3 * ms, moves ? 0 : 1,
                moves ? ladder.bytes / ms * 1e-6 : ladder.flops / ms * 1e-9);
  }
}

}  // namespace

int main() try {
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s\n", properties.name);
  time_versions(layernorm_ladder(65536, 768));
  time_versions(classifier_ladder(8192, 50257));
  time_versions(adamw_ladder(1 << 26));
  time_versions(attention_ladder(4, 1024, 12));
} catch (const Error& error) {
  std::fprintf(stderr, "ladders: %s\n", error.what());
  return 1;
}
