// Moments in a file (--offload-dir): the same bits in every layout as on the device; files, buffers and bytes as
// planned; disks that are full or fail; a killed run resumes.
#include <fstream>
#include <string>

#include "catch2.h"
#include "faults/fault_run.h"
#include "helpers.h"
#include "parallel/offload_layouts.h"
#include "parallel/on_ranks.h"
#include "run/selftest/selftest.h"

using namespace llmc;
using namespace offload_layouts;
using selftest::Outcome;

namespace {

using enum Offloaded;

StepConfig step_of(const char* family, DType dtype, const Layout& layout, std::initializer_list<Offloaded> parts,
                   const std::string& directory) {
  Offload in_file = offload(parts);
  in_file.directory = directory;
  return offload_layouts::step_of(family, dtype, layout, in_file);
}

// A run of two ranks with its moments in files in the directory "disk".
struct TinyRun {
  const TempDir dir;
  std::string more = "--max-steps 6 --checkpoint-every 2 --local-ranks 2 --zero-stage 1 --lr-schedule constant ";
  TinyRun() { std::filesystem::create_directory(dir / "disk"); }
  std::string in_file() const { return more + "--offload moments --offload-dir " + (dir / "disk"); }
  ProgramResult start(const std::string& out, const std::string& options, const std::string& faults = "") const {
    return run_program(tiny(dir / out, options), faults.empty() ? "" : shim(dir, faults));
  }
  std::string good(const std::string& out, const std::string& options) const {
    const ProgramResult r = start(out, options);
    INFO(options << ": " << r.out << r.err);
    REQUIRE(r.status == 0);
    REQUIRE(names_in(dir / "disk").empty());
    return result_of(dir / out);
  }
};

}  // namespace

TEST_CASE("moments in a file change no bit, in any layout", "[parallel][offload]") {
  const TempDir dir;
  const std::string d = dir.path();
  require_same(step_of("gpt2", DType::fp32, layout_of(0, 1), {moments}, d));
  require_same(step_of("llama", DType::bf16, layout_of(0, 2), {moments, master}, d));
  require_same(step_of("gpt2", DType::fp32, layout_of(1, 2), {moments, gradients}, d));
  require_same(step_of("llama", DType::bf16, layout_of(2, 2), {moments}, d));
  require_same(step_of("llama", DType::bf16, layout_of(3, 4), {moments, master, gradients, weights}, d));
  Layout tensor = layout_of(3, 2), context = layout_of(3, 2), pipeline = layout_of(2, 2), experts = layout_of(3, 2);
  tensor.tensor.ranks = 2;
  require_same(step_of("llama", DType::bf16, tensor, {moments}, d));
  context.context.ranks = 2;
  StepConfig sliced = step_of("llama", DType::bf16, context, {moments, master}, d);
  sliced.batch.T = 20;
  require_same(sliced);
  pipeline.pipeline = {Schedule::one_f_one_b, 3, 1};
  require_same(step_of("gpt2", DType::bf16, pipeline, {moments, master}, d));
  experts.expert.ranks = 1;
  require_same(step_of("mixtral", DType::bf16, experts, {moments}, d));
  REQUIRE(names_in(d).empty());
}

TEST_CASE("moments in a file with every rule, in few bits, in one piece and in two", "[parallel][offload][optimizer]") {
  const TempDir dir;
  const StepConfig usual = step_of("llama", DType::bf16, layout_of(3, 2), {moments}, dir.path());
  for (const Optimizer optimizer : {Optimizer::lion, Optimizer::sgd}) {
    StepConfig step = usual;
    step.layout.zero.optimizer = optimizer;
    INFO(name_of(optimizer));
    require_same(step);
  }
  StepConfig small = usual, whole = usual;
  small.precision.moment1 = DType::e4m3, small.precision.moment2 = DType::e5m3, small.precision.split_masters = true;
  require_same(small);
  whole.layout.zero.offload.piece = 1 << 22;  // as many pieces as units
  require_same(whole);
}

TEST_CASE("plans count moments in a file, the buffers on their way, and what a step reads and writes",
          "[plan][offload]") {
  StepConfig step = step_of("llama", DType::bf16, layout_of(3, 2), {moments, master}, "/nowhere");
  step.micro_batches = 3;
  StepConfig at_host = step;
  at_host.layout.zero.offload.directory = "";
  const Plan plan = make_plan(step, {DeviceKind::cuda}, 0, Passes::step),
             before = make_plan(at_host, {DeviceKind::cuda}, 0, Passes::step);
  double n = 0;  // elements that this rank updates
  int64_t in_file = 0, masters = 0;
  for (const UnitSpec& unit : parameter_table(step.model)) {
    const int64_t shard = UnitLayout(unit, 2).size / 2;
    n += static_cast<double>(shard);
    in_file += 2 * round_up(shard * 4, Arena::alignment);
    masters += round_up(shard * 4, Arena::alignment);
  }
  const int64_t piece = step.layout.zero.offload.piece;
  REQUIRE(plan.file_bytes == in_file);
  REQUIRE(plan.host_bytes == masters + 3 * 2 * 4 * piece);
  REQUIRE(plan.step_file.read == 2 * 4 * n);
  REQUIRE(plan.step_file.written == 2 * 4 * n);
  REQUIRE(before.file_bytes == 0);
  REQUIRE(before.step_file.both() == 0);
  REQUIRE(before.host_bytes == masters + in_file);
  // The device sees no difference.
  REQUIRE(plan.step_host.to_device == before.step_host.to_device);
  REQUIRE(plan.step_host.to_host == before.step_host.to_host);
  REQUIRE(plan.total_bytes() == before.total_bytes());
}

TEST_CASE("on paper, moments in a file take the time of the disk as far as computation does not hide it",
          "[plan][offload]") {
  const StepConfig step = step_of("llama", DType::bf16, layout_of(0, 1), {moments}, "/nowhere");
  Machine machine;
  machine.flops_per_s = machine.bytes_per_s = machine.host_bytes_per_s = 1e18;  // takes no time
  machine.disk_bytes_per_s = 1e6;
  Device device{DeviceKind::cuda};
  const auto seconds = [&] {
    device.machine = std::make_shared<const Machine>(machine);
    return make_plan(step, device, 0, Passes::step).step_seconds;
  };
  const Plan plan = make_plan(step, device, 0, Passes::step);
  const double disk = plan.step_file.read / 1e6, piece = 1e-6 * 8 * static_cast<double>(step.layout.zero.offload.piece);
  REQUIRE(plan.step_file.written == plan.step_file.read);
  // In both directions at the same time; each unit has a smaller piece, beside which others wait.
  const double found = seconds();
  REQUIRE(found > disk - 3 * piece);
  REQUIRE(found < disk + (static_cast<double>(parameter_table(step.model).size()) + 3) * piece);
  machine.disk_bytes_per_s = 0;  // unknown
  REQUIRE(seconds() < 1e-3 * disk);
}

TEST_CASE("--plan states files, and that no machine says how fast its disks are", "[plan][offload]") {
  const ProgramResult r = run_program(
      "--plan --model gpt2:124M --dtype bf16 --machine h100x8 --offload moments --offload-dir /nvme --sample-every 0");
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  for (const char* text : {"file of a rank, in /nvme", "AdamW first moment", "buffers of files", " read, ", " written",
                           "bf16, recompute none, moments in files", "does not say how fast its disks are"})
    REQUIRE(r.out.find(text) != std::string::npos);
  const ProgramResult json = run_program(
      "--plan --json --model gpt2:124M --dtype bf16 --offload moments --offload-dir /nvme --sample-every 0");
  REQUIRE(json.status == 0);
  const nlohmann::json stage = nlohmann::json::parse(json.out)["stages"][0];
  REQUIRE(stage["file_bytes"].get<int64_t>() > int64_t{8} * 124'000'000);
  REQUIRE(stage["file_read_bytes"] == stage["file_written_bytes"]);
  REQUIRE(stage["file"].size() == 2);
}

TEST_CASE("a run whose moments are in files writes the same checkpoints, and goes on from them", "[run][offload]") {
  TinyRun run;
  const std::string usual = run.good("usual", run.more);
  {  // left of a run that was killed
    std::ofstream(run.dir / "disk/train_gpt-moments-00000-of-00002") << "old";
  }
  for (const char* mode : {"sync", "async"})
    REQUIRE((run.good(mode, run.in_file() + " --checkpoint-mode " + mode) == usual));
  // What is in memory and what is in a file may change from start to start.
  run.good("turns", run.more + "--offload moments --max-steps 2");
  run.good("turns", run.in_file() + " --max-steps 4");
  REQUIRE((run.good("turns", run.more) == usual));
  // Comparisons of copies read all state.
  const std::string every = " --zero-stage 0 --check-replicas 1";
  REQUIRE((run.good("compared", run.in_file() + every) == run.good("whole", run.more + every)));
}

TEST_CASE("a run that is killed while its moments are in files resumes from its checkpoint", "[run][offload][faults]") {
  const TinyRun run;
  const std::string usual = run.good("usual", run.more);
  for (const char* update : {"device", "host"})
    for (const char* at : {"allocate ", "rename ", "pwrite "}) {
      const std::string out = formatted("out-{}-{}", update, at[0]),
                        options = run.in_file() + " --offload-update " + update;
      // Without a checkpoint, from the beginning; with one, from there.
      const ProgramResult killed = run.start(out, options, formatted("FILE_OPS_KILL_AT='{}'", at));
      INFO(options << ", " << at << ": " << killed.out << killed.err);
      REQUIRE(killed.status == 128 + SIGKILL);
      REQUIRE((run.good(out, options) == usual));
    }
}

TEST_CASE("a disk that is too small for moments is found at the start, and no checkpoint is lost",
          "[run][offload][faults]") {
  const TinyRun run;
  const std::string usual = run.good("usual", run.more), before = run.good("out", run.more + "--max-steps 4");
  const ProgramResult r = run.start("out", run.in_file(), "FILE_OPS_FULL=train_gpt-moments");
  INFO(r.out << r.err);
  REQUIRE(r.status == 1);
  for (const char* text : {"train_gpt-moments-0000", "it needs ",
                           " bytes are free there: No space left on device: ", "use another --offload-dir"})
    REQUIRE(r.err.find(text) != std::string::npos);
  REQUIRE(names_in(run.dir / "disk").empty());
  REQUIRE((result_of(run.dir / "out") == before));
  REQUIRE((run.good("out", run.in_file()) == usual));
}

TEST_CASE("a disk that fails ends the run with the file, the place and the reason, and the last checkpoint is good",
          "[run][offload][faults]") {
  const TinyRun run;
  const std::string usual = run.good("usual", run.more);
  for (const auto& [at, message] :
       {std::pair{"pread ", "cannot read "}, {"pwrite ", "cannot write to "}, {"begin-fsync ", "cannot write to "}}) {
    for (const int after : {0, 9, 25}) {
      const std::string out = formatted("out-{}{}", at[1], after);
      const ProgramResult r = run.start(out, run.in_file() + (after == 9 ? " --offload-update host" : ""),
                                        formatted("FILE_OPS_FAIL_AT='{}{}' FILE_OPS_FAIL_AT_AFTER={}", at,
                                                  run.dir / "disk/train_gpt-moments-00001", after));
      INFO(at << after << ": " << r.out << r.err);
      REQUIRE(r.status == 1);
      REQUIRE(r.err.find(message) != std::string::npos);
      REQUIRE(r.err.find("/train_gpt-moments-00001-of-00002 at byte ") != std::string::npos);
      REQUIRE(r.err.find("Input/output error") != std::string::npos);
      REQUIRE((run.good(out, run.in_file()) == usual));
    }
  }
}

TEST_CASE("--offload-dir is refused where it makes no sense, with a remedy", "[options][offload]") {
  const TempDir dir;
  for (const auto& [options, message] :
       {std::pair{std::string("--plan --model d2 --offload-dir /nvme"), "add moments to --offload, or leave out"},
        {"--plan --model d2 --dtype bf16 --offload master --offload-dir /nvme", "add moments to --offload"},
        {"--plan --model d2 --offload moments --offload-dir /nvme --optimizer muon", "which works on whole"},
        {tiny(dir / "out", "--max-steps 1 --offload moments --offload-dir " + (dir / "none")),
         "there is no such directory"}}) {
    const ProgramResult r = run_program(options);
    INFO(options << ": " << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(message) != std::string::npos);
  }
}
