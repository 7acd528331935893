// Mixed-precision runs of the program, compared with PyTorch's (golden/gpt2_tiny) by their fp32 masters; bf16 weights
// are too coarse: a norm's weight moves by about one bf16 step in twenty updates.
#include <nlohmann/json.hpp>

#include "catch2.h"
#include "core/safetensors.h"
#include "helpers.h"
#include "model/hf.h"
#include "model/presets.h"

using namespace llmc;
using nlohmann::json;

namespace {

const std::string model = "test/golden/gpt2_tiny";
constexpr size_t steps = 20;

// The options of the golden trajectory in bf16.
std::string bf16_options(const std::string& out_dir, int micro_batch) {
  return formatted(
      "--model {} --train-data {}/train.bin --batch-size {} --seq-len 33 --total-batch-size 264 --max-steps {} "
      "--lr 1e-3 --warmup-steps 5 --lr-schedule cosine --final-lr-frac 0.1 --weight-decay 0.1 --grad-clip 1 "
      "--no-shuffle --threads 2 --dtype bf16 --out-dir {}",
      model, model, micro_batch, steps, out_dir);
}

std::vector<json> training_lines(const std::string& out_dir) {
  std::vector<json> lines;
  std::ifstream in(out_dir + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);)
    if (json object = json::parse(line); object["kind"] == "train") lines.push_back(object);
  return lines;
}

// An fp32 tensor from a Hugging Face file.
std::vector<float> wide_values(const SafetensorsReader& file, const std::string& name) {
  REQUIRE(file.info(name).dtype == DType::fp32);
  std::vector<float> all(static_cast<size_t>(file.info(name).numel()));
  file.read(name, all.data());
  return all;
}

// The fp32 masters in a checkpoint written by one rank, as the Hugging Face tensor `hf`.
std::vector<float> masters(const SafetensorsReader& optimizer, const HfTensor& hf) {
  std::map<std::string, std::vector<float>> contents;
  std::map<std::string, ParamSpec> specs;
  StateTable parts;
  for (const std::string& part : hf.parts)
    for (const std::string& name : optimizer.names()) {
      if (!name.starts_with(part + ":master[")) continue;
      std::vector<float>& values = contents[part] = wide_values(optimizer, name);
      const Tensor flat{.name = "master",
                        .dtype = DType::fp32,
                        .shape = {static_cast<int64_t>(values.size())},
                        .bytes = reinterpret_cast<std::byte*>(values.data())};
      specs[part] = {.name = part, .shape = flat.shape};
      parts.push_back({&specs[part], StateKind::weight, 0, flat});
    }
  REQUIRE(parts.size() == hf.parts.size());
  std::vector<std::byte> room;
  std::vector<float> all(static_cast<size_t>(TensorInfo{"", DType::fp32, hf.shape}.numel()));
  std::memcpy(all.data(), gather_hf(room, hf, parts), all.size() * sizeof(float));
  return all;
}

// The true gradient of the key bias is zero: Adam turns any rounding error into a full step.
std::vector<float> without_key_bias(const std::string& name, std::vector<float> x) {
  if (!name.ends_with("c_attn.bias")) return x;
  const auto third = static_cast<int64_t>(x.size() / 3);
  x.erase(x.begin() + third, x.begin() + 2 * third);
  return x;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  return relative_distance(a.data(), b.data(), static_cast<int64_t>(a.size()));
}

// Our run in micro-batches of `micro` follows PyTorch's; `other` is PyTorch's second micro-batch size.
void require_parity(int micro, int other) {
  const json golden = json::parse(read_whole(model + "/trajectory_bf16.json"));
  const json &same = golden[formatted("micro-batches of {}", micro)],
             &different = golden[formatted("micro-batches of {}", other)];
  const TempDir dir;
  const ProgramResult r = run_program(bf16_options(dir / "run", micro));
  INFO("micro-batches of " << micro << "\n" << r.err);
  REQUIRE(r.status == 0);

  const std::vector<json> lines = training_lines(dir / "run");
  REQUIRE(lines.size() == steps);
  for (const auto& [name, rounding] : {std::pair{"loss", 1e-3}, {"grad_norm", 0x1p-8}})
    for (size_t i = 0; i < steps; ++i) {
      INFO(name << " at step " << i + 1);
      const double ours = lines[i][name], theirs = same[name][i], self = different[name][i];
      REQUIRE(std::abs(ours - theirs) < std::max(2 * std::abs(theirs - self), rounding * theirs));
    }

  const std::string checkpoint = dir / "run/step-000020/";
  const SafetensorsReader weights(checkpoint + "model.safetensors"),
      optimizer(checkpoint + "optimizer-00001-of-00001.safetensors"),
      theirs(model + formatted("/masters_bf16_{}.safetensors", micro)),
      others(model + formatted("/masters_bf16_{}.safetensors", other)), in_fp32(model + "/final.safetensors"),
      start(model + "/model.safetensors");
  const std::vector<HfTensor> tensors = hf_tensors(resolve_model(model, {}));
  REQUIRE(tensors.size() == theirs.names().size());
  for (const HfTensor& hf : tensors) {
    INFO(hf.name);
    const std::vector<float> whole = masters(optimizer, hf);
    std::vector<bf16> weight(whole.size());
    REQUIRE(weights.info(hf.name).dtype == DType::bf16);
    weights.read(hf.name, weight.data());
    const bool rounded =
        std::equal(weight.begin(), weight.end(), whole.begin(), [](bf16 w, float m) { return w.bits == bf16(m).bits; });
    REQUIRE(rounded);

    auto of = [&](const SafetensorsReader& file) { return without_key_bias(hf.name, wide_values(file, hf.name)); };
    const std::vector<float> a = without_key_bias(hf.name, whole), b = of(theirs), c = of(others), before = of(start);
    // Not all that PyTorch rounds inside an op is rounded here, and the other way round, and processors round products
    // in their own ways: all are about as far from fp32, in directions of their own, as PyTorch's two runs are.
    const std::vector<float> f = of(in_fp32);
    REQUIRE(distance(a, f) < std::max({2 * distance(b, f), 2 * distance(c, f), 0x1p-8}));
    REQUIRE(distance(a, b) < std::max({2 * distance(b, c), std::sqrt(2.0) * distance(b, f), 0x1p-8}));
    // Distance from PyTorch's update, relative to the update: 1 for a weight that did not move, 2 for one that moved
    // backward, 1/2 at half the speed.
    std::vector<float> our_way(a.size()), their_way(a.size());
    for (size_t i = 0; i < a.size(); ++i) our_way[i] = a[i] - before[i], their_way[i] = b[i] - before[i];
    REQUIRE(distance(our_way, their_way) < 0.5);
  }
}

}  // namespace

TEST_CASE(
    "bf16: loss, norm and every fp32 master follow PyTorch's for twenty steps, and weights are the rounded masters",
    "[train][bf16]") {
  require_parity(4, 8);
  require_parity(8, 4);
}
