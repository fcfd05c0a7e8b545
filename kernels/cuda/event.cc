#include "kernels/cuda/event.h"

#include "kernels/cuda/check.h"

namespace spillway::cuda {

// Threads that wait for an event sleep: the cores have the optimizer to run. For that the GPU tells the host of each
// one that happens, which holds up a copy of 1 MiB for a twentieth of its time (seen on an H100): not where events are
// asked for. What is recorded to know the time has happened by then.
RawEvent::RawEvent(Use use) {
  const unsigned flags = use == Use::kNow    ? cudaEventDefault
                         : use == Use::kPoll ? cudaEventDisableTiming
                         : use == Use::kTime ? cudaEventBlockingSync
                                             : cudaEventBlockingSync | cudaEventDisableTiming;
  check(cudaEventCreateWithFlags(&event_, flags), "creating an event");
}

RawEvent::~RawEvent() {
  const Context::Use use(context_);
  static_cast<void>(cudaEventDestroy(event_));
}

bool RawEvent::done() const {
  const RelaxedCapture relaxed;
  return is_done(cudaEventQuery(event_));
}

void record(const RawEvent& event, cudaStream_t stream) {
  check(cudaEventRecord(event.get(), stream), "recording an event");
}

double seconds_between(const RawEvent& from, const RawEvent& to) {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, from.get(), to.get()), "reading a time");
  return milliseconds > 0 ? static_cast<double>(milliseconds) * 1e-3 : 0;
}

}  // namespace spillway::cuda
