// option_row.h: an option as a row of the list in options.h.
#pragma once
#include "run/options/option_values.h"
#include "run/options/text_list.h"
#include "run/options/values.h"

namespace llmc {

// The value of one option, whatever its type.
class OptionField {
 public:
  template <class T>
  explicit OptionField(T& value) : value_(&value), type_(&type_of<T>) {}

  // A flag takes no value. A flag without a fixed default has a negation, --no-NAME.
  bool is_flag() const { return type_->kind == Kind::flag || type_->kind == Kind::flag_or_none; }
  bool has_negation() const { return type_->kind == Kind::flag_or_none; }
  bool is_list() const { return type_->kind == Kind::list; }  // may be given several times
  bool is_text() const { return type_->kind == Kind::text || type_->kind == Kind::list; }
  // What --help calls the value.
  const char* placeholder() const {
    return is_flag() ? "" : is_text() ? "TEXT" : type_->kind == Kind::real ? "NUMBER" : "N";
  }

  // As a --config file has it; empty: absent.
  std::string text() const { return type_->text(value_); }
  // Reads all of `text`; a list takes it as one more value. An error begins with `name`.
  void parse(const std::string& name, const std::string& text) const { type_->parse(name, text, value_); }
  void check(const char* name, const Limits& limits) const { type_->check(name, limits, value_); }
  void clear() const { type_->clear(value_); }
  // Takes the value that the same option has elsewhere.
  void take(const OptionField& from) const { type_->take(from.value_, value_); }

 private:
  enum class Kind { flag, flag_or_none, list, text, real, other };
  template <class T>
  static constexpr Kind kind_of() {
    if (std::is_same_v<T, bool>) return Kind::flag;
    if (std::is_same_v<T, std::optional<bool>>) return Kind::flag_or_none;
    if (std::is_same_v<T, TextList>) return Kind::list;
    if (std::is_same_v<T, std::string> || NamedEnum<T>) return Kind::text;
    if (std::is_same_v<T, double> || std::is_same_v<T, std::optional<double>>) return Kind::real;
    return Kind::other;
  }
  struct Type {
    Kind kind;
    std::string (*text)(const void*);
    void (*parse)(const std::string&, const std::string&, void*);
    void (*check)(const char*, const Limits&, const void*);
    void (*clear)(void*);
    void (*take)(const void*, void*);
  };
  template <class T>
  static constexpr Type type_of = {
      kind_of<T>(),
      [](const void* value) { return detail::option_text(*static_cast<const T*>(value)); },
      [](const std::string& name, const std::string& text, void* value) {
        detail::parse_value(name, text, *static_cast<T*>(value));
      },
      [](const char* name, const Limits& limits, const void* value) {
        detail::check_limits(name, *static_cast<const T*>(value), limits);
      },
      [](void* value) { *static_cast<T*>(value) = {}; },
      [](const void* from, void* value) { *static_cast<T*>(value) = *static_cast<const T*>(from); }};

  void* value_;
  const Type* type_;
};

struct OptionRow {
  const char* group;
  const char* name;    // "--batch-size"
  const char* letter;  // "-b", or ""
  OptionField field;
  Limits limits;
  ResumeRule rule;
  const char* help;

  std::string negation() const { return field.has_negation() ? formatted("--no-{}", name + 2) : ""; }
};

}  // namespace llmc
