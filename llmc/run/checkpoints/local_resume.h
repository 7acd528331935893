// local_resume.h: a start takes the newest checkpoint that is complete, from wherever its files are. The processes tell
// each other which parts of local checkpoints (local_parts.h) they find. If all files of one are among them, and it is
// newer than the intact checkpoints of the out directory, the processes that have its files copy them there: from then
// on it is a checkpoint like any other. A file is only copied if it has the checksums of the manifest; if not, another
// process may have it, or an older checkpoint is taken.
#pragma once
#include "core/clock.h"
#include "run/checkpoints/checkpoint.h"
#include "run/checkpoints/local_parts.h"
#include "run/checkpoints/run_dir.h"
#include "run/checkpoints/shared_check.h"
#include "run/processes.h"

namespace llmc {

// What a process has found on its disk of one part.
struct FoundPart {
  LocalName name;
  int holder = 0;                             // the process
  std::string path;                           // on the holder's disk
  std::string manifest = {};                  // its checksum; empty: there is none, or it is not of this part
  std::map<std::string, int64_t> files = {};  // sizes
};

// Where a file of a checkpoint is.
struct FileSource {
  std::string name;
  FileRecord record;
  int holder;
  std::string path;
};

// A complete local checkpoint.
struct LocalChoice {
  LocalName of;          // any of its parts
  std::string manifest;  // its text
  std::vector<FileSource> files;
};

// What is found and why not more of it.
struct LocalSearch {
  std::optional<LocalChoice> choice = {};
  std::vector<std::string> faults = {};  // of newer ones
};

namespace detail {

// The newest checkpoint of which every file is there. manifests: texts by checksum. bad: files that were found to be
// damaged, as (holder, path)
inline LocalSearch newest_local(std::vector<FoundPart> parts, const std::map<std::string, std::string>& manifests,
                                const LocalHistory& history, const std::set<std::pair<int, std::string>>& bad) {
  std::erase_if(parts, [&](const FoundPart& p) { return !history.has(p.name); });
  // The newest first; the copy of the process that wrote it before others.
  std::ranges::sort(parts, {}, [](const FoundPart& p) {
    return std::tuple(-p.name.step, -p.name.start, p.name.process, p.holder != p.name.process, p.holder);
  });
  LocalSearch found;
  for (auto begin = parts.begin(), end = begin; begin != parts.end(); begin = end) {
    const LocalName of = begin->name;
    end = std::find_if(begin, parts.end(),
                       [&](const FoundPart& p) { return p.name.step != of.step || p.name.start != of.start; });
    const std::span<const FoundPart> parts_of_it(begin, end);
    std::set<std::string> tried;
    std::string fault = "no part of it has an intact manifest.json";
    for (const FoundPart& part : parts_of_it) {
      if (part.manifest.empty() || !tried.insert(part.manifest).second) continue;
      const std::string file = part.path + "/manifest.json", &text = manifests.at(part.manifest);
      LocalChoice choice{of, text, {}};
      std::vector<std::string> missing;
      const nlohmann::json manifest = parse_json(text, file);
      for (const auto& [name, record] : records_of(manifest, file)) {
        const auto has = [&, &name = name, &record = record](const FoundPart& p) {
          const auto it = p.files.find(name);
          return it != p.files.end() && it->second == record.size && !bad.contains({p.holder, p.path + "/" + name});
        };
        const auto at = std::ranges::find_if(parts_of_it, has);
        if (at == parts_of_it.end()) missing.push_back(name);
        else choice.files.push_back({name, record, at->holder, at->path + "/" + name});
      }
      if (missing.empty()) {
        found.choice = std::move(choice);
        return found;
      }
      std::set<int64_t> here;
      std::vector<int64_t> away;
      for (const FoundPart& p : parts_of_it) here.insert(p.name.process);
      for (int64_t p = 0; p < whole_number(member(manifest, "processes")).value_or(0); ++p)
        if (!here.contains(p)) away.push_back(p);
      fault = formatted("{} of its {} files are not there or damaged, {} the first{}", missing.size(),
                        missing.size() + choice.files.size(), missing[0],
                        away.empty() ? "" : formatted("; nothing is there of what process(es) {} had", away));
    }
    found.faults.push_back(formatted("the local checkpoint of step {} is incomplete: {}", of.step, fault));
  }
  return found;
}

// The parts of the run on this process's disk. Files that are not what their place says are taken for damaged.
inline std::vector<FoundPart> find_parts(const std::string& dir, const std::string& run, int process) {
  std::vector<FoundPart> parts;
  const std::string directory = local_directory(dir, run);
  for (const LocalName& name : local_names(directory)) {
    FoundPart part{.name = name, .holder = process, .path = directory + "/" + name.text()};
    std::error_code error;
    for (std::filesystem::directory_iterator entry(part.path, error), end; !error && entry != end;
         entry.increment(error)) {
      std::error_code none;
      const auto size = static_cast<int64_t>(entry->file_size(none));
      if (!none) part.files[entry->path().filename()] = size;
    }
    part.files.erase("manifest.json");
    try {
      const std::string file = part.path + "/manifest.json", text = read_text(file);
      const nlohmann::json manifest = parse_json(text, file);
      const auto records = records_of(manifest, file);
      if (member(manifest, "run") == run && member(manifest, "start") == name.start &&
          member(manifest, "step") == name.step && records.contains("config.json") && records.contains("trainer.json"))
        part.manifest = checksum(text);
    } catch (const Error&) {
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

inline std::string message_of(const std::vector<FoundPart>& parts) {
  nlohmann::json all = nlohmann::json::array();
  for (const FoundPart& p : parts)
    all.push_back({p.name.step, p.name.start, p.name.process, p.path, p.manifest, p.files});
  return all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}
inline void add_parts(std::vector<FoundPart>& parts, const std::string& message, int holder) {
  for (const nlohmann::json& p : parse_json(message, formatted("process {}", holder)))
    parts.push_back({{p.at(0), p.at(1), p.at(2)}, holder, p.at(3), p.at(4), p.at(5)});
}

// Copies a file that has these checksums. Returns why it cannot be read, or has not; throws if it cannot be written.
inline std::optional<std::string> copy_intact(const std::string& from, const std::string& to,
                                              const FileRecord& record) {
  constexpr int64_t piece = 8 << 20;
  std::optional<File> in;
  try {
    in = File::open_read(from);
  } catch (const Error& error) {
    return error.what();
  }
  RecordedFile out(to);
  std::vector<char> bytes(static_cast<size_t>(std::min(piece, record.size)));
  for (int64_t at = 0, n; at < record.size; at += n) {
    n = std::min(piece, record.size - at);
    try {
      in->read_at(bytes.data(), n, at);
    } catch (const Error& error) {
      return error.what();
    }
    out.write(bytes.data(), n);
  }
  if (out.finish().slices != record.slices) return formatted("{} does not have the checksums of its manifest", from);
  return std::nullopt;
}

// What other runs have left in the directory takes room that someone may miss.
inline void report_other_runs(const std::string& dir, const std::string& run, Log& log) {
  std::vector<std::string> others;
  for (const std::string& name : names_in(dir))
    if (name.starts_with("train_gpt-") && name != "train_gpt-" + run) others.push_back(name);
  if (!others.empty())
    log.line(
        formatted("notice: --checkpoint-local {} also has checkpoints of {} other run(s), such as {}, which are "
                  "left alone: delete those of runs that are over",
                  shown(dir), others.size(), shown(others[0])));
}

// Whether the out directory has an intact checkpoint of this step or a later one. On process 0.
inline bool has_as_new(const std::string& out_dir, int64_t step, const CheckpointCheck& check) {
  std::vector<int64_t> steps = checkpoint_steps(out_dir);
  for (; !steps.empty() && steps.back() >= step; steps.pop_back())
    if (!check(checkpoint_path(out_dir, steps.back()), Part::all)) return true;
  return false;
}

// What process 0's run.json says of the run's local checkpoints.
inline LocalHistory history_of(const Processes& processes, const RunDirectory* directory) {
  const bool some = directory != nullptr && !directory->local().run.empty();
  const std::string mine = some ? directory->local().to_json().dump() : "null";
  return LocalHistory::from_json(parse_json(processes.all_gather("local checkpoints", mine)[0], "process 0"),
                                 "run.json");
}

}  // namespace detail

// Called by all processes before they look for the checkpoint to resume from; directory: process 0's.
inline void adopt_local_checkpoint(const Processes& processes, const Options& o, const RunDirectory* directory,
                                   Log& log) {
  if (o.checkpoint_local.empty()) return;
  const bool first = processes.process() == 0;
  together(processes, "--checkpoint-local", [&] {
    std::error_code error;
    std::filesystem::create_directories(o.checkpoint_local, error);
    CHECK(!error && ::access(o.checkpoint_local.c_str(), W_OK | X_OK) == 0,
          "--checkpoint-local {}: cannot write there: {}; name a directory on this node's own disk, or in /dev/shm",
          shown(o.checkpoint_local), error ? error.message() : std::strerror(errno));
  });
  const bool resumes = o.resume == "auto" || requeued();  // by process 0's environment, as in RunDirectory
  if (processes.all_gather("--resume", resumes ? "yes" : "")[0].empty()) return;
  const LocalHistory history = detail::history_of(processes, directory);
  if (first) detail::report_other_runs(o.checkpoint_local, history.run, log);
  std::vector<FoundPart> parts;
  std::map<std::string, std::string> manifests;
  together(processes, "parts of local checkpoints", [&] {
    if (!history.run.empty()) parts = detail::find_parts(o.checkpoint_local, history.run, processes.process());
  });
  std::vector<std::string> all = gather_large("local parts", detail::message_of(parts), processes);
  parts.clear();
  for (int p = 0; p < processes.count(); ++p) detail::add_parts(parts, all[static_cast<size_t>(p)], p);
  nlohmann::json mine = nlohmann::json::object();
  for (std::set<std::string> seen = {""}; const FoundPart& part : parts)  // the first process that has one sends it
    if (seen.insert(part.manifest).second && part.holder == processes.process()) try {
        mine[part.manifest] = read_text(part.path + "/manifest.json");
      } catch (const Error&) {
        mine[part.manifest] = "";
      }
  for (const std::string& text : gather_large("local manifests", mine.dump(), processes))
    manifests.merge(parse_json(text, "a process's manifests").get<std::map<std::string, std::string>>());
  for (FoundPart& part : parts)
    if (!part.manifest.empty() && checksum(manifests[part.manifest]) != part.manifest) part.manifest.clear();

  std::set<std::pair<int, std::string>> bad;
  for (std::set<std::string> said;;) {
    const LocalSearch found = detail::newest_local(parts, manifests, history, bad);
    const int64_t step = found.choice ? found.choice->of.step : 0;
    std::string verdict;
    check_together(processes, "checkpoints in --out-dir", o.out_dir, log, [&](const CheckpointCheck& check) {
      for (const std::string& fault : found.faults)
        if (said.insert(fault).second)
          log.line(formatted("WARNING: {}; {}", fault,
                             found.choice ? formatted("that of step {} is complete", step)
                                          : std::string("no older one is complete, so those in --out-dir count")));
      if (found.choice && !detail::has_as_new(o.out_dir, step, check)) verdict = "copy";
    });
    if (processes.all_gather("use local checkpoint", verdict)[0].empty()) return;

    const auto begin = Clock::now();
    const std::string temporary = formatted("{}/.tmp-step-{:06}", o.out_dir, step);
    together(processes, "room for a local checkpoint", [&] {
      if (!first) return;
      int64_t bytes = 0;
      for (const FileSource& file : found.choice->files) bytes += file.record.size;
      detail::require_space(o.out_dir, bytes);
      std::error_code error;
      std::filesystem::remove_all(temporary, error);
      std::filesystem::create_directory(temporary, error);
      CHECK(!error, "cannot create {}: {}", temporary, error.message());
    });
    nlohmann::json damaged = nlohmann::json::array();
    std::set<int> holders;
    together(processes, "a local checkpoint", [&] {
      for (const FileSource& file : found.choice->files) {
        holders.insert(file.holder);
        if (file.holder != processes.process()) continue;
        wait_for_path(temporary);
        if (const auto fault = detail::copy_intact(file.path, temporary + "/" + file.name, file.record))
          damaged.push_back({file.path, *fault});
      }
    });
    all = gather_large("damaged files", damaged.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                       processes);
    const size_t before = bad.size();
    for (int p = 0; p < processes.count(); ++p)
      for (const nlohmann::json& file : parse_json(all[static_cast<size_t>(p)], formatted("process {}", p))) {
        bad.insert({p, file.at(0)});
        log.line(formatted("WARNING: a damaged file of the local checkpoint of step {}, of process {}: {}", step, p,
                           file.at(1).get<std::string>()));
      }
    if (bad.size() > before) {
      std::error_code none;
      if (first) std::filesystem::remove_all(temporary, none);
      continue;
    }
    together(processes, "the local checkpoint", [&] {
      if (!first) return;
      directory->adopt(log, step, temporary, found.choice->manifest);
      log.line(formatted(
          "the newest complete checkpoint is a local one, of step {}: copied to {} in {:.1f} s, {} files of {} "
          "process(es)",
          step, checkpoint_path(o.out_dir, step), seconds_since(begin), found.choice->files.size(), holders.size()));
    });
    return;
  }
}

// Deletes the local checkpoints of a run that is complete. Called by all processes; directory: process 0's.
inline void delete_local_checkpoints(const Processes& processes, const RunDirectory* directory, const Options& o) {
  if (o.checkpoint_local.empty()) return;
  const LocalHistory history = detail::history_of(processes, directory);
  if (!history.run.empty()) LocalParts(o.checkpoint_local, history, o.place.process, o.checkpoint_local_keep).clear();
}

}  // namespace llmc
