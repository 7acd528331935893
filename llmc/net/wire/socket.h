// socket.h: TCP over IPv4 and IPv6: addresses, sockets that close themselves, and waits that end at a deadline or when
// somebody wakes them. No socket blocks, no signal is raised when the other side is gone, nothing spins.
#pragma once
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <chrono>

#include "core/clock.h"
#include "core/files.h"

namespace llmc {

// A connection that was not made, or that broke: the other side may be late, or gone.
class ConnectionError : public Error {
 public:
  explicit ConnectionError(const std::string& message) : Error(message, ExitStatus::lost) {}
};

class Socket : public Descriptor {
 public:
  using Descriptor::Descriptor;

  static constexpr const char* closed = "the connection was closed";
  // Is this the error of a connection whose other side was closed?
  static bool is_end(const std::string& error) {
    return error == closed || error == std::strerror(ECONNRESET) || error == std::strerror(EPIPE);
  }

  // Moves as many of these bytes as it can without waiting; 0: none now. Throws if the other side has closed.
  size_t send_some(const iovec* parts, size_t n) const { return move_some(::sendmsg, parts, n); }
  size_t receive_some(const iovec* parts, size_t n) const { return move_some(::recvmsg, parts, n); }

 private:
  template <class Call>
  size_t move_some(Call&& call, const iovec* parts, size_t n) const {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = n;
    for (;;) {
      const ssize_t moved = call(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (moved > 0) return static_cast<size_t>(moved);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
      throw ConnectionError(moved == 0 ? closed : std::strerror(errno));
    }
  }
};

// Wakes the thread that polls it, from any thread.
class Waker {
 public:
  Waker() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    CHECK(event_, "cannot make an eventfd: {}", std::strerror(errno));
  }
  void wake() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(event_.fd(), &one, sizeof one);  // fails only if it is awake
  }
  void clear() const {
    uint64_t times;
    [[maybe_unused]] const ssize_t bytes = ::read(event_.fd(), &times, sizeof times);
  }
  int fd() const { return event_.fd(); }

 private:
  Descriptor event_;
};

// How long a wait may take. stop: when woken, ends the wait with a PeerError.
struct Limit {
  Clock::time_point deadline = Clock::time_point::max();
  const Waker* stop = nullptr;

  static Limit seconds(double s, const Waker* stop = nullptr) { return {after(s), stop}; }
  static Clock::duration lasting(double s) {  // at most 30 years: the clock cannot count centuries
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(s, 1e9)));
  }
  static Clock::time_point after(double s) { return Clock::now() + lasting(s); }
  Limit sooner(double s) const { return {std::min(deadline, after(s)), stop}; }
  bool passed() const { return deadline <= Clock::now(); }
  // For poll(): rounded up, so that it does not return before the deadline.
  int milliseconds() const {
    if (deadline == Clock::time_point::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 3'600'000));
  }
};

// A limit that the time in which this process is stopped, or starved, does not count towards.
class RunningLimit {
 public:
  explicit RunningLimit(double seconds) : limit_(Limit::seconds(seconds)) {}
  const Limit& limit() const { return limit_; }
  bool passed() const { return limit_.passed(); }
  // Calls wait(Limit), which is to take at most these seconds; of what it takes, at most twice as much counts. True:
  // it took longer than that.
  template <class Wait>
  bool wait(double seconds, Wait&& wait) {
    const Limit limit = limit_.sooner(seconds);
    const Clock::time_point late = limit.deadline + Limit::lasting(seconds);
    wait(limit);
    const Clock::time_point now = Clock::now();
    if (now <= late) return false;
    limit_.deadline += now - late;
    return true;
  }

 private:
  Limit limit_;
};

// Times a repeated message: from the second on, each interval is twice the last one, up to `most` seconds.
class NowAndThen {
 public:
  NowAndThen(double first, double second, double most = 60)
      : next_(Limit::seconds(first)), interval_(second), most_(most) {}
  Limit next() const { return next_; }
  bool due() {
    if (!next_.passed()) return false;
    next_ = Limit::seconds(interval_);
    interval_ = std::min(most_, 2 * interval_);
    return true;
  }

 private:
  Limit next_;
  double interval_, most_;  // seconds
};

// Waits until one of at most four files is ready. False: the deadline has passed.
inline bool wait_for(std::span<const pollfd> files, const Limit& limit) {
  std::array<pollfd, 5> polled{};
  size_t n = static_cast<size_t>(std::copy(files.begin(), files.end(), polled.begin()) - polled.begin());
  if (limit.stop != nullptr) polled[n++] = {limit.stop->fd(), POLLIN, 0};
  for (;;) {
    const int ready = ::poll(polled.data(), n, limit.milliseconds());
    if (limit.stop != nullptr && polled[n - 1].revents != 0) throw PeerError();
    if (ready > 0) return true;
    CHECK(ready == 0 || errno == EINTR, "cannot poll: {}", std::strerror(errno));
    if (limit.passed()) return false;
  }
}
inline void sleep_until(const Limit& limit) { wait_for({}, limit); }

// Sends, or receives, all of these bytes. Throws ConnectionError, also at the deadline.
inline void send_all(const Socket& socket, const void* data, size_t bytes, const Limit& limit) {
  iovec rest{const_cast<void*>(data), bytes};
  while (rest.iov_len > 0) {
    const size_t sent = socket.send_some(&rest, 1);
    rest = {static_cast<char*>(rest.iov_base) + sent, rest.iov_len - sent};
    const pollfd file{socket.fd(), POLLOUT, 0};
    if (sent == 0 && !wait_for({&file, 1}, limit)) throw ConnectionError("no answer in time");
  }
}
inline void receive_all(const Socket& socket, void* data, size_t bytes, const Limit& limit) {
  iovec rest{data, bytes};
  while (rest.iov_len > 0) {
    const size_t received = socket.receive_some(&rest, 1);
    rest = {static_cast<char*>(rest.iov_base) + received, rest.iov_len - received};
    const pollfd file{socket.fd(), POLLIN, 0};
    if (received == 0 && !wait_for({&file, 1}, limit)) throw ConnectionError("no answer in time");
  }
}

// "HOST:PORT", an IPv6 address as "[::1]:PORT".
struct Endpoint {
  std::string host;
  int port = 0;
  std::string text() const { return formatted(host.find(':') == host.npos ? "{}:{}" : "[{}]:{}", host, port); }
};

inline Endpoint parse_endpoint(const std::string& text) {
  const size_t colon = text.rfind(':');
  const std::string port = colon == text.npos ? "" : text.substr(colon + 1);
  std::string host = text.substr(0, std::min(colon, text.size()));
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  const bool digits = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == port.npos;
  const int number = digits ? std::stoi(port) : 0;
  CHECK(!host.empty() && number >= 1 && number <= 65535 && (bracketed || host.find(':') == host.npos),
        "the rendezvous {} is not an address: expected HOST:PORT, [IPv6 ADDRESS]:PORT or file:PATH", shown(text));
  return {host, number};
}

// An address of the network layer.
struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = sizeof(sockaddr_storage);

  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  const sockaddr_in& v4() const { return reinterpret_cast<const sockaddr_in&>(storage); }
  const sockaddr_in6& v6() const { return reinterpret_cast<const sockaddr_in6&>(storage); }

  bool is_loopback() const {
    return family() == AF_INET ? ntohl(v4().sin_addr.s_addr) >> 24 == 127 : IN6_IS_ADDR_LOOPBACK(&v6().sin6_addr) != 0;
  }
  Endpoint endpoint() const {
    std::array<char, NI_MAXHOST> host{};
    const int port = ntohs(family() == AF_INET ? v4().sin_port : v6().sin6_port);
    const int status = ::getnameinfo(raw(), bytes, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST);
    return {status == 0 ? host.data() : "unknown address", port};
  }
  std::string text() const { return endpoint().text(); }
  void set_port(int port) {
    auto& place = family() == AF_INET ? reinterpret_cast<sockaddr_in&>(storage).sin_port
                                      : reinterpret_cast<sockaddr_in6&>(storage).sin6_port;
    place = htons(static_cast<uint16_t>(port));
  }
  // A socket for both families sees IPv4 addresses as ::ffff:10.0.0.1.
  Address unmapped() const {
    if (family() != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&v6().sin6_addr)) return *this;
    Address plain;
    auto& v4 = reinterpret_cast<sockaddr_in&>(plain.storage);
    v4.sin_family = AF_INET;
    v4.sin_port = v6().sin6_port;
    std::memcpy(&v4.sin_addr, v6().sin6_addr.s6_addr + 12, 4);
    plain.bytes = sizeof v4;
    return plain;
  }
};

inline Address address_here(const Socket& socket) {
  Address address;
  ::getsockname(socket.fd(), address.raw(), &address.bytes);
  return address.unmapped();
}
inline Address address_there(const Socket& socket) {
  Address address;
  if (::getpeername(socket.fd(), address.raw(), &address.bytes) != 0) address.storage.ss_family = AF_UNSPEC;
  return address.unmapped();
}

// All addresses of a host.
inline std::vector<Address> resolve(const Endpoint& endpoint) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int status = ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  if (status != 0)
    throw ConnectionError(formatted("cannot find host {}: {}", shown(endpoint.host, 255), ::gai_strerror(status)));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, ::freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    Address address;
    std::memcpy(&address.storage, info->ai_addr, info->ai_addrlen);
    address.bytes = info->ai_addrlen;
    addresses.push_back(address);
  }
  return addresses;
}

namespace detail {

template <class T = int>
void set_option(const Socket& socket, int level, int name, T value) {
  ::setsockopt(socket.fd(), level, name, &value, sizeof value);
}

// Small messages are sent at once. A host that vanished without a word is noticed after half a minute.
inline void tune(const Socket& socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

inline Socket open_socket(int family) {
  Socket socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) throw ConnectionError(formatted("cannot make a socket: {}", std::strerror(errno)));
  return socket;
}

}  // namespace detail

// Throws ConnectionError with the system's reason.
inline Socket connect_to(const Address& address, const Limit& limit) {
  Socket socket = detail::open_socket(address.family());
  detail::tune(socket);
  int fault = ::connect(socket.fd(), address.raw(), address.bytes) == 0 ? 0 : errno;
  if (fault == EINPROGRESS || fault == EINTR) {
    const pollfd file{socket.fd(), POLLOUT, 0};
    if (!wait_for({&file, 1}, limit)) throw ConnectionError(std::strerror(ETIMEDOUT));
    socklen_t bytes = sizeof fault;
    ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &fault, &bytes);
  }
  // Where nobody listens, a connection may be given that very port by chance, and so reach itself.
  const Endpoint here = address_here(socket).endpoint(), there = address_there(socket).endpoint();
  if (fault == 0 && here.host == there.host && here.port == there.port) fault = ECONNREFUSED;
  if (fault != 0) throw ConnectionError(std::strerror(fault));
  return socket;
}

// Listens at this address; port 0: a free one.
inline Socket listen_at(const Address& address) {
  Socket socket = detail::open_socket(address.family());
  detail::set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.family() == AF_INET6) detail::set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (::bind(socket.fd(), address.raw(), address.bytes) != 0 || ::listen(socket.fd(), 1024) != 0)
    throw ConnectionError(formatted("cannot listen at {}: {}", address.text(), std::strerror(errno)));
  return socket;
}

// Listens at the first of these addresses that this machine has; not at another one because its port is in use.
inline Socket listen_at_any_of(const std::vector<Address>& addresses) {
  for (const Address& address : addresses) {
    const Descriptor probe(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    Address any_port = address;
    any_port.set_port(0);
    if (probe && ::bind(probe.fd(), any_port.raw(), any_port.bytes) == 0) return listen_at(address);
  }
  return listen_at(addresses.at(0));
}

// Listens at every address of this machine, of both families if it has both.
inline Socket listen_everywhere(int port) {
  const auto listen_at_any = [&](sa_family_t family, socklen_t bytes) {
    Address any;
    any.storage.ss_family = family;
    any.bytes = bytes;
    any.set_port(port);
    return listen_at(any);
  };
  try {
    return listen_at_any(AF_INET6, sizeof(sockaddr_in6));
  } catch (const ConnectionError&) {  // no IPv6 here; or the port is taken, which the next attempt will report
    return listen_at_any(AF_INET, sizeof(sockaddr_in));
  }
}

}  // namespace llmc
