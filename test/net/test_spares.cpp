// net/: spares wait at the rendezvous for the place of a process that stays away (spare.h).
#include <latch>

#include "catch2.h"
#include "net/meeting/spare.h"
#include "net/meetings.h"

using namespace llmc;

namespace {

Rendezvous with_spares(const std::string& where, Lines& lines, double init_timeout = 20) {
  Rendezvous there = at(where, lines, init_timeout);
  there.spare_wait = 0.2;
  return there;
}
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

}  // namespace

TEST_CASE("a spare takes the place of a process that stays away when the job starts again", "[net]") {
  const std::string where = formatted("127.0.0.1:{}", free_port());
  Lines lines, of_spare, late;
  std::atomic<bool> given = false, told = false;
  std::atomic<int> left_over = 0;
  std::latch both_wait(1);
  const auto errors = on_threads(5, [&](int p) {
    if (p < 3) {
      {
        ControlPlane job(greeting(p, 3), with_spares(where, lines));
        job.barrier("the first start");
        if (p == 0) {
          wait_until([&] { return count(lines.text(), "a spare waits") == 2; });
          both_wait.count_down();
        }
        both_wait.wait();
        job.abort();  // all are lost
      }
      if (p == 1) {  // it comes back when its place has been given away
        wait_until([&] { return given.load(); });
        const std::shared_ptr<void> tried(nullptr, [&](void*) { told = true; });
        return void(ControlPlane(greeting(1, 3), with_spares(where, late)));
      }
      return ControlPlane(greeting(p, 3), with_spares(where, lines)).barrier("the second start");
    }
    const auto place = wait_as_spare(greeting(0, 3), with_spares(where, of_spare), 20);
    if (!place) return void(++left_over);
    given = true;
    wait_until([&] { return told.load(); });
    Rendezvous there = with_spares(where, of_spare);
    there.ticket = place->ticket;
    ControlPlane(greeting(place->process, 3), std::move(there)).barrier("the second start");
  });
  REQUIRE(errors[1] == "a spare has taken the place of this process: with --spare it waits for another one");
  for (const int p : {0, 2, 3, 4}) REQUIRE(errors[static_cast<size_t>(p)] == "");
  REQUIRE(left_over == 1);
  REQUIRE(lines.contain("takes the place of rank 1"));
}

TEST_CASE("spares that differ are refused, those that go are noted, and the others end with the job", "[net]") {
  const std::string where = formatted("127.0.0.1:{}", free_port());
  Lines lines, of_spare;
  std::atomic<int> done = 0;
  const auto errors = on_threads(5, [&](int p) {
    if (p < 2) {
      ControlPlane job(greeting(p, 2), with_spares(where, lines));
      for (const char* topic : {"before", "after"}) {
        job.barrier(topic);
        wait_until([&] { return done == 2; });
      }
      job.beat();
      if (p == 0) wait_until([&] { return lines.contain("has gone"); });
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
    CHECK(!wait_as_spare(it, with_spares(where, of_spare), 20), "there is no place");
  });
  REQUIRE(errors[2] == "--lr differs: 0.001 on rank 0, 0.5 on rank 2 (rank 2 is the spare)");
  for (const int p : {0, 1, 3, 4}) REQUIRE(errors[static_cast<size_t>(p)] == "");
  REQUIRE(lines.contain("the spare on elsewhere has gone"));
  REQUIRE(lines.contain("was refused: --lr differs"));
}
