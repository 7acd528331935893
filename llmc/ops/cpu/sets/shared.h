// shared.h: what the ops of several instruction sets use, compiled for any processor: it is included before a set's
// instructions are switched on, because the linker keeps one copy of an inline function, no matter which.
#pragma once
#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <omp.h>

#include <atomic>
#include <bit>
#include <thread>

#include "core/dtype.h"
#include "core/rng.h"
#include "core/shape.h"
#include "ops/cpu/attention_shape.h"
#include "ops/cpu/isa.h"
#include "ops/cpu/matmul_shape.h"
#include "ops/optimizers.h"
#include "ops/types.h"
