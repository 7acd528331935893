// rows.cuh: shared by the norms of whole rows. A warp or a block takes a row, each thread owning some of its packs.
#pragma once
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vec.cuh"

namespace llmc::cuda {

// The input of a norm: fetch() starts a load, take() returns its elements. Each element is requested once.
template <class T>
struct PlainRows {
  const T* x;
  template <class Pack>
  __device__ Kept<Pack> fetch(int64_t at) const {
    return Pack::load_streaming(x + at);
  }
  template <class Pack>
  __device__ Floats<Pack::size> take(const Kept<Pack>& fetched, int64_t) const {
    return fetched.fp32();
  }
  bool fits_packs() const { return fit_packs(x); }
};
// a + b, which is also stored. Rounded to T before normalising, as later readers see it.
template <class T>
struct SummedRows {
  template <class Pack>
  struct Fetched {
    Kept<Pack> a, b;
  };
  T* sum;
  const T *a, *b;
  template <class Pack>
  __device__ Fetched<Pack> fetch(int64_t at) const {
    return {Pack::load_streaming(a + at), Pack::load_streaming(b + at)};
  }
  template <class Pack>
  __device__ Floats<Pack::size> take(const Fetched<Pack>& fetched, int64_t at) const {
    Floats<Pack::size> sums = fetched.a.fp32();
    sums += fetched.b.fp32();
    const Kept<Pack> rounded = Pack::of(sums);
    rounded.store(sum + at);
    return rounded.fp32();
  }
  bool fits_packs() const { return fit_packs(sum, a, b); }
};

// A row that a warp holds in registers; all its loads are in flight at once.
template <class T, int packs>
struct WarpRow {
  using Pack = Packed<T>;
  static constexpr int threads = 128;
  const int C, lane = threadIdx.x % warp_size;
  Floats<Pack::size> held[packs];

  __device__ explicit WarpRow(int64_t C_) : C(static_cast<int>(C_)) {}
  __device__ int64_t index() const {
    return static_cast<int64_t>(blockIdx.x) * (threads / warp_size) + threadIdx.x / warp_size;
  }
  __device__ bool leads() const { return lane == 0; }
  __device__ static float sum(float x) { return warp_sum(x); }

  // Row n of x.
  template <class Input>
  __device__ void fill(const Input& x, int64_t n) {
    decltype(x.template fetch<Pack>(0)) fetched[packs];
    each_pack([&](int j, int c) { fetched[j] = x.template fetch<Pack>(n * C + c); });
    each_pack([&](int j, int c) { held[j] = x.template take<Pack>(fetched[j], n * C + c); });
  }
  // f(elements of a pack, its first column) for each of this thread's packs
  template <class F>
  __device__ void each(F f) const {
    each_pack([&](int j, int c) { f(held[j], c); });
  }

 private:
  template <class F>
  __device__ void each_pack(F f) const {
#pragma unroll
    for (int j = 0; j < packs; ++j) {
      const int c = (lane + j * warp_size) * Pack::size;
      if (j < packs - 1 || c < C) f(j, c);
    }
  }
};

// A row that a block holds in dynamic shared memory. Each thread reads only what it stored itself: no barrier needed.
template <class T, int pack>
struct BlockRow {
  using Pack = Packed<T, pack>;
  static constexpr int threads = 1024;
  const int64_t C;
  T* held;

  __device__ explicit BlockRow(int64_t C_) : C(C_) {
    DYN_SHARED(T, row);  // (C)
    held = row;
  }
  __device__ int64_t index() const { return blockIdx.x; }
  __device__ bool leads() const { return threadIdx.x == 0; }
  __device__ static float sum(float x) { return block_sum(x); }

  template <class Input>
  __device__ void fill(const Input& x, int64_t n) {
    for (int64_t c = threadIdx.x * pack; c < C; c += blockDim.x * pack)
      Pack::of(x.template take<Pack>(x.template fetch<Pack>(n * C + c), n * C + c)).store(held + c);
  }
  template <class F>
  __device__ void each(F f) const {
    for (int64_t c = threadIdx.x * pack; c < C; c += blockDim.x * pack) f(Kept<Pack>(Pack::load(held + c)).fp32(), c);
  }
};

// Whole warps, up to one thread per pack of a row.
inline unsigned row_threads(int64_t C, int pack, int64_t most = 1024) {
  return static_cast<unsigned>(std::min(round_up(ceil_div(C, pack), warp_size), most));
}
// Grid: (rows, blocks of packs in C), of up to `most` threads each: a thread has the pack at column_of_thread(), which
// may be past the end.
template <class... Parameters, class... Arguments>
void launch_rows(void (*kernel)(Parameters...), int64_t rows, int64_t C, int pack, int64_t most, cudaStream_t stream,
                 Arguments&&... arguments) {
  const unsigned threads = row_threads(C, pack, most);
  launch(kernel, Grid(rows, ceil_div(C, pack * threads)), threads, 0, stream, std::forward<Arguments>(arguments)...);
}
__device__ inline int64_t column_of_thread(int pack) {
  return (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * pack;
}

// Throws Error if the current device has no room for this much dynamic shared memory and for the fixed arrays of sums
// over a block.
inline void check_row_fits(const char* op, int64_t C, int64_t bytes) {
  const int64_t room = device_shared_bytes() - most_static_shared_bytes;
  CHECK(bytes <= room,
        "{}: {} channels need {} bytes of shared memory, a block on this GPU has {} for them; use fewer channels", op,
        C, bytes, room);
}

// Calls run.operator()<Held>(blocks, threads, bytes of shared memory) with the form in which a row of C elements of T
// is held: WarpRow if it fits into a warp's registers and its packs are aligned, else BlockRow.
template <class T, class Run>
void with_held_row(const char* op, int64_t N, int64_t C, bool fit, Run run) {
  constexpr int most = 8, pack = full_pack<T>;
  const int64_t packs = ceil_div(C, pack * warp_size);
  if (fit && packs <= most) {
    with_constant<most>(packs, [&]<int each>() {
      using Held = WarpRow<T, each>;
      run.template operator()<Held>(ceil_div(N, Held::threads / warp_size), Held::threads, 0);
    });
    return;
  }
  const int64_t shared = C * static_cast<int64_t>(sizeof(T));
  check_row_fits(op, C, shared);
  with_packs<pack>(fit,
                   [&]<int each>() { run.template operator()<BlockRow<T, each>>(N, row_threads(C, each), shared); });
}

}  // namespace llmc::cuda
