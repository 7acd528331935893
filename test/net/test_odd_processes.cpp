// net/: odd, late and hostile processes at the rendezvous: they are rejected or named, and do no harm.
#include <latch>

#include "catch2.h"
#include "net/meetings.h"

using namespace llmc;

TEST_CASE("process 0 that goes during the meeting is missed at once", "[net]") {
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
  REQUIRE(seconds < 15);
}

TEST_CASE("who meets the others and then says nothing is named with its host on all of them", "[net]") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  std::atomic<int> waiting = 3;
  const auto errors = on_threads(4, [&](int p) {
    if (p < 3) {
      const std::shared_ptr<void> ended(nullptr, [&](void*) { --waiting; });
      const ControlPlane job(greeting(p, 4), at(where, lines, p == 0 ? 3 : 20));  // that of process 0 counts
      return;
    }
    const Odd silent(where, lines, 3, 4);
    for (int i = 0; i < 10000 && waiting > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  require_all({errors.begin(), errors.begin() + 3}, "no answer within 3 s from rank 3 on elsewhere");
}

TEST_CASE("a door without room for the first try of a process is tried again", "[net]") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  std::atomic<int> guests = 0;
  std::latch met(2);
  const auto errors = on_threads(3, [&](int p) {
    if (p != 1) {
      std::shared_ptr<void> meets(nullptr, [&](void*) { met.count_down(); });
      const ControlPlane job(greeting(p, 3), at(where, lines));
      meets.reset();
      return;
    }
    Socket listening = listen_everywhere(0);
    Odd deputy(where, lines, 1, 3, address_here(listening).endpoint().port);
    pollfd coming{listening.fd(), POLLIN, 0};
    ::poll(&coming, 1, 5000);
    Socket(::accept4(listening.fd(), nullptr, nullptr, SOCK_NONBLOCK));  // and closed
    const Listener door(
        std::move(listening), 1, deputy.reached.job, token,
        {[](const Hello&) { return Answer::welcome; },
         // Who loses a line asks whether this process is alive.
         [&](const Hello& hello, Socket, const Address&) { guests += hello.purpose != ConnectionPurpose::question; }},
        lines.say());
    deputy.say({Kind::text, {"deputy", ""}});
    met.wait();
  });
  INFO(errors[0] + " / " + errors[1] + " / " + errors[2]);
  REQUIRE(guests == 1);
  REQUIRE(errors[0] == "");
  REQUIRE(errors[1] == "");
}

TEST_CASE("who says nothing is sent no more boards than its buffers hold, and further ones once it speaks", "[net]") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  std::unique_ptr<ControlPlane> job;
  std::thread meets([&] { job = std::make_unique<ControlPlane>(greeting(0, 2), at(where, lines)); });
  std::atomic<int> boards = 0, beats = 0;
  Control* speaks = nullptr;
  Control control({[&](int line, const Message& message) {
                     boards += message.kind == Kind::board, beats += message.kind == Kind::beat;
                     if (message.kind == Kind::verdict) speaks->send(line, {Kind::text, {"deputy", ""}});
                   },
                   [](int, const std::string&) {}});
  speaks = &control;
  const Introduction it{protocol_version, greeting(1, 2), {1, "elsewhere", "", "", 1}};
  const int line = control.add(reach_process_0(at(where, lines), 1).socket);
  control.send(line, {Kind::greeting, it.parts()});
  meets.join();
  const auto post = [&](size_t bytes) { job->post({std::string(bytes, 'x')}), job->beat(); };
  for (int i = 0; i < 200; ++i) post(3000);
  for (const Limit limit = Limit::seconds(20); (boards == 0 || beats == 0) && !limit.passed();)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  REQUIRE((boards > 0 && boards < 10));
  REQUIRE((beats > 0 && beats < 10));
  control.send(line, {Kind::beat, {}});
  const int before = boards;
  for (const Limit limit = Limit::seconds(20); boards == before;) {
    post(100'000);  // one that is larger than the buffers is still sent
    REQUIRE(!limit.passed());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST_CASE("what the others have said is heard before it is noticed that some are gone", "[net]") {
  const Socket listening = listen_at(resolve({"127.0.0.1", 0}).at(0));
  std::vector<std::string> heard;
  std::latch stopped(1), go_on(1), done(1);
  const auto said = [&](int line, const std::string& what) {
    heard.push_back(formatted("{}: {}", line, what));
    if (what == "stop") stopped.count_down(), go_on.wait();
    if (heard.size() == 4) done.count_down();
  };
  Control control({[&](int line, const Message& message) { said(line, message.parts.at(0)); }, said});
  std::vector<Socket> others;
  for (int i = 0; i < 3; ++i) {
    control.add(connect_to(address_here(listening), Limit::seconds(5)));
    others.emplace_back(::accept4(listening.fd(), nullptr, nullptr, SOCK_NONBLOCK));
  }
  const auto say = [&](size_t line, const std::string& what) {
    const std::string text = Message{Kind::fault, {what}}.encoded();
    send_all(others[line], text.data(), text.size(), Limit::seconds(5));
  };
  say(1, "stop");  // as if the process were stopped
  stopped.wait();
  say(2, "why"), say(0, "a consequence");
  others[0] = Socket();
  go_on.count_down();
  done.wait();
  REQUIRE(heard.back() == formatted("0: {}", Socket::closed));
}

TEST_CASE("numbers and messages that no process of this job can say change nothing", "[net]") {
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

TEST_CASE("another version of the protocol is refused on all", "[net]") {
  const TempDir dir;
  Lines lines;
  const std::string where = "file:" + dir / "meeting";
  const auto errors = on_threads(3, [&](int p) {
    if (p < 2) {
      Rendezvous there = at(where, lines);
      there.patience = 10;  // all come
      const ControlPlane job(greeting(p, 3), std::move(there));
      return;
    }
    std::string told;
    std::atomic<bool> done = false;
    Control control(
        {[&](int, Message message) { told = message.parts.at(0), done = true; }, [](int, const std::string&) {}});
    Introduction it{protocol_version + 1, greeting(2, 3), {2, "elsewhere", "", "", 1}};
    control.send(control.add(reach_process_0(at(where, lines), 2).socket), {1, it.parts()});
    while (!done) std::this_thread::yield();
    throw Error(told);
  });
  require_all(errors, formatted("the protocol version differs: {} on ranks 0 and 1, {} on rank 2", protocol_version,
                                protocol_version + 1));
}

TEST_CASE("a process with another token or none is refused, and the others wait for the real one", "[net]") {
  const std::string where = formatted("127.0.0.1:{}", free_port());
  Lines lines;
  std::latch refused(2);
  const auto errors = on_threads(4, [&](int p) {
    Rendezvous there = at(where, lines);
    if (p == 1) refused.wait();  // once all have come, nobody else is let in
    if (p == 2) there.token = "a token of somebody else's tests";
    if (p == 3) there.token = "";
    const std::shared_ptr<void> told(nullptr, [&](void*) {
      if (p >= 2) refused.count_down();
    });
    const ControlPlane job(greeting(p == 0 ? 0 : 1, 2), std::move(there));
  });
  REQUIRE(errors[0] == "");
  REQUIRE(errors[1] == "");
  REQUIRE(errors[2] == formatted("the rendezvous at {} refused this process: its token differs", where));
  REQUIRE(errors[3].starts_with(formatted("the rendezvous at {} refused this process: it has no token: set ", where)));
  REQUIRE(lines.contain("its token differs"));
}

TEST_CASE("without a token, processes meet on a loopback address only", "[net]") {
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

TEST_CASE("what an earlier run left in the file is not believed", "[net]") {
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
  REQUIRE_ERROR(ControlPlane(greeting(1, 2), at("file:" + path, lines, 2)), "what listens there is another job");
}

TEST_CASE("strangers and late processes do not disturb a job that has begun", "[net]") {
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

TEST_CASE("hostile connections during the rendezvous are refused, and the job begins", "[net]") {
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
