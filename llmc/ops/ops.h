// ops.h: every op: its contract and its checks. The CPU source of op X is ops/cpu/X.h. Arguments in one order: outputs,
// inputs, sizes, stream. Work is enqueued on the stream; an op returns at once. On the null device only the cost is
// booked and scratch memory counted.
//
// Sizes: N rows (batch times sequence), B batch, T sequence, C channels, F feed-forward, V vocabulary, Hq query heads,
// Hkv key-value heads, D head size.
// dtype: activations and weights of one call share a dtype (fp32, bf16; fp64 for finite differences). Statistics,
// softmax, losses and weight gradients are in its accumulator type: fp32, or fp64 for fp64.
#pragma once
#include "ops/ops_attention.h"  // attention, rotary positions, query-key norm, key-value cache
#include "ops/ops_layers.h"     // embedding, norms, linear, activations
#include "ops/ops_memory.h"     // zero, copy, convert, fill, add, scale, initial numbers
#include "ops/ops_step.h"       // loss, gradient norm, clipping, AdamW
