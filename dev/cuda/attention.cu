// attention.cu: the forward of causal attention in seven versions, the last in three sizes. See cuda/ladder.h.
//
//   1  three kernels, with the T x T scores of every head in memory: memory and traffic grow with T^2
//   2  a running maximum and sum per row: scores stay in registers, but every row reads all keys on its own
//   3  rows share tiles of keys and values in shared memory: read T / 64 times instead of T times
//   4  tensor cores, 16 rows per warp; they wait while a tile is loaded
//   5  llmc's: the next tile is loaded meanwhile, and a warp has 32 rows per read of a tile instead of 16
//   6  llmc's on Hopper: a warpgroup's tensor-core instructions read tiles from shared memory (elsewhere: as 5)
//   7  as 6, but a tile's product with its values runs while the next tile's exponentials are computed, as in
//      FlashAttention-3 (Shah et al. 2024); llmc's once a GPU has shown for which sizes it is faster
#include <memory>

#include "cuda/ladder.h"
#include "ops/cpu/attention.h"
#include "ops/cuda/attention_forward.cuh"

namespace llmc::cuda {
namespace {

constexpr int head_size = 64;

// Head h of sequence b in an array (B, T, heads, D).
template <class T>
__device__ Head<T> head_of(T* array, const AttentionShape& s, int64_t heads, int64_t b, int64_t h) {
  return {array + (b * s.T * heads + h) * s.D, heads * s.D, static_cast<int>(s.T), static_cast<int>(s.D)};
}
// Addresses of the queries, keys and values of query head h of sequence b in qkv (B, T, 3 H D).
struct Heads {
  Head<const bf16> q, k, v;
  __device__ Heads(const bf16* qkv, const AttentionShape& s, int64_t b, int64_t h)
      : q(head_of(qkv, s, 3 * s.Hq, b, h)),
        k(head_of(qkv, s, 3 * s.Hq, b, s.Hq + h)),
        v(head_of(qkv, s, 3 * s.Hq, b, 2 * s.Hq + h)) {}
};
__device__ float score_scale() { return 1.0f / sqrtf(float{head_size}); }

// scores (B, H, T, T), minus infinity for masked keys. Grid (blocks of keys, T, B H).
__global__ void attention1_scores(float* scores, const bf16* qkv, AttentionShape s) {
  const int64_t key = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (key >= s.T) return;
  const Heads at(qkv, s, blockIdx.z / s.Hq, blockIdx.z % s.Hq);
  float score = 0;
  for (int d = 0; d < head_size; ++d)
    score += to_float(at.q.data[row * at.q.stride + d]) * to_float(at.k.data[key * at.k.stride + d]);
  scores[(blockIdx.z * s.T + row) * s.T + key] = key <= row ? score * score_scale() : -INFINITY;
}
// Turns scores into probabilities; one thread per row of B H T.
__global__ void attention1_softmax(float* scores, float* lse, int64_t rows, int64_t T) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float* x = scores + row * T;
  float largest = -INFINITY, sum = 0;
  for (int64_t key = 0; key < T; ++key) largest = fmaxf(largest, x[key]);
  for (int64_t key = 0; key < T; ++key) sum += expf(x[key] - largest);
  for (int64_t key = 0; key < T; ++key) x[key] = expf(x[key] - largest) / sum;
  lse[row] = logf(sum) + largest;
}
// Grid (T, B H); one thread per d.
__global__ void attention1_values(bf16* out, const float* probabilities, const bf16* qkv, AttentionShape s) {
  const int64_t row = blockIdx.x, b = blockIdx.y / s.Hq, h = blockIdx.y % s.Hq;
  const Heads at(qkv, s, b, h);
  float sum = 0;
  for (int64_t key = 0; key <= row; ++key)
    sum += probabilities[(blockIdx.y * s.T + row) * s.T + key] * to_float(at.v.data[key * at.v.stride + threadIdx.x]);
  const Head<bf16> to = head_of(out, s, s.Hq, b, h);
  to.data[row * to.stride + threadIdx.x] = from_float<bf16>(sum);
}

// One warp per row of B H T, 32 keys at a time: each lane computes the score of one key, and two channels of the
// output. Sums accumulated with an earlier maximum are rescaled to the new one (Milakov & Gimelshein 2018).
__global__ void attention2(bf16* out, float* lse, const bf16* qkv, AttentionShape s) {
  using Pack = Packed<bf16, full_pack<bf16>>;
  using Pair = Packed<bf16, 2>;
  static_assert(head_size == 2 * warp_size);
  const int64_t item = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_size;
  if (item >= s.B * s.Hq * s.T) return;
  const int64_t row = item % s.T, h = item / s.T % s.Hq, b = item / s.T / s.Hq;
  const Heads at(qkv, s, b, h);
  const int lane = lane_of_thread();
  float largest = -INFINITY, sum = 0, outs[2] = {};  // sum: over this lane's keys
  for (int64_t first = 0; first <= row; first += warp_size) {
    const int64_t key = first + lane;
    float score = -INFINITY;
    if (key <= row) {
      score = 0;
      for (int d = 0; d < head_size; d += Pack::size) {
        const Pack qs = Pack::load(at.q.data + row * at.q.stride + d),
                   ks = Pack::load(at.k.data + key * at.k.stride + d);
        for (int i = 0; i < Pack::size; ++i) score += qs[i] * ks[i];
      }
      score *= score_scale();
    }
    const float before = largest;
    largest = fmaxf(largest, warp_max(score));
    const float correction = __expf(before - largest), p = __expf(score - largest);
    sum = sum * correction + p;
    for (float& o : outs) o *= correction;
    for (int j = 0; j < warp_size && first + j <= row; ++j) {
      const Pair vs = Pair::load(at.v.data + (first + j) * at.v.stride + 2 * lane);
      const float of_key = __shfl_sync(all_lanes, p, j);
      for (int i = 0; i < 2; ++i) outs[i] += of_key * vs[i];
    }
  }
  const float total = warp_sum(sum);
  Pair pair;
  for (int i = 0; i < 2; ++i) pair.set(i, outs[i] / total);
  const Head<bf16> to = head_of(out, s, s.Hq, b, h);
  pair.store(to.data + row * to.stride + 2 * lane);
  if (lane == 0) lse[(b * s.Hq + h) * s.T + row] = logf(total) + largest;
}

// A block of `rows` threads takes that many rows: each thread has one row's query and output in registers. All threads
// read the same key at the same time, a single broadcast from shared memory. Grid (blocks of rows, B H).
template <int rows, int tile_rows>
__global__ void attention3(bf16* out, float* lse, const bf16* qkv, AttentionShape s) {
  constexpr int size = tile_rows * head_size;
  SHARED(float, keys, size);
  SHARED(float, values, size);
  const int64_t b = blockIdx.y / s.Hq, h = blockIdx.y % s.Hq, begin = static_cast<int64_t>(blockIdx.x) * rows,
                row = begin + threadIdx.x;
  const Heads at(qkv, s, b, h);
  float q[head_size], outs[head_size] = {}, largest = -INFINITY, sum = 0;
#pragma unroll
  for (int d = 0; d < head_size; ++d)
    q[d] = row < s.T ? to_float(at.q.data[row * at.q.stride + d]) * score_scale() : 0.0f;
  for (int64_t first = 0; first < min(begin + rows, s.T); first += tile_rows) {
    for (int i = static_cast<int>(threadIdx.x); i < size; i += rows) {
      const int64_t key = first + i / head_size;
      keys[i] = key < s.T ? to_float(at.k.data[key * at.k.stride + i % head_size]) : 0.0f;
      values[i] = key < s.T ? to_float(at.v.data[key * at.v.stride + i % head_size]) : 0.0f;
    }
    __syncthreads();  // the tile is loaded
    for (int j = 0; j < tile_rows && first + j <= row; ++j) {
      float score = 0;
#pragma unroll
      for (int d = 0; d < head_size; ++d) score += q[d] * keys[j * head_size + d];
      if (score > largest) {  // rare
        const float correction = __expf(largest - score);
        largest = score;
        sum *= correction;
#pragma unroll
        for (float& o : outs) o *= correction;
      }
      const float p = __expf(score - largest);
      sum += p;
#pragma unroll
      for (int d = 0; d < head_size; ++d) outs[d] += p * values[j * head_size + d];
    }
    __syncthreads();  // the tile has been read
  }
  if (row >= s.T) return;
  const Head<bf16> to = head_of(out, s, s.Hq, b, h);
#pragma unroll
  for (int d = 0; d < head_size; ++d) to.data[row * to.stride + d] = from_float<bf16>(outs[d] / sum);
  lse[(b * s.Hq + h) * s.T + row] = logf(sum) + largest;
}

// The block copies rows of a head, from `first` on, to the tile; zeros past the last row.
template <int rows, int threads>
__device__ void copy_rows(const Tile<bf16, head_size>& tile, const Head<const bf16>& from, int first) {
  using Chunk = Packed<bf16, Tile<bf16, head_size>::chunk>;
  constexpr int chunks = Tile<bf16, head_size>::chunks;
  for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += threads) {
    const int row = first + i / chunks, c = i % chunks;
    Chunk elements = {};
    if (row < from.rows) elements = Chunk::load(from.data + row * from.stride + c * Chunk::size);
    elements.store(tile.at(i / chunks, c));
  }
}

// The 16 rows of a warp, from `first` on.
template <int ND>
__device__ void store_attention(bf16* out, float* lse, const AttentionShape& s, int64_t b, int64_t h, int first,
                                const OnlineSoftmax<1>& softmax, Accumulators<1, ND>& outs, float scale) {
  for (int half = 0; half < 2; ++half) {
    const float total = quad_reduce(softmax.sum[0][half], Sum{});
    scale_row(outs, 0, half, 1.0f / total);
    const int row = first + fragment_row(2 * half);
    if (row < s.T && fragment_column(0) == 0)
      lse[(b * s.Hq + h) * s.T + row] = softmax.largest[0][half] * scale * ln_2 + logf(total);
  }
  store_rows<Copy::packs>(head_of(out, s, s.Hq, b, h), first, outs);
}

// A warp takes 16 rows. The products leave a row's scores in the four lanes of a quad, exactly where the next product
// needs its first operand: probabilities never leave the registers. Grid (B H, blocks of rows).
template <class Block>
__global__ void __launch_bounds__(Block::threads) attention4(bf16* out, float* lse, const bf16* qkv, AttentionShape s) {
  DYN_SHARED(bf16, memory);
  const Tile<bf16, head_size> queries{memory}, keys = queries.after(Block::rows), values = keys.after(Block::tile_rows);
  const int64_t b = blockIdx.x / s.Hq, h = blockIdx.x % s.Hq;
  const int begin = static_cast<int>(blockIdx.y) * Block::rows, end = min(begin + Block::rows, static_cast<int>(s.T)),
            warp_row = 16 * warp_of_thread(), first = begin + warp_row;
  const Heads at(qkv, s, b, h);
  const float scale = log2_e * score_scale();  // exp(x / sqrt(D)) = 2^(x scale)
  OnlineSoftmax<1> softmax;
  Accumulators<1, Block::ND> outs = {};
  copy_rows<Block::rows, Block::threads>(queries, at.q, begin);
  for (int key = 0; key < end; key += Block::tile_rows) {
    copy_rows<Block::tile_rows, Block::threads>(keys, at.k, key);
    copy_rows<Block::tile_rows, Block::threads>(values, at.v, key);
    __syncthreads();  // the tile is loaded
    Accumulators<1, Block::N> p = {};
    multiply_transposed(p, queries, warp_row, keys);
    for_each(p, [&](float& x, int, int n, int i) {
      if (key + 8 * n + fragment_column(i) > first + fragment_row(i)) x = -INFINITY;
    });
    for (int half = 0; half < 2; ++half) softmax.update(p, outs, 0, half, scale);
    multiply(outs, p, values);
    __syncthreads();  // the tile has been read
  }
  store_attention(out, lse, s, b, h, first, softmax, outs, scale);
}

// A step has the keys of a tile and the values of the tile before: it issues both products, and finds the exponentials
// of the new scores while the tensor cores are at the values. Grid (B H, blocks of rows).
template <class Block>
__global__ void __launch_bounds__(Block::threads, Block::blocks)
    attention7(bf16* out, float* lse, const bf16* qkv, AttentionShape s) {
  constexpr int DP = head_size, n = Block::tile_rows;
  const int64_t b = blockIdx.x / s.Hq, h = blockIdx.x % s.Hq;
  const int begin = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Block::rows, group_row = row_of_warpgroup<Block>(),
            first = begin + 16 * warp_of_thread(), T = static_cast<int>(s.T);
  const Heads at(qkv, s, b, h);
  DYN_SHARED_TILES(bf16, memory);
  const PanelTile<Block::rows, DP> query_tile{memory};
  const PanelBuffers<Block> buffers{memory + Block::rows * DP};
  load_panels<Block>(query_tile, at.q, begin);

  const float scale = log2_e * score_scale();  // exp(x / sqrt(D)) = 2^(x scale)
  OnlineSoftmax<1> softmax;
  Accumulators<1, Block::ND> outs = {};
  WarpgroupOperand<Block::N> probabilities;
  float correction[2];  // of outs, once the product before is added
  const auto exponentials = [&](Accumulators<1, Block::N>& p, int key) {
    if (key + n > begin + group_row)
      for_each(p, [&](float& x, int, int j, int i) {
        if (key + 8 * j + fragment_column(i) > first + fragment_row(i)) x = -INFINITY;
      });
#pragma unroll
    for (int half = 0; half < 2; ++half) correction[half] = softmax.exponentials(p, 0, half, scale);
  };
  const int tiles = (min(begin + Block::rows, T) + n - 1) / n,  // of the block
      of_group = (min(begin + group_row + 64, T) + n - 1) / n;  // of the warpgroup
  const auto load = [&](int i) {
    if (i < tiles) load_panels<Block>(buffers.tile(i, 0), at.k, i * n);
    if (i > 0) load_panels<Block>(buffers.tile(i, 1), at.v, (i - 1) * n);
  };
  const auto use = [&](int i) {
    if (i > of_group) return;
    Accumulators<1, Block::N> p;
    wgmma_fence();
    if (i == 0) {
      issue_transposed(p[0], query_tile, group_row, buffers.tile(i, 0));
      wgmma_commit();
      wgmma_wait<0>(p[0]);
      exponentials(p, 0);
      probabilities = WarpgroupOperand(p[0]);
    } else if (i < of_group) {
      issue_transposed(p[0], query_tile, group_row, buffers.tile(i, 0));
      wgmma_commit();
      issue(outs[0], probabilities, buffers.tile(i, 1));
      wgmma_commit();
      wgmma_wait<1>(p[0]);
      exponentials(p, i * n);
      wgmma_wait<0>(outs[0]);
#pragma unroll
      for (int half = 0; half < 2; ++half) scale_row(outs, 0, half, correction[half]);
      probabilities = WarpgroupOperand(p[0]);
    } else {
      issue(outs[0], probabilities, buffers.tile(i, 1));
      wgmma_commit();
      wgmma_wait<0>(outs[0]);
    }
  };
  double_buffered_tiles(0, tiles + 1, load, use);
  store_attention(out, lse, s, b, h, first, softmax, outs, scale);
}

struct Problem {
  AttentionShape s;
  std::vector<bf16> qkv = normal_values<bf16>(s.B * s.T * 3 * s.Hq * s.D, 1);
  DeviceArray<bf16> qkvs{qkv}, out{s.B * s.T * s.Hq * s.D};
  DeviceArray<float> lse{s.B * s.Hq * s.T}, scores{s.B * s.Hq * s.T * s.T};
};
AttentionInputs<bf16> inputs(const bf16* qkv, const AttentionShape& s) {
  const int64_t C = s.Hq * s.D;
  return {{qkv, 3 * C}, {qkv + C, 3 * C}, {qkv + 2 * C, 3 * C}, nullptr};
}

// Runs 7 where the GPU has the instructions, else 5.
template <int groups, int tile_rows, int blocks>
void run_overlapped(Problem& p, TensorCores instructions) {
  const AttentionShape& s = p.s;
  if constexpr (compiled_for_warpgroups)
    if (instructions == TensorCores::of_warpgroup) {
      using Block = WarpgroupBlock<groups, tile_rows, head_size, blocks>;
      return launch(attention7<Block>, Grid(s.B * s.Hq, ceil_div(s.T, int64_t{Block::rows})), Block::threads,
                    Block::shared_bytes(1), nullptr, p.out, p.lse, p.qkvs, s);
    }
  attention_forward<bf16>({{p.out, s.Hq * head_size}, p.lse}, inputs(p.qkvs, s), nullptr, whole_sequences(s), nullptr,
                          TensorCores::of_warp);
}

}  // namespace

Ladder attention_ladder(int64_t B, int64_t T, int64_t H) { return attention_ladder(B, T, H, tensor_cores()); }
Ladder attention_ladder(int64_t B, int64_t T, int64_t H, TensorCores instructions) {
  const AttentionShape s = {.B = B, .T = T, .Hq = H, .Hkv = H, .D = head_size};
  const AttentionBlock block = whole_sequences(s);
  const auto p = std::make_shared<Problem>(s);
  std::vector<bf16> out(p->qkv.size() / 3);
  std::vector<float> lse(static_cast<size_t>(B * H * T));
  std::vector<std::byte> scratch(
      static_cast<size_t>(cpu::attention_forward_scratch(block, sizeof(float), omp_get_max_threads())));
  cpu::attention_forward<bf16>({{out.data(), H * head_size}, lse.data()}, inputs(p->qkv.data(), s), scratch.data(),
                               block, omp_get_max_threads());
  const unsigned heads = static_cast<unsigned>(B * H), rows = static_cast<unsigned>(T);
  const auto blocks = [](int64_t n, int64_t size) { return static_cast<unsigned>(ceil_div(n, size)); };
  constexpr int threads = 256, tile_rows = 64, tile_keys = 32;
  using Block = BlockSize<1, 4, 64, head_size, bf16>;
  constexpr int64_t shared = (Block::rows + 2 * Block::tile_rows) * head_size * int64_t{sizeof(bf16)};
  return {.op = "attention",
          .versions =
              {{"scores, softmax and values one after another: T x T matrices in memory",
                [=] {
                  launch(attention1_scores, dim3(blocks(T, threads), rows, heads), threads, 0, nullptr, p->scores,
                         p->qkvs, s);
                  launch(attention1_softmax, blocks(B * H * T, threads), threads, 0, nullptr, p->scores, p->lse,
                         B * H * T, T);
                  launch(attention1_values, dim3(rows, heads), head_size, 0, nullptr, p->out, p->scores, p->qkvs, s);
                }},
               {"one warp per row: running maximum and sum, no T x T matrix",
                [=] {
                  launch(attention2, blocks(B * H * T * warp_size, threads), threads, 0, nullptr, p->out, p->lse,
                         p->qkvs, s);
                }},
               {"64 rows per block share tiles of keys and values in shared memory",
                [=] {
                  launch(attention3<tile_rows, tile_keys>, dim3(blocks(T, tile_rows), heads), tile_rows, 0, nullptr,
                         p->out, p->lse, p->qkvs, s);
                }},
               {"tensor cores, 16 rows per warp",
                [=] {
                  launch(attention4<Block>, dim3(heads, blocks(T, Block::rows)), Block::threads, shared, nullptr,
                         p->out, p->lse, p->qkvs, s);
                }},
               {"llmc/ops/cuda/attention_forward.cuh: the next tile is loaded meanwhile; 32 rows per warp",
                [=] {
                  attention_forward<bf16>({{p->out, H * head_size}, p->lse}, inputs(p->qkvs, s), nullptr, block,
                                          nullptr, TensorCores::of_warp);
                }},
               {"llmc/ops/cuda/attention_wgmma.cuh: tensor-core instructions of a warpgroup, where the GPU has them",
                [=] {
                  attention_forward<bf16>({{p->out, H * head_size}, p->lse}, inputs(p->qkvs, s), nullptr, block,
                                          nullptr, instructions);
                }},
               {"the last tile's values meanwhile; 2 warpgroups, 64 keys, 2 blocks",
                [=] { run_overlapped<2, 64, 2>(*p, instructions); }},
               {"the same; 1 warpgroup, 128 keys, 3 blocks", [=] { run_overlapped<1, 128, 3>(*p, instructions); }},
               {"the same; 2 warpgroups, 128 keys, 1 block", [=] { run_overlapped<2, 128, 1>(*p, instructions); }}},
          .prepare =
              [=] {
                for (DeviceArray<float>* array : {&p->lse, &p->scores})
                  CUDA_CHECK(cudaMemset(*array, 0xff, array->bytes()));
                CUDA_CHECK(cudaMemset(p->out, 0xff, p->out.bytes()));
              },
          .outputs = [=]() -> Outputs {
            return {{"out", p->out.host()}, {"lse", p->lse.host()}};
          },
          .reference = {{"out", out}, {"lse", lse}},
          .tolerance = 0x1p-7,  // the tensor cores' probabilities are in bf16
          .flops = 4.0 * static_cast<double>(B * H * head_size) * static_cast<double>(T * (T + 1) / 2)};
}

}  // namespace llmc::cuda
