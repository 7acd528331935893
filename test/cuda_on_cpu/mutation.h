// mutation.h: are a test's barriers needed, and does the test notice when one is missing?
#pragma once
#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "cuda_on_cpu/emulator.h"

namespace cuda_on_cpu {

struct Mutants {
  std::vector<Site> killed, survivors;
};

// `passes`, a bool(), runs kernels and says whether the outcome is right; an exception means that it is not. Runs it
// under every schedule with one barrier (or wait) that it executes switched off, for each of them. Such a mutant is
// killed if the outcome is wrong under at least one schedule. kind: only sites of this name, "cudaStreamWaitEvent" say;
// empty: all.
template <class Test>
Mutants find_mutants(Test&& passes, const std::string& kind = "") {
  const auto passes_under = [&](const Schedule& schedule) {
    set_schedule(schedule);
    try {
      return static_cast<bool>(passes());
    } catch (const std::exception&) {
      return false;
    }
  };
  struct Restored {  // whatever happens, later tests run with all barriers
    ~Restored() {
      record_sites(nullptr);
      switch_off({});
      set_schedule({});
    }
  } restored;
  passes_under({});  // shows whether cp.async is used
  const std::vector<Schedule> schedules = all_schedules();
  std::vector<Site> sites;
  record_sites(&sites);
  for (const Schedule& schedule : schedules)
    if (!passes_under(schedule)) throw Failure("fails with nothing switched off, under " + to_string(schedule));
  record_sites(nullptr);
  if (!kind.empty()) std::erase_if(sites, [&](const Site& site) { return site.what != kind; });
  std::sort(sites.begin(), sites.end());

  Mutants mutants;
  for (const Site& site : sites) {
    switch_off(site);
    const bool killed = !std::all_of(schedules.begin(), schedules.end(), passes_under);
    (killed ? mutants.killed : mutants.survivors).push_back(site);
  }
  return mutants;
}

}  // namespace cuda_on_cpu
