// forms.h: alternatives to the ring all-reduce of llmc/comm/ring.h, over the same transport, for comparison. Both
// send more bytes through one rank than the ring; the tree needs fewer steps, and so is faster for small buffers.
#pragma once
#include "comm/ring.h"

namespace llmc::forms {

// Every rank sends everything to rank 0, which adds it up and sends the sum back to every rank. Rank 0 sends and
// receives (P - 1) n.
template <class T>
void naive_all_reduce(const Link& t, T* buffer, int64_t n, T* scratch) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  if (t.rank() > 0) {
    t.exchange({0, buffer, bytes}, {});
    t.exchange({}, {0, buffer, bytes});
    return;
  }
  for (int other = 1; other < t.size(); ++other) {
    t.exchange({}, {other, scratch, bytes});
    t.add(buffer, scratch, n);
  }
  for (int other = 1; other < t.size(); ++other) t.exchange({other, buffer, bytes}, {});
}

// A binomial tree: in round k the ranks that are odd multiples of 2^k send their sum to the rank 2^k below, then the
// sum travels back the same way. 2 log2(P) rounds of n each.
template <class T>
void tree_all_reduce(const Link& t, T* buffer, int64_t n, T* scratch) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  const int P = t.size(), r = t.rank();
  int reach = 1;
  for (; reach < P; reach *= 2) {
    if (r % (2 * reach) == reach) {
      t.exchange({r - reach, buffer, bytes}, {});
      break;
    }
    if (r + reach < P) {
      t.exchange({}, {r + reach, scratch, bytes});
      t.add(buffer, scratch, n);
    }
  }
  if (r % (2 * reach) == reach && reach < P) t.exchange({}, {r - reach, buffer, bytes});
  for (reach /= 2; reach >= 1; reach /= 2)
    if (r % (2 * reach) == 0 && r + reach < P) t.exchange({r + reach, buffer, bytes}, {});
}

}  // namespace llmc::forms
