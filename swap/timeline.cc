#include "swap/timeline.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace spillway {

struct Timeline::Mark {
  std::unique_ptr<Stopwatch> watch;
  Stream* stream = nullptr;
  Span span;
  Mark* next = nullptr;  // that is free, that ended after it, or that the lease began before
};

Timeline::Timeline(std::size_t spans, std::size_t leases)
    : ring_(std::max<std::size_t>(spans, 1)), marks_(kMarks), visits_(leases) {}

Timeline::~Timeline() = default;

void Timeline::add(const Span& span) noexcept {
  const std::lock_guard lock(mutex_);
  ring_[added_++ % ring_.size()] = span;
}

void Timeline::attach(Device& device) {
  const std::lock_guard lock(mutex_);
  for (Mark& mark : marks_) {
    mark.watch = device.create_stopwatch();
    mark.next = std::exchange(free_, &mark);
  }
}

void Timeline::detach() {
  for (Ended& ended : ended_) collect(ended, kMarks);
  const std::lock_guard lock(mutex_);
  for (Ended& ended : ended_) {
    for (; ended.first; ended.first = ended.first->next) ++lost_marks_;  // a GPU failed, or a caller's stream is behind
  }
  free_ = nullptr;
  marks_.clear();
}

Timeline::Mark* Timeline::begin(const Span& span, Stream& stream) {
  Mark* mark = take_free();
  if (!mark) {
    // Only now are all streams asked: usually end() gives back marks as fast as they are taken.
    for (Ended& ended : ended_) collect(ended, kMarks);
    mark = take_free();
  }
  if (!mark) {
    const std::lock_guard lock(mutex_);
    ++lost_marks_;
    return nullptr;
  }
  mark->stream = &stream;
  mark->span = span;
  mark->next = nullptr;
  mark->watch->start(stream);
  return mark;
}

Timeline::Mark* Timeline::take_free() {
  const std::lock_guard lock(mutex_);
  return free_ ? std::exchange(free_, free_->next) : nullptr;
}

void Timeline::end(Mark* mark) {
  if (!mark) return;
  mark->watch->stop(*mark->stream);
  mark->next = nullptr;
  Ended* ended = nullptr;
  {
    const std::lock_guard lock(mutex_);
    ended = &ended_on(*mark->stream);
    (ended->first ? ended->last->next : ended->first) = mark;
    ended->last = mark;
  }
  collect(*ended, 2);  // more than come
}

// With mutex_ held.
Timeline::Ended& Timeline::ended_on(Stream& stream) {
  const auto found = std::ranges::find_if(
      ended_, [&stream](const Ended& ended) { return ended.stream == &stream || ended.stream == nullptr; });
  // More streams than lists: the rest share the last one, and their spans are collected a little later.
  if (found == ended_.end()) return ended_.back();
  found->stream = &stream;
  return *found;
}

// At most so many of those that ended first, up to one that has not come yet. The device is asked without the lock.
void Timeline::collect(Ended& ended, std::size_t most) {
  for (; most > 0; --most) {
    Mark* mark = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (!ended.first) return;
      mark = std::exchange(ended.first, ended.first->next);
    }
    // Asking the device may take long; others may add spans meanwhile.
    const auto times = mark->watch->times();
    const std::lock_guard lock(mutex_);
    // Not over yet: back to the front, so that the oldest stays first.
    if (!times) {
      if (!ended.first) ended.last = mark;
      mark->next = std::exchange(ended.first, mark);
      return;
    }
    mark->span.begin_ns = ns_at(times->begin);
    mark->span.end_ns = ns_at(times->end);
    ring_[added_++ % ring_.size()] = mark->span;
    mark->next = std::exchange(free_, mark);
  }
}

void Timeline::begin_visit(std::uint32_t lease, Visit visit, Stream& stream) {
  const SpanKind kind = visit.pass == Pass::kForward ? SpanKind::kForward : SpanKind::kBackward;
  Mark* mark = begin({.kind = kind, .subject = visit.block}, stream);
  if (!mark) return;
  mark->next = visits_[lease];
  visits_[lease] = mark;
}

void Timeline::end_visit(std::uint32_t lease) {
  Mark* mark = visits_[lease];
  if (!mark) return;
  visits_[lease] = mark->next;
  end(mark);
}

std::vector<Span> Timeline::spans() const {
  const std::lock_guard lock(mutex_);
  const std::size_t count = std::min<std::uint64_t>(added_, ring_.size());
  std::vector<Span> sorted(ring_.begin(), ring_.begin() + static_cast<std::ptrdiff_t>(count));
  std::ranges::stable_sort(sorted, {}, &Span::begin_ns);
  return sorted;
}

std::uint64_t Timeline::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_marks_ + (added_ - std::min<std::uint64_t>(added_, ring_.size()));
}

}  // namespace spillway
