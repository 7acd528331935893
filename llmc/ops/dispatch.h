// dispatch.h: calls the implementation of an op for the device of its stream.
#pragma once
#include "device/arena.h"
#include "device/device.h"
#include "device/tensor.h"
#include "ops/cpu/table.h"
#ifdef TRAIN_GPT_CUDA
#include "ops/cuda/all_ops.cuh"
#endif

namespace llmc::detail {

[[noreturn]] inline void refuse_fp64() {
  throw Error("GPU ops do not compute in fp64, which is for finite differences: use --device cpu");
}

}  // namespace llmc::detail

// RUN_ON_DEVICE(stream, X, cuda_call, cpu_call): runs one of the two calls. X: the C++ type that the op computes in;
// never double on GPUs.
// CALL_OP(stream, X, f, arguments...): the same for cuda::f(arguments..., stream) and the CPU's f(arguments...).
// ON_GPU(value): 0 in a build without GPUs.
#ifdef TRAIN_GPT_CUDA
#define RUN_ON_DEVICE(stream, X, cuda_call, cpu_call) \
  do {                                                \
    if ((stream).device().kind == DeviceKind::cuda) { \
      if constexpr (std::is_same_v<X, double>) {      \
        ::llmc::detail::refuse_fp64();                \
      } else {                                        \
        cuda_call;                                    \
      }                                               \
    } else {                                          \
      cpu_call;                                       \
    }                                                 \
  } while (false)
#define ON_GPU(...) (__VA_ARGS__)
#else
#define ON_GPU(...) \
  int64_t { 0 }
#define RUN_ON_DEVICE(stream, X, cuda_call, cpu_call) \
  do {                                                \
    using ComputedIn [[maybe_unused]] = X;            \
    (void)(stream);                                   \
    cpu_call;                                         \
  } while (false)
#endif
#define CALL_OP(stream, X, f, ...) \
  RUN_ON_DEVICE(stream, X, cuda::f(__VA_ARGS__, (stream).cuda()), cpu::ops<X>().f(__VA_ARGS__))
