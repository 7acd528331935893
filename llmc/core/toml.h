// toml.h: reads TOML, by toml++, which nvcc cannot compile: the reader is a source of its own, toml.cpp.
#pragma once
#include "core/std.h"

namespace llmc {

struct TomlFile {
  std::string json;                  // the same as JSON
  std::map<std::string, int> lines;  // of each value, by JSON pointer
  int fault_line = 0;                // where it is not TOML; 0: it is
  std::string fault = {};
};

TomlFile read_toml(const std::string& text);

}  // namespace llmc
