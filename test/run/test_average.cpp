// --average: the mean of models, and what is refused.
#include <cmath>

#include "tiny_run.h"

using namespace llmc;

namespace {

std::map<std::string, std::vector<float>> weights_in(const std::string& directory) {
  std::map<std::string, std::vector<float>> all;
  for (const auto& file : open_all(model_files(directory)))
    for (const std::string& name : file->names()) {
      all[name].resize(static_cast<size_t>(file->info(name).numel()));
      file->read(name, all[name].data());
    }
  return all;
}

}  // namespace

TEST_CASE("--average writes the mean of checkpoints, which any run can begin with", "[run][average]") {
  const TempDir dir;
  run_well(tiny(dir / "run", "--tokenizer bytes --vocab-size 257 --max-steps 3 --checkpoint-every 1"));
  const std::string a = dir / "run/step-000001", b = dir / "run/step-000002", c = dir / "run/step-000003";
  const std::string text = said(formatted("--average {} {} {} --out {}", a, b, c, dir / "mean"));
  REQUIRE(text.find("the mean of 3 models") != std::string::npos);
  const auto mean = weights_in(dir / "mean");
  const auto of_a = weights_in(a), of_b = weights_in(b), of_c = weights_in(c);
  REQUIRE(mean.size() == of_a.size());
  for (const auto& [name, values] : mean)
    for (size_t i = 0; i < values.size(); ++i) {
      const double exact =
          (static_cast<double>(of_a.at(name)[i]) + static_cast<double>(of_b.at(name)[i]) + of_c.at(name)[i]) / 3;
      REQUIRE(values[i] == static_cast<float>(exact));  // rounded once
    }
  REQUIRE(read_whole(dir / "mean/tokenizer.json") == read_whole(a + "/tokenizer.json"));
  REQUIRE_FALSE(checkpoint_fault(dir / "mean"));
  const std::string evaluate =
      "--evaluate --seq-len 33 --batch-size 2 --threads 1 --val-data " + tiny_data + " --model ";
  const std::string table = said(evaluate + dir / "mean");
  REQUIRE(table.find(", the mean of 3 models\n") != std::string::npos);
  REQUIRE(table.find("after step") == std::string::npos);
  const auto json = nlohmann::json::parse(said(evaluate + dir / "mean" + " --json"));
  REQUIRE(json["mean_of"] == 3);
  REQUIRE_FALSE(json.contains("step"));
  run_well(tiny(dir / "next", "--model " + dir / "mean" + " --tokenizer auto --vocab-size 257 --max-steps 1"));

  // Models that another program wrote, with commas between them, in bf16.
  for (const char* name : {"x", "y"}) {
    run_well(tiny(dir / "of" + name, formatted("--dtype bf16 --max-steps 1 --seed {}", static_cast<int>(name[0]))));
    std::filesystem::create_directory(dir / name);
    for (const char* file : {"config.json", "model.safetensors"})
      std::filesystem::copy(dir / "of" + name + "/step-000001/" + file, dir / name);
  }
  run_well(formatted("--average={},{} --out {}/", dir / "x", dir / "y", dir / "xy"));
  REQUIRE_FALSE(path_exists(dir / "xy/manifest.json"));
  const SafetensorsReader x(dir / "x/model.safetensors"), y(dir / "y/model.safetensors"),
      xy(dir / "xy/model.safetensors");
  for (const std::string& name : x.names()) {
    std::vector<bf16> p(static_cast<size_t>(x.info(name).numel())), q = p, r = p;
    x.read(name, p.data()), y.read(name, q.data()), xy.read(name, r.data());
    for (size_t i = 0; i < p.size(); ++i)
      REQUIRE(r[i].bits == bf16((static_cast<float>(p[i]) + static_cast<float>(q[i])) / 2).bits);
  }
}

TEST_CASE("--average refuses models that are not alike, by what differs, and overwrites nothing", "[run][average]") {
  const TempDir dir;
  const auto make = [&](const std::string& name, const std::string& options) {
    run_well(tiny(dir / name, "--tokenizer bytes --vocab-size 257 --max-steps 1 " + options));
    return dir / name + "/step-000001";
  };
  const std::string a = make("a", ""), wide = make("wide", "--n-embd 24"), half = make("half", "--dtype bf16"),
                    other = make("other", "");
  const std::string tokenizer = read_whole(other + "/tokenizer.json");
  std::ofstream(other + "/tokenizer.json")
      << std::string(tokenizer).replace(tokenizer.find("<|endoftext|>"), 13, "<|other|>");
  const std::string to = " --out " + dir / "mean";
  refused("--average " + a + " " + wide + to, "\"n_embd\" is 12 in " + a + "/config.json and 24 in " + wide);
  refused("--average " + a + " " + half + to, "\"torch_dtype\" is \"float32\" in " + a);
  refused("--average " + a + " " + other + to, "differ in \"added_tokens\"");
  refused("--average " + a + to, "name at least two models");
  refused("--average " + a + " " + a, "--average " + a + "," + a + " needs --out");
  refused("--average " + a + " " + dir / "nowhere" + to, "has no config.json");
  refused("--average " + a + " " + a + " --out " + dir / "no/where", "there is no directory " + dir / "no");
  refused("--average " + a + " " + a + " --lr 1" + to, "--lr with --average");
  refused("--average " + a + " " + a + " --out " + dir / "a", "--out " + dir / "a" + " exists");
  std::fstream(a + "/model.safetensors", std::ios::in | std::ios::out | std::ios::binary).seekp(-1, std::ios::end)
      << 'x';
  refused("--average " + other + " " + a + to, "do not match the checksum");
  for (const std::string& name : names_in(dir.path())) REQUIRE(name.find("tmp") == name.npos);
  REQUIRE_FALSE(path_exists(dir / "mean"));
}
