// Datasheet peaks by the GPU names that drivers report, and the cache of those that are measured.
#include "catch2.h"
#include "helpers.h"
#include "run/plan/report_plan.h"
#include "run/reports/report.h"
#include "run/setup.h"

using namespace llmc;

namespace {

struct Chip {
  const char* name;
  std::optional<double> bf16, fp8, bandwidth;
};

}  // namespace

TEST_CASE("a step that is faster than the measured peak raises it, so that no share of it is above 1", "[run][peaks]") {
  Peaks cpu{.measured = 2e12, .promised = 2e12, .source = Peaks::from_measurement};
  REQUIRE(!cpu.raise(1.9e12));
  REQUIRE(cpu.raise(2.5e12));
  REQUIRE((cpu.measured == 2.5e12 && cpu.promised == 2.5e12));
  Peaks named{.measured = 2e12, .promised = 3e12, .source = "--peak-tflops"};
  REQUIRE(named.raise(2.5e12));
  REQUIRE(named.promised == 3e12);
  REQUIRE(!Peaks().raise(1));  // of a rank that reports nothing
}

TEST_CASE("a cache of measurements outlives hosts whose clocks differ", "[run][peaks]") {
  const TempDir dir;
  const char* const before = getenv("XDG_CACHE_HOME");
  const std::string former = before == nullptr ? "" : before;
  setenv("XDG_CACHE_HOME", dir.path().c_str(), 1);
  constexpr double an_hour = 3600;
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::filesystem::create_directories(cache_directory());
  std::ofstream(cache_directory() + "/x.json")
      << nlohmann::json{{"new", {{"measured_at", now - 100}}},        {"ahead", {{"measured_at", now + 30}}},
                        {"far ahead", {{"measured_at", now + 5000}}}, {"old", {{"measured_at", now - 5000}}},
                        {"unknown", {{"measured_at", "today"}}},      {"damaged", 3}};
  const auto found = [&](auto... seconds) {
    std::string all;
    for (const char* key : {"new", "ahead", "far ahead", "old", "unknown", "damaged", "mine"})
      if (!MeasurementCache("x.json").find(key, seconds...).is_null())
        all += std::string(all.empty() ? "" : ", ") + key;
    return all;
  };
  REQUIRE(found() == "new, ahead, far ahead, old, unknown");
  REQUIRE(found(an_hour) == "new, ahead");
  MeasurementCache("x.json").keep("mine", {{"flops", 1}});
  REQUIRE(found() == "new, ahead, far ahead, old, unknown, mine");
  MeasurementCache("x.json").keep("mine", {{"flops", 2}}, an_hour);
  REQUIRE(found() == "new, ahead, far ahead, mine");
  before == nullptr ? unsetenv("XDG_CACHE_HOME") : setenv("XDG_CACHE_HOME", former.c_str(), 1);
}

TEST_CASE("a profile ends with each op's time and its share of a roof that was measured here", "[run][peaks]") {
  const TempDir dir;
  for (const char* ranks : {"1", "2"}) {
    const ProgramResult done =
        run_program(std::string("--profile --local-ranks ") + ranks + " --train-data " + tiny_data +
                    " --model d1 --n-embd 32 --n-head 2 --vocab-size 257 --seq-len 16 " +
                    "--batch-size 2 --max-steps 2 --out-dir " + (dir / ranks));
    INFO(done.out << done.err);
    REQUIRE(done.status == 0);
    const auto table = done.out.find("ops per rank, steps 1 to 2; roof: ");
    REQUIRE(table != std::string::npos);
    REQUIRE(done.out.find("ops per rank", table + 1) == std::string::npos);  // of one rank
    double of_all = 0;
    for (const char* op : {"linear_forward", "attention_backward", "adamw_update"}) {
      const auto line = done.out.find(std::string("\n  ") + op + " ", table);
      REQUIRE(line != std::string::npos);
      const std::string text = done.out.substr(line + 1, done.out.find('\n', line + 1) - line - 1);
      const auto share = text.find(" ms/step");
      of_all += std::stod(text.substr(share + 8));
      REQUIRE(text.ends_with("% of roof"));
      REQUIRE(std::stod(text.substr(text.find("GB/s") + 4)) > 0);
    }
    REQUIRE((of_all > 0 && of_all < 100));
  }
}

TEST_CASE("processes that share processors have their peak once", "[run][peaks]") {
  Options o;
  const auto times = [&](int64_t processes, int64_t sharers, int threads, int processors) {
    o.place.processes = processes, o.place.sharers = sharers;
    return devices_in_use({.threads = threads}, o, processors);
  };
  REQUIRE(times(1, 1, 4, 4) == 1);
  REQUIRE(times(4, 4, 1, 2) == 2);  // four of one thread on two processors
  REQUIRE(times(2, 2, 2, 4) == 2);  // each its half
  REQUIRE(times(2, 1, 4, 4) == 2);  // on a host each, or bound to processors of their own
  REQUIRE(times(8, 4, 1, 2) == 4);  // on two hosts
  REQUIRE(times(2, 2, 4, 4) == 1);  // --threads 4 for both
  REQUIRE(times(1, 1, 8, 4) == 1);  // --threads beyond the processors: so it was measured
  // Each rank has a thread, whatever --threads says.
  const auto working = [](int64_t ranks, int threads, int processors) {
    return working_device({.threads = threads}, Place{.local_ranks = ranks}, processors).threads;
  };
  REQUIRE((working(2, 1, 4) == 2 && working(8, 1, 4) == 4 && working(2, 4, 4) == 4 && working(1, 8, 4) == 8));
  REQUIRE(more_ranks_notice(2, 2, 2).empty());
  REQUIRE(more_ranks_notice(2, 1, 2) == "notice: 2 ranks have a thread each, though --threads is 1");
  REQUIRE(more_ranks_notice(4, 1, 2) ==
          "notice: 4 ranks, of a thread each, share 2 processors: fine for tests and for learning, not faster than 2 "
          "ranks");
  // A rank may use memory while the others multiply: it has all of its speed.
  const Peaks of_rank = Peaks{.measured = 4e12, .bandwidth = 6e10, .source = ""}.of_rank(2);
  REQUIRE((of_rank.measured == 2e12 && of_rank.bandwidth == 6e10));
}

TEST_CASE("processes of a host that have more threads than processors are told so", "[run][peaks]") {
  const auto notice = [](int64_t sharers, int64_t threads, int64_t processors) {
    Place place;
    place.processes = place.sharers = sharers;
    return detail::crowded_notice(place, threads, processors);
  };
  REQUIRE(notice(4, 1, 2).find("4 processes of this host, with 1 thread each, share 2 processors") !=
          std::string::npos);
  REQUIRE(!notice(2, 4, 4).empty());  // no more processes than processors, but too many threads
  REQUIRE(notice(2, 2, 4).empty());
  REQUIRE(notice(1, 8, 4).empty());  // one process, or each with processors of its own
}

TEST_CASE("a GPU is recognised by the driver's name for it", "[run][peaks]") {
  const std::optional<double> na;
  const Chip chips[] = {
      {"NVIDIA H100 80GB HBM3", 989.5, 1979, 3350},
      {"NVIDIA H100 PCIe", 756.5, 1513, 2000},
      {"NVIDIA H100 NVL", 835.5, 1670.5, 3900},
      {"NVIDIA H200", 989.5, 1979, 4800},
      {"NVIDIA H200 NVL", 835.5, 1670.5, 4800},
      {"NVIDIA GH200 480GB", 989.5, 1979, 4000},
      {"NVIDIA GH200 120GB", 989.5, 1979, 4000},
      {"NVIDIA GH200 144G HBM3e", 989.5, 1979, 4900},
      {"NVIDIA B200", 2250, 4500, 8000},
      {"NVIDIA GB200", 2500, 5000, 8000},
      {"NVIDIA B300 SXM6 AC", 2250, 4500, 8000},
      {"NVIDIA A100-SXM4-80GB", 312, na, 2039},
      {"NVIDIA A100-SXM4-40GB", 312, na, 1555},
      {"A100-SXM4-40GB", 312, na, 1555},  // as named by drivers of 2020
      {"NVIDIA A100 80GB PCIe", 312, na, 1935},
      {"NVIDIA A100-PCIE-40GB", 312, na, 1555},
      {"NVIDIA A10", 125, na, 600},
      {"NVIDIA L4", 121, 242.5, 300},
      {"NVIDIA L40", 181.05, 362, 864},
      {"NVIDIA L40S", 362.05, 733, 864},
      {"A100-SXM-80GB", 312, na, 2039},
      {"NVIDIA GeForce RTX 3090", 71, na, 936},
      {"NVIDIA GeForce RTX 4090", 165.2, 330.3, 1008},
      {"NVIDIA GeForce RTX 4070", 58.2, 116.5, 504},
      {"NVIDIA GeForce RTX 4070 Ti", 80.1, 160.2, 504},
      {"NVIDIA GeForce RTX 4070 SUPER", 71, 142, 504},
      {"NVIDIA GeForce RTX 4070 Ti SUPER", 88.2, 176.5, 672},
      {"NVIDIA GeForce RTX 5090", 209.5, 419, 1792},
      {"NVIDIA RTX A6000", 154.8, na, 768},
      {"NVIDIA RTX 6000 Ada Generation", 364.2, 728.5, 960},
      {"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9, 877.8, 1792},
      {"NVIDIA GB10", na, na, 273},
  };
  for (const Chip& chip : chips) {
    INFO(chip.name);
    const auto peaks = gpu_peaks(chip.name);
    REQUIRE(peaks.has_value());
    EXPECT(peaks->bf16 == chip.bf16);
    EXPECT(peaks->fp8 == chip.fp8);
    EXPECT(peaks->bandwidth == chip.bandwidth);
  }
}

TEST_CASE("an unlisted GPU does not match a similar row", "[run][peaks]") {
  for (const char* name : {"NVIDIA GeForce RTX 4090 Laptop GPU",
                           "NVIDIA GeForce RTX 4090 D",
                           "NVIDIA GeForce RTX 5090 D v2",
                           "NVIDIA GeForce RTX 3060 Lite",
                           "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
                           "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
                           "NVIDIA A100-SXM-64GB",
                           "NVIDIA A100X",
                           "NVIDIA A10G",
                           "NVIDIA A10-24Q",
                           "GRID A100-10C",
                           "NVIDIA H20-3e",
                           "NVIDIA H100",
                           "NVIDIA RTX PRO 6000 Blackwell",
                           "NVIDIA RTX 6000",
                           "Quadro RTX 6000",
                           "NVIDIA Thor",
                           "AMD Instinct MI300X",
                           "NVIDIA",
                           ""}) {
    INFO(name);
    EXPECT(!gpu_peaks(name).has_value());
  }
}

TEST_CASE("a plan's clock takes a GPU's rates from its datasheet, or has none", "[run][peaks]") {
  const auto machine = [](const char* gpu, DType dtype, int ranks) {
    return datasheet_machine(*gpu_peaks(gpu), dtype, ranks);
  };
  const auto h100 = machine("NVIDIA H100 80GB HBM3", DType::bf16, 8);
  REQUIRE(h100 != nullptr);
  REQUIRE((h100->flops_per_s == 989.5e12 && h100->bytes_per_s == 3350e9));
  REQUIRE((h100->links.size() == 1 && h100->links[0].bytes_per_s == 450e9 && h100->links[0].latency_s == 0));
  EXPECT(!machine("NVIDIA H100 80GB HBM3", DType::fp32, 8));
  EXPECT(machine("NVIDIA L4", DType::bf16, 1) != nullptr);  // alone it needs no link
  EXPECT(!machine("NVIDIA L4", DType::bf16, 2));
  EXPECT(!machine("NVIDIA GB10", DType::bf16, 1));
}
