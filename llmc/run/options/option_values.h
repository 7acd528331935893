// option_values.h: the values that options take, words, numbers and lists; whether a resumed run may change them.
#pragma once
#include <cctype>

#include "core/precision.h"
#include "core/words.h"

namespace llmc {

enum class DataChanged : uint8_t { refuse, accept };
constexpr auto names_of_values(DataChanged) { return std::array{"refuse", "accept"}; }
enum class OnFailure : uint8_t { retry, fail };
constexpr auto names_of_values(OnFailure) { return std::array{"retry", "fail"}; }
// Whether training waits until a checkpoint is written, or only until it is copied to host memory.
enum class CheckpointMode : uint8_t { sync, async };
constexpr auto names_of_values(CheckpointMode) { return std::array{"sync", "async"}; }
// What a run does about a loss or gradient norm that is beyond its threshold or not finite.
enum class OnSpike : uint8_t { stop, skip, rollback };
constexpr auto names_of_values(OnSpike) { return std::array{"stop", "skip", "rollback"}; }
enum class WeightType : uint8_t { fp32, bf16 };
constexpr auto names_of_values(WeightType) { return std::array{"fp32", "bf16"}; }
constexpr auto names_of_values(Operands) { return std::array{"dtype", "fp8-block", "fp8", "mxfp8", "fp8-tensor"}; }
enum class GatherType : uint8_t { dtype, fp8 };
constexpr auto names_of_values(GatherType) { return std::array{"dtype", "fp8"}; }
enum class MasterWeights : uint8_t { fp32, split, none };
constexpr auto names_of_values(MasterWeights) { return std::array{"fp32", "split", "none"}; }
enum class MomentType : uint8_t { fp32, bf16, bits8 };
constexpr auto names_of_values(MomentType) { return std::array{"fp32", "bf16", "8bit"}; }
enum class MuonProducts : uint8_t { automatic, fp32, bf16 };
constexpr auto names_of_values(MuonProducts) { return std::array{"auto", "fp32", "bf16"}; }
enum class OnOff : uint8_t { on, off };
constexpr auto names_of_values(OnOff) { return std::array{"on", "off"}; }
enum class GradReduceChoice : uint8_t { automatic, step, micro };
constexpr auto names_of_values(GradReduceChoice) { return std::array{"auto", "step", "micro"}; }
enum class Dispatch : uint8_t { dropless, capacity };
constexpr auto names_of_values(Dispatch) { return std::array{"dropless", "capacity"}; }
enum class DeviceChoice : uint8_t { automatic, cpu, cuda };
constexpr auto names_of_values(DeviceChoice) { return std::array{"auto", "cpu", "cuda"}; }
enum class CommChoice : uint8_t { automatic, threads, mpi, tcp, nccl };
constexpr auto names_of_values(CommChoice) { return std::array{"auto", "threads", "mpi", "tcp", "nccl"}; }
enum class GpuAttention : uint8_t { own, cudnn };
constexpr auto names_of_values(GpuAttention) { return std::array{"own", "cudnn"}; }
enum class GpuEpilogue : uint8_t { own, cublaslt };
constexpr auto names_of_values(GpuEpilogue) { return std::array{"own", "cublaslt"}; }
enum class SelftestLayouts : uint8_t { pairs, all };
constexpr auto names_of_values(SelftestLayouts) { return std::array{"pairs", "all"}; }
enum class TokenizeSplit : uint8_t { train, val };
constexpr auto names_of_values(TokenizeSplit) { return std::array{"train", "val"}; }

// A number of tokens as people write it: 1000000, 300M, 1.5B.
struct TokenCount {
  int64_t tokens = 0;
  std::string text;  // as given and recorded

  operator const std::string&() const { return text; }
  explicit operator double() const { return static_cast<double>(tokens); }
};

// With k, M, B (or G) and T for thousands, millions, billions and trillions; none: not a whole number of tokens, or one
// that does not fit into 64 bits.
inline std::optional<TokenCount> token_count(const std::string& text) {
  if (const std::optional<int64_t> tokens = number_from<int64_t>(text)) return TokenCount{*tokens, text};
  double number = 0, scale = 1;
  const char* const end = text.data() + text.size();
  const auto [suffix, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || end - suffix > 1) return std::nullopt;
  if (suffix < end) {
    constexpr std::pair<char, double> scales[] = {{'k', 1e3}, {'m', 1e6}, {'b', 1e9}, {'g', 1e9}, {'t', 1e12}};
    const char letter = static_cast<char>(std::tolower(static_cast<unsigned char>(*suffix)));
    const auto* const known = std::ranges::find(scales, letter, &std::pair<char, double>::first);
    if (known == std::end(scales)) return std::nullopt;
    scale = known->second;
  }
  const double tokens = number * scale, whole = std::round(tokens);
  if (!(std::abs(tokens) < 9.2e18) || std::abs(tokens - whole) > 1e-9 * std::abs(whole)) return std::nullopt;
  return TokenCount{static_cast<int64_t>(whole), text};
}

// The values of an option that may be given several times, such as --data.
struct TextList {
  std::vector<std::string> items;
  std::string text;  // all of them, as recorded: separated by semicolons

  bool empty() const { return items.empty(); }
  // Adds the values of a text that has one or several.
  void add(const std::string& more) {
    text += (text.empty() ? "" : ";") + more;
    for (std::string& item : split(more, ';')) items.push_back(std::move(item));
  }
  operator const std::string&() const { return text; }
};

// On resume an option must match, must match unless --branch-from begins another run, also unless --data-changed accept
// takes a new recipe from here on, may change with a notice, or may change freely.
enum class ResumeRule { must_match, branch, recipe, warn, free };
constexpr auto names_of_values(ResumeRule) {
  return std::array{"must match", "must match, except in a branch",
                    "must match, except in a branch or with --data-changed accept", "warns", "free"};
}

// The values that an option takes: a closed interval, or one of a list.
struct Limits {
  double min = -std::numeric_limits<double>::infinity(), max = std::numeric_limits<double>::infinity();
  std::vector<std::string> choices = {};
  const char* remedy = "";  // ends the error about a number that is outside
};
inline Limits at_least(double min) { return {.min = min}; }
inline Limits above_zero(const char* remedy = "") {
  return {.min = std::numeric_limits<double>::min(), .remedy = remedy};
}
inline Limits between(double min, double max) { return {.min = min, .max = max}; }
inline Limits one_of(std::vector<std::string> choices, const std::vector<std::string>& more = {}) {
  choices.insert(choices.end(), more.begin(), more.end());
  return {.choices = std::move(choices)};
}
template <NamedEnum E>
Limits any_of() {
  return one_of(all_names<E>());
}

}  // namespace llmc
