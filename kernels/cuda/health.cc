#include "kernels/cuda/health.h"

#include <pthread.h>

#include <chrono>

#include "kernels/cuda/check.h"

namespace spillway::cuda {
namespace {

constexpr std::chrono::milliseconds kPollEvery{250};

}  // namespace

Health::Health() {
  check(cudaStreamCreateWithFlags(&clock_, cudaStreamNonBlocking), "creating a stream");
  watcher_ = std::thread(&Health::watch, this);
}

Health::~Health() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  watcher_.join();
  const Context::Use use(context_);
  static_cast<void>(cudaStreamDestroy(clock_));
}

double Health::seconds_since(const RawEvent& event) {
  const std::lock_guard lock(now_mutex_);
  record(now_, clock_);
  check(cudaEventSynchronize(now_.get()), "reading a time");
  return seconds_between(event, now_);
}

// The GPU's present lies between two readings of the host's clock; once more where something came between them.
std::chrono::steady_clock::time_point Health::time_of(const RawEvent& event) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kClose(50);
  Clock::time_point time;
  Clock::duration apart = Clock::duration::max();
  for (int tries = 0; tries < 4 && apart > kClose; ++tries) {
    const Clock::time_point before = Clock::now();
    const std::chrono::duration<double> ago(seconds_since(event));
    const Clock::duration now_apart = Clock::now() - before;
    if (now_apart >= apart) continue;
    apart = now_apart;
    time = before + apart / 2 - std::chrono::duration_cast<Clock::duration>(ago);
  }
  return time;
}

void Health::throw_if_failed() const {
  if (!failed_) return;
  const std::lock_guard lock(mutex_);
  throw *failure_;
}

void Health::fail(const Error& error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = error;
    failed_ = true;
  }
  changed_.notify_all();
}

Health::Call* Health::prepare(void (*function)(void*), void* argument) {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) free_.emplace_back();
  waiting_.splice(waiting_.end(), free_, free_.begin());
  waiting_.back() = {this, function, argument, std::prev(waiting_.end())};
  if (failed_) changed_.notify_all();
  return &waiting_.back();
}

void Health::run(void* argument) {
  Health& health = *static_cast<Call*>(argument)->owner;
  std::unique_lock lock(health.mutex_);
  if (!health.failed_) health.make(*static_cast<Call*>(argument), lock);  // else the watcher does
}

void Health::make(const Call& call, std::unique_lock<std::mutex>& lock) {
  void (*const function)(void*) = call.function;
  void* const argument = call.argument;
  free_.splice(free_.end(), waiting_, call.self);
  ++running_;
  lock.unlock();
  function(argument);
  lock.lock();
  if (--running_ == 0) changed_.notify_all();
}

void Health::wait_for_calls() {
  if (!failed_) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return waiting_.empty() && running_ == 0; });
}

void Health::watch() {
  ::pthread_setname_np(::pthread_self(), "spillway gpu");
  const Context::Use use(context_);
  const RelaxedCapture relaxed;
  std::unique_lock lock(mutex_);
  while (!stop_ || (failed_ && !waiting_.empty())) {
    if (!failed_) {
      if (changed_.wait_for(lock, kPollEvery, [this] { return stop_ || failed_; })) continue;
      lock.unlock();
      guard([this] { is_done(cudaStreamQuery(clock_)); });
      lock.lock();
      continue;
    }
    changed_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
    if (!waiting_.empty()) make(waiting_.front(), lock);
  }
}

}  // namespace spillway::cuda
