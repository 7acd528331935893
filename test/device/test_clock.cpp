// The null device's clock: streams and events on paper, against times added up by hand.
#include "catch2.h"
#include "device/arena.h"
#include "helpers.h"

using namespace llmc;

namespace {

constexpr Rates rates{.flops_per_s = 100, .bytes_per_s = 10, .link_bytes_per_s = 8, .link_latency_s = 0.5};

Device on_paper(const std::optional<Rates>& r) {
  Device paper = Device{}.on_paper();
  paper.rates = r;
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
  const Device paper = on_paper(rates);
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
  const Device paper = on_paper(rates);
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
  for (const std::optional<Rates>& r :
       {std::optional<Rates>(), std::optional(Rates{infinite, infinite, infinite, 0})}) {
    const Device paper = on_paper(r);
    Arena scratch(paper);
    Stream a(paper, scratch), b(paper, scratch);
    work(a, 200, 5);
    transfer(a, 2, 32);
    b.wait(a.record());
    for (const Stream* s : {&a, &b}) REQUIRE((s->seconds() == 0 && s->exposed_seconds() == 0));
  }
  Arena scratch(on_paper({}));
  for (const Rates& r : {Rates{0, 1, 1, 0}, Rates{1, 0, 1, 0}, Rates{1, 1, 0, 0}, Rates{1, 1, 1, -1}})
    REQUIRE_THROWS_AS(Stream(on_paper(r), scratch), Error);
}
