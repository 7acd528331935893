// net/: processes meet, agree and talk, or all learn why they cannot.
#include <linux/filter.h>
#include <sys/wait.h>

#include <atomic>
#include <latch>

#include "catch2.h"
#include "net/meetings.h"

using namespace llmc;

TEST_CASE("processes meet, know each other, and gather texts by topic", "[net]") {
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
      const std::vector<std::string> large = job.all_gather("large", std::string(400'000 + 200'000 * p, 'x'));
      for (int q = 0; q < 4; ++q) CHECK(large.at(static_cast<size_t>(q)) == std::string(400'000 + 200'000 * q, 'x'));
      job.barrier("the end");
    });
    require_all(errors, "");
    REQUIRE_ERROR(jobs[1].all_gather("too long", std::string(2 << 20, 'x')), "too long");
  }
  REQUIRE(entries("/proc/self/fd") == files);
  REQUIRE(entries("/proc/self/task") == threads);
}

TEST_CASE("the process whose text is too long is to blame, process 0 included", "[net]") {
  for (const int longer : {0, 1}) {
    Jobs jobs(2);
    const auto errors = on_threads(2, [&](int p) {
      if (p != longer) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      try {
        jobs[p].all_gather("a topic", std::string(p == longer ? 2 << 20 : 1, 'x'));
      } catch (const PeerError&) {
        throw;
      } catch (const Error& error) {
        jobs[p].report_failure({formatted("process {}: {}", p, error.what())});
        throw;
      }
    });
    for (int p = 0; p < 2; ++p) {
      INFO(errors[static_cast<size_t>(p)]);
      REQUIRE(errors[static_cast<size_t>(p)].starts_with(p == longer ? "a message of "
                                                                     : formatted("process {}: ", longer)));
      REQUIRE(errors[static_cast<size_t>(p)].find("is too long for another process") != std::string::npos);
    }
  }
}

TEST_CASE("what one message cannot hold goes in several", "[net]") {
  const std::vector<std::string> head = {"a topic", ""};
  std::vector<std::string> rest;
  for (size_t i = 0; i < 120; ++i) rest.emplace_back(i * i % 11, static_cast<char>('a' + i % 26));
  for (const size_t together : {1, 3, 4, 200})
    for (const size_t most : {110, 111, 112, 113, 500, 1 << 20}) {
      INFO(together << " at a time, " << most << " bytes");
      const std::vector<Message> pieces = in_pieces(7, head, rest, together, most);
      std::vector<std::string> all;
      for (size_t i = 0; i < pieces.size(); ++i) {
        const std::vector<std::string>& parts = pieces[i].parts;
        REQUIRE((pieces[i].kind == 7 && std::vector(parts.begin(), parts.begin() + 2) == head));
        all.insert(all.end(), parts.begin() + 2, parts.end());
        REQUIRE(all.size() % together == (i + 1 == pieces.size() ? rest.size() % together : 0));
        REQUIRE((pieces[i].encoded().size() <= most || together == 200));
        if (i == 0) continue;
        Message fuller = pieces[i - 1];  // with what comes next, it would be too long
        fuller.parts.insert(fuller.parts.end(), parts.begin() + 2,
                            parts.begin() + 2 + std::ssize(std::span(parts).subspan(2).first(together)));
        REQUIRE(fuller.encoded().size() > most);
      }
      REQUIRE(all == rest);
    }
  REQUIRE(in_pieces(7, head, {}).size() == 1);
  REQUIRE(in_pieces(7, head, {})[0].parts == head);

  std::vector<Peer> peers, told;
  for (int p = 0; p < 30'000; ++p)
    peers.push_back({p, formatted("host{}", p), formatted("host{} {}", p, std::string(36, 'b')), "10.0.0.1", 1 + p});
  std::string bytes;
  const std::vector<Message> pieces = in_pieces(Kind::verdict, Fault{}.parts(), parts_of(peers), parts_of_a_peer);
  REQUIRE(pieces.size() > 1);
  for (const Message& piece : pieces) bytes += piece.encoded();
  for (Message piece; piece.decode_from(bytes);) add_peers(told, std::span(piece.parts).subspan(2));
  REQUIRE(told.size() == peers.size());
  for (size_t p = 0; p < peers.size(); ++p)
    REQUIRE((told[p].process == peers[p].process && told[p].host == peers[p].host &&
             told[p].machine == peers[p].machine && told[p].address == peers[p].address &&
             told[p].port == peers[p].port));
}

TEST_CASE("processes that one message cannot describe are told of in several", "[net]") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  const auto machine = [](int p) { return std::string(600'000, static_cast<char>('a' + p)); };
  std::latch met(2);
  std::atomic<int> pieces = 0;
  const auto errors = on_threads(4, [&](int p) {
    if (p < 2) {
      const std::shared_ptr<void> meets(nullptr, [&](void*) { met.count_down(); });
      const ControlPlane job(greeting(p, 4), at(where, lines));
      for (const int q : {2, 3}) CHECK(job.peers().at(static_cast<size_t>(q)).machine == machine(q));
      CHECK(job.name_of_rank(3) == "rank 3 on elsewhere");
      return;
    }
    size_t known = 0;
    Control* speaks = nullptr;
    Control control({[&](int line, const Message& message) {
                       if (message.kind != Kind::verdict) return;
                       ++pieces;
                       known += (message.parts.size() - 2) / parts_of_a_peer;
                       if (known == 4) speaks->send(line, {Kind::text, {"deputy", ""}});
                     },
                     [](int, const std::string&) {}});
    speaks = &control;
    const Introduction it{protocol_version, greeting(p, 4), {p, "elsewhere", machine(p), "", 1}};
    control.send(control.add(reach_process_0(at(where, lines), p).socket), {Kind::greeting, it.parts()});
    met.wait();
  });
  require_all(errors, "");
  REQUIRE(pieces == 4);
}

TEST_CASE("processes meet at an address of either family, whoever comes first", "[net]") {
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

TEST_CASE("process 0 may listen before the others know where", "[net]") {
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

TEST_CASE("a job of one process needs nobody", "[net]") {
  Lines lines;
  ControlPlane job(greeting(0, 1), at("", lines));
  REQUIRE(job.all_gather("topic", "text") == std::vector<std::string>{"text"});
  REQUIRE(job.local_processes() == 1);
}

TEST_CASE("options, builds and sizes that differ are refused on all processes, with both values", "[net]") {
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
  REQUIRE(seconds < 9);
}

TEST_CASE("a process whose command line was refused tells all others", "[net]") {
  for (const int refused : {0, 1, 2})
    require_all(meet(3,
                     [&](int p, Greeting& it) {
                       if (p == refused) it.agree = {{refusal, "--lr 'x': expected a number"}};
                     }),
                formatted("rank {} on {}: --lr 'x': expected a number", refused, host_name()));
}

TEST_CASE("values that differ everywhere are not all listed", "[net]") {
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

TEST_CASE("whether thousands of processes have met is known at once, after each of them", "[net]") {
  constexpr int n = 10'000;
  Lines lines;
  const auto it = [](int p) { return Introduction{protocol_version, greeting(p, n), {p, "elsewhere", "", "", 1}}; };
  const double seconds = seconds_of([&] {
    Meeting meeting(it(0), at("here", lines, 1000));
    for (int p = n - 1; p > 0; --p) {  // not in order
      REQUIRE(!meeting.verdict());
      meeting.arrive(p, it(p));
    }
    REQUIRE((meeting.verdict() && !meeting.verdict()->known()));
    REQUIRE(meeting.peers().size() == n);
    REQUIRE(meeting.line_of(n / 2) == n / 2);
    meeting.arrive(n, it(7));
    REQUIRE(meeting.verdict()->why.starts_with("two processes say that they are rank 7 of the job at here"));
  });
  REQUIRE(seconds < 60);  // less than one
}

TEST_CASE("a difference is told before all have come, and to those who come later", "[net]") {
  const TempDir dir;
  Lines lines;
  std::atomic<bool> told = false;
  const auto errors = on_threads(3, [&](int p) {
    Rendezvous there = at("file:" + dir / "meeting", lines);
    if (p == 0) there.patience = 3;
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

TEST_CASE("a number that two processes have is refused on all", "[net]") {
  const auto errors = meet(4, [](int p, Greeting& it) { it.process = p == 3 ? 1 : p; });
  for (const std::string& error : errors) {
    REQUIRE(error == errors[0]);
    REQUIRE(error.starts_with("two processes say that they are rank 1 of the job at file:"));
  }
}

TEST_CASE("processes that do not come are named on all that have", "[net]") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  const auto errors = on_threads(
      3, [&](int p) { const ControlPlane job(greeting(p == 2 ? 4 : p, 6), at(where, lines, p == 0 ? 6 : 20)); });
  require_all(errors, formatted("ranks 2, 3 and 5 have not arrived at {} within 6 s (--init-timeout)", where));
  REQUIRE(lines.contain("waiting for ranks 2, 3 and 5 of 6 at " + where));
}

TEST_CASE("a process that connects and then says nothing is missing, and its address is told", "[net]") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  std::string from;
  const auto errors = on_threads(3, [&](int p) {
    if (p < 2) {
      const ControlPlane job(greeting(p, 3), at(where, lines, p == 0 ? 12 : 40));
      return;
    }
    while (!lines.contain("waiting for rank 2 of 3 at " + where))  // after 3 s; the next time after 9
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const Reached silent = reach_process_0(at(where, lines), 2);
    from = address_here(silent.socket).endpoint().host;
    char end;
    const iovec all{&end, 1};
    while (silent.socket.receive_some(&all, 1) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  const std::string but =
      formatted("; from {} a process has connected, but what it sends next does not arrive: {}", from, same_mtu);
  for (const int p : {0, 1})
    REQUIRE(errors[static_cast<size_t>(p)] ==
            formatted("rank 2 has not arrived at {} within 12 s (--init-timeout){}", where, but));
  REQUIRE(lines.contain(formatted("waiting for rank 2 of 3 at {}{}", where, but)));
}

TEST_CASE("a process whose messages process 0 does not get says so", "[long][net]") {
  const TempDir dir;
  Lines lines;
  Socket listening = listen_at(resolve({"127.0.0.1", 0}).at(0));
  const Nonce job = random_nonce();
  const MeetingFile file(dir / "meeting", address_here(listening).endpoint(), job);
  std::optional<Socket> deaf;
  const Listener door(std::move(listening), 0, job, token,
                      Listener::Guests{[](const Hello&) { return Answer::welcome; },
                                       [&](const Hello&, Socket socket, const Address&) {
                                         sock_filter drops = BPF_STMT(BPF_RET | BPF_K, 0);
                                         const sock_fprog all{1, &drops};
                                         detail::set_option(socket, SOL_SOCKET, SO_ATTACH_FILTER, all);
                                         deaf = std::move(socket);
                                       }},
                      lines.say());
  const std::string where = "file:" + dir / "meeting";
  const auto errors = on_threads(1, [&](int) { const ControlPlane job(greeting(1, 2), at(where, lines, 100)); });
  REQUIRE(errors[0] == formatted("the rendezvous at {} {}", where, end_before_all_met(std::strerror(ETIMEDOUT))));
}

TEST_CASE("a process that ends while others arrive is named at once", "[net]") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  std::latch has_ended(1);
  const double seconds = seconds_of([&] {
    const auto errors = on_threads(4, [&](int p) {
      if (p == 3) has_ended.wait();
      if (p != 2) {
        Rendezvous there = at(where, lines);
        there.patience = 10;  // all come
        const ControlPlane job(greeting(p, 4), std::move(there));
        return;
      }
      const std::shared_ptr<void> ends(nullptr, [&](void*) { has_ended.count_down(); });
      Control control({[](int, Message) {}, [](int, const std::string&) {}});
      Introduction it{protocol_version, greeting(2, 4), {2, "elsewhere", "", "", 1}};
      control.send(control.add(reach_process_0(at(where, lines), 2).socket), {1, it.parts()});
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    });
    REQUIRE(errors[0] == formatted("rank 2 on elsewhere has ended before all had met at {}", where));
    for (const int p : {1, 3}) REQUIRE(errors[static_cast<size_t>(p)] == errors[0]);
  });
  REQUIRE(seconds < 9);
}

TEST_CASE("a process that cannot reach the rendezvous says where it looked and what it found", "[net]") {
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
                "does another run use this port, and is ");
  // A host's addresses: one that is another machine's (RFC 5737) is passed over, one whose port is in use is not.
  const std::vector<Address> own = resolve({"127.0.0.1", 0}), busy = resolve({"127.0.0.1", port}),
                             other = resolve({"192.0.2.1", 0});
  REQUIRE(address_here(listen_at_any_of({other[0], own[0]})).is_loopback());
  REQUIRE_ERROR(listen_at_any_of({busy[0], own[0]}), "Address already in use");
}

TEST_CASE("a process that does not reach the rendezvous says what it found together with where", "[net]") {
  Lines lines;
  const TempDir dir;
  const std::string path = dir / "meeting", nobody = formatted("127.0.0.1:{}", free_port());
  write_text_durably(path, formatted("train_gpt rendezvous\n{}\n{}\n", nobody, std::string(32, '0')));
  const auto errors = on_threads(2, [&](int i) {
    if (i == 0) ControlPlane(greeting(1, 2), at("file:" + path, lines, 0.2));
    std::this_thread::sleep_for(std::chrono::milliseconds(170));  // before the last attempt
    ::unlink(path.c_str());
  });
  INFO(errors[0]);
  const bool names = errors[0].find(", which names " + nobody) != std::string::npos;
  REQUIRE(names == (errors[0].find("Connection refused") != std::string::npos));
}

TEST_CASE("while a process is stopped, its time to meet the others does not run", "[net]") {
  constexpr double init_timeout = 4;
  const TempDir dir;
  const std::array<std::string, 2> where = {"file:" + dir / "of 0", "file:" + dir / "of 1"};  // two jobs
  std::array<pid_t, 2> stopped{};
  for (int p = 0; p < 2; ++p)
    if ((stopped[static_cast<size_t>(p)] = ::fork()) == 0) {
      try {
        Lines its;
        ControlPlane(greeting(p, 2), at(where[static_cast<size_t>(p)], its, init_timeout)).barrier("here");
        ::_exit(0);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "process %d: %s\n", p, error.what());
        ::_exit(1);
      }
    }
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  for (const pid_t pid : stopped) ::kill(pid, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::duration<double>(init_timeout + 0.1));
  for (const pid_t pid : stopped) ::kill(pid, SIGCONT);
  Lines lines;
  const auto errors = on_threads(2, [&](int job) {  // the other process of each job
    ControlPlane(greeting(1 - job, 2), at(where[static_cast<size_t>(job)], lines)).barrier("here");
  });
  for (const pid_t pid : stopped) {
    int status = -1;
    REQUIRE(::waitpid(pid, &status, 0) == pid);
    REQUIRE(status == 0);
  }
  require_all(errors, "");
}

TEST_CASE("a process that is gone is named on all others", "[net]") {
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

TEST_CASE("nobody waits for a process that has ended, process 0 included", "[net]") {
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

TEST_CASE("a cut control connection is named by both of its ends, and by all others, in the same words", "[net]") {
  for (int round = 0; round < 24; ++round) {
    Jobs jobs(2 + round % 3);
    const int n = jobs.size(), judge = n > 2 && round % 4 == 3 ? 1 : 0;
    const auto errors = on_threads(n + 1, [&](int p) {
      if (p < n)
        for (int i = 0;; ++i) jobs[p].barrier(formatted("number {}", i));
      std::this_thread::sleep_for(std::chrono::milliseconds(3 * round));
      std::vector<int> ends;  // of connections with the judge
      for (int fd = 3; fd < 1024; ++fd) {
        sockaddr_storage there{};
        socklen_t size = sizeof there;
        if (getpeername(fd, reinterpret_cast<sockaddr*>(&there), &size) != 0) continue;
        const int port = ntohs(there.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(there).sin6_port
                                                           : reinterpret_cast<sockaddr_in&>(there).sin_port);
        if (port == jobs[0].peers()[static_cast<size_t>(judge)].port) ends.push_back(fd);
      }
      CHECK(!ends.empty());
      ::shutdown(ends[static_cast<size_t>(round) % ends.size()], SHUT_RDWR);
    });
    std::set<std::string> expected;
    for (int p = judge + 1; p < n; ++p)
      expected.insert(formatted("the connection between process {} ({}) and process {} ({}) was cut", judge,
                                host_name(), p, host_name()));
    INFO("round " << round << ": " << errors[0]);
    REQUIRE(expected.count(errors[0]) == 1);
    for (int p = 1; p < n; ++p) REQUIRE(errors[static_cast<size_t>(p)] == errors[0]);
  }
}
