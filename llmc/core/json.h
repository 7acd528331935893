// json.h: the only reader of JSON. Anyone may have written the files, so size and depth are limited, an object may not
// name a member twice (the library would keep the last), and nothing may come before or after the value.
#pragma once
#include <nlohmann/json.hpp>

#include "core/files.h"

namespace llmc {

namespace detail {

// Builds the value from the parts that the library reports, until the first fault. (The library's own builder takes
// quadratic time with a callback, and accepts any depth, although its copies and dump() then exhaust the stack.)
template <class Json>
class JsonBuilder {
 public:
  Json root;
  std::string fault;  // why a function returned false, which ends the parsing

  bool null() { return put(nullptr); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(int64_t value) { return put(value); }
  bool number_unsigned(uint64_t value) { return put(value); }
  bool number_float(double value, const std::string&) { return put(value); }
  bool string(std::string& value) { return put(std::move(value)); }
  bool binary(typename Json::binary_t&) { return false; }  // does not occur in text
  bool start_object(size_t) { return open(Json::object()); }
  bool start_array(size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(const std::string& name) {
    const auto [place, is_new] = open_.back()->emplace(name, nullptr);
    member_ = &*place;
    return is_new || fail(formatted("names {} twice", shown(name)));
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) {
    const std::string text = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    return fail("not JSON: " + shown(text.substr(text.find("] ") + 2), 300));
  }

 private:
  static constexpr size_t most_open = 64;            // the formats read here need 8
  static constexpr size_t most_values = 10'000'000;  // a tokenizer's file has about a million

  Json* put(Json&& value) {
    if (++values_ > most_values) {
      fail(formatted("more than {} values", most_values));
      return nullptr;
    }
    if (open_.empty()) return &(root = std::move(value));
    if (open_.back()->is_object()) return &(*member_ = std::move(value));
    open_.back()->push_back(std::move(value));
    return &open_.back()->back();
  }
  bool open(Json&& empty) {
    if (open_.size() == most_open) return fail(formatted("nested more than {} deep", most_open));
    open_.push_back(put(std::move(empty)));
    return open_.back() != nullptr;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  bool fail(std::string why) {
    fault = std::move(why);
    return false;
  }

  std::vector<Json*> open_;  // objects and arrays, from the root inwards
  size_t values_ = 0;
  Json* member_ = nullptr;  // the member of the innermost object that is being read
};

template <class Json>
JsonBuilder<Json> build_json(std::string_view text) {
  JsonBuilder<Json> builder;
  if (text.find('\0') != text.npos) builder.fault = "not JSON: it has a NUL";  // the library takes it for the end
  else if (!Json::sax_parse(text, &builder) && builder.fault.empty()) builder.fault = "not JSON";
  return builder;
}

}  // namespace detail

// Parses a text; errors begin with `where`.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& where) {
  detail::JsonBuilder<Json> built = detail::build_json<Json>(text);
  CHECK(built.fault.empty(), "{}: {}", where, built.fault);
  return std::move(built.root);
}

// The same for text that may be incomplete, such as the last line of metrics.jsonl; none: it is not JSON.
inline std::optional<nlohmann::json> try_parse_json(std::string_view text) {
  detail::JsonBuilder<nlohmann::json> built = detail::build_json<nlohmann::json>(text);
  return built.fault.empty() ? std::optional(std::move(built.root)) : std::nullopt;
}

// Of a file: the largest are tokenizers, some tens of MB, and records of runs with many inputs.
inline constexpr int64_t most_json_bytes = int64_t{256} << 20;

// Reads a file that holds a JSON object; errors begin with `option` and its path.
inline nlohmann::json read_json(const std::string& path, const std::string& option = "") {
  nlohmann::json json = parse_json(read_text(path, most_json_bytes), option + path);
  CHECK(json.is_object(), "{}{}: expected a JSON object, found {}; the file is damaged", option, path, json);
  return json;
}

// Appends a member to an object that has none of this name, which is not looked for: the library's own operator[]
// takes as long as there are members.
inline void append_member(nlohmann::ordered_json& object, const std::string& name, nlohmann::ordered_json value) {
  object.get_ref<nlohmann::ordered_json::object_t&>().emplace_back(name, std::move(value));
}

// A member of an object; null: it is no object, or has no such member.
inline nlohmann::json member(const nlohmann::json& json, const std::string& name) {
  return json.is_object() ? json.value(name, nlohmann::json()) : nlohmann::json();
}

// A non-negative integer that fits into int64_t; none: anything else.
inline std::optional<int64_t> whole_number(const nlohmann::json& json) {
  const int64_t value = json.is_number_integer() ? json.get<int64_t>() : -1;  // 2^63 and more become negative too
  return value >= 0 ? std::optional(value) : std::nullopt;
}

}  // namespace llmc
