// What happened when, for a picture of a run: one span for each visit, copy, request, tile's update and wait, in a ring
// of fixed size that keeps the newest. src/engine/trace_file gives them names and writes them when the run ends.
//
// Whoever may have something to record holds a Timeline*, which is null while nothing is traced: then nothing is done
// and no clock is read. Every call may come from any thread and takes a short lock; nothing is allocated after
// attach().
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "kernels/device.h"
#include "spillway/model.h"

namespace spillway {

enum class SpanKind : std::uint8_t {  // and what `subject` counts
  kStep,                              // steps: from the end of the step before to the end of this one
  kAcquire,                           // blocks: the caller inside Engine::acquire()
  kFinishStep,                        // steps: the caller inside Engine::step()
  kCommit,                            // steps
  kWait,                              // StallCause: what the caller's thread waited for
  kUpdate,                            // tiles: the optimizer's pass
  kForward,                           // blocks: a visit on its stream, from its weights' arrival to its release
  kBackward,                          // ditto
  kCopyUp,                            // tiles
  kCopyDown,                          // tiles
  kGradientDown,                      // blocks
  kAccumulatorUp,                     // blocks
  kAccumulatorDown,                   // blocks
  kRead,                              // bytes of the store's space: a request, from its post to its completion
  kWrite,                             // ditto
  kSync,                              // nothing
  kChecksum,                          // tiles: on the store's thread
};

struct Span {
  SpanKind kind = SpanKind::kStep;
  std::uint64_t subject = 0;
  std::uint64_t bytes = 0;
  std::int64_t begin_ns = 0, end_ns = 0;  // since the timeline was made
};

class Timeline {
 public:
  // `leases`: numbers that begin_visit() may get are below it.
  Timeline(std::size_t spans, std::size_t leases);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  using Clock = std::chrono::steady_clock;
  std::int64_t ns_at(Clock::time_point time) const noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time - start_).count();
  }
  std::int64_t now_ns() const noexcept { return ns_at(Clock::now()); }
  void add(const Span& span) noexcept;

  // Before the first span of device work, and when all streams have come to an end, while the device is still there.
  void attach(Device& device);
  void detach();

  // A span of device work: all that is enqueued on `stream` by this thread between begin() and end(), timed by the
  // device, which is asked later: no stream waits for the host. Null when more are under way than marks; end() takes
  // it, and the span counts as lost.
  struct Mark;
  Mark* begin(const Span& span, Stream& stream);
  void end(Mark* mark);

  // A visit under a lease; of leases with the same number the one that began last ends first. One thread at a time.
  void begin_visit(std::uint32_t lease, Visit visit, Stream& stream);
  void end_visit(std::uint32_t lease);

  // When nothing records any more:
  std::vector<Span> spans() const;  // the newest, in order of their begin
  std::uint64_t lost() const;       // older than those

 private:
  static constexpr std::size_t kMarks = 1024;

  struct Ended {  // marks, in the order in which their stream comes by their ends
    Stream* stream = nullptr;
    Mark *first = nullptr, *last = nullptr;
  };
  Ended& ended_on(Stream& stream);
  void collect(Ended& ended, std::size_t most);
  Mark* take_free();

  const Clock::time_point start_ = Clock::now();
  mutable std::mutex mutex_;  // everything below but visits_
  std::vector<Span> ring_;
  std::uint64_t added_ = 0, lost_marks_ = 0;
  std::vector<Mark> marks_;
  Mark* free_ = nullptr;
  std::array<Ended, 16> ended_;  // by stream; more of them share the last place
  std::vector<Mark*> visits_;    // by lease
};

// Records the scope it lives in. `timeline` may be null.
class TimedSpan {
 public:
  TimedSpan(Timeline* timeline, SpanKind kind, std::uint64_t subject, std::uint64_t bytes = 0)
      : timeline_(timeline), span_{kind, subject, bytes, timeline ? timeline->now_ns() : 0, 0} {}
  ~TimedSpan() {
    if (!timeline_) return;
    span_.end_ns = timeline_->now_ns();
    timeline_->add(span_);
  }
  TimedSpan(const TimedSpan&) = delete;
  TimedSpan& operator=(const TimedSpan&) = delete;

 private:
  Timeline* timeline_;
  Span span_;
};

// Records what is enqueued on `stream` in the scope it lives in. `timeline` may be null.
class StreamSpan {
 public:
  StreamSpan(Timeline* timeline, const Span& span, Stream& stream)
      : timeline_(timeline), mark_(timeline ? timeline->begin(span, stream) : nullptr) {}
  ~StreamSpan() {
    if (mark_) timeline_->end(mark_);
  }
  StreamSpan(const StreamSpan&) = delete;
  StreamSpan& operator=(const StreamSpan&) = delete;

 private:
  Timeline* timeline_;
  Timeline::Mark* mark_;
};

}  // namespace spillway
