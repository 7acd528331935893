// embedding.cuh: token embedding, plus position embedding where a model has one. The backward sorts the rows of dout by
// the table row that they belong to and sums them in that order: no atomics, and no slowdown for frequent tokens.
// Contracts: ops/ops.h.
#pragma once
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sort.cuh"
#include "ops/types.h"

namespace llmc::cuda {

// Grid: (N, blocks of packs in C). wte: the rows of the tokens in `part`. wpe: nullptr without position embeddings.
template <class T, int pack>
__global__ void embedding_forward_kernel(T* __restrict__ out, const int32_t* __restrict__ tokens,
                                         const int32_t* __restrict__ positions, const T* __restrict__ wte,
                                         const T* __restrict__ wpe, int64_t C, Vocabulary part) {
  using Pack = Packed<T, pack>;
  const int64_t n = blockIdx.x, c = column_of_thread(pack);
  if (c >= C) return;
  const int32_t token = tokens[n];
  Pack row = {};
  if (part.has(token)) row = Pack::load(wte + (token - part.first) * C + c);
  if (wpe != nullptr) {
    const Pack position = Pack::load(wpe + positions[n] * C + c);
    for (int i = 0; i < pack; ++i) row.set(i, row[i] + position[i]);
  }
  row.store(out + n * C + c);
}

// x += wpe[positions]. Grid as above.
template <class T, int pack>
__global__ void add_positions_kernel(T* __restrict__ x, const int32_t* __restrict__ positions,
                                     const T* __restrict__ wpe, int64_t C) {
  using Pack = Packed<T, pack>;
  const int64_t n = blockIdx.x, c = column_of_thread(pack);
  if (c >= C) return;
  Pack row = Pack::load(x + n * C + c);
  const Pack position = Pack::load(wpe + positions[n] * C + c);
  for (int i = 0; i < pack; ++i) row.set(i, row[i] + position[i]);
  row.store(x + n * C + c);
}

// The gradients of both tables, whose rows are numbered through.
struct TableGradients {
  float *tokens, *positions;  // (V, C) (P, C); or nullptr
  int64_t V, P;               // 0 for nullptr

  __host__ __device__ int tables() const { return (tokens != nullptr) + (positions != nullptr); }
  __host__ __device__ int64_t rows() const { return V + P; }
  __device__ float* row(int32_t id, int64_t C) const { return id < V ? tokens + id * C : positions + (id - V) * C; }
};

// ids (tables N) = the row that each token has, rows() for those outside of `part`, then the row of each position.
template <int = 0>
__global__ void table_rows_kernel(int32_t* __restrict__ ids, const int32_t* __restrict__ tokens,
                                  const int32_t* __restrict__ positions, int64_t N, TableGradients to,
                                  Vocabulary part) {
  const int64_t n = item_of_thread();
  if (n < N) ids[n] = static_cast<int32_t>(part.has(tokens[n]) ? tokens[n] - part.first : to.rows());
  else if (n < N * to.tables()) ids[n] = static_cast<int32_t>(to.V + positions[n - N]);
}

namespace detail {

// Sorted rows per segment, and rows of a segment loaded together.
inline constexpr int64_t embedding_segment = 32;
inline constexpr int embedding_batch = 4;

}  // namespace detail

// Row id of the tables += the rows of dout (N, C) with that id, in order: row n % N for sorted row n. Grid: (segments
// of the M sorted rows, blocks of packs in C). The sum for an id that began in an earlier segment goes to carried
// (segments, C), for the next kernel. Ids from to.rows() on, which come last, are skipped.
template <class T, int pack>
__global__ void add_sorted_rows_kernel(TableGradients tables, float* __restrict__ carried, const T* __restrict__ dout,
                                       const int32_t* __restrict__ ids, const int32_t* __restrict__ rows, int64_t M,
                                       int64_t N, int64_t C) {
  using Pack = Packed<T, pack>;
  constexpr int batch = detail::embedding_batch;
  const int64_t c = column_of_thread(pack);
  if (c >= C) return;
  const int64_t begin = blockIdx.x * detail::embedding_segment;
  if (ids[begin] >= tables.rows()) return;
  int64_t end = min(M, begin + detail::embedding_segment);
  while (ids[end - 1] >= tables.rows()) --end;
  const int32_t before = begin == 0 ? -1 : ids[begin - 1];  // ids are non-negative
  float* to = carried + blockIdx.x * C + c;
  Floats<pack> sum = {};
  int32_t current = before;
  for (int64_t k = begin; k < end; k += batch) {
    Pack gradients[batch];
    Floats<pack> starts[batch];
    int32_t id[batch];
#pragma unroll
    for (int j = 0; j < batch; ++j)
      if (k + j < end) {
        id[j] = ids[k + j];
        const int32_t row = rows[k + j];
        gradients[j] = Pack::load_streaming(dout + (row < N ? row : row - N) * C + c);
        if (id[j] != (j == 0 ? current : id[j - 1])) starts[j] = Floats<pack>::load(tables.row(id[j], C) + c);
      }
#pragma unroll
    for (int j = 0; j < batch; ++j)
      if (k + j < end) {
        if (id[j] != current) {
          if (k + j > begin) sum.store(to);
          to = tables.row(id[j], C) + c;
          sum = starts[j];
          current = id[j];
        }
        sum += gradients[j];
      }
  }
  sum.store(to);
}

// Row id of the tables += the carried sums of an id, in segment order. Grid as above; only the block of the first
// segment that carries an id adds them.
template <int pack>
__global__ void add_carried_kernel(TableGradients tables, const float* __restrict__ carried,
                                   const int32_t* __restrict__ ids, int64_t segments, int64_t C) {
  constexpr int batch = 2 * detail::embedding_batch;
  constexpr int64_t rows = detail::embedding_segment;
  const int64_t c = column_of_thread(pack), first = blockIdx.x;
  if (c >= C || first == 0) return;
  const int32_t id = ids[first * rows];
  if (ids[first * rows - 1] != id || id >= tables.rows()) return;  // no id is carried into this segment
  if (first > 1 && ids[(first - 1) * rows - 1] == id) return;      // not the first segment that carries it
  float* const to = tables.row(id, C) + c;
  Floats<pack> sum = Floats<pack>::load(to);
  bool more = true;
  for (int64_t segment = first; more; segment += batch) {
    Floats<pack> parts[batch];
    bool valid[batch];
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      valid[j] = segment + j < segments && ids[(segment + j) * rows] == id;
      if (valid[j]) parts[j] = Floats<pack>::load(carried + (segment + j) * C + c);
    }
#pragma unroll
    for (int j = 0; j < batch; ++j)
      if (valid[j]) sum += parts[j];
    more = valid[batch - 1];
  }
  sum.store(to);
}

template <class T>
void embedding_forward(T* out, const int32_t* tokens, const int32_t* positions, const T* wte, const T* wpe, int64_t N,
                       int64_t C, const Vocabulary& part, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(C, full_pack<T>, out, wte, wpe), [&]<int pack>() {
    launch_rows(embedding_forward_kernel<T, pack>, N, C, pack, 128, stream, out, tokens, positions, wte, wpe, C, part);
  });
}

template <class T>
void add_positions(T* x, const int32_t* positions, const T* wpe, int64_t N, int64_t C, cudaStream_t stream) {
  with_packs<full_pack<T>>(rows_fit_packs(C, full_pack<T>, x, wpe), [&]<int pack>() {
    launch_rows(add_positions_kernel<T, pack>, N, C, pack, 128, stream, x, positions, wpe, C);
  });
}

// Size of embedding_backward's `scratch` in four-byte elements; it is aligned to 16 bytes.
inline int64_t embedding_backward_scratch(int64_t N, int64_t C, int tables) {
  const int64_t M = N * tables;
  return round_up(sort_rows_scratch(M), 4) + ceil_div(M, detail::embedding_segment) * C;
}

// The rows of an id are added in order, in sums of at most 32 rows that are then added: the order depends on the ids
// alone.
template <class T>
void embedding_backward(const TableGradients& to, int32_t* scratch, const T* dout, const int32_t* tokens,
                        const int32_t* positions, int64_t N, int64_t C, const Vocabulary& part, cudaStream_t stream) {
  const int64_t M = N * to.tables();
  const int32_t* ids = to.tokens == nullptr ? positions : tokens;
  if (to.tables() == 2 || part.size >= 0) {
    int32_t* const numbered = scratch + 3 * M;
    launch_each(table_rows_kernel<>, M, stream, numbered, tokens, positions, N, to, part);
    ids = numbered;
  }
  const detail::RowIds sorted = sort_rows(scratch, ids, M, to.rows() + (part.size >= 0 ? 1 : 0), stream);
  float* carried = reinterpret_cast<float*>(scratch + round_up(sort_rows_scratch(M), 4));
  const int64_t segments = ceil_div(M, detail::embedding_segment);
  const bool fit = rows_fit_packs(C, full_pack<T>, to.tokens, to.positions, carried, dout);
  with_packs<full_pack<T>>(fit, [&]<int pack>() {
    launch_rows(add_sorted_rows_kernel<T, pack>, segments, C, pack, 128, stream, to, carried, dout, sorted.ids,
                sorted.rows, M, N, C);
    launch_rows(add_carried_kernel<pack>, segments, C, pack, 128, stream, to, carried, sorted.ids, segments, C);
  });
}

}  // namespace llmc::cuda
