// Collectives between those who call them, the streams that come to them, and the communicator's thread that carries
// them out: a ring of calls in their order.
//
//     over          ready           called            call    the caller's thread takes the next number
//   ───┴──────┬───────┴──────┬────────┴───── number    arrive  a stream comes to it, and waits until it is over
//      carried out      streams come                   over    the communicator's thread has carried it out
//
// Streams of a GPU do not arrive, nor wait here: they come to a gate of a StreamMover's, which tells when.
//
// After fail() nothing waits for anything any more. Who waits for the communicator's thread looks whether it goes
// round: a library's call that never comes back (below, hangs()) must not stop the process, too.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "spillway/communicator.h"
#include "spillway/error.h"

namespace spillway {

class CollectiveQueue {
 public:
  static constexpr std::uint64_t kCalls = 64;  // at a time; further ones wait

  CollectiveQueue(std::uint32_t ranks, double patience_seconds, std::string library);

  // Callers. Copies the slices. Throws what it failed with.
  enum class Where : std::uint8_t { kHost, kGpu };
  std::uint64_t call(const Collective& collective, Where where = Where::kHost);
  void throw_if_failed() const;
  // Any thread: this rank does what others wait for, and it goes on.
  void note_work() noexcept { works_.store(true, std::memory_order_relaxed); }
  // Of calls from here on: Communicator::note_ending().
  void note_ending(bool ending) noexcept { ending_.store(ending, std::memory_order_relaxed); }
  // A stream's thread, once for every number that is of the host.
  void arrive(std::uint64_t number);
  // Until every call has been arrived at and left; those of a GPU's streams are over, or the queue has failed.
  void drain();
  // Until the communicator's thread ends, or hangs: true. For a GPU's streams, in which no thread waits for it.
  bool watch();
  // Stops the communicator's thread; after drain(). False: it hangs.
  bool stop();

  // The communicator's thread. Null: not called, or no stream has come to it, of the host. Valid until it is over.
  const Collective* ready(std::uint64_t number) const;
  bool on_gpu(std::uint64_t number) const;  // that was called
  void over(std::uint64_t number);
  bool take_work() noexcept { return works_.exchange(false, std::memory_order_relaxed); }  // noted since the last time
  void fail(const Error& error);
  bool stopping() const;
  void go_round() noexcept { rounds_.fetch_add(1, std::memory_order_relaxed); }  // often, whatever it does
  void end();                                                                    // the last call
  // How many were called.
  std::uint64_t called() const;
  // Until a stream comes to another one, or stop(), or for so long.
  void wait(std::chrono::microseconds most);

 private:
  struct Call {
    Collective collective;
    std::vector<std::uint64_t> slices;
    Where where = Where::kHost;
    bool ready = false, over = false;
  };
  Call& at(std::uint64_t number) { return calls_[number % kCalls]; }
  template <typename Condition>
  bool wait_for_thread(std::unique_lock<std::mutex>& lock, Condition condition);
  void hangs();

  const double patience_seconds_;
  const std::string library_;
  std::atomic<std::uint64_t> rounds_ = 0;
  std::atomic<bool> works_ = false, ending_ = false;
  mutable std::mutex mutex_;                        // guards everything below
  std::condition_variable something_to_do_, over_;  // over_: also left, and failed
  std::vector<Call> calls_;
  std::uint64_t called_ = 0, left_ = 0;
  std::uint64_t on_gpu_ = 0;    // that are not over
  std::uint64_t all_over_ = 0;  // numbers below it are over
  bool news_ = false, stopping_ = false, ended_ = false;
  std::optional<Error> failure_;
  std::optional<std::uint64_t> hung_in_;  // round
};

}  // namespace spillway
