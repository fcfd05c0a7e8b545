// What carries messages between ranks that are threads of this process: a message is over for both when the later of
// its two ends has come, in the thread of that one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <tuple>
#include <utility>

#include "src/comm/message_transport.h"

namespace spillway::testing {

class MessageHub {
 public:
  explicit MessageHub(std::uint32_t ranks) : ranks_(ranks) {}

  MessageFunctions join(std::uint32_t rank) {
    return {.rank = rank,
            .ranks = ranks_,
            .library = "messages",
            .send =
                [this, rank](std::uint32_t to, Channel channel, std::span<const std::byte> data, Message message) {
                  send({rank, to, channel}, data, std::move(message));
                },
            .receive =
                [this, rank](std::uint32_t from, Channel channel, std::span<std::byte> data, Message message) {
                  receive({from, rank, channel}, data, std::move(message));
                },
            .close = [this, rank](Parting) { close(rank); }};
  }

 private:
  using Road = std::tuple<std::uint32_t, std::uint32_t, Channel>;  // from, to
  struct Sent {
    std::span<const std::byte> data;
    Message message;
  };
  struct Awaited {
    std::span<std::byte> data;
    Message message;
  };

  void send(const Road& road, std::span<const std::byte> data, Message message) {
    const std::lock_guard lock(mutex_);
    sent_[road].push_back({data, std::move(message)});
    meet(road);
  }
  void receive(const Road& road, std::span<std::byte> data, Message message) {
    const std::lock_guard lock(mutex_);
    awaited_[road].push_back({data, std::move(message)});
    meet(road);
  }
  void meet(const Road& road) {
    auto& sent = sent_[road];
    auto& awaited = awaited_[road];
    while (!sent.empty() && !awaited.empty()) {
      const bool fits = sent.front().data.size() == awaited.front().data.size();
      if (fits) std::ranges::copy(sent.front().data, awaited.front().data.begin());
      for (const Message* message : {&sent.front().message, &awaited.front().message}) {
        fits ? message->over() : message->over("a message of another length");
      }
      sent.pop_front();
      awaited.pop_front();
    }
  }
  // Whoever sends to it, or waits for it, hears that it has gone.
  void close(std::uint32_t rank) {
    const std::lock_guard lock(mutex_);
    const auto end = [&](auto& roads) {
      for (auto& [road, messages] : roads) {
        if (std::get<0>(road) != rank && std::get<1>(road) != rank) continue;
        for (auto& each : messages) each.message.over("the connection is closed");
        messages.clear();
      }
    };
    end(sent_);
    end(awaited_);
  }

  const std::uint32_t ranks_;
  std::mutex mutex_;  // guards everything below
  std::map<Road, std::deque<Sent>> sent_;
  std::map<Road, std::deque<Awaited>> awaited_;
};

}  // namespace spillway::testing
