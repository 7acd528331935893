// toml.cpp: TOML as JSON, with the line of each value.
#include "core/toml.h"
#include "core/std.h"

#include <nlohmann/json.hpp>

namespace llmc {
struct TomlAssertion {};  // toml++ asserts some of what malformed text breaks
}  // namespace llmc
#define TOML_ASSERT(condition) ((condition) ? void() : throw llmc::TomlAssertion())
#define TOML_MAX_NESTED_VALUES 64
#define TOML_ENABLE_FORMATTERS 0
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wterminate"  // assertions in functions that are noexcept
#include <toml++/toml.h>
#pragma GCC diagnostic pop

namespace llmc {
namespace {

nlohmann::json json_of(const toml::node& node, const std::string& pointer, TomlFile& file) {
  file.lines.emplace(pointer, static_cast<int>(node.source().begin.line));
  nlohmann::json json;
  if (const toml::table* table = node.as_table()) {
    json = nlohmann::json::object();
    for (const auto& [key, value] : *table) {
      const std::string name(key.str()), at = pointer + "/" + name;
      file.lines[at] = static_cast<int>(key.source().begin.line);
      json[name] = json_of(value, at, file);
    }
  } else if (const toml::array* array = node.as_array()) {
    json = nlohmann::json::array();
    for (size_t i = 0; i < array->size(); ++i)
      json.push_back(json_of(*array->get(i), pointer + "/" + std::to_string(i), file));
  } else if (node.is_string()) {
    json = *node.value<std::string>();
  } else if (node.is_boolean()) {
    json = *node.value<bool>();
  } else if (node.is_integer()) {
    json = *node.value<int64_t>();
  } else if (node.is_floating_point()) {
    json = *node.value<double>();
  } else if (file.fault_line == 0) {
    file.fault_line = static_cast<int>(node.source().begin.line);
    file.fault = "a date or a time, which no setting is";
  }
  return json;
}

}  // namespace

TomlFile read_toml(const std::string& text) {
  TomlFile file;
  try {
    const toml::table table = toml::parse(std::string_view(text));
    file.json = json_of(table, "", file).dump();
  } catch (const toml::parse_error& error) {
    file.fault_line = static_cast<int>(error.source().begin.line);
    file.fault = error.description();
  } catch (const TomlAssertion&) {
    file.fault_line = 1;
    file.fault = "not TOML, in a way that the reader cannot name";
  }
  return file;
}

}  // namespace llmc
