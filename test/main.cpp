// main() of every test program, and a listener that records the result of every test case in the file named by the
// environment variable TEST_NOTES. scripts/run_tests.sh counts these notes: a killed test program prints no summary,
// but its last note names the test case in which it died.
#define CATCH_CONFIG_RUNNER
#include "catch2.h"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>

namespace {

// One line when a test case starts, "started - NAME", and one when it ends, "passed|failed|skipped SECONDS NAME".
class Notes : public Catch::EventListenerBase {
 public:
  using Catch::EventListenerBase::EventListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo& test) override {
    name_ = test.name;
    start_ = Clock::now();
    write("started", "-");
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    const Catch::Counts& cases = stats.totals.testCases;
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    const char* fate = cases.failed ? "failed" : cases.passed || cases.failedButOk ? "passed" : "skipped";
    write(fate, std::to_string(seconds));
  }

 private:
  using Clock = std::chrono::steady_clock;

  void write(const std::string& fate, const std::string& seconds) {
    file_ << fate << ' ' << seconds << ' ' << name_ << std::endl;  // flushed: a crash loses what is in a buffer
  }

  std::string name_;
  Clock::time_point start_;
  std::ofstream file_{std::getenv("TEST_NOTES") ? std::getenv("TEST_NOTES") : "/dev/null", std::ios::app};
};
CATCH_REGISTER_LISTENER(Notes)

}  // namespace

int main(int argc, char** argv) { return Catch::Session().run(argc, argv); }
