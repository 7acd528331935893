// Catch2 behind one include. Version 3 is many headers and a library, version 2 (Debian 12) one header; where names
// differ, tests use those of version 3.
//
// CHECK is the trainer's own (core/check.h), which throws and so ends the test case. REQUIRE also ends it and prints
// the values; EXPECT, which is Catch2's CHECK, prints them and continues.
#pragma once

#pragma push_macro("CHECK")
#undef CHECK
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;  // as version 2 has it
#else
#include <catch2/catch.hpp>

namespace Catch {
using Detail::Approx;
namespace Matchers {
inline auto ContainsSubstring(const std::string& text) { return Contains(text); }
}  // namespace Matchers
#ifdef CATCH_CONFIG_RUNNER
using EventListenerBase = TestEventListenerBase;
#endif
}  // namespace Catch
#endif

#pragma GCC poison Contains  // in version 3 it matches an element: ContainsSubstring

#undef CHECK
#pragma pop_macro("CHECK")
#define EXPECT(...) INTERNAL_CATCH_TEST("EXPECT", Catch::ResultDisposition::ContinueOnFailure, __VA_ARGS__)
