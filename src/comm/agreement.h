// What ranks decide together outside of the work on a step: whether something went well on all of them, and small
// numbers. It is asked in the same order on every rank, and answers once all of them have asked.
//
//   all(work)                  work on every rank; what fails on one fails on all, with the lowest failing rank's error
//   fold(values, kMin) …       the same values on every rank afterwards
//
// With one rank everything is as that one has it. One thread at a time. Errors: those of the Communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/device.h"
#include "kernels/workers.h"
#include "spillway/communicator.h"
#include "spillway/error.h"
#include "swap/rank.h"

namespace spillway {

class Agreement {
 public:
  // `communicator`: null for one rank; stays valid.
  explicit Agreement(Communicator* communicator);

  Rank rank() const noexcept { return rank_; }
  bool alone() const noexcept { return rank_.count == 1; }

  // Runs `work`, waits for the others', and throws where it failed on some rank. Not inside of other such work: a rank
  // that fails before would not come to it.
  template <typename Work>
  auto all(Work&& work) -> std::decay_t<decltype(work())> {
    if (alone()) return work();
    if constexpr (std::is_void_v<decltype(work())>) {
      tell(failure_of([&] { work(); }));
    } else {
      std::optional<std::decay_t<decltype(work())>> result;
      tell(failure_of([&] { result.emplace(work()); }));
      return *std::move(result);
    }
  }
  // The same of work that was done: what failed here, if it did.
  void tell(const std::optional<Error>& failure);

  // Of long work that the others wait for, in all() or before: it goes on (Communicator::note_work()). Any thread.
  void note_work() const noexcept {
    if (communicator_) communicator_->note_work();
  }

  // Communicator::note_ending()
  void note_ending(bool ending) const noexcept {
    if (communicator_) communicator_->note_ending(ending);
  }

  void fold(std::span<std::uint64_t> values, Fold fold);
  void fold(std::span<double> values, Fold fold);
  // Bytes of rank `root` on every rank; as many on all.
  void broadcast(std::span<std::byte> bytes, std::uint32_t root);
  // Rank `root`'s text, or bytes, on every rank; that of the others is not looked at.
  std::string same(std::string text, std::uint32_t root);
  // Each brings a value, and has all of them, by rank.
  std::vector<std::uint64_t> gather(std::uint64_t value);

 private:
  std::optional<Error> failure_of(const std::function<void()>& work) const;
  template <typename Value>
  void fold_all(std::span<Value> values, Fold fold);
  void finish();

  Communicator* const communicator_;  // null: alone
  const Rank rank_;
  std::unique_ptr<HostWorkers> workers_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace spillway
