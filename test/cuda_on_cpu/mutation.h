// mutation.h: mutation testing of barriers: is each one needed, and does the test notice if it is missing?
#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "cuda_on_cpu/emulator.h"

namespace cuda_on_cpu {

struct Mutants {
  std::vector<Site> killed, survivors;
};

struct Restored {  // later tests run with all barriers again, whatever happens
  ~Restored() {
    record_sites(nullptr);
    switch_off({});
    set_schedule({});
    set_hosts_first(false);
  }
};

// `passes`, a bool(), runs kernels and returns whether the outcome is right; an exception means that it is not. Runs it
// under every schedule with each executed barrier (or wait) disabled in turn. Such a mutant is killed if the outcome is
// wrong under at least one schedule.
template <class Test>
Mutants find_mutants(Test&& passes) {
  const auto passes_under = [&](const Schedule& schedule) {
    set_schedule(schedule);
    try {
      return static_cast<bool>(passes());
    } catch (const std::exception&) {
      return false;
    }
  };
  const Restored restored;
  passes_under({});  // shows whether cp.async is used
  const std::vector<Schedule> schedules = all_schedules();
  std::vector<Site> sites;
  record_sites(&sites);
  for (const Schedule& schedule : schedules)
    if (!passes_under(schedule)) throw Failure("fails with nothing disabled, under " + to_string(schedule));
  record_sites(nullptr);
  std::sort(sites.begin(), sites.end());

  Mutants mutants;
  for (const Site& site : sites) {
    switch_off(site);
    const bool killed = !std::all_of(schedules.begin(), schedules.end(), passes_under);
    (killed ? mutants.killed : mutants.survivors).push_back(site);
  }
  return mutants;
}

// Calls bool() in a child process, which isolates memory errors, hangs and output. Call only while no other thread
// runs.
template <class Test>
pid_t start_apart(Test&& passes) {
  constexpr unsigned most_seconds = 240;
  const pid_t child = fork();
  if (child < 0) throw Failure("cannot fork");
  if (child > 0) return child;
  if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(2);
  // A mutant that crashes dies in silence; Catch2's handlers would report a failed test.
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) std::signal(signal, SIG_DFL);
  alarm(most_seconds);
  bool passed = false;
  try {
    passed = static_cast<bool>(passes());
  } catch (const std::exception&) {
  }
  _exit(passed ? 0 : 1);
}
// Its result; false if it did not finish.
inline bool passed_apart(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) throw Failure("the machine is too slow to test the waits");
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Mutation testing of the event waits that `passes` executes, except those in `known`, like find_mutants but in every
// order of streams; each mutant in its own process, one process per processor. Uses hosts-first mode, so the outcome is
// deterministic.
template <class Test>
Mutants find_event_mutants(Test&& passes, const std::vector<Site>& known) {
  const auto passes_in_all_orders = [&] {
    set_schedule({Order::reverse, AsyncCopy::eager, 0});  // first: most mutants fail in it
    if (!passes()) return false;
    for (uint64_t seed = 0; seed < stream_orders; ++seed) {
      set_schedule({Order::random, AsyncCopy::eager, seed});
      if (!passes()) return false;
    }
    return true;
  };
  const Restored restored;
  set_hosts_first(true);
  std::vector<Site> sites;
  record_sites(&sites);
  passes();
  record_sites(nullptr);
  std::erase_if(sites, [&](const Site& site) {
    return site.what != "cudaStreamWaitEvent" || std::find(known.begin(), known.end(), site) != known.end();
  });
  std::sort(sites.begin(), sites.end());
  std::vector<pid_t> children = {start_apart(passes_in_all_orders)};  // with nothing disabled
  Mutants mutants;
  const auto finish = [&](size_t i) {
    const bool passed = passed_apart(children[i]);
    if (i > 0) (passed ? mutants.survivors : mutants.killed).push_back(sites[i - 1]);
    else if (!passed) throw Failure("fails in some order of streams, with nothing disabled");
  };
  const size_t at_a_time = std::max(1u, std::thread::hardware_concurrency());
  size_t finished = 0;
  for (const Site& site : sites) {
    while (children.size() - finished >= at_a_time) finish(finished++);
    children.push_back(start_apart([&] {
      switch_off(site);
      return passes_in_all_orders();
    }));
  }
  while (finished < children.size()) finish(finished++);
  return mutants;
}

}  // namespace cuda_on_cpu
