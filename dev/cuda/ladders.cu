// ladders.cu: times every version of every kernel ladder on the GPU; `make ladders && build/ladders`. Each version runs
// for about 200 ms; the arrays are larger than the caches. With --small they are tiny, to try the program on an
// emulated GPU. Exit status 1: a version is wrong; its error is printed in place of its time.
#include <algorithm>
#include <cstdio>
#include <cstring>

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

// Returns how many versions are wrong.
int time_versions(const Ladder& ladder) {
  int wrong = 0;
  const bool moves = ladder.flops == 0;
  std::printf("\n| %s | us | %s |\n| --- | --- | --- |\n", ladder.op, moves ? "GB/s" : "TFLOP/s");
  for (const Ladder::Version& version : ladder.versions) {
    ladder.prepare();
    version.run();
    const Outputs got = ladder.outputs();
    std::string error;
    for (size_t i = 0; i < got.size() && error.empty(); ++i)
      if (!(relative_error(got[i].values, ladder.reference[i].values) < ladder.tolerance))
        error = describe_error(got[i], ladder.reference[i]);
    if (!error.empty()) {
      std::printf("| %s | WRONG | %s |\n", version.idea, error.c_str());
      ++wrong;
      continue;
    }
    const float once = milliseconds_of(version.run);
    const int times = std::clamp(static_cast<int>(200 / once), 3, 1000);
    const float ms = milliseconds_of([&] {
                       for (int i = 0; i < times; ++i) version.run();
                     }) /
                     static_cast<float>(times);
    std::printf("| %s | %.1f | %.*f |\n", version.idea, 1e3 * ms, moves ? 0 : 1,
                moves ? ladder.bytes / ms * 1e-6 : ladder.flops / ms * 1e-9);
  }
  return wrong;
}

}  // namespace

int main(int argc, char** argv) try {
  const bool small = argc > 1 && std::strcmp(argv[1], "--small") == 0;
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // each row is seen as soon as it is measured
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s\n", properties.name);
  const int wrong = time_versions(small ? layernorm_ladder(64, 96) : layernorm_ladder(65536, 768)) +
                    time_versions(small ? classifier_ladder(8, 257) : classifier_ladder(8192, 50257)) +
                    time_versions(adamw_ladder(small ? 1 << 10 : 1 << 26)) +
                    time_versions(small ? attention_ladder(1, 64, 2) : attention_ladder(4, 1024, 12));
  if (wrong > 0) std::fprintf(stderr, "ladders: %d version(s) are wrong\n", wrong);
  return wrong > 0;
} catch (const Error& error) {
  std::fprintf(stderr, "ladders: %s\n", error.what());
  return 1;
}
