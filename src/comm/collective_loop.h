// Carries out what is in a CollectiveQueue over a Transport: the communicator's thread.
//
//   announced ─► all others' words have come and are the same ─► data moves ─► over
//       │                     │                                      │
//       └─ no progress ───────┴─ a word differs, a rank has left ────┴─► last words ─► the queue fails
//
// Last words: whoever finds that it cannot go on says so to all, once, and whoever hears that does the same. A second
// later each rank knows who answers and how far everybody has come, and names them.
//
// What is called for a stream of a GPU is announced when it is called, ahead of its stream, so that the stream finds
// its gate open when it comes to it; but an all_reduce, whose values are in memory only then, and a barrier. Whether
// others are waited for is counted from when the stream has come.
//
// A rank at long work that notes how it goes on (CollectiveQueue::note_work()) is waited for: while it does not wait
// itself, its thread tells the others.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/comm/collective_queue.h"
#include "src/comm/conversation.h"
#include "src/comm/stream_mover.h"
#include "src/comm/transfers.h"
#include "src/comm/transport.h"

namespace spillway {

class CollectiveLoop {
 public:
  CollectiveLoop(Transport& transport, CollectiveQueue& queue, const TransferLimits& limits, double patience_seconds);

  // Before anything is called for a stream of a GPU. Outlives the loop.
  void move_streams_by(StreamMover& streams) { streams_ = &streams; }

  void run();  // until the queue stops
  // Afterwards: whether nobody knows this object's memory any more.
  bool lets_go() const noexcept { return lets_go_; }

 private:
  using Clock = std::chrono::steady_clock;

  bool announce();
  bool take_tickets();
  bool agree();
  bool agree_on(std::uint64_t number, const Word& own);
  bool move();
  bool move_on_streams();
  bool go_on();  // all of these; false: nothing has changed
  void tell_of_work();
  void watch(bool progress);
  void rest(bool progress);
  void finish(std::uint64_t number);
  void give_up(Word::Reason reason, std::uint64_t failed, const std::string& text = {});
  const Word* announced_by(std::uint32_t rank, std::uint64_t number) const;
  void leave();
  void say_last(const Word& own);
  template <typename Condition>
  void take_until(Condition condition, Clock::duration most);
  std::vector<std::uint32_t> unanswering() const;
  bool has_come(std::uint64_t number) const;  // the stream that it was called for
  bool waits_for_others() const { return announced_ > all_over_ && has_come(all_over_); }
  bool have_parted() const noexcept { return conversation_.all_have_left() && conversation_.all_sent(); }

  Transport& transport_;
  CollectiveQueue& queue_;
  const double patience_seconds_;
  const Clock::duration patience_;
  Conversation conversation_;
  Transfers transfers_;
  std::atomic<StreamMover*> streams_ = nullptr;
  std::vector<std::uint64_t> on_streams_;  // numbers that are agreed on and not over
  std::uint64_t marks_ = 0;                // of streams, as they were last seen
  std::array<Word, kAhead> own_;           // announced, by number
  std::array<bool, kAhead> over_{};        // the same
  std::vector<std::string> hosts_;
  std::vector<const Word*> words_;            // of every rank
  std::uint64_t announced_ = 0, agreed_ = 0;  // how many
  std::uint64_t all_over_ = 0;                // numbers below it are over
  bool ended_ = false;                        // given up
  bool lets_go_ = false;
  std::optional<Clock::time_point> differ_since_;

  Clock::time_point polled_;               // last
  std::vector<Clock::duration> waited_;    // for each rank, without progress and without word that it is at work
  std::optional<Clock::time_point> told_;  // that this one is
  unsigned idle_rounds_ = 0;
};

}  // namespace spillway
