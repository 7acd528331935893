// socket_owner.h: which user owns the other end of a connection within this machine. Linux lists the sockets of a
// network namespace, and so of its loopback addresses, with their owners (proc(5): /proc/net/tcp, /proc/net/tcp6).
#pragma once
#include <unistd.h>

#include <fstream>
#include <istream>
#include <sstream>

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

}  // namespace llmc
