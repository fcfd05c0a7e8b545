// CUDA's events, created and destroyed; private to kernels/cuda.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "kernels/cuda/context.h"
#include "kernels/device.h"

namespace spillway::cuda {

// A cudaEvent_t, of the GPU of the thread that makes it.
class RawEvent {
 public:
  enum class Use { kOrder, kPoll, kTime, kNow };
  explicit RawEvent(Use use);
  ~RawEvent();
  RawEvent(const RawEvent&) = delete;
  RawEvent& operator=(const RawEvent&) = delete;
  void swap(RawEvent& other) noexcept { std::swap(event_, other.event_); }  // of the same GPU
  cudaEvent_t get() const noexcept { return event_; }
  bool done() const;

 private:
  const Context context_ = Context::of_this_thread();
  cudaEvent_t event_ = nullptr;
};

void record(const RawEvent& event, cudaStream_t stream);
// Both have happened.
double seconds_between(const RawEvent& from, const RawEvent& to);

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(RawEvent::Use use) : raw(use) {}
  RawEvent raw;
  std::atomic<std::uint64_t> stream = 0;  // number of the stream of the latest record
};

}  // namespace spillway::cuda
