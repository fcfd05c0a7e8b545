#include "kernels/cuda/stream.h"

#include <nvtx3/nvToolsExtCudaRt.h>

#include "kernels/cuda/check.h"

namespace spillway::cuda {
namespace {

double seconds_between(cudaEvent_t from, cudaEvent_t to) {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, from, to), "reading a time");
  return milliseconds > 0 ? static_cast<double>(milliseconds) * 1e-3 : 0;
}

}  // namespace

// Threads that wait for an event sleep: the cores have the optimizer to run.
RawEvent::RawEvent(Use use) {
  const unsigned flags = cudaEventBlockingSync | (use == Use::kOrder ? cudaEventDisableTiming : 0u);
  check(cudaEventCreateWithFlags(&event_, flags), "creating an event");
}

RawEvent::~RawEvent() { static_cast<void>(cudaEventDestroy(event_)); }

bool RawEvent::done() const { return is_done(cudaEventQuery(event_)); }

CudaStream::CudaStream(const std::string& name, std::uint64_t number, std::optional<cudaStream_t> adopted,
                       cudaStream_t clock)
    : stream_(adopted.value_or(nullptr)), owned_(!adopted), number_(number), clock_(clock) {
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
  {
    const std::lock_guard lock(mutex_);
    check(cudaEventRecord(done_.get(), stream_), "recording an event");
  }
  check(cudaEventSynchronize(done_.get()), "work on the GPU");
}

void CudaStream::record(CudaEvent& event) {
  const std::lock_guard lock(mutex_);
  end_empty();
  check(cudaEventRecord(event.raw.get(), stream_), "recording an event");
  event.stream = number_;
  record_tail();
}

void CudaStream::wait(const CudaEvent& event) {
  if (event.stream == number_ || event.raw.done()) return;
  const std::lock_guard lock(mutex_);
  end_empty();
  if (begun_ - settled_ == kWaits) settle_waits(true);
  Wait& wait = waits_[begun_ % kWaits];
  wait.on = event.stream;
  check(cudaEventRecord(wait.before.get(), stream_), "recording an event");
  check(cudaStreamWaitEvent(stream_, event.raw.get(), 0), "waiting for an event");
  check(cudaEventRecord(wait.after.get(), stream_), "recording an event");
  ++begun_;
  record_tail();
}

IdleSeconds CudaStream::idle() const {
  const std::lock_guard lock(mutex_);
  settle_waits(false);
  double waited = waiting_now(0);
  for (const Awaited& awaited : awaited_) waited += awaited.seconds;
  return {.empty = empty_ + (empty_now() ? since(tail_) : 0), .waiting = waited};
}

double CudaStream::wait_seconds(const CudaStream& on) const {
  const std::lock_guard lock(mutex_);
  settle_waits(false);
  double waited = waiting_now(on.number_);
  for (const Awaited& awaited : awaited_) waited += awaited.on == on.number_ ? awaited.seconds : 0;
  return waited;
}

bool CudaStream::empty_now() const { return has_tail_ && is_done(cudaStreamQuery(stream_)); }

void CudaStream::end_empty() {
  if (empty_now()) empty_ += since(tail_);
}

void CudaStream::record_tail() {
  check(cudaEventRecord(tail_.get(), stream_), "recording an event");
  has_tail_ = true;
}

// Those that are over, in order; the oldest one too when `oldest`, whatever it takes.
void CudaStream::settle_waits(bool oldest) const {
  while (settled_ < begun_) {
    const Wait& wait = waits_[settled_ % kWaits];
    if (oldest) check(cudaEventSynchronize(wait.after.get()), "work on the GPU");
    if (!oldest && !wait.after.done()) return;
    oldest = false;
    for (Awaited& awaited : awaited_) {
      if (awaited.on != wait.on && awaited.on != 0) continue;
      awaited.on = wait.on;
      awaited.seconds += seconds_between(wait.before.get(), wait.after.get());
      break;
    }
    ++settled_;
  }
}

double CudaStream::since(const RawEvent& event) const {
  check(cudaEventRecord(now_.get(), clock_), "recording an event");
  check(cudaEventSynchronize(now_.get()), "reading a time");
  return seconds_between(event.get(), now_.get());
}

// Of the wait that the stream is in, if it is in one.
double CudaStream::waiting_now(std::uint64_t on) const {
  if (settled_ == begun_) return 0;
  const Wait& wait = waits_[settled_ % kWaits];
  if ((on != 0 && wait.on != on) || !wait.before.done()) return 0;
  return since(wait.before);
}

}  // namespace spillway::cuda
