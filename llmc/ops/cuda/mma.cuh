// mma.cuh: PTX instructions: warp-level matrix products, loads of their operands, asynchronous copies to shared memory,
// and a fast power of two. No other file contains PTX. Operand layouts: PTX manual, "Warp-level matrix instructions".
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace llmc::cuda {

#ifdef __CUDACC__

// d (16 x 8, fp32) += a (16 x 16, bf16, row-major) b (16 x 8, bf16, column-major). All lanes take part. With group =
// lane / 4 and pair = 2 (lane % 4), a lane holds
//   each a[0..3]: rows group, group + 8, group, group + 8 at columns pair, pair, pair + 8, pair + 8 (and the next one)
//   each b[0..1]: column group at rows pair, pair + 8 (and the next one)
//   each d[0..3]: (group, pair), (group, pair + 1), (group + 8, pair), (group + 8, pair + 1)
__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory; lane 8 i + r passes the 16-byte aligned address of
// row r of matrix i; r[i] = elements 2 (lane % 4) and the next of row lane / 4 of matrix i. All lanes take part.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
// The same for the transposed matrices.
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Starts to copy 16 bytes (source_bytes bytes, then zeros) from global to shared memory, both 16-byte aligned.
__device__ inline void cp_async_16(void* shared, const void* global, int source_bytes = 16) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(__cvta_generic_to_global(global)), "r"(source_bytes)
      : "memory");
}
// The same for 4 bytes, or for none and then zeros. Goes through L1, which the 16-byte copy bypasses.
__device__ inline void cp_async_4(void* shared, const void* global, int source_bytes = 4) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(__cvta_generic_to_global(global)), "r"(source_bytes)
      : "memory");
}
// Commits a group: this thread's copies since the last one.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are pending. Other threads see the copies only after a barrier.
template <int N>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// 2^x to within 2 ulp; 0 below 2^-126.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#else  // the same on a CPU

using Location = cuda_on_cpu::Location;

inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const Location& where = Location::current()) {
  cuda_on_cpu::mma_m16n8k16_bf16(d, a, b, where);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, const Location& where = Location::current()) {
  cuda_on_cpu::ldmatrix_x4<cuda_on_cpu::Transpose::no>(r, row, where);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, const Location& where = Location::current()) {
  cuda_on_cpu::ldmatrix_x4<cuda_on_cpu::Transpose::yes>(r, row, where);
}
inline void cp_async_16(void* shared, const void* global, int source_bytes = 16,
                        const Location& where = Location::current()) {
  cuda_on_cpu::async_copy(shared, global, 16, source_bytes, where);
}
inline void cp_async_4(void* shared, const void* global, int source_bytes = 4,
                       const Location& where = Location::current()) {
  cuda_on_cpu::async_copy(shared, global, 4, source_bytes, where);
}
inline void cp_async_commit() { cuda_on_cpu::async_commit(); }
template <int N>
void cp_async_wait(const Location& where = Location::current()) {
  if (!cuda_on_cpu::is_switched_off("cp_async_wait", where)) cuda_on_cpu::async_wait(N);
}
inline float fast_exp2(float x) { return std::exp2(x); }

#endif

}  // namespace llmc::cuda
