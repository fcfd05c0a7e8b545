// Where the idle time of the stream that computes goes. While the stream waits for an event, the cause is the stream
// that it waits for: a copy up, a gradient on its way down, or what other ranks bring. While nothing is enqueued, the
// cause is what the caller's thread waits for, since that thread would enqueue the work; `other` while it waits for
// nothing of Spillway's. It measures and never waits itself: a StallMeter::Wait stands where the code waits.
//
// One thread at a time (the engine's). Nothing is allocated after construction, but a followed stream's clock.
#pragma once

#include <memory>

#include "kernels/device.h"
#include "spillway/stall.h"
#include "swap/timeline.h"

namespace spillway {

class StallMeter {
 public:
  struct Streams {
    Stream* compute = nullptr;
    const Stream* h2d = nullptr;
    const Stream* d2h = nullptr;
    const Stream* net = nullptr;  // with several ranks
  };

  // Every wait is a span of `timeline`, unless that is null.
  StallMeter(Device& device, Streams streams, Timeline* timeline);

  // From now on this is the stream that computes: one of the caller's own, which may go before the meter.
  void follow(Stream& compute);

  // The caller's thread waits for `cause` while this lives. Of waits inside each other the outer one counts.
  class Wait {
   public:
    Wait(StallMeter* meter, StallCause cause) : meter_(meter && meter->enter(cause) ? meter : nullptr) {}
    ~Wait() {
      if (meter_) meter_->leave();
    }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    StallMeter* meter_;
  };

  // The idle seconds since the last take(), by cause. Not inside a wait.
  StallSeconds take();
  // All of them, whatever the cause, from some time before the first call.
  double idle_seconds() const;

 private:
  bool enter(StallCause cause);  // false: inside another wait
  void leave();
  void account();
  void account_waits();

  Device& device_;
  const Streams streams_;
  Timeline* timeline_;
  std::shared_ptr<IdleClock> clock_;  // of the stream that computes
  double before_ = 0;                 // idle seconds of those before it, less what it had when it became that
  StallCause current_ = StallCause::kOther;
  std::int64_t entered_ns_ = 0;
  StallSeconds sum_;
  double empty_ = 0, waiting_ = 0, h2d_ = 0, d2h_ = 0,
         net_ = 0;  // of the clock's counts, how far they have been accounted for
};

// Who looks on while bytes move. Null: nobody.
struct Watch {
  StallMeter* stalls = nullptr;
  Timeline* timeline = nullptr;
};

}  // namespace spillway
