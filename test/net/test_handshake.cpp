// net/: tokens, addresses, and which processes are let in.
#include <sys/stat.h>

#include <atomic>
#include <map>

#include "catch2.h"
#include "helpers.h"
#include "net/meeting/listener.h"
#include "net/processes.h"

using namespace llmc;

namespace {

Environment environment(std::map<std::string, std::string> variables) {
  return [=](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

// A door that counts its guests.
struct Door {
  Door() : Door(listen_at(resolve({"127.0.0.1", 0}).at(0))) {}
  explicit Door(Socket listening) : port(address_here(listening).endpoint().port) {
    listener = std::make_unique<Listener>(
        std::move(listening), 3, job, token,
        Listener::Guests{
            [](const Hello& hello) { return hello.numbers[0] == 666 ? Answer::complete : Answer::welcome; },
            [this](const Hello& hello, Socket, const Address&) {
              CHECK(hello.numbers[0] != 667, "nobody is at home");
              ++guests;
            }},
        lines.say());
  }
  Socket connect() const { return connect_to(resolve({"127.0.0.1", port}).at(0), Limit::seconds(5)); }
  Nonce enter(const Hello& hello, const std::string& with = token) const {
    return introduce(connect(), hello, with, "the door", Limit::seconds(5));
  }

  const Nonce job = random_nonce();
  int port;
  Lines lines;
  std::atomic<int> guests = 0;
  std::unique_ptr<Listener> listener;
};

Hello hello(int32_t number = 0) {
  return {.purpose = ConnectionPurpose::control, .to_process = 3, .numbers = {number, 0, 0}};
}

}  // namespace

TEST_CASE("HMAC-SHA256 gives the published codes", "[net]") {  // RFC 4231, cases 2 and 6
  auto text = [](const Mac& mac) {
    Nonce halves[2];
    std::memcpy(halves, mac.data(), sizeof mac);
    return hexadecimal(halves[0]) + hexadecimal(halves[1]);
  };
  REQUIRE(text(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  REQUIRE(text(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  REQUIRE(random_token() != random_token());
  REQUIRE(proof_of(Role::connecting, Answer::welcome, {}, {}, token) !=
          proof_of(Role::listening, Answer::welcome, {}, {}, token));  // so neither can be sent back
  REQUIRE(random_token().size() == 64);
}

TEST_CASE("the token comes from one variable or from a file of its owner alone", "[net]") {
  const TempDir dir;
  const std::string file = dir / "token";
  write_text_durably(file, "0123456789abcdef\n");
  ::chmod(file.c_str(), 0644);
  const auto of_file = environment({{"TRAIN_GPT_TOKEN_FILE", file}});
  REQUIRE_ERROR(read_token(of_file), "chmod 600 " + file);
  REQUIRE_ERROR(read_token(of_file), "its mode is 644");
  ::chmod(file.c_str(), 0600);
  REQUIRE(read_token(of_file) == "0123456789abcdef");
  REQUIRE(read_token(environment({})).empty());
  REQUIRE(read_token(environment({{"TRAIN_GPT_TOKEN", "0123456789abcdef"}})) == "0123456789abcdef");
  REQUIRE_ERROR(read_token(environment({{"TRAIN_GPT_TOKEN", "0123456789abcdef"}, {"TRAIN_GPT_TOKEN_FILE", file}})),
                "both set");
  REQUIRE_ERROR(read_token(environment({{"TRAIN_GPT_TOKEN", "secret"}})), "6 characters");
  REQUIRE_ERROR(read_token(environment({{"TRAIN_GPT_TOKEN", ""}})), "0 characters");
  REQUIRE_ERROR(read_token(environment({{"TRAIN_GPT_TOKEN_FILE", dir / "none"}})), "No such file");
}

TEST_CASE("addresses are HOST:PORT, IPv6 in brackets", "[net]") {
  REQUIRE(parse_endpoint("node1:29500").text() == "node1:29500");
  REQUIRE(parse_endpoint("[::1]:80").host == "::1");
  REQUIRE(parse_endpoint("[::1]:80").text() == "[::1]:80");
  for (const char* wrong : {"", "node1", "node1:", ":80", "node1:0", "node1:65536", "node1:80x", "::1:80", "node1:-1"})
    REQUIRE_ERROR(parse_endpoint(wrong), "expected HOST:PORT");
}

TEST_CASE("who knows the token is let in, and is told why if not", "[net]") {
  Door door;
  REQUIRE(door.enter(hello()) == door.job);
  Hello of_this_job = hello();
  of_this_job.job = door.job;
  REQUIRE(door.enter(of_this_job) == door.job);
  REQUIRE_ERROR(door.enter(hello(), "another token, which is as long as that"),
                "the door refused this process: its token differs");
  REQUIRE_ERROR(door.enter(hello(), ""), "set TRAIN_GPT_TOKEN");
  REQUIRE_ERROR(door.enter(hello(666)), "have met already");
  Hello elsewhere = hello();
  elsewhere.to_process = 2;
  REQUIRE_ERROR(door.enter(elsewhere), "another process of the job");
  Hello of_another_job = hello();
  of_another_job.job = random_nonce();
  REQUIRE_ERROR(door.enter(of_another_job), "another job");
  door.listener.reset();
  REQUIRE(door.guests == 2);
  REQUIRE(door.lines.contain("a connection from 127.0.0.1:"));
}

TEST_CASE("a guest whom nobody can take is refused, and the next one is let in", "[net]") {
  Door door;
  for (int i = 0; i < 3; ++i) {
    door.enter(hello(667));
    REQUIRE(door.enter(hello()) == door.job);
  }
  door.listener.reset();
  REQUIRE(door.guests == 3);
  REQUIRE(door.lines.contain("was refused: nobody is at home"));
}

TEST_CASE("a listener that does not know the token is not believed", "[net]") {
  const Socket listening = listen_at(resolve({"127.0.0.1", 0}).at(0));
  const int port = address_here(listening).endpoint().port;
  auto answered_with = [&](const std::string& text) {
    std::thread impostor([&] {
      pollfd file{listening.fd(), POLLIN, 0};
      ::poll(&file, 1, 5000);
      const Socket socket(::accept4(listening.fd(), nullptr, nullptr, SOCK_NONBLOCK));
      std::array<char, sizeof(Hello) + sizeof(Mac)> said;
      try {
        send_all(socket, text.data(), text.size(), Limit::seconds(5));
        receive_all(socket, said.data(), said.size(), Limit::seconds(5));
      } catch (const Error&) {
      }
    });
    std::string message = "welcome";
    try {
      introduce(connect_to(resolve({"127.0.0.1", port}).at(0), Limit::seconds(5)), hello(), token, "the door",
                Limit::seconds(5));
    } catch (const ConnectionError& error) {
      message = error.what();
    }
    impostor.join();
    return message;
  };
  const Reply reply;
  const Verdict welcome;  // with a proof of zeros
  std::string text(reinterpret_cast<const char*>(&reply), sizeof reply);
  text.append(reinterpret_cast<const char*>(&welcome), sizeof welcome);
  REQUIRE(answered_with(text) == "what listens there does not know the job's token");
  REQUIRE(answered_with("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n..") ==
          "what listens there is not train_gpt");
}

TEST_CASE("hostile connections of all kinds are refused, and do not keep others out", "[net]") {
  Door door;
  std::atomic<bool> attacked = false;
  int entered = 0;
  const auto errors = on_threads(2, [&](int i) {
    if (i == 0) {
      const bool good = attack(door.port, 60, "--patience 0", "TRAIN_GPT_TOKEN='" + token + "'");
      attacked = true;
      CHECK(good, "a hostile connection was believed");
    }
    while (!attacked) {
      door.enter(hello());
      ++entered;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  REQUIRE(errors == std::vector<std::string>(2));
  door.listener.reset();
  REQUIRE(door.guests == entered);
  const std::string text = door.lines.text();
  INFO(text);
  const auto lines = std::count(text.begin(), text.end(), '\n');
  REQUIRE(lines >= 1);
  REQUIRE(lines < 6);  // not one for each
}

TEST_CASE("connections that say nothing are bounded, and leave room for one that speaks", "[net]") {
  Door door;
  const size_t before = entries("/proc/self/fd");
  std::vector<Socket> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(door.connect());
  REQUIRE(door.enter(hello()) == door.job);
  REQUIRE(entries("/proc/self/fd") <= before + 200 + Listener::most_strangers);
  REQUIRE(door.lines.contain("there were too many at the same time"));
}

TEST_CASE("a process without file descriptors to spare lets the next one in when it has", "[net]") {
  Door door;
  const Socket first = door.connect();
  std::vector<Socket> all;
  {
    const FewOpenFiles few(entries("/proc/self/fd") + 20);
    for (int fd; (fd = ::dup(first.fd())) >= 0;) all.emplace_back(fd);
    all.pop_back();  // for the connecting side, which the other one may precede
    const Socket second = [&] {
      for (int left = 1000;; --left) try {
          return door.connect();
        } catch (const Error&) {
          if (left == 0) throw;
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    }();
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    all.clear();
  }
  REQUIRE(
      door.lines.contain("no connection can be accepted, so that they wait: Too many open files; raise `ulimit -n`"));
  REQUIRE(door.enter(hello()) == door.job);
}

TEST_CASE("hostile connections are closed after a few seconds", "[net][long]") {
  Door door;
  REQUIRE(attack(door.port, 500, "--seed 2 --at-once 100", "TRAIN_GPT_TOKEN='" + token + "'"));
  REQUIRE(attack(door.port, 100, "--seed 3 --at-once 50"));
  door.listener.reset();
  REQUIRE(door.guests == 0);
}
