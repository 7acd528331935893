// formats.h: a small valid file of every format that the trainer reads, and all that it reads from it.
#pragma once
#include <xxhash.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "catch2.h"
#include "data/dataloader.h"
#include "data/packed_shards.h"
#include "data/verify_data.h"
#include "fuzz/mutations.h"
#include "helpers.h"
#include "run/checkpoints/checkpoint_write.h"
#include "run/checkpoints/progress.h"
#include "run/job.h"
#include "run/options/parse.h"
#include "run/recipe/course.h"
#include "text/tokenizer.h"
#include "train/choices.h"

namespace llmc {

struct Format {
  std::string name, directory, file;
  Content content;
  bool is_protected = false;          // by a manifest: a change is refused, or changes nothing that is read
  std::function<void()> reseal;       // makes the manifest fit the changed file; empty: nothing to do
  std::function<std::string()> read;  // what a run would read, as text; throws Error
};

// The whole state that a checkpoint holds, and a place to load it to.
class Checkpoints {
 public:
  Checkpoints() {
    init_weights(state_, 1, stream_);
    for (const StateEntry& e : state_.state_table())
      if (e.kind != StateKind::weight) init_normal(e.tensor, 0.5f, {}, 2, e.param->name, stream_);
    stream_.synchronize();
  }
  static ModelConfig config() {
    ModelConfig model;
    model.n_layer = 1;
    model.n_head = model.n_kv_head = 2;
    model.head_size = 4;
    model.n_embd = 8;
    model.n_ffn = 12;
    model.vocab_size = 31;
    model.n_positions = 16;
    return model;
  }
  std::string write(const std::string& out, const nlohmann::ordered_json& trainer) {
    std::filesystem::create_directories(out);
    const std::string path = CheckpointWrite(out, 3, config(), state_, stream_, {.trainer = trainer}).publish(),
                      file = "optimizer-00001-of-00001.safetensors";
    divide_columns(path + "/" + file);
    nlohmann::json all = nlohmann::json::parse(read_whole(path + "/manifest.json"));
    all["files"][file] = write_recorded_text(path + "/" + file, read_whole(path + "/" + file)).to_json();
    std::ofstream(path + "/manifest.json") << all.dump(1);
    return path;
  }
  std::string load_weights(const std::string& path) {
    const auto files = open_all(model_files(path));
    match_hf_names(files, hf_tensors(resolve_model(path, {}), files));
    load_model(path, config(), state_, stream_);
    return contents();
  }
  std::string load_all(const std::string& path) {
    if (const auto fault = checkpoint_fault(path)) throw Error(*fault);
    const ResumePoint point{path, 3, read_json(path + "/trainer.json")};
    load_checkpoint(path, config(), state_, stream_);
    const Progress progress = progress_at(point);
    std::string all = contents() + config_to_hf(resolve_model(path, {}), DType::bf16).dump();
    for (const double v : progress.losses.values()) all += formatted(" {:.17g}", v);
    for (const double v : progress.norms.values()) all += formatted(" {:.17g}", v);
    Log log = Log::silent();
    check_resumed_options(log, path + "/trainer.json", point.trainer.value("options", nlohmann::json()), Options());
    return all + formatted(" {} {:.17g} {} {}", progress.best_step, progress.best_val, progress.matmul_choices,
                           trained_seq_len(path).value_or(0));
  }

 private:
  // Gives one matrix (8 rows of 12) the slices that tensor-parallel ranks write: of some columns each.
  static void divide_columns(const std::string& file) {
    const std::string matrix = "blocks.0.mlp.down.weight:", rows = "[0:96]";
    std::vector<std::pair<TensorInfo, std::vector<float>>> tensors;
    const SafetensorsReader reader(file);
    for (const std::string& name : reader.names()) {
      std::vector<float> values(static_cast<size_t>(reader.info(name).numel()));
      reader.read(name, values.data());
      if (!name.starts_with(matrix)) tensors.emplace_back(reader.info(name), values);
      else
        for (const auto& [columns, first, end] : {std::tuple("[:,0:5][0:40]", 0, 5), {"[:,5:12][0:56]", 5, 12}}) {
          std::vector<float> box;
          for (size_t row = 0; row < 8; ++row)
            box.insert(box.end(), values.data() + row * 12 + first, values.data() + row * 12 + end);
          const std::string what = name.substr(0, name.size() - rows.size());
          tensors.emplace_back(TensorInfo{what + columns, DType::fp32, {std::ssize(box)}}, box);
        }
    }
    std::vector<TensorInfo> infos;
    for (const auto& [info, values] : tensors) infos.push_back(info);
    SafetensorsWriter writer(file, infos);
    for (const auto& [info, values] : tensors) writer.write(values.data(), info.bytes());
    writer.finish();
  }
  std::string contents() {
    stream_.synchronize();
    std::string all;
    for (const StateEntry& e : state_.state_table())
      all += hex_digits(XXH3_64bits(e.tensor.bytes, static_cast<size_t>(e.tensor.size_bytes())));
    return all;
  }
  // What the state takes: a write beyond it is not within the arena either, so that AddressSanitizer sees it.
  static int64_t state_bytes() {
    const Device paper = Device{DeviceKind::cpu, 1}.on_paper();
    Arena counted(paper);
    Groups alone{Layout{}, 0, paper, Groups::null_groups(0)};
    const ModelState state(parameter_table(config()), DType::bf16, {}, alone, counted);
    return counted.high_water();
  }
  Device device_{DeviceKind::cpu, 1};
  Arena arena_{device_, state_bytes()}, scratch_{device_, 1 << 20};
  Stream stream_{device_, scratch_};
  Groups alone_{Layout{}, 0, device_, Groups::null_groups(0)};
  ModelState state_{parameter_table(config()), DType::bf16, {}, alone_, arena_};
};

inline std::string text_of(const std::vector<int32_t>& tokens) { return formatted("{} ", tokens); }

inline std::string read_shard(const std::string& path, DataFormat format) {
  const TokenShards shards(path, 16, "--train-data", format);
  std::string all = formatted("{} ", shards.tokens());
  std::vector<int32_t> tokens;
  std::vector<uint8_t> begins;
  for (int64_t i = 0; i < shards.samples(); ++i) {
    shards.read_sample(i, 300, tokens);
    shards.find_documents_of(i, 0, tokens, 0, begins);
    all += text_of(tokens) + std::string(begins.begin(), begins.end());
  }
  const ShardReport report = verify_shard(path, format, 300, 0, [](int64_t) {});
  if (!report.error.empty()) throw Error(report.error);
  return all + formatted("{} {} {}", report.tokens, report.documents, report.largest);
}

inline std::string read_packed(const std::string& path, const std::string& index_directory) {
  const TokenFiles files(path, "--train-data");
  const PackedShards shards(files, {.seq_len = 12, .vocab_size = 300, .index_directory = index_directory},
                            [](auto&) {});
  std::string all;
  std::vector<int32_t> tokens(12), targets(12), positions(12);
  for (int64_t i = 0; i < shards.samples(); ++i) {
    shards.read_sample(i, 300, tokens.data(), targets.data(), positions.data());
    all += text_of(tokens) + text_of(targets);
  }
  return all;
}

inline std::string read_tokenizer(const std::string& path) {
  const auto tokenizer = make_tokenizer(path);
  std::string all = formatted("{} {} ", tokenizer->end_of_text(), tokenizer->prefix());
  for (int32_t id = -1; id < 600; ++id) all += tokenizer->decode(std::vector<int32_t>{id}) + " ";
  if (!path.ends_with(".bin"))
    all += text_of(tokenizer->encode("The quick brown fox's 12345 jumps\n\n  over <|endoftext|> l\xc3\xa9zards!  "));
  return all;
}

inline std::string read_safetensors(const std::string& path) {
  const SafetensorsReader reader(path);
  std::string all;
  for (const std::string& name : reader.names()) {
    std::string bytes(static_cast<size_t>(reader.info(name).bytes()), '\0');
    reader.read(name, bytes.data());
    all += formatted("{} {} {} {} ", name, reader.info(name).dtype, reader.info(name).shape, bytes);
  }
  return all;
}

inline std::string read_config_file(const std::string& path) {
  return config_text(parse_command_line({"train_gpt", "--config", path}, [](const Options&) {}).options);
}

// The steps of a run of these stages over two sources.
inline std::string read_stages(const std::string& path) {
  Options o;
  o.stages = path;
  for (const char* source : {"web=web.bin:0.7", "code=code.bin:0.3"}) o.data.add(source);
  const Recipe recipe = read_recipe(o);
  const Course course(recipe, {4000 * recipe.longest(), 1000 * recipe.longest()});
  std::string all = recipe.text.dump();
  for (const Stretch& stretch : course.stretches())
    all += formatted(" {} {} {} {} {:.17g}", stretch.first_step, stretch.steps, stretch.tokens_per_step,
                     stretch.weights, stretch.learning_rate(stretch.last_step()));
  return all;
}

// All formats, in directories below `root`.
// checkpoints: there while this function and the formats' functions run.
inline std::vector<Format> make_formats(const std::string& root, std::unique_ptr<Checkpoints>& checkpoints) {
  namespace fs = std::filesystem;
  std::vector<Format> formats;
  const std::string golden = "test/golden/";
  auto directory = [&](const std::string& name) {
    fs::create_directories(root + "/" + name);
    return root + "/" + name;
  };
  auto put = [](const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; };

  std::vector<uint16_t> small;
  std::vector<uint32_t> large;
  for (int i = 0; i < 70; ++i) small.push_back(static_cast<uint16_t>(i * 7 % 257)), large.push_back(small.back());
  const std::string shards = directory("shards");
  write_shard(shards + "/small.bin", small);
  write_shard(shards + "/large.bin", large);
  for (const char* file : {"small.bin", "large.bin"})
    formats.push_back({file, shards, file, Content::binary, false, {}, [=] {
                         return read_shard(shards + "/" + file, DataFormat::automatic);
                       }});
  const std::string foreign = directory("foreign");
  for (const char* file : {"nanogpt.bin", "olmo.npy", "megatron_int32.bin", "megatron_int32.idx"})
    fs::copy(golden + "token_files/" + file, foreign);
  for (const auto& [changed, read, format] : {std::tuple("nanogpt.bin", "nanogpt.bin", DataFormat::nanogpt),
                                              {"olmo.npy", "olmo.npy", DataFormat::olmo},
                                              {"megatron_int32.bin", "megatron_int32.bin", DataFormat::automatic},
                                              {"megatron_int32.idx", "megatron_int32.bin", DataFormat::megatron}})
    formats.push_back({changed, foreign, changed, Content::binary, false, {}, [path = foreign + "/" + read, format] {
                         return read_shard(path, format);
                       }});

  // An index of documents, and one whose checksums fit what was changed.
  std::vector<uint16_t> texts;
  for (int i = 0; i < 200; ++i) texts.push_back(static_cast<uint16_t>(i * i % 13 < 2 ? 0 : i));
  for (const bool sealed : {true, false}) {
    const std::string name = sealed ? "sealed documents" : "resealed documents", indexes = directory(name + "' index"),
                      tokens = directory(name) + "/texts.bin";
    write_shard(tokens, texts);
    read_packed(tokens, indexes);
    const std::string file = names_in(indexes)[0], path = indexes + "/" + file;
    auto reseal = [=] {
      std::string bytes = read_whole(path);
      if (bytes.size() < sizeof(IndexSeal)) return;
      IndexSeal seal;
      const size_t beginnings = bytes.size() - sizeof seal;
      std::memcpy(&seal, bytes.data() + beginnings, sizeof seal);
      seal.documents = static_cast<int64_t>(beginnings / 8);
      seal.beginnings = XXH3_64bits(bytes.data(), beginnings);
      seal.seal = seal.hash();
      std::memcpy(bytes.data() + beginnings, &seal, sizeof seal);
      put(path, bytes);
    };
    formats.push_back({formatted("{} index", name), indexes, file, Content::binary, sealed,
                       sealed ? std::function<void()>() : reseal, [=] { return read_packed(tokens, indexes); }});
  }

  // A checkpoint whose manifest fits what was changed, as after a change by hand, and one whose manifest does not.
  const nlohmann::ordered_json trainer = {{"format", 1},
                                          {"step", 3},
                                          {"seq_len", 8},
                                          {"best_validation", {{"step", 2}, {"loss", 1.25}}},
                                          {"detectors", {{"loss", {3.5, 3.25, 3}}, {"grad_norm", {1.5, 1.25, 1}}}},
                                          {"choices", {{"grad_reduce", "step"}, {"matmul", "x"}}},
                                          {"options", options_json(Options())}};
  for (const bool sealed : {true, false}) {
    const std::string path = checkpoints->write(directory(sealed ? "sealed" : "resealed"), trainer);
    for (const auto& [file, content] : {std::pair("config.json", Content::json),
                                        {"trainer.json", Content::json},
                                        {"manifest.json", Content::json},
                                        {"model.safetensors", Content::safetensors},
                                        {"optimizer-00001-of-00001.safetensors", Content::safetensors}}) {
      const bool manifest = std::string_view(file) == "manifest.json";
      if (manifest && !sealed) continue;
      auto reseal = [=] {
        nlohmann::json all = nlohmann::json::parse(read_whole(path + "/manifest.json"));
        all["files"][file] = write_recorded_text(path + "/" + file, read_whole(path + "/" + file)).to_json();
        std::ofstream(path + "/manifest.json") << all;
      };
      formats.push_back({formatted("{} {}", sealed ? "sealed" : "resealed", file), path, file, content, sealed,
                         sealed ? std::function<void()>() : reseal,
                         [=, &checkpoints] { return checkpoints->load_all(path); }});
    }
  }

  const std::string model = directory("model"), parts = directory("parts");
  fs::copy(root + "/sealed/step-000003/config.json", model);
  fs::copy(root + "/sealed/step-000003/model.safetensors", model);
  fs::copy(golden + "families/qwen3_tiny/config.json", parts);
  for (const char* file : {"config.json", "model.safetensors"})
    formats.push_back({formatted("model's {}", file),
                       model,
                       file,
                       file[0] == 'c' ? Content::json : Content::safetensors,
                       false,
                       {},
                       [=, &checkpoints] { return checkpoints->load_weights(model); }});
  fs::copy(root + "/sealed/step-000003/config.json", parts, fs::copy_options::overwrite_existing);
  fs::copy(root + "/sealed/step-000003/model.safetensors", parts + "/model-00001-of-00001.safetensors");
  nlohmann::ordered_json map;
  for (const HfTensor& t : hf_tensors(Checkpoints::config())) map[t.name] = "model-00001-of-00001.safetensors";
  put(parts + "/model.safetensors.index.json",
      nlohmann::ordered_json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump(1));
  formats.push_back({"index.json", parts, "model.safetensors.index.json", Content::json, false, {}, [=, &checkpoints] {
                       return checkpoints->load_weights(parts);
                     }});
  const std::string family = directory("family");
  for (const auto& [folder, name] :
       {std::pair("families", "llama3_tiny"), {"families", "qwen2_tiny"}, {"experts", "qwen2_moe_tiny"}}) {
    const std::string file = formatted("{}.json", name);
    fs::copy(formatted("{}{}/{}/config.json", golden, folder, name), family + "/" + file);
    formats.push_back({file, family, file, Content::json, false, {}, [=] {
                         const std::string path = family + "/" + file;
                         const ModelConfig c = config_from_hf(read_json(path), path);
                         return config_to_hf(c, DType::fp32).dump() + formatted("{}", hf_tensors(c).size());
                       }});
  }
  const std::string tensors = directory("tensors");
  {
    SafetensorsWriter w(tensors + "/t.safetensors",
                        {{"a", DType::fp32, {2, 3}}, {"b", DType::bf16, {2}}, {"c", DType::fp64, {}}});
    w.write(std::string(36, 'x').data(), 36);
    w.finish();
  }
  formats.push_back({"t.safetensors", tensors, "t.safetensors", Content::safetensors, false, {}, [=] {
                       return read_safetensors(tensors + "/t.safetensors");
                     }});

  const std::string out = directory("out");
  checkpoints->write(out, trainer);
  Options o;
  o.out_dir = out;
  put(out + "/run.json", nlohmann::ordered_json{{"format", 1}, {"options", options_json(o)}}.dump(1));
  std::string lines;
  for (int step = 1; step < 6; ++step)
    for (const char* kind : {"train", "val"})
      lines += nlohmann::ordered_json{{"kind", kind}, {"step", step}, {"loss", 2.5}}.dump() + "\n";
  put(out + "/metrics.jsonl", lines);
  for (const auto& [file, content] : {std::pair("run.json", Content::json), {"metrics.jsonl", Content::json_lines}})
    formats.push_back({file, out, file, content, false, {}, [=] {
                         Log log = Log::silent();
                         RunDirectory run(log, o);
                         const MetricsKept kept = run.claim(log, o, ResumePoint{out, 3, {}});
                         return formatted("{} {} {}", kept.validated, kept.elapsed_s,
                                          read_whole(out + "/metrics.jsonl"));
                       }});

  const std::string text = directory("text");
  for (const char* file : {"gpt2.json", "llama2.json", "llama3.json", "qwen2.5.json"}) {
    fs::copy(golden + "tokenizers/" + file, text);
    formats.push_back({formatted("tokenizer {}", file), text, file, Content::json, false, {}, [=] {
                         return read_tokenizer(text + "/" + file);
                       }});
  }
  std::string table(1024, '\0');
  const uint32_t header[] = {20240328, 2, 3, 2};
  std::memcpy(table.data(), header, sizeof header);
  put(text + "/gpt2_tokenizer.bin", table + "\1a\4 b\n\xff\5<end>");
  formats.push_back({"gpt2_tokenizer.bin", text, "gpt2_tokenizer.bin", Content::binary, false, {}, [=] {
                       return read_tokenizer(text + "/gpt2_tokenizer.bin");
                     }});

  const std::string choices = directory("choices");
  put(choices + "/choices.jsonl",
      "{\"context\":[1,2,3],\"choices\":[[4,5],[6]],\"label\":1,\"lengths\":[7,3]}\n"
      "{\"context\":[9],\"choices\":[[4],[6],[8,9,10]],\"label\":0,\"lengths\":[1,2,3.5]}\n");
  formats.push_back({"choices.jsonl", choices, "choices.jsonl", Content::json_lines, false, {}, [=] {
                       const ChoiceSet set(choices + "/choices.jsonl", 31, 8);
                       const HostBatch batch = set.batch(0, set.rows(), set.length(8));
                       return text_of(batch.tokens) + text_of(batch.targets);
                     }});

  const std::string stages = directory("stages");
  put(stages + "/run.toml",
      "[[stage]]\nname = \"short\"\ntokens = \"2M\"\nseq-len = 64\nbatch-size = 8\ntotal-batch-size = 4096\n"
      "batch-doubling = { from = 1024, every = \"200k\" }\nlr = 6e-3\nwarmup = 100_000\n"
      "[[stage]]\nsteps = 40\nseq-len = 256\nbatch-size = 4\ntotal-batch-size = 8192\n"
      "data = { web = 1, code = 3.5 }  # more of it\nlr-schedule = \"wsd\"\ndecay = 0x8000\nmask-documents = true\n");
  put(stages + "/run.json",
      R"({"stage": [{"tokens": "300k", "seq-len": 32, "batch-ramp": [[0, 256], ["50k", 512]], "batch-size": 1},
                    {"name": "b", "epochs": 1.5, "data": {"code": 1}, "seq-len": 64, "rope-factor": 2, "lr": 1e-4}]})");
  for (const auto& [file, content] : {std::pair("run.toml", Content::text), {"run.json", Content::json}})
    formats.push_back({formatted("stages in {}", file), stages, file, content, false, {}, [path = stages + "/" + file] {
                         return read_stages(path);
                       }});

  const std::string config = directory("config");
  o.train_data = "x.bin";
  put(config + "/run.cfg", "# options\n" + config_text(o) + "\n");
  formats.push_back(
      {"--config", config, "run.cfg", Content::text, false, {}, [=] { return read_config_file(config + "/run.cfg"); }});
  return formats;
}

}  // namespace llmc
