// State in host memory (--offload): the same bits in every layout as on the device; memory as planned; bytes by their
// law; missing waits and stale pieces are caught; a killed run resumes.
#include <string>

#include "catch2.h"
#include "helpers.h"
#include "parallel/offload_layouts.h"
#include "parallel/on_ranks.h"
#include "run/selftest/selftest.h"

using namespace llmc;
using selftest::Outcome;

using namespace offload_layouts;
using enum Offloaded;

TEST_CASE("state in host memory changes no bit, in any layout", "[parallel][offload]") {
  const auto all = offload({moments, master, gradients, weights});
  require_same(step_of("gpt2", DType::bf16, layout_of(0, 1), offload({moments, master})));
  require_same(step_of("llama", DType::bf16, layout_of(3, 1), all));  // one rank, whose units come as they are used
  require_same(step_of("gpt2", DType::fp32, layout_of(1, 2), offload({moments, gradients})));
  require_same(step_of("llama", DType::bf16, layout_of(3, 4), all));
  Layout tensor = layout_of(3, 2), context = layout_of(3, 2), pipeline = layout_of(2, 2), experts = layout_of(3, 2);
  tensor.tensor.ranks = 2;
  require_same(step_of("llama", DType::bf16, tensor, all));
  context.context.ranks = 2;
  StepConfig sliced = step_of("llama", DType::bf16, context, all);
  sliced.batch.T = 20;
  require_same(sliced);
  pipeline.pipeline = {Schedule::one_f_one_b, 3, 1};
  require_same(step_of("gpt2", DType::bf16, pipeline, offload({moments, master, gradients})));
  experts.expert.ranks = 1;
  require_same(step_of("mixtral", DType::bf16, experts, all));
}

TEST_CASE("state in host memory with every rule, in few bits, without masters and with averages",
          "[parallel][offload][optimizer]") {
  const StepConfig usual =
      step_of("llama", DType::bf16, layout_of(3, 2), offload({moments, master, gradients, weights}));
  for (const Optimizer optimizer : {Optimizer::lion, Optimizer::sgd}) {
    StepConfig step = usual;
    step.layout.zero.optimizer = optimizer;
    INFO(name_of(optimizer));
    require_same(step);
  }
  StepConfig small = usual, none = usual, average = usual, muon = usual;
  small.precision.moment1 = DType::e4m3, small.precision.moment2 = DType::bf16, small.precision.split_masters = true;
  require_same(small);
  none.precision.masters = false;
  require_same(none);
  average.precision.averages = true;
  require_same(average);
  muon.layout.zero.optimizer = Optimizer::muon;
  muon.layout.zero.offload = offload({master, weights});
  require_same(muon);
}

TEST_CASE("plans count state in host memory, and the bytes copied in a step", "[plan][offload]") {
  StepConfig step = step_of("llama", DType::bf16, layout_of(3, 2), offload({moments, master, gradients, weights}));
  step.micro_batches = 3;
  StepConfig without = step;
  without.layout.zero.offload = {};
  const Plan plan = make_plan(step, {DeviceKind::cuda}, 0, Passes::step),
             usual = make_plan(without, {DeviceKind::cuda});
  double n = 0;  // elements that this rank updates
  int64_t room = 0, largest = 0;
  for (const UnitSpec& unit : parameter_table(step.model)) {
    const int64_t shard = UnitLayout(unit, 2).size / 2;
    n += static_cast<double>(shard);
    for (const int64_t bytes : {2, 4, 4, 4, 4}) room += round_up(shard * bytes, Arena::alignment);
    largest = std::max(largest, shard);
  }
  REQUIRE(largest > 2 * step.layout.zero.offload.piece);
  REQUIRE(plan.host_bytes == room);
  for (const char* label : {"master weights", "AdamW first moment", "AdamW second moment", "gradients", "weights"}) {
    REQUIRE(planned_bytes(plan, label) == 0);
    REQUIRE(planned_bytes(usual, label) > 0);
  }
  // Two pieces of all state, and one of gradients.
  const int64_t piece = step.layout.zero.offload.piece;
  REQUIRE(planned_bytes(plan, "offloaded state") == 2 * (2 + 4 * 4) * piece + 4 * piece);
  // An update copies 2 + 4 * 4 bytes for each element to the device, and all but the gradient back. Each micro-batch
  // adds to gradients, the first without reading any. Weights are gathered as often as they are without --offload; of
  // two ranks each sends as many bytes as its shard has.
  double gathered = 0;
  for (const auto& [group, bytes] : plan.step_traffic)
    if (group == "weights") gathered = static_cast<double>(bytes);
  REQUIRE(gathered > n * 2 * 3);
  REQUIRE(plan.step_host.to_device == n * (2 + 4 * 4) + n * 4 * 2 + gathered);
  REQUIRE(plan.step_host.to_host == n * (2 + 3 * 4) + n * 4 * 3);
  REQUIRE(plan.bytes_sent() == usual.bytes_sent());
  REQUIRE(usual.step_host.both() == 0);
}

TEST_CASE("on paper, state in host memory takes the time of the bus as far as computation does not hide it",
          "[plan][offload]") {
  StepConfig step = step_of("llama", DType::bf16, layout_of(0, 1), offload({moments, master}));
  Machine machine;
  machine.flops_per_s = machine.bytes_per_s = 1e18;  // takes no time
  machine.host_bytes_per_s = 1e6;
  const auto plan_of = [&](const StepConfig& s) {
    Device device{DeviceKind::cuda};
    device.machine = std::make_shared<const Machine>(machine);
    return make_plan(s, device, 0, Passes::step);
  };
  const Plan plan = plan_of(step);
  const double bus = plan.step_host.to_host / 1e6,
               piece = 1e-6 * 12 * static_cast<double>(step.layout.zero.offload.piece);
  REQUIRE(plan.step_host.to_device == plan.step_host.to_host);
  // In both directions at the same time; each unit has a smaller piece, beside which others wait.
  REQUIRE(plan.step_seconds > bus - 2 * piece);
  REQUIRE(plan.step_seconds < bus + (static_cast<double>(parameter_table(step.model).size()) + 2) * piece);
  REQUIRE(plan.exposed_by_group.at(host_copies) > 0.98 * plan.step_seconds);
}

TEST_CASE("a run whose state is in host memory writes the same checkpoints and goes on from them", "[run][offload]") {
  const SavedRuns runs;
  runs.train("usual", "--zero-stage 3 --max-steps 6");
  runs.train("parts", "--zero-stage 3 --offload moments,master,gradients,weights --max-steps 3");
  runs.train("parts", "--zero-stage 3 --offload moments --max-steps 4");
  runs.train("parts", "--zero-stage 3 --offload weights,gradients --max-steps 6");
  REQUIRE(runs.state("usual").size() > 100'000);
  REQUIRE(runs.state("parts") == runs.state("usual"));
}

TEST_CASE("--offload is refused where it makes no sense, with a remedy", "[options][offload]") {
  for (const auto& [options, message] :
       {std::pair{"--offload moments,optimizer", "'optimizer' is no state: expected none, or some of "},
        {"--offload moments,moments", "'moments' is there twice"},
        {"--offload master", "--offload master with --dtype fp32, whose weights are their own: there are no master"},
        {"--dtype bf16 -w none --offload master", "--offload master with --master-weights none: there are no master"},
        {"--offload weights", "--offload weights with --zero-stage 0: "},
        {"--offload gradients --grad-reduce step", "--offload gradients with --grad-reduce step: "},
        {"--offload moments --optimizer muon", "of gradients and momenta: leave out moments, or use --optimizer adamw"},
        {"--offload moments,master,gradients --optimizer muon --dtype bf16",
         ": leave out moments and gradients, or use"},
        {"--offload master --optimizer muon", "no master weights: leave out master, or use --dtype bf16"},
        {"--offload gradients --local-ranks 2 --pp 2", "whose embedding is also its head: both end stages add"},
        {"--offload gradients --local-ranks 2 --dp-sync parameter-server --grad-reduce micro", "servers add gradients"},
        {"--offload activations", "and this is --recompute none, --token-slices 1: use --recompute block"},
        {"--offload activations -r block --local-ranks 2 --pp 2 --schedule zb-v", "passes outputs to itself"},
        {"--offload gradients --noise-scale --local-ranks 2", "--noise-scale reads whole sums of gradients"}}) {
    const ProgramResult r = run_program(std::string("--plan --model d2 ") + options);
    INFO(options << ": " << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(message) != std::string::npos);
  }
}

TEST_CASE("a plan that does not fit names what host memory would make of it, and the price", "[plan][offload]") {
  for (const auto& [options, found] :
       {std::pair{"--model qwen2.5:7B --dtype bf16 --machine rtx4080x1 -t 2048 -b 1", "a GPU of rtx4080x1"},
        {"--model qwen2.5:32B --dtype bf16 --machine rtx4090x4 --ranks 4 -t 2048 -b 1", "a GPU of rtx4090x4"},
        {"--model qwen2.5:32B --dtype bf16 --machine rtx4090x4 -t 1024 -b 4", "--local-ranks 4"}}) {
    const ProgramResult r = run_program(std::string("--plan --sample-every 0 ") + options);
    INFO(r.out << r.err);
    REQUIRE(r.status == 0);
    for (const char* text : {found, " it would with", " --zero-stage 3", " --offload moments,", "weights",
                             "each rank has ", " in host memory, and copies ", " s at 25.6 GB/s"})
      REQUIRE(r.out.find(text) != std::string::npos);
  }
}

TEST_CASE("inputs of blocks that wait in host memory change no bit", "[parallel][offload][recompute]") {
  const auto step_with = [](int64_t segment, int64_t layers, const PipelineParallel& pipeline) {
    Layout layout = layout_of(1, 2);
    layout.pipeline = pipeline;
    StepConfig step = step_of("llama", DType::bf16, layout, offload({moments, activations}));
    step.model.n_layer = layers;
    step.recompute = Recompute::block;
    step.segment = segment;
    step.micro_batches = 4;
    return step;
  };
  for (const int64_t segment : {1, 2}) {
    require_same(step_with(segment, 5, {}));
    for (const Schedule schedule : {Schedule::gpipe, Schedule::one_f_one_b, Schedule::zb_h1})
      require_same(step_with(segment, 5, {schedule, 2, 1}));
    require_same(step_with(segment, 8, {Schedule::interleaved, 2, 2}));
  }
}

TEST_CASE("plans count activations in host memory, and their copies", "[plan][offload][recompute]") {
  StepConfig step = step_of("llama", DType::bf16, layout_of(0, 1), offload({activations}));
  step.model.n_layer = 7;
  step.recompute = Recompute::block;
  step.segment = 2;
  step.micro_batches = 3;
  StepConfig without = step;
  without.layout.zero.offload = {};
  const Plan plan = make_plan(step, {DeviceKind::cuda}, 0, Passes::step),
             usual = make_plan(without, {DeviceKind::cuda});
  const int64_t output = step.batch.rows() * step.model.n_embd * 2, room = round_up(output, Arena::alignment);
  // Of four segments the last one's output is the head's input.
  REQUIRE(plan.host_bytes == 3 * room);
  REQUIRE(planned_bytes(usual, "activations") - planned_bytes(plan, "activations") == 3 * room);
  REQUIRE(planned_bytes(plan, "offloaded activations") == 4 * room);
  REQUIRE(plan.step_host.to_host == static_cast<double>(3 * 3 * output));
  REQUIRE(plan.step_host.to_device == plan.step_host.to_host);
}
