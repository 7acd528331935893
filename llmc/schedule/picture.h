// picture.h: a picture of a schedule: in the terminal, stages down and time across; and as JSON, for
// scripts/plot_schedule.py. Every pass takes its time in PassCosts, messages take none.
#pragma once
#include "core/json.h"
#include "schedule/check.h"
#include "schedule/messages.h"

namespace llmc {

struct PictureStyle {
  int64_t width = 120;  // of the terminal, in characters
  bool colour = false;
  int64_t most_rows = 8;  // of the time axis, which wraps at the width
};

namespace detail {

inline char letter_of(ActionKind kind) {
  return kind == ActionKind::forward ? 'F' : kind == ActionKind::backward_weight ? 'W' : 'B';
}

class Picture {
 public:
  Picture(const Pipeline& p, const PictureStyle& style)
      : p_(p), style_(style), lists_(pipeline_actions(p)), sim_(simulate(p, lists_)) {
    check_actions(p, lists_);
    const int parts = std::max(p.chunks_per_stage, p.slices);
    cell_ = 2 + formatted("{}", p.micro_batches - 1).size() + (parts > 1 ? 1 + formatted("{}", parts - 1).size() : 0);
    margin_ = formatted("stage {}  ", p.stages - 1).size();
  }

  std::string text() const { return legend() + drawing() + "\n" + table() + bubble(); }

 private:
  int64_t units() const { return std::llround(sim_.makespan); }

  std::string legend() const {
    std::string of = formatted("{} micro-batch{}", p_.micro_batches, p_.micro_batches == 1 ? "" : "es");
    if (p_.slices > 1) of += formatted(" in {} slices", p_.slices);
    if (p_.chunks_per_stage > 1) of += formatted(", {} chunks per stage", p_.chunks_per_stage);
    const char* numbers = p_.slices > 1 ? "numbers: micro-batch.slice"
                          : p_.chunks_per_stage > 1
                              ? "numbers: micro-batch.chunk, the stage's own chunks counted from 0"
                              : "numbers: micro-batch";
    return formatted("{}: {} stage{}, {}\n", p_.schedule, p_.stages, p_.stages == 1 ? "" : "s", of) +
           formatted("F forward, {}, . idle; {}\n",
                     p_.splits_backward()                 ? "B input part of the backward, W weight part"
                     : p_.schedule == Schedule::pipedream ? "B backward (twice as long) and update"
                                                          : "B backward (twice as long)",
                     numbers) +
           formatted("unit of time: the forward of a {}\n\n",
                     p_.slices > 1 ? "slice through a stage"
                     : p_.chunks_per_stage > 1
                         ? formatted("micro-batch through a chunk, 1/{} of a stage", p_.chunks_per_stage)
                         : "micro-batch through a stage");
  }

  std::string row(size_t stage, int64_t begin, int64_t end) const {
    std::string line;
    int64_t now = begin;
    auto idle_until = [&](int64_t time) {
      for (; now < time; ++now) line += padded(".", cell_);
    };
    for (size_t i = 0; i < lists_[stage].size(); ++i) {
      const Action& a = lists_[stage][i];
      const int64_t from = std::llround(sim_.times[stage][i].begin), to = std::llround(sim_.times[stage][i].end);
      if (!computes(a.kind) || to <= begin || from >= end) continue;
      idle_until(from);
      std::string box = label(a);
      box.resize(static_cast<size_t>(to - from) * cell_ - 1, to - from > 1 ? '-' : ' ');
      // Cuts off the parts before and after this row of the time axis.
      const size_t cut = static_cast<size_t>(now - from) * cell_;
      box = box.substr(cut, static_cast<size_t>(std::min(to, end) - now) * cell_);
      line += coloured(a.kind, box);
      if (to <= end) line += ' ';
      now = std::min(to, end);
    }
    idle_until(end);
    line.erase(line.find_last_not_of(' ') + 1);
    return line;
  }
  std::string label(const Action& a) const {
    std::string text = formatted("{}{}", std::string(1, letter_of(a.kind)), a.micro_batch);
    if (p_.slices > 1) text += formatted(".{}", a.slice);
    if (p_.chunks_per_stage > 1) text += formatted(".{}", p_.place_of(a.chunk));
    return text;
  }
  std::string coloured(ActionKind kind, const std::string& box) const {
    const char letter = letter_of(kind);
    const char* background = letter == 'F' ? "46" : letter == 'B' ? "42" : "43";  // cyan, green, yellow
    return style_.colour ? formatted("\x1b[30;{}m{}\x1b[0m", background, box) : box;
  }
  static std::string padded(std::string text, size_t width) {
    text.resize(std::max(width, text.size()), ' ');
    return text;
  }

  std::string drawing() const {
    const int64_t cells = (style_.width - static_cast<int64_t>(margin_)) / static_cast<int64_t>(cell_);
    const int64_t fit = std::max<int64_t>(5, cells >= units() ? units() : cells / 5 * 5);
    const int64_t shown = std::min(units(), fit * style_.most_rows);
    std::string text;
    for (int64_t begin = 0; begin < shown; begin += fit) {
      const int64_t end = std::min(units(), begin + fit);
      if (begin > 0) text += "\n";
      text += padded("time", margin_);
      for (int64_t t = begin; t < end; t += 5) text += padded(formatted("{}", t), cell_ * 5);
      text.erase(text.find_last_not_of(' ') + 1);
      for (size_t s = 0; s < lists_.size(); ++s)
        text += padded(formatted("\nstage {}", s), margin_ + 1) + row(s, begin, end);
      text += "\n";
    }
    if (shown < units())
      text += formatted("... cut at time {} of {}: draw fewer micro-batches, or --json for scripts/plot_schedule.py\n",
                        shown, units());
    return text;
  }

  // A number of passes, as micro-batches of the whole stage.
  std::string micro_batches(int64_t passes) const {
    return formatted("{:.4g}", static_cast<double>(passes) / (p_.chunks_per_stage * p_.slices));
  }
  static std::string percent(double part) { return formatted("{:.1f}%", 100 * part); }

  std::string table() const {
    const bool split = p_.splits_backward(), stashes = p_.schedule == Schedule::pipedream;
    std::string text = padded("", margin_) + "idle    activations kept at most, in micro-batches\n";
    for (size_t s = 0; s < lists_.size(); ++s) {
      const Kept kept = most_kept(p_, lists_[s]);
      text += padded(formatted("stage {}", s), margin_) + padded(percent(sim_.bubble(s)), 8) +
              micro_batches(kept.activations);
      if (split)
        text += formatted("; for weight parts {}; together {}", micro_batches(kept.for_weights),
                          micro_batches(kept.together));
      if (stashes) text += formatted("; versions of the weights {}", weight_versions(p_, static_cast<int>(s)));
      text += "\n";
    }
    return text;
  }

  std::string bubble() const {
    const auto law = bubble_law(p_);
    const bool flushes = p_.schedule == Schedule::pipedream;
    return formatted("{} {:.4g} forwards of a stage, {} of it bubble{}; {}",
                     flushes ? formatted("from one flush to the next, {} micro-batches = {} steps take",
                                         p_.micro_batches, p_.micro_batches)
                             : "a step takes",
                     sim_.makespan / (p_.chunks_per_stage * p_.slices), percent(sim_.bubble()),
                     flushes ? ", which 1f1b has in every step" : "",
                     law ? formatted("law: {} = {}", law->formula, percent(law->bubble))
                         : "there is no law for so few micro-batches");
  }

  const Pipeline& p_;
  PictureStyle style_;
  std::vector<ActionList> lists_;
  Simulation sim_;
  size_t cell_, margin_;  // characters per unit of time, and before the first
};

}  // namespace detail

inline std::string picture_of(const Pipeline& p, const PictureStyle& style = {}) {
  pipeline_faults(p).refuse();
  return detail::Picture(p, style).text();
}

// {"kind", "chunk", "micro_batch", "slice", "begin", "end"}
inline nlohmann::ordered_json action_json(const Action& a, const PassTime& time) {
  constexpr const char* kinds[] = {"forward",         "backward",          "backward_input",
                                   "backward_weight", "send_activations",  "receive_activations",
                                   "send_gradients",  "receive_gradients", "update"};
  return {{"kind", kinds[static_cast<int>(a.kind)]},
          {"chunk", a.chunk},
          {"micro_batch", a.micro_batch},
          {"slice", a.slice},
          {"begin", time.begin},
          {"end", time.end}};
}

// {"schedule", "stages", ..., "actions": [[action, ...] per stage]}
inline std::string schedule_json(const Pipeline& p) {
  using Json = nlohmann::ordered_json;
  const std::vector<ActionList> lists = pipeline_actions(p);
  check_actions(p, lists);
  const Simulation sim = simulate(p, lists);
  const auto law = bubble_law(p);
  Json json = {{"schedule", name_of(p.schedule)},
               {"stages", p.stages},
               {"chunks_per_stage", p.chunks_per_stage},
               {"micro_batches", p.micro_batches},
               {"slices", p.slices},
               {"makespan", sim.makespan},
               {"bubble", sim.bubble()},
               {"bubble_by_law", law ? Json(law->bubble) : Json()},
               {"law", law ? Json(law->formula) : Json()}};
  json["idle"] = json["activations"] = json["for_weights"] = json["actions"] = Json::array();
  for (size_t s = 0; s < lists.size(); ++s) {
    const Kept kept = most_kept(p, lists[s]);
    json["idle"].push_back(sim.bubble(s));
    json["activations"].push_back(kept.activations);
    json["for_weights"].push_back(kept.for_weights);
    Json actions = Json::array();
    for (size_t i = 0; i < lists[s].size(); ++i) actions.push_back(action_json(lists[s][i], sim.times[s][i]));
    json["actions"].push_back(std::move(actions));
  }
  return json.dump();
}

}  // namespace llmc
