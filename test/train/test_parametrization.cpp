// Parametrizations: what the rules make of every kind of parameter in every family, by hand; runs of the base's size
// are standard runs, bit for bit; layouts, resuming and saved models; the coordinate check, and bugs that it finds.
#include <map>
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "run/coord_check.h"
#include "run/known_state.h"
#include "tiny_run.h"

using namespace llmc;

namespace {

// A model of this family, four times as wide, three times as deep and with heads twice as large as its base, whose
// layers are two.
ModelConfig scaled(const char* family, bool tied) {
  ModelConfig c;
  c.family = *find_family(family);
  c.n_layer = 6, c.n_head = 4, c.n_kv_head = c.family.norm == Norm::layernorm ? 4 : 2, c.head_size = 16, c.n_embd = 64;
  c.n_ffn = 256, c.vocab_size = 61, c.n_positions = 32, c.tied = tied;
  if (c.family.experts != ExpertFields::none) {
    const bool shared = std::string_view(family) == "qwen2_moe";
    c.experts = {.count = 4, .per_token = 2, .width = 256, .shared = shared ? 256 : 0, .shared_gate = shared};
  }
  c.base = {16, 2, 8};
  return c;
}

// Initial standard deviation (of a gain: its value; of a bias: 0), and parts of rate and epsilon.
struct Expected {
  double initial, rate, eps;
};

// By hand, for m = 4, l = 3, d = 2 and AdamW.
Expected by_hand(const std::string& name, const ModelConfig& c) {
  const double s = c.init_std, root2 = std::sqrt(2.0);
  const auto is = [&](const char* part) { return name.find(part) != name.npos; };
  const bool bias = name.ends_with(".bias"), norms_queries = c.family.qk_norm != QkNorm::none;
  if (is("wte") || is("wpe")) return {s, 1, 1 / 4.0};
  if (is("lm_head")) return {s / 4, 1 / 4.0, 1};
  if (is("ln_f")) return {bias ? 0 : c.tied ? 1 / 4.0 : 1, c.tied ? 1 / 4.0 : 1, c.tied ? 1 : 1 / 4.0};
  if (is("ln1") || is("ln2")) return {bias ? 0 : 1.0, 1, 1 / 12.0};
  if (is("q_norm")) return {1 / root2, 1 / root2, root2 / 12};
  if (is("k_norm")) return {1, 1, 1 / 12.0};
  if (is("router") || is("shared_gate")) return {s / 4, 1 / 4.0, 1 / 3.0};
  if (is("attn.q.") && bias) return {0, 1 / root2, root2 / 12};
  if (is("attn.q.") && !norms_queries) return {s / 2 / root2, 1 / (4 * root2), root2 / 12};
  if (is(".proj.") || is(".down."))
    return bias ? Expected{0, 1 / 3.0, 1 / 4.0} : Expected{s / 2 / 2 / 3, 1 / 12.0, 1 / 4.0};  // 1 / sqrt(2 x 2 layers)
  if (bias) return {0, 1, 1 / 12.0};
  return {s / 2, 1 / 4.0, 1 / 12.0};
}

const ParamSpec& param(const ParamTable& table, const std::string& name) {
  for (const UnitSpec& unit : table)
    for (const ParamSpec& p : unit.params)
      if (p.name == name) return p;
  throw Error("no " + name);
}

const double rounding = 4e-7;  // two of fp32

}  // namespace

TEST_CASE("every family's parameters are scaled as the papers' tables say", "[train][parametrization]") {
  for (const Family& family : families)
    for (const bool tied : {false, true}) {
      const ModelConfig c = scaled(family.model_type, tied);
      for (const Optimizer rule : {Optimizer::adamw, Optimizer::lion})
        for (const UnitSpec& unit : parameter_table(c, rule))
          for (const ParamSpec& p : unit.params) {
            INFO(family.model_type << " " << p.name);
            const Expected e = by_hand(p.name, c);
            const double initial = p.init == Init::normal ? p.init_std : p.init == Init::constant ? p.init_value : 0;
            REQUIRE(std::abs(initial - e.initial) <= rounding * e.initial);
            REQUIRE(std::abs(p.rate - e.rate) <= rounding * e.rate);
            REQUIRE(std::abs(p.eps - e.eps) <= rounding * e.eps);
          }
    }
}

TEST_CASE("Muon's rates make up for what its scales do not do", "[train][parametrization]") {
  // 256 x 64 and base 64 x 16: singular values of the updates 0.2 sqrt(256) and 0.2 sqrt(64), for 2 and 2 of sqrt(rows
  // / columns); or 2 and 2. Heads apart: 32 rows, base 16, of 64 and 16 columns: 0.2 sqrt(64) and 0.2 sqrt(16), for
  // sqrt(1 / 2) and 1; or 1 and 1.
  const ModelConfig c = scaled("llama", true);
  struct Case {
    MuonScale scale;
    HeadGroups heads;
    const char* name;
    double rate;
  };
  using enum MuonScale;
  const double query = 1 / std::sqrt(2.0), branch = 1 / 3.0;
  for (const Case& is : {Case{rms, HeadGroups::together, "mlp.up.weight", 1 / 2.0},
                         {spectral, HeadGroups::together, "mlp.up.weight", 1},
                         {rms, HeadGroups::together, "mlp.down.weight", branch / 2},
                         {spectral, HeadGroups::together, "mlp.down.weight", branch},
                         {rms, HeadGroups::together, "attn.q.weight", query / 2},
                         {rms, HeadGroups::apart, "attn.q.weight", query / 2 / std::sqrt(2.0)},
                         {spectral, HeadGroups::apart, "attn.q.weight", query / std::sqrt(2.0)}}) {
    INFO(is.name << " " << name_of(is.scale) << " " << name_of(is.heads));
    const ParamTable table = parameter_table(c, Optimizer::muon, {}, {.scale = is.scale, .heads = is.heads});
    const ParamSpec p = param(table, std::string("blocks.1.") + is.name);
    REQUIRE(std::abs(p.rate - is.rate) <= rounding * is.rate);
    REQUIRE(std::abs(param(table, "wte.weight").rate - 1) == 0);  // AdamW's rules
    REQUIRE(std::abs(param(table, "ln_f.weight").rate - 0.25) == 0);
  }
}

TEST_CASE("a multiplier folded into a weight changes nothing but the weight's unit", "[train][parametrization]") {
  // w follows its gradient g(a w) a; the folded a w follows g(a w).
  const double a = 0.3;
  const auto gradient = [](double x) { return std::sin(3 * x) + 0.2; };
  const auto check = [&](auto step_of) {
    const OptimizerOptions plain{
        .lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 0.05f, .weight_decay = 0.1f, .step = 1};
    OptimizerOptions folded = plain;
    double w = 0.7, m = 0, v = 0, x = a * w, mx = 0, vx = 0;
    for (int64_t s = 1; s <= 20; ++s) {
      step_of(plain, s, 1.0, w, m, v, a * gradient(a * w));
      step_of(folded, s, a, x, mx, vx, gradient(x));
      REQUIRE(std::abs(x - a * w) < 1e-13);
    }
    REQUIRE(std::abs(w - 0.7) > 0.1);
  };
  const auto of_part = [](OptimizerOptions o, int64_t step, double part, auto&& use) {  // unit_state.h's, in double
    using Step = AdamWStep<double>;
    o.step = step;
    Step s(o);
    s.decay = 1 - static_cast<double>(o.lr) * static_cast<double>(o.weight_decay);
    s.rate *= part, s.eps /= part;
    use(s);
  };
  check([&](const OptimizerOptions& o, int64_t s, double part, double& w, double& m, double& v, double g) {
    of_part(o, s, part, [&](const AdamWStep<double>& step) { step(w, m, v, g); });
  });
  check([](OptimizerOptions o, int64_t s, double part, double& w, double& m, double&, double g) {
    o.step = s;
    LionStep<double> step(o);
    step.rate *= part;
    step(w, m, g);
  });
}

TEST_CASE("a run of the base's size is a standard run, bit for bit", "[train][parametrization]") {
  for (const char* more : {"", "--optimizer lion", "--optimizer muon", "--model d2-e4 --n-embd 16 --moe-z-loss 0.001",
                           "--dtype bf16 --master-weights none"}) {
    const TempDir dir;
    INFO(more);
    const std::string options = std::string("--max-steps 4 --n-layer 2 ") + more + " ";
    const bool wider = std::string_view(more).find("n-embd") != std::string_view::npos;
    run_well(tiny(dir / "standard", options));
    run_well(tiny(dir / "scaled",
                  options + "--parametrization completep --base-depth 2 --base-width " + (wider ? "16" : "12")));
    REQUIRE(state_of(dir / "standard/step-000004") == state_of(dir / "scaled/step-000004"));
    run_well(tiny(dir / "other", options + "--parametrization completep --base-depth 1 --base-width 6"));
    REQUIRE(losses(dir / "other") != losses(dir / "standard"));
  }
}

TEST_CASE("with completep, layouts are the run of one rank; runs resume; saved models compute the same",
          "[train][parametrization]") {
  for (const std::string& model :
       {std::string("--model d2 --n-embd 24 --n-head 2 "),
        std::string(
            "--model qwen3:0.6B --n-layer 2 --n-embd 24 --n-head 4 --n-kv-head 2 --n-ffn 48 --optimizer muon ")}) {
    const TempDir dir;
    const auto run = [&](const std::string& out, const std::string& more) {
      return tiny(dir / out, model +
                                 "--seq-len 32 --batch-size 4 --total-batch-size 256 --max-steps 6 --threads 2 "
                                 "--parametrization completep --base-width 6 --base-depth 1 --base-head-size 3 " +
                                 more);
    };
    run_well(run("one", "--val-data " + tiny_data + " --val-steps 2"));
    const auto expected = losses(dir / "one");
    for (const char* layout : {"--local-ranks 2 --tp 2", "--local-ranks 2 --pp 2", "--local-ranks 2 --zero-stage 3",
                               "--local-ranks 4 --tp 2 --zero-stage 1"}) {
      INFO(model << layout);
      run_well(run("several", std::string(layout) + " --restart"));
      for (const auto& [step, loss] : losses(dir / "several")) REQUIRE(std::abs(loss / expected.at(step) - 1) < 1e-5);
    }
    run_well(run("resumed", "--max-steps 6 --checkpoint-every 3"));
    std::filesystem::remove_all(dir / "resumed/step-000006");
    run_well(run("resumed", "--checkpoint-every 3"));
    REQUIRE(state_of(dir / "resumed/step-000006") == state_of(dir / "one/step-000006"));
    refused(run("one", "--max-steps 7 --base-width 12"), "--base-width was '6' and is now '12'");
    refused(tiny(dir / "one", model + "--seq-len 32 --batch-size 4 --total-batch-size 256 --max-steps 7"),
            "--parametrization was 'completep' and is now 'standard'");
    const std::string evaluated = said("--evaluate --model " + (dir / "one/step-000006") + " --val-data " + tiny_data +
                                       " --seq-len 32 --batch-size 8 --val-steps 2 --json");
    const double saved = nlohmann::json::parse(evaluated)["loss"].get<double>();
    REQUIRE(std::abs(saved / validations(dir / "one").at(6) - 1) < 1e-6);
  }
}

TEST_CASE("initial weights have the standard deviation asked for", "[train][parametrization]") {
  const TempDir dir;
  const auto deviation = [&](const std::string& out, const std::string& more) {
    run_well(tiny(dir / out, "--max-steps 1 --lr 1e-12 --weight-decay 0 " + more));
    const std::string bytes = weights_of(dir / out + "/step-000001").at("transformer.wte.weight");
    std::vector<float> weights(bytes.size() / sizeof(float));
    std::memcpy(weights.data(), bytes.data(), bytes.size());
    double squares = 0;
    for (const float w : weights) squares += static_cast<double>(w) * w;
    return std::pair{std::sqrt(squares / static_cast<double>(weights.size())), weights.size()};
  };
  for (const auto& [options, expected] : {std::pair{"", 0.02}, {"--init-std 0.1", 0.1}}) {
    const auto [found, count] = deviation(formatted("std-{}", expected), options);
    REQUIRE(std::abs(found / expected - 1) < 5 / std::sqrt(2.0 * static_cast<double>(count)));  // five standard errors
  }
  refused(tiny(dir / "x", "--init-std 0.1 --model " + dir / "std-0.1/step-000001"), "add --from-scratch");
}

TEST_CASE("bases that cannot be used are refused", "[train][parametrization]") {
  const TempDir dir;
  refused(tiny(dir / "x", "--parametrization mup"), "needs --base-width");
  refused(tiny(dir / "x", "--parametrization completep --base-width 6"), "needs --base-depth");
  refused(tiny(dir / "x", "--parametrization mup --base-width 6 --base-depth 1"), "--base-depth 1");
  refused(tiny(dir / "x", "--base-width 6"), "add --parametrization mup");
  refused(tiny(dir / "x", "--parametrization mup --base-width 6 --optimizer sgd"), "adamw, lion and muon");
  for (const char* state : {"--moment1-dtype bf16", "--dtype bf16 --master-weights split"})
    refused(
        tiny(dir / "x", "--model d3 --n-embd 96 --n-head 3 --parametrization mup --base-width 48 --base-head-size 16 " +
                            std::string(state)),
        "begins within a block of 64 elements of optimizer state");
}

namespace {

// Two heads that grow with the width.
Options coord_options(Optimizer optimizer, double lr) {
  Options o;
  o.model = "d2", o.n_head = 2, o.optimizer = optimizer, o.lr = lr;
  o.parametrization = Parametrization::completep, o.base_width = 32, o.base_depth = 2, o.base_head_size = 16;
  return o;
}
const Device coord_device{DeviceKind::cpu, 2};
StepConfig coord_step(const Options& o, int64_t width, std::optional<int64_t> depth, const ScalingRules* rules) {
  ModelConfig c = coord::model_of(o, width, depth);
  c.scaling = rules;
  return coord::step_of(o, c, coord_device);
}
coord::Axis over_widths(const Options& o, const std::vector<int64_t>& widths,
                        const ScalingRules* rules = &scaling_rules, int64_t seeds = coord::seeds) {
  std::vector<StepConfig> models;
  for (const int64_t width : widths) models.push_back(coord_step(o, width, {}, rules));
  return coord::check_axis("width", widths, models, o, coord_device, seeds);
}
coord::Axis over_depths(const Options& o, const ScalingRules* rules = &scaling_rules, int64_t seeds = coord::seeds) {
  const std::vector<int64_t> depths = {4, 8, 16};
  std::vector<StepConfig> models;
  for (const int64_t depth : depths) models.push_back(coord_step(o, 128, depth, rules));
  return coord::check_axis("depth", depths, models, o, coord_device, seeds);
}

}  // namespace

TEST_CASE("the coordinate check passes with a parametrization that fits, and fails without",
          "[train][parametrization]") {
  Options o = coord_options(Optimizer::adamw, 2e-3);
  o.n_head.reset(), o.base_head_size.reset();  // more heads, of the same size
  const coord::Axis good = over_widths(o, {128, 256});
  INFO(coord::text_of({good}));
  REQUIRE(good.lines.size() == 2 * coord::kinds);
  REQUIRE(good.good());
  o.parametrization = Parametrization::standard;
  const coord::Axis bad = over_widths(o, {128, 256}, &scaling_rules, 1);
  INFO(coord::text_of({bad}));
  REQUIRE_FALSE(bad.good());
}

TEST_CASE("widths from whose sizes no slope can be told are refused", "[train][parametrization]") {
  Options o = coord_options(Optimizer::adamw, 2e-3);
  Log silent = Log::silent();
  for (const char* widths : {"128,256", "64,96", "32,64,128,256", "256"}) {
    o.coord_check = widths;
    REQUIRE_ERROR(coord::check(o, silent), "give widths such as 128,256,512");
  }
  for (const char* widths : {"128,", "256,128", "128,128", "128,x", "0,128"}) {
    o.coord_check = widths;
    REQUIRE_ERROR(coord::check(o, silent), "--coord-check ");
  }
}

TEST_CASE("the coordinate check refuses depths, and deep models, before it trains the wide ones",
          "[train][parametrization]") {
  Options o = coord_options(Optimizer::adamw, 2e-3);
  Log silent = Log::silent();
  o.coord_check = "128,512", o.lr = std::numeric_limits<double>::infinity();  // the first model to train would end it
  REQUIRE_ERROR(coord::check(o, silent), "of a model with 128 channels has loss");
  for (const auto& [depths, part] : {std::pair("2", "--coord-depths 2: expected at least two depths"),
                                     {"4,2", "--coord-depths 4,2: expected numbers that rise"},
                                     {"2,100000", "the model has 100000 layers"}}) {
    o.coord_depths = depths;
    REQUIRE_ERROR(coord::check(o, silent), part);
  }
}

TEST_CASE("the coordinate check trains on one rank, whatever the layout, with the losses and clips of the options",
          "[train][parametrization]") {
  Options o = coord_options(Optimizer::adamw, 2e-3);
  const auto change = [&] {
    const StepConfig step = coord::step_of(o, coord::model_of(o, 32, {}), coord_device);
    const coord::ModelSizes sizes = coord::sizes_of(o, step, coord_device, 1);
    return sizes[static_cast<size_t>(coord::Kind::logits)].change;
  };
  const double plain = change();
  o.ranks = 4, o.zero_stage = 3, o.tp = 2;
  REQUIRE(change() == plain);
  o.z_loss = 1;
  REQUIRE(change() != plain);
  o.z_loss = 0, o.qk_clip = 1e-3;
  REQUIRE(change() != plain);
  o.head_lr = 1e-3;
  REQUIRE_ERROR(change(), "whose output layer is its embedding");
}

TEST_CASE("the coordinate check passes with every optimizer, and fails with any rule left out",
          "[train][parametrization][long]") {
  const std::vector<int64_t> widths = {128, 256, 512};
  for (const auto& [optimizer, lr] :
       {std::pair{Optimizer::adamw, 2e-3}, {Optimizer::lion, 4e-4}, {Optimizer::muon, 1e-2}}) {
    const Options o = coord_options(optimizer, lr);
    const coord::Axis width = over_widths(o, widths), depth = over_depths(o);
    INFO(name_of(optimizer) << "\n" << coord::text_of({width, depth}));
    REQUIRE((width.good() && depth.good()));
  }
  Options o = coord_options(Optimizer::adamw, 2e-3);
  for (double ScalingRules::*rule :
       {&ScalingRules::hidden_std, &ScalingRules::hidden_rate, &ScalingRules::output, &ScalingRules::query}) {
    ScalingRules wrong;
    wrong.*rule = 0;
    const coord::Axis width = over_widths(o, widths, &wrong, 1);
    INFO(coord::text_of({width}));
    REQUIRE_FALSE(width.good());
  }
  ScalingRules wrong;
  wrong.branch = 0;
  REQUIRE_FALSE(over_depths(o, &wrong, 1).good());
  o.adam_eps = 1e-2, o.lr = 5e-3;  // epsilon is larger than gradients
  o.n_head.reset(), o.base_head_size.reset();
  const coord::Axis width = over_widths(o, widths), depth = over_depths(o);
  INFO(coord::text_of({width, depth}));
  REQUIRE((width.good() && depth.good()));
  wrong = {.gradient_width = 0};
  REQUIRE_FALSE(over_widths(o, widths, &wrong, 1).good());
  wrong = {.gradient_depth = 0};
  REQUIRE_FALSE(over_depths(o, &wrong, 1).good());
}
