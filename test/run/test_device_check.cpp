// --check-devices: which ranks are named, of given speeds.
#include "catch2.h"
#include "run/reports/device_check.h"
#include "tiny_run.h"

using namespace llmc;

TEST_CASE("a device that is much slower than the others is named, with what it is slow at", "[run][failures]") {
  const auto slow = [](std::vector<DeviceSpeed> speeds) {
    return slow_devices(speeds, [](int rank) { return formatted("rank {}", rank); });
  };
  const DeviceSpeed usual{600e12, 3000e9};
  REQUIRE(slow({usual}).empty());
  REQUIRE(slow({usual, {460e12, 2300e9}, usual}).empty());  // 0.76 of it
  REQUIRE(slow({usual, usual, {440e12, 3000e9}, usual}) ==
          std::vector<std::string>{"rank 2 is slow: 440 TFLOP/s in a product, 600 is the median of the others"});
  REQUIRE(slow({{600e12, 1000e9}, usual}) ==
          std::vector<std::string>{"rank 0 is slow: 1e+03 GB/s in a copy, 3e+03 is the median of the others"});
  REQUIRE(slow({usual, {}, usual, {300e12, 100e9}}).size() == 2);  // one that could not be measured
  REQUIRE(said(tiny(TempDir() / "run", "--max-steps 1 --local-ranks 2 --check-devices")).find("--check-devices: ") !=
          std::string::npos);
}
