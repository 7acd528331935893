// net/: the watchdogs of a job of several processes.
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>

#include "catch2.h"
#include "helpers.h"
#include "net/processes.h"
#include "net/watching/watchdog.h"

using namespace llmc;

namespace {

constexpr Timeouts timeouts = {.init = 1, .comm = 1};

struct Watched {
  explicit Watched(int n, int local_ranks = 1) : jobs(n, local_ranks) {
    for (int p = 0; p < n; ++p) dogs.push_back(std::make_unique<Watchdog>(jobs[p], timeouts));
  }
  ~Watched() {
    for (int p = 0; p < jobs.size(); ++p) jobs[p].abort();
  }
  Watchdog& operator[](int p) { return *dogs[static_cast<size_t>(p)]; }

  // A rank waits in a collective of all ranks until the job ends. Returns why.
  // `begun` is called once it waits.
  std::string wait(
      int process, int rank, const std::vector<int>& members, const std::function<void()>& begun = [] {}) {
    Watchdog& dog = (*this)[process];
    std::atomic<bool> woken = false;
    const auto place = dog.board.join(rank, "gradients", members);
    place->begin("reduce_scatter", "unit ", "blocks.3");
    begun();
    if (rank % jobs[process].local_ranks() == 0) dog.on_fault([&] { woken = true; });
    else woken = true;  // by the first one
    const std::string reason = dog.fault(20).why;
    for (int i = 0; i < 2000 && !woken; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (rank % jobs[process].local_ranks() == 0) dog.on_fault({});
    return woken ? reason : "nobody woke it: " + reason;
  }

  Jobs jobs;
  std::vector<std::unique_ptr<Watchdog>> dogs;
};

}  // namespace

TEST_CASE("the rank that does not arrive is named on all processes in the same words, and all are woken",
          "[net][failures]") {
  for (const int culprit : {0, 1, 3}) {
    Watched job(4);
    std::vector<std::string> reasons(4);
    on_threads(4, [&](int p) {
      if (p == culprit) job[p].board.join(p, "gradients", {0, 1, 2, 3});
      reasons[static_cast<size_t>(p)] = p == culprit ? job[p].fault(20).why : job.wait(p, p, {0, 1, 2, 3});
    });
    for (int p = 0; p < 4; ++p) REQUIRE(job[p].fault(0).status == ExitStatus::lost);
    for (const std::string& reason : reasons) {
      REQUIRE(reason == reasons[0]);
      REQUIRE(reason.starts_with(
          formatted("rank {} on {} has not arrived at the reduce-scatter of unit blocks.3, step 0 (waited ", culprit,
                    host_name())));
      REQUIRE(reason.ends_with(" s, --init-timeout 1)"));  // on a busy machine a second passes
    }
  }
}

TEST_CASE("of a process with several ranks the one that does not arrive is named", "[net][failures]") {
  Watched job(2, 2);
  const std::vector<int> all = {0, 1, 2, 3};
  std::vector<std::string> reasons(4);
  on_threads(4, [&](int rank) {
    if (rank != 2) reasons[static_cast<size_t>(rank)] = job.wait(rank / 2, rank, all);
  });
  for (const int rank : {0, 1, 3})
    REQUIRE(reasons[static_cast<size_t>(rank)].starts_with(formatted("rank 2 on {} has not", host_name())));
}

TEST_CASE("where process 0 says nothing, process 1 judges", "[net][failures]") {
  Watched job(3);
  std::latch both_wait(2);
  std::vector<std::string> reasons(3);
  on_threads(3, [&](int p) {
    if (p > 0) {
      reasons[static_cast<size_t>(p)] = job.wait(p, p, {0, 1, 2}, [&] { both_wait.count_down(); });
      return;
    }
    both_wait.wait();
    job.dogs[0].reset();  // it is there, but says nothing
  });
  for (const int p : {1, 2})
    REQUIRE(reasons[static_cast<size_t>(p)].starts_with(formatted("rank 0 on {} has not arrived at", host_name())));
}

TEST_CASE("where neither of those who judge says anything, the others end by themselves and name both",
          "[net][failures]") {
  Watched job(4);
  const std::string nothing = job[3].fault(3).why;  // longer than the limit
  REQUIRE(nothing == "");
  job.dogs[0].reset(), job.dogs[1].reset();
  for (const int p : {2, 3})
    REQUIRE(job[p].fault(20).why ==
            formatted("rank 0 on {} and rank 1 on {}: nothing heard for 1.5 s (--init-timeout 1)", host_name(),
                      host_name()));
}

TEST_CASE("a process that fails tells all others why, and what follows from it is not a cause", "[net][failures]") {
  for (const int failing : {0, 1, 2}) {
    Watched job(3);
    std::vector<std::string> reasons(3);
    const ExitStatus status = failing == 2 ? ExitStatus::lost : ExitStatus::refused;  // what all of them end with
    on_threads(3, [&](int p) {
      if (p == failing) {
        job[p].failed(p, "the disk is full", status);
        job[p].failed(p, "and something else");
      }
      reasons[static_cast<size_t>(p)] = job[p].fault(20).why;
      job[p].failed(p, "a consequence");
    });
    for (int p = 0; p < 3; ++p) {
      REQUIRE(reasons[static_cast<size_t>(p)] ==
              formatted("rank {} on {} has failed: the disk is full", failing, host_name()));
      REQUIRE(job[p].fault(0).why == reasons[0]);
      REQUIRE(job[p].fault(0).status == status);
      REQUIRE_ERROR(job.jobs[p].barrier("never"), reasons[0]);
    }
  }
}

TEST_CASE("who ends the job by itself tells the others why, and not what follows from it", "[net][failures]") {
  Watched job(3);
  job.jobs[2].end_job("the disk is full");
  for (int p = 0; p < 3; ++p) REQUIRE(job[p].fault(20).why == "the disk is full");
  job[2].failed(2, "a consequence");
  REQUIRE(job[0].fault(0.02).why == "the disk is full");
}

TEST_CASE("a rank that is busy for longer than the timeout is waited for", "[net][failures]") {
  Watched job(2);
  std::atomic<bool> done = false;
  std::string reason;
  on_threads(2, [&](int p) {
    if (p == 0) {
      const auto place = job[0].board.join(0, "gradients", {0, 1});
      place->begin("reduce_scatter", "unit ", "blocks.3");
      while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      place->end();
      reason = job[0].fault(0).why;
      return;
    }
    const auto place = job[1].board.join(1, "gradients", {0, 1});
    for (int i = 0; i < 150; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      pulse();  // as ops and files do
    }
    place->begin("reduce_scatter", "unit ", "blocks.3");
    done = true;
    place->end();
  });
  REQUIRE(reason == "");
}

TEST_CASE("a board that is too long for a message ends the job with that reason", "[net][failures]") {
  for (const int process : {0, 1, 2}) {
    Watched job(3);
    std::vector<int> without_runs = {0};
    for (int i = 0; i < 200'000; ++i) without_runs.push_back(without_runs.back() + 1 + 2 * (i % 2));
    job[process].board.join(process, "gradients", without_runs);
    for (int p = 0; p < 3; ++p) {
      const std::string reason = job[p].fault(20).why;
      REQUIRE(reason.starts_with(formatted("rank {} on {} has failed: a message of ", process, host_name())));
      REQUIRE(reason.ends_with("bytes is too long for another process, which takes 1048576"));
    }
  }
}

TEST_CASE("a process that cannot leave a scope is ended with the reason", "[net][failures]") {
  int error[2];
  REQUIRE(::pipe(error) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(error[1], STDERR_FILENO);
    const LastResort last_resort(0.02, "why");
    for (;;) ::pause();
  }
  ::close(error[1]);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  std::array<char, 100> text{};
  const ssize_t bytes = ::read(error[0], text.data(), text.size());
  ::close(error[0]);
  REQUIRE((WIFEXITED(status) && WEXITSTATUS(status) == 3));
  REQUIRE(std::string(text.data(), static_cast<size_t>(bytes)) == "train_gpt: why\n");
  { const LastResort left(20, "not this one"); }
}
