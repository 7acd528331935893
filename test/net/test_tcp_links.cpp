// net/: bytes between ranks of different processes over TCP.
#include <numeric>

#include "catch2.h"
#include "helpers.h"
#include "net/processes.h"
#include "net/tcp_links.h"

using namespace llmc;

namespace {

struct Linked {
  explicit Linked(int n, int local_ranks = 1) : jobs(n, local_ranks) {
    for (int p = 0; p < n; ++p) links.push_back(std::make_unique<TcpLinks>(jobs[p]));
  }
  TcpLinks& operator[](int p) { return *links[static_cast<size_t>(p)]; }

  Jobs jobs;
  std::vector<std::unique_ptr<TcpLinks>> links;
};

std::vector<char> pattern(int seed, size_t bytes) {
  std::vector<char> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>((i * 31 + static_cast<size_t>(seed) * 7) >> 3);
  return data;
}

void require_none(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) REQUIRE(error == "");
}

}  // namespace

TEST_CASE("large messages go both ways at once, and around a ring", "[net]") {
  Linked all(3);
  const size_t bytes = 10'000'001;  // more than the buffers of sockets
  require_none(on_threads(3, [&](int p) {
    const auto out = pattern(p, bytes);
    std::vector<char> in(bytes);
    const auto size = static_cast<int64_t>(bytes);
    const int next = (p + 1) % 3, previous = (p + 2) % 3;
    for (int round = 0; round < 2; ++round) {
      all[p].exchange(0, p, {next, out.data(), size}, {previous, in.data(), size});
      CHECK(in == pattern(previous, bytes));
    }
    if (p == 2) return;
    all[p].exchange(1, p, {1 - p, out.data(), size}, {1 - p, in.data(), size});
    CHECK(in == pattern(1 - p, bytes));
  }));
}

TEST_CASE("messages of all sizes between all pairs of ranks, in many groups and threads, arrive in order", "[net]") {
  constexpr int processes = 3, local = 2, ranks = processes * local, groups = 4;
  Linked all(processes, local);
  require_none(on_threads(ranks * groups, [&](int thread) {
    const int self = thread % ranks, group = thread / ranks, process = self / local;
    for (int shift = 0; shift < ranks; ++shift)
      for (int i = 0; i < 25; ++i) {
        const int to = (self + shift) % ranks, from = (self - shift + ranks) % ranks;
        if (to / local == process && from / local == process) continue;
        const size_t bytes = static_cast<size_t>(i < 3 ? i : i * i * 40);
        const auto out = pattern(self + i, bytes);
        std::vector<char> in(bytes);
        const auto size = static_cast<int64_t>(bytes);
        const bool sends = to / local != process, receives = from / local != process;
        all[process].exchange(group, self, {sends ? to : -1, out.data(), size},
                              {receives ? from : -1, in.data(), size});
        CHECK(!receives || in == pattern(from + i, bytes));
      }
  }));
}

TEST_CASE("a rank sends although the one it receives from waits for others", "[net]") {
  Linked all(3);
  require_none(on_threads(3, [&](int p) {
    char out = 'a', in = 'b';
    if (p == 0) return all[0].exchange(0, 0, {1, &out, 1}, {2, &in, 1});  // 2 sends only after 1 has, and 1 after 0
    all[p].exchange(0, p, {}, {p - 1, &in, 1});
    all[p].exchange(0, p, {(p + 1) % 3, &out, 1}, {});
  }));
}

TEST_CASE("data may come before the receiver has its links", "[net]") {
  Jobs jobs(2);
  TcpLinks first(jobs[0]);
  const auto out = pattern(1, 1000);
  first.exchange(5, 0, {1, out.data(), 1000}, {});
  TcpLinks second(jobs[1]);
  std::vector<char> in(1000);
  second.exchange(5, 1, {}, {0, in.data(), 1000});
  REQUIRE(in == out);
}

TEST_CASE("a message of another length than expected is an error that names both", "[net]") {
  for (const int64_t expected : {0, 99, 101, 100'000}) {
    Linked all(2);
    const auto errors = on_threads(2, [&](int p) {
      std::vector<char> data(100'000);
      if (p == 0) all[0].exchange(0, 0, {1, data.data(), 100}, {});
      else all[1].exchange(0, 1, {}, {0, data.data(), expected});
    });
    REQUIRE(errors[0] == "");
    REQUIRE(errors[1] == formatted("rank 0 on {} sent 100 bytes to rank 1, which expected {}", host_name(), expected));
  }
}

TEST_CASE("abort wakes who sends, who receives and who waits for a connection, and ends what comes later", "[net]") {
  Linked all(3);
  std::vector<char> much(64 << 20);
  std::atomic<int> aborted = 0;
  require_none(on_threads(4, [&](int t) {
    char byte = 0;
    if (t == 3) {
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
      for (int p = 0; p < 3; ++p) all[p].abort();
      return;
    }
    try {
      if (t == 0) all[0].exchange(0, 0, {1, much.data(), static_cast<int64_t>(much.size())}, {});
      if (t == 1) all[1].exchange(0, 1, {}, {2, &byte, 1});  // never made
      if (t == 2) {
        all[0].exchange(1, 0, {2, &byte, 1}, {});
        all[2].exchange(1, 2, {}, {0, &byte, 1});
        all[2].exchange(1, 2, {}, {0, &byte, 1});
      }
    } catch (const PeerError&) {
      ++aborted;
    }
  }));
  REQUIRE(aborted == 3);
  REQUIRE_THROWS_AS(all[0].exchange(0, 0, {1, much.data(), 1}, {}), PeerError);
  REQUIRE_THROWS_AS(all[0].exchange(9, 0, {1, much.data(), 1}, {}), PeerError);
}

TEST_CASE("a rank that is gone in the middle of a message is named", "[net]") {
  Linked all(3);
  std::vector<char> much(64 << 20);
  const auto size = static_cast<int64_t>(much.size());
  const auto errors = on_threads(3, [&](int p) {
    char byte = 0, first = 0;
    if (p == 0) {
      all[0].exchange(0, 0, {2, &byte, 1}, {});
      all[0].exchange(0, 0, {2, much.data(), size}, {});
    }
    if (p == 1) all[1].exchange(0, 1, {}, {2, &byte, 1});
    if (p == 2) {
      all[2].exchange(0, 2, {1, &byte, 1}, {0, &first, 1});  // the connection is there, however busy this machine is
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
      all.links[2].reset();
    }
  });
  REQUIRE(errors[0].starts_with("rank 2 on " + host_name() + " has gone: "));
  REQUIRE_THROWS_AS(all[1].exchange(0, 1, {}, {2, much.data(), 1}), Error);
}

TEST_CASE("hostile connections do not disturb data", "[net]") {
  Linked all(2);
  const int port = all.jobs[0].peers()[1].port;
  require_none(on_threads(3, [&](int p) {
    if (p == 2) {
      CHECK(attack(port, 30, "--patience 0 --seed 6"), "a hostile connection was believed");
      return;
    }
    for (int group = 0; group < 60; ++group) {  // new connections all the time
      const auto out = pattern(p + group, 50'000);
      std::vector<char> in(out.size());
      all[p].exchange(group, p, {1 - p, out.data(), 50'000}, {1 - p, in.data(), 50'000});
      CHECK(in == pattern(1 - p + group, 50'000));
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
  }));
}
