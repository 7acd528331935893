// ring.h: ring collectives over send and receive (Patarasu & Yuan 2009), chunked so that a rank forwards one chunk
// while the next one arrives. Every rank sends to the next rank of its group and receives from the previous one.
// Written once for all of our transports; dev/comm has the naive and the tree algorithms for comparison.
//
// A buffer has P shards of n elements: rank r of P owns shard r.
#pragma once
#include "core/dtype.h"
#include "core/shape.h"
#include "device/host_copy.h"
#include "net/links.h"
#include "ops/ops_memory.h"

namespace llmc {

// One rank's connections to the other ranks of its group.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Sends and receives at the same time, and returns when both are done. gpu: a stream of the GPU in whose memory both
  // buffers are, idle unless exchanges are enqueued; none: they are in host memory.
  virtual void exchange(const ToRank& out, const FromRank& in, Stream* gpu = nullptr) = 0;
  virtual bool moves_data() const { return true; }  // false: bytes are only counted
  virtual bool enqueues() const { return false; }   // true: exchange() returns at once, and happens in stream order
};

// A transport, and where the buffers of a collective are.
struct Link {
  Transport& transport;
  Stream* gpu = nullptr;  // as in exchange()

  int rank() const { return transport.rank(); }
  int size() const { return transport.size(); }
  bool moves_data() const { return transport.moves_data(); }
  void exchange(const ToRank& out, const FromRank& in) const {
    if (gpu != nullptr && !transport.enqueues()) gpu->synchronize();
    transport.exchange(out, in, gpu);
  }
  // to += x, added in the accumulator type and rounded once.
  template <class T>
  void add(T* to, const T* x, int64_t n) const {
    if (moves_data()) detail::add_arrays(to, x, n, gpu);
  }
  template <class T>
  void copy(T* to, const T* x, int64_t n) const {
    if (moves_data()) copy_now(to, x, n * static_cast<int64_t>(sizeof(T)), gpu);
  }
};

namespace ring {

inline constexpr int64_t chunk_elements = 1 << 16;

namespace detail {

inline int wrap(int rank, int size) { return (rank % size + size) % size; }

// Calls f(first element, elements, bytes) for each chunk of n elements.
template <class T, class F>
void for_chunks(int64_t n, F&& f) {
  for (int64_t begin = 0; begin < n; begin += chunk_elements) {
    const int64_t count = std::min(chunk_elements, n - begin);
    f(begin, count, count * static_cast<int64_t>(sizeof(T)));
  }
}

}  // namespace detail

// Shard r becomes the sum over the ranks; the other shards are left with partial sums. Shard k is summed from rank k +
// 1 around the ring to rank k, so the order of addition is fixed. scratch: chunk_elements. Each rank sends (P - 1) n
// elements.
template <class T>
void reduce_scatter(const Link& t, T* buffer, int64_t n, T* scratch) {
  const int P = t.size(), r = t.rank(), next = detail::wrap(r + 1, P), previous = detail::wrap(r - 1, P);
  for (int s = 0; s < P - 1; ++s) {
    T* out = buffer + detail::wrap(r - 1 - s, P) * n;
    T* in = buffer + detail::wrap(r - 2 - s, P) * n;
    detail::for_chunks<T>(n, [&](int64_t begin, int64_t count, int64_t bytes) {
      t.exchange({next, out + begin, bytes}, {previous, scratch, bytes});
      t.add(in + begin, scratch, count);
    });
  }
}

// Every rank gets all shards. Each rank sends (P - 1) n elements.
template <class T>
void all_gather(const Link& t, T* buffer, int64_t n) {
  const int P = t.size(), r = t.rank(), next = detail::wrap(r + 1, P), previous = detail::wrap(r - 1, P);
  for (int s = 0; s < P - 1; ++s) {
    const T* out = buffer + detail::wrap(r - s, P) * n;
    T* in = buffer + detail::wrap(r - s - 1, P) * n;
    detail::for_chunks<T>(n, [&](int64_t begin, int64_t, int64_t bytes) {
      t.exchange({next, out + begin, bytes}, {previous, in + begin, bytes});
    });
  }
}

// buffer (n) becomes a copy of the root's, forwarded chunk by chunk. Each rank but the last sends n elements.
template <class T>
void broadcast(const Link& t, T* buffer, int64_t n, int root) {
  const int P = t.size(), position = detail::wrap(t.rank() - root, P);
  const int next = position + 1 < P ? detail::wrap(t.rank() + 1, P) : -1,
            previous = position > 0 ? detail::wrap(t.rank() - 1, P) : -1;
  detail::for_chunks<T>(n, [&](int64_t begin, int64_t, int64_t bytes) {
    if (previous >= 0) t.exchange({}, {previous, buffer + begin, bytes});
    if (next >= 0) t.exchange({next, buffer + begin, bytes}, {});
  });
}

// The root's buffer (n) becomes the sum over the ranks, added around the ring; other buffers become partial sums.
template <class T>
void reduce(const Link& t, T* buffer, int64_t n, int root, T* scratch) {
  const int P = t.size(), position = detail::wrap(t.rank() - root - 1, P);  // the root comes last
  const int next = position + 1 < P ? detail::wrap(t.rank() + 1, P) : -1,
            previous = position > 0 ? detail::wrap(t.rank() - 1, P) : -1;
  detail::for_chunks<T>(n, [&](int64_t begin, int64_t count, int64_t bytes) {
    if (previous >= 0) {
      t.exchange({}, {previous, scratch, bytes});
      t.add(buffer + begin, scratch, count);
    }
    if (next >= 0) t.exchange({next, buffer + begin, bytes}, {});
  });
}

// out: shard k from rank k; in: shard k for rank k. In step s each rank sends to the rank s places after it. Each rank
// sends (P - 1) n elements.
template <class T>
void all_to_all(const Link& t, T* out, const T* in, int64_t n) {
  const int P = t.size(), r = t.rank();
  t.copy(out + r * n, in + r * n, n);
  for (int s = 1; s < P; ++s) {
    const int to = detail::wrap(r + s, P), from = detail::wrap(r - s, P);
    const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
    t.exchange({to, in + to * n, bytes}, {from, out + from * n, bytes});
  }
}

// The same with blocks of rows of `width` elements: send[k] of `in` for rank k, receive[k] of `out` from rank k.
template <class T>
void all_to_all_rows(const Link& t, T* out, const T* in, int64_t width, const std::vector<Range>& send,
                     const std::vector<Range>& receive) {
  const auto of = [](const std::vector<Range>& blocks, int rank) { return blocks[static_cast<size_t>(rank)]; };
  const int P = t.size(), r = t.rank();
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  t.copy(out + of(receive, r).begin * width, in + of(send, r).begin * width, of(send, r).size * width);
  for (int s = 1; s < P; ++s) {
    const int to = detail::wrap(r + s, P), from = detail::wrap(r - s, P);
    t.exchange({to, in + of(send, to).begin * width, of(send, to).size * row_bytes},
               {from, out + of(receive, from).begin * width, of(receive, from).size * row_bytes});
  }
}

}  // namespace ring
}  // namespace llmc
