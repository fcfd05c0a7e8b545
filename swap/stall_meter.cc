#include "swap/stall_meter.h"

#include <algorithm>
#include <utility>

namespace spillway {
namespace {

// What is shorter leaves no span: looking whether something has come is not waiting for it.
constexpr std::int64_t kShortestWaitNs = 10'000;

double advance(double& from, double to) { return to - std::exchange(from, to); }

}  // namespace

StallMeter::StallMeter(const Device& device, MeteredStreams streams, Timeline* timeline)
    : device_(device), streams_(streams), timeline_(timeline) {
  take();
}

bool StallMeter::enter(StallCause cause) {
  if (current_ != StallCause::kOther) return false;
  account();
  current_ = cause;
  if (timeline_) entered_ns_ = timeline_->now_ns();
  return true;
}

void StallMeter::leave() {
  account();
  const StallCause cause = std::exchange(current_, StallCause::kOther);
  if (!timeline_) return;
  const std::int64_t now = timeline_->now_ns();
  if (now - entered_ns_ < kShortestWaitNs) return;
  timeline_->add(
      {.kind = SpanKind::kWait, .subject = static_cast<std::uint64_t>(cause), .begin_ns = entered_ns_, .end_ns = now});
}

void StallMeter::account() { sum_[current_] += advance(empty_, device_.idle(*streams_.compute).empty); }

StallSeconds StallMeter::take() {
  account();
  const double h2d = advance(h2d_, waited(streams_.h2d)), d2h = advance(d2h_, waited(streams_.d2h));
  sum_[StallCause::kCopy] += h2d;
  sum_[StallCause::kGradient] += d2h;
  // Events of a stream of the caller's own; the three counts are not read at one instant.
  const double others = advance(waiting_, device_.idle(*streams_.compute).waiting) - h2d - d2h;
  sum_[StallCause::kOther] += std::max(others, 0.0);
  return std::exchange(sum_, {});
}

}  // namespace spillway
