// State that the host's processors update in its memory (--offload-update host): on a CPU the same bits as on the
// device, with skipped updates, averages and files; memory, bytes and time as planned; a run takes turns with others.
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "catch2.h"
#include "helpers.h"
#include "parallel/offload_layouts.h"
#include "parallel/on_ranks.h"
#include "run/selftest/selftest.h"

using namespace llmc;
using namespace offload_layouts;
using selftest::Outcome;
using enum Offloaded;

namespace {

Offload by_host(std::initializer_list<Offloaded> parts, const std::string& directory = "") {
  Offload all = offload(parts);
  all.update = OffloadUpdate::host;
  all.directory = directory;
  return all;
}

}  // namespace

TEST_CASE("updates by the host change no bit on a CPU, in any layout", "[parallel][offload]") {
  require_same(step_of("gpt2", DType::bf16, layout_of(0, 1), by_host({moments, master})));
  require_same(step_of("gpt2", DType::fp32, layout_of(0, 2), by_host({moments})));  // weights go to the host, too
  require_same(step_of("gpt2", DType::fp32, layout_of(1, 2), by_host({moments, gradients})));
  require_same(step_of("llama", DType::bf16, layout_of(2, 2), by_host({moments, master})));
  require_same(step_of("llama", DType::bf16, layout_of(3, 4), by_host({moments, master, gradients, weights})));
  // Weights stay; gradients do not: those of the next step must wait.
  for (const GradReduce reduce : {GradReduce::step, GradReduce::micro}) {
    StepConfig step = step_of("llama", DType::bf16, layout_of(3, 2), by_host({moments, master, weights}));
    step.layout.zero.grad_reduce = reduce;
    require_same(step);
  }
  Layout tensor = layout_of(3, 2), context = layout_of(3, 2), pipeline = layout_of(2, 2), experts = layout_of(3, 2);
  tensor.tensor.ranks = 2;
  require_same(step_of("llama", DType::bf16, tensor, by_host({moments, master})));
  context.context.ranks = 2;
  StepConfig sliced = step_of("llama", DType::bf16, context, by_host({moments, master}));
  sliced.batch.T = 20;
  require_same(sliced);
  pipeline.pipeline = {Schedule::one_f_one_b, 3, 1};
  require_same(step_of("gpt2", DType::bf16, pipeline, by_host({moments, master, gradients})));
  experts.expert.ranks = 1;
  require_same(step_of("mixtral", DType::bf16, experts, by_host({moments, master})));
  for (const DpSync sync : {DpSync::parameter_server, DpSync::partitioned_server}) {
    Layout served = layout_of(0, 2);
    served.zero.sync = sync;
    require_same(step_of("gpt2", DType::bf16, served, by_host({moments, master})));
  }
}

TEST_CASE("updates by the host with every rule, in few bits, without masters, with averages and files",
          "[parallel][offload][optimizer]") {
  const TempDir dir;
  for (const std::string& directory : {std::string(), dir.path()}) {
    INFO(directory);
    const StepConfig usual = step_of("llama", DType::bf16, layout_of(1, 2), by_host({moments, master}, directory));
    for (const Optimizer optimizer : {Optimizer::lion, Optimizer::sgd}) {
      StepConfig step = usual;
      step.layout.zero.optimizer = optimizer;
      INFO(name_of(optimizer));
      require_same(step);
    }
    StepConfig small = usual, none = usual, average = usual, whole = usual;
    small.precision.moment1 = DType::e4m3, small.precision.moment2 = DType::e5m3, small.precision.split_masters = true;
    require_same(small);
    none.precision.masters = false;
    none.layout.zero.offload = by_host({moments}, directory);
    require_same(none);
    average.precision.averages = true;
    require_same(average);
    whole.layout.zero.offload.piece = 1 << 22;  // as many pieces as units
    require_same(whole);
  }
  REQUIRE(names_in(dir.path()).empty());
}

TEST_CASE("a skipped update of the host leaves weights and state as they are", "[parallel][offload]") {
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const int stage : {0, 3}) {
      StepConfig step = step_of("llama", dtype, layout_of(stage, 2), by_host({moments}));
      if (dtype == DType::bf16) step.layout.zero.offload.add(master);
      StepConfig without = step;
      without.layout.zero.offload = {};
      const Outcome found = steps_in_a_row(step, 2), expected = steps_in_a_row(without, 2);
      REQUIRE(found.fault == "");
      REQUIRE(expected.fault == "");
      REQUIRE(found.same_bits(expected));
      REQUIRE(found.optimizer_state == expected.optimizer_state);
    }
}

TEST_CASE("averages that the host has take the place of weights and give it back", "[parallel][offload]") {
  StepConfig step = step_of("llama", DType::bf16, layout_of(2, 2), by_host({moments, master}));
  step.precision.averages = true;
  StepConfig without = step;
  without.layout.zero.offload = {};
  const auto loss_of_averages = [](const StepConfig& s) {
    std::vector<double> losses;
    std::mutex mutex;
    on_ranks(s, [&](Run& run) {
      const BatchSource batches = [&](int64_t m) { return selftest::read_batch(s, run.groups.reader(), m); };
      const auto loss = [&] { return run.trainer.evaluate(2, 2 * s.batch.rows() * s.layout.readers(), batches); };
      std::vector<double> mine;
      for (int64_t k = 1; k <= 2; ++k) run.trainer.step(batches, selftest::update_options(Optimizer::adamw, k), {});
      mine.push_back(loss());
      mine.push_back(run.trainer.with_averages(loss));
      mine.push_back(loss());
      const std::lock_guard lock(mutex);
      losses = mine;
    });
    return losses;
  };
  const std::vector<double> found = loss_of_averages(step);
  REQUIRE(found == loss_of_averages(without));
  REQUIRE(found[0] == found[2]);
  REQUIRE(found[0] != found[1]);
}

TEST_CASE("plans count updates by the host: buffers, gradients to the host, weights back", "[plan][offload]") {
  const auto planned = [](const StepConfig& step) { return make_plan(step, {DeviceKind::cuda}, 0, Passes::step); };
  StepConfig step = step_of("llama", DType::bf16, layout_of(1, 2), by_host({moments, master}));
  const int64_t piece = step.layout.zero.offload.piece;
  double n = 0;  // elements that this rank updates
  int64_t room = 0;
  for (const UnitSpec& unit : parameter_table(step.model)) {
    const int64_t shard = UnitLayout(unit, 2).size / 2;
    n += static_cast<double>(shard);
    room += 3 * round_up(shard * 4, Arena::alignment);
  }
  const int64_t control = round_up(4 * 8, Arena::alignment);
  const double control_bytes = 4 * 8;
  const Plan plan = planned(step);
  REQUIRE(plan.host_bytes == room + control + 2 * (4 + 2) * piece);
  REQUIRE(planned_bytes(plan, "offloaded state") == 0);
  REQUIRE(plan.step_host.to_host == 4 * n + control_bytes);
  REQUIRE(plan.step_host.to_device == 2 * n);
  // Weights that have no masters, or split ones, are read, too.
  StepConfig none = step, split = step, own = step_of("llama", DType::fp32, layout_of(1, 2), by_host({moments}));
  none.precision.masters = false;
  none.layout.zero.offload = by_host({moments});
  split.precision.split_masters = true;
  for (const StepConfig& s : {none, split}) {
    const Plan reads = planned(s);
    REQUIRE(reads.step_host.to_host == (4 + 2) * n + control_bytes);
    REQUIRE(reads.step_host.to_device == 2 * n);
  }
  const Plan masters = planned(own);
  REQUIRE(masters.step_host.to_host == (4 + 4) * n + control_bytes);
  REQUIRE(masters.step_host.to_device == 4 * n);
  // Nothing but the control moves for an update if all is there. Micro-batches and gathers move what they always do.
  StepConfig all = step_of("llama", DType::bf16, layout_of(3, 2), by_host({moments, master, gradients, weights}));
  all.micro_batches = 3;
  double gathered = 0;
  const Plan at_host = planned(all);
  for (const auto& [group, bytes] : at_host.step_traffic)
    if (group == "weights") gathered = static_cast<double>(bytes);
  REQUIRE(at_host.step_host.to_host == 3 * 4 * n + control_bytes);
  REQUIRE(at_host.step_host.to_device == 2 * 4 * n + gathered);
  // Moments in a file are read and written once, and never go to the device.
  StepConfig in_file = step;
  in_file.layout.zero.offload.directory = "/nowhere";
  const Plan files = planned(in_file);
  REQUIRE(files.step_file.read == 8 * n);
  REQUIRE(files.step_file.written == 8 * n);
  REQUIRE(files.step_host.to_host == plan.step_host.to_host);
  REQUIRE(files.step_host.to_device == plan.step_host.to_device);
  REQUIRE(files.total_bytes() == plan.total_bytes());
}

TEST_CASE("on paper, updates by the host take its time, beside which the bus is hidden", "[plan][offload]") {
  const StepConfig step = step_of("llama", DType::bf16, layout_of(0, 1), by_host({moments, master}));
  Machine machine;
  machine.flops_per_s = machine.bytes_per_s = 1e18;  // takes no time
  machine.host_bytes_per_s = 1e7;
  machine.host_update_bytes_per_s = 1e6;
  const auto planned = [&] {
    Device device{DeviceKind::cuda};
    device.machine = std::make_shared<const Machine>(machine);
    return make_plan(step, device, 0, Passes::step);
  };
  const Plan plan = make_plan(step, {DeviceKind::cuda}, 0, Passes::step);
  // Reads and writes masters, moments and weights, and reads gradients.
  const double n = plan.step_host.to_device / 2, update = n * (2 * (4 + 8 + 2) + 4) / 1e6,
               copies = 1e-7 * (4 + 2) * static_cast<double>(step.layout.zero.offload.piece);
  const Plan timed = planned();
  const double found = timed.step_seconds;
  REQUIRE(found >= update);
  // Of each unit the first piece's gradients and the last one's weights may find nothing beside them.
  REQUIRE(found < update + (static_cast<double>(parameter_table(step.model).size()) + 1) * copies);
  REQUIRE(timed.exposed_by_group.at(host_updates) > 0.98 * found);
  machine.host_update_bytes_per_s = 0;  // unknown
  REQUIRE(planned().step_seconds < update / 2);
  // A step that computes for as long as the host updates: its first forward, a third of one of two micro-batches, hides
  // as much of the update, but for the head, which a pass computes in its backward.
  machine.host_bytes_per_s = 1e18;
  machine.flops_per_s = 1e18 * planned().step_seconds / update;
  const double computes = planned().step_seconds;
  machine.host_update_bytes_per_s = 1e6;
  INFO("computes " << computes << " s, the update takes " << update << " s, both " << planned().step_seconds << " s");
  REQUIRE(planned().step_seconds < computes + update - computes / 12);
  REQUIRE(planned().step_seconds > computes + update - computes / 3);
}

TEST_CASE("on paper, each stage of a pipeline counts one update by the host, in none of its passes",
          "[plan][offload]") {
  for (const Schedule schedule : {Schedule::one_f_one_b, Schedule::pipedream}) {
    Layout layout = layout_of(0, 1);
    layout.pipeline = {schedule, 2, 1};
    StepConfig step = step_of("llama", DType::bf16, layout, by_host({moments, master}));
    step.micro_batches = schedule == Schedule::pipedream ? 1 : 2;
    step.model.tied = false;
    Machine machine;
    machine.flops_per_s = machine.bytes_per_s = 1e12;
    machine.host_bytes_per_s = 1e9;
    for (const int stage : {0, 1}) {
      const auto planned = [&](double rate) {
        Device device{DeviceKind::cuda};
        machine.host_update_bytes_per_s = rate;
        device.machine = std::make_shared<const Machine>(machine);
        return make_plan(step, device, stage, Passes::step);
      };
      const Plan plan = planned(1e6), fast = planned(1e18);
      INFO(name_of(schedule) << ", stage " << stage);
      const double n = plan.step_host.to_device / 2, update = n * (2 * (4 + 8 + 2) + 4) / 1e6;
      for (size_t i = 0; i < plan.action_seconds.size(); ++i)
        REQUIRE(plan.action_seconds[i] < fast.action_seconds[i] + 1e-9 * update);
      REQUIRE(plan.step_seconds > update);
      REQUIRE(plan.step_seconds < fast.step_seconds + 1.01 * update);
    }
  }
}

TEST_CASE("--plan states updates by the host, and that no machine says how fast they are", "[plan][offload]") {
  const std::string run =
      "--plan --model gpt2:124M --dtype bf16 --offload moments,master --offload-update host --sample-every 0 ";
  const ProgramResult r = run_program(run + "--machine h100x8");
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  for (const char* text : {"in host memory moments,master, updated by the host", "buffers of host updates",
                           "does not say how fast its hosts update", "give host_update_gb_per_s"})
    REQUIRE(r.out.find(text) != std::string::npos);
  const TempDir dir;
  std::ofstream(dir / "m.json") << R"({"like": "h100x8", "host_update_gb_per_s": 50})";
  const ProgramResult known = run_program(run + "--machine " + (dir / "m.json"));
  INFO(known.out << known.err);
  REQUIRE(known.status == 0);
  REQUIRE(known.out.find("50.0 GB/s in updates by the host") != std::string::npos);
  REQUIRE(known.out.find("does not say how fast") == std::string::npos);
  const ProgramResult json = run_program(run + "--json");
  REQUIRE(json.status == 0);
  REQUIRE(nlohmann::json::parse(json.out)["precision"]["offload_update"] == "host");
}

TEST_CASE("a run that the host updates in part writes the same checkpoints and goes on from them", "[run][offload]") {
  const SavedRuns runs;
  std::filesystem::create_directory(runs.dir / "disk");
  const std::string usual = "--zero-stage 2 ", by_host = usual + "--offload moments,master --offload-update host ";
  runs.train("usual", usual + "--max-steps 6");
  runs.train("parts", by_host + "--max-steps 2");
  runs.train("parts", usual + "--offload moments --max-steps 3");
  runs.train("parts", by_host + "--offload-dir " + (runs.dir / "disk") + " --max-steps 5");
  runs.train("parts", by_host + "--max-steps 6 --threads 2");
  REQUIRE(runs.state("usual").size() > 100'000);
  REQUIRE(runs.state("parts") == runs.state("usual"));
}

TEST_CASE("stages of an asynchronous pipeline, updated by their hosts, write the same checkpoint", "[run][offload]") {
  const TempDir dir;
  const std::string model =
      "--model llama2:7B --n-layer 4 --n-head 4 --n-kv-head 2 --n-embd 48 --n-ffn 60 --vocab-size 257 -t 32 -b 2 -d 64 "
      "--dtype bf16 --local-ranks 2 --pp 2 --schedule pipedream --grad-clip 0 --threads 1 --sample-every 0 "
      "--val-every 0 --checkpoint-every 3 --lr-schedule constant --max-steps 6 -i test/golden/gpt2_tiny/train.bin -o ";
  std::string states[2];
  for (const bool by_host : {false, true}) {
    const std::string out = dir / (by_host ? "host" : "usual");
    const ProgramResult r =
        run_program(model + out + (by_host ? " --offload moments,master --offload-update host" : ""));
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    for (const std::string& name : names_in(out + "/step-000006"))
      if (name.ends_with(".safetensors")) states[by_host] += name + read_whole(out + "/step-000006/" + name);
  }
  REQUIRE(states[0].size() > 100'000);
  REQUIRE(states[0] == states[1]);
}

TEST_CASE("--offload-update host is refused where it makes no sense, with a remedy", "[options][offload]") {
  for (const auto& [options, message] :
       {std::pair{"", "--offload-update host with --offload none: the host updates what is in its memory"},
        {"--offload master --dtype bf16", "use --offload moments,master"},
        {"--offload moments --dtype bf16", "use --offload moments,master"},
        {"--offload activations -r block", "use --offload moments,activations"},
        {"--offload master --dtype bf16 --optimizer muon", "whose updates are products of whole matrices"},
        {"--offload moments,master --dtype bf16 --qk-clip 100", "--qk-clip 100, which shrinks weights on the device"},
        {"--offload moments --ema 0.9", "--ema and --dtype fp32, whose averages only the device has"}}) {
    const ProgramResult r = run_program(std::string("--plan --model d2 --offload-update host ") + options);
    INFO(options << ": " << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(message) != std::string::npos);
  }
}
