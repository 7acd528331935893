// handshake.h: how two processes of a job prove to each other that they know its token, without showing it:
//
//   connecting -> listening   hello    64 bytes   who and what for, a nonce
//   listening -> connecting   reply    48 bytes   the job, a nonce
//   connecting -> listening   proof    32 bytes   HMAC-SHA256 of (role, answer, hello, reply) under the token
//   listening -> connecting   answer   36 bytes   welcome or why not, and the same for the other role
//
// Both nonces are fresh, so a recording proves nothing later; the role is part of the proof, so what one side says
// cannot be sent back to it. Numbers are little-endian. These messages never change, so that processes of different
// versions can tell each other that they differ; `version` is that of everything that follows. What follows is neither
// encrypted nor signed: the token keeps out strangers and mistakes, but hides nothing from anyone who controls the
// network.
//
// Without a token, both sides also check that a process of the same user owns the other end. Linux lists the sockets of
// a network namespace, and so of its loopback addresses, with their owners (proc(5): /proc/net/tcp, /proc/net/tcp6).
#pragma once
#include <fstream>
#include <sstream>

#include "net/meeting/secret.h"
#include "net/wire/socket.h"

namespace llmc {

namespace detail {

// An address as such a table shows it: words of 32 bits as this machine stores them, then the port.
inline std::string table_text(const Address& address) {
  const bool v4 = address.family() == AF_INET;
  const auto* bytes = v4 ? reinterpret_cast<const char*>(&address.v4().sin_addr)
                         : reinterpret_cast<const char*>(&address.v6().sin6_addr);
  std::string text;
  for (size_t at = 0; at < (v4 ? 4 : 16); at += 4) {
    uint32_t word = 0;
    std::memcpy(&word, bytes + at, sizeof word);
    text += printf_string("%08X", word);
  }
  return text + printf_string(":%04X", static_cast<unsigned>(address.endpoint().port));
}

// The owner of the established socket from `local` to `remote`; none: there is no such socket. One that its process has
// closed is listed with user 0 and counts for nobody.
inline std::optional<uid_t> owner_in_table(std::istream& table, const std::string& local, const std::string& remote) {
  std::string line, number, from, to, state, skipped;
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    int64_t user = -1, inode = 0;
    fields >> number >> from >> to >> state >> skipped >> skipped >> skipped >> user >> skipped >> inode;
    if (fields && from == local && to == remote && state == "01" && inode != 0) return static_cast<uid_t>(user);
  }
  return std::nullopt;
}

constexpr const char* or_set_a_token =
    "set TRAIN_GPT_TOKEN to the same value for all processes of the job; `head -c 32 /dev/urandom | base64` makes one";

}  // namespace detail

// Checks that the owners of sockets can be read: without a token, processes know each other by their user.
inline void check_that_users_are_told() {
  constexpr const char* table = "/proc/net/tcp";
  CHECK(std::ifstream(table).good(),
        "without a token the processes of a job know each other by their user, which {} tells, and this process cannot "
        "read it: {}; {}",
        table, std::strerror(errno), detail::or_set_a_token);
  uid_t unknown = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> unknown;
  CHECK(::geteuid() != unknown,
        "without a token the processes of a job know each other by their user; this one is of user {}, which is also "
        "the number of all users that Linux does not know here; {}",
        unknown, detail::or_set_a_token);
}

// Does a process of this user own the other end? None: nobody has an open socket there, or not on this machine.
inline std::optional<bool> other_end_is_ours(const Socket& socket) {
  const Address here = address_here(socket), there = address_there(socket);
  if (there.family() == AF_UNSPEC) return std::nullopt;
  // A table that changes while it is read may lack a line.
  for (int tries = 0; tries < 3; ++tries) {
    std::ifstream table(here.family() == AF_INET ? "/proc/net/tcp" : "/proc/net/tcp6");
    const auto owner = detail::owner_in_table(table, detail::table_text(there), detail::table_text(here));
    if (owner) return *owner == ::geteuid();
  }
  return std::nullopt;
}

inline constexpr uint32_t protocol_version = 5;
inline constexpr std::array<char, 8> protocol_magic = {'t', 'r', 'a', 'i', 'n', 'g', 'p', 't'};
inline constexpr double handshake_seconds = 5;  // a stranger may take no longer

enum class ConnectionPurpose : uint32_t { control = 1, data = 2, question = 3 };  // question: is it alive?

struct Hello {
  std::array<char, 8> magic = protocol_magic;
  uint32_t version = protocol_version;
  ConnectionPurpose purpose{};
  int32_t to_process = 0;
  // control, question: the process that connects, its Rendezvous::was_spare; data: group, sending and receiving rank
  std::array<int32_t, 3> numbers{};
  Nonce job{};  // zero: to be told
  Nonce nonce{};
};
struct Reply {
  std::array<char, 8> magic = protocol_magic;
  uint32_t version = protocol_version;
  int32_t process = 0;
  Nonce job{};
  Nonce nonce{};
};
static_assert(sizeof(Hello) == 64 && sizeof(Reply) == 48 && sizeof(Mac) == 32, "the format of the messages");

enum class Answer : uint32_t {
  welcome,
  wrong_token,
  wrong_version,
  wrong_job,
  wrong_process,
  complete,
  unknown,
  other_user
};
struct Verdict {
  Answer answer = Answer::welcome;
  Mac proof{};
};
static_assert(sizeof(Verdict) == 36);

// The fault of the process that gets this answer.
inline std::string reason(Answer answer) {
  switch (answer) {
    case Answer::wrong_token: return "its token differs";
    case Answer::wrong_version: return "its protocol version differs: use the same build";
    case Answer::wrong_job: return "it belongs to another job";
    case Answer::wrong_process: return "it looks for another process of the job";
    case Answer::complete: return "all processes of the job have met already; is another run using the same address?";
    case Answer::other_user:
      return "it is a process of another user, and the job has no token: set TRAIN_GPT_TOKEN to the same value for all "
             "processes of the job";
    default: return "for a reason that this version does not know";
  }
}

enum class Role : char { connecting = 'c', listening = 'l' };

inline Mac proof_of(Role role, Answer answer, const Hello& hello, const Reply& reply, const std::string& token) {
  std::string text = "train_gpt ";
  auto add = [&](const auto& part) { text.append(reinterpret_cast<const char*>(&part), sizeof part); };
  add(role), add(answer), add(hello), add(reply);
  return hmac_sha256(token, text);
}

// The listening side said that this process is not welcome: trying again will not help.
class RefusedError : public Error {
 public:
  using Error::Error;
};

// The connecting side; where: names the listening one, as in "the rendezvous at HOST:PORT". Returns the job. Throws
// ConnectionError if something else listens there, and RefusedError.
inline Nonce introduce(const Socket& socket, Hello hello, const std::string& token, const std::string& where,
                       Limit limit) {
  limit = limit.sooner(2 * handshake_seconds);
  hello.nonce = random_nonce();
  Reply reply;
  send_all(socket, &hello, sizeof hello, limit);
  receive_all(socket, &reply, sizeof reply, limit);
  if (reply.magic != protocol_magic) throw ConnectionError("what listens there is not train_gpt");
  if (hello.job != Nonce{} && reply.job != hello.job) throw ConnectionError("what listens there is another job");
  if (token.empty()) {  // it has accepted this connection, and so owns its end of it
    const std::optional<bool> ours = other_end_is_ours(socket);
    if (!ours) throw ConnectionError(Socket::closed);
    if (!*ours)
      throw ConnectionError(
          "what listens there is a process of another user; set TRAIN_GPT_TOKEN if it belongs to this job");
  }
  const Mac proof = proof_of(Role::connecting, Answer::welcome, hello, reply, token);
  send_all(socket, &proof, sizeof proof, limit);
  Verdict verdict;
  receive_all(socket, &verdict, sizeof verdict, limit);
  if (verdict.answer != Answer::wrong_token &&  // a process with another token can prove nothing
      !equal(verdict.proof, proof_of(Role::listening, verdict.answer, hello, reply, token)))
    throw ConnectionError("what listens there does not know the job's token");
  if (verdict.answer != Answer::welcome)
    throw RefusedError(formatted(
        "{} refused this process: {}", where,
        token.empty() && verdict.answer == Answer::wrong_token ? how_to_set_a_token : reason(verdict.answer)));
  return reply.job;
}

// The listening side of one connection: what a stranger can make us keep. It never waits.
class Stranger {
 public:
  enum class State : uint8_t { pending, welcome, refused };

  explicit Stranger(Socket connected) : socket(std::move(connected)) {}

  // Reads what has arrived, and answers. accept: Answer(const Hello&), asked once the other side has proved itself.
  // Throws ConnectionError.
  template <class Accept>
  State proceed(const Reply& us, const std::string& token, Accept&& accept) {
    if (!greeted_) {
      if (!receive(sizeof(Hello))) return State::pending;
      std::memcpy(&hello, bytes_.data(), sizeof hello);
      greeted_ = true;
      received_ = 0;
      reply_ = us;
      reply_.nonce = random_nonce();
      send(&reply_, sizeof reply_);
    }
    if (!receive(sizeof(Mac))) return State::pending;
    Mac proof;
    std::memcpy(&proof, bytes_.data(), sizeof proof);
    Verdict verdict;
    if (!equal(proof, proof_of(Role::connecting, Answer::welcome, hello, reply_, token))) {
      verdict.answer = Answer::wrong_token;
    } else if (const std::optional<bool> ours = token.empty() ? other_end_is_ours(socket) : true; !ours) {
      throw ConnectionError("its user is unknown: it has closed its end, or is on another machine");
    } else if (!*ours) {
      verdict.answer = Answer::other_user;
    } else {
      verdict.answer = hello.to_process != us.process                ? Answer::wrong_process
                       : hello.job != us.job && hello.job != Nonce{} ? Answer::wrong_job
                                                                     : accept(hello);
    }
    if (verdict.answer != Answer::wrong_token)
      verdict.proof = proof_of(Role::listening, verdict.answer, hello, reply_, token);
    send(&verdict, sizeof verdict);
    if (verdict.answer != Answer::welcome) why = reason(verdict.answer);
    return verdict.answer == Answer::welcome ? State::welcome : State::refused;
  }
  // Its time is up.
  std::string too_slow() const {
    return formatted("it said {} of {} bytes within {} s", received_ + (greeted_ ? sizeof(Hello) : 0),
                     sizeof(Hello) + sizeof(Mac), handshake_seconds);
  }

  Socket socket;
  Limit limit = Limit::seconds(handshake_seconds);
  std::string from = address_there(socket).text();  // its address
  std::string why;                                  // it was refused
  Hello hello;                                      // valid once welcome

 private:
  bool receive(size_t bytes) {
    while (received_ < bytes) {
      const iovec rest{bytes_.data() + received_, bytes - received_};
      const size_t n = socket.receive_some(&rest, 1);
      if (n == 0) return false;
      received_ += n;
      const size_t known = std::min(received_, protocol_magic.size());
      if (!greeted_ &&
          !std::equal(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(known), protocol_magic.begin()))
        throw ConnectionError("it does not speak the protocol of train_gpt");
    }
    return true;
  }
  // A new connection always has room for these few bytes.
  void send(const void* data, size_t bytes) {
    const iovec all{const_cast<void*>(data), bytes};
    if (socket.send_some(&all, 1) != bytes) throw ConnectionError("it takes no answer");
  }

  std::array<char, sizeof(Hello)> bytes_{};
  size_t received_ = 0;  // bytes of the current message
  bool greeted_ = false;
  Reply reply_;
};

}  // namespace llmc
