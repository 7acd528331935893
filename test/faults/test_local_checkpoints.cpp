// Checkpoints on the nodes' own disks (--checkpoint-local): directories of processes stand for nodes.
#include "catch2.h"
#include "faults/fault_run.h"
#include "run/checkpoints/local_copies.h"
#include "run/checkpoints/local_resume.h"

using namespace llmc;
namespace fs = std::filesystem;

TEST_CASE("a local checkpoint belongs to a run only if later starts began at its step or after it",
          "[faults][checkpoint]") {
  LocalHistory history;
  history.begin(0, true);   // start a saves until 90, say
  history.begin(60, true);  // start b found that of 60
  const int64_t a = history.starts[0].number, b = history.starts[1].number;
  const auto has = [&](int64_t step, int64_t start) { return history.has({step, start, 0}); };
  REQUIRE((a != b && has(60, a) && !has(61, a) && has(1000, b) && !has(60, a + b + 1)));
  history.begin(50, false);  // without --checkpoint-local
  REQUIRE((has(50, a) && !has(60, a) && !has(60, b)));
  history.begin(50, true);
  REQUIRE(history.starts.size() == 3);
  const auto json = nlohmann::json::parse(history.to_json().dump());
  REQUIRE(LocalHistory::from_json(json, "run.json") == history);
  for (const char* member : {"run", "starts"}) {
    nlohmann::json damaged = json;
    damaged[member] = "x";
    REQUIRE_ERROR(LocalHistory::from_json(damaged, "run.json"), "run.json: \"local\" is");
  }
  history.begin(0, true);
  REQUIRE(history.starts.size() == 1);
}

TEST_CASE("of local checkpoints, the newest is taken of which every file is somewhere", "[faults][checkpoint]") {
  LocalHistory history{"0123456789abcdef", {{1, LocalHistory::no_end}}};
  std::map<std::string, std::string> manifests;
  std::vector<FoundPart> parts;
  const auto add = [&](int64_t step, int64_t start, int process, int holder, const std::string& salt = "") {
    const nlohmann::json record = FileRecord{1, {salt}}.to_json();
    const std::string text =
        nlohmann::json{{"step", step}, {"processes", 2}, {"files", {{"a0", record}, {"a1", record}, {"both", record}}}}
            .dump();
    manifests[checksum(text)] = text;
    const LocalName name{step, start, process};
    parts.push_back({name,
                     holder,
                     formatted("disk{}/{}", holder, name.text()),
                     checksum(text),
                     {{formatted("a{}", process), 1}, {"both", 1}}});
  };
  const auto found = [&](const std::set<std::pair<int, std::string>>& bad = {}) {
    const LocalSearch search = detail::newest_local(parts, manifests, history, bad);
    return std::pair(search.choice ? search.choice->of.step : 0, search.faults);
  };
  REQUIRE(found().first == 0);
  for (const int process : {0, 1}) add(10, 1, process, process);
  add(20, 1, 0, 0);
  auto [step, faults] = found();
  REQUIRE(step == 10);
  REQUIRE(faults == std::vector<std::string>{"the local checkpoint of step 20 is incomplete: 1 of its 3 files are not "
                                             "there or damaged, a1 the first; nothing is there of what process(es) 1 "
                                             "had"});
  add(20, 2, 1, 1);  // of another start
  add(20, 1, 1, 1, "another manifest, of other files");
  parts.back().files.clear();
  REQUIRE(found().first == 10);
  add(20, 1, 1, 0);  // a copy, on another disk
  REQUIRE(found().first == 20);
  REQUIRE(found({{0, parts.back().path + "/a1"}}).first == 10);
  REQUIRE(found({{0, "disk0/step-000020-start-1-process-0/both"}}).first == 20);  // process 1's
  parts.back().files["a1"] = 2;                                                   // truncated, or longer
  REQUIRE(found().first == 10);
}

TEST_CASE("what killed starts left half written on a node's disk is removed, but not what this start writes",
          "[faults][checkpoint]") {
  const TempDir dir;
  LocalHistory history;
  history.begin(0, true);
  const int64_t own = history.starts.back().number;
  const LocalParts parts(dir / "disk", history, 0, 2);
  for (const int64_t start : {own, own + 1})
    for (const char* kind : {".tmp-", ".tmp-copy-", ".tmp-removed-"})
      fs::create_directories(parts.directory() + "/" + kind + LocalName{10, start, 0}.text());
  fs::create_directories(parts.directory() + "/" + LocalName{10, own + 1, 0}.text());
  parts.remove_unfinished();
  size_t left = 0;
  for (const std::string& name : names_in(parts.directory())) {
    INFO(name);
    REQUIRE((!name.starts_with(".tmp-") || name.find(formatted("-start-{}-", own)) != name.npos));
    ++left;
  }
  REQUIRE(left == 4);
}

TEST_CASE("copies go to another host if there is one, else to another directory", "[faults][checkpoint]") {
  const NodeDisk a{"a", "/d"}, b{"b", "/d"}, a2{"a", "/e"};
  REQUIRE(copy_distance({a}) == 0);
  REQUIRE(copy_distance({a, a}) == 0);
  REQUIRE(copy_distance({a, b}) == 1);
  REQUIRE(copy_distance({a, a2}) == 1);
  REQUIRE(copy_distance({a, a, b, b}) == 2);
  REQUIRE(copy_distance({a, a2, b, b}) == 2);
  REQUIRE(copy_distance({a, b, a, b}) == 1);
  REQUIRE(copy_distance({a, a, a, b}) == 1);  // the last and the one before it: the most that is possible
}

namespace {

// Two processes, each with a disk of its own, of which the first is killed before the last checkpoint: there is one of
// step 6 in the out directory, and local ones of steps 8 and 10.
struct LostRun {
  FaultRun run{"two processes",
               "--max-steps 12 --checkpoint-every 6 --checkpoint-local-every 2 --zero-stage 1 --init-timeout 10 "
               "--checkpoint-local ",
               2};
  TempDir dir{in_memory()};
  std::string whole, killed = dir / "killed";

  // Starts it, and kills its first process where it begins the checkpoint of its last step, the 12th.
  void kill(const FaultRun& of, const std::string& out) {
    const Ended r = of.start(out, shim(dir, "FILE_OPS_KILL_AT=/.tmp-step-000012"));
    INFO(r.said);
    REQUIRE(r.killed());
  }

  explicit LostRun(const std::string& local = "NODE") {
    run.options += local;
    const Ended ended = run.start(dir / "whole", "");
    INFO(ended.said);
    REQUIRE(ended.good());
    whole = result_of(dir / "whole");
    kill(run, killed);
    if (local != "NODE") return;
    for (const int node : {0, 1}) {
      std::set<int64_t> steps;
      for (const LocalName& name : local_names(parts(killed, node))) steps.insert(name.step);
      REQUIRE(steps == std::set<int64_t>{8, 10});  // --checkpoint-local-keep 2
    }
  }
  static std::string parts(const std::string& out, int node) {
    for (const std::string& name : names_in(FaultRun::node(out, node)))
      if (name.starts_with("train_gpt-")) return FaultRun::node(out, node) + "/" + name;
    return "";
  }
  // Damages a copy of what is left, and starts the run again, which must end as if nobody had disturbed it. Returns
  // what it says.
  template <class Damage>
  std::string resumed_after(Damage&& damage) const {
    const std::string out = dir / "again";
    for (const auto& [from, to] : {std::pair(killed, out),
                                   {FaultRun::node(killed, 0), FaultRun::node(out, 0)},
                                   {FaultRun::node(killed, 1), FaultRun::node(out, 1)}}) {
      fs::remove_all(to);
      fs::copy(from, to, fs::copy_options::recursive);
    }
    damage(out);
    fs::rename(killed, killed + "-away");  // to which they would belong otherwise
    const Ended r = run.start(out, "");
    fs::rename(killed + "-away", killed);
    INFO(r.said);
    REQUIRE(r.good());
    REQUIRE(result_of(out) == whole);
    return r.said;
  }
};

void flip_last_byte(const std::string& file) {
  std::string bytes = read_whole(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  std::ofstream(file, std::ios::binary) << bytes;
}

bool says(const std::string& text, const std::string& what) { return text.find(what) != text.npos; }

}  // namespace

TEST_CASE("a start takes the newest checkpoint that is complete on the nodes' disks, bit for bit",
          "[faults][checkpoint]") {
  LostRun lost;
  const int64_t start = read_run_record(lost.killed + "/run.json").local.starts.at(0).number;
  const std::string weights = "/model-00002-of-00002.safetensors";
  std::string said = lost.resumed_after([](const std::string&) {});
  REQUIRE(says(said, "the newest complete checkpoint is a local one, of step 10: copied to "));
  REQUIRE(says(said, "resuming after step 10"));

  // Each part is on both disks, its own and the other one's.
  const auto of_process_1 = [&](const std::string& out, int node, const std::string& file) {
    return LostRun::parts(out, node) + "/" + LocalName{10, start, 1}.text() + file;
  };
  const auto resumes_at = [&](int64_t step, const std::string& why, auto&& damage) {
    const std::string text = lost.resumed_after(damage);
    INFO(text << "\nexpected: step " << step << ", " << why);
    REQUIRE(says(text, formatted("resuming after step {}", step)));
    REQUIRE(says(text, why));
  };
  for (const int away : {0, 1})
    resumes_at(10, "a local one, of step 10",
               [&](const std::string& out) { fs::remove_all(FaultRun::node(out, away)); });
  resumes_at(10, "does not have the checksums of its manifest",
             [&](const std::string& out) { flip_last_byte(of_process_1(out, 1, weights)); });
  resumes_at(8, "does not have the checksums of its manifest", [&](const std::string& out) {
    for (const int node : {0, 1}) flip_last_byte(of_process_1(out, node, weights));
  });
  resumes_at(8, "step 10 is incomplete: 1 of its ", [&](const std::string& out) {
    for (const int node : {0, 1}) fs::resize_file(of_process_1(out, node, weights), 100);
  });
  resumes_at(8, "nothing is there of what process(es) 1 had", [&](const std::string& out) {
    for (const int node : {0, 1}) fs::remove_all(of_process_1(out, node, ""));
  });
  resumes_at(8, "no part of it has an intact manifest.json", [&](const std::string& out) {
    for (const int node : {0, 1})
      for (const int process : {0, 1})
        flip_last_byte(LostRun::parts(out, node) + "/" + LocalName{10, start, process}.text() + "/manifest.json");
  });
  resumes_at(6, "also has checkpoints of 1 other run(s), such as train_gpt-0123456789abcdef",
             [&](const std::string& out) {  // those of another run are left alone
               for (const int node : {0, 1})
                 fs::rename(LostRun::parts(out, node), FaultRun::node(out, node) + "/train_gpt-0123456789abcdef");
             });
  resumes_at(6, "no part of it has an intact manifest.json", [&](const std::string& out) {  // in the place of ours
    FaultRun other = lost.run;
    other.options += " --seed 2";
    lost.kill(other, lost.dir / "other");
    for (const int node : {0, 1}) {
      const std::string ours = LostRun::parts(out, node), theirs = LostRun::parts(lost.dir / "other", node);
      std::vector<std::string> names;
      for (const LocalName& name : local_names(ours)) names.push_back(name.text());
      fs::remove_all(ours);
      fs::create_directories(ours);
      for (const LocalName& name : local_names(theirs))
        fs::copy(theirs + "/" + name.text(), ours + "/" + LocalName{name.step, start, name.process}.text(),
                 fs::copy_options::recursive);
    }
  });
}

TEST_CASE("the local checkpoint before the last one stays until the last one has its copies", "[faults][checkpoint]") {
  const TempDir dir(in_memory());
  const FaultRun run{"keeps one",
                     "--max-steps 12 --checkpoint-every 6 --checkpoint-local-every 2 --checkpoint-local-keep 1 "
                     "--zero-stage 1 --init-timeout 10 --checkpoint-local NODE",
                     2};
  REQUIRE(run.start(dir / "whole", "").good());
  const std::string killed = dir / "killed";
  const Ended first = run.start(killed, shim(dir, "FILE_OPS_KILL_AT=/.tmp-copy-step-000010"));
  INFO(first.said);
  REQUIRE(first.killed());
  fs::remove_all(FaultRun::node(killed, 0));  // and its node is lost
  const Ended second = run.start(killed, "");
  INFO(second.said);
  REQUIRE(second.good());
  REQUIRE(says(second.said, "resuming after step 8"));
  REQUIRE(result_of(killed) == result_of(dir / "whole"));
}

TEST_CASE("local checkpoints that cannot be written cost a warning; processes may share their directory",
          "[faults][checkpoint]") {
  const TempDir dir(in_memory());
  LostRun lost(dir / "shared");
  const auto parts = [&] { return names_in(dir / "shared"); };
  REQUIRE(parts().size() == 1);
  const std::vector<LocalName> names = local_names(dir / ("shared/" + parts()[0]));
  REQUIRE(names.size() == 4);
  const int64_t start = names[0].start;
  REQUIRE(names == std::vector<LocalName>{{8, start, 0}, {8, start, 1}, {10, start, 0}, {10, start, 1}});
  // Those of a copy of the out directory are others.
  fs::copy(lost.killed, dir / "copy", fs::copy_options::recursive);
  const Ended copied = lost.run.start(dir / "copy", "");
  INFO(copied.said);
  REQUIRE(copied.good());
  REQUIRE(says(copied.said, "is a copy of " + lost.killed + ", to which the local checkpoints so far belong"));
  REQUIRE(says(copied.said, "resuming after step 6"));
  REQUIRE(parts().size() == 1);
  REQUIRE(local_names(dir / ("shared/" + parts()[0])) == names);
  const Ended again = lost.run.start(lost.killed, "");
  INFO(again.said);
  REQUIRE(again.good());
  REQUIRE(says(again.said, "a local one, of step 10"));
  REQUIRE(result_of(lost.killed) == lost.whole);
  REQUIRE(parts().empty());  // the run is complete
  // As they are if it is killed before it has deleted them.
  const std::string left = local_directory(dir / "shared", read_run_record(lost.killed + "/run.json").local.run);
  fs::create_directories(left + "/" + LocalName{10, start, 0}.text());
  REQUIRE(lost.run.start(lost.killed, "").good());
  REQUIRE(parts().empty());

  const FaultRun run{"often",
                     "--max-steps 9 --checkpoint-every 5 --zero-stage 1 --init-timeout 10 --checkpoint-local-every 1 "
                     "--checkpoint-local NODE",
                     2};
  REQUIRE(run.start(dir / "run", "").good());
  const std::string whole = result_of(dir / "run");
  const Ended full = run.start(dir / "full", shim(dir, "FILE_OPS_FULL=train_gpt-"), {});
  INFO(full.said);
  REQUIRE(full.good());
  REQUIRE(result_of(dir / "full") == whole);
  for (const char* why : {"WARNING: no local checkpoint after step 1: ",
                          // one or two steps later: the write may have ended before step 1 did, or after
                          "No space left on device; training goes on, and the next is tried after step "})
    REQUIRE(says(full.said, why));

  std::ofstream(dir / "file") << "x";
  refused(tiny(dir / "no", "--max-steps 1 --checkpoint-local-every 1 --checkpoint-local " + (dir / "file")),
          "/file: cannot write there: ");
  refused(tiny(dir / "no", "--max-steps 1 --checkpoint-local-every 1 --checkpoint-local " + (dir / "no/in")),
          "is in --out-dir ");
  refused(tiny(dir / "no", "--max-steps 1 --checkpoint-local " + (dir / "in")), "how often?");
}
