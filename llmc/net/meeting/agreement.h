// agreement.h: what each process of a job says about itself when they meet, and what must be the same for all of them.
#pragma once
#include "core/words.h"
#include "net/meeting/handshake.h"
#include "net/wire/control.h"

namespace llmc {

using NamedValues = std::vector<std::pair<std::string, std::string>>;

// Stands in for an option's name, with the error as its value: this process cannot take part, and comes only to say so.
inline constexpr const char* refusal = "";

// The number of a process that waits for the place of another one: wait_as_spare().
inline constexpr int spare_process = -1;

// The trainer's part of an introduction.
struct Greeting {
  int process = 0, processes = 1, local_ranks = 1;
  std::string build;  // of the program
  NamedValues agree;  // option and value: must be equal on all
};

// A process as the others know it.
struct Peer {
  int process = 0;
  std::string host;     // its name
  std::string machine;  // equal for two processes that share processors; two containers may share the name alone
  std::string address;  // where it listens; empty: on the machine of process 0
  int port = 0;
};

constexpr int64_t most_of_a_name = 255;  // of a host, as others repeat it

struct Introduction {
  int protocol = protocol_version;
  Greeting greeting;
  Peer peer;

  // This form, like the handshake, is the same in all versions.
  std::vector<std::string> parts() const {
    std::vector<std::string> out = {std::to_string(protocol),
                                    std::to_string(greeting.process),
                                    std::to_string(greeting.processes),
                                    std::to_string(greeting.local_ranks),
                                    greeting.build,
                                    peer.host,
                                    peer.machine,
                                    peer.address,
                                    std::to_string(peer.port)};
    for (const auto& [option, value] : greeting.agree) out.push_back(option), out.push_back(value);
    return out;
  }
  static Introduction from(const std::vector<std::string>& parts) {
    CHECK(parts.size() >= 9 && parts.size() % 2 == 1, "a process introduced itself in another form");
    auto number = [&](size_t i) { return std::atoi(parts[i].c_str()); };
    Introduction it{number(0),
                    {number(1), number(2), number(3), parts[4], {}},
                    {number(1), shown(parts[5], most_of_a_name), parts[6], parts[7], number(8)}};
    for (size_t i = 9; i < parts.size(); i += 2) it.greeting.agree.emplace_back(parts[i], parts[i + 1]);
    return it;
  }
  // Throws if no job of any size can have such a process.
  void check() const {
    CHECK(greeting.process >= spare_process && greeting.process < greeting.processes && greeting.local_ranks >= 1 &&
          peer.port > 0 && peer.port < 1 << 16);
  }
};

// "rank 3", "ranks 0-2 and 5": ranks are processes unless a process has several of them.
inline std::string named(std::vector<int> processes, int local_ranks) {
  std::sort(processes.begin(), processes.end());
  std::vector<std::string> runs;
  for (size_t i = 0, end; i < processes.size(); i = end) {
    for (end = i + 1; end < processes.size() && processes[end] == processes[end - 1] + 1;) ++end;
    if (end - i <= 2) end = i + 1;  // "3, 4" rather than "3-4"
    runs.push_back(end == i + 1 ? std::to_string(processes[i]) : formatted("{}-{}", processes[i], processes[end - 1]));
  }
  const char* const noun = local_ranks == 1 ? "rank" : "process";
  const char* const plural = processes.size() == 1 ? "" : local_ranks == 1 ? "s" : "es";
  return formatted("{}{} {}", noun, plural, either(runs, "and"));
}

// The values that must be the same for all, as each process, by its number, reports them.
using Said = std::vector<std::pair<int, NamedValues>>;

inline constexpr const char *protocol_name = "the protocol version", *build_name = "the build";

// How these processes differ: "--lr differs: 0.001 on ranks 0-2, 0.0003 on rank 3"; empty: not at all.
inline std::string disagreement(const Said& all, int local_ranks) {
  constexpr size_t most = 4;                                 // names, and values of a name
  std::vector<std::string> names;                            // in the order of the first process that has it
  std::map<std::string, std::map<int, std::string>> values;  // by name and process
  for (const auto& [process, said] : all)
    for (const auto& [name, value] : said) {
      if (!values.contains(name)) names.push_back(name);
      values[name][process] = value;
    }
  std::vector<std::string> differences;
  for (const std::string& name : names) {
    std::vector<std::pair<std::string, std::vector<int>>> groups;  // a value, and who has it
    for (const auto& [process, said] : all) {
      const auto found = values[name].find(process);
      const std::string value = found == values[name].end() ? "not known"
                                : found->second.empty()     ? "\"\""
                                                            : shown(found->second);
      auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == value; });
      if (group == groups.end()) group = groups.insert(group, {value, {}});
      group->second.push_back(process);
    }
    if (groups.size() == 1) continue;
    std::string text = name + " differs: ";
    for (size_t i = 0; i < std::min(most, groups.size()); ++i)
      text += formatted("{}{} on {}", i == 0 ? "" : ", ", groups[i].first, named(groups[i].second, local_ranks));
    if (groups.size() > most) text += formatted(", and {} more values", groups.size() - most);
    differences.push_back(text);
    if (name == protocol_name || name == build_name) break;  // other builds have other options
  }
  std::string text;
  for (size_t i = 0; i < std::min(most, differences.size()); ++i) text += (i == 0 ? "" : "; ") + differences[i];
  return differences.size() > most ? text + formatted("; and {} more", differences.size() - most) : text;
}

inline std::string disagreement(const std::vector<Introduction>& all) {
  Said said;
  for (const Introduction& it : all) {
    NamedValues& its = said.emplace_back(it.greeting.process, NamedValues{}).second;
    its = {{protocol_name, std::to_string(it.protocol)},
           {build_name, it.greeting.build},
           {"--world-size", std::to_string(it.greeting.processes)},
           {"--local-ranks", std::to_string(it.greeting.local_ranks)}};
    its.insert(its.end(), it.greeting.agree.begin(), it.greeting.agree.end());
  }
  return disagreement(said, all[0].greeting.local_ranks);
}

}  // namespace llmc
