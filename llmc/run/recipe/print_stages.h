// print_stages.h: the stages of a run on paper: a table, curves over its tokens, and JSON for scripts/plot_stages.py.
#pragma once
#include "core/log.h"
#include "run/recipe/course.h"

namespace llmc {

namespace detail {

inline double share_of_source(const Stretch& stretch, size_t source) {
  const double all = std::accumulate(stretch.weights.begin(), stretch.weights.end(), 0.0);
  return static_cast<double>(stretch.weights[source]) / all;
}

// "web 70%, code 30%"; empty for one source without a name.
inline std::string mix_text(const Recipe& recipe, const Stretch& stretch) {
  std::string text;
  for (size_t s = 0; s < recipe.sources.size(); ++s)
    if (!recipe.sources[s].name.empty() && stretch.weights[s] > 0)
      text += formatted("{}{} {:.4g}%", text.empty() ? "" : ", ", recipe.sources[s].name,
                        100 * share_of_source(stretch, s));
  return text;
}

// The first and the last step of a stretch, and those around the end of the warm-up: until there the rate rises, and
// then it falls.
inline std::vector<int64_t> turning_steps(const Stretch& s) {
  if (s.steps == 0) return {};
  const int64_t first = s.first_step + 1, last = s.last_step(),
                warm = s.first_step + ceil_div(std::max<int64_t>(0, s.schedule.warmup - s.counted), s.per_step);
  return {first, std::clamp(warm - 1, first, last), std::clamp(warm, first, last), last};
}

// "3.00e-04 to 0.00e+00", of the first and the last step; "1.00e-04 up to 3.00e-04, 0.00e+00 at the end".
inline std::string rate_text(const Stretch& s) {
  if (s.steps == 0) return "-";
  double largest = 0;
  for (const int64_t step : turning_steps(s)) largest = std::max(largest, s.learning_rate(step));
  const auto text = [](double rate) { return formatted("{:.2e}", rate); };
  const std::string first = text(s.learning_rate(s.first_step + 1)), last = text(s.learning_rate(s.last_step())),
                    most = text(largest);
  if (most != first && most != last) return formatted("{} up to {}, {} at the end", first, most, last);
  return first == last ? first : formatted("{} to {}", first, last);
}

// A curve of a value over the tokens of the run, in characters of eight heights; its range is that of all steps.
inline std::string curve(const Course& course, const std::function<double(const Stretch&, int64_t)>& at) {
  constexpr int64_t columns = 60;
  static constexpr const char* heights[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::vector<double> values;
  const double tokens = static_cast<double>(course.tokens());
  size_t stretch = 0;
  for (int64_t c = 0; c < columns; ++c) {
    const int64_t token = static_cast<int64_t>((static_cast<double>(c) + 0.5) / static_cast<double>(columns) * tokens);
    while (stretch + 1 < course.stretches().size() && token >= course.stretches()[stretch + 1].tokens) ++stretch;
    const Stretch& s = course.stretches()[stretch];
    const int64_t step = s.first_step + 1 + std::clamp<int64_t>((token - s.tokens) / s.tokens_per_step, 0, s.steps - 1);
    values.push_back(at(s, step));
  }
  std::vector<double> extremes;
  for (const Stretch& s : course.stretches())
    for (const int64_t step : turning_steps(s)) extremes.push_back(at(s, step));
  const auto [smallest, largest] = std::ranges::minmax(extremes);
  std::string text;
  for (const double value : values)
    text += heights[largest > 0 ? std::clamp<int>(static_cast<int>(value / largest * 8), 0, 7) : 0];
  return smallest == largest ? formatted("{} {:.4g}", text, largest)
                             : formatted("{} {:.4g} to {:.4g}", text, smallest, largest);
}

}  // namespace detail

// "stage 2 of 3, anneal: ..." and the same as JSON, for the beginning of a stretch.
inline std::pair<std::string, nlohmann::ordered_json> stage_text(const Course& course, size_t number) {
  const Stretch& s = course.stretches()[number];
  const Recipe& recipe = course.recipe();
  const std::string& name = recipe.stages[s.stage].name;
  const std::string mix = detail::mix_text(recipe, s);
  nlohmann::ordered_json json = {{"stage", s.stage + 1},
                                 {"name", name},
                                 {"last_step", s.last_step()},
                                 {"tokens_per_step", s.tokens_per_step},
                                 {"seq_len", s.seq_len}};
  for (size_t i = 0; i < recipe.sources.size(); ++i)
    if (!recipe.sources[i].name.empty())  // weights are whole numbers: 0.7 would be 0.70000000000021
      json["mix"][recipe.sources[i].name] = std::round(1e9 * detail::share_of_source(s, i)) / 1e9;
  return {formatted("stage {} of {}, {}: steps {} to {}, {} tokens a step in sequences of {}{}, learning rate {}",
                    s.stage + 1, recipe.stages.size(), name, s.first_step + 1, s.last_step(),
                    human_count(s.tokens_per_step), s.seq_len, mix.empty() ? "" : ", " + mix, detail::rate_text(s)),
          json};
}

inline std::string stages_text(const Course& course) {
  const Recipe& recipe = course.recipe();
  size_t width = 0;
  for (const Stretch& s : course.stretches()) width = std::max(width, detail::rate_text(s).size());
  const std::string row =
      formatted("{}{}{}", "{:5}  {:-14} {:9} {:8} {:7} {:10}  {:-", std::max<size_t>(20, width), "}  {}\n");
  std::string text = formatted(row, "stage", "name", "tokens", "steps", "length", "a step", "learning rate", "mix");
  for (const Stretch& s : course.stretches())
    text += formatted(row, s.stage + 1, recipe.stages[s.stage].name, human_count(s.steps * s.tokens_per_step), s.steps,
                      s.seq_len, human_count(s.tokens_per_step), detail::rate_text(s), detail::mix_text(recipe, s));
  text += formatted("all    {} tokens in {}\n\n", human_count(course.tokens()), counted(course.steps(), "step"));
  const auto curve = [&](const std::string& name, const std::function<double(const Stretch&, int64_t)>& at) {
    text += formatted("{:-14} {}\n", name, detail::curve(course, at));
  };
  curve("learning rate", [](const Stretch& s, int64_t step) { return s.learning_rate(step); });
  curve("tokens a step", [](const Stretch& s, int64_t) { return static_cast<double>(s.tokens_per_step); });
  curve("length", [](const Stretch& s, int64_t) { return static_cast<double>(s.seq_len); });
  for (size_t i = 0; i < recipe.sources.size(); ++i)
    if (!recipe.sources[i].name.empty())
      curve(recipe.sources[i].name, [i](const Stretch& s, int64_t) { return detail::share_of_source(s, i); });
  text.pop_back();
  return text;
}

// Every stretch, and the learning rate at up to 200 of its steps.
inline std::string stages_json(const Course& course) {
  constexpr int64_t most = 200;
  nlohmann::ordered_json json = {
      {"steps", course.steps()}, {"tokens", course.tokens()}, {"stretches", nlohmann::ordered_json::array()}};
  for (size_t i = 0; i < course.stretches().size(); ++i) {
    const Stretch& s = course.stretches()[i];
    nlohmann::ordered_json one = stage_text(course, i).second;
    one["first_step"] = s.first_step;
    one["tokens"] = s.tokens;
    one["tokens_after"] = s.tokens_after(s.last_step());
    for (int64_t p = 0, n = std::min(most, s.steps); p < n; ++p) {
      const int64_t step = s.first_step + 1 + (n > 1 ? p * (s.steps - 1) / (n - 1) : 0);
      one["learning_rate"].push_back(nlohmann::ordered_json::array({s.tokens_after(step), s.learning_rate(step)}));
    }
    json["stretches"].push_back(one);
  }
  return json.dump();
}

}  // namespace llmc
