// warp_matrix.h: the tensor-core instructions of a warp and of a warpgroup, as ops/cuda/mma.cuh names them. The layouts
// of the fragments are those of the PTX manual, "Matrix Fragments for mma.m16n8k16" and "ldmatrix".
#pragma once
#include <bit>
#include <cstring>

#include "cuda_on_cpu/emulator.h"

namespace cuda_on_cpu {

// d (16 x 8, fp32) += a (16 x 16, bf16) b (16 x 8, bf16). Sums are in the order of k; hardware uses another order and
// fewer bits, so results agree only within tolerances.
struct MmaFragments {
  uint32_t a[4], b[2];
  float d[4];
};
void multiply_fragments(MmaFragments* const* lanes);  // of a warp's lanes
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const Location& where = Location::current()) {
  MmaFragments record{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d[0], d[1], d[2], d[3]}};
  const auto multiply = [](MmaFragments* const* lanes, uint32_t) { multiply_fragments(lanes); };
  meet_warp("mma.sync.m16n8k16", ~0u, record, multiply, where);
  for (int i = 0; i < 4; ++i) d[i] = record.d[i];
}

// Four 8 x 8 matrices of 16-bit elements; lane 8 i + r passes the address of row r of matrix i. Each lane gets elements
// 2 (lane % 4) and the next of row lane / 4 of each matrix, or of its transpose.
enum class Transpose : uint8_t { no, yes };
template <Transpose transpose>
void ldmatrix_x4(uint32_t (&r)[4], const void* row, const Location& where) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("ldmatrix: the address of a row is not a multiple of 16", where);
  struct Rows {
    uint16_t row[8];
    uint32_t result[4];
  } record{};
  std::memcpy(record.row, row, sizeof record.row);  // by the lane that passes it, so that reports name that lane
  const auto distribute = [](Rows* const* lanes, uint32_t) {
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        uint32_t pair = 0;
        for (int half = 0; half < 2; ++half) {
          const int i = lane / 4, j = lane % 4 * 2 + half;
          const uint16_t element =
              transpose == Transpose::yes ? lanes[matrix * 8 + j]->row[i] : lanes[matrix * 8 + i]->row[j];
          pair |= static_cast<uint32_t>(element) << (16 * half);
        }
        lanes[lane]->result[matrix] = pair;
      }
  };
  meet_warp("ldmatrix", ~0u, record, distribute, where);
  for (int i = 0; i < 4; ++i) r[i] = record.result[i];
}

// A tile of a warpgroup's product: rows of 128 bytes; bits 4 to 6 of an address in shared memory are swizzled by bits 7
// to 9.
struct WgmmaTile {
  const std::byte* shared = static_cast<const std::byte*>(dynamic_shared_memory());
  size_t start;  // in the block's dynamic shared memory, in bytes
  int panel_bytes;
  WgmmaTile(const void* first, int bytes)
      : start(static_cast<size_t>(static_cast<const std::byte*>(first) - shared)), panel_bytes(bytes) {}
  WgmmaTile after(int bytes) const {
    WgmmaTile tile = *this;
    tile.start += static_cast<size_t>(bytes);
    return tile;
  }
  // Two elements of one column in rows `row` and row + rows_apart, or of one row in columns `column` and the next.
  uint32_t pair(int row, int column, int rows_apart) const {
    return static_cast<uint32_t>(bits(row, column)) |
           static_cast<uint32_t>(bits(row + rows_apart, column + 1 - rows_apart)) << 16;
  }

 private:
  uint16_t bits(int row, int column) const {
    size_t at = start + static_cast<size_t>(row * 128 + column / 64 * panel_bytes + column % 64 * 2);
    at ^= at >> 3 & 0x70;
    uint16_t element;
    std::memcpy(&element, shared + at, sizeof element);
    return element;
  }
};

// A warp's part: 16 rows of sums, of the 64 of its warpgroup.
template <int N>
void wgmma(float (&sums)[N][4], const uint32_t (&a)[4], const WgmmaTile& b,
           const Location& where = Location::current()) {
  const int lane = static_cast<int>(thread_index().x) % 32;
  for (int n = 0; n < N; ++n) {
    uint32_t bs[2];
    for (int r = 0; r < 2; ++r) bs[r] = b.pair(lane % 4 * 2 + 8 * r, 8 * n + lane / 4, 1);
    mma_m16n8k16_bf16(sums[n], a, bs, where);
  }
}
template <int N>
void wgmma_transposed(float (&sums)[N][4], const WgmmaTile& a, const WgmmaTile& b, bool accumulate,
                      const Location& where = Location::current()) {
  const int lane = static_cast<int>(thread_index().x) % 32, first = static_cast<int>(thread_index().x) / 32 % 4 * 16;
  uint32_t as[4];
  for (int r = 0; r < 4; ++r) as[r] = a.pair(first + lane / 4 + r % 2 * 8, lane % 4 * 2 + r / 2 * 8, 0);
  for (int n = 0; n < N; ++n) {
    uint32_t bs[2];
    for (int r = 0; r < 2; ++r) bs[r] = b.pair(8 * n + lane / 4, lane % 4 * 2 + 8 * r, 0);
    if (!accumulate)
      for (float& sum : sums[n]) sum = 0;
    mma_m16n8k16_bf16(sums[n], as, bs, where);
  }
}

}  // namespace cuda_on_cpu
