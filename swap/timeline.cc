#include "swap/timeline.h"

#include <algorithm>

namespace spillway {

struct Timeline::Mark {
  Timeline* timeline = nullptr;
  Stream* stream = nullptr;
  Span span;
  Mark* next = nullptr;  // that is free, or that the lease began before
};

Timeline::Timeline(std::size_t spans, std::size_t leases)
    : ring_(std::max<std::size_t>(spans, 1)), marks_(kMarks), visits_(leases) {
  for (Mark& mark : marks_) {
    mark.timeline = this;
    mark.next = free_;
    free_ = &mark;
  }
}

Timeline::~Timeline() = default;

void Timeline::add(const Span& span) noexcept {
  const std::lock_guard lock(mutex_);
  ring_[added_++ % ring_.size()] = span;
}

Timeline::Mark* Timeline::begin(const Span& span, Device& device, Stream& stream) {
  Mark* mark = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!free_) {
      ++lost_marks_;
      return nullptr;
    }
    mark = free_;
    free_ = mark->next;
  }
  mark->stream = &stream;
  mark->span = span;
  mark->next = nullptr;
  device.call_async(
      [](void* argument) {
        Mark& begun = *static_cast<Mark*>(argument);
        begun.span.begin_ns = begun.timeline->now_ns();
      },
      mark, stream);
  return mark;
}

void Timeline::end(Mark* mark, Device& device) {
  if (!mark) return;
  device.call_async(
      [](void* argument) {
        Mark& ended = *static_cast<Mark*>(argument);
        ended.span.end_ns = ended.timeline->now_ns();
        ended.timeline->give_back(ended);
      },
      mark, *mark->stream);
}

void Timeline::give_back(Mark& mark) noexcept {
  const std::lock_guard lock(mutex_);
  ring_[added_++ % ring_.size()] = mark.span;
  mark.next = free_;
  free_ = &mark;
}

void Timeline::begin_visit(std::uint32_t lease, Visit visit, Device& device, Stream& stream) {
  const SpanKind kind = visit.pass == Pass::kForward ? SpanKind::kForward : SpanKind::kBackward;
  Mark* mark = begin({.kind = kind, .subject = visit.block}, device, stream);
  if (!mark) return;
  mark->next = visits_[lease];
  visits_[lease] = mark;
}

void Timeline::end_visit(std::uint32_t lease, Device& device) {
  Mark* mark = visits_[lease];
  if (!mark) return;
  visits_[lease] = mark->next;
  end(mark, device);
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
