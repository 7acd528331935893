// attention.cuh: attention: forward and backward for training, and with a key-value cache for generation.
#pragma once
#include "ops/cuda/attention_backward.cuh"
#include "ops/cuda/attention_cached.cuh"
#include "ops/cuda/attention_forward.cuh"
