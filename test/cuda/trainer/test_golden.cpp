// Twenty steps on a GPU against PyTorch's AdamW (golden/), like the CPU tests.
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "core/safetensors.h"
#include "cuda/device_test.h"
#include "data/dataloader.h"
#include "helpers.h"
#include "model/presets.h"
#include "run/checkpoints/checkpoint_write.h"
#include "run/ranks.h"
#include "train/lr_schedule.h"

using namespace llmc;
using nlohmann::json;

namespace {

const Device gpu{.kind = DeviceKind::cuda};

std::vector<float> read(const std::string& file, const std::string& name) {
  const SafetensorsReader reader(file);
  std::vector<float> values(static_cast<size_t>(reader.info(name).numel()));
  reader.read(name, values.data());
  return values;
}

}  // namespace

TEST_CASE("twenty steps on a GPU follow PyTorch's AdamW in loss, norm and every weight", "[pytorch][cuda][trainer]") {
#ifdef __CUDACC__
  const char* family = GENERATE("llama2_tiny", "llama3_tiny", "qwen2_tiny", "qwen3_tiny", "smollm2_tiny");
#else
  const char* family = "qwen3_tiny";  // the others use the same ops, and are slow
#endif
  const std::string folder = std::string("test/golden/families/") + family;
  const json golden = json::parse(read_whole(folder + "/trajectory.json")), &o = golden["options"];
  const int64_t B = o["batch-size"], T = o["seq-len"], rows = o["total-batch-size"], steps = o["max-steps"];
  const StepConfig config{.model = resolve_model(folder, {}), .batch = {B, T}, .micro_batches = rows / (B * T)};
  World world{Mesh()};
  Run run(config, make_plan(config, gpu), gpu, world, 0);
  load_model(folder, config.model, run.trainer.state(), run.stream);
  const TokenShards shards(folder + "/train.bin", T);
  DataLoader loader(shards, {.vocab_size = config.model.vocab_size});
  const LrShape shape = *from_name<LrShape>(o["lr-schedule"].get<std::string>());
  const LrSchedule schedule{shape, o["lr"], o["warmup-steps"], steps, o["final-lr-frac"]};
  for (int64_t step = 1; step <= steps; ++step) {
    const BatchSource batches = [&](int64_t m) {
      HostBatch batch;
      loader.read_batch((step - 1) * rows / T, m, {.batch_size = B}, batch.tokens, batch.targets, batch.positions);
      return batch;
    };
    const StepResult result = run.trainer.step(batches,
                                               {.lr = static_cast<float>(learning_rate(schedule, step)),
                                                .beta1 = o["beta1"],
                                                .beta2 = o["beta2"],
                                                .eps = o["adam-eps"],
                                                .weight_decay = o["weight-decay"],
                                                .step = step},
                                               {.max_norm = o["grad-clip"]});
    INFO(family << ", step " << step);
    const auto i = static_cast<size_t>(step - 1);
    REQUIRE(std::abs(result.loss / golden["loss"][i].get<double>() - 1) < 1e-4);
    REQUIRE(std::abs(result.grad_norm / golden["grad_norm"][i].get<double>() - 1) < 1e-4);
  }
  const TempDir dir;
  std::filesystem::create_directories(dir / "out");
  const std::string ours =
      CheckpointWrite(dir / "out", steps, config.model, run.trainer.state(), run.stream).publish() +
      "/model.safetensors";
  const std::string theirs = folder + "/final.safetensors";
  REQUIRE(SafetensorsReader(ours).names() == SafetensorsReader(theirs).names());
  for (const std::string& name : SafetensorsReader(theirs).names()) {
    std::vector<float> a = read(ours, name), b = read(theirs, name);
    REQUIRE(a.size() == b.size());
    for (const json& zero : golden["zero_gradient"])  // where Adam turns any rounding error into a full step
      if (zero[0] == name)
        for (size_t i = zero[1]; i < zero[2]; ++i) a[i] = b[i] = 0;
    INFO(family << ", " << name);
    REQUIRE(relative_distance(a.data(), b.data(), static_cast<int64_t>(a.size())) < 1e-4);
  }
}
