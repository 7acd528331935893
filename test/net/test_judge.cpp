// net/: which rank is to blame when ranks wait, as a function of their boards.
#include <thread>

#include "catch2.h"
#include "comm/mesh.h"
#include "core/rng.h"
#include "helpers.h"
#include "net/watching/judge.h"
#include "net/wire/control.h"

using namespace llmc;

namespace {

const std::vector<int> all = {0, 1, 2, 3};

// Four ranks that have trained for a while; nobody waits.
struct Ranks {
  std::vector<Seen> seen = std::vector<Seen>(4);
  Ranks() {
    for (Seen& s : seen) s.state.step = 812, s.state.updates = 811, s.still = 100;
  }
  Seen& operator[](int rank) { return seen[static_cast<size_t>(rank)]; }
  // In this group, a rank has begun so many collectives, and waits in the last one.
  Ranks& reached(int rank, const std::string& group, const std::vector<int>& members, int64_t begun,
                 std::optional<double> waiting = std::nullopt, int world = 1) {
    const std::string what = formatted("the all-gather of unit {}.{}", group, begun);
    (*this)[rank].state.groups.push_back({group, world, members, begun, waiting, what});
    return *this;
  }
  Ranks& waits(int rank, const std::string& group, const std::vector<int>& members, int64_t begun, double seconds) {
    return reached(rank, group, members, begun, seconds);
  }
  Ranks& silent(int rank, double seconds) {
    (*this)[rank].silent = seconds;
    (*this)[rank].stale = seconds > 4;
    return *this;
  }
  std::string verdict() const {
    const NameOfRank name = [](int rank) { return formatted("rank {} on HOST", rank); };
    return Judge(seen, {.init = 60, .comm = 30}, name).verdict().value_or("");
  }
};

}  // namespace

TEST_CASE("who has not arrived is named, with what the others wait in", "[net][failures]") {
  Ranks ranks;
  for (const int r : {0, 1, 3}) ranks.waits(r, "w", all, 7, 30.6);
  ranks.reached(2, "w", all, 6);
  const std::string line =
      "rank 2 on HOST has not arrived at the all-gather of unit w.7, step 812 (waited 31 s, --comm-timeout 30)";
  REQUIRE(ranks.verdict() == line);
  SECTION("whether its process has stopped or only hangs") { REQUIRE(ranks.silent(2, 40).verdict() == line); }
  SECTION("also if it has never joined the group") {
    ranks[2].state.groups.clear();
    REQUIRE(ranks.verdict() == line);
  }
  SECTION("and that it is writing a checkpoint") {
    ranks[2].state.saving = true;
    REQUIRE(ranks.verdict() == line + "; it is writing a checkpoint: does the file system of --out-dir still answer?");
  }
  SECTION("unless it is busy") {
    ranks[2].still = 29;
    REQUIRE(ranks.verdict() == "");
  }
  SECTION("before the first update --init-timeout holds") {
    for (Seen& s : ranks.seen) s.state.updates = 0;
    REQUIRE(ranks.verdict() == "");
    ranks[3].state.groups[0].waiting = 60;
    REQUIRE(ranks.verdict().ends_with("unit w.7, step 812 (waited 60 s, --init-timeout 60)"));
  }
}

TEST_CASE("nobody is blamed while nobody has waited for long", "[net][failures]") {
  Ranks ranks;
  for (const int r : {0, 1, 3}) ranks.waits(r, "w", all, 7, 29.9);
  ranks.reached(2, "w", all, 6);
  REQUIRE(ranks.verdict() == "");
  REQUIRE(Ranks().verdict() == "");
}

TEST_CASE("a chain of waits leads to who waits for nobody, in whatever group", "[net][failures]") {
  Ranks ranks;
  ranks.waits(0, "a", {0, 1}, 5, 31).reached(1, "a", {0, 1}, 4);
  ranks.waits(1, "b", {1, 2}, 9, 10).reached(2, "b", {1, 2}, 8);
  ranks.waits(2, "c", {2, 3}, 2, 3).reached(3, "c", {2, 3}, 1);
  REQUIRE(ranks.verdict().starts_with("rank 3 on HOST has not arrived at the all-gather of unit c.2"));
  // It, too, may wait: for something at which all have arrived by now.
  ranks.waits(3, "b", {1, 3}, 4, 1).reached(1, "b", {1, 3}, 4);
  REQUIRE(ranks.verdict().starts_with("rank 3 on HOST has not arrived at the all-gather of unit c.2"));
}

TEST_CASE("a rank that waits in two groups at once is not excused by the first of them", "[net][failures]") {
  // A stage of a pipeline: it waits for a gradient of the next one, which waits for its output, and for its own input.
  Ranks ranks;
  ranks.waits(2, "back", {2, 3}, 4, 33).reached(3, "back", {2, 3}, 3);
  ranks.waits(3, "forth", {2, 3}, 6, 32).reached(2, "forth", {2, 3}, 5);
  ranks.waits(2, "into", {1, 2}, 6, 31).reached(1, "into", {1, 2}, 5);
  const std::string line = "rank 1 on HOST has not arrived at the all-gather of unit into.6, step 812 (waited 33 s";
  REQUIRE(ranks.verdict().starts_with(line));
  REQUIRE(ranks.silent(1, 33).verdict().starts_with(line));
  ranks[1].still = 29;  // busy
  REQUIRE(ranks.verdict() == "");
}

TEST_CASE("groups of one name with other members are other groups", "[net][failures]") {
  for (int culprit = 0; culprit < 4; ++culprit) {  // 2 replicas of 2 shards
    Ranks ranks;
    for (int r = 0; r < 4; ++r) {
      const std::vector<int> shard = r < 2 ? std::vector{0, 1} : std::vector{2, 3}, replica = {r % 2, r % 2 + 2};
      const bool is = r == culprit, beside = r / 2 == culprit / 2;
      // The culprit's neighbour waits for it within the shard group, the others in the next collective: over replicas.
      ranks.reached(r, "gradients", shard, is ? 3 : 4, !is && beside ? std::optional(40.0) : std::nullopt);
      ranks.reached(r, "replicas", replica, beside ? 3 : 4, beside ? std::nullopt : std::optional(40.0));
    }
    REQUIRE(ranks.verdict().starts_with(formatted("rank {} on HOST has not arrived", culprit)));
  }
}

TEST_CASE("what a stopped process said last does not clear it", "[net][failures]") {
  Ranks ranks;
  for (const int r : {1, 2, 3}) ranks.waits(r, "w", all, 7, 33);
  SECTION("it waited for something at which all have arrived") {
    ranks.reached(0, "w", all, 6, 1.0).silent(0, 34);
    REQUIRE(ranks.verdict().starts_with("rank 0 on HOST has not arrived at the all-gather of unit w.7, step 812"));
  }
  SECTION("it waited for somebody who was late") {
    ranks.reached(0, "w", all, 6).waits(0, "x", {0, 1}, 2, 1).reached(1, "x", {0, 1}, 1).silent(0, 34);
    REQUIRE(ranks.verdict().starts_with("rank 0 on HOST has not arrived at the all-gather of unit w.7"));
  }
  SECTION("it is within what the others wait in") {
    ranks.waits(0, "w", all, 7, 1).silent(0, 34);
    REQUIRE(ranks.verdict().starts_with("rank 0 on HOST has not finished the all-gather of unit w.7, step 812"));
  }
  SECTION("of several, the one that fell silent first") {
    ranks.reached(0, "w", all, 6).silent(0, 31);
    ranks[2].state.groups[0] = {"w", 1, all, 6, std::nullopt, "it"};
    ranks.silent(2, 36);
    REQUIRE(ranks.verdict().starts_with("rank 2 on HOST has not arrived"));
  }
}

TEST_CASE("a process that says nothing is named even if nobody waits for it", "[net][failures]") {
  Ranks ranks;
  ranks.silent(3, 34);
  REQUIRE(ranks.verdict() == "");
  ranks.silent(3, 36);
  REQUIRE(ranks.verdict() == "rank 3 on HOST has said nothing for 36 s (--comm-timeout 30)");
  ranks[3].ended = true;
  REQUIRE(ranks.verdict() == "");
}

TEST_CASE("judges count as silent once each of them that has not ended is", "[net][failures]") {
  SilenceOfJudges silence;
  const auto after = [&](int seconds, const std::set<int>& heard, const std::set<int>& ended = {}) {
    std::vector<int> silent;
    for (int i = 0; i < seconds; ++i) silent = silence.add(1, heard, ended, 10);
    return silent;
  };
  const std::vector<int> nobody;
  REQUIRE(after(15, {1}) == nobody);  // process 0 has been silent for 15 s
  REQUIRE(after(9, {}) == nobody);
  REQUIRE(after(1, {}) == std::vector<int>{0, 1});  // both clocks run at the same time
  REQUIRE(after(1, {0}) == nobody);
  REQUIRE(after(9, {}, {1}) == nobody);
  REQUIRE(after(1, {}, {1}) == std::vector<int>{0});
  REQUIRE(after(1, {}, {0, 1}) == nobody);
}

TEST_CASE("ranks that wait for each other, or for the network, do not wait forever", "[net][failures]") {
  Ranks ranks;
  ranks.waits(0, "a", {0, 1}, 5, 31).reached(1, "a", {0, 1}, 4);
  ranks.waits(1, "b", {0, 1}, 9, 31).reached(0, "b", {0, 1}, 8);
  REQUIRE(ranks.verdict().starts_with("rank 0 on HOST waits for rank 1 on HOST at the all-gather of unit a.5"));
  Ranks stuck;
  for (int r = 0; r < 4; ++r) stuck.waits(r, "w", all, 7, 31);
  REQUIRE(stuck.verdict().ends_with("where all ranks have arrived: no data passes between them"));
  stuck[1].still = 5;  // bytes come through
  REQUIRE(stuck.verdict() == "");
}

TEST_CASE("who is in a later World has arrived at all of the earlier one", "[net][failures]") {
  Ranks ranks;
  ranks.reached(0, "w", {0, 1}, 7, 31.0, 1)
      .reached(1, "w", {0, 1}, 2, std::nullopt, 2)
      .reached(1, "v", {1, 2}, 1, 31.0, 2);
  ranks.reached(2, "v", {1, 2}, 0, std::nullopt, 2);
  REQUIRE(ranks.verdict().starts_with("rank 0 on HOST waits in the all-gather of unit w.7"));
  ranks[0].state.groups.clear();
  REQUIRE(ranks.verdict().starts_with("rank 2 on HOST has not arrived at the all-gather of unit v.1"));
}

TEST_CASE("a board tells what ranks do, across the network", "[net][failures]") {
  Board board(4, 2, {0, 4, 8});
  board.begin_world();
  const auto place = board.join(5, "gradients", {1, 3, 5, 6, 7});
  KnownMembers known;
  const auto send = [&](double seconds) { return ranks_from(parts_of(board.read(seconds)), known); };
  board.at_step(5, 12);
  std::vector<RankState> states = send(1);
  REQUIRE(states.size() == 2);
  REQUIRE(states[0].groups.at(0).members.ranks() == std::vector{0, 4, 8});
  REQUIRE((states[1].step == 12 && !states[1].saving));
  board.saving(5, true);
  states = send(1);
  REQUIRE((states[1].saving && !states[0].saving));
  const auto group = [&] { return states[1].groups.at(0); };
  REQUIRE((group().name == "gradients" && group().world == 1 && group().begun == 0 && !group().waiting));
  REQUIRE(group().members.ranks() == std::vector{1, 3, 5, 6, 7});
  std::thread attendant([&] {
    try {
      const Attending attending(place.get(), "reduce_scatter", "unit ", "blocks.3");
      for (const double waited : {0.0, 1.5, 3.0}) {  // from when it was first seen
        states = send(1.5);
        CHECK(group().begun == 1 && group().waiting == waited && group().what == "the reduce-scatter of unit blocks.3");
      }
      throw 1;
    } catch (int) {
    }
  });
  attendant.join();
  states = send(1);
  REQUIRE(group().waiting == 4.0);  // what ended with an exception has not ended for the others
  { const Attending attending(place.get(), "all_gather", "", "x"); }
  states = send(1);
  REQUIRE((group().begun == 2 && !group().waiting));
  board.begin_world();
  REQUIRE(send(1)[1].groups.empty());
  for (const std::vector<std::string>& wrong :
       {std::vector<std::string>{"1"},
        {"1", "1", "0", "0", "1", "1", "name", "1", "5-2", "1", "", ""},
        {"1", "1", "0", "0", "1", "1", "name", "1", "0-999999999999", "1", "", ""},
        {"1", "1", "0", "0", "1", "1", "name", "1", "9223372036854775807", "1", "", ""},
        {"1", "1", "0", "0", "1", "1", "name", "1", "0-8/0", "1", "", ""},
        {"1", "1", "0", "0", "1", "1", "name", "1", "0-8/-2", "1", "", ""},
        {"1", "1", "0", "0", "1", "1", "name", "1", "0-8/", "1", "", ""},
        {"1", "1", "0", "0", "1", "1", "name", "1", "0-8/9223372036854775807", "1", "", ""},
        {"1", "1", "0", "0", "1", "1", "name", "1", "0-2147483646/2", "1", "", ""},
        {"1", "1", "0", "0", "1", "2"}})
    REQUIRE_THROWS(ranks_from(wrong, known));
}

TEST_CASE("ranks are written as runs, with a stride where it is not 1", "[net][failures]") {
  const std::pair<std::vector<int>, const char*> written[] = {{{7}, "7"},
                                                              {{0, 1}, "0-1"},
                                                              {{0, 1, 2, 3, 8}, "0-3 8"},
                                                              {{3, 8}, "3 8"},
                                                              {{0, 4, 8, 9}, "0-8/4 9"},
                                                              {{0, 4, 5, 8, 9}, "0 4-5 8-9"},
                                                              {{1, 2, 10, 14, 18, 100}, "1-2 10-18/4 100"}};
  for (const auto& [ranks, text] : written) {
    EXPECT(runs_of(ranks) == text);
    EXPECT(from_runs(text) == ranks);
  }
  const Philox rng(1, "runs of ranks");
  for (uint64_t i = 0, at = 0; i < 2000; ++i) {  // in few steps, so that there are many runs
    std::vector<int> ranks = {static_cast<int>(rng.bits(at++) % 3)};
    const uint64_t steps = 1 + i % 4;
    while (ranks.size() < 1 + i % 40) ranks.push_back(ranks.back() + 1 + static_cast<int>(rng.bits(at++) % steps));
    INFO(runs_of(ranks));
    REQUIRE(from_runs(runs_of(ranks)) == ranks);
  }
}

TEST_CASE("a board is a short message however many ranks there are, and whatever their groups", "[net][failures]") {
  for (const int tp : {1, 2, 8})
    for (const int cp : {1, 4}) {
      const Mesh mesh(
          {{Axis::pp, 4}, {Axis::replicate, 2}, {Axis::shard, 4096 / cp / tp}, {Axis::cp, cp}, {Axis::tp, tp}});
      REQUIRE(mesh.size() == 32768);
      constexpr int local = 8;
      std::vector<int> firsts;
      for (int rank = 0; rank < mesh.size(); rank += local) firsts.push_back(rank);
      Board board(16384, local, firsts);
      for (int rank = 16384; rank < 16384 + local; ++rank)
        for (const GroupRow& row : group_table) board.join(rank, row.name, mesh.group(rank, row.axes));
      const std::vector<RankState> states = board.read(1);
      const Message message{Kind::board, parts_of(states)};
      INFO("tp " << tp << ", cp " << cp);
      REQUIRE(message.encoded().size() < 16 << 10);
      KnownMembers known;
      const std::vector<RankState> there = ranks_from(message.parts, known), again = ranks_from(message.parts, known);
      for (size_t r = 0; r < local; ++r)
        for (size_t g = 0; g < states[r].groups.size(); ++g) {
          const std::vector<int>& members = there.at(r).groups.at(g).members.ranks();
          REQUIRE(members == states[r].groups[g].members.ranks());
          REQUIRE(&members == &again[r].groups[g].members.ranks());  // of each group, a judge keeps one list
        }
    }
}

TEST_CASE("a rank that computes for longer than the others is named with its factor", "[net][failures]") {
  Board board(0, 1, {0});
  double total = 50;  // the first update is not like the others
  for (int step = 0; step < 25; ++step) {
    board.step_done(0, total);
    total += step == 10 ? 9 : 0.2;
    REQUIRE((board.read(1)[0].busy > 0) == (step >= 20));
  }
  REQUIRE(std::abs(board.read(1)[0].busy - 0.2) < 1e-9);
  std::vector<Seen> ranks(4);
  const NameOfRank name = [](int rank) { return formatted("rank {} on HOST", rank); };
  for (Seen& s : ranks) s.state.busy = 0.2;
  REQUIRE(!straggler(ranks, name));
  ranks[2].state.busy = 0.29;
  REQUIRE(!straggler(ranks, name));
  ranks[2].state.busy = 0.36;
  REQUIRE(straggler(ranks, name) ==
          "notice: rank 2 on HOST computes 1.8 times as long as the others (median of 20 steps)");
  ranks[1].state.busy = 0;  // not known yet
  REQUIRE(!straggler(ranks, name));
}
