// core/: formatting, bf16, counter-based random numbers, the log.
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "catch2.h"
#include "core/clock.h"
#include "core/dtype.h"
#include "core/environment.h"
#include "core/files.h"
#include "core/log.h"
#include "core/rng.h"
#include "helpers.h"

using namespace llmc;

namespace {

// A step whose numbers are as wide as they become.
TrainLine wide_row(int64_t step, double grad_norm) {
  return {.step = step,
          .max_steps = 99999,
          .loss = 12.3456,
          .grad_norm = grad_norm,
          .lr = 1.25e-4,
          .ms = 98765.4,
          .tokens_per_s = 1.234e6,
          .mfu = 1.0,
          .speed_of_light = 0.654,
          .eta_s = 359999,
          .tokens = 1,
          .memory = 1};
}

}  // namespace

TEST_CASE("the formatter formats values of all types and refuses more arguments than placeholders", "[core]") {
  REQUIRE(formatted("{} {:.2f} {:5} {:-4}| {}", 3, 2.5, 7, "ab", std::vector<int>{1, 2}) == "3 2.50     7 ab  | 1, 2");
  REQUIRE(formatted("{:06} {}", 42, true) == "000042 true");
  REQUIRE(formatted("{:.4f} {:6.1f}", -std::numeric_limits<double>::quiet_NaN(), -std::nanf("")) == "nan    nan");
  REQUIRE_ERROR(formatted("{}", 1, 2), "more arguments");
}

TEST_CASE("the values of a table are aligned, however long their names are", "[core]") {
  const TempDir dir;
  const std::string longest = "an op whose name is much longer than others";
  {
    Log log;
    log.open(dir.path(), 0);
    log.table("ops", {{"short", "1"}, {longest, "2"}});
  }
  REQUIRE(read_text(dir / "log.txt") ==
          "ops\n  short" + std::string(longest.size() - 4, ' ') + "1\n  " + longest + " 2\n");
}

TEST_CASE("control characters and bytes that are not UTF-8 are shown escaped, on the terminal and in the log",
          "[core]") {
  REQUIRE(printable("a\tb\n\u00e9\u4e16\U0001f600") == "a\tb\n\u00e9\u4e16\U0001f600");
  REQUIRE(printable("\x1b[31mred\a\r\x7f") == "\\x1b[31mred\\x07\\x0d\\x7f");
  REQUIRE(printable("\u009b2J") == "\\xc2\\x9b2J");  // CSI of ISO 6429
  REQUIRE(printable("a\xff\xc3(\xe4\xb8") == "a\\xff\\xc3(\\xe4\\xb8");
  REQUIRE(printable(std::string_view("\0", 1)) == "\\x00");
  REQUIRE(printable(printable("\x1b\xff")) == printable("\x1b\xff"));
  REQUIRE(shown("a\tb\nc\x1b\u0085\xff") == "a\\x09b\\x0ac\\x1b\\xc2\\x85\\xff");
  REQUIRE(shown("\u4e16\u4e16", 4) == "\u4e16... (6 bytes)");
  REQUIRE(formatted("{}", nlohmann::json("\u009b\xff")) == "\"\\xc2\\x9b\ufffd\"");

  const TempDir dir;
  Log log;
  log.open(dir.path(), 0);
  log.line("sample: \x1b]0;title\a\xf0");
  log.file_line("train_gpt: \x9b");
  REQUIRE(read_whole(dir / "log.txt") == "sample: \\x1b]0;title\\x07\\xf0\ntrain_gpt: \\x9b\n");
}

TEST_CASE("bf16 rounds to nearest even, keeps NaN and infinity", "[core]") {
  auto round = [](float x) { return static_cast<float>(bf16(x)); };
  REQUIRE(round(1.0f) == 1.0f);
  REQUIRE(round(1.0f + 0x1p-8f) == 1.0f);  // a tie goes to even
  REQUIRE(round(1.0f + 3 * 0x1p-8f) == 1.0f + 0x1p-6f);
  REQUIRE(round(1.0f + 0x1p-8f + 0x1p-20f) == 1.0f + 0x1p-7f);
  REQUIRE(std::isinf(round(std::numeric_limits<float>::infinity())));
  REQUIRE(std::isnan(round(std::bit_cast<float>(0x7f800001u))));  // its payload is in the truncated bits
  REQUIRE(round(-0.0f) == 0.0f);
}

TEST_CASE("Philox gives the published numbers", "[core]") {  // kat_vectors of Random123, philox4x32 with 10 rounds
  REQUIRE(Philox::rounds({0, 0, 0, 0}, 0, 0) ==
          std::array<uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  REQUIRE(Philox::rounds({~0u, ~0u, ~0u, ~0u}, ~0u, ~0u) ==
          std::array<uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
}

TEST_CASE("normal numbers are a pure function of the index, with the right mean and deviation", "[core]") {
  const Philox rng(5, "a parameter");
  std::vector<float> whole(100000), part(1001);
  rng.fill_normal(whole.data(), 0, 100000, 2.0f);
  rng.fill_normal(part.data(), 777, 1001, 2.0f);
  for (size_t i = 0; i < part.size(); ++i) REQUIRE(part[i] == whole[777 + i]);
  double mean = 0, square = 0;
  for (float x : whole) mean += x, square += double(x) * x;
  REQUIRE(std::abs(mean / 1e5) < 0.03);
  REQUIRE(std::abs(square / 1e5 - 4) < 0.08);
}

TEST_CASE("normal numbers equal Box-Muller in double with libm's functions", "[core]") {
  const Philox rng(5, "a parameter");
  for (uint64_t block = 0; block < 20000; ++block) {
    const auto w = rng.words(block);
    const auto z = rng.normals(block);
    for (size_t pair = 0; pair < 2; ++pair) {
      const float u = (static_cast<float>(w[2 * pair] >> 8) + 0.5f) * 0x1p-24f;
      const double radius = std::sqrt(-2 * std::log(double{u}));
      const double angle = 2 * std::numbers::pi * static_cast<double>(w[2 * pair + 1] >> 8) * 0x1p-24;
      REQUIRE(std::abs(z[2 * pair] - radius * std::cos(angle)) < 3e-7 * radius);
      REQUIRE(std::abs(z[2 * pair + 1] - radius * std::sin(angle)) < 3e-7 * radius);
    }
  }
}

TEST_CASE("the keyed permutation is a bijection for any size, and differs between keys", "[core]") {
  for (const int64_t n : {1, 2, 3, 16, 17, 1000}) {
    const Permutation p(n, 1, "epoch 0"), q(n, 1, "epoch 1");
    std::set<int64_t> seen;
    int64_t same = 0;
    for (int64_t i = 0; i < n; ++i) {
      REQUIRE(p(i) >= 0);
      REQUIRE(p(i) < n);
      seen.insert(p(i));
      same += p(i) == q(i);
    }
    REQUIRE(seen.size() == static_cast<size_t>(n));
    if (n == 1000) REQUIRE(same < 20);
  }
}

TEST_CASE("metrics.jsonl holds every number exactly, null where one is not finite", "[core]") {
  const TempDir dir;
  {
    Log log;
    log.open(dir.path(), 100);
    log.train({.step = 3,
               .max_steps = 10,
               .loss = 1.0 / 3,
               .grad_norm = std::nan(""),
               .lr = 1e-3,
               .ms = 5,
               .tokens_per_s = 1e6,
               .mfu = 0.5,
               .eta_s = 9,
               .tokens = 3072,
               .memory = int64_t{5} << 40});
    log.val({.step = 3, .loss = 2.0 / 3});
  }
  std::ifstream in(dir / "metrics.jsonl");
  std::string line;
  std::getline(in, line);
  const auto train = nlohmann::json::parse(line);
  REQUIRE(train["kind"] == "train");
  REQUIRE(train["loss"].get<double>() == 1.0 / 3);
  REQUIRE(train["grad_norm"].is_null());
  REQUIRE(train["tokens"] == 3072);
  REQUIRE(train["memory_bytes"] == int64_t{5} << 40);
  const std::string time = train["time"];  // 2026-01-31T23:59:59Z
  REQUIRE(time.size() == 20);
  REQUIRE((time[4] == '-' && time[10] == 'T' && time[19] == 'Z'));
  REQUIRE(train["elapsed_s"] >= 100);  // those before the run resumed count
  REQUIRE(train["elapsed_s"] < 110);
  std::getline(in, line);
  REQUIRE(nlohmann::json::parse(line)["loss"].get<double>() == 2.0 / 3);
}

TEST_CASE("the table of steps has at most 80 columns and repeats its titles; log.txt keeps what the console showed",
          "[core]") {
  const TempDir dir;
  {
    Log log;
    log.line("before the directory is known");
    log.file_line("the command");
    log.open(dir.path(), 0);
    for (int64_t step = 1; step <= 60; ++step) log.train(wide_row(99939 + step, step == 1 ? 1e9 : 123.4567), step != 2);
  }
  {
    Log resumed;
    resumed.open(dir.path(), 5), resumed.line("a second start");
  }
  std::istringstream lines(read_whole(dir / "log.txt"));
  std::vector<std::string> all;
  for (std::string line; std::getline(lines, line);) all.push_back(line);
  REQUIRE(all.size() == 2 + 59 + 3 + 1);  // three screens
  REQUIRE(all[0] == "before the directory is known");
  REQUIRE(all[1] == "the command");
  REQUIRE(all[2] == "       step     loss     norm        lr       ms   tok/s     MFU    SOL      ETA");
  REQUIRE(all[3] == "99940/99999  12.3456 1.00e+09  1.25e-04  98765.4   1.23M  100.0%  65.4% 99:59:59");
  REQUIRE(all[4].starts_with("99942/99999  12.3456 123.4567"));
  REQUIRE(all[2 + 26] == all[2]);
  REQUIRE(all.back() == "a second start");
  for (const std::string& line : all) REQUIRE(line.size() <= 80);
}

TEST_CASE("a row of a long run has at most 80 columns, too", "[core]") {
  const TempDir dir;
  {
    Log log;
    log.open(dir.path(), 0);
    TrainLine line = wide_row(500000, 123.4567);
    line.max_steps = 572205, line.eta_s = 400 * 86400;
    log.train(line);
  }
  const std::string row = read_whole(dir / "log.txt");
  REQUIRE(row.find("\n500000 ") != std::string::npos);
  REQUIRE(row.ends_with(" 400.0 d\n"));
  REQUIRE(row.size() <= 2 * 81);
}

TEST_CASE("a row with one more column, and numbers for metrics.jsonl alone, has at most 80 columns, too", "[core]") {
  const TempDir dir;
  {
    Log log;
    log.open(dir.path(), 0);
    TrainLine row = wide_row(99940, 123.4567);
    row.column = std::pair{"experts", "0.0-128"}, row.more = {{"router_entropy", 1.0 / 3}};
    log.train(row);
  }
  REQUIRE(read_whole(dir / "log.txt") ==
          "       step     loss     norm        lr       ms  tok/s     MFU experts      ETA\n"
          "99940/99999  12.3456 123.4567  1.25e-04  98765.4  1.23M  100.0% 0.0-128 99:59:59\n");
  const auto line = nlohmann::json::parse(read_whole(dir / "metrics.jsonl"));
  REQUIRE(line["router_entropy"].get<double>() == 1.0 / 3);
  REQUIRE(line["speed_of_light"].get<double>() == 0.654);
}

TEST_CASE("a full disk does not end a file that grows: its lines wait until there is room", "[core]") {
  const TempDir dir;
  AppendFile file(dir / "lines");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, SIG_IGN);  // then a write fails like one to a full disk
  const rlimit ten_bytes{10, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &ten_bytes);
  std::vector<std::string> faults;
  for (const char* line : {"first\n", "second\n", "third\n"}) faults.push_back(file.append(line));
  std::string sync_fault;
  try {
    file.sync();
  } catch (const Error& error) {
    sync_fault = error.what();
  }
  const std::string meanwhile = read_whole(dir / "lines");
  setrlimit(RLIMIT_FSIZE, &before);
  REQUIRE(faults == std::vector<std::string>{"", "File too large", ""});  // said once
  REQUIRE(sync_fault == "cannot write to " + (dir / "lines") + ": File too large");
  REQUIRE(meanwhile == "first\nseco");
  REQUIRE(file.append("fourth\n").empty());
  file.sync();
  REQUIRE(read_whole(dir / "lines") == "first\nsecond\nthird\nfourth\n");
}

TEST_CASE("numbers in human-readable form", "[core]") {
  REQUIRE(human_rate(987.4) == "987");
  REQUIRE(human_rate(999.6) == "1.00k");
  REQUIRE(human_rate(39712) == "39.7k");
  REQUIRE(human_rate(123456) == "123k");
  REQUIRE(human_rate(1234567) == "1.23M");

  REQUIRE(human_count(999) == "999");
  REQUIRE(human_count(1234567) == "1,234,567");
  REQUIRE(human_count(124439808) == "124.4M");
  REQUIRE(human_count(15'600'000'000'000) == "15.6T");
  REQUIRE((counted(1, "step") == "1 step" && counted(1234, "step") == "1,234 steps"));
  REQUIRE((human_amount(0.01234) == "0.0123" && human_amount(12.34) == "12.3" && human_amount(1234.5) == "1,235"));

  REQUIRE(human_flops(12.5e6) == "12.50 MFLOP");
  REQUIRE(human_flops(999.96e6) == "1.000 GFLOP");
  REQUIRE(human_flops(2.5331e12) == "2.533 TFLOP");
  REQUIRE(human_flops(4.12345e19) == "41.23 EFLOP");
  REQUIRE(human_flops(3.937e25) == "39.37 YFLOP");
  REQUIRE(human_bytes(int64_t{3} << 30) == "3.00 GiB");
  REQUIRE(human_duration(65.4) == "1:05");
  REQUIRE(human_duration(3661) == "1:01:01");
}

TEST_CASE("one at a time holds a lock whose file its holders remove", "[core]") {
  const TempDir dir;
  std::atomic<int> inside = 0, together = 0, taken = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      while (taken < 300) {
        FileLock lock;
        if (lock.take(dir / "lock") != 0) {
          std::this_thread::yield();
          continue;
        }
        if (++inside > 1) ++together;
        std::this_thread::yield();
        --inside;
        ++taken;
        lock.remove();
      }
    });
  for (std::thread& t : threads) t.join();
  REQUIRE(together == 0);
  REQUIRE_FALSE(path_exists(dir / "lock"));

  FileLock held, other;
  REQUIRE(held.take(dir / "lock") == 0);
  REQUIRE(other.take(dir / "lock") == EWOULDBLOCK);
  other.remove();  // not its own
  REQUIRE(held.in_place());
  std::filesystem::rename(dir / "lock", dir / "moved");
  REQUIRE(other.take(dir / "lock") == 0);
  held.remove();  // nor is this the file of that name any more
  REQUIRE(other.in_place());
  std::filesystem::create_symlink(dir / "moved", dir / "link");
  REQUIRE(held.take(dir / "link") == ELOOP);
}

TEST_CASE(
    "caches are in the directory that XDG_CACHE_HOME, HOME or the system names, never in one that others can make",
    "[core]") {
  const auto in = [](std::map<std::string, std::string> set) {
    return cache_directory(
        [set](const std::string& name) { return set.contains(name) ? std::optional(set.at(name)) : std::nullopt; });
  };
  REQUIRE(in({{"XDG_CACHE_HOME", "/c"}, {"HOME", "/h"}}) == "/c/train_gpt");
  REQUIRE(in({{"XDG_CACHE_HOME", ""}, {"HOME", "/h"}}) == "/h/.cache/train_gpt");
  const passwd* const user = ::getpwuid(::getuid());
  REQUIRE(in({}) == (user != nullptr ? std::string(user->pw_dir) + "/.cache/train_gpt"
                                     : formatted("/tmp/train_gpt-{}", int64_t{::getuid()})));
}

TEST_CASE("a directory is for caches only if it belongs to this user alone", "[core]") {
  const TempDir dir;
  REQUIRE(own_directory(dir / "new") == dir / "new");
  REQUIRE(own_directory(dir / "new") == dir / "new");
  REQUIRE(::chmod((dir / "new").c_str(), 0770) == 0);
  REQUIRE(own_directory(dir / "new").empty());
  REQUIRE(::chmod((dir / "new").c_str(), 0755) == 0);
  std::filesystem::create_symlink("new", dir / "link");
  REQUIRE(own_directory(dir / "link").empty());
  REQUIRE(own_directory(dir / "none/new").empty());
  if (::geteuid() != 0) return;
  REQUIRE(::chown((dir / "new").c_str(), 12345, 0) == 0);
  REQUIRE(own_directory(dir / "new").empty());
}

TEST_CASE("printing to a socket, a pipe or another user's pipe does not wait for a reader that has stopped", "[core]") {
  const std::string lines = [] {
    std::string text;
    for (int i = 0; i < 100; ++i) text += formatted("line {} {}\n", i, std::string(10'000, '.'));
    return text;
  }();
  struct Writer {
    int socket, of_another_user, ends[2];
    pid_t pid;
  } writers[] = {{1, 0, {}, 0}, {0, 0, {}, 0}, {0, 1, {}, 0}};
  for (Writer& w : writers) {
    REQUIRE((w.socket != 0 ? ::socketpair(AF_UNIX, SOCK_STREAM, 0, w.ends) : ::pipe(w.ends)) == 0);
    w.pid = ::fork();
    REQUIRE(w.pid >= 0);
    if (w.pid != 0) continue;
    ::alarm(30);  // ends a child that waits
    if (w.of_another_user != 0 && (::fchmod(w.ends[1], 0) != 0 || (::geteuid() == 0 && ::setuid(12345) != 0)))
      ::_exit(1);
    Console(::fdopen(w.ends[1], "w")).print(lines);
    ::_exit(0);
  }
  for (const Writer& w : writers) {
    INFO("socket: " << w.socket << ", of another user: " << w.of_another_user);
    int status = 0;
    REQUIRE(::waitpid(w.pid, &status, 0) == w.pid);
    REQUIRE(status == 0);
    ::close(w.ends[1]);
    std::string found(lines.size(), '\0');
    const ssize_t n = ::read(w.ends[0], found.data(), found.size());
    ::close(w.ends[0]);
    REQUIRE(n > 10'000);
    REQUIRE(lines.starts_with(found.substr(0, static_cast<size_t>(n))));
  }
}

TEST_CASE("stacks that are too small for ops are refused; OMP_STACKSIZE counts KiB without a unit", "[core]") {
  const std::string name = GENERATE("OMP_STACKSIZE", "GOMP_STACKSIZE");
  const auto require = [&](const std::string& value) {
    require_stacks([&](const std::string& asked) { return asked == name ? std::optional(value) : std::nullopt; });
  };
  for (const char* size : {"16", " 16 k ", "63K", "65535B"})
    REQUIRE_ERROR(require(size), name + " " + size + ": a thread needs 64 KiB at least");
  for (const char* size : {"64", "65536b", "1M", " 4 m", "1G", "512000", "0", "0.02M", "many", ""})
    REQUIRE_NOTHROW(require(size));
}

TEST_CASE("what something usually takes is the median of the last three times: one pause changes nothing", "[core]") {
  UsualTime usual;
  REQUIRE(!usual.seconds());
  const auto then = [&](double seconds) {
    usual.add(seconds);
    return usual.seconds();
  };
  REQUIRE(then(2) == 2.0);
  REQUIRE(then(3) == 3.0);
  REQUIRE(then(1) == 2.0);
  REQUIRE(then(3600) == 3.0);
  REQUIRE(then(2) == 2.0);
  REQUIRE(then(2) == 2.0);
  REQUIRE(then(50) == 2.0);
  REQUIRE(then(51) == 50.0);  // a trend
}
