#include "kernels/cuda/stream.h"

#include <nvtx3/nvToolsExtCudaRt.h>

#include "kernels/cuda/check.h"

namespace spillway::cuda {
double seconds_between(const RawEvent& from, const RawEvent& to) {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, from.get(), to.get()), "reading a time");
  return milliseconds > 0 ? static_cast<double>(milliseconds) * 1e-3 : 0;
}

// Threads that wait for an event sleep: the cores have the optimizer to run. What is recorded to know the time has
// happened by then.
RawEvent::RawEvent(Use use) {
  const unsigned flags = use == Use::kNow    ? cudaEventDefault
                         : use == Use::kTime ? cudaEventBlockingSync
                                             : cudaEventBlockingSync | cudaEventDisableTiming;
  check(cudaEventCreateWithFlags(&event_, flags), "creating an event");
}

RawEvent::~RawEvent() { static_cast<void>(cudaEventDestroy(event_)); }

bool RawEvent::done() const { return is_done(cudaEventQuery(event_)); }

CudaStream::CudaStream(const std::string& name, std::uint64_t number, std::optional<cudaStream_t> adopted,
                       Health& health)
    : stream_(adopted.value_or(nullptr)), owned_(!adopted), number_(number), health_(health) {
  if (!owned_) return;
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  nvtxNameCudaStreamA(stream_, ("spillway " + name).c_str());
}

CudaStream::~CudaStream() {
  if (!owned_) return;
  static_cast<void>(cudaStreamSynchronize(stream_));
  static_cast<void>(cudaStreamDestroy(stream_));
}

void CudaStream::launch(const HostTask&) { SPILLWAY_CHECK(false, "a HostTask runs on the host device only"); }

void CudaStream::synchronize() {
  health_.guard([&] {
    {
      const std::lock_guard lock(mutex_);
      check(cudaEventRecord(done_.get(), stream_), "recording an event");
    }
    check(cudaEventSynchronize(done_.get()), "work on the GPU");
  });
  health_.wait_for_calls();
}

void CudaStream::record(CudaEvent& event) {
  add([&](cudaStream_t stream) { check(cudaEventRecord(event.raw.get(), stream), "recording an event"); });
  event.stream = number_;
}

void CudaStream::mark(const RawEvent& event) {
  health_.guard([&] { check(cudaEventRecord(event.get(), stream_), "recording an event"); });
}

void CudaStream::wait(const CudaEvent& event) {
  health_.guard([&] {
    if (event.stream == number_ || event.raw.done()) return;
    const std::lock_guard lock(mutex_);
    end_empty();
    const Gap& gap = begin_gap(event.stream);
    check(cudaEventRecord(gap.before.get(), stream_), "recording an event");
    check(cudaStreamWaitEvent(stream_, event.raw.get(), 0), "waiting for an event");
    check(cudaEventRecord(gap.after.get(), stream_), "recording an event");
    record_tail();
  });
}

IdleSeconds CudaStream::idle() const {
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

double CudaStream::wait_seconds(const CudaStream& on) const {
  double seconds = 0;
  health_.guard([&] {
    const std::lock_guard lock(mutex_);
    settle_gaps(false);
    const bool now = settled_ < begun_ && gaps_[settled_ % kGaps].on == on.number_;
    seconds = seconds_of(on.number_) + (now ? waiting_now() : 0);
  });
  return seconds;
}

bool CudaStream::empty_now() const { return has_tail_ && is_done(cudaStreamQuery(stream_)); }

void CudaStream::end_empty() {
  if (!empty_now()) return;
  Gap& gap = begin_gap(number_);
  gap.before.swap(tail_);
  check(cudaEventRecord(gap.after.get(), stream_), "recording an event");
}

void CudaStream::record_tail() {
  check(cudaEventRecord(tail_.get(), stream_), "recording an event");
  has_tail_ = true;
}

CudaStream::Gap& CudaStream::begin_gap(std::uint64_t on) {
  if (begun_ - settled_ == kGaps) settle_gaps(true);
  Gap& gap = gaps_[begun_++ % kGaps];
  gap.on = on;
  return gap;
}

// Those that are over, in order; the oldest one too when `oldest`, whatever it takes.
void CudaStream::settle_gaps(bool oldest) const {
  while (settled_ < begun_) {
    const Gap& gap = gaps_[settled_ % kGaps];
    if (oldest) check(cudaEventSynchronize(gap.after.get()), "work on the GPU");
    if (!oldest && !gap.after.done()) return;
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

double CudaStream::since(const RawEvent& event) const {
  check(cudaEventRecord(now_.get(), health_.clock()), "recording an event");
  check(cudaEventSynchronize(now_.get()), "reading a time");
  return seconds_between(event, now_);
}

// Of the gaps that are settled.
double CudaStream::seconds_of(std::uint64_t on) const {
  for (const Total& total : totals_) {
    if (total.on == on) return total.seconds;
  }
  return 0;
}

// Of the wait that the stream is in, if it is in one.
double CudaStream::waiting_now() const {
  if (settled_ == begun_) return 0;
  const Gap& gap = gaps_[settled_ % kGaps];
  return gap.on != number_ && gap.before.done() ? since(gap.before) : 0;
}

}  // namespace spillway::cuda
