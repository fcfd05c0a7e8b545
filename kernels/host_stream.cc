#include "kernels/host_stream.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "kernels/float_environment.h"
#include "spillway/error.h"

namespace spillway {

bool StreamProgress::reached(std::uint64_t position) const {
  const std::lock_guard lock(mutex_);
  return completed_ >= position;
}

void StreamProgress::wait_until(std::uint64_t position) const {
  std::unique_lock lock(mutex_);
  advanced_.wait(lock, [&] { return completed_ >= position; });
}

IdleSeconds StreamProgress::seconds() {
  using Seconds = std::chrono::duration<double>;
  const std::lock_guard lock(mutex_);
  count_idle();
  told_ = waited_;
  return {.empty = Seconds(empty_total_).count(), .waiting = Seconds(waiting_total_).count()};
}

double StreamProgress::waiting_for(const Stream& on) const {
  const StreamProgress* const other = static_cast<const HostStream&>(on).progress().get();
  const std::lock_guard lock(mutex_);
  Clock::duration total{};
  for (const Waited& waited : told_) total += waited.on == other ? waited.total : Clock::duration{};
  return std::chrono::duration<double>(total).count();
}

void StreamProgress::begin_idle(const StreamProgress* on) {
  idle_ = true;
  awaited_ = on;
  idle_since_ = Clock::now();
}

void StreamProgress::end_idle() {
  count_idle();
  idle_ = false;
  awaited_ = nullptr;
}

void StreamProgress::count_idle() {
  if (!idle_) return;
  const Clock::time_point now = Clock::now();
  const Clock::duration more = now - std::exchange(idle_since_, now);
  (awaited_ ? waiting_total_ : empty_total_) += more;
  for (Waited& waited : waited_) {
    if (!awaited_ || (waited.on && waited.on != awaited_)) continue;
    waited.on = awaited_;
    waited.total += more;
    break;
  }
}

HostStream::HostStream(std::string name, std::shared_ptr<StreamProgress> progress, HostWorkers& workers)
    : progress_(std::move(progress)), workers_(workers), thread_([this] { run(); }) {
  name.resize(std::min<std::size_t>(name.size(), 15));  // the kernel's limit (pthread_setname_np(3))
  pthread_setname_np(thread_.native_handle(), name.c_str());
}

HostStream::~HostStream() {
  {
    const std::lock_guard lock(progress_->mutex_);
    stopping_ = true;
  }
  work_.notify_one();
  thread_.join();
}

void HostStream::launch(const HostTask& task) {
  SPILLWAY_CHECK(std::this_thread::get_id() != thread_.get_id(), "work on a stream must not feed that stream");
  {
    std::unique_lock lock(progress_->mutex_);
    progress_->advanced_.wait(lock, [&] { return progress_->enqueued_ - progress_->completed_ < kRingTasks; });
    ring_[progress_->enqueued_ % kRingTasks] = task;
    ++progress_->enqueued_;
  }
  work_.notify_one();
}

void HostStream::synchronize() {
  SPILLWAY_CHECK(std::this_thread::get_id() != thread_.get_id(), "a stream cannot wait for itself");
  progress_->wait_until(position());
}

std::uint64_t HostStream::position() const {
  const std::lock_guard lock(progress_->mutex_);
  return progress_->enqueued_;
}

void HostStream::launch_wait(const StreamProgress& other, std::uint64_t position) {
  // A record on this very stream has been passed by the time the task runs.
  if (&other == progress_.get()) return;
  launch([this, &other, position](HostWorkers&) {
    if (other.reached(position)) return;
    {
      const std::lock_guard lock(progress_->mutex_);
      progress_->begin_idle(&other);
    }
    other.wait_until(position);
    const std::lock_guard lock(progress_->mutex_);
    progress_->end_idle();
  });
}

void HostStream::run() {
  // A thread inherits its creator's settings; a model's tasks compute on this thread too.
  const DefaultFloatEnvironment environment;
  std::unique_lock lock(progress_->mutex_);
  for (;;) {
    if (progress_->completed_ == progress_->enqueued_) {
      if (stopping_) return;
      progress_->begin_idle(nullptr);
      work_.wait(lock, [&] { return stopping_ || progress_->completed_ != progress_->enqueued_; });
      progress_->end_idle();
      continue;
    }
    // Run in place: launch() reuses the slot only after completed_ has moved past it.
    const HostTask& task = ring_[progress_->completed_ % kRingTasks];
    lock.unlock();
    task(workers_);
    lock.lock();
    ++progress_->completed_;
    progress_->advanced_.notify_all();
  }
}

}  // namespace spillway
