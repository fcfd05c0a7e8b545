// Whose idle time counts when the caller computes on one stream and then on another. (tests/src/stall_test.cc: its
// causes, in an engine.)
#include "swap/stall_meter.h"
#include "kernels/host_device.h"

#include <gtest/gtest.h>

#include "kernels/workers.h"
#include "tests/kernels/gate.h"

namespace spillway {
namespace {

struct StallMeterTest : ::testing::Test {
  std::unique_ptr<HostWorkers> workers = create_workers(1);
  std::unique_ptr<Device> device = create_host_device({.hbm_bytes = 1 << 20}, *workers);
  std::unique_ptr<Stream> own = device->create_stream("own"), h2d = device->create_stream("h2d"),
                          d2h = device->create_stream("d2h"), callers = device->create_stream("caller's");
  StallMeter meter{*device, {.compute = own.get(), .h2d = h2d.get(), .d2h = d2h.get()}, nullptr};
  double at_start = 0;  // a little behind the meter's own

  // From when it has begun to run, a stream's idle time grows.
  StallMeterTest() {
    own->launch([](HostWorkers&) {});
    own->synchronize();
    at_start = meter.idle_seconds();
  }
};

TEST_F(StallMeterTest, FollowsTheStreamThatComputes) {
  give_a_wrong_stream_time();
  const double before = meter.idle_seconds();
  EXPECT_GT(before, at_start) << "nothing runs";
  Gate gate;
  gate.enqueue(*device, *callers);
  gate.wait_reached();
  meter.follow(*callers);
  const double at_change = meter.idle_seconds();
  EXPECT_GE(at_change, before) << "what has been counted stays";
  give_a_wrong_stream_time();
  EXPECT_EQ(meter.idle_seconds(), at_change) << "it runs, and its idle time before is not the step's";
  const double stalls = meter.take().total();
  EXPECT_GE(stalls, before - at_start);
  EXPECT_LE(stalls, at_change);
  EXPECT_EQ(meter.take().total(), 0);

  gate.open();
  callers->synchronize();
  give_a_wrong_stream_time();
  EXPECT_GT(meter.idle_seconds(), at_change);
  EXPECT_GT(meter.take().total(), 0);
}

TEST_F(StallMeterTest, CountsWhatTheStreamWaitsForByItsCause) {
  meter.follow(*callers);
  meter.take();
  Gate gate;
  gate.enqueue(*device, *h2d);
  const auto event = device->create_event();
  device->record(*event, *h2d);
  device->wait(*callers, *event);
  while (device->idle_clock(*callers)->seconds().waiting == 0) std::this_thread::yield();
  give_a_wrong_stream_time();
  gate.open();
  callers->synchronize();
  const StallSeconds stalls = meter.take();
  EXPECT_GT(stalls[StallCause::kCopy], 0);
  EXPECT_EQ(stalls[StallCause::kGradient], 0);
}

TEST_F(StallMeterTest, TheStreamMayGoFirst) {
  meter.follow(*callers);
  callers.reset();
  const StallMeter::Wait wait(&meter, StallCause::kWrite);
  EXPECT_GE(meter.idle_seconds(), 0);
}

}  // namespace
}  // namespace spillway
