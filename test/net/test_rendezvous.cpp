// net/: processes meet, agree and talk, or all learn why they cannot.
#include <atomic>
#include <chrono>

#include "catch2.h"
#include "helpers.h"
#include "net/processes.h"

using namespace llmc;

namespace {

double seconds_of(const std::function<void()>& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Processes meet, each with what change(process, greeting) makes of its greeting; the error of each.
std::vector<std::string> meet(int n, const std::function<void(int, Greeting&)>& change, double init_timeout = 20) {
  const TempDir dir;
  Lines lines;
  return on_threads(n, [&](int p) {
    Greeting it = greeting(p, n);
    change(p, it);
    const ControlPlane job(it, at("file:" + dir / "meeting", lines, init_timeout));
  });
}
void require_all(const std::vector<std::string>& errors, const std::string& expected) {
  for (const std::string& error : errors) REQUIRE(error == expected);
}

// A process that says what it likes: it has reached process 0, and introduced itself with this number.
struct Odd {
  Odd(const std::string& where, Lines& lines, int process, int processes, int port = 1)
      : reached(reach_process_0(at(where, lines), process)),
        control({[](int, const Message&) {}, [](int, const std::string&) {}}),
        line(control.add(std::move(reached.socket))) {
    say({Kind::board, {"before the greeting"}});
    introduce(process, processes, port);
  }
  void introduce(int process, int processes, int port) {
    const Introduction it{protocol_version, greeting(process, processes), {process, "elsewhere", "", "", port}};
    say({Kind::greeting, it.parts()});
  }
  void say(const Message& message) { control.send(line, message); }

  Reached reached;
  Control control;
  int line;
};

Socket connect_when_ready(int port) {
  for (;;) try {
      return connect_to(resolve({"127.0.0.1", port}).at(0), Limit::seconds(5));
    } catch (const ConnectionError&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
}

}  // namespace

TEST_CASE("processes meet, know each other, and gather texts by topic") {
  const size_t files = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  {
    Jobs jobs(4, 2);
    const auto errors = on_threads(4, [&](int p) {
      ControlPlane& job = jobs[p];
      CHECK(job.process() == p && job.processes() == 4 && job.local_ranks() == 2);
      CHECK(job.local_process() == p && job.local_processes() == 4);  // all on one machine
      CHECK(job.peers().at(3).process == 3 && job.peers()[3].host == host_name());
      CHECK(job.name_of_rank(7) == "rank 7 on " + host_name());
      const std::string binary("\0\xff\n", 3);
      for (int round = 0; round < 20; ++round) {
        const auto texts = job.all_gather("a topic", formatted("{}.{}", p, round) + binary);
        for (int q = 0; q < 4; ++q) CHECK(texts.at(static_cast<size_t>(q)) == formatted("{}.{}", q, round) + binary);
      }
      // Several threads, topics in another order on each process.
      const auto inner = on_threads(3, [&](int t) {
        const std::string topic = formatted("topic {}", (t + p) % 3);
        const auto texts = job.all_gather(topic, topic + std::string(100'000, 'x'));
        for (const std::string& text : texts) CHECK(text.starts_with(topic) && text.size() == 100'007);
      });
      for (const std::string& error : inner) CHECK(error.empty(), "{}", error);
      job.barrier("the end");
    });
    require_all(errors, "");
    REQUIRE_ERROR(jobs[1].all_gather("too long", std::string(2 << 20, 'x')), "too long");
  }
  REQUIRE(entries("/proc/self/fd") == files);
  REQUIRE(entries("/proc/self/task") == threads);
}

TEST_CASE("processes meet at an address of either family, whoever comes first") {
  for (const std::string host : {"127.0.0.1", "localhost", "[::1]", "*"}) {
    const int port = free_port();
    const std::string where = formatted("{}:{}", host == "*" ? host_name() : host, port);
    if (host == "*") {  // a machine need not know its own name
      try {
        resolve({host_name(), 1});
      } catch (const Error&) {
        continue;
      }
    }
    INFO(where);
    Lines lines;
    const auto errors = on_threads(3, [&](int p) {
      if (p == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ControlPlane job(greeting(p, 3), at(where, lines));
      CHECK(job.all_gather("hello", std::to_string(p)) == std::vector<std::string>({"0", "1", "2"}));
    });
    require_all(errors, "");
    EXPECT(lines.text().empty());
  }
}

TEST_CASE("process 0 may listen before the others know where") {
  auto [socket, endpoint] = listen_anywhere(token, "127.0.0.1");
  Lines lines;
  const auto errors = on_threads(2, [&, &socket = socket, &endpoint = endpoint](int p) {
    Rendezvous there = at(endpoint.text(), lines);
    if (p == 0) there.listening = std::move(socket);
    ControlPlane job(greeting(p, 2), std::move(there));
    job.barrier("here");
  });
  require_all(errors, "");
}

TEST_CASE("a job of one process needs nobody") {
  Lines lines;
  ControlPlane job(greeting(0, 1), at("", lines));
  REQUIRE(job.all_gather("topic", "text") == std::vector<std::string>{"text"});
  REQUIRE(job.local_processes() == 1);
}

TEST_CASE("options, builds and sizes that differ are refused on all processes, with both values") {
  require_all(meet(4, [](int p, Greeting& it) { it.agree[0].second = p == 3 ? "0.0003" : "0.001"; }),
              "--lr differs: 0.001 on ranks 0-2, 0.0003 on rank 3");
  require_all(meet(3, [](int p, Greeting& it) { it.build = p == 1 ? "new" : "old"; }),
              "the build differs: old on ranks 0 and 2, new on rank 1");
  require_all(meet(2, [](int p, Greeting& it) { it.local_ranks = 1 + p; }),
              "--local-ranks differs: 1 on rank 0, 2 on rank 1");
  require_all(meet(2,
                   [](int p, Greeting& it) {
                     if (p == 1) it.agree.emplace_back("--new", "");
                   }),
              "--new differs: not known on rank 0, \"\" on rank 1");
  double seconds = 0;
  std::vector<std::string> errors;
  seconds = seconds_of(
      [&] { errors = meet(3, [](int p, Greeting& it) { it.processes = p == 1 ? 4 : 3, it.local_ranks = 2; }); });
  require_all(errors, "--world-size differs: 3 on processes 0 and 2, 4 on process 1");
  REQUIRE(seconds < 5);
}

TEST_CASE("a process whose command line was refused tells all others") {
  for (const int refused : {0, 1, 2})
    require_all(meet(3,
                     [&](int p, Greeting& it) {
                       if (p == refused) it.agree = {{refusal, "--lr 'x': expected a number"}};
                     }),
                formatted("rank {} on {}: --lr 'x': expected a number", refused, host_name()));
}

TEST_CASE("process 0 that goes during the meeting is missed at once") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  Socket listening = listen_at(resolve({"127.0.0.1", 0}).at(0));
  const Nonce job = random_nonce();
  const MeetingFile file(dir / "meeting", address_here(listening).endpoint(), job);
  std::optional<Socket> line;
  std::atomic<bool> come = false;
  auto door = std::make_unique<Listener>(
      std::move(listening), 0, job, token,
      Listener::Guests{[](const Hello&) { return Answer::welcome; },
                       [&](const Hello&, Socket socket, const Address&) { line = std::move(socket), come = true; }},
      lines.say());
  const double seconds = seconds_of([&] {
    const auto errors = on_threads(2, [&](int i) {
      if (i == 0) ControlPlane(greeting(2, 3), at(where, lines));
      while (!come) std::this_thread::yield();
      door.reset(), line.reset();
    });
    REQUIRE(errors[0] ==
            formatted("the rendezvous at {} has ended before all processes had met; see what process 0 says", where));
  });
  REQUIRE(seconds < 5);
}

TEST_CASE("values that differ everywhere are not all listed") {
  std::vector<Introduction> all;
  for (int p = 0; p < 12; ++p) {
    Greeting it = greeting(p, 12);
    it.agree = {{"--seed", std::to_string(p / 2 * 100)}};
    all.push_back({static_cast<int>(protocol_version), it, {}});
  }
  REQUIRE(disagreement(all) ==
          "--seed differs: 0 on ranks 0 and 1, 100 on ranks 2 and 3, 200 on ranks 4 and 5, 300 on ranks 6 and 7, and 2 "
          "more values");
  REQUIRE(named({5, 1, 0, 2, 7, 8}, 1) == "ranks 0-2, 5, 7 and 8");
  for (Introduction& it : all) it.greeting.agree.clear();
  REQUIRE(disagreement(all).empty());
  for (int option = 0; option < 6; ++option)
    for (Introduction& it : all)
      it.greeting.agree.emplace_back(formatted("--{}", option), it.greeting.process == 3 ? "a" : "b");
  REQUIRE(disagreement(all).ends_with("--3 differs: b on ranks 0-2 and 4-11, a on rank 3; and 2 more"));
}

TEST_CASE("a difference is told before all have come, and to those who come later") {
  const TempDir dir;
  Lines lines;
  std::atomic<bool> told = false;
  const auto errors = on_threads(3, [&](int p) {
    Rendezvous there = at("file:" + dir / "meeting", lines);
    if (p == 0) there.patience = 0.4;
    while (p == 2 && !told) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Greeting it = greeting(p, 3);
    it.agree[1].second = std::to_string(p);
    try {
      const ControlPlane job(it, std::move(there));
    } catch (const Error&) {
      told = true;
      throw;
    }
  });
  require_all(errors, "--seed differs: 0 on rank 0, 1 on rank 1");
}

TEST_CASE("a number that two processes have is refused on all") {
  const auto errors = meet(4, [](int p, Greeting& it) { it.process = p == 3 ? 1 : p; });
  for (const std::string& error : errors) {
    REQUIRE(error == errors[0]);
    REQUIRE(error.starts_with("two processes say that they are rank 1 of the job at file:"));
  }
}

TEST_CASE("processes that do not come are named on all that have") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  const auto errors =
      on_threads(3, [&](int p) { const ControlPlane job(greeting(p == 2 ? 4 : p, 6), at(where, lines, 0.25)); });
  require_all(errors, formatted("ranks 2, 3 and 5 have not arrived at {} within 0.25 s (--init-timeout)", where));
  REQUIRE(lines.contain("waiting for ranks 2, 3 and 5 of 6 at " + where));
}

TEST_CASE("a process that ends while others arrive is named at once") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  const double seconds = seconds_of([&] {
    const auto errors = on_threads(3, [&](int p) {
      if (p < 2) {
        const ControlPlane job(greeting(p, 4), at(where, lines));
        return;
      }
      Control control({[](int, Message) {}, [](int, const std::string&) {}});
      Introduction it{1, greeting(2, 4), {2, "elsewhere", "", "", 1}};
      control.send(control.add(reach_process_0(at(where, lines), 2).socket), {1, it.parts()});
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    });
    REQUIRE(errors[0] == formatted("rank 2 on elsewhere has ended before all had met at {}", where));
    REQUIRE(errors[1] == errors[0]);
  });
  REQUIRE(seconds < 5);
}

TEST_CASE("who meets the others and then says nothing is named with its host on all of them") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  const auto errors = on_threads(4, [&](int p) {
    if (p < 3) return (void)ControlPlane(greeting(p, 4), at(where, lines, 0.4));
    const Odd silent(where, lines, 3, 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(900));
  });
  require_all({errors.begin(), errors.begin() + 3}, "no answer within 0.4 s from rank 3 on elsewhere");
}

TEST_CASE("a door without room for the first try of a process is tried again") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  std::atomic<int> guests = 0;
  const auto errors = on_threads(3, [&](int p) {
    if (p != 1) {
      const ControlPlane job(greeting(p, 3), at(where, lines));
      while (guests == 0) std::this_thread::yield();
      return;
    }
    Socket listening = listen_everywhere(0);
    Odd deputy(where, lines, 1, 3, address_here(listening).endpoint().port);
    pollfd coming{listening.fd(), POLLIN, 0};
    ::poll(&coming, 1, 5000);
    Socket(::accept4(listening.fd(), nullptr, nullptr, SOCK_NONBLOCK));  // and closed
    const Listener door(
        std::move(listening), 1, deputy.reached.job, token,
        {[](const Hello&) { return Answer::welcome; }, [&](const Hello&, Socket, const Address&) { ++guests; }},
        lines.say());
    deputy.say({Kind::text, {"deputy", ""}});
    for (int i = 0; i < 5000 && guests == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  });
  INFO(errors[0] + " / " + errors[1] + " / " + errors[2]);
  REQUIRE(guests == 1);
  REQUIRE(errors[0] == "");
  REQUIRE(errors[1] == "");
}

TEST_CASE("numbers and messages that no process of this job can say change nothing") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  std::unique_ptr<Odd> odd[2];
  std::vector<std::unique_ptr<ControlPlane>> jobs(3);
  const auto errors = on_threads(3, [&](int p) {
    if (p == 2) {
      odd[0] = std::make_unique<Odd>(where, lines, 7, 3);
      odd[1] = std::make_unique<Odd>(where, lines, -1, 3);
      for (auto& it : odd)
        for (const uint32_t kind : {2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 10u, 0u}) it->say({kind, {"a", "b"}});
    }
    jobs[static_cast<size_t>(p)] = std::make_unique<ControlPlane>(greeting(p, 3), at(where, lines));
  });
  require_all(errors, "");
  const auto enter = [&](int process, ConnectionPurpose purpose, const std::array<int32_t, 3>& numbers) {
    return jobs[2]->connect(process, purpose, numbers, Limit::seconds(5));
  };
  for (const int32_t number : {-1, 0, 1, 3, 1 << 30})
    REQUIRE_ERROR(enter(1, ConnectionPurpose::control, {number, 0, 0}), "it looks for another process of the job");
  for (const auto& numbers :
       std::vector<std::array<int32_t, 3>>{{-1, 0, 1}, {0, -1, 1}, {0, 3, 1}, {0, 0, 2}, {0, 0, -1}})
    REQUIRE_ERROR(enter(1, ConnectionPurpose::data, numbers), "it looks for another process of the job");
  enter(1, ConnectionPurpose::data, {0, 0, 1});
  REQUIRE(jobs[0]->take_posts().first.empty());
  const auto after = on_threads(3, [&](int p) { jobs[static_cast<size_t>(p)]->barrier("still here"); });
  require_all(after, "");
  on_threads(3, [&](int p) { jobs[static_cast<size_t>(p)].reset(); });
}

TEST_CASE("another version of the protocol is refused on all") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  const auto errors = on_threads(3, [&](int p) {
    if (p < 2) {
      const ControlPlane job(greeting(p, 3), at(where, lines));
      return;
    }
    std::string told;
    std::atomic<bool> done = false;
    Control control(
        {[&](int, Message message) { told = message.parts.at(0), done = true; }, [](int, const std::string&) {}});
    Introduction it{2, greeting(2, 3), {2, "elsewhere", "", "", 1}};
    control.send(control.add(reach_process_0(at(where, lines), 2).socket), {1, it.parts()});
    while (!done) std::this_thread::yield();
    throw Error(told);
  });
  require_all(errors, "the protocol version differs: 1 on ranks 0 and 1, 2 on rank 2");
}

TEST_CASE("a process with another token or none is refused, and the others wait for the real one") {
  const std::string where = formatted("127.0.0.1:{}", free_port());
  Lines lines;
  const auto errors = on_threads(4, [&](int p) {
    Rendezvous there = at(where, lines);
    if (p == 1) std::this_thread::sleep_for(std::chrono::milliseconds(80));
    if (p == 2) there.token = "a token of somebody else's tests";
    if (p == 3) there.token = "";
    const ControlPlane job(greeting(p == 0 ? 0 : 1, 2), std::move(there));
  });
  REQUIRE(errors[0] == "");
  REQUIRE(errors[1] == "");
  REQUIRE(errors[2] == formatted("the rendezvous at {} refused this process: its token differs", where));
  REQUIRE(errors[3].starts_with(formatted("the rendezvous at {} refused this process: it has no token: set ", where)));
  REQUIRE(lines.contain("its token differs"));
}

TEST_CASE("without a token, processes meet on a loopback address only") {
  Lines lines;
  const TempDir dir;
  for (const std::string& where : {formatted("127.0.0.1:{}", free_port()), "file:" + dir / "meeting"}) {
    require_all(on_threads(2,
                           [&](int p) {
                             Rendezvous there = at(where, lines);
                             there.token = "";
                             ControlPlane(greeting(p, 2), std::move(there)).barrier("here");
                           }),
                "");
    REQUIRE(lines.contain("notice: without a token (TRAIN_GPT_TOKEN)"));
  }
  // RFC 5737: nobody's. A file may be an earlier job's, and is looked at again.
  const std::string file = dir / "meeting";
  write_text_durably(file, formatted("train_gpt rendezvous\n192.0.2.1:29500\n{}\n", std::string(32, '0')));
  Rendezvous elsewhere = at("file:" + file, lines, 0.1);
  elsewhere.token = "";
  REQUIRE_ERROR(ControlPlane(greeting(1, 2), std::move(elsewhere)),
                "192.0.2.1:29500 can be reached from other machines");
  const auto errors = on_threads(2, [&](int p) {
    Rendezvous there = at("192.0.2.1:29500", lines);
    there.token = "";
    ControlPlane(greeting(p, 2), std::move(there));
  });
  for (const std::string& error : errors)
    for (const char* part : {"192.0.2.1:29500", "TRAIN_GPT_TOKEN_FILE", "head -c 32 /dev/urandom"})
      REQUIRE(error.find(part) != std::string::npos);
}

TEST_CASE("what an earlier run left in the file is not believed") {
  const TempDir dir;
  const std::string path = dir / "meeting";
  Lines lines;
  Jobs other(2);  // a job that lives, with the same token, to whose port the old file happens to lead
  const Socket silent = listen_at(resolve({"127.0.0.1", 0}).at(0));
  const std::string job(32, '0');
  const std::string leftovers[] = {
      "", "garbage\n", formatted("train_gpt rendezvous\n127.0.0.1:{}\n{}\n", free_port(), job),
      formatted("train_gpt rendezvous\n127.0.0.1:{}\n{}\n", other[0].peers()[0].port, job + "0").substr(0, 40),
      formatted("train_gpt rendezvous\n{}:{}\n{}\n", other[1].peers()[0].address, other[1].peers()[0].port,
                std::string(32, '1'))};
  for (const std::string& left : leftovers) {
    INFO(left);
    write_text_durably(path, left);
    const auto errors = on_threads(2, [&](int p) {
      if (p == 0) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      ControlPlane(greeting(p, 2), at("file:" + path, lines)).barrier("here");
    });
    require_all(errors, "");
    REQUIRE(!path_exists(path));  // all have met
    REQUIRE(entries(dir.path()) == 0);
  }
  write_text_durably(path, leftovers[4]);
  REQUIRE_ERROR(ControlPlane(greeting(1, 2), at("file:" + path, lines, 0.12)),
                formatted("the rendezvous at file:{}, which names {}:{}, has not been reached within 0.12 s", path,
                          other[1].peers()[0].address, other[1].peers()[0].port));
  REQUIRE_ERROR(ControlPlane(greeting(1, 2), at("file:" + path, lines, 0.12)), "what listens there is another job");
}

TEST_CASE("a process that cannot reach the rendezvous says where it looked and what it found") {
  Lines lines;
  const TempDir dir;
  const std::string where = formatted("127.0.0.1:{}", free_port());
  REQUIRE_ERROR(
      ControlPlane(greeting(1, 2), at(where, lines, 0.12)),
      "the rendezvous at " + where + " has not been reached within 0.12 s (--init-timeout): Connection refused");
  REQUIRE(lines.contain("waiting for the rendezvous at " + where + ": Connection refused"));
  REQUIRE_ERROR(ControlPlane(greeting(1, 2), at("file:" + dir / "none", lines, 0.12)), "No such file");
  REQUIRE_ERROR(ControlPlane(greeting(1, 2), at("no.such.host.invalid:80", lines, 0.12)),
                "cannot find host no.such.host.invalid");
  REQUIRE_ERROR(ControlPlane(greeting(0, 2), at("file:" + dir / "none/here", lines)), "No such file");
  const Socket taken = listen_everywhere(0);
  const int port = address_here(taken).endpoint().port;
  REQUIRE_ERROR(ControlPlane(greeting(0, 2), at(formatted("localhost:{}", port), lines)),
                "does another run use this port?");
}

TEST_CASE("strangers and late processes do not disturb a job that has begun") {
  Jobs jobs(3);
  const int port = jobs[0].peers()[0].port;
  const auto errors = on_threads(5, [&](int p) {
    if (p < 3)
      for (int i = 0; i < 200; ++i) jobs[p].barrier("a step");
    if (p == 3) CHECK(attack(port, 30, "--patience 0 --seed 4"), "a hostile connection was believed");
    if (p == 4) {
      Lines lines;
      const ControlPlane job(greeting(1, 3), at(formatted("127.0.0.1:{}", port), lines));
    }
  });
  for (int p = 0; p < 4; ++p) REQUIRE(errors[static_cast<size_t>(p)] == "");
  REQUIRE(errors[4] ==
          formatted("the rendezvous at 127.0.0.1:{} refused this process: all processes of the job have met "
                    "already; is another run using the same address?",
                    port));
}

TEST_CASE("hostile connections during the rendezvous are refused, and the job begins") {
  Lines lines;
  const int port = free_port();
  std::atomic<bool> attacked = false;
  const auto errors = on_threads(3, [&](int p) {
    if (p == 2) {
      connect_when_ready(port);
      const bool good = attack(port, 40, "--patience 0 --seed 5");
      attacked = true;
      CHECK(good, "a hostile connection was believed");
      return;
    }
    while (p == 1 && !attacked) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ControlPlane(greeting(p, 2), at(formatted("127.0.0.1:{}", port), lines)).barrier("here");
  });
  require_all(errors, "");
  REQUIRE(lines.contain("was refused"));
}

TEST_CASE("a process that is gone is named on all others") {
  Jobs jobs(4);
  for (const int gone : {2}) {
    const auto errors = on_threads(4, [&](int p) {
      if (p == gone) {
        jobs[p].abort();  // and so says no farewell
        REQUIRE_THROWS_AS(jobs[p].barrier("never"), PeerError);
        jobs.jobs[static_cast<size_t>(p)].reset();
        return;
      }
      jobs[p].barrier("never");
    });
    for (int p = 0; p < 4; ++p)
      if (p != gone)
        REQUIRE(errors[static_cast<size_t>(p)].starts_with(formatted("rank {} on {} has gone: ", gone, host_name())));
  }
}

TEST_CASE("nobody waits for a process that has ended, process 0 included") {
  for (const int first : {0, 1, 2}) {
    Jobs jobs(3);
    const auto errors = on_threads(3, [&](int p) {
      jobs[p].barrier("together");
      if (p != first) return jobs[p].barrier("once more");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the others wait already
      jobs.jobs[static_cast<size_t>(p)].reset();
    });
    for (int p = 0; p < 3; ++p)
      if (p != first)
        REQUIRE(errors[static_cast<size_t>(p)] ==
                formatted("rank {} on {} has ended while others wait for it at \"once more\"", first, host_name()));
  }
}
