// Random changes of every input format, in a process under sanitizers: each is rejected by an error that names a file,
// or read; none crashes the process, hangs it, fills the memory, or silently changes what a manifest protects.
#include <omp.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <csignal>

#include "catch2.h"
#include "fuzz/formats.h"
#include "helpers.h"

// From AddressSanitizer's library; g++ 12 has no header for them.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*, size_t),
                                                         void (*)(const volatile void*));
extern "C" size_t __sanitizer_get_allocated_size(const volatile void*);

using namespace llmc;

namespace {

// ---- The memory in use, counted at each allocation
// --------------------------------------------------------------------

std::atomic<int64_t> in_use = 0, most_in_use = 0;
void allocated(const volatile void*, size_t size) {
  const int64_t now = in_use += static_cast<int64_t>(size);
  if (now > most_in_use) most_in_use = now;
}
void freed(const volatile void* address) {
  if (address != nullptr) in_use -= static_cast<int64_t>(__sanitizer_get_allocated_size(address));
}

// ---- One process reads changed files until something kills it; another one watches and starts the next
// ---------------

enum class Outcome : uint8_t { refused, same, different, failed };

struct Shared {
  uint64_t next = 0;  // the mutation being read
  int64_t outcomes[4] = {};
  size_t length = 0;
  char failures[1 << 16] = {};
  void fail(const std::string& text) {
    const size_t n = std::min(text.size() + 1, sizeof failures - length);
    std::memcpy(failures + length, (text + "\n").data(), n);
    length += n;
  }
};

void write_file(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

constexpr int64_t most_memory = int64_t{64} << 20;
constexpr timeval processor_seconds{2, 0};
constexpr unsigned seconds = 60;  // of a machine that is busy with other things

struct Fuzzer {
  uint64_t seed, begin, end;
  Shared& shared;
  std::unique_ptr<Checkpoints>& checkpoints;
  std::chrono::steady_clock::time_point stop;

  // Reads the changed file, in the watched process.
  Outcome read(const Format& format, uint64_t number, const std::string& whole, const std::string& expected) {
    const std::string path = format.directory + "/" + format.file;
    const std::string changed = Mutation(seed, format.name, number).of(whole, format.content);
    auto fail = [&](const std::string& why) {
      shared.fail(formatted("{}, FUZZ_SEED={} FUZZ_NUMBER={}: {}", format.name, seed, number, shown(why, 600)));
      return Outcome::failed;
    };
    write_file(path, changed);
    if (format.reseal) format.reseal();
    const itimerval limit{{}, processor_seconds}, none{};
    most_in_use = in_use.load();
    const int64_t before = in_use;
    std::string found, error;
    setitimer(ITIMER_PROF, &limit, nullptr);
    alarm(seconds);
    try {
      found = format.read();
    } catch (const Error& refusal) {
      error = refusal.what();
    } catch (const std::exception& other) {
      return fail(formatted("an exception of another kind: {}", other.what()));
    }
    setitimer(ITIMER_PROF, &none, nullptr);
    alarm(0);
    const int64_t memory = most_in_use - before;
    if (memory > most_memory + static_cast<int64_t>(changed.size()))
      return fail(formatted("took {} MiB for a file of {} bytes", memory >> 20, changed.size()));
    if (!error.empty()) {
      const bool named =
          error.find(format.directory) != error.npos || (format.name == "--config" && error.starts_with("--"));
      if (!named) return fail("does not name the file: " + error);
      if (error.size() > 2000) return fail("says too much: " + error);
      if (error.find('\x1b') != error.npos) return fail("repeats a control character: " + error);
      return Outcome::refused;
    }
    if (found == expected) return Outcome::same;
    return format.is_protected ? fail("was changed silently") : Outcome::different;
  }

  // All files of the directory as they were.
  static void restore(const Format& format, const std::map<std::string, std::string>& files) {
    for (const auto& [name, bytes] : files) write_file(format.directory + "/" + name, bytes);
  }

  [[noreturn]] void work(const Format& format, const std::map<std::string, std::string>& files) {
    __sanitizer_install_malloc_and_free_hooks(allocated, freed);
    checkpoints = std::make_unique<Checkpoints>();
    const std::string expected = format.read();
    for (; shared.next < end && std::chrono::steady_clock::now() < stop; ++shared.next) {
      restore(format, files);
      ++shared.outcomes[static_cast<int>(read(format, shared.next, files.at(format.file), expected))];
    }
    restore(format, files);
    _exit(0);
  }

  void watch(const Format& format, const std::map<std::string, std::string>& files) {
    for (shared.next = begin; shared.next < end && std::chrono::steady_clock::now() < stop; ++shared.next) {
      restore(format, files);
      std::fflush(nullptr);
      const pid_t child = fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        try {
          work(format, files);
        } catch (const std::exception& error) {
          shared.fail(formatted("{}: the unchanged file: {}", format.name, error.what()));
          shared.next = end;
          _exit(0);
        }
      }
      int status = 0;
      REQUIRE(waitpid(child, &status, 0) == child);
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
      const bool hung = WIFSIGNALED(status) && (WTERMSIG(status) == SIGPROF || WTERMSIG(status) == SIGALRM);
      shared.fail(formatted("{}, FUZZ_SEED={} FUZZ_NUMBER={}: {} (status {})", format.name, seed, shared.next,
                            hung ? "hangs" : "crashes", status));
      ++shared.outcomes[static_cast<int>(Outcome::failed)];
    }
  }
};

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::stoull(text) : otherwise;
}

// `count` changes of each format. In the environment, FUZZ_TARGET is the name of one, FUZZ_SEED takes other changes,
// FUZZ_NUMBER repeats one of them, and FUZZ_SECONDS goes on for so long.
void fuzz(uint64_t count) {
  omp_set_num_threads(1);  // OpenMP's threads do not survive a fork
  const TempDir dir;
  constexpr uint64_t all = ~uint64_t{0};
  const uint64_t seed = number_from("FUZZ_SEED", 1), one = number_from("FUZZ_NUMBER", all),
                 seconds = number_from("FUZZ_SECONDS", 0);
  const uint64_t begin = one < all ? one : 0, end = one < all ? one + 1 : seconds > 0 ? uint64_t{1} << 40 : count;
  const char* const only = std::getenv("FUZZ_TARGET");
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  Shared& shared = *new (memory) Shared;
  auto checkpoints = std::make_unique<Checkpoints>();
  const std::vector<Format> formats = make_formats(dir.path(), checkpoints);
  checkpoints.reset();  // its threads would not survive a fork
  for (const Format& format : formats) {
    if (only != nullptr && only != format.name) continue;
    std::map<std::string, std::string> files;
    for (const std::string& name : names_in(format.directory))
      if (std::filesystem::is_regular_file(format.directory + "/" + name))
        files[name] = read_whole(format.directory + "/" + name);
    const auto before = std::to_array(shared.outcomes);
    const auto stop = seconds > 0 ? std::chrono::steady_clock::now() + std::chrono::seconds(seconds)
                                  : std::chrono::steady_clock::time_point::max();
    Fuzzer{seed, begin, end, shared, checkpoints, stop}.watch(format, files);
    std::printf(
        "%-44s %6lld refused %6lld same %6lld different %4lld failed\n", format.name.c_str(),
        static_cast<long long>(shared.outcomes[0] - before[0]), static_cast<long long>(shared.outcomes[1] - before[1]),
        static_cast<long long>(shared.outcomes[2] - before[2]), static_cast<long long>(shared.outcomes[3] - before[3]));
  }
  INFO(std::string(shared.failures, shared.length));
  REQUIRE(shared.length == 0);
  REQUIRE((only != nullptr || shared.outcomes[0] > 0));
}

}  // namespace

TEST_CASE("twenty changes of every input format", "[fuzz]") { fuzz(20); }
TEST_CASE("a thousand changes of every input format", "[fuzz][long]") { fuzz(1000); }
