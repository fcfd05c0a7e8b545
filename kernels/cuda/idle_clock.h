// How long a CUDA stream had nothing to run; private to kernels/cuda.
//
// CUDA does not say when a stream was idle, but events with times do. A wait for another stream's event is put between
// two of them, and what lies between the two is time waited:
//
//     … work │ before ─ wait for the other stream ─ after │ work …
//
// Behind what is recorded or waited for comes `tail_`. A call that finds the stream empty there knows that it has been
// so since then, and puts an event before what it adds: between the two there was nothing to run. Work that nobody
// records an event behind has no tail: how long the stream is empty behind it is not known, and counts as busy. What a
// model launches by itself lies between the marks of a stopwatch: a visit's. Waits for what has happened already are no
// waits, and cost nothing. Times are read later: nobody waits for an event to know its time, but who asks for a gap
// that has not ended yet.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <mutex>

#include "kernels/cuda/check.h"
#include "kernels/cuda/event.h"
#include "kernels/cuda/health.h"
#include "kernels/device.h"

namespace spillway::cuda {

class CudaIdleClock final : public IdleClock {
 public:
  CudaIdleClock(cudaStream_t stream, std::uint64_t number, Health& health)
      : stream_(stream), number_(number), health_(health) {}

  IdleSeconds seconds() const override;
  double waiting_for(const Stream& on) const override;

  // By the stream, inside its lock and the health's guard, around what it enqueues:
  void before_work() {
    const std::lock_guard lock(mutex_);
    end_empty();
  }
  void behind_work() {
    const std::lock_guard lock(mutex_);
    tail_is_last_ = false;
  }
  void record_tail();
  template <typename Enqueue>
  void around_wait(std::uint64_t on, Enqueue enqueue) {
    const std::lock_guard lock(mutex_);
    end_empty();
    const Gap& gap = begin_gap(on);
    cuda::record(gap.before, stream_);
    enqueue();
    cuda::record(gap.after, stream_);
    cuda::record(tail_, stream_);
    tail_is_last_ = true;
  }
  void retire();  // the stream is no more

 private:
  static constexpr std::size_t kGaps = 64;     // under way at one time
  static constexpr std::size_t kStreams = 16;  // waited for

  // Time in which nothing ran.
  struct Gap {
    RawEvent before{RawEvent::Use::kTime}, after{RawEvent::Use::kTime};
    std::uint64_t on = 0;  // number of the stream that was waited for; its own number: it was empty
  };
  struct Total {
    std::uint64_t on = 0;
    double seconds = 0;
  };

  // With mutex_ held, all of them.
  void end_empty();
  bool empty_now() const;
  Gap& begin_gap(std::uint64_t on);
  void settle_gaps(bool oldest) const;
  double since(const RawEvent& event) const;
  double seconds_of(std::uint64_t on) const;
  double waiting_now() const;

  const cudaStream_t stream_;
  const std::uint64_t number_;
  Health& health_;
  mutable std::mutex mutex_;
  bool retired_ = false;
  RawEvent tail_{RawEvent::Use::kTime};
  mutable RawEvent now_{RawEvent::Use::kNow};
  bool tail_is_last_ = false;  // as far as the stream knows
  std::array<Gap, kGaps> gaps_;
  mutable std::size_t settled_ = 0;  // of the gaps so far
  std::size_t begun_ = 0;
  mutable std::array<Total, kStreams> totals_;
};

}  // namespace spillway::cuda
