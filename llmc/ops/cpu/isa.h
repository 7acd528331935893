// isa.h: the instruction sets that the CPU's ops are compiled for, and which of them this processor has. The ops are in
// headers that are compiled once for each set, into objects of their own (sets/), in a namespace named after the set:
// no object uses anything from another, so a program for all processors runs no instruction that its processor lacks.
#pragma once
#include <cstdlib>

#ifdef __x86_64__
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sys/utsname.h>
#endif

#include "core/check.h"

// The namespace that ops/cpu/*.h define their functions in. Code that includes them outside sets/, such as tests, gets
// those of any processor.
#ifndef CPU_ISA
#define CPU_ISA portable
#endif

namespace llmc::cpu {

// Each is faster than those before it, and includes their instructions. Then stand-ins, for tests: the products of the
// last two in plain C++, bit for bit, on any processor.
enum class Isa : uint8_t { portable, avx2, avx512, avx512_bf16, amx, pairs_stand_in, tiles_stand_in };
inline constexpr std::array<const char*, 7> isa_names = {
    "portable", "avx2", "avx512", "avx512-bf16", "amx", "avx512-bf16-stand-in", "amx-stand-in"};
inline const char* name_of(Isa isa) { return isa_names[static_cast<size_t>(isa)]; }

// The best set that this processor has, whose registers the operating system saves, and that this program has ops for.
inline Isa processor_isa() {
#if defined(__x86_64__) && defined(CPU_ISA_SETS)
  static const Isa isa = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
      return Isa::portable;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
      return Isa::avx2;
    if (!__builtin_cpu_supports("avx512bf16")) return Isa::avx512;
    if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16")) return Isa::avx512_bf16;
    constexpr int request_permission = 0x1023, tile_data = 18;  // Linux lets a process use AMX's registers if it asks
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0 ? Isa::amx : Isa::avx512_bf16;
  }();
  return isa;
#else
  return Isa::portable;
#endif
}
inline bool processor_has(Isa isa) { return isa >= Isa::pairs_stand_in || isa <= processor_isa(); }

// The sets that a user may ask for.
inline std::vector<std::string> isa_choices() {
  return {isa_names.begin(), isa_names.begin() + static_cast<size_t>(Isa::pairs_stand_in)};
}

inline constexpr const char* isa_variable = "TRAIN_GPT_CPU_ISA";  // set by --cpu-isa

// The instruction set with this name. Throws Error if the processor lacks it.
inline Isa isa_of(const std::string& name, const char* option) {
  const auto found = std::find(isa_names.begin(), isa_names.end(), name);
  CHECK(found != isa_names.end(), "{} {}: no such instruction set; use one of {}", option, name, isa_choices());
  const Isa isa = static_cast<Isa>(found - isa_names.begin());
#if defined(__x86_64__) && !defined(CPU_ISA_SETS)  // tests without the sets take any name for the portable ops
  if (isa < Isa::pairs_stand_in) return Isa::portable;
#endif
  CHECK(processor_has(isa), "{} {}: this processor has {} at best; leave {} out, or use that", option, name,
        name_of(processor_isa()), option);
  return isa;
}

// Call before the first op.
inline void use_isa(const std::string& name, const char* option) {
  isa_of(name, option);
  setenv(isa_variable, name.c_str(), 1);
}
// The set that this process uses.
inline Isa isa_in_use() {
  static const Isa isa = [] {
    const char* most = std::getenv(isa_variable);
    return most == nullptr || *most == '\0' ? processor_isa() : isa_of(most, isa_variable);
  }();
  return isa;
}
// The name that a run records: equal names round alike. The portable ops round differently on another architecture.
inline std::string recorded_isa() {
#ifdef __x86_64__
  return name_of(isa_in_use());
#else
  utsname system{};
  CHECK(uname(&system) == 0, "uname fails");
  return formatted("{} on {}", name_of(isa_in_use()), system.machine);
#endif
}
// Would --cpu-isa take this name here?
inline bool can_choose(const std::string& name) {
  const std::vector<std::string> choices = isa_choices();
  const auto found = std::find(choices.begin(), choices.end(), name);
  return found != choices.end() && processor_has(static_cast<Isa>(found - choices.begin()));
}

}  // namespace llmc::cpu
