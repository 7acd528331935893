// ignored.h: options of training that a mode other than training would ignore, and refuses.
#pragma once
#include <string>
#include <string_view>

#include "core/check.h"
#include "run/options/print.h"

namespace llmc {

// How ranks share a model, and what is asked of experts. is_given(name): on the command line; a --config file may have
// what other modes use.
template <class IsGiven>
void refuse_ignored(const Options& o, IsGiven&& is_given) {
  const struct {
    bool asked;
    const char *name, *what;
  } modes[] = {{o.generate, "--generate", "which computes on one rank and does not train"},
               {o.verify_data, "--verify-data", "which reads data and does not train"},
               {o.selftest, "--selftest", "which has models and layouts of its own, on --local-ranks ranks"},
               {o.print_schedule, "--print-schedule", "which draws the stages of --pp, whatever they compute"}};
  for (const auto& mode : modes) {
    if (!mode.asked) continue;
    for (const OptionText& option : option_texts(o)) {
      const std::string_view name = option.name;
      const bool ignored = name == "--tp" || name == "--cp" || name == "--ep" || name.starts_with("--moe-") ||
                           (name == "--pp" && !o.print_schedule);
      CHECK(!ignored || option.text == option.usual || !is_given(option.name), "{} {} with {}, {}: leave it out",
            option.name, option.text, mode.name, mode.what);
    }
  }
}

}  // namespace llmc
