// control.h: small messages between processes that know each other, and what they say: one thread reads from and writes
// to any number of connections, so that nobody waits for a slow one.
#pragma once
#include <deque>
#include <mutex>
#include <thread>

#include "net/wire/socket.h"

namespace llmc {

// On the wire: the number of bytes that follow, the kind, and each part after its own length; 32 bits each.
struct Message {
  static constexpr size_t most_bytes = size_t{1} << 20;

  uint32_t kind = 0;
  std::vector<std::string> parts;

  static size_t bytes_of(std::span<const std::string> parts) {
    size_t bytes = 0;
    for (const std::string& part : parts) bytes += sizeof(uint32_t) + part.size();
    return bytes;
  }
  void require_short() const {
    const size_t bytes = 2 * sizeof(uint32_t) + bytes_of(parts);
    CHECK(bytes <= most_bytes, "a message of {} bytes is too long for another process, which takes {}", bytes,
          most_bytes);
  }

  std::string encoded() const {
    require_short();
    std::string text;
    auto add = [&](size_t number) {
      const auto word = static_cast<uint32_t>(number);
      text.append(reinterpret_cast<const char*>(&word), sizeof word);
    };
    add(sizeof(uint32_t) + bytes_of(parts)), add(kind);
    for (const std::string& part : parts) add(part.size()), text += part;
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

// As many messages of this kind as their size needs: each has the parts of `head`, and then some of `rest`, in order
// and `together` at a time.
inline std::vector<Message> in_pieces(uint32_t kind, const std::vector<std::string>& head,
                                      const std::vector<std::string>& rest, size_t together = 1,
                                      size_t most_bytes = Message::most_bytes) {
  const size_t bytes_of_head = 2 * sizeof(uint32_t) + Message::bytes_of(head);
  std::vector<Message> pieces = {{kind, head}};
  size_t bytes = bytes_of_head;
  for (size_t i = 0; i < rest.size(); i += together) {
    const auto next = std::span(rest).subspan(i, std::min(together, rest.size() - i));
    const size_t more = Message::bytes_of(next);
    if (i > 0 && bytes + more > most_bytes) pieces.push_back({kind, head}), bytes = bytes_of_head;
    std::vector<std::string>& parts = pieces.back().parts;
    parts.insert(parts.end(), next.begin(), next.end());
    bytes += more;
  }
  return pieces;
}

// What the processes of a job say over their control connections.
struct Kind {
  enum Value : uint32_t { greeting = 1, verdict, text, gathered, fault, end, failed, board, beat, place };
};

// Whether process `to` takes a message of this kind from process `from`; none: a process that is not in the job yet.
// Each process has control connections only with processes 0 and 1.
inline bool may_say(uint32_t kind, std::optional<int> from, int to) {
  switch (kind) {
    case Kind::greeting: return !from && to == 0;
    case Kind::verdict:
    case Kind::gathered: return from == 0;
    case Kind::text: return from && to == 0;
    case Kind::failed:
    case Kind::board: return from && to <= 1;
    case Kind::fault:
    case Kind::beat: return from && *from <= 1;
    case Kind::end: return from.has_value();
    default: return false;  // also a place: only spares take one, which are not in the job
  }
}

// Why a job cannot go on, and the exit status of its processes: that of a rank that has failed by itself; lost where
// one has gone, hangs, or has not come.
struct Fault {
  std::string why = {};  // empty: there is none
  ExitStatus status = ExitStatus::lost;

  bool known() const { return !why.empty(); }
  // The text, which may be another process's, as far as it is read.
  static std::string limited(const std::string& text) {
    constexpr size_t most = 16 << 10;
    return text.size() <= most ? text : formatted("{}... ({} bytes)", text.substr(0, most), text.size());
  }
  std::vector<std::string> parts() const { return {why, std::to_string(static_cast<int>(status))}; }
  static Fault from(const std::vector<std::string>& parts) {
    const ExitStatus status{std::stoi(parts.at(1))};
    CHECK(status == ExitStatus::refused || status == ExitStatus::diverged || status == ExitStatus::lost,
          "a fault has no such exit status");
    return {limited(parts.at(0)), status};
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
  }

  int add(Socket socket) {
    // Keepalive detects only idle connections that broke; with data under way, TCP would try for a quarter of an hour.
    // Data connections do without this limit: their other side may be busy for longer, and reads nothing meanwhile.
    detail::set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);  // milliseconds
    std::lock_guard lock(mutex_);
    lines_.emplace(next_, Line{.socket = std::move(socket)});
    waker_.wake();
    return next_++;
  }
  // Does not wait. Nothing happens on connections that are gone.
  void send(int line, const Message& message) { send(std::set{line}, message); }
  void send(const std::set<int>& lines, const Message& message) {
    push(lines, message, [](Line&, size_t) { return true; });
  }
  // For messages that both sides send regularly, each in place of the last one. It leaves out lines whose other side
  // has said nothing since several of them: a process that is stopped reads nothing, and a connection whose buffers
  // are full breaks like one to a host that has vanished (add()).
  void send_regular(const std::set<int>& lines, const Message& message) {
    constexpr size_t most_unanswered = 32 << 10, overhead = 4 << 10;  // bytes; a small message costs memory, too
    push(lines, message, [](Line& line, size_t bytes) {
      if (line.unanswered > 0 && line.unanswered + overhead + bytes > most_unanswered) return false;
      line.unanswered += overhead + bytes;
      return true;
    });
  }

 private:
  struct Line {
    Socket socket;
    std::string in = {};
    std::deque<std::shared_ptr<const std::string>> out = {};
    size_t sent = 0;        // bytes of the first of `out`
    size_t unanswered = 0;  // of regular messages since the other side last said anything
    bool said_all = false;
  };

  template <class Takes>
  void push(const std::set<int>& lines, const Message& message, Takes&& takes) {
    const auto text = std::make_shared<const std::string>(message.encoded());  // one copy, however many lines
    std::lock_guard lock(mutex_);
    for (const int line : lines)
      if (const auto found = lines_.find(line); found != lines_.end() && takes(found->second, text->size()))
        found->second.out.push_back(text);
    waker_.wake();
  }

  void run() {
    std::vector<pollfd> polled;
    std::vector<int> ids;
    std::vector<std::pair<int, std::string>> closed;
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
        if (polled[i + 1].revents != 0) attend(ids[i], closed);
      // What the other lines hold may say why these were closed, if this process has been stopped for a while.
      if (!closed.empty())
        for (const int id : ids) attend(id, closed);
      for (const auto& [id, why] : closed) events_.closed(id, why);
      closed.clear();
    }
  }

  // Sends and receives what it can, then reports the messages, without the lock. Adds to the lines that are closed.
  void attend(int id, std::vector<std::pair<int, std::string>>& closed) {
    std::vector<Message> messages;
    {
      std::lock_guard lock(mutex_);
      const auto found = lines_.find(id);
      if (found == lines_.end()) return;
      try {
        receive(found->second, messages);
        send_some(found->second);
      } catch (const ConnectionError& error) {
        closed.emplace_back(id, error.what());
        lines_.erase(found);
      }
    }
    for (Message& message : messages) events_.received(id, std::move(message));
  }
  static void send_some(Line& line) {
    std::array<iovec, 64> parts;
    size_t n = 0, skipped = line.sent;
    for (; n < std::min(parts.size(), line.out.size()); ++n, skipped = 0)
      parts[n] = {const_cast<char*>(line.out[n]->data()) + skipped, line.out[n]->size() - skipped};
    if (n > 0) line.sent += line.socket.send_some(parts.data(), n);
    for (; !line.out.empty() && line.sent >= line.out.front()->size(); line.out.pop_front())
      line.sent -= line.out.front()->size();
  }
  static void receive(Line& line, std::vector<Message>& messages) {
    std::array<char, 16384> buffer;
    const iovec in{buffer.data(), buffer.size()};
    while (const size_t n = line.socket.receive_some(&in, 1)) {
      line.in.append(buffer.data(), n);
      line.unanswered = 0;
      for (Message message; message.decode_from(line.in);) messages.push_back(std::move(message));
    }
  }

  Events events_;
  std::mutex mutex_;
  std::map<int, Line> lines_;
  int next_ = 0;
  std::optional<Limit> end_;  // set when this object is being destroyed
  Waker waker_;
  std::jthread thread_;  // last: it uses all of them
};

}  // namespace llmc
