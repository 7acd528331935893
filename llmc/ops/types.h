// types.h: arguments of ops other than tensors and sizes; the same on every device.
#pragma once
#include <numbers>

#include "core/std.h"

namespace llmc {

enum class Accumulate : uint8_t { no, yes };  // is the output overwritten or added to?
enum class Gradient : uint8_t { no, yes };
enum class Transpose : uint8_t { no, yes };
enum class Bias : uint8_t { no, yes };
enum class Centred : uint8_t { no, yes };  // yes: layernorm, which has a mean and a bias; no: rmsnorm
// What a product makes of its sums before it writes them: with gelu, z = the sums and C = GELU(z); with gelu_backward,
// C = the sums times GELU's derivative at z; with residual, C = z + the sums.
enum class Epilogue : uint8_t { none, gelu, gelu_backward, residual };

// Sums over rows, in parts: first (C), and second (width - C) unless there is none, += the sums of partials (parts,
// width) over the parts.
struct RowSum {
  float *first, *second;
  const float* partials;
  int64_t parts, C, width;
};
// Room for the parts of an op's sums, and on a GPU the list in which they wait to be added up; none: at once.
template <class A>
struct RowParts {
  A* data;
  std::vector<RowSum>* waiting = nullptr;
  operator A*() const { return data; }
};

// Which numbers of an operand in fp8 have a scale in common: 128 that follow each other along the sum of the product,
// or 128 x 128. The last block of a row or column may be smaller.
enum class ScaledBy : uint8_t { nothing, segments, tiles };
// And the numbers themselves.
enum class Fp8Format : uint8_t { e4m3, e5m2 };
// So many rows and columns of a matrix have a scale in common.
struct ScaleBlock {
  int64_t rows, columns;

  static constexpr int64_t all = std::numeric_limits<int64_t>::max();
  static constexpr ScaleBlock whole() { return {all, all}; }
  constexpr bool is_whole() const { return rows == all; }
};
// Elements [first, first + n) of matrices one after another, which each divide into tiles of 128 x 128.
struct TiledPart {
  static constexpr int64_t size = 128;
  int64_t matrices, rows, columns, first, n;

  constexpr int64_t down() const { return (rows + size - 1) / size; }
  constexpr int64_t across() const { return (columns + size - 1) / size; }
  constexpr int64_t tiles() const { return matrices * down() * across(); }
  constexpr int64_t tile_of(int64_t element) const {
    const int64_t row = element / columns, column = element % columns;
    return (row / rows * down() + row % rows / size) * across() + column / size;
  }
};

// Bytes of cuBLASLt's work space: NVIDIA's recommendation for Hopper. A fixed size, not what an algorithm needs, so
// that it can be planned without a GPU.
inline constexpr int64_t gpu_matmul_workspace = 32 << 20;

// qkv (B, T, (Hq + 2 Hkv) D): all query heads, then key heads, then value heads; query head h reads key-value head h /
// (Hq / Hkv). out (B, T, Hq D); lse (B, Hq, T)
struct AttentionShape {
  int64_t B, T, Hq, Hkv, D;
};

// How tensor-parallel ranks share the heads of a projection: all have equally many query heads and equally many key
// heads; each `key_copies` consecutive ranks have the same key heads.
struct HeadShares {
  int64_t ranks = 1, rank = 0, key_copies = 1;

  // The number of ranks that together have all query heads (which = 0), or all key heads (1), once.
  constexpr int64_t parts(int64_t which) const { return which == 0 ? ranks : ranks / key_copies; }
  // The sum, over those ranks in order, of row n of sums (ranks, N, 2), where each rank has summed over its own heads.
  // For keys they are the ranks with this rank's copies, so a gradient in parts, one per copy, stays in parts.
  template <class A>
  constexpr A total(const A* sums, int64_t N, int64_t n, int64_t which) const {
    const int64_t step = ranks / parts(which);
    A total = 0;
    for (int64_t p = rank % step; p < ranks; p += step) total += sums[(p * N + n) * 2 + which];
    return total;
  }
};

// Rows [first, first + rows) of every sequence of `length` rows.
struct SequenceRows {
  int64_t length, first, rows;
};

// A block of causal attention: some query rows of each of B sequences against some key rows: in the same sequences, in
// a cache, or on their way round a ring. Counted within the block, query row i sees the keys up to i + offset; in
// packed documents only those of its own document, which begins position(i) keys before that.
struct AttentionBlock {
  int64_t B, Hq, Hkv, D;
  SequenceRows queries, keys;
  int64_t offset = 0;
  bool all_keys = true;  // no query row sees a key outside of the block

  // Pairs of a query and a key that it sees, for one head and sequence; packed documents count as one document.
  constexpr int64_t pairs() const {
    constexpr auto triangle = [](int64_t n) { return n > 0 ? n * (n + 1) / 2 : 0; };
    const int64_t beyond = offset - keys.rows;  // rows see no more keys than there are
    return triangle(queries.rows + offset) - triangle(offset) - triangle(queries.rows + beyond) + triangle(beyond);
  }
};
// All rows of whole sequences.
constexpr AttentionBlock whole_sequences(const AttentionShape& s) {
  return {.B = s.B, .Hq = s.Hq, .Hkv = s.Hkv, .D = s.D, .queries = {s.T, 0, s.T}, .keys = {s.T, 0, s.T}};
}
// New rows, from `begin` on, of one sequence against all of its keys so far, which begin a cache of `rows` rows.
constexpr AttentionBlock continuation(const AttentionShape& s, int64_t begin, int64_t rows) {
  return {.B = 1,
          .Hq = s.Hq,
          .Hkv = s.Hkv,
          .D = s.D,
          .queries = {s.T, 0, s.T},
          .keys = {rows, 0, begin + s.T},
          .offset = begin};
}

// Heads side by side in the rows of a matrix: head h of row t is at data + t * stride + h * D.
template <class T>
struct HeadRows {
  T* data = nullptr;
  int64_t stride = 0;
};
// The inputs of an attention kernel. Row i of the block's queries is row b * length + first + i of the matrix.
template <class T>
struct AttentionInputs {
  HeadRows<const T> queries, keys, values;
  const int32_t* positions;  // for all query rows, or nullptr: sequences are one document each
};
// The outputs of the forward: out, and of each row lse and the largest score; or, if `sums` is set, it merges the block
// into sums, largest and total (RunningAttention in ops_attention.h).
template <class T, class A>
struct AttentionOutputs {
  HeadRows<T> out;
  A* lse = nullptr;  // (B, Hq, queries.length), or nullptr: not wanted
  HeadRows<A> sums = {};
  A *largest = nullptr, *total = nullptr;  // (B, Hq, queries.length), largest without `sums` like lse
};
// The outputs of the backward: the gradients in the training dtype, or, if query_sums is set, it adds to sums.
template <class T, class A>
struct AttentionGradients {
  HeadRows<T> queries = {}, keys = {}, values = {};
  HeadRows<A> query_sums = {}, key_sums = {}, value_sums = {};
};

// How QK-clip shrinks the weights that make a head's queries or keys, if its largest logit is above a limit: to their
// share of limit / logit (Kimi Team 2025, algorithm 1).
enum class ClipShare : uint8_t { none, root, whole };
struct HeadClip {
  double limit;
  ClipShare share;
  int64_t elements;  // of the parameter, for each head

  constexpr double factor(double logit) const {
    // After a logit that is not finite no update is made.
    if (!(logit > limit) || logit > std::numeric_limits<double>::max()) return 1;
    return share == ClipShare::root ? std::sqrt(limit / logit) : limit / logit;
  }
};

// The boxes of a tensor that copy_box() copies: element (i, j, k) is at begin + i * outer + j * inner + k.
struct BoxStrides {
  int64_t begin, outer, inner;
};
struct BoxSizes {
  int64_t outer, inner, run;
};

enum class Turn : uint8_t { forward, backward };  // direction of the rotation by rotary positions

// The elements of a parameter that a flat tensor has: those of a box of it (rows x columns, row by row) from element
// `begin` of the box on. Anything that depends on an element's index in the parameter (random numbers) asks index().
struct Elements {
  int64_t begin = 0;
  int64_t first = 0;                // index in the parameter of the box's first element
  int64_t columns = 1, stride = 1;  // row lengths of the box and of the parameter; equal if the box has whole rows

  // The index in the parameter of element i of the tensor.
  constexpr int64_t index(int64_t i) const {
    const int64_t in_box = begin + i;
    return columns == stride ? first + in_box : first + in_box / columns * stride + in_box % columns;
  }
  // The number of elements from element i on that are contiguous in the parameter.
  constexpr int64_t run(int64_t i) const {
    return columns == stride ? std::numeric_limits<int64_t>::max() : columns - (begin + i) % columns;
  }
};

// Tokens [first, first + size) of a vocabulary: a rank has their rows of a table, or their columns of the logits.
struct Vocabulary {
  int64_t first = 0, size = -1;  // size -1: all tokens

  constexpr bool has(int64_t token) const { return size < 0 || (token >= first && token < first + size); }
};

// How rotary frequencies are scaled for contexts longer than those of pretraining (Llama 3.1): low ones are divided by
// `factor`, high ones are kept, those in between are interpolated.
struct RotaryScaling {
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
  double original_positions = 8192;
};

struct Rotary {
  double theta = 10000;
  bool scaled = false;
  RotaryScaling scaling = {};

  // The angle per position of pair i of D / 2; in fp32, as in transformers.
  float frequency(int64_t i, int64_t D) const {
    const double f = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(D));
    if (!scaled) return static_cast<float>(f);
    const double wavelength = 2 * std::numbers::pi / f, low = scaling.original_positions / scaling.low_freq_factor,
                 high = scaling.original_positions / scaling.high_freq_factor;
    if (wavelength > low) return static_cast<float>(f / scaling.factor);
    if (wavelength < high) return static_cast<float>(f);
    const double smooth = (scaling.original_positions / wavelength - scaling.low_freq_factor) /
                          (scaling.high_freq_factor - scaling.low_freq_factor);
    return static_cast<float>((1 - smooth) * f / scaling.factor + smooth * f);
  }
};

// ---- Mixture of experts --------------------------------------------------------------------------------------------

inline constexpr int64_t most_experts = 1024;

enum class RouterScores : uint8_t { softmax, sigmoid };  // how scores follow from a row's logits

// A router chooses k of E experts for each row and weights what they compute.
struct Router {
  int64_t E, k;
  RouterScores scores = RouterScores::softmax;
  bool normalised = true;  // the weights of a row are divided by their sum
  float scaling = 1;       // and multiplied by this
};

// Segments are sequences, or slices of sequences that are spread over ranks, of `length` rows each, one after the
// other. Row n of a call is row first + n of them; the first one may have begun earlier, and the last one may continue.
struct Segments {
  int64_t length, first = 0;

  constexpr int64_t of(int64_t n) const { return (first + n) / length; }
  constexpr int64_t count(int64_t N) const { return N == 0 ? 0 : of(N - 1) + 1; }
  // The most segments that N rows can belong to, wherever they begin: for memory that is equal on all ranks.
  constexpr int64_t most(int64_t N) const { return N == 0 ? 0 : (N - 1) / length + 2; }
  constexpr int64_t begin(int64_t segment) const { return segment == 0 ? 0 : segment * length - first; }
  constexpr int64_t end(int64_t segment, int64_t N) const {
    const int64_t last = (segment + 1) * length - first;
    return last < N ? last : N;
  }
};

// Room for rows in the order of experts: without gaps, or divided equally among blocks of experts.
struct ExpertRoom {
  int64_t room;
  int64_t blocks = 1;

  constexpr int64_t stride() const { return room / blocks; }
};

// The coefficients of the router's own losses in the gradient of the logits: d loss / d (balancing loss of a sequence),
// and d loss / d (sum over rows of logsumexp^2).
struct RouterLosses {
  float balance = 0, z = 0;
  int64_t sequence = 1;  // rows of a whole sequence, on all ranks that share it
};

// Rows [begin, end) belong to this expert.
struct ExpertRows {
  int64_t expert = -1, begin = 0, end = 0;
};

// Sums in double that all devices and vector widths add in the same order (contract 10): sum_lanes running sums,
// element i in lane i % sum_lanes, then a pairwise tree over neighbouring lanes. Squares are summed this way in blocks
// of square_sum_block elements, then over the blocks.
inline constexpr int64_t sum_lanes = 1024, square_sum_block = 1 << 16;

// The output layer's own loss, which keeps log Z, the logarithm of the sum of the exponentials of a row's logits, near
// zero (Chowdhery et al. 2022, PaLM): coefficient * (log Z)^2 of each row.
template <class A>
struct ZLoss {
  A coefficient = 0;
  A* squares = nullptr;  // (N) = (log Z)^2, or nullptr: not wanted

  // d(loss of a row) / d logits is the softmax times this, minus one at the target.
  constexpr A gradient(A log_z) const { return A(1) + A(2) * coefficient * log_z; }
  constexpr void record(int64_t n, A log_z) const {
    if (squares != nullptr) squares[n] = log_z * log_z;
  }
};

// When an update is allowed, and how its gradients are scaled.
struct UpdateRule {
  double max_norm = 0;
  double scale = 1;  // of loss and gradients, which are sums over the tokens of a step: tokens / those with a target
  double largest_loss = std::numeric_limits<double>::infinity(), largest_norm = largest_loss;
};

// Which weights decay: all, or only those that the update makes smaller (Chen et al. 2025, cautious weight decay).
enum class Decay : uint8_t { always, cautious };

// By what NorMuon multiplies a row of an orthogonal update, whose second moment this is.
constexpr double row_factor(double second_moment) { return 1 / (std::sqrt(second_moment) + 1e-10); }

// Parameters with a learning rate of their own: tables of tokens and positions; an output layer that is not tied to
// one; norms and biases; and all others.
enum class RateGroup : uint8_t { matrices, embedding, head, scalars };
inline constexpr size_t rate_groups = 4;

// The settings of all rules (optimizers.h); each uses some of them.
struct OptimizerOptions {
  float lr;
  float beta1;         // decay of AdamW's first moment; momentum of SGD; Lion's share of the momentum in its direction
  float beta2;         // decay of AdamW's second moment, of Lion's momentum
  float eps;           // of AdamW
  float weight_decay;  // per step, times lr
  int64_t step;        // counts from 1
  uint64_t seed = 0;   // for stochastic rounding
  float momentum = 0;  // of Muon, Nesterov's
  Decay decay = Decay::always;                          // of Muon
  bool decays_embeddings = true;                        // does the weight decay of matrices include these tables?
  std::array<float, rate_groups> rates = {1, 1, 1, 1};  // learning rates of groups of parameters, as parts of lr
  double average_share = 0;                             // of the new weights in their moving average

  float rate(RateGroup group) const { return rates[static_cast<size_t>(group)]; }
};

}  // namespace llmc
