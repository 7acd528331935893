// server.h: parameter servers (Dean et al. 2012; Li et al. 2014), the classical alternative to an all-reduce. Gradients
// are pushed to the rank that serves them, which adds them in rank order and updates; weights are pulled from there.
//
// A buffer has S parts of n elements, and rank k < S serves part k: with one central server S = 1, and if every rank
// serves its shard, S = P. All messages go directly between a rank and a server, in chunks. link_traffic() has the law
// of their bytes. All three kinds of server add the same numbers in the same order: they agree bit for bit (contract
// 3).
#pragma once
#include "comm/ring.h"

namespace llmc {

// How data-parallel ranks keep their weights equal.
enum class DpSync : uint8_t { all_reduce, parameter_server, parameter_server_chain, partitioned_server };
constexpr auto names_of_values(DpSync) {
  return std::array{"all-reduce", "parameter-server", "parameter-server-chain", "partitioned-server"};
}

namespace server {

inline constexpr int64_t chunk_elements = ring::chunk_elements / 2;  // scratch holds two of them

namespace detail {

// Sends `out` to rank p and receives `in` from it, n elements each; nullptr: nothing.
template <class T>
void meet(const Link& t, int p, const T* out, T* in, int64_t n) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  if (out != nullptr || in != nullptr)
    t.exchange({out != nullptr ? p : -1, out, bytes}, {in != nullptr ? p : -1, in, bytes});
}

// Calls f(part, count) for each chunk of the parts of n elements; part(k): where the chunk begins in part k; nullptr if
// rank k is not a server.
template <class T, class F>
void for_chunks(T* buffer, int64_t n, int servers, F&& f) {
  for (int64_t begin = 0; begin < n; begin += chunk_elements)
    f([=](int k) { return k < servers ? buffer + k * n + begin : nullptr; }, std::min(chunk_elements, n - begin));
}

}  // namespace detail

// On rank k < servers, part k becomes its sum over the ranks, added in rank order; the rest of the buffer stays. In
// each chunk every rank meets the others in rank order: ranks x and p meet in turn x + p of the chunk, so that no ranks
// wait in a cycle, and one chunk begins while the one before ends. scratch: ring::chunk_elements.
template <class T>
void push(const Link& t, T* buffer, int64_t n, int servers, T* scratch) {
  const int r = t.rank();
  T *lower = scratch, *in = scratch + chunk_elements;  // the sum of the ranks below this one; the data that arrives
  detail::for_chunks(buffer, n, servers, [&](auto part, int64_t count) {
    T* const mine = part(r);
    for (int p = 0; p < t.size(); ++p) {
      if (p != r) detail::meet(t, p, part(p), mine == nullptr ? nullptr : p == 0 ? lower : in, count);
      if (mine == nullptr || p == 0) continue;
      if (p == r) t.add(mine, lower, count);
      else t.add(p < r ? lower : mine, in, count);
    }
  });
}

// Every rank gets part k from rank k < servers.
template <class T>
void pull(const Link& t, T* buffer, int64_t n, int servers) {
  detail::for_chunks(buffer, n, servers, [&](auto part, int64_t count) {
    for (int p = 0; p < t.size(); ++p)
      if (p != t.rank()) detail::meet(t, p, part(t.rank()), part(p), count);
  });
}

}  // namespace server

// Bytes in a step through the link of each of these ranks, with f = (P - 1) / P, G and W the bytes of gradients and
// weights, and R reductions.
struct LinkTraffic {
  DpSync sync;
  std::string of;   // which ranks
  int first, last;  // the same ranks, in numbers
  std::string out_law, in_law;
  int64_t out, in;
};
// P > 1 ranks; gradients: G R; weights: W; both divisible by P.
inline std::vector<LinkTraffic> link_traffic(int P, int64_t gradients, int64_t weights) {
  using enum DpSync;
  const int64_t G = gradients, W = weights, fG = G / P * (P - 1), fW = W / P * (P - 1);
  std::vector<LinkTraffic> all = {
      {all_reduce, "every rank", 0, P - 1, "2 f G R", "2 f G R", 2 * fG, 2 * fG},
      {parameter_server, "the server", 0, 0, "(P - 1) W", "(P - 1) G R", (P - 1) * W, (P - 1) * G},
      {parameter_server, "others", 1, P - 1, "G R", "W", G, W},
      {parameter_server_chain, "the server", 0, 0, "W", "(P - 1) G R", W, (P - 1) * G},
      {parameter_server_chain, "ranks between", 1, P - 2, "G R + W", "W", G + W, W},
      {parameter_server_chain, "the last rank", P - 1, P - 1, "G R", "W", G, W},
      {partitioned_server, "every rank", 0, P - 1, "f (G R + W)", "f (G R + W)", fG + fW, fG + fW}};
  std::erase_if(all, [](const LinkTraffic& link) { return link.first > link.last; });
  return all;
}

}  // namespace llmc
