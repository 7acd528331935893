// report_search.h: what --plan-auto prints: the fastest layouts, as a table with the command of the first, or as JSON.
#pragma once
#include "core/log.h"
#include "run/length.h"
#include "run/options/ignored.h"
#include "run/plan/describe.h"
#include "run/plan/plan_json.h"
#include "run/plan/search.h"

namespace llmc {

namespace detail {

// The options of a layout that are not the defaults.
inline std::string options_text(const StepConfig& step) {
  const Layout& l = step.layout;
  std::string text = formatted("--dtype {} --batch-size {} --total-batch-size {}", step.precision.weights, step.batch.B,
                               step.tokens());
  const auto add = [&](bool given, const char* option, const auto& value) {
    if (given) text += formatted(" {} {}", option, value);
  };
  add(l.tensor.ranks > 1, "--tp", l.tensor.ranks);
  add(l.context.ranks > 1, "--cp", l.context.ranks);
  add(l.expert.ranks > 1, "--ep", l.expert.ranks);
  add(l.pipeline.stages > 1, "--pp", l.pipeline.stages);
  add(l.pipeline.schedule != Schedule::one_f_one_b, "--schedule", l.pipeline.schedule);
  add(l.pipeline.chunks_per_stage > 1 && l.pipeline.schedule == Schedule::interleaved, "--pp-chunks",
      l.pipeline.chunks_per_stage);
  add(l.zero.stage > 0, "--zero-stage", l.zero.stage);
  add(step.recompute != Recompute::none, "--recompute", step.recomputation());
  add(!step.precision.masters || step.precision.split_masters, "--master-weights",
      step.precision.masters ? "split" : "none");
  return text;
}

// The options that a layout was searched for and a command does not have otherwise: of the model, its tokenizer and its
// products, of the optimizer and its state. Without a --vocab-size that follows from --tokenizer.
inline std::string other_options(const Options& o) {
  constexpr Kinds searched_for = kinds({Kind::model, Kind::tokenizer, Kind::epilogues, Kind::update, Kind::state});
  std::string text;
  for (const OptionText& option : option_texts(o))
    for (const OptionKind& kind : option_kinds())
      if ((searched_for & kinds({kind.kind})) != 0 && option.name != "--model" && option.name != "--seq-len" &&
          option.name != "--dtype" && option.name != "--master-weights" &&
          (option.name != "--vocab-size" || o.preset_vocabulary == 0) &&
          std::ranges::find(kind.names, option.name) != kind.names.end())
        text += words_of(option);
  for (const OptionText& option : option_texts(o))
    if (option.name == "--tf32" || option.name == "--cuda-graphs") text += words_of(option);
  return text;
}

// The command that trains in a layout.
inline std::string command_of(const Options& o, const SearchFor& asked, const StepConfig& step) {
  const bool one_server = asked.ranks <= asked.device.machine->links[0].ranks;
  return formatted("./train_gpt --model {} --seq-len {} {} {}{}{}", o.model, o.seq_len,
                   one_server ? formatted("--local-ranks {}", asked.ranks)
                              : formatted("--world-size {} --local-ranks 1", asked.ranks),
                   options_text(step), o.max_steps || o.tokens ? " " + length_text(o) : "", other_options(o));
}

// The seconds of the whole run, if it is known how long it is.
inline std::optional<double> run_seconds(const Options& o, const Found& found) {
  if (!o.max_steps && !o.tokens) return std::nullopt;
  return found.seconds * static_cast<double>(choose_steps(o, found.step.tokens(), 0));
}

}  // namespace detail

// The fastest layouts of one or several precisions.
struct SearchResult {
  struct Row {
    Found found;
    const SearchFor* what;
    double tokens_per_second, mfu;
  };
  std::vector<Row> rows;  // the fastest first
  std::vector<LayoutSearch> searches;
};

// Throws Error if there is none, or none fits.
inline SearchResult search_layouts(const Options& o, const std::vector<SearchFor>& precisions) {
  constexpr size_t count = 10;
  SearchResult result;
  for (const SearchFor& what : precisions) {
    if (!result.rows.empty() && what.less_exact) break;
    for (const Found& f : result.searches.emplace_back(what).find(count)) {
      const double per_second = static_cast<double>(f.step.tokens()) / f.seconds;
      result.rows.push_back({f, &what, per_second,
                             training_flops_per_token(f.step.model, f.step.batch.T) * per_second /
                                 (what.device.machine->flops_per_s * static_cast<double>(what.ranks))});
    }
  }
  std::ranges::stable_sort(result.rows, [](const auto& a, const auto& b) { return a.found.seconds < b.found.seconds; });
  if (result.rows.size() > count) result.rows.erase(result.rows.begin() + count, result.rows.end());
  const SearchFor& asked = precisions.front();
  CHECK(std::ranges::any_of(result.searches, [](const LayoutSearch& s) { return s.counts().tried > 0; }),
        "--plan-auto: no layout of {} on {} rank{} divides a step of {} sequences: of the ways to divide the ranks, "
        "{}: use --total-batch-size {}, a sequence for each rank{}",
        shown(o.model), asked.ranks, asked.ranks == 1 ? "" : "s", asked.sequences,
        result.searches.front().counts().reasons_text(), asked.ranks * o.seq_len,
        asked.sequences % asked.ranks == 0 ? "" : ", or a multiple of it");
  CHECK(!result.rows.empty(),
        "--plan-auto: no layout of {} on {} rank{} fits into {} of a GPU of {}, with any --recompute,{} and "
        "--batch-size 1: use more ranks, a smaller --model or a smaller --seq-len",
        shown(o.model), asked.ranks, asked.ranks == 1 ? "" : "s", human_bytes(asked.memory), shown(o.machine),
        precisions.back().less_exact ? " bf16 without master weights," : "");
  return result;
}

inline void report_search(Log& log, const Options& o, const std::vector<SearchFor>& precisions) {
  const SearchResult result = search_layouts(o, precisions);
  const SearchFor& asked = precisions.front();
  Rows rows;
  for (size_t i = 0; i < result.rows.size(); ++i) {
    const auto& [f, what, per_second, mfu] = result.rows[i];
    rows.emplace_back(formatted("{}", i + 1),
                      formatted("{:10.3f} ms {:12.0f} tokens/s, MFU {:4.1f}%, {:10}  {}", 1e3 * f.seconds, per_second,
                                100 * mfu, human_bytes(f.bytes), detail::options_text(f.step)));
  }
  log.table(formatted("fastest layouts of {} on {} rank{} of {}, {} tokens per step", o.model, asked.ranks,
                      asked.ranks == 1 ? "" : "s", o.machine, human_count(asked.sequences * o.seq_len)),
            rows);
  for (const LayoutSearch& search : result.searches) log.line(search.counts_text());
  const Found& first = result.rows[0].found;
  log.line("=> " + detail::command_of(o, asked, first.step));
  if (const auto seconds = detail::run_seconds(o, first)) {
    const Machine& machine = *asked.device.machine;
    log.table(formatted("the fastest layout for {}", length_text(o)),
              detail::run_cost_rows(o, machine, detail::run_cost(o, first.step, machine, *seconds)));
  }
}

// --plan-auto --json. run/README.md has the schema.
inline std::string search_json(const Options& o, const std::vector<SearchFor>& precisions) {
  using detail::OrderedJson;
  const SearchResult result = search_layouts(o, precisions);
  OrderedJson layouts = OrderedJson::array(), searched = OrderedJson::array();
  for (const auto& [f, what, per_second, mfu] : result.rows) {
    layouts.push_back({{"step_seconds", f.seconds},
                       {"tokens_per_second", per_second},
                       {"mfu", mfu},
                       {"memory_bytes", f.bytes},
                       {"memory_limit_bytes", what->memory},
                       {"precision", detail::precision_json(f.step)},
                       {"batch", detail::batch_json(f.step, std::nullopt)},
                       {"layout", detail::layout_json(f.step)},
                       {"command", detail::command_of(o, *what, f.step)}});
    if (const auto seconds = detail::run_seconds(o, f))
      layouts.back()["run"] = detail::run_json(o, f.step, *what->device.machine, *seconds);
  }
  for (size_t i = 0; i < result.searches.size(); ++i) {
    const Precision& precision = precisions[i].step.precision;
    const LayoutSearch::Counts& counts = result.searches[i].counts();
    searched.push_back({{"weights", name_of(precision.weights)},
                        {"master_weights", precision.keeps_masters()},
                        {"layouts", counts.tried},
                        {"impossible", counts.impossible},
                        {"reasons", counts.reasons},
                        {"do_not_fit_by_estimate", counts.small},
                        {"planned", counts.planned},
                        {"planned_and_do_not_fit", counts.too_large}});
  }
  const SearchFor& asked = precisions.front();
  OrderedJson notices = OrderedJson::array();
  if (const std::string notice = detail::vocabulary_notice(o, asked.step.model); !notice.empty())
    notices.push_back(notice);
  return OrderedJson{{"model", o.model},     {"machine", o.machine},
                     {"ranks", asked.ranks}, {"tokens_per_step", asked.sequences * o.seq_len},
                     {"notices", notices},   {"layouts", layouts},
                     {"searched", searched}}
      .dump(2);
}

}  // namespace llmc
