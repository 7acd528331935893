// search.h: the fastest layouts of a step on a machine (--plan-auto). A rough estimate ranks all layouts: times and
// activations of a layer are planned once for each shape of it, state follows from ZeRO's law, communication and bubble
// from theirs. The best are then planned in full, and only those plans are printed.
#pragma once
#include <ctime>

#include "core/log.h"
#include "model/layout_faults.h"
#include "run/plan/report_time.h"
#include "run/requirements.h"

namespace llmc {

// What is asked for: the rest of the step, ranks and layout, is searched.
struct SearchFor {
  StepConfig step = {};  // model, T, precision
  int64_t ranks = 1;
  int64_t sequences = 1;    // of a step
  Device device = {};       // of a rank, with a machine
  int64_t memory = 0;       // bytes that a rank may use
  bool less_exact = false;  // than what is asked for: only where nothing else fits
};

// The sequences of a step if nothing else is asked for: half a million tokens, or one for every eighth rank, and as
// many more as it takes to give equal numbers to as many ranks as possible.
inline int64_t usual_sequences(int64_t ranks, int64_t T) {
  const int64_t least = std::max(ceil_div(int64_t{1} << 19, T), ranks / 8);
  int64_t readers = 1;
  for (const int64_t divisor : divisors(ranks))
    if (divisor <= least) readers = divisor;
  return round_up(least, readers);
}

struct Found {
  StepConfig step;
  double seconds;
  int64_t bytes;
};

class LayoutSearch {
 public:
  explicit LayoutSearch(SearchFor what) : what_(std::move(what)), machine_(*what_.device.machine) {}

  // The fastest layouts that fit, the best first: at most `count`.
  std::vector<Found> find(size_t count = 10) {
    std::vector<Guess> guesses = all_guesses();
    std::ranges::stable_sort(guesses, [](const Guess& a, const Guess& b) { return a.seconds < b.seconds; });
    std::vector<Found> found;
    const std::clock_t begin = std::clock();  // processor time: a busy machine finds the same layouts
    for (const Guess& guess : guesses) {
      const double spent = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
      if (found.size() >= count && (counts_.planned >= 2 * static_cast<int64_t>(count) || spent > most_seconds / 2))
        break;
      if (!found.empty() && spent > most_seconds) break;
      std::string why;
      const std::optional<Plan> plan = try_plan(guess.step, what_.device, &why);
      if (!plan) {
        reject_for(why);
        continue;
      }
      ++counts_.planned;
      if (plan->total_bytes() > what_.memory) {
        ++counts_.too_large;
        continue;
      }
      found.push_back({guess.step, detail::step_time(guess.step, *plan, what_.device)->step(), plan->total_bytes()});
    }
    std::ranges::stable_sort(found, [](const Found& a, const Found& b) {
      return std::pair(a.seconds, a.bytes) < std::pair(b.seconds, b.bytes);
    });
    if (found.size() > count) found.resize(count);
    return found;
  }

  // How many layouts there were, and why most of them were not planned.
  struct Counts {
    int64_t tried = 0, impossible = 0, small = 0;  // small: memory, by the estimate
    int64_t planned = 0, too_large = 0;            // in full; of these, those that do not fit
    std::map<std::string, int64_t> reasons = {};   // of impossible ones
    // "3 leave ranks over, 5 divide heads or experts unevenly"
    std::string reasons_text() const {
      std::string text;
      for (const auto& [why, count] : reasons) text += formatted("{}{} {}", text.empty() ? "" : ", ", count, why);
      return text;
    }
  };
  const Counts& counts() const { return counts_; }
  std::string counts_text() const {
    return formatted(
        "{}: {} layouts: {} ways to divide the ranks cannot be{}, {} do not fit by the estimate, {} were planned in "
        "full, of which {} do not fit; the others would be slower",
        what_.step.precision.weights, counts_.tried, counts_.impossible,
        counts_.impossible == 0 ? std::string() : formatted(" ({})", counts_.reasons_text()), counts_.small,
        counts_.planned, counts_.too_large);
  }

 private:
  // For planning in full. It ends no search of 405B on 24,576 ranks, whose 20 plans take less than half of it.
  static constexpr double most_seconds = 16;

  struct Guess {
    StepConfig step;
    double seconds;
  };
  // A layer's and the ends' (embedding and head) time for a micro-batch and activations, on a rank.
  struct Cost {
    double layer_seconds = 0, ends_seconds = 0;
    double layer_bytes = 0, fixed_bytes = 0;  // kept for each micro-batch in flight; once
  };

  static std::vector<int> powers(int64_t most) {
    std::vector<int> all;
    for (int64_t p = 1; p <= most; p *= 2) all.push_back(static_cast<int>(p));
    return all;
  }

  void reject(const std::string& why) {
    ++counts_.impossible;
    ++counts_.reasons[why];
  }
  // error: the trainer's, without what to do about it
  void reject_for(const std::string& error) {
    reject(formatted("the trainer rejects ({})", error.substr(0, error.find(": use "))));
  }

  std::vector<Guess> all_guesses() {
    std::vector<Guess> guesses;
    const int64_t experts = what_.step.model.experts.count, most_cp = std::min(what_.ranks, what_.step.batch.T / 4096);
    for (const int tp : powers(std::min<int64_t>(machine_.links[0].ranks, what_.ranks)))
      for (const int cp : powers(std::max<int64_t>(1, most_cp)))
        for (const int ep : powers(experts > 0 ? std::min(experts, what_.ranks) : 1))
          for (const int64_t pp : stages()) add_guesses(guesses, tp, cp, ep, pp);
    return guesses;
  }
  std::vector<int64_t> stages() const {
    std::vector<int64_t> all;
    for (int64_t pp = 1; pp <= std::min(what_.ranks, what_.step.model.n_layer); ++pp)
      if (what_.ranks % pp == 0 && (what_.step.model.n_layer % pp == 0 || (pp & (pp - 1)) == 0)) all.push_back(pp);
    return all;
  }

  // Of one way to divide the ranks, unless it cannot be.
  void add_guesses(std::vector<Guess>& guesses, int tp, int cp, int ep, int64_t pp) {
    const ModelConfig& m = what_.step.model;
    if (what_.ranks % (tp * cp * pp) != 0) return reject("leave ranks over");
    const int64_t readers = what_.ranks / (tp * cp * pp);
    if (what_.sequences % readers != 0) return reject("leave sequences of a step over");
    if (tp > 1 && what_.device.gelu_in_products) return reject("have --tp, which --gelu cublaslt does not allow");
    if (tp > 1 && what_.device.residual_in_products)
      return reject("have --tp, which --residual cublaslt does not allow");
    StepConfig step = what_.step;
    ZeroConfig zero = step.layout.zero;  // with the optimizer
    zero.shards = static_cast<int>(readers * cp);
    step.layout = {.zero = zero,
                   .tensor = tensor_parallel(m, tp),
                   .context = {.ranks = cp},
                   .expert = expert_parallel(m, ep),
                   .pipeline = {.stages = static_cast<int>(pp)}};
    if (step.batch.T % step.layout.context.slices() != 0) return reject("cut sequences unevenly");
    if (readers * cp * tp % ep != 0 || !layout_faults(step.layout, m).empty())
      return reject("divide heads or experts unevenly");
    if (!fp8_can(step, what_.device)) return reject("divide what --products rounds in blocks, or as a whole");
    try {
      add_guesses(guesses, step, what_.sequences / readers);
    } catch (const Error& error) {
      reject_for(error.what());
    }
  }
  // The micro-batches that are tried: powers of two, three times these, and the largest of all. More than 32 sequences
  // gain something only if they are short.
  static std::vector<int64_t> batch_sizes(int64_t sequences, int64_t T) {
    int64_t largest = std::min(sequences, std::max<int64_t>(32, (1 << 17) / T));
    while (sequences % largest != 0) --largest;
    std::set<int64_t> all = {largest};
    for (int64_t power = 1; power <= largest; power *= 2)
      for (const int64_t B : {power, 3 * power})
        if (B <= largest && sequences % B == 0) all.insert(B);
    return {all.begin(), all.end()};
  }
  // sequences: of a reader
  void add_guesses(std::vector<Guess>& guesses, StepConfig& step, int64_t sequences) {
    const bool sharded = step.layout.zero.shards > 1;
    const int64_t tried = counts_.tried;
    for (const int64_t B : batch_sizes(sequences, step.batch.T)) {
      step.batch.B = B;
      step.micro_batches = sequences / B;
      if (step.micro_batches > most_passes / step.model.n_layer) continue;
      for (const Recompute recompute : all_values<Recompute>()) {
        if (what_.device.gelu_in_products && repeats_activation_alone(recompute)) continue;  // require_gelu_can()
        step.recompute = recompute;
        step.segment = 1;
        const Cost* cost = nullptr;  // planned for the first layout whose state leaves room for activations
        for (const int stage : sharded ? std::vector{1, 2, 3} : std::vector{0}) {
          step.layout.zero.set_stage(stage);
          for (const auto& [schedule, chunks] : schedules(step)) {
            step.layout.pipeline.schedule = schedule;
            step.layout.pipeline.chunks_per_stage = chunks;
            ++counts_.tried;
            const double most = 1.05 * static_cast<double>(what_.memory);
            if (cost == nullptr && bytes_of(step, {}) <= most) cost = &cost_of(step);
            if (cost != nullptr && bytes_of(step, *cost) <= most) guesses.push_back({step, seconds_of(step, *cost)});
            else if (const auto segments = cost == nullptr ? std::nullopt : segments_of(step, *cost, most))
              guesses.push_back(*segments);
            else ++counts_.small;
          }
        }
      }
    }
    if (counts_.tried == tried) reject("have more micro-batches than can be planned");
  }
  // The step with segments recomputed, if whole blocks are and need more memory. cost: of whole blocks
  std::optional<Guess> segments_of(StepConfig step, Cost cost, double most) {
    if (step.recompute != Recompute::block) return std::nullopt;
    StepConfig none = step;
    none.recompute = Recompute::none;
    step.segment = square_root_recomputation(step).segment;
    const double N = static_cast<double>(step.segment), forward = cost.layer_seconds - cost_of(none).layer_seconds;
    if (step.segment == 1) return std::nullopt;
    cost.layer_seconds += forward * (N - 1) / N;
    cost.layer_bytes /= N;
    cost.fixed_bytes += (N - 1) * message_bytes(step);
    if (bytes_of(step, cost) > most) return std::nullopt;
    return Guess{step, seconds_of(step, cost)};
  }
  static std::vector<std::pair<Schedule, int>> schedules(const StepConfig& step) {
    const int64_t pp = step.layout.pipeline.stages, layers = step.model.n_layer;
    std::vector<std::pair<Schedule, int>> all = {{Schedule::one_f_one_b, 1}};
    if (pp == 1) return all;
    all.emplace_back(Schedule::zb_h1, 1);
    if (2 * pp <= layers) all.emplace_back(Schedule::zb_v, 2);
    for (int chunks = 2; chunks * pp <= layers && chunks <= 8; chunks *= 2)
      if (step.micro_batches % pp == 0) all.emplace_back(Schedule::interleaved, chunks);
    return all;
  }

  // Planned with few layers, whose costs are differences.
  const Cost& cost_of(const StepConfig& step) {
    const auto key = std::tuple(step.layout.tensor.ranks, step.layout.context.ranks, step.layout.expert.ranks,
                                step.batch.B, step.recompute);
    if (const auto known = costs_.find(key); known != costs_.end()) return known->second;
    StepConfig few = step;
    few.noise_scale = false;  // it takes several small batches, and two numbers
    few.layout.pipeline = {};
    int shards = step.layout.context.ranks;
    while (shards * step.layout.tensor.ranks % step.layout.expert.ranks != 0) shards += step.layout.context.ranks;
    few.layout.zero.shards = shards;
    few.layout.zero.set_stage(0);
    few.model.experts.dense_layers = {};
    const int64_t period = few.model.experts.count > 0 ? few.model.experts.every : 1;
    double seconds[2][2], activations[2], others[2];
    for (const int layers : {1, 2}) {
      few.model.n_layer = layers * period;
      Plan plan;
      for (const int micro_batches : {1, 2}) {
        few.micro_batches = micro_batches;
        plan = make_plan(few, what_.device, 0, Passes::step);
        seconds[layers - 1][micro_batches - 1] = plan.step_seconds;
      }
      const Plan& forwards = forwards_of(few);
      activations[layers - 1] = 0;
      others[layers - 1] = static_cast<double>(std::max(plan.scratch_bytes, forwards.scratch_bytes));
      for (const MemoryLine& line : (forwards.arena_bytes > plan.arena_bytes ? forwards : plan).memory)
        if (line.label == "activations") activations[layers - 1] = static_cast<double>(line.bytes);
        else if (!is_state(line.label) && line.label != scratch_label)
          others[layers - 1] += static_cast<double>(line.bytes);
    }
    const double one = seconds[0][1] - seconds[0][0], two = seconds[1][1] - seconds[1][0],
                 p = static_cast<double>(period);
    Cost& cost = costs_[key];
    cost.layer_seconds = (two - one) / p;
    cost.ends_seconds = std::max(0.0, one - (two - one));
    cost.layer_bytes = (activations[1] - activations[0]) / p;
    cost.fixed_bytes = std::max(0.0, activations[0] - p * cost.layer_bytes) + others[0];
    return cost;
  }
  // The forwards of evaluation and generation, which neither recomputation nor micro-batches change.
  const Plan& forwards_of(const StepConfig& few) {
    const Layout& l = few.layout;
    const auto key = std::tuple(l.tensor.ranks, l.context.ranks, l.expert.ranks, few.batch.B, few.model.n_layer);
    if (const auto known = forwards_.find(key); known != forwards_.end()) return known->second;
    return forwards_[key] = make_plan(few, what_.device, 0, Passes::forwards);
  }
  static bool is_state(const std::string& label) {
    return label == "weights" || label == "master weights" || label == "moving average of weights" ||
           label == "gradients" || label == "gathered weights" || label == "gradients in flight" ||
           label == nccl_label || label == row_moment.label ||
           std::ranges::any_of(optimizer_rules, [&](const OptimizerRule& rule) {
             return std::ranges::any_of(rule.slots, [&](const OptimizerSlot& slot) { return label == slot.label; });
           });
  }

  // Parameters of a rank before ZeRO, and the bytes of their state.
  struct Parameters {
    double all = 0, state = 0;
  };
  struct UnitParameters {
    Parameters layer, ends;  // of a layer; of the embedding and the head
    double largest = 0;      // of the largest unit
  };
  struct StageParameters {
    double all, state;  // of the stage with most
    double largest;
  };
  StageParameters parameters_of(const StepConfig& step) {
    const auto key = std::pair(step.layout.tensor.ranks, step.layout.expert.ranks);
    auto [place, is_new] = parameters_.try_emplace(key);
    if (is_new) {
      ParamTable& table = tables_[step.layout.tensor.ranks];
      if (table.empty())
        table = part_of(parameter_table(step.model, step.layout.zero.optimizer, {.experts = Range{0, 1}}),
                        step.layout.tensor, 0);
      const double L = static_cast<double>(step.model.n_layer);
      UnitParameters& units = place->second;
      for (size_t u = 0; u < table.size(); ++u) {
        const double held =
            table[u].sharing == Sharing::experts
                ? static_cast<double>(step.model.experts.count * step.layout.tensor.ranks) / step.layout.expert.ranks
                : 1;
        const bool end = u == 0 || u + 1 == table.size();
        Parameters& sum = end ? units.ends : units.layer;
        double unit = 0;
        for (const ParamSpec& p : table[u].params) {
          const double elements = held * static_cast<double>(p.box().numel());
          unit += elements;
          sum.all += elements / (end ? 1 : L);
          sum.state += elements * state_bytes(step.precision, rule_of(p.rule)) / (end ? 1 : L);
        }
        units.largest = std::max(units.largest, unit);
      }
    }
    const auto& [layer, ends, largest] = place->second;
    const int64_t pp = step.layout.pipeline.stages;
    const double layers = static_cast<double>(ceil_div(step.model.n_layer, pp)), of_ends = pp == 1 ? 1 : 0.5;
    return {layer.all * layers + ends.all * of_ends, layer.state * layers + ends.state * of_ends, largest};
  }

  double bytes_of(const StepConfig& step, const Cost& cost) {
    const StageParameters p = parameters_of(step);
    const ZeroConfig& zero = step.layout.zero;
    const double weight = static_cast<double>(size_of(step.precision.weights)), N = zero.shards;
    double bytes = zero.stage == 3   ? p.all * (weight + 4) / N + 2 * p.largest * (weight + 4)
                   : zero.stage == 2 ? p.all * (weight + 4 / N) + 2 * p.largest * 4
                                     : p.all * (weight + 4);
    bytes += p.state / N;
    const PipelineParallel& pipeline = step.layout.pipeline;
    const double L = static_cast<double>(step.model.n_layer), P = pipeline.stages, V = pipeline.chunks_per_stage,
                 M = static_cast<double>(step.micro_batches);
    // Passes of a chunk that the first stage keeps, each with its input and output.
    const double passes = P == 1                                       ? 1
                          : pipeline.schedule == Schedule::interleaved ? std::min(M * V, P * (V - 1) + 2 * P - 1)
                          : pipeline.schedule == Schedule::zb_v        ? std::min(M * V, 2 * P)
                                                                       : std::min(M, P);
    bytes += cost.layer_bytes * std::max(1.0, L / (P * V)) * passes + cost.fixed_bytes;
    if (P > 1) bytes += 2 * (passes + 4) * message_bytes(step);
    const auto has = [](bool axis) { return axis ? 1.0 : 0.0; };
    const double groups =
        has(N > 1) * 2 + has(step.layout.tensor.ranks > 1) + has(step.layout.context.ranks > 1) + has(P > 1) * 4;
    return bytes + groups * (416 << 20);  // NCCL's, as nccl_bytes() has it for three ranks or more of a server
  }
  // Of a parameter: a master, its average, and the rule's slots.
  static double state_bytes(const Precision& p, const OptimizerRule& rule) {
    double bytes = (p.keeps_masters() ? static_cast<double>(size_of(p.master_dtype())) : 0) + (p.averages ? 4 : 0);
    for (size_t slot = 0; slot < rule.slots.size(); ++slot) {
      const int64_t size = size_of(p.slot_dtype(slot));
      bytes += static_cast<double>(size) + (size > 1 ? 0 : 4.0 / state_block);
    }
    return bytes;
  }
  static double message_bytes(const StepConfig& step) {
    const int64_t rows = step.layout.tensor.stream_rows(step.share(step.batch, Purpose::train).rows());
    return static_cast<double>(rows * step.model.n_embd * size_of(step.precision.activations));
  }

  double seconds_of(const StepConfig& step, const Cost& cost) {
    const PipelineParallel& pipeline = step.layout.pipeline;
    const double P = pipeline.stages, M = static_cast<double>(step.micro_batches);
    const double pass = cost.layer_seconds * static_cast<double>(ceil_div(step.model.n_layer, pipeline.stages)) +
                        cost.ends_seconds * (P == 1 ? 1 : 0.9);
    const double idle = P == 1                                       ? 0
                        : pipeline.schedule == Schedule::interleaved ? (P - 1) / pipeline.chunks_per_stage
                        : pipeline.schedule == Schedule::zb_h1       ? (P - 1) / 3
                        : pipeline.schedule == Schedule::zb_v        ? (P - 1) / 6
                                                                     : P - 1;
    // Gradients are reduced beside a backward, which is two thirds of a pass; gathered weights are waited for. The
    // passes of a pipeline's chunks are too short to hide them.
    const StageParameters p = parameters_of(step);
    const double N = step.layout.zero.shards, part = p.all * (N - 1) / N,
                 gather = transfer_seconds(step, part * static_cast<double>(size_of(step.precision.weights))),
                 reduce = transfer_seconds(step, part * static_cast<double>(size_of(step.precision.wire))),
                 gathers = step.pipeline().splits_backward() ? 3 : 2;
    double seconds = pass * (M + idle);
    switch (step.layout.zero.stage) {
      case 3: seconds += M * std::max(0.0, gathers * gather + reduce - (P == 1 ? pass : pass / 2)); break;
      case 2: seconds += M * std::max(0.0, reduce - (P == 1 ? 2 * pass / 3 : 0)) + gather; break;
      default: seconds += std::max(0.0, reduce - 2 * pass / 3 / P) + (N > 1 ? gather : 0);
    }
    return seconds + p.all * 32 / N / (machine_.bytes_per_s * machine_.memory_share);
  }
  double transfer_seconds(const StepConfig& step, double bytes) {
    if (step.layout.zero.shards == 1) return 0;
    const auto [path, is_new] = paths_.try_emplace({step.layout.tensor.ranks, step.layout.zero.shards});
    if (is_new) {
      std::vector<int> members;
      for (int i = 0; i < step.layout.zero.shards; ++i) members.push_back(i * step.layout.tensor.ranks);
      path->second = machine_.path_of({.name = "units", .members = &members});
    }
    const int64_t units = ceil_div(step.model.n_layer, step.layout.pipeline.stages);
    return machine_.seconds({.name = "units",
                             .link_bytes = bytes,
                             .messages = units * (step.layout.zero.shards - 1),
                             .path = &path->second});
  }

  SearchFor what_;
  const Machine& machine_;
  std::map<std::tuple<int, int, int, int64_t, Recompute>, Cost> costs_;
  std::map<std::tuple<int, int, int, int64_t, int64_t>, Plan> forwards_;
  std::map<std::pair<int, int>, UnitParameters> parameters_;  // by --tp and --ep
  std::map<int, ParamTable> tables_;                          // by --tp, of one expert in each layer
  std::map<std::pair<int, int>, LinkPath> paths_;             // between the members of a shard group
  Counts counts_;
};

}  // namespace llmc
