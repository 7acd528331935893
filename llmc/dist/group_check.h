// group_check.h: before the first step, known values go through every group of a rank (an all-gather and a sum) and
// through every link between the stages of a pipeline. So a transport that mixes up ranks or groups is noticed where it
// does so, not by a wrong loss.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dist/data_parallel.h"

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

  // Each term is below 200, so the sum is exact in fp32 for any number of ranks that can occur.
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

// Sends through each link a value that tells the link and the sender.
inline void check_links(DataParallel& dp, const std::function<std::string(int)>& name_of_rank) {
  const int inner = dp.ranks_of_stage(), place = dp.rank % inner;
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
  dp.links.for_each_with_ends([&](StageLink& link, int from, int to) {
    Stream& stream = link.stream();
    scopes.emplace_back(new Arena::Scope(stream.scratch()));
    const Tensor x = stream.scratch().alloc("scratch", "known value", DType::fp32, {1});
    if (from == dp.stage) {
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
  dp.links.for_each([](StageLink& link) {
    link.stream().synchronize();
    link.comm().forget_bytes();
  });
}

}  // namespace detail

// Called by all ranks. compute: the stream that uses the group `scalars`.
inline void check_groups(DataParallel& dp, const Mesh& mesh, Stream& compute,
                         const std::function<std::string(int)>& name_of_rank) {
  const auto along = [&](const std::vector<Axis>& axes) { return mesh.group(dp.rank, axes); };
  const std::vector<int> tensor = along({Axis::tp}), shard_group = along({Axis::shard, Axis::cp}),
                         everybody = along({Axis::pp, Axis::replicate, Axis::shard, Axis::cp, Axis::tp});
  // Computed again here, so that a wrong group in `dp` is noticed.
  const auto same_head = tensor.begin() + dp.tensor_rank / dp.tensor.head_copies * dp.tensor.head_copies;
  Stream& exchanges = dp.exchange_stream ? *dp.exchange_stream : compute;
  detail::check_group(*dp.gradients, 1, shard_group, dp.reduce_stream, name_of_rank);
  detail::check_group(*dp.replicas, 2, along({Axis::replicate}), dp.reduce_stream, name_of_rank);
  detail::check_group(*dp.weights, 3, shard_group, dp.gather_stream, name_of_rank);
  detail::check_group(*dp.scalars, 4, everybody, compute, name_of_rank);
  detail::check_group(*dp.activations, 5, tensor, exchanges, name_of_rank);
  detail::check_group(*dp.partial_gradients, 6, tensor, dp.reduce_stream, name_of_rank);
  detail::check_group(*dp.head_gradients, 7, {same_head, same_head + dp.tensor.head_copies}, dp.reduce_stream,
                      name_of_rank);
  detail::check_group(*dp.keys_values, 8, along({Axis::cp}), dp.context_stream ? *dp.context_stream : compute,
                      name_of_rank);
  if (dp.experts_apart()) {
    const Mesh view = expert_view(mesh, dp.expert);
    detail::check_group(*dp.experts, 11, view.group(dp.rank, {Axis::ep}),
                        dp.expert_stream ? *dp.expert_stream : compute, name_of_rank);
    const std::vector<int> same_experts = view.group(dp.rank, {Axis::shard});
    detail::check_group(*dp.expert_gradients, 12, same_experts, dp.reduce_stream, name_of_rank);
    detail::check_group(*dp.expert_weights, 13, same_experts, dp.gather_stream, name_of_rank);
  }
  if (dp.expert.count > 0) detail::check_group(*dp.sequences, 14, along({Axis::cp, Axis::tp}), compute, name_of_rank);
  const std::vector<int> column = along({Axis::pp});
  const bool end = dp.rank == column.front() || dp.rank == column.back();
  const std::vector<int> ends = end ? std::vector{column.front(), column.back()} : std::vector{dp.rank};
  if (column.size() > 1) detail::check_group(*dp.tied_gradients, 9, ends, dp.reduce_stream, name_of_rank);
  if (dp.stage_scalars->size() > 1)
    detail::check_group(*dp.stage_scalars, 10, along(DataParallel::of_stage), compute, name_of_rank);
  detail::check_links(dp, name_of_rank);
}

}  // namespace llmc
