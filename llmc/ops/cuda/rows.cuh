// rows.cuh: shared by the norms of whole rows. A block takes one row at a time, each thread owning some of its packs.
#pragma once
#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/vec.cuh"

namespace llmc::cuda {

// The input of a norm. Each element is requested once.
template <class T>
struct PlainRows {
  const T* x;
  template <int pack>
  __device__ Packed<T, pack> load(int64_t at) const {
    return Packed<T, pack>::load_streaming(x + at);
  }
  bool fits_packs() const { return fit_packs(x); }
};
// a + b, which is also stored. Rounded to T before normalising, as later readers see it.
template <class T>
struct SummedRows {
  T* sum;
  const T *a, *b;
  template <int pack>
  __device__ Packed<T, pack> load(int64_t at) const {
    const auto as = Packed<T, pack>::load_streaming(a + at), bs = Packed<T, pack>::load_streaming(b + at);
    Packed<T, pack> sums;
    for (int i = 0; i < pack; ++i) sums.set(i, as[i] + bs[i]);
    sums.store(sum + at);
    return sums;
  }
  bool fits_packs() const { return fit_packs(sum, a, b); }
};

// Whole warps, up to one thread per pack of a row.
inline unsigned row_threads(int64_t C, int pack, int64_t most = 1024) {
  return static_cast<unsigned>(std::min(round_up(ceil_div(C, pack), warp_size), most));
}
// One thread per pack, in blocks of row_threads(C, pack, most): several for a long row.
inline Grid row_grid(int64_t rows, int64_t C, int pack, int64_t most) {
  return {rows, ceil_div(C, pack * row_threads(C, pack, most))};
}

inline void check_row_fits(const char* op, int64_t C, int64_t bytes) {
  CHECK(bytes <= max_shared_bytes, "{}: {} channels need {} bytes of shared memory, a block has {}; use fewer channels",
        op, C, bytes, max_shared_bytes);
}

}  // namespace llmc::cuda
