// Too little memory, too few threads, files that are too large, or not where they seem to be, and closed streams.
#include "catch2.h"
#include "core/log.h"
#include "run/checkpoints/run_dir.h"
#include "tiny_run.h"

using namespace llmc;
namespace fs = std::filesystem;

TEST_CASE("memory and threads that a limit refuses are named, with the limit, and are no internal error", "[run]") {
  const auto says = [](const std::exception& error) {
    rlimit before{};
    REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
    rlimit low = before;
    low.rlim_cur = rlim_t{1} << 40;  // more than there is
    REQUIRE(setrlimit(RLIMIT_AS, &low) == 0);
    const std::string text = failure_text(error);
    REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
    return text;
  };
  REQUIRE(says(std::bad_alloc()).starts_with("the system gave no more memory, ulimit -v is 1073741824 KiB: end other"));
  const std::string thread = says(std::system_error(EAGAIN, std::generic_category()));
  REQUIRE(thread.starts_with("the system started no further thread"));
  REQUIRE(thread.find(", ulimit -v is 1073741824 KiB: raise a limit") != thread.npos);
  REQUIRE(says(fs::filesystem_error("cannot rename", "a", std::error_code(EACCES, std::generic_category()))) ==
          "filesystem error: cannot rename: Permission denied [a]");
  REQUIRE(says(std::bad_array_new_length()).starts_with("internal error: "));
  REQUIRE(says(std::runtime_error("x")) == "internal error: x");
  REQUIRE(says(Error("ours")) == "ours");
}

TEST_CASE("where the system gives too few threads or too little memory for the ranks, the program ends with an error",
          "[run]") {
  for (const auto& [ranks, kib] : std::vector<std::pair<int, int>>{
           {3, 60'000}, {3, 80'000}, {16, 250'000}, {16, 300'000}, {16, 400'000}, {16, 500'000}, {16, 700'000}}) {
    const TempDir dir;
    const ProgramResult r =
        run_program(tiny(dir / "run", formatted("--max-steps 2 --local-ranks {} --batch-size 1", ranks)),
                    formatted("bash -c 'ulimit -v {}; exec \"$0\" \"$@\"'", kib));
    INFO(ranks << " ranks, " << kib << " KiB: " << r.status << ": " << r.err);
    if (r.status == 127) continue;  // too little for the loader
    REQUIRE(r.status < 128);        // no signal
    REQUIRE((r.status == 0 || r.err.find("train_gpt: ") != std::string::npos));
    REQUIRE(r.err.find("terminate called") == std::string::npos);
    REQUIRE(r.err.find("internal error") == std::string::npos);
  }
}

TEST_CASE("a lock, log or metrics that are a symbolic link are refused, and what it links to stays as it is", "[run]") {
  for (const char* name : {".lock", "log.txt", "metrics.jsonl"}) {
    INFO(name);
    const TempDir dir;
    std::ofstream(dir / "precious") << "precious\n";
    run_well(tiny(dir / "run", "--max-steps 1"));
    fs::remove(dir / (std::string("run/") + name));
    fs::create_symlink(dir / "precious", dir / (std::string("run/") + name));
    const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 2"));
    INFO(r.err);
    REQUIRE(r.status == 1);
    REQUIRE(r.err.find((dir / (std::string("run/") + name))) != std::string::npos);
    REQUIRE(r.err.find("is a symbolic link, expected a file") != std::string::npos);
    REQUIRE(read_whole(dir / "precious") == "precious\n");
  }
}

TEST_CASE("ulimit -f acts like a full disk", "[run]") {
  const TempDir dir;
  const ProgramResult r = run_program(tiny(dir / "run", "--max-steps 1"), "bash -c 'ulimit -f 8; exec \"$0\" \"$@\"'");
  INFO(r.out << r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("no checkpoint after step 1: ") != std::string::npos);
  REQUIRE(r.err.find("File too large") != std::string::npos);
}

TEST_CASE("what is printed to a closed stream gets into no file of the run", "[run]") {
  const TempDir dir;
  run_well(tiny(dir / "open", "--max-steps 2"));
  for (const char* closed : {">&-", ">&- 2>&-", "<&- >&- 2>&-"}) {
    INFO(closed);
    fs::remove_all(dir / "closed");
    const ProgramResult r =
        run_program(tiny(dir / "closed", "--max-steps 2"), formatted("bash -c 'exec \"$0\" \"$@\" {}'", closed));
    REQUIRE(r.status == 0);
    REQUIRE(read_whole(dir / "closed/.lock") == read_whole(dir / "open/.lock"));
    REQUIRE(state_of(dir / "closed/step-000002") == state_of(dir / "open/step-000002"));
  }
}

TEST_CASE("questions of 40 GB are refused by their size", "[run]") {
  const TempDir dir;
  std::ofstream(dir / "questions") << "x";
  fs::resize_file(dir / "questions", 40'000'000'000);  // a hole
  const ProgramResult r = run_program(
      tiny(dir / "run", "--max-steps 1 --val-data " + tiny_data + " --eval-choices " + (dir / "questions")));
  INFO(r.err);
  REQUIRE(r.status == 1);
  REQUIRE(r.err.find("questions: 40000000000 bytes are too many for a file of this kind") != std::string::npos);
}
