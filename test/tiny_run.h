// tiny_run.h: a run of the program that takes a second, and readers for its output.
#pragma once
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/safetensors.h"
#include "helpers.h"
#include "run/checkpoints/checkpoint.h"

inline const std::string tiny_data = "test/golden/gpt2_tiny/train.bin";

// A tiny model with gradient accumulation and shuffling; epochs end in the middle of steps.
inline std::string tiny(const std::string& out, const std::string& more) {
  return "--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --train-data " + tiny_data +
         " --seq-len 33 --batch-size 2 --total-batch-size 264 --lr 1e-2 --threads 1 --out-dir " + out + " " + more;
}

// A number from all lines of a kind in metrics.jsonl, by step; each step occurs once.
inline std::map<int64_t, double> metric(const std::string& out, const std::string& kind, const std::string& name) {
  std::map<int64_t, double> found;
  std::ifstream in(out + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);) {
    const nlohmann::json object = nlohmann::json::parse(line);
    if (object["kind"] == kind) REQUIRE(found.emplace(object["step"], object[name]).second);
  }
  return found;
}
inline std::map<int64_t, double> losses(const std::string& out) { return metric(out, "train", "loss"); }
inline std::map<int64_t, double> validations(const std::string& out) { return metric(out, "val", "loss"); }

// The bytes of a checkpoint's entire state.
inline std::string state_of(const std::string& checkpoint) {
  REQUIRE_FALSE(llmc::checkpoint_fault(checkpoint));
  return read_whole(checkpoint + "/model.safetensors") +
         read_whole(checkpoint + "/optimizer-00001-of-00001.safetensors");
}

// A model directory with the weights of a checkpoint, each tensor changed by change(name, values).
template <class Change>
void write_changed_model(const std::string& to, const std::string& checkpoint, Change&& change) {
  std::filesystem::create_directories(to);
  std::filesystem::copy(checkpoint + "/config.json", to + "/config.json");
  const llmc::SafetensorsReader r(checkpoint + "/model.safetensors");
  std::vector<llmc::TensorInfo> infos;
  for (const std::string& name : r.names()) infos.push_back(r.info(name));
  llmc::SafetensorsWriter w(to + "/model.safetensors", infos);
  for (const llmc::TensorInfo& info : infos) {
    std::vector<float> values(static_cast<size_t>(info.numel()));
    r.read(info.name, values.data());
    change(info.name, values);
    w.write(values.data(), info.bytes());
  }
  w.finish();
}

// The operations in a log of file_ops.cpp: "WORDS BYTES\n", then that many bytes.
inline std::vector<std::string> file_operations(const std::string& log) {
  std::vector<std::string> all;
  for (size_t at = 0; at < log.size();) {
    const size_t end = log.find('\n', at), space = log.rfind(' ', end);
    all.push_back(log.substr(at, space - at));
    at = end + 1 + std::stoul(log.substr(space + 1, end - space - 1));
  }
  return all;
}

inline void run_well(const std::string& arguments) {
  const ProgramResult r = run_program(arguments);
  INFO(r.err);
  REQUIRE(r.status == 0);
}
// What a run that ends well says.
inline std::string said(const std::string& arguments) {
  const ProgramResult r = run_program(arguments);
  INFO(r.err);
  REQUIRE(r.status == 0);
  return r.out;
}
inline ProgramResult refused(const std::string& arguments, const std::string& why) {
  const ProgramResult r = run_program(arguments);
  INFO(r.out << r.err << "\nexpected: " << why);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find(why) != std::string::npos);
  return r;
}

// DIR/broken: a model in which only token 9 at position 4 embeds to infinity. The head ignores that channel.
inline void write_broken_model(const TempDir& dir) {
  run_well(tiny(dir / "made", "--max-steps 1 --warmup-steps 0"));
  write_changed_model(dir / "broken", dir / "made/step-000001",
                      [](const std::string& name, std::vector<float>& values) {
                        if (name.ends_with("wte.weight")) values[9 * 12] = 3e38f;
                        if (name.ends_with("wpe.weight")) values[4 * 12] = 1e38f;
                        if (name.ends_with("ln_f.weight")) values[0] = 0;
                      });
}
