#include "swap/stall_meter.h"

#include <algorithm>
#include <utility>

namespace spillway {
namespace {

// What is shorter leaves no span: looking whether something has come is not waiting for it.
constexpr std::int64_t kShortestWaitNs = 10'000;

double advance(double& from, double to) { return to - std::exchange(from, to); }

double total(IdleClock& clock) {
  const IdleSeconds seconds = clock.seconds();
  return seconds.empty + seconds.waiting;
}

}  // namespace

StallMeter::StallMeter(Device& device, Streams streams, Timeline* timeline)
    : device_(device), streams_(streams), timeline_(timeline), clock_(device.idle_clock(*streams.compute)) {
  take();
}

void StallMeter::follow(Stream& compute) {
  std::shared_ptr<IdleClock> clock = device_.idle_clock(compute);
  if (clock == clock_) return;
  account();
  account_waits();
  // Idle time is counted from stream to stream without a jump.
  before_ += total(*clock_) - total(*clock);
  if (current_ != StallCause::kOther) {
    clock_->caller_waits(false);
    clock->caller_waits(true);
  }
  clock_ = std::move(clock);
  const IdleSeconds now = clock_->seconds();
  empty_ = now.empty;
  waiting_ = now.waiting;
  h2d_ = clock_->waiting_for(*streams_.h2d);
  d2h_ = clock_->waiting_for(*streams_.d2h);
  net_ = streams_.net ? clock_->waiting_for(*streams_.net) : 0;
}

bool StallMeter::enter(StallCause cause) {
  if (current_ != StallCause::kOther) return false;
  account();
  // While the caller waits it launches nothing: only then can a GPU's clock tell whether its stream has work.
  clock_->caller_waits(true);
  current_ = cause;
  if (timeline_) entered_ns_ = timeline_->now_ns();
  return true;
}

void StallMeter::leave() {
  account();
  clock_->caller_waits(false);
  const StallCause cause = std::exchange(current_, StallCause::kOther);
  if (!timeline_) return;
  const std::int64_t now = timeline_->now_ns();
  if (now - entered_ns_ < kShortestWaitNs) return;
  timeline_->add(
      {.kind = SpanKind::kWait, .subject = static_cast<std::uint64_t>(cause), .begin_ns = entered_ns_, .end_ns = now});
}

void StallMeter::account() { sum_[current_] += advance(empty_, clock_->seconds().empty); }

void StallMeter::account_waits() {
  const double waiting = advance(waiting_, clock_->seconds().waiting);
  const double h2d = advance(h2d_, clock_->waiting_for(*streams_.h2d));
  const double d2h = advance(d2h_, clock_->waiting_for(*streams_.d2h));
  const double net = streams_.net ? advance(net_, clock_->waiting_for(*streams_.net)) : 0;
  // The stream's wait has a cause by the stream that it waits for; see stall_meter.h.
  sum_[StallCause::kCopy] += h2d;
  sum_[StallCause::kGradient] += d2h;
  sum_[StallCause::kNetwork] += net;
  sum_[StallCause::kOther] += std::max(waiting - h2d - d2h - net, 0.0);  // events of a stream of the caller's own
}

StallSeconds StallMeter::take() {
  account();
  account_waits();
  return std::exchange(sum_, {});
}

double StallMeter::idle_seconds() const { return before_ + total(*clock_); }

}  // namespace spillway
