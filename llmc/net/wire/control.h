// control.h: small messages between processes that know each other: one thread reads from and writes to any number of
// connections, so that nobody waits for a slow one.
#pragma once
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "net/wire/socket.h"

namespace llmc {

// On the wire: the number of bytes that follow, the kind, and each part after its own length; 32 bits each.
struct Message {
  static constexpr size_t most_bytes = size_t{1} << 20;

  uint32_t kind = 0;
  std::vector<std::string> parts;

  std::string encoded() const {
    std::string text(sizeof(uint32_t), '\0');
    auto add = [&](size_t number) {
      const auto word = static_cast<uint32_t>(number);
      text.append(reinterpret_cast<const char*>(&word), sizeof word);
    };
    add(kind);
    for (const std::string& part : parts) add(part.size()), text += part;
    CHECK(text.size() <= most_bytes, "a message of {} bytes is too long for another process, which takes {}",
          text.size(), most_bytes);
    const auto bytes = static_cast<uint32_t>(text.size() - sizeof(uint32_t));
    std::memcpy(text.data(), &bytes, sizeof bytes);
    return text;
  }

  // Takes the first message from the front of `text`; false: it is not complete yet. Throws ConnectionError.
  bool decode_from(std::string& text) {
    std::string_view rest = text;
    auto number = [&]() -> size_t {
      uint32_t word = 0;
      if (rest.size() < sizeof word) throw ConnectionError("it sent a message of the wrong form");
      std::memcpy(&word, rest.data(), sizeof word);
      rest.remove_prefix(sizeof word);
      return word;
    };
    if (text.size() < sizeof(uint32_t)) return false;
    const size_t bytes = number();
    if (bytes > most_bytes) throw ConnectionError(formatted("it sent a message of {} bytes, which is too long", bytes));
    if (rest.size() < bytes) return false;
    rest = rest.substr(0, bytes);
    kind = static_cast<uint32_t>(number());
    parts.clear();
    while (!rest.empty()) {
      const size_t length = number();
      if (length > rest.size()) throw ConnectionError("it sent a message of the wrong form");
      parts.emplace_back(rest.substr(0, length));
      rest.remove_prefix(length);
    }
    text.erase(0, sizeof(uint32_t) + bytes);
    return true;
  }
};

// A connection is known by the number that add() returned.
class Control {
 public:
  struct Events {  // called on the thread of this object
    std::function<void(int line, Message)> received;
    std::function<void(int line, const std::string& why)> closed;  // by the other side, or it broke
  };

  explicit Control(Events events) : events_(std::move(events)), thread_([this] { run(); }) {}
  // Waits at most a second for the rest to be sent, and for the others to have read it.
  ~Control() {
    {
      std::lock_guard lock(mutex_);
      end_ = Limit::seconds(1);
    }
    waker_.wake();
    thread_.join();
  }
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  int add(Socket socket) {
    // Keepalive detects only idle connections that broke; with data under way, TCP would try for a quarter of an hour.
    // Data connections do without this limit: their other side may be busy for longer, and reads nothing meanwhile.
    detail::set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);  // milliseconds
    std::lock_guard lock(mutex_);
    lines_.emplace(next_, Line{std::move(socket), "", ""});
    waker_.wake();
    return next_++;
  }
  // Does not wait. Nothing happens if the connection is gone.
  void send(int line, const Message& message) {
    const std::string text = message.encoded();
    std::lock_guard lock(mutex_);
    const auto found = lines_.find(line);
    if (found == lines_.end()) return;
    found->second.out += text;
    waker_.wake();
  }

 private:
  struct Line {
    Socket socket;
    std::string in, out;
    bool said_all = false;
  };

  void run() {
    std::vector<pollfd> polled;
    std::vector<int> ids;
    for (;;) {
      polled.assign({{waker_.fd(), POLLIN, 0}});
      ids.clear();
      Limit limit;
      {
        std::lock_guard lock(mutex_);
        if (end_) {
          if (lines_.empty() || end_->passed()) return;
          limit = *end_;
        }
        for (auto& [id, line] : lines_) {
          if (end_ && line.out.empty() && !std::exchange(line.said_all, true)) ::shutdown(line.socket.fd(), SHUT_WR);
          ids.push_back(id);
          polled.push_back({line.socket.fd(), static_cast<short>(line.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
        }
      }
      if (::poll(polled.data(), polled.size(), limit.milliseconds()) < 0) continue;  // EINTR
      if (polled[0].revents != 0) waker_.clear();
      for (size_t i = 0; i < ids.size(); ++i)
        if (polled[i + 1].revents != 0) attend(ids[i]);
    }
  }

  // Sends and receives what it can, then reports what has happened, without the lock.
  void attend(int id) {
    std::vector<Message> messages;
    std::optional<std::string> closed;
    {
      std::lock_guard lock(mutex_);
      Line& line = lines_.at(id);
      try {
        receive(line, messages);
        const iovec out{line.out.data(), line.out.size()};
        if (!line.out.empty()) line.out.erase(0, line.socket.send_some(&out, 1));
      } catch (const ConnectionError& error) {
        closed = error.what();
        lines_.erase(id);
      }
    }
    for (Message& message : messages) events_.received(id, std::move(message));
    if (closed) events_.closed(id, *closed);
  }
  static void receive(Line& line, std::vector<Message>& messages) {
    std::array<char, 16384> buffer;
    const iovec in{buffer.data(), buffer.size()};
    while (const size_t n = line.socket.receive_some(&in, 1)) {
      line.in.append(buffer.data(), n);
      for (Message message; message.decode_from(line.in);) messages.push_back(std::move(message));
    }
  }

  Events events_;
  std::mutex mutex_;
  std::map<int, Line> lines_;
  int next_ = 0;
  std::optional<Limit> end_;  // set when this object is being destroyed
  Waker waker_;
  std::thread thread_;  // last: it uses all of them
};

}  // namespace llmc
