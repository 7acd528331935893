// recipe_file.h: reads a file of stages, in TOML or JSON, into JSON, and knows the line of each value of TOML.
#pragma once
#include <nlohmann/json.hpp>

#include "core/files.h"
#include "core/json.h"
#include "core/toml.h"
#include "core/utf8.h"

namespace llmc {

struct RecipeFile {
  std::string path;
  nlohmann::json root;
  std::map<std::string, int> lines;  // by JSON pointer; of TOML

  // "recipe.toml:12" where the file has lines, otherwise "recipe.json: /stage/0/tokens".
  std::string place(const std::string& pointer) const {
    const auto line = lines.find(pointer);
    if (line != lines.end()) return formatted("{}:{}", path, line->second);
    return lines.empty() && !pointer.empty() ? path + ": " + shown(pointer) : path;
  }
};

inline RecipeFile read_recipe_file(const std::string& path) {
  constexpr int64_t most_bytes = 1 << 20;
  CHECK(path_exists(path), "--stages {}: there is no such file", path);
  RecipeFile file{.path = path, .root = {}, .lines = {}};
  if (path.ends_with(".json")) {
    file.root = read_json(path);
    return file;
  }
  CHECK(path.ends_with(".toml"), "--stages {}: expected a file that ends with .toml or .json", path);
  const std::string text = read_text(path, most_bytes);
  const auto fault = utf8_fault(text);
  CHECK(!fault, "--stages {}: byte {} is not UTF-8", path, fault.value_or(0) + 1);
  int dots = 0;  // a.b.c: tables in tables, which the parser builds and frees by recursion
  for (const char c : text) {
    dots = c == '\n' ? 0 : dots + (c == '.');
    CHECK(dots <= 256, "--stages {}: a line with more than 256 dots, which no setting of a stage has", path);
  }
  const TomlFile toml = read_toml(text);
  CHECK(toml.fault_line == 0, "{}:{}: {}", path, toml.fault_line, shown(toml.fault, 300));
  file.root = parse_json(toml.json, path);
  file.lines = toml.lines;
  return file;
}

}  // namespace llmc
