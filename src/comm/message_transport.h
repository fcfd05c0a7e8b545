// A Transport over what can send and receive, and says by itself when a message is over: a table of functions of the
// caller's (spillway/c_ranks.h). All the rest is made of messages here.
//
//   all_gather   each rank sends its part to every other one, and receives theirs
//   broadcast    the root sends to every other rank
//   sums         in a tree, which Transfers makes of messages anyhow
//
// Each byte goes once between two ranks, as it would in a ring, but for a broadcast, which ranks agree on small things
// by.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/comm/transport.h"

namespace spillway {

// Where messages are said to be over: by any thread, also after the transport has gone.
class MessageInbox {
 public:
  struct Over {
    std::uint64_t number = 0;
    std::optional<std::string> failure;
  };
  void put(Over over);
  // Of the thread that polls.
  std::vector<Over> take();

 private:
  std::mutex mutex_;
  std::vector<Over> over_;
};

// A message that was started, in the hands of whoever carries it out.
class Message {
 public:
  Message(std::shared_ptr<MessageInbox> inbox, std::uint64_t number) : inbox_(std::move(inbox)), number_(number) {}

  // Once for each. A failure: no more will come of it.
  void over(std::optional<std::string> failure = {}) const { inbox_->put({number_, std::move(failure)}); }

 private:
  std::shared_ptr<MessageInbox> inbox_;
  std::uint64_t number_;
};

// What carries messages. All of it is called by the communicator's thread, and returns at once; of close() it is waited
// for, after which nothing touches memory that was named any more.
struct MessageFunctions {
  std::uint32_t rank = 0, ranks = 1;
  std::string library;  // its name and version
  std::function<void(std::uint32_t to, Channel, std::span<const std::byte>, Message)> send;
  std::function<void(std::uint32_t from, Channel, std::span<std::byte>, Message)> receive;
  std::function<void(Parting)> close;
};

class MessageTransport final : public Transport {
 public:
  explicit MessageTransport(MessageFunctions functions);

  std::uint32_t rank() const noexcept override { return functions_.rank; }
  std::uint32_t ranks() const noexcept override { return functions_.ranks; }
  std::string library() const override { return functions_.library; }
  std::string host() const override;

  void send(std::uint32_t to, Channel channel, std::span<const std::byte> data, Ticket ticket) override;
  void receive(std::uint32_t from, Channel channel, std::span<std::byte> data, Ticket ticket) override;

  std::size_t most_bytes() const noexcept override { return SIZE_MAX; }
  bool has_sums() const noexcept override { return false; }
  void all_gather(std::span<std::byte> data, std::span<const SlicePart> parts, Ticket ticket) override;
  void broadcast(std::span<std::byte> data, std::uint32_t root, Ticket ticket) override;
  void reduce(std::span<std::byte> data, std::uint32_t root, Ticket ticket) override;
  void reduce_scatter(std::span<std::byte> data, std::span<const std::uint64_t> slices, Ticket ticket) override;

  std::size_t poll(std::span<Ticket> over) override;
  std::string failure() const override;
  bool close(Parting parting) noexcept override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Begun {
    std::uint64_t operation = 0;
    std::uint32_t peer = 0;
    Channel channel = Channel::kWords;
    bool is_receive = false;
  };
  struct Operation {
    Ticket ticket = 0;
    std::size_t out = 0;  // messages that are not over
  };
  struct Failure {
    std::string why;
    Clock::time_point at;
  };

  std::uint64_t begin(Ticket ticket);
  void start_send(std::uint64_t operation, std::uint32_t to, Channel channel, std::span<const std::byte> data);
  void start_receive(std::uint64_t operation, std::uint32_t from, Channel channel, std::span<std::byte> data);
  Message begin_message(const Begun& begun);
  void end_if_complete(std::uint64_t operation);  // is over where nothing of it is out
  void take_messages();
  void fail(const Begun& begun, const std::string& why);

  const MessageFunctions functions_;
  const std::shared_ptr<MessageInbox> inbox_;
  std::uint64_t next_operation_ = 0, next_message_ = 0;
  std::map<std::uint64_t, Operation> operations_;
  std::map<std::uint64_t, Begun> begun_;  // messages, by number
  std::vector<Ticket> over_;              // and not given back yet
  std::optional<Failure> of_words_, of_data_;
};

}  // namespace spillway
