// A stream of the `host` device: a thread of its own that runs a fixed ring of tasks in order.
//
//             enqueued ──┐                   position p: "the first p tasks of this stream"
//   ┌────┬────┬────┬────┬▼───┬────┐          launch      writes slot enqueued % kRingTasks
//   │free│run │wait│wait│free│free│          thread      runs  slot completed % kRingTasks, in place
//   └────┴▲───┴────┴────┴────┴────┘          a slot is free again only when its task has run
//         └── completed
//
// An event is a stream and a position in it: recording notes where the stream stands, and everything that waits asks
// whether that many tasks have completed. A wait therefore captures the record of its own time exactly, on whichever
// streams the event is recorded later, and neither recording nor waiting allocates.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "kernels/device.h"

namespace spillway {

// How far a stream has come. Belongs to the device and outlives the stream, so that events may keep pointing at it.
class StreamProgress {
 public:
  bool reached(std::uint64_t position) const;
  void wait_until(std::uint64_t position) const;  // blocks

 private:
  friend class HostStream;
  mutable std::mutex mutex_;
  mutable std::condition_variable advanced_;  // completed_ grew
  std::uint64_t enqueued_ = 0, completed_ = 0;
};

class HostStream final : public Stream {
 public:
  static constexpr std::size_t kRingTasks = 256;
  static constexpr std::size_t kAwaited = 8;

  HostStream(std::string name, StreamProgress& progress, HostWorkers& workers);
  ~HostStream() override;  // runs what is enqueued first

  DeviceKind kind() const noexcept override { return DeviceKind::kHost; }
  void* native() const noexcept override { return nullptr; }
  void launch(const HostTask& task) override;
  void synchronize() override;

  // Where the stream stands now: the position that an event records.
  std::uint64_t position() const;
  const StreamProgress& progress() const noexcept { return progress_; }
  // Appends: go on only when `other` has reached `position`.
  void launch_wait(const StreamProgress& other, std::uint64_t position);
  IdleSeconds idle() const;
  // Of it, what this stream waited for `other`; kept for the first kAwaited streams that it waited for.
  double wait_seconds(const StreamProgress& other) const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Waited {
    const StreamProgress* on = nullptr;
    Clock::duration total{};
  };

  void run();
  // With progress_.mutex_ held, all of them. `on`: the stream whose event is waited for; null: nothing is enqueued.
  void begin_idle(const StreamProgress* on);
  void end_idle();
  Clock::duration idle_now() const { return idle_ ? Clock::now() - idle_since_ : Clock::duration{}; }

  StreamProgress& progress_;  // its mutex guards everything below
  HostWorkers& workers_;
  std::condition_variable work_;
  bool stopping_ = false;
  bool idle_ = false;
  const StreamProgress* awaited_ = nullptr;  // while idle
  Clock::time_point idle_since_;
  Clock::duration empty_total_{}, waiting_total_{};
  std::array<Waited, kAwaited> waited_;
  std::array<HostTask, kRingTasks> ring_;
  std::thread thread_;  // last: starts when the rest is there
};

}  // namespace spillway
