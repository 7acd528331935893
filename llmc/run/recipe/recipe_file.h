// recipe_file.h: reads a file of stages, in TOML or JSON, into JSON, and knows the line of each value of TOML.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "core/files.h"
#include "core/json.h"
#include "core/utf8.h"

#define TOML_MAX_NESTED_VALUES 64
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

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

namespace detail {

inline nlohmann::json json_of(const toml::node& node, const std::string& pointer, RecipeFile& file) {
  file.lines[pointer] = static_cast<int>(node.source().begin.line);
  nlohmann::json json;
  if (const toml::table* table = node.as_table()) {
    json = nlohmann::json::object();
    for (const auto& [key, value] : *table) {
      const std::string name(key.str());
      json[name] = json_of(value, pointer + "/" + name, file);
      file.lines[pointer + "/" + name] = static_cast<int>(key.source().begin.line);
    }
  } else if (const toml::array* array = node.as_array()) {
    json = nlohmann::json::array();
    for (size_t i = 0; i < array->size(); ++i)
      json.push_back(json_of(*array->get(i), formatted("{}/{}", pointer, i), file));
  } else if (node.is_string()) {
    json = *node.value<std::string>();
  } else if (node.is_boolean()) {
    json = *node.value<bool>();
  } else if (node.is_integer()) {
    json = *node.value<int64_t>();
  } else if (node.is_floating_point()) {
    json = *node.value<double>();
  } else {
    throw Error(formatted("{}: a date or a time, which no setting of a stage is", file.place(pointer)));
  }
  return json;
}

}  // namespace detail

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
  try {
    const toml::table table = toml::parse(std::string_view(text), std::string_view(path));
    file.root = detail::json_of(table, "", file);
  } catch (const toml::parse_error& error) {
    throw Error(formatted("{}:{}: {}", path, error.source().begin.line, shown(std::string(error.description()), 300)));
  }
  return file;
}

}  // namespace llmc
