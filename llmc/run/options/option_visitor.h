// option_visitor.h: what visit_options() (options.h) calls, made of two lambdas.
#pragma once
#include "run/options/option_values.h"

namespace llmc {

namespace detail {

// Visits groups and options with two lambdas.
template <class OnGroup, class OnOption>
struct OptionVisitor {
  OnGroup on_group;
  OnOption on_option;
  void operator()(const char* group) { on_group(group); }
  template <class T>
  void operator()(const char* name, const char* letter, T& field, const Limits& limits, ResumeRule rule,
                  const char* help) {
    on_option(name, letter, field, limits, rule, help);
  }
};
template <class G, class F>
OptionVisitor(G, F) -> OptionVisitor<G, F>;

inline auto no_group = [](const char*) {};

}  // namespace detail

}  // namespace llmc
