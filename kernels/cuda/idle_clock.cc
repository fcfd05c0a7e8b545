#include "kernels/cuda/idle_clock.h"

#include "kernels/cuda/stream.h"

namespace spillway::cuda {

IdleSeconds CudaIdleClock::seconds() const {
  IdleSeconds seconds;
  health_.guard([&] {
    const std::lock_guard lock(mutex_);
    settle_gaps(false);
    seconds.waiting = waiting_now();
    for (const Total& total : totals_) seconds.waiting += total.on != number_ ? total.seconds : 0;
    seconds.empty = seconds_of(number_) + (empty_now() ? since(tail_) : 0);
  });
  return seconds;
}

double CudaIdleClock::waiting_for(const Stream& on) const {
  const std::uint64_t number = static_cast<const CudaStream&>(on).number();
  double seconds = 0;
  health_.guard([&] {
    const std::lock_guard lock(mutex_);
    settle_gaps(false);
    const bool now = settled_ < begun_ && gaps_[settled_ % kGaps].on == number;
    seconds = seconds_of(number) + (now ? waiting_now() : 0);
  });
  return seconds;
}

void CudaIdleClock::record_tail() {
  const std::lock_guard lock(mutex_);
  cuda::record(tail_, stream_);
  tail_is_last_ = true;
}

void CudaIdleClock::retire() {
  const std::lock_guard lock(mutex_);
  retired_ = true;
}

bool CudaIdleClock::empty_now() const { return !retired_ && tail_is_last_ && is_done(cudaStreamQuery(stream_)); }

void CudaIdleClock::end_empty() {
  if (!empty_now()) return;
  Gap& gap = begin_gap(number_);
  gap.before.swap(tail_);
  cuda::record(gap.after, stream_);
  tail_is_last_ = false;
}

CudaIdleClock::Gap& CudaIdleClock::begin_gap(std::uint64_t on) {
  if (begun_ - settled_ == kGaps) settle_gaps(true);
  Gap& gap = gaps_[begun_++ % kGaps];
  gap.on = on;
  return gap;
}

// Those that are over, in order; the oldest one too when `oldest`, whatever it takes. In which the stream was empty is
// over as good as at once, and was counted while it lasted: time that was counted never goes away.
void CudaIdleClock::settle_gaps(bool oldest) const {
  while (settled_ < begun_) {
    const Gap& gap = gaps_[settled_ % kGaps];
    if (oldest || gap.on == number_) {
      check(cudaEventSynchronize(gap.after.get()), "work on the GPU");
    } else if (!gap.after.done()) {
      return;
    }
    oldest = false;
    for (Total& total : totals_) {
      if (total.on != gap.on && total.on != 0) continue;
      total.on = gap.on;
      total.seconds += seconds_between(gap.before, gap.after);
      break;
    }
    ++settled_;
  }
}

double CudaIdleClock::since(const RawEvent& event) const {
  cuda::record(now_, health_.clock());
  check(cudaEventSynchronize(now_.get()), "reading a time");
  return seconds_between(event, now_);
}

// Of the gaps that are settled.
double CudaIdleClock::seconds_of(std::uint64_t on) const {
  for (const Total& total : totals_) {
    if (total.on == on) return total.seconds;
  }
  return 0;
}

// Of the wait that the stream is in, if it is in one.
double CudaIdleClock::waiting_now() const {
  if (settled_ == begun_) return 0;
  const Gap& gap = gaps_[settled_ % kGaps];
  return gap.on != number_ && gap.before.done() ? since(gap.before) : 0;
}

}  // namespace spillway::cuda
