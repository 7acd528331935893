// meeting_point.h: where the processes of a job meet: process 0 listens at HOST:PORT; or at a free port, and writes its
// address to a file that all of them can see.
#pragma once
#include <ifaddrs.h>
#include <net/if.h>

#include <sstream>

#include "net/meeting/listener.h"

namespace llmc {

struct Rendezvous {
  std::string where;          // "HOST:PORT" or "file:PATH"
  std::string token;          // empty: none, and then only on a loopback address, between processes of one user
  double init_timeout = 600;  // seconds to wait for all processes
  double patience = 2;        // seconds to wait for those still to come, when it is clear that the job cannot begin
  Say say;                    // must outlive the job
  std::string address;        // TRAIN_GPT_ADDRESS: where others reach it, if not where its connections come from
  Socket listening;           // process 0's, if it listens at HOST:PORT already
  double spare_wait = 30;     // seconds that a place is empty, and nobody comes, before a spare takes it
  bool was_spare = false;     // this process has been sent to its place

  // When it is said who is waited for.
  NowAndThen reminder() const {
    const double first = std::min(5.0, init_timeout / 4);
    return NowAndThen(first, 2 * first);
  }
  std::optional<std::string> file() const {
    return where.starts_with("file:") ? std::optional(where.substr(5)) : std::nullopt;
  }
};

namespace detail {

// By its name alone: in /etc/hosts many machines give their own name a loopback address.
inline bool is_loopback_name(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}
inline void check_token(const Endpoint& endpoint, const std::string& token) {
  CHECK(!token.empty() || std::ranges::all_of(resolve(endpoint), &Address::is_loopback),
        "the rendezvous at {} can be reached from other machines, so this process has to prove that it belongs to the "
        "job, and {}",
        endpoint.text(), how_to_set_a_token);
  if (token.empty()) check_that_users_are_told();
}

// An address by which others may reach this machine: of its host name, else its first interface, else a loopback one.
inline std::string own_address() {
  try {
    for (const Address& address : resolve({host_name(), 0}))
      if (!address.is_loopback()) return address.endpoint().host;
  } catch (const ConnectionError&) {  // a machine need not know its own name
  }
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return "127.0.0.1";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owned(found, ::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6})
    for (const ifaddrs* i = found; i != nullptr; i = i->ifa_next) {
      if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != family || (i->ifa_flags & IFF_UP) == 0) continue;
      Address address;
      address.bytes = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      std::memcpy(&address.storage, i->ifa_addr, address.bytes);
      const bool link_local = family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&address.v6().sin6_addr);
      if (!address.is_loopback() && !link_local) return address.endpoint().host;
    }
  return "127.0.0.1";
}

constexpr const char* first_line = "train_gpt rendezvous";

}  // namespace detail

// A socket of process 0 that listens at a free port, and the HOST:PORT to tell the others.
inline std::pair<Socket, Endpoint> listen_anywhere(const std::string& token, const std::string& address) {
  const std::string host = !address.empty() ? address : token.empty() ? "127.0.0.1" : detail::own_address();
  detail::check_token({host, 0}, token);
  Socket socket =
      detail::is_loopback_name(host) || token.empty() ? listen_at_any_of(resolve({host, 0})) : listen_everywhere(0);
  const int port = address_here(socket).endpoint().port;
  return {std::move(socket), Endpoint{host, port}};
}

// A file that says where process 0 of a job is, from now until it is destroyed.
class MeetingFile {
 public:
  MeetingFile(std::string path, const Endpoint& endpoint, const Nonce& job)
      : path_(std::move(path)),
        text_(formatted("{}\n{}\n{}\n", detail::first_line, endpoint.text(), hexadecimal(job))) {
    const std::string temporary = formatted("{}.{}.new", path_, ::getpid());
    write_text_durably(temporary, text_);
    rename_path(temporary, path_);
  }
  ~MeetingFile() {  // unless it is another job's by now
    try {
      if (read_text(path_, 4096) == text_) ::unlink(path_.c_str());
    } catch (const Error&) {
    }
  }
  MeetingFile(const MeetingFile&) = delete;
  MeetingFile& operator=(const MeetingFile&) = delete;

  // Throws ConnectionError if the file is missing, is not (yet) such a file, or belongs to a job with a token while
  // this process has none: it may be an earlier job's.
  static std::pair<Endpoint, Nonce> read(const std::string& path, const std::string& token) {
    std::string text, title, endpoint, job;
    try {
      text = read_text(path, 4096);
      std::istringstream lines(text);
      std::getline(lines, title), std::getline(lines, endpoint), std::getline(lines, job);
      CHECK(title == detail::first_line && job.size() == 2 * sizeof(Nonce) &&
                job.find_first_not_of("0123456789abcdef") == job.npos,
            "{} holds \"{}\", expected what process 0 writes there", path, shown(text));
      Nonce nonce;
      for (size_t i = 0; i < nonce.size(); ++i)
        nonce[i] = static_cast<unsigned char>(std::stoi(job.substr(2 * i, 2), nullptr, 16));
      const Endpoint there = parse_endpoint(endpoint);
      detail::check_token(there, token);
      return {there, nonce};
    } catch (const Error& error) {
      throw ConnectionError(error.what());
    }
  }

 private:
  std::string path_, text_;
};

// Process 0 listens at HOST:PORT.
inline Socket listen_at_meeting_point(const Endpoint& endpoint, const std::string& token) {
  detail::check_token(endpoint, token);
  try {
    return detail::is_loopback_name(endpoint.host) || token.empty() ? listen_at_any_of(resolve(endpoint))
                                                                    : listen_everywhere(endpoint.port);
  } catch (const ConnectionError& error) {
    throw Error(formatted("the rendezvous at {}: {}; does another run use this port, and is {} this host?",
                          endpoint.text(), error.what(), shown(endpoint.host, 255)));
  }
}

struct Reached {
  Socket socket;
  Nonce job;
  Endpoint endpoint;
};

namespace detail {

// Throws the last address's ConnectionError.
inline Reached connect_to_any(const Endpoint& endpoint, const Hello& hello, const std::string& token,
                              const std::string& where, const Limit& limit) {
  const std::vector<Address> addresses = resolve(endpoint);
  for (size_t i = 0;; ++i) try {
      Socket socket = connect_to(addresses.at(i), limit.sooner(handshake_seconds));
      const Nonce job = introduce(socket, hello, token, where, limit);
      return {std::move(socket), job, endpoint};
    } catch (const ConnectionError&) {
      if (i + 1 == addresses.size()) throw;
    }
}

}  // namespace detail

// Connects another process to process 0 as soon as process 0 listens.
inline Reached reach_process_0(const Rendezvous& at, int process) {
  RunningLimit limit(at.init_timeout);
  NowAndThen reminder = at.reminder();
  std::string fault, its_place;
  for (double pause = 0.02;; pause = std::min(0.5, 2 * pause)) {
    std::string where = "the rendezvous at " + at.where;
    try {
      Hello hello{.purpose = ConnectionPurpose::control, .to_process = 0, .numbers = {process, at.was_spare, 0}};
      Endpoint endpoint;
      if (const auto path = at.file()) {
        std::tie(endpoint, hello.job) = MeetingFile::read(*path, at.token);
        where += formatted(", which names {},", endpoint.text());
      } else {
        endpoint = parse_endpoint(at.where);
        detail::check_token(endpoint, at.token);
      }
      return detail::connect_to_any(endpoint, hello, at.token, where, limit.limit());
    } catch (const ConnectionError& error) {  // not there yet, or what listens there is not process 0 of this job
      if (fault.empty() || !limit.passed()) fault = error.what(), its_place = where;  // not one that was cut short
    }
    if (reminder.due()) at.say(formatted("waiting for {}: {}", its_place, fault));
    if (limit.passed())
      throw Error(formatted("{} has not been reached within {} s (--init-timeout): {}; has process 0 started{}?",
                            its_place, at.init_timeout, fault, at.file() ? ", and do both see the same file" : ""),
                  ExitStatus::lost);
    limit.wait(pause, sleep_until);
  }
}

}  // namespace llmc
