// The null device's clock: streams and events on paper, against times added up by hand.
#include "catch2.h"
#include "device/arena.h"
#include "helpers.h"

using namespace llmc;

namespace {

using Known = std::shared_ptr<const Machine>;

Device on_paper(const Known& machine = ideal_machine(100, 10, 8, 0.5)) {
  Device paper = Device{}.on_paper();
  paper.machine = machine;
  return paper;
}

void work(Stream& stream, double flops, double bytes) {
  stream.run({"work", flops, bytes}, {}, [] { throw Error("the null device has run an op"); });
}
void transfer(Stream& stream, int64_t messages, double link_bytes) {
  stream.run({"transfer", 0, 0, link_bytes, messages}, {}, [] { throw Error("the null device has run a transfer"); });
}

}  // namespace

TEST_CASE("two streams on paper take the time of their ops, and wait for each other's events", "[device][plan]") {
  const Device paper = on_paper();
  Arena scratch(paper);
  Stream compute(paper, scratch), side(paper, scratch);
  work(compute, 200, 5);  // 2 s of flops, 0.5 s of bytes
  REQUIRE(compute.seconds() == 2);
  const Event begun = compute.record();
  work(compute, 100, 30);  // 1 s of flops, 3 s of bytes
  REQUIRE(compute.seconds() == 5);

  side.wait(begun);
  REQUIRE(side.seconds() == 2);
  REQUIRE(side.exposed_seconds() == 2);
  transfer(side, 2, 32);  // 2 x 0.5 s + 4 s
  REQUIRE(side.seconds() == 7);
  const Event arrived = side.record();
  transfer(side, 0, 0);  // a group of one has no messages
  work(side, 0, 0);
  REQUIRE(side.seconds() == 7);

  // 3 of the 5 seconds of the transfer are behind compute's own work.
  compute.wait(arrived);
  REQUIRE(compute.seconds() == 7);
  REQUIRE(compute.exposed_seconds() == 2);
  compute.wait(begun);  // long past
  REQUIRE(compute.seconds() == 7);
  transfer(compute, 1, 8);  // on the stream that computes nothing hides it
  REQUIRE(compute.seconds() == 8.5);
  REQUIRE(compute.exposed_seconds() == 3.5);
  // An event says when it was recorded, not how far its stream has come since.
  work(side, 1000, 0);
  const Event copy = arrived;
  compute.wait(copy);
  compute.wait(Event());
  REQUIRE(compute.seconds() == 8.5);
  REQUIRE(compute.seconds() - compute.exposed_seconds() == 5);  // its work
}

TEST_CASE("the ledger of a null stream has the seconds of its clock", "[device][plan]") {
  const Device paper = on_paper();
  Arena scratch(paper);
  Stream stream(paper, scratch);
  OpLedger ledger;
  stream.set_ledger(&ledger);
  work(stream, 200, 5);
  work(stream, 100, 30);
  transfer(stream, 2, 32);
  REQUIRE(ledger.at("work").seconds == 5);
  REQUIRE(ledger.at("transfer").seconds == 5);
}

TEST_CASE("without rates no time passes on paper, and at infinite rates none", "[device][plan]") {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  for (const Known& machine : {Known(), ideal_machine(infinite, infinite)}) {
    const Device paper = on_paper(machine);
    Arena scratch(paper);
    Stream a(paper, scratch), b(paper, scratch);
    work(a, 200, 5);
    transfer(a, 2, 32);
    b.wait(a.record());
    for (const Stream* s : {&a, &b}) REQUIRE((s->seconds() == 0 && s->exposed_seconds() == 0));
  }
  REQUIRE_THROWS_AS(ideal_machine(0, 1), Error);
  REQUIRE_THROWS_AS(ideal_machine(1, 0), Error);
  REQUIRE_THROWS_AS(ideal_machine(1, 1, 0), Error);
  REQUIRE_THROWS_AS(ideal_machine(1, 1, 1, -1), Error);
}

TEST_CASE("exposed time is booked by the group whose transfers a stream makes or waits for", "[device][plan]") {
  const Device paper = on_paper();
  Arena scratch(paper);
  Stream compute(paper, scratch), side(paper, scratch);
  const auto transfer_of = [](Stream& stream, const char* group, double bytes) {
    stream.run({.name = "send", .link_bytes = bytes, .messages = 1, .group = group}, {}, [] {});
  };
  transfer_of(compute, "tensors", 4);  // 0.5 + 0.5 s, its own
  transfer_of(side, "gradients", 28);  // 4 s, of which 2 pass beside work
  const Event reduced = side.record();
  work(compute, 100, 0);
  compute.wait(reduced);
  work(side, 600, 0);  // the next event ends work, but it is that of a stream of transfers
  REQUIRE(compute.exposed_by_group() == std::map<std::string, double>{{"gradients", 2}, {"tensors", 1}});
  REQUIRE(compute.seconds() == 4);
}

TEST_CASE("collectives of side streams that share a link go one after another, those of the compute stream at once",
          "[device][plan]") {
  Machine shared = *ideal_machine(100, 10);
  shared.links = {{.ranks = 2, .bytes_per_s = 8}, {.bytes_per_s = 4}};
  shared.share_links = true;
  Device paper = on_paper(std::make_shared<const Machine>(shared));
  paper.links = std::make_shared<LinkTimes>();
  Arena scratch(paper);
  Stream compute(paper, scratch), gather(paper, scratch, Precedence::communication),
      reduce(paper, scratch, Precedence::communication);
  const std::vector<int> near = {0, 1}, far = {0, 2};
  const auto transfer_to = [](Stream& stream, const std::vector<int>& members, double bytes) {
    stream.run({.name = "broadcast", .link_bytes = bytes, .messages = 1, .members = &members}, {}, [] {});
  };
  transfer_to(gather, near, 16);  // 2 s
  transfer_to(reduce, far, 4);    // 1 s, through another tier
  REQUIRE((gather.seconds() == 2 && reduce.seconds() == 1));
  transfer_to(reduce, near, 8);  // after the first
  REQUIRE(reduce.seconds() == 3);
  transfer_to(compute, near, 8);
  REQUIRE(compute.seconds() == 1);
}

TEST_CASE("products fill tiles, and tiles the multiprocessors in waves", "[device][plan]") {
  Machine m;
  m.flops_per_s = 2.0 * 256 * 128 * 10, m.bytes_per_s = 1e30;  // ten multiprocessors do a step of K of a tile in 1 s
  m.units = 10;
  const auto seconds = [&](ProductShape p) {
    return m.seconds(
        {.name = "product", .flops = 2.0 * static_cast<double>(p.M * p.N * p.K * p.groups), .bytes = 1, .product = p});
  };
  // Ten tiles of 256 x 128 are one wave; an eleventh takes as long as ten more, unless smaller tiles divide better.
  REQUIRE(seconds({2560, 128, 100}) == Catch::Approx(100));
  REQUIRE(seconds({256, 1280, 100}) == Catch::Approx(100));
  REQUIRE(seconds({11 * 256, 128, 100}) > 100 * 1.1);
  REQUIRE(seconds({11 * 256, 128, 100}) <= 200);
  REQUIRE(seconds({2560 - 255, 128, 100}) <= 100);  // what is beside the matrix is computed, too
  REQUIRE(seconds({256 * 5, 128, 100, 2}) == Catch::Approx(100));
  // Groups of few rows fill little of a tile.
  REQUIRE(seconds({8, 128, 100, 10}) > 10 * seconds({80, 128, 100}) / 10);
  REQUIRE(seconds({1, 128, 100, 40}) == Catch::Approx(seconds({64, 128, 100, 40})));
  // A long sum is split among multiprocessors that would idle.
  REQUIRE(seconds({256, 128, 100'000}) < 100'000 / 4);
  REQUIRE(seconds({256, 128, 100'000}) >= 100'000 / 10);
  m.tile_fill = 20;
  REQUIRE(seconds({2560, 128, 100}) == Catch::Approx(120));
  m.op_s = 7;
  REQUIRE(seconds({2560, 128, 100}) == Catch::Approx(127));
}

TEST_CASE("attention is slower for short sequences and narrow heads, and as slow as its scores without flash kernels",
          "[device][plan]") {
  Machine m;
  m.flops_per_s = 100, m.bytes_per_s = 10;
  m.attention_share = 0.5, m.half_keys = 64, m.half_channels = 32;
  const auto seconds = [&](int64_t keys, int64_t channels) {
    return m.seconds({.name = "attention", .flops = 100, .bytes = 1, .attention = {keys, channels, 30}});
  };
  REQUIRE(seconds(64, 32) == Catch::Approx(1 / (0.5 * 0.5 * 0.5)));
  REQUIRE(seconds(192, 32) == Catch::Approx(1 / (0.5 * 0.75 * 0.5)));
  REQUIRE(seconds(1 << 30, 1 << 30) == Catch::Approx(2).epsilon(1e-6));
  m.score_bytes = 5;
  REQUIRE(seconds(64, 32) == Catch::Approx(2 / (0.5 * 0.5 * 0.5) + 30 * 5 / 10.0));
}

TEST_CASE("a transfer is as fast as the slowest link on its way", "[device][plan]") {
  Machine m;
  m.flops_per_s = m.bytes_per_s = 1;
  m.links = {{.ranks = 4, .bytes_per_s = 100, .latency_s = 1},
             {.ranks = 16, .bytes_per_s = 10, .latency_s = 5},
             {.bytes_per_s = 1, .latency_s = 9}};
  const auto path = [&](const std::vector<int>& members, Pattern pattern) {
    return m.path_of({.name = "transfer", .pattern = pattern, .members = &members});
  };
  using enum Pattern;
  REQUIRE(path({0, 1, 2, 3}, ring).bytes_per_s == 100);
  REQUIRE(path({0, 1, 2, 3}, ring).latency_s == 1);
  // Four members in each of two servers: NCCL's rings use four cards of each.
  REQUIRE(path({0, 1, 2, 3, 4, 5, 6, 7}, ring).bytes_per_s == 40);
  REQUIRE(path({0, 1, 2, 3, 4, 5, 6, 7}, ring).latency_s == Catch::Approx((6 * 1 + 2 * 5) / 8.0));
  REQUIRE(path({0, 1, 2, 3, 4, 5, 6, 7}, neighbours).bytes_per_s == 10);
  REQUIRE(path({0, 1, 2, 3, 4, 5, 6, 7}, all_to_all).bytes_per_s == Catch::Approx(10 * 7 / 4.0));
  REQUIRE(path({1, 5, 9, 13}, ring).bytes_per_s == 10);  // one in each server
  REQUIRE(path({3, 19}, neighbours).bytes_per_s == 1);   // beyond 16
  REQUIRE(path({3, 19}, neighbours).latency_s == 9);
  REQUIRE(path({0, 4, 16, 20}, ring).bytes_per_s == 2);  // two members below the last tier
  REQUIRE(path({}, ring).bytes_per_s == 100);
  m.rails = false;
  REQUIRE(path({0, 1, 2, 3, 4, 5, 6, 7}, ring).bytes_per_s == 10);
}
