// mma.cuh: PTX instructions: matrix products of a warp and, on Hopper, of a warpgroup; loads of their operands;
// asynchronous copies to shared memory; a fast power of two. No other file contains PTX. Operand layouts: PTX manual,
// "Warp-level matrix instructions" and "Asynchronous warpgroup-level matrix instructions".
#pragma once
#include <cuda_runtime.h>

#include <numbers>

#include "core/std.h"

namespace llmc::cuda {

inline constexpr float log2_e = std::numbers::log2e_v<float>, ln_2 = std::numbers::ln2_v<float>;

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

// ---- Hopper: products of a warpgroup, 4 consecutive warps, from a multiple of 4 on ----
// They read tiles in shared memory through the asynchronous proxy: stores and cp.async copies to them are followed by
// fence_async_proxy() in the threads that made them, then by a barrier. Issued products run on; their sums and operands
// may not be touched before a wait. Instructions of sm_90a, which no other architecture has.

__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first product after other instructions wrote its sums or its operands in registers.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Commits a group: the products issued since the last one.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `groups` groups are pending, of which none adds to `sums`.
template <int groups, int N>
__device__ void wgmma_wait(float (&sums)[N][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[n][i])::"memory");  // no read of sums moves before the wait
}

// A tile of bf16 whose rows are 128 bytes, in order; chunk c (16 bytes) of row r is stored at position c ^ (r % 8) of
// the row. `start` is in the tile's first row or in one that is a multiple of 8 further; these begin at multiples
// of 1024 bytes. panel_bytes: from 64 columns to the next 64, where a product's sums have more.
struct WgmmaTile {
  uint32_t low;  // half of the descriptor; the other half is the same for all tiles
  __device__ WgmmaTile(const void* start, int panel_bytes)
      : low((static_cast<uint32_t>(__cvta_generic_to_shared(start)) & 0x3ffff) >> 4 |
            static_cast<uint32_t>(panel_bytes >> 4) << 16) {}
  // The tile that starts so much further: one addition, where another descriptor would be six instructions.
  __device__ WgmmaTile after(int bytes) const {
    WgmmaTile tile = *this;
    tile.low += static_cast<uint32_t>(bytes >> 4);
    return tile;
  }
  __device__ uint64_t descriptor() const {
    constexpr uint64_t high = 1024 >> 4 | 1 << 30;  // bytes of 8 rows; swizzled by 128 bytes
    return high << 32 | low;
  }
};

#define LLMC_SUMS_4(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define LLMC_SUMS_16(n) LLMC_SUMS_4(n), LLMC_SUMS_4(n + 1), LLMC_SUMS_4(n + 2), LLMC_SUMS_4(n + 3)
#define LLMC_SUMS_32 LLMC_SUMS_16(0), LLMC_SUMS_16(4)
#define LLMC_SUMS_64 LLMC_SUMS_32, LLMC_SUMS_16(8), LLMC_SUMS_16(12)
#define LLMC_REGISTERS_32                                                                                              \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31"
#define LLMC_REGISTERS_64                                                                                             \
  LLMC_REGISTERS_32                                                                                                   \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"

// sums (64 x 8 N, fp32) = or, to accumulate, += 16 columns of a (64 rows) times 16 columns of b (8 N rows), transposed.
// A warp has 16 rows of sums and a, sums[n] are 8 columns in mma's layout.
__device__ inline void wgmma_transposed(float (&sums)[8][4], WgmmaTile a, WgmmaTile b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LLMC_REGISTERS_32 "}, %32, %33, p, 1, 1, 0, 0;}"
      : LLMC_SUMS_32
      : "l"(a.descriptor()), "l"(b.descriptor()), "r"(static_cast<int>(accumulate)));
}
__device__ inline void wgmma_transposed(float (&sums)[16][4], WgmmaTile a, WgmmaTile b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LLMC_REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0;}"
      : LLMC_SUMS_64
      : "l"(a.descriptor()), "l"(b.descriptor()), "r"(static_cast<int>(accumulate)));
}
// sums (64 x 8 N, fp32) += a (64 x 16, in registers as for mma_m16n8k16_bf16) times 16 rows of b (8 N columns).
__device__ inline void wgmma(float (&sums)[8][4], const uint32_t (&a)[4], WgmmaTile b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LLMC_REGISTERS_32
               "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
               : LLMC_SUMS_32
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()));
}
__device__ inline void wgmma(float (&sums)[16][4], const uint32_t (&a)[4], WgmmaTile b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LLMC_REGISTERS_64
               "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : LLMC_SUMS_64
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()));
}

#undef LLMC_SUMS_4
#undef LLMC_SUMS_16
#undef LLMC_SUMS_32
#undef LLMC_SUMS_64
#undef LLMC_REGISTERS_32
#undef LLMC_REGISTERS_64

#else  // the same on a CPU

using Location = cuda_on_cpu::Location;

using cuda_on_cpu::mma_m16n8k16_bf16;
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

// Products are finished when they are issued.
inline void fence_async_proxy() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int groups, int N>
void wgmma_wait(float (&)[N][4]) {}
using cuda_on_cpu::wgmma;
using cuda_on_cpu::wgmma_transposed;
using cuda_on_cpu::WgmmaTile;

#endif

}  // namespace llmc::cuda
