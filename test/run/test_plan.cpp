// The planner: planned memory by name equals the sum of its parts; runs that do not fit are refused with alternatives.
#include <nlohmann/json.hpp>
#include <regex>

#include "catch2.h"
#include "helpers.h"
#include "model/presets.h"
#include "run/reports/report.h"
#include "run/selftest/selftest.h"

using namespace llmc;

namespace {

int64_t line(const Plan& plan, const std::string& label) {
  for (const MemoryLine& l : plan.memory)
    if (l.label == label) return l.bytes;
  return 0;
}

}  // namespace

TEST_CASE("a plan counts the ring's chunk of every stream that communicates, links between stages included",
          "[run][plan]") {
  const auto chunks = [](const StepConfig& step) {
    const Plan plan = make_plan(step, {});
    int64_t bytes = 0;
    for (const MemoryLine& line : plan.of(0).memory) bytes += line.label == "ring chunks" ? line.bytes : 0;
    return bytes / Groups::scratch_bytes;
  };
  StepConfig step{.model = selftest::awkward_model("gpt2"), .batch = {1, 19}, .micro_batches = 2};
  REQUIRE(chunks(step) == 0);  // one rank
  step.layout.zero.shards = 2;
  REQUIRE(chunks(step) == 2);  // reductions, gathers
  step.layout.pipeline.stages = 2;
  REQUIRE(chunks(step) == 4);  // and activations down, gradients up
}

TEST_CASE("the plan of gpt3:13B equals the sum computed by hand", "[run][plan]") {
  const int64_t L = 40, C = 5120, F = 20480, H = 40, V = 50304, P = 2048, B = 2, T = 2048, N = B * T;
  const StepConfig config{
      .model = resolve_model("gpt3:13B", {}), .precision = DType::bf16, .batch = {B, T}, .micro_batches = 4};
  const Plan plan = make_plan(config, {DeviceKind::cpu, 2});
  // Every size here is a multiple of the arena's 256 bytes, including the head unit's two vectors.
  const int64_t block = 3 * C * C + 3 * C + C * C + C + 4 * C + F * C + F + C * F + C;
  const int64_t elements = V * C + P * C + L * block + 2 * C;
  REQUIRE(line(plan, "weights") == 2 * elements);
  for (const char* fp32 : {"master weights", "gradients", "AdamW first moment", "AdamW second moment"})
    REQUIRE(line(plan, fp32) == 4 * elements);
  // A block keeps ln1, qkv (3), attention, middle, ln2, out: 8 N C; up, gelu: 2 N F; four statistics and the lse in
  // fp32.
  const int64_t kept = 2 * (8 * N * C + 2 * N * F) + 4 * (4 * N + H * N);
  const int64_t residual_stream = 2 * N * C;
  REQUIRE(line(plan, "activations") == L * kept + residual_stream);  // the embedding's
  REQUIRE(line(plan, "gradients of activations") == residual_stream);
  REQUIRE(line(plan, "inputs") == 3 * 4 * N);
  REQUIRE(line(plan, "head") == 2 * (N * C + N * V) + 4 * 3 * N);
  int64_t sum = 0;
  for (const MemoryLine& l : plan.memory) sum += l.bytes;
  REQUIRE(sum == plan.total_bytes());
  // Matmuls: 6 flops per parameter and token; the padded vocabulary counts as parameters.
  double flops = 0;
  for (const char* op : {"linear_forward", "linear_backward_input", "linear_backward_weight"})
    flops += plan.step_ops.at(op).flops;
  const double matrices = static_cast<double>(V * C + L * (4 * C * C + 2 * C * F));
  REQUIRE(flops == 6 * matrices * static_cast<double>(4 * N));
}

TEST_CASE("inputs of linear layers that a GPU keeps in fp8 take a byte each, and scales", "[run][plan][fp8]") {
  const int64_t L = 40, C = 5120, F = 20480, B = 2, T = 2048, N = B * T, columns = 2 * C + F;  // two norms, GELU
  StepConfig config{
      .model = resolve_model("gpt3:13B", {}), .precision = DType::bf16, .batch = {B, T}, .micro_batches = 4};
  config.precision.linear = Operands::fp8_block;
  const auto activations = [&](DeviceKind kind) { return line(make_plan(config, {kind, 2}), "activations"); };
  // Where products do not read fp8, they are kept as they are.
  REQUIRE(activations(DeviceKind::cpu) - activations(DeviceKind::cuda) ==
          L * columns * (N * (2 - 1) - N / 128 * int64_t{sizeof(float)}));
  // As they are, there is one of each for all blocks.
  REQUIRE(line(make_plan(config, {DeviceKind::cuda, 2}), "activations of one block") == 2 * N * columns);
  for (const Recompute recompute : {Recompute::norm, Recompute::block}) {
    config.recompute = recompute;
    REQUIRE(activations(DeviceKind::cpu) == activations(DeviceKind::cuda));
  }
}

TEST_CASE("--plan needs no data and no GPU, and --memory-limit refuses with a configuration that fits", "[run][plan]") {
  const ProgramResult plan = run_program("--plan --model gpt3:13B --seq-len 2048 --dtype bf16 --threads 2");
  INFO(plan.out << plan.err);
  REQUIRE(plan.status == 0);
  REQUIRE(plan.out.find("activations") != std::string::npos);
  const std::string shape = "--model gpt2:124M --seq-len 1024 --batch-size 4 --threads 2 ";
  const ProgramResult refused = run_program("--plan --memory-limit 2.5 " + shape);
  INFO(refused.err);
  REQUIRE(refused.status == 1);
  REQUIRE(refused.err.find("--memory-limit") != std::string::npos);
  REQUIRE(refused.out.find("AdamW first moment") != std::string::npos);
  // Its proposal fits, and nothing earlier in the list would.
  const size_t begin = refused.err.find("it would with ") + 14, end = refused.err.find(" (", begin);
  const std::string proposed = refused.err.substr(begin, end - begin);
  REQUIRE(proposed == "--batch-size 2 --total-batch-size 4096 --recompute block");
  REQUIRE(run_program("--plan --memory-limit 2.5 " + shape + proposed).status == 0);
  REQUIRE(run_program("--plan --memory-limit 2.5 " + shape + "--recompute block").status == 1);
  REQUIRE(run_program("--plan --memory-limit 2.5 " + shape + "-b 2 -d 4096 --recompute norm").status == 1);
  // What would not help is not advised: the state alone is larger than this.
  const ProgramResult hopeless = run_program("--plan --memory-limit 1 " + shape);
  INFO(hopeless.err);
  REQUIRE(hopeless.status == 1);
  REQUIRE(hopeless.err.find("use a smaller --model") != std::string::npos);
  REQUIRE(hopeless.err.find("--seq-len") == std::string::npos);
}

TEST_CASE("advice fits when it is followed, and shows its price", "[run][plan]") {
  struct Case {
    std::string options, change;
    std::vector<std::string> price;
  };
  for (const Case& c : std::vector<Case>{
           // fp32 state takes 16 bytes per parameter, bf16 with master weights 18.
           {"--model gpt2:124M -t 64 -b 1 --memory-limit 1.89", "--recompute block", {"more work"}},
           {"--model gpt2:124M -t 64 -b 1 --memory-limit 1.86",
            "--dtype bf16 --master-weights split --moment1-dtype 8bit --moment2-dtype 8bit",
            {"; less exact"}},
           // Halves of masters are as exact as whole ones.
           {"--model gpt2:124M --dtype bf16 -t 64 -b 1 --memory-limit 1.95", "--master-weights split", {}},
           // QK-clip needs whole masters; lion has one moment.
           {"--model gpt2:124M -t 64 -b 1 --memory-limit 1.6 --qk-clip 100",
            "--dtype bf16 --moment1-dtype 8bit --moment2-dtype 8bit",
            {"; less exact"}},
           {"--model gpt2:124M -t 64 -b 1 --memory-limit 1.3 --optimizer lion",
            "--dtype bf16 --master-weights split --moment1-dtype 8bit",
            {"; less exact"}},
           // Stage 1 costs no traffic; stage 2 does, and comes only where less does not help.
           {"--model d6 -t 256 -b 2 --local-ranks 4 -d 32768 --memory-limit 0.45", "--zero-stage 1", {}},
           // A parameter server needs as much as a rank of stage 0; the higher stages have no servers.
           {"--model d6 -t 256 -b 2 --local-ranks 4 -d 32768 --memory-limit 0.45 --dp-sync parameter-server",
            "--dp-sync all-reduce --zero-stage 1",
            {"; gradients are then added in another order"}},
           {"--model llama3:8B --dtype bf16 -t 2048 --local-ranks 8 --zero-stage 1 -d 1048576 --memory-limit 48",
            "--zero-stage 2",
            {"more work; each rank sends ", " a step instead of ", "; gradients are then reduced every micro-batch"}},
           {"--model d6 -t 256 -b 4 --schedule gpipe -d 16384 --memory-limit 1", "--schedule 1f1b", {}},
           // For a GPU, of which there is none here: more ranks.
           {"--model gpt2:1558M --device cuda --dtype bf16 -t 1024 -b 8 --memory-limit 12",
            "--local-ranks 4",
            {"sends"}},
           {"--model d2 -t 1024 -b 1 --memory-limit 0.16", "--seq-len 128", {}}}) {
    INFO(c.options);
    const ProgramResult refused = run_program("--plan --threads 2 " + c.options);
    INFO(refused.err);
    REQUIRE(refused.status == 1);
    const size_t begin = refused.err.find("it would with ");
    REQUIRE(begin != std::string::npos);
    const size_t end = refused.err.find(" (", begin);
    const std::string change = refused.err.substr(begin + 14, end - begin - 14), price = refused.err.substr(end);
    REQUIRE(change.find(c.change) != std::string::npos);
    REQUIRE(price.find(" instead of ") != std::string::npos);
    for (const std::string& part : c.price) REQUIRE(price.find(part) != std::string::npos);
    const ProgramResult followed = run_program("--plan --threads 2 " + c.options + " " + change);
    INFO(followed.err);
    REQUIRE(followed.status == 0);
    REQUIRE(followed.out.find("fits into --memory-limit") != std::string::npos);
  }
}

TEST_CASE("--plan shows the memory of a parameter server and of the others, and every --dp-sync's traffic",
          "[run][plan]") {
  const ProgramResult r = run_program(
      "--plan --threads 2 --model d2 --n-embd 64 --n-head 1 --vocab-size 257 -t 64 -b 1 --local-ranks 4 --dp-sync "
      "parameter-server");
  INFO(r.out << r.err);
  REQUIRE(r.status == 0);
  const size_t server = r.out.find("memory of rank 0, the server"), others = r.out.find("memory of each other rank"),
               sent = r.out.find("sent by rank 0 per step");
  REQUIRE((server < others && others < sent && sent != std::string::npos));
  REQUIRE(r.out.substr(server, others - server).find("AdamW first moment") != std::string::npos);
  REQUIRE(r.out.substr(others, sent - others).find("AdamW") == std::string::npos);
  for (const DpSync sync : all_values<DpSync>()) REQUIRE(r.out.find(name_of(sync), sent) != std::string::npos);
  const ProgramResult without =
      run_program("--plan --threads 2 --model d2 --n-embd 64 --n-head 1 --vocab-size 257 -t 64 -b 1 --local-ranks 4");
  REQUIRE(without.out.find("sent per rank and step") != std::string::npos);
  REQUIRE(without.out.find("server") == std::string::npos);
}

TEST_CASE("a run that was begun is not advised to compute something else", "[run][plan]") {
  const StepConfig step{.model = resolve_model("gpt2:124M", {}), .batch = {1, 64}};
  const Device device{DeviceKind::cpu, 1};
  Options o;
  o.memory_limit = 1.85;
  const Plan plan = make_plan(step, device);
  REQUIRE_ERROR(require_memory(o, step, plan, device, Begun::no), "--dtype bf16");
  REQUIRE_ERROR(require_memory(o, step, plan, device, Begun::yes), "use a smaller --model");
}

TEST_CASE("a plan for GPUs needs none, says what it leaves out, and where ranks would be threads of one process",
          "[run][plan]") {
  auto plan = [](const std::string& options) {
    const ProgramResult r = run_program("--plan --device cuda --model d4 -t 64 " + options);
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out;
  };
  const std::string one = plan(""), eight = plan("--local-ranks 8 --memory-limit 80"), many = plan("--local-ranks 512");
  INFO(one << eight << many);
  for (const char* part : {"a GPU that is not in this machine", "not counted", "CUDA context and cuBLASLt",
                           "there is no GPU here to compare with: --memory-limit"})
    REQUIRE(one.find(part) != std::string::npos);
  // cuBLASLt's work space of 32 MiB, and 16 for sums over rows that wait
  REQUIRE(std::regex_search(one, std::regex("\n  op scratch +48\\.0 MiB")));
  REQUIRE(one.find("NCCL") == std::string::npos);
  REQUIRE(eight.find("fits into --memory-limit 80.00 GiB less 512.0 MiB for CUDA") != std::string::npos);
  // Gradients and weights in groups of 16 channels, scalars in one of 2, each connected to two neighbours by 12 MiB,
  // and 16 MiB for each group.
  REQUIRE(std::regex_search(eight, std::regex("\n  NCCL +864\\.0 MiB")));
  REQUIRE(eight.find("threads of one process") == std::string::npos);
  REQUIRE(many.find("notice: 512 ranks would be threads of one process") != std::string::npos);
  // To train takes a GPU.
  const ProgramResult training = run_program("--device cuda -i nothing.bin");
  REQUIRE(training.status == 1);
  REQUIRE(training.err.find("--device cuda: ") != std::string::npos);
}

TEST_CASE("small numbers are said in words that fit them", "[run][plan]") {
  Options o;
  o.checkpoint_every = 1, o.checkpoint_minutes = 1;
  REQUIRE(detail::checkpoints_text(o).starts_with("every step, 1 minute after the last one"));
  o.price = 2;
  const Machine machine{.name = "x", .watts = 500};
  const Rows rows = detail::run_cost_rows(
      o, machine, {.seconds = 36, .gpu_hours = 0.01, .kwh = 0.005, .kg_co2 = 0.00225, .price = 0.02});
  REQUIRE(rows[0].second.starts_with("0:36, 0.01 GPU-hours; "));
  REQUIRE((rows[1].second.starts_with("0.005 kWh, about 0.00225 kg") && rows[2].second == "0.02, at 2 per GPU-hour"));
  REQUIRE(flops_text(5e10) == "50.00 GFLOP/s");
}

TEST_CASE("a plan shows the time of a step on paper where its rates are known, with the rates", "[run][plan]") {
  ZeroConfig zero{.shards = 8};
  zero.set_stage(1);
  const StepConfig step{
      .model = resolve_model("gpt2:124M", {}), .precision = DType::bf16, .batch = {4, 1024}, .layout = {.zero = zero}};
  Device device{DeviceKind::cuda};
  REQUIRE(detail::time_rows({}, step, make_plan(step, device), device).empty());
  device.machine = datasheet_machine(*gpu_peaks("NVIDIA H100 80GB HBM3"), DType::bf16, 8);
  const Plan plan = make_plan(step, device);
  REQUIRE((0 < plan.exposed_seconds && plan.exposed_seconds < plan.step_seconds));
  const Rows rows = detail::time_rows({}, step, plan, device);
  std::map<std::string, std::string> shown(rows.begin(), rows.end());
  const double exposed = std::stod(shown["exposed communication"]), step_ms = std::stod(shown["step"]);
  REQUIRE(exposed == Catch::Approx(plan.exposed_seconds * 1e3).margin(1e-3));
  REQUIRE(step_ms == Catch::Approx(plan.step_seconds * 1e3).margin(1e-3));
  REQUIRE(std::stod(shown["compute"]) + exposed == Catch::Approx(step_ms).margin(2e-3));
  REQUIRE(shown["rates"] ==
          "989.5 TFLOP/s, 3350.0 GB/s of memory, 450.0 GB/s and 0.0 us of link; no time for launches");
  // Ranks that wait for a server do not run in step with it.
  StepConfig served = step;
  served.layout.zero = {.shards = 8, .sync = DpSync::parameter_server};
  REQUIRE(detail::time_rows({}, served, make_plan(served, device), device).empty());
  // Without a GPU here, and on a CPU, whose peaks no datasheet states, no rates are made up.
  for (const char* where : {"--device cpu", "--device cuda"})
    REQUIRE(run_program(formatted("--plan --model d2 -t 64 --dtype bf16 {}", where)).out.find("on paper") ==
            std::string::npos);
}

TEST_CASE("--version lists the devices that --device takes", "[run][plan]") {
  const std::string version = version_text();
  const std::string devices = version.substr(version.find("devices: "));
  INFO(devices);
  REQUIRE(devices.find("cpu") != std::string::npos);
  REQUIRE(devices.find("null") == std::string::npos);
}

TEST_CASE("generation needs only the weights, and is refused if they do not fit", "[run][plan]") {
  const TempDir dir;
  write_shard<uint16_t>(dir / "t.bin", std::vector<uint16_t>(1000, 5));
  const std::string shape = "--vocab-size 257 --n-layer 4 --n-embd 96 --n-head 4 -t 64 ";
  REQUIRE(run_program("--model d4 -x 1 " + shape + "-i " + (dir / "t.bin") + " -o " + (dir / "out")).status == 0);
  const std::string model = dir / "out/step-000001";
  StepConfig config{.model = resolve_model(model, {}), .batch = {1, 64}};
  const Plan training = make_plan(config, {DeviceKind::cpu, 1});
  config.layout.zero.holds = Holds::weights;
  const Plan plan = make_plan(config, {DeviceKind::cpu, 1});
  REQUIRE(line(plan, "weights") == line(training, "weights"));
  for (const char* held : {"gradients", "AdamW first moment", "AdamW second moment"}) REQUIRE(line(training, held) > 0);
  for (const char* gone : {"gradients", "master weights", "AdamW first moment", "AdamW second moment"})
    REQUIRE(line(plan, gone) == 0);
  REQUIRE(3 * plan.total_bytes() < training.total_bytes());

  auto generate = [&](int64_t bytes, const std::string& more) {
    return run_program("--generate --sample-tokens 70 --threads 1 --local-ranks 4 --model " + model +
                       formatted(" --memory-limit {:.17g} ", static_cast<double>(bytes) / (1 << 30)) + more);
  };
  const ProgramResult good = generate(plan.total_bytes() + 1, "");
  INFO(good.err);
  REQUIRE(good.status == 0);
  const ProgramResult refused = generate(plan.total_bytes() - 1, "");
  INFO(refused.err);
  REQUIRE(refused.status == 1);
  REQUIRE(refused.err.find("--memory-limit") != std::string::npos);
  REQUIRE(refused.err.find("it would with --dtype bf16 (") != std::string::npos);
  REQUIRE(generate(plan.total_bytes() - 1, "--dtype bf16").status == 0);
  REQUIRE(generate(1 << 14, "").err.find("the least is ") != std::string::npos);
  REQUIRE(generate(1 << 14, "").err.find("--recompute") == std::string::npos);
}

TEST_CASE("a run beyond the memory limit is refused before anything is made", "[run][plan]") {
  const TempDir dir;
  write_shard<uint16_t>(dir / "t.bin", std::vector<uint16_t>(1000, 5));
  const ProgramResult r = run_program("--model d2 --vocab-size 257 -t 64 -x 2 --memory-limit 0.001 -i " +
                                      (dir / "t.bin") + " -o " + (dir / "out"));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("--memory-limit") != std::string::npos);
  REQUIRE_FALSE(std::filesystem::exists(dir / "out"));
}

TEST_CASE("sizes that would overflow are refused before multiplying", "[run][plan]") {
  auto refused = [](const std::string& options, const std::string& why) {
    const ProgramResult r = run_program("--plan " + options, "timeout 10");
    INFO(options << "\n" << r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find(why) != std::string::npos);
  };
  const std::string one = "--model d1 --vocab-size 257 --batch-size 1 --seq-len 4 ", most = "4611686018427387904";
  refused(one + "--total-batch-size " + most, "1152921504606846976 micro-batches");
  refused(one + "--schedule gpipe --total-batch-size " + most, "are more than 262144 passes");
  refused("--model d4 -b 1 -t 4 --total-batch-size 262148", "65537 micro-batches");
  refused("--model d1 --n-layer 16777216", "the model has 16777216 layers: use at most 16384");
  refused("--model gpt3:13B --batch-size 16777216 --seq-len 2048", "use a smaller --batch-size, --seq-len or --model");
  refused("--model d1 --n-layer 16384 --n-head 1 --n-embd 16777216", "use a smaller --model");

  const TempDir dir;
  write_shard<uint16_t>(dir / "t.bin", std::vector<uint16_t>(5001, 5));
  const std::string run = one + "--threads 1 -i " + (dir / "t.bin") + " -o " + (dir / "out");
  const ProgramResult r = run_program(run + " --max-steps " + most);
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("use at most 2305843009213693951") != std::string::npos);
  REQUIRE_FALSE(std::filesystem::exists(dir / "out"));
}

TEST_CASE("a validation of more steps than there is data uses all of it, for any number of micro-batches",
          "[run][plan]") {
  const TempDir dir;
  std::vector<uint16_t> tokens(10001);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i * i % 100);
  write_shard<uint16_t>(dir / "t.bin", tokens);
  auto loss = [&](const std::string& name, const std::string& more) {
    const ProgramResult r = run_program(
        "--model d1 --n-embd 8 --n-head 1 --vocab-size 101 --seq-len 2 --threads 1 -x 1 "
        "--total-batch-size 20 -i " +
        (dir / "t.bin") + " -j " + (dir / "t.bin") + " -o " + (dir / name) + more);
    INFO(r.err);
    REQUIRE(r.status == 0);
    std::ifstream in(dir / (name + "/metrics.jsonl"));
    std::string line;
    std::getline(in, line);
    const auto object = nlohmann::json::parse(line);
    REQUIRE(object["kind"] == "val");
    return object["loss"].get<double>();
  };
  const double whole = loss("whole", " --val-steps 500 --batch-size 10");
  REQUIRE(std::isfinite(whole));
  REQUIRE(loss("most", " --val-steps 4611686018427387904 --batch-size 10") == whole);
  // The products of other micro-batches are rounded otherwise, to 6e-8; a target left out would be 1e-4 of the sum.
  REQUIRE(std::abs(loss("small", " --val-steps 4611686018427387904 --batch-size 1") / whole - 1) < 1e-6);
}

TEST_CASE("a plan as JSON has the numbers of the plan, for each stage", "[run][plan]") {
  const std::string options =
      "--plan --json --model d4-e4 --local-ranks 8 --pp 2 --tp 2 --ep 2 --zero-stage 2 -b 2 -t 64 "
      "--total-batch-size 1024 --tokens 10k --device cpu";
  const ProgramResult run = run_program(options);
  INFO(run.err);
  REQUIRE(run.status == 0);
  const nlohmann::json json = nlohmann::json::parse(run.out);
  Options o;
  const char* argv[] = {"train_gpt",
                        "--plan",
                        "--model",
                        "d4-e4",
                        "--local-ranks",
                        "8",
                        "--pp",
                        "2",
                        "--tp",
                        "2",
                        "--ep",
                        "2",
                        "-b",
                        "2",
                        "-t",
                        "64",
                        "--total-batch-size",
                        "1024",
                        "--zero-stage",
                        "2"};
  o = parse_command_line({std::begin(argv), std::end(argv)}, [](Options& at) {
        at.ranks = at.place.ranks_on_host = 8;
      }).options;
  const StepConfig step = choose_step(o);
  const Plan plan = plan_run(o, step, {DeviceKind::cpu, 1});
  REQUIRE(json["memory_bytes"] == plan.total_bytes());
  REQUIRE(json["layout"]["ranks"] == 8);
  REQUIRE(json["layout"]["layers_of_chunks"] == nlohmann::json{2, 2});
  REQUIRE(json["batch"]["tokens_per_step"] == 1024);
  REQUIRE(json["batch"]["steps"] == 10);
  REQUIRE(json["stages"].size() == 2);
  for (size_t s = 0; s < 2; ++s) {
    const nlohmann::json& stage = json["stages"][s];
    int64_t sum = 0, sent = 0;
    for (const auto& line : stage["memory"]) sum += line["bytes"].get<int64_t>();
    for (const auto& group : stage["sent"]) sent += group["bytes"].get<int64_t>();
    REQUIRE(stage["memory_bytes"] == sum);
    REQUIRE(sum == plan.of_stage(s).total_bytes());
    REQUIRE(stage["checkpoint_copy_bytes"] == plan.of_stage(s).share_bytes);
    REQUIRE(stage["sent_bytes"] == sent);
    REQUIRE(sent == plan.of_stage(s).bytes_sent());
    REQUIRE(stage["flops"] == plan.of_stage(s).flops());
  }
  for (const char* unknown : {"step_seconds", "tokens_per_second", "mfu", "time", "run", "other_ranks"})
    REQUIRE(json[unknown].is_null());  // a CPU has no datasheet, and there is no server

  const ProgramResult small = run_program(options + " --memory-limit 0.0001");
  REQUIRE(small.status == 1);
  REQUIRE(nlohmann::json::parse(small.out)["fits"] == false);
  REQUIRE(small.err.find("does not fit into --memory-limit") != std::string::npos);
}

TEST_CASE("a plan as JSON has the notices and the costs of the run that a plan in words has", "[run][plan]") {
  for (const std::string options :
       {"--model d24 --ranks 24 --tp 3 --machine h100x8 --dtype bf16 -t 64 -b 1 --price 2 --max-steps 1000",
        "--model d2 --vocab-size 257 -t 64 -b 1 --local-ranks 64", "--model d2 --vocab-size 257 -t 64 -b 1"}) {
    const ProgramResult words = run_program("--plan --sample-every 0 " + options),
                        numbers = run_program("--plan --json --sample-every 0 " + options);
    INFO(words.out << words.err << numbers.err);
    REQUIRE(words.status == 0);
    const auto json = nlohmann::json::parse(numbers.out);
    size_t notices = 0;
    for (size_t at = words.out.find("notice: "); at != std::string::npos; at = words.out.find("notice: ", at + 1))
      ++notices;
    REQUIRE(json["notices"].size() == notices);
    for (const auto& notice : json["notices"]) REQUIRE(words.out.find(notice.get<std::string>()) != std::string::npos);
    if (options.find("--price") == options.npos) continue;
    REQUIRE(notices == 2);  // of depth and topology
    const auto& run = json["run"];
    REQUIRE(run["seconds"] == json["step_seconds"].get<double>() * 1000);
    REQUIRE(run["price"] == 2 * run["gpu_hours"].get<double>());
    REQUIRE(run["gpu_hours"].get<double>() == Catch::Approx(run["seconds"].get<double>() * 24 / 3600));
    REQUIRE((run["least_seconds"] < run["seconds"] && run["seconds"] < run["most_seconds"]));
    REQUIRE(words.out.find(formatted("{} kWh, about {} kg", human_amount(run["kwh"].get<double>()),
                                     human_amount(run["kg_co2"].get<double>()))) != std::string::npos);
  }
}

TEST_CASE("a plan as JSON says where the time goes, and what each stage does when", "[run][plan]") {
  for (const std::string layout :
       {"--ranks 1", "--ranks 4 --zero-stage 3", "--ranks 1 --schedule gpipe --token-slices 2", "--ranks 4 --pp 4",
        "--ranks 4 --pp 2 --schedule zb-v", "--ranks 4 --pp 2 --schedule interleaved --pp-chunks 2 --zero-stage 1",
        "--ranks 4 --pp 2 --tp 2 --schedule zb-h1 --tp-overlap"}) {
    const ProgramResult run = run_program(
        "--plan --json --sample-every 0 --machine h100x8 --model d8 -b 1 -t 256 --total-batch-size 2048 " + layout);
    INFO(layout << run.err);
    REQUIRE(run.status == 0);
    const nlohmann::json json = nlohmann::json::parse(run.out);
    const double step = json["step_seconds"];
    const nlohmann::json& time = json["time"];
    const double parts = time["compute_seconds"].get<double>() + time["exposed_communication_seconds"].get<double>() +
                         time["bubble_seconds"].get<double>();
    REQUIRE(std::abs(parts - step) < 1e-9 * step);
    REQUIRE(time["update_seconds"] > 0);
    REQUIRE(time["update_seconds"] < time["compute_seconds"]);
    REQUIRE(json["hfu"] >= json["mfu"]);
    double before = std::numeric_limits<double>::infinity();
    for (const nlohmann::json& loss : time["losses"]) {
      REQUIRE(loss["seconds"] > 0);
      REQUIRE(loss["seconds"] <= before);
      REQUIRE(!loss["remedy"].get<std::string>().empty());
      before = loss["seconds"];
    }
    double exposed = 0, end = 0;
    const size_t slowest = time["slowest_stage"];
    for (const nlohmann::json& group : json["stages"][slowest]["exposed"]) exposed += group["seconds"].get<double>();
    REQUIRE(std::abs(exposed - time["exposed_communication_seconds"].get<double>()) <= 1e-9 * step);

    const int64_t passes = json["batch"]["micro_batches"].get<int64_t>() *
                           json["layout"]["chunks_per_stage"].get<int64_t>() *
                           std::max<int64_t>(1, std::ssize(json["layout"]["token_slices"]));
    const bool split = layout.find("zb-") != std::string::npos;
    for (const nlohmann::json& stage : json["stages"]) {
      std::map<std::string, int64_t> kinds;
      double now = 0;
      for (const nlohmann::json& pass : stage["timeline"]) {  // one after the other
        ++kinds[pass["kind"]];
        REQUIRE(pass["begin"] >= now);
        REQUIRE(pass["end"] >= pass["begin"]);
        now = pass["end"];
      }
      REQUIRE(kinds ==
              (split ? std::map<std::string, int64_t>{{"forward", passes},
                                                      {"backward_input", passes},
                                                      {"backward_weight", passes},
                                                      {"update", 1}}
                     : std::map<std::string, int64_t>{{"forward", passes}, {"backward", passes}, {"update", 1}}));
      REQUIRE(stage["timeline"].back()["kind"] == "update");
      end = std::max(end, now);
    }
    REQUIRE(std::abs(end - step) < 1e-9 * step);
  }
  const ProgramResult many =
      run_program("--plan --json --machine h100x8 --model d1 -b 1 -t 64 --ranks 1 --total-batch-size 1048576");
  REQUIRE(many.status == 0);
  REQUIRE(nlohmann::json::parse(many.out)["stages"][0]["timeline"].is_null());  // 2 x 16384 passes
}

namespace {

// Bytes that a step of GPT-2 124M reads and writes, by op.
std::map<std::string, double> bytes_of_124m(const std::string& options) {
  const ProgramResult run = run_program(
      "--plan --json --sample-every 0 --model gpt2:124M --machine h100x8 --ranks 1 --dtype bf16 -b 8 -t 1024 " +
      options);
  INFO(run.err);
  REQUIRE(run.status == 0);
  std::map<std::string, double> bytes;
  const nlohmann::json plan = nlohmann::json::parse(run.out);
  for (const nlohmann::json& op : plan["stages"][0]["ops"]) bytes[op["op"]] = op["bytes"];
  return bytes;
}
void require_refused(const std::string& options, const std::string& words) {
  const ProgramResult run = run_program(options);
  INFO(options << ": " << run.err);
  REQUIRE(run.status == 1);
  REQUIRE(run.err.find(words) != std::string::npos);
}

}  // namespace

TEST_CASE("--residual cublaslt: products read the residual stream, and no op their sums; refused where they cannot",
          "[run][plan]") {
  auto own = bytes_of_124m(""), products = bytes_of_124m("--residual cublaslt");
  const double of_layers = 12.0 * 8 * 1024 * 768 * 2;  // all numbers between two blocks
  REQUIRE(own["residual_forward"] == 3 * of_layers);
  REQUIRE(own["residual_layernorm_forward"] == 4 * of_layers);
  REQUIRE(products.count("residual_forward") + products.count("residual_layernorm_forward") == 0);
  REQUIRE(products["layernorm_forward"] == own["layernorm_forward"] + 2 * of_layers);
  REQUIRE(products["linear_residual_forward"] + products["linear_forward"] == own["linear_forward"] + 2 * of_layers);
  const std::string d2 = "--plan --residual cublaslt --model d2 ";
  require_refused(d2 + "--device cpu", "--residual cublaslt needs a GPU");
  require_refused(d2 + "--machine h100x8 --dtype bf16 --products fp8", "--products fp8: use --products dtype or");
  require_refused(d2 + "--machine h100x8 --ranks 2 --tp 2", "use --tp 1 or --residual own");
}

TEST_CASE("--gelu cublaslt: no op reads and writes all of GELU's numbers; refused where products cannot compute it",
          "[run][plan]") {
  auto own = bytes_of_124m(""), products = bytes_of_124m("--gelu cublaslt");
  const double of_layers = 12.0 * 8 * 1024 * 3072 * 2;  // all numbers before GELU
  REQUIRE(own["gelu_forward"] == 2 * of_layers);
  REQUIRE(own["gelu_backward_with_bias"] == 3 * of_layers);
  REQUIRE(products.count("gelu_forward") + products.count("gelu_backward_with_bias") == 0);
  // The products write them beside GELU's, and read them again; up's bias sums their gradients.
  REQUIRE(products["linear_gelu_forward"] + products["linear_forward"] == own["linear_forward"] + of_layers);
  REQUIRE(products["linear_gelu_backward_input"] + products["linear_backward_input"] ==
          own["linear_backward_input"] + of_layers);
  REQUIRE(products["linear_backward_bias"] == own["linear_backward_bias"] + of_layers);

  for (const auto& [options, words] :
       {std::pair{"--plan --gelu cublaslt --model d2 --device cpu", "--gelu cublaslt needs a GPU"},
        {"--plan --gelu cublaslt --model llama3:1B --machine h100x8 --dtype bf16", "models of type llama have SwiGLU"},
        {"--plan --gelu cublaslt --model d2 --machine h100x8 --dtype fp32", "use --dtype bf16 --products dtype"},
        {"--plan --gelu cublaslt --model d2 --machine h100x8 --dtype bf16 --products fp8", "--products fp8: use"},
        {"--plan --gelu cublaslt --model d2 --machine h100x8 --dtype bf16 --n-ffn 500", "use --n-ffn 496 or 504"},
        {"--plan --gelu cublaslt --model d2 --machine h100x8 --dtype bf16 --ranks 2 --tp 2", "use --tp 1"},
        {"--plan --gelu cublaslt --model d2 --machine h100x8 --dtype bf16 --recompute activation",
         "with --recompute activation"}})
    require_refused(options, words);
}

TEST_CASE("a plan of many stages has a row for each run of equal ones", "[run][plan]") {
  const ProgramResult run = run_program(
      "--plan --model d16 --n-embd 32 --n-head 2 --vocab-size 300 --local-ranks 16 --pp 16 -b 1 -t 16 "
      "--total-batch-size 256 --device cpu");
  INFO(run.out << run.err);
  REQUIRE(run.status == 0);
  REQUIRE(run.out.find("16 stages of 1 (16 times) layers") != std::string::npos);
  // With 1f1b an earlier stage keeps more micro-batches; all send the same but for the two at the ends.
  REQUIRE(std::regex_search(run.out, std::regex("  stage 0 +embedding, 0 ")));
  REQUIRE(std::regex_search(run.out, std::regex("  stage 15 +15, head ")));
  const ProgramResult gpipe = run_program(
      "--plan --model d16 --n-embd 32 --n-head 2 --vocab-size 300 --local-ranks 16 --pp 16 -b 1 -t 16 "
      "--total-batch-size 256 --schedule gpipe --device cpu");
  INFO(gpipe.out);
  REQUIRE(std::regex_search(gpipe.out, std::regex("  stages 1-14 +1 to 14 ")));
}
