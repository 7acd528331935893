// How the layers of a model are divided among the stages of a pipeline: by --pp-layout, on paper and in training; and
// that together the ranks hold the whole model.
#include "catch2.h"
#include "helpers.h"
#include "parallel/on_ranks.h"
#include "run/plan/report_plan.h"
#include "run/selftest/selftest.h"
#include "run/setup.h"
#include "schedule/laws.h"
#include "shard/whole_check.h"
#include "tiny_run.h"

using namespace llmc;

namespace {

using Sizes = std::vector<int64_t>;

StepConfig step_of(const ModelConfig& model, DType dtype, Schedule schedule, int stages, int chunks, Sizes layers) {
  StepConfig step{.model = model,
                  .precision = dtype,
                  .batch = {2, 16},
                  .micro_batches = 6,
                  .layout = {.pipeline = {.schedule = schedule}}};
  step.layout.pipeline.stages = stages;
  step.layout.pipeline.chunks_per_stage = chunks;
  step.layout.pipeline.layers = std::move(layers);
  return step;
}

ModelConfig tiny(bool tied, int64_t n_layer, int heads = 2) {
  ModelConfig model = selftest::Model{"qwen3", tied, DType::fp32, heads, heads}.config();
  model.n_layer = n_layer;
  return model;
}

// Costs of layers that all cost 1.
ModelCosts costs_of(int64_t n_layer, double embedding, double head) {
  return {
      {.seconds = embedding}, std::vector<ModuleCost>(static_cast<size_t>(n_layer), {.seconds = 1}), {.seconds = head}};
}

double slowest_stage(const ModelCosts& costs, const Sizes& layers, const std::vector<int>& stage_of) {
  std::vector<double> stages(stage_of.size());
  for (size_t c = 0; c < layers.size(); ++c)
    stages[static_cast<size_t>(stage_of[c])] += static_cast<double>(layers[c]) +
                                                (c == 0 ? costs.embedding.seconds : 0) +
                                                (c + 1 == layers.size() ? costs.head.seconds : 0);
  return *std::ranges::max_element(stages);
}

// The least that any layout of chunks can have, by trying all.
double fastest(const ModelCosts& costs, const std::vector<int>& stage_of, Sizes& layers, size_t c, int64_t left) {
  if (c + 1 == stage_of.size()) {
    layers[c] = left;
    return slowest_stage(costs, layers, stage_of);
  }
  double best = std::numeric_limits<double>::infinity();
  for (layers[c] = c == 0 ? 0 : 1; layers[c] <= left; ++layers[c]) {
    const int64_t n = layers[c];
    best = std::min(best, fastest(costs, stage_of, layers, c + 1, left - n));
    layers[c] = n;
  }
  return best;
}

std::vector<int> stages_of(Schedule schedule, int stages, int chunks) {
  StepConfig step;
  step.layout.pipeline.schedule = schedule;
  step.layout.pipeline.stages = stages;
  step.layout.pipeline.chunks_per_stage = chunks;
  return step.stages_of_chunks();
}

}  // namespace

TEST_CASE("uneven stages, and stages with only the embedding or the head, train bit for bit as one rank", "[pp]") {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const ModelConfig model = tiny(false, 3);
    const selftest::Outcome alone = selftest::run_layout(step_of(model, dtype, Schedule::one_f_one_b, 1, 1, {}));
    REQUIRE(alone.fault.empty());
    struct Case {
      Schedule schedule;
      int stages, chunks;
      Sizes layers;
    };
    for (const Case& c : {Case{Schedule::one_f_one_b, 2, 1, {1, 2}},
                          {Schedule::one_f_one_b, 3, 1, {0, 3, 0}},
                          {Schedule::gpipe, 2, 1, {0, 3}},
                          {Schedule::interleaved, 2, 2, {0, 1, 2, 0}}}) {
      const StepConfig step = step_of(model, dtype, c.schedule, c.stages, c.chunks, c.layers);
      const selftest::Outcome outcome = selftest::run_layout(step);
      INFO(name_of(dtype) << " " << detail::layout_text(step) << outcome.fault);
      REQUIRE(outcome.fault.empty());
      REQUIRE(outcome.losses == alone.losses);
      REQUIRE(outcome.norms == alone.norms);
      REQUIRE(outcome.weights == alone.weights);
      REQUIRE(outcome.optimizer_state == alone.optimizer_state);
    }
  }
}

TEST_CASE("no layout of chunks has a faster slowest stage than the balanced one", "[pp]") {
  for (const Schedule schedule : {Schedule::interleaved, Schedule::zb_v, Schedule::one_f_one_b})
    for (const int stages : {2, 3})
      for (const int64_t n_layer : {4, 5, 7, 9})
        for (const double embedding : {0.0, 0.5, 3.0})
          for (const double head : {0.0, 0.7, 2.5, 6.0}) {
            const std::vector<int> stage_of = stages_of(schedule, stages, schedule == Schedule::one_f_one_b ? 1 : 2);
            const ModelCosts costs = costs_of(n_layer, embedding, head);
            const Sizes layers = balanced_layers(costs, stage_of);
            Sizes tried(stage_of.size());
            INFO(name_of(schedule) << " " << stages << " " << n_layer << " " << embedding << " " << head);
            check_every_layer_once(chunks_of(layers), n_layer);
            REQUIRE(slowest_stage(costs, layers, stage_of) ==
                    Catch::Approx(fastest(costs, stage_of, tried, 0, n_layer)));
          }
  // zb-v has the embedding and the head on the same stage.
  REQUIRE(balanced_layers(costs_of(10, 1, 3), stages_of(Schedule::zb_v, 2, 2)) == Sizes{2, 3, 4, 1});
  REQUIRE_ERROR(balanced_layers(costs_of(5, 0, 1), stages_of(Schedule::zb_v, 4, 2)),
                "the embedding, 5 layers and the head cannot be divided into 8 chunks; use at most 7");
}

TEST_CASE("counted costs are those of the products that a module has, with what it recomputes", "[pp]") {
  ModelConfig model = tiny(false, 4);
  model.vocab_size = 1024;
  StepConfig step = step_of(model, DType::fp32, Schedule::one_f_one_b, 1, 1, {});
  const double rows = static_cast<double>(step.batch.rows()), C = static_cast<double>(model.n_embd);
  const ModelCosts costs = count_costs(step, 1);
  REQUIRE(costs.blocks.size() == 4);
  REQUIRE(costs.embedding.seconds == 0);
  REQUIRE(costs.head.seconds == Catch::Approx(6 * rows * C * 1024).epsilon(1e-3));
  const double products = static_cast<double>(count_parameters({parameter_table(model)[1]})) * 6 * rows;
  REQUIRE(costs.blocks[0].seconds > 0.99 * products);
  REQUIRE(costs.blocks[0].seconds < 1.2 * products);  // attention
  REQUIRE(costs.blocks[0].activation_bytes == rows * C * 4);
  step.recompute = Recompute::block;
  const double recomputed = count_costs(step, 1).blocks[0].seconds / costs.blocks[0].seconds;
  REQUIRE((1.2 < recomputed && recomputed < 4.0 / 3));  // its last product is not needed again
  REQUIRE(count_costs(step, 1).head.seconds == costs.head.seconds);
}

TEST_CASE("--pp-layout is taken, balanced or refused by name", "[pp]") {
  const auto layers_with = [](const std::string& options) {
    const ProgramResult r = run_program(
        "--plan --model d2 --n-layer 10 --n-embd 64 --n-head 1 --vocab-size 4096 -t 64 "
        "-b 1 -d 512 " +
        options);
    const size_t begin = r.out.find(" of ", r.out.find("stages of") - 1), end = r.out.find(" layers,", begin);
    return r.status == 0 ? r.out.substr(begin + 4, end - begin - 4) : r.err;
  };
  REQUIRE(layers_with("--pp 4") == "2, 3, 3, 2");
  REQUIRE(layers_with("--pp 4 --pp-layout even") == "2, 3, 3, 2");
  REQUIRE(layers_with("--pp 4 --pp-layout 1,2,3,4") == "1, 2, 3, 4");
  REQUIRE(layers_with("--pp 2 --schedule interleaved --pp-layout 1,2,3,4") == "4, 6");
  REQUIRE(layers_with("--pp 2 --pp-layout balanced") == "7, 3");  // the head costs as much as 5 layers
  const auto refused = [&](const std::string& options, const std::string& why) {
    const std::string said = layers_with(options);
    INFO(said);
    REQUIRE(said.find(why) != std::string::npos);
  };
  refused("--pp 4 --pp-layout 1,2,3,3",
          "--pp-layout 1,2,3,3: the numbers add up to 9, but the model has 10 layers: 1 too few");
  refused("--pp 4 --pp-layout 5,5", "found 2 numbers, expected 4: one for each of the 4 stages (--pp 4)");
  refused("--pp 2 --schedule interleaved --pp-layout 5,5", "expected 4: one for each chunk, in the order of the model");
  refused("--pp 4 --pp-layout 4,0,3,3", "number 2 is 0");
  refused("--pp 4 --pp-layout blanced", "expected even, balanced, or the layers of each stage, as in 8,10,10,8");
  refused("--pp-layout balanced", "--pp-layout balanced is for the stages of a pipeline, and --pp 1 has one");
  refused("--pp 16", "10 layers cannot be spread over 16 stages");
  refused("--pp 16 --pp-layout balanced", "cannot be divided into 16 stages; use at most 12");
}

TEST_CASE("a plan has a row for each stage, and the largest decides", "[pp]") {
  const std::string model = "--plan --model d2 --n-layer 6 --n-embd 64 --n-head 1 --vocab-size 257 -t 64 -b 1 -d 512 ";
  const ProgramResult r = run_program(model + "--pp 3 --pp-layout 1,4,1");
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  REQUIRE(r.out.find("memory per rank of stage 1, which needs most") != std::string::npos);
  for (const char* row : {"  stage 0                embedding, 0 ", "  stage 1                1-4 ",
                          "  stage 2                5, head ", "work per step of a rank of stage 1, which has most",
                          "slowest stage          1, of 0 to 2: ", "--pp-layout balanced   ",
                          "% if all chunks took equally long: (P - 1) / (M + P - 1)"})
    REQUIRE(r.out.find(row) != std::string::npos);
  REQUIRE(r.out.find("PipeDream") == std::string::npos);  // the speed of the links is not known
  const ProgramResult refused = run_program(model + "--pp 3 --pp-layout 1,4,1 --memory-limit 0.0001");
  REQUIRE(refused.status == 1);

  StepConfig step = step_of(tiny(true, 6), DType::fp32, Schedule::one_f_one_b, 3, 1, {1, 4, 1});
  const Plan plan = make_plan(step, {DeviceKind::cpu, 1});
  REQUIRE(plan.stage_with_most(&Plan::total_bytes) == 1);
  REQUIRE(plan.total_bytes() == make_plan(step, {DeviceKind::cpu, 1}, 1).total_bytes());
  REQUIRE(plan.of_stage(2).total_bytes() == make_plan(step, {DeviceKind::cpu, 1}, 2).total_bytes());
  double flops = 0;
  for (size_t s = 0; s < 3; ++s) flops += plan.of_stage(s).flops();
  StepConfig alone = step_of(step.model, DType::fp32, Schedule::one_f_one_b, 1, 1, {});
  REQUIRE(flops == Catch::Approx(make_plan(alone, {DeviceKind::cpu, 1}).flops()));
  REQUIRE(flops_of_step(plan, step) == Catch::Approx(flops));
  Options o;
  o.memory_limit = 1e-6;
  REQUIRE_ERROR(require_memory(o, step, plan, {DeviceKind::cpu, 1}), "each rank of stage 1, which needs most, needs");
}

TEST_CASE("a plan says how well the stages are balanced, by the schedule, the slices and the links", "[pp]") {
  using Text = std::map<std::string, std::string>;
  Device device{DeviceKind::cpu, 1};
  const auto rows_of = [&](const StepConfig& step) {
    const Rows rows = detail::balance_rows(step, device);
    return Text(rows.begin(), rows.end());
  };
  const auto has = [](const std::string& text, const std::string& part) {
    INFO(text);
    REQUIRE(text.find(part) != std::string::npos);
  };
  const ModelConfig model = tiny(false, 8);
  StepConfig step = step_of(model, DType::fp32, Schedule::pipedream, 4, 1, {2, 2, 3, 1});
  step.micro_batches = 1;
  Text rows = rows_of(step);
  has(rows["idle, over all stages"], "none between flushes but for unequal stages (the slowest has ");
  has(rows["idle, over all stages"], "each flush costs the time of P - 1 = 3 micro-batches");
  REQUIRE(!rows.contains("PipeDream's answer"));
  device.machine = ideal_machine(1e12, 1e12, 1e9, 1e-6);
  rows = rows_of(step);
  has(rows["PipeDream's answer"], ", with links of 1.0 GB/s; this trainer does not replicate stages");
  // Of a server whose links join all ranks, and of one that has fewer.
  Machine servers = *device.machine;
  for (const auto& [ranks, gb_per_s] : {std::pair{4, "7.0"}, {2, "1.0"}}) {
    servers.links = {{.ranks = ranks, .bytes_per_s = 7e9}, {.bytes_per_s = 1e9}};
    device.machine = std::make_shared<const Machine>(servers);
    has(rows_of(step)["PipeDream's answer"], formatted(", with links of {} GB/s", gb_per_s));
  }
  device.machine = ideal_machine(1e12, 1e12, 1e15, 1e-6);
  rows = rows_of(step);
  has(rows["PipeDream's answer"], "1 stage of 8 layers on 4 workers (pure data parallelism), with links of ");
  // Steady: the slowest stage works all the time.
  const Device gpu{.kind = DeviceKind::cuda, .machine = device.machine};
  const Plan plan = make_plan(step, gpu);
  const Rows time = detail::time_rows({}, step, plan, gpu);
  Text shown(time.begin(), time.end());
  REQUIRE(shown["bubble"] == "none between flushes");
  const double slowest = plan.with_most(&Plan::step_seconds).step_seconds;
  REQUIRE(std::stod(shown["step"]) == Catch::Approx(1e3 * slowest).margin(1e-3));

  const auto unequal = [&] {
    const Plan whole = make_plan(step, gpu);
    const auto losses = detail::losses_of(step, whole, *detail::step_time(step, whole, gpu), gpu);
    return *std::ranges::find(losses, "stages of unequal work", &detail::Loss::what);
  };
  double mean = 0;
  for (size_t s = 0; s < 4; ++s) mean += plan.of_stage(s).step_seconds / 4;
  REQUIRE(unequal().seconds == Catch::Approx(slowest - mean));
  step.layout.pipeline.layers = {4, 2, 1, 1};
  REQUIRE(unequal().remedy == "--pp-layout balanced");
  step.layout.pipeline.layers = balanced_layers(count_costs(step), step.stages_of_chunks());
  REQUIRE(rows_of(step)["--pp-layout balanced"] == "the same layers");
  REQUIRE(unequal().remedy == "a smaller --pp");
  step.layout.pipeline.schedule = Schedule::zb_h1;
  step.micro_batches = 8;
  has(rows_of(step)["idle, over all stages"],
      "(both parts of a backward count as equally long); would be 11.1% if all chunks");

  // Slices take as long as --token-slices auto takes them to: one that is much longer than the other makes the stages
  // wait longer than two halves do.
  step.layout.pipeline.schedule = Schedule::one_f_one_b;
  step.micro_batches = 1;
  step.batch = {1, 1024};
  const auto bubble_with = [&](const Sizes& slices) {
    step.layout.pipeline.slices = slices;
    return std::stod(rows_of(step)["idle, over all stages"]);
  };
  REQUIRE(bubble_with({1000, 24}) > bubble_with({540, 484}) + 2);
}

TEST_CASE("the header says what a pipeline idles on paper, and what would make it less", "[pp]") {
  StepConfig step = step_of(tiny(false, 8), DType::fp32, Schedule::one_f_one_b, 4, 1, {});
  step.micro_batches = 1;
  REQUIRE(detail::pipeline_text(step) ==
          "4 stages, 1 micro-batch: on paper each stage idles 75% of a step; 16 micro-batches (--total-batch-size 512) "
          "would leave 16%");
  step.micro_batches = 16;
  REQUIRE(detail::pipeline_text(step) == "4 stages, 16 micro-batches: on paper each stage idles 16% of a step");
  step.layout.pipeline.schedule = Schedule::zb_v, step.layout.pipeline.chunks_per_stage = 2,
  step.micro_batches = 2;  // too few for a law
  REQUIRE(detail::pipeline_text(step).ends_with("; 16 micro-batches (--total-batch-size 512) would leave 3%"));
  REQUIRE(detail::layout_text(step).find("zb-v, 2 chunks per stage") != std::string::npos);
}

TEST_CASE("what would fit is found with stages too, and keeps them", "[pp]") {
  const std::string model =
      "--plan --model d4 --vocab-size 257 -t 128 -b 8 -d 16384 --pp 2 --schedule interleaved --threads 1 ";
  const ProgramResult refused = run_program(model + "--memory-limit 0.05");
  INFO(refused.err);
  REQUIRE(refused.status == 1);
  const size_t with = refused.err.find("it would with ");
  REQUIRE(with != std::string::npos);
  const std::string change = refused.err.substr(with + 14, refused.err.find(" (", with) - with - 14);
  REQUIRE(change.find("--schedule") == std::string::npos);
  REQUIRE(run_program(model + "--memory-limit 0.05 " + change).status == 0);
}

TEST_CASE("a run resumes in another --pp-layout, bit for bit where the table is not tied", "[pp]") {
  const TempDir directory;
  const std::string out = directory.path() + "/run", other = directory.path() + "/other";
  const auto run = [&](const std::string& to, const std::string& more) {
    return run_program(
        "--model llama2:7B --n-layer 4 --n-head 2 --n-kv-head 2 --n-embd 16 --n-ffn 24 --vocab-size 211 "
        "--seq-len 16 --batch-size 2 --total-batch-size 192 --train-data " +
        tiny_data + " --lr 1e-2 --threads 2 --max-steps 4 --checkpoint-every 2 --pp 2 --local-ranks 2 --out-dir " + to +
        " " + more);
  };
  const ProgramResult whole = run(out, "--from-scratch --pp-layout 1,3");
  INFO(whole.out << whole.err);
  REQUIRE(whole.status == 0);
  const ProgramResult resumed = run(other, "--from-scratch --pp-layout balanced --resume " + out + "/step-000002");
  INFO(resumed.out << resumed.err);
  REQUIRE(resumed.status == 0);
  REQUIRE(resumed.out.find("notice: --pp-layout was '1,3' and is now 'balanced'") != std::string::npos);
  for (const int64_t step : {3, 4}) {  // those of step 4 are of the weights after step 3
    REQUIRE(losses(other).at(step) == losses(out).at(step));
    REQUIRE(metric(other, "train", "grad_norm").at(step) == metric(out, "train", "grad_norm").at(step));
  }
  // The head weighs as much as a layer or two here.
  REQUIRE(resumed.out.find("2 stages of 1, 3 layers") == std::string::npos);
}

TEST_CASE("the plan of Llama 3 405B takes seconds", "[pp]") {
  const auto begin = std::chrono::steady_clock::now();
  const std::string recipe =
      "--plan --device cuda --model llama3:405B --dtype bf16 --tp 8 --pp 16 --zero-stage 1 -b 1 --local-ranks 8 ";
  for (const char* rest :
       {"-t 8192 -d 16777216 --world-size 2048", "-t 8192 -d 25165824 --world-size 3072",
        "-t 8192 -d 16777216 --world-size 2048 --schedule interleaved --pp-chunks 4 --pp-layout balanced",
        "-t 131072 -d 16777216 --world-size 2048 --cp 16"}) {
    const ProgramResult r = run_program(recipe + rest);
    INFO(rest << r.err);
    REQUIRE(r.status == 0);
    REQUIRE(r.out.find("stage 15") != std::string::npos);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  REQUIRE(seconds.count() < 120);  // a second or two on an idle machine
}

TEST_CASE("what the ranks of a layout hold is the whole model, and what is lost or held twice is named", "[pp]") {
  const auto all_held = [](const StepConfig& step) {
    std::vector<HeldByRank> all(static_cast<size_t>(step.layout.ranks()));
    std::mutex mutex;
    const Mesh mesh = step.layout.mesh();
    on_ranks(step, [&](Run& run) {
      check_whole_model(run.trainer.state(), part_of(parameter_table(step.model), step.layout.tensor, 0),
                        step.model.tied, mesh);
      std::lock_guard lock(mutex);
      const int rank = run.groups.rank();
      all[static_cast<size_t>(rank)] = {mesh.coordinate(rank, Axis::pp), mesh.coordinate(rank, Axis::tp),
                                        held_from_text(text_of(units_held(run.trainer.state())))};
    });
    return all;
  };
  const auto require_whole = [](const StepConfig& step, const std::vector<HeldByRank>& held) {
    require_whole_model(part_of(parameter_table(step.model), step.layout.tensor, 0), step.model.tied, step.layout.zero,
                        step.layout.zero, held);
  };
  for (const int zero : {0, 1, 2, 3})
    for (const bool tied : {false, true})
      for (const int tp : {1, 2}) {
        StepConfig step = step_of(tiny(tied, 4), DType::fp32, Schedule::interleaved, 2, 2, {0, 1, 1, 2});
        step.layout.zero = {.shards = 2};
        step.layout.zero.set_stage(zero);
        step.layout.tensor = tensor_parallel(step.model, tp);
        require_whole(step, all_held(step));
      }

  StepConfig step = step_of(tiny(true, 4), DType::fp32, Schedule::one_f_one_b, 2, 1, {2, 2});
  step.layout.zero = {.stage = 1, .shards = 2};
  step.layout.tensor = tensor_parallel(step.model, 2);
  const std::vector<HeldByRank> good = all_held(step);
  require_whole(step, good);
  const auto planted = [&](auto&& plant) {
    std::vector<HeldByRank> held = good;
    for (HeldByRank& rank : held) plant(rank);
    return held;
  };
  // rank.units: the embedding, blocks 0 and 1 on stage 0; the table, blocks 2 and 3, and the head on stage 1.
  const auto blocks = [](HeldByRank& rank) -> HeldUnits& {
    return *std::ranges::find_if(rank.units, [](const HeldUnits& h) { return h.units.size() > 1; });
  };
  const auto on = [](const HeldByRank& rank, int stage) { return rank.stage == stage; };
  REQUIRE_ERROR(require_whole(step, planted([&](HeldByRank& r) {
                                if (on(r, 1)) blocks(r).units.erase(blocks(r).units.begin());
                              })),
                "the model is not whole: no stage of the pipeline has blocks.2");
  REQUIRE_ERROR(require_whole(step, planted([&](HeldByRank& r) {
                                if (on(r, 0)) blocks(r).units.push_back(blocks(r).units.back() + 1);
                              })),
                "the model is not whole: blocks.2 is on stages 0, 1, expected one");
  REQUIRE_ERROR(require_whole(step, planted([&](HeldByRank& r) {
                                if (on(r, 1)) r.units.erase(r.units.begin());
                              })),
                "embedding, whose table is the head's too, is on stage(s) 0, and the head on 1");
  REQUIRE_ERROR(require_whole(step, planted([&](HeldByRank& r) { r.units.pop_back(); })), "has ");
  bool first = true;
  REQUIRE_ERROR(require_whole(step, planted([&](HeldByRank& r) {
                                if (first) --blocks(r).params[0].slots.size, first = false;
                              })),
                "rank(s), expected 1");
  first = true;
  REQUIRE_ERROR(require_whole(step, planted([&](HeldByRank& r) {
                                if (first) blocks(r).params[0].weights = {}, first = false;
                              })),
                "is held by 1 rank(s), expected 2");
  REQUIRE_ERROR(require_whole(step, planted([&](HeldByRank& r) {
                                if (on(r, 1) && r.tensor_rank == 1) blocks(r).params[0].box.row = 0;
                              })),
                "tensor-parallel rank(s), expected");
}
