// net_ops.so, for LD_PRELOAD: leads every TCP connection of the trainer to a proxy on this machine, at port
// $NET_OPS_PROXY of 127.0.0.1, which is told in 64 bytes where the connection was to go: "ADDRESS PORT", filled up with
// zeros. $NET_OPS_HOST: the name of the machine on which the trainer believes to be.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" int gethostname(char* name, size_t size) {
  static const auto real = reinterpret_cast<decltype(&::gethostname)>(dlsym(RTLD_NEXT, "gethostname"));
  const char* const host = getenv("NET_OPS_HOST");
  return host == nullptr ? real(name, size) : snprintf(name, size, "%s", host) < 0 ? -1 : 0;
}

extern "C" int connect(int fd, const sockaddr* address, socklen_t bytes) {
  static const auto real = reinterpret_cast<decltype(&::connect)>(dlsym(RTLD_NEXT, "connect"));
  const char* const proxy = getenv("NET_OPS_PROXY");
  const bool v6 = address->sa_family == AF_INET6;
  if (proxy == nullptr || (!v6 && address->sa_family != AF_INET)) return real(fd, address, bytes);
  char name[INET6_ADDRSTRLEN] = "", wanted[64] = "";
  sockaddr_in6 to6{};
  sockaddr_in to{};
  std::memcpy(v6 ? static_cast<void*>(&to6) : &to, address, v6 ? sizeof to6 : sizeof to);
  v6 ? inet_ntop(AF_INET6, &to6.sin6_addr, name, sizeof name) : inet_ntop(AF_INET, &to.sin_addr, name, sizeof name);
  snprintf(wanted, sizeof wanted, "%s %d", name, ntohs(v6 ? to6.sin6_port : to.sin_port));
  const uint16_t port = htons(static_cast<uint16_t>(atoi(proxy)));
  to6.sin6_port = to.sin_port = port;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  inet_pton(AF_INET6, "::ffff:127.0.0.1", &to6.sin6_addr);
  // The proxy accepts at once: so the caller's socket, which does not block, may block for this.
  const int flags = fcntl(fd, F_GETFL);
  fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
  int status = real(fd, v6 ? reinterpret_cast<sockaddr*>(&to6) : reinterpret_cast<sockaddr*>(&to), bytes);
  if (status == 0 && send(fd, wanted, sizeof wanted, MSG_NOSIGNAL) != sizeof wanted) status = -1;
  fcntl(fd, F_SETFL, flags);
  return status;
}
