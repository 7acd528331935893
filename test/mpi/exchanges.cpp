// exchanges.cpp: MpiLinks between processes. test/scripts/mpi_test.sh runs it under mpirun, as
//
//   exchanges data LOCAL_RANKS PART_BYTES      all pairs of ranks, in several groups at once; ends MPI and exits with 0
//   exchanges length OUT_BYTES IN_BYTES DIR    process 0 sends another length than process 1 expects
//   exchanges abort DIR                        a rank fails while others wait
//
// After the last two, MPI cannot be finalized, and mpirun kills every process when the first one exits: so each writes
// what it saw to DIR/PROCESS, waits until all have done so, and exits with 1.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "comm/comm_mpi.h"

using namespace llmc;

namespace {

// The two directions of an exchange differ in length. Several MiB in one group only.
int64_t bytes_between(int from, int to, int size, int group) {
  const int64_t sizes[] = {0, 1, 8, 4097, group == 0 ? 3 << 20 : 100'000};
  return sizes[size] == 0 ? 0 : sizes[size] + (from * 3 + to) % 5;
}

// Every rank exchanges with every other one, and once only sends or only receives.
void exchange_all(MpiLinks& links, int rank, int ranks, int group) {
  const auto message = [&](int from, int to, int size) {
    std::vector<uint8_t> data(static_cast<size_t>(bytes_between(from, to, size, group)));
    uint32_t x = static_cast<uint32_t>(1 + from * 31 + to * 17 + group * 5);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>((x = x * 1664525 + 1013904223) >> 24);
    return data;
  };
  for (int size = 0; size < 5; ++size)
    for (int step = 1; step < ranks; ++step) {
      const int to = (rank + step) % ranks, from = (rank - step + ranks) % ranks;
      const auto out = message(rank, to, size), expected = message(from, rank, size);
      std::vector<uint8_t> in(expected.size(), 0xee);
      links.exchange(group, rank, {to, out.data(), std::ssize(out)}, {from, in.data(), std::ssize(in)});
      CHECK(in == expected, "group {}, {} bytes from rank {} to rank {} are wrong", group, in.size(), from, rank);
    }
  // In order, and one way: the sender may be far ahead.
  for (int i = 0; i < 50; ++i) {
    const int in_expected = i;
    int in = -1;
    if (rank == 0) links.exchange(group, 0, {1, &in_expected, sizeof in}, {});
    if (rank != 1) continue;
    links.exchange(group, 1, {}, {0, &in, sizeof in});
    CHECK(in == in_expected, "message {} came in place of message {}", in, in_expected);
  }
  links.exchange(group, rank, {}, {});
}

void test_data(int local_ranks, int64_t part_bytes) {
  MpiLinks links(local_ranks, part_bytes);
  for (const std::string& text : {std::string("host:1234"), std::string(), std::string(100'000, 'x')})
    CHECK(links.broadcast_text(links.process() == 0 ? text : "mine") == text);

  const int ranks = links.processes() * local_ranks;
  std::atomic<int> failures = 0;
  std::vector<std::thread> threads;
  for (int local = 0; local < local_ranks; ++local)
    for (int group = 0; group < 3; ++group)
      threads.emplace_back([&, local, group] {
        try {
          exchange_all(links, links.process() * local_ranks + local, ranks, group);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "process %d: %s\n", links.process(), error.what());
          ++failures;
          links.abort();
        }
      });
  for (std::thread& thread : threads) thread.join();
  if (failures > 0) _exit(1);

  try {
    links.exchange(1 << 30, links.process() * local_ranks, {0, nullptr, 0}, {0, nullptr, 0});
    throw std::logic_error("a tag that MPI does not have was not refused");
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("use fewer --local-ranks") != std::string::npos, "{}", error.what());
  }
  if (links.process() == 0) std::printf("%s: %d ranks\n", links.name().c_str(), ranks);
}

// Ends the process.
[[noreturn]] void tell(const MpiLinks& links, const std::string& directory, const std::string& seen) {
  const std::filesystem::path mine = directory + "/" + std::to_string(links.process());
  std::ofstream(mine.string() + ".new") << seen << std::endl;
  std::filesystem::rename(mine.string() + ".new", mine);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (int p = 0; p < links.processes(); ++p)
    while (!std::filesystem::exists(directory + "/" + std::to_string(p)) && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  _exit(1);
}

template <class F>
std::string caught(F&& f) {
  try {
    f();
  } catch (const PeerError&) {
    return "PeerError";
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing";
}

void test_length(int64_t out_bytes, int64_t in_bytes, const std::string& directory) {
  MpiLinks links(1, 1000);
  std::vector<char> data(static_cast<size_t>(std::max(out_bytes, in_bytes)));
  std::string seen;
  if (links.process() == 0) {
    seen = caught([&] { links.exchange(4, 0, {1, data.data(), out_bytes}, {}); });
  } else {
    std::string other;  // what a rank of another group sees
    std::thread waiting([&] { other = caught([&] { links.exchange(5, 1, {}, {0, &other, 1}); }); });
    seen = caught([&] { links.exchange(4, 1, {}, {0, data.data(), in_bytes}); });
    waiting.join();
    seen += "; " + other;
  }
  links.abort();
  tell(links, directory, seen);
}

void test_abort(const std::string& directory) {
  MpiLinks links(2);
  const int rank = links.process() * 2, other = (rank + 2) % (links.processes() * 2);
  // The peer never comes: to a message that waits for it, and to one that has arrived without it.
  std::vector<std::byte> big(8 << 20), small(8);
  std::string seen[2];
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      auto& data = i == 0 ? big : small;
      seen[i] = caught([&] {
        links.exchange(i, rank + i, {other + i, data.data(), std::ssize(data)}, {other + 1 - i, data.data(), 1});
      });
    });
  const std::clock_t clock_begin = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const double processor = static_cast<double>(std::clock() - clock_begin) / CLOCKS_PER_SEC;
  const auto begin = std::chrono::steady_clock::now();
  links.abort();
  for (std::thread& thread : threads) thread.join();
  const std::string later = caught([&] { links.exchange(0, rank, {other, big.data(), 1}, {}); });
  links.abort();  // again
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  tell(links, directory,
       formatted("{} {} {} {} {}", seen[0], seen[1], later, seconds < 10 ? "soon" : formatted("after {} s", seconds),
                 processor < 0.1 ? "asleep" : formatted("took {} s of a processor", processor)));
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    if (argc == 4 && arguments[0] == "data") test_data(std::stoi(arguments[1]), std::stoll(arguments[2]));
    else if (argc == 5 && arguments[0] == "length")
      test_length(std::stoll(arguments[1]), std::stoll(arguments[2]), arguments[3]);
    else if (argc == 3 && arguments[0] == "abort") test_abort(arguments[1]);
    else throw std::invalid_argument("see the first lines of test/mpi/exchanges.cpp");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "exchanges: %s\n", error.what());
    _exit(1);
  }
}
