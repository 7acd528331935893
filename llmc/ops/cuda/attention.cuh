// attention.cuh: attention for training, forward and backward, and for generating, with a cache of keys and values.
#pragma once
#include "ops/cuda/attention_backward.cuh"
#include "ops/cuda/attention_cached.cuh"
#include "ops/cuda/attention_forward.cuh"
