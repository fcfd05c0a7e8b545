// A CUDA stream of the device, and how long it had nothing to run; private to kernels/cuda.
//
// CUDA does not say when a stream was idle, but events with times do. A wait for another stream's event is put between
// two of them, and what lies between the two is time waited:
//
//     … work │ before ─ wait for the other stream ─ after │ work …
//
// Behind everything that goes through the device comes `tail_`. A call that finds the stream empty knows that it has
// been so since then, and puts an event before what it adds: between the two there was nothing to run. (Operations that
// a model launches by itself are always followed by such a call: the release of a lease.) Waits for what has happened
// already are no waits, and cost nothing. Times are read later: nobody waits for an event to know its time, but who
// asks for a gap that has not ended yet.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "kernels/cuda/health.h"
#include "kernels/device.h"

namespace spillway::cuda {

// A cudaEvent_t, created and destroyed.
class RawEvent {
 public:
  enum class Use { kOrder, kTime, kNow };
  explicit RawEvent(Use use);
  ~RawEvent();
  RawEvent(const RawEvent&) = delete;
  RawEvent& operator=(const RawEvent&) = delete;
  void swap(RawEvent& other) noexcept { std::swap(event_, other.event_); }
  cudaEvent_t get() const noexcept { return event_; }
  bool done() const;

 private:
  cudaEvent_t event_ = nullptr;
};

// Both have happened.
double seconds_between(const RawEvent& from, const RawEvent& to);

class CudaEvent final : public Event {
 public:
  RawEvent raw{RawEvent::Use::kOrder};
  std::atomic<std::uint64_t> stream = 0;  // number of the stream of the latest record
};

class CudaStream final : public Stream {
 public:
  // `adopted`: a stream of the caller's, that stays its own (CUDA's default stream is null); nothing: a new one.
  CudaStream(const std::string& name, std::uint64_t number, std::optional<cudaStream_t> adopted, Health& health);
  ~CudaStream() override;  // runs what is enqueued first

  DeviceKind kind() const noexcept override { return DeviceKind::kCuda; }
  void* native() const noexcept override { return stream_; }
  void launch(const HostTask& task) override;
  void synchronize() override;

  std::uint64_t number() const noexcept { return number_; }
  // Runs enqueue(cudaStream_t), which adds work, and keeps the times.
  template <typename Enqueue>
  void add(Enqueue enqueue) {
    health_.guard([&] {
      const std::lock_guard lock(mutex_);
      end_empty();
      enqueue(stream_);
      record_tail();
    });
  }
  void record(CudaEvent& event);
  void mark(const RawEvent& event);  // a place in the stream, that nobody waits for
  void wait(const CudaEvent& event);
  IdleSeconds idle() const;
  double wait_seconds(const CudaStream& on) const;

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
  void record_tail();
  Gap& begin_gap(std::uint64_t on);
  void settle_gaps(bool oldest) const;
  double since(const RawEvent& event) const;
  double seconds_of(std::uint64_t on) const;
  double waiting_now() const;
  bool empty_now() const;

  cudaStream_t stream_ = nullptr;
  const bool owned_;
  const std::uint64_t number_;
  Health& health_;
  mutable std::mutex mutex_;
  RawEvent tail_{RawEvent::Use::kTime};
  mutable RawEvent now_{RawEvent::Use::kNow}, done_{RawEvent::Use::kOrder};
  bool has_tail_ = false;
  std::array<Gap, kGaps> gaps_;
  mutable std::size_t settled_ = 0;  // of the gaps so far
  std::size_t begun_ = 0;
  mutable std::array<Total, kStreams> totals_;
};

}  // namespace spillway::cuda
