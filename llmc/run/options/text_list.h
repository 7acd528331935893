// text_list.h: the values of an option that may be given several times, such as --data.
#pragma once
#include "core/std.h"
#include "core/words.h"

namespace llmc {

struct TextList {
  std::vector<std::string> items;
  std::string text;  // all of them, as recorded: separated by semicolons

  bool empty() const { return items.empty(); }
  // Adds the values of a text that has one or several.
  void add(const std::string& more) {
    text += (text.empty() ? "" : ";") + more;
    for (std::string& item : split(more, ';')) items.push_back(std::move(item));
  }
  operator const std::string&() const { return text; }
};

}  // namespace llmc
