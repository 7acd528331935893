// ops.h: every op, with its contract and checks. The CPU implementation of op X is in ops/cpu/X.h. Argument order:
// outputs, inputs, sizes, stream. An op enqueues its work on the stream and returns at once. On the null device it only
// books its cost and counts scratch memory.
//
// Sizes: N rows (batch times sequence), B batch, T sequence, C channels, F feed-forward, V vocabulary, Hq query heads,
// Hkv key-value heads, D head size.
// dtype: activations and weights of one call share a dtype (fp32, bf16; fp64 for finite differences). Statistics,
// softmax, losses and weight gradients are in its accumulator type: fp32, or fp64 for fp64.
#pragma once
#include "ops/matmul_choices.h"    // a GPU library's algorithms for products
#include "ops/ops_attention.h"     // attention, key-value cache
#include "ops/ops_embedding.h"     // token and position embedding
#include "ops/ops_expert_ranks.h"  // experts on several ranks: arriving rows, shared sequences, biases
#include "ops/ops_experts.h"       // mixture of experts: router, rows by expert, grouped linear layers
#include "ops/ops_heads.h"         // rotary positions, query-key norms
#include "ops/ops_layers.h"        // norms, linear, activations, sums of parts
#include "ops/ops_memory.h"        // zero, copy, convert, fill, add, scale, initial weights
#include "ops/ops_muon.h"          // Muon: momentum of a matrix, Newton-Schulz iteration
#include "ops/ops_step.h"          // loss, gradient norm, clipping, update, QK-clip
