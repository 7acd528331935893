// ladder.h: one op in several versions, from the plainest kernel to the one in llmc/, each with what it does better
// than the one before. dev/cuda/ has them; test_ladders.cpp holds every version to the CPU's op; dev/cuda/ladders.cu
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
  std::function<void()> prepare;  // poisons what is written, restores what is changed in place
  std::function<Outputs()> outputs;
  Outputs reference;  // what they should be
  double tolerance;
  double bytes = 0, flops = 0;  // that a version has to move at least, or to compute: what its speed is counted in
};

// Activations and weights in bf16. layernorm: x (N, C); classifier: logits (N, V), padded to full packs; adamw: n
// weights; attention: qkv (B, T, 3 H D), D = 64
Ladder layernorm_ladder(int64_t N, int64_t C);
Ladder classifier_ladder(int64_t N, int64_t V);
Ladder adamw_ladder(int64_t n);
Ladder attention_ladder(int64_t B, int64_t T, int64_t H);

}  // namespace llmc::cuda
