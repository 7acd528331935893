// server.h: parameter servers (Dean et al. 2012; Li et al. 2014), the classical alternative to an all-reduce. Gradients
// are pushed to the rank that serves them, which adds them in rank order and updates; weights are pulled from there.
//
// A buffer has S parts of n elements, and rank k < S serves part k: one central server has S = 1, and if every rank
// serves its shard, S = P. All messages go directly between a rank and a server, in chunks. Bytes through the link of
// one rank in a step, f = (P - 1) / P, G and W the bytes of gradients and weights, R reductions:
//
//   --dp-sync                 link of            out               in
//   all-reduce                every rank         2 f G R           2 f G R         the ring, for comparison
//   parameter-server          rank 0, serves     (P - 1) W         (P - 1) G R     grows with the number of ranks
//                             the others         G R               W
//   parameter-server-chain    rank 0, serves     W                 (P - 1) G R     weights go from rank to rank, in
//                             ranks between      G R + W           W               chunks
//                             the last rank      G R               W
//   partitioned-server        every rank         f (G R + W)       f (G R + W)     that of ZeRO stage 1
//
// All three servers add the same numbers in the same order: they agree bit for bit (contract 3).
#pragma once
#include <string>
#include <vector>

#include "dist/ring.h"

namespace llmc {

// How data-parallel ranks keep their weights equal.
enum class DpSync : uint8_t { all_reduce, parameter_server, parameter_server_chain, partitioned_server };
inline constexpr DpSync all_dp_syncs[] = {DpSync::all_reduce, DpSync::parameter_server, DpSync::parameter_server_chain,
                                          DpSync::partitioned_server};
inline const char* name_of(DpSync sync) {
  constexpr const char* names[] = {"all-reduce", "parameter-server", "parameter-server-chain", "partitioned-server"};
  return names[static_cast<int>(sync)];
}
inline DpSync dp_sync_from_name(const std::string& name) {
  for (const DpSync sync : all_dp_syncs)
    if (name == name_of(sync)) return sync;
  throw Error(formatted("--dp-sync {}: there is no such way to synchronise ranks", name));
}

namespace server {

inline constexpr int64_t chunk_elements = ring::chunk_elements / 2;  // scratch holds two of them

// Part k becomes, on rank k < servers, its sum over the ranks, added in rank order; the rest of the buffer stays. For
// each chunk of a part, every rank meets the others in rank order. Rank x meets p as the (x + p)-th, as p does x: so
// nobody waits in a circle, and while x meets p in one chunk, ranks behind it may still be in the one before.
// scratch: ring::chunk_elements.
template <class T>
void push(const Link& t, T* buffer, int64_t n, int servers, T* scratch) {
  const int P = t.size(), r = t.rank();
  T *lower = scratch, *in = scratch + chunk_elements;  // the sum of the ranks below this one; what arrives
  for (int64_t begin = 0; begin < n; begin += chunk_elements) {
    const int64_t count = std::min(chunk_elements, n - begin), bytes = count * static_cast<int64_t>(sizeof(T));
    T* const mine = r < servers ? buffer + r * n + begin : nullptr;
    for (int p = 0; p < P; ++p) {
      if (p == r) {
        if (mine != nullptr && r > 0) t.add(mine, lower, count);
      } else if (mine != nullptr || p < servers) {
        t.exchange(p < servers ? p : -1, p < servers ? buffer + p * n + begin : nullptr, bytes,
                   mine != nullptr ? p : -1, p == 0 ? lower : in, bytes);
        if (mine != nullptr && p > 0) t.add(p < r ? lower : mine, in, count);
      }
    }
  }
}

// Every rank gets part k from rank k < servers, in the order of push().
template <class T>
void pull(const Link& t, T* buffer, int64_t n, int servers) {
  const int P = t.size(), r = t.rank();
  for (int64_t begin = 0; begin < n; begin += chunk_elements) {
    const int64_t bytes = std::min(chunk_elements, n - begin) * static_cast<int64_t>(sizeof(T));
    for (int p = 0; p < P; ++p)
      if (p != r && (r < servers || p < servers))
        t.exchange(r < servers ? p : -1, r < servers ? buffer + r * n + begin : nullptr, bytes,  //
                   p < servers ? p : -1, p < servers ? buffer + p * n + begin : nullptr, bytes);
  }
}

}  // namespace server

// The table above, in numbers: bytes through the link of each of some ranks in a step.
struct LinkTraffic {
  DpSync sync;
  std::string of;   // which ranks
  int first, last;  // the same in numbers
  std::string out_law, in_law;
  int64_t out, in;
};
// gradients: G R; weights: W; both divisible by the number of ranks, P.
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
