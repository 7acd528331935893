// option_values.h: the values that options take: words, intervals, and whether a resumed run may change them.
#pragma once
#include "core/precision.h"

namespace llmc {

// ---- Words -------------------------------------------------------------------------------------------------------

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
  std::vector<std::string> choices;
};
inline Limits at_least(double min) { return {.min = min, .choices = {}}; }
inline Limits above_zero() { return {.min = std::numeric_limits<double>::min(), .choices = {}}; }
inline Limits between(double min, double max) { return {.min = min, .max = max, .choices = {}}; }
inline Limits one_of(std::vector<std::string> choices) { return {.choices = std::move(choices)}; }
template <NamedEnum E>
Limits any_of() {
  return one_of(all_names<E>());
}
// Some of them, separated by commas.
template <NamedEnum E>
Limits any_of_list() {
  Limits limits = any_of<E>();
  limits.choices.insert(limits.choices.begin(), "none");
  return limits;
}
inline Limits with_segments(std::vector<std::string> choices) {
  choices.push_back("block:N");
  return one_of(std::move(choices));
}
inline std::vector<std::string> with_auto(std::vector<std::string> choices) {
  choices.insert(choices.begin(), "auto");
  return choices;
}

}  // namespace llmc
