// Which rows go to the ranks of their experts in which round.
#include "catch2.h"
#include "dist/expert_exchange.h"
#include "helpers.h"

using namespace llmc;

// Every row exactly once, from its sender to the rank of its expert, never more in a round than there is room for.
TEST_CASE("rounds of rows to experts have all of them once, and never more than the room") {
  const int P = 3;
  const int64_t E = 6;
  const std::vector<int64_t> counts = {4, 0, 2, 1, 0, 5, /**/ 0, 0, 7, 0, 0, 0, /**/ 3, 3, 3, 0, 0, 1};
  auto count = [&](int from, int64_t expert) { return counts[static_cast<size_t>(from * E + expert)]; };
  for (const int64_t room : {1, 4, 5, 10, 16, 100}) {
    INFO("room for " << room);
    const ExpertRounds rounds(counts, P, room);
    REQUIRE(rounds.rounds() == ceil_div(13, room));  // rank 1 gets most rows
    for (int to = 0; to < P; ++to) {
      std::vector<int64_t> next(P, 0);  // row of each sender's block that has not been sent
      std::vector<int64_t> received(static_cast<size_t>(P * 2), 0);
      for (int round = 0; round < rounds.rounds(); ++round) {
        const auto blocks = rounds.blocks_received(to, round);
        const auto by_expert = rounds.counts_received(to, round);
        int64_t in_round = 0;
        for (int from = 0; from < P; ++from) {
          int64_t block = 0;  // where the rows for `to` begin
          for (int before = 0; before < to; ++before) block += rounds.rows(from, before);
          const RowBlock sent = rounds.blocks_sent(from, round)[static_cast<size_t>(to)];
          if (sent.count > 0) REQUIRE(sent.begin == block + next[static_cast<size_t>(from)]);
          next[static_cast<size_t>(from)] += sent.count;
          REQUIRE(blocks[static_cast<size_t>(from)].begin == in_round);
          REQUIRE(blocks[static_cast<size_t>(from)].count == sent.count);
          in_round += sent.count;
          int64_t of_experts = 0;
          for (int64_t e = 0; e < 2; ++e) {
            const int32_t n = by_expert[static_cast<size_t>(from * 2 + e)];
            received[static_cast<size_t>(from * 2 + e)] += n;
            of_experts += n;
          }
          REQUIRE(of_experts == sent.count);
        }
        REQUIRE(in_round <= room);
      }
      for (int from = 0; from < P; ++from)
        for (int64_t e = 0; e < 2; ++e) REQUIRE(received[static_cast<size_t>(from * 2 + e)] == count(from, 2 * to + e));
    }
  }
  const ExpertRounds none(std::vector<int64_t>(18, 0), P, 4);
  REQUIRE(none.rounds() == 1);
  REQUIRE(none.blocks_sent(0, 0)[1].count == 0);
  REQUIRE_ERROR(ExpertRounds(counts, P, 0), "room for 0 rows");
}
