// panels.h: packs the operands of a product into the panels that register_tile.h reads: a few lines (rows of A, columns
// of B) side by side, step by step of k, so that the innermost loop reads memory in order.
#pragma once
#include "ops/cpu/matrix_tile.h"

namespace llmc::cpu {
inline namespace CPU_ISA {

// The lines of an operand as stored: element k of line i is at data[i * line + k * depth]; one of the strides is 1.
template <class T>
struct Lines {
  const T* data;
  int64_t line, depth;
  Lines from(int64_t i, int64_t k) const { return {data + i * line + k * depth, line, depth}; }
};

namespace detail {

// Vectors of 32-bit words: an fp32, or two bf16 next to each other.
typedef uint32_t Words __attribute__((vector_size(vector_bytes)));
inline constexpr int words = vector_bytes / 4;

template <size_t First, size_t... I>
Words interleave(const Words& x, const Words& y, std::index_sequence<I...>) {
  return __builtin_shuffle(x, y, Words{static_cast<uint32_t>(First + I / 2 + I % 2 * words)...});
}
// Transposes a square of words in place: every round interleaves rows of the two halves.
inline void transpose(Words* x) {
  constexpr std::make_index_sequence<words> all;
  Words y[words];
  for (int round = 1; round < words; round *= 2) {
    for (int i = 0; i < words / 2; ++i) {
      y[2 * i] = interleave<0>(x[i], x[i + words / 2], all);
      y[2 * i + 1] = interleave<words / 2>(x[i], x[i + words / 2], all);
    }
    for (int i = 0; i < words; ++i) x[i] = y[i];
  }
}

// The next words of a line that has n elements left; zeros after them.
template <class P, class T>
Words words_of(const T* x, int64_t n) {
  constexpr int64_t most = words * 4 / sizeof(P);
  alignas(64) T padded[most];
  if (n < most) {
    std::fill_n(padded, most, T{});
    if (n > 0) std::memcpy(static_cast<void*>(padded), x, static_cast<size_t>(n) * sizeof(T));
    x = padded;
  }
  alignas(64) P packed[most];
  if constexpr (std::is_same_v<P, T>) {
    std::memcpy(static_cast<void*>(packed), x, sizeof(packed));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < most; ++i) store(packed[i], static_cast<accumulator_t<P>>(x[i]));
  }
  Words v;
  std::memcpy(&v, packed, sizeof(v));
  return v;
}

// Lines that are contiguous along k: squares of words are transposed. Group: elements next to each other in the panel.
template <int64_t Group, class P, class T>
void pack_along_k(P* out, int64_t width, const Lines<T>& x, int64_t n, int64_t K) {
  constexpr int64_t step = words * Group;  // elements of a line in a vector
  constexpr int most = (32 + words - 1) / words;
  const int64_t squares = ceil_div(width, words);
  for (int64_t k = 0; k < K; k += step) {
    alignas(64) Words square[most][words];
    for (int64_t s = 0; s < squares; ++s) {
      for (int64_t i = 0; i < words; ++i) {
        const int64_t line = s * words + i;
        const T* at = x.data + std::min(line, n - 1) * x.line + k;
        __builtin_prefetch(at + 4 * step);  // more lines than a hardware prefetcher follows
        square[s][i] = words_of<P>(at, line < n ? K - k : 0);
      }
      transpose(square[s]);
    }
    P* to = out + k * width;
    for (int64_t j = 0; j < std::min<int64_t>(words, ceil_div(K - k, Group)); ++j, to += width * Group)
      for (int64_t s = 0; s < squares; ++s)  // what exceeds the panel's width is overwritten by the next line
        std::memcpy(static_cast<void*>(to + s * words * Group), &square[s][j], sizeof(Words));
  }
}

// A vector of words from as many adjacent lines, n of which exist: element k of each or, in pairs, k and k + 1, which
// is in the row `next` (nullptr: there is none).
template <class P, class T>
Words words_across(const T* row, const T* next, int64_t n) {
  alignas(64) T padded[2][words];
  if (n < words) {
    std::fill_n(padded[0], 2 * words, T{});
    std::memcpy(static_cast<void*>(padded[0]), row, static_cast<size_t>(n) * sizeof(T));
    if (next != nullptr) std::memcpy(static_cast<void*>(padded[1]), next, static_cast<size_t>(n) * sizeof(T));
    row = padded[0], next = next == nullptr ? nullptr : padded[1];
  }
  Words v;
  if constexpr (sizeof(T) == sizeof(uint32_t)) {
    std::memcpy(&v, row, sizeof(v));
  } else {
    typedef uint16_t HalfWords __attribute__((vector_size(vector_bytes / 2)));
    HalfWords half;
    std::memcpy(&half, row, sizeof(half));
    v = __builtin_convertvector(half, Words);
    if constexpr (sizeof(P) == sizeof(uint32_t)) {
      v <<= 16;  // bf16 to fp32
    } else if (next != nullptr) {
      std::memcpy(&half, next, sizeof(half));
      v |= __builtin_convertvector(half, Words) << 16;
    }
  }
  return v;
}

// Lines that lie side by side, packed for several panels at a time, to read more than one cache line of each row.
template <int64_t Group, class P, class T>
void pack_along_lines(P* out, int64_t width, int64_t panels, int64_t last_width, int64_t depth, const Lines<T>& x,
                      int64_t n, int64_t K) {
  static_assert(Group <= 2);
  for (int64_t k = 0; k < K; k += Group) {
    const T *row = x.data + k * x.depth, *next = k + 1 < K ? row + x.depth : nullptr;
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t columns = p + 1 < panels ? width : last_width;
      P* to = out + p * width * depth + k * columns;
      for (int64_t i = 0; i < columns; i += words) {
        const int64_t line = std::min(p * width + i, n);
        const Words v =
            words_across<P>(row + line, next == nullptr ? nullptr : next + line, std::min<int64_t>(words, n - line));
        // The next step overwrites what exceeds the panel's width; after the last step the next panel begins there.
        if (k + Group < K || columns - i >= words) std::memcpy(static_cast<void*>(to + i * Group), &v, sizeof(v));
        else std::memcpy(static_cast<void*>(to + i * Group), &v, static_cast<size_t>(columns - i) * 4);
      }
    }
  }
}

// Packs n bf16 lines, 32 elements of each next to each other, and zeros up to `width` lines.
template <class T>
void pack_in_32s(bf16* out, int64_t width, const Lines<T>& x, int64_t n, int64_t K) {
  for (int64_t k = 0; k < K; k += 32)
    for (int64_t i = 0; i < width; ++i, out += 32) {
      const int64_t there = i < n ? std::min<int64_t>(32, K - k) : 0;
      const T* from = x.data + i * x.line + k * x.depth;
      if (x.depth == 1)
        for (int64_t e = 0; e < there; ++e) out[e] = static_cast<bf16>(from[e]);
      else
        for (int64_t e = 0; e < there; ++e) out[e] = static_cast<bf16>(from[e * x.depth]);
      std::fill(out + there, out + 32, bf16{});
    }
}

// Packs `lines` of the n lines that exist into panels (ceil(K / Group), width, Group), one after another; the last one
// is as wide as the number of lines left, or padded with zeros to the full width. A line has `depth` elements in a
// panel: K, and zeros. Writes up to beyond_panels elements beyond the panels.
enum class LastPanel : uint8_t { narrow, padded };
template <int64_t Group, class P, class T>
void pack_panels(P* out, int64_t width, LastPanel last, int64_t depth, const Lines<T>& x, int64_t lines, int64_t n,
                 int64_t K) {
  constexpr int64_t at_a_time = 8;
  const auto width_at = [&](int64_t i) { return last == LastPanel::padded ? width : std::min(width, lines - i); };
  if constexpr (sizeof(P) == 8) {
    for (int64_t i = 0; i < lines; i += width)
      for (int64_t k = 0; k < K; ++k)
        for (int64_t r = 0; r < width_at(i); ++r)
          out[i * depth + k * width_at(i) + r] = i + r < n ? x.data[(i + r) * x.line + k * x.depth] : 0;
  } else if constexpr (Group == 32) {
    for (int64_t i = 0; i < lines; i += width)
      pack_in_32s(out + i * depth, width, x.from(i, 0), std::min(lines - i, width), K);
  } else if (x.depth == 1) {
    for (int64_t i = 0; i < lines; i += width)
      pack_along_k<Group>(out + i * depth, width_at(i), x.from(i, 0), n - i, K);
  } else if constexpr (sizeof(T) > sizeof(P)) {
    std::abort();  // sums are packed along k alone
  } else {
    for (int64_t i = 0; i < lines; i += at_a_time * width) {
      const int64_t panels = std::min(at_a_time, ceil_div(lines - i, width));
      pack_along_lines<Group>(out + i * depth, width, panels, width_at(i + (panels - 1) * width), depth, x.from(i, 0),
                              n - i, K);
    }
  }
  // Zeros for the rest of the last step, where K does not fill it.
  if (const int64_t filled = round_up(K, Group); filled < depth)
    for (int64_t i = 0; i < lines; i += width)
      std::fill(out + i * depth + filled * width_at(i), out + (i + width_at(i)) * depth, P{});
}

// Packs `lines` of the n lines that exist as panels of A, or of B.
template <class How, class T>
void pack_a(typename How::Packed* out, const Lines<T>& x, int64_t lines, int64_t n, int64_t K, int64_t depth) {
  pack_panels<How::group_a>(out, How::rows, How::pads_rows ? LastPanel::padded : LastPanel::narrow, depth, x, lines, n,
                            K);
}
template <class How, class T>
void pack_b(typename How::Packed* out, const Lines<T>& x, int64_t lines, int64_t n, int64_t K, int64_t depth) {
  pack_panels<How::group_b>(out, How::columns, LastPanel::padded, depth, x, lines, n, K);
}

}  // namespace detail
}  // namespace CPU_ISA
}  // namespace llmc::cpu
