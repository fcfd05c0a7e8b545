#include "src/comm/conversation.h"

#include <algorithm>

#include "spillway/error.h"

namespace spillway {

// Tickets: those of receives by rank, after them those of sends by place in said_.
Conversation::Conversation(Transport& transport, Ticket ticket)
    : transport_(transport), first_(ticket), peers_(transport.ranks()) {
  said_[kAnswers].word.what = Word::What::kHeard;
  said_[kWork].word.what = Word::What::kAtWork;
}

Ticket Conversation::ticket_of(const Said& said) const noexcept {
  return first_ + peers_.size() + static_cast<std::size_t>(&said - said_.data());
}

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
  return std::any_of(said_.begin(), said_.begin() + kLastWord, [](const Said& said) { return said.out == 0; });
}

void Conversation::say(const Word& word) {
  const bool is_last = word.what != Word::What::kCollective;
  const auto end = said_.begin() + kLastWord;
  const auto place = is_last ? end : std::find_if(said_.begin(), end, [](const Said& said) { return said.out == 0; });
  SPILLWAY_CHECK((is_last || place != end) && place->out == 0, "a place for a word is free");
  place->word = word;
  has_said_last_ |= is_last;
  send_to_all(*place);
}

void Conversation::send_to_all(Said& said) {
  said.out = peers_.size() - 1;
  for (std::uint32_t i = 1; i < peers_.size(); ++i) {  // everybody begins with somebody else
    const auto to = static_cast<std::uint32_t>((transport_.rank() + i) % peers_.size());
    transport_.send(to, Channel::kWords, std::as_bytes(std::span(&said.word, 1)), ticket_of(said));
  }
}

void Conversation::answer(std::uint32_t to) {
  Said& answers = said_[kAnswers];
  ++answers.out;
  transport_.send(to, Channel::kWords, std::as_bytes(std::span(&answers.word, 1)), ticket_of(answers));
}

bool Conversation::all_sent() const noexcept {
  return std::ranges::all_of(said_, [](const Said& said) { return said.out == 0; });
}

bool Conversation::take(Ticket ticket) {
  const std::uint64_t index = ticket - first_;
  if (index >= peers_.size()) {
    --said_[index - peers_.size()].out;
    return index - peers_.size() != kWork;
  }
  const auto rank = static_cast<std::uint32_t>(index);
  Peer& peer = peers_[rank];
  if (peer.arriving.what == Word::What::kCollective) {
    peer.words[peer.come++ % peer.words.size()] = peer.arriving;
    receive(rank);
  } else if (peer.arriving.what == Word::What::kHeard) {
    peer.heard = true;
    receive(rank);
  } else if (peer.arriving.what == Word::What::kAtWork) {
    peer.at_work = true;
    receive(rank);
    return false;
  } else {
    peer.last = peer.arriving;  // nothing follows it
    ++left_;
    if (peer.last->what == Word::What::kLeft && !has_said_last_) answer(rank);
  }
  return true;
}

const Word* Conversation::word(std::uint32_t rank, std::uint64_t number) const {
  const Peer& peer = peers_[rank];
  const bool known = number < peer.come && number + peer.words.size() >= peer.come;
  return known ? &peer.words[number % peer.words.size()] : nullptr;
}

const Word* Conversation::last(std::uint32_t rank) const { return peers_[rank].last ? &*peers_[rank].last : nullptr; }

}  // namespace spillway
