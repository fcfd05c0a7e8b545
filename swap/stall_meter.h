// Where the compute stream's idle time goes. While the stream waits for an event, the cause is the stream that it waits
// for: a copy up, or a gradient on its way down. While nothing is enqueued, the cause is what the caller's thread waits
// for, since it is that thread that would enqueue; `other` while it waits for nothing of Spillway's.
//
// One thread at a time (the engine's). Nothing is allocated after construction.
#pragma once

#include "kernels/device.h"
#include "spillway/stall.h"
#include "swap/timeline.h"

namespace spillway {

struct MeteredStreams {
  const Stream* compute = nullptr;
  const Stream* h2d = nullptr;
  const Stream* d2h = nullptr;
};

class StallMeter {
 public:
  // Every wait is a span of `timeline`, unless that is null.
  StallMeter(const Device& device, MeteredStreams streams, Timeline* timeline);

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

  // The compute stream's idle seconds since the last take(), by cause. Not inside a wait.
  StallSeconds take();

 private:
  bool enter(StallCause cause);  // false: inside another wait
  void leave();
  void account();
  double waited(const Stream* on) const { return device_.wait_seconds(*streams_.compute, *on); }

  const Device& device_;
  const MeteredStreams streams_;
  Timeline* timeline_;
  StallCause current_ = StallCause::kOther;
  std::int64_t entered_ns_ = 0;
  StallSeconds sum_;
  double empty_ = 0, waiting_ = 0, h2d_ = 0, d2h_ = 0;  // of the device's counts, how far they have been accounted for
};

// Who looks on while bytes move. Null: nobody.
struct Watch {
  StallMeter* stalls = nullptr;
  Timeline* timeline = nullptr;
};

}  // namespace spillway
