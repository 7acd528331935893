// text_list.h: the values of an option that may be given several times, such as --data.
#pragma once
#include <string>
#include <vector>

namespace llmc {

struct TextList {
  std::vector<std::string> items;
  std::string text;  // all of them, as recorded: separated by semicolons

  bool empty() const { return items.empty(); }
  // Adds the values of a text that has one or several.
  void add(const std::string& more) {
    text += (text.empty() ? "" : ";") + more;
    for (size_t at = 0; at <= more.size();) {
      const size_t end = std::min(more.find(';', at), more.size());
      items.push_back(more.substr(at, end - at));
      at = end + 1;
    }
  }
  operator const std::string&() const { return text; }
};

}  // namespace llmc
