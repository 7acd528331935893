// --machine local: rates fitted to what ops took, a clock whose streams share processors, and plans by both.
#include "catch2.h"
#include "device/device.h"
#include "helpers.h"
#include "run/plan/local_machine.h"

using namespace llmc;

TEST_CASE("the rate of an op is that by which its samples were made, and has no part below zero", "[run][plan]") {
  const auto samples = [](const OpRate& r) {
    std::vector<detail::Sample> all;
    for (const auto& [bytes, flops] : {std::array{1e6, 5e6}, {5e5, 2e6}, {7e5, 9e6}, {1e6, 1e6}})
      all.push_back({bytes, flops, r.call + r.byte * bytes + r.flop * flops});
    return all;
  };
  for (const OpRate& r : {OpRate{1e-5, 1e-10, 1e-11}, {0, 2e-10, 0}, {3e-6, 0, 4e-12}}) {
    const OpRate fitted = detail::fit_rate(samples(r));
    REQUIRE(fitted.call == Catch::Approx(r.call).margin(1e-12));
    REQUIRE(fitted.byte == Catch::Approx(r.byte).margin(1e-17));
    REQUIRE(fitted.flop == Catch::Approx(r.flop).margin(1e-17));
  }
  // Less time for more bytes, as noise may have it: the bytes cost nothing, not less than nothing.
  const OpRate noisy = detail::fit_rate({{1e6, 0, 1.1e-4}, {2e6, 0, 1e-4}});
  REQUIRE((noisy.call > 0.9e-4 && noisy.byte == 0 && noisy.flop == 0));
  REQUIRE(detail::fit_rate({{0, 0, 2e-6}}).call == Catch::Approx(2e-6));
}

TEST_CASE("on shared processors, the streams of a rank work one after another", "[run][plan]") {
  Machine machine;
  machine.measured["work"] = {.call = 1};
  machine.links = {{.latency_s = 2}};
  const OpCost work{.name = "work", .bytes = 1}, transfer{.name = "move", .messages = 1, .group = "gradients"};
  for (const bool one_at_a_time : {false, true}) {
    machine.one_at_a_time = one_at_a_time;
    Device paper = Device{DeviceKind::cpu, 1}.on_paper();
    paper.machine = std::make_shared<const Machine>(machine);
    paper.links = std::make_shared<LinkTimes>();
    Arena scratch(paper);
    Stream compute(paper, scratch), side(paper, scratch, Precedence::communication);
    const auto run = [](Stream& stream, const OpCost& cost) { stream.run(cost, {}, [] {}); };
    run(compute, work);  // to 1
    side.wait(compute.record());
    run(side, transfer);  // to 3
    run(compute, work);   // beside it, or after it
    REQUIRE(compute.seconds() == (one_at_a_time ? 4 : 2));
    REQUIRE(side.seconds() == 3);
    REQUIRE(compute.exposed_seconds() == (one_at_a_time ? 2 : 0));
    if (one_at_a_time) REQUIRE(compute.exposed_by_group().at("gradients") == 2);
  }
}

TEST_CASE("a plan with --machine local measures once, says how long a step takes, and changes nothing else",
          "[run][plan]") {
  const TempDir dir;
  const std::string run = "--sample-every 0 --model d2 --vocab-size 257 -t 32 -b 2 --local-ranks 2 --zero-stage 3 ";
  const auto plan = [&](const std::string& more) {
    ProgramResult r = run_program("--plan " + run + more, "XDG_CACHE_HOME=" + (dir / "cache"));
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out;
  };
  const std::string without = plan(""), first = plan("--machine local --tokens 1M"), again = plan("--machine local");
  INFO(first);
  REQUIRE(first.find("measuring this machine") != std::string::npos);
  REQUIRE(again.find("measuring this machine") == std::string::npos);
  REQUIRE(first.find("time of a step on paper, by what was measured here") != std::string::npos);
  REQUIRE(first.find("exposed communication") != std::string::npos);
  REQUIRE(first.find("GPU-hours") == std::string::npos);
  const auto section = [](const std::string& out, const std::string& from, const std::string& to) {
    const size_t begin = out.find(from);
    return out.substr(begin, out.find(to, begin) - begin);
  };
  REQUIRE(section(without, "memory", "sent per rank") == section(again, "memory", "sent per rank"));

  // Another optimizer is another op, which is measured, too.
  REQUIRE(plan("--machine local --optimizer lion").find("measuring this machine") != std::string::npos);
  REQUIRE(read_whole(dir / "cache/train_gpt/local_machine.json").find("lion_update") != std::string::npos);

  const auto json = nlohmann::json::parse(plan("--machine local --json"));
  REQUIRE(json["step_seconds"].get<double>() > 0);
  REQUIRE(json["tokens_per_second"].get<double>() * json["step_seconds"].get<double>() == Catch::Approx(128));
  double ops = 0;
  for (const auto& op : json["stages"][0]["ops"]) ops += op["seconds"].get<double>();
  REQUIRE(ops <= Catch::Approx(json["step_seconds"].get<double>()));
}

TEST_CASE("--machine local refuses what it cannot measure", "[run][plan]") {
  const auto refused = [](const std::string& options, const std::string& why) {
    const ProgramResult r = run_program("--machine local " + options);
    INFO(r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(why) != std::string::npos);
  };
  refused("--plan --model d2 --device cuda", "--machine local measures processors");
  refused("--plan --model d2 --world-size 4 --local-ranks 2", "6 of 8 would be elsewhere");
  refused("--plan-auto --ranks 8", "use --plan");
  refused("--plan --model gpt2:124M -t 1024 -b 262144", "to be measured, and this machine has");
  refused("", "is for --plan");
}
