#include "src/comm/collective_queue.h"

#include <algorithm>
#include <utility>

#include "src/comm/last_words.h"

namespace spillway {
namespace {

constexpr std::chrono::milliseconds kLookEvery{250};
constexpr std::chrono::seconds kBeyondPatience{2};  // in which the thread itself would have found what is wrong

}  // namespace

CollectiveQueue::CollectiveQueue(std::uint32_t ranks, double patience_seconds, std::string library)
    : patience_seconds_(patience_seconds), library_(std::move(library)), calls_(kCalls) {
  for (Call& call : calls_) call.slices.resize(ranks);
}

std::uint64_t CollectiveQueue::call(const Collective& collective, Where where) {
  std::unique_lock lock(mutex_);
  if (!wait_for_thread(lock, [&] { return failure_ || called_ - all_over_ < kCalls; })) hangs();
  if (failure_) throw Error(*failure_);
  Call& call = at(called_);
  call.collective = collective;
  call.collective.ending = ending_.load(std::memory_order_relaxed);
  std::ranges::copy(collective.slices, call.slices.begin());
  if (!collective.slices.empty()) call.collective.slices = call.slices;
  call.ready = call.over = false;
  call.where = where;
  if (where == Where::kGpu) {
    ++on_gpu_;
    news_ = true;
    something_to_do_.notify_one();
  }
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
  if (!wait_for_thread(lock, [&] { return failure_ || all_over_ > number || at(number).over; })) hangs();
  ++left_;
  over_.notify_all();
}

void CollectiveQueue::drain() {
  std::unique_lock lock(mutex_);
  const auto have_left = [&] { return left_ + (failure_ ? on_gpu_ : 0) == called_; };
  if (wait_for_thread(lock, have_left)) return;
  hangs();
  over_.wait(lock, have_left);
}

bool CollectiveQueue::watch() {
  std::unique_lock lock(mutex_);
  if (wait_for_thread(lock, [&] { return ended_; })) return false;
  hangs();
  return true;
}

bool CollectiveQueue::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  something_to_do_.notify_one();
  return hung_in_ != rounds_ && wait_for_thread(lock, [&] { return ended_; });
}

void CollectiveQueue::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  over_.notify_all();
}

// False: the thread does not go round any more. A process that was stopped for an hour has not looked for an hour.
template <typename Condition>
bool CollectiveQueue::wait_for_thread(std::unique_lock<std::mutex>& lock, Condition condition) {
  using Clock = std::chrono::steady_clock;
  const auto patience = std::chrono::duration<double>(patience_seconds_);
  Clock::duration stands{};
  std::uint64_t rounds = rounds_;
  Clock::time_point looked = Clock::now();
  while (!over_.wait_for(lock, kLookEvery, condition)) {
    const Clock::time_point now = Clock::now();
    const std::uint64_t before = std::exchange(rounds, rounds_);
    const bool stood = rounds == before;
    stands = stood ? stands + std::min<Clock::duration>(now - looked, 2 * kLookEvery) : Clock::duration{};
    looked = now;
    if (stands > patience + kBeyondPatience) return false;
  }
  return true;
}

// Open MPI 4.1's TCP takes a lock twice when a connection breaks while data is on its way, and then waits for itself
// (mca_btl_tcp_endpoint_close, which calls back under endpoint_send_lock).
void CollectiveQueue::hangs() {
  hung_in_ = rounds_;
  if (!failure_)
    failure_ =
        error_of_hanging(at(all_over_).collective, all_over_, library_, patience_seconds_ + kBeyondPatience.count());
  over_.notify_all();
}

const Collective* CollectiveQueue::ready(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const Call& call = calls_[number % kCalls];
  return number < called_ && (call.ready || call.where == Where::kGpu) ? &call.collective : nullptr;
}

bool CollectiveQueue::on_gpu(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return calls_[number % kCalls].where == Where::kGpu;
}

void CollectiveQueue::over(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  at(number).over = true;
  if (at(number).where == Where::kGpu) {
    --on_gpu_;
    ++left_;
  }
  while (all_over_ < called_ && at(all_over_).over) ++all_over_;
  over_.notify_all();
}

void CollectiveQueue::fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = error;
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
