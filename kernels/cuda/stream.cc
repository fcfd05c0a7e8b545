#include "kernels/cuda/stream.h"

#include <nvtx3/nvToolsExtCudaRt.h>

#include "kernels/cuda/check.h"

namespace spillway::cuda {

CudaStream::CudaStream(const std::string& name, std::uint64_t number, std::optional<cudaStream_t> adopted,
                       Health& health)
    : stream_(adopted.value_or(nullptr)), owned_(!adopted), number_(number), health_(health) {
  if (!owned_) return;
  const Context::Use use(health_.context());
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  nvtxNameCudaStreamA(stream_, ("spillway " + name).c_str());
}

CudaStream::~CudaStream() {
  if (clock_) clock_->retire();
  if (!owned_) return;
  const Context::Use use(health_.context());
  static_cast<void>(cudaStreamSynchronize(stream_));
  static_cast<void>(cudaStreamDestroy(stream_));
}

void CudaStream::launch(const HostTask&) {
  throw Error(Code::kUnsupported, {"Stream::launch", "the engine's device is cuda", 0,
                                   "launch a kernel on native(), or let spillway.device be host"});
}

void CudaStream::synchronize() {
  record_and(&CudaIdleClock::record_tail, done_);
  health_.guard([&] { check(cudaEventSynchronize(done_.get()), "work on the GPU"); });
  health_.wait_for_calls();
}

void CudaStream::record_and(void (CudaIdleClock::*tell)(), const RawEvent& event) {
  health_.guard([&] {
    const std::lock_guard lock(mutex_);
    if (clock_) clock_->before_work();
    cuda::record(event, stream_);
    if (clock_) (*clock_.*tell)();
  });
}

void CudaStream::record(CudaEvent& event) {
  record_and(&CudaIdleClock::record_tail, event.raw);
  event.stream = number_;
}

void CudaStream::mark_begin(const RawEvent& event) { record_and(&CudaIdleClock::begin_visit, event); }

void CudaStream::mark_end(const RawEvent& event) { record_and(&CudaIdleClock::end_visit, event); }

void CudaStream::wait(const CudaEvent& event) {
  health_.guard([&] {
    if (event.stream == number_ || event.raw.done()) return;
    const std::lock_guard lock(mutex_);
    const auto enqueue = [&] { check(cudaStreamWaitEvent(stream_, event.raw.get(), 0), "waiting for an event"); };
    clock_ ? clock_->around_wait(event.stream, enqueue) : enqueue();
  });
}

std::shared_ptr<IdleClock> CudaStream::idle_clock() {
  const Context::Use use(health_.context());
  const std::lock_guard lock(mutex_);
  if (!clock_) clock_ = std::make_shared<CudaIdleClock>(stream_, number_, health_);
  return clock_;
}

}  // namespace spillway::cuda
