// cuda_runtime.h: replaces the toolkit's header when kernels are compiled for the CPU. README.md explains how to write
// and test a kernel.
#pragma once
#include "cuda_on_cpu/device_functions.h"
#include "cuda_on_cpu/emulator.h"
#include "cuda_on_cpu/runtime_api.h"
#include "cuda_on_cpu/types.h"
#include "cuda_on_cpu/warp_matrix.h"

// Last, because members of structs above have these names too; in a kernel's source such members cannot be named.
#define threadIdx (::cuda_on_cpu::thread_index())
#define blockIdx (::cuda_on_cpu::block_index())
#define blockDim (::cuda_on_cpu::block_size())
#define gridDim (::cuda_on_cpu::grid_size())
