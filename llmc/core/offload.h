// offload.h: which state is in the host's memory or in a file, and who updates it there.
#pragma once
#include "core/check.h"
#include "core/precision.h"

namespace llmc {

// Who updates state in host memory: the device, to which it comes for that, or the processors of the host.
enum class OffloadUpdate : uint8_t { device, host };
constexpr auto names_of_values(OffloadUpdate) { return std::array{"device", "host"}; }

// State that may be in the host's memory, moments in a file instead; the device has a part of it while that is used
// (ZeRO-Infinity: Rajbhandari et al. 2021).
enum class Offloaded : uint8_t { moments, master, gradients, weights, activations };
constexpr auto names_of_values(Offloaded) {
  return std::array{"moments", "master", "gradients", "weights", "activations"};
}

struct Offload {
  std::array<bool, 5> parts = {};  // by Offloaded
  int64_t piece = 1 << 22;         // elements of a unit that are on the device at a time: a multiple of 64
  std::string directory = {};      // of the files that have the moments (scratch_file.h); empty: host memory has them
  OffloadUpdate update = OffloadUpdate::device;

  bool has(Offloaded part) const { return parts[static_cast<size_t>(part)]; }
  void add(Offloaded part) { parts[static_cast<size_t>(part)] = true; }
  bool in_file(Offloaded part) const { return part == Offloaded::moments && has(part) && !directory.empty(); }
  bool any_in_file() const { return in_file(Offloaded::moments); }
  // Is any of what lasts from step to step?
  bool has_state() const {
    return std::ranges::any_of(all_values<Offloaded>(),
                               [&](Offloaded p) { return has(p) && p != Offloaded::activations; });
  }
  bool any() const { return has_state() || has(Offloaded::activations); }
  // Is all there that an update changes besides weights? Then the host can make it.
  bool has_all_of_update(const Precision& precision) const {
    return has(Offloaded::moments) && (has(Offloaded::master) || !(precision.keeps_masters() || precision.averages));
  }
  bool updates_at_host() const { return update == OffloadUpdate::host && has(Offloaded::moments); }
  bool operator==(const Offload&) const = default;
  // As --offload has it: "moments,master", or "none".
  operator std::string() const {
    std::string text;
    for (const Offloaded part : all_values<Offloaded>())
      if (has(part)) text += (text.empty() ? "" : ",") + std::string(name_of(part));
    return text.empty() ? "none" : text;
  }
};

}  // namespace llmc
