// json_line.h: the text in a line of JSON. Lines as most writers make them are read here, several times as fast as by
// the library; the library reads all others and says what is wrong with them.
#pragma once
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace llmc {

namespace detail {

// Reads a line as the library would, or gives up: at any fault, and at what is rare.
class LineReader {
 public:
  LineReader(std::string_view line, const std::string& field)
      : line_(line), at_(line.data()), end_(at_ + line.size()), field_(field) {}

  // text = the string that the field holds.
  bool read(std::string& text) {
    text_ = &text;
    return !utf8_fault(line_) && take('{') && object(1) && found_ && at_end();
  }

 private:
  static constexpr int most_depth = 64;
  static constexpr std::ptrdiff_t most_digits = 18;  // numbers do not overflow

  bool object(int depth) {
    if (take('}')) return true;
    do {
      if (!take('"') || !string(name_) || !take(':')) return false;
      if (depth > 1 || name_ != field_) {
        if (!value(depth)) return false;
      } else if (std::exchange(found_, true) || !take('"') || !string(*text_)) {
        return false;
      }
    } while (take(','));
    return take('}');
  }
  bool array(int depth) {
    if (take(']')) return true;
    do
      if (!value(depth)) return false;
    while (take(','));
    return take(']');
  }
  bool value(int depth) {
    if (take('"')) return string(name_);
    if (take('{')) return depth < most_depth && object(depth + 1);
    if (take('[')) return depth < most_depth && array(depth + 1);
    for (const std::string_view word : {"true", "false", "null"})
      if (std::string_view(at_, static_cast<size_t>(end_ - at_)).starts_with(word)) return at_ += word.size(), true;
    return number();
  }
  // Without an exponent.
  bool number() {
    const char* const begin = at_;
    next_is('-');
    if (!next_is('0') && !digits()) return false;
    return (!next_is('.') || digits()) && at_ - begin <= most_digits;
  }
  bool digits() {
    const char* const begin = at_;
    while (at_ < end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    return at_ > begin;
  }

  // What is after the opening quote.
  bool string(std::string& out) {
    for (out.clear();;) {
      const char* const begin = at_;
      skip_plain();
      out.append(begin, at_);
      if (next_is('"')) return true;
      if (!next_is('\\') || !escape(out)) return false;
    }
  }
  void skip_plain() {
    constexpr uint64_t ones = 0x0101010101010101, highs = 0x8080808080808080;
    auto below = [](uint64_t bytes, uint64_t limit) { return (bytes - ones * limit) & ~bytes & highs; };
    for (uint64_t eight; end_ - at_ >= 8; at_ += 8) {
      std::memcpy(&eight, at_, 8);
      if ((below(eight, ' ') | below(eight ^ (ones * '"'), 1) | below(eight ^ (ones * '\\'), 1)) != 0) break;
    }
    while (at_ < end_ && static_cast<unsigned char>(*at_) >= ' ' && *at_ != '"' && *at_ != '\\') ++at_;
  }
  bool escape(std::string& out) {
    constexpr std::string_view names = "n\"\\t/rbf", meanings = "\n\"\\\t/\r\b\f";
    if (next_is('u')) return unicode(out);
    const size_t i = at_ < end_ ? names.find(*at_++) : names.npos;
    if (i == names.npos) return false;
    out += meanings[i];
    return true;
  }
  // One unit of UTF-16, or two that stand for a character.
  bool unicode(std::string& out) {
    const std::optional<char32_t> first = unit();
    if (!first) return false;
    if (*first < 0xd800 || *first > 0xdfff) return append_utf8(out, *first), true;
    if (*first > 0xdbff || !next_is('\\') || !next_is('u')) return false;
    const std::optional<char32_t> second = unit();
    if (!second || *second < 0xdc00 || *second > 0xdfff) return false;
    return append_utf8(out, 0x10000 + ((*first - 0xd800) << 10) + (*second - 0xdc00)), true;
  }
  std::optional<char32_t> unit() {
    if (end_ - at_ < 4) return std::nullopt;
    char32_t code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = *at_++, letter = static_cast<char>(c | 0x20);
      if (c >= '0' && c <= '9') code = code << 4 | static_cast<char32_t>(c - '0');
      else if (letter >= 'a' && letter <= 'f') code = code << 4 | static_cast<char32_t>(letter - 'a' + 10);
      else return std::nullopt;
    }
    return code;
  }

  bool next_is(char c) { return at_ < end_ && *at_ == c && (++at_, true); }
  // The same after white space.
  bool take(char c) {
    skip_blanks();
    return next_is(c);
  }
  bool at_end() {
    skip_blanks();
    return at_ == end_;
  }
  void skip_blanks() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n')) ++at_;
  }

  std::string_view line_;
  const char *at_, *end_;
  const std::string& field_;
  std::string* text_ = nullptr;
  std::string name_;  // of a member, or a string that is skipped
  bool found_ = false;
};

// Takes one field of an object from the library; knows its faults.
class FieldReader {
 public:
  explicit FieldReader(const std::string& field) : field_(field) {}
  std::optional<std::string> text;
  std::string fault;

  bool null() { return scalar("null"); }
  bool boolean(bool) { return scalar("true or false"); }
  bool number_integer(int64_t) { return scalar("a number"); }
  bool number_unsigned(uint64_t) { return scalar("a number"); }
  bool number_float(double, const std::string&) { return scalar("a number"); }
  bool string(std::string& value) {
    if (depth_ == 0) return fail("not a JSON object");
    if (wanted()) text = std::move(value);
    return true;
  }
  bool binary(nlohmann::json::binary_t&) { return false; }  // does not occur in text
  bool start_object(size_t) { return open("an object"); }
  bool start_array(size_t) { return depth_ == 0 ? fail("not a JSON object") : open("a list"); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(const std::string& name) {
    if (depth_ != 1) return true;
    if (names_.size() < 100) names_ += (names_.empty() ? "" : ", ") + shown(name, 40);
    here_ = name == field_;
    return !here_ || !text || fail(formatted("names {} twice", shown(name)));
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) {
    const std::string why = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    return fail("not JSON: " + shown(why.substr(why.find("] ") + 2), 200));
  }
  const std::string& names() const { return names_; }

 private:
  bool wanted() const { return depth_ == 1 && here_; }
  bool scalar(const char* kind) {
    if (depth_ == 0) return fail("not a JSON object");
    return !wanted() || fail(formatted("field '{}' holds {}, expected a string", shown(field_), kind));
  }
  bool open(const char* kind) {
    if (wanted()) return fail(formatted("field '{}' holds {}, expected a string", shown(field_), kind));
    return ++depth_ <= 512 || fail("nested more than 512 deep");
  }
  bool close() {
    --depth_;
    return true;
  }
  bool fail(std::string why) {
    if (fault.empty()) fault = std::move(why);
    return false;
  }

  const std::string& field_;
  std::string names_;
  int depth_ = 0;
  bool here_ = false;  // the key just read is the field's
};

}  // namespace detail

// text = the text in a line of JSON, valid UTF-8; errors begin with `where`.
inline void text_in_line(std::string& text, std::string_view line, const std::string& field, const std::string& where) {
  if (line.starts_with(utf8_mark)) line.remove_prefix(utf8_mark.size());
  if (detail::LineReader(line, field).read(text)) return;
  detail::FieldReader reader(field);
  if (line.find('\0') != line.npos) reader.fault = "not JSON: it has a NUL";  // the library takes it for the end
  else if (!nlohmann::json::sax_parse(line.begin(), line.end(), &reader) && reader.fault.empty())
    reader.fault = "not JSON";
  CHECK(reader.fault.empty(), "{}: {}; expected an object with a \"{}\" on each line, found {}", where, reader.fault,
        shown(field), shown(line, 60));
  CHECK(reader.text, "{}: no field '{}', only {}: name the text's with --tokenize-field", where, shown(field),
        reader.names().empty() ? "none" : reader.names());
  text = std::move(*reader.text);
}

}  // namespace llmc
