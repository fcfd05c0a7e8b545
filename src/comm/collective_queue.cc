#include "src/comm/collective_queue.h"

#include <algorithm>

namespace spillway {

CollectiveQueue::CollectiveQueue(std::uint32_t ranks) : calls_(kCalls) {
  for (Call& call : calls_) call.slices.resize(ranks);
}

std::uint64_t CollectiveQueue::call(const Collective& collective) {
  std::unique_lock lock(mutex_);
  over_.wait(lock, [&] { return failure_ || called_ - all_over_ < kCalls; });
  if (failure_) throw Error(*failure_);
  Call& call = at(called_);
  call.collective = collective;
  std::ranges::copy(collective.slices, call.slices.begin());
  if (!collective.slices.empty()) call.collective.slices = call.slices;
  call.ready = call.over = false;
  return called_++;
}

void CollectiveQueue::throw_if_failed() const {
  const std::lock_guard lock(mutex_);
  if (failure_) throw Error(*failure_);
}

void CollectiveQueue::arrive(std::uint64_t number) {
  std::unique_lock lock(mutex_);
  at(number).ready = true;
  news_ = true;
  something_to_do_.notify_one();
  over_.wait(lock, [&] { return failure_ || all_over_ > number || at(number).over; });
  ++left_;
  over_.notify_all();
}

void CollectiveQueue::drain() {
  std::unique_lock lock(mutex_);
  over_.wait(lock, [&] { return left_ == called_; });
}

void CollectiveQueue::stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  something_to_do_.notify_one();
}

const Collective* CollectiveQueue::ready(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const Call& call = calls_[number % kCalls];
  return number < called_ && call.ready ? &call.collective : nullptr;
}

void CollectiveQueue::over(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  at(number).over = true;
  while (all_over_ < called_ && at(all_over_).over) ++all_over_;
  over_.notify_all();
}

void CollectiveQueue::fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  failure_ = error;
  over_.notify_all();
}

bool CollectiveQueue::stopping() const {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

std::uint64_t CollectiveQueue::called() const {
  const std::lock_guard lock(mutex_);
  return called_;
}

void CollectiveQueue::wait(std::chrono::microseconds most) {
  std::unique_lock lock(mutex_);
  something_to_do_.wait_for(lock, most, [&] { return news_ || stopping_; });
  news_ = false;
}

}  // namespace spillway
