// The channel of words: says this rank's to all others, and listens to each of them all the time, so that an
// announcement, or a last word, is known when it arrives and not when somebody asks. A rank that leaves is answered,
// and one at long work says so now and then.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "src/comm/transport.h"
#include "src/comm/word.h"

namespace spillway {

// Collectives that a rank may have announced and that are not over yet. A rank is done with one only after every other
// rank has announced it; so none hears of more than 2 * kAhead that it still has to look at.
inline constexpr std::size_t kAhead = 8;

class Conversation {
 public:
  // Tickets from `ticket` on are its own.
  Conversation(Transport& transport, Ticket ticket);

  void listen();  // begins
  bool may_say() const noexcept;
  void say(const Word& word);  // while may_say(), or a last word
  bool may_say_at_work() const noexcept { return said_[kWork].out == 0; }
  void say_at_work() { send_to_all(said_[kWork]); }
  bool all_sent() const noexcept;  // what was said is out of our hands
  bool take(Ticket ticket);        // one of its own is over. Whether it is more than that a rank is at work

  // What `rank` announced as its collective `number`, as far as it is remembered; null: it has not come.
  const Word* word(std::uint32_t rank, std::uint64_t number) const;
  // Null: it still takes part.
  const Word* last(std::uint32_t rank) const;
  bool all_have_left() const noexcept { return left_ + 1 == transport_.ranks(); }
  // Whether `rank` has said that it is at work since this was asked last.
  bool was_at_work(std::uint32_t rank) noexcept { return std::exchange(peers_[rank].at_work, false); }
  // Whether `rank` has said its last word, or has answered this rank's.
  bool has_answered(std::uint32_t rank) const noexcept { return peers_[rank].heard || peers_[rank].last; }

 private:
  struct Said {
    Word word;
    std::size_t out = 0;  // sends that are not over
  };
  struct Peer {
    Word arriving;
    std::array<Word, 2 * kAhead> words;
    std::uint64_t come = 0;
    std::optional<Word> last;
    bool heard = false, at_work = false;
  };

  void receive(std::uint32_t from);
  void answer(std::uint32_t to);
  void send_to_all(Said& said);
  Ticket ticket_of(const Said& said) const noexcept;

  Transport& transport_;
  const Ticket first_;
  static constexpr std::size_t kLastWord = kAhead, kAnswers = kAhead + 1, kWork = kAhead + 2;
  std::array<Said, kAhead + 3> said_;  // announcements, the last word, what those who leave are answered, work
  bool has_said_last_ = false;
  std::vector<Peer> peers_;
  std::uint32_t left_ = 0;
};

}  // namespace spillway
