// rows.cuh: what the norms of whole rows share. A block takes a row at a time, each thread its own packs of it.
#pragma once
#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/vec.cuh"

namespace llmc::cuda {

// Where a norm's input comes from. Each element is asked for once.
template <class T>
struct PlainRows {
  const T* x;
  template <int pack>
  __device__ Packed<T, pack> load(int64_t at) const {
    return Packed<T, pack>::load_streaming(x + at);
  }
  bool fits_packs() const { return fit_packs(x); }
};
// a + b, which is written too. Rounded to T before it is normalised: as it is seen by who reads it later.
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

// Whole warps, a thread for each pack of a row as far as a block has them.
inline unsigned row_threads(int64_t C, int pack) {
  return static_cast<unsigned>(std::min<int64_t>(round_up(ceil_div(C, pack), warp_size), 1024));
}

inline void check_row_fits(const char* op, int64_t C, int64_t bytes) {
  CHECK(bytes <= max_shared_bytes, "{}: {} channels take {} bytes of shared memory, a block has {}; use fewer", op, C,
        bytes, max_shared_bytes);
}

}  // namespace llmc::cuda
