#include "src/comm/conversation.h"

#include <algorithm>

#include "spillway/error.h"

namespace spillway {

// Tickets: those of receives by rank, behind them those of sends by place in said_.
Conversation::Conversation(Transport& transport, Ticket ticket)
    : transport_(transport), first_(ticket), peers_(transport.ranks()) {}

void Conversation::listen() {
  for (std::uint32_t rank = 0; rank < peers_.size(); ++rank) {
    if (rank != transport_.rank()) receive(rank);
  }
}

void Conversation::receive(std::uint32_t from) {
  transport_.receive(from, Channel::kWords, std::as_writable_bytes(std::span(&peers_[from].arriving, 1)),
                     first_ + from);
}

bool Conversation::may_say() const noexcept {
  return std::any_of(said_.begin(), said_.end() - 1, [](const Said& said) { return said.out == 0; });
}

void Conversation::say(const Word& word) {
  auto place = word.what == Word::What::kCollective
                   ? std::find_if(said_.begin(), said_.end() - 1, [](const Said& said) { return said.out == 0; })
                   : said_.end() - 1;
  SPILLWAY_CHECK(place->out == 0, "a place for a word is free");
  place->word = word;
  place->out = peers_.size() - 1;
  const Ticket ticket = first_ + peers_.size() + static_cast<std::size_t>(place - said_.begin());
  for (std::uint32_t i = 1; i < peers_.size(); ++i) {  // everybody begins with somebody else
    const auto to = static_cast<std::uint32_t>((transport_.rank() + i) % peers_.size());
    transport_.send(to, Channel::kWords, std::as_bytes(std::span(&place->word, 1)), ticket);
  }
}

bool Conversation::all_sent() const noexcept {
  return std::ranges::all_of(said_, [](const Said& said) { return said.out == 0; });
}

void Conversation::take(Ticket ticket) {
  const std::uint64_t index = ticket - first_;
  if (index >= peers_.size()) {
    --said_[index - peers_.size()].out;
    return;
  }
  Peer& peer = peers_[index];
  if (peer.arriving.what == Word::What::kCollective) {
    peer.words[peer.come++ % peer.words.size()] = peer.arriving;
    receive(static_cast<std::uint32_t>(index));
  } else {
    peer.last = peer.arriving;  // nothing follows it
    ++left_;
  }
}

const Word* Conversation::word(std::uint32_t rank, std::uint64_t number) const {
  const Peer& peer = peers_[rank];
  const bool known = number < peer.come && number + peer.words.size() >= peer.come;
  return known ? &peer.words[number % peer.words.size()] : nullptr;
}

const Word* Conversation::last(std::uint32_t rank) const { return peers_[rank].last ? &*peers_[rank].last : nullptr; }

}  // namespace spillway
