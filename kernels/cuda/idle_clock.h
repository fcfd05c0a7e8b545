// How long a CUDA stream had nothing to run; private to kernels/cuda.
//
// CUDA does not say when a stream was idle, but events with times do. A wait for another stream's event is put between
// two of them, and what lies between the two is time waited:
//
//     … work │ before ─ wait for the other stream ─ after │ work …
//
// After what is recorded or waited for comes `tail_`. A call that finds the stream empty there knows that it has been
// so since then, and puts an event before what it adds: between the two there was nothing to run. Work that nobody
// records an event after has no tail: how long the stream is empty after it is not known, and counts as busy. So does
// all that a model launches by itself, between the marks of a stopwatch: there is no tail in a visit, but while the
// caller waits. (What it launches outside of visits is not known of. Where the stream is empty again when the next call
// looks, it passes for idle time.) Waits for what has happened already are no waits, and cost nothing. Times are read
// later: nobody waits for an event to know its time, but who asks for a gap that has not ended yet. What such a one was
// told stays counted.
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

  IdleSeconds seconds() override;
  double waiting_for(const Stream& on) const override;
  void caller_waits(bool waits) override;

  // By the stream, inside its lock and the health's guard, around what it enqueues:
  void before_work() {
    const std::lock_guard lock(mutex_);
    end_empty();
  }
  void behind_work() {
    const std::lock_guard lock(mutex_);
    tail_is_last_ = false;
  }
  void record_tail() {
    const std::lock_guard lock(mutex_);
    put_tail();
  }
  void begin_visit();
  void end_visit();
  template <typename Enqueue>
  void around_wait(std::uint64_t on, Enqueue enqueue) {
    const std::lock_guard lock(mutex_);
    end_empty();
    const Gap& gap = begin_gap(on);
    cuda::record(gap.before, stream_);
    enqueue();
    cuda::record(gap.after, stream_);
    put_tail();
  }
  void retire();  // the stream is no more

 private:
  static constexpr std::size_t kGaps = 64;     // under way at one time
  static constexpr std::size_t kStreams = 16;  // waited for

  // Time in which nothing ran.
  struct Gap {
    RawEvent before{RawEvent::Use::kTime}, after{RawEvent::Use::kTime};
    std::uint64_t on = 0;  // number of the stream that was waited for; its own number: it was empty
    double counted = 0;    // seconds of it, in the totals
  };
  struct Total {
    std::uint64_t on = 0;
    double seconds = 0;
  };

  // With mutex_ held, all of them.
  void end_empty();
  bool empty_now() const;
  Gap& begin_gap(std::uint64_t on);
  void put_tail();
  void count_ended_gaps(bool oldest);
  void count();
  void add(std::uint64_t on, double seconds, double& counted);
  // Nothing but what the clock is told of is on the stream, as far as that can be known.
  bool nothing_unseen() const { return visits_ == 0 || caller_waits_; }

  const cudaStream_t stream_;
  const std::uint64_t number_;
  Health& health_;
  mutable std::mutex mutex_;
  bool retired_ = false;
  int visits_ = 0;  // going on
  bool caller_waits_ = false;
  RawEvent tail_{RawEvent::Use::kTime};
  bool tail_is_last_ = false;  // as far as the stream knows
  double tail_counted_ = 0;    // seconds since the tail, in the totals
  std::array<Gap, kGaps> gaps_;
  std::size_t counted_gaps_ = 0, begun_ = 0;  // of the gaps so far
  std::array<Total, kStreams> totals_;
};

}  // namespace spillway::cuda
