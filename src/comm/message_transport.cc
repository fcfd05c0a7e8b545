#include "src/comm/message_transport.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "spillway/error.h"

namespace spillway {
namespace {

// A rank that ends the communicator says why and closes its connections. Data that does not come then is heard of by
// one thread of the library's, and the word by another.
constexpr std::chrono::seconds kWordsMayCome{1};

}  // namespace

void MessageInbox::put(Over over) {
  const std::lock_guard lock(mutex_);
  over_.push_back(std::move(over));
}

std::vector<MessageInbox::Over> MessageInbox::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(over_, {});
}

MessageTransport::MessageTransport(MessageFunctions functions)
    : functions_(std::move(functions)), inbox_(std::make_shared<MessageInbox>()) {}

std::string MessageTransport::host() const {
  char name[65] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

std::uint64_t MessageTransport::begin(Ticket ticket) {
  operations_[next_operation_] = {.ticket = ticket};
  return next_operation_++;
}

Message MessageTransport::begin_message(const Begun& begun) {
  begun_[next_message_] = begun;
  ++operations_[begun.operation].out;
  return {inbox_, next_message_++};
}

void MessageTransport::start_send(std::uint64_t operation, std::uint32_t to, Channel channel,
                                  std::span<const std::byte> data) {
  functions_.send(to, channel, data, begin_message({operation, to, channel, false}));
}

void MessageTransport::start_receive(std::uint64_t operation, std::uint32_t from, Channel channel,
                                     std::span<std::byte> data) {
  functions_.receive(from, channel, data, begin_message({operation, from, channel, true}));
}

void MessageTransport::end_if_complete(std::uint64_t operation) {
  const auto found = operations_.find(operation);
  if (found->second.out > 0) return;
  over_.push_back(found->second.ticket);
  operations_.erase(found);
}

void MessageTransport::send(std::uint32_t to, Channel channel, std::span<const std::byte> data, Ticket ticket) {
  start_send(begin(ticket), to, channel, data);
}

void MessageTransport::receive(std::uint32_t from, Channel channel, std::span<std::byte> data, Ticket ticket) {
  start_receive(begin(ticket), from, channel, data);
}

void MessageTransport::all_gather(std::span<std::byte> data, std::span<const SlicePart> parts, Ticket ticket) {
  const std::uint64_t operation = begin(ticket);
  const auto part = [&](std::uint32_t rank) { return data.subspan(parts[rank].begin, parts[rank].bytes); };
  for (std::uint32_t i = 1; i < ranks(); ++i) {  // everybody begins with somebody else
    const std::uint32_t from = (rank() + ranks() - i) % ranks(), to = (rank() + i) % ranks();
    if (!part(from).empty()) start_receive(operation, from, Channel::kData, part(from));
    if (!part(rank()).empty()) start_send(operation, to, Channel::kData, part(rank()));
  }
  end_if_complete(operation);
}

void MessageTransport::broadcast(std::span<std::byte> data, std::uint32_t root, Ticket ticket) {
  const std::uint64_t operation = begin(ticket);
  if (rank() != root) {
    start_receive(operation, root, Channel::kData, data);
  } else {
    for (std::uint32_t i = 1; i < ranks(); ++i) start_send(operation, (root + i) % ranks(), Channel::kData, data);
  }
  end_if_complete(operation);
}

void MessageTransport::reduce(std::span<std::byte>, std::uint32_t, Ticket) {
  SPILLWAY_CHECK(false, "sums are made in a tree");
}

void MessageTransport::reduce_scatter(std::span<std::byte>, std::span<const std::uint64_t>, Ticket) {
  SPILLWAY_CHECK(false, "sums are made in a tree");
}

std::size_t MessageTransport::poll(std::span<Ticket> over) {
  take_messages();
  const std::size_t count = std::min(over.size(), over_.size());
  std::copy_n(over_.begin(), count, over.begin());
  over_.erase(over_.begin(), over_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

void MessageTransport::take_messages() {
  for (const MessageInbox::Over& message : inbox_->take()) {
    const auto found = begun_.find(message.number);
    if (found == begun_.end()) continue;
    const Begun begun = found->second;
    begun_.erase(found);
    if (message.failure) {
      fail(begun, *message.failure);
      // A word that does not reach a rank is missed by nobody: who has gone is seen by what is received from it, and
      // one that has left in peace hears no more.
      if (begun.is_receive || begun.channel == Channel::kData) continue;
    }
    --operations_[begun.operation].out;
    end_if_complete(begun.operation);
  }
}

void MessageTransport::fail(const Begun& begun, const std::string& why) {
  if (begun.channel == Channel::kWords && !begun.is_receive) return;
  auto& failure = begun.channel == Channel::kWords ? of_words_ : of_data_;
  if (!failure) failure = {fmt::format("from or to rank {}: {}", begun.peer, why), Clock::now()};
}

std::string MessageTransport::failure() const {
  if (of_words_) return of_words_->why;
  return of_data_ && Clock::now() - of_data_->at > kWordsMayCome ? of_data_->why : "";
}

bool MessageTransport::close(Parting parting) noexcept {
  try {
    if (functions_.close) functions_.close(parting);
    take_messages();
  } catch (...) {
    return false;
  }
  return begun_.empty();
}

}  // namespace spillway
