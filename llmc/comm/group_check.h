// group_check.h: before the first step, known values go through every group of a rank (an all-gather and a sum) and
// through every link between the stages of a pipeline. So a transport that mixes up ranks or groups is noticed where it
// does so, not by a wrong loss.
#pragma once
#include "comm/groups.h"

namespace llmc {

namespace detail {

inline void check_group(Comm& group, int number, const std::vector<int>& members, Stream& stream,
                        const std::function<std::string(int)>& name_of_rank) {
  const int P = group.size(), me = group.rank();
  if (P == 1) return;
  const auto value = [&](int member) {
    return static_cast<float>(1000 * number + members[static_cast<size_t>(member)]);
  };
  auto scope = stream.scratch().scope();
  const Tensor x = stream.scratch().alloc("scratch", "known values", DType::fp32, {P});

  std::vector<float> mine(static_cast<size_t>(P), -1.0f);
  mine[static_cast<size_t>(me)] = value(me);
  upload(x, mine, stream);
  group.all_gather(x, stream);
  const HostView all(x, stream);
  for (int m = 0; m < P; ++m)
    CHECK(all.data<float>()[m] == value(m),
          "the group {}: got {} from {} instead of {}; the transport mixes up ranks or groups: try another --comm",
          group.name(), all.data<float>()[m], name_of_rank(members[static_cast<size_t>(m)]), value(m));

  // Each term is below 300, so the sum is exact in fp32 for any number of ranks that can occur.
  const auto term = [&](int member) {
    return static_cast<float>(10 * number + members[static_cast<size_t>(member)] % 10);
  };
  float sum = 0;
  for (int m = 0; m < P; ++m) sum += term(m);
  upload(x, std::vector<float>(static_cast<size_t>(P), term(me)), stream);
  group.reduce_scatter(x, stream);
  const HostView sums(x, stream);
  CHECK(sums.data<float>()[me] == sum,
        "the group {}: got the sum {} instead of {}; the transport mixes up ranks or groups: try another --comm",
        group.name(), sums.data<float>()[me], sum);
  group.forget_bytes();
}

// Sends through each link a value that identifies the link and the sender.
inline void check_links(Groups& groups, const std::function<std::string(int)>& name_of_rank) {
  const int inner = groups.ranks_of_stage(), place = groups.rank() % inner;
  const auto value = [&](int from, int to) {
    return static_cast<float>(10'000 * (from + 1) + 10 * to + 1 + place % 7);
  };
  struct Expected {
    Tensor x;
    StageLink* link;
    int from, to;
  };
  std::vector<Expected> expected;
  std::vector<std::unique_ptr<Arena::Scope>> scopes;
  groups.links.for_each_with_ends([&](StageLink& link, int from, int to) {
    Stream& stream = link.stream();
    scopes.emplace_back(new Arena::Scope(stream.scratch()));
    const Tensor x = stream.scratch().alloc("scratch", "known value", DType::fp32, {1});
    if (from == groups.me.stage) {
      upload(x, std::vector<float>{value(from, to)}, stream);
      link.comm().send(x, link.peer(), stream);
    } else {
      upload(x, std::vector<float>{-1}, stream);
      link.comm().receive(x, link.peer(), stream);
      expected.push_back({x, &link, from, to});
    }
  });
  for (const auto& [x, link, from, to] : expected) {
    const HostView got(x, link->stream());
    CHECK(got.data<float>()[0] == value(from, to),
          "the link from stage {} to stage {}: got {} from {} instead of {}; the transport mixes up ranks or groups: "
          "try another --comm",
          from, to, got.data<float>()[0], name_of_rank(from * inner + place), value(from, to));
  }
  groups.links.for_each([](StageLink& link) {
    link.stream().synchronize();
    link.comm().forget_bytes();
  });
}

// Are ranks a and b in the same group of this row? From their numbers alone, so that a wrong group, or a wrong mesh, is
// noticed.
inline bool belong_together(const GroupRow& row, const Layout& l, int a, int b) {
  if (a == b) return true;
  if (row.needed == Needed::with_experts && l.expert.count == 0) return false;
  if (row.needed == Needed::with_matrices && !rule_of(l.zero.optimizer).of_matrices) return false;
  if (row.needed == Needed::asynchronous && !l.pipeline.asynchronous()) return false;
  if (row.needed == Needed::many_ranks && l.ranks() <= 64) return false;
  if (row.view == View::row || row.view == View::column) {
    const int length = row_length(l.ranks());
    return row.view == View::row ? a / length == b / length : (a - b) % length == 0;
  }
  if (row.view == View::experts && !l.experts_apart()) return false;
  const int tp = l.tensor.ranks, cp = l.context.ranks, replica = l.zero.shards * tp, stage = replica * l.zero.replicas,
            ep = l.expert.ranks;
  const auto same = [&](Axis axis, int of_a, int of_b) { return row.axes.has(axis) || of_a == of_b; };
  if (!same(Axis::pp, a / stage, b / stage)) return false;
  if (!same(Axis::replicate, a % stage / replica, b % stage / replica)) return false;
  const int x = a % replica, y = b % replica;  // places in the replica
  if (row.view == View::experts) return same(Axis::shard, x / ep, y / ep) && same(Axis::ep, x % ep, y % ep);
  const int heads = row.view == View::same_head ? l.tensor.head_copies : tp;
  const auto is_end = [&](int rank) { return rank / stage == 0 || rank / stage == l.pipeline.stages - 1; };
  return same(Axis::shard, x / (tp * cp), y / (tp * cp)) && same(Axis::cp, x / tp % cp, y / tp % cp) &&
         same(Axis::tp, x % tp, y % tp) && x % tp / heads == y % tp / heads &&
         (row.view != View::ends || (is_end(a) && is_end(b)));
}

}  // namespace detail

// Called by all ranks. compute: the stream that lanes without one of their own use.
inline void check_groups(Groups& groups, Stream& compute, const std::function<std::string(int)>& name_of_rank) {
  int number = 0;
  for (const GroupRow& row : groups.table()) {
    std::vector<int> members;
    for (int rank = 0; rank < groups.ranks(); ++rank)
      if (detail::belong_together(row, groups.layout, groups.rank(), rank)) members.push_back(rank);
    Comm& group = groups[row.id];
    CHECK(
        group.size() == static_cast<int>(members.size()) && members[static_cast<size_t>(group.rank())] == groups.rank(),
        "the group {} of {}: this is rank {} of {}, expected one of {}", group.name(), name_of_rank(groups.rank()),
        group.rank(), group.size(), members);
    if (row.traffic != Traffic::text)
      detail::check_group(group, ++number, members, groups.stream(row.lane, compute), name_of_rank);
  }
  detail::check_links(groups, name_of_rank);
}

}  // namespace llmc
