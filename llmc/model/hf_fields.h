// hf_fields.h: reads the fields of a Hugging Face config.json.
#pragma once
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/json.h"

namespace llmc::detail {

// Reads fields of one config.json; a missing or null field has transformers' default.
struct HfFields {
  const nlohmann::json& json;
  const std::string& file;

  nlohmann::json get(const char* field, const nlohmann::json& fallback) const {
    return json.contains(field) && !json[field].is_null() ? json[field] : fallback;
  }
  void expect(const char* field, const nlohmann::json& supported) const {
    const nlohmann::json found = get(field, supported);
    CHECK(found == supported, "{}: \"{}\" is {}, but only {} is supported", file, field, found, supported);
  }
  int64_t integer(const char* field, const nlohmann::json& fallback, int64_t most = 1 << 24) const {
    const nlohmann::json found = get(field, fallback);
    const int64_t value = whole_number(found).value_or(0);
    CHECK(value > 0 && value <= most, "{}: \"{}\" is {}, expected a whole number from 1 to {}", file, field, found,
          most);
    return value;
  }
  double real(const char* field, const nlohmann::json& fallback, double most = 1e12) const {
    const nlohmann::json found = get(field, fallback);
    CHECK(found.is_number() && found >= 0 && found <= most, "{}: \"{}\" is {}, expected a number from 0 to {}", file,
          field, found, most);
    return found.get<double>();
  }
  bool flag(const char* field, bool fallback) const {
    const nlohmann::json found = get(field, fallback);
    CHECK(found.is_boolean(), "{}: \"{}\" is {}, expected true or false", file, field, found);
    return found.get<bool>();
  }
};

}  // namespace llmc::detail
