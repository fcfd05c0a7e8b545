#include "kernels/cuda/idle_clock.h"

#include <algorithm>
#include <utility>

#include "kernels/cuda/stream.h"

namespace spillway::cuda {

IdleSeconds CudaIdleClock::seconds() {
  const std::lock_guard lock(mutex_);
  health_.guard([this] { count(); });
  IdleSeconds seconds;
  for (const Total& total : totals_) (total.on == number_ ? seconds.empty : seconds.waiting) += total.seconds;
  return seconds;
}

double CudaIdleClock::waiting_for(const Stream& on) const {
  const std::uint64_t number = static_cast<const CudaStream&>(on).number();
  const std::lock_guard lock(mutex_);
  for (const Total& total : totals_) {
    if (total.on == number) return total.seconds;
  }
  return 0;
}

void CudaIdleClock::caller_waits(bool waits) {
  const std::lock_guard lock(mutex_);
  caller_waits_ = waits;
  if (!waits) {
    tail_is_last_ = tail_is_last_ && nothing_unseen();
  } else if (!retired_) {
    health_.guard([this] {
      if (!empty_now()) put_tail();
    });
  }
}

void CudaIdleClock::begin_visit() {
  const std::lock_guard lock(mutex_);
  ++visits_;
  tail_is_last_ = false;
}

void CudaIdleClock::end_visit() {
  const std::lock_guard lock(mutex_);
  visits_ = std::max(visits_ - 1, 0);  // it may have begun before the clock was asked for
  put_tail();
}

void CudaIdleClock::retire() {
  const std::lock_guard lock(mutex_);
  retired_ = true;
}

void CudaIdleClock::put_tail() {
  tail_is_last_ = nothing_unseen();
  if (!tail_is_last_) return;
  cuda::record(tail_, stream_);
  tail_counted_ = 0;
}

bool CudaIdleClock::empty_now() const {
  const RelaxedCapture relaxed;
  return !retired_ && tail_is_last_ && is_done(cudaStreamQuery(stream_));
}

void CudaIdleClock::end_empty() {
  if (!empty_now()) return;
  Gap& gap = begin_gap(number_);
  gap.before.swap(tail_);
  gap.counted = std::exchange(tail_counted_, 0);
  cuda::record(gap.after, stream_);
  tail_is_last_ = false;
}

CudaIdleClock::Gap& CudaIdleClock::begin_gap(std::uint64_t on) {
  if (begun_ - counted_gaps_ == kGaps) count_ended_gaps(true);
  Gap& gap = gaps_[begun_++ % kGaps];
  gap.on = on;
  gap.counted = 0;
  return gap;
}

// Those that are over, in order; the oldest one too when `oldest`, whatever it takes. One in which the stream was empty
// is over as good as at once.
void CudaIdleClock::count_ended_gaps(bool oldest) {
  while (counted_gaps_ < begun_) {
    Gap& gap = gaps_[counted_gaps_ % kGaps];
    if (oldest || gap.on == number_) {
      check(cudaEventSynchronize(gap.after.get()), "work on the GPU");
    } else if (!gap.after.done()) {
      return;
    }
    oldest = false;
    add(gap.on, seconds_between(gap.before, gap.after), gap.counted);
    ++counted_gaps_;
  }
}

// Up to now: of what goes on, too. Whether a wait still goes on is asked after the time was taken.
void CudaIdleClock::count() {
  count_ended_gaps(false);
  if (counted_gaps_ < begun_) {
    Gap& gap = gaps_[counted_gaps_ % kGaps];
    if (!gap.before.done()) return;
    const double so_far = health_.seconds_since(gap.before);
    gap.after.done() ? count_ended_gaps(false) : add(gap.on, so_far, gap.counted);
  } else if (empty_now()) {
    add(number_, health_.seconds_since(tail_), tail_counted_);
  }
}

// `counted`: how much of the seconds has been added before.
void CudaIdleClock::add(std::uint64_t on, double seconds, double& counted) {
  const double more = std::max(seconds - counted, 0.0);
  counted += more;
  for (Total& total : totals_) {
    if (total.on != on && total.on != 0) continue;
    total.on = on;
    total.seconds += more;
    return;
  }
}

}  // namespace spillway::cuda
