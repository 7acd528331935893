// net/: random changes of what processes say to each other, each a function of FUZZ_SEED and a number: the handshake,
// control messages in both directions, boards of the watchdog, frames of TCP links. Whoever does not know the token
// harms nobody. Whoever does can end a job, but only by an error: nothing crashes, hangs, or takes memory.
#include <sys/resource.h>

#include <csignal>
#include <fstream>

#include "catch2.h"
#include "comm/host_group.h"
#include "fuzz/mutations.h"
#include "net/recordings.h"
#include "net/tcp_links.h"

using namespace llmc;

namespace {

constexpr int64_t most_memory = int64_t{256}
                                << 20;  // more than threads and buffers of a job, less than one hostile size

// Kilobytes of this process: VmRSS now, or VmHWM, the most since reset_peak().
int64_t kilobytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1));
  return 0;
}
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

// Changes of recorded conversations.
class Changes {
 public:
  Changes(uint64_t seed, const std::string& target, uint64_t number)
      : mutation_(seed, target, number), rng_(seed, target + ", which"), at_(number << 20) {}

  uint64_t below(uint64_t n) { return rng_.bits(at_++) % n; }
  std::string of(const std::string& bytes) { return mutation_.of(bytes, Content::binary); }
  // As bytes: some are changed as such; mostly a message, or its place among the others, so that it has its right form.
  std::string of(std::vector<Message> all) {
    if (below(4) == 0) return of(encoded(all));
    for (uint64_t changes = 1 + below(3); changes > 0 && !all.empty(); --changes) {
      Message& one = all[below(all.size())];
      const size_t part = below(one.parts.size() + 1);
      switch (below(7)) {
        case 0: one.kind = static_cast<uint32_t>(below(14)); break;
        case 1: std::swap(one, all[below(all.size())]); break;
        case 2: all.insert(all.begin() + static_cast<ptrdiff_t>(below(all.size())), Message(one)); break;
        case 3: all.erase(all.begin() + (&one - all.data())); break;
        case 4:
          one.parts.insert(one.parts.begin() + static_cast<ptrdiff_t>(part), mutation_.of("7", Content::text));
          break;
        case 5:
          if (part < one.parts.size()) one.parts.erase(one.parts.begin() + static_cast<ptrdiff_t>(part));
          break;
        default:
          if (part < one.parts.size()) one.parts[part] = mutation_.of(one.parts[part], Content::text);
      }
    }
    return encoded(all);
  }

 private:
  static std::string encoded(const std::vector<Message>& all) {
    std::string bytes;
    for (const Message& m : all) try {
        bytes += m.encoded();
      } catch (const Error&) {  // too long to be sent
      }
    return bytes;
  }

  Mutation mutation_;
  Philox rng_;
  uint64_t at_;
};

// Process 0 listens before any other looks for it.
struct MeetingPoint {
  Socket listening = listen_at(resolve({"127.0.0.1", 0}).at(0));
  int port = address_here(listening).endpoint().port;
  Rendezvous at(int process, Lines& lines, double init_timeout = 20) {
    Rendezvous there = ::at(formatted("127.0.0.1:{}", port), lines, init_timeout);
    if (process == 0) there.listening = std::move(listening);
    return there;
  }
};

// Sends what the other side takes within a moment, then reads until it closes or says nothing more.
void pour(const Socket& socket, const std::string& bytes, double seconds) try {
  send_all(socket, bytes.data(), bytes.size(), Limit::seconds(seconds));
  char byte;
  for (const Limit limit = Limit::seconds(seconds); !limit.passed();) receive_all(socket, &byte, 1, limit);
} catch (const Error&) {
}
template <class T>
T as(const std::string& bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
  return value;
}
template <class T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// A connection to a port that says a changed hello, then a proof for it under this token, changed perhaps, then more.
void connect_oddly(int port, const Recording& recorded, Changes& changes, const std::string& its_token) try {
  const Socket socket = connect_to(resolve({"127.0.0.1", port}).at(0), Limit::seconds(5));
  Hello hello = as<Hello>(recorded.hello);
  hello.nonce = random_nonce();
  hello.purpose = static_cast<ConnectionPurpose>(1 + changes.below(4));
  hello.to_process = static_cast<int32_t>(changes.below(3));
  std::string said = bytes_of(hello);
  if (changes.below(3) > 0) said = changes.of(said);
  send_all(socket, said.data(), said.size(), Limit::seconds(1));
  Reply reply;
  receive_all(socket, &reply, sizeof reply, Limit::seconds(0.05));
  std::string rest = bytes_of(proof_of(Role::connecting, Answer::welcome, as<Hello>(said), reply, its_token));
  if (changes.below(3) == 0) rest = changes.of(rest);
  pour(socket, rest + changes.of(recorded.of_member), 0.005);
} catch (const Error&) {
}

// What honest processes do in a job with an odd one: exchange texts, and judge what they have heard.
void take_part(ControlPlane& job) {
  job.connect(job.process() == 0 ? 1 : 0, ConnectionPurpose::question, {job.process(), 0, 0}, Limit::seconds(0.2));
  KnownMembers known;
  for (const char* topic : {"options", "weights"}) {
    job.post(parts_of({RankState()}));
    job.beat();
    job.all_gather(topic, "text", 0.1);
    std::vector<Seen> seen(3);
    for (const auto& [process, parts] : job.take_posts().first) try {
        seen.at(static_cast<size_t>(process)).state = ranks_from(parts, known).at(0);
      } catch (const std::exception&) {  // as Watchdog::judge()
      }
    const NameOfRank name = [&](int rank) { return job.name_of_rank(rank); };
    Judge(seen, {.init = 0.4, .comm = 0.4}, name).verdict();
    straggler(seen, name);
    job.take_heard();
  }
}

// ---- The targets: who says what is changed. Each plays one change, and returns what is wrong.
// -------------------------

struct Target {
  const char* name;
  std::function<std::string(const Recording&, Changes&)> play;
};

const std::string another_kind = "an exception of another kind: ";

// Honest processes end without an error, or with one that a person can read.
std::atomic<int64_t> harmless = 0;  // conversations after which no process had an error
std::string fault_of(const std::vector<std::string>& errors) {
  harmless += std::all_of(errors.begin(), errors.end(), [](const std::string& error) { return error.empty(); });
  for (const std::string& error : errors)
    if (error.size() > 20'000 || error.starts_with(another_kind)) return "an error reads: " + shown(error, 300);
  return "";
}
// f(): an honest process, whose only exceptions are those of the program.
template <class F>
void honestly(F&& f) {
  try {
    f();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(another_kind + error.what());
  }
}

// A stranger knocks at the doors of processes 0 and 1 of a job while it meets and works.
std::string stranger(const Recording& recorded, Changes& changes) {
  Lines lines;
  MeetingPoint meeting;
  const int port = meeting.port;
  const auto errors = on_threads(3, [&](int p) {
    if (p == 2) {  // to a door that is open already, or not any more
      for (int i = 0; i < 8; ++i) connect_oddly(port, recorded, changes, "a token of somebody else");
      return;
    }
    ControlPlane job(greeting(p, 2), meeting.at(p, lines));
    if (p == 0) connect_oddly(job.peers()[1].port, recorded, changes, "");
    for (int i = 0; i < 20; ++i) job.barrier("a step");
  });
  for (const std::string& error : errors)
    if (!error.empty()) return "a stranger has harmed the job: " + error;
  return fault_of(errors);
}

// One that knows the token connects for any purpose, in any name.
std::string acquaintance(const Recording& recorded, Changes& changes) {
  Lines lines;
  MeetingPoint meeting;
  const int port = meeting.port;
  return fault_of(on_threads(3, [&](int p) {
    honestly([&] {
      if (p == 2) {
        for (int i = 0; i < 4; ++i) connect_oddly(port, recorded, changes, token);
        return;
      }
      ControlPlane job(greeting(p, 2), meeting.at(p, lines, 0.3));
      if (p == 0) connect_oddly(job.peers()[1].port, recorded, changes, token);
      take_part(job);
    });
  }));
}

// Process 2 says changed messages to processes 0 and 1.
std::string member(const Recording& recorded, Changes& changes) {
  Lines lines;
  MeetingPoint meeting;
  std::vector<Message> after_greeting = recorded.of_member;
  const bool whole = changes.below(2) == 0;
  if (whole) after_greeting.erase(after_greeting.begin());
  const std::string said = changes.of(after_greeting), to_deputy = changes.of(recorded.of_member);
  return fault_of(on_threads(3, [&](int p) {
    honestly([&] {
      if (p < 2) {
        ControlPlane job(greeting(p, 3), meeting.at(p, lines, 0.3));
        return take_part(job);
      }
      const Reached reached = reach_process_0(meeting.at(p, lines, 0.3), 2);
      const std::string first = whole ? recorded.of_member[0].encoded() : "";
      send_all(reached.socket, first.data(), first.size(), Limit::seconds(1));
      std::string heard;  // until the verdict, which says where process 1 is
      std::array<char, 4096> buffer;
      const iovec in{buffer.data(), buffer.size()};
      Message verdict;
      for (const Limit limit = Limit::seconds(0.2); whole && !verdict.decode_from(heard) && !limit.passed();)
        if (const size_t n = reached.socket.receive_some(&in, 1)) heard.append(buffer.data(), n);
        else std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::optional<Socket> deputy;
      if (verdict.parts.size() >= 10) {
        deputy = connect_to(resolve({"127.0.0.1", std::atoi(verdict.parts[9].c_str())}).at(0), Limit::seconds(1));
        introduce(*deputy,
                  {.purpose = ConnectionPurpose::control, .to_process = 1, .numbers = {2, 0, 0}, .job = reached.job},
                  token, "process 1", Limit::seconds(1));
      }
      pour(reached.socket, said, 0.02);
      if (deputy) pour(*deputy, to_deputy, 0.02);
    });
  }));
}

// What listens at the rendezvous answers oddly, or knows the token and then says changed messages.
std::string head(const Recording& recorded, Changes& changes) {
  Lines lines;
  const Socket listening = listen_at(resolve({"127.0.0.1", 0}).at(0));
  const std::string where = formatted("127.0.0.1:{}", address_here(listening).endpoint().port);
  const bool answers = changes.below(3) > 0;
  const std::string said = changes.of(recorded.of_process_0);
  return fault_of(on_threads(2, [&](int p) {
    honestly([&] {
      if (p == 1) {
        ControlPlane job(greeting(2, 3), at(where, lines, 0.2));
        return take_part(job);
      }
      pollfd coming{listening.fd(), POLLIN, 0};
      if (::poll(&coming, 1, 1000) != 1) return;
      const Socket socket(::accept4(listening.fd(), nullptr, nullptr, SOCK_NONBLOCK));
      Hello hello;
      receive_all(socket, &hello, sizeof hello, Limit::seconds(1));
      Reply us;
      us.job = us.nonce = random_nonce();
      const std::string reply = answers ? bytes_of(us) : changes.of(bytes_of(us));
      send_all(socket, reply.data(), reply.size(), Limit::seconds(1));
      if (!answers && changes.below(2) == 0) return;
      Mac proof;
      receive_all(socket, &proof, sizeof proof, Limit::seconds(0.1));
      Verdict verdict;
      if (!answers) verdict.answer = static_cast<Answer>(changes.below(10));
      verdict.proof = proof_of(Role::listening, verdict.answer, hello, as<Reply>(reply), token);
      const std::string answer = answers ? bytes_of(verdict) : changes.of(bytes_of(verdict));
      send_all(socket, answer.data(), answer.size(), Limit::seconds(1));
      pour(socket, said, 0.02);
    });
  }));
}

// Rank 0 of two, which are processes.
struct RankZero final : Transport {
  explicit RankZero(Links& between) : links(between) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void exchange(const ToRank& out, const FromRank& in, Stream*) override { links.exchange(0, 0, out, in); }
  Links& links;
};

// A rank of process 1 sends changed frames, and texts, to a rank of process 0.
std::string frames(const Recording&, Changes& changes) {
  Lines lines;
  MeetingPoint meeting;
  const auto frame = [](const std::string& bytes) { return bytes_of(uint64_t{bytes.size()}) + bytes; };
  const auto text = [&](const std::string& bytes) { return frame(bytes_of(uint64_t{bytes.size()})) + frame(bytes); };
  const std::string numbers(40, '\1');
  const std::string said = changes.of(frame(numbers) + text("options") + text("of process 1"));
  return fault_of(on_threads(2, [&](int p) {
    honestly([&] {
      ControlPlane job(greeting(p, 2), meeting.at(p, lines, 0.3));
      if (p == 1) {
        const Socket socket = job.connect(0, ConnectionPurpose::data, {0, 1, 0}, Limit::seconds(1));
        return pour(socket, said, 0.02);
      }
      TcpLinks links(job);
      std::thread limit([&] {  // as the watchdog would
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        links.abort();
      });
      const std::shared_ptr<void> joined(nullptr, [&](void*) { limit.join(); });
      std::string received(numbers.size(), '\0');
      links.exchange(0, 0, {}, {1, received.data(), std::ssize(received)});
      HostGroup("control", std::make_shared<CountingTransport>(std::make_unique<RankZero>(links)))
          .gather_text(0, "options", "of process 0");
    });
  }));
}

const Target targets[] = {{"strangers", stranger},
                          {"known strangers", acquaintance},
                          {"messages to processes 0 and 1", member},
                          {"messages of process 0", head},
                          {"frames of TCP links", frames}};

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::stoull(text) : otherwise;
}

// So many changes for each target. In the environment, FUZZ_TARGET is the name of one, FUZZ_SEED takes other changes,
// FUZZ_NUMBER repeats one of them, and FUZZ_SECONDS goes on for so long.
void fuzz(uint64_t count) {
  constexpr uint64_t all = ~uint64_t{0};
  const uint64_t seed = number_from("FUZZ_SEED", 1), one = number_from("FUZZ_NUMBER", all),
                 seconds = number_from("FUZZ_SECONDS", 0);
  constexpr int at_once = 8;  // most of the time is waiting
  const Recording recorded = Recording::make();
  REQUIRE(recorded.of_member.size() >= 5);     // greeting, two texts, boards
  REQUIRE(recorded.of_process_0.size() >= 5);  // verdict, texts of three topics, beats
  std::string wrong;
  const char* const only = std::getenv("FUZZ_TARGET");
  for (const Target& target : targets) {
    if (only != nullptr && std::string(only) != target.name) continue;
    std::mutex mutex;
    std::atomic<uint64_t> next = one < all ? one : 0;
    const uint64_t end = one < all ? one + 1 : seconds > 0 ? uint64_t{1} << 40 : count;
    const Limit limit = seconds > 0 ? Limit::seconds(static_cast<double>(seconds)) : Limit();
    harmless = 0;
    reset_peak();
    const int64_t before = kilobytes("VmRSS");
    on_threads(one < all ? 1 : at_once, [&](int) {
      for (uint64_t number = next++; number < end && !limit.passed(); number = next++) {
        Changes changes(seed, target.name, number);
        const auto begin = std::chrono::steady_clock::now();
        std::string found = target.play(recorded, changes);
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        if (took > 60) found += formatted(" took {:.0f} s", took);
        if (found.empty()) continue;
        const std::lock_guard lock(mutex);
        wrong += formatted("{}, FUZZ_SEED={} FUZZ_NUMBER={}: {}\n", target.name, seed, number, found);
      }
    });
    const int64_t peak = kilobytes("VmHWM") - before;
    if (peak * 1024 > most_memory) wrong += formatted("{}: {} MiB\n", target.name, peak >> 10);
    if (seconds > 0)
      std::printf("%-30s %8llu changes, %lld of them harmless, %lld MiB\n", target.name,
                  static_cast<unsigned long long>(std::min(next.load(), end)), static_cast<long long>(harmless.load()),
                  static_cast<long long>(peak >> 10));
  }
  INFO(wrong);
  REQUIRE(wrong.empty());
}

}  // namespace

TEST_CASE("changed conversations of each protocol harm nobody, or end the job by an error", "[net]") { fuzz(40); }
TEST_CASE("a thousand changed conversations of each protocol", "[net][long]") { fuzz(1000); }
