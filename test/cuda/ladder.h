// ladder.h: a kernel ladder: one op in several versions, from the simplest kernel to the one in llmc/, each improving
// on the one before. dev/cuda/ has them; test_ladders.cpp checks every version against the CPU op; dev/cuda/ladders.cu
// times them on a GPU.
#pragma once
#include <functional>

#include "cuda/device_array.h"

namespace llmc::cuda {

struct Ladder {
  struct Version {
    const char* idea;
    std::function<void()> run;  // on the default stream
  };
  const char* op;
  std::vector<Version> versions;
  std::function<void()> prepare;  // poisons outputs, restores arrays updated in place
  std::function<Outputs()> outputs;
  Outputs reference;  // expected outputs
  double tolerance;
  double bytes = 0, flops = 0;  // minimum that a version must move or compute, for its reported speed
};

// Activations and weights in bf16. layernorm: x (N, C); classifier: logits (N, V), padded to full packs; adamw: n
// weights; attention: qkv (B, T, 3 H D), D = 64
Ladder layernorm_ladder(int64_t N, int64_t C);
Ladder classifier_ladder(int64_t N, int64_t V);
Ladder adamw_ladder(int64_t n);
Ladder attention_ladder(int64_t B, int64_t T, int64_t H);
// For the last versions: which instructions, where the code has them; else those of the device.
enum class TensorCores : uint8_t;
Ladder attention_ladder(int64_t B, int64_t T, int64_t H, TensorCores instructions);

}  // namespace llmc::cuda
