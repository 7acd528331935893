// mutation.h: mutation testing of barriers: is each one needed, and does the test notice if it is missing?
#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
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
  set_hosts_first(true);  // else how fast ranks are is a part of the schedule
  passes_under({});       // shows whether cp.async is used
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

// The reverse one, and those in which each stream comes last once.
inline std::vector<Schedule> all_stream_orders() {
  std::vector<Schedule> all = {{Order::reverse, AsyncCopy::eager, 0}};
  for (uint64_t seed = 0; seed < stream_orders; ++seed) all.push_back({Order::random, AsyncCopy::eager, seed});
  return all;
}

// Mutation testing of the event waits that some of these programs execute, but those that are `exempt`. Each program is
// like `passes` of find_mutants; a mutant is killed if one of them fails in some order of streams. Each mutant runs in
// its own process, one process per processor, in hosts-first mode, so the outcome is deterministic.
inline Mutants find_event_mutants(const std::vector<std::function<bool()>>& programs,
                                  const std::function<bool(const Site&)>& exempt) {
  const Restored restored;
  set_hosts_first(true);
  std::vector<std::vector<Site>> sites_of;
  for (const auto& passes : programs) {
    std::vector<Site>& sites = sites_of.emplace_back();
    record_sites(&sites);
    if (!passes()) throw Failure("fails with nothing disabled");
    record_sites(nullptr);
    std::erase_if(sites, [&](const Site& site) { return site.what != "cudaStreamWaitEvent" || exempt(site); });
    std::sort(sites.begin(), sites.end());
  }
  Mutants mutants;
  const auto is_killed = [&](const Site& site) {
    return std::find(mutants.killed.begin(), mutants.killed.end(), site) != mutants.killed.end();
  };
  std::deque<std::pair<pid_t, std::optional<Site>>> children;
  const auto finish_oldest = [&] {
    const auto [child, off] = children.front();
    children.pop_front();
    if (passed_apart(child)) return;
    if (!off) throw Failure("fails in some order of streams, with nothing disabled");
    mutants.killed.push_back(*off);
  };
  const size_t at_a_time = std::max(1u, std::thread::hardware_concurrency());
  const auto start = [&](size_t program, const std::optional<Site>& off, const std::vector<Schedule>& orders) {
    while (children.size() >= at_a_time) finish_oldest();
    const pid_t child = start_apart([&] {
      switch_off(off);
      return std::all_of(orders.begin(), orders.end(), [&](const Schedule& order) {
        set_schedule(order);
        return programs[program]();
      });
    });
    children.push_back({child, off});
  };
  // Most mutants fail in the first order, in one program or another; those that do not are tried in all others.
  const std::vector<Schedule> all = all_stream_orders();
  for (const auto& orders : {std::vector(all.begin(), all.begin() + 1), std::vector(all.begin() + 1, all.end())})
    for (size_t i = 0; i < programs.size(); ++i) {
      std::erase_if(sites_of[i], is_killed);
      if (sites_of[i].empty()) continue;
      start(i, {}, orders);  // with nothing disabled
      for (const Site& site : sites_of[i]) start(i, site, orders);
      while (!children.empty()) finish_oldest();
    }
  std::set<Site> left;
  for (const std::vector<Site>& sites : sites_of) left.insert(sites.begin(), sites.end());
  std::copy_if(left.begin(), left.end(), std::back_inserter(mutants.survivors), std::not_fn(is_killed));
  return mutants;
}

}  // namespace cuda_on_cpu
