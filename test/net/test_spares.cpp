// net/: spares wait at the rendezvous for the place of a process that stays away (wait_as_spare()).
#include <algorithm>
#include <functional>
#include <latch>
#include <set>

#include "catch2.h"
#include "net/meeting/rendezvous.h"
#include "net/meetings.h"

using namespace llmc;

namespace {

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != text.npos; ++at) ++n;
  return n;
}
void wait_until(const std::function<bool()>& done) {
  for (const Limit limit = Limit::seconds(20); !done();) {
    CHECK(!limit.passed(), "waited for 20 s");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

// A job of three processes starts twice, beside spares that have waited since the first time; `of_again` says what each
// of its processes and each spare, which has its place by then, does the second time, when a place is given after
// spare_wait seconds. Returns what their errors say.
using Again = std::function<void(int process, bool was_spare, Rendezvous at)>;
std::vector<std::string> start_twice(int spares, Lines& lines, double spare_wait, const Again& again) {
  const std::string where = formatted("127.0.0.1:{}", free_port());
  std::latch all_wait(1);
  return on_threads(3 + spares, [&, spares](int p) {
    Rendezvous there = at(where, lines);
    there.spare_wait = spare_wait;
    if (p < 3) {
      {
        ControlPlane job(greeting(p, 3), at(where, lines));
        job.barrier("the first start");
        if (p == 0) {
          wait_until([&] { return count(lines.text(), "a spare waits") == spares; });
          all_wait.count_down();
        }
        all_wait.wait();
        job.abort();  // all are lost
      }
      return again(p, false, std::move(there));
    }
    const std::optional<int> place = wait_as_spare(greeting(0, 3), at(where, lines), 20);
    CHECK(place, "left over");
    there.was_spare = true;
    again(*place, true, std::move(there));
  });
}
void start(int process, Rendezvous at) {
  ControlPlane(greeting(process, 3), std::move(at)).barrier("the second start");
}

}  // namespace

TEST_CASE("a spare takes the place of a process that stays away when the job starts again", "[net]") {
  Lines lines;
  // Two spares: the second one would have the place as well if the first one took as long as this to come again.
  const auto errors = start_twice(2, lines, 3, [](int process, bool was_spare, Rendezvous at) {
    if (process != 1 || was_spare) start(process, std::move(at));
  });
  for (const int p : {0, 1, 2}) REQUIRE(errors[static_cast<size_t>(p)] == "");
  REQUIRE(std::set<std::string>{errors[3], errors[4]} == std::set<std::string>{"", "left over"});
  REQUIRE(lines.contain("takes the place of rank 1"));
}

TEST_CASE("a process that comes back has its place, unless a spare is there first", "[net]") {
  Lines lines;
  std::atomic<bool> given = false, told = false;
  const bool spare_dies = GENERATE(false, true);
  const auto errors = start_twice(1, lines, 0.2, [&](int process, bool was_spare, Rendezvous at) {
    if (was_spare) given = true;
    if (was_spare && spare_dies) return;
    // Of the spare and the process that comes back, one is first. The last process comes once the other one was told.
    if (process == 1 && !was_spare) wait_until([&] { return given.load(); });
    if (process == 2) wait_until([&] { return spare_dies ? given.load() : told.load(); });
    try {
      start(process, std::move(at));
    } catch (...) {
      told = true;
      throw;
    }
  });
  const std::string taken = "another process has taken the place of this one: with --spare it waits for another one";
  REQUIRE(std::ranges::count(errors, taken) == (spare_dies ? 0 : 1));
  REQUIRE(std::ranges::count(errors, "") == (spare_dies ? 4 : 3));
}

TEST_CASE("a spare that is to wait for centuries takes no place", "[net]") {
  Lines lines;
  const auto errors = start_twice(1, lines, 1e10, [&](int process, bool was_spare, Rendezvous at) {
    CHECK(!was_spare, "it has a place");
    if (process != 0) {
      wait_until([&] { return count(lines.text(), "a spare waits") == 2; });
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // in which it could get one
    }
    at.init_timeout = 1e11;
    start(process, std::move(at));
  });
  for (const int p : {0, 1, 2}) REQUIRE(errors[static_cast<size_t>(p)] == "");
  REQUIRE(errors[3] == "left over");
}

TEST_CASE("spares that differ are refused, those that go are noted, and the others end with the job", "[net]") {
  const std::string where = formatted("127.0.0.1:{}", free_port());
  Lines lines, of_spare;
  std::atomic<int> done = 0;
  const auto errors = on_threads(5, [&](int p) {
    if (p < 2) {
      ControlPlane job(greeting(p, 2), at(where, lines));
      for (const char* topic : {"before", "after"}) {
        job.barrier(topic);
        wait_until([&] { return done == 2; });
      }
      job.beat();
      if (p == 0)
        wait_until([&] { return lines.contain("has gone") && lines.contain("a spare waits on " + host_name()); });
      return;
    }
    Greeting it = greeting(0, 2);
    if (p == 2) it.agree[0].second = "0.5";
    if (p == 3) {
      const Odd brief(where, lines, spare_process, 2);
      wait_until([&] { return lines.contain("a spare waits on elsewhere"); });
      ++done;
      return;
    }
    const std::shared_ptr<void> counted(nullptr, [&](void*) { done += p == 2; });
    CHECK(!wait_as_spare(it, at(where, of_spare), 20), "there is no place");
  });
  REQUIRE(errors[2] == "--lr differs: 0.001 on rank 0, 0.5 on rank 2 (rank 2 is the spare)");
  for (const int p : {0, 1, 3, 4}) REQUIRE(errors[static_cast<size_t>(p)] == "");
  REQUIRE(lines.contain("the spare on elsewhere has gone"));
  REQUIRE(lines.contain("was refused: --lr differs"));
}
