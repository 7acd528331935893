// mutants.h: included before the sources that mutate.awk has filled with mutants; an environment variable selects one.
#pragma once
#include <cstdlib>
#include <type_traits>

namespace mutants {

inline int chosen() {
  const char* number = std::getenv("MUTANT");
  return number == nullptr ? 0 : std::atoi(number);
}
inline const int on = chosen();

}  // namespace mutants

constexpr int MUTANT(int number) {
  if (std::is_constant_evaluated()) return 0;
  return number == mutants::on;
}
