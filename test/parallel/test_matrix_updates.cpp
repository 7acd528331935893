// Muon's matrices in every layout: each is iterated once a step by one rank, by the plain formula; who owns what; what
// is sent, planned and computed.
#include <mutex>
#include <numeric>

#include "catch2.h"
#include "helpers.h"
#include "run/ranks.h"
#include "run/selftest/draws.h"
#include "run/selftest/run_layout.h"
#include "shard/matrix_owners.h"

using namespace llmc;

namespace {

StepConfig with_muon(StepConfig step, HeadGroups heads = HeadGroups::together) {
  step.layout.zero.optimizer = Optimizer::muon;
  step.layout.zero.muon.heads = heads;
  return step;
}

// Every matrix of the model.
std::vector<Matrix> all_matrices(const StepConfig& step) {
  std::vector<Matrix> all;
  const ParamTable table = parameter_table(step.model, Optimizer::muon);
  for (size_t u = 0; u < table.size(); ++u)
    for (const Matrix& m : matrices_of(table[u], u, step.layout.zero.muon.heads)) all.push_back(m);
  return all;
}

// Counts what ranks iterate.
struct Counted : Poison {
  mutable std::mutex mutex;
  mutable std::map<std::pair<std::string, int64_t>, int> times;
  void iterated(const std::string& parameter, int64_t row) const override {
    std::lock_guard lock(mutex);
    ++times[{parameter, row}];
  }
};

int64_t sent_for_matrices(const Plan& plan) {
  int64_t bytes = 0;
  for (const auto& [group, sent] : plan.step_traffic)
    if (group == "matrices" || group == "expert matrices") bytes += sent;
  return bytes;
}

// x = the update of Muon for a matrix with this momentum and gradient, in plain loops.
using Values = std::vector<double>;
Values product(const Values& a, const Values& b, int64_t rows, int64_t inner, int64_t columns) {
  Values c(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < inner; ++k) {
      const double factor = a[static_cast<size_t>(i * inner + k)];
      double* const sums = c.data() + i * columns;
      const double* const row = b.data() + k * columns;
      for (int64_t j = 0; j < columns; ++j) sums[j] += factor * row[j];
    }
  return c;
}
Values transposed(const Values& x, int64_t rows, int64_t columns) {
  Values t(x.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      t[static_cast<size_t>(j * rows + i)] = x[static_cast<size_t>(i * columns + j)];
  return t;
}
Values orthogonal(Values x, int64_t rows, int64_t columns) {
  if (rows > columns) return transposed(orthogonal(transposed(x, rows, columns), columns, rows), columns, rows);
  const double norm = std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
  for (double& e : x) e /= std::max(norm, 1e-7);
  for (int step = 0; step < 5; ++step) {
    const Values gram = product(x, transposed(x, rows, columns), rows, columns, rows);
    Values sum = product(gram, gram, rows, rows, rows);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = -4.7750 * gram[i] + 2.0315 * sum[i];
    const Values more = product(sum, x, rows, rows, columns);
    for (size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + more[i];
  }
  return x;
}
// Divides the rows of x by the roots of their second moments, and scales all back together.
void normalise(Values& x, Values& moments, int64_t rows, int64_t columns, double beta2) {
  moments.resize(static_cast<size_t>(rows));
  const auto size = [&] { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); };
  const double before = size();
  for (int64_t i = 0; i < rows; ++i) {
    const auto row = x.begin() + i * columns;
    double& moment = moments[static_cast<size_t>(i)];
    moment =
        beta2 * moment + (1 - beta2) * std::inner_product(row, row + columns, row, 0.0) / static_cast<double>(columns);
    std::for_each(row, row + columns, [&](double& e) { e /= std::sqrt(moment) + 1e-10; });
  }
  const double after = size();
  for (double& e : x) e *= before / after;
}

}  // namespace

TEST_CASE("each matrix is iterated once a step by one rank, in every layout", "[parallel][muon]") {
  for (uint64_t n = 0; n < 16; ++n) {
    const selftest::Draw d = selftest::draw(n % 2 == 0 ? 4 : 8, 7000 + n);
    StepConfig step = with_muon(d.step, n % 4 == 0 ? HeadGroups::apart : HeadGroups::together);
    step.layout.zero.muon.rows = n % 3 == 0 ? MuonRows::normalised : MuonRows::plain;
    INFO(n << ": " << to_string(d));
    const Counted hooks;
    const selftest::Outcome outcome = selftest::run_layout(step, {}, {.hooks = hooks, .max_norm = d.max_norm});
    REQUIRE(outcome.fault == "");
    const ParamTable table = parameter_table(step.model, Optimizer::muon);
    const std::vector<Matrix> matrices = all_matrices(step);
    REQUIRE(hooks.times.size() == matrices.size());
    for (const Matrix& m : matrices) {
      const std::string& name = table[m.unit].params[m.param].name;
      INFO(name << " from row " << m.row);
      REQUIRE(hooks.times.at({name, m.row}) == selftest::steps);
    }
  }
}

TEST_CASE("Muon follows its plain formula in fp64 for twenty steps, in every family, and NorMuon its own",
          "[parallel][muon]") {
  for (const Family& family : families) {
    const MuonRows kind = family.norm == Norm::layernorm ? MuonRows::normalised : MuonRows::plain;
    INFO(family.model_type);
    StepConfig step = with_muon(
        selftest::step_config(selftest::awkward_model(family.model_type, true), DType::fp64, 1, ZeroConfig{}));
    step.batch = {1, 8}, step.micro_batches = 1;
    step.layout.zero.muon.rows = kind;
    World world{Mesh()};
    Run run(step, make_plan(step, {DeviceKind::cpu, 1}), {DeviceKind::cpu, 1}, world, 0);
    init_weights(run.trainer.state(), 1, run.stream);
    const BatchSource batches = [&](int64_t m) { return selftest::read_batch(step, 0, m); };
    std::map<std::string, Values> weights, momenta, moments;
    const auto values = [&](const StateEntry& e) {
      const HostView view(e.tensor, run.stream);
      return Values(view.data<double>(), view.data<double>() + e.tensor.numel());
    };
    const auto is_matrix = [](const StateEntry& e) { return e.param->rule == Optimizer::muon; };
    int matrices = 0;
    for (const StateEntry& e : run.trainer.state().state_table())
      if (e.kind == StateKind::weight && is_matrix(e)) weights[e.param->name] = values(e), ++matrices;
    REQUIRE(matrices == std::ssize(all_matrices(step)));
    const OptimizerOptions options{
        .lr = 0.02f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .step = 1, .momentum = 0.95f};
    for (int s = 0; s < 20; ++s) {
      run.trainer.accumulate_gradients(batches);
      for (const StateEntry& e : run.trainer.state().gradient_table()) {
        if (!is_matrix(e)) continue;
        const int64_t rows = e.param->shape[0], columns = e.param->shape[1];
        const Values g = values(e);
        Values &m = momenta[e.param->name], &w = weights[e.param->name], nesterov(g.size());
        m.resize(g.size());
        const double mu = options.momentum;
        for (size_t i = 0; i < g.size(); ++i)
          m[i] = mu * m[i] + (1 - mu) * g[i], nesterov[i] = mu * m[i] + (1 - mu) * g[i];
        Values x = orthogonal(nesterov, rows, columns);
        const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns))), lr = options.lr;
        for (double& value : x) value *= scale;
        if (kind == MuonRows::normalised) normalise(x, moments[e.param->name], rows, columns, options.beta2);
        for (size_t i = 0; i < g.size(); ++i) w[i] = w[i] * (1 - lr * options.weight_decay) - lr * x[i];
      }
      run.trainer.step(batches, options, {});
    }
    for (const StateEntry& e : run.trainer.state().state_table()) {
      if (!is_matrix(e) || (e.kind != StateKind::weight && e.kind != StateKind::row_moment)) continue;
      INFO(e.param->name << " " << e.name());
      const Values now = values(e), &plain = (e.kind == StateKind::weight ? weights : moments)[e.param->name];
      REQUIRE(now.size() == plain.size());
      REQUIRE(relative_distance(now.data(), plain.data(), e.tensor.numel()) < 1e-5);
    }
  }
}

TEST_CASE("owners share the work evenly, and every rank sends, receives and computes what the law says",
          "[parallel][muon][plan]") {
  struct Case {
    const char* family;
    int replicas, shards, tensors, experts, stage;
  };
  for (const Case& c : {Case{"gpt2", 1, 1, 1, 1, 0},
                        {"gpt2", 1, 3, 1, 1, 0},
                        {"llama", 1, 4, 1, 1, 2},
                        {"llama", 2, 2, 1, 1, 1},
                        {"llama", 2, 1, 1, 1, 0},
                        {"llama", 1, 2, 2, 1, 0},
                        {"llama", 1, 2, 2, 1, 3},
                        {"qwen3_moe", 1, 2, 1, 2, 2},
                        {"qwen3_moe", 1, 2, 2, 4, 1}}) {
    INFO(c.family << ", " << c.replicas << " x " << c.shards << " x " << c.tensors << ", ep " << c.experts << ", stage "
                  << c.stage);
    ModelConfig model = selftest::awkward_model(c.family, true);
    if (model.experts.count > 0) model.experts.count = 4;
    Layout layout{.zero = {.shards = c.shards, .replicas = c.replicas},
                  .tensor = tensor_parallel(model, c.tensors),
                  .expert = expert_parallel(model, c.experts)};
    layout.zero.set_stage(c.stage);
    const StepConfig step = with_muon(selftest::step_config(model, DType::fp32, 1, layout));
    const ParamTable table = parameter_table(model, Optimizer::muon);
    double flops = 0, largest = 0, planned_flops = 0, most = 0;
    int64_t least_bytes = 0, most_bytes = 0, planned_bytes = 0;
    for (const Matrix& m : all_matrices(step)) {
      flops += m.flops(), largest = std::max(largest, m.flops());
      const ZeroConfig zero = table[m.unit].sharing == Sharing::experts ? layout.expert_zero() : layout.zero;
      const int64_t P = zero.shards, Q = zero.replicas, n = 4 * m.numel();
      const int64_t T = table[m.unit].sharing == Sharing::experts ? 1 : c.tensors;
      if (c.stage == 0) {
        most_bytes += (T - 1) * n / T + Q * P * n - n / T;
        least_bytes += (T - 1) * n / T + Q * P * n - n / T;
      } else {  // an owner holds all of its part of the matrix at most, and twice that is not sent
        most_bytes += n + Q * n;
        least_bytes += n + Q * n - 2 * n / T;
      }
    }
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      const Plan plan = make_plan(step, {DeviceKind::cpu, 1}, rank);
      planned_bytes += sent_for_matrices(plan);
      const auto op = plan.step_ops.find("newton_schulz");
      const double of_rank = op == plan.step_ops.end() ? 0 : op->second.flops;
      planned_flops += of_rank, most = std::max(most, of_rank);
    }
    REQUIRE(planned_flops == flops);
    REQUIRE(most <= flops / layout.ranks() + largest);
    REQUIRE((planned_bytes >= least_bytes && planned_bytes <= most_bytes));
    World world(layout.mesh());
    const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
    run_ranks(world, [&](int rank) {
      Run run(step, plan, {DeviceKind::cpu, 1}, world, rank);
      init_weights(run.trainer.state(), 1, run.stream);
      run.trainer.step([&](int64_t m) { return selftest::read_batch(step, run.groups.reader(), m); },
                       selftest::update_options(Optimizer::muon, 1), {});
      run.groups.gather_stream().synchronize();
      const int64_t sent = run.groups[GroupName::matrices].bytes_sent() +
                           run.groups[GroupName::expert_matrices].bytes_sent(),
                    planned = sent_for_matrices(make_plan(step, {DeviceKind::cpu, 1}, rank));
      CHECK(sent == planned, "rank {} sends {} bytes for matrices, planned {}", rank, sent, planned);
    });
  }
}

TEST_CASE("the pieces that seats hold of a matrix are the matrix, once in each replica", "[parallel][muon]") {
  ModelConfig model = selftest::awkward_model("llama", true);
  model.n_head = 8, model.n_kv_head = 2, model.head_size = 3, model.n_embd = 24, model.n_ffn = 44;
  const ParamTable table = parameter_table(model, Optimizer::muon);
  for (const HeadGroups heads : {HeadGroups::together, HeadGroups::apart})
    for (const int tensors : {1, 2, 4})
      for (const int shards : {1, 3}) {
        ZeroConfig zero{.stage = 1, .shards = shards, .replicas = 2};
        const TensorParallel tp = tensor_parallel(model, tensors);
        const UnitHolders holders(table[1], zero, tp);
        for (const Matrix& m : matrices_of(table[1], 1, heads)) {
          INFO(table[1].params[m.param].name << " from row " << m.row << ", " << tensors << " x " << shards);
          std::vector<int> held(static_cast<size_t>(m.numel())), sent(held);
          for (int seat = 0; seat < holders.seats().count(); ++seat) {
            const UnitHolders::Piece p = holders.piece(m, seat);
            for (int64_t i = 0; i < p.held.size; ++i) {
              const int64_t at = p.begin + i, element = at / p.columns * m.columns + p.column + at % p.columns;
              ++held[static_cast<size_t>(element)];
              sent[static_cast<size_t>(element)] += holders.sends(m, seat);
            }
          }
          const int copies = part_of(table[1].params[m.param], tp, 0).copies;
          for (const int times : held) REQUIRE(times == 2 * copies);
          for (const int times : sent) REQUIRE(times == 1);
        }
      }
}
