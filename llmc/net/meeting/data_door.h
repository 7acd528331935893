// data_door.h: holds incoming data connections until somebody takes them.
#pragma once
#include <compare>
#include <mutex>

#include "net/wire/socket.h"

namespace llmc {

// A one-way connection for data, from a rank of another process to a rank of this one.
struct Channel {
  int group = 0, from = 0, to = 0;
  auto operator<=>(const Channel&) const = default;
};

class DataDoor {
 public:
  using Take = std::function<void(const Channel&, Socket)>;

  // Sets who takes the connections, including those that have already come. Empty: nobody from now on.
  void serve(Take take) {
    std::lock_guard lock(mutex_);
    take_ = std::move(take);
    if (!take_) return;
    for (auto& [channel, socket] : early_) take_(channel, std::move(socket));
    early_.clear();
  }
  void arrive(const Channel& channel, Socket socket) {
    std::lock_guard lock(mutex_);
    if (take_) take_(channel, std::move(socket));
    else early_.emplace_back(channel, std::move(socket));
  }

 private:
  std::mutex mutex_;
  Take take_;
  std::vector<std::pair<Channel, Socket>> early_;
};

}  // namespace llmc
