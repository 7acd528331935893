// helpers.h: shared by the tests: temporary directories, token shards, expected errors, distances, running the program.
#pragma once
#include <sys/resource.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "catch2.h"
#include "core/check.h"

// A directory that is deleted at the end of the test.
class TempDir {
 public:
  explicit TempDir(const std::string& where = "/tmp") : path_(where + "/train_gpt_test_XXXXXX") {
    CHECK(mkdtemp(path_.data()) != nullptr, "cannot make a directory in {}", where);
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string read_whole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// Questions for --eval-choices, of tokens below 10.
inline void write_choices(const std::string& path) {
  std::ofstream(path) << R"({"context": [1, 2, 3], "choices": [[4], [5, 6], [7, 8, 9]], "label": 1})"
                      << "\n"
                      << R"({"context": [9], "choices": [[1, 2], [3]], "label": 0})"
                      << "\n"
                      << R"({"context": [9, 4, 6, 1, 7], "choices": [[1, 2], [3, 5, 8]], "label": 1})"
                      << "\n";
}

// A token shard in llm.c's format; Token is uint16_t or uint32_t.
template <class Token>
void write_shard(const std::string& path, const std::vector<Token>& tokens) {
  int32_t header[256] = {sizeof(Token) == 2 ? 20240520 : 20240801, sizeof(Token) == 2 ? 1 : 7,
                         static_cast<int32_t>(tokens.size())};
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(header), sizeof header);
  out.write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(tokens.size() * sizeof(Token)));
}

// Requires that the expression throws llmc::Error with a message that contains `part`.
#define REQUIRE_ERROR(expression, part)                \
  do {                                                 \
    std::string message_ = "no error";                 \
    try {                                              \
      (void)(expression);                              \
    } catch (const llmc::Error& error_) {              \
      message_ = error_.what();                        \
    }                                                  \
    INFO(message_);                                    \
    REQUIRE(message_.find(part) != std::string::npos); \
  } while (false)

// ||a - b|| / ||b||; NaN if either has a NaN, and no bound accepts NaN: compare with <.
template <class A, class B>
double relative_distance(const A* a, const B* b, int64_t n) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    difference += (x - y) * (x - y);
    size += y * y;
  }
  return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

// The cross-entropy of these logits, which must be small.
inline double loss_of(std::span<const float> logits, int32_t target) {
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  return std::log(sum) - static_cast<double>(logits[static_cast<size_t>(target)]);
}

// Limits the number of open files of this process and its children until the end of the scope.
class FewOpenFiles {
 public:
  explicit FewOpenFiles(rlim_t most) {
    REQUIRE(getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const rlimit few{most, before_.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
  }
  ~FewOpenFiles() { setrlimit(RLIMIT_NOFILE, &before_); }
  FewOpenFiles(const FewOpenFiles&) = delete;
  FewOpenFiles& operator=(const FewOpenFiles&) = delete;

 private:
  rlimit before_{};
};

struct ProgramResult {
  int status;  // 128 + signal if killed by one
  std::string out, err;
};

// Runs ./train_gpt (the working directory is the repository's root), on the CPU, with these shell-quoted arguments;
// `prefix`: environment settings or a program to run it with.
inline ProgramResult run_program(const std::string& arguments, const std::string& prefix = "") {
  const TempDir dir;
  const std::string command = "XDG_CACHE_HOME=build/cache CUDA_VISIBLE_DEVICES= " + prefix + " ./train_gpt " +
                              arguments + " >" + (dir / "out") + " 2>" + (dir / "err") + " </dev/null";
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_whole(dir / "out"),
          read_whole(dir / "err")};
}
