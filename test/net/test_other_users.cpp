// net/: without a token, processes of other users on the same machine are kept out of a job.
#include <sys/stat.h>

#include <chrono>
#include <sstream>

#include "catch2.h"
#include "helpers.h"
#include "net/meeting/handshake.h"
#include "net/meetings.h"
#include "net/processes.h"
#include "net/tcp_links.h"

using namespace llmc;

namespace {

constexpr int other_user = 12345;  // of nobody here

bool can_be_others() {
  if (::geteuid() == 0) return true;
  WARN("skipped: only root can act as another user");
  return false;
}
Rendezvous without_token(const std::string& where, Lines& lines, double init_timeout = 20) {
  Rendezvous there = at(where, lines, init_timeout);
  there.token = "";
  return there;
}
bool attack_as_other(int port, int to, int count) {
  return attack(
      port, count,
      formatted("--patience 25 --at-once 4 --seed {} --other-user {} --to {} --ranks 3", port, other_user, to));
}

}  // namespace

TEST_CASE("the owner of a socket is read from the tables of Linux", "[net]") {
  const Address v4 = resolve({"127.0.0.1", 5000}).at(0), v6 = resolve({"::1", 5000}).at(0);
  const bool little = std::endian::native == std::endian::little;
  REQUIRE(detail::table_text(v4) == (little ? "0100007F:1388" : "7F000001:1388"));
  REQUIRE(detail::table_text(v6) == std::string(24, '0') + (little ? "01000000" : "00000001") + ":1388");
  const std::string row =
      "   {}: A:1 B:2 {} 00000000:00000000 00:00000000 00000000  {}        0 {} 1 0 20 4 30 10 -1\n";
  const auto owner = [&](const std::string& state, int user, int inode) {
    std::istringstream table("  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n" +
                             formatted(row, 17, state, user, inode));
    return detail::owner_in_table(table, "A:1", "B:2");
  };
  REQUIRE(owner("01", 1000, 77) == 1000u);
  REQUIRE(!owner("01", 0, 0));   // closed, and so of nobody
  REQUIRE(!owner("05", 0, 77));  // about to be
  REQUIRE(!owner("06", 1000, 0));
  std::istringstream other_way(formatted(row, 1, "01", 1000, 77));
  REQUIRE(!detail::owner_in_table(other_way, "B:2", "A:1"));
}

TEST_CASE("both ends of a connection within a process are this user's, until one is closed", "[net]") {
  for (const char* host : {"127.0.0.1", "::1"}) {
    const Socket listening = listen_at(resolve({host, 0}).at(0));
    Socket one = connect_to(address_here(listening), Limit::seconds(5));
    pollfd file{listening.fd(), POLLIN, 0};
    ::poll(&file, 1, 5000);
    const Socket other(::accept4(listening.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    REQUIRE(other_end_is_ours(one) == true);
    REQUIRE(other_end_is_ours(other) == true);
    one = Socket();
    REQUIRE(other_end_is_ours(other) == std::nullopt);
  }
}

TEST_CASE("without a token, another user can neither join a job nor disturb or blame its processes", "[net]") {
  if (!can_be_others()) return;
  Lines lines;
  const int port = free_port();
  std::atomic<int> met = 0;
  std::atomic<bool> attacked = false;
  std::array<std::unique_ptr<ControlPlane>, 3> jobs;
  const auto errors = on_threads(4, [&](int p) {
    if (p < 3) {
      // Before the others have come: a stranger who took the place of one would keep it out.
      if (p > 0)
        while (!attacked) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      jobs[static_cast<size_t>(p)] =
          std::make_unique<ControlPlane>(greeting(p, 3), without_token(formatted("127.0.0.1:{}", port), lines));
      ++met;
      return;
    }
    connect_when_ready(port);
    const bool refused = attack_as_other(port, 0, 12);
    attacked = true;
    CHECK(refused, "another user was believed");
  });
  require_all(errors, "");

  std::vector<std::unique_ptr<TcpLinks>> links;
  for (const auto& job : jobs) links.push_back(std::make_unique<TcpLinks>(*job));
  std::atomic<int> attacks = 0;
  require_all(on_threads(6,
                         [&](int i) {
                           if (i >= 3) {
                             const int p = i - 3;
                             const bool refused = attack_as_other(jobs[0]->peers()[static_cast<size_t>(p)].port, p, 12);
                             ++attacks;
                             CHECK(refused, "another user was believed");
                             return;
                           }
                           // In the groups that they name, too, and only then connections are made.
                           while (attacks < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
                           for (int group = 0; group < 3; ++group) {
                             const std::string out(1000, static_cast<char>('a' + i));
                             std::string in(1000, ' ');
                             links[static_cast<size_t>(i)]->exchange(group, i, {(i + 1) % 3, out.data(), 1000},
                                                                     {(i + 2) % 3, in.data(), 1000});
                             CHECK(in == std::string(1000, static_cast<char>('a' + (i + 2) % 3)));
                           }
                           jobs[static_cast<size_t>(i)]->barrier("the end");
                         }),
              "");
  REQUIRE((lines.contain("it is a process of another user, and the job has no token: set TRAIN_GPT_TOKEN") ||
           lines.contain("its user is unknown")));
  links.clear();
  on_threads(3, [&](int p) { jobs[static_cast<size_t>(p)].reset(); });
}

TEST_CASE("without a token, another user's process 0 is not believed", "[net]") {
  if (!can_be_others()) return;
  const int port = free_port();
  Lines lines;
  std::thread impostor([&] {
    // Answers as process 0 would up to the proof, which this process does not give.
    const std::string program = formatted(
        "import os, socket\n"
        "os.setuid({})\n"
        "s = socket.create_server((\"127.0.0.1\", {}))\n"
        "s.settimeout(10)\n"
        "while True:\n"
        "  c = s.accept()[0]\n"
        "  if c.recv(64) == b\"end\": break\n"
        "  c.sendall(b\"traingpt\" + bytes([{}, 0, 0, 0]) + bytes(36))\n"
        "  c.settimeout(5)\n"
        "  try:\n"
        "    if c.recv(64): os._exit(1)\n"
        "  except ConnectionResetError: pass\n",
        other_user, port, protocol_version);
    CHECK(std::system(formatted("python3 -c '{}'", program).c_str()) == 0);
  });
  connect_when_ready(port);
  REQUIRE_ERROR(ControlPlane(greeting(1, 2), without_token(formatted("127.0.0.1:{}", port), lines, 3)),
                "what listens there is a process of another user; set TRAIN_GPT_TOKEN");
  const Socket last = connect_when_ready(port);
  send_all(last, "end", 3, Limit::seconds(5));
  impostor.join();
}
