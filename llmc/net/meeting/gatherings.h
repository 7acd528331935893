// gatherings.h: the all-gathers of text that are under way, as process 0 sees them.
#pragma once
#include "core/std.h"

namespace llmc {

class Gatherings {
 public:
  explicit Gatherings(int processes) : processes_(processes) {}

  // Adds a process's text. Returns the texts of all processes if this was the last one.
  std::optional<std::vector<std::string>> add(int from, const std::string& topic, const std::string& text) {
    auto& texts = texts_[topic];
    texts[from] = text;
    if (static_cast<int>(texts.size()) < processes_) return std::nullopt;
    std::vector<std::string> all;
    for (auto& [process, its] : texts) all.push_back(std::move(its));
    texts_.erase(topic);
    return all;
  }
  std::vector<int> missing(const std::string& topic) const {
    std::vector<int> missing;
    const auto found = texts_.find(topic);
    for (int p = 0; p < processes_; ++p)
      if (found == texts_.end() || !found->second.contains(p)) missing.push_back(p);
    return missing;
  }
  // One of these processes that others wait for, and the topic.
  std::optional<std::pair<int, std::string>> waits_for(const std::set<int>& processes) const {
    for (const auto& [topic, texts] : texts_)
      for (const int process : processes)
        if (!texts.contains(process)) return std::pair(process, topic);
    return std::nullopt;
  }

 private:
  int processes_;
  std::map<std::string, std::map<int, std::string>> texts_;  // by topic and process
};

}  // namespace llmc
