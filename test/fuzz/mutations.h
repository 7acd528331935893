// mutations.h: random changes of valid files, each a function of a seed and a number, so that it can be repeated.
#pragma once
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/rng.h"

namespace llmc {

enum class Content { binary, text, json, json_lines, safetensors };

class Mutation {
 public:
  Mutation(uint64_t seed, const std::string& format, uint64_t number) : rng_(seed, format), at_(number << 20) {}

  // One change, or two.
  std::string of(std::string bytes, Content content) {
    for (uint64_t changes = 1 + below(3) / 2; changes > 0; --changes) {
      const bool parts = below(3) > 0;  // of its structure; else of its bytes
      if (content == Content::safetensors && parts) change_header(bytes);
      else if (content == Content::json && parts) change_json(bytes);
      else if (content == Content::json_lines && parts) change_line(bytes);
      else change_bytes(bytes);
    }
    return bytes;
  }

 private:
  using Json = nlohmann::ordered_json;

  uint64_t below(uint64_t n) { return rng_.bits(at_++) % std::max<uint64_t>(n, 1); }
  template <class T>
  const T& one_of(const std::vector<T>& all) {
    return all[below(all.size())];
  }

  std::string hostile_text() {
    static const std::vector<std::string> pieces = {"",
                                                    "0",
                                                    "-1",
                                                    "9",
                                                    "\"",
                                                    ",",
                                                    "[",
                                                    "]",
                                                    "{",
                                                    "}",
                                                    ":",
                                                    "e9",
                                                    ".5",
                                                    "=",
                                                    "#",
                                                    "\n",
                                                    "\r\n",
                                                    "null",
                                                    "true",
                                                    "NaN",
                                                    "Infinity",
                                                    "1e999",
                                                    "1e308",
                                                    "-0.0",
                                                    "\xff",
                                                    "\xc3",
                                                    "\xed\xa0\x80",
                                                    "\\ud800",
                                                    "\\u0000",
                                                    "\x1b[31m",
                                                    "../x",
                                                    "/dev/zero",
                                                    "2147483648",
                                                    "4294967295",
                                                    "9223372036854775807",
                                                    "9223372036854775808",
                                                    "18446744073709551615",
                                                    "-9223372036854775808",
                                                    "99999999999999999999",
                                                    "[0:5]xyz",
                                                    "[:,0:5]",
                                                    "\"a\":",
                                                    "{\"a\":1,\"a\":2}",
                                                    "%s%n",
                                                    "\\"};
    switch (below(20)) {
      case 0: return std::string(1, '\0');
      case 1: return std::string(100'000, "[{(a\"9"[below(6)]);
      case 2: return std::string(1 + below(40), static_cast<char>(below(256)));
      default: return one_of(pieces);
    }
  }

  Json hostile_value() {
    switch (below(16)) {
      case 0: return nullptr;
      case 1: return below(2) == 0;
      case 2: return -1;
      case 3: return 0;
      case 4: return uint64_t{1} << below(64);
      case 5: return -(int64_t{1} << below(63));
      case 6: return std::numeric_limits<uint64_t>::max();
      case 7: return 0.5;
      case 8: return 1e300;
      case 9: return Json::array();
      case 10: return Json::object();
      case 11: return Json::array({1, "x", nullptr});
      case 12: return std::string(1 + below(3) * 5000, 'x');
      case 13: return below(300);
      case 14: return Json(129, 1.5);
      default: return "\x1b]0;\n../" + std::to_string(below(1000));
    }
  }

  void change_bytes(std::string& bytes) {
    const size_t size = bytes.size(), at = below(size), n = std::min(size - at, size_t{1} << below(12));
    switch (size == 0 ? 1 : below(10)) {
      case 0: bytes[at] = static_cast<char>(bytes[at] ^ static_cast<char>(1 << below(8))); break;
      case 1: bytes.insert(at, hostile_text()); break;
      case 2: bytes.replace(at, std::min(n, below(9)), hostile_text()); break;
      case 3: bytes.erase(at, n); break;
      case 4: bytes.resize(at); break;
      case 5: bytes.insert(below(size), bytes.substr(at, n)); break;
      case 6: bytes += hostile_text(); break;
      case 7: std::swap(bytes[at], bytes[below(size)]); break;
      case 8: {  // a word of a header
        const size_t word = 4 * below(std::min<size_t>(size / 4, 16));
        const uint32_t values[] = {0, 1, 0xffffffff, 0x7fffffff, 0x80000000, 1u << below(32), 20240520, 20240801, 7};
        if (word + 4 <= size) std::memcpy(bytes.data() + word, &values[below(std::size(values))], 4);
        break;
      }
      case 9: {  // a number of 64 bits anywhere in a header
        const uint64_t value = below(2) == 0 ? below(300) : (uint64_t{1} << below(64)) - below(2);
        if (const size_t byte = below(64); byte + 8 <= size) std::memcpy(bytes.data() + byte, &value, 8);
      }
    }
  }

  // Every value inside, with the one that holds it.
  static void collect(Json& value, std::vector<std::pair<Json*, std::string>>& places) {
    if (!value.is_structured()) return;
    for (auto item = value.begin(); item != value.end(); ++item) {
      places.emplace_back(&value, value.is_object() ? item.key() : std::to_string(item - value.begin()));
      collect(*item, places);
    }
  }

  void change_json(std::string& text) {
    if (text.find(std::string(100, '[')) != text.npos) return change_bytes(text);  // the library would recurse into it
    Json json = Json::parse(text, nullptr, false);
    std::vector<std::pair<Json*, std::string>> places;
    if (!json.is_discarded()) collect(json, places);
    if (places.empty()) return change_bytes(text);
    auto [holder, name] = one_of(places);
    Json& value = holder->is_object() ? (*holder)[name] : (*holder)[std::stoul(name)];
    std::string deep;
    switch (below(7)) {
      case 0: value = hostile_value(); break;
      case 1:
        if (holder->is_object()) holder->erase(name);
        else holder->erase(std::stoul(name));
        break;
      case 2: {
        const auto& [other, key] = one_of(places);
        value = Json(other->is_object() ? (*other)[key] : (*other)[std::stoul(key)]);
        break;
      }
      case 3:
        if (holder->is_object()) (*holder)[name + hostile_name()] = Json(value);
        else holder->push_back(Json(value));
        break;
      case 4:  // renamed
        if (holder->is_object()) {
          Json moved = value;
          holder->erase(name);
          (*holder)[below(2) == 0 ? name + hostile_name() : hostile_name()] = std::move(moved);
        }
        break;
      case 5:
        if (value.is_number()) value = value.get<double>() + (below(2) == 0 ? 1 : -1);
        if (value.is_number_float() && below(2) == 0) value = static_cast<int64_t>(value.get<double>());
        if (value.is_string()) value = value.get<std::string>() + hostile_name();
        break;
      case 6:
        value = "DEEP";
        deep = std::string(uint64_t{1} << below(18), '[');
        break;
    }
    text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (!deep.empty()) text.replace(text.find("\"DEEP\""), 6, deep + std::string(deep.size(), ']'));
  }
  std::string hostile_name() {
    static const std::vector<std::string> names = {"x", "/", "../", ":", "[0:1]", "]", "\x1b[2J", "model", "step"};
    return one_of(names);
  }

  void change_line(std::string& text) {
    const size_t at = below(text.size()), begin = text.rfind('\n', at) + 1,
                 end = std::min(text.find('\n', at), text.size());
    if (begin > end) return change_bytes(text);
    std::string line = text.substr(begin, end - begin);
    change_json(line);
    text.replace(begin, end - begin, line);
  }

  void change_header(std::string& bytes) {
    uint64_t length = 0;
    if (bytes.size() >= 8) std::memcpy(&length, bytes.data(), 8);
    if (length > bytes.size() - 8 || bytes.size() < 8) return change_bytes(bytes);
    std::string header = bytes.substr(8, length);
    change_json(header);
    bytes.replace(8, length, header);
    length = header.size();
    std::memcpy(bytes.data(), &length, 8);
  }

  Philox rng_;
  uint64_t at_;
};

}  // namespace llmc
