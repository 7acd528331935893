// matmul_choices.h: which algorithms a library uses for matrix products on a GPU, by shape, as text: a title, which
// says for which library and GPU they are, then a line per shape.
#pragma once
#include <sstream>

#include "ops/ops_layers.h"

namespace llmc {

// While `on`, the first product of each shape that has no choice yet tries every algorithm that the library offers and
// keeps the fastest; its result is discarded.
inline void tune_matmuls([[maybe_unused]] bool on, [[maybe_unused]] Stream& stream) {
#ifdef TRAIN_GPT_CUDA
  if (stream.device().kind == DeviceKind::cuda) stream.kept<cuda::MatmulPlans>().set_tuning(on);
#endif
}
enum class Choices : uint8_t { all, used };  // set or chosen, or only of products that were computed
// The choices so far; empty on a CPU.
inline std::string matmul_choices([[maybe_unused]] Stream& stream, [[maybe_unused]] Choices which = Choices::all) {
#ifdef TRAIN_GPT_CUDA
  if (stream.device().kind == DeviceKind::cuda) return stream.kept<cuda::MatmulPlans>().exported(which == Choices::all);
#endif
  return "";
}
// Uses exactly these choices from now on.
inline void set_matmul_choices([[maybe_unused]] const std::string& choices, [[maybe_unused]] Stream& stream) {
#ifdef TRAIN_GPT_CUDA
  if (stream.device().kind != DeviceKind::cuda) return;
  stream.kept<cuda::MatmulPlans>().forget();
  stream.kept<cuda::MatmulPlans>().restore(choices);
#endif
}

// Calls f(shape, line) for each line of choices.
template <class F>
void for_matmul_choices(const std::string& choices, F&& f) {
  std::istringstream lines(choices);
  std::string line;
  std::getline(lines, line);  // the title
  while (std::getline(lines, line)) f(line.substr(0, line.find(':')), line);
}
// All choices under the title of the first; for a shape the first that has it.
inline std::string merged_matmul_choices(std::span<const std::string> all) {
  std::string merged = all[0].substr(0, all[0].find('\n') + 1);
  std::set<std::string> shapes;
  for (const std::string& choices : all)
    for_matmul_choices(choices, [&](const std::string& shape, const std::string& line) {
      if (shapes.insert(shape).second) merged += line + "\n";
    });
  return merged;
}

}  // namespace llmc
