// trace_file.h: the file of --trace, and what it says about itself.
#pragma once
#include <cstdio>
#include <filesystem>

#include "core/files.h"
#include "core/trace.h"
#include "train/step_config.h"

namespace llmc {

namespace detail {

inline std::string unfinished_trace(const std::string& path) { return path + ".partial"; }

}  // namespace detail

// The file appears under its name once it is complete.
inline void write_trace(const std::string& path, const std::string& text) {
  const std::string unfinished = detail::unfinished_trace(path);
  try {
    write_text_durably(unfinished, text);
    std::filesystem::rename(unfinished, path);
  } catch (const std::exception& error) {  // Error, or one of std::filesystem
    std::remove(unfinished.c_str());
    throw Error(formatted("--trace {}: {}", path, error.what()));
  }
}

// Rejects a file that cannot be written, before anything is computed for it.
inline void require_writable_trace(const std::string& path) {
  CHECK(!is_directory(path), "--trace {} is a directory: name a file, such as {}/trace.json", path, path);
  const std::string unfinished = detail::unfinished_trace(path);
  try {
    File::create(unfinished);
  } catch (const Error& error) {
    throw Error(
        formatted("--trace {}: {}: name a file in a directory that exists and may be written to", path, error.what()));
  }
  std::remove(unfinished.c_str());
}

// What a trace says of the step that it shows. kind: "run" or "plan"; times: how they were found
inline TraceArgs about_trace(const StepConfig& step, const char* kind, const std::string& times) {
  const Pipeline p = step.pipeline();
  return {{"program", "train_gpt"},           {"kind", kind},       {"times", times},
          {"schedule", name_of(p.schedule)},  {"stages", p.stages}, {"chunks_per_stage", p.chunks_per_stage},
          {"micro_batches", p.micro_batches}, {"slices", p.slices}, {"ranks", step.layout.ranks()}};
}

}  // namespace llmc
